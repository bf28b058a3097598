"""Define frozen modules whose fields are options, which are checked against their annotations before construction."""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import equinox as eqx

from hyperpush.base.annotations import check_option, options_of
from hyperpush.base.checks import check_arguments

C = TypeVar("C", bound="Configured")


class Configured(eqx.Module):
    """Base class of frozen modules whose fields are options, checked against their annotations before construction."""

    sample: ClassVar[str] = ""  # on an abstract class: example of a concrete subclass, for error messages

    def __new__(cls, *args: Any, **options: Any):
        # The check is not in __check_init__, because run-time type checkers that wrap __init__ would raise first, with
        # other messages.
        check_arguments(cls.label(), _signature(cls), args, options)
        described = options_of(cls)
        for name, given in _signature(cls).bind_partial(*args, **options).arguments.items():
            check_option(f"{cls.label()}.{name}", described[name].annotation, given)
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying and pickling would call `__new__` without the required options, so `_restore` sets the fields instead.
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return _restore, (type(self), fields)

    @classmethod
    def label(cls) -> str:
        """Return the name of the class in error messages, where it stands before the name of an option."""
        return cls.__name__

    @classmethod
    def usage(cls) -> str:
        """Return an example of a call for error messages, such as `HGP(steps=…, pushes=…, step_size=…)`."""
        if cls.sample and inspect.isabstract(cls):
            return cls.sample
        needed = [each.name for each in dataclasses.fields(cls) if each.init and _has_no_default(each)]
        return f"{cls.__name__}({', '.join(f'{name}=…' for name in needed)})"

    def options(self) -> dict[str, Any]:
        """Return the options of this object by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}

    def option(self, name: str) -> Any:
        """Return the value of the option with this name; None if the object lacks this option."""
        return self.options().get(name)

    def with_options(self: C, **changes: Any) -> C:
        """Return a copy of this object with the given options changed."""
        return dataclasses.replace(self, **changes)


def _restore(cls: type[C], fields: Mapping[str, Any]) -> C:
    """Return an object with these fields, which were checked when the original was made."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls)


def _has_no_default(each: dataclasses.Field) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
