"""Analysis of traces finds data that leave a client other than through releases."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import PyTree
from layered import Layered

import hyperpush as hp
from hyperpush.algorithms.base import Algorithm
from hyperpush.algorithms.stopping import StoppingState
from hyperpush.data.batches import Data, Ragged, count, full_batch, minibatch
from hyperpush.hypergradients.base import HypergradientState
from hyperpush.inner.base import InnerSolver, InnerState
from hyperpush.methods.base import MethodInfo
from hyperpush.methods.registry import construct as build
from hyperpush.personalize.baselines import FedEM, FedProx, PFedMe
from hyperpush.privacy.flow import ExampleRows, Held, check_leaf, flow
from hyperpush.privacy.release import access_data, release_tree
from hyperpush.programs import (
    Average,
    Context,
    Exchange,
    Local,
    Repeat,
    Scope,
    Sequence,
    Server,
    one_client,
    program_of,
)
from hyperpush.task.private_problem import Noise, PrivateProblem
from hyperpush.task.problem import Problem
from hyperpush.verbs.budget import program_releases

SIZE, ROWS, CLIENTS = 4, 10, 3


def cost(x, hyper, rows):
    return 0.5 * jnp.sum((x - rows) ** 2 + hyper**2, axis=-1)


PLAIN = Problem(cost, cost)
HIDDEN = PrivateProblem.of(PLAIN, Noise(hp.privacy.Gaussian(1.0), 1.0, 1.0, 1.0))
PAIRS = PrivateProblem.of(Problem(lambda x, h, b: cost(x, h, b[0] + b[1]), cost), HIDDEN.noise)
X = jnp.zeros(SIZE)
FULL = Data.pair(jnp.ones((ROWS, SIZE)), jnp.ones((ROWS, SIZE)))
RAGGED = Data.pair(*(Ragged(jnp.ones((ROWS, SIZE)), jnp.int32(7)) for _ in range(2)))


def examples(ctx):
    return ctx.data.train


def own_rows(ctx):
    rows = examples(ctx)
    return rows.examples if isinstance(rows, Ragged) else rows


def gradient(x, ctx):
    return HIDDEN.inner_gradient(x, x, full_batch(examples(ctx)))


def context(data=FULL):
    return Context(jnp.int32(0), CLIENTS, jnp.int32(0), jax.random.key(0), data)


def objection(f, data=FULL):
    """Return the objection of the data-flow check against a leaf; None if the leaf passes."""
    try:
        check_leaf(f, X, context(data))
    except hp.InvalidInput as error:
        return str(error)
    return ""


# ------------------------------------------------------------------ single leaves


@pytest.mark.parametrize("data", [FULL, RAGGED])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, ctx: x - gradient(x, ctx),
        lambda x, ctx: HIDDEN.inner_gradient(x, x, minibatch(examples(ctx), 5, ctx.key)),
        lambda x, ctx: HIDDEN.with_l2(0.1).inner_gradient(x, x, full_batch(examples(ctx))),
        lambda x, ctx: jax.lax.fori_loop(0, 3, lambda _, x: x - gradient(x, ctx), x),
        lambda x, ctx: jax.vmap(lambda s: gradient(s * x, ctx))(jnp.arange(3.0)),
        lambda x, ctx: jax.vmap(lambda k: HIDDEN.inner_gradient(x, x, minibatch(examples(ctx), 5, k)))(
            jax.random.split(ctx.key, 3)
        ),
        lambda x, ctx: HIDDEN.products(x, x, full_batch(examples(ctx)), gradient(x, ctx)),
        lambda x, ctx: PAIRS.inner_gradient(
            x[:2], x[:2], minibatch((own_rows(ctx)[:, :2], own_rows(ctx)[:, 2:]), 5, ctx.key)
        ),
        lambda x, ctx: PAIRS.inner_gradient(x[:2], x[:2], (own_rows(ctx)[1:, :2], own_rows(ctx)[1:, 2:])),
        lambda x, ctx: jax.lax.cond(x[0] > 0, lambda: gradient(x, ctx), lambda: x),
        lambda x, ctx: jax.scipy.sparse.linalg.cg(
            lambda v: HIDDEN.hessian_product(x, x, full_batch(examples(ctx)), v), x, maxiter=3
        )[0],
        lambda x, ctx: jnp.asarray(count(examples(ctx))),
        lambda x, ctx: x * jnp.sum(getattr(full_batch(examples(ctx)), "mask", jnp.ones(()))),
        lambda x, ctx: jnp.zeros(examples(ctx).shape if isinstance(examples(ctx), jax.Array) else ()),
    ],
)
def test_what_is_released_or_public_passes(f, data):
    assert not objection(f, data)


def raw(x, ctx):
    return jax.grad(PLAIN.inner_cost)(x, x, full_batch(examples(ctx)))


@pytest.mark.parametrize("data", [FULL, RAGGED])
@pytest.mark.parametrize(
    "f",
    [
        raw,
        lambda x, ctx: PLAIN.inner_gradient(x, x, full_batch(examples(ctx))),
        lambda x, ctx: HIDDEN.examples.inner_gradient(x, x, full_batch(examples(ctx))),
        lambda x, ctx: jax.grad(HIDDEN.inner_cost)(x, x, full_batch(examples(ctx))),
        lambda x, ctx: HIDDEN.outer_cost(x, x, full_batch(ctx.data.outer)),
        lambda x, ctx: gradient(x, ctx) + 1e-9 * raw(x, ctx),
        lambda x, ctx: jax.lax.cond(HIDDEN.inner_cost(x, x, full_batch(examples(ctx))) > 1, lambda: x, lambda: -x),
        lambda x, ctx: jax.lax.while_loop(lambda c: c[0] < raw(x, ctx)[0], lambda c: c + 1, x),
        lambda x, ctx: jax.lax.fori_loop(0, 3, lambda _, xy: (xy[1], raw(xy[0], ctx)), (x, x))[0],
        lambda x, ctx: jnp.argmax(raw(x, ctx)),
        lambda x, ctx: minibatch(examples(ctx), 1, ctx.key),
        lambda x, ctx: jnp.where(raw(x, ctx) > 0, 1, 0),
        lambda x, ctx: jax.lax.stop_gradient(raw(x, ctx)),
        lambda x, ctx: x[jnp.int32(jnp.abs(raw(x, ctx)[0])) % 3],
        lambda x, ctx: jax.jit(raw)(x, ctx),
        lambda x, ctx: jax.checkpoint(raw)(x, ctx),
    ],
)
def test_what_is_not_released_is_found(f, data):
    said = objection(f, data)
    assert "without noise; allowed: values of data" in said.replace("'", "")
    assert "test_flow.py:" in said


@pytest.mark.parametrize(
    "f",
    [
        # a point that depends on data: another example changes the gradients of all others
        lambda x, ctx: gradient(raw(x, ctx), ctx),
        lambda x, ctx: HIDDEN.hessian_product(x, x, examples(ctx), raw(x, ctx)),
        # rows that contain more than one example
        lambda x, ctx: HIDDEN.inner_gradient(x, x, examples(ctx) - jnp.mean(examples(ctx), axis=0)),
        lambda x, ctx: HIDDEN.inner_gradient(x[0], x[0], examples(ctx).T),
        lambda x, ctx: HIDDEN.inner_gradient(x, x, jnp.concatenate([examples(ctx), examples(ctx)])),
        lambda x, ctx: HIDDEN.inner_gradient(x, x, examples(ctx)[jnp.argsort(examples(ctx)[:, 0])[:3]]),
        # rows that may be drawn twice
        lambda x, ctx: HIDDEN.inner_gradient(x, x, examples(ctx)[jnp.zeros(5, int)]),
        lambda x, ctx: HIDDEN.inner_gradient(x, x, examples(ctx)[jax.random.randint(ctx.key, (5,), 0, ROWS)]),
        # rows whose parts belong to different examples
        lambda x, ctx: PAIRS.inner_gradient(x, x, (examples(ctx), examples(ctx)[::-1])),
        lambda x, ctx: PAIRS.inner_gradient(x, x, (examples(ctx)[1:], examples(ctx)[:-1])),
        lambda x, ctx: PAIRS.inner_gradient(
            x, x, tuple(minibatch(examples(ctx), 5, key) for key in jax.random.split(ctx.key))
        ),
        # a cost that uses more than its row
        lambda x, ctx: replace(HIDDEN, inner=lambda x, h, b: cost(x, h, b) + x @ examples(ctx)[0]).inner_gradient(
            x, x, examples(ctx)
        ),
        # a release of data without a recorded access, and noise that depends on data
        lambda x, ctx: release_tree(raw(x, ctx), 0.0),
        lambda x, ctx: release_tree(jnp.mean(access_data(x, examples(ctx))[1]), jnp.max(examples(ctx))),
    ],
)
def test_release_whose_bound_does_not_hold_is_found(f):
    assert "one example each" in objection(f)


@pytest.mark.parametrize(
    "rows",
    [
        lambda a: a[:5],
        lambda a: a / 255 - 0.5,
        lambda a: a[:, :2].reshape(ROWS, 2, 1).transpose(0, 2, 1)[:, 0],
        lambda a: a[::-1].astype(jnp.float16),
        lambda a: jax.lax.dynamic_slice_in_dim(a, 2, 5),
    ],
)
def test_rows_that_hold_one_example_pass(rows):
    assert not objection(lambda x, ctx: HIDDEN.inner_gradient(X[0], X[0], rows(examples(ctx))))


def test_loops_reach_a_fixed_point():
    """Data pass through a chain of carries, one step further in each pass of the loop."""

    def chain(first, data):
        def step(carry, row):
            a, b, c, d = carry
            return (row, a, b, c), d

        return jax.lax.scan(step, (first,) * 4, data)

    jaxpr = jax.make_jaxpr(chain)(0.0, jnp.ones(5)).jaxpr
    assert flow(jaxpr, [None, ExampleRows(0)]) == [Held.MIXED] * 5
    assert flow(jaxpr, [None, None]) == [None] * 5


# ------------------------------------------------------------------ programs


def checked(program, state=None, data=FULL):
    program_releases(HIDDEN.protect(program), X if state is None else state, data, CLIENTS)


def refusal(program, state=None, data=FULL):
    with pytest.raises(hp.InvalidInput) as caught:
        checked(program, state, data)
    return str(caught.value)


def leaky(x, ctx):
    return jnp.mean(examples(ctx), axis=0)


@pytest.mark.parametrize(
    "program",
    [
        Local(leaky),
        Repeat(Sequence(Local(lambda x, ctx: x), Local(leaky)), 3),
        Scope(Local(lambda x, ctx: x), enter=leaky, leave=lambda x, inner, ctx: inner),
        Scope(Local(lambda x, ctx: x), enter=lambda x, ctx: x, leave=lambda x, inner, ctx: leaky(x, ctx)),
        Exchange(send=leaky, receive=lambda x, inbox, ctx: x),
        Exchange(send=lambda x, ctx: x, receive=lambda x, inbox, ctx: leaky(x, ctx)),
        Exchange(lambda x, ctx: x, lambda x, inbox, ctx: x, lambda x, ctx: leaky(x, ctx)[:3]),
        Average(lambda x, ctx: (leaky(x, ctx), jnp.ones(())), lambda x, average, mass, ctx: average, 2),
        Average(lambda x, ctx: (x, jnp.ones(())), lambda x, average, mass, ctx: leaky(x, ctx), 2),
        Server(leaky, lambda messages, key: messages, lambda x, answer, ctx: x),
        Repeat(Local(lambda x, ctx: x), 3, until=lambda x, ctx: leaky(x, ctx)[0] > 0),
        Repeat(Local(lambda x, ctx: x), 3, times=lambda x, ctx: leaky(x, ctx)[0].astype(jnp.int32)),
        # The shape of a host's answer is unknown before the host has run.
        Server(lambda x, ctx: x, lambda messages, key: messages, lambda x, answer, ctx: x, host=True),
    ],
)
def test_every_leaf_of_a_program_is_looked_at(program):
    said = refusal(program)
    assert "test_flow.py:" in said
    assert "take gradients with them" in said


def test_location_is_the_leafs():
    said = refusal(Repeat(Sequence(Local(lambda x, ctx: x), Local(leaky)), 2))
    assert said.startswith(f"task.private: {__file__}:{leaky.__code__.co_firstlineno} leaky: got")


def test_leaves_check_themselves_on_every_way_to_run_a_program():
    task, states = made(), InnerState(jnp.zeros((CLIENTS, SIZE)), jnp.zeros((CLIENTS, SIZE)))
    at = program_of(OwnGradient(), task.problem), NETWORK, states, task.data, jax.random.key(0)
    assert "test_flow.py:" in refused(lambda: hp.extend.evaluate(*at))
    assert "test_flow.py:" in refused(lambda: hp.Simulate().run(*at))


INNER = InnerState(X, X)
START = HypergradientState(X, X, X)


@pytest.mark.parametrize("data", [FULL, RAGGED])
@pytest.mark.parametrize(
    "method",
    [
        hp.SGP(3, 0.1),
        hp.SGP(3, 0.1, batch_size=5),
        hp.DSGD(3, 0.1),
        hp.LocalSGD(3, 0.1),
        hp.FedAvg(2, 0.1, 2, 5),
        FedProx(2, 0.1, 2, 5, penalty=0.5),
        PFedMe(2, 0.1, batch_size=5),
    ],
)
def test_solvers_are_private_on_a_private_problem_and_are_not_on_a_plain_one(method, data):
    checked(method.program(HIDDEN), INNER, data)
    said = refusal(method.program(PLAIN), INNER, data)
    assert "task.private: " in said
    assert ".py:" in said


@pytest.mark.parametrize(
    "method",
    [
        hp.HGP(3, 2, 0.1),
        hp.TrackedHGP(3, 0.1, 2, tolerance=None, acceleration=0),
        hp.HGP(3, 1, 0.1, averaging="exact"),
        # takes products along an earlier run whose iterates were released
        hp.hypergradients.ITDBackward(hp.SGP(3, 0.1)),
    ],
)
def test_estimators_are_private_on_a_private_problem(method):
    checked(method.program(HIDDEN), START)
    assert "without noise" in refusal(method.program(PLAIN), START)


def test_derivatives_of_gradients_are_refused_with_file_and_line():
    def bend(state, ctx):
        rows = full_batch(examples(ctx))
        return jax.jvp(lambda x: HIDDEN.inner_gradient(x, state, rows), (state,), (state,))[1]

    said = refusal(Local(bend))
    assert "a derivative of a released gradient" in said
    assert "test_flow.py:" in said


def test_hessians_are_refused_with_file_and_line():
    said = refusal(hp.hypergradients.Dense().program(HIDDEN), START)
    assert "a cost with its first and second derivative" in said
    assert "dense.py:" in said


def test_a_problem_built_from_the_cost_is_refused():
    """FedProx and pFedMe once did this: a plain problem built from the private problem's cost has no noise."""

    def train(state, ctx):
        near = Problem(lambda x, h, b: HIDDEN.inner_cost(x, h, b) + jnp.sum((x - state) ** 2), HIDDEN.outer)
        return state - near.inner_gradient(state, state, full_batch(examples(ctx)))

    assert "test_flow.py:" in refusal(Local(train))


