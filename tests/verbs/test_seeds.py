"""Several seeds as one result: the same class with a leading axis, mean and spread."""

import numpy as np
import pytest

import hyperpush as hp

TASK, NETWORK = hp.tasks.quadratic(3, 0), hp.networks.RandomDirected(3)
METHOD = hp.PDBO(hp.SGP(10, 0.1), hp.HGP(3, 3, 0.1), hp.optimizer("sgd", learning_rate=0.1), 2)


def test_seeds_are_single_runs_stacked(tmp_path):
    several = hp.solve(TASK, METHOD, NETWORK, key=0, seeds=[4, 9], save=tmp_path / "runs")
    single = [hp.solve(TASK, METHOD, NETWORK, key=key) for key in (4, 9)]
    assert type(several) is hp.Solution
    np.testing.assert_array_equal(several.params, np.stack([each.params for each in single]))
    np.testing.assert_array_equal(several.history.cost, np.stack([each.history.cost for each in single]))
    np.testing.assert_allclose(several.mean.hypers, np.mean([each.hypers for each in single], axis=0), rtol=1e-6)
    np.testing.assert_allclose(several.spread.hypers, np.std([each.hypers for each in single], axis=0), rtol=1e-5)
    assert np.any(several.spread.hypers > 0)
    assert "2 seeds" in repr(several)
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == ["seed-0", "seed-1"]


def test_clients_are_found_behind_the_axis_of_seeds():
    task, keys = TASK.replace(common=True), (4, 9)
    method = hp.CDBO(METHOD.inner, METHOD.hypergradient, METHOD.outer, 2)
    several = hp.solve(task, method, NETWORK, key=0, seeds=list(keys))
    single = [hp.solve(task, method, NETWORK, key=key) for key in keys]
    np.testing.assert_allclose(several.hyper, np.stack([each.hyper for each in single]), rtol=1e-6)
    np.testing.assert_array_equal(several.client(2).hyper, np.stack([each.client(2).hyper for each in single]))
    trained = hp.train(TASK, METHOD.inner, NETWORK, key=0, seeds=list(keys))
    assert trained.client(2).params.shape == (2, *TASK.params.shape[1:])
    np.testing.assert_array_equal(trained.client(2).hyper, TASK.hypers[2])


def test_one_run_has_no_mean():
    with pytest.raises(hp.InvalidInput, match="seeds"):
        _ = hp.train(TASK, hp.SGP(2, 0.1), NETWORK, key=0).mean


@pytest.mark.parametrize("seeds", [0, -1, "three", [], 2.0])
def test_bad_seeds_are_named(seeds):
    with pytest.raises(hp.InvalidInput, match="seeds: got"):
        hp.train(TASK, hp.SGP(2, 0.1), NETWORK, key=0, seeds=seeds)
