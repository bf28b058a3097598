"""Parameters that repeat what others show."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def some(parameters: Mapping[str, Any], now: Collection[str]) -> list[Any]:
    """Parameters by name, of which `make test` takes those in `now`: the others repeat them in `make test-long`."""
    return [
        pytest.param(each, id=name, marks=() if name in now else pytest.mark.long) for name, each in parameters.items()
    ]