NETWORK = hp.networks.FullyConnected(CLIENTS)
ALL_ROWS = jax.random.normal(jax.random.key(2), (CLIENTS, ROWS, SIZE))


def made(sigma: float | None = 1.0, inner=cost, outer=cost, clip=1e3, **options: Any) -> hp.Task:
    task = hp.Task(
        inner=inner, outer=outer, params=X, hypers=X, train=ALL_ROWS, validation=ALL_ROWS, holdout=ALL_ROWS, **options
    )
    bounds: Any = {"clip": clip, "curvature": clip, "coupling": clip}
    return task if sigma is None else task.private(noise=hp.privacy.Gaussian(sigma), **bounds)


def refused(call):
    with pytest.raises(hp.InvalidInput) as caught:
        call()
    return str(caught.value)


class OwnGradient(InnerSolver):
    """A method that computes gradients of the cost itself."""

    info = MethodInfo(network="any", target="inner", sends="params", paper="")

    def program(self, problem):
        def step(state, ctx):
            gradient = jax.grad(problem.inner_cost)(state.params, state.hyper, full_batch(ctx.data.train))
            return InnerState(state.params - 0.1 * gradient, state.hyper)

        return Repeat(Local(step), 3, name="OwnGradient")


def test_ones_own_gradient_is_refused_on_a_private_task_alone():
    said = refused(lambda: hp.train(made(), OwnGradient(), NETWORK, key=0))
    line = OwnGradient.program.__code__.co_firstlineno + 1
    assert f"test_flow.py:{line} OwnGradient.program.step" in said
    assert ".params" in said
    hp.train(made(None), OwnGradient(), NETWORK, key=0)


