"""Solve a bilevel problem, ready-made or one's own: train, estimate the hyper-gradient, tune, report."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.config import Config
from hyperpush.errors import InvalidInput
from hyperpush.experiments.registry import Experiment

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Inner(Config):
    """The inner solver."""

    method: Literal["SGP", "DSGD", "FedAvg", "Alone"] = Field(default="SGP", description="Who trains, and how.")
    steps: Count = Field(default=1000, description="Steps; for FedAvg rounds of one local epoch.")
    rate: Positive = Field(default=0.5, description="Learning rate.")
    milestones: tuple[Count, ...] = Field(default=(), description="Steps at which the rate is divided by ten.")
    batch: Count | None = Field(default=None, description="Mini-batch size; all examples if left out.")
    order: Literal["gradient-first", "gradient-after"] = Field(
        default="gradient-first", description="When SGP and DSGD take their gradient: before mixing or after."
    )
    epochs: Count = Field(default=1, description="Local epochs per round of FedAvg.")


class Estimation(Config):
    """The hyper-gradient's estimator."""

    method: Literal[
        "HGP",
        "TrackedHGP",
        "DirectedRB",
        "VRHGP",
        "ExactRB",
        "ITDBackward",
        "ITDForward",
        "ImplicitCG",
        "ImplicitNeumann",
        "Dense",
        "ClientGradient",
        "LocalGradient",
        "DirectGradient",
    ] = "HGP"
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
    """The outer optimiser."""

    steps: int = Field(default=10, ge=0, description="Outer steps; 0 only trains.")
    rate: Positive = Field(default=0.1, description="Adam's rate.")
    restart: bool = Field(default=True, description="Train from the start before every outer step.")
    form: Literal["PDBO", "CDBO", "CDBO-Local"] = Field(
        default="PDBO",
        description="Hypers of one's own; one for all; one for all while everyone trains alone (Alone, LocalGradient).",
    )
    pushes: Count = Field(default=1, description="Pushes per outer step towards one hyper for all (CDBO).")
    tracked: bool = Field(default=True, description="Whether clients track the mean hyper-gradient (CDBO).")


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
        default="logistic", description="logistic, quadratic, or your own module:function of (clients, seed)."
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
            ("inner.method", self.inner.method, "SGP", "Alone"),
            ("estimator.method", self.estimator.method, "HGP", "LocalGradient"),
        ):
            if self.outer.form == "CDBO-Local" and given not in (usual, alone):
                raise InvalidInput(field, given, f"{alone} (or nothing), as outer.form is CDBO-Local")
        return self


def instance(config: Solve) -> Any:
    """The problem that the configuration names."""
    from functools import partial

    from hyperpush.errors import unknown
    from hyperpush.problem import Problem
    from hyperpush.problems.instance import Instance
    from hyperpush.problems.logistic import logistic
    from hyperpush.problems.quadratic import quadratic

    known = {"logistic": partial(logistic, log_rates=True), "quadratic": quadratic}
    if ":" in config.problem:
        made = called("problem", config.problem, config)
        if not isinstance(made, tuple) or len(made) != len(Instance._fields) or not isinstance(made[0], Problem):
            raise InvalidInput("problem", config.problem, f"a function that returns ({', '.join(Instance._fields)})")
        return Instance(*made)
    if config.problem not in known:
        raise unknown("problem", config.problem, [*known, "module:function"])
    return known[config.problem](config.clients, config.seed)


def called(field: str, spec: str, config: Solve) -> Any:
    """What the user's function of (clients, seed) returns."""
    from hyperpush.config import load_object
    from hyperpush.errors import HyperpushError

    function = load_object(spec, field)
    try:
        return function(config.clients, config.seed)
    except HyperpushError:
        raise
    except Exception as error:  # the function is the user's: whatever it raises, say so
        said = f"{spec}, which fails with {type(error).__name__}: {error}"
        raise InvalidInput(field, said, "a function of (clients, seed)") from error


