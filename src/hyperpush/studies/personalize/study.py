"""The comparison of personal models: deal data out, fit every method, table, figures."""

from collections.abc import Sequence
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike

import hyperpush as hp
from hyperpush import networks, processes, registry
from hyperpush.errors import Diverged, InvalidInput
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.networks import Network
from hyperpush.runs.report.figures import panels
from hyperpush.runs.run import StudyRun
from hyperpush.studies.data import summary
from hyperpush.studies.data.partition import counts
from hyperpush.studies.data.sources import Dataset
from hyperpush.studies.personalize import methods, settings
from hyperpush.studies.personalize.config import Numbers, Personalize, Setting
from hyperpush.studies.personalize.cost import costs, describe_files
from hyperpush.studies.personalize.methods import Fitted, Fitting
from hyperpush.studies.personalize.published import SOURCE, published
from hyperpush.studies.personalize.scenarios import MODELS, Scenario, owned_scenario, read_own, scenario

Row = dict[str, Any]


# ------------------------------------------------------------------------ options


def check(config: Personalize) -> None:
    """What can be refused before data are read."""
    for name in config.methods:
        methods.check(name)
    for field in ("methods", "pushes"):
        values = getattr(config, field)
        if len(set(values)) < len(values):
            raise InvalidInput(field, list(values), "values that differ")
    _check_data(config)
    if config.size == "small" and config.paper != Personalize.model_fields["paper"].default:
        raise InvalidInput("paper", config.paper, "nothing, unless size=paper")
    registry.find("networks", config.network, "network")
    setting = setting_of(config)
    if setting.clients:  # else those of your own data, which are not read yet
        networks.by_name(config.network, setting.clients, config.seed)
    if len(config.pushes) > 1 and setting.estimator in ("directed-rb", "vr-hgp"):
        raise InvalidInput("pushes", list(config.pushes), f"one number: {setting.estimator} pushes once per order")


def _check_data(config: Personalize) -> None:
    """Refuse options that are for other data."""
    if config.data == "own":
        if config.size == "paper" or config.examples or config.dry_run:
            raise InvalidInput("data", "own", "a data set of the papers for size=paper, examples or dry_run")
        return
    for field in ("path", "client", "label", "classes"):
        if getattr(config, field) != Personalize.model_fields[field].default:
            raise InvalidInput(field, getattr(config, field), "nothing, unless data=own")


def setting_of(config: Personalize, owners: int = 0) -> Setting:
    """The size's numbers with the configuration's in their place; `owners` are the clients of your own data."""
    if config.size == "small":
        made = settings.small(config.data)
    else:
        network = networks.by_name(config.network, config.clients or 20, config.seed)
        made = settings.of_paper(config.paper, config.data, config.network, methods.kind(network))
    given = {name: value for name in Numbers.model_fields if (value := getattr(config, name))}
    return made.model_copy(update={"clients": made.clients or owners, **given})


def estimator_of(setting: Setting, pushes: int) -> HypergradientEstimator:
    """The estimator of the cooperative recipes."""
    order, step, batch = setting.order, setting.step, setting.batch
    if setting.estimator == "directed-rb":
        return hp.hypergradients.DirectedRB(order, step, variant="gradient-after", batch_size=batch)
    if setting.estimator == "vr-hgp":
        return hp.hypergradients.VRHGP(order, step, variant="gradient-after", batch_size=batch)
    if setting.estimator == "tracked":
        return hp.TrackedHGP(order, step, pushes, tolerance=None, acceleration=1)
    return hp.HGP(order, pushes, step, batch, keep_mass=True)


# ------------------------------------------------------------------------ the study


class Comparison(NamedTuple):
    """What is compared, and where it is written."""

    config: Personalize
    run: StudyRun
    setting: Setting
    own: Dataset | None  # your own data
    chosen: dict[tuple[str, int], str]  # titles by method and pushes; the first number of pushes is not told
    skipped: dict[str, str]  # why, by method or title

    def scenario(self, seed: int) -> Scenario:
        """Who has which examples."""
        made = self.setting
        if self.own is not None:
            return owned_scenario(self.own, made.clients, seed)
        sizes: Any = {"examples": made.examples, "large": made.large, "clusters": made.clusters}
        return scenario(self.config.data, made.clients, seed, **sizes)

    def network(self, seed: int) -> Network:
        """Who can send to whom."""
        return networks.by_name(self.config.network, self.setting.clients, seed)


