"""Exact averages along a tree: all values are summed on the way to the root, and the mean goes back to all clients.

In an average each client sends about two messages: a partial sum to its parent, and the mean to its children. The tree
and the number of rounds depend on the clients' knowledge of the links:

- **Planned**: scheduled links (`network.scheduled`) are known ahead, so the tree is a tree of the network unfolded in
  time. A window of T rounds is long enough if, going backward from its end, every client has a link into the tree at
  some step. The client sends its partial sum at that step. The plan uses the shortest such window. The mean goes back
  to each client on the first link that can deliver it.
- **Waiting**: random links are not known ahead. Two fixed trees, one toward the root and one from it, follow the paths
  of shortest expected waiting time Σ 1/frequency (Dijkstra). A client waits for the sums of all its children, and then
  for the link to its parent.

The root is always client 0, so clients need not elect one.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Bool, Int, PRNGKeyArray
from scipy.sparse.csgraph import breadth_first_order, dijkstra

from hyperpush.networks.base import Network
from hyperpush.networks.links import Links
from hyperpush.networks.reach import require_connected
from hyperpush.networks.remembered import remembered

ROOT = 0
LONGEST = 100_000  # rounds after which an average along a tree gives up
RARELY = 1e-3  # smallest frequency assumed for a link
NEVER = np.iinfo(np.int32).max
# Maps (step, senders, receivers) to whether each link senders[e] → receivers[e] is up, and when its message arrives.
Post = Callable[[Int[Array, ""], Int[Array, " n"], Int[Array, " n"]], tuple[Bool[Array, " n"], Int[Array, " n"]]]


class Trip(NamedTuple):
    """The course of one average along a tree: its duration, and each client's receiver, sender and messages."""

    rounds: Int[Array, ""]  # duration in rounds
    up: Int[Array, " n"]  # receiver of each client's partial sum; the root's entry is the root
    down: Int[Array, " n"]  # sender of the mean to each client
    messages: Int[Array, " n"]  # messages of each client; one message to several receivers counts once
    links: Int[Array, " n"]  # links used by the messages of each client
    complete: Bool[Array, ""]  # True if all clients have the mean


class PlannedTree(eqx.Module):
    """The trees of scheduled links: one for each step of the period at which an average can begin."""

    rounds: Int[np.ndarray, " period"]
    up: Int[np.ndarray, "period n"]
    down: Int[np.ndarray, "period n"]
    messages: Int[np.ndarray, "period n"]
    links: Int[np.ndarray, "period n"]

    def __init__(self, network: Network):
        frame, sender, receiver = _schedule(network)
        period, n = network.period(), network.clients
        union = scipy.sparse.csr_array((np.ones(len(sender)), (sender, receiver)), shape=(n, n))
        require_connected(f"network {network.name}", union)
        broadcast = _spread(frame, sender, receiver, period, n)
        # A broadcast with links and time reversed finds the clients that can reach the root before a step.
        backward = _spread(period - 1 - frame, receiver, sender, period, n)
        start = np.arange(period)
        window, ends = np.full(period, -1), start.copy()
        for rounds in range(int(backward.rounds.max()) + 1):
            ends = np.where(window < 0, (start + rounds) % period, ends)
            fits = (window < 0) & (backward.rounds[-ends % period] <= rounds)
            window = np.where(fits, rounds, window)
        self.rounds = (window + broadcast.rounds[ends]).astype(np.int32)
        self.up, self.down = backward.source[-ends % period], broadcast.source[ends]
        sends = np.arange(n) != ROOT
        self.messages, self.links = sends + broadcast.messages[ends], sends + broadcast.links[ends]

    @property
    def planned_rounds(self) -> int:
        """Rounds to plan for: an upper bound for every average."""
        return int(self.rounds.max())

    def trip(self, step: Int[Array, ""]) -> Trip:
        """Return the average that begins at a step."""
        phase = step % self.rounds.shape[0]
        tables = (self.rounds, self.up, self.down, self.messages, self.links)
        return Trip(*(jnp.asarray(table)[phase] for table in tables), complete=jnp.ones((), bool))


