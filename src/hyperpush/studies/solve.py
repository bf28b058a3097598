"""Solve a bilevel task, ready-made or one's own, with short options: train, estimate the hypergradient, tune, report.

A spec (a file with `[task]`, `[network]` and `[method]`) can say more.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
STOP = "stop"  # the data set that early stopping looks at, if it is one of its own


class Inner(Config):
    """The inner solver."""

    method: str = Field(default="SGP", description="Name of the inner solver, or module:Class.")
    steps: Count = Field(default=1000, description="Steps; for FedAvg rounds of one local epoch.")
    rate: Positive = Field(default=0.5, description="Learning rate.")
    milestones: tuple[Count, ...] = Field(default=(), description="Steps at which the rate is divided by ten.")
    batch: Count | None = Field(default=None, description="Mini-batch size; all examples if left out.")
    order: Literal["gradient-first", "gradient-after"] = Field(
        default="gradient-first", description="When SGP and DSGD take their gradient: before mixing or after."
    )
    epochs: Count = Field(default=1, description="Local epochs per round of FedAvg.")


class Estimation(Config):
    """The hypergradient's estimator."""

    method: str = Field(default="HGP", description="Name of the estimator, or module:Class.")
    order: Count = Field(default=200, description="Order M of the series; steps or rounds of the other methods.")
    pushes: Count | None = Field(
        default=None, description="Averaging steps S per order: 10 for HGP, found by TrackedHGP itself, if left out."
    )
    step: Positive | None = Field(
        default=None,
        description="Step size, SGP's last rate for methods that reverse SGP; 0.5, or TrackedHGP's own, if left out.",
    )
    batch: Count | None = Field(default=None, description="Mini-batch size; all examples if left out.")
    averaging: Literal["push", "gossip", "exact"] = Field(default="push", description="How HGP averages.")
    keep_mass: bool = Field(default=False, description="Whether HGP keeps push-sum's weights between orders.")


class Outer(Config):
    """The outer optimizer."""

    steps: int = Field(default=10, ge=0, description="Outer steps; 0 only trains.")
    rate: Positive = Field(default=0.1, description="Adam's rate.")
    restart: bool = Field(default=True, description="Train from the start before every outer step.")
    form: Literal["PDBO", "CDBO", "CDBO-Local"] = Field(
        default="PDBO",
        description="Hypers of one's own; one for all; one for all, all training alone (LocalSGD, LocalGradient).",
    )
    pushes: Count = Field(default=1, description="Pushes per outer step towards one hyper for all (CDBO).")
    tracked: bool = Field(default=True, description="Whether clients track the mean hypergradient (CDBO).")


class Stopping(Config):
    """Early stopping."""

    patience: Count | None = Field(
        default=None, description="Outer steps without a better mean metric before the end; never if left out."
    )
    metric: str = Field(
        default="outer-cost", description="outer-cost, or your own module:function of (params, hyper, batch)."
    )
    data: str | None = Field(
        default=None,
        description="Its examples: module:function of (clients, seed); those of the outer cost if left out.",
    )
    mode: Literal["min", "max"] = Field(default="min", description="Which metric is better.")
    rounds: Count = Field(default=30, description="Pushes to average it.")
    weighted: bool = Field(default=False, description="Whether clients count by their number of examples.")

    @model_validator(mode="after")
    def _is_wanted(self) -> "Stopping":
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.patience is None and given:
            raise InvalidInput("stop.patience", None, f"a number of outer steps, as stop.{given[0]} is given")
        return self


class Solve(Config):
    """Options of a bilevel run."""

    problem: str = Field(
        default="logistic", description="A task of hp.tasks, or your own module:function of (clients, seed)."
    )
    clients: Annotated[int, Field(ge=2)] = 5
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    inner: Inner = Inner()
    estimator: Estimation = Estimation()
    outer: Outer = Outer()
    stop: Stopping = Stopping()
    engine: Literal["simulate", "shard", "peer"] = Field(
        default="simulate", description="One device, all devices of this process, or a thread per client."
    )
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _trains_alone(self) -> "Solve":
        for field, given, usual, alone in (
            ("inner.method", self.inner.method, "SGP", "LocalSGD"),
            ("estimator.method", self.estimator.method, "HGP", "LocalGradient"),
        ):
            if self.outer.form == "CDBO-Local" and given not in (usual, alone):
                raise InvalidInput(field, given, f"{alone} (or nothing), as outer.form is CDBO-Local")
        return self


def read_task(config: Solve) -> Any:
    """The task that the configuration names."""
    from hyperpush import spec

    options = {"log_rates": True} if config.problem == "logistic" else {}
    try:
        return spec.read_task({"name": config.problem, "clients": config.clients, "seed": config.seed, **options})
    except InvalidInput as error:
        if error.field != "task.name":
            raise
        raise InvalidInput("problem", error.given, error.allowed) from error


def called(field: str, name: str, config: Solve) -> Any:
    """What the user's function of (clients, seed) returns."""
    from hyperpush.errors import HyperpushError
    from hyperpush.spec import load_function

    function = load_function(field, name)
    try:
        return function(config.clients, config.seed)
    except HyperpushError:
        raise
    except Exception as error:  # the function is the user's: whatever it raises, say so
        said = f"{name}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of (clients, seed)") from error


def algorithm(config: Solve, task: Any) -> tuple[Any, Any]:
    """The algorithm as configured, and the task as it wants it."""
    from hyperpush.data.sets import DataSet
    from hyperpush.optimizers import optimizer
    from hyperpush.registry import find

    alone = config.outer.form == "CDBO-Local"
    kind = find("algorithms", config.outer.form, "outer.form")
    options: dict[str, Any] = {
        "inner": solver(config.inner, "LocalSGD" if alone else config.inner.method),
        "hypergradient": estimator(config.estimator, "LocalGradient" if alone else config.estimator.method),
        "outer": optimizer("adam", learning_rate=config.outer.rate),
        "steps": config.outer.steps,
        "restart": config.outer.restart,
        "pushes": config.outer.pushes,
        "tracked": config.outer.tracked,
    }
    task = task.replace(common=bool(kind.info.fixed_point))
    if config.stop.data is not None:
        examples = DataSet(STOP, called("stop.data", config.stop.data, config))
        if examples.clients != task.clients:
            raise InvalidInput("stop.data", f"{examples.clients} clients", f"{task.clients} clients, as in problem")
        task = task.replace(_sets={**task._sets, STOP: examples})
    return kind(**fitting(kind, options), stop=stopping(config, task)), task


def stopping(config: Solve, task: Any) -> Any:
    """The early stopping that the configuration asks for."""
    from hyperpush.algorithms.stopping import EarlyStopping
    from hyperpush.spec import load_function

    given = config.stop
    if given.patience is None:
        return None
    metric = "cost" if given.metric == "outer-cost" else load_function("stop.metric", given.metric)
    on = task.outer_on if given.data is None else STOP
    return EarlyStopping(metric, on, given.patience, given.mode, given.rounds, given.weighted)


def solver(given: Inner, name: str) -> Any:
    """The inner solver of this name, as configured."""
    from hyperpush.optimizers import schedule
    from hyperpush.registry import find

    rate = schedule("milestones", given.rate, at=given.milestones) if given.milestones else given.rate
    kind = find("inner", name, "inner.method")
    options = {"steps": given.steps, "step_size": rate, "batch_size": given.batch}
    return kind(**fitting(kind, {**options, "variant": given.order, "epochs": given.epochs}))


def estimator(given: Estimation, name: str) -> Any:
    """The estimator of this name, as configured."""
    from hyperpush.inner.sgp import SGP
    from hyperpush.registry import find

    kind = find("hypergradients", name, "estimator.method")
    options = {"steps": given.order, "pushes": given.pushes, "step_size": given.step, "batch_size": given.batch}
    options |= {"averaging": given.averaging, "keep_mass": given.keep_mass}
    step = given.step or 0.5
    needed = {"pushes": 10, "step_size": step, "solver": SGP(given.order, step, batch_size=given.batch)}
    return kind(**fitting(kind, options, needed))