def test_likelihoods_of_fedem_are_refused():
    rows = jnp.ones((CLIENTS, ROWS, SIZE)), jnp.zeros((CLIENTS, ROWS), jnp.int32)
    task = hp.personalize.MTL(2).task(Layered(SIZE, 2), train=rows, key=0, outer_on="train")
    private = task.private(clip=1.0, noise=hp.privacy.Gaussian(1.0))
    said = refused(lambda: hp.train(private, FedEM(2, 0.1), NETWORK, key=0))
    assert "fedem.py:" in said
    assert ".hyper" in said


PAIR: Any = {"inner": hp.SGP(3, 0.1), "hypergradient": hp.HGP(2, 2, 0.1), "steps": 2}
SGD = hp.optimizer("sgd", learning_rate=0.1)


def test_early_stopping_without_bounds_is_refused_with_the_reason():
    stop = hp.EarlyStopping("cost", on="holdout", patience=2)
    method = hp.PDBO(**PAIR, outer=SGD, stop=stop)
    said = refused(lambda: hp.solve(made(), method, NETWORK, key=0))
    assert "PDBO.stop.bounds" in said
    assert "noise hides a metric within bounds" in said
    # Tracing its leaves gives the same result.
    task = made()
    said = refusal(stop.program(task.problem), _Watched(X, X, StoppingState.start(X, X)), one_client(task.data))
    assert ".watch.own" in said
    assert "stopping.py:" in said


