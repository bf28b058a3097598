"""Personal models over a network: recipes, baselines, and what cooperation adds (docs/personalize.md)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.config import Config
from hyperpush.errors import InvalidInput
from hyperpush.experiments.registry import Experiment, Tuning

Count = Annotated[int, Field(ge=1)]
Name = Literal["digits", "emnist", "cifar10", "cifar100", "shakespeare", "own"]


class Personalize(Config):
    """Options of the comparison of personal models; what is 0 or left out is the size's."""

    data: Name = Field(
        default="digits", description="Data set; all but digits are read from HYPERPUSH_DATA, your own from `path`."
    )
    path: str = Field(default="", description="Your own data: a folder with a .npz for each client, or a .csv table.")
    network: str = Field(
        default="random-directed",
        description="fully-connected, static-undirected, random-undirected, random-directed, or another network.",
    )
    methods: tuple[str, ...] = Field(
        default=("local", "sgp", "pl", "pl-direct", "mtl", "mtl-direct"), min_length=1, description="What to compare."
    )
    size: Literal["small", "paper"] = Field(
        default="small", description="Small models, fewer clients and a warm start between outer steps; or the papers'."
    )
    seeds: Count = Field(default=1, description="Runs, each with a partition, network and model of its own.")
    seed: int = Field(default=0, ge=0, description="The first of the seeds.")
    clients: int = Field(default=0, ge=0, description="Number of clients.")
    examples: int = Field(default=0, ge=0, description="Examples of the data set, random ones.")
    steps: int = Field(default=0, ge=0, description="Inner steps from the start.")
    again: int = Field(default=0, ge=0, description="Inner steps after each outer step, from where training stands.")
    rounds: int = Field(default=0, ge=0, description="Rounds of methods with local epochs.")
    outer_steps: int = Field(default=0, ge=0, description="Outer steps.")
    batch: int = Field(default=0, ge=0, description="Mini-batch size.")
    rate: float = Field(default=0, ge=0, description="Inner learning rate of a single model.")
    ensemble_rate: float = Field(default=0, ge=0, description="Inner learning rate of several models.")
    outer_rate: float = Field(default=0, ge=0, description="Adam's rate for the hypers; 0: each recipe's own.")
    estimator: Literal["hgp", "tracked", "vr-hgp"] = Field(default="hgp", description="Of the cooperative recipes.")
    order: int = Field(default=0, ge=0, description="The estimator's order: HGP's M, TrackedHGP's steps.")
    pushes: tuple[Count, ...] = Field(
        default=(10,), min_length=1, description="Pushes per order, S; recipes run once for each number."
    )
    at_a_time: int = Field(default=0, ge=0, description="Clients computed at a time; 0: all of small models, else 1.")
    dry_run: bool = Field(default=False, description="Only say what it would cost.")


def setting_of(config: Personalize, owners: int = 0) -> Any:
    """The size's numbers with the configuration's in their place; `owners` are the clients of your own data."""
    from hyperpush.personalize.methods import Setting

    small = {
        "digits": Setting(20, None, False, 150, 20, 150, 8, 32, 0.3, 1.0, 10, 0.1),
        "emnist": Setting(20, 14_000, False, 600, 60, 60, 5, 32, 0.1, 0.5, 10, 0.1),
        "cifar10": Setting(20, 15_000, False, 600, 60, 60, 5, 64, 0.1, 0.3, 10, 0.1),
        "cifar100": Setting(20, 10_000, False, 600, 60, 60, 5, 64, 0.1, 0.3, 10, 0.1),
        "shakespeare": Setting(20, 10_000, False, 300, 60, 30, 5, 64, 1.0, 3.0, 10, 0.1),
        "own": Setting(owners, None, False, 600, 60, 60, 8, 32, 0.1, 0.5, 10, 0.1),
    }
    # As in the two papers whose tables are shown beside ours; `again` None: from the start before every outer step.
    paper = {
        "digits": Setting(20, None, True, 600, 200, None, 20, 128, 0.1, 0.5, 200, 0.1),
        "emnist": Setting(100, 81_425, True, 600, 200, None, 20, 128, 0.05, 0.25, 200, 0.1),
        "cifar10": Setting(20, None, True, 1200, 200, None, 10, 128, 0.1, 0.1, 20, 0.1),
        "cifar100": Setting(20, None, True, 1200, 200, None, 10, 128, 0.2, 0.2, 20, 0.1),
        "shakespeare": Setting(20, None, True, 1200, 200, None, 10, 128, 10.0, 10.0, 20, 0.1),
    }
    if config.data == "own" and (config.size == "paper" or config.examples or config.dry_run):
        raise InvalidInput("data", "own", "a data set of the papers for size=paper, examples or dry_run")
    made = (small if config.size == "small" else paper)[config.data]
    names = (
        "clients",
        "examples",
        "steps",
        "again",
        "rounds",
        "outer_steps",
        "batch",
        "rate",
        "ensemble_rate",
        "outer_rate",
        "order",
    )
    return made._replace(**{name: getattr(config, name) for name in names if getattr(config, name)})