def fitting(kind: type, options: dict[str, Any], needed: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options that a class has; where one is not set but has no default, that of `needed`."""
    import inspect

    parameters = inspect.signature(kind).parameters
    found = {name: value for name, value in options.items() if name in parameters and value is not None}
    required = [name for name, each in parameters.items() if each.default is each.empty and name not in found]
    return found | {name: value for name, value in (needed or {}).items() if name in required}


def run_solve(config: Solve, run: Any) -> dict[str, Any]:
    """Run it and compare the last hypergradient with the closed form where that is affordable."""
    from contextlib import suppress

    import jax
    import numpy as np

    import hyperpush as hp
    from hyperpush.algorithms.base import LOOP
    from hyperpush.hooks import Progress
    from hyperpush.hypergradients import oracles
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    method, task = algorithm(config, read_task(config))
    network = hp.networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    alone = config.outer.form == "CDBO-Local"
    engine = {"simulate": hp.Simulate, "shard": hp.Shard, "peer": hp.Threads}[config.engine]()
    solving_key, checking_key = jax.random.split(jax.random.key(config.seed))
    with run.progress("outer steps", max(config.outer.steps, 1)) as bar:

        def advance(loop: str, done: int, total: int) -> None:
            if loop == LOOP:
                bar.update(done)

        hooks = (Progress(advance),)
        solution = hp.solve(task, method, network, key=solving_key, every=1, engine=engine, hooks=hooks)
    # An estimator that trains itself starts where training did.
    at = task.at(hypers=solution.hypers) if method.hypergradient.trains else solution.task
    found = hp.hypergradient(at, method.hypergradient, network, key=checking_key, engine=engine)
    value = flat(found.value)
    error = None  # the closed form is that of one inner problem for all
    if not alone and sum(leaf[0].size for leaf in jax.tree.leaves(task.params)) <= 500:
        with suppress(np.linalg.LinAlgError):  # a singular Hessian has no closed form to compare with
            truth = oracles.dense(task.problem, solution.task.params, solution.hypers, task.data)
            error = float(np.linalg.norm(value - flat(truth)))
    columns = solution.history.columns()
    costs = columns["cost"].tolist()
    metric = columns["watched"].tolist() if "watched" in columns else None
    for number, cost in enumerate(costs):
        more = {} if metric is None else {"metric": metric[number]}
        run.record(outer_step=number, outer_cost=cost, **more, rounds=int(columns["rounds"][number]))
    if len(costs) > 1:
        figure, (axes,) = panels()
        error_curves(
            axes, [Curve("mean over clients", range(len(costs)), costs)], x_label="outer step", y_label="outer cost"
        )
        run.figure("outer-cost", figure)
    run.save_models("params", solution.params, solution.names)
    run.save_models("hypers", solution.hypers, solution.names)
    rows = [("outer cost before", costs[0]), ("outer cost after", costs[solution.best_step])]
    rows += [("best outer step", f"{solution.best_step} of {len(costs) - 1}")] if metric is not None else []
    spread = None
    if task.common:
        spread = float(max(np.ptp(leaf, 0).max() for leaf in jax.tree.leaves(solution.hypers)))
        rows += [("largest difference of clients' hypers", spread)]
    rows += [("norm of the hypergradient", float(np.linalg.norm(value)))]
    rows += [("its error against the closed form", error)] if error is not None else []
    rows += [("rounds", solution.costs.rounds), ("numbers sent per client", solution.costs.floats)]
    run.table(f"{config.problem} on {config.network}", ("quantity", "value"), rows)
    return {
        "outer_costs": costs,
        "best_step": solution.best_step,
        "metric": metric,
        "hyper_spread": spread,
        "hypergradient_norm": float(np.linalg.norm(value)),
        "hypergradient_error": error,
        "rounds": solution.costs.rounds,
        "floats_per_client": solution.costs.floats,
    }


def flat(tree: Any) -> Any:
    """All numbers of a pytree in one float64 vector."""
    import jax
    import numpy as np

    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


EXPERIMENT = Experiment("solve", "Solve a bilevel task, ready-made or your own module:function.", Solve, run_solve)
