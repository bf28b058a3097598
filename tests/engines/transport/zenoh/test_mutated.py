"""Invalid messages from strangers and from faulty peers are counted and have no effect."""

import struct
import zlib

import jax
import numpy as np
import pytest
from engines.peer.parties import DIGEST, Places, certified, push_sum, together, values

import hyperpush as hp
from hyperpush.engines.peer import Peer
from hyperpush.engines.transport import wire
from hyperpush.engines.transport.wire import Header, Rejected, Template, decode, encode, peek
from hyperpush.engines.transport.zenoh.control import Card, ControlMessage, Departure, Topic, unpack
from hyperpush.engines.transport.zenoh.parts import PART_BYTES, Assembly, split
from hyperpush.programs import Exchange, Repeat

TREE = {"w": np.linspace(-1, 1, 7, dtype=np.float32), "on": np.array([True, False]), "k": np.int32(3)}
TEMPLATE = Template(TREE)
MESSAGE = bytes(encode(Header(view=0, node=5, step=2, sender=1), TREE))


def mutated(random, data):
    """Return bytes that differ from `data`: changed, cut, extended, shuffled, or random."""
    while True:
        made = bytearray(data)
        kind = random.integers(6)
        if kind == 0:
            for _ in range(random.integers(1, 9)):
                made[random.integers(len(made))] ^= 1 << random.integers(8)
        elif kind == 1:
            start = random.integers(len(made))
            made[start : start + random.integers(1, 9)] = random.bytes(random.integers(0, 9))
        elif kind == 2:
            made = made[: random.integers(len(made))]
        elif kind == 3:
            made += random.bytes(random.integers(1, 64))
        elif kind == 4:
            cut = random.integers(1, len(made))
            made = made[cut:] + made[:cut]
        else:
            made = bytearray(random.bytes(random.integers(0, 2 * len(made))))
        if made != data:
            return bytes(made)


