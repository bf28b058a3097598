"""Parties deploy any spec (personalization, other algorithms, estimates, influence) with the simulator's results."""

import jax
import numpy as np
import pytest
from deploy.deployed import deployed
from engines.peer.parties import together
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.deploy.party import run_peer
from hyperpush.deploy.swarm import on_loopback
from hyperpush.runs.models import leaf_name
from hyperpush.spec import objects
from hyperpush.verbs.results import Result

CLIENTS = 3
SGP = {"name": "SGP", "steps": 20, "step_size": 0.3}
HGP = {"name": "HGP", "steps": 4, "pushes": 2, "step_size": 0.3}
VRHGP = {"name": "VRHGP", "steps": 4, "step_size": 0.3}  # each party observes only its own links
PDBO = {"name": "PDBO", "steps": 2, "inner": SGP, "hypergradient": HGP, "outer": {"name": "adam", "learning_rate": 0.1}}


def run_parties(base, tables, clients=CLIENTS):
    """Return the parties' configuration and results."""
    names = [f"peer-{client}" for client in range(clients)]
    config = on_loopback(deployed(base / "run.toml", tables, clients, patience=100.0), names, base, secure=False)
    return config, together(clients, lambda client: run_peer(config, names[client], say=lambda line: None))


def both(base, tables, certify=True):
    """Return the results of a spec's parties and of the simulator; `certify=False` skips its certificate."""
    config, results = run_parties(base, tables)
    names = list(config.peers)
    said = objects.read(config.spec.tables())
    run = said.run if certify else lambda: hp.solve(said.task, said.method, said.network, key=said.key, certify=False)
    truth: Result = run()
    assert [result["rounds"] for result in results] == [results[0]["rounds"]] * CLIENTS
    return [base / name for name in names], results, truth


def same_files(folders, name, truth):
    """Check that each party's files hold its part of a stacked pytree."""
    for client, folder in enumerate(folders):
        found = load_file(folder / "models" / name / f"{folder.name}.safetensors")
        leaves = jax.tree_util.tree_flatten_with_path(truth)[0]
        assert set(found) == {leaf_name(where) for where, _ in leaves}
        for where, leaf in leaves:
            np.testing.assert_allclose(found[leaf_name(where)], leaf[client], atol=1e-5)


@pytest.mark.parametrize(
    ("task", "network", "method"),
    [
        pytest.param({"name": "deploy.tasks:personal", "seed": 0}, "random-directed", PDBO, marks=pytest.mark.long),
        ({"name": "deploy.tasks:weighted_labels", "seed": 0}, "random-directed", PDBO),
        ({"name": "deploy.tasks:personal", "seed": 0}, "random-directed", {**PDBO, "hypergradient": VRHGP}),
        ({"name": "quadratic", "seed": 0, "common": True}, "ring", {"name": "MDBO", "steps": 12}),
        ({"name": "quadratic", "seed": 0, "common": True}, "random-directed", {**PDBO, "name": "CDBO", "pushes": 2}),
    ],
    ids=["recipe", "own labels", "links seen", "MDBO", "CDBO"],
)
@pytest.mark.long
def test_algorithms_reach_what_the_simulator_reaches(task, network, method, tmp_path):
    if method["name"] == "MDBO":
        method = {**method, "outer_step_size": 0.05, "inner_step_size": 0.1}
    if task["name"] == "quadratic" and "inner" in method:
        small = {"step_size": 0.05}
        method = {**method, "inner": {**SGP, **small}, "hypergradient": {**HGP, **small}}
    tables = {"task": task, "network": {"name": network}, "method": method}
    # peers do not certify single-loop algorithms
    folders, results, truth = both(tmp_path, tables, certify="inner" in method)
    assert isinstance(truth, hp.Solution)
    same_files(folders, "params", truth.params)
    same_files(folders, "hypers", truth.hypers)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(truth.hypers)) > 1e-3
    costs = np.asarray(truth.history.cost)
    for client, result in enumerate(results):
        assert (result["rounds"], result["floats"]) == (truth.costs.rounds, truth.costs.floats)
        np.testing.assert_allclose(result["outer_costs"], costs[:, client], rtol=1e-5)
    own = truth.task.replace(names=tuple(folder.name for folder in folders)).for_client(folders[1].name)
    loaded = hp.load(folders[1], task=own).result
    np.testing.assert_allclose(loaded.history.cost, costs[:, 1], rtol=1e-5)
    for mine, leaf in zip(jax.tree.leaves(loaded.hypers), jax.tree.leaves(truth.hypers), strict=True):
        np.testing.assert_allclose(mine, leaf[1], atol=1e-5)


