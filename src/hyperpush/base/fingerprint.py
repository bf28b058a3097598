"""What tells one function or object from another, across processes: its code, its numbers and what it refers to."""

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "equinox", "hyperpush")  # whose functions are what they are called
DEEP = 12  # objects within objects that are looked into
LARGE, SAMPLE = 1 << 20, 4096  # bytes from which on a quick look samples an array, and how many of its numbers


def fingerprint(given: object, quick: bool = False) -> str:
    """A name and a digest: the same for the same code and the same numbers, whichever process asks.

    Args:
        given: A function or an object.
        quick: Look at a sample of each array of a megabyte or more, and at where it lies. The digest then holds for
            this process alone.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, given, DEEP, set(), quick)
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return f"{name} {digest.hexdigest()}"


def _add(digest: hashlib.blake2b, given: object, deep: int, seen: set[int], quick: bool) -> None:
    if isinstance(given, bool | int | float | complex | str | bytes | None):
        digest.update(repr(given).encode())
        return
    if isinstance(given, np.ndarray | np.generic | jax.Array):
        if isinstance(given, jax.Array) and jax.numpy.issubdtype(given.dtype, jax.dtypes.prng_key):
            given = jax.random.key_data(given)
        array = np.asarray(given)
        if quick and array.nbytes >= LARGE:
            digest.update(f"{array.dtype}{array.shape}{id(given)}".encode())
            array = array.reshape(-1)[:: max(1, array.size // SAMPLE)]
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return
    digest.update(type(given).__qualname__.encode())
    if deep == 0 or id(given) in seen:
        return
    seen = seen | {id(given)}
    for part in _parts(given):
        _add(digest, part, deep - 1, seen, quick)


def _parts(given: object) -> list[Any]:
    """What an object is made of."""
    if isinstance(given, types.CodeType):
        return [given.co_code, given.co_names, given.co_freevars, list(given.co_consts)]
    if isinstance(given, types.ModuleType):
        return [given.__name__]
    if isinstance(given, type):
        return [given.__module__, given.__qualname__]
    if isinstance(given, types.FunctionType):
        return _function_parts(given)
    if isinstance(given, types.MethodType):
        return [given.__func__, given.__self__]
    if isinstance(given, functools.partial):
        return [given.func, given.args, given.keywords]
    if isinstance(given, Mapping):
        return [part for key in sorted(given, key=str) for part in (str(key), given[key])]
    if isinstance(given, tuple | list):
        return list(given)
    call = next((vars(each)["__call__"] for each in type(given).__mro__ if "__call__" in vars(each)), None)
    code = [call] if isinstance(call, types.FunctionType) else []
    return [*code, dict(sorted(getattr(given, "__dict__", {}).items()))]


def _function_parts(function: types.FunctionType) -> list[Any]:
    if (function.__module__ or "").partition(".")[0] in LIBRARIES:
        return [str(function.__module__), function.__qualname__, _closure(function)]
    used = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    return [function.__code__, function.__defaults__, function.__kwdefaults__ or {}, _closure(function), used]


def _closure(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet: a function that refers to itself
            found.append(None)
    return found
