"""`hyperpush peer` and `hyperpush swarm`: complete runs, and errors before a run starts."""

import errno
import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from deploy.deployed import deployed
from engines.peer.parties import together
from safetensors.numpy import load_file

import hyperpush as hp
from hyperpush.base.errors import HyperpushError, InvalidInput
from hyperpush.cli.app import main
from hyperpush.deploy import party
from hyperpush.deploy import swarm as swarms
from hyperpush.deploy.data import read_own_data
from hyperpush.deploy.options import Deployment, digest, read
from hyperpush.deploy.party import own_spec, run_peer
from hyperpush.deploy.swarm import on_loopback, peer_names, rows, schedule, swarm, worst
from hyperpush.engines.peer.checkpoint import Checkpoint
from hyperpush.engines.peer.origin import read_secret
from hyperpush.engines.transport.zenoh.addresses import Address
from hyperpush.privacy.accountant import compose
from hyperpush.programs import Local
from hyperpush.spec import objects


def solving(estimator="HGP", steps=2):
    """Return a spec of 12 inner steps, 4 steps of the estimator and two outer steps."""
    return {
        "task": {"name": "logistic", "seed": 0, "log_rates": True},
        "network": {"name": "random-directed"},
        "method": {
            "name": "PDBO",
            "steps": steps,
            "inner": {"name": "SGP", "steps": 12, "step_size": 0.5},
            "hypergradient": {"name": estimator, "steps": 4, "pushes": 2, "step_size": 0.5},
            "outer": {"name": "adam", "learning_rate": 0.1},
        },
    }


