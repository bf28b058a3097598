"""Four steps on the same parties and a private step, each compared with controls, with standard errors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import t as student

import hyperpush as hp
from hyperpush import influence
from hyperpush.algorithms import Ties
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.personalize import MTL, Clean, Product
from hyperpush.personalize.recipe import losses
from hyperpush.personalize.scores import scores
from hyperpush.runs.run import StudyRun
from hyperpush.verbs.results import Result
from hyperpush_papers.common.data.sources import available
from hyperpush_papers.together.config import STEPS, Together
from hyperpush_papers.together.parties import CLUSTERS, DROPPED, L2, Examples, Parties, auc, deal
from hyperpush_papers.together.private import DATA, PriceOfPrivacy

RATE = 0.5  # step size of SGP
PUSHES = 2
DIRECT = hp.hypergradients.DirectGradient()
MTL_RATE, CLEAN_RATE = 1.0, 0.5  # learning rates of Adam
FROZEN = 1e-12  # a learning rate so small that weights do not change
HALF = float(np.log(1 / 3))  # log weight in the recipe Clean that gives a weight of ½
# Main method of each step, with which its controls are compared.
MAIN = {
    "train": "one model",
    "learn": "together",
    "score": "influence",
    "continue": "drop parties by influence",
    "private": "together, no noise",
}
Row = dict[str, Any]


def run(config: Together, run: StudyRun) -> dict[str, Any]:
    """Run all steps with all seeds; return a table of every step, and the lead over each control."""
    wanted = STEPS[: STEPS.index(config.until) + 1]
    if "private" in wanted and not available(DATA):
        run.console.print(f"private: left out, because {DATA} is not in the folder that HYPERPUSH_DATA names")
        wanted = wanted[:-1]
    rows: list[Row] = []
    with run.progress("seeds", len(config.seeds)) as bar:
        for seed in config.seeds:
            for row in Story(config, seed).rows(wanted):
                run.record(**row)
                rows.append(row)
            bar.step()
    compared = compare(rows)
    for step in wanted:
        _report(run, step, [each for each in compared if each["step"] == step])
    said = [verdict(each) for each in compared if each["gain"] is not None]
    for sentence in said:
        run.console.print(sentence)
    return {"rows": rows, "compared": compared, "verdicts": said}


@dataclass(frozen=True)
class Story:
    """All steps for one seed: parties, links, models and rows."""

    config: Together
    seed: int

    @cached_property
    def parties(self) -> Parties:
        asked = self.config
        sizes = {"examples": asked.examples, "trusted": asked.trusted, "test": asked.test}
        return deal(asked.parties, self.seed, **sizes, mislabel=asked.mislabel, data=asked.data)

    @cached_property
    def network(self) -> hp.networks.Network:
        return hp.networks.RandomDirected(self.config.parties)

    @property
    def engine(self) -> hp.Simulate:
        return hp.Simulate(faults=hp.Faults(loss=self.config.loss) if self.config.loss else None)

    @property
    def estimator(self) -> hp.TrackedHGP:
        return hp.TrackedHGP(self.config.order, 0.3, pushes=PUSHES, tolerance=None)

    def ties(self, links: list[tuple[int, int]]) -> Ties:
        return Ties(links, self.config.strength, entries=("mtl",))

    # ------------------------------------------------------------------ what is run

    def task(self, models: int, train: Examples | None = None, log_weights: Any = 0.0) -> hp.Task:
        """Return the task with mixtures of this many models, and with example weights that start at `log_weights`."""
        made, more = self.parties, {"key": self.seed, "l2": L2, "classes": 10}
        own = made.train if train is None else train
        task = recipes(models).task(made.model, train=own, validation=made.trusted, test=made.test, **more)
        weights = jnp.broadcast_to(jnp.asarray(log_weights, jnp.zeros(()).dtype), task.hypers["clean"].shape)
        return task.at(hypers={**task.hypers, "clean": weights})

    def train(self, task: hp.Task, alone: bool = False, rounds: int = 5) -> hp.Training:
        """Train params at fixed mixtures and weights; with `alone`, each party trains its own params."""
        method = (hp.LocalSGD if alone else hp.SGP)(rounds * self.config.steps, RATE)
        return hp.train(task, method, self.network, key=self.seed, engine=self.engine)

    def train_longer(self, task: hp.Task, alone: bool = False) -> hp.Training:
        """Train params as `train` does, for as many steps as `learn` takes in all."""
        return self.train(task, alone, self.config.outer_steps + 1)

    def learn(
        self,
        task: hp.Task,
        ties: Ties | None,
        clean_rate: float = CLEAN_RATE,
        estimator: HypergradientEstimator | None = None,
    ) -> hp.Solution:
        """Learn mixtures and example weights by PDBO; `clean_rate=FROZEN` keeps the weights fixed."""
        rates = {"mtl": MTL_RATE, "clean": clean_rate}
        method = hp.PDBO(
            inner=hp.SGP(self.config.steps, RATE),
            hypergradient=estimator or self.estimator,
            outer=hp.optimizer("by-name", **{n: hp.optimizer("adam", learning_rate=r) for n, r in rates.items()}),
            steps=self.config.outer_steps,
            restart=False,
            ties=ties,
        )
        return hp.solve(task, method, self.network, key=self.seed, engine=self.engine)

    @cached_property
    def together(self) -> hp.Solution:
        """Mixtures and example weights, learned with the graph's ties."""
        return self.learn(self.task(CLUSTERS), self.ties(self.parties.clusters))

    @cached_property
    def impersonal(self) -> hp.Solution:
        """One shared model with learned example weights, without mixtures."""
        return self.learn(self.task(1), None)

    @cached_property
    def one_model(self) -> hp.Training:
        """One shared model of all examples, trained for as many steps as the other methods of the step `learn`."""
        return self.train_longer(self.task(1))

    @cached_property
    def everyone_alone(self) -> hp.Training:
        """One model per party, trained alone for the same number of steps."""
        return self.train_longer(self.task(1), alone=True)

    @property
    def right_only(self) -> Float[np.ndarray, "n m"]:
        return np.where(self.parties.wrong, DROPPED, 0.0)

    # ------------------------------------------------------------------ the steps

    def rows(self, wanted: tuple[str, ...]) -> Iterator[Row]:
        """Yield a row for every method of the requested steps."""
        steps: dict[str, Callable[[], dict[str, Row]]] = {
            "train": self.train_step,
            "learn": self.learn_step,
            "score": self.score_step,
            "continue": self.continue_step,
            "private": self.private_step,
        }
        for step in wanted:
            for name, row in steps[step]().items():
                yield {"step": step, "method": name, "seed": self.seed, **row}

    def train_step(self) -> dict[str, Row]:
        """Return rows of one model on all examples, on trusted examples, or on right labels, and of training alone."""
        trusted = self.task(1, self.parties.trusted)
        return {
            "one model": self.judge(self.train(self.task(1)), 1),
            "everyone alone": self.judge(self.train(self.task(1), alone=True), 1),
            "trusted data only": self.judge(self.train(trusted), 1),
            "right labels only": self.judge(self.train(self.task(1, log_weights=self.right_only)), 1),
        }

    def learn_step(self) -> dict[str, Row]:
        """Return rows of mixtures and weights together, without each part, with a rewired graph, and of controls."""
        made, several = self.parties, self.task(CLUSTERS)
        graph = self.ties(made.clusters)
        right = self.task(CLUSTERS, log_weights=self.right_only)
        return {
            "together": self.judge(self.together, CLUSTERS),
            "own gradient only": self.judge(self.learn(several, graph, estimator=DIRECT), CLUSTERS),
            "everyone alone": self.judge(self.everyone_alone, 1),
            "one model": self.judge(self.one_model, 1),
            "no graph": self.judge(self.learn(several, None), CLUSTERS),
            "rewired graph": self.judge(self.learn(several, self.ties(made.rewired)), CLUSTERS),
            "no cleaning": self.judge(self.uncleaned, CLUSTERS),
            "no personal part": self.judge(self.impersonal, 1),
            "right labels only": self.judge(self.learn(right, graph, FROZEN), CLUSTERS),
            "right labels only, one model": self.judge(self.train_longer(self.task(1, log_weights=self.right_only)), 1),
        }

    @cached_property
    def uncleaned(self) -> hp.Solution:
        """Mixtures learned with the graph's ties, while all examples have the same weight."""
        return self.learn(self.task(CLUSTERS), self.ties(self.parties.clusters), FROZEN)

    @cached_property
    def influence(self) -> influence.Influence:
        """Influence scores of records and parties at the personal models of `uncleaned`."""
        options: Any = {"key": self.seed, "engine": self.engine, "curvature_steps": 0, "parties": None}
        return influence.scores(self.uncleaned.task, self.estimator, self.network, **options)

    def score_step(self) -> dict[str, Row]:
        """Return rows on how well influence, learned weights and losses find wrong labels and their parties."""
        found, weights = self.influence, np.asarray(self.together.hypers["clean"])
        low = {
            "influence": (found, np.stack(found.examples), found.totals),
            "learned weights": (None, weights, weights.mean(axis=1)),
            "loss": (None, -self.own_losses, -self.own_losses.mean(axis=1)),
        }
        wrong = self.parties.wrong
        bad = np.asarray(wrong.any(axis=1))
        return {
            name: {**_row(result, records, wrong), "auc_wrong_parties": auc(parties, bad)}
            for name, (result, records, parties) in low.items()
        }

    @cached_property
    def own_losses(self) -> Float[np.ndarray, "n m"]:
        """Loss of every training example under its party's model of `uncleaned`."""
        inputs, labels = self.parties.train
        product, made = recipes(CLUSTERS), []
        for client in range(self.config.parties):
            own = self.uncleaned.client(client)
            log_probs = product.log_probs(self.parties.model, own.params, own.hyper, jnp.asarray(inputs[client]))
            made.append(np.asarray(losses(log_probs, jnp.asarray(labels[client]))))
        return np.stack(made)

    def continue_step(self) -> dict[str, Row]:
        """Return rows of continued training, with trusted examples added and harmful data dropped in different ways."""
        weights, scored = np.asarray(self.together.hypers["clean"]), np.stack(self.influence.examples)
        contradicted = self.own_losses > np.quantile(self.own_losses, 1 - np.mean(scored < 0))
        leaving = drop(np.broadcast_to((self.influence.totals < 0)[:, None], scored.shape))
        light = np.mean(2 / (1 + np.exp(-weights)), axis=1, keepdims=True) < 1
        graph, rewired = self.ties(self.parties.clusters), self.ties(self.parties.rewired)
        return {
            "drop parties by influence": self.resume(leaving, graph),
            "drop parties by weights": self.resume(drop(np.broadcast_to(light, scored.shape)), graph),
            "drop records by influence": self.resume(drop(scored < 0), graph),
            "drop records by weights": self.resume(drop(weights < HALF), graph),
            "keep the weights": self.resume(weights, graph),
            "drop records by loss": self.resume(drop(contradicted), graph),
            "own gradient only": self.resume(leaving, graph, estimator=DIRECT),
            "everyone alone": self.train_on(self.everyone_alone, alone=True),
            "one model": self.train_on(self.one_model),
            "no graph": self.resume(leaving, None),
            "rewired graph": self.resume(leaving, rewired),
            "no personal part": self.resume(leaving, None, self.impersonal, models=1),
            "no cleaning": self.resume(np.zeros_like(weights), graph, self.uncleaned),
            "right labels only": self.resume(self.right_only, graph),
        }

    def resume(
        self,
        log_weights: Float[np.ndarray, "n m"],
        ties: Ties | None,
        after: hp.Solution | None = None,
        models: int = CLUSTERS,
        estimator: HypergradientEstimator | None = None,
    ) -> Row:
        """Continue from an earlier solution, with these example weights and with trusted examples in training."""
        known = np.zeros((self.config.parties, self.config.trusted))
        task = self.task(models, self.with_trusted, np.concatenate([log_weights, known], axis=1))
        before = after or self.together
        task = task.at(params=before.params, hypers={**task.hypers, "mtl": before.hypers["mtl"]})
        return self.judge(self.learn(task, ties, FROZEN, estimator), models)

    def train_on(self, before: hp.Training, alone: bool = False) -> Row:
        """Continue training of params only, on all examples and the trusted examples."""
        task = self.task(1, self.with_trusted).at(params=before.params)
        return self.judge(self.train_longer(task, alone), 1)

    @property
    def with_trusted(self) -> Examples:
        """The training examples, followed by the trusted examples."""
        pairs = zip(self.parties.train, self.parties.trusted, strict=True)
        inputs, labels = (np.concatenate(pair, axis=1) for pair in pairs)
        return inputs, labels

    def private_step(self) -> dict[str, Row]:
        """Return the rows of `PriceOfPrivacy`: parties with thousands of records, for every ε."""
        asked = self.config
        return dict(PriceOfPrivacy(self.seed, asked.epsilons, asked.loss, asked.mislabel).rows())

    def judge(self, found: hp.Training | hp.Solution, models: int) -> Row:
        """Return the row of a result: test accuracy, and how well learned weights separate wrong from right labels."""
        made, hypers = self.parties, found.task.hypers
        of = scores(recipes(models), made.model, found.params, hypers, made.test)
        weights = np.asarray(hypers["clean"])
        learned = weights.shape == made.wrong.shape and np.ptp(weights[weights > DROPPED / 2]) > 1e-6
        row = _row(found, weights if learned else None, made.wrong)
        return {**row, "accuracy": of.average, "accuracy_p10": of.p10}