def estimator_of(config: Personalize, setting: Any, pushes: int) -> Any:
    """The estimator of the cooperative recipes."""
    import hyperpush as hp

    if config.estimator == "tracked":
        return hp.TrackedHGP(setting.order, setting.step, pushes, tolerance=None, acceleration=1)
    if config.estimator == "vr-hgp":
        return hp.VRHGP(setting.order, setting.step, order="gradient-after", batch=setting.batch)
    return hp.HGP(setting.order, pushes, setting.step, setting.batch, keep_mass=True)


def run_personalize(config: Personalize, run: Any) -> dict[str, Any]:
    """A row for every method and seed; curves, weights and accuracies of clients of the first seed."""
    from hyperpush import networks
    from hyperpush.data import summary
    from hyperpush.personalize import methods
    from hyperpush.personalize.tasks import owned_task, read, task

    own = read(config.path) if config.data == "own" else None
    setting = setting_of(config, 0 if own is None else len(own.owner_names))
    for name in config.methods:
        methods.check(name)
    network = networks.by_name(config.network, setting.clients, config.seed)
    skipped = {name: reason for name in config.methods if (reason := methods.why_not(name, network))}
    if config.dry_run:
        return {"dry_run": True, "rows": [], "not_applicable": skipped, "cost": cost(config, setting, run)}
    chosen = [
        (name, pushes)
        for name in config.methods
        if name not in skipped
        for pushes in (config.pushes if name in methods.RECIPES else config.pushes[:1])
    ]
    rows: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    with run.progress("methods", len(chosen) * config.seeds) as bar:
        for seed in range(config.seed, config.seed + config.seeds):
            if own is None:
                made = task(config.data, setting.clients, seed, examples=setting.examples, large=setting.large)
            else:
                made = owned_task(own, setting.clients, seed)
            if not described:
                described = summary.show(run, made.data, made.split, made.shift)
            for row, detail in _fit_all(config, setting, made, seed, chosen):
                rows.append(row)
                if seed == config.seed:
                    details.append({"method": row["method"], **detail})
                run.record(**row, **detail)
                bar.advance()
    _show(config, run, rows, skipped)
    _draw(run, details)
    start = "warm: each outer step goes on from where training stands" if setting.again else "anew before each step"
    return {
        "rows": rows,
        "not_applicable": skipped,
        "details": details,
        "data": described,
        "start": start,
        "setting": setting._asdict(),
    }


def _fit_all(config: Personalize, setting: Any, made: Any, seed: int, chosen: Any) -> Any:
    """(row, detail) of every method for one seed."""
    from time import perf_counter

    import jax

    from hyperpush import networks, processes
    from hyperpush.personalize.methods import Fitting, personal
    from hyperpush.personalize.scores import scores

    network = networks.by_name(config.network, setting.clients, seed)
    at_a_time = config.at_a_time or (None if config.data in ("digits", "own") else 1)
    fitting = Fitting(made, network, setting, jax.random.key(seed), at_a_time)
    for name, pushes in chosen:
        began = perf_counter()
        fitted = fitting.fit(name, estimator_of(config, setting, pushes))
        held_out, result = (
            scores(fitted.recipe, made.model, fitted.params, fitted.hypers, data, at_a_time or 1)
            for data in (made.validation, made.test)
        )
        row = {
            "method": name if len(config.pushes) == 1 or pushes == config.pushes[0] else f"{name}, S = {pushes}",
            "network": config.network,
            "seed": seed,
            "accuracy": result.average,
            "accuracy_p10": result.p10,
            "validation_accuracy": held_out.average,
            "best_step": fitted.best_step,
            "rounds": fitted.rounds,
            "floats_per_client": fitted.floats,
            "seconds": perf_counter() - began,
        }
        weights = personal(fitted.recipe, processes.gathered(fitted.hypers))
        detail = {
            "clients": result.each.tolist(),
            "validation_by_outer_step": fitted.curve,
            "weights": {key: value.tolist() for key, value in weights.items()},
        }
        if made.cluster is not None and "models" in weights:
            groups = range(int(made.cluster.max()) + 1)
            detail["models_by_cluster"] = [weights["models"][made.cluster == c].mean(0).tolist() for c in groups]
        yield row, detail


