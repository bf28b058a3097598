"""Read a party's examples from its file or function, and check them against the shapes in the task."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.base.imports import load_function
from hyperpush.runs.models import leaf_name


def read_own_data(given: str, base: Path, name: str, like: dict[str, Any]) -> dict[str, Any]:
    """Return a party's examples from an .npz file or from `module:function(name)`, with the structure of the task's.

    Arrays in a file are named by data set and leaf: `train/0`, …. Shapes must equal those in the task, except for the
    number of examples (axis 0).
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names, field = [leaf_name(where) for where, _ in leaves], f"peers.{name}.data"
    if ":" in given and not (base / given).exists():
        arrays = _call_loader(field, given, name)
    else:
        arrays = _read_arrays(field, base / given, names)
    if set(arrays) != set(names):
        raise InvalidInput(field, sorted(arrays), f"arrays named {', '.join(names)}, in {given}")
    checked = [_check(f"{field} {key}", arrays[key], leaf) for key, (_, leaf) in zip(names, leaves, strict=True)]
    return structure.unflatten(checked)


def _call_loader(field: str, given: str, name: str) -> dict[str, np.ndarray]:
    """Call the party's function with its name, and return the arrays of the result by name of the leaf."""
    function = load_function(field, given)
    try:
        found = jax.tree_util.tree_flatten_with_path(function(name))[0]
        return {leaf_name(where): np.asarray(leaf) for where, leaf in found}
    except HyperpushError:
        raise
    except Exception as error:  # the user's function may raise anything; report it
        said = f"{given}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of the party's name that returns its examples") from error


def _read_arrays(field: str, path: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput(field, str(path), f"an .npz file with {', '.join(names)} ({error})") from None


def _check(field: str, array: np.ndarray, like: Any) -> np.ndarray:
    """Return one array of a party's examples in the task's dtype. Raise InvalidInput if its shape or type is wrong."""
    if array.ndim != like.ndim or array.shape[1:] != like.shape[1:]:
        raise InvalidInput(field, array.shape, f"examples of shape {like.shape[1:]}")
    if array.dtype.kind not in "biuf":
        raise InvalidInput(field, str(array.dtype), "numbers")
    if array.ndim and not len(array):
        raise InvalidInput(field, "no examples", "at least 1")
    if not np.all(np.isfinite(array)):
        raise InvalidInput(field, "a number that is not finite", "finite numbers")
    return np.asarray(array, like.dtype)
