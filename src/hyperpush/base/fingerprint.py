"""Compute a digest of a function or object from its code, its numbers and the objects that it refers to.

The digest is the same in every process.
"""

import functools
import hashlib
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np

LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "equinox", "hyperpush")  # functions of these are digested by name only
DEEP = 40  # levels of nested objects that a digest covers
LARGE, SAMPLE = 1 << 20, 4096  # a quick digest samples arrays of at least LARGE bytes, about SAMPLE numbers of each


def fingerprint(given: object, quick: bool = False) -> str:
    """Return the name of a function or object and a digest of its code and numbers, which is the same in any process.

    The digest covers the values that the code reads: globals, closures, defaults, and the attributes that it names.

    Args:
        given: A function or an object.
        quick: True digests only a sample of each array of a megabyte or more, together with the address of the array.
            Such a digest is valid only in this process. False digests all numbers.
    """
    look = _Look(quick)
    look.add(given, DEEP)
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return f"{name} {look.digest.hexdigest()}"


class _Look:
    """Digest to which objects are added one by one. An object that occurs again is replaced by its number."""

    def __init__(self, quick: bool):
        self.digest, self.quick = hashlib.blake2b(digest_size=8), quick
        # Number of each object by its id. Holding the objects keeps Python from reusing their ids.
        self.seen: dict[int, tuple[int, object]] = {}

    def add(self, given: object, deep: int) -> None:
        if isinstance(given, bool | int | float | complex | str | bytes | None):
            self.digest.update(repr(given).encode())
        elif isinstance(given, np.ndarray | np.generic | jax.Array):
            self._add_array(given)
        elif id(given) in self.seen:
            self.digest.update(f"seen {self.seen[id(given)][0]}".encode())
        else:
            self.digest.update(type(given).__qualname__.encode())
            if deep:
                self.seen[id(given)] = len(self.seen), given
                for part in _parts(given):
                    self.add(part, deep - 1)

    def _add_array(self, given: Any) -> None:
        if isinstance(given, jax.Array) and jax.numpy.issubdtype(given.dtype, jax.dtypes.prng_key):
            given = jax.random.key_data(given)
        array = np.asarray(given)
        if self.quick and array.nbytes >= LARGE:
            self.digest.update(f"{array.dtype}{array.shape}{id(given)}".encode())
            array = array.reshape(-1)[:: max(1, array.size // SAMPLE)]
        self.digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())


def _parts(given: object) -> list[Any]:
    """Return the parts of an object that determine its digest."""
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
    if isinstance(given, property):
        return [given.fget]
    if isinstance(given, staticmethod | classmethod):
        return [given.__func__]
    return _values(given)


def _values(given: object) -> list[Any]:
    """Return the parts of a container, or the code and attributes of another object."""
    if isinstance(given, Mapping):
        return [part for key in sorted(given, key=str) for part in (str(key), given[key])]
    if isinstance(given, tuple | list | deque):
        return list(given)
    if isinstance(given, AbstractSet):
        return sorted(given, key=repr)
    own = dict(sorted(getattr(given, "__dict__", {}).items()))
    slots = [name for each in type(given).__mro__ for name in _slots(each) if hasattr(given, name)]
    wrapped = getattr(given, "__wrapped__", None)  # the function inside a compiled or cached function
    return [*_called(type(given)), own, [(name, getattr(given, name)) for name in slots], wrapped]


def _slots(cls: type) -> list[str]:
    names = vars(cls).get("__slots__", ())
    names = [names] if isinstance(names, str) else list(names)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _called(cls: type) -> list[Any]:
    """Return the `__call__` of a class, and the attributes of the class that its code names."""
    call = next((vars(each)["__call__"] for each in cls.__mro__ if "__call__" in vars(each)), None)
    return [call, _attributes(cls, set(_names(call.__code__)))] if isinstance(call, types.FunctionType) else []


def _function_parts(function: types.FunctionType) -> list[Any]:
    if _is_known(function.__module__):
        return [str(function.__module__), function.__qualname__, _closure(function)]
    names = sorted(set(_names(function.__code__)))
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    closure = _closure(function)
    read = [_attributes(value, set(names)) for value in (*used.values(), *closure)]
    return [function.__code__, function.__defaults__, function.__kwdefaults__ or {}, closure, used, read]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code, and in the functions that it defines."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _attributes(given: object, names: set[str]) -> dict[str, Any]:
    """Return the attributes with these names of a module, a class, or an object's class.

    The result is empty for installed packages.
    """
    if isinstance(given, types.ModuleType):
        own = {} if _is_installed(given.__name__) else vars(given)
        return {name: own[name] for name in sorted(names & set(own))}
    cls = given if isinstance(given, type) else type(given)
    if _is_installed(cls.__module__):
        return {}
    found = {name: inspect.getattr_static(cls, name, None) for name in sorted(names)}
    return {name: each for name, each in found.items() if each is not None}


def _is_installed(module: str | None) -> bool:
    """Return True for modules of Python and of installed packages, which do not change while a process runs."""
    if _is_known(module):
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_known(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in LIBRARIES or top in sys.stdlib_module_names


def _closure(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the cell is still empty, as in a function that refers to itself
            found.append(None)
    return found
