"""The peer benchmark at a tiny size runs, and its figures follow from the recorded seconds."""

import numpy as np
import peers
import pytest
from peers import Peers
from script import main

ROUNDS, BLOCKS, MEGABYTES = 2, 3, 0.01


def test_both_kinds_are_measured_and_compared(capsys):
    found = peers.run(Peers(megabytes=MEGABYTES, rounds=ROUNDS, blocks=BLOCKS))
    seconds = {kind: np.array(each) for kind, each in found["seconds"].items()}
    for kind, key in (("bare Zenoh", "bare_zenoh"), ("peers", "peers")):
        assert seconds[kind].shape == (BLOCKS,)
        assert np.all(seconds[kind] > 0)
        rate = ROUNDS / np.sort(seconds[kind])[BLOCKS // 2]
        assert found[key]["rounds_per_second"] == pytest.approx(rate)
        assert found[key]["megabytes_per_second"] == pytest.approx(2 * MEGABYTES * rate)
    ratios = np.sort(seconds["bare Zenoh"] / seconds["peers"])
    assert found["share"] == pytest.approx(ratios[BLOCKS // 2])
    assert (found["asked"], found["met"]) == (0.7, bool(ratios[BLOCKS // 2] >= 0.7))
    said = capsys.readouterr().err
    assert "mutual TLS" in said
    assert f"asked 0.7: {'met' if found['met'] else 'not met'}" in said


SIZES = [("megabytes", "0"), ("megabytes", "201"), ("rounds", "0"), ("blocks", "0")]


@pytest.mark.parametrize(("option", "value"), SIZES)
def test_sizes_that_make_no_sense_are_refused(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(Peers, peers.run, [f"--{option}", value])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert option in said.splitlines()[-1]
    assert "Traceback" not in said
