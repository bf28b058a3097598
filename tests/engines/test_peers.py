"""`hp.Peers`: parties with only their own data, over real links, reach the simulator's results."""

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from engines.peer.parties import together
from systems import system

import hyperpush as hp
from hyperpush.cli.app import main
from hyperpush.deploy.certificates import make
from hyperpush.deploy.swarm import free_ports
from hyperpush.engines.peer import Checkpoint
from hyperpush.methods.registry import registered
from hyperpush.programs import Local
from hyperpush.tasks.logistic import logistic

NAMES = ("ann", "ben", "cleo", "dora")
NETWORK = hp.networks.RandomDirected(len(NAMES), probability=(0.4, 0.8))
SGP = hp.SGP(steps=20, step_size=0.5)
HGP = hp.HGP(steps=4, pushes=3, step_size=0.5)


def everyone():
    return logistic(len(NAMES), 0, log_rates=True).replace(names=NAMES)


def own(client):
    """Return what one party holds: the shape of the task, and its own examples."""
    task = everyone()
    mine = jax.tree.map(lambda leaf: leaf[client], {"train": task.train, "validation": task.validation})
    return task.for_client(NAMES[client], mine)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make(folder, NAMES, ["127.0.0.1"])
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)}
    return [
        hp.Peers(name, addresses, folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key", patience=60.0)
        for name in NAMES
    ]


def stacked(found):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


@pytest.mark.long
def test_four_parties_train_and_estimate_one_after_the_other(engines):
    """Verbs run over mutual TLS; one result is the input of the next, and no array has a client axis."""
    truth = hp.train(everyone(), SGP, NETWORK, key=0)
    estimate = hp.hypergradient(truth.task, HGP, NETWORK, key=1)

    def party(client):
        engine = engines[client]
        trained = hp.train(own(client), SGP, NETWORK, key=0, engine=engine)
        found = hp.hypergradient(trained.task, HGP, NETWORK, key=1, engine=engine)
        return trained.params, found.value, trained.names, trained.costs.rounds

    found = together(len(NAMES), party)
    np.testing.assert_allclose(stacked([params for params, *_ in found]), truth.params, atol=1e-5)
    values = np.asarray(estimate.value)
    np.testing.assert_allclose(stacked([value for _, value, *_ in found]), values, atol=1e-5 * np.abs(values).max())
    assert [(names, rounds) for *_, names, rounds in found] == [((name,), truth.costs.rounds) for name in NAMES]


@pytest.mark.faults
def test_asynchronous_parties_get_an_estimator_that_needs_no_tree():
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)}
    problem = system("like", n=len(NAMES), d=3)

    def party(client):
        engine = hp.Peers(NAMES[client], addresses, tls=False, mode="asynchronous", longest_wait=0.2)
        task = problem.task.replace(names=NAMES).for_client(NAMES[client])
        return hp.hypergradient(task, hp.Automatic(), hp.networks.FullyConnected(len(NAMES)), key=0, engine=engine)

    found = together(len(NAMES), party)
    assert [each.status.chosen for each in found] == ["TrackedHGP: asynchronous peers"] * len(NAMES)
    unknown = (None, "params not checked: asynchronous peers", None)
    assert [(each.status.converged, each.status.reason, each.status.residual) for each in found] == [unknown] * 4, found
    assert problem.error(stacked([each.value for each in found])) < max(each.status.error for each in found) < 1e-3


