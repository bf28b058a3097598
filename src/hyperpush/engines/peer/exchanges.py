"""One exchange of a peer: of running sums or messages with its neighbors, or of messages with a server."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from hyperpush.base.errors import HyperpushError
from hyperpush.engines.peer.channels import Channel
from hyperpush.engines.peer.functions import ClientLinks, combine, in_turn
from hyperpush.engines.peer.messenger import Messenger
from hyperpush.programs import Exchange, Node, Path, Server, all_clients, one_client

SERVER = 0  # the peer that acts as the server: an arbitrary choice, the same at all peers


class Received(NamedTuple):
    """The result of an exchange: the combined messages, their senders, and the weights used."""

    total: PyTree
    own: ArrayLike  # the weight of this peer's own message
    senders: list[int]
    weights: np.ndarray  # weights of sent messages, by receiver


def exchange_totals(
    messenger: Messenger,
    channel: Channel,
    message: PyTree,
    links: ClientLinks,
    resumed: bool,
    save: Callable[[], None],
) -> Received:
    """Add shares of a message to the totals of the links, send these totals, and receive the neighbors' totals.

    Args:
        messenger: This peer's messenger.
        channel: The channel of the exchange, with the running sums of its links.
        message: The value to share out.
        links: The links of this step.
        resumed: True if the totals already hold the shares of this exchange, because the peer was restarted here.
        save: Function that makes the totals durable, called before they are sent.
    """
    targets = np.flatnonzero(links.to).tolist()
    if resumed:
        links = links._replace(own=np.asarray(messenger.state.own, links.own.dtype))
        targets = list(channel.outgoing.totals)
    else:
        if messenger.members is not None:
            # A target that has not confirmed the last share gets no new share, only its total again. Otherwise a peer
            # without connection would soon push away almost all of its mass ω, and the parameters x = z/ω would take
            # huge steps (step size)·∇f/ω. Push-sum allows any weights that add up to 1.
            # A peer that is far behind sends no new shares until it has caught up, because messages in transit to it
            # are as old as its own.
            links = links.keep_shares(targets if messenger.behind else channel.unseen(targets))
        messenger.check_finite(message)
        channel.put(message, links.weights)
        messenger.state.own = float(links.own)
    save()
    messenger.acknowledge_owed()
    for target in targets:
        messenger.send_total(channel, target)
    messenger.say_farewell()
    channel.due += float(links.given[links.heard].sum())
    senders = [header.sender for header, _ in messenger.collect(channel.path, links.heard)]
    return Received(channel.take(float(links.own)), links.own, senders, links.weights)


def exchange_messages(
    messenger: Messenger,
    node: Exchange,
    path: Path,
    message: PyTree,
    links: ClientLinks,
    own_weights: Callable[[], np.ndarray],
) -> Received:
    """Send a message to the neighbors, and combine the messages that arrive in this round.

    `own_weights()` returns the weights by sender; it is called only if the receiver chooses them.
    """
    messenger.send(path, message, np.flatnonzero(links.to), links.weights)
    arrived, own = messenger.receive(path, links.heard, np.where(links.heard, links.given, 0)), links.own
    weights = links.weights if node.weights == "reverse" else None
    if callable(node.weights):
        weights = own_weights()
        own = weights[messenger.client]
    if weights is not None:  # use the receiver's weights instead of those in the messages
        arrived = [(sender, value, float(weights[sender])) for sender, value, _ in arrived]
    total = combine(message, arrived, node.reduce, len(links.to))
    return Received(total, own, [sender for sender, _, _ in arrived], links.weights)


def answer_shapes(node: Node, message: PyTree, clients: int) -> PyTree:
    """Return the shapes of a server's answer to one client; None for other nodes and for host functions."""
    if not isinstance(node, Server) or node.host:
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    return one_client(jax.eval_shape(node.compute, all_clients(message, clients), key))


def ask_server(
    messenger: Messenger, node: Server, path: Path, message: PyTree, key: PRNGKeyArray, clients: int
) -> PyTree:
    """Return the server's answer to this peer's message. The peer that acts as the server computes all answers."""
    if node.host:
        raise HyperpushError("a server that computes in plain Python runs on simulate and shard only")
    down, others = (*path, 1), np.arange(clients) != SERVER
    if messenger.client == SERVER:
        everyone = messenger.receive_all(path, others) | {SERVER: message}
        rows = [everyone[k] for k in range(clients)]
        answers = in_turn(lambda: node.compute(jax.tree.map(lambda *own: jnp.stack(own), *rows), key))
        answers = jax.tree.map(np.asarray, answers)
        for other in np.flatnonzero(others).tolist():
            messenger.send_one(down, other, jax.tree.map(lambda rows, k=other: rows[k], answers))
        return jax.tree.map(lambda rows: rows[SERVER], answers)
    messenger.send_one(path, SERVER, message)
    if down not in messenger.channels.current:
        messenger.channels.add(Channel(down, answer_shapes(node, message, clients)))
    return messenger.receive_all(down, ~others)[SERVER]
