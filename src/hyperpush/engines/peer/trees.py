"""Averages along a tree by real messages: sums go up to the root, and the mean comes back down.

The tree, and the counts of rounds and messages, follow from the network's links (`hyperpush.networks.trees`), which all
peers know. Peers do not wait until a link is up, but count the rounds as if they did.
"""

from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from hyperpush.base.errors import HyperpushError
from hyperpush.engines import keys
from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.functions import in_turn
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.networks import Network
from hyperpush.networks.trees import LONGEST, ROOT, PlannedTree, Tree, Trip, WaitingTree, reliable_post, tree_of
from hyperpush.programs import Path, Profile


@eqx.filter_jit
def _trip(network: Network, tree: Tree, root: PRNGKeyArray, step: ArrayLike, learns: bool) -> Trip:
    if isinstance(tree, PlannedTree):
        return tree.trip(jnp.asarray(step))
    post = reliable_post(network, keys.network_key(root))
    travel = tree.learn if learns else tree.trip
    return travel(jnp.asarray(step), post, False)


def mean_channel(path: Path) -> Path:
    """Return the path of the channel for the mean of the sums that are sent at `path`."""
    return (*path, 1)


@final
class TreeAverages:
    """One client's part in averages along a tree: it adds its children's sums, and passes the mean on to them."""

    def __init__(self, network: Network, key: PRNGKeyArray, messenger: Messenger):
        self.network, self.key, self.messenger, self.state = network, key, messenger, messenger.state
        self.tree = tree_of(network, lossy=False)

    @staticmethod
    def of(network: Network, key: PRNGKeyArray, messenger: Messenger, found: Profile) -> "TreeAverages | None":
        """Return an object with channels for all averages along a tree in a program; None if there are none."""
        places = [sending for sending in found.sendings if sending.by_tree]
        averages = TreeAverages(network, key, messenger) if places else None
        for place in places:
            assert averages is not None
            averages.open(place.path, place.message, place.answer)
        return averages

    def open(self, path: Path, message: PyTree[jax.ShapeDtypeStruct], answer: jax.ShapeDtypeStruct | None) -> None:
        """Add the channel for the mean, and for the root's answer if there is one. The sums already have a channel."""
        mean = jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) / 1, message))
        self.messenger.channels.add(Channel(mean_channel(path), (mean, answer)))

    def mean(self, path: Path, value: PyTree, answer: Callable[[PyTree], Any]) -> tuple[PyTree, Any]:
        """Return the mean of all clients' values, and the root's answer to the mean; bitwise equal at all clients."""
        state, messenger, me = self.state, self.messenger, self.messenger.client
        if isinstance(self.tree, WaitingTree) and self.tree.learns and not state.learned:
            n = self.network.clients
            self._count(self._trip(learns=True), n, n * jnp.zeros(()).dtype.itemsize)
            state.learned = True
        trip, begun = self._trip(), state.step
        others = np.arange(self.network.clients) != ROOT
        messenger.check_finite(value)
        total = value
        for _, part in sorted(messenger.receive_all(path, (trip.up == me) & others).items()):
            total = jax.tree.map(np.add, total, part)
        if me != ROOT:
            messenger.send_one(path, int(trip.up[me]), total)
        state.step += 1  # a separate step for the way back, in which the same two peers may exchange another message
        if me == ROOT:
            shapes, n = messenger.channels.current[mean_channel(path)].message[0], self.network.clients
            mean = jax.tree.map(lambda leaf, like: np.asarray(leaf / n, like.dtype), total, shapes)
            told = (mean, answer(mean))
        else:
            teller = int(trip.down[me])
            told = messenger.receive_all(mean_channel(path), np.arange(self.network.clients) == teller)[teller]
        for child in np.flatnonzero((trip.down == me) & others).tolist():
            messenger.send_one(mean_channel(path), child, told)
        state.step, channel = begun, messenger.channels.current[path]
        self._count(trip, channel.floats, channel.bytes)
        return told

    def _trip(self, learns: bool = False) -> Trip:
        step = np.asarray(self.state.step, np.int32)
        found = in_turn(lambda: _trip(self.network, self.tree, self.key, step, learns))
        trip = jax.tree.map(np.asarray, found)
        if not trip.complete:
            raise HyperpushError(f"an average along a tree did not reach all clients within {LONGEST:,} rounds")
        return trip

    def _count(self, trip: Trip, floats: int, size: int) -> None:
        """Count the rounds and messages of an average, in which each message has `floats` numbers and `size` bytes."""
        counts, me = self.state.counts, self.messenger.client
        self.state.step += int(trip.rounds)
        counts.rounds += int(trip.rounds)
        counts.floats += floats * int(trip.messages[me])
        counts.bytes += size * int(trip.links[me])
