"""Test parameters that repeat a property."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def some(parameters: Mapping[str, Any], now: Collection[str]) -> list[Any]:
    """Return parameters by name: `make test` runs those in `now`, `make test-long` also the others."""
    return [
        pytest.param(each, id=name, marks=() if name in now else pytest.mark.long) for name, each in parameters.items()
    ]
