"""The program of one round of an audit: it shares means, trains all runs, and sums paired losses over parties."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hyperpush.audits.plan import Plan
from hyperpush.audits.splits import Records
from hyperpush.inner.base import InnerState
from hyperpush.inner.tree_newton import TreeNewton
from hyperpush.programs import Average, Context, Local, Node, ProgramRecipe, Runs, Scope, Sequence, stack
from hyperpush.programs.recipe import what_is_read
from hyperpush.programs.report import Report
from hyperpush.tables.heads import LinearHead
from hyperpush.tables.scaling import CONSTANT
from hyperpush.task.problem import Problem

INTERCEPT = 1e-6  # L2 rate on intercepts; its effect on losses is too small to change verdicts


class SharedMeans(eqx.Module):
    """Means and scales that all parties share, by group of runs: of the features, then of a numeric label."""

    mean: Float[Array, "*n g width"]
    scale: Float[Array, "*n g width"]  # 1/deviation; 0 for constant features
    rows: Float[Array, "*n g parties"]  # training rows by party


class Hyper(eqx.Module):
    """Settings and constants of one run, as the hyper of its task; only `member` differs between parties."""

    fold: Array
    inner: Array
    rate: Array
    member: Array  # 1 if this party's records count in the run
    factor: Array  # parties over training rows
    mean: Array
    scale: Array


class FoldLosses(eqx.Module):
    """One party's losses on its own held-out records, [runs, records], which are never sent."""

    loss: Array
    score: Array  # the first linear score
    right: Array  # 1 where the most likely class is right


class Auditor(eqx.Module):
    """One party's state in a round of an audit."""

    plan: Plan
    means: SharedMeans | None = None
    params: Float[Array, "*n k rows width"] | None = None
    report: Report | None = None
    losses: FoldLosses | None = None
    # Sums over all other parties that count in the run. Columns: losses, records, loss differences, squares of these
    # differences, records.
    sums: Float[Array, "*n k 5"] | None = None


class Round(eqx.Module):
    """The model of an audit's round, and the solvers of its runs.

    Args:
        head: The linear model.
        solved: The number of first runs that are trained to their solution. The other runs take Newton steps from the
            params of their reference run.
        solver: The solver of the first runs.
        stepper: The solver that takes the Newton steps of the other runs; None if there are none.
    """

    head: LinearHead
    solved: int = eqx.field(static=True)
    solver: TreeNewton
    stepper: TreeNewton | None = None

    def recipe(self) -> ProgramRecipe:
        """Return the program for an engine, whose states are `Auditor`, and whose data hold `Records` as `train`."""
        inner, penalty = RunLoss(self.head), RunPenalty(self.head)
        reads = what_is_read((inner, penalty))
        return ProgramRecipe(_program, (self, Problem(inner, inner, penalty, outer_on="train", reads=reads)))


class RunLoss(eqx.Module):
    """Inner cost of a run: a party's part of the mean loss over all training records, times the number of parties."""

    head: LinearHead

    def __call__(self, params: PyTree, hyper: Hyper, records: Records) -> Float[Array, ""]:
        inputs, labels = scale_records(self.head, records, hyper.mean, hyper.scale)
        losses = self.head.losses(params, inputs, labels)
        return hyper.factor * hyper.member * (trains(records, hyper.fold, hyper.inner) @ losses)


class RunPenalty(eqx.Module):
    """Penalty of a run: the model's penalty at the run's L2 rate, plus a very small penalty on intercepts.

    Without the small penalty, the own model of a party with only one class in training would not exist.
    """

    head: LinearHead

    def __call__(self, params: PyTree, hyper: Hyper) -> Float[Array, ""]:
        return self.head.penalty(params, hyper.rate) + 0.5 * INTERCEPT * jnp.sum(params[:, -1] ** 2)


def trains(records: Records, fold: Array, inner: Array) -> Float[Array, " m"]:
    """Return a mask that is 1 for the training records of a run with these folds held out, else 0."""
    used = (records.fold >= 0) & (records.fold != fold) & (records.inner != inner)
    return used.astype(records.values.dtype)


