"""A verb does its own work once: few Python calls when warm, one binding of the method, and one program."""

import sys
from pathlib import Path

import jax.numpy as jnp

import hyperpush as hp

PACKAGE = str(Path(hp.__file__).parent)
MOST = 1200  # limit on calls of a warm hp.solve; 1,059 when this was written
TASK, NETWORK = hp.tasks.quadratic(3, seed=0), hp.networks.Ring(3)


class Seen(hp.SGP):
    """SGP that records which of its functions a verb calls."""

    def bind(self, network, engine=None, task=None):
        asked.append("bind")
        return super().bind(network, engine, task)

    def program(self, problem):
        asked.append("program")
        return super().program(problem)


asked: list[str] = []


def calls_of(verb):
    """Count the calls of the package's functions during a call."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    try:
        verb()
    finally:
        sys.setprofile(None)
    return count


def test_a_warm_solve_makes_few_calls():
    outer = hp.optimizer("sgd", learning_rate=0.05)
    method = hp.PDBO(hp.SGP(20, 0.1), hp.HGP(steps=20, pushes=1, step_size=0.1), outer, steps=3)

    def verb():
        hp.solve(TASK, method, NETWORK, key=0)

    verb()
    assert calls_of(verb) <= MOST


def test_a_warm_call_binds_its_method_once_and_builds_no_program_twice():
    hp.train(TASK, Seen(20, 0.1), NETWORK, key=0)
    asked.clear()
    hp.train(TASK, Seen(20, 0.1), NETWORK, key=0)
    assert asked.count("bind") == 1
    assert asked.count("program") <= 1


def test_a_call_on_a_private_task_binds_its_method_once():
    rows = jnp.ones((3, 10))
    task = hp.Task(
        inner=lambda x, hyper, a: (x - a) ** 2,
        outer=lambda x, hyper, a: (x - hyper - a) ** 2,
        params=0.0,
        hypers=0.0,
        train=rows,
        validation=rows,
    ).private(clip=1.0, noise=hp.privacy.Laplace(40.0))
    asked.clear()
    found = hp.train(task, Seen(20, 0.1), NETWORK, key=0)
    assert asked.count("bind") == 1
    assert found.privacy.releases == {"train": 20}


def test_tuning_binds_each_setting_once():
    asked.clear()
    hp.tune(TASK, Seen(20, 0.1), NETWORK, key=0, over={"step_size": [0.05, 0.1]}, on="validation")
    assert asked.count("bind") == 2
