"""Rubbish, from strangers and from peers that should know better: counted, and nothing comes of it."""

import struct

import jax
import numpy as np
import pytest
from peers.parties import Places, certified, together, values

import hyperpush as hp
from hyperpush.engine import wire
from hyperpush.engine.peer import Peer
from hyperpush.engine.wire import Header, Rejected, Template, decode, encode, peek
from hyperpush.peers.parts import Assembly, split
from hyperpush.program import Exchange, Repeat

TREE = {"w": np.linspace(-1, 1, 7, dtype=np.float32), "on": np.array([True, False]), "k": np.int32(3)}
TEMPLATE = Template(TREE)
MESSAGE = bytes(encode(Header(view=0, node=5, step=2, sender=1), TREE))


def mutated(random, data):
    """Other bytes than `data`: changed, cut, longer, shuffled, or made up."""
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
    """Whether a message gets through; nothing but `Rejected` may be raised."""
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
        if number % 2 and len(data) >= 4:  # a sender that lies consistently: it may only say what any sender may
            sealed += decoded(data[:-4] + struct.pack("<I", wire.checksum(data[:-4])))
    assert sealed > 0  # the checksum was not what caught everything
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


class Babbler:
    """A transport that sends rubbish before every message, under the sender's own name."""

    def __init__(self, transport, seed, each):
        self.transport, self.random, self.each, self.sent = transport, np.random.default_rng(seed), each, 0

    def send(self, to, step, payload):
        seen = set()  # what is sent twice is not refused twice
        for number in range(self.each):
            while (rubbish := mutated(self.random, bytes(payload))) in seen:
                pass
            seen.add(rubbish)
            if number % 3 == 0:  # not even in parts
                self.transport._deliver(to, "data", rubbish, self.random.bytes(int(self.random.integers(0, 40))))
            elif number % 3 == 1:
                self.transport._deliver(to, "control", rubbish, None)
            else:
                self.transport._put(to, step, rubbish)
            self.sent += 1
        self.transport.send(to, step, payload)

    def collect(self, step, expected):
        return self.transport.collect(step, expected)

    def close(self):
        self.transport.close()

    def __getattr__(self, name):
        return getattr(self.transport, name)


@pytest.mark.parametrize("each", [4, pytest.param(45, marks=pytest.mark.faults)])
def test_a_live_peer_that_hears_rubbish_computes_as_if_it_did_not(each, tmp_path):
    clients, rounds = 3, 8
    places = Places(clients, certified(tmp_path, [f"p{number}" for number in range(clients)]))
    network = hp.networks.FullyConnected(clients)
    mix = Exchange(lambda state, ctx: state, lambda state, inbox, ctx: inbox.mix(state))
    start = values(clients).astype(np.float32)

    def party(client):
        transport = places.open(client)
        babbler = Babbler(transport, client, each if client else 0)
        try:
            transport.ready()
            peer = Peer(client, network, babbler, jax.random.key(0))
            state = peer.run(Repeat(mix, rounds), jax.numpy.asarray(start[client]), None)
            refused = peer.counts.rejections.total + transport.rejections.total
            return np.asarray(state), babbler.sent, refused
        finally:
            transport.close()

    found = together(clients, party)
    sent = sum(count for _, count, _ in found)
    assert sent == 2 * 2 * rounds * each
    assert sum(count for *_, count in found) == sent
    for state, *_ in found:  # every round of the complete network is the mean
        np.testing.assert_allclose(state, start.mean(0), atol=1e-6)
