"""Users' own objects by name: `module:Class` and `module:function`, also from files beside theirs. Imports no JAX."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperpush.base.errors import InvalidInput, unknown


def allow_imports_from(folder: Path) -> None:
    """Let modules of a folder be named: those beside a file, and those in the current directory."""
    for each in (str(folder), str(Path.cwd())):
        if each not in sys.path:
            sys.path.insert(0, each)


def import_object(field: str, name: Any, kind: str) -> tuple[ModuleType, Any]:
    """The module that `module:Name` names, and what is called so in it; None if nothing is.

    Raises:
        InvalidInput: The name has another form, or the module does not import; the message says why.
    """
    if not isinstance(name, str) or ":" not in name:
        raise InvalidInput(field, name, f"module:{kind}")
    module_name, _, attribute = name.partition(":")
    allow_imports_from(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module of the user's raises
        reason = f"{type(error).__name__}: {error}"
        raise InvalidInput(field, name, f"module:{kind} of a module that imports ({reason})") from error
    return module, getattr(module, attribute, None)


def load_function(field: str, name: Any) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, found = import_object(field, name, "function")
    if callable(found):
        return found
    public = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
    raise unknown(field, name, [f"{module.__name__}:{key}" for key in public])


def plain_name(name: str) -> str:
    """A name without case, dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")
