"""Hyper-parameters tuned by every bilevel algorithm, with and without privacy (docs/bilevel.md).

Three tasks: weights of training examples of which some have wrong labels (`cleaning`), weights of their classes
(`class-weights`), and an L2 rate for every feature (`l2`). Counterparts of the figures of Chen and Wang, "Locally
differentially private decentralized stochastic bilevel optimization", on their kinds of data.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from hyperpush.runs.experiment import Experiment
from hyperpush.studies.comparison import Benchmark, Comparison, Count, Positive

FEW = 10  # features of the synthetic data that decide the label
FEATURES = 60
THIRD = 3  # every so many-th class has wrong labels, where classes have weights


class Tune(Comparison):
    """Options of the comparison on tuning tasks."""

    task: Literal["cleaning", "class-weights", "l2"] = Field(default="cleaning", description="What is tuned.")
    data: Literal["auto", "mnist", "digits", "a9a", "synthetic"] = Field(
        default="auto",
        description="a9a or synthetic for l2, mnist or digits otherwise; auto: the first if HYPERPUSH_DATA has it.",
    )
    examples: Count | None = Field(default=None, description="Training examples of a client; by task if not set.")
    validation: Count | None = Field(default=None, description="Validation examples of a client; by task if not set.")
    corrupted: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.3,
        description="Share of training labels that are wrong; with class-weights, all those are of every third class.",
    )
    l2: Positive = Field(default=3e-4, description="L2 rate of the weighted classifiers.")
    test: Count = Field(default=2000, description="Test examples, at most.")


class Prepared(NamedTuple):
    """A task with what is needed to judge it."""

    data: str
    note: str
    common: Benchmark
    personal: Benchmark | None
    test: Any
    wrong: Any  # which training labels are, [clients, examples]; None
    references: dict[str, float]


def source(config: Tune) -> str:
    """The data set of the task."""
    from hyperpush.errors import InvalidInput
    from hyperpush.studies.data.sources import available

    fitting = ("a9a", "synthetic") if config.task == "l2" else ("mnist", "digits")
    if config.data == "auto":
        return fitting[0] if available(fitting[0]) else fitting[1]
    if config.data not in fitting:
        raise InvalidInput("data", config.data, f"{' or '.join(fitting)} for task={config.task}, or auto")
    return config.data


def sizes(config: Tune, data: str) -> tuple[int, int]:
    """Training and validation examples of a client."""
    usual = {"mnist": (100, 100), "digits": (60, 60), "a9a": (2000, 1000), "synthetic": (100, 100)}[data]
    return config.examples or usual[0], config.validation or usual[1]


def dealt(config: Tune, data: str) -> tuple[str, Any, Any, Any, int]:
    """(note, inputs [clients, training + validation, features], labels, test part, classes), rows of norm at most 1."""
    import numpy as np

    from hyperpush.errors import InvalidInput
    from hyperpush.studies.data.sources import load
    from hyperpush.tasks.cleaning import unit_rows
    from hyperpush.tasks.rates import few_matter

    train, validation = sizes(config, data)
    each = train + validation
    if data == "synthetic":
        total = each + -(-config.test // config.clients)
        inputs, labels = few_matter(config.clients, total, FEATURES, FEW, config.seed)
        inputs = unit_rows(inputs)
        tests = inputs[:, each:].reshape(-1, inputs.shape[-1]), labels[:, each:].reshape(-1)
        note = f"synthetic: {FEATURES} features of which {FEW} matter"
        return note, inputs[:, :each], labels[:, :each], tests, 2
    parts = [load(data, part) for part in ("train", "test")]
    wanted = config.clients * each
    if wanted > len(parts[0].labels):
        field = f"clients × ({train} training + {validation} validation examples)"
        raise InvalidInput(field, wanted, f"at most the {len(parts[0].labels)} of {data}")
    generator = np.random.default_rng(config.seed)
    rows = []
    for part, count in zip(parts, (wanted, config.test), strict=True):
        chosen = part.rows(generator.permutation(len(part.labels))[:count])
        images = chosen.inputs
        if data == "mnist":  # 28x28 to 14x14: the same accuracy of a linear classifier at a quarter of the size
            images = images.reshape(-1, 14, 2, 14, 2).mean((2, 4))
        rows.append((unit_rows(images.reshape(len(images), -1)), chosen.labels))
    inputs, labels = (a.reshape(config.clients, each, *a.shape[1:]) for a in rows[0])
    return parts[0].note, inputs, labels, rows[1], parts[0].classes


def prepare(config: Tune) -> Prepared:
    """The task's problem, data and references."""
    data = source(config)
    return (_rates if config.task == "l2" else _weights)(config, data)