def run_personalize(config: Personalize, run: StudyRun) -> dict[str, Any]:
    """A row for every method and seed; curves, weights and accuracies of clients of the first seed."""
    comparison = _prepare(config, run)
    setting, skipped = comparison.setting, comparison.skipped
    if config.dry_run:
        return _dry_run(comparison)
    first = comparison.scenario(config.seed)
    described = summary.show(run, first.data, first.split, first.shift)
    if first.cluster is not None:
        described["cluster"] = first.cluster.tolist()
    rows, details = _compare(comparison, first)
    _show(config, run, rows, skipped)
    _draw_accuracies(run, details)
    _show_weights(run, first, details)
    start = "warm: each outer step continues from where training stands" if setting.again else "anew before each step"
    outer = {name: outer._asdict() for name, outer in setting.outer.items()}
    return {
        "rows": rows,
        "not_applicable": skipped,
        "details": details,
        "data": described,
        "start": start,
        "setting": setting.model_dump() | {"outer": outer},
    }


def _prepare(config: Personalize, run: StudyRun) -> Comparison:
    """The setting, and which methods can run in it."""
    check(config)
    own = read_own(config.path, config.client, config.label, config.classes or None) if config.data == "own" else None
    setting = setting_of(config, 0 if own is None else len(own.owner_names))
    made = Comparison(config, run, setting, own, {}, {})
    network, model = made.network(config.seed), MODELS[config.data][setting.large] if own is None else None
    for name in config.methods:
        if reason := methods.why_not(name, network, model):
            made.skipped[name] = reason
            continue
        for pushes in config.pushes if name in methods.RECIPES else config.pushes[:1]:
            made.chosen[name, pushes] = name if pushes == config.pushes[0] else f"{name}, S = {pushes}"
    return made


def _compare(comparison: Comparison, first: Scenario) -> tuple[list[Row], list[Row]]:
    """Rows of all seeds and details of the first; what diverges with some seed is skipped, if others are left."""
    config, run, setting, _, chosen, skipped = comparison
    rows: list[Row] = []
    details: list[Row] = []
    with run.progress("methods", len(chosen) * config.seeds) as bar:
        for seed in range(config.seed, config.seed + config.seeds):
            made = first if seed == config.seed else comparison.scenario(seed)
            at_a_time = config.at_a_time or (None if config.data in ("digits", "own") else 1)
            fitting = Fitting(made, comparison.network(seed), setting, jax.random.key(seed), at_a_time)
            for (name, pushes), title in chosen.items():
                bar.advance()
                if title in skipped:
                    continue
                labels = {"method": title, "network": config.network, "seed": seed}
                try:
                    row, detail, fitted = _fit(fitting, name, pushes, labels)
                except Diverged as error:
                    skipped[title] = f"diverged with seed {seed}: {error}"
                    if set(chosen.values()) <= set(skipped):  # nothing is left to compare
                        raise
                    continue
                rows.append(row)
                if seed == config.seed:
                    details.append({"method": title, **detail})
                    run.save_models(f"{title}, params", fitted.params, made.names)
                    run.save_models(f"{title}, hypers", fitted.hypers, made.names)
                run.record(**row, **detail)
    return [row for row in rows if row["method"] not in skipped], [d for d in details if d["method"] not in skipped]


def _fit(fitting: Fitting, name: str, pushes: int, labels: Row) -> tuple[Row, Row, Fitted]:
    """The row of a method, what else is known of it, and the personal models."""
    made, began = fitting.scenario, perf_counter()
    fitted = fitting.fit(name, estimator_of(fitting.setting, pushes))
    models, at_a_time = (fitted.recipe, made.model, fitted.params, fitted.hypers), fitting.engine.clients_per_batch or 1
    held_out, result = (hp.personalize.scores(*models, data, at_a_time) for data in (made.validation, made.test))
    row = {
        **labels,
        "accuracy": result.average,
        "accuracy_p10": result.p10,
        "validation_accuracy": held_out.average,
        "best_step": fitted.best_step,
        "rounds": fitted.rounds,
        "floats_per_client": fitted.floats,
        "seconds": perf_counter() - began,
    }
    learned = {} if name in methods.PLAIN else fitted.recipe.weights(processes.gathered(fitted.hypers))
    weights = {key: np.asarray(value) for key, value in learned.items()}
    detail = {
        "clients": result.each.tolist(),
        "validation_by_outer_step": fitted.curve,
        "weights": {key: value.tolist() for key, value in weights.items()},
    }
    if made.cluster is not None and "models" in weights:
        groups = range(int(made.cluster.max()) + 1)
        detail["models_by_cluster"] = [weights["models"][made.cluster == c].mean(0).tolist() for c in groups]
    return row, detail, fitted


