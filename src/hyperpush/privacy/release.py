"""Releases: the places of a leaf at which information on a client's data becomes known.

A private access puts two identity operations into the trace: `access_data` where it reads the data, and `release_tree`
where its result leaves. The second one holds the largest change of the result by one example. `noise_at_releases.py`
adds noise there when a program is made private. A release without noise cannot run, because its lowering raises. So
each path of a computation ends with noise or with an error.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, PyTree

from hyperpush.base.errors import InvalidInput
from hyperpush.privacy.traces import calling_line
from hyperpush.programs.counting import Kind, longest_loop

DataSet = str  # "train", "validation", or another name of a task's data


def release_tree(
    tree: PyTree,
    change: float | Float[Array, ""],
    *,
    kind: Kind = "gradients",
    on: DataSet = "train",
    kept: bool = False,
) -> PyTree:
    """Return the tree unchanged, marked so that an engine adds noise in units of `change`.

    Args:
        tree: Arrays that become known, computed from data.
        change: Largest ℓ2 change of the numbers by one example. It must not depend on data itself.
        kind: Kind of access that made the numbers.
        on: Data set of that access.
        kept: True declares that each number belongs to one example and is never sent. Then the numbers get no noise
            and do not count as a release.
    """
    leaves, structure = jax.tree.flatten(tree)
    options = {"kind": kind, "on": on, "kept": kept, "lead": 0, "copies": 0 if kept else 1, "noisy": kept}
    change = jnp.asarray(change, jnp.result_type(float))
    return structure.unflatten(release.bind(*leaves, change, times=longest_loop(), **options))


def access_data(public: PyTree, batch: PyTree, own: Sequence[int] = ()) -> tuple[PyTree, PyTree]:
    """Return (public, batch) unchanged, marked as the inputs of an access whose result will be released.

    The check of flows enforces two conditions: `public` does not depend on data, and the rows of `batch` are single
    examples on axis 0. Otherwise one example changes more than its own row, and the release's bound is wrong. Leaves of
    `public` whose positions are in `own` may hold one number per example, which only the row of that example uses.
    """
    leaves, structure = jax.tree.flatten((public, batch))
    options = {"public": len(jax.tree.leaves(public)), "own": tuple(own), "lead": 0}
    return structure.unflatten(access.bind(*leaves, **options))


def _values(*inputs: Any, **_: Any) -> list[Any]:
    return list(inputs[:-1])


def _run_plain(*inputs: Any, noisy: bool, kind: str, **_: Any) -> list[Any]:
    if not noisy:
        given = f"{kind} of private data, computed without noise at {calling_line()}"
        raise InvalidInput("task.private", given, "those that a program takes while an engine runs it")
    return _values(*inputs)


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise InvalidInput(
        f"task.private: {calling_line()}",
        "a derivative of a released gradient",
        "gradients and products of the problem themselves: problem.hessian_product instead of a derivative of "
        "problem.inner_gradient; HGP or TrackedHGP instead of Dense",
    )


def _lead(inputs: Any, axes: Any) -> tuple[int, list[Any]]:
    """Return the size of the `vmap` axis, and all inputs with this axis first."""
    wide = next(leaf.shape[axis] for leaf, axis in zip(inputs, axes, strict=True) if axis is not None)
    return wide, [batching.bdim_at_front(leaf, axis, wide) for leaf, axis in zip(inputs, axes, strict=True)]


def _map_release(inputs: Any, axes: Any, *, lead: int, copies: int, **params: Any) -> tuple[list[Any], list[int]]:
    """Apply a release under `vmap`, where each member of the batch is one release."""
    wide, every = _lead(inputs, axes)
    return release.bind(*every, lead=lead + 1, copies=copies * wide, **params), [0] * (len(every) - 1)


def _map_access(inputs: Any, axes: Any, *, lead: int, **params: Any) -> tuple[list[Any], list[int]]:
    every = _lead(inputs, axes)[1]
    return access.bind(*every, lead=lead + 1, **params), [0] * len(every)


release = Primitive("hyperpush_release")
release.multiple_results = True
release.def_impl(_run_plain)
release.def_abstract_eval(_values)
mlir.register_lowering(release, lambda ctx, *inputs, **params: _run_plain(*inputs, **params))
batching.primitive_batchers[release] = _map_release
ad.primitive_jvps[release] = _refuse_derivative

access = Primitive("hyperpush_access")
access.multiple_results = True
access.def_impl(lambda *leaves, **_: list(leaves))
access.def_abstract_eval(lambda *leaves, **_: list(leaves))
mlir.register_lowering(access, lambda ctx, *leaves, **_: leaves)
batching.primitive_batchers[access] = _map_access
ad.primitive_jvps[access] = lambda primals, tangents, **params: (access.bind(*primals, **params), tangents)