def _rates(config: Tune, data: str) -> Prepared:
    import jax
    import jax.numpy as jnp

    from hyperpush.tasks import rates

    train, _ = sizes(config, data)
    note, inputs, labels, test, _ = dealt(config, data)
    parts = (inputs[:, :train], labels[:, :train]), (inputs[:, train:], labels[:, train:])
    task = rates.rated(*parts, common=True)
    held = tuple(jnp.asarray(part) for part in test)

    def right(params):
        return jnp.mean((held[0] @ params > 0) == (held[1] > 0.5))

    def measure(params, hypers):
        costs = jax.vmap(task.problem.outer_cost)(params, hypers, task.validation)
        return {"accuracy": jnp.mean(jax.vmap(right)(params)), "outer_cost": jnp.mean(costs)}

    def fixed(rate: float) -> tuple[float, float]:
        hypers = jnp.full_like(task.hypers, jnp.log(rate))
        params = refitted(task, hypers)
        spread = jnp.broadcast_to(params, task.params.shape)
        return float(measure(spread, hypers)["outer_cost"]), float(right(params))

    tried = {rate: fixed(rate) for rate in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)}
    references = {"start": tried[1e-3][1], "best_single_rate": min(tried.values())[1]}
    common = Benchmark(task, measure, float(inputs.shape[-1]), inner_unit=12.0, constants=rates.constants)
    return Prepared(data, note, common, None, right, None, references)


def _weights(config: Tune, data: str) -> Prepared:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from hyperpush.tasks.cleaning import Labelled, accuracy, cleaning, constants, corrupted

    n, (m, _) = config.clients, sizes(config, data)
    note, inputs, labels, test, classes = dealt(config, data)
    by_example = config.task == "cleaning"
    into = range(classes) if by_example else range(0, classes, THIRD)
    given, wrong = corrupted(labels[:, :m], config.corrupted, into, config.seed)
    train = Labelled(inputs[:, :m], given)
    validation = Labelled(inputs[:, m:], labels[:, m:])
    held = Labelled(*map(jnp.asarray, test))
    clean = jnp.asarray(~wrong)

    def right(params):
        return accuracy(params, held)

    def made(slots, own, common):
        """A task whose examples look up `slots`, or have weights of their own (None).

        `own(hypers)` are the clients' weights, [clients, examples].
        """
        task = cleaning(train, validation, classes, slots, config.l2, common)

        def measure(params, hypers):
            costs = jax.vmap(task.problem.outer_cost)(params, hypers, task.validation)
            values = {"accuracy": jnp.mean(jax.vmap(right)(params)), "outer_cost": jnp.mean(costs)}
            return {**values, "auc": area(own(hypers), clean)} if wrong.any() else values

        unit = float(task.hypers.shape[1] * (1 if common else n))
        return Benchmark(task, measure, unit, 4.0, constants(config.l2))

    numbers = np.arange(n * m).reshape(n, m)  # of all clients' examples
    any_weight = made(numbers, lambda hypers: jnp.stack([h.reshape(n, m)[i] for i, h in enumerate(hypers)]), True)
    if by_example:
        common, personal = any_weight, made(None, lambda hypers: hypers, False)
    else:
        common, personal = made(given, lambda hypers: jnp.take_along_axis(hypers, jnp.asarray(given), 1), True), None
    weights = {"everything": np.ones((n, m), bool), "clean": ~wrong}
    references = {}
    for name, kept in weights.items():
        hypers = jnp.broadcast_to(jnp.where(jnp.asarray(kept).reshape(-1), 30.0, -30.0), (n, n * m))
        references[name] = float(right(refitted(any_weight.task, hypers)))
    return Prepared(data, note, common, personal, right, wrong, references)


