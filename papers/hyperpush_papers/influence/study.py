"""Predict the effect of removing examples, retrain without them, compare; then groups, clients and wrong labels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import hyperpush as hp
from hyperpush import influence
from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import panels
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.influence import Effects, Influence, Weights
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush.task.task import Task
from hyperpush_papers.common.data.partition import dirichlet, split, stack
from hyperpush_papers.common.data.sources import Dataset, available, load
from hyperpush_papers.common.models.cnn import CNN, INFLUENCE
from hyperpush_papers.influence.config import InfluenceStudy
from hyperpush_papers.influence.wrong_labels import RATE, hunt_wrong_labels, l2
from hyperpush_papers.papers import items

# shares of the steps after which the step size falls tenfold
MILESTONES = (0.6, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.998, 0.9998)
PAPER = items()["B.table4"].published
TIMED = 5  # timed runs of each kind; the median is reported
AGREEMENT = ("r2", "f1", "kendall", "spearman")

Predict = Callable[[Influence], Float[np.ndarray, " k"]]  # scores of the removed examples
Row = dict[str, Any]


def run(config: InfluenceStudy, run: StudyRun) -> dict[str, Any]:
    """Compare predicted effects of removals with retraining; then groups, clients, and the search for wrong labels."""
    network = hp.network(config.network, config.clients, config.seed, **config.network_options)
    task, described = task_of(config)
    cases = [_case(config, run, task, network, batch, place == 0) for place, batch in enumerate(config.batches)]
    first = cases[0]
    _report(config, run, cases, described)
    result = {
        "model": config.model,
        "data": described,
        **{name: first[name] for name in (*AGREEMENT, "pairs", "timing")},
        "cases": cases,
    }
    if config.hunt.seeds:
        solver = solver_of(config.hunt.steps, RATE, 0)
        result["label_noise"] = hunt_wrong_labels(config, solver, run)
    return result


# ------------------------------------------------------------------------ data and training


def task_of(config: InfluenceStudy) -> tuple[Task, str]:
    """Return the task before training, and a description of its data."""
    if config.model == "logistic":
        made = hp.tasks.logistic(config.clients, config.seed, examples=config.examples, rate=config.l2)
        return made, f"synthetic, {config.examples} examples per client"
    found, generator = draw_images(config), np.random.default_rng(config.seed + 1)
    parts = split(dirichlet(found.labels, config.clients, config.concentration, generator), generator)
    model = INFLUENCE if found.inputs.shape[1] == INFLUENCE.size else CNN((20, 20), (), 10, size=16, kernel=3)

    def losses(params: PyTree, hyper: PyTree, examples: PyTree) -> Float[Array, " m"]:
        images, labels = examples
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels)

    made = hp.Task(
        inner=losses,
        outer=losses,
        penalty=l2,
        params=model.init(jax.random.key(config.seed)),
        hypers=config.l2,
        train=stack(found, parts.train),
        validation=stack(found, parts.validation),
    )
    return made, f"{config.images} digits of {found.note}"


def draw_images(config: InfluenceStudy) -> Dataset:
    """Return the requested number of examples, digits only."""
    name = config.data
    if name == "auto":
        name = "emnist" if available("emnist") else "digits"
    found = load(name)
    digits = np.flatnonzero(found.labels < 10)
    if len(digits) < config.images:
        raise InvalidInput("images", config.images, f"at most {len(digits)}, the digits in {name}")
    generator = np.random.default_rng(config.seed)
    found = found.rows(np.sort(generator.choice(digits, config.images, replace=False)))
    if name == "digits":  # 8×8 pixels are too few for two convolutions
        found = found._replace(inputs=found.inputs.repeat(2, axis=1).repeat(2, axis=2))
    return found


def solver_of(steps: int, rate: float, batch: int) -> hp.SGP:
    """Return SGP whose step size falls tenfold at the paper's milestones, scaled to the number of steps."""
    at = tuple(sorted({round(share * steps) for share in MILESTONES}))
    return hp.SGP(steps, hp.schedule("milestones", rate, at=at), batch_size=batch or None)


