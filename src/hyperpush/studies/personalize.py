"""Personal models over a network: recipes, baselines, and what cooperation adds (docs/personalize.md)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.errors import Diverged, InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, Tuning

Count = Annotated[int, Field(ge=1)]
Name = Literal["digits", "emnist", "cifar10", "cifar100", "shakespeare", "own"]
Paper = Literal["personalized", "cooperative", "hyper-gradient"]


class Personalize(Config):
    """Options of the comparison of personal models; what is 0 or left out is the size's."""

    data: Name = Field(
        default="digits", description="Data set; all but digits are read from HYPERPUSH_DATA, your own from `path`."
    )
    path: str = Field(default="", description="Your own data: a folder with a .npz for each client, or a .csv table.")
    client: str = Field(default="client", description="Column of your table that says whose a row is.")
    label: str = Field(default="label", description="Column of your table with the labels.")
    classes: int = Field(default=0, ge=0, description="Classes of your own data; 0: the largest label and one more.")
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
    paper: Paper = Field(
        default="personalized", description="Whose settings size=paper takes (docs/personalize.md has their titles)."
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
    prox: float = Field(default=0, ge=0, description="FedProx's penalty on leaving the common model.")
    pull: float = Field(default=0, ge=0, description="pFedMe's.")
    estimator: Literal["", "hgp", "directed-rb", "vr-hgp", "tracked"] = Field(
        default="", description="Of the cooperative recipes; empty: HGP, or the paper's."
    )
    order: int = Field(default=0, ge=0, description="The estimator's order: M of the series, TrackedHGP's steps.")
    pushes: tuple[Count, ...] = Field(
        default=(10,), min_length=1, description="Pushes per order, S; recipes run once for each number."
    )
    at_a_time: int = Field(default=0, ge=0, description="Clients computed at a time; 0: all of small models, else 1.")
    dry_run: bool = Field(default=False, description="Only say what it would cost.")


def check(config: Personalize) -> None:
    """What can be refused before data are read."""
    from hyperpush import networks, registry
    from hyperpush.personalize import methods

    for name in config.methods:
        methods.check(name)
    for field in ("methods", "pushes"):
        values = getattr(config, field)
        if len(set(values)) < len(values):
            raise InvalidInput(field, list(values), "values that differ")
    if config.data != "own":
        for field, default in (("path", ""), ("client", "client"), ("label", "label"), ("classes", 0)):
            if getattr(config, field) != default:
                raise InvalidInput(field, getattr(config, field), "nothing, unless data=own")
    elif config.size == "paper" or config.examples or config.dry_run:
        raise InvalidInput("data", "own", "a data set of the papers for size=paper, examples or dry_run")
    if config.size == "small" and config.paper != Personalize.model_fields["paper"].default:
        raise InvalidInput("paper", config.paper, "nothing, unless size=paper")
    registry.find("networks", config.network, "network")
    setting = setting_of(config)
    if setting.clients:  # else those of your own data, which are not read yet
        networks.by_name(config.network, setting.clients, config.seed)
    if len(config.pushes) > 1 and setting.estimator in ("directed-rb", "vr-hgp"):
        raise InvalidInput("pushes", list(config.pushes), f"one number: {setting.estimator} pushes once per order")


def setting_of(config: Personalize, owners: int = 0) -> Any:
    """The size's numbers with the configuration's in their place; `owners` are the clients of your own data."""
    from hyperpush import networks
    from hyperpush.personalize import methods, settings

    if config.size == "small":
        made = settings.small(config.data, owners)
    else:
        network = networks.by_name(config.network, config.clients or 20, config.seed)
        made = settings.of_paper(config.paper, config.data, config.network, methods.kind(network))
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
        "prox",
        "pull",
        "estimator",
    )
    return made._replace(**{name: getattr(config, name) for name in names if getattr(config, name)})


def estimator_of(setting: Any, pushes: int) -> Any:
    """The estimator of the cooperative recipes."""
    import hyperpush as hp

    order, step, batch = setting.order, setting.step, setting.batch
    return {
        "hgp": lambda: hp.HGP(order, pushes, step, batch, keep_mass=True),
        "directed-rb": lambda: hp.hypergradients.DirectedRB(order, step, "gradient-after", batch),
        "vr-hgp": lambda: hp.hypergradients.VRHGP(order, step, variant="gradient-after", batch_size=batch),
        "tracked": lambda: hp.TrackedHGP(order, step, pushes, tolerance=None, acceleration=1),
    }[setting.estimator]()


