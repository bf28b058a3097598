"""Compare personal models: divide the data among clients, fit every method, show table and figures."""

from dataclasses import replace
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

import hyperpush as hp
from hyperpush.base import processes
from hyperpush.base.annotations import options_of
from hyperpush.base.config import as_table
from hyperpush.base.errors import Diverged, InvalidInput, unknown
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.methods import registry
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.data.partition import Split
from hyperpush_papers.personalize import figures, methods, settings
from hyperpush_papers.personalize.config import Numbers, Personalize, Setting
from hyperpush_papers.personalize.methods import Fitted, Fitting
from hyperpush_papers.personalize.published import SOURCE, published_cell
from hyperpush_papers.personalize.scenarios import MODELS, Scenario, scenario

Row = dict[str, Any]


# ------------------------------------------------------------------------ options


def check(config: Personalize) -> None:
    """Raise InvalidInput for invalid options before data are read."""
    for field in ("methods", "pushes"):
        values = getattr(config, field)
        if len(set(values)) < len(values):
            raise InvalidInput(field, list(values), "values that differ")
    if config.size == "small" and config.paper != Personalize().paper:
        raise InvalidInput("paper", config.paper, "nothing, unless size=paper")
    registry.find("networks", config.network, "network")
    setting = setting_of(config)
    for name in config.methods:
        methods.check(name, setting)
    used = {part for name in config.methods if methods.is_product(name) for part in methods.parts_of(name)}
    for name in set(config.recipes) - used:
        raise unknown("recipes", name, used or ["nothing: no method is made of recipes"])
    network_of(config, setting, config.seed)
    if len(config.pushes) > 1 and setting.estimator in ("directed-rb", "vr-hgp"):
        raise InvalidInput("pushes", list(config.pushes), f"one number: {setting.estimator} pushes once per order")


def setting_of(config: Personalize) -> Setting:
    """Return the settings of the configured size, with the values that the configuration gives."""
    if config.size == "small":
        made = settings.small(config.data)
    else:
        network = hp.network(config.network, config.clients or 20, config.seed)
        made = settings.of_paper(config.paper, config.data, config.network, methods.kind(network))
    given = {name: value for name in options_of(Numbers) if (value := getattr(config, name))}
    return replace(made, **given | {"network_options": {**made.network_options, **config.network_options}})


def network_of(config: Personalize, setting: Setting, seed: int) -> Network:
    """Return the network of a seed."""
    return hp.network(config.network, setting.clients, seed, **setting.network_options)


def estimator_of(setting: Setting, pushes: int, by: methods.Kind = "push") -> HypergradientEstimator:
    """Return the estimator of the cooperative recipes, for training by SGP (`"push"`) or by local epochs."""
    order, step, batch = setting.order, setting.step, setting.batch
    if setting.estimator == "tracked":
        return hp.TrackedHGP(order, step, pushes, tolerance=None, acceleration=1)
    if setting.estimator == "hgp":
        return hp.HGP(order, pushes, step, batch, keep_mass=True)
    kind = hp.hypergradients.VRHGP if setting.estimator == "vr-hgp" else hp.hypergradients.DirectedRB
    # None: the step size of SGP at its last step, whose iteration is differentiated
    step = None if by == "push" else step
    return kind(order, step, variant="gradient-after", batch_size=batch)


# ------------------------------------------------------------------------ the study