def _dry_run(comparison: Comparison) -> dict[str, Any]:
    """What each method would take, what cannot run here, and which files are there."""
    config, run, setting, _, chosen, skipped = comparison
    titles = [(name, title) for (name, _), title in chosen.items()]
    found = costs(config.data, comparison.network(config.seed), setting, titles)
    cost = [row | {"hours": row["hours"] * config.seeds} for row in found]
    lines: list[Sequence[Any]] = [list(row.values()) for row in cost]
    lines += [[name, f"n/a: {reason}", None, None] for name, reason in skipped.items()]
    columns = ("method", "parameters", "gradients per client", "hours")
    run.table(f"{config.data}, {config.network}, {config.size}: about", columns, lines)
    asked = "all examples" if setting.examples is None else f"{setting.examples:,} examples"
    files = f"{asked} are asked for; {describe_files(config.data)}"
    run.console.print(files)
    return {"dry_run": True, "rows": [], "not_applicable": skipped, "cost": cost, "files": files}


# ------------------------------------------------------------------------ tables and figures


def _show(config: Personalize, run: StudyRun, rows: list[Row], skipped: dict[str, str]) -> None:
    """Mean ± sd over seeds beside the published numbers."""

    def cell(values: list[float]) -> str:
        spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * mean(values):.1f}{spread}"

    lines: list[tuple[Any, ...]] = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        both = [cell([row[key] for row in own]) for key in ("accuracy", "accuracy_p10")]
        paper = published(config.data, config.network, name)
        lines.append((name, *both, mean(row["seconds"] for row in own), paper))
    lines += [(name, f"n/a: {reason}", None, None, None) for name, reason in skipped.items()]
    columns = ("method", "accuracy, %", "10 % client", "seconds", "published, larger")
    seeds = f"seed {config.seed}" if config.seeds == 1 else f"{config.seeds} seeds"
    run.table(f"{config.data}, {config.network}, {seeds}", columns, lines)
    if any(line[-1] for line in lines):
        run.console.print(f"published: {SOURCE}; average / 10 % client, on the papers' sizes")


def _draw_accuracies(run: StudyRun, details: list[Row]) -> None:
    """Accuracies of clients and validation by outer step."""
    figure, (left, right) = panels(2)
    for detail in details:
        left.plot(sorted(detail["clients"]), label=detail["method"])
        if len(detail["validation_by_outer_step"]) > 1:
            right.plot(detail["validation_by_outer_step"], label=detail["method"])
    left.set(xlabel="clients, from the worst", ylabel="test accuracy")
    right.set(xlabel="outer step", ylabel="validation accuracy")
    if details:
        left.legend(fontsize=6)
    run.figure("accuracy", figure)


def _show_weights(run: StudyRun, made: Scenario, details: list[Row]) -> None:
    """The weights that were learned: of models by true cluster, of labels beside how often clients have them."""
    owned = counts(made.data.labels, made.data.classes, made.split.train)
    shares = owned / owned.sum(1, keepdims=True)
    lines: list[tuple[Any, ...]] = []
    for detail in details:
        method = detail["method"]
        weights = {of: np.asarray(values) for of, values in detail["weights"].items()}
        for of in ("models", "labels"):
            if of in weights:
                together = _correlation(weights[of], shares) if of == "labels" else None
                lines.append((method, of, *np.quantile(weights[of], (0, 0.5, 1)).tolist(), together))
        stem = f"weights-{method.replace(',', '').replace(' ', '')}"
        if "models_by_cluster" in detail:
            figure, (axes,) = panels()
            _draw_matrix(axes, detail["models_by_cluster"], "model", "true cluster of clients", vmin=0, vmax=1)
            axes.set_title(f"{method}: mean weights")
            run.figure(stem, figure)
        if "labels" in weights:
            figure, (left, right) = panels(2)
            _draw_matrix(left, shares, "label", "client")
            left.set_title("share of the client's training examples")
            figure.colorbar(_draw_matrix(right, weights["labels"], "label", "client"), ax=right)
            right.set_title(f"{method}: weights")
            run.figure(f"{stem}-labels", figure)
    if lines:
        columns = ("method", "weights of", "least", "median", "most", "correlation with shares")
        run.table("what was learned", columns, lines)


def _correlation(weights: np.ndarray, shares: np.ndarray) -> float | None:
    """None where one of the two is the same everywhere."""
    if not weights.std() > 0 or not shares.std() > 0:
        return None
    return float(np.corrcoef(weights.ravel(), shares.ravel())[0, 1])


def _draw_matrix(axes: Axes, values: ArrayLike, x: str, y: str, **options: Any) -> AxesImage:
    """A matrix as colors."""
    drawn = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    axes.grid(visible=False)
    axes.set(xlabel=x, ylabel=y)
    return drawn