class _Watched(eqx.Module):
    params: PyTree
    hyper: PyTree
    watch: StoppingState


def test_metrics_and_costs_are_not_measured():
    task = made()
    assert "metrics.loss" in refused(
        lambda: hp.train(task, hp.SGP(3, 0.1), NETWORK, key=0, metrics={"loss": cost}, every=1)
    )
    found = hp.train(task, hp.SGP(3, 0.1), NETWORK, key=0, every=1)
    assert found.history is not None
    assert found.history.recorded_cost is None
    assert hp.solve(task, hp.PDBO(**PAIR, outer=SGD), NETWORK, key=0).history.recorded_cost is None
    assert "private task" in refused(
        lambda: hp.tune(task, hp.SGP(3, 0.1), NETWORK, key=0, over={"step_size": [0.1, 0.2]}, on="holdout")
    )


def test_verbs_about_exact_values_are_refused():
    task, method = made(), hp.HGP(3, 2, 0.1)
    for call in (
        lambda: hp.check(task, method, NETWORK, key=0),
        lambda: hp.influence.scores(task, method, NETWORK, key=0),
        lambda: hp.influence.group_score(task, method, NETWORK, hp.influence.without(task, [(0, 0)]), key=0),
    ):
        assert "one without noise" in refused(call)


def test_records_that_look_at_data_are_refused():
    def peek(state, ctx):
        return jnp.mean(ctx.data.train)

    def run(record):
        return hp.hypergradient(made(), hp.HGP(3, 2, 0.1), NETWORK, key=0, record={"HGP": record})

    said = refused(lambda: run(peek))
    assert "test_flow.py:" in said
    assert "peek" in said
    assert run(lambda state, ctx: state.u).history["HGP"].shape == (2, CLIENTS, SIZE)


