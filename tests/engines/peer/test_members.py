"""A peer among silent members keeps its mass, and draws new noise in a new view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.peer import Peer
from hyperpush.engines.peer.members import members_of
from hyperpush.programs import Exchange, Repeat, Scope

CLIENTS, ROUNDS = 3, 40


class Silent:
    """Transport whose other members are silent; client 2 is removed at the n-th look at the mail."""

    def __init__(self, closes_at=None):
        self.closed = self.leaving = self.left = self.settled = frozenset()
        self.patience = 60.0
        self.sent, self.looks, self.closes_at = 0, 0, closes_at

    def send(self, to, step, payload):
        self.sent += 1

    def collect(self, step, expected):
        self.looks += 1
        if self.looks == self.closes_at:
            self.closed = frozenset({2})
        return []

    def everyone_done(self):
        return True

    def missing(self):
        return False

    def present(self, clients):
        return []

    def close(self): ...
    def refuse(self, sender, reason, step): ...
    def acknowledge(self, step): ...
    def done(self, finished=True, again=False, view=frozenset()): ...
    def finish(self): ...
    def failure(self, what, clients, then=""):
        return hp.HyperpushError(f"peer 0: {what} {sorted(clients)}{then}")

    def leave(self, left): ...


def enter(state, ctx):
    return jax.random.normal(ctx.key), jnp.ones(())


push = Exchange(lambda state, ctx: state, lambda state, inbox, ctx: inbox.mix(state), conserved=True)
# Draw a number, push it with a mass of 1, and return what remains of both.
PROGRAM = Scope(Repeat(push, ROUNDS, name="average"), enter, lambda state, held, ctx: held)


def run(transport, **options):
    assert members_of(transport) is transport
    network = hp.networks.FullyConnected(CLIENTS)
    peer = Peer(0, network, transport, jax.random.key(1), tolerant=True, **options)
    return [float(each) for each in peer.run(PROGRAM, (jnp.zeros(()), jnp.zeros(())), None)]


def test_who_hears_nobody_keeps_its_mass():
    transport = Silent()
    _, mass = run(transport)
    # The peer sends a third to each of two members, then nothing new, because they have not acknowledged it.
    assert mass == pytest.approx(1 / 3, rel=1e-6)
    assert transport.sent == 2 * ROUNDS  # it repeats the same total to both in every round


def test_in_a_new_view_secret_draws_are_new():
    def drawn(closes_at, secret):
        w, mass = run(Silent(closes_at), secret=secret)
        return w / mass  # nothing arrives, so both shrink by the same factor

    secret = jax.random.key(7)
    first, again = drawn(None, secret), drawn(5, secret)
    assert abs(first - again) > 1e-3
    np.testing.assert_allclose(drawn(5, secret), again, rtol=1e-6)
    np.testing.assert_allclose(drawn(None, None), drawn(5, None), rtol=1e-6)  # public draws stay the same


def test_who_ends_is_done_in_the_view_of_those_who_are_left():
    """The others vanish in the moment in which this member asks whether they are done."""
    said = []

    class Vanishing(Silent):
        def done(self, finished=True, again=False, view=frozenset()):
            said.append((finished, view))

        def everyone_done(self):
            self.closed = frozenset({1, 2})
            return True

    run(Vanishing())
    assert said == [(True, frozenset()), (True, frozenset({1, 2}))]


def test_what_may_not_be_repeated_ends_with_an_error():
    with pytest.raises(hp.HyperpushError, match=r"peer 0: removed: \[2\], and starting anew would cost more"):
        run(Silent(5), repeats=False)
