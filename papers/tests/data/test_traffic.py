"""Traffic data: tables of speeds that have no row are refused."""

import warnings

import pytest

from hyperpush.base.errors import InvalidInput
from hyperpush_papers.common.data.traffic import traffic


@pytest.mark.parametrize("speeds", ["", "7,8\n", "7,8\n\n"])
def test_empty_tables_are_refused_without_a_warning(tmp_path, monkeypatch, speeds):
    monkeypatch.setenv("HYPERPUSH_DATA", str(tmp_path))
    (tmp_path / "traffic" / "los-loop").mkdir(parents=True)
    (tmp_path / "traffic" / "los-loop" / "los_speed.csv").write_text(speeds)
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(InvalidInput, match=r"los_speed\.csv: none'; allowed: at least one row of numbers"),
    ):
        traffic("los-loop")
