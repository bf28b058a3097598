"""A fixture that runs tests in float64."""

import jax
import pytest


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield
