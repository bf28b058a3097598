"""The number of compilations in first calls, and the rule that compiles short runs with fewer optimizations."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled import compile
from hyperpush.engines.compiled.effort import LIGHT, QUICK, STARTED, Choice, effort
from hyperpush.networks.trees import tree_of
from hyperpush.programs import Average, Local, Repeat, profile
from hyperpush.programs.operations import OPEN_ENDED, equations, operations

ROOT = Path(__file__).parents[3]
NETWORK = hp.networks.RandomDirected(4)


def count(f, *given):
    return operations(jax.make_jaxpr(f)(*given).jaxpr)


def test_operations_follow_the_sizes_of_products_and_the_lengths_of_loops():
    a, b = jnp.ones((2, 3)), jnp.ones((3, 4))
    product = count(jnp.matmul, a, b)
    assert product == 2 * 2 * 4 * 3

    def square(x):
        return x * x

    assert count(lambda x: jax.lax.scan(lambda x, _: (square(x), None), x, length=7)[0], a) == 7 * 6
    looped = count(lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, square, x), a)
    assert looped == OPEN_ENDED * (6 + 6 + 1)  # the square, the sum of six numbers, and the comparison


def test_effort_counts_every_client_and_pass():
    def program(passes):
        return Repeat(Local(lambda x, ctx: x @ x), passes)

    found = [
        effort(profile(program(passes), jnp.ones((8, 8)), None, n), hp.networks.Ring(n))
        for n, passes in ((4, 3), (4, 6))
    ]
    assert found == [3 * (STARTED + 4 * 2 * 8**3), 6 * (STARTED + 4 * 2 * 8**3)]


def test_effort_counts_the_rounds_in_which_a_tree_waits():
    mean = Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean, rounds=1, by="tree")
    found = {}
    for network in (hp.networks.Ring(60), hp.networks.KOut(60, k=3)):
        tree, known = tree_of(network, False), profile(mean, jnp.ones(8), None, 60)
        found[network.name] = effort(known, network, tree) - effort(known, network)
    assert found["ring"] == 0  # the tree is planned, so no client waits
    assert found["k-out"] > 35 * STARTED  # each link is up in 3 of 59 rounds in both directions


def test_levels_follow_the_work_per_equation():
    def double(x):
        return x + x

    once, five = (jax.make_jaxpr(lambda x, k=k: jax.lax.fori_loop(0, k, lambda _, x: x + x, x))(1.0) for k in (1, 5))
    assert equations(jax.make_jaxpr(double)(1.0).jaxpr) == 1
    assert equations(once.jaxpr) == equations(five.jaxpr)  # a loop counts once, whatever its length
    count = equations(once.jaxpr)
    sizes = (0, QUICK * count - 1, QUICK * count, LIGHT * count - 1, LIGHT * count)
    assert [Choice(size)(once.jaxpr) for size in sizes] == ["quick", "quick", "light", "light", "full"]


def test_an_engine_that_compiles_fully_does_so_for_every_run():
    task, found = hp.tasks.quadratic(4, 0), []
    for fully in (False, True):
        compile.clear()
        with compile.counting() as counts:
            hp.train(task, hp.SGP(5, 0.1), NETWORK, key=0, engine=hp.Simulate(compile_fully=fully))
        found.append(counts.levels)
    looked, trained, judged = found[0]
    assert looked == trained == judged == "quick"
    # computing the first costs is a single pass; the certificate compiles as the engine does
    assert found[1] == ["quick", "full", "full"]
    with pytest.raises(hp.InvalidInput, match="compile_fully"):
        hp.Simulate(compile_fully="no")  # type: ignore[arg-type]


def solve(rate, hooks=()):
    method = hp.PDBO(
        inner=hp.SGP(20, rate), hypergradient=hp.TreeCG(), outer=hp.optimizer("sgd", learning_rate=0.1), steps=3
    )
    return hp.solve(hp.tasks.quadratic(4, 0), method, NETWORK, key=0, hooks=hooks)


def test_a_solve_is_one_program_and_other_numbers_compile_nothing():
    compile.clear()
    with compile.counting() as counts:
        solve(0.1)
    assert counts.compilations == 3  # the first costs, the solve, and the judgment of the params that it reports
    with compile.counting() as counts:
        solve(0.11)
    assert counts.compilations == 0


@pytest.mark.long
def test_a_watched_solve_computes_what_one_program_does():
    class Watch(hp.hooks.Hook):
        pass

    one, watched = solve(0.1), solve(0.1, [Watch()])
    assert one.costs.rounds == watched.costs.rounds
    assert one.costs.floats == watched.costs.floats
    for name in ("hypers", "recorded_cost"):
        np.testing.assert_allclose(getattr(one.history, name), getattr(watched.history, name), rtol=1e-5)


def away(params, hyper, batch):
    return jnp.sum(params**2)


def test_calls_of_the_other_verbs_compile_few_programs():
    task = hp.tasks.logistic(4, 0)
    compile.clear()
    with compile.counting() as training:
        trained = hp.train(task, hp.SGP(200, 0.1), NETWORK, key=0).task
    assert training.compilations <= 3  # the first costs, the training, and the certificate of its params
    with compile.counting() as tuning:
        hp.tune(task, hp.SGP(20, 0.1), NETWORK, key=0, over={"step_size": [0.1, 0.2]}, on="validation", metric=away)
    assert tuning.compilations == 2  # one program for all settings, and the judgment of the best; first costs are known
    with compile.counting() as scoring:
        hp.influence.scores(trained, hp.TreeCG(), NETWORK, key=0)
    assert scoring.compilations <= 6, scoring
    with compile.counting() as again:
        hp.train(task, hp.SGP(200, 0.12), NETWORK, key=0)
    assert again.compilations == 0


FIRST = """
import jax
names = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: names.append(name))
import runpy
from hyperpush.engines.compiled import compile
with compile.counting() as counts:
    runpy.run_path("benchmarks/first_call.py")
print(*counts.levels)
print(sum(name == "/jax/core/compile/backend_compile_duration" for name in names))
"""


@pytest.mark.long
def test_the_first_example_compiles_little_in_a_new_process(tmp_path):
    """Runs in a process without the suite's XLA_FLAGS; only the result is printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "HYPERPUSH_CACHE")}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    *_, levels, compilations = found.stdout.splitlines()
    assert levels == "quick light"  # the first costs, and the solve
    assert int(compilations) <= 15
    assert found.stderr == ""
