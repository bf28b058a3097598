"""Expected rounds of averages along a tree, and the choice between a tree and gradient tracking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.networks.expected import tree_pays, tree_rounds
from hyperpush.networks.trees import WaitingTree, reliable_post


class Planned(hp.networks.KOut):
    """The same links, planned link by link."""

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


def test_a_tree_is_left_where_it_would_wait_for_seldom_links():
    assert tree_pays(hp.networks.KOut(20, k=3), 6)
    assert not tree_pays(hp.networks.KOut(300, k=3), 6)
    assert not tree_pays(hp.networks.KOut(10_000, k=3), 10**6)
    assert tree_pays(hp.networks.RandomDirected(100), 6)
    assert tree_pays(hp.networks.Ring(1000), 6)  # a schedule: nobody waits longer than planned


def test_automatic_choices_name_the_links_that_are_seldom_up():
    task, engine = hp.tasks.quadratic(300, 0), hp.Simulate()
    seldom, often = hp.networks.KOut(300, k=3), hp.networks.RandomDirected(300)
    for method, tracked in ((hp.Automatic(), "TrackedHGP"), (hp.AutomaticInner(), "TrackedSGP")):
        assert method.choice(engine, task, seldom) == f"{tracked}: links that are too seldom up to wait for"
        assert type(method.bind(seldom, engine, task)).__name__ == tracked
        assert method.choice(engine, task, often).startswith("Tree")
