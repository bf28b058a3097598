"""Average numbers of all clients exactly, so that all clients hold the same answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_nonnegative, check_positive, no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.base.panels import Panel, Pictured
from hyperpush.base.status import Reason, Status, note_status
from hyperpush.data.sets import check_numbers
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.networks import Network
from hyperpush.programs import Average, Context, Node, ProgramRecipe
from hyperpush.verbs import result_panels as shown
from hyperpush.verbs.checks import check_engine_kind, check_network_kind
from hyperpush.verbs.costs import Costs
from hyperpush.verbs.run import Ran, run


@dataclass(frozen=True, repr=False)
class Mean(Pictured):
    """Result of `hp.average`: the mean over all clients, identical at every client.

    Attributes:
        value: The mean, with the tree structure and shapes of one client's values.
        status: Converged if the rounding error is within the tolerance.
        costs: Communication rounds, and the numbers and bytes that each client sent.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> hp.average(jnp.array([1.0, 2.0, 6.0]), hp.networks.Ring(3), key=0)
        Mean(3; converged (tolerance); 2 rounds, 3 floats sent per client)
    """

    value: PyTree
    status: Status
    costs: Costs

    def panels(self) -> list[Panel]:
        """Return the report's panels: the status, the costs, and every entry of the mean."""
        value = shown.by_client("Mean", ["all clients"], jax.tree.map(lambda leaf: leaf[None], self.value))
        return [shown.status_panel(self.status), shown.costs_panel(self.costs), *value]

    def __repr__(self) -> str:
        numbers = [np.size(leaf) for leaf in jax.tree.leaves(self.value)]
        shown = f"{float(jax.tree.leaves(self.value)[0]):.6g}" if numbers == [1] else f"{sum(numbers)} numbers"
        return f"Mean({shown}; {self.status}; {self.costs})"


class _Share(eqx.Module):
    """State of one client: its values and weight before the exchange, and the mean afterwards."""

    value: PyTree
    weight: Float[Array, "*clients"]
    size: Float[Array, "*clients"]  # weight times ‖values‖; the mean of these sizes scales the rounding error


@no_type_check
def average(
    values: PyTree,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    weights: Sequence[float] | Float[ArrayLike, " n"] | None = None,
    tolerance: float | None = None,
    engine: Engine = Simulate(),
) -> Mean:
    """Average numbers over all clients, so that every client holds the same result to the last bit.

    The result is the weighted mean Σ_i w_i v_i / Σ_i w_i of the clients' values v_i with their weights w_i. Messages
    are summed along a spanning tree of the network, and the mean is sent back. **Use it** for means, counts and scales
    that all clients need. **Avoid it** where a client must not see the sums of its children in the tree.

    Args:
        values: A pytree of numbers with clients on axis 0. With `hp.Peers(…)`, the numbers of one party, without that
            axis.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key; it determines random links.
        weights: One number per client, 0 or more, not all 0. None gives all clients equal weights. With
            `hp.Peers(…)`, one number: the weight of this party.
        tolerance: The largest rounding error to accept, relative to the mean, above 0. None takes 1e-4 in float32 and
            1e-10 in float64.
        engine: The engine that runs the clients. It must be able to average along a tree; `hp.Threads` with lost
            messages cannot.

    Returns:
        A `Mean` with `value`, `status` and `costs`. `status.converged` is False if values cancel so much that the
        rounding error exceeds the tolerance.

    Raises:
        InvalidInput: An argument is invalid; the message names it and the allowed values.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> found = hp.average(jnp.array([1.0, 2.0, 6.0]), hp.networks.DirectedRing(3), key=0, weights=[1, 1, 2])
        >>> float(found.value)
        3.75
    """
    check_network_kind(network)
    check_engine_kind(engine)
    check_positive("tolerance", tolerance, optional=True)
    if engine.no_tree:
        raise InvalidInput("engine", engine.no_tree, "an engine whose clients can average along a tree")
    states = _shares(values, weights, network.clients, engine.hosts_one)
    found = run(ProgramRecipe(_program, ()), {}, network, key=key, states=states, engine=engine)
    return _conclude(found, tolerance, engine.hosts_one, network.clients)


def _program() -> Node:
    def get(state: _Share, ctx: Context) -> tuple[PyTree, Array]:
        return (jax.tree.map(lambda leaf: state.weight * leaf, state.value), state.weight, state.size), jnp.ones(())

    def answer(state: _Share, means: Any, ctx: Context) -> _Share:
        values, weight, size = means
        return _Share(jax.tree.map(lambda leaf: leaf / weight, values), weight, size / weight)

    def put(state: _Share, after: _Share, mass: Any, ctx: Context) -> _Share:
        return after

    return Average(get, put, rounds=1, by="tree", answer=answer)


def _shares(values: PyTree, weights: Any, clients: int, alone: bool) -> _Share:
    """Check values and weights, and return the initial states of the clients."""
    shape = () if alone else (clients,)
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        if np.shape(leaf)[: len(shape)] != shape or np.asarray(leaf).dtype.kind not in "fiub":
            field, given = f"values{jax.tree_util.keystr(path)}", f"{np.asarray(leaf).dtype} of shape {np.shape(leaf)}"
            raise InvalidInput(
                field, given, f"numbers with {clients} clients on axis 0, or one party's own on hp.Peers"
            )
    if not jax.tree.leaves(values):
        raise InvalidInput("values", values, "at least one number per client")
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.zeros(()).dtype), values)
    check_numbers("values", tree, floating=True, one=alone)
    weight = _weights(weights, shape)
    flat = [leaf.reshape(*shape, -1) for leaf in jax.tree.leaves(tree)]
    return _Share(tree, weight, weight * jnp.linalg.norm(jnp.concatenate(flat, axis=-1), axis=-1))


def _weights(given: Any, shape: tuple[int, ...]) -> Array:
    if given is None:
        return jnp.ones(shape)
    array = np.asarray(given)
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise InvalidInput("weights", given, f"{shape[0]} numbers, one per client" if shape else "one number")
    for number, each in enumerate(array.reshape(-1)):
        check_nonnegative(f"weights[{number}]" if shape else "weights", float(each))
    if shape and not array.any():
        raise InvalidInput("weights", "only zeros", "at least one weight above 0")
    return jnp.asarray(array, jnp.zeros(()).dtype)


def _conclude(run: Ran, tolerance: float | None, alone: bool, clients: int) -> Mean:
    found: _Share = jax.tree.map(np.asarray, run.states)
    value = found.value if alone else jax.tree.map(lambda leaf: leaf[0], found.value)
    size, kind = float(np.max(found.size)), found.size.dtype
    length = float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(value))))
    if tolerance is None:
        tolerance = 1e-4 if kind == np.float32 else 1e-10
    # Each of the n sums has a rounding error of up to half an eps times the sum of sizes.
    rounding = 0.5 * float(np.finfo(kind).eps) * clients * size
    error = rounding / length if length > 0 else 0.0 if size == 0 else float("inf")
    reason = Reason.TOLERANCE if error <= tolerance else Reason.INACCURATE
    status = Status(reason.converged, reason.text, error=error if np.isfinite(error) else None)
    note_status(status)
    return Mean(value, status, run.costs)