def holds(records: Records, fold: Array, inner: Array) -> Float[Array, " m"]:
    """Return a mask that is 1 for the test records of a run: its fold, or the inner fold of its training part."""
    by_inner = (records.fold >= 0) & (records.fold != fold) & (records.inner == inner)
    return jnp.where(inner >= 0, by_inner, records.fold == fold).astype(records.values.dtype)


def scale_records(head: LinearHead, records: Records, mean: Array, scale: Array) -> tuple[Array, Array]:
    """Return scaled features, with 0 for missing values, and labels. Numeric labels are scaled, classes are not."""
    inputs = records.present * (records.values - mean[: head.width]) * scale[: head.width]
    if head.kind == "softmax":
        return inputs, records.labels
    return inputs, (records.labels - mean[-1]) * scale[-1]


def _program(audit: Round, problem: Problem) -> Node:
    nodes = [share_sums(audit.head), share_squares(audit.head), train_runs(audit, problem, 0, audit.solved)]
    if audit.stepper is not None:
        nodes.append(train_runs(audit, problem, audit.solved, None))
    return Sequence(*nodes, Local(lambda state, ctx: _judge(audit.head, state, ctx)), _share_losses())


# ------------------------------------------------------------------------------------------------- shared means


def _joined(head: LinearHead, records: Records) -> tuple[Array, Array]:
    """Return the values to scale (features and numeric labels) and a mask that is 1 where a value is present."""
    if head.kind == "softmax":
        return records.values, records.present
    labels = records.labels[:, None]
    return jnp.concatenate([records.values, labels], 1), jnp.concatenate([records.present, jnp.ones_like(labels)], 1)


def _own_rows(state: Auditor, ctx: Context) -> Float[Array, "g m"]:
    """Return a mask of the party's own training rows in each group; it is 0 for a party that does not count."""
    plan = state.plan
    rows = jax.vmap(lambda fold, inner: trains(ctx.data.train, fold, inner))(plan.group_fold, plan.group_inner)
    return plan.counts[ctx.client] * rows


def share_sums(head: LinearHead) -> Node:
    def get(state: Auditor, ctx: Context) -> tuple[Any, Array]:
        rows, (values, present) = _own_rows(state, ctx), _joined(head, ctx.data.train)
        own = (jnp.arange(ctx.clients) == ctx.client) * jnp.sum(rows, 1)[:, None]
        return (rows @ (values * present), rows @ present, own), jnp.ones(())

    def answer(state: Auditor, means: Any, ctx: Context) -> SharedMeans:
        total, present, own = means
        mean = total / jnp.where(present > 0, present, 1)
        return SharedMeans(mean, jnp.zeros_like(mean), jnp.round(own * ctx.clients))

    def put(state: Auditor, found: SharedMeans, mass: Any, ctx: Context) -> Auditor:
        return replace(state, means=found)

    return Average(get, put, rounds=1, by="tree", answer=answer)


def share_squares(head: LinearHead) -> Node:
    def get(state: Auditor, ctx: Context) -> tuple[Any, Array]:
        assert state.means is not None
        rows, (values, present) = _own_rows(state, ctx), _joined(head, ctx.data.train)
        squares = jax.vmap(lambda own, mean: own @ (present * (values - mean) ** 2))(rows, state.means.mean)
        return squares, jnp.ones(())

    def answer(state: Auditor, squares: Any, ctx: Context) -> SharedMeans:
        assert state.means is not None
        found = state.means
        rows = jnp.sum(found.rows, axis=1, keepdims=True)
        deviation = jnp.sqrt(squares * ctx.clients / jnp.maximum(rows, 1))
        varies = deviation > CONSTANT * jnp.abs(found.mean)
        return replace(found, scale=jnp.where(varies, 1 / jnp.where(varies, deviation, 1), 0))

    def put(state: Auditor, found: SharedMeans, mass: Any, ctx: Context) -> Auditor:
        return replace(state, means=found)

    return Average(get, put, rounds=1, by="tree", answer=answer)


# ---------------------------------------------------------------------------------------------------- trainings


