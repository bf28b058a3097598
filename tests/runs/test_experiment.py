"""Errors for packages that a study needs and that are not installed."""

import sys

import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush.runs.experiment import defer


def test_a_package_that_is_missing_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    (tmp_path / "needs_matplotlib.py").write_text("import matplotlib")
    with pytest.raises(
        InvalidInput, match=r"^matplotlib: got 'not installed'; allowed: pip install hyperpush\[pages\]$"
    ):
        defer("needs_matplotlib:run")()
    (tmp_path / "needs_another.py").write_text("import one_that_is_nowhere")
    # no package of an extra: a bug in this package or the user's code
    with pytest.raises(ModuleNotFoundError, match="one_that_is_nowhere"):
        defer("needs_another:run")()
