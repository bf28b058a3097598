"""Averages along a tree: the engines' counts equal those of a replay that sends real vectors in plain messages."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.sparse

import hyperpush as hp
from hyperpush.engines import keys
from hyperpush.engines.planning import plan
from hyperpush.networks import Network, trees
from hyperpush.networks.hashing import words
from hyperpush.networks.means import of_independent
from hyperpush.networks.reach import random_flood
from hyperpush.programs import Average, Repeat, Sequence

KEY, WIDTH, AVERAGES, START = jax.random.key(4), 7, 3, 2
LONG = 600  # all replays end within these steps
LOSS = hp.Faults(loss=0.3, duplicate=0.1, delay=1)
SCHEDULES = [
    hp.networks.DirectedRing(5),
    hp.networks.Ring(7),
    hp.networks.Exponential(9),
    hp.networks.OnePeerExponential(20),
    hp.networks.StaticUndirected(20, 0.2),
    hp.networks.Star(6),
    hp.networks.KOut(12, 3, varying=False),
    hp.networks.Trace(6, [[[0, 1], [1, 2], [3, 4]], [], [[2, 3], [4, 5], [5, 0]]]),
]


class Flaky(Network):
    """A network such as a user may write: links i → i + 1 and 0 → n/2, each up in half of the steps."""

    name: ClassVar[str] = "flaky"
    directed: bool = eqx.field(static=True, default=True, kw_only=True)
    varying: bool = eqx.field(static=True, default=True, kw_only=True)
    clients: int = eqx.field(static=True)
    ends: int = eqx.field(static=True, default=0)  # senders below this index never use their link i → i + 1

    def _slots(self, key, step, senders):
        up = words(key, step, senders[:, None].astype(jnp.uint32) * 2 + jnp.arange(2, dtype=jnp.uint32)) % 2 == 0
        targets = jnp.stack([(senders + 1) % self.clients, jnp.full_like(senders, self.clients // 2)], axis=1)
        return up & jnp.stack([senders >= self.ends, senders == 0], axis=1), targets

    def flood_rounds(self):
        return random_flood(self, 0.5)

    def possible(self):
        return scipy.sparse.csr_array(self.means().up - np.eye(self.clients) > 0)

    def means(self, weights="push"):
        up = np.roll(np.eye(self.clients), 1, axis=1) / 2
        up[0, self.clients // 2] = 0.5
        return of_independent(up)


OBSERVED = [
    hp.networks.RandomDirected(6),
    hp.networks.RandomDirected(20, 0.2),
    hp.networks.KOut(8, 2),
    hp.networks.RandomUndirected(5),
    Flaky(6),
]


def by_name(network):
    return f"{network.name}-{network.clients}"


def values(network):
    """Return integers, whose sums are exact in every order."""
    return np.random.default_rng(1).integers(-99, 99, (network.clients, WIDTH)).astype(float)


def alive(network, steps=LONG):
    """Return the live links as [step, sender, receiver]."""
    key, n = keys.network_key(KEY), network.clients
    found = jax.jit(jax.vmap(lambda step: hp.networks.matrix(network, key, step, "ones")))(jnp.arange(steps))
    return np.array(found > 0).transpose(0, 2, 1) & ~np.eye(n, dtype=bool)


AVERAGE = Average(
    lambda x, ctx: ({"x": x}, jnp.ones(())), lambda x, mean, mass, ctx: mean["x"] + x / 2, rounds=1, by="tree"
)


def run(network, engine=None, program=None):
    """Run several averages of different values, one after the other."""
    program = program or Repeat(AVERAGE, AVERAGES, name="averages")
    start, nothing = jnp.asarray(values(network), jnp.float32), jnp.zeros((network.clients, 1))
    record = {"averages": lambda x, ctx: x} if isinstance(program, Repeat) else {}
    return (engine or hp.Simulate()).run(program, network, start, nothing, KEY, step=START, record=record)


def check(network, found, rounds, messages, links, learning=(0, 0)):
    """Compare results with a replay, and counts of rounds by average and of links and messages by client."""
    x = values(network)
    for row in found.history["averages"]:
        x = x.mean(0) + x / 2
        np.testing.assert_allclose(row, x, rtol=1e-6, atol=1e-4)
    clock, n = found.clocks["averages"], network.clients
    np.testing.assert_array_equal(clock.rounds, np.cumsum(rounds))
    sent = WIDTH * np.cumsum([each.sum() for each in messages]) + np.sum(learning[0])
    np.testing.assert_array_equal(clock.floats, np.rint(sent / n))
    np.testing.assert_array_equal(found.bytes, 4 * (WIDTH * np.sum(links, axis=0) + learning[1]))
    assert (found.rounds, found.step, found.floats) == (clock.rounds[-1], START + clock.rounds[-1], clock.floats[-1])


def lowest(up):
    """Return for each row the first index that is true, if there is one."""
    return {row: int(np.argmax(found)) for row, found in enumerate(up) if found.any()}


def planned(up, step, x):
    """Replay a gather and a broadcast on known links; return the rounds, and messages and links by client."""
    n, total, window, sends = len(x), x.sum(0), 0, {}
    for window in range(1, 1000):
        inside, sends = np.arange(n) == 0, {}
        for now in range(step + window - 1, step - 1, -1):
            sends[now] = lowest(up[now] & inside & ~inside[:, None])
            inside[list(sends[now])] = True
        if inside.all():
            break
    messages, links, partial = np.zeros(n, int), np.zeros(n, int), x.copy()
    for now in range(step, step + window):
        sums = {j: (to, partial[j].copy()) for j, to in sends[now].items()}
        for j, (to, vector) in sums.items():
            assert up[now, j, to]
            partial[to] += vector
            messages[j] += 1
            links[j] += 1
    np.testing.assert_array_equal(partial[0], total)
    holds, now = np.arange(n) == 0, step + window
    while not holds.all():
        gets = lowest(up[now].T & holds & ~holds[:, None])
        holds[list(gets)] = True
        now += 1
        for teller in set(gets.values()):
            messages[teller] += 1
            links[teller] += list(gets.values()).count(teller)
    return now - step, messages, links


@pytest.mark.parametrize("network", SCHEDULES, ids=by_name)
def test_schedules_are_planned(network):
    assert network.scheduled
    up, step, replayed = alive(network), START, []
    for _ in range(AVERAGES):
        replayed.append(planned(up, step, values(network)))
        step += replayed[-1][0]
        assert replayed[-1][1].mean() <= 2
        assert replayed[-1][2].mean() <= 2
    check(network, run(network), *zip(*replayed, strict=True))


def waiting(up, start, x, parents, tellers, fates=None, patience=0, again=False):
    """Replay the same on links that clients wait for: each client knows only the messages that it has received."""
    n = len(x)
    children = [[j for j in range(1, n) if parents[j] == i] for i in range(n)]
    heard, means = [{} for _ in range(n)], [None] * n  # partial sums by child, and the mean
    asked, told, repeated = {}, {}, dict.fromkeys(range(1, n), start - 1)
    sums, messages, links, mail, now = np.zeros(n, int), np.zeros(n, int), np.zeros(n, int), [], start

    def post(sender, receiver, content):
        if fates is None:
            mail.append((now, receiver, sender, content))
        else:
            arrives, delays = fates[0][now, sender, receiver], fates[1][now, sender, receiver]
            mail.extend((now + delays[copy], receiver, sender, content) for copy in (0, 1) if arrives[copy])

    def due(last, key):
        return key not in last or (fates is not None and now - last[key] >= patience)

    while any(mean is None for mean in means):
        for j in range(1, n):
            complete = all(child in heard[j] for child in children[j])
            if complete and means[j] is None and up[now, j, parents[j]] and due(asked, j):
                asked[j] = now
                sums[j] += 1
                post(j, parents[j], x[j] + sum(heard[j].values()))
        for j in range(n):
            last = repeated if means[j] is None else told
            some = [i for i in range(1, n) if tellers[i] == j and up[now, j, i] and due(last, i)]
            if means[j] is None and not (again and fates is not None):
                some = []
            for i in some:
                last[i] = now
                post(j, i, None if means[j] is None else ("mean", means[j]))
            messages[j] += bool(some)
            links[j] += len(some)
        for arrival, receiver, sender, content in mail:
            if arrival == now and isinstance(content, tuple):
                means[receiver] = content[1]
            elif arrival == now and content is not None:
                heard[receiver][sender] = content
        if means[0] is None and all(child in heard[0] for child in children[0]):
            means[0] = (x[0] + sum(heard[0].values())) / n
        now += 1
    for mean in means:
        np.testing.assert_array_equal(mean, x.sum(0) / n)
    return now - start, sums, messages, links


def ways(network):
    """By networkx, return quickest paths to and from the root, paths with the fewest links, and the patience."""
    frequency, everyone = network.means().up, range(network.clients)
    links = [(j, i) for j, i in zip(*np.nonzero(frequency), strict=True) if i != j]
    graph = nx.DiGraph((j, i, {"wait": 1 / frequency[j, i]}) for j, i in links)
    there, back, fewest = (
        [nx.shortest_path(graph, *ends, weight) for ends in pairs]
        for pairs, weight in (
            ([(j, 0) for j in everyone], "wait"),
            ([(0, i) for i in everyone], "wait"),
            ([(j, 0) for j in everyone], None),
        )
    )
    longest = [max(nx.path_weight(graph, way, "wait") for way in each) for each in (there, back)]
    return there, back, fewest, int(np.ceil(sum(longest)))


def replay_waiting(network, fates=None):
    """Return each client's counts for the averages of a run, and for learning the links before them."""
    there, back, fewest, patience = ways(network)
    up, x, n, step = alive(network), values(network), network.clients, START
    tellers, lossy = [(0, *way)[-2] for way in back], {"fates": fates, "patience": patience}
    replayed, learning, before = [], (0, np.zeros(n, int)), 0
    if not network.scheduled:
        parents = [(*way, 0)[1] for way in fewest]
        before, sums, messages, links = waiting(up, step, x, parents, tellers, **lossy)
        # counts all clients whose path leads through this one
        rows = n * sums * np.array([sum(i in way for way in fewest) for i in range(n)])
        learning = (rows + 2 * n * messages, rows + 2 * n * links)
        step += before
    parents = [(*way, 0)[1] for way in there]
    for number in range(AVERAGES):
        rounds, sums, messages, links = waiting(up, step, x, parents, tellers, **lossy, again=number > 0)
        step += rounds
        replayed.append((rounds + before, sums + messages, sums + links))
        before = 0
    return (*zip(*replayed, strict=True), learning)


