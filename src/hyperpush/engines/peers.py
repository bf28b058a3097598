"""Engine that runs one party's client on a real network, where that party's data are."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.limits import PositiveFloat, Whole
from hyperpush.base.options import Configured
from hyperpush.engines.base import Engine, Request
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import SERVER, Checkpoint, Peer
from hyperpush.engines.peer.code import code_digest
from hyperpush.engines.peer.durable import clock_at
from hyperpush.engines.peer.exchanges import answer_shapes
from hyperpush.engines.peer.origin import (
    Origin,
    arrays_digest,
    draws_key,
    new_start,
    problem_digest,
    read_secret,
    secret_digest,
)
from hyperpush.engines.peer.peer import spelled_out
from hyperpush.engines.result import Progress, RunResult
from hyperpush.engines.run_checks import check_conserved
from hyperpush.engines.transport.faulty import Faulty
from hyperpush.engines.transport.zenoh.addresses import Address, check_name
from hyperpush.networks import Network
from hyperpush.programs import Average, Node, ProgramRecipe, Server, at, contains, profile
from hyperpush.programs.recipe import is_number

if TYPE_CHECKING:
    from hyperpush.engines.transport.zenoh.identity import Identity
    from hyperpush.engines.transport.zenoh.transport import Zenoh
    from hyperpush.task.task import Task

Mode = Literal["synchronous", "asynchronous"]
DIGEST_BYTES = 32
LIMIT = 256 << 20  # largest size of a message in bytes
MESSAGE_OVERHEAD = 4096  # upper bound on the bytes of header and padding in a message


class Peers(Engine, Configured):
    """Engine that runs one party's client and exchanges messages with the other parties directly, over mutual TLS.

    Every party calls the same verb with the same method, network and key, on its own task:

        engine = hp.Peers("hospital-3", addresses, authority="ca.pem", certificate="h3.pem", private_key="h3.key")
        hp.solve(task.for_client("hospital-3", data), method, network, key=0, engine=engine)

    Use it when data must not leave their party. To try out a method, use `hp.Simulate`. To test the code of peers
    without a network, use `hp.Threads`. Parties must trust each other: plausible false values are not detected.
    `hyperpush peer` runs this engine from a TOML file, and `hyperpush swarm` runs all parties on one machine.

    Results lack a client axis: `params` are those of this party. To chain verbs, pass `trained.task` to the next one.
    Calls of different programs do not disturb each other. Give repeated calls of one program different `session` names.

    Args:
        party: Name of this party's client, as in `task.for_client(name)`.
        addresses: All parties in the order of their clients, each with its `host:port`. A party with None does not
            listen, but dials all its neighbors, which is enough behind a NAT. If two parties listen, both dial.
        authority: The PEM file of the authority that signs certificates. `authority`, `certificate` and `private_key`
            may be None only with `tls=False`.
        certificate: The PEM file of this party's certificate, whose common name is `party`.
        private_key: The PEM file of the certificate's private key.
        tls: False: run without certificates, for trials among loopback addresses; other addresses are refused.
        session: Name of the run, part of every message's key. Parties in runs of different names get no messages
            from each other.
        mode: "synchronous": rounds in lockstep, with the simulator's results. "asynchronous": each party at its own
            pace. It survives losses and crashes, for programs that send only conserved quantities (such as `SGP` and
            `TrackedHGP`).
        patience: Seconds, above 0, to wait for a party before the run ends with an error. Choose more than a restart
            takes.
        close_after: Seconds, above 0, after which an absent party is removed; asynchronous mode only.
        longest_wait: Longest time in seconds, above 0, to wait for one message. Deadlines adapt to the network below
            this bound; asynchronous mode only.
        checkpoint: A file to continue from after a crash. None: a party that crashes cannot come back.
        checkpoint_every: Number of exchanges between checkpoints; 0: none. Asynchronous mode saves every exchange.
        keep_checkpoint: True keeps the file after the run, for a caller that still has to save the result.
        secret: A file with 32 secret bytes, written if missing. This party's mini-batches and noise are drawn from it.
            None: they follow from `key=`, which all parties know. A private task requires a file.
        repeats: True lets averages restart after the removal of a party. A private task requires False, because ε
            covers each release only once.
        faults: Injected faults on top of the network's, for trials in asynchronous mode. None: no injected faults.
        fault_seed: Seed of the injected faults, 0 or more.
        digest: 32 bytes that all parties compare before they start. None: a digest of the program's messages, loops
            and numbers, the network and the key. The code of all functions is compared in either case.
        on_start: Function called with the running `PeerSession`, through which a caller can watch, leave or stop the
            run. None: no call.

    Raises:
        InvalidInput: An option is out of range; the extra `peers` is not installed; or the task is another party's.

    Example:
        >>> import hyperpush as hp
        >>> engine = hp.Peers("alice", {"alice": "127.0.0.1:7800", "bob": None}, tls=False, patience=30.0)
        >>> engine.mode
        'synchronous'
    """

    hosts_one: ClassVar[bool] = True

    party: str = eqx.field(static=True)
    addresses: Mapping[str, str | None] = eqx.field(static=True)
    authority: str | Path | None = eqx.field(static=True, default=None)
    certificate: str | Path | None = eqx.field(static=True, default=None)
    private_key: str | Path | None = eqx.field(static=True, default=None)
    tls: bool = eqx.field(static=True, default=True)
    session: str = eqx.field(static=True, default="run")
    mode: Mode = eqx.field(static=True, default="synchronous")
    patience: PositiveFloat = eqx.field(static=True, default=120.0)
    close_after: PositiveFloat = eqx.field(static=True, default=30.0)
    longest_wait: PositiveFloat = eqx.field(static=True, default=2.0)
    checkpoint: str | Path | None = eqx.field(static=True, default=None)
    checkpoint_every: Whole = eqx.field(static=True, default=1)
    keep_checkpoint: bool = eqx.field(static=True, default=False)
    secret: str | Path | None = eqx.field(static=True, default=None)
    repeats: bool = eqx.field(static=True, default=True)
    faults: Faults | None = None
    fault_seed: Whole = eqx.field(static=True, default=0)
    digest: bytes | None = eqx.field(static=True, default=None)
    on_start: Callable[["PeerSession"], None] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_name("Peers.session", self.session)
        for name in self.addresses:
            check_name("Peers.addresses", name)
        if self.party not in self.addresses:
            raise unknown("Peers.party", self.party, self.addresses)
        for name, text in self.addresses.items():
            if text is not None:
                Address.parse(f"Peers.addresses.{name}", text)
        self.check_faults(self.faults)
        if self.digest is not None and len(self.digest) != DIGEST_BYTES:
            raise InvalidInput("Peers.digest", f"{len(self.digest)} bytes", f"{DIGEST_BYTES} bytes, or None")
        if self.faults is not None and not self.asynchronous:
            raise InvalidInput("Peers.faults", self.faults, "none, or mode='asynchronous', which survives them")

    @property
    def asynchronous(self) -> bool:
        """True if parties do not wait for each other in every round."""
        return self.mode == "asynchronous"

    @property
    def lossy(self) -> Faults | None:
        return Faults() if self.asynchronous else None

    @property
    def no_tree(self) -> str:
        return "asynchronous peers" if self.asynchronous else ""

    def check_task(self, task: "Task") -> None:
        """Raise InvalidInput for a task of all clients or of another party, and for options that leak private data."""
        if task.owner is None or task.names[task.owner] != self.party or task.names != tuple(self.addresses):
            whose = "all clients'" if task.owner is None else f"{task.names[task.owner]}'s, of {', '.join(task.names)}"
            parties = ", ".join(self.addresses)
            allowed = f"task.for_client({self.party!r}, data) of a task with these parties as names: {parties}"
            raise InvalidInput("task", whose, allowed)
        if task.privacy is not None and self.secret is None:
            allowed = "a file, for a private task: a party that knows the key can draw the noise again and subtract it"
            raise InvalidInput("Peers.secret", None, allowed)
        if task.privacy is not None and self.repeats:
            allowed = "False, for a private task: ε does not cover sending the same again with other noise"
            raise InvalidInput("Peers.repeats", True, allowed)

    def _origin(self, recipe: ProgramRecipe, states: PyTree, data: PyTree, code: bytes) -> Origin:
        """Return digests of this party's inputs. Create a missing secret file, unless there is a checkpoint."""
        given = arrays_digest(data), arrays_digest(states), problem_digest(code, recipe.parts)
        if self.secret is None:
            return Origin(*given)
        resumes = self.checkpoint is not None and Checkpoint.exists(Path(self.checkpoint))
        return Origin(*given, secret_digest(read_secret(Path(self.secret), resumes)))

    def connect(self, program: Node, network: Network) -> "Connection":
        """Return this party's links, address and certificate.

        Invalid input raises an error here, before any file is written or any message sent.
        """
        from hyperpush.engines.transport.zenoh.session import settings

        if self.asynchronous:
            check_conserved(program)
        names = list(self.addresses)
        client = names.index(self.party)
        links = {
            names[other]: self._address_to_dial(names[other])
            for other in neighbors(network, client, everyone=needs_server(program))
        }
        own = self.addresses[self.party]
        made = Connection(client, links, None if own is None else Address.parse("", own), self._identity())
        settings(self.session, self.party, made.listen, links, made.identity)
        return made

    def _address_to_dial(self, other: str) -> Address | None:
        """Return the address of a neighbor; None if it does not listen. If both listen, both dial.

        So a restarted party is connected at once, even if strangers keep its neighbor from accepting connections.
        """
        there, here = self.addresses[other], self.addresses[self.party]
        if there is None and here is None:
            allowed = f"host:port, or an address for {self.party}: at least one of the two must listen"
            raise InvalidInput(f"Peers.addresses.{other}", None, allowed)
        return None if there is None else Address.parse(f"Peers.addresses.{other}", there)

    def _identity(self) -> "Identity | None":
        from hyperpush.engines.transport.zenoh.identity import Identity

        given = {"authority": self.authority, "certificate": self.certificate, "private_key": self.private_key}
        if not self.tls and not any(given.values()):
            return None
        for field, path in given.items():
            if path is None:
                raise InvalidInput(f"Peers.{field}", None, "a PEM file; or tls=False and no certificate, on loopback")
        return Identity(*(Path(str(path)) for path in given.values())).check(self.party)

    def execute(self, request: Request) -> RunResult:
        """Run this party's client. States, data and results are its own, without a client axis."""
        # Imported only here and in `connect`: the rest of the library works without the extra `peers`.
        from hyperpush.engines.transport.zenoh.transport import Zenoh

        recipe, network, key, step = request.recipe, request.network, request.key, request.step
        states, data = jax.tree.map(jnp.asarray, (request.states, request.data))
        connection, session, digest = self.connect(recipe.program(), network), self.session, self.digest
        if digest is None:
            structure, numbers = _description(recipe, network, states, data, key, step)
            session = f"{session}-{_hash(structure, 4).hex()}"  # separates messages of successive verbs
            digest = _hash([structure, numbers, self.mode, list(self.addresses), self.secret is not None], DIGEST_BYTES)
        code = code_digest(recipe, states, data, network.clients)
        origin = self._origin(recipe, states, data, code.own)
        keeps = self.checkpoint is not None and self.checkpoint_every > 0
        store = Checkpoint(Path(str(self.checkpoint)), digest, origin) if keeps else None
        stored = None if store is None else store.load()
        start = new_start() if store is None else store.start
        secret = None if self.secret is None else draws_key(read_secret(Path(self.secret)), digest, origin, start)
        before = stored or {}
        with ExitStack() as held:
            if store is not None:
                held.callback(store.close)
                store.prepare()
            transport = Zenoh(
                session,
                list(self.addresses),
                *connection,
                digest=digest,
                code=code.common,
                limit=longest_message(recipe, states, data, network.clients),
                mode=self.mode,
                patience=self.patience,
                close_after=self.close_after,
                longest_wait=self.longest_wait,
                durable=store is not None,
                closed=before.get("closed", ()),
                left=before.get("left", ()),
                refused=dict(before.get("refused", ())),
                resumed=stored is not None,
            )
            held.callback(transport.close)
            lossy = transport
            if self.faults is not None:
                lossy = Faulty(transport, self.faults, self.fault_seed, connection.client)
            peer = Peer(
                connection.client,
                network,
                lossy,
                key,
                tolerant=self.asynchronous,
                step=step,
                store=store,
                store_every=self.checkpoint_every,
                secret=secret,
                repeats=self.repeats,
            )
            running = PeerSession(transport, peer, before.get("step"), start, not_compared=code.undefined)
            if self.on_start is not None:
                self.on_start(running)
            transport.ready(clock_at(before) if before else step, everyone=stored is None)
            running.begin()
            watched = running.watch(request.progress)
            result = peer.result(peer.run(recipe, states, data, request.recorders, request.every, watched))
        if store is not None and not self.keep_checkpoint:
            store.remove()
        return replace(result, refused=refused_by_name(list(self.addresses), peer.counts.refused))