@pytest.mark.faults
def test_parties_say_that_the_inner_problem_is_not_solved(engines):
    """Parties draw the simulator's mini-batches, and send messages for checks that cost the simulator nothing."""
    methods = hp.HGP(steps=4, pushes=3, step_size=0.5, batch_size=2), hp.Automatic(), hp.Automatic(trust=False)
    truths = [hp.hypergradient(everyone(), method, NETWORK, key=1) for method in methods]

    def party(client):
        def estimate(number):
            engine = hp.Peers(NAMES[client], engines[client].addresses, tls=False, session=f"unsolved-{number}")
            return hp.hypergradient(own(client), methods[number], NETWORK, key=1, engine=engine)

        return [estimate(number) for number in range(3)]

    for number, (truth, found) in enumerate(zip(truths, zip(*together(len(NAMES), party), strict=True), strict=True)):
        np.testing.assert_allclose(stacked([each.value for each in found]), truth.value, atol=1e-5)
        told = [(each.status.reason, each.status.residual) for each in found]
        if number == 2:  # members that do not trust each other build no tree
            assert [residual for _, residual in told] == [None] * len(NAMES)
            continue
        assert truth.status.reason == "unsolved"
        assert told == [("unsolved", pytest.approx(truth.status.residual, rel=1e-4))] * len(NAMES)
        assert (found[0].costs.rounds > truth.costs.rounds) == (number == 0)


@pytest.mark.long
def test_four_parties_solve_without_certificates_on_loopback(engines):
    method = hp.PDBO(inner=SGP, hypergradient=HGP, outer=hp.optimizer("adam", learning_rate=0.1), steps=2)
    truth = hp.solve(everyone(), method, NETWORK, key=0)

    def party(client):
        engine = hp.Peers(NAMES[client], engines[client].addresses, tls=False, session="plain", patience=60.0)
        return hp.solve(own(client), method, NETWORK, key=0, engine=engine)

    found = together(len(NAMES), party)
    np.testing.assert_allclose(stacked([each.params for each in found]), truth.params, atol=1e-5)
    np.testing.assert_allclose(stacked([each.hypers for each in found]), truth.hypers, atol=1e-5)
    assert truth.history.cost is not None
    np.testing.assert_allclose(np.stack([each.history.cost for each in found], axis=1), truth.history.cost, rtol=1e-5)


@pytest.mark.long
def test_four_parties_solve_the_inner_problem_without_a_step_size(engines):
    """Newton's method runs along a tree, twice at the same time, and gradient tracking runs without a tree."""
    methods = hp.TreeNewton(), hp.TrackedSGP(400, tolerance=1e-3)
    task = everyone()
    truths = [hp.train(task, method, NETWORK, key=0) for method in methods]
    both = hp.train(task, methods[0], NETWORK, key=0, runs=[task.hypers, task.hypers + 1])

    def party(client):
        def engine(session):
            addresses = engines[client].addresses
            return hp.Peers(NAMES[client], addresses, tls=False, session=session, patience=60.0)

        mine = own(client)
        alone = [hp.train(mine, method, NETWORK, key=0, engine=engine(type(method).__name__)) for method in methods]
        runs = [mine.hypers, mine.hypers + 1]
        return *alone, hp.train(mine, methods[0], NETWORK, key=0, engine=engine("runs"), runs=runs)

    found = list(zip(*together(len(NAMES), party), strict=True))
    for truth, each in zip(truths, found, strict=False):
        np.testing.assert_allclose(stacked([own.params for own in each]), truth.params, rtol=1e-3, atol=1e-4)
        # One party cannot compare its params with the others' params.
        assert {own.status.converged for own in each} == {None}
        assert {own.status.reason for own in each} == {"params not checked among peers"}
    np.testing.assert_allclose(np.stack([each.params for each in found[2]], axis=1), both.params, rtol=1e-3, atol=1e-4)
    assert found[2][0].costs.rounds == both.costs.rounds


def test_parties_with_another_number_are_told_so(engines):
    """The program is the same but its step size differs; both errors name both configurations."""
    addresses = dict(list(engines[0].addresses.items())[:2])
    network = hp.networks.FullyConnected(2)

    def party(client):
        task = logistic(2, 0).replace(names=NAMES[:2]).for_client(NAMES[client])
        engine = hp.Peers(NAMES[client], addresses, tls=False, session="differ", patience=30.0)
        with pytest.raises(hp.HyperpushError, match=r"ann.*configuration|configuration.*ann"):
            hp.train(task, hp.SGP(steps=3, step_size=0.1 * (client + 1)), network, key=0, engine=engine)

    together(2, party)


