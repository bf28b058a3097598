import itertools

import numpy as np
import pytest

from hyperpush.engines.transport.wire import VERSION, RefusalReason, Rejected
from hyperpush.engines.transport.zenoh import parts
from hyperpush.engines.transport.zenoh.parts import OPEN, PART_BYTES, Assembly, split

SIZES = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 3 * PART_BYTES + 7]


def payload(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def pieces(number, step, size):
    return [(header, bytes(part)) for header, part in split(number, step, payload(size))]


def refused(assembly, header, part):
    with pytest.raises(Rejected) as caught:
        assembly.add(header, part)
    return caught.value.reason


@pytest.mark.parametrize("size", SIZES)
def test_together_again_in_any_order(size):
    made = pieces(1, 7, size)
    assert all(len(part) <= PART_BYTES for _, part in made)
    for order in itertools.islice(itertools.permutations(made), 24):
        assembly = Assembly(limit=size)
        found = [assembly.add(*piece) for piece in order]
        assert found == [None] * (len(made) - 1) + [(7, payload(size))]


def test_payloads_of_several_numbers_do_not_mix_and_repeats_do_not_complete():
    one, other = pieces(1, 4, 2 * PART_BYTES), pieces(2, 5, 2 * PART_BYTES + 1)
    assembly = Assembly(1 << 30)
    assert [assembly.add(*piece) for piece in (one[0], one[0], other[2], one[0], other[0])] == [None] * 5
    assert assembly.add(*other[1]) == (5, payload(2 * PART_BYTES + 1))
    assert assembly.add(*one[1]) == (4, payload(2 * PART_BYTES))


def test_what_is_too_long_is_refused_before_anything_is_kept():
    assembly = Assembly(limit=PART_BYTES + 5)
    assert refused(assembly, *pieces(1, 0, PART_BYTES + 6)[0]) == RefusalReason.OVERSIZED
    assert not assembly._open


def test_the_number_of_open_payloads_is_bounded():
    assembly = Assembly(1 << 30)
    for number in range(20 * OPEN):
        assembly.add(*pieces(number, 0, 2 * PART_BYTES)[0])
        assert len(assembly._open) <= OPEN
    last = 20 * OPEN - 1
    assert assembly.add(*pieces(last, 0, 2 * PART_BYTES)[1]) == (0, payload(2 * PART_BYTES))


def test_parts_that_do_not_fit_are_refused():
    assembly, made = Assembly(1 << 30), pieces(1, 3, PART_BYTES + 10)
    (first, head), (second, tail) = made
    assert refused(assembly, first, head[:-1]) == RefusalReason.BAD_PART
    assert refused(assembly, second, tail + b"x") == RefusalReason.BAD_PART
    assert refused(assembly, first[:-1], head) == RefusalReason.BAD_PART
    assert refused(assembly, b"", head) == RefusalReason.BAD_PART
    assert refused(assembly, b"xxxx" + first[4:], head) == RefusalReason.BAD_PART
    assert refused(assembly, first[:2] + b"\x04" + first[3:], head) == RefusalReason.WRONG_VERSION
    beyond = parts._HEADER.pack(parts._MAGIC, VERSION, 2, 1, PART_BYTES + 10, 3, bytes(8), 0)
    assert refused(assembly, beyond, b"") == RefusalReason.BAD_PART
    far = parts._HEADER.pack(parts._MAGIC, VERSION, 2**16 - 1, 1, PART_BYTES + 10, 3, bytes(8), 0)
    assert refused(assembly, far, tail) == RefusalReason.BAD_PART
    assembly.add(first, head)
    assert assembly.add(second, tail) == (3, payload(PART_BYTES + 10))  # refused parts leave no trace


def test_a_sender_that_was_killed_between_two_parts_counts_anew():
    assembly = Assembly(1 << 30)
    assembly.add(*pieces(5, 7, 3 * PART_BYTES)[0])
    after = pieces(5, 90, 2 * PART_BYTES + 1)
    assert [assembly.add(*each) for each in after[:-1]] == [None, None]
    assert assembly.add(*after[-1]) == (90, payload(2 * PART_BYTES + 1))