def test_hessians_are_refused_by_the_verb():
    said = refused(lambda: hp.hypergradient(made(), hp.hypergradients.Dense(), NETWORK, key=0))
    assert "a cost with its first and second derivative" in said
    assert "dense.py:" in said


@pytest.mark.parametrize("name", ["inner", "outer"])
def test_costs_of_all_examples_together_are_refused(name):
    def whole(x, hyper, rows):
        return jnp.mean(cost(x, hyper, rows))

    costs: Any = {name: whole}
    said = refused(lambda: hp.train(made(**costs), hp.SGP(3, 0.1), NETWORK, key=0))
    assert f"task.{name}" in said
    assert "one loss per example" in said


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip": 0.0}, "task.private.clip"),
        ({"clip": float("nan")}, "task.private.clip"),
        ({"curvature": -1.0}, "task.private.curvature"),
        ({"coupling": float("inf")}, "task.private.coupling"),
        ({"hypers": "per example"}, "task.private.hypers"),
        ({"hypers": "noisy"}, "task.private.hypers"),
        ({"clip": "much"}, "task.private.clip"),
        ({"noise": 1.0}, "task.private.noise"),
        ({"noise": hp.privacy.Gaussian}, "task.private.noise"),
    ],
)
def test_options_out_of_range_are_refused(options, field):
    given: Any = {"clip": 1.0, "noise": hp.privacy.Gaussian(1.0), **options}
    with pytest.raises(hp.InvalidInput) as caught:
        made(None).private(**given)
    assert caught.value.field == field