def longest_message(recipe: ProgramRecipe, state: PyTree, data: PyTree, clients: int) -> int:
    """Return an upper bound on the bytes of a program's messages, in which running sums take float64."""
    spelled = spelled_out(recipe)
    program, found = spelled.program(), profile(spelled, state, data, clients)
    answers = [answer_shapes(at(program, place.path), place.message, clients) for place in found.sendings]
    trees = [jax.tree.leaves((place.message, place.answer)) for place in found.sendings]
    trees += [jax.tree.leaves(answer) for answer in answers]
    longest = max((sum(8 * leaf.size + 8 for leaf in leaves) for leaves in trees), default=0)
    return min(longest + MESSAGE_OVERHEAD, LIMIT)


def refused_by_name(names: list[str], refused: Mapping[int, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return counts of refused messages by the name of their sender and by reason."""
    return {names[sender]: dict(reasons) for sender, reasons in sorted(refused.items())}


class Connection(NamedTuple):
    """Connection data of a party: the addresses of its neighbors, its own address and its certificate."""

    client: int
    links: Mapping[str, Address | None]  # neighbors by name, with the address to dial; None: the neighbor dials
    listen: Address | None
    identity: "Identity | None"


@final
@dataclass
class PeerSession:
    """Handle on a party's running client, through which a caller can watch, leave or stop the run."""

    transport: "Zenoh"
    peer: Peer
    resumed_at: int | None  # step of the checkpoint from which it continues; None: a fresh start
    start: str  # identifier of this fresh start of the party, kept when it is resumed
    not_compared: str = ""  # the reason why the parties cannot compare their code; empty if they have
    begun: bool = False  # True once all parties have said hello
    on_begin: Callable[[], None] | None = None  # called when `begun` becomes True, before the first message is sent
    leaves: bool = False  # True after a call of `leave`
    position: Mapping[str, Any] | None = None  # "loop", "step" and "total" of the last progress report

    def begin(self) -> None:
        """Note that all parties have said hello, and call `on_begin`."""
        self.begun = True
        if self.on_begin is not None:
            self.on_begin()

    def leave(self) -> None:
        """Leave the run for good, at the next exchange of mass in its program."""
        self.leaves = True
        self.peer.leave()

    def stop(self, error: HyperpushError) -> None:
        """End the run with an error. With a checkpoint it can be resumed."""
        self.transport.stop(error)

    def news(self) -> list[str]:
        """Return lines about parties that were lost, found, removed or refused since the last call."""
        return self.transport.news()

    def watch(self, progress: Progress | None) -> Progress:
        """Return a function that passes progress on to `progress`, and stores it in `position`."""

        def show(name: str, done: int, total: int) -> None:
            self.position = {"loop": name, "step": done, "total": total}
            if progress is not None:
                progress(name, done, total)

        return show

    def status(self) -> dict[str, Any]:
        """Return the progress of this party's client, and what it knows about its neighbors."""
        counts, links = self.peer.counts, self.transport.status()
        return {
            "round": counts.rounds,
            "code_not_compared": self.not_compared or None,
            **(self.position or {}),
            "late": counts.late,
            "rejected": dict(counts.rejections),
            "refused": refused_by_name(list(self.transport.names), counts.refused),
            "mass": self.peer.mass,
            "isolated": counts.isolation or None,
            "closed_out": [self.transport.names[each] for each in sorted(self.transport.closed)],
            "links": links,
            "rejected_by_transport": dict(self.transport.rejections),
            "received_bytes": sum(link["received_bytes"] for link in links.values()),
            "sent_bytes": sum(link["sent_bytes"] for link in links.values()),
        }


def needs_server(program: Node) -> bool:
    """Return True if a program requires one peer that gathers the messages of all peers."""
    return contains(
        program, lambda node: isinstance(node, Server) or (isinstance(node, Average) and node.by == "exact")
    )


def neighbors(network: Network, client: int, everyone: bool = False) -> list[int]:
    """Return the clients with a link to or from `client` at any step.

    With `everyone`, which programs with a server require, all clients are also linked to the peer `SERVER`.
    """
    possible = network.possible()
    linked = np.asarray((possible + possible.T).todense())[client] > 0
    if everyone:
        linked = linked | (np.arange(network.clients) == SERVER) | (client == SERVER)
    linked[client] = False
    return np.flatnonzero(linked).tolist()


def _description(
    recipe: ProgramRecipe, network: Network, state: PyTree, data: PyTree, key: PRNGKeyArray, step: int
) -> tuple[list[Any], list[Any]]:
    """Describe a run for comparison between parties: its messages and loops, and its numbers, network and key."""
    found = profile(recipe, state, data, network.clients)
    sent = [(place.path, repr(place.message)) for place in found.sendings]
    loops = [(path, loop.name, loop.at_most) for path, _, loop in found.loops]
    numbers = [float(leaf) for leaf in jax.tree.leaves(recipe) if is_number(leaf)]
    arrays = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(network) if eqx.is_array_like(leaf)]
    shown = re.sub(" at 0x[0-9a-f]+", "", repr(network))  # addresses of functions differ between processes
    return [sent, loops, step], [numbers, shown, arrays, np.asarray(jax.random.key_data(key)).tolist()]


def _hash(given: Any, size: int) -> bytes:
    return blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=size).digest()