def test_it_is_registered_and_shown(capsys):
    assert registered("engines")["Peers"] is hp.Peers
    with pytest.raises(SystemExit) as ended:
        main(["show", "Peers"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert all(option in said for option in ("addresses", "patience", "certificate", "mutual TLS"))


WITHOUT = """
import sys
sys.modules["zenoh"] = sys.modules["cryptography"] = None  # as if the extra were not installed
import hyperpush as hp
from hyperpush.cli.app import main
from hyperpush.programs import Local
from hyperpush.engines.peer import Checkpoint
from hyperpush.methods.registry import registered
from hyperpush.tasks.logistic import logistic
task = logistic(2, 0)
hp.train(task, hp.SGP(steps=2, step_size=0.1), hp.networks.FullyConnected(2), key=0, engine=hp.Threads())
assert "Peers" in registered("engines")
engine = hp.Peers("0", {"0": "127.0.0.1:1", "1": None})
try:
    hp.train(task.for_client(0), hp.SGP(steps=2, step_size=0.1), hp.networks.FullyConnected(2), key=0, engine=engine)
except hp.InvalidInput as error:
    print(error)
main(["certificates", sys.argv[1], "alice"])
"""


def test_without_the_extra_all_else_works_and_one_line_names_it(tmp_path):
    found = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "keys")], capture_output=True, text=True)
    assert "pip install 'hyperpush[peers]'" in found.stdout
    assert "Traceback" not in found.stderr
    assert "pip install 'hyperpush[peers]'" in found.stderr.splitlines()[-1]
    assert (found.returncode, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"party": "eve"}, "Peers.party: got 'eve'"),
        ({"addresses": {"Ann": None}}, "Peers.addresses: got 'Ann'"),
        ({"addresses": {"ann": "nowhere"}}, r"Peers.addresses.ann: got 'nowhere'"),
        ({"session": "a/b"}, "Peers.session"),
        ({"mode": "sometimes"}, "Peers.mode"),
        ({"patience": 0.0}, "Peers.patience"),
        ({"tls": "yes"}, "Peers.tls"),
        ({"digest": b"short"}, "Peers.digest"),
        ({"checkpoint_every": -1}, "Peers.checkpoint_every"),
        ({"faults": hp.Faults(loss=0.1)}, "Peers.faults"),
    ],
)
def test_options_out_of_range_are_named(options, says):
    with pytest.raises(hp.InvalidInput, match=says):
        hp.Peers(**{"party": "ann", "addresses": {"ann": "127.0.0.1:1", "ben": None}, **options})


def test_without_tls_only_if_asked_for_and_on_loopback():
    program, network = Local(lambda state, ctx: state), hp.networks.FullyConnected(2)
    tried: list[tuple[str, dict[str, Any], str]] = [
        ("127.0.0.1:1", {}, r"Peers\.authority: got None; allowed: a PEM file; or tls=False"),
        ("127.0.0.1:1", {"tls": False, "certificate": "ann.pem"}, r"Peers\.authority: got None"),
        ("192.0.2.1:1", {"tls": False}, r"certificate: got None; allowed: a certificate, to talk to 192\.0\.2\.1"),
    ]
    for address, options, says in tried:
        with pytest.raises(hp.InvalidInput, match=says):
            hp.Peers("ann", {"ann": address, "ben": None}, **options).connect(program, network)