@pytest.mark.parametrize("network", OBSERVED, ids=by_name)
def test_random_links_are_waited_for(network):
    assert not network.scheduled
    rounds, messages, links, learning = replay_waiting(network)
    assert np.mean(messages, axis=1).max() <= 2
    assert np.mean(links, axis=1).max() <= 2
    check(network, run(network), rounds, messages, links, learning)


LOSSY = [hp.networks.RandomDirected(6), Flaky(5), hp.networks.DirectedRing(4)]


@pytest.mark.parametrize("network", LOSSY, ids=by_name)
def test_what_is_lost_is_sent_again(network):
    key, everyone = keys.faults_key(KEY), jnp.arange(network.clients)
    of_step = jax.vmap(jax.vmap(LOSS.fates, (None, None, 0, None)), (None, 0, None, None))
    fates = jax.tree.map(np.asarray, of_step(key, jnp.arange(LONG), everyone, network.clients))
    rounds, messages, links, learning = replay_waiting(network, fates)
    assert np.mean(links) > 2 * (network.clients - 1) / network.clients  # some messages were lost
    check(network, run(network, hp.Simulate(faults=LOSS)), rounds, messages, links, learning)


@pytest.mark.parametrize(
    ("network", "devices"),
    # six clients on four devices need padding
    [(hp.networks.OnePeerExponential(6), 2), (hp.networks.RandomDirected(6), 4)],
    ids=["planned", "waiting"],
)
def test_shard_counts_the_same(network, devices):
    one, several = run(network), run(network, hp.Shard(devices))
    np.testing.assert_allclose(several.states, one.states, rtol=1e-6)
    np.testing.assert_array_equal(several.bytes, one.bytes)
    np.testing.assert_array_equal(several.clocks["averages"].floats, one.clocks["averages"].floats)
    assert (several.rounds, several.floats) == (one.rounds, one.floats)


