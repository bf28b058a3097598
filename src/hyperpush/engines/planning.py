"""What a run would take, before anything of it runs.

The experiment runs with engines that compute nothing: each call is profiled and answered with ones of the right shape.
What an experiment does between the calls it does for real.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hyperpush.errors import InvalidInput
from hyperpush.privacy import ASSUMPTION

LARGE = 1 << 24  # bytes
PRODUCT = 1500  # rows of the matrices whose product tells how fast the machine is
OVERHEAD = 2e-6  # seconds that a leaf of a program takes however little it computes
_IMPLEMENTATION = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True)
class Piece:
    """One call of an engine, at most: loops that clients agree to end may end earlier."""

    call: str  # the names of its loops
    clients: int
    parameters: int  # numbers in one client's state, where it is largest
    rounds: int
    bytes_per_round: float  # that a client sends
    megabytes_moved: float  # between processes
    megabytes_per_process: float  # states, which loops hold twice, and data
    operations: float  # additions and multiplications of all clients


@final
@dataclass
class Planner:
    """The calls of engines in a run that is planned for so many processes."""

    processes: int = 1
    pieces: list[Piece] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Engines answer to this planner in the block."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before


_current: Planner | None = None


def current() -> Planner | None:
    """The planner, while a run is only planned."""
    return _current


def ones(shapes: PyTree) -> PyTree:
    """Arrays of these shapes that are not zero, so that ratios of them exist; large ones take no memory."""

    def one(leaf: Any) -> Any:
        if size(leaf) > LARGE and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.broadcast_to(np.ones((), leaf.dtype), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0, impl=_IMPLEMENTATION[str(leaf.dtype)]), leaf.shape)
        return jnp.ones(leaf.shape, leaf.dtype)

    return jax.tree.map(one, shapes)


def size(tree: PyTree) -> int:
    """Bytes of the arrays of a pytree."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 8) for leaf in leaves)


def operations(f: Callable[..., Any], *shapes: PyTree) -> float:
    """Additions and multiplications of a function, a loop in it counted once; 0 where the compiler does not tell."""
    try:
        found: Any = jax.jit(f).lower(*shapes).cost_analysis()
        return float((found or {}).get("flops", 0.0))
    except Exception:  # an estimate is not worth an end
        return 0.0


def speed() -> float:
    """Additions and multiplications per second in a product of two matrices."""
    a = jnp.ones((PRODUCT, PRODUCT), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    began = perf_counter()
    jax.block_until_ready(multiply(a, a))
    return 2 * PRODUCT**3 / (perf_counter() - began)


def plan(run: Callable[[Any], Any], processes: int) -> dict[str, Any]:
    """The calls of engines that `run` makes, what they take together, and every ε that it reports."""
    planner, noted = Planner(processes), Noted()
    stopped = None
    with planner.active():
        try:
            noted.found(run(noted))
        except Exception as error:  # what it makes of ones may make no sense
            if isinstance(error, InvalidInput) and not planner.pieces:
                raise  # nothing has been made of anything yet
            stopped = f"{type(error).__name__}: {error}".splitlines()[0]
    rate = speed()
    seconds = [
        each.operations / rate / min(processes, jax.device_count()) + each.rounds * OVERHEAD for each in planner.pieces
    ]
    pieces = [{**asdict(each), "seconds": spent} for each, spent in zip(planner.pieces, seconds, strict=True)]
    return {
        "processes": processes,
        "pieces": pieces,
        "rounds": sum(each.rounds for each in planner.pieces),
        "megabytes_moved": sum(each.megabytes_moved for each in planner.pieces),
        "megabytes_per_process": max((each.megabytes_per_process for each in planner.pieces), default=0.0),
        "seconds": sum(seconds),
        "epsilon": noted.epsilon,
        "assumes": ASSUMPTION if noted.epsilon else None,
        "stopped": stopped,
    }


@final
class Noted:
    """What a planned run reports: of all of it, the ε."""

    def __init__(self) -> None:
        self.epsilon: dict[str, float] = {}

    def found(self, values: Any, where: str = "") -> None:
        """Look for ε in a record or a result."""
        if isinstance(values, dict):
            for name, value in values.items():
                self.found(value, str(name))
        elif isinstance(values, list | tuple):
            for value in values:
                self.found(value, where)
        elif isinstance(values, float | int) and ("epsilon" in where or where == "claimed"):
            self.epsilon[where] = max(float(values), self.epsilon.get(where, 0.0))