def test_tasks_that_are_not_this_partys_are_refused(tmp_path):
    addresses = {name: f"127.0.0.1:{number + 1}" for number, name in enumerate(NAMES)}
    engine = hp.Peers("ann", addresses, patience=1.0)
    for task in (everyone(), own(1), logistic(4, 0).for_client(0)):
        with pytest.raises(hp.InvalidInput, match=r"task: got .*task\.for_client\('ann', data\)"):
            hp.train(task, SGP, NETWORK, key=0, engine=engine)
    with pytest.raises(hp.InvalidInput, match=r"engine: got 'Simulate'; allowed: hp\.Peers\('ben', …\)"):
        hp.train(own(1), SGP, NETWORK, key=0)
    private = own(0).private(clip=1.0, noise=hp.privacy.Laplace(50.0), curvature=0.35, coupling=0.3)
    with pytest.raises(hp.InvalidInput, match=r"Peers\.secret: got None"):
        hp.train(private, SGP, NETWORK, key=0, engine=engine)
    with pytest.raises(hp.InvalidInput, match=r"Peers\.repeats: got True"):
        hp.train(private, SGP, NETWORK, key=0, engine=hp.Peers("ann", addresses, secret=tmp_path / "secret.key"))


def test_parties_with_other_code_are_told_so_with_both_digests(engines):
    """In one party's code the L2 rate is ten times as large."""
    addresses = dict(list(engines[0].addresses.items())[:2])
    network = hp.networks.FullyConnected(2)

    def party(client):
        rate = 0.05 * 10**client
        task = logistic(2, 0).replace(names=NAMES[:2], penalty=lambda params, hyper: rate * params @ params)
        engine = hp.Peers(NAMES[client], addresses, tls=False, session="code", patience=30.0)
        with pytest.raises(
            hp.HyperpushError, match=r"\w+ \([0-9a-f]{16}…\) runs other code than \w+ \([0-9a-f]{16}…\)"
        ):
            hp.train(task.for_client(NAMES[client]), SGP, network, key=0, engine=engine)

    together(2, party)


def test_killed_after_all_were_done_a_party_needs_nobody_to_end(tmp_path):
    """In synchronous mode a party dies before it writes its result; its checkpoint holds the end."""
    addresses: dict[str, str | None] = {
        name: f"127.0.0.1:{port}" for name, port in zip(NAMES[:2], free_ports(2), strict=True)
    }
    task, network = logistic(2, 0).replace(names=NAMES[:2]), hp.networks.FullyConnected(2)

    def party(client, patience=60.0):
        options = {"tls": False, "session": "over", "checkpoint": tmp_path / NAMES[client], "keep_checkpoint": True}
        engine = hp.Peers(NAMES[client], addresses, patience=patience, **options)
        return hp.train(task.for_client(NAMES[client]), SGP, network, key=0, engine=engine, certify=False)

    first, _ = together(2, party)
    again = party(0, patience=3.0)
    assert np.abs(first.params).max() > 0
    np.testing.assert_array_equal(again.params, first.params)
    assert again.costs.rounds == first.costs.rounds


class Killed(Exception):
    pass


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_with_a_server_a_party_that_is_killed_comes_back_be_it_the_server(victim, tmp_path, monkeypatch):
    method, network = hp.FedAvg(steps=6, step_size=0.3), hp.networks.FullyConnected(2)
    addresses: dict[str, str | None] = {
        name: f"127.0.0.1:{port}" for name, port in zip(NAMES[:2], free_ports(2), strict=True)
    }
    task = logistic(2, 0).replace(names=NAMES[:2])
    saves = []

    def save(store, facts, save=Checkpoint.save):
        save(store, facts)
        if NAMES[victim] in str(store.paths[0]):
            saves.append(facts["step"])
            if len(saves) == 4:
                raise Killed

    monkeypatch.setattr(Checkpoint, "save", save)

    def party(client):
        def train():
            options = {"tls": False, "session": "server", "patience": 60.0, "checkpoint": tmp_path / NAMES[client]}
            engine = hp.Peers(NAMES[client], addresses, **options)
            return hp.train(task.for_client(NAMES[client]), method, network, key=0, engine=engine, certify=False)

        if client != victim:
            return train()
        with pytest.raises(Killed):
            train()
        return train()

    found = together(2, party)
    truth = hp.train(task, method, network, key=0, certify=False)
    assert saves[3] > 0
    assert len(saves) > 4
    np.testing.assert_allclose(np.stack([each.params for each in found]), truth.params, atol=1e-5)