class Comparison(NamedTuple):
    """A comparison of methods: options, run, settings, and the methods left out."""

    config: Personalize
    run: StudyRun
    setting: Setting
    chosen: dict[tuple[str, int], str]  # titles by method and pushes; a title omits the first number of pushes
    skipped: dict[str, str]  # reasons, by method or title

    def scenario(self, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        made = self.setting
        sizes: Any = {"examples": made.examples, "large": made.large, "clusters": made.clusters}
        return scenario(self.config.data, made.clients, seed, **sizes)

    def network(self, seed: int) -> Network:
        """Return the network of a seed."""
        return network_of(self.config, self.setting, seed)


def run(config: Personalize, run: StudyRun) -> dict[str, Any]:
    """Return a row for every method and seed, and curves, weights and clients' accuracies for the first seed."""
    comparison = choose_methods(config, run)
    setting, skipped = comparison.setting, comparison.skipped
    first = comparison.scenario(config.seed)
    described = first.describe()
    show_partition(run, first, described)
    figures.draw_partition(run, first)
    rows, details = compare(comparison, first)
    show_accuracies(config, run, rows, skipped)
    figures.draw_accuracies(run, details)
    show_weights(run, first, details)
    figures.draw_weights(run, first, details)
    start = "warm: each outer step continues from where training stands" if setting.again else "anew before each step"
    outer = {name: outer._asdict() for name, outer in setting.outer.items()}
    return {
        "rows": rows,
        "not_applicable": skipped,
        "details": details,
        "data": described,
        "start": start,
        "setting": as_table(setting) | {"outer": outer},
    }


def choose_methods(config: Personalize, run: StudyRun) -> Comparison:
    """Return the comparison with its settings, the methods that can run, and reasons for the others."""
    check(config)
    setting = setting_of(config)
    made = Comparison(config, run, setting, {}, {})
    network, model = made.network(config.seed), MODELS[config.data][setting.large]
    for name in config.methods:
        if reason := methods.why_not(name, network, setting, model):
            made.skipped[name] = reason
            continue
        cooperates = methods.is_product(name) and not name.endswith("-direct")
        for pushes in config.pushes if cooperates else config.pushes[:1]:
            made.chosen[name, pushes] = name if pushes == config.pushes[0] else f"{name}, S = {pushes}"
    return made


def compare(comparison: Comparison, first: Scenario) -> tuple[list[Row], list[Row]]:
    """Return rows of all seeds and details of the first; skip methods that diverge with a seed if others remain."""
    config, run, setting, chosen, skipped = comparison
    rows: list[Row] = []
    details: list[Row] = []
    with run.progress("methods", len(chosen) * config.seeds) as bar:
        for seed in range(config.seed, config.seed + config.seeds):
            made = first if seed == config.seed else comparison.scenario(seed)
            at_a_time = config.at_a_time or (None if config.data == "digits" else 1)
            fitting = Fitting(made, comparison.network(seed), setting, jax.random.key(seed), at_a_time)
            for (name, pushes), title in chosen.items():
                bar.step()
                if title in skipped:
                    continue
                labels = {"method": title, "network": config.network, "seed": seed}
                try:
                    row, detail, fitted = fit_method(fitting, name, pushes, labels)
                except Diverged as error:
                    skipped[title] = f"diverged with seed {seed}: {error}"
                    if set(chosen.values()) <= set(skipped):  # nothing is left to compare
                        raise
                    continue
                rows.append(row)
                if seed == config.seed:
                    details.append({"method": title, **detail})
                    run.save_models(f"{title}, params", fitted.params)
                    run.save_models(f"{title}, hypers", fitted.hypers)
                run.record(**row, **detail)
    return [row for row in rows if row["method"] not in skipped], [d for d in details if d["method"] not in skipped]


def fit_method(fitting: Fitting, name: str, pushes: int, labels: Row) -> tuple[Row, Row, Fitted]:
    """Return the row of a method, its details, and the personal models."""
    made, began = fitting.scenario, perf_counter()
    fitted = fitting.fit(name, estimator_of(fitting.setting, pushes, methods.kind(fitting.network)))
    models, at_a_time = (
        (fitted.product, made.model, fitted.params, fitted.hypers),
        fitting.engine.clients_per_batch or 1,
    )
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
    learned = {} if name in methods.PLAIN else fitted.product.weights(processes.gather(fitted.hypers))
    weights = {part: {of: np.asarray(each) for of, each in own.items()} for part, own in learned.items() if own}
    detail = {
        "clients": result.each.tolist(),
        "validation_by_outer_step": fitted.curve,
        "weights": {
            part: {of: [row.tolist() for row in made.cut_weights(of, each)] for of, each in own.items()}
            for part, own in weights.items()
        },
    }
    mixed = next((own["models"] for own in weights.values() if "models" in own), None)
    if made.cluster is not None and mixed is not None:
        groups = range(int(made.cluster.max()) + 1)
        detail["models_by_cluster"] = [mixed[made.cluster == c].mean(0).tolist() for c in groups]
    return row, detail, fitted


# ------------------------------------------------------------------------ tables


def show_partition(run: StudyRun, made: Scenario, described: Row) -> None:
    """Summarize the data over clients."""
    names = {
        "train": "training examples",
        "validation": "validation examples",
        "test": "test examples",
        "labels": f"labels of {made.data.classes}",
        "commonest_label": "share of the commonest label",
        "mean": "mean taken off inputs",
        "std": "inputs divided by",
    }
    rows = [
        (
            name,
            *np.quantile(described[key], (0, 0.5, 1)).tolist(),
            sum(described[key]) if key in Split._fields else None,
        )
        for key, name in names.items()
        if key in described
    ]
    title = f"{made.data.note}; {described['clients']} clients"
    run.table(title, ("per client", "least", "median", "most", "all"), rows)


def show_accuracies(config: Personalize, run: StudyRun, rows: list[Row], skipped: dict[str, str]) -> None:
    """Show accuracies as mean ± standard deviation over seeds, beside the published numbers."""

    def cell(values: list[float]) -> str:
        spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * mean(values):.1f}{spread}"

    lines: list[tuple[Any, ...]] = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        both = [cell([row[key] for row in own]) for key in ("accuracy", "accuracy_p10")]
        paper = published_cell(config.data, config.network, name)
        lines.append((name, *both, mean(row["seconds"] for row in own), paper))
    lines += [(name, f"n/a: {reason}", None, None, None) for name, reason in skipped.items()]
    columns = ("method", "accuracy, %", "10 % client", "seconds", "published, larger")
    seeds = f"seed {config.seed}" if config.seeds == 1 else f"{config.seeds} seeds"
    run.table(f"{config.data}, {config.network}, {seeds}", columns, lines)
    if any(line[-1] for line in lines):
        run.console.print(f"published: {SOURCE}; average / 10 % client, on the papers' sizes")


def show_weights(run: StudyRun, made: Scenario, details: list[Row]) -> None:
    """Show the learned weights, and the correlation of label weights with the clients' label frequencies."""
    shares, lines = made.label_shares().ravel(), []
    for detail in details:
        for part, of, values in figures.learned_weights(detail):
            weights, together = np.concatenate(values), None
            if of == "labels" and weights.std() > 0 and shares.std() > 0:
                together = float(np.corrcoef(weights, shares)[0, 1])
            lines.append((detail["method"], f"{of} ({part})", *np.quantile(weights, (0, 0.5, 1)).tolist(), together))
    if lines:
        columns = ("method", "weights of", "least", "median", "most", "correlation with shares")
        run.table("what was learned", columns, lines)
