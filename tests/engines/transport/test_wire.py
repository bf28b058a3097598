import contextlib
import dataclasses
import struct
import zlib
from collections import Counter
from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.engines.transport import wire
from hyperpush.engines.transport.wire import Header, RefusalReason, Rejected, Template, decode, encode, peek

BFLOAT16 = np.dtype(jnp.bfloat16)
INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
FLOATS = [np.dtype(f"f{size}") for size in (2, 4, 8)]
HEADER = Header(view=1, node=2, step=3, sender=4, counter=5, weight=0.25)
TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": (np.int32(7), np.array([True, False, True]))}
MESSAGE = encode(HEADER, TREE)
TEMPLATE = Template(TREE)

headers = st.builds(
    Header,
    view=st.integers(0, 2**32 - 1),
    node=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**64 - 1),
    sender=st.integers(0, 2**32 - 1),
    counter=st.integers(0, 2**64 - 1),
    weight=st.floats(allow_nan=False, allow_infinity=False),
    kind=st.sampled_from(wire.Kind),
)


@st.composite
def arrays(draw):
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = draw(st.sampled_from([np.dtype(bool), *INTEGERS, *FLOATS, BFLOAT16]))
    if dtype == BFLOAT16:
        return draw(npst.arrays(np.int8, shape)).astype(BFLOAT16)
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    return draw(npst.arrays(dtype, shape, elements=finite))


trees = st.recursive(
    arrays(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.none()
    ),
    max_leaves=6,
)


def reason(data, template=TEMPLATE, **options) -> RefusalReason:
    with pytest.raises(Rejected) as caught:
        decode(data, template, **options)
    return caught.value.reason


def resealed(data) -> bytes:
    """Return the bytes with a matching checksum, as a malicious sender would compute it."""
    return bytes(data[:-4]) + zlib.crc32(data[:-4]).to_bytes(4, "little")


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@given(headers, trees)
@settings(deadline=None, max_examples=200)
def test_round_trip(header, tree):
    data = encode(header, tree)
    template = Template(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree))
    assert len(data) == template.size
    got, leaves = decode(data, template, expect_sender=header.sender)
    assert got == header == peek(data)
    assert_same(leaves, tree)


def test_jax_arrays_numbers_and_foreign_byte_order():
    tree = {
        "jax": jnp.ones((2, 2), jnp.bfloat16),
        "number": 1.5,
        "strided": np.arange(6.0)[::2],
        "big": np.ones(2, ">i4"),
    }
    _, got = decode(encode(HEADER, tree), Template(tree))
    assert_same(
        got,
        {
            "jax": np.ones((2, 2), BFLOAT16),
            "number": np.float64(1.5),
            "strided": np.array([0.0, 2, 4]),
            "big": np.ones(2, "i4"),
        },
    )


def test_byte_layout_is_fixed():
    """Machines of different architectures must agree, so the test fixes the bytes themselves."""
    digest = blake2b(b"[0] float32 (2,)", digest_size=16).digest()
    expected = struct.pack("<4sHBxIIQIIQd16s", b"hpsh", 5, 0, 1, 2, 3, 4, 0, 5, 0.25, digest)
    expected += struct.pack("<2f", 1, 2)
    expected += struct.pack("<I", zlib.crc32(expected))
    assert encode(HEADER, [np.array([1, 2], np.float32)]) == expected


def test_decoded_leaves_are_read_in_place_aligned_and_read_only():
    data = bytearray(MESSAGE)
    _, tree = decode(data, TEMPLATE)
    for leaf in jax.tree.leaves(tree):
        assert (leaf.flags.owndata, leaf.flags.aligned, leaf.flags.writeable) == (False, True, False)
        assert np.shares_memory(leaf, np.frombuffer(data, np.uint8))


def test_every_truncation_is_rejected():
    for length in range(len(MESSAGE)):
        assert reason(MESSAGE[:length]) in {RefusalReason.TOO_SHORT, RefusalReason.BAD_CHECKSUM}
        if length >= 4:
            assert reason(resealed(MESSAGE[:length])) in {
                RefusalReason.TOO_SHORT,
                *([RefusalReason.BAD_CHECKSUM] if length < 68 else []),
            }


