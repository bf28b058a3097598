"""A diverging run of one party is reported as growing, and never ends silently."""

import jax.numpy as jnp
import numpy as np

import hyperpush as hp
from hyperpush.base.status import Status
from hyperpush.verbs.ending import judge_estimate_growth, judge_growth
from hyperpush.verbs.growing import grown_cost, grown_estimate

TASK = hp.tasks.logistic(2, seed=0, log_rates=True)
OWN = TASK.for_client(0)


def at(size):
    return OWN.at(params=jnp.full_like(OWN.params, size))


def test_a_cost_a_million_times_the_starts_is_growing_though_params_are_not():
    """The ridge penalty is λ‖x‖² / 2 with λ of up to 1e-2, so params of 1e5 cost about 1e8 or more."""
    start = at(0.1)
    assert judge_growth(Status(), start, at(10.0)) is None
    grown = judge_growth(Status(), start, at(1e5))
    assert grown is not None
    assert (grown.converged, grown.reason) == (False, "growing")
    assert "the inner cost of this party's data grew from 0." in grown.hint
    assert "grew from" in str(grown)


def test_costs_of_all_clients_and_of_private_tasks_are_not_looked_at():
    far = TASK.at(params=jnp.full_like(TASK.params, 1e5))
    assert grown_cost(TASK, far) == ""
    private = OWN.private(clip=1.0, noise=hp.privacy.Laplace(50.0), curvature=0.35, coupling=0.3)
    assert grown_cost(private, at(1e5)) == ""


def test_an_estimate_far_beyond_its_parts_is_growing():
    value = np.ones_like(OWN.hypers)
    assert judge_estimate_growth(Status(True, "tolerance"), OWN, value).converged
    grown = judge_estimate_growth(Status(True, "tolerance"), OWN, 1e12 * value)
    assert (grown.converged, grown.reason) == (False, "growing")
    assert "the hypergradient is 1e+12" in grown.hint
    assert grown_estimate(TASK, 1e12 * value) == ""  # for all clients, certificates give more information


def test_doubts_of_a_run_stay_with_every_later_status():
    run = Status().refusing({"dave": {"wrong-mass": 2}}).with_isolation("it heard little, in 1 of 3 averages")
    after = Status(True, "tolerance").with_doubts_of(run)
    assert (after.converged, after.reason) == (False, "refused")
    assert "refused of dave: 2 wrong-mass" in str(after)
    assert "it heard little, in 1 of 3 averages" in str(after)
    alone = Status(True, "tolerance").with_isolation("it heard little")
    assert str(alone).startswith("! not converged (isolated: ")
    assert Status(True, "tolerance").with_doubts_of(Status()).converged