class WaitingTree(eqx.Module):
    """Two fixed trees, to the root and from it, for links that come and go.

    Clients know the possible links, and observe how often each is up. `network.frequencies()` stands for these
    observations, and frequencies below 1/1,000 count as 1/1,000. Sharing the observations takes one additional trip in
    a run (`learn`). Each client's row of n frequencies goes to the root on the path with the fewest links. The root
    sends back the n parents of both trees.
    """

    up: Int[np.ndarray, " n"]
    down: Int[np.ndarray, " n"]
    hops: Int[np.ndarray, " n"]  # parents on the paths to the root with the fewest links
    below: Int[np.ndarray, " n"]  # number of clients whose `hops` path contains each client, itself included
    patience: Int[np.ndarray, ""]  # rounds after which a message is sent again on lossy links
    learns: bool = eqx.field(static=True)  # True if clients must first share the frequencies

    def __init__(self, network: Network):
        self.learns = not network.scheduled
        if (uniform := network.uniform()) is not None:  # the direct link is the shortest path
            n = network.clients
            self.up, self.down, self.hops = (np.full(n, ROOT, np.int32) for _ in range(3))
            self.below = np.where(np.arange(n) == ROOT, n, 1).astype(np.int32)
            self.patience = np.asarray(np.ceil(2 / max(uniform, RARELY)) * (n > 1), np.int32)
            return
        possible = network.possible()
        require_connected(f"network {network.name}", possible)
        senders, receivers = possible.nonzero()
        waits = 1 / np.maximum(network.frequencies()[senders, receivers], RARELY)
        expected = scipy.sparse.csr_array((waits, (senders, receivers)), shape=possible.shape)
        there, self.up = _nearest(expected.T.tocsr())
        back, self.down = _nearest(expected)
        order, hops = breadth_first_order(possible.T.tocsr(), ROOT)
        self.hops = np.where(hops < 0, ROOT, hops).astype(np.int32)
        self.below = np.ones(network.clients, np.int32)
        for client in order[:0:-1]:
            self.below[self.hops[client]] += self.below[client]
        # Clients do not resend before an answer can be expected.
        self.patience = np.asarray(np.ceil(there.max() + back.max()), np.int32)

    @property
    def planned_rounds(self) -> int:
        """Rounds to plan for: the expected length of the longest round trip; it is not bounded."""
        return int(self.patience)

    def trip(self, step: Int[Array, ""], post: Post, lossy: bool, again: Bool[Array, ""] | bool = False) -> Trip:
        """Return the average that begins at a step.

        On `lossy` links a client sends message k again after every `patience` rounds until it receives message k + 1,
        which shows that all clients received k. So with `again` (another average came before), clients also repeat the
        previous mean.
        """
        up, down = jnp.asarray(self.up), jnp.asarray(self.down)
        repeat = _Repeat(lossy, jnp.asarray(self.patience), jnp.asarray(again))
        sums, messages, links, rounds, complete = _wait(up, down, step, post, repeat)
        return Trip(rounds, up, down, sums + messages, sums + links, complete)

    def learn(self, step: Int[Array, ""], post: Post, lossy: bool) -> Trip:
        """Return the trip that shares the frequencies of links; `messages` and `links` count rows of n numbers."""
        up, down = jnp.asarray(self.hops), jnp.asarray(self.down)
        repeat = _Repeat(lossy, jnp.asarray(self.patience), jnp.zeros((), bool))
        sums, messages, links, rounds, complete = _wait(up, down, step, post, repeat)
        rows = jnp.asarray(self.below) * sums
        return Trip(rounds, up, down, rows + 2 * messages, rows + 2 * links, complete)


Tree = PlannedTree | WaitingTree


@remembered
def tree_of(network: Network, lossy: bool) -> Tree:
    """Return the tree of a network; on `lossy` links it is always a waiting tree, because losses break a plan."""
    return PlannedTree(network) if network.scheduled and not lossy else WaitingTree(network)


def up_between(links: Links, senders: Int[Array, " e"], receivers: Int[Array, " e"]) -> Bool[Array, " e"]:
    """Return True for each link senders[e] → receivers[e] that is up, from the links of all clients."""
    if links.targets is None:
        return links.alive[senders, receivers]
    return jnp.any(links.alive[senders] & (links.targets[senders] == receivers[:, None]), axis=1)


def reliable_post(network: Network, key: PRNGKeyArray) -> Post:
    """Return the `Post` of a network whose messages arrive in the round in which they are sent."""

    def post(step, senders, receivers):
        everyone = network.links(key, step, jnp.arange(network.clients), "ones", padded=False)
        alive = up_between(everyone, senders, receivers)
        return alive, jnp.where(alive, step, NEVER)

    return post


class _Repeat(NamedTuple):
    """Rule for resending messages."""

    lossy: bool  # False: messages are never resent
    patience: Int[Array, ""]  # number of rounds before a message is resent
    again: Bool[Array, ""]  # True if the mean of an earlier average may have to be resent

    def due(self, now: Int[Array, ""], last: Int[Array, " n"]) -> Bool[Array, " n"]:
        return (now - last >= self.patience) if self.lossy else jnp.zeros(last.shape, bool)


class _Waiting(NamedTuple):
    """The progress of every client in an average on waiting trees; unknown steps are `NEVER` or −1."""

    now: Int[Array, ""]
    summed: Int[Array, " n"]  # step at which the client's partial sum arrives at its parent
    arrived: Int[Array, " n"]  # step at which the mean arrives at the client
    sent: Int[Array, " n"]  # step at which the client last sent its partial sum
    told: Int[Array, " n"]  # step at which the parent last sent the mean to the client
    repeated: Int[Array, " n"]  # step at which the parent last sent the previous mean to the client
    counts: Int[Array, "3 n"]  # number of partial sums, of messages with a mean, and of links used by the latter


