"""`hyperpush peer` and `hyperpush swarm`: whole runs, and what is refused before they start."""

import errno
import json
import os
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.cli import main
from hyperpush.config import validate
from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.experiments.solve import estimation, instance, solver
from hyperpush.peers.checkpoint import Checkpoint
from hyperpush.peers.options import Peers, addresses, digest, private, read
from hyperpush.peers.party import own_data, secret, take_part
from hyperpush.peers.session import Address
from hyperpush.peers.swarm import rows, schedule, swarm


def options(clients, method="HGP", **more):
    made = validate(
        Peers,
        {
            "experiment": {
                "problem": "logistic",
                "clients": clients,
                "inner": {"steps": 12, "rate": 0.5},
                "estimator": {"method": method, "order": 4, "pushes": 2, "step": 0.5},
                "outer": {"steps": 2},
            },
            **more,
        },
    )
    assert isinstance(made, Peers)
    return made


def simulated(config):
    chosen = config.experiment
    made = instance(chosen)
    return hp.solve(
        made.problem,
        hp.networks.by_name(chosen.network, chosen.clients, chosen.seed),
        inner=solver(chosen.inner, "SGP"),
        hypergradient=estimation(chosen.estimator, chosen.estimator.method),
        outer=optax.adam(chosen.outer.rate),
        outer_steps=chosen.outer.steps,
        params=made.params,
        hypers=made.hypers,
        inner_data=made.inner_data,
        outer_data=made.outer_data,
        key=jax.random.split(jax.random.key(chosen.seed))[0],
        trace=True,
    )


def compare(config, base, found):
    truth, clients = simulated(config), config.experiment.clients
    names = list(found["peers"])
    models = {
        file: np.stack([load_file(base / name / f"{file}.safetensors")[""] for name in names])
        for file in ("params", "hypers", "hypergradients")
    }
    assert np.abs(truth.hypers - np.log(0.01)).max() > 0.1  # two steps of Adam
    np.testing.assert_allclose(models["params"], truth.params, atol=1e-5)
    np.testing.assert_allclose(models["hypers"], truth.hypers, atol=1e-5)
    scale = np.abs(truth.hypergradients).max()
    gradients = models["hypergradients"].swapaxes(0, 1)
    np.testing.assert_allclose(gradients / scale, np.asarray(truth.hypergradients) / scale, atol=1e-5)
    for client, name in enumerate(names):
        result = found["peers"][name]
        assert (result["rounds"], result["late"], result["rejected"]) == (truth.rounds, 0, {})
        np.testing.assert_allclose(result["outer_costs"], np.asarray(truth.outer_costs)[:, client], rtol=1e-5)
        lines = [json.loads(line) for line in (base / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["outer_cost"] for line in lines] == result["outer_costs"]
        assert not (base / name / "checkpoint.safetensors").exists()
    assert clients == len(names)


def test_in_step_peers_find_what_the_simulator_finds_though_one_was_killed(tmp_path):
    config = options(3)
    shown = []
    base = tmp_path / "run"
    found = swarm(config, 3, base, kill=1, restart=1, kill_before=20, seconds=300, show=shown.append)
    assert set(found["exit_codes"].values()) == {0}
    victim = schedule(list(found["peers"]), 1, 1, 20, 0)[0].name
    assert [name for name, result in found["peers"].items() if result["resumed_at"] is not None] == [victim]
    compare(config, base, found)
    assert any(len(rows(seen)) == 3 for seen in shown)


@pytest.mark.faults
@pytest.mark.parametrize("method", ["HGP", "TrackedHGP"])
def test_eight_peers_with_mutual_tls_find_what_the_simulator_finds(method, tmp_path):
    config = options(8, method)
    compare(config, tmp_path / "run", swarm(config, 8, tmp_path / "run", seconds=600))


def test_killed_when_its_result_was_written_it_ends_with_that(tmp_path):
    config = validate(Peers, {"experiment": {"clients": 2}, "peers": {"alice": {"address": "127.0.0.1:1"}, "bob": {}}})
    assert isinstance(config, Peers)
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / "result.json").write_text('{"name": "alice"}')
    with pytest.raises(InvalidInput, match=r"peers\.alice\.out: got .*without the result of an earlier run"):
        take_part(config, "alice", tmp_path)
    file = tmp_path / "alice" / "checkpoint.safetensors"
    Checkpoint(file, bytes(32)).save({}, {})
    with pytest.raises(InvalidInput, match="checkpoint: got 'one of configuration 0000"):  # of another run
        take_part(config, "alice", tmp_path)
    Checkpoint(file, digest(config)).save({}, {})
    assert take_part(config, "alice", tmp_path) == {"name": "alice"}
    assert not file.exists()


