"""Score single records by the change of the other parties' loss without each record."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from hyperpush.audits.plan import NOBODY, PlannedRun, make_plan
from hyperpush.audits.program import (
    Auditor,
    Round,
    RunLoss,
    RunPenalty,
    hypers_of,
    scale_records,
    share_squares,
    share_sums,
    train_runs,
    trains,
)
from hyperpush.audits.result import Named, Record
from hyperpush.audits.rounds import SOLVER, AuditRounds
from hyperpush.audits.splits import ALL, Records
from hyperpush.base.errors import InvalidInput
from hyperpush.programs import Average, Context, Local, Node, ProgramRecipe, Sequence
from hyperpush.programs.recipe import what_is_read
from hyperpush.tables.heads import LinearHead
from hyperpush.tables.read import Tables
from hyperpush.task.problem import Problem

MOST_PARAMS = 1024  # largest number of params of a model whose Hessian is sent and factored


def check_size(head: LinearHead) -> None:
    """Raise `InvalidInput` for a model whose Hessian is too large to score records."""
    if head.size > MOST_PARAMS:
        raise InvalidInput("records", f"True with {head.size:,} params", f"False above {MOST_PARAMS:,} params")


class Scored(eqx.Module):
    """A party's state with the mean Hessian, the sum of all gradients, and the scores of its own records."""

    before: Auditor
    hessian: Float[Array, "*n d d"]
    gradient: Float[Array, "*n d"]  # of the summed losses of all parties that count
    gains: Float[Array, "*n m"] | None = None  # of the party's own records; never sent


def score_records(rounds: AuditRounds, counts: np.ndarray) -> np.ndarray:
    """Return the change of the others' summed training loss without each record; positive: the record helps.

    The model is trained on all N records of the parties that count, and H is its mean Hessian. Removing record q with
    loss ℓ_q moves the params by H⁻¹∇ℓ_q/N. The predicted change is the product of this move and the gradient of the
    others' summed loss.

    Returns:
        One number per party and record; 0 for parties that do not count.
    """
    inner, penalty = RunLoss(rounds.head), RunPenalty(rounds.head)
    problem = Problem(inner, inner, penalty, outer_on="train", reads=what_is_read((inner, penalty)))
    recipe = ProgramRecipe(_program, (Round(rounds.head, 1, SOLVER), problem))
    plan = make_plan([PlannedRun(ALL, NOBODY, rounds.fixed)], counts, rounds.clients)
    return np.asarray(rounds.execute(recipe, plan).gains)


def record_rows(tables: Tables, rounds: AuditRounds, named: list[Named]) -> tuple[Record, ...]:
    """Return a row per record: of the parties not named, then of each named party, each time the most harmful first.

    Records of the parties not named are scored with the model of these parties. Records of a named party are scored
    with the model of the round that named it, which shows the party its harmful records.
    """
    counts, rows = np.zeros(rounds.clients), []
    counts[list(rounds.parties)] = 1
    for row in named:
        place = tables.names.index(row.party)
        rows += _rows_of(tables, score_records(rounds, counts), counts, [place], row.round)
        counts[place] = 0
    left = [int(place) for place in np.nonzero(counts)[0]]
    return (*_rows_of(tables, score_records(rounds, counts), counts, left, 0), *rows)


def _rows_of(tables: Tables, gains: np.ndarray, counts: np.ndarray, parties: list[int], round: int) -> list[Record]:
    """Return a row per record of some parties, the most harmful record first."""
    rows = []
    for party in parties:
        others = int(counts @ tables.counts) - tables.counts[party]
        for line, gain in zip(tables.lines[party], gains[party], strict=False):
            way = "rise" if gain > 0 else "fall"
            says = f"Without it the loss over the others' {others:,} records would {way} by {abs(gain):.3g} in all."
            rows.append(Record(tables.names[party], tables.sources[party], int(line), float(gain), says, round))
    return sorted(rows, key=lambda row: row.gain)


def _program(audit: Round, problem: Problem) -> Node:
    head = audit.head

    def get(state: Auditor, ctx: Context) -> tuple[Any, Array]:
        hyper, params = _only(state, ctx)
        _, _, hessian = problem.expansion(params, hyper, ctx.data.train)
        gradients = hyper.member * _gradients(head, params, hyper, ctx.data.train)
        return (hessian, jnp.sum(gradients, axis=0)), jnp.ones(())

    def put(state: Auditor, means: Any, mass: Any, ctx: Context) -> Scored:
        hessian, gradient = means
        return Scored(state, hessian, gradient * ctx.clients)

    def score(state: Scored, ctx: Context) -> Scored:
        hyper, params = _only(state.before, ctx)
        own = hyper.member * _gradients(head, params, hyper, ctx.data.train)
        others = state.gradient - jnp.sum(own, axis=0)
        rows = ctx.clients / hyper.factor
        return replace(state, gains=own @ jnp.linalg.solve(state.hessian, others) / rows)

    train = train_runs(audit, problem, 0, None)
    return Sequence(share_sums(head), share_squares(head), train, Average(get, put, rounds=1, by="tree"), Local(score))


def _only(state: Auditor, ctx: Context) -> tuple[Any, Array]:
    """Return the settings and the params of the only run, because scoring records trains a single model."""
    assert state.params is not None
    return jax.tree.map(lambda leaf: leaf[0], hypers_of(state, ctx)), state.params[0]


def _gradients(head: LinearHead, params: Array, hyper: Any, records: Records) -> Float[Array, "m d"]:
    """Return the gradient of each record's loss; 0 for padding."""
    inputs, labels = scale_records(head, records, hyper.mean, hyper.scale)
    flat, back = ravel_pytree(params)

    def loss(x: Array, row: Array, label: Array) -> Array:
        return head.losses(back(x), row[None], label[None])[0]

    found = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(flat, inputs, labels)
    return trains(records, hyper.fold, hyper.inner)[:, None] * found
