"""Run every method on a tuning task: rows and curves, references, and private runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree
from scipy.stats import mannwhitneyu

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import panels
from hyperpush.hypergradients import oracles
from hyperpush.runs.run import StudyRun
from hyperpush.tasks.cleaning import Labeled, accuracy, cleaning, corrupt_labels, unit_rows
from hyperpush_papers.common.comparison import Benchmark, benchmark_of, compare, method_names
from hyperpush_papers.common.data.sources import available, load
from hyperpush_papers.common.report import report
from hyperpush_papers.tune import rates, weights
from hyperpush_papers.tune.config import Tune

FEW = 10  # number of features of the synthetic data on which labels depend
FEATURES = 60
THIRD = 3  # with weights of classes, every third class has wrong labels
SURE = 30.0  # σ(30) is practically 1, σ(−30) practically 0
# Default numbers of a client's training and validation examples.
USUAL = {"mnist": (100, 100), "digits": (60, 60), "a9a": (2000, 1000), "synthetic": (100, 100)}


class Examples(NamedTuple):
    """Data of all clients, with inputs of norm at most 1."""

    name: str
    note: str
    train: Labeled
    validation: Labeled
    test: Labeled  # without a client axis
    classes: int


class Prepared(NamedTuple):
    """A task with the metrics and references that judge its solutions."""

    common: Benchmark
    personal: Benchmark | None
    accuracy: Callable[[PyTree], Float[Array, ""]]  # accuracy of one classifier on the test examples
    wrong: Bool[np.ndarray, "clients m"]  # True for wrong training labels
    references: dict[str, float]


def run(config: Tune, run: StudyRun) -> dict[str, Any]:
    """Compare all methods, then repeat those that support privacy with noise."""
    network = hp.network(config.network, config.clients, config.seed)
    method_names(config, network)  # raises errors before data are loaded
    data = read_examples(config)
    made = prepare_rates(config, data) if config.task == "l2" else prepare_weights(config, data)
    found = compare(config, run, network, made.common, made.personal)
    weights = {}
    for each in found:
        if each.solution is None:
            continue
        name, hypers = each.row["method"], each.solution.hypers
        task = benchmark_of(name, made.common, made.personal).task
        each.row["accuracy_refitted"] = float(made.accuracy(refit(task, hypers)))
        if made.wrong.any() and config.task == "cleaning":
            own = own_weights(hypers, made.wrong)
            weights[name] = 1 / (1 + np.exp(-own))
            each.row["auc_by_client"] = [
                area(scores, clean) if clean.any() and not clean.all() else None
                for scores, clean in zip(own, ~made.wrong, strict=True)
            ]
    metrics = ("accuracy", "outer_cost", "auc") if made.wrong.any() else ("accuracy", "outer_cost")
    references = {name: {"accuracy": accuracy} for name, accuracy in made.references.items()}
    benchmarks = made.common, made.personal
    result = report(config, run, network, found, benchmarks, config.task, data.name, references, metrics)
    if weights:
        draw_weights(run, weights, made.wrong)
    return {"task": config.task, "data": data.name, "note": data.note, "references": made.references, **result}


def read_examples(config: Tune) -> Examples:
    """Read the task's data set and divide it among the clients."""
    name = source(config)
    train, validation = config.examples or USUAL[name][0], config.validation or USUAL[name][1]
    each = train + validation
    if name == "synthetic":
        total = each + -(-config.test // config.clients)
        inputs, labels = rates.sparse_examples(config.clients, total, FEATURES, FEW, config.seed)
        inputs, classes = unit_rows(inputs), 2
        test = Labeled(inputs[:, each:].reshape(-1, inputs.shape[-1]), labels[:, each:].reshape(-1))
        note = f"synthetic: {FEATURES} features of which {FEW} matter"
    else:
        parts = [load(name, part) for part in ("train", "test")]
        wanted, classes, note = config.clients * each, parts[0].classes, parts[0].note
        if wanted > len(parts[0].labels):
            field = f"clients × ({train} training + {validation} validation examples)"
            raise InvalidInput(field, wanted, f"at most the {len(parts[0].labels)} of {name}")
        generator = np.random.default_rng(config.seed)
        drawn = [
            part.rows(generator.permutation(len(part.labels))[:count])
            for part, count in zip(parts, (wanted, config.test), strict=True)
        ]
        dealt, test = (Labeled(flat_rows(name, part.inputs), part.labels) for part in drawn)
        inputs, labels = (a.reshape(config.clients, each, *a.shape[1:]) for a in dealt)
    own, held = (Labeled(inputs[:, part], labels[:, part]) for part in (slice(train), slice(train, each)))
    return Examples(name, note, own, held, test, classes)


def source(config: Tune) -> str:
    """Return the name of the task's data set."""
    fitting = ("a9a", "synthetic") if config.task == "l2" else ("mnist", "digits")
    if config.data == "auto":
        return fitting[0] if available(fitting[0]) else fitting[1]
    if config.data not in fitting:
        raise InvalidInput("data", config.data, f"{' or '.join(fitting)} for task={config.task}, or auto")
    return config.data


def flat_rows(name: str, inputs: Float[np.ndarray, "m ..."]) -> Float[np.ndarray, "m d"]:
    """Flatten every example to a row of norm 1."""
    if name == "mnist":  # 28x28 to 14x14: the same accuracy of a linear classifier at a quarter of the size
        inputs = inputs.reshape(-1, 14, 2, 14, 2).mean((2, 4))
    return unit_rows(inputs.reshape(len(inputs), -1))


def prepare_rates(config: Tune, data: Examples) -> Prepared:
    """Prepare the task with an L2 rate per feature; its references have one rate for all features."""
    task = rates.l2_rates(data.train, data.validation, common=True)
    test = [jnp.asarray(part) for part in data.test]

    def right(params):
        return jnp.mean((test[0] @ params > 0) == (test[1] > 0.5))

    def metric(params, hyper, batch):
        return right(params)

    common = Benchmark(
        task, {"accuracy": metric}, {}, float(data.test.inputs.shape[-1]), inner_unit=12.0, constants=rates.constants
    )
    tried = {}
    for rate in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        hypers = jnp.full_like(task.hypers, jnp.log(rate))
        params = jnp.broadcast_to(refit(task, hypers), task.params.shape)
        found = common.measure(params, hypers)
        tried[rate] = found["outer_cost"], found["accuracy"]
    references = {"start": tried[1e-3][1], "best_single_rate": min(tried.values())[1]}
    return Prepared(common, None, right, np.zeros(data.train.labels.shape, bool), references)


def prepare_weights(config: Tune, data: Examples) -> Prepared:
    """Prepare the task with a weight per example or class; its references train on all examples and on clean ones."""
    n, m = data.train.labels.shape
    into = range(data.classes) if config.task == "cleaning" else range(0, data.classes, THIRD)
    given, wrong = corrupt_labels(np.asarray(data.train.labels), config.corrupted, into, config.seed)
    test = Labeled(*map(jnp.asarray, data.test))

    def right(params):
        return accuracy(params, test)

    def metric(params, hyper, batch):
        return right(params)

    def benchmark(slots: Int[np.ndarray, "clients m"] | None, common: bool) -> Benchmark:
        """Return the benchmark in which examples share the weights of these slots; None: a weight for each example."""
        task = cleaning(Labeled(data.train.inputs, given), data.validation, data.classes, slots, config.l2, common)

        def auc(hypers):
            by_class = slots is given
            own = np.take_along_axis(np.asarray(hypers), given, 1) if by_class else own_weights(hypers, wrong)
            return area(own, ~wrong)

        unit = float(task.hypers.shape[1] * (1 if common else n))
        return Benchmark(
            task, {"accuracy": metric}, {"auc": auc} if wrong.any() else {}, unit, 4.0, weights.constants(config.l2)
        )

    every_weight = benchmark(np.arange(n * m).reshape(n, m), common=True)
    references = {}
    for name, kept in {"everything": np.ones((n, m), bool), "clean": ~wrong}.items():
        hypers = jnp.broadcast_to(jnp.where(jnp.asarray(kept).reshape(-1), SURE, -SURE), (n, n * m))
        references[name] = float(right(refit(every_weight.task, hypers)))
    if config.task == "cleaning":
        return Prepared(every_weight, benchmark(None, common=False), right, wrong, references)
    return Prepared(benchmark(given, common=True), None, right, wrong, references)


def own_weights(hypers: Array, wrong: Bool[np.ndarray, "clients m"]) -> Float[np.ndarray, "clients m"]:
    """Return the weights of each client's own examples, even if its hyper holds the weights of all clients."""
    n, m = wrong.shape
    return np.asarray(hypers).reshape(n, -1, m)[range(n), range(n) if hypers.shape[1] > m else 0]


def area(scores: Float[np.ndarray, "..."], clean: Bool[np.ndarray, "..."]) -> float:
    """Return the area under the ROC curve: how often a clean example scores above a corrupted one; ties count half."""
    above, below = scores[clean], scores[~clean]
    return float(mannwhitneyu(above, below).statistic / (above.size * below.size))


def refit(task: hp.Task, hypers: PyTree) -> Float[Array, "..."]:
    """Minimize the mean inner cost for these hypers on one machine; params are one array."""
    return jnp.asarray(oracles.minimize(task.problem, task.params, hypers, task.data)[0], task.params.dtype)


def draw_weights(run: StudyRun, weights: dict[str, Any], wrong: Bool[np.ndarray, "clients m"]) -> None:
    """Draw the learned weights of clean and of corrupted examples, with a panel for each method."""
    chosen = list(weights)[-4:]
    figure, axes = panels(len(chosen))
    for axis, name in zip(axes, chosen, strict=True):
        for label, which in (("clean", ~wrong), ("corrupted", wrong)):
            axis.hist(weights[name][which], bins=np.linspace(0, 1, 31).tolist(), alpha=0.6, density=True, label=label)
        axis.set_title(name)
        axis.set_xlabel("weight")
        axis.legend()
    run.figure("weights", figure)
