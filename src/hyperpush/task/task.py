"""A task: one client's costs, the starts of all clients, and their data."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.base import processes
from hyperpush.base.arrays import copies
from hyperpush.base.checks import check_arguments, check_boolean, no_type_check
from hyperpush.base.errors import InvalidInput, unknown
from hyperpush.data import sets
from hyperpush.data.batches import Data, Ragged, number_examples
from hyperpush.networks.link_estimates import LinkEstimates
from hyperpush.privacy.mechanisms import Gaussian, Laplace, Mechanism
from hyperpush.programs import one_client
from hyperpush.programs.recipe import what_is_read
from hyperpush.task.cost_checks import as_cost, check_cost, check_function, check_rows, find_hypers
from hyperpush.task.private_problem import Noise, PrivateProblem
from hyperpush.task.problem import Cost, JointCost, Penalty, Problem
from hyperpush.task.starts import PerClient, PerExample, is_per_example, split_start, tree_of


@dataclass(frozen=True)
class LastPoint:
    """State at the end of a run, for the next run on the same network.

    It holds estimates of the links, the network's step, and the record of the training.
    """

    network: Any
    links: LinkEstimates | None
    step: int
    iteration: Mapping[str, Any] = field(default_factory=dict)  # record of the inner solver; empty without training
    start: float | None = None  # root mean square of ‖params‖ over the clients before training; None: not known


class Task:
    """One client's costs and start, and all clients' data: the input of `hp.train`, `hp.solve` and similar functions.

    All clients lower the mean over clients of F_i(x*(λ), λ_i), where x*(λ) minimizes the mean of f_i(x, λ_i). f_i is
    the mean of client i's `inner` losses on `train` plus `penalty`. F_i is the mean of its `outer` losses on the data
    set `outer_on` plus `outer_penalty`.

    Args:
        inner: One client's training cost, `inner(params, hyper, batch)`: one loss per example (the library takes the
            mean and leaves padding out) or one scalar. A pair `(model, loss)` means
            `loss(model(params, hyper, batch), batch)`, for methods that use Gauss–Newton products.
        outer: One client's outer cost, in the same form; or a joint cost of all clients such as `hp.big_fed.Cosine`,
            for methods that can differentiate it.
        params: One client's params to start from: any pytree of floating-point arrays, or an Equinox module.
            Use `hp.per_client(tree)` if clients start at different points.
        hypers: One client's hypers to start from, in the same form. Use `hp.per_example(train)` for one hyper per
            training example.
        train: Examples of the inner cost: a pytree of arrays with clients on axis 0 and examples on axis 1, a list
            with one pytree per client (of any sizes), or `hp.tasks.clients(load, n)`.
        validation: Examples that the outer level fits, in the same form.
        penalty: `penalty(params, hyper)`, added to the inner cost once, after the mean; it does not depend on examples.
        outer_penalty: `outer_penalty(params, hyper)`, added to the outer cost in the same way.
        holdout: Examples that neither the inner nor the outer level fits, for `hp.EarlyStopping` and `hp.tune`.
        test: Examples for reported scores, which must not affect any choice.
        data: Further data sets by name.
        outer_on: The data set that the outer level fits; None: `"validation"`.
        common: True if all clients must agree on one hyper.
        weights: `"clients"`: all clients have equal weight. `"examples"`: all examples have equal weight. Then the mean
            losses of client i are multiplied by n·N_i/ΣN_k, for n clients. N_i counts the examples of `train` for the
            inner cost, and of the outer level's data set for the outer cost. Penalties are not multiplied. All counts
            must be known, so real parties must choose `"clients"`.
        names: The clients' names in results, files and figures; None: their numbers.

    Raises:
        InvalidInput: An argument does not fit; the message names it and what is allowed.

    Example:
        Three clients share one number x; each tunes the rate of its own penalty.

        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> def loss(x, log_rate, batch):  # one loss per example
        ...     return (x - batch) ** 2
        >>> def penalty(x, log_rate):
        ...     return jnp.exp(log_rate) * x**2
        >>> train, validation = jnp.ones((3, 8)), jnp.zeros((3, 5))  # clients on axis 0
        >>> hp.Task(inner=loss, penalty=penalty, outer=loss, params=0.0, hypers=0.0, train=train, validation=validation)
        Task(3 clients, 1 params each; train 8, validation 5 examples; the outer level fits 'validation')
    """

    def __new__(cls, *args: Any, **options: Any):
        # Before __init__, where Python would raise its own error for a misspelled option.
        signature = inspect.signature(cls.__init__)
        own = signature.replace(parameters=[each for name, each in signature.parameters.items() if name != "self"])
        if args or options:  # copying makes a task without arguments
            check_arguments("Task", own, args, options)
        return super().__new__(cls)

    @no_type_check
    def __init__(
        self,
        *,
        inner: Cost | tuple[Callable[..., Any], Callable[..., Any]],
        outer: Any,
        params: PyTree,
        hypers: PyTree,
        train: PyTree,
        validation: PyTree = None,
        penalty: Penalty | None = None,
        outer_penalty: Penalty | None = None,
        holdout: PyTree = None,
        test: PyTree = None,
        data: Mapping[str, PyTree] | None = None,
        outer_on: str | None = None,
        common: bool = False,
        weights: Literal["clients", "examples"] = "clients",
        names: Sequence[str] | None = None,
    ):
        given = {"train": train, "validation": validation, "holdout": holdout, "test": test}
        self._sets = sets.collect(given, data)
        if isinstance(outer, JointCost) and outer.own is None and validation is None and outer_on is None:
            outer_on = "train"  # its outer level does not use examples
        self.outer_on = sets.outer_set(outer_on, self._sets)
        self.inner, self.outer = as_cost("inner", inner), as_cost("outer", outer)
        self.penalty, self.outer_penalty = (
            check_function("penalty", penalty),
            check_function("outer_penalty", outer_penalty),
        )
        self.common = check_boolean("common", common)
        if weights not in ("clients", "examples"):
            raise unknown("weights", str(weights), ("clients", "examples"))
        self.weights = weights
        self.clients = sets.count_clients(self._sets)
        if self.clients < 1:
            raise InvalidInput("train", "data of no client", "examples of at least one client, on axis 0")
        self.names = _check_names(names, self.clients)
        self.is_multi_seed = False  # True for the task of a multi-seed result, which has no single end point
        self.owner: int | None = None  # number of the party whose task this is; None: the task of all clients
        self.point: LastPoint | None = None
        self.privacy: Noise | None = None
        self.spent: Any = None  # `Budget` of the runs of a private task that led to its point
        self._params, self.fixed = split_start("params", params)
        self._hypers, other = split_start("hypers", hypers)
        if other is not None:
            raise InvalidInput("hypers", f"{other} among the numbers", "a pytree of floating-point numbers")
        # True for the leaves of the hypers with one number per training example.
        leaves = jax.tree.leaves(tree_of(self._hypers), is_leaf=is_per_example)
        self.by_example = tuple(isinstance(leaf, PerExample) for leaf in leaves)
        self._made = True  # attributes are frozen from here on

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self):
            allowed = "a new task: tasks do not change; task.at(…) starts elsewhere, task.replace(…) has other costs"
            raise InvalidInput(f"task.{name}", value, allowed)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise InvalidInput(f"task.{name}", "deleted", "a task as it was made: tasks do not change")

    # ------------------------------------------------------------------ data

    @property
    def data(self) -> Data:
        """All data sets; in one party's task they lack the client axis."""
        return _fresh(self._data)

    @cached_property
    def _data(self) -> Data:
        with jax.ensure_compile_time_eval():  # it is kept, and its first use may be inside jax.jit
            found = {name: each.of(self.owner) for name, each in self._sets.items()}
            for name, tree in found.items():
                sets.check_examples(name, tree, self.clients if self.owner is None else None)
            weighted = {"train", self.outer_on} if self.weights == "examples" else set()
            numbered = {*weighted, *({"train"} if any(self.by_example) else ())}
            for name in numbered:
                factors = self._factors(name, found[name]) if name in weighted else None
                found[name] = number_examples(found[name], one=self.owner is not None, weights=factors)
            return Data(found, self.outer_on)

    def _factors(self, name: str, tree: PyTree) -> Any:
        """Return each client's factor of its cost on a data set, so that all examples have equal weight."""
        shares = self._shares(name, tree)
        if shares is None:
            given = "'examples', but the numbers of examples of all clients are not known"
            raise InvalidInput("weights", given, "'clients'; or data of all clients in one process, as arrays or lists")
        factors = jnp.asarray(self.clients * shares, jnp.zeros(()).dtype)
        return factors if self.owner is None else factors[self.owner]

    def _shares(self, name: str, tree: PyTree) -> Any:
        """Return each client's share of the examples of a data set; None if not all numbers are known."""
        counts = sets.given_counts(self._sets[name].given)
        if self.owner is None:
            counts = sets.example_counts(tree)
        elif isinstance(self._sets[name], sets.OwnSet):
            counts = None
        if counts is None or len(counts) != self.clients:
            return None
        return np.asarray(counts, np.float64) / np.sum(counts)

    @property
    def train(self) -> PyTree:
        """The training examples."""
        return self.data.train

    @property
    def most_examples(self) -> int | None:
        """The largest number of training examples of any client; None if a party knows only its own."""
        return self._sets["train"].most

    @property
    def validation(self) -> PyTree:
        """The examples that the outer level fits."""
        return self.data.outer

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Each client's share of the weight in the inner problem; None if a party knows only its own examples."""
        if self.weights == "clients":
            return (1 / self.clients,) * self.clients
        found = self._shares("train", self.data.train)
        return None if found is None else tuple(found.tolist())

    # ---------------------------------------------------------------- starts

    @property
    def params(self) -> PyTree:
        """All clients' params to start from, with clients on axis 0; in one party's task, without the client axis."""
        return _fresh(self._all_params)

    @cached_property
    def _all_params(self) -> PyTree:
        with jax.ensure_compile_time_eval():
            return self._spread("params", self._params)

    @property
    def hypers(self) -> PyTree:
        """All clients' hypers to start from, with clients on axis 0; in one party's task, without the client axis."""
        return _fresh(self._all_hypers)

    @cached_property
    def _all_hypers(self) -> PyTree:
        with jax.ensure_compile_time_eval():
            return self._spread("hypers", self._hypers)

    def _spread(self, field: str, start: Any) -> PyTree:
        if isinstance(start, PerClient):
            sets.check_clients(field, start.tree, self.clients)
            tree = jax.tree.map(jnp.asarray, start.tree)
            tree = tree if self.owner is None else jax.tree.map(lambda leaf: leaf[self.owner], tree)
            return self._clear_padding(field, tree)

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, PerExample):
                return leaf
            if leaf.counts is not None and self.owner is None:
                self._check_counts(leaf.counts)
            return jnp.full(sets.rows(self.data.train, self.owner is not None), leaf.start, jnp.zeros(()).dtype)

        tree = jax.tree.map(fill, start, is_leaf=is_per_example)
        if self.owner is None and processes.count() > 1 and self.clients % jax.device_count() == 0:
            tree = processes.stack(lambda client: tree, self.clients)
        elif self.owner is None:
            tree = jax.tree.map(lambda leaf: copies(leaf, self.clients), tree)
        return self._clear_padding(field, tree)

    def _clear_padding(self, field: str, tree: PyTree) -> PyTree:
        has_rows = field == "hypers" and any(self.by_example)
        return sets.clear_padding(tree, self.by_example, self.data.train) if has_rows else tree

    def _check_counts(self, counts: tuple[int, ...]) -> None:
        """Refuse `hp.per_example` hypers whose counts differ from the task's training examples.

        The error names the first client that differs.
        """
        if self.common and len(set(counts)) > 1:
            given = f"one for each example of clients with {min(counts)} to {max(counts)} of them, and common=True"
            raise InvalidInput("hypers", given, "common=False: clients cannot agree on different numbers of hypers")
        if len(counts) != self.clients:
            allowed = f"hp.per_example of the task's own training examples, of {self.clients} clients"
            raise InvalidInput("hypers", f"one for each example of {len(counts)} clients", allowed)
        own = sets.example_counts(self.data.train)
        if len(own) != self.clients:  # one of several processes does not see all counts
            return
        for name, given, count in zip(self.names, counts, own, strict=True):
            if given != count:
                allowed = f"hp.per_example of the task's own training examples: client {name!r} has {count}"
                raise InvalidInput("hypers", f"one for each of {given} examples of client {name!r}", allowed)

    @property
    def joint(self) -> bool:
        """True if the outer cost is a joint cost of all clients."""
        return isinstance(self.outer, JointCost)

    @property
    def problem(self) -> Problem:
        """The costs in the form that methods take."""
        costs = (self.inner, self.outer, self.penalty, self.outer_penalty)
        plain = Problem(*costs, self.fixed, self.by_example, self.outer_on, what_is_read(costs))
        if self.privacy is None:
            return plain
        return PrivateProblem.of(plain, self.privacy, 0 if self.spent is None else sum(self.spent.releases.values()))

    # ------------------------------------------------------- tasks made of it

    def replace(self, **changes: Any) -> Self:
        """Return the same task with other attributes; values that depend on them are computed anew.

        Data sets and starts cannot be replaced: make a new task, or use `at`.
        """
        for name in changes:
            if name in _COMPUTED or name not in vars(self):
                known = [key for key in vars(self) if not key.startswith("_") and key not in _COMPUTED]
                raise unknown("Task.replace", name, known)
        self._check_privacy_stays(changes)
        new = object.__new__(type(self))  # a subclass keeps its own attributes
        kept = {key: value for key, value in vars(self).items() if key not in _COMPUTED}
        vars(new).update(kept | changes)
        return new

    def _check_privacy_stays(self, changes: Mapping[str, Any]) -> None:
        """Raise `InvalidInput` if changes remove the privacy, or the count of releases, of a private task."""
        for name in ("privacy", "spent"):
            if self.privacy is not None and name in changes and changes[name] is None and getattr(self, name):
                allowed = "a private task, whose releases stay counted; without privacy make a new hp.Task(…)"
                raise InvalidInput(f"task.{name}", None, allowed)

    def at(self, params: PyTree = None, hypers: PyTree = None, point: LastPoint | None = None) -> Self:
        """Return the same task from another start: params and hypers in the form of results, clients on axis 0.

        Raises:
            InvalidInput: The task is private: numbers from elsewhere may reveal its data without noise.
        """
        if self.privacy is not None and (params is not None or hypers is not None):
            given = "params or hypers from elsewhere on a private task"
            allowed = "a start chosen without data before task.private(…); or result.task to continue a run"
            raise InvalidInput("task.at", given, allowed)
        return self._moved(params, hypers, point)

    def _moved(self, params: PyTree = None, hypers: PyTree = None, point: LastPoint | None = None) -> Self:
        """Return the task that starts at the end point of a run."""
        changes: dict[str, Any] = {"point": point}
        for name, tree in (("_params", params), ("_hypers", hypers)):
            if tree is not None:
                arrays = eqx.filter(tree, eqx.is_array)
                changes[name] = PerClient(arrays) if self.owner is None else arrays
        return self.replace(**changes)

    def with_l2(self, rate: float) -> "Task":
        """Return the same task with ½·rate·‖params‖² added to every inner cost."""
        return self.replace(penalty=self.problem.with_l2(rate).penalty)

    @no_type_check
    def private(
        self,
        *,
        clip: float,
        noise: Mechanism,
        curvature: float | None = None,
        coupling: float | None = None,
        hypers: Literal["shared", "per example"] = "shared",
    ) -> "Task":
        """Return the same task with local differential privacy: all accesses to data are clipped and get noise.

        Every gradient or product that a method computes from data is a *release*: a mean of parts of N examples, each
        of norm at most C, plus noise. The noise has the scale σΔ, where σ is the scale of `noise`. Δ is the largest
        change of the mean by one example: 2C/N, or √dim·2C/N in the ℓ1 norm for Laplace noise. So a release costs 1/σ,
        for any C, N and dimension. Clients continue from their releases, so later computations cost no more privacy. A
        method that reveals data in another way raises an error with file and line. Penalties do not depend on examples,
        so they are neither clipped nor noised. `hp.budget(task, method)` returns the cost of a run, and
        `hp.within_budget(epsilon, delta, task, method)` finds the noise for an ε.

        Costs must return one loss per example. The number of a client's examples is public. The ε of a client holds for
        ideal real-valued noise: see `hp.privacy.ASSUMPTION`.

        Args:
            clip: C of gradients, above 0; ∂_x F and ∂_λ F are clipped as one vector. A larger C means more noise and
                less bias; the median norm of an example's gradient is a common choice.
            noise: `hp.privacy.Gaussian(scale)` or `hp.privacy.Laplace(scale)`, in units of Δ. Larger scales cost less
                privacy. A schedule counts the releases of a step within the loop around it, from 0.
            curvature: C/‖v‖ of products ∂²_xx f v, above 0. The vector v is public, as it is made of earlier releases.
                None is for methods without products, such as inner solvers.
            coupling: C/‖v‖ of products ∂²_λx f v, above 0. None is for methods without these products, and for
                `hypers="per example"`.
            hypers: `"shared"`: the hypers are public, as they are made of releases. `"per example"`: products
                ∂²_λx f v are without noise, and cost nothing. It is for hypers of `hp.per_example` that are never sent
                and that the outer optimizer updates one by one.

        Raises:
            InvalidInput: An option is out of range, or does not fit the task.
        """
        if self.privacy is not None:
            raise InvalidInput("task.private", "a private task", "a task that is not private yet")
        if self.point is not None:
            allowed = "a task before training, or one with a start that does not depend on data: training had no noise"
            raise InvalidInput("task.private", "a trained task", allowed)
        if self.weights != "clients":
            raise InvalidInput("task.private", f"weights={self.weights!r}", "weights='clients' on a private task")
        if not isinstance(noise, Laplace | Gaussian):
            raise InvalidInput("task.private.noise", noise, "hp.privacy.Gaussian(…) or hp.privacy.Laplace(…)")
        made = Noise(noise, clip, curvature, coupling, hypers)
        if made.hypers == "per example" and not all(self.by_example):
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.hypers)]
            shared = [path for path, rows in zip(paths, self.by_example, strict=True) if not rows and path]
            others = f"; {', '.join(shared)} are not" if shared else ""
            allowed = f"'shared'; 'per example' is for hypers that are all of hp.per_example(train){others}"
            raise InvalidInput("task.private.hypers", hypers, allowed)
        if made.hypers == "per example" and self.common:
            allowed = "'shared' for a task with common=True, whose hypers are sent"
            raise InvalidInput("task.private.hypers", hypers, allowed)
        return self.replace(privacy=made)

    def client(self, name: str | int) -> int:
        """Return the number of the client with this name or number."""
        if isinstance(name, int | np.integer) and not isinstance(name, bool) and 0 <= name < self.clients:
            return int(name)
        if str(name) not in self.names:
            raise unknown("client", str(name), self.names)
        return self.names.index(str(name))

    def for_client(self, name: str | int, data: Mapping[str, PyTree] | None = None) -> "Task":
        """Return one party's task: the same costs, its own start, and its own data only.

        Args:
            name: Name or number of the party.
            data: The party's examples by data set, without a client axis; None takes its examples from the task.
        """
        changes: dict[str, Any] = {"owner": self.client(name)}
        if data is not None:
            missing = sorted({"train", self.outer_on} - set(data))
            if missing:
                raise InvalidInput("data", sorted(data), f"data sets with {' and '.join(missing)} among them")
            changes["_sets"] = {key: sets.OwnSet(key, tree) for key, tree in data.items()}
        return self.replace(**changes)

    # ----------------------------------------------------------------- checks

    @cached_property
    def uses_hypers(self) -> tuple[str, ...]:
        """Names of the costs and penalties that use the hypers.

        Reading it raises `InvalidInput` if a cost, start or data set does not fit; the message names it.
        """
        try:
            return self._uses()
        except InvalidInput as error:
            starts = {"params": self.params, "hypers": self.hypers}
            hint = "" if self.owner is not None else _axis_hint(starts, self.clients)
            if not hint or not error.field.startswith("task."):
                raise
            raise InvalidInput(error.field, error.given, error.allowed + hint) from error

    def _uses(self) -> tuple[str, ...]:
        one = self.owner is not None
        for name, tree in (("params", self.params), ("hypers", self.hypers), *self.data.sets.items()):
            sets.check_numbers(name, tree, floating=name in ("params", "hypers"), one=one)
        params, hypers, data = (client_shapes(self, tree) for tree in (self.params, self.hypers, self.data))
        found = find_hypers(self.problem, params, hypers, data)
        for name, cost, tree in (("inner", self.inner, self.data.train), ("outer", self.outer, self.data.outer)):
            if isinstance(tree, Ragged) and self.owner is None and processes.count() == 1:
                check_rows(f"task.{name}", self.problem, cost, self.params, self.hypers, tree)
        return found

    def check_metric(self, field: str, metric: Cost, on: str) -> None:
        """Raise `InvalidInput` if a metric fails on the examples of a data set, or its result has a wrong form."""
        if on not in self.data.sets:
            raise unknown(field, on, self.data.sets)
        shapes = [client_shapes(self, tree) for tree in (self.params, self.hypers, self.data.sets[on])]
        check_cost(field, self.problem, metric, *shapes, metric=True)

    def check(self) -> None:
        """Raise `InvalidInput` if costs, starts and data do not fit each other; the message names the one at fault."""
        _ = self.uses_hypers

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name} {sets.describe(tree, self.owner is not None)}" for name, tree in self._data.sets.items()
        )
        who = f"{self.clients} clients" if self.owner is None else f"client {self.names[self.owner]!r}"
        numbers = sum(leaf.size for leaf in jax.tree.leaves(self.params)) // (self.clients if self.owner is None else 1)
        return f"Task({who}, {numbers:,} params each; {sizes} examples; the outer level fits {self.outer_on!r})"


_COMPUTED = ("_data", "_all_params", "_all_hypers", "uses_hypers")


def _fresh(tree: Any) -> Any:
    """Return the same arrays in new containers, so that writing to a dict or list does not change the task."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(leaves)


def _axis_hint(starts: Mapping[str, PyTree], clients: int) -> str:
    """Return a hint if a start seems to hold all clients: then axis 1 of its copies has the clients' length, too."""
    for name, tree in starts.items():
        if any(leaf.shape[1:2] == (clients,) for leaf in jax.tree.leaves(tree)):
            return f"; if {name} was given with the {clients} clients on axis 0, write {name}=hp.per_client(…)"
    return ""


# ----------------------------------------------------------------------- names and costs


def _check_names(names: Sequence[str] | None, clients: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(clients)))
    listed = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else ()
    texts = all(isinstance(name, str) and name for name in listed)
    if not texts or not len(listed) == len(set(listed)) == clients:
        raise InvalidInput("names", names, f"a list of {clients} different texts")
    return listed


def client_shapes(task: Task, tree: PyTree) -> PyTree:
    """Return the shapes of one client's part of a tree of the task."""
    return one_client(tree) if task.owner is None else jax.eval_shape(lambda: tree)