@dataclass(frozen=True)
class Trained:
    """One way of training, with the trained params."""

    config: InfluenceStudy
    run: StudyRun
    task: Task  # before training
    network: Network
    solver: hp.SGP
    training_key: PRNGKeyArray
    key: PRNGKeyArray  # key of the estimates

    @cached_property
    def there(self) -> Task:
        """The task at the trained params."""
        with self.run.progress(f"training, {_size(self.solver.batch_size)}", self.solver.steps) as bar:
            return hp.train(self.task, self.solver, self.network, key=self.training_key, hooks=(bar,)).task

    def retrain(self, weights: Sequence[Weights], progress: Callable[[float], None] | None = None) -> Effects:
        """Train with each of these weights, and with all examples, on links and mini-batches of the training run."""
        options: Any = {"key": self.training_key, "at_once": self.config.at_once, "progress": progress}
        return influence.retrain(self.task, self.solver, self.network, weights, **options)

    def changes(self, weights: Sequence[Weights], label: str) -> np.ndarray:
        """Return the change of Σ_k F_k by retraining with each of these weights."""
        title = f"retraining without {label}, {_size(self.solver.batch_size)}"
        with self.run.progress(title, len(weights)) as bar:
            return self.retrain(weights, bar.update).total

    def scores(self, estimator: HypergradientEstimator, damping: float, *, look: bool = False) -> Influence:
        """Return predictions at the trained params; with `look`, also check the curvature there."""
        steps: Any = {"parties": None} if look else {"parties": None, "curvature_steps": 0}
        return influence.scores(self.there, estimator, self.network, key=self.key, damping=damping, **steps)


def _size(batch: int | None) -> str:
    return f"batches of {batch}" if batch else "full batch"


# ------------------------------------------------------------------------ predictions against retraining


def _case(config: InfluenceStudy, run: StudyRun, task: Task, network: Network, batch: int, first: bool) -> Row:
    """Compare predictions with retraining for one way of training; for the first way also groups, times and files."""
    keys = jax.random.split(jax.random.key(config.seed))
    trained = Trained(config, run, task, network, solver_of(config.steps, config.rate, batch), keys[0], keys[1])
    found = trained.scores(hp.TrackedHGP(config.order), config.damping, look=True)
    for sentence in found.warnings:
        run.console.print(f"warning: {sentence}")
    if first:
        _write_rankings(run, found)
        run.save_models("inner-solution", trained.there.params)
    places = found.top(config.removals)
    removals = [influence.without(task, [place]) for place in places]
    actual = trained.changes(removals, "single examples")

    def predict(scores: Influence) -> np.ndarray:
        return np.array([scores.examples[client][number] for client, number in places])

    predicted, kind = predict(found), config.model + ", mini-batches" * bool(batch)
    case = {
        "batch": batch,
        "examples": [len(own) for own in found.examples],
        "damping": config.damping,
        "curvature": None if found.curvature is None else found.curvature._asdict(),
        "warnings": found.warnings,
        **influence.agreement(predicted, actual),
        "paper": {name: float(cells[kind]) for name, cells in PAPER.items() if kind in cells} or None,
        "pairs": np.stack([predicted, actual], 1),
        "rounds": found.estimate.costs.rounds,
        "floats_per_client": found.estimate.costs.floats,
        "methods": _compare_methods(trained, predict, actual),
        "timing": _time_retraining(trained, removals) if first and not batch else None,
    }
    if first:
        case |= _remove_groups(trained, found)
    run.record(**case)
    return case


def _compare_methods(trained: Trained, predict: Predict, actual: np.ndarray) -> list[Row]:
    """Compare predictions with other dampings and estimators on the same removals."""
    config, order = trained.config, trained.config.order
    hgp = hp.HGP(order, config.pushes, config.step, trained.solver.batch_size)
    ways: list[tuple[float, HypergradientEstimator]]
    ways = [*((damping, hp.TrackedHGP(order)) for damping in config.dampings), (0.0, hgp)]
    if config.unrolled:
        ways.append((0.0, hp.hypergradients.ITDBackward(trained.solver)))
    rows: list[Row] = []
    with trained.run.progress("estimators", len(ways)) as bar:
        for damping, estimator in ways:
            rows.append({"method": type(estimator).__name__, "damping": damping})
            try:
                rows[-1] |= _judge(trained, estimator, damping, predict, actual)
            except hp.Diverged as error:
                rows[-1]["failed"] = str(error)
            bar.step()
    return rows


def _judge(
    trained: Trained, estimator: HypergradientEstimator, damping: float, predict: Predict, actual: np.ndarray
) -> Row:
    """Return how well an estimator's predictions agree with retraining."""
    # it starts from the untrained task, and uses the links of the training run
    if isinstance(estimator, hp.hypergradients.ITDBackward):
        scores = influence.scores(
            trained.task, estimator, trained.network, key=trained.training_key, damping=damping, curvature_steps=0
        )
    else:
        scores = trained.scores(estimator, damping)
    guess = predict(scores)
    if not np.all(np.isfinite(guess)):
        raise hp.Diverged(type(estimator).__name__, trained.config.order, "Try another estimator or smaller steps.")
    slope = float(guess @ actual / (guess @ guess)) if np.any(guess) else None
    return {**influence.agreement(guess, actual), "slope": slope, "rounds": scores.costs.rounds}


