"""Lower and compile large programs: the chunks of engines, and functions in which verbs combine whole runs.

Compiled programs are cached by the structure of their arguments and the shapes of the arrays. The lowering rules here
apply only to the programs of this package; JAX's own rules stay unchanged for the rest of the process.

Programs with little work are compiled with fewer optimizations. `effort.py` decides by their structure alone, so the
same call always gives bitwise the same result.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from hyperpush.base.settings import keep_compiled_code
from hyperpush.engines.compiled import convolutions

# XLA's options for each level of optimization. Compared with "full", level "quick" compiles in a third of the time, but
# its loops take up to eight times as long. Level "light" compiles in four fifths of the time, and its loops take up to
# twice as long.
Level = Literal["quick", "light", "full"]
_FEWER_PASSES = {"xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False}
OPTIONS: dict[Level, dict[str, Any] | None] = {
    "quick": {"xla_backend_optimization_level": 0, **_FEWER_PASSES},
    "light": {"xla_backend_optimization_level": 1, **_FEWER_PASSES},
    "full": None,
}
ARRAYS = (jax.Array, np.ndarray, np.generic)
MOST = 1024  # programs in the cache; the least recently used is dropped first
# JAX settings that affect a trace.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_debug_nans",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


class Compiled(NamedTuple):
    """A compiled program, and those of its results that are not arrays."""

    run: Callable[..., Any]
    static: list[Any]  # list with one entry: the results that are not arrays, filled in by the trace


@dataclass
class CompileCounts:
    """Statistics of the compilations inside a `counting` block."""

    compilations: int = 0
    lines: int = 0
    levels: list[Level] = field(default_factory=list)
    peak: int = 0  # bytes of arguments, results and temporaries of the largest program, as XLA reports them


@dataclass(frozen=True, eq=False)
class Fixed:
    """Wrapper for an argument whose values the host reads during the trace. It is static and compared by identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and other.value is self.value


_kept: OrderedDict[Any, Compiled] = OrderedDict()
_counting: list[CompileCounts] = []


def call(
    function: Callable[..., PyTree],
    given: PyTree,
    donated: PyTree = None,
    level: Level | Callable[[Any], Level] = "full",
) -> PyTree:
    """Return `function(given, donated)`, compiled at an optimization level. Arrays of `donated` may be overwritten.

    The level may be a function of the traced program, such as `effort.level_of_one_run` or `effort.Choice`.

    Arrays and NumPy numbers are arguments of the compiled program. All other leaves are static: another value compiles
    another program. The function may also return objects other than arrays, if these depend on static leaves alone.
    """
    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009, JAX makes it when it runs
        return function(given, donated)
    leaves, structure = jax.tree.flatten((given, donated))
    arrays = [leaf if isinstance(leaf, ARRAYS) else None for leaf in leaves]
    # Lists, because generators take ten times as long if there are many leaves.
    others = tuple([leaf if array is None else None for leaf, array in zip(leaves, arrays, strict=True)])
    kinds = [
        each
        if each is None
        else (each.shape, each.dtype, getattr(each, "weak_type", None), getattr(each, "sharding", None))
        for each in arrays
    ]
    key = (function, level, structure, others, tuple(kinds), tuple([getattr(jax.config, name) for name in SETTINGS]))
    traced = [array for array in arrays if array is not None]
    count = len(traced) - sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(donated))
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _compile(function, structure, others, arrays, count, level)
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return eqx.combine(found.run(traced[:count], traced[count:]), found.static[0])


def clear() -> None:
    """Forget all compiled programs."""
    _kept.clear()


@contextmanager
def counting() -> Iterator[CompileCounts]:
    """Count the compilations in a `with` block."""
    counts = CompileCounts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def _compile(
    function: Callable[..., PyTree],
    structure: Any,
    others: tuple[Any, ...],
    arrays: list[Any],
    count: int,
    level: Level | Callable[[Any], Level],
) -> Compiled:
    static: list[Any] = []

    def program(kept: list[Any], donated: list[Any]) -> PyTree:
        rest = iter([*kept, *donated])
        leaves = [other if array is None else next(rest) for other, array in zip(others, places, strict=True)]
        made, around = eqx.partition(function(*structure.unflatten(leaves)), eqx.is_array)
        static[:] = [around]
        return made

    keep_compiled_code()
    places = [None if array is None else True for array in arrays]  # without arrays, so the closure keeps none alive
    traced = [array for array in arrays if array is not None]
    trace = jax.jit(program, donate_argnums=1).trace(traced[:count], traced[count:])
    lowered = convolutions.lower(trace)
    level = level(trace.jaxpr.jaxpr) if callable(level) else level
    for counts in _counting:
        counts.compilations += 1
        counts.lines += lowered.as_text().count("\n")
        counts.levels.append(level)
    options = OPTIONS[level] if jax.default_backend() == "cpu" else None
    compiled = lowered.compile(compiler_options=options)
    for counts in _counting:
        counts.peak = max(counts.peak, _peak(compiled.memory_analysis()))
    return Compiled(compiled, static)


def _peak(found: Any) -> int:
    """Return the bytes that a program needs; 0 if XLA does not report them. Results may reuse donated arguments."""
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(found, name, 0) for name in sizes) - getattr(found, "alias_size_in_bytes", 0)
