"""Averages along a tree among parties on loopback: parties wait for one that returns, and name one that is gone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.parties import together

import hyperpush as hp
from hyperpush.deploy.swarm import free_ports
from hyperpush.programs import Average, Repeat

NAMES, KEY = ("ann", "ben", "cleo", "dora"), jax.random.key(4)
START = jnp.arange(12.0).reshape(4, 3) ** 2
AVERAGES = Repeat(
    Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean + x / 2, rounds=1, by="tree"), 3
)


@pytest.fixture(scope="module")
def addresses():
    return {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(4), strict=True)}


def killed_at(iteration):
    def progress(name, done, total):
        if done == iteration:
            raise KeyboardInterrupt

    return [hp.hooks.Progress(progress)]


@pytest.mark.parametrize("network", [hp.networks.DirectedRing(4), hp.networks.RandomDirected(4)], ids=lambda n: n.name)
def test_parties_get_what_the_simulator_gets_though_one_is_killed(network, addresses, tmp_path):
    truth = hp.Simulate().run(AVERAGES, network, START, jnp.zeros((4, 1)), KEY)

    def party(client):
        options = {"tls": False, "session": network.name, "patience": 60.0}
        engine = hp.Peers(NAMES[client], addresses, checkpoint=tmp_path / NAMES[client], **options)
        given = (AVERAGES, network, START[client], jnp.zeros(1), KEY)
        if client == 2:
            with pytest.raises(KeyboardInterrupt):
                engine.run(*given, hooks=killed_at(2))
        return engine.run(*given)

    found = together(4, party)
    np.testing.assert_allclose([each.states for each in found], truth.states, rtol=1e-6)
    assert [each.rounds for each in found] == [truth.rounds] * 4
    assert [int(each.bytes[0]) for each in found] == truth.bytes.tolist()
    assert round(np.mean([each.floats for each in found])) == truth.floats


def test_who_is_gone_is_named(addresses):
    def party(client):
        engine = hp.Peers(NAMES[client], addresses, tls=False, session="gone", patience=2.0)
        given = (AVERAGES, hp.networks.DirectedRing(4), START[client], jnp.zeros(1), KEY)
        with pytest.raises((hp.HyperpushError, KeyboardInterrupt)) as failed:
            engine.run(*given, hooks=killed_at(1) if client == 2 else ())
        return str(failed.value)

    assert "from cleo (absent)" in together(4, party)[3]  # its parent in the tree
