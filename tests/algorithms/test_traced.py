"""Every algorithm's numbers can be traced: results are those of Python's numbers, and a new one compiles nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import PROBLEM, sampled
from wide import float64  # noqa: F401

import hyperpush as hp
from hyperpush.algorithms.base import LOOP
from hyperpush.big_fed.algorithm import BY_FORM
from hyperpush.big_fed.clustered import FLHC, FeSEM
from hyperpush.inner.base import InnerState
from hyperpush.personalize.baselines import FedAvgPlus, FedProx, PFedMe
from hyperpush.programs import Scope
from hyperpush.registry import registered

pytestmark = pytest.mark.usefixtures("float64")

N = 4
NETWORK = hp.networks.Ring(N)
ALGORITHMS = {name: each.example() for name, each in registered("algorithms").items()}
ALGORITHMS |= {f"BiGFed, {form}": hp.big_fed.BiGFed(**info.example) for form, info in BY_FORM.items()}
ALGORITHMS |= {
    "falling": hp.algorithms.MADSBO(
        3,
        hp.schedule("power", 0.1, 0.5),
        hp.schedule("milestones", 0.1, at=(1,)),
        0.1,
        averaging=hp.schedule("power", 0.5),
    ),
    "series": hp.algorithms.MDBO(
        3, 0.1, 0.1, hp.schedule("power", 0.7, 0.4), 0.9, 0.8, hp.algorithms.Neumann(3, 0.2), 2
    ),
    "corrected": hp.algorithms.FedBiOAcc(
        2, 0.1, 0.1, 2, hp.algorithms.Neumann(3, 0.2, random=False), forget=hp.schedule("power", 0.5, 1)
    ),
    "gossip": hp.algorithms.GBDSBO(3, 0.1, 0.1, 0.5, estimates=2, curvature=4.0),
    "private": hp.algorithms.LDPDSBO(
        3,
        {"x": 0.1, "y": hp.schedule("power", 0.2, 0.8), "z": 0.1},
        hp.privacy.Gaussian(0.1),
        hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=5, C_Hz=1, C_Jz=1),
        use="reused",
        checked=False,
    ),
}
SOLVERS = {cls.__name__: cls.example() for cls in (FedProx, FedAvgPlus, PFedMe, FeSEM, FLHC)}


@pytest.fixture(scope="module")
def made():
    with jax.enable_x64(True):
        return sampled(N, 3)


def is_number(leaf):
    return isinstance(leaf, float)


def both_ways(method, made, begin, record=None):
    """(states, history) from Python's numbers and from traced ones; a second traced run must compile nothing."""
    params, hypers, *data = made.start
    traces = []

    def run(numbers, rest):
        traces.append(rest)
        program = eqx.combine(numbers, rest).on(NETWORK).program(PROBLEM)
        start, key = begin(params, hypers), jax.random.key(0)
        return hp.programs.evaluate(program, NETWORK, start, hp.programs.Data.pair(*data), key, record=record)

    numbers, rest = eqx.partition(method, is_number)
    assert jax.tree.leaves(numbers)
    plain = jax.jit(lambda: run(numbers, rest))()
    traced = jax.jit(lambda numbers: run(numbers, rest))
    found = traced(numbers)
    traced(jax.tree.map(lambda number: 0.9 * number, numbers))
    assert len(traces) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, plain)
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_take_traced_numbers_and_show_their_points(name, made):
    """The states of the loop that all algorithms have hold params and hypers."""
    algorithm, (params, hypers, *_) = ALGORITHMS[name], made.start
    assert isinstance(algorithm.program(PROBLEM), Scope)
    record = {LOOP: lambda state, ctx: (state.params, state.hyper)}
    _, history = both_ways(algorithm, made, hp.algorithms.BilevelState, record)
    for seen, start in zip(history[LOOP], (params, hypers), strict=True):
        assert seen.shape == (algorithm.steps, *start.shape)
        assert jnp.any(seen[-1] != start)


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_take_traced_numbers(name, made):
    both_ways(SOLVERS[name], made, InnerState)