def decoded(data):
    """Return whether a message is accepted; no exception but `Rejected` is allowed."""
    try:
        peek(data)
        header, tree = decode(data, TEMPLATE, expect_sender=1)
    except Rejected:
        return False
    assert header.sender == 1
    for leaf, like in zip(jax.tree.leaves(tree), jax.tree.leaves(TREE), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert np.isfinite(leaf).all()
    return True


def through_the_decoder(count, seed):
    random = np.random.default_rng(seed)
    sealed = 0
    for number in range(count):
        data = mutated(random, MESSAGE)
        assert not decoded(data)
        if number % 2 and len(data) >= 4:  # a consistent liar may still claim only what any sender may claim
            sealed += decoded(data[:-4] + struct.pack("<I", wire.checksum(data[:-4])))
    assert sealed > 0  # some messages pass the checksum, so other checks were used
    assembly, (header, part) = Assembly(1 << 20), next(split(0, 2, MESSAGE))
    for _ in range(count // 10):
        try:
            found = assembly.add(mutated(random, header), bytes(part))
        except Rejected:
            continue
        assert found is None or found[1] == MESSAGE


def test_mutated_messages_do_not_get_through_the_decoder():
    assert decoded(MESSAGE)
    through_the_decoder(2_000, seed=0)


@pytest.mark.faults
def test_a_hundred_thousand_mutated_messages():
    through_the_decoder(100_000, seed=1)


def resealed(payload):
    """Return a message with a matching checksum."""
    return bytes(payload[:-4]) + struct.pack("<I", wire.checksum(payload[:-4]))


ALL_KINDS = tuple(range(8))
NO_CONTENT = (0, 3, 4)  # message kinds that carry only a header and their length


def wrongly_sealed(random, payload, fields=(4, 8, 12, 24), kinds=ALL_KINDS):
    """Return a well-formed message with a forbidden claim and a matching checksum.

    `fields` are the offsets of the version, the view, the node and the sender; only a peer can judge view and node.
    """
    made = bytearray(payload)
    kind = random.choice(kinds)
    if kind == 0:
        made[fields[random.integers(len(fields))]] ^= 1 << random.integers(8)
    elif kind in (1, 2):  # another structure, dtype or shape
        made[48 + random.integers(16)] ^= 1 << random.integers(8)
    elif kind == 3:
        made = made[: random.integers(68, len(made) - 1)]
    elif kind == 4:
        made = made[:-4] + random.bytes(random.integers(1, 64)) + made[-4:]
    elif kind in (5, 6):  # not finite: the first float64 of a leaf; read as two float32, the second is NaN
        made[64:72] = struct.pack("<d", (np.nan, np.inf)[random.integers(2)])
    else:
        made[40:48] = struct.pack("<d", (np.nan, np.inf, -np.inf)[random.integers(3)])
    return resealed(made)


def control(client, other, clients, random):
    """Return a control message such as `client` might send."""
    kind = (Topic.ACKNOWLEDGE, Topic.DONE, Topic.MEMBERS)[random.integers(3)]
    return ControlMessage(kind, Departure.NO, 1 << 40, 7, 9, bytes(8), frozenset(), frozenset()).pack(clients)


class Babbler:
    """Transport wrapper that sends invalid messages in its own name before every message of the first steps."""

    def __init__(self, transport, seed, each, steps=1 << 62):
        self.transport, self.random, self.each, self.sent = transport, np.random.default_rng(seed), each, 0
        self.steps, self.say = steps, transport.send
        transport.send = self.send

    def send(self, to, step, payload):
        seen = set()  # repeated bytes are refused only once
        total = step > 0 or not self.transport.asynchronous  # not for acknowledgments
        for number in range(self.each if total and step < self.steps else 0):
            made, clients = None, len(self.transport.names)
            while made is None or made in seen:
                if number % 5 == 4:
                    made = wrongly_sealed(self.random, payload, kinds=NO_CONTENT)
                elif number % 5 == 3:
                    made = mutated(self.random, control(self.transport.client, to, clients, self.random))
                else:
                    made = mutated(self.random, bytes(payload))
            seen.add(made)
            if number % 5 == 0:  # not a valid part of a message
                self.transport._deliver(to, "data", made[:4096], self.random.bytes(int(self.random.integers(0, 31))))
            elif number % 5 in (1, 3):
                self.transport._deliver(to, "control", made[:PART_BYTES], None)  # Zenoh itself drops longer messages
            else:
                self.transport._put(to, step, made)
            self.sent += 1
        self.say(to, step, payload)


def babbled(folder, each, width, mode, program, start, rounds):
    """Return the results of three peers, two of which send invalid messages, with the numbers sent and refused."""
    clients = 3
    places = Places(clients, certified(folder, [f"p{number}" for number in range(clients)]))
    network = hp.networks.FullyConnected(clients)

    def party(client):
        transport = places.open(client, mode=mode, longest_wait=0.5)
        # In asynchronous mode the last messages may reach a peer that has ended; invalid ones are sent before them.
        babbler = Babbler(transport, client, each if client else 0, rounds - 1 if transport.asynchronous else 1 << 62)
        try:
            transport.ready()
            with jax.enable_x64(transport.asynchronous):
                peer = Peer(client, network, transport, jax.random.key(0), tolerant=transport.asynchronous)
                state = peer.run(program, start(client), None)
            refused = peer.counts.rejections.total() + transport.rejections.total()
            return jax.tree.map(np.asarray, state), babbler.sent, refused, transport.closed
        finally:
            transport.close()

    found = together(clients, party)
    assert all(closed == set() for *_, closed in found)
    return [state for state, *_ in found], sum(sent for _, sent, *_ in found), sum(no for _, _, no, _ in found)


@pytest.mark.parametrize(
    ("each", "width"),
    [
        (5, 3),
        pytest.param(45, 3, marks=pytest.mark.faults),
        pytest.param(10, 40_000, marks=pytest.mark.faults, id="160 kB"),
        pytest.param(5, 1_500_000, marks=pytest.mark.faults, id="6 MB, in parts"),
    ],
)
def test_a_live_peer_that_hears_rubbish_computes_as_if_it_did_not(each, width, tmp_path):
    rounds = 8 if width < 1000 else 3
    mix = Exchange(lambda state, ctx: state, lambda state, inbox, ctx: inbox.mix(state))
    start = values(3, width).astype(np.float32)
    states, sent, refused = babbled(
        tmp_path, each, width, "synchronous", Repeat(mix, rounds), lambda k: jax.numpy.asarray(start[k]), rounds
    )
    assert sent == 2 * 2 * rounds * each
    assert refused == sent
    for state in states:  # on the complete network every round gives the mean
        np.testing.assert_allclose(state, start.mean(0), atol=1e-6)


@pytest.mark.parametrize("each", [5, pytest.param(25, marks=pytest.mark.faults)])
def test_at_its_own_pace_rubbish_adds_no_mass_and_takes_none(each, tmp_path):
    rounds, start = 30, values(3)
    states, sent, refused = babbled(
        tmp_path,
        each,
        3,
        "asynchronous",
        push_sum(rounds),
        lambda k: (jax.numpy.asarray(start[k]), jax.numpy.ones(())),
        rounds,
    )
    assert refused == sent > 100
    assert sum(float(mass) for _, mass in states) == pytest.approx(3, rel=1e-12)
    np.testing.assert_allclose(sum(w for w, _ in states), start.sum(0), atol=1e-11)


@pytest.mark.parametrize(("numbers", "count"), [(20_000, 200), (2_600_000, 12)], ids=["80 kB", "10 MB, in parts"])
def test_long_messages_that_are_mutated_do_not_get_through(numbers, count):
    random = np.random.default_rng(3)
    tree = {"w": random.normal(size=numbers).astype(np.float32)}
    template, whole = Template(tree), bytes(encode(Header(view=0, node=5, step=2, sender=1), tree))
    decode(whole, template, expect_sender=1)
    for _ in range(count):
        with pytest.raises(Rejected):
            decode(mutated(random, whole), template, expect_sender=1)
        with pytest.raises(Rejected):
            decode(wrongly_sealed(random, whole, fields=(4, 24)), template, expect_sender=1)
        assembly, found = Assembly(1 << 30), None
        parts = list(split(0, 2, whole))
        bad = int(random.integers(len(parts)))
        for place, (header, part) in enumerate(parts):
            try:
                made = bytes(part) if place != bad else mutated(random, bytes(part))
                found = assembly.add(header, made) or found
            except Rejected:
                continue
        if found is not None:  # a part of the right length, which only the checksum can refuse
            with pytest.raises(Rejected):
                decode(found[1], template, expect_sender=1)


def test_control_messages_that_are_mutated_are_refused():
    random = np.random.default_rng(4)
    card = Card(DIGEST, bytes(16), "0.9.1", 1 << 40, bytes(range(16)))
    about = Departure.LEAVING, 12, 1 << 62, 5, bytes(8), frozenset({8}), frozenset({0, 9})
    said = ControlMessage(Topic.HELLO, *about, more=card)
    good = said.pack(10)
    assert unpack(good, 10) == said
    for _ in range(3000):
        with pytest.raises(Rejected, match=r"bad-control|wrong-version"):
            unpack(mutated(random, good), 10)
    for place in range(len(good) - 4):  # a consistent liar: it may claim only what any sender may claim
        lie = bytearray(good[:-4])
        lie[place] ^= 1 << random.integers(8)
        try:
            found = unpack(bytes(lie) + struct.pack("<I", zlib.crc32(lie)), 10)
        except Rejected:
            continue
        assert max(found.closed | found.left) < 10
        assert place >= 8 or place in (4, 5)  # a sender may choose another topic or departure
