"""Expected rounds of averages along a tree, and the choice between a tree and gradient tracking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled import lossy
from hyperpush.engines.faults import Faults
from hyperpush.networks.expected import Losses, tree_pays, tree_rounds
from hyperpush.networks.trees import WaitingTree, reliable_post


class Planned(hp.networks.KOut):
    """The same links, with the expected times computed link by link."""

    def uniform(self) -> float | None:
        return None


def test_where_all_links_are_alike_the_plan_is_that_of_the_shortest_ways():
    short, long = WaitingTree(hp.networks.KOut(30, k=3)), WaitingTree(Planned(30, k=3))  # pyright: ignore
    for name in ("up", "down", "hops", "below", "patience"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name))


def test_expected_rounds_are_those_of_averages_on_random_links():
    network = hp.networks.KOut(30, k=3)
    tree, post = WaitingTree(network), reliable_post(network, jax.random.key(0))
    trips = jax.jit(jax.vmap(lambda step: tree.trip(step, post, False).rounds))(1000 * jnp.arange(100))
    assert tree_rounds(network) == pytest.approx(float(trips.mean()), rel=0.3)


def test_expected_rounds_count_lost_and_late_messages():
    """Compare with simulated averages under faults, on random links and on a schedule with repeated messages."""
    faults, key = Faults(loss=0.05, delay=2), jax.random.key(0)
    for network in (hp.networks.KOut(30, k=3), hp.networks.Ring(12)):
        tree, post = WaitingTree(network), lossy.post(network, key, faults, key)
        trips = jax.jit(jax.vmap(lambda step, tree=tree, post=post: tree.trip(step, post, True).rounds))
        rounds = float(trips(1000 * jnp.arange(50)).mean())
        assert tree_rounds(network, Losses(faults.all_lost, faults.delay / 2)) == pytest.approx(rounds, rel=0.5)


def test_a_tree_is_left_where_it_would_wait_for_seldom_links():
    assert tree_pays(hp.networks.KOut(20, k=3), 6)
    assert not tree_pays(hp.networks.KOut(300, k=3), 6)
    assert not tree_pays(hp.networks.KOut(10_000, k=3), 10**6)
    assert tree_pays(hp.networks.RandomDirected(100), 6)
    assert tree_pays(hp.networks.Ring(1000), 6)  # links follow a schedule, so no client waits longer than planned


def test_on_lossy_links_the_same_rule_decides():
    engine, task = hp.Simulate(faults=hp.Faults(loss=0.01)), hp.tasks.quadratic(4, 0)
    for network, chosen in ((hp.networks.KOut(5000, k=3), "Tracked"), (hp.networks.RandomDirected(300), "Tree")):
        assert hp.Automatic().choice(engine, task, network).startswith(chosen)
        assert hp.AutomaticInner().choice(engine, task, network).startswith(chosen)


def test_automatic_choices_name_the_links_that_are_seldom_up():
    task, engine = hp.tasks.quadratic(300, 0), hp.Simulate()
    seldom, often = hp.networks.KOut(300, k=3), hp.networks.RandomDirected(300)
    for method, tracked in ((hp.Automatic(), "TrackedHGP"), (hp.AutomaticInner(), "TrackedSGP")):
        assert method.choice(engine, task, seldom) == f"{tracked}: links that are too seldom up to wait for"
        assert type(method.bind(seldom, engine, task)).__name__ == tracked
        assert method.choice(engine, task, often).startswith("Tree")