def test_several_places_learn_the_links_once():
    network = hp.networks.RandomDirected(6)
    one, two = run(network), run(network, program=Sequence(*[AVERAGE] * AVERAGES))
    assert (one.rounds, one.floats) == (two.rounds, two.floats)
    np.testing.assert_array_equal(one.bytes, two.bytes)


def test_double_precision_and_vmap():
    network, nothing = hp.networks.RandomDirected(4), jnp.zeros((4, 1))
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)))
        found = jax.vmap(lambda x: hp.extend.evaluate(Repeat(AVERAGE, 1), network, x, nothing, KEY)[0])(x)
        np.testing.assert_allclose(found, x.mean(1, keepdims=True) + x / 2, rtol=1e-14)


def test_plans_say_at_most_what_is_sent():
    network = hp.networks.OnePeerExponential(20)
    planned = plan(lambda note: run(network), 1)
    found = run(network)
    assert found.floats <= planned["floats"] == 2 * AVERAGES * WIDTH
    assert found.rounds <= planned["rounds"] < found.rounds + AVERAGES * network.period()


def test_no_tree(monkeypatch):
    class Parted(Flaky):
        name: ClassVar[str] = "parted"

        def possible(self):
            return scipy.sparse.csr_array(super().possible().toarray() & (np.arange(self.clients)[:, None] > 0))

    with pytest.raises(hp.InvalidInput, match=r"network parted: .* clients 1, 2, 3 cannot be reached"):
        run(Parted(4))
    monkeypatch.setattr(trees, "LONGEST", 40)
    with pytest.raises(hp.HyperpushError, match="did not reach all clients"):
        run(Flaky(5, ends=3))


@pytest.mark.parametrize("network", [hp.networks.OnePeerExponential(5), Flaky(5)], ids=["planned", "waiting"])
def test_peers_send_along_the_same_tree(network):
    one, peers = run(network), run(network, hp.Threads())
    # Numbers of about 100 are summed in another order; float32 rounds each of them by up to 1e-5.
    np.testing.assert_allclose(peers.states, one.states, rtol=1e-6, atol=1e-4)
    np.testing.assert_array_equal(peers.bytes, one.bytes)
    np.testing.assert_array_equal(peers.clocks["averages"].floats, one.clocks["averages"].floats)
    assert (peers.rounds, peers.step, peers.floats) == (one.rounds, one.step, one.floats)
    with pytest.raises(hp.InvalidInput, match="links that lose messages"):
        run(network, hp.Threads(faults=LOSS))
