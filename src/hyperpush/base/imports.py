"""Import users' objects by name, as `module:Class` or `module:function`. This module does not import JAX."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperpush.base.errors import InvalidInput, unknown


def allow_imports_from(folder: Path) -> None:
    """Allow imports of modules in a folder, such as the folder of a spec, and in the current directory."""
    for each in (str(folder), str(Path.cwd())):
        if each not in sys.path:
            sys.path.insert(0, each)


def import_object(field: str, name: Any, kind: str) -> tuple[ModuleType, Any]:
    """Return the module that `module:Name` names, and its attribute `Name`, which is None if it does not exist.

    Raises:
        InvalidInput: The name has another form, or the module cannot be imported; the message gives the reason.
    """
    if not isinstance(name, str) or ":" not in name:
        raise InvalidInput(field, name, f"module:{kind}")
    module_name, _, attribute = name.partition(":")
    allow_imports_from(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InvalidInput(field, name, f"module:{kind} of a module that imports ({reason})") from error
    return module, getattr(module, attribute, None)


def load_function(field: str, name: Any) -> Callable[..., Any]:
    """Return the function that `module:function` names; raise InvalidInput if it does not exist."""
    module, found = import_object(field, name, "function")
    if callable(found):
        return found
    public = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
    raise unknown(field, name, [f"{module.__name__}:{key}" for key in public])


def plain_name(name: str) -> str:
    """Return a name in lower case, without dashes and underscores."""
    return name.lower().replace("-", "").replace("_", "")