def run_personalize(config: Personalize, run: Any) -> dict[str, Any]:
    """A row for every method and seed; curves, weights and accuracies of clients of the first seed."""
    from hyperpush import networks
    from hyperpush.personalize import methods
    from hyperpush.personalize.scenarios import model_of, owned_scenario, read, scenario
    from hyperpush.studies.data import summary

    check(config)
    own = read(config.path, config.client, config.label, config.classes or None) if config.data == "own" else None
    setting = setting_of(config, 0 if own is None else len(own.owner_names))
    network = networks.by_name(config.network, setting.clients, config.seed)
    model = model_of(config.data, setting.large) if own is None else None
    skipped = {name: reason for name in config.methods if (reason := methods.why_not(name, network, model))}
    chosen = [
        (name, pushes)
        for name in config.methods
        if name not in skipped
        for pushes in (config.pushes if name in methods.RECIPES else config.pushes[:1])
    ]
    if config.dry_run:
        return _dry(config, setting, network, chosen, skipped, run)
    rows: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    with run.progress("methods", len(chosen) * config.seeds) as bar:
        for seed in range(config.seed, config.seed + config.seeds):
            if own is None:
                sizes: Any = {"examples": setting.examples, "large": setting.large, "clusters": setting.clusters}
                made = scenario(config.data, setting.clients, seed, **sizes)
            else:
                made = owned_scenario(own, setting.clients, seed)
            if not described:
                described = summary.show(run, made.data, made.split, made.shift)
                if made.cluster is not None:
                    described["cluster"] = made.cluster.tolist()
                first = made
            fitting = _fitting(config, setting, made, seed)
            for name, pushes in chosen:
                title = _title(config, name, pushes)
                if title in skipped:  # diverged with another seed
                    bar.advance()
                    continue
                try:
                    row, detail, fitted = _fit(config, fitting, name, pushes, seed)
                except Diverged as error:
                    skipped[title] = f"diverged with seed {seed}: {error}"
                    if all(_title(config, *each) in skipped for each in chosen):  # nothing is left to compare
                        raise
                else:
                    rows.append(row)
                    if seed == config.seed:
                        details.append({"method": title, **detail})
                        run.save_models(f"{title}, params", fitted.params, made.names)
                        run.save_models(f"{title}, hypers", fitted.hypers, made.names)
                    run.record(**row, **detail)
                bar.advance()
    rows, details = ([each for each in found if each["method"] not in skipped] for found in (rows, details))
    _show(config, run, rows, skipped)
    _draw(run, details)
    _learnt(run, first, details)
    start = "warm: each outer step goes on from where training stands" if setting.again else "anew before each step"
    return {
        "rows": rows,
        "not_applicable": skipped,
        "details": details,
        "data": described,
        "start": start,
        "setting": setting._asdict() | {"outer": {name: outer._asdict() for name, outer in setting.outer.items()}},
    }


def _fitting(config: Personalize, setting: Any, made: Any, seed: int) -> Any:
    """What fits methods to the task of one seed."""
    import jax

    from hyperpush import networks
    from hyperpush.personalize.methods import Fitting

    network = networks.by_name(config.network, setting.clients, seed)
    at_a_time = config.at_a_time or (None if config.data in ("digits", "own") else 1)
    return Fitting(made, network, setting, jax.random.key(seed), at_a_time)


