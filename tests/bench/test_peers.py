"""The benchmark of peers at a tiny size: it runs, and its figures follow from the seconds that it records."""

import numpy as np
import pytest

from hyperpush.bench.config import Peers
from hyperpush.bench.peers import run
from hyperpush.cli.app import main
from hyperpush.runs.run import StudyRun

ROUNDS, BLOCKS, MEGABYTES = 2, 3, 0.01


class Kept(StudyRun):
    """A run that keeps what it is given."""

    def __init__(self):
        self.records, self.tables = [], []

    def record(self, **values):
        self.records.append(values)

    def table(self, title, columns, rows):
        self.tables.append((title, columns, rows))


def test_both_kinds_are_measured_and_compared():
    kept = Kept()
    found = run(Peers(megabytes=MEGABYTES, rounds=ROUNDS, blocks=BLOCKS), kept)
    seconds = {
        kind: np.array([each["seconds"] for each in kept.records if each["side"] == kind])
        for kind in ("bare Zenoh", "peers")
    }
    for kind, key in (("bare Zenoh", "bare_zenoh"), ("peers", "peers")):
        assert seconds[kind].shape == (BLOCKS,)
        assert np.all(seconds[kind] > 0)
        rate = ROUNDS / np.sort(seconds[kind])[BLOCKS // 2]
        assert found[key]["rounds_per_second"] == pytest.approx(rate)
        assert found[key]["megabytes_per_second"] == pytest.approx(2 * MEGABYTES * rate)
    ratios = np.sort(seconds["bare Zenoh"] / seconds["peers"])
    assert found["share"] == pytest.approx(ratios[BLOCKS // 2])
    assert (found["asked"], found["met"]) == (0.7, bool(ratios[BLOCKS // 2] >= 0.7))
    ((title, _, rows),) = kept.tables
    assert "mutual TLS" in title
    assert [row[0] for row in rows] == ["bare Zenoh", "peers", "share"]
    assert rows[-1][-1].endswith("asked 0.7: met" if found["met"] else "asked 0.7: not met")


def test_sizes_that_make_no_sense_are_refused(capsys, tmp_path):
    for setting in ("megabytes=0", "rounds=0", "blocks=0"):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "peers", "-s", setting, "--out", str(tmp_path / "out")])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert setting.split("=")[0] in said
        assert "Traceback" not in said
        assert not (tmp_path / "out").exists()
