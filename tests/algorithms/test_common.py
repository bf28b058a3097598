"""Properties of every registered algorithm, including both forms of BiG-Fed."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from common_suite import CLIENTS, ENGINE, NETWORK, CommonSuite, compiled  # noqa: F401
from sampled import sampled, task_of

import hyperpush as hp
from hyperpush.algorithms.base import LOOP, Algorithm
from hyperpush.big_fed.algorithm import FORMS
from hyperpush.methods.registry import registered
from hyperpush.programs import Repeat, contains

CLASSES = {**registered("algorithms"), **registered("big_fed")}
FEW = hp.algorithms.ConjugateGradients(3)  # each of the three iterations is a round with a server
METHODS = {name: each.example() for name, each in CLASSES.items() if issubclass(each, Algorithm)}
METHODS |= {name: each.with_options(inverse=FEW) for name, each in METHODS.items() if hasattr(each, "inverse")}
METHODS["BiGFed-peers"] = replace(hp.big_fed.BiGFed.example(), form="peers")
assert len(FORMS) == 2
SIGMA, SIZE, STEP = 0.5, 400, 0.1


def quadratic(common):
    return task_of(*sampled(CLIENTS, 3).start, common=common)


class TestAlgorithms(CommonSuite):
    METHODS = METHODS
    FEW = ("PDBO", "INTERACT", "LDPDSBO", "BiGFed")

    @staticmethod
    def run(method, engine=ENGINE, network=NETWORK):
        return hp.solve(quadratic(bool(method.info.fixed_point)), method, network, key=0, engine=engine, certify=False)

    @staticmethod
    def values(result):
        return result.params, result.hypers, result.history.hypers

    def test_its_main_loop_has_the_name_that_records_are_taken_by(self, method):
        program = method.bind(NETWORK).program(quadratic(False).problem)
        assert contains(program, lambda node: isinstance(node, Repeat) and node.name == LOOP == method.loop)
        assert len(self.reference(method).history) == method.steps + 1


SCHEDULED = {
    "MADSBO": hp.algorithms.MADSBO(
        3,
        hp.schedule("power", 0.1, 0.5),
        hp.schedule("milestones", 0.1, at=(1,)),
        0.1,
        averaging=hp.schedule("power", 0.5),
    ),
    "GBDSBO": hp.algorithms.GBDSBO(3, 0.1, 0.1, 0.5, estimates=2, curvature=4.0),
    "FedBiOAcc": hp.algorithms.FedBiOAcc(
        2, 0.1, 0.1, 2, inverse=hp.algorithms.Neumann(3, 0.2, random=False), forget=hp.schedule("power", 0.5, 1)
    ),
    "LDPDSBO": hp.algorithms.LDPDSBO(
        3,
        {"x": 0.1, "y": hp.schedule("power", 0.2, 0.8), "z": 0.1},
        hp.privacy.Gaussian(0.1),
        hp.privacy.Constants(C_y=1, C_b=1, C_x=1, R=5, C_Hz=1, C_Jz=1),
        use="reused",
        checked=False,
    ),
}


@pytest.mark.parametrize("method", SCHEDULED.values(), ids=SCHEDULED)
def test_new_numbers_in_schedules_series_and_noise_compile_nothing(method, compiled):  # noqa: F811
    suite = TestAlgorithms()
    suite.test_same_key_gives_the_same_bits_and_a_new_number_compiles_nothing(method, compiled)


def flat(y, x, rows):
    """Return losses whose derivatives are all zero, so that only noise changes the variables."""
    return 0.0 * (jnp.sum(y) + jnp.sum(x)) ** 3 * rows


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.info.private])
def test_without_gradients_a_private_run_is_noise_of_the_promised_size(name):
    """Each release moves a client by step·σ, and averaging keeps the mean; so the variance is steps·(step·σ)²/n."""
    method, rows = METHODS[name], jnp.ones((CLIENTS, 10))
    task = hp.Task(
        inner=flat, outer=flat, params=jnp.zeros(SIZE), hypers=jnp.zeros(SIZE), train=rows, validation=rows, common=True
    )
    # One of ten examples changes a mean by at most 2·clip/10 = 1, which is the unit of the noise.
    private = task.private(noise=hp.privacy.Gaussian(SIGMA), clip=5.0, curvature=5.0, coupling=5.0)
    found = hp.solve(private, method, hp.networks.FullyConnected(CLIENTS), key=0)
    expected = method.steps * (STEP * SIGMA) ** 2 / CLIENTS
    assert np.var(np.mean(found.params, axis=0)) == pytest.approx(expected, rel=4.5 * np.sqrt(2 / SIZE))
    assert found.privacy.releases == found.costs.accesses