def test_a_table_makes_a_private_task():
    table: Any = {"clip": 1.0, "noise": {"name": "Laplace", "scale": {"name": "power", "scale": 2.0, "exponent": 0.5}}}
    task = build(made(None).private, table, "task.private")
    assert task.privacy == Noise(hp.privacy.Laplace(hp.schedule("power", 2.0, 0.5)), 1.0)
    for change, field in (
        ({"clip": -1.0}, "task.private.clip"),
        ({"noise": {"name": "Laplac", "scale": 1.0}}, "task.private.noise.name"),
        ({"hyper": "shared"}, "task.private.hyper"),
    ):
        with pytest.raises(hp.InvalidInput) as caught:
            build(made(None).private, {**table, **change}, "task.private")
        assert caught.value.field == field


def test_what_methods_need_of_the_bounds_is_named():
    task = made(None).private(clip=1.0, noise=hp.privacy.Gaussian(1.0))
    assert "task.private.curvature" in refused(lambda: hp.hypergradient(task, hp.HGP(3, 2, 0.1), NETWORK, key=0))
    half = made(None).private(clip=1.0, noise=hp.privacy.Gaussian(1.0), curvature=1.0)
    assert "task.private.coupling" in refused(lambda: hp.hypergradient(half, hp.HGP(3, 2, 0.1), NETWORK, key=0))
    assert "task.private.curvature" in refused(lambda: hp.hypergradient(task, hp.TrackedHGP(3), NETWORK, key=0))
    twice = hp.HGP(3, 2, 0.1, independent_batches=True)
    assert "HGP.independent_batches" in refused(lambda: hp.hypergradient(made(), twice, NETWORK, key=0))
    assert "not private yet" in refused(lambda: half.private(clip=1.0, noise=hp.privacy.Gaussian(1.0)))


KEPT = jnp.asarray(np.asarray(ALL_ROWS)[0, 0])


class Near(eqx.Module):
    """A penalty that contains examples."""

    rows: Any

    def __call__(self, x, hyper):
        return jnp.sum((x - jnp.mean(self.rows, axis=0)) ** 2)


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": lambda x, hyper: jnp.sum((x - KEPT) ** 2)},
        {"penalty": lambda x, hyper: jnp.sum((x - np.asarray(KEPT)) ** 2)},
        {"penalty": Near(ALL_ROWS[1])},
        {"inner": lambda x, hyper, rows: cost(x, hyper, rows) + x @ jnp.mean(ALL_ROWS[0], axis=0)},
    ],
)
def test_costs_and_penalties_that_hold_examples_are_refused(options):
    assert "holds the task's own examples" in refused(lambda: hp.train(made(**options), hp.SGP(2, 0.1), NETWORK, key=0))


def test_other_arrays_in_costs_pass():
    def shifted(x, hyper, rows):
        return cost(x + jnp.arange(4.0) + jnp.ones(4) + jnp.eye(4)[0], hyper, rows)

    hp.train(made(inner=shifted), hp.SGP(2, 0.1), NETWORK, key=0)


def test_a_task_that_was_trained_without_noise_is_not_private():
    trained = hp.train(made(None), hp.SGP(2, 0.1), NETWORK, key=0)
    assert "a trained task" in refused(lambda: trained.task.private(clip=1.0, noise=hp.privacy.Gaussian(1.0)))


def test_references_are_refused():
    held = jax.new_ref(X)

    def leaf(x, ctx):
        held[...] = jnp.mean(examples(ctx), axis=0)
        return x

    assert "swap in a leaf" in refusal(Local(leaf))


def test_host_calls_are_refused_even_where_nothing_is_released():
    def leaf(x, ctx):
        jax.debug.print("{}", examples(ctx))
        return x

    said = refusal(Local(leaf))
    assert "debug_print" in said or "callback" in said
    assert "test_flow.py:" in said


@pytest.mark.parametrize(
    "method",
    [
        hp.FedAvg(2, 0.1, 2, 5),
        pytest.param(FedProx(2, 0.1, 2, 5, penalty=0.5), marks=pytest.mark.long),
        pytest.param(PFedMe(2, 0.1, 1.0, batch_size=5), marks=pytest.mark.long),
    ],
)
def test_federated_methods_run_with_noise(method):
    def trained(sigma):
        return hp.train(made(sigma), method, NETWORK, key=0)

    plain, quiet, noisy = trained(None), trained(1e-9), trained(1.0)
    np.testing.assert_allclose(quiet.params, plain.params, atol=1e-4)
    assert np.std(np.asarray(noisy.params - plain.params)) > 1
    assert noisy.costs.gradients == plain.costs.gradients == sum(noisy.privacy.releases.values())
    assert noisy.costs.accesses == plain.costs.accesses == noisy.privacy.releases