def test_a_checkpoint_that_cannot_be_written_is_one_error_and_the_last_one_is_good(tmp_path, monkeypatch):
    store = Checkpoint(tmp_path / "checkpoint.safetensors", bytes(32))
    store.save({"x": np.ones(3)}, {"step": 1})

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HyperpushError, match=r"cannot be written \(No space left on device\)"):
        store.save({"x": np.zeros(3)}, {"step": 2})
    stored = store.load()
    assert stored is not None
    assert (stored[0]["x"].tolist(), stored[1]) == ([1, 1, 1], {"step": 1})


# ------------------------------------------------------------- configurations

TWO = """
run = "demo"
[experiment]
problem = "logistic"
[peers.alice]
address = "127.0.0.1:7800"
[peers.bob]
"""


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (("", ""), "carol", "--name: got 'carol'"),
        (("[peers.bob]", "[peers.bob]\nport = 3"), "bob", "peers.bob.port"),
        (("[peers.bob]", "[peers.Bob]"), "alice", "peers: got 'Bob'"),
        (('run = "demo"', 'run = "a/b"'), "alice", "run: got 'a/b'"),
        (("127.0.0.1:7800", "127.0.0.1"), "alice", "peers.alice.address: got '127.0.0.1'"),
        (("127.0.0.1:7800", "192.0.2.1:7800"), "bob", "certificate: got None"),
        (("[peers.bob]", '[peers.bob]\ncertificate = "bob.pem"'), "bob", "authority: got None"),
        (('address = "127.0.0.1:7800"', ""), "bob", "peers.alice.address: got None"),
        (("[experiment]", "[experiment]\nclients = 5"), "alice", "experiment.clients: got 5"),
        (("[experiment]", "[faults]\nloss = 0.2\n[experiment]"), "alice", "faults"),
        (("[peers.bob]", '[peers.bob]\ndata = "none.npz"'), "bob", "data: got"),
        (('problem = "logistic"', 'problem = "no_such:thing"'), "alice", "problem: got 'no_such:thing'"),
    ],
)
def test_bad_configurations_are_one_line_and_leave_nothing(change, name, says, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(TWO.replace(*change) if change[0] else TWO)
    assert says in refused(["peer", file, "--name", name], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_bad_swarms_are_one_line_and_leave_nothing(tmp_path, capsys):
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text("[experiment]\n")
    for arguments, says in (
        (["-n", "1"], "clients"),
        (["-n", "3", "--kill", "3"], "--kill"),
        (["-n", "3", "--restart", "1"], "--kill, --restart"),
        (["-n", "3", "--loss", "0.3"], "faults"),
        (["-n", "3", "--loss", "1.5"], "faults.loss"),
    ):
        assert says in refused(["swarm", file, *arguments, "--out", out], capsys)
        assert not out.exists()
    file.write_text(TWO)
    assert "peers: got" in refused(["swarm", file, "-n", "2", "--out", out], capsys)
    assert not (out / "certificates").exists()


def test_the_digest_is_of_what_has_to_agree_and_of_nothing_else(tmp_path):
    file = tmp_path / "run.toml"

    def of(text):
        file.write_text(text)
        return digest(read(file))

    same = of(TWO)
    assert of(TWO.replace("127.0.0.1:7800", "127.0.0.1:9")) == same
    assert of(TWO + 'out = "elsewhere"\n') == same
    for other in (
        TWO.replace("demo", "demo2"),
        TWO.replace("[experiment]", "[experiment]\nseed = 1"),
        TWO.replace("[peers.bob]", "[peers.carol]"),
        'mode = "asynchronous"\n' + TWO,
    ):
        assert of(other) != same


def solving(**more):
    """Options of an experiment of 12 steps, order 4, two outer steps."""
    return {
        "clients": 2,
        "inner": {"steps": 12},
        "estimator": {"method": "TrackedHGP", "order": 4, "pushes": 2, "step": 0.5},
        "outer": {"steps": 2},
        "privacy": {"epsilon": 2.0, "delta": 0.0, "clip": 0.5, "curvature": 0.25, "coupling": 3.0},
        **more,
    }


def made_private(**more):
    config = validate(Peers, {"private_draws": True, "experiment": solving(**more)})
    assert isinstance(config, Peers)
    options = config.experiment
    inner, estimator = solver(options.inner, options.inner.method), estimation(options.estimator, "TrackedHGP")
    return private(options, inner, replace(estimator, tolerance=None), None, None)


def test_privacy_is_the_noise_that_all_releases_together_cost_epsilon():
    inner, estimator = made_private()
    # Pure ε: every release costs 1/σ. Three solves of 12 gradients; two estimates of 4 products and one more release.
    scale = (3 * 12 + 2 * (4 + 1)) / 2.0
    for method in (inner, estimator):
        assert isinstance(method.privacy.mechanism, hp.Laplace)
        assert float(method.privacy.mechanism.scale(0)) == pytest.approx(scale, rel=1e-6)
    noise = estimator.privacy
    assert (inner.privacy.clip, noise.clip, noise.curvature, noise.coupling) == (0.5, 0.5, 0.25, 3.0)
    inner, estimator = made_private(outer={"steps": 0})  # training only
    assert float(inner.privacy.mechanism.scale(0)) == pytest.approx(12 / 2.0, rel=1e-6)
    given = {"epsilon": 1.0, "delta": 1e-5}
    inner, estimator = made_private(privacy=given)
    assert isinstance(inner.privacy.mechanism, hp.Gaussian)
    assert 0.9 < hp.budget(inner, estimator, 2).epsilon(1e-5) <= 1.0


PRIVATE = """
private_draws = true
[experiment]
problem = "logistic"
inner = { steps = 5 }
outer = { steps = 1 }
privacy = { epsilon = 1.0 }
[peers.alice]
address = "127.0.0.1:7800"
[peers.bob]
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("private_draws = true", ""), "private_draws: got False"),
        (("epsilon = 1.0", "epsilon = 0"), "experiment.privacy.epsilon"),
        (("steps = 5", 'method = "DSGD", steps = 5'), "experiment.inner.method: got 'DSGD'"),
        (("[experiment]", '[experiment]\nestimator = { method = "ExactRB" }'), "experiment.estimator.method: got"),
        (("[experiment]", '[experiment]\nestimator = { method = "TrackedHGP" }'), "TrackedHGP.step: got None"),
        (("[experiment]", "[experiment]\nstop = { patience = 2 }"), "stop: got"),
    ],
)
def test_privacy_that_cannot_hold_is_refused(change, says, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(PRIVATE.replace(*change))
    assert says in refused(["peer", file, "--name", "alice"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_of_two_that_listen_the_later_one_dials():
    where = {"alice": {"address": "127.0.0.1:1"}, "bob": {"address": "127.0.0.1:2"}, "carol": {}}
    config = validate(Peers, {"experiment": {"clients": 3}, "peers": where})
    assert isinstance(config, Peers)
    assert addresses(config, "alice", ["bob", "carol"]) == {"bob": None, "carol": None}
    assert addresses(config, "bob", ["alice", "carol"]) == {"alice": Address("127.0.0.1", 1), "carol": None}
    more = validate(Peers, {"experiment": {"clients": 4}, "peers": {**where, "dave": {}}})
    assert isinstance(more, Peers)
    with pytest.raises(InvalidInput, match=r"peers\.dave\.address"):
        addresses(more, "carol", ["dave"])


def test_own_data_have_the_shape_of_the_problem_and_any_number_of_examples(tmp_path):
    like = {"inner": (np.zeros((4, 3), np.float32), np.zeros(4, np.float32)), "outer": np.zeros((2, 3), np.float32)}
    arrays = {"inner/0": np.ones((9, 3)), "inner/1": np.ones(9), "outer": np.ones((5, 3))}
    file = tmp_path / "own.npz"
    np.savez(file, **arrays)
    found = own_data(file, like)
    assert jax.tree.map(np.shape, found) == {"inner": ((9, 3), (9,)), "outer": (5, 3)}
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    for change, says in (
        ({"outer": np.ones((5, 4))}, "data outer"),
        ({"outer": np.array(["a"])}, "data outer"),
        ({"other": np.ones(3)}, "arrays named inner/0"),
        ({"outer": np.array([{}], object)}, "npz"),
        ({"outer": np.ones((0, 3))}, "data outer: got 'no examples'"),
        ({"outer": np.full((2, 3), np.nan)}, "data outer: got .*not finite"),
    ):
        np.savez(file, **{**arrays, **change})
        with pytest.raises(InvalidInput, match=says):
            own_data(file, like)
    np.savez(file, **arrays)
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"\x93NUMPY" + whole):
        file.write_bytes(broken)
        with pytest.raises(InvalidInput, match="npz file with inner/0"):
            own_data(file, like)
    with file.open("wb") as one:
        np.save(one, np.ones(3))
    with pytest.raises(InvalidInput, match="npz file with inner/0"):
        own_data(file, like)


def test_the_secret_stays_and_draws_other_noise_for_another_run(tmp_path):
    path = tmp_path / "secret.key"
    first = jax.random.key_data(secret(path, b"a run"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert (jax.random.key_data(secret(path, b"a run")) == first).all()
    assert (jax.random.key_data(secret(path, b"another run")) != first).any()
    path.write_bytes(b"")
    with pytest.raises(InvalidInput, match="0 bytes"):
        secret(path, b"a run")


def test_schedules_follow_the_seed():
    names = [f"p{k}" for k in range(8)]
    assert schedule(names, 2, 1, 100, 3) == schedule(names, 2, 1, 100, 3)
    assert len({tuple(schedule(names, 2, 1, 100, seed)) for seed in range(20)}) == 20
    for seed in range(20):
        first, second = schedule(names, 2, 1, 100, seed)
        assert first.name != second.name
        assert 1 <= min(first.round, second.round) <= max(first.round, second.round) < 100
        assert first.again_after is not None
        assert second.again_after is None