def _fit(
    config: Personalize, fitting: Any, name: str, pushes: int, seed: int
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The row of a method, what else is known of it, and the personal models."""
    from time import perf_counter

    import numpy as np

    from hyperpush import processes
    from hyperpush.personalize.methods import PLAIN
    from hyperpush.personalize.scores import scores

    made, began = fitting.scenario, perf_counter()
    fitted = fitting.fit(name, estimator_of(fitting.setting, pushes))
    held_out, result = (
        scores(fitted.recipe, made.model, fitted.params, fitted.hypers, data, fitting.engine.clients_per_batch or 1)
        for data in (made.validation, made.test)
    )
    row = {
        "method": _title(config, name, pushes),
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
    learnt = {} if name in PLAIN else fitted.recipe.shown(processes.gathered(fitted.hypers))
    weights = {key: np.asarray(value) for key, value in learnt.items()}
    detail = {
        "clients": result.each.tolist(),
        "validation_by_outer_step": fitted.curve,
        "weights": {key: value.tolist() for key, value in weights.items()},
    }
    if made.cluster is not None and "models" in weights:
        groups = range(int(made.cluster.max()) + 1)
        detail["models_by_cluster"] = [weights["models"][made.cluster == c].mean(0).tolist() for c in groups]
    return row, detail, fitted


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
    seeds = f"seed {config.seed}" if config.seeds == 1 else f"{config.seeds} seeds"
    run.table(f"{config.data}, {config.network}, {seeds}", columns, lines)
    if any(line[-1] for line in lines):
        run.console.print(f"published: {SOURCE}; average / 10 % client, on the papers' sizes")


def _draw(run: Any, details: list[dict[str, Any]]) -> None:
    """Accuracies of clients and validation by outer step."""
    from hyperpush.runs.report.figures import panels

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


def _learnt(run: Any, task: Any, details: list[dict[str, Any]]) -> None:
    """The weights that were learnt: of models by true cluster, of labels beside how often clients have them."""
    import numpy as np

    from hyperpush.runs.report.figures import panels
    from hyperpush.studies.data.partition import counts

    shares = counts(task.data.labels, task.data.classes, task.split.train)
    shares = shares / shares.sum(1, keepdims=True)
    lines = []
    for detail in details:
        weights, method = detail["weights"], detail["method"]
        stem = f"weights-{method.replace(',', '').replace(' ', '')}"
        if "models" in weights:
            each = np.asarray(weights["models"])
            lines.append((method, "models", *np.quantile(each, (0, 0.5, 1)).tolist(), None))
        if "models_by_cluster" in detail:
            figure, (axes,) = panels()
            _matrix(axes, detail["models_by_cluster"], "model", "true cluster of clients", vmin=0, vmax=1)
            axes.set_title(f"{method}: mean weights")
            run.figure(stem, figure)
        if "labels" in weights:
            each = np.asarray(weights["labels"])
            moved = each.std() > 0 and shares.std() > 0
            together = float(np.corrcoef(each.ravel(), shares.ravel())[0, 1]) if moved else None
            lines.append((method, "labels", *np.quantile(each, (0, 0.5, 1)).tolist(), together))
            figure, (left, right) = panels(2)
            _matrix(left, shares, "label", "client")
            left.set_title("share of the client's training examples")
            figure.colorbar(_matrix(right, each, "label", "client"), ax=right)
            right.set_title(f"{method}: weights")
            run.figure(f"{stem}-labels", figure)
    if lines:
        columns = ("method", "weights of", "least", "median", "most", "correlation with shares")
        run.table("what was learnt", columns, lines)


def _matrix(axes: Any, values: Any, x: str, y: str, **options: Any) -> Any:
    """A matrix as colours."""
    drawn = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    axes.grid(visible=False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return drawn


def _title(config: Personalize, name: str, pushes: int) -> str:
    """A method's name in tables; the first number of pushes is not told."""
    return name if pushes == config.pushes[0] else f"{name}, S = {pushes}"


def _dry(
    config: Personalize, setting: Any, network: Any, chosen: list[Any], skipped: dict[str, str], run: Any
) -> dict[str, Any]:
    """What each method would take, what cannot run here, and which files are there."""
    from hyperpush.personalize.cost import costs, here

    titles = [(name, _title(config, name, pushes)) for name, pushes in chosen]
    cost = costs(config.data, network, setting, titles) if titles else []
    cost = [row | {"hours": row["hours"] * config.seeds} for row in cost]
    lines = [list(row.values()) for row in cost]
    lines += [[name, f"n/a: {reason}", None, None] for name, reason in skipped.items()]
    run.table(
        f"{config.data}, {config.network}, {config.size}: about",
        ("method", "parameters", "gradients per client", "hours"),
        lines,
    )
    asked = "all examples" if setting.examples is None else f"{setting.examples:,} examples"
    files = f"{asked} are asked for; {here(config.data)}"
    run.console.print(files)
    return {"dry_run": True, "rows": [], "not_applicable": skipped, "cost": cost, "files": files}


EXPERIMENT = Experiment(
    "personalize",
    "Personal models over a network: recipes and baselines, by average and 10 % client.",
    Personalize,
    run_personalize,
    Tuning("validation_accuracy", ("accuracy", "accuracy_p10"), rates=("rate", "ensemble_rate")),
    check,
)