def _show(config: Personalize, run: Any, rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    """Mean ± sd over seeds beside the published numbers."""
    from statistics import mean, stdev

    from hyperpush.personalize.published import SOURCE, published

    def cell(values: list[float]) -> str:
        spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
        return f"{100 * mean(values):.1f}{spread}"

    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        both = [cell([row[key] for row in own]) for key in ("accuracy", "accuracy_p10")]
        paper = published(config.data, config.network, name)
        lines.append((name, *both, mean(row["seconds"] for row in own), paper))
    lines += [(name, f"n/a: {reason}", None, None, None) for name, reason in skipped.items()]
    columns = ("method", "accuracy, %", "10 % client", "seconds", "published, larger")
    run.table(f"{config.data}, {config.network}, {config.seeds} seeds", columns, lines)
    if any(line[-1] for line in lines):
        run.console.print(f"published: {SOURCE}; average / 10 % client, on the papers' sizes")


def _draw(run: Any, details: list[dict[str, Any]]) -> None:
    """Accuracies of clients, validation by outer step, and weights of models."""
    from hyperpush.report.figures import panels

    figure, (left, right) = panels(2)
    for detail in details:
        left.plot(sorted(detail["clients"]), label=detail["method"])
        if len(detail["validation_by_outer_step"]) > 1:
            right.plot(detail["validation_by_outer_step"], label=detail["method"])
    left.set_xlabel("clients, from the worst")
    left.set_ylabel("test accuracy")
    right.set_xlabel("outer step")
    right.set_ylabel("validation accuracy")
    if details:
        left.legend(fontsize=6)
    run.figure("accuracy", figure)
    for detail in details:
        if "models_by_cluster" in detail:
            figure, (axes,) = panels()
            axes.imshow(detail["models_by_cluster"], vmin=0, vmax=1)
            axes.grid(visible=False)
            axes.set_xlabel("model")
            axes.set_ylabel("true cluster of clients")
            axes.set_title(f"{detail['method']}: mean weights")
            run.figure(f"weights-{detail['method'].replace(',', '').replace(' ', '')}", figure)


def cost(config: Personalize, setting: Any, run: Any) -> list[dict[str, Any]]:
    """What each method would take, from one measured gradient on inputs of zeros; products count as three gradients."""
    from time import perf_counter

    import jax
    import jax.numpy as jnp

    from hyperpush.personalize import methods
    from hyperpush.personalize.recipe import stacked
    from hyperpush.personalize.recipes import Shared
    from hyperpush.personalize.tasks import model_of

    model = model_of(config.data, setting.large)
    shapes = {"digits": (8, 8), "emnist": (28, 28), "shakespeare": (200 if setting.large else 40,)}
    shape = (setting.batch, *shapes.get(config.data, (32, 32, 3)))
    kind = jnp.uint8 if config.data == "shakespeare" else jnp.float32
    batch = (jnp.zeros(shape, kind), jnp.zeros(setting.batch, jnp.int32))
    rows, seconds = [], {}
    for name in config.methods:
        direct = name.endswith("-direct")
        recipe = methods.RECIPES.get(name.removesuffix("-direct"), methods.PLAIN.get(name, (Shared(), 0)))[0]
        params, hypers = jax.tree.map(lambda leaf: leaf[0], stacked(recipe, model, 1, jax.random.key(0)))
        if methods.ensemble(recipe) not in seconds:
            gradient = jax.jit(recipe.problem(model, setting.l2).inner_gradient)
            jax.block_until_ready(gradient(params, hypers, batch))
            began = perf_counter()
            jax.block_until_ready(gradient(params, hypers, batch))
            seconds[methods.ensemble(recipe)] = perf_counter() - began
        again = setting.again or setting.steps
        solves = (setting.outer_steps + 1) * again + (setting.steps if again < setting.steps else 0)
        solves = solves if name in methods.RECIPES or direct or setting.again else setting.steps
        gradients = solves + (3 * setting.order * setting.outer_steps if name in methods.RECIPES else 0)
        rows.append(
            {
                "method": name,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
                "gradients_per_client": gradients,
                "hours": gradients * setting.clients * seconds[methods.ensemble(recipe)] * config.seeds / 3600,
            }
        )
    columns = [key.replace("_", " ") for key in rows[0]]
    run.table(f"{config.data}, {config.size}: about", columns, [list(row.values()) for row in rows])
    return rows


EXPERIMENT = Experiment(
    "personalize",
    "Personal models over a network: recipes and baselines, by average and 10 % client.",
    Personalize,
    run_personalize,
    Tuning("validation_accuracy", ("accuracy", "accuracy_p10"), rates=("rate", "ensemble_rate")),
)