def area(scores: Any, clean: Any) -> Any:
    """The chance that a clean example scores above a corrupted one (area under the ROC curve); ties count half."""
    import jax.numpy as jnp

    scores, clean = scores.reshape(-1), clean.reshape(-1)
    above = jnp.sign(scores[:, None] - scores[None, :]) / 2 + 0.5
    pairs = clean[:, None] & ~clean[None, :]
    return jnp.sum(above * pairs) / jnp.maximum(jnp.sum(pairs), 1)


def refitted(task: Any, hypers: Any) -> Any:
    """The minimizer of the mean inner cost for these hypers, by L-BFGS on one machine."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from scipy.optimize import minimize

    start, back = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], task.params))

    @jax.jit
    def cost(flat, hypers):
        return jax.value_and_grad(
            lambda v: jnp.mean(
                jax.vmap(lambda hyper, data: task.problem.inner_cost(back(v), hyper, data))(hypers, task.train)
            )
        )(flat)

    def both(flat):
        value, gradient = cost(jnp.asarray(flat, start.dtype), hypers)
        return float(value), np.asarray(gradient, np.float64)

    found = minimize(both, np.zeros(start.size), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return back(jnp.asarray(found.x, start.dtype))


def run_tune(config: Tune, run: Any) -> dict[str, Any]:
    """A row and a curve for every method, references, and the private runs."""
    import numpy as np

    from hyperpush import networks
    from hyperpush.studies.comparison import compare, draw, names, privately, table, tell

    network = networks.by_name(config.network, config.clients, config.seed)
    names(config, network)
    made = prepare(config)
    found = compare(config, run, network, made.common, made.personal)
    details = {}
    for each in found:
        if each.params is None:
            continue
        name = each.row["method"]
        own_hypers = made.personal if name.startswith("PDBO") else None
        task = (own_hypers or made.common).task
        each.row["accuracy_refitted"] = float(made.test(refitted(task, each.hypers)))
        if config.task == "cleaning" and made.wrong is not None and made.wrong.any():
            own = np.asarray(each.hypers)
            if task.common:  # everybody holds the weights of all clients' examples
                own = np.stack([h.reshape(len(own), -1)[i] for i, h in enumerate(own)])
            details[name] = 1 / (1 + np.exp(-own))
            each.row["auc_by_client"] = [
                float(area(*pair)) if pair[1].any() and not pair[1].all() else None
                for pair in zip(own, ~made.wrong, strict=True)
            ]
    private = privately(config, run, network, found, made.common, made.personal)
    kept = ("method", "accuracy", "accuracy_refitted", "auc", "outer_cost", "floats_per_client", "rounds", "left_out")
    shown = [{key: each.row[key] for key in kept if key in each.row} for each in found]
    table(run, f"{config.task} on {made.data}", shown)
    run.table("references", ("classifier", "accuracy"), list(made.references.items()))
    tell(run, private)
    judged = made.wrong is not None and made.wrong.any()
    draw(run, config.task, found, ("accuracy", "outer_cost", "auc") if judged else ("accuracy", "outer_cost"))
    if details:
        _histogram(run, details, made.wrong)
    return {
        "task": config.task,
        "data": made.data,
        "note": made.note,
        "rows": [each.row for each in found],
        "references": made.references,
        "privacy": {row["method"]: row for row in private} if private else None,
        "curves": [each.curve for each in found if each.curve is not None],
    }


def _histogram(run: Any, weights: dict[str, Any], wrong: Any) -> None:
    """The learned weights of clean and of corrupted examples, a panel for each of some methods."""
    import numpy as np

    from hyperpush.runs.report.figures import panels

    chosen = list(weights)[-4:]
    figure, axes = panels(len(chosen))
    for axis, name in zip(axes, chosen, strict=True):
        for label, which in (("clean", ~wrong), ("corrupted", wrong)):
            axis.hist(weights[name][which], bins=np.linspace(0, 1, 31).tolist(), alpha=0.6, density=True, label=label)
        axis.set_title(name)
        axis.set_xlabel("weight")
        axis.legend()
    run.figure("weights", figure)


EXPERIMENT = Experiment(
    "tune",
    "Tuning of weights or L2 rates by every bilevel algorithm, with and without privacy.",
    Tune,
    run_tune,
)