def recipes(models: int) -> Product:
    """Return recipes with a mixture of this many models per party and example weights; 1 is one shared model."""
    return Product([MTL(models=models), Clean()])


def drop(chosen: Bool[np.ndarray, "n m"]) -> Float[np.ndarray, "n m"]:
    """Return log weights that drop these examples."""
    return np.where(chosen, DROPPED, 0.0)


def _row(found: Result | None, suspicion: np.ndarray | None, wrong: Bool[np.ndarray, "n m"]) -> Row:
    """Return the columns that all rows have; low numbers mark suspicious records. The private step fills epsilon."""
    return {
        "accuracy": None,
        "accuracy_p10": None,
        "auc_wrong_labels": None if suspicion is None else auc(suspicion, wrong),
        "bytes": 0 if found is None else found.costs.bytes,
        "epsilon": None,
        "converged": None if found is None else found.status.converged,
    }


# ---------------------------------------------------------------------- what paid


def compare(rows: list[Row]) -> list[Row]:
    """Return means over seeds by step and method, and the lead of the step's main method with its standard error.

    The lead is in accuracy; in the step "score" it is in the AUC of wrong labels. Rows whose status makes no judgment
    lack the count of runs that did not converge.
    """
    made = []
    for step, method in dict.fromkeys((row["step"], row["method"]) for row in rows):
        measure = "auc_wrong_labels" if step == "score" else "accuracy"
        own, main = (_by_seed(rows, step, name) for name in (method, MAIN[step]))
        pairs = [(main[seed][measure], own[seed][measure]) for seed in own]
        # without wrong labels there is no AUC
        ahead = np.array([one - other for one, other in pairs if None not in (one, other)])
        compared = method != MAIN[step] and len(ahead) > 0
        judged = [row["converged"] for row in own.values() if row["converged"] is not None]
        names = ("accuracy", "accuracy_p10", "auc_wrong_labels", "bytes")
        made.append(
            {
                "step": step,
                "method": method,
                **{name: _mean([row[name] for row in own.values()]) for name in names},
                "not_converged": judged.count(False) if judged else None,
                "gain": float(ahead.mean()) if compared else None,
                "standard_error": float(ahead.std(ddof=1) / np.sqrt(len(ahead)))
                if compared and len(ahead) > 1
                else None,
                "seeds": len(ahead),
            }
        )
    return made