def _time_retraining(trained: Trained, removals: list[Weights]) -> Row | None:
    """Return seconds of one retraining and of all, each with the run on all examples; medians without compilation."""
    if trained.config.model == "cnn":  # skipped, since it would take as long as the whole study
        return None
    seconds: dict[str, list[float]] = {"one": [], "all": []}
    for _ in range(TIMED):
        for name, weights in (("one", removals[:1]), ("all", removals)):
            begun = time.perf_counter()
            trained.retrain(weights)
            seconds[name].append(time.perf_counter() - begun)
    one, together = (float(np.median(seconds[name])) for name in ("one", "all"))
    return {"one": one, "all": together, "ratio": together / one, "removals": len(removals)}


def _remove_groups(trained: Trained, found: Influence) -> Row:
    """Remove groups of random examples, groups of the most harmful examples, and whole clients."""
    config, generator = trained.config, np.random.default_rng(trained.config.seed)
    places = [(client, number) for client, own in enumerate(found.examples) for number in range(len(own))]
    worst = sorted(places, key=lambda place: found.examples[place[0]][place[1]])
    groups: list[tuple[Row, list[Any], list[int]]] = []  # first entries of a group's row, its examples, its clients
    for size in config.groups:
        if size < len(places):
            drawn = [places[i] for i in generator.permutation(len(places))[:size]]
            groups.append(({"kind": "random", "size": size}, drawn, []))
            groups.append(({"kind": "most harmful", "size": size}, worst[:size], []))
    if config.leave:
        groups += [({"kind": "client", "client": client}, [], [client]) for client in range(config.clients)]
    if not groups:
        return {"groups": [], "leaving": []}
    weights = [influence.without(trained.task, examples, clients) for _, examples, clients in groups]
    actual = trained.changes(weights, "groups and clients")
    rows = []
    for (row, examples, clients), own, change in zip(groups, weights, actual, strict=True):
        added = sum(found.examples[client][place] for client, place in examples) + sum(found.totals[clients])
        rows.append(row | {"sum_of_scores": float(added), "newton": _newton(trained, own), "actual": float(change)})
    return {
        "groups": [row for row in rows if row["kind"] != "client"],
        "leaving": [row for row in rows if row["kind"] == "client"],
    }


def _newton(trained: Trained, weights: Weights) -> float | None:
    """Return the effects by a Newton step with these weights; None if it diverges."""
    # acceleration diverges if a client without examples lacks curvature
    estimator = hp.TrackedHGP(acceleration=0)
    damping = trained.config.damping
    try:
        found = influence.group_score(
            trained.there, estimator, trained.network, weights, key=trained.key, damping=damping
        )
    except hp.Diverged:
        return None
    return float(found.total[0]) if np.isfinite(found.total[0]) else None


# ------------------------------------------------------------------------ files, figures and tables


def _write_rankings(run: StudyRun, found: Influence) -> None:
    """Write each client's ranking of its own examples: rank 1 hurts all clients most."""
    for client, scores in enumerate(found.examples):
        ranks = np.argsort(found.ranking(client)) + 1
        lines = [f"{number},{score:.9g},{rank}" for number, (score, rank) in enumerate(zip(scores, ranks, strict=True))]
        run.write(f"client-{client}/influence.csv", "\n".join(["instance,score,rank", *lines]) + "\n")


def _report(config: InfluenceStudy, run: StudyRun, cases: list[Row], described: str) -> None:
    """Draw scatter plots and show tables."""
    figure, axes = panels(len(cases))
    for axis, case in zip(axes, cases, strict=True):
        pairs = case["pairs"]
        axis.plot([pairs.min(), pairs.max()], [pairs.min(), pairs.max()], color="gray", linewidth=0.8)
        axis.scatter(*pairs.T, s=12)
        axis.set(xlabel="predicted change of Σ F", ylabel="change after retraining", title=_size(case["batch"]))
        axis.locator_params(axis="x", nbins=5)
    run.figure("removals", figure)
    title = f"{config.model} on {described}: predictions against {config.removals} retrainings"
    columns = ("batch", "method", "damping", "R²", "F1", "Kendall τ", "Spearman ρ", "slope")
    run.table(title, columns, [line for case in cases for line in _lines(case)])
    first = cases[0]
    if together := [*first["groups"], *first["leaving"]]:
        columns = ("kind", "size or client", "sum of scores", "Newton step", "actual")
        run.table("removed together", columns, [list(row.values()) for row in together])
    if timing := first["timing"]:
        seconds = f"{timing['all']:.3g} s, {timing['ratio']:.2g} times one"
        run.console.print(f"{timing['removals']} retrainings took {seconds}")


def _lines(case: Row) -> list[tuple[Any, ...]]:
    """Return the rows of a table: the chosen estimator, the other estimators, and the paper's numbers."""
    rows = [{**case, "method": "TrackedHGP (chosen)"}, *case["methods"]]
    if case["paper"]:
        rows.append({"method": "HGP (the paper)", "damping": 0.0, **case["paper"]})
    names = ("method", "damping", *AGREEMENT, "slope")
    return [(case["batch"] or "all", *(row.get(name) for name in names)) for row in rows]