def compare(config, base, found):
    truth, names = objects.read(config.spec.tables()).run(), list(found["peers"])
    assert isinstance(truth, hp.Solution)
    models = {
        file: np.stack([load_file(base / name / "models" / file / f"{name}.safetensors")[""] for name in names])
        for file in ("params", "hypers")
    }
    assert np.abs(truth.hypers - np.log(0.01)).max() > 0.1  # two steps of Adam
    np.testing.assert_allclose(models["params"], truth.params, atol=1e-5)
    np.testing.assert_allclose(models["hypers"], truth.hypers, atol=1e-5)
    norms, costs = truth.history.hypergradient_norm, truth.history.cost
    assert norms is not None
    assert costs is not None
    for client, name in enumerate(names):
        result = found["peers"][name]
        assert (result["rounds"], result["late"], result["rejected"]) == (truth.costs.rounds, 0, {})
        np.testing.assert_allclose(result["outer_costs"], costs[:, client], rtol=1e-5)
        lines = [json.loads(line) for line in (base / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == truth.history.steps.tolist()
        assert [line["rounds"] for line in lines] == truth.history.rounds.tolist()
        assert [line["cost"] for line in lines] == result["outer_costs"]
        scale = norms[1:].max()
        found_norms = [line["hypergradient_norm"] for line in lines[1:]]
        np.testing.assert_allclose(found_norms / scale, norms[1:, client] / scale, atol=1e-5)
        assert not (base / name / "checkpoint.safetensors").exists()
    assert truth.task.clients == len(names)


@pytest.mark.long
def test_in_step_peers_find_what_the_simulator_finds_though_one_was_killed(tmp_path):
    config = deployed(tmp_path / "run.toml", solving(), 3)
    shown = []
    base = tmp_path / "run"
    found = swarm(config, 3, base, kill=1, restart=1, kill_before=20, seconds=300, show=shown.append)
    assert set(found["exit_codes"].values()) == {0}
    victim = schedule(list(found["peers"]), 1, 1, 20, 0)[0].name
    assert [name for name, result in found["peers"].items() if result["resumed_at"] is not None] == [victim]
    compare(config, base, found)
    assert any(len(rows(seen)) == 3 for seen in shown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": "nowhere"}, "start: got 'nowhere/north'; allowed: the folder of a finished run"),
        ({"verb": {"name": "influence", "validation": [["nord", 1]]}}, "client: got 'nord'; allowed: east, north"),
        ({"verb": {"name": "influence", "validation": [["east", 99]]}}, r"validation: got \['east', 99\]"),
    ],
)
def test_a_swarm_has_the_names_of_its_task_and_writes_nothing_if_it_cannot_run(change, message, tmp_path):
    named = {"name": "deploy.tasks:weighted_labels", "seed": 0, "names": ["north", "east"]}
    spec = {"task": named, "network": "ring", "method": "automatic", "verb": "influence", **change}
    with pytest.raises(InvalidInput, match=message):
        swarm(deployed(tmp_path / "run.toml", spec, 2), 2, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"]


def test_peers_are_called_as_the_clients_of_a_task_if_those_have_names_that_files_can_have():
    task = hp.tasks.quadratic(2, seed=0)
    assert peer_names(task.replace(names=("north", "east"))) == ["north", "east"]
    assert peer_names(task) == peer_names(task.replace(names=("../a", "b"))) == ["peer-0", "peer-1"]


@pytest.mark.faults
@pytest.mark.parametrize("method", ["HGP", "TrackedHGP"])
def test_eight_peers_with_mutual_tls_find_what_the_simulator_finds(method, tmp_path):
    config = deployed(tmp_path / "run.toml", solving(method), 8)
    compare(config, tmp_path / "run", swarm(config, 8, tmp_path / "run", seconds=600))


def test_killed_when_its_result_was_written_it_ends_with_that(tmp_path):
    spec = {**solving(), "peers": {"alice": {"address": "127.0.0.1:1"}, "bob": {}}}
    config = deployed(tmp_path / "run.toml", spec)
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / "result.json").write_text('{"name": "alice"}')
    with pytest.raises(InvalidInput, match=r"peers\.alice\.out: got .*without the result of an earlier run"):
        run_peer(config, "alice", tmp_path)
    file = tmp_path / "alice" / "checkpoint.safetensors"
    Checkpoint(file, bytes(32)).save({})
    # a checkpoint of another run
    with pytest.raises(InvalidInput, match="checkpoint: got 'one of configuration 0000"):
        run_peer(config, "alice", tmp_path)
    Checkpoint(file, digest(config)).save({})
    assert run_peer(config, "alice", tmp_path) == {"name": "alice"}
    assert not file.exists()


def test_a_checkpoint_that_cannot_be_written_is_one_error_and_the_last_one_is_good(tmp_path, monkeypatch):
    store = Checkpoint(tmp_path / "checkpoint.safetensors", bytes(32))
    store.save({"x": [np.ones(3)], "step": 1})

    def full(file, data, at, write=os.pwrite):
        if at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(HyperpushError, match=r"could not be written: the disk is full; the one before it is good"):
        store.save({"x": [np.zeros(3)], "step": 2})
    stored = store.load()
    assert stored is not None
    assert (stored["x"][0].tolist(), stored["step"]) == ([1, 1, 1], 1)


@pytest.mark.long
def test_a_result_that_finds_the_disk_full_is_in_the_checkpoint_and_the_party_ends_alone_later(tmp_path, monkeypatch):
    spec = {**solving(), "method": {"name": "SGP", "steps": 5, "step_size": 0.5}}
    config = deployed(tmp_path / "run.toml", {**spec, "network": {"name": "fully-connected"}}, 2, patience=60)
    config = on_loopback(config, ["peer-0", "peer-1"], tmp_path, secure=False)
    write = party._write_result

    def full(out, name, *rest):
        if name == "peer-0":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(out, name, *rest)

    monkeypatch.setattr(party, "_write_result", full)

    def run(client):
        if client:
            return run_peer(config, "peer-1", say=lambda line: None)
        with pytest.raises(HyperpushError, match="the disk is full; make room and start again: the checkpoint holds"):
            run_peer(config, "peer-0", say=lambda line: None)
        return None

    _, other = together(2, run)
    monkeypatch.setattr(party, "_write_result", write)
    found = run_peer(config, "peer-0", say=lambda line: None)
    assert other is not None
    assert found["rounds"] == other["rounds"] == 5
    assert found["resumed_at"] == 5
    truth = objects.read(config.spec.tables()).run()
    assert isinstance(truth, hp.Training)
    np.testing.assert_allclose(
        load_file(tmp_path / "peer-0" / "models" / "params" / "peer-0.safetensors")[""], truth.params[0], atol=1e-5
    )


# ------------------------------------------------------------- configurations

TWO = """
[task]
name = "logistic"
seed = 0
[network]
name = "random-directed"
[method]
name = "SGP"
steps = 5
step_size = 0.5
[deploy]
session = "demo"
patience = 3
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
        (('session = "demo"', 'session = "a/b"'), "alice", "deploy.session: got 'a/b'"),
        (("patience = 3", "patience = 0"), "alice", "deploy.patience: got 0"),
        (('session = "demo"', "patiense = 9"), "alice", "deploy.patiense: got 'patiense'"),
        (('session = "demo"', "spec = 9"), "alice", "deploy.spec: got 'spec'"),
        (("127.0.0.1:7800", "127.0.0.1"), "alice", "peers.alice.address: got '127.0.0.1'"),
        (("127.0.0.1:7800", "192.0.2.1:7800"), "bob", "certificate: got None"),
        (("[peers.bob]", '[peers.bob]\ncertificate = "bob.pem"'), "bob", "deploy.authority: got None"),
        (('address = "127.0.0.1:7800"', ""), "bob", "peers.alice.address: got None"),
        (("[task]", "[task]\nclients = 5"), "alice", "task.clients: got 5"),
        (("[peers.alice]", "[deploy.faults]\nloss = 0.2\n[peers.alice]"), "alice", "deploy.faults: got"),
        (("[peers.alice]", "[deploy.faults]\nloss = 1.5\n[peers.alice]"), "alice", "deploy.faults.loss: got 1.5"),
        (("[peers.bob]", '[peers.bob]\ndata = "none.npz"'), "bob", "peers.bob.data: got"),
        (("[peers.bob]", '[peers.bob]\ndata = "no_such:thing"'), "bob", "peers.bob.data: got 'no_such:thing'"),
        (('name = "logistic"', 'name = "no_such:thing"'), "alice", "task.name: got 'no_such:thing'"),
        (("seed = 0", "seed = 0\nexamples = 0"), "alice", "task.examples: got 0"),
        (("step_size = 0.5", "step_size = -1.0"), "alice", "method.step_size: got -1"),
        (("step_size = 0.5", "steq_size = 1.0"), "alice", "method.steq_size"),
        (('name = "random-directed"', 'name = "randm"'), "alice", "network.name: got 'randm'"),
        (("[task]", "[tusk]"), "alice", "task: got None"),
    ],
)
def test_bad_configurations_are_one_line_and_leave_nothing(change, name, says, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(TWO.replace(*change) if change[0] else TWO)
    assert says in refused(["peer", file, "--name", name], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_bad_swarms_are_one_line_and_leave_nothing(tmp_path, capsys):
    file, out = tmp_path / "run.toml", tmp_path / "out"
    alone = TWO[: TWO.index("[peers.alice]")]
    file.write_text(alone)
    for arguments, says in (
        (["-n", "1"], "-n: got 1"),
        (["-n", "3", "--kill", "3"], "--kill"),
        (["-n", "3", "--restart", "1"], "--kill, --restart"),
        (["-n", "3", "-s", "deploy.faults.loss=0.3"], "deploy.faults: got"),
        (["-n", "3", "-s", "deploy.faults.loss=1.5"], "deploy.faults.loss: got 1.5"),
    ):
        assert says in refused(["swarm", file, *arguments, "--out", out], capsys)
        assert not out.exists()
    for bad, cause in (
        (file, "Not a directory"),
        (file / "run", "Not a directory"),
        (tmp_path / ("o" * 300), "too long"),
    ):
        assert cause in refused(["swarm", file, "-n", "3", "--out", bad], capsys)
    file.write_text(TWO)
    assert "peers: got" in refused(["swarm", file, "-n", "2", "--out", out], capsys)
    assert not (out / "certificates").exists()


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([4, 3, 4], 3),  # one party diverges, so the others lose it
        ([4, 5, 4], 5),
        ([4, 4, 0], 4),
        ([2, 4, 5], 2),
        ([4, 1, 2], 1),
        ([0, -9, 1], 137),
    ],
)
def test_the_exit_code_of_a_swarm_is_that_of_the_party_that_failed_first(codes, code):
    assert worst(codes) == code


def test_a_party_whose_params_grow_ends_as_one_that_diverged(monkeypatch):
    monkeypatch.setattr(swarms, "run_peer", lambda *_, **__: {"status": {"converged": False, "reason": "growing"}})
    with pytest.raises(SystemExit) as ended:
        swarms.run_one("peer-0", Deployment())
    assert ended.value.code == 3


class Started(Exception):
    """Raised at the point where a party would start."""


def test_every_party_is_rehearsed_once(tmp_path, monkeypatch):
    sgp = {"name": "SGP", "steps": 2, "step_size": 0.1}
    estimate = {**solving(), "method": {"name": "HGP", "steps": 2, "pushes": 1, "step_size": 0.1}, "train": sgp}
    config = deployed(tmp_path / "run.toml", estimate, 2)
    rehearsed, run = [], party.Rehearsal.run

    def count(self, *arguments, **options):
        rehearsed.append(self.party)
        return run(self, *arguments, **options)

    def start(*arguments, **options):
        raise Started

    monkeypatch.setattr(party.Rehearsal, "run", count)
    monkeypatch.setattr(party, "_run_in", start)
    monkeypatch.setattr(
        swarms.Processes, "run", lambda processes, names, *_: processes.target(names[0], *processes.arguments)
    )
    with pytest.raises(Started):
        swarm(config, 2, tmp_path / "run")
    assert rehearsed == ["peer-0", "peer-1"]
    with pytest.raises(Started):
        run_peer(on_loopback(config, ["peer-0", "peer-1"], tmp_path / "peers", secure=False), "peer-1")
    assert rehearsed == ["peer-0", "peer-1", "peer-1"]


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
        TWO.replace("seed = 0", "seed = 1"),
        TWO.replace("[task]", "key = 1\n[task]"),
        TWO.replace("steps = 5", "steps = 6"),
        TWO.replace("random-directed", "fully-connected"),
        TWO.replace("[peers.bob]", "[peers.carol]"),
        TWO.replace("[deploy]", '[deploy]\nmode = "asynchronous"'),
        TWO.replace("[deploy]", "[deploy]\nprivate_draws = true"),
    ):
        assert of(other) != same


def private(scale, kind, steps):
    """Return a spec with noise."""
    noise = {"clip": 0.5, "curvature": 0.25, "coupling": 3.0, "noise": {"name": kind, "scale": scale}}
    made = solving("TrackedHGP", steps)
    made["method"]["hypergradient"]["tolerance"] = "none"
    return {**made, "task": {**made["task"], "private": noise}}


def test_a_private_spec_is_every_partys_own_task_with_this_noise(tmp_path):
    peers = {"alice": {"address": "127.0.0.1:7800"}, "bob": {}}
    # In pure ε, every release costs 1/σ. There are three solves of 12 gradients, and two estimates with 4 products and
    # one more release each.
    scale = (3 * 12 + 2 * (4 + 1)) / 2.0
    for kind, steps, epsilon in (
        ("Laplace", 2, 2.0),
        ("Laplace", 0, 12 / scale),  # only training
        ("Gaussian", 2, None),
    ):
        config = deployed(tmp_path / "run.toml", {**private(scale, kind, steps), "peers": peers}, private_draws=True)
        for name in peers:
            made = own_spec(config, name, tmp_path)
            noise = made.task.privacy
            assert noise is not None
            assert type(noise.mechanism).__name__ == kind
            assert (noise.clip, noise.curvature, noise.coupling) == (0.5, 0.25, 3.0)
            spent = hp.budget(made.task, made.method)
            if epsilon is not None:
                assert spent.epsilon() == pytest.approx(epsilon, rel=1e-6)
            else:
                losses = np.full(3 * 12 + 2 * (4 + 1), 1 / scale)
                mu = float(np.sqrt(np.sum(losses**2)))
                assert spent.epsilon(1e-5) == pytest.approx(compose(np.zeros(0), mu, 1e-5, None), rel=1e-6)


def test_peers_that_would_take_each_others_data_are_refused(tmp_path):
    """Parties are numbered by their order in the file, but the task may name its clients in another order."""
    peers = {"alice": {"address": "127.0.0.1:7800"}, "bob": {}}
    config = deployed(tmp_path / "run.toml", {**solving(), "peers": peers})
    spec = objects.read(config.spec.tables())
    for names in (("alice", "bob"), ("north", "south")):
        own = own_spec(config, "bob", tmp_path, replace(spec, task=spec.task.replace(names=names)))
        assert own.task.owner == 1
    with pytest.raises(InvalidInput, match="peers: got 'alice, bob'; allowed: the order of the task's clients, bob"):
        own_spec(config, "bob", tmp_path, replace(spec, task=spec.task.replace(names=("bob", "alice"))))


PRIVATE = """
[task]
name = "logistic"
seed = 0
[task.private]
clip = 1.0
curvature = 0.35
coupling = 0.3
noise = { name = "Gaussian", scale = 50.0 }
[network]
name = "fully-connected"
[method]
name = "PDBO"
steps = 1
inner = { name = "SGP", steps = 5, step_size = 0.5 }
hypergradient = { name = "HGP", steps = 5, pushes = 1, step_size = 0.5 }
outer = { name = "adam", learning_rate = 0.1 }
[deploy]
patience = 3
private_draws = true
[peers.alice]
address = "127.0.0.1:7800"
[peers.bob]
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("private_draws = true", ""), "deploy.private_draws: got False"),
        (("scale = 50.0", "scale = 0.0"), "task.private"),
        (("clip = 1.0", "clip = 0.0"), "task.private.clip: got 0"),
        (('"Gaussian"', '"Gausian"'), "task.private.noise.name: got 'Gausian'"),
        (("curvature = 0.35", ""), "curvature"),
        (("steps = 1\n", 'steps = 1\nstop = { metric = "cost", on = "validation", patience = 2 }\n'), "PDBO.stop"),
    ],
)
def test_privacy_that_cannot_hold_is_refused(change, says, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(PRIVATE.replace(*change))
    assert says in refused(["peer", file, "--name", "alice"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_of_two_that_listen_both_dial():
    addresses = {"alice": "127.0.0.1:1", "bob": "127.0.0.1:2", "carol": None}
    program, network = Local(lambda state, ctx: state), hp.networks.FullyConnected(3)

    def links(name, **more):
        return hp.Peers(name, {**addresses, **more}, tls=False).connect(program, network).links

    assert links("alice") == {"bob": Address("127.0.0.1", 2), "carol": None}
    assert links("bob") == {"alice": Address("127.0.0.1", 1), "carol": None}
    with pytest.raises(InvalidInput, match=r"Peers\.addresses\.carol: got None"):
        links("bob", bob=None)


def test_own_data_have_the_shape_of_the_problem_and_any_number_of_examples(tmp_path):
    like = {
        "train": (np.zeros((4, 3), np.float32), np.zeros(4, np.float32)),
        "validation": np.zeros((2, 3), np.float32),
    }
    arrays = {"train/0": np.ones((9, 3)), "train/1": np.ones(9), "validation": np.ones((5, 3))}
    file = tmp_path / "own.npz"
    np.savez(file, **arrays)
    found = read_own_data("own.npz", tmp_path, "bob", like)
    assert jax.tree.map(np.shape, found) == {"train": ((9, 3), (9,)), "validation": (5, 3)}
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}
    for change, says in (
        ({"validation": np.ones((5, 4))}, "peers.bob.data validation"),
        ({"validation": np.array(["a"])}, "peers.bob.data validation"),
        ({"other": np.ones(3)}, "arrays named train/0"),
        ({"validation": np.array([{}], object)}, "npz"),
        ({"validation": np.ones((0, 3))}, r"peers\.bob\.data validation: got 'no examples'"),
        ({"validation": np.full((2, 3), np.nan)}, r"peers\.bob\.data validation: got .*not finite"),
    ):
        np.savez(file, **{**arrays, **change})
        with pytest.raises(InvalidInput, match=says):
            read_own_data("own.npz", tmp_path, "bob", like)
    np.savez(file, **arrays)
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"\x93NUMPY" + whole):
        file.write_bytes(broken)
        with pytest.raises(InvalidInput, match="npz file with train/0"):
            read_own_data("own.npz", tmp_path, "bob", like)
    with file.open("wb") as one:
        np.save(one, np.ones(3))
    with pytest.raises(InvalidInput, match="npz file with train/0"):
        read_own_data("own.npz", tmp_path, "bob", like)


def test_own_data_can_come_from_a_loader(tmp_path):
    like = {name: (np.zeros((1, 4), np.float32), np.zeros(1, np.int32)) for name in ("train", "validation")}
    for name, size in (("alice", 5), ("bob", 7)):
        found = read_own_data("deploy.tasks:own", tmp_path, name, like)
        assert jax.tree.map(np.shape, found) == {"train": ((size, 4), (size,)), "validation": ((3, 4), (3,))}
        assert found["train"][1].dtype == np.int32
    for given, says in (
        ("deploy.tasks:own", r"peers\.carol\.data: got .*fails with KeyError"),
        ("deploy.tasks:spoiled", r"peers\.carol\.data: got .*arrays named train/0, train/1, validation/0"),
        ("deploy.tasks:nothing", r"peers\.carol\.data: got 'deploy.tasks:nothing'"),
    ):
        with pytest.raises(InvalidInput, match=says):
            read_own_data(given, tmp_path, "carol", like)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((("step_size = 0.5", "step_size = 0.5\nbatch_size = 1000"),), "SGP.batch_size: got 1000"),
        ((('"SGP"', '"DSGD"'),), "network: got 'random-directed, which is directed'"),
        (
            (("[deploy]", '[deploy]\nmode = "asynchronous"'), ('"random-directed"', '"ring"'), ('"SGP"', '"DSGD"')),
            "asynchronous",
        ),
        (
            (
                ('name = "SGP"\nsteps = 5', 'name = "ITDBackward"\nsolver = { name = "SGP", steps = 5 }'),
                ("step_size = 0.5\n", "[train]\nname = 'SGP'\nsteps = 5\nstep_size = 0.5\n"),
                ("steps = 5 }", "steps = 5, step_size = 0.5 }"),
            ),
            "train: got 'SGP'",
        ),
    ],
    ids=["batch", "network", "mode", "trains"],
)
def test_what_verbs_refuse_is_refused_before_anything_is_sent(change, says, tmp_path, capsys):
    text, file = TWO, tmp_path / "run.toml"
    for each in change:
        text = text.replace(*each)
    file.write_text(text)
    assert says in refused(["peer", file, "--name", "alice"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_secret_stays_and_is_asked_for_when_it_is_gone(tmp_path):
    path = tmp_path / "secret.key"
    first = read_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == read_secret(path, resumes=True) == first
    path.write_bytes(b"")
    with pytest.raises(InvalidInput, match="0 bytes"):
        read_secret(path)
    path.unlink()
    with pytest.raises(InvalidInput, match="which is missing"):
        read_secret(path, resumes=True)


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
