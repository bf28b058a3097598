"""Every bilevel algorithm on one task, each with the same grid of steps: what `tune` and `meta` share.

All settings of a method run side by side as one compiled program, in which its step sizes are traced. Of those that
stay finite, the one with the least outer (validation) cost in the end is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from hyperpush.runs.config import Config

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
QUIET = 1e6  # an ε whose noise does not matter


class Privacy(Config):
    """Local differential privacy of a run. All of it is fixed beforehand: what is chosen by looking is a release."""

    epsilon: Positive = Field(default=1.0, description="What no client's ε may exceed, for all that it sends.")
    delta: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=1e-5, description="δ, with Gaussian noise; 0 for pure ε, with Laplace noise."
    )
    clip: Positive = Field(default=0.5, description="Largest ℓ2 norm of one example's gradient.")
    radius: Positive = Field(default=0.5, description="Largest ℓ2 norm of LDP-DSBO's z.")
    iterations: Count = Field(default=300, description="Iterations of LDP-DSBO.")
    loop_outer: Positive = Field(
        default=0.1, description="Outer step of LDP-DSBO, as it is: differences that it keeps grow with steps × slopes."
    )
    loop_inner: Positive = Field(default=0.25, description="Inner step of LDP-DSBO, as it is.")
    outer_steps: Count = Field(default=2, description="Outer steps of PDBO.")
    solver_steps: Count = Field(default=15, description="Steps of SGP before each of them, and once more at the end.")
    order: Count = Field(default=3, description="Order of HGP, and steps of TrackedHGP.")
    outer: Positive = Field(default=1.0, description="Outer step of PDBO, in units of the task.")
    inner: Positive = Field(default=1.0, description="Inner step of PDBO, in units of the task.")


class Comparison(Config):
    """Options of a comparison; an experiment adds its own."""

    clients: Annotated[int, Field(ge=2)] = Field(default=10, description="How many share the data.")
    network: str = Field(default="ring", description="Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = Field(default=(), description="Which to run, by name; all if left out.")
    iterations: Annotated[int, Field(ge=5)] = Field(default=150, description="Iterations of single-loop methods.")
    local_steps: Count = Field(
        default=5, description="Steps of FedBiO and FedBiOAcc per iteration, of which they take as many times fewer."
    )
    products: Count = Field(default=5, description="Conjugate gradients where a method solves with a Hessian.")
    outer_steps: Count = Field(default=20, description="Outer steps of the methods that solve the inner problem first.")
    solver_steps: Count = Field(default=20, description="Steps of SGP before each of them, from where it stood.")
    order: Count = Field(default=10, description="Order of HGP, and steps of TrackedHGP.")
    pushes: Count = Field(default=4, description="Pushes of HGP, of TrackedHGP and of the hypers in a step.")
    outer: tuple[Positive, ...] = Field(
        default=(1.0, 4.0, 16.0), min_length=1, description="Outer steps to try, in units of the task."
    )
    inner: tuple[Positive, ...] = Field(
        default=(0.5, 1.5), min_length=1, description="Inner steps to try, in units of the task."
    )
    points: Count = Field(default=15, description="Points of a curve.")
    most: Count = Field(
        default=50_000, description="Methods that would form larger matrices than this many numbers are left out."
    )
    privacy: Privacy | None = Field(default=None, description="Run privately besides, what can be.")
    seed: int = Field(default=0, ge=0, description="Decides data, starting point and every draw.")
    precision: Literal["float32", "float64"] = "float32"


@dataclass(frozen=True)
class Benchmark:
    """What is compared on.

    `measure(params, hypers)` takes these stacked, clients on axis 0, and returns named numbers, `outer_cost` among
    them, by JAX.
    """

    task: Any  # hyperpush.Task; with common=True all clients are to agree on one hyper
    measure: Callable[[Any, Any], dict[str, Any]]
    outer_unit: float = 1.0  # of outer step sizes
    inner_unit: float = 1.0  # of inner step sizes: about 1/λ_max of the inner Hessian
    constants: Callable[[float, float], Any] | None = None  # (clip, radius) -> Constants that are true of the costs


class Runs(NamedTuple):
    """Runs side by side: (params, hypers) with leaves [settings, points, clients, …], and what each run cost."""

    seen: tuple[Any, Any]
    iterations: Any  # at each point
    floats: Any  # that a client had sent at each point
    rounds: int  # in all


@dataclass(frozen=True)
class Compared:
    """A method at its best setting: a row of the table, its curve, and where it ended (None if it was left out)."""

    row: dict[str, Any]
    curve: dict[str, Any] | None = None
    params: Any = None
    hypers: Any = None


def algorithms(config: Comparison) -> dict[str, Callable[[Any, Any], Any]]:
    """The algorithms that move params and hypers together, by name, from their (outer, inner) step sizes."""
    import hyperpush as hp

    many, cg = config.iterations, hp.algorithms.ConjugateGradients(config.products)
    local, times = config.local_steps, max(1, config.iterations // config.local_steps)
    return {
        "BSA": lambda a, b: hp.algorithms.BSA(many, a, b, inner_steps=3, growth=0, inverse=cg),
        "TTSA": lambda a, b: hp.algorithms.TTSA(many, a, b, inverse=cg),
        "FedNest": lambda a, b: hp.algorithms.FedNest(many, a, b, inner_steps=3, inverse=cg),
        "FedBiO": lambda a, b: hp.algorithms.FedBiO(times, a, b, local, inverse=cg),
        "FedBiOAcc": lambda a, b: hp.algorithms.FedBiOAcc(times, a, b, local, inverse=cg, forget=0.5),
        "SPDB": lambda a, b: hp.algorithms.SPDB(many, a, b, penalty=0.5 / a, inverse=cg),
        "INTERACT": lambda a, b: hp.algorithms.INTERACT(many, a, b, config.products),
        "SVRINTERACT": lambda a, b: hp.algorithms.SVRINTERACT(many, a, b, period=7, inverse=cg),
        "MDBO": lambda a, b: hp.algorithms.MDBO(many, a, b, 0.7, 0.9, 0.8, inverse=cg),
        "VRDBO": lambda a, b: hp.algorithms.VRDBO(many, a, b, 0.7, 0.9, 0.8, inverse=cg),
        "DSBOJHIP": lambda a, b: hp.algorithms.DSBOJHIP(many, a, b, b, tracked=True),
        "GBDSBO": lambda a, b: hp.algorithms.GBDSBO(many, a, b, tracked=True),
        "MADSBO": lambda a, b: hp.algorithms.MADSBO(many, a, b, b, tracked=True),
        "LDPDSBO": lambda a, b: hp.algorithms.LDPDSBO(
            many,
            {"x": hp.schedule("power", a), "y": hp.schedule("power", b), "z": hp.schedule("power", b)},
            use="reused",
        ),
    }


def nested(task: Any, solver: Any, estimator: Any, outer: Any, steps: int, pushes: int) -> Any:
    """PDBO; where all are to agree on one hyper, CDBO with so many pushes."""
    import hyperpush as hp

    loops = {
        "inner": solver,
        "hypergradient": estimator,
        "outer": hp.optimizer("sgd", learning_rate=outer),
        "steps": steps,
        "restart": False,
    }
    return hp.CDBO(**loops, pushes=pushes) if task.common else hp.PDBO(**loops)


def method_of(config: Comparison, name: str, on: Benchmark, outer: Any, inner: Any) -> Any:
    """A method with these outer and inner step sizes, which may be traced."""
    import hyperpush as hp

    if not name.startswith("PDBO"):
        return algorithms(config)[name](outer, inner)
    if name == "PDBO + HGP":
        estimator = hp.HGP(config.order, config.pushes, on.inner_unit * min(config.inner))
    else:
        estimator = hp.TrackedHGP(config.order, pushes=config.pushes, tolerance=None)
    solver = hp.SGP(config.solver_steps, inner)
    return nested(on.task, solver, estimator, outer, config.outer_steps, config.pushes)


def known(config: Comparison) -> list[str]:
    """All methods, in the order of the table."""
    return [*algorithms(config), "PDBO + HGP", "PDBO + TrackedHGP"]


def names(config: Comparison, network: Any = None) -> list[str]:
    """The methods that a comparison runs; refuse names that do not exist, and methods that cannot use the network."""
    from hyperpush.arguments import check_links
    from hyperpush.errors import unknown

    for name in config.methods:
        if name not in known(config):
            raise unknown("methods", name, known(config))
    wanted = [name for name in known(config) if name in config.methods or not config.methods]
    made = algorithms(config)
    for name in wanted:
        if network is not None and name in made:  # PDBO runs on any
            check_links(made[name](0.1, 0.1), network)
    return wanted


def compare(
    config: Comparison, run: Any, network: Any, common: Benchmark, personal: Benchmark | None = None
) -> list[Compared]:
    """Every method at its best setting of the grid.

    `common` has one hyper for all. `personal` is the same with hypers that are each client's own, for the methods
    that can do without agreeing on them (PDBO); without it they agree too.
    """
    found = []
    wanted = names(config, network)
    with run.progress("methods", len(wanted)) as bar:
        for name in wanted:
            alternating = name.startswith("PDBO")
            on = personal if alternating and personal is not None else common
            reason = None if alternating else too_large(config, name, on.task)
            best = Compared(blank(name, reason)) if reason else tuned(config, name, network, on)
            found.append(best)
            run.record(**best.row)
            bar.advance()
    return found


def blank(name: str, reason: str) -> dict[str, Any]:
    return {"method": name, "left_out": reason}


def too_large(config: Comparison, name: str, task: Any) -> str | None:
    """Why a method that forms matrices does not run here, if it does not."""
    import jax

    from hyperpush.registry import registered

    if not registered("algorithms")[name].info.matrices:
        return None
    d, h = (sum(leaf[0].size for leaf in jax.tree.leaves(tree)) for tree in (task.params, task.hypers))
    largest = max(d * d, d * h) if name == "GBDSBO" else d * h
    if largest <= config.most:
        return None
    return (
        f"a matrix of {largest:,} numbers per client, for {d:,} params and {h:,} hypers; the limit is {config.most:,}"
    )


def tuned(config: Comparison, name: str, network: Any, on: Benchmark) -> Compared:
    """A method on the whole grid, and its best setting."""
    import jax
    import numpy as np

    grid = np.array(list(product(config.outer, config.inner))) * (on.outer_unit, on.inner_unit)
    runs = side_by_side(
        config, partial(method_of, config, name, on), network, on.task, grid, jax.random.key(config.seed)
    )
    return chosen(name, on, grid, runs)


def chosen(name: str, on: Benchmark, grid: Any, runs: Runs) -> Compared:
    """The finite setting of the least outer cost."""
    import jax
    import numpy as np

    seen = runs.seen
    measured = jax.jit(jax.vmap(lambda lane: jax.lax.map(lambda point: on.measure(*point), lane)))(seen)
    values = {key: np.asarray(value, np.float64) for key, value in measured.items()}
    ends = np.array([[np.all(np.isfinite(leaf[k, -1])) for leaf in jax.tree.leaves(seen)] for k in range(len(grid))])
    fine = ends.all(1) & np.isfinite([value[:, -1] for value in values.values()]).all(0)
    settings = {"settings_tried": len(grid), "settings_diverged": int((~fine).sum())}
    if not fine.any():
        return Compared({**blank(name, "diverged at every setting"), **settings})
    best = int(np.argmin(np.where(fine, values["outer_cost"][:, -1], np.inf)))
    row = {
        "method": name,
        **{key: float(value[best, -1]) for key, value in values.items()},
        "floats_per_client": int(runs.floats[-1]),
        "rounds": runs.rounds,
        "settings": {"outer_step": float(grid[best, 0]), "inner_step": float(grid[best, 1])},
        **settings,
    }
    curve = {
        "method": name,
        "iterations": [int(done) for done in runs.iterations],
        "floats_per_client": [float(sent) for sent in runs.floats],
        **{key: [float(v) if np.isfinite(v) else None for v in value[best]] for key, value in values.items()},
    }
    params, hypers = jax.tree.map(lambda leaf: leaf[best, -1], seen)
    return Compared(row, curve, params, hypers)


def side_by_side(
    config: Comparison, make: Callable[[Any, Any], Any], network: Any, task: Any, grid: Any, key: Any
) -> Runs:
    """Runs of `make(outer, inner)` for every row of the grid, as one compiled program; rows have the same structure."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import hyperpush as hp
    from hyperpush.algorithms.base import LOOP
    from hyperpush.engines.result import Recorder
    from hyperpush.programs import BilevelState, evaluate, profile, program_of
    from hyperpush.task import one_client

    def recipe(outer: Any, inner: Any) -> Any:
        return program_of(make(outer, inner).on(network), task.problem)

    first, start = make(*grid[0].tolist()), BilevelState(task.params, task.hypers)
    every = 1 if isinstance(first, hp.PDBO | hp.CDBO) else max(1, first.steps // config.points)
    record = {LOOP: Recorder(lambda state, ctx: (state.params, state.hyper), entry=True)}

    @jax.jit
    def everything(grid: Any, start: Any, data: Any) -> Any:
        def one(setting: Any) -> Any:
            return evaluate(recipe(*setting), network, start, data, key, record=record, every=every)

        return jax.vmap(one)(grid)

    end, history = everything(jnp.asarray(grid, jnp.zeros(()).dtype), start, task.data)
    seen, done = history[LOOP], np.arange(first.steps // every + 1) * every
    if done[-1] < first.steps:
        done, last = np.append(done, first.steps), (end.params, end.hyper)
        seen = jax.tree.map(lambda rows, row: jnp.concatenate([rows, row[:, None]], axis=1), seen, last)
    found = profile(recipe(*grid[0].tolist()), one_client(start), one_client(task.data), network.clients)
    body, passes = next(body for body, _, loop in found.loops if loop.name == LOOP), found.passes({})
    rounds = sum(passes[sending.body] * sending.messages(1) for sending in found.sendings)
    return Runs(seen, done, found.floats_at(body, done, {}, 1), rounds)


def privately(
    config: Comparison,
    run: Any,
    network: Any,
    found: list[Compared],
    common: Benchmark,
    personal: Benchmark | None = None,
) -> list[dict[str, Any]]:
    """What can be private, run so, beside what `compare` found: ε as claimed and what it costs in accuracy.

    The same run at next to no noise tells what the noise costs from what its settings cost, which are fixed beforehand.
    """
    from hyperpush.privacy import ASSUMPTION

    privacy = config.privacy
    if privacy is None:
        return []
    rows = []
    for open_run in found:
        name = open_run.row["method"]
        on = personal if name.startswith("PDBO") and personal is not None else common
        row: dict[str, Any] = {"method": name}
        if name != "LDPDSBO" and not name.startswith("PDBO"):
            row["reason"] = "n/a: this study runs LDPDSBO and PDBO privately"
        elif on.constants is None:
            row["reason"] = "n/a: no bounds on the second derivatives of this problem are known"
        else:
            quiet = privacy.model_copy(update={"epsilon": max(QUIET, privacy.epsilon)})
            noisy, claimed = once(config, privacy, name, network, on, private_key(config, name))
            same, _ = once(config, quiet, name, network, on, private_key(config, name, quiet=True))
            row |= {"epsilon": privacy.epsilon, "delta": privacy.delta, "claimed": claimed, **noisy}
            row |= costs_of_privacy(open_run.row, same, noisy)
            row["assumes"] = ASSUMPTION
        rows.append(row)
        run.record(private=True, **row)
    return rows


def once(
    config: Comparison, privacy: Privacy, name: str, network: Any, on: Benchmark, key: Any
) -> tuple[dict[str, Any], float]:
    """The row of one private run, and the ε that it claims."""
    import numpy as np

    single = name == "LDPDSBO"
    if single:
        task, (made, claimed) = on.task, single_loop(privacy, network, on)
    else:
        task, made, claimed = alternating(config, privacy, name, network, on)
    step_sizes = [privacy.outer * on.outer_unit, privacy.inner * on.inner_unit]
    grid = np.array([[privacy.loop_outer, privacy.loop_inner] if single else step_sizes])
    runs = side_by_side(config, lambda outer, inner: made, network, task, grid, key)
    return chosen(name, on, grid, runs).row, claimed


def private_key(config: Comparison, name: str, quiet: bool = False) -> Any:
    """The key of a method's private run: no two runs have the same noise, and none shares draws with `compare`."""
    import zlib

    import jax

    key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(b"quiet" if quiet else b"private"))
    return jax.random.fold_in(key, known(config).index(name))


def costs_of_privacy(best: dict[str, Any], same: dict[str, Any], noisy: dict[str, Any]) -> dict[str, float]:
    """What privacy costs in accuracy, and its parts; a run that diverged has none.

    `best` is the row without privacy, `same` that of the private settings at next to no noise, `noisy` the private one.
    """
    found: dict[str, float] = {}
    if "accuracy" not in noisy or "accuracy" not in best:
        return found
    found["accuracy_without"] = best["accuracy"]
    found["cost_in_accuracy"] = best["accuracy"] - noisy["accuracy"]
    if "accuracy" in same:
        found["accuracy_same_settings"] = same["accuracy"]
        found["cost_of_noise"] = same["accuracy"] - noisy["accuracy"]
        found["cost_of_settings"] = best["accuracy"] - same["accuracy"]
    return found


def tell(run: Any, private: list[dict[str, Any]]) -> None:
    """What privacy cost each method, in a sentence; the methods that cannot be private in one line for each reason.

    In the end what every ε among them assumes.
    """
    reasons: dict[str, list[str]] = {}
    for row in private:
        if "cost_in_accuracy" not in row:
            reason = row.get("reason") or row.get("left_out") or "nothing to compare with"
            reasons.setdefault(reason, []).append(row["method"])
            continue
        delta = f", δ = {row['delta']:g}" if row["delta"] else ""
        parts = "the private settings diverge with next to no noise"
        if "cost_of_noise" in row:
            parts = (
                f"{100 * row['cost_of_settings']:.1f} for the private settings "
                f"({100 * row['accuracy_same_settings']:.1f} % with next to no noise) and "
                f"{100 * row['cost_of_noise']:.1f} for noise"
            )
        run.console.print(
            f"{row['method']}: ε = {row['claimed']:.3g}{delta} costs "
            f"{100 * row['cost_in_accuracy']:.1f} points of accuracy, "
            f"{100 * row['accuracy_without']:.1f} % without and {100 * row['accuracy']:.1f} % with: {parts}.",
            highlight=False,
        )
    for reason, methods in reasons.items():
        run.console.print(f"{', '.join(methods)}: {reason}", highlight=False)
    for assumed in dict.fromkeys(row["assumes"] for row in private if "assumes" in row):
        run.console.print(assumed, highlight=False)


def single_loop(privacy: Privacy, network: Any, on: Benchmark) -> tuple[Any, float]:
    """LDP-DSBO on a data set that it reuses, for a number of iterations that is known; and the ε that it claims.

    The noise on every variable is in proportion to how much an example can change it.
    """
    import hyperpush as hp
    from hyperpush.data.batches import capacity
    from hyperpush.task import one_client

    assert on.constants is not None
    start = on.task.params, on.task.hypers
    rows = min(capacity(one_client(each)) for each in (on.task.train, on.task.validation))
    kind, delta = (hp.privacy.Gaussian, privacy.delta) if privacy.delta else (hp.privacy.Laplace, None)
    step_sizes = {"x": privacy.loop_outer, "y": privacy.loop_inner, "z": privacy.loop_inner}
    constants = on.constants(privacy.clip, privacy.radius)

    def algorithm(noise):
        return hp.algorithms.LDPDSBO(privacy.iterations, step_sizes, noise, constants, use="reused", checked=False)

    unscaled = algorithm(kind(1.0)).accountant(network, *start, rows)
    changes = unscaled.sender.sensitivities(privacy.iterations)
    size = {key: unscaled.sender.dims[key] ** (0.5 if kind is hp.privacy.Laplace else 0) for key in changes}
    balanced = {key: kind(max(float(change.max()) * size[key], 1e-9)) for key, change in changes.items()}
    account = algorithm(balanced).accountant(network, *start, rows)
    made = algorithm(account.noise_for(privacy.epsilon, privacy.iterations, delta))
    claimed = made.accountant(network, *start, rows).epsilon(privacy.iterations, delta)
    return made, float(claimed.max())


def alternating(config: Comparison, privacy: Privacy, name: str, network: Any, on: Benchmark) -> tuple[Any, Any, float]:
    """The task with noise on everything that PDBO learns of data, PDBO, and the ε that it claims."""
    import hyperpush as hp

    assert on.constants is not None
    first, delta = (hp.privacy.Gaussian(1.0), privacy.delta) if privacy.delta else (hp.privacy.Laplace(1.0), None)
    constants, step_size = on.constants(privacy.clip, privacy.radius), privacy.inner * on.inner_unit
    hypers = "per example" if all(on.task.by_example) else "shared"
    along_y, along_x = (bound / constants.R for bound in constants.products)  # finite also where C_J is not known
    task = on.task.private(clip=privacy.clip, noise=first, curvature=along_y, coupling=along_x, hypers=hypers)
    solver = hp.SGP(privacy.solver_steps, step_size)
    if name == "PDBO + HGP":
        estimator = hp.HGP(privacy.order, config.pushes, step_size)
    else:
        estimator = hp.TrackedHGP(privacy.order, step_size, config.pushes, tolerance=None)
    made = nested(task, solver, estimator, privacy.outer * on.outer_unit, privacy.outer_steps, config.pushes)
    task = hp.privacy.within(privacy.epsilon, delta, task, made, network)
    return task, made, float(hp.privacy.budget(task, made, network).epsilon(delta))


def draw(run: Any, name: str, found: list[Compared], metrics: tuple[str, ...]) -> None:
    """A figure of each metric by iteration and by floats sent."""
    from hyperpush.runs.report.figures import panels

    curves = [each.curve for each in found if each.curve is not None]
    for metric in metrics:
        figure, axes = panels(2)
        for axis, x in zip(axes, ("iterations", "floats_per_client"), strict=True):
            for number, curve in enumerate(curves):
                values = [float("nan") if v is None else v for v in curve[metric]]
                style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
                axis.plot(curve[x], values, style, label=curve["method"])
            axis.set_xlabel(x.replace("_", " "))
            axis.set_ylabel(metric.replace("_", " "))
            axis.set_xscale("symlog", linthresh=max(1.0, min((v for c in curves for v in c[x] if v > 0), default=1.0)))
        axes[1].legend(fontsize=5)
        run.figure(f"{name}-{metric}", figure)


def table(run: Any, title: str, rows: list[dict[str, Any]]) -> None:
    """A table of rows that need not have the same columns; settings are spelled out. `tell` says what ε assumes."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "assumes"))

    def text(value: Any) -> Any:
        if isinstance(value, dict):
            return ", ".join(f"{key} {each:.3g}" for key, each in value.items())
        return value

    run.table(title, columns, [[text(row.get(column)) for column in columns] for row in rows])