def _wait(
    up: Int[Array, " n"], down: Int[Array, " n"], start: Int[Array, ""], post: Post, repeat: _Repeat
) -> tuple[Int[Array, " n"], Int[Array, " n"], Int[Array, " n"], Int[Array, ""], Bool[Array, ""]]:
    """Return each client's counts of sent sums, sent means and used links, the rounds, and if all have the mean."""
    everyone = jnp.arange(up.shape[0])
    other, none = everyone != ROOT, jnp.zeros(up.shape, bool)
    senders, receivers = jnp.concatenate([everyone, down]), jnp.concatenate([up, everyone])

    def unfinished(at: _Waiting) -> Bool[Array, ""]:
        return ~jnp.all(at.arrived < at.now) & (at.now - start < LONGEST)

    def one_round(at: _Waiting) -> _Waiting:
        now, has = at.now, at.arrived < at.now
        waits = none.at[up].max((at.summed >= now) & other)
        # One call for both trees draws the links of a round only once.
        (alive, back), (due, returns) = (jnp.split(each, 2) for each in post(now, senders, receivers))
        sums = alive & other & ~waits & ~has & ((at.sent < 0) | repeat.due(now, at.sent))
        summed = jnp.minimum(at.summed, jnp.where(sums, due, NEVER))
        tells = back & other & has[down] & ((at.told < 0) | repeat.due(now, at.told))
        repeats = back & other & ~has[down] & repeat.due(now, at.repeated) & repeat.again
        arrived = jnp.minimum(at.arrived, jnp.where(tells, returns, NEVER))
        gathered = ~jnp.any((summed > now) & (up == ROOT) & other)
        arrived = arrived.at[ROOT].min(jnp.where(gathered, now, NEVER))
        speaks = tells | repeats
        counts = jnp.stack([sums, none.at[down].max(speaks), jnp.zeros_like(up).at[down].add(speaks)])
        sent, told = jnp.where(sums, now, at.sent), jnp.where(tells, now, at.told)
        repeated = jnp.where(repeats, now, at.repeated)
        return _Waiting(now + 1, summed, arrived, sent, told, repeated, at.counts + counts)

    never, before = (jnp.full(up.shape, step, jnp.int32) for step in (NEVER, -1))
    nothing = jnp.zeros((3, *up.shape), jnp.int32)
    alone = up.shape[0] == 1
    first = _Waiting(start, never, before if alone else never, before, before, before + start, nothing)
    end = jax.lax.while_loop(unfinished, one_round, first)
    return *end.counts, end.now - start, jnp.all(end.arrived < end.now)


class _Spread(NamedTuple):
    """The broadcasts from the root, one for each step of the period at which a broadcast can begin."""

    rounds: Int[np.ndarray, " period"]
    source: Int[np.ndarray, "period n"]  # client that sends the mean to each client
    messages: Int[np.ndarray, "period n"]
    links: Int[np.ndarray, "period n"]


def _spread(frame: np.ndarray, sender: np.ndarray, receiver: np.ndarray, period: int, n: int) -> _Spread:
    """Return broadcasts that reach each client at the first possible step, from the sender with the lowest number."""
    order = np.lexsort((sender, frame))
    frame, sender, receiver = frame[order], sender[order], receiver[order]
    rounds, source = np.zeros(period, np.int32), np.full((period, n), ROOT, np.int32)
    messages, links = np.zeros((2, period, n), np.int32)
    holds = np.zeros((period, n), bool)
    holds[:, ROOT] = True
    later = 0
    while not holds.all():
        begun = (frame - later) % period  # start of the broadcast for which this link is up now
        gets = np.flatnonzero(holds[begun, sender] & ~holds[begun, receiver])
        _, first = np.unique(begun[gets] * n + receiver[gets], return_index=True)
        begun, told, teller = begun[gets[first]], receiver[gets[first]], sender[gets[first]]
        holds[begun, told], source[begun, told], rounds[begun] = True, teller, later + 1
        np.add.at(links, (begun, teller), 1)
        messages.reshape(-1)[np.unique(begun * n + teller)] += 1
        later += 1
    return _Spread(rounds, source, messages, links)


@eqx.filter_jit
def _links_at(network: Network, step: Int[Array, ""]) -> Links:
    return network.links(jax.random.key(0), step, jnp.arange(network.clients), "ones", padded=False)


def _schedule(network: Network) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the links of all steps of a period: step, sender, receiver."""
    found = []
    for step in range(network.period()):
        links = _links_at(network, jnp.int32(step))
        sender, slot = np.nonzero(np.asarray(links.alive))
        receiver = slot if links.targets is None else np.asarray(links.targets)[sender, slot]
        found.append((np.full(len(sender), step), sender, receiver))
    frame, sender, receiver = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return frame, sender, receiver


def _nearest(lengths: scipy.sparse.csr_array) -> tuple[np.ndarray, Int[np.ndarray, " n"]]:
    """Return each client's distance from the root, and its predecessor on the shortest path."""
    distances, before = dijkstra(lengths, indices=ROOT, return_predecessors=True)
    return distances, np.where(before < 0, ROOT, before).astype(np.int32)
