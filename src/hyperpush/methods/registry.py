"""Find methods, networks and recipes by name, make them from tables of options, and write them back as tables.

All public classes in the modules of a kind's package are registered automatically. Classes that an installed
distribution names in the entry point group `hyperpush.methods` are registered, too.
"""

import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

import equinox as eqx

from hyperpush.base import annotations
from hyperpush.base.annotations import NONE, is_callable, read_option
from hyperpush.base.errors import HyperpushError, InvalidInput, unknown
from hyperpush.base.extensions import METHODS, extensions, load_extension
from hyperpush.base.imports import import_object, plain_name
from hyperpush.base.schedules import Schedule, schedule
from hyperpush.methods.base import MethodInfo
from hyperpush.methods.optimizers import BY_NAME, Optimizer, optimizer


@dataclass(frozen=True)
class _Kind:
    """A kind of registered classes, such as inner solvers or networks."""

    package: str
    base: str  # the base class, as module:Class
    one: str  # name of one object of this kind in error messages
    extensible: bool = True  # True if classes of other distributions join this kind; one kind per base class has True


KINDS: dict[str, _Kind] = {
    "inner": _Kind("hyperpush.inner", "hyperpush.inner.base:InnerSolver", "an inner solver"),
    "hypergradients": _Kind(
        "hyperpush.hypergradients", "hyperpush.hypergradients.base:HypergradientEstimator", "a hypergradient estimator"
    ),
    "algorithms": _Kind("hyperpush.algorithms", "hyperpush.algorithms.base:Algorithm", "an algorithm"),
    "networks": _Kind("hyperpush.networks", "hyperpush.networks.base:Network", "a network"),
    "recipes": _Kind("hyperpush.personalize.recipes", "hyperpush.personalize.recipe:Recipe", "a recipe"),
    "baselines": _Kind("hyperpush.personalize.baselines", "hyperpush.inner.base:InnerSolver", "an inner solver", False),
    "big_fed": _Kind("hyperpush.big_fed", "hyperpush.methods.base:Method", "a method", False),
    "methods": _Kind("hyperpush.methods.base", "hyperpush.methods.base:Method", "a method"),
    "engines": _Kind("hyperpush.engines", "hyperpush.engines.base:Engine", "an engine"),
    "hooks": _Kind("hyperpush.verbs.hooks", "hyperpush.verbs.hooks:Hook", "a hook"),
}