@pytest.mark.long
def test_ragged_clients_and_l2_are_private_too():
    listed = [np.asarray(rows[: 4 + client]) for client, rows in enumerate(ALL_ROWS)]
    task = hp.Task(inner=cost, outer=cost, params=X, hypers=X, train=listed, validation=listed).with_l2(0.1)
    quiet = task.private(clip=1e3, noise=hp.privacy.Gaussian(1e-9), curvature=1e3, coupling=1e3)
    method = hp.PDBO(**PAIR, outer=SGD)
    plain, found = (hp.solve(each, method, NETWORK, key=0) for each in (task, quiet))
    np.testing.assert_allclose(found.hypers, plain.hypers, atol=1e-5)
    np.testing.assert_allclose(found.params, plain.params, atol=1e-5)
    assert quiet.problem.private


class SendsHypers(Algorithm):
    """Algorithm that mixes all clients' hypers, which may belong to single examples."""

    info = MethodInfo(network="any", target="direct", sends="hypers", paper="")
    steps: int = eqx.field(static=True, default=2)

    def program(self, problem):
        exchange = Exchange(lambda state, ctx: state.hyper, lambda state, inbox, ctx: state)
        return Repeat(exchange, self.steps, name=self.loop)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (SendsHypers(), {}, "hypers of single examples in its result"),
        (None, {"penalty": lambda x, weights: jnp.sum(weights) * jnp.sum(x**2)}, ".z, without noise"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), {}, ".hyper, without noise"),
    ],
)
def test_hypers_of_examples_that_leave_their_owner_are_refused(method, options, said):
    def weighted(x, weight, rows):
        return jax.nn.sigmoid(weight) * jnp.sum((x - rows) ** 2, axis=-1)

    def plain(x, weight, rows):
        return jnp.sum((x - rows) ** 2, axis=-1)

    shared: Any = {"inner": weighted, "outer": plain, "params": X, "train": ALL_ROWS, "validation": ALL_ROWS}
    task = hp.Task(**shared, hypers=hp.per_example(ALL_ROWS), **options)
    task = task.private(clip=1e3, noise=hp.privacy.Gaussian(1e-9), curvature=1e3, hypers="per example")
    if not isinstance(method, Algorithm):
        method = hp.PDBO(**PAIR, outer=method or SGD)
    assert said in refused(lambda: hp.solve(task, method, NETWORK, key=0))


@pytest.mark.parametrize("outer", ["sgd", pytest.param("adam", marks=pytest.mark.long)])
@pytest.mark.long
def test_one_hyper_per_example_stays_clean(outer):
    def weighted(x, weight, rows):
        return jax.nn.sigmoid(weight) * jnp.sum((x - rows) ** 2, axis=-1)

    def plain(x, weight, rows):
        return jnp.sum((x - rows) ** 2, axis=-1)

    shared: Any = {"inner": weighted, "outer": plain, "params": X, "train": ALL_ROWS, "validation": ALL_ROWS}
    task = hp.Task(**shared, hypers=hp.per_example(ALL_ROWS))
    quiet = task.private(clip=1e3, noise=hp.privacy.Gaussian(1e-9), curvature=1e3, hypers="per example")
    method = hp.PDBO(**PAIR, outer=hp.optimizer(outer, learning_rate=0.1))
    found, right = hp.solve(quiet, method, NETWORK, key=0), hp.solve(task, method, NETWORK, key=0)
    np.testing.assert_allclose(found.hypers, right.hypers, atol=1e-5)
    # three solves of three steps, two estimates with one transmitted product each, two outer gradients
    assert found.privacy.releases == {"train": 3 * 3 + 2 * 1, "validation": 2}
    batched = hp.train(quiet, hp.SGP(3, 0.1, batch_size=5), NETWORK, key=0)
    np.testing.assert_allclose(
        batched.params, hp.train(task, hp.SGP(3, 0.1, batch_size=5), NETWORK, key=0).params, atol=1e-5
    )
