"""Predict the effect of leaving out each record and party, learn weights, drop, and compare with every control."""

import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

import hyperpush as hp
from hyperpush import influence
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush.task.task import Task
from hyperpush_papers.quickstart import report
from hyperpush_papers.quickstart.config import Quickstart
from hyperpush_papers.quickstart.controls import STEP_SIZE, Choice, Trainer
from hyperpush_papers.quickstart.figure import draw
from hyperpush_papers.quickstart.parties import Kind, Parties, make_parties, make_task
from hyperpush_papers.quickstart.report import Row

PUSHES = 5  # push-sum rounds per average of the short estimates
# long, so that predictions of single removals are accurate
PREDICTOR = hp.HGP(steps=200, pushes=2, step_size=STEP_SIZE)
OUTER = hp.optimizer("adam", learning_rate=0.5)


def run(config: Quickstart, run: StudyRun) -> dict[str, Any]:
    """Run all seeds; show the table and the summary sentence, and draw the figure of the first seed."""
    network = hp.networks.RandomDirected(config.parties, probability=(0.4, 0.8))
    stories: list[Row] = []
    for seed in range(config.seed, config.seed + config.seeds):
        stories.append(Story(config, seed, network).tell(run))
        for row in stories[-1]["rows"]:
            run.record(**row)
    rows = [row for story in stories for row in story["rows"]]
    compared, removals = report.compare(rows), [story["removals"] for story in stories]
    said = report.sentence(compared, removals, config == Quickstart(seed=config.seed, by_record=config.by_record))
    report.show(run, config, compared, removals)
    draw(run, stories[0], compared)
    run.console.print(textwrap.fill(said, 80), highlight=False)
    return {"rows": rows, "comparison": compared, "removals": removals, "sentence": said}


@dataclass(frozen=True)
class Story:
    """Parties, training, predictions, learned weights and comparison for one seed."""

    config: Quickstart
    seed: int
    network: Network

    @cached_property
    def parties(self) -> Parties:
        return make_parties(self.config, self.seed)

    @cached_property
    def task(self) -> Task:
        return make_task(self.parties, self.seed)

    @cached_property
    def solver(self) -> hp.SGP:
        return hp.SGP(self.config.steps, STEP_SIZE)

    @cached_property
    def trained(self) -> hp.Training:
        """The shared model, trained on all records without the trusted ones."""
        return hp.train(self.task, self.solver, self.network, key=self.seed)

    @property
    def short(self) -> hp.HGP:
        """The short estimator with which weights are learned."""
        return hp.HGP(self.config.terms, PUSHES, 0.3)

    def tell(self, run: StudyRun) -> Row:
        """Compute predictions, compare them with retraining, learn weights, and return the rows of all methods."""
        with run.progress(f"seed {self.seed}", 4) as bar:
            found = self.predict(PREDICTOR)
            bar.step()
            removals, changes = self.check(found)
            bar.step()
            solutions = {"party": self.solve("party")}
            if self.config.by_record:
                solutions["record"] = self.solve("record")
            bar.step()
            trainer = Trainer(self.parties, self.network, self.config.steps, self.seed)
            rows = trainer.rows([*self.choices(found, changes), *self.learned(solutions)], self.trained)
        common = {"seed": self.seed}
        return {
            "rows": [common | row for row in rows],
            "removals": common | removals,
            "parties": self.parties,
            "scores": found,
            "weights": weights_of(solutions["party"]),
        }

    # ------------------------------------------------------------------ predictions

    def predict(self, estimator: hp.HGP) -> influence.Influence:
        """Predict from one estimate how removing each record and each party changes the total cost."""
        return influence.scores(
            self.trained.task, estimator, self.network, key=self.seed, curvature_steps=0, parties=None
        )

    def check(self, found: influence.Influence) -> tuple[Row, Float[np.ndarray, " n"]]:
        """Compare predicted and real changes for parties and some records; also return the real changes of parties."""
        n, records = self.config.parties, self.config.records
        drawn = np.random.default_rng(self.seed).permutation(n * records)[: self.config.removals]
        places = [(int(place) // records, int(place) % records) for place in drawn]
        removals = [influence.without(self.task, clients=[party]) for party in range(n)]
        removals += [influence.without(self.task, [place]) for place in places]
        again = influence.retrain(self.task, self.solver, self.network, removals, key=self.seed)
        actual, full = again.total, again.baseline.sum()
        predicted = {"parties": found.totals, "records": np.array([found.examples[i][j] for i, j in places])}
        real = {"parties": actual[:n], "records": actual[n:]}
        told = {name: report.agreement(predicted[name], real[name]) for name in real}
        return told | {"cost": float(full), "status": str(found.status)}, actual[:n]

    # ------------------------------------------------------------------ weights

    def solve(self, weights: Kind) -> hp.Solution:
        """Learn one weight per party, or per record, that lowers the total cost on trusted records."""
        method = hp.PDBO(inner=self.solver, hypergradient=self.short, outer=OUTER, steps=self.config.outer_steps)
        return hp.solve(make_task(self.parties, self.seed, weights), method, self.network, key=self.seed)

    def learned(self, solutions: dict[str, hp.Solution]) -> list[Choice]:
        """Keep parties or records with a weight of ½ or more."""
        return [
            Choice(
                report.LEARNED[name],
                "hypergradient",
                weights_of(solution).reshape(self.config.parties, -1) >= 0.5,
                self.config.outer_steps + 1,
                solution.costs.floats,
                str(solution.status),
            )
            for name, solution in solutions.items()
        ]

    def choices(self, found: influence.Influence, changes: Float[np.ndarray, " n"]) -> list[Choice]:
        """Return the records to keep by retraining without each party, and by single estimates."""
        one, n, by_record = self.trained.costs.floats, self.config.parties, np.stack(found.examples) >= 0
        first, short = self.predict(hp.HGP(1, PUSHES, STEP_SIZE)), self.predict(self.short)
        return [
            Choice(report.LEAVE_ONE_OUT, "control", changes[:, None] >= 0, n + 1, (n + 1) * one),
            _by_estimate(report.ALIGNED, "control", first, one),
            _by_estimate(report.ESTIMATE.format(self.config.terms), "hypergradient", short, one),
            _by_estimate(report.ESTIMATE.format(PREDICTOR.steps), "hypergradient", found, one),
            _by_estimate(report.BY_RECORD.format(PREDICTOR.steps), "hypergradient", found, one, by_record),
        ]


def _by_estimate(
    name: str, group: str, found: influence.Influence, training: int, kept: np.ndarray | None = None
) -> Choice:
    """Choose the parties, or the given records, that do not hurt according to the estimate."""
    kept = found.totals[:, None] >= 0 if kept is None else kept
    return Choice(name, group, kept, 1, training + found.costs.floats, str(found.status))


def weights_of(solution: hp.Solution) -> Float[np.ndarray, "n ..."]:
    """Return the learned weights σ(λ)."""
    return 1 / (1 + np.exp(-np.asarray(solution.hypers, np.float64)))