@pytest.mark.parametrize("verb", [pytest.param("hypergradient", marks=pytest.mark.long), "influence"])
def test_estimates_and_influence_reach_what_the_simulator_reaches(verb, tmp_path):
    asked = {"name": verb, "parties": "first order"} if verb == "influence" else verb
    tables = {
        "verb": asked,
        "task": {"name": "deploy.tasks:weighted_labels", "seed": 0},
        "network": {"name": "random-directed"},
        "train": SGP,
        "method": {**HGP, "steps": 20},
    }
    folders, results, truth = both(tmp_path, tables)
    if verb == "influence":
        assert isinstance(truth, hp.influence.Influence)
        for client, result in enumerate(results):
            own = truth.examples[client]
            assert list(result["scores"]) == list(result["totals"]) == [f"peer-{client}"]
            assert np.abs(own).max() > 1e-3
            np.testing.assert_allclose(result["scores"][f"peer-{client}"], own, atol=1e-5)
            np.testing.assert_allclose(result["totals"][f"peer-{client}"], truth.totals[client], atol=1e-5)
            # A party learns the effect of its leaving on each other party.
            row = list(result["by_site"][f"peer-{client}"].values())
            np.testing.assert_allclose(row, truth.by_site[client], atol=1e-5)
        return
    assert isinstance(truth, hp.Estimate)
    assert np.abs(truth.value).max() > 1e-3
    same_files(folders, "value", truth.value)
    # Parties train and estimate in one program, and the result counts both. Then they learn how often links are up,
    # average their params along a tree, and average their distance from the mean, which is a scalar.
    params = 4 * 3
    rounds, floats = (np.array([result[name] for result in results]) for name in ("rounds", "floats"))
    assert np.all(rounds > 20 + truth.costs.rounds)
    more = floats - (20 * (params + 1) + truth.costs.floats)
    assert np.all((more > 0) & (more <= 4 * (2 * params + 1) + 4 * CLIENTS**2))
    apart = [result["status"]["disagreement"] for result in results]
    assert apart == pytest.approx([truth.status.disagreement] * CLIENTS, rel=1e-4)
    assert [result["status"]["residual"] for result in results] == [None] * CLIENTS  # no peer sees all gradients


@pytest.mark.faults
def test_parties_score_their_own_records_at_what_they_have_saved(tmp_path):
    tables = {
        "task": {"name": "deploy.tasks:weighted_labels", "seed": 0},
        "network": {"name": "random-directed"},
        "method": {**PDBO, "inner": {**SGP, "steps": 100}},
    }
    (tmp_path / "solved").mkdir()
    (tmp_path / "scored").mkdir()
    config, _ = run_parties(tmp_path / "solved", tables, 4)
    asked = {"name": "influence", "validation": [["peer-3", 2], [0, 0]]}
    scoring = {**tables, "start": str(tmp_path / "solved"), "verb": asked, "method": "automatic"}
    _, results = run_parties(tmp_path / "scored", scoring, 4)
    said = objects.read(config.spec.tables())
    solution = said.run()
    options = {"key": said.key, "validation": [(3, 2), (0, 0)], "parties": None}
    truth = hp.influence.scores(solution.task, hp.Automatic(), said.network, **options)
    assert np.abs(solution.task.hypers).max() > 0.05
    for client, result in enumerate(results):
        own = truth.examples[client]
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(result["scores"][f"peer-{client}"], own, atol=1e-5)
        # A party learns nothing about the others' records.
        assert list(result["by_validation"]) == [f"peer-{client}"]
        np.testing.assert_allclose(result["by_validation"][f"peer-{client}"], truth.by_validation[client], atol=1e-5)