@cache
def registered(kind: str) -> Mapping[str, type]:
    """Return the classes of a kind by name: networks by their attribute `name`, others by the class name."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    base, package = base_of(kind), importlib.import_module(KINDS[kind].package)
    found: dict[str, type] = {}
    modules = sorted(each.name for each in pkgutil.iter_modules(getattr(package, "__path__", [])))
    for module in (package, *(importlib.import_module(f"{package.__name__}.{name}") for name in modules)):
        for each in _public_classes(module):
            if issubclass(each, base) and _is_offered(each):
                found[_name(each)] = each
    for name, each in extension_classes()[0].items() if KINDS[kind].extensible else ():
        if issubclass(each, base):
            found.setdefault(name, each)
    return types.MappingProxyType(found)


@cache
def extension_classes() -> tuple[Mapping[str, type], Mapping[str, HyperpushError]]:
    """Return the classes of other distributions by name, and the errors of classes that cannot be loaded."""
    found, broken = {}, {}
    for name, point in extensions(METHODS).items():
        try:
            found[name] = load_extension(point, type)
        except HyperpushError as error:
            broken[name] = error
    return types.MappingProxyType(found), types.MappingProxyType(broken)


def broken() -> Mapping[str, HyperpushError]:
    """Return the errors of classes of other distributions that cannot be loaded, by name."""
    return extension_classes()[1]


def find(kind: str, name: Any, field: str | None = None) -> type:
    """Return the class with a registered name, or the class that `module:Class` names.

    Case and dashes of a registered name do not matter. Modules in the current directory can be imported.

    Raises:
        InvalidInput: The name does not exist, the module does not import, or the class is not of this kind.
    """
    field = kind if field is None else field
    if not isinstance(name, str):
        raise InvalidInput(field, name, f"the name of {KINDS[kind].one}, or module:Class")
    if ":" in name:
        return _import_class(kind, name, field)
    known = registered(kind)
    by_plain_name = {plain_name(each): found for each, found in known.items()}
    by_plain_name |= {plain_name(found.__name__): found for found in known.values()}
    if plain_name(name) not in by_plain_name:
        raise broken()[name] if name in broken() else unknown(field, name, known)
    return by_plain_name[plain_name(name)]


def build(kind: str, table: Any, field: str) -> Any:
    """Make the object that a table `{name = …, option = …}` describes.

    Nested tables describe options that are objects, such as methods or schedules.

    Raises:
        InvalidInput: The table is invalid. The message has the option's dotted key, such as `method.inner.step_size`.
    """
    options = _as_table(table, field)
    if "name" not in options:
        raise InvalidInput(f"{field}.name", None, f"the name of {KINDS[kind].one}: " + ", ".join(registered(kind)))
    return construct(find(kind, options.pop("name"), f"{field}.name"), options, field)


def table(given: Any) -> dict[str, Any]:
    """Return the table that describes an object: its name, and all options that differ from their defaults.

    Raises:
        InvalidInput: An option is a Python object that no table can hold, such as a function.
    """
    if isinstance(given, Optimizer):
        return {"name": given.name, **_write_options(given.options(), type(given).__name__)}
    known = {each: name for kind in KINDS for name, each in registered(kind).items()}
    cls = type(given)
    name = given.name if isinstance(given, Schedule) else known.get(cls)
    if name is None:
        name = cls.__name__ if cls.__module__.startswith("hyperpush.") else f"{cls.__module__}:{cls.__qualname__}"
    options = {}
    for parameter in inspect.signature(cls).parameters.values():
        if not hasattr(given, parameter.name):
            raise InvalidInput(f"{cls.__name__}.{parameter.name}", given, "an option that the object keeps")
        value = getattr(given, parameter.name)
        if not _same(value, parameter.default):
            options[parameter.name] = value
    return {"name": name, **_write_options(options, cls.__name__)}


def kind_of(given: object) -> str | None:
    """Return the kind of an object whose class is registered, such as `"inner"`; None if it is not registered."""
    return next((kind for kind in KINDS if type(given) in registered(kind).values()), None)


def base_of(kind: str) -> type:
    """Return the base class of a kind of registered classes, such as `InnerSolver` for `"inner"`."""
    module, _, name = KINDS[kind].base.partition(":")
    return getattr(importlib.import_module(module), name)


def _public_classes(module: types.ModuleType) -> Iterator[type]:
    for name, each in vars(module).items():
        if isinstance(each, type) and each.__module__ == module.__name__ and not name.startswith("_"):
            yield each


def _is_offered(each: type) -> bool:
    """Return True for concrete classes that can be used by name.

    Methods need an attribute `info`, and networks need a name and an argument `clients`.
    """
    if inspect.isabstract(each):
        return False
    if issubclass(each, (base_of("engines"), base_of("hooks"))):
        return each is not base_of("hooks")
    network = base_of("networks")
    if issubclass(each, network):
        return isinstance(getattr(each, "name", None), str) and "clients" in inspect.signature(each).parameters
    return isinstance(getattr(each, "info", None), MethodInfo) or issubclass(each, base_of("recipes"))


def _name(each: type) -> str:
    return each.name if issubclass(each, base_of("networks")) else each.__name__


def _import_class(kind: str, name: str, field: str) -> type:
    module, found = import_object(field, name, "Class")
    base = base_of(kind)
    if found is None:
        fitting = [each.__name__ for each in _public_classes(module) if issubclass(each, base)]
        none = [f"{KINDS[kind].one} in {module.__name__}, which has none"]
        raise unknown(field, name.partition(":")[2], fitting or none)
    if not isinstance(found, type) or not issubclass(found, base):
        raise InvalidInput(field, name, f"{KINDS[kind].one}: a subclass of {base.__name__}")
    return found


def _as_table(given: Any, field: str) -> dict[str, Any]:
    """Return a copy of a table as a dict; raise InvalidInput if `given` is not a table."""
    if not isinstance(given, Mapping):
        raise InvalidInput(field, given, "a table with a name and options")
    return dict(given)


def construct(make: Callable[..., Any], options: Mapping[str, Any], field: str) -> Any:
    """Make an object from a table of options; errors name the option by its dotted key."""
    return annotations.construct(make, options, field, _read_table)


def read_value(annotation: Any, given: Any, field: str) -> Any:
    """Convert a value in a table to the type that an annotation asks for.

    Nested tables become methods, schedules, optimizers or other modules.
    """
    return read_option(annotation, given, field, _read_table)


def _read_table(allowed: tuple[Any, ...], given: Mapping[str, Any], field: str) -> Any:
    """Read a nested table as a method, a schedule, an optimizer, another module, or a mapping of these."""
    options = _as_table(given, field)
    mapping = next((each for each in allowed if get_origin(each) in (Mapping, dict)), None)
    if "name" not in options and mapping is not None:
        return {
            key: read_option(get_args(mapping)[1], each, f"{field}.{key}", _read_table) for key, each in options.items()
        }
    classes = [each for each in allowed if isinstance(each, type) and issubclass(each, eqx.Module)]
    if Optimizer in classes:
        return _by_function(optimizer, options, field, "optimizer")
    if any(is_callable(each) for each in allowed) or any(issubclass(each, Schedule) for each in classes):
        return _by_function(schedule, options, field, "schedule")
    for kind in ("inner", "hypergradients", "algorithms"):
        if any(issubclass(each, base_of(kind)) for each in classes):
            return build(kind, options, field)
    by_name = {plain_name(each.__name__): each for each in classes}
    name = options.pop("name", classes[0].__name__ if len(classes) == 1 else "")
    if plain_name(str(name)) not in by_name:
        raise unknown(f"{field}.name", str(name), [each.__name__ for each in classes])
    return construct(by_name[plain_name(name)], options, field)


def _by_function(make: Callable[..., Any], options: dict[str, Any], field: str, label: str) -> Any:
    """Make a schedule or an optimizer from a table, with `make` being `hp.schedule` or `hp.optimizer`."""
    if "name" not in options:
        raise InvalidInput(f"{field}.name", None, f"the name of the {label}")
    if make is optimizer and isinstance(options.get("learning_rate"), Mapping):
        rate = _as_table(options["learning_rate"], f"{field}.learning_rate")
        options["learning_rate"] = _by_function(schedule, rate, f"{field}.learning_rate", "schedule")
    if make is optimizer and options["name"] == BY_NAME:
        for name, part in options.items():
            if isinstance(part, Mapping):
                options[name] = _by_function(optimizer, dict(part), f"{field}.{name}", label)
    try:
        return make(**options)
    except InvalidInput as error:
        rest = error.field.removeprefix(label).removeprefix(f".{options['name']}") or ".name"
        raise InvalidInput(f"{field}{rest}", error.given, error.allowed) from None


def _write_options(options: Mapping[str, Any], label: str) -> dict[str, Any]:
    return {name: _write(given, f"{label}.{name}") for name, given in options.items()}


def _write(given: Any, field: str) -> Any:
    if given is None:
        return NONE
    if isinstance(given, bool | int | float | str):
        return given
    if isinstance(given, eqx.Module):
        return table(given)
    if isinstance(given, Mapping):
        return _write_options(given, field)
    if type(given) in (tuple, list):
        return [_write(each, field) for each in given]
    raise InvalidInput(field, given, "what a table can hold: numbers, texts, hp.optimizer(…), hp.schedule(…), methods")


def _same(given: Any, default: Any) -> bool:
    if type(given) is not type(default) and not (isinstance(given, float) and isinstance(default, int)):
        return False
    return bool(given == default)