def test_every_bit_flip_is_rejected():
    for place in range(len(MESSAGE) * 8):
        data = bytearray(MESSAGE)
        data[place // 8] ^= 1 << place % 8
        expected = {0: RefusalReason.BAD_MAGIC, 1: RefusalReason.WRONG_VERSION}.get(
            place // 32, RefusalReason.BAD_CHECKSUM
        )
        if 48 <= place < 64:  # the kind, with six valid values, and an unused byte
            expected = RefusalReason.WRONG_KIND if 51 <= place < 56 else RefusalReason.BAD_CHECKSUM
        assert reason(data) == expected


def test_the_checksum_of_long_messages():
    rows, rest = 11, 5
    data = np.random.default_rng(0).integers(0, 256, 1021 * 8 * rows + rest, dtype=np.uint8)
    columns = [0] * 1021
    for place, word in enumerate(np.frombuffer(data[:-rest].tobytes(), "<u8").tolist()):
        columns[place % 1021] = (columns[place % 1021] + word) % 2**64
    expected = zlib.crc32(struct.pack("<1021Q", *columns) + data[-rest:].tobytes())
    assert wire.checksum(data.tobytes()) == expected
    assert wire.checksum(data[: 1 << 16].tobytes()) == zlib.crc32(data[: 1 << 16].tobytes())
    random = np.random.default_rng(1)
    for place in [0, len(data) - 1, *random.integers(0, len(data), 200)]:
        changed = data.copy()
        changed[place] ^= 1 << random.integers(8)
        assert wire.checksum(changed.tobytes()) != expected
    half = np.roll(data[:65536], 32768)
    assert wire.checksum(np.concatenate([half, data[65536:]]).tobytes()) != expected


def test_foreign_bytes_and_versions():
    assert reason(b"") == RefusalReason.TOO_SHORT
    assert reason(b"\x00" * 100) == RefusalReason.BAD_MAGIC
    for version in (0, wire.VERSION + 1, 2**16 - 1):
        data = bytearray(MESSAGE)
        struct.pack_into("<H", data, 4, version)
        assert reason(data) == reason(resealed(data)) == RefusalReason.WRONG_VERSION


def test_other_lengths_are_refused_and_other_shapes_are_told_from_damage():
    assert reason(MESSAGE + b"\x00") == RefusalReason.BAD_CHECKSUM
    assert reason(resealed(MESSAGE + b"\x00" * 8)) == RefusalReason.OVERSIZED
    assert reason(bytes(TEMPLATE.size + 1)) == RefusalReason.BAD_MAGIC
    assert RefusalReason.WRONG_STRUCTURE.of_content
    assert not RefusalReason.OVERSIZED.of_content


@pytest.mark.parametrize(
    "other",
    [
        {"a": TREE["a"], "c": TREE["b"]},
        {"a": TREE["a"], "b": [*TREE["b"], np.float32(0)]},
        {"a": TREE["a"]},
        [TREE["a"], *TREE["b"]],
        None,
    ],
)
def test_wrong_structure(other):
    template = Template(other)
    data = encode(HEADER, other)
    assert reason(data, TEMPLATE) == reason(MESSAGE, template) == RefusalReason.WRONG_STRUCTURE


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (), (2, 2), (0, 3)])
def test_wrong_shape(shape):
    data = encode(HEADER, TREE | {"a": np.zeros(shape, np.float32)})
    assert reason(data) == RefusalReason.WRONG_STRUCTURE


@pytest.mark.parametrize("dtype", ["i4", "u4", "f2", BFLOAT16, "f8"])
def test_wrong_dtype(dtype):
    data = encode(HEADER, TREE | {"a": np.zeros((2, 3), dtype)})
    assert reason(data) == RefusalReason.WRONG_STRUCTURE


def test_wrong_sender():
    assert reason(MESSAGE, expect_sender=3) == RefusalReason.WRONG_SENDER
    assert decode(MESSAGE, TEMPLATE, expect_sender=4)[0] == HEADER


@pytest.mark.parametrize("dtype", [*FLOATS, BFLOAT16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_must_be_finite(dtype, value):
    tree = np.array([0, value, 1]).astype(dtype)
    data = encode(HEADER, tree)
    assert reason(data, Template(tree)) == RefusalReason.NOT_FINITE
    if np.isnan(value):
        assert reason(data, Template(tree, allow_infinite=True)) == RefusalReason.NOT_FINITE
    else:
        assert_same(decode(data, Template(tree, allow_infinite=True))[1], tree)


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_weight_must_be_finite(weight):
    data = encode(dataclasses.replace(HEADER, weight=weight), TREE)
    assert reason(data) == reason(data, Template(TREE, allow_infinite=True)) == RefusalReason.NOT_FINITE


def test_booleans_must_be_0_or_1():
    data = bytearray(encode(HEADER, np.array([True, False])))
    data[-12] = 2
    assert reason(resealed(data), Template(np.array([True, False]))) == RefusalReason.NOT_BOOLEAN


def test_random_mutations_raise_nothing_but_rejected():
    random = np.random.default_rng(0)
    rejections = Counter()
    accepted = 0
    for trial in range(20_000):
        data = bytearray(MESSAGE)
        for _ in range(random.integers(1, 4)):
            place, length = int(random.integers(len(data) + 1)), int(random.integers(1, 9))
            noise = random.bytes(length)
            match random.integers(4):
                case 0:
                    data[place : place + length] = noise[: len(data) - place]
                case 1:
                    data[place:place] = noise
                case 2:
                    del data[place : place + length]
                case _:
                    data = data[:place] or bytearray(noise)
        if trial % 2 and len(data) >= 4:
            data = bytearray(resealed(data))
        try:
            _, tree = decode(data, TEMPLATE, expect_sender=4)
        except Rejected as rejected:
            rejections[rejected.reason] += 1
        else:
            accepted += data != MESSAGE
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
        with contextlib.suppress(Rejected):
            peek(data)
    # Changed values or header fields under a matching checksum form a valid message; most mutations do not.
    assert 0 < accepted < 5_000
    assert rejections.total() > 15_000
    assert set(rejections) >= {
        *(
            RefusalReason.OVERSIZED,
            RefusalReason.TOO_SHORT,
            RefusalReason.BAD_MAGIC,
            RefusalReason.WRONG_VERSION,
            RefusalReason.WRONG_KIND,
            RefusalReason.BAD_CHECKSUM,
        ),
        *(RefusalReason.WRONG_SENDER, RefusalReason.WRONG_STRUCTURE, RefusalReason.NOT_BOOLEAN),
    }


def test_what_cannot_be_sent_is_named():
    assert issubclass(Rejected, HyperpushError)
    for leaf in (np.array(["text"]), np.array([object()]), np.complex64(1), jax.random.key(0)):
        with pytest.raises(InvalidInput, match="dtype"):
            encode(HEADER, leaf)
        with pytest.raises(InvalidInput, match="dtype"):
            Template(leaf)