def hypers_of(state: Auditor, ctx: Context) -> Hyper:
    """Return the settings and constants of all runs at this party, with runs on axis 0."""
    plan, means = state.plan, state.means
    assert means is not None

    def one(fold: Array, inner: Array, leaver: Array, rate: Array, group: Array) -> Hyper:
        stays = plan.counts * (jnp.arange(ctx.clients) != leaver)
        rows = jnp.sum(stays * means.rows[group])
        factor = ctx.clients / jnp.maximum(rows, 1)
        return Hyper(fold, inner, rate, stays[ctx.client], factor, means.mean[group], means.scale[group])

    return jax.vmap(one)(plan.fold, plan.inner, plan.leaver, plan.rate, plan.group)


def train_runs(audit: Round, problem: Problem, first: int, last: int | None) -> Node:
    """Return the node that trains the runs from `first` to `last`.

    The first runs of a round start from the model's start, and later runs from the params of their reference runs.
    """
    some = slice(first, last)
    solver = audit.solver if first == 0 else audit.stepper
    assert solver is not None

    def enter(state: Auditor, ctx: Context) -> Runs:
        hypers = jax.tree.map(lambda leaf: leaf[some], hypers_of(state, ctx))
        if state.params is None:
            start = jnp.repeat(audit.head.start()[None], hypers.rate.shape[0], axis=0)
        else:
            start = state.params[state.plan.against[some]]
        return Runs.start(InnerState(start, hypers))

    def leave(state: Auditor, runs: Runs, ctx: Context) -> Auditor:
        found: InnerState = runs.state
        if state.params is None:
            return replace(state, params=found.params, report=found.report)
        return replace(state, params=jnp.concatenate([state.params, found.params]))

    return Scope(stack(problem.protect(solver.program(problem))), enter, leave)


# ------------------------------------------------------------------------------------------------------- losses


def _judge(head: LinearHead, state: Auditor, ctx: Context) -> Auditor:
    """Add the losses of all runs on the party's own held-out records, in units of the label; 0 for other records."""
    records: Records = ctx.data.train

    def one(params: Array, hyper: Hyper) -> FoldLosses:
        inputs, labels = scale_records(head, records, hyper.mean, hyper.scale)
        mask = holds(records, hyper.fold, hyper.inner)
        scores, loss = head.scores(params, inputs), head.losses(params, inputs, labels)
        if head.kind == "regression":
            unit = jnp.where(hyper.scale[-1] > 0, 1 / jnp.where(hyper.scale[-1] > 0, hyper.scale[-1], 1), 0)
            return FoldLosses(mask * loss * unit**2, mask * scores[:, 0], jnp.zeros_like(mask))
        picked = (scores[:, 0] > 0) if head.rows == 1 else jnp.argmax(jnp.pad(scores, ((0, 0), (0, 1))), axis=1)
        return FoldLosses(mask * loss, mask * scores[:, 0], mask * (picked == labels))

    assert state.params is not None
    return replace(state, losses=jax.vmap(one)(state.params, hypers_of(state, ctx)))


def _share_losses() -> Node:
    """Return the node that sums each run's losses over the other parties; only these sums of losses leave a party."""

    def get(state: Auditor, ctx: Context) -> tuple[Array, Array]:
        plan, records, found = state.plan, ctx.data.train, state.losses
        assert found is not None

        def one(loss: Array, fold: Array, inner: Array, leaver: Array, other: Array) -> Array:
            counts = plan.counts[ctx.client] * (ctx.client != leaver)
            rows = jnp.sum(holds(records, fold, inner))
            gain = loss - found.loss[other]
            return counts * jnp.stack([jnp.sum(loss), rows, jnp.sum(gain), gain @ gain, rows])

        sums = jax.vmap(one)(found.loss, plan.fold, plan.inner, plan.leaver, plan.against)
        return sums, jnp.ones(())

    def put(state: Auditor, sums: Array, mass: Any, ctx: Context) -> Auditor:
        return replace(state, sums=sums * ctx.clients)

    return Average(get, put, rounds=1, by="tree")