def run_solve(config: Solve, run: Any) -> dict[str, Any]:
    """Run it and compare the last hyper-gradient with the closed form where that is affordable."""
    from contextlib import suppress

    import jax
    import numpy as np
    import optax

    from hyperpush import networks
    from hyperpush.bilevel.consensus import OuterConsensus
    from hyperpush.bilevel.solve import solve
    from hyperpush.data.batches import Data
    from hyperpush.engine import peer, shard, simulate
    from hyperpush.estimators import oracles
    from hyperpush.estimators.estimate import hypergradient
    from hyperpush.report.figures import Curve, error_curves, panels

    made = instance(config)
    network = networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    alone = config.outer.form == "CDBO-Local"
    inner = solver(config.inner, "Alone" if alone else config.inner.method)
    estimator = estimation(config.estimator, "LocalGradient" if alone else config.estimator.method)
    consensus = None if config.outer.form == "PDBO" else OuterConsensus(config.outer.pushes, config.outer.tracked)
    engine = {"simulate": simulate.run, "shard": shard.run, "peer": peer.run}[config.engine]
    solving_key, checking_key = jax.random.split(jax.random.key(config.seed))
    with run.progress("outer steps", max(config.outer.steps, 1)) as bar:

        def progress(name: str, done: int, total: int) -> None:
            if name == "outer":
                bar.update(done)

        solution = solve(
            made.problem,
            network,
            inner=inner,
            hypergradient=estimator,
            outer=optax.adam(config.outer.rate),
            outer_steps=config.outer.steps,
            params=made.params,
            hypers=made.hypers,
            inner_data=made.inner_data,
            outer_data=made.outer_data,
            key=solving_key,
            restart=config.outer.restart,
            consensus=consensus,
            stop=stopping(config, made.problem),
            run=engine,
            progress=progress,
        )
    found = hypergradient(
        made.problem,
        estimator,
        network,
        solution.params,
        solution.hypers,
        made.inner_data,
        made.outer_data,
        checking_key,
        run=engine,
        step=solution.step,
    )
    value = flat(found.value)
    error = None  # the closed form is that of one inner problem for all
    if not alone and sum(leaf[0].size for leaf in jax.tree.leaves(made.params)) <= 500:
        with suppress(np.linalg.LinAlgError):  # a singular Hessian has no closed form to compare with
            data = Data(made.inner_data, made.outer_data)
            truth = oracles.dense(made.problem, solution.params, solution.hypers, data)
            error = float(np.linalg.norm(value - flat(truth)))
    history = solution.history
    costs = np.asarray(history.outer_costs, np.float64).mean(1).tolist()
    metric = None if history.mean_metric is None else np.asarray(history.mean_metric, np.float64).tolist()
    for number, cost in enumerate(costs):
        more = {} if metric is None else {"metric": metric[number]}
        more |= {} if history.rounds is None else {"rounds": int(history.rounds[number])}
        run.record(outer_step=number, outer_cost=cost, **more)
    if len(costs) > 1:
        figure, (axes,) = panels()
        error_curves(
            axes, [Curve("mean over clients", range(len(costs)), costs)], x_label="outer step", y_label="outer cost"
        )
        run.figure("outer-cost", figure)
    run.save_models("params", solution.params)
    run.save_models("hypers", solution.hypers)
    rows = [("outer cost before", costs[0]), ("outer cost after", costs[solution.best_step])]
    rows += [("best outer step", f"{solution.best_step} of {len(costs) - 1}")] if metric is not None else []
    spread = None
    if consensus is not None:
        spread = float(max(np.ptp(leaf, 0).max() for leaf in jax.tree.leaves(solution.hypers)))
        rows += [("largest difference of clients' hypers", spread)]
    rows += [("norm of the hyper-gradient", float(np.linalg.norm(value)))]
    rows += [("its error against the closed form", error)] if error is not None else []
    rows += [("rounds", solution.rounds), ("numbers sent per client", solution.floats)]
    run.table(f"{config.problem} on {config.network}", ("quantity", "value"), rows)
    return {
        "outer_costs": costs,
        "best_step": solution.best_step,
        "metric": metric,
        "hyper_spread": spread,
        "hypergradient_norm": float(np.linalg.norm(value)),
        "hypergradient_error": error,
        "rounds": solution.rounds,
        "floats_per_client": solution.floats,
    }


def stopping(config: Solve, problem: Any) -> Any:
    """The early stopping that the configuration asks for."""
    from hyperpush.bilevel.stopping import EarlyStopping
    from hyperpush.config import load_object

    options = config.stop
    if options.patience is None:
        return None
    metric = problem.outer if options.metric == "outer-cost" else load_object(options.metric, "stop.metric")
    data = None if options.data is None else called("stop.data", options.data, config)
    return EarlyStopping(metric, data, options.patience, options.mode, options.rounds, options.weighted)


def solver(options: Inner, method: str) -> Any:
    """The inner solver `method`, as configured."""
    import hyperpush as hp

    rate = hp.milestones(options.rate, options.milestones) if options.milestones else options.rate
    own: dict[str, Any] = {"FedAvg": {"epochs": options.epochs}, "Alone": {}}.get(method, {"order": options.order})
    return getattr(hp, method)(options.steps, rate, batch=options.batch, **own)


def estimation(options: Estimation, method: str) -> Any:
    """The estimator `method`, as configured."""
    import hyperpush as hp

    count, batch, step = options.order, options.batch, options.step or 0.5
    if method == "HGP":
        averaging = options.averaging
        return hp.HGP(count, options.pushes or 10, step, batch, averaging, keep_mass=options.keep_mass)
    if method == "TrackedHGP":
        return hp.TrackedHGP(count, options.step, options.pushes, batch)
    if method in ("LocalGradient", "DirectGradient", "Dense"):
        return getattr(hp, method)()
    if method in ("ImplicitCG", "ClientGradient"):
        return getattr(hp, method)(count)
    if method == "ImplicitNeumann":
        return hp.ImplicitNeumann(count, step)
    if method in ("ITDBackward", "ITDForward"):
        return getattr(hp, method)(hp.SGP(count, step, batch=batch))
    return getattr(hp, method)(count, step, batch=batch)


def flat(tree: Any) -> Any:
    """All numbers of a pytree in one float64 vector."""
    import jax
    import numpy as np

    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


EXPERIMENT = Experiment("solve", "Solve a bilevel problem, ready-made or your own module:function.", Solve, run_solve)
