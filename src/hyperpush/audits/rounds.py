"""Run the rounds of an audit as programs on an engine, and train each party's own models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hyperpush.audits.plan import NOBODY, Plan, PlannedRun, compare_runs, make_plan, rate_runs
from hyperpush.audits.program import Auditor, FoldLosses, Round
from hyperpush.audits.splits import ALL, Records
from hyperpush.audits.watch import AuditWatch
from hyperpush.base.status import Reason, Status
from hyperpush.data.batches import Data
from hyperpush.engines.base import Engine
from hyperpush.engines.compiled.compile import call
from hyperpush.engines.compiled.effort import level_of_one_run
from hyperpush.engines.simulate import evaluate
from hyperpush.inner.tree_newton import TreeNewton
from hyperpush.networks import FullyConnected, Network
from hyperpush.programs.report import Report
from hyperpush.tables.fit import RATES
from hyperpush.tables.heads import LinearHead
from hyperpush.verbs.costs import Costs

AT_ONCE = 4e7  # largest count of numbers in the scaled records of all runs of one program
PACKED = 128  # number of params up to which whole Hessians are sent
SOLVER = TreeNewton(tolerance=1e-8, packed=PACKED)
FIXED = 0.01  # default L2 rate of tests on leavers: tuned rates find less


@dataclass
class Found:
    """Results of the finished runs of an audit.

    Attributes:
        runs: The finished runs, each once.
        loss: Losses of held-out records, [runs, parties, records]; 0 elsewhere.
        score: First linear scores of held-out records.
        right: 1 where the most likely class is right.
        sums: Sums of losses over the other parties, [runs, 5]; see `Auditor.sums`.
        places: The number of each run, by its first four fields.
    """

    runs: list[PlannedRun] = field(default_factory=list)
    loss: Any = None
    score: Any = None
    right: Any = None
    sums: Any = None
    places: dict[tuple[int, int, float, int], int] = field(default_factory=dict)

    def add(self, runs: Sequence[PlannedRun], losses: FoldLosses, sums: np.ndarray | None, skip: int) -> None:
        """Add the runs of a program and their results, except the first `skip` runs, which are known already."""
        start = len(self.runs)
        fresh = runs[skip:]
        self.runs += fresh
        self.places |= {run[:4]: start + number for number, run in enumerate(fresh)}
        for name in ("loss", "score", "right"):
            new = np.moveaxis(np.asarray(getattr(losses, name)), 1, 0)[skip : skip + len(fresh)]
            old = getattr(self, name)
            setattr(self, name, new if old is None else np.concatenate([old, new]))
        if sums is not None:
            new = sums[skip : skip + len(fresh)]
            self.sums = new if self.sums is None else np.concatenate([self.sums, new])

    def at(self, fold: int, leaver: int, rate: float) -> int:
        """Return the number of the run with this held-out fold, leaving party and L2 rate, without an inner fold."""
        return self.places[fold, leaver, rate, ALL]

    def best(self, folds: int, leaver: int, l2: float | None, party: int | None = None) -> list[int]:
        """Return, for each fold, the number of the run at the given L2 rate, or at the best rate by inner folds.

        Args:
            folds: Number of outer folds.
            leaver: The party that leaves; −1 for none.
            l2: The L2 rate; None chooses the rate with the least loss on inner folds.
            party: The party whose losses alone decide the choice; None uses the losses of all parties in training.
        """
        if l2 is not None:
            return [self.at(fold, leaver, l2) for fold in range(folds)]
        return [self.at(fold, leaver, self._best_rate(fold, leaver, party)) for fold in range(folds)]

    def _best_rate(self, fold: int, leaver: int, party: int | None) -> float:
        """Return the rate with the least loss on the inner folds, which are the same for all rates."""

        def loss(rate: float) -> float:
            places = [place for key, place in self.places.items() if key[:3] == (fold, leaver, rate) and key[3] != ALL]
            own = self.sums[places, 0] if party is None else self.loss[places, party].sum(1)
            return float(own.sum())

        return min(RATES, key=loss)


@dataclass
class AuditRounds:
    """Arguments that all rounds of an audit share, and the costs and statuses of the rounds so far."""

    head: LinearHead
    records: Records
    parties: tuple[int, ...]  # parties with enough records to take part
    network: Network
    key: Any
    engine: Engine
    folds: int
    l2: float | None
    newton: bool
    watch: AuditWatch
    costs: Costs = field(default_factory=Costs)
    statuses: list[Status] = field(default_factory=list)
    programs: int = 0

    @property
    def clients(self) -> int:
        return self.network.clients

    @property
    def fixed(self) -> float:
        """L2 rate of the models that test the effects of leaving parties."""
        return FIXED if self.l2 is None else self.l2

    def first(self, counts: np.ndarray) -> Found:
        """Run the first round: models of all parties, models without each party, and models that choose the L2 rate."""
        together, leavers = compare_runs(self.folds, self.parties, self.fixed)
        rates = [] if self.l2 is not None else rate_runs(self.folds, [NOBODY, *self.parties], self.fixed)
        found = Found()
        if self.newton:
            if rates:
                self._run(found, together, rates, counts, solved=True)
            self._run(found, together, leavers, counts, solved=False)
        else:
            self._run(found, together, [*leavers, *rates], counts, solved=True)
        return found

    def again(self, counts: np.ndarray) -> Found:
        """Repeat the tests of leaving parties, with the parties whose `counts` are 1."""
        found = Found()
        self._run(found, *compare_runs(self.folds, self.parties, self.fixed), counts, solved=not self.newton)
        return found

    def _run(
        self, found: Found, together: list[PlannedRun], others: list[PlannedRun], counts: np.ndarray, solved: bool
    ) -> None:
        """Run all runs in as few programs of one shape as memory allows, each with the runs `together` first."""
        most = max(int(AT_ONCE / self.records.values.size) - len(together), 1)
        pieces = max(-(-len(others) // most), 1)
        self.watch.expect(pieces)
        size = -(-len(others) // pieces)
        for piece in range(pieces):
            part = others[piece * size : (piece + 1) * size]
            runs = [*together, *part, *part[-1:] * (size - len(part))]
            audit = Round(self.head, len(runs if solved else together), SOLVER, None if solved else self._stepper())
            after = self.execute(audit.recipe(), make_plan(runs, counts, self.clients))
            skip = len(together) if found.runs else 0
            found.add([*together, *part], after.losses, np.asarray(after.sums)[0], skip)

    def _stepper(self) -> TreeNewton:
        return TreeNewton(tolerance=1e-8, packed=PACKED, steps=self.steps)

    @property
    def steps(self) -> int:
        """Number of Newton steps: one, or three if conjugate gradients solve each step only roughly."""
        return 1 if self.head.size <= PACKED else 3

    def execute(self, recipe: Any, plan: Plan) -> Any:
        """Run a program; record its costs and the status of its runs."""
        run = self.engine.run(recipe, self.network, Auditor(plan), Data({"train": self.records}, "train"), self.key)
        self.costs += Costs.of(run)
        self.programs += 1
        self.statuses.append(status_of(getattr(run.states, "before", run.states).report))
        self.watch.tell(self.costs)
        return run.states

    def alone(self) -> Found:
        """Train each party's own models on its own scaled records, by one compiled program for all parties."""
        runs, _ = compare_runs(self.folds, (), self.fixed)
        runs += [] if self.l2 is not None else rate_runs(self.folds, [NOBODY], self.fixed)
        recipe = Round(self.head, len(runs), SOLVER).recipe()
        start = Auditor(make_plan(runs, np.ones(1), 1))
        losses, report = call(_evaluate_alone, (recipe, start, self.records, self.key), level=level_of_one_run)
        # Parties that are too small may lack records to train on.
        self.statuses.append(status_of(jax.tree.map(lambda leaf: leaf[np.array(self.parties)], report)))
        found = Found()
        found.add(runs, losses, None, 0)
        self.watch.tell(self.costs)
        return found


def _evaluate_alone(given: tuple[Any, Auditor, Records, Any], donated: None) -> tuple[FoldLosses, Report]:
    recipe, start, records, key = given

    def one(own: Records) -> tuple[FoldLosses, Report]:
        data = Data({"train": jax.tree.map(lambda leaf: leaf[None], own)}, "train")
        states, _ = evaluate(recipe, FullyConnected(1), start, data, key)
        return jax.tree.map(lambda leaf: leaf[0], (states.losses, states.report))

    return jax.vmap(one)(records)


def status_of(report: Any) -> Status:
    """Return the status of all runs of a program together."""
    reason, error = Reason(int(np.max(report.reason))), np.asarray(report.error)
    runs = error.shape[-1]
    failed = int(np.max(np.sum(np.asarray(report.failed) > 0, axis=-1)))
    known = float(np.max(error)) if np.all(error >= 0) else None
    return Status(reason.converged, reason.text, error=known, runs=runs, failed=failed)
