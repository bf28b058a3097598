"""Data sets of a task: arrays of all clients, a list of clients, or a loader by client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from hyperpush.base import processes
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.data.batches import Ragged, ragged

RESERVED = ("train", "validation", "holdout", "test")


@dataclass(frozen=True)
class Clients:
    """Data that are loaded client by client, so that a process can hold the data of its own clients only.

    Args:
        load: `load(i)` returns the examples of client i: a pytree of arrays with the examples on axis 0.
        count: Number of clients.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def load(client):
        ...     return jnp.full(5 + client, float(client))
        >>> rows = hp.tasks.clients(load, 3)
        >>> task = hp.Task(inner=lambda x, h, a: (x - a) ** 2, outer=lambda x, h, a: (x - h - a) ** 2, params=0.0,
        ...                hypers=0.0, train=rows, validation=rows)
        >>> task.for_client(2).train.tolist()
        [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """

    load: Callable[[int], PyTree]
    count: int

    def stack(self, field: str) -> PyTree:
        """Load and stack all clients' data; each of several processes loads the data of its own clients."""
        if processes.count() > 1 and self.count % jax.device_count() == 0:
            return processes.stack(self.one, self.count)
        return stack_clients(field, [self.one(client) for client in range(self.count)])

    def one(self, client: int) -> PyTree:
        """Load one client's data."""
        try:
            return self.load(client)
        except Exception as error:  # a user's loader may raise anything: name the client and the error
            said = f"a loader that fails for client {client} with {type(error).__name__}: {error}"
            raise InvalidInput("data", said, "a function of a client's number that returns its examples") from error


@dataclass(frozen=True, eq=False)
class DataSet:
    """One data set in the form that the user gave, which returns the examples of all clients or of one."""

    name: str
    given: Any

    def __post_init__(self):
        if callable(self.given) and not isinstance(self.given, Clients):
            allowed = "examples, a list of clients' examples, or hp.tasks.clients(load, n)"
            raise InvalidInput(self.name, self.given, allowed)
        if isinstance(self.given, list) and not self.given:
            raise InvalidInput(self.name, [], "the examples of at least one client")

    @property
    def clients(self) -> int:
        """The number of clients."""
        if isinstance(self.given, Clients):
            return self.given.count
        if isinstance(self.given, list):
            return len(self.given)
        leaves = jax.tree.leaves(self.given)
        if not leaves or not jnp.shape(leaves[0]):
            allowed = "arrays with the clients on axis 0, or a list with one entry per client"
            raise InvalidInput(self.name, "no arrays", allowed)
        return jnp.shape(leaves[0])[0]

    @cached_property
    def all(self) -> PyTree:
        """All clients' examples, stacked on axis 0."""
        if isinstance(self.given, Clients):
            return self.given.stack(self.name)
        return stack_clients(self.name, self.given) if isinstance(self.given, list) else arrays(self.given)

    @property
    def most(self) -> int | None:
        """The largest number of examples of any client; None if it is not known here."""
        counts = given_counts(self.given)
        return None if counts is None else max(counts)

    def of(self, client: int | None) -> PyTree:
        """Return one client's examples; None returns the examples of all clients."""
        if client is None:
            return self.all
        if isinstance(self.given, Clients):
            return arrays(self.given.one(client))
        if isinstance(self.given, list):
            return arrays(self.given[client])
        return jax.tree.map(lambda leaf: jnp.array(leaf[client]), self.given)


class OwnSet(DataSet):
    """One party's own examples, without a client axis."""

    @property
    def most(self) -> None:
        return None

    def of(self, client: int | None) -> PyTree:
        return arrays(self.given)


def arrays(tree: PyTree) -> PyTree:
    """Return the same examples as JAX arrays."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        found = np.asarray(leaf)
        if found.dtype.kind not in "biufc":
            raise InvalidInput("data", f"an array of {found.dtype}", "arrays of numbers")
        narrow = jnp.array(found)  # a copy: JAX may share memory with NumPy, which could be written to later
        if found.dtype.kind in "iu" and not np.array_equal(np.asarray(narrow), found):
            allowed = f"whole numbers that fit into {narrow.dtype}; switch on jax_enable_x64 for larger ones"
            raise InvalidInput("data", f"whole numbers up to {np.abs(found).max()}", allowed)
        return narrow

    return jax.tree.map(one, tree)


def stack_clients(field: str, clients: Sequence[PyTree]) -> PyTree:
    """Stack one pytree of examples per client; return `Ragged` data if clients own different numbers of examples."""
    made = ragged(clients, field)
    everybody_full = np.all(np.asarray(made.counts) == jax.tree.leaves(made.examples)[0].shape[1])
    return made.examples if everybody_full else made


def collect(given: Mapping[str, PyTree], more: Mapping[str, PyTree] | None) -> dict[str, DataSet]:
    """Return the data sets of a task by name."""
    if more is not None and not isinstance(more, Mapping):
        raise InvalidInput("data", type(more).__name__, "a dict of further data sets by name")
    for name in more or {}:
        if name in RESERVED or not str(name).isidentifier():
            raise InvalidInput("data", name, f"names of data sets other than {', '.join(RESERVED)}, which are options")
    found = {name: DataSet(name, tree) for name, tree in {**given, **(more or {})}.items() if tree is not None}
    if "train" not in found:
        raise InvalidInput("train", None, "the examples of the inner cost")
    return found


def outer_set(outer_on: str | None, found: Mapping[str, DataSet]) -> str:
    """Return the name of the data set that the outer level fits."""
    if outer_on is None and "validation" not in found:
        allowed = "the examples that the outer level fits, or outer_on= with the name of another data set"
        raise InvalidInput("validation", None, allowed)
    chosen = "validation" if outer_on is None else outer_on
    if chosen not in found:
        raise unknown("outer_on", str(chosen), found)
    if chosen == "test":
        raise InvalidInput("outer_on", chosen, "another data set: nothing may be fitted to the test examples")
    return chosen


def count_clients(found: Mapping[str, DataSet]) -> int:
    """Return the number of clients; raise `InvalidInput` for data sets with different numbers of clients."""
    clients = found["train"].clients
    for name, each in found.items():
        if each.clients != clients:
            allowed = f"{clients} clients, as in train"
            if any(isinstance(found[given].given, list) for given in ("train", name)):
                allowed += "; a list has one entry per client, arrays of all clients are a tuple"
            raise InvalidInput(name, f"{each.clients} clients", allowed)
    return clients


def check_examples(name: str, tree: PyTree, clients: int | None) -> None:
    """Raise `InvalidInput` for arrays without clients on axis 0, or clients without examples.

    `clients` is the number of clients, None for one party's data.
    """
    if clients is not None:
        check_clients(name, tree, clients)
    if isinstance(tree, Ragged) and np.any(processes.visible(tree.counts) < 1):
        empty = np.nonzero(processes.visible(tree.counts) < 1)[0][:5].tolist()
        raise InvalidInput(name, f"no examples at clients {empty}", "at least 1 example per client")
    axis = 0 if clients is None else 1
    if any(leaf.shape[axis : axis + 1] == (0,) for leaf in jax.tree.leaves(tree)):
        raise InvalidInput(name, "0 examples per client", "at least 1 example per client")


def check_clients(name: str, tree: PyTree, clients: int) -> None:
    """Raise `InvalidInput` for arrays with another number of clients on axis 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != clients:
            raise InvalidInput(f"{name}{jax.tree_util.keystr(path)}", shape, f"{clients} clients on axis 0")


def check_numbers(name: str, tree: PyTree, *, floating: bool, one: bool) -> None:
    """Raise `InvalidInput` for numbers that are not finite.

    With `floating`, for params and hypers, also refuse all types except float32 and float64. With `one`, the tree is
    one client's, without a client axis.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        field = f"{name}{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise InvalidInput(field, "a JAX key", "numbers; jax.random.key_data(key) makes numbers of a key")
        array = processes.visible(leaf)
        if floating and not jnp.issubdtype(array.dtype, jnp.floating):
            raise InvalidInput(field, f"numbers of type {array.dtype}", "real floating-point numbers")
        if floating and array.dtype not in (np.float32, np.float64):
            allowed = "float32 or float64: solvers and statuses need their precision; a cost may compute in less"
            raise InvalidInput(field, f"numbers of type {array.dtype}", allowed)
        if jnp.issubdtype(array.dtype, jnp.inexact) and not np.all(np.isfinite(array)):
            where = "" if one else f" at clients {np.unique(np.nonzero(~np.isfinite(array))[0])[:5].tolist()}"
            raise InvalidInput(field, f"NaN or infinity{where}", "finite numbers")


def rows(tree: PyTree, one: bool) -> int:
    """Return the number of rows of a client's examples, including padding."""
    return jax.tree.leaves(getattr(tree, "examples", tree))[0].shape[0 if one else 1]


def clear_padding(tree: PyTree, by_example: tuple[bool, ...], train: PyTree) -> PyTree:
    """Set hypers of padding to 0, so that only hypers of real examples count in a sum."""
    if not isinstance(train, Ragged):
        return tree
    axis = train.counts.ndim  # axis of examples, after that of clients if there is one

    def clear(leaf: Array) -> Array:
        own = np.arange(leaf.shape[axis]) < train.counts[..., None]
        return jnp.where(own.reshape(own.shape + (1,) * (leaf.ndim - own.ndim)), leaf, 0)

    return _map_rows(clear, tree, by_example)


def cut_padding(tree: PyTree, by_example: tuple[bool, ...], train: PyTree, client: int, axis: int = 0) -> PyTree:
    """Return one client's hypers without the entries of padding; `axis` is the axis of examples."""
    counts = example_counts(train) if isinstance(train, Ragged) and any(by_example) else ()
    if client >= len(counts):  # a process sees only some counts
        return tree
    return _map_rows(lambda leaf: leaf[(slice(None),) * axis + (slice(counts[client]),)], tree, by_example)


def _map_rows(function: Callable[[Any], Any], tree: PyTree, by_example: tuple[bool, ...]) -> PyTree:
    """Apply a function to the leaves of hypers with one number per example; other leaves stay unchanged."""
    leaves, structure = jax.tree.flatten(tree)
    changed = [function(leaf) if rows else leaf for leaf, rows in zip(leaves, by_example, strict=True)]
    return structure.unflatten(changed)


def example_counts(tree: PyTree) -> Int[np.ndarray, " n"]:
    """Return each client's number of examples."""
    if isinstance(tree, Ragged):
        return processes.visible(tree.counts)
    clients, rows = jax.tree.leaves(tree)[0].shape[:2]
    return np.full(clients, rows)


def given_counts(given: PyTree) -> tuple[int, ...] | None:
    """Return each client's number of examples, for data in the form that a task takes; None if only a loader knows."""
    if isinstance(given, list):
        return tuple(jnp.shape(jax.tree.leaves(client)[0])[0] for client in given)
    leaves = [] if isinstance(given, Clients) else jax.tree.leaves(given)
    shape = jnp.shape(leaves[0]) if leaves else ()
    return (shape[1],) * shape[0] if len(shape) > 1 else None


def describe(tree: PyTree, one: bool) -> str:
    """Return the number of examples per client as text, a range if clients differ."""
    if isinstance(tree, Ragged) and not one:
        counts = processes.visible(tree.counts)
        return f"{counts.min()} to {counts.max()}"
    return str(rows(tree, one))