def _by_seed(rows: list[Row], step: str, method: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if (row["step"], row["method"]) == (step, method)}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def verdict(row: Row) -> str:
    """Return True if a step's main method beats a control.

    A gain counts if Student's 95 % interval excludes 0: with five seeds, above 2.8 standard errors.
    """
    gain, error, main = row["gain"], row["standard_error"], MAIN[row["step"]]
    said = f"{row['step']}: {main} against {row['method']}: {100 * gain:+.1f} points"
    if error is None:
        return f"{said}, one seed"
    margin = float(student.ppf(0.975, row["seeds"] - 1)) * error
    word = "pays" if gain > margin else ("costs" if gain < -margin else "does not pay")
    return f"{said} ± {100 * error:.1f}: it {word}"


def _report(run: StudyRun, step: str, rows: list[Row]) -> None:
    columns = ("method", "accuracy", "10 % party", "AUC", "MB sent", "not converged", "main − this", "± s.e.")
    names = ("accuracy", "accuracy_p10", "auc_wrong_labels")
    run.table(
        step,
        columns,
        [
            (
                row["method"],
                *(row[name] for name in names),
                row["bytes"] / 1e6,
                row["not_converged"],
                row["gain"],
                row["standard_error"],
            )
            for row in rows
        ],
    )
