"""Every bilevel algorithm on one task, each with the same grid of steps: what `tune` and `meta` share.

All settings of a method run side by side as one compiled program, where its steps may be traced; of those that stay
finite, the one with the least outer (validation) cost in the end is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.config import Config

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
UNTRACED = ("INTERACT", "SPDB", "LDPDSBO")  # their steps have to be plain numbers: settings run one after the other
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
class Task:
    """What is compared on; clients on axis 0 of every array of the instance.

    `measure(params, hypers)` takes these stacked and returns named numbers, `outer_cost` among them, by JAX.
    """

    instance: Any  # hyperpush.problems.instance.Instance
    measure: Callable[[Any, Any], dict[str, Any]]
    outer_unit: float = 1.0  # of outer steps
    inner_unit: float = 1.0  # of inner steps: about 1/λ_max of the inner Hessian
    personal: bool = False  # every client has hypers of its own, which nobody else needs
    per_example: bool = False  # every hyper weighs one inner example, and nothing else uses it
    constants: Callable[[float, float], Any] | None = None  # (clip, radius) -> Constants that are true of the costs


@dataclass(frozen=True)
class Compared:
    """A method at its best setting: a row of the table, its curve, and where it ended (None if it was left out)."""

    row: dict[str, Any]
    curve: dict[str, Any] | None = None
    params: Any = None
    hypers: Any = None


def algorithms(config: Comparison) -> dict[str, Callable[[Any, Any], Any]]:
    """The algorithms that move params and hypers together, by name, from their (outer step, inner step)."""
    import hyperpush as hp

    many, cg = config.iterations, hp.ConjugateGradients(config.products)
    local, times = config.local_steps, max(1, config.iterations // config.local_steps)
    return {
        "BSA": lambda a, b: hp.BSA(many, a, b, inner_steps=3, growth=0, inverse=cg),
        "TTSA": lambda a, b: hp.TTSA(many, a, b, inverse=cg),
        "FedNest": lambda a, b: hp.FedNest(many, a, b, inner_steps=3, inverse=cg),
        "FedBiO": lambda a, b: hp.FedBiO(times, a, b, local, cg),
        "FedBiOAcc": lambda a, b: hp.FedBiOAcc(times, a, b, local, cg, forget=0.5),
        "SPDB": lambda a, b: hp.SPDB(many, a, b, penalty=0.5 / a, inverse=cg),
        "INTERACT": lambda a, b: hp.INTERACT(many, a, b, config.products),
        "SVRINTERACT": lambda a, b: hp.SVRINTERACT(many, a, b, period=7, inverse=cg),
        "MDBO": lambda a, b: hp.MDBO(many, a, b, 0.7, 0.9, 0.8, inverse=cg),
        "VRDBO": lambda a, b: hp.VRDBO(many, a, b, 0.7, 0.9, 0.8, inverse=cg),
        "DSBOJHIP": lambda a, b: hp.DSBOJHIP(many, a, b, b, tracked=True),
        "GBDSBO": lambda a, b: hp.GBDSBO(many, a, b, tracked=True),
        "MADSBO": lambda a, b: hp.MADSBO(many, a, b, b, tracked=True),
        "LDPDSBO": lambda a, b: hp.LDPDSBO(many, {"x": hp.Power(a), "y": hp.Power(b), "z": hp.Power(b)}, use="reused"),
    }


def estimators(config: Comparison, task: Task) -> dict[str, Any]:
    """The estimators that PDBO follows, by the name of the method."""
    import hyperpush as hp

    step = task.inner_unit * min(config.inner)
    return {
        "PDBO + HGP": hp.HGP(config.order, config.pushes, step),
        "PDBO + TrackedHGP": hp.TrackedHGP(config.order, pushes=config.pushes, tolerance=None),
    }


def known(config: Comparison) -> list[str]:
    """All methods, in the order of the table."""
    return [*algorithms(config), "PDBO + HGP", "PDBO + TrackedHGP"]


def names(config: Comparison, network: Any = None) -> list[str]:
    """The methods that a comparison runs; refuse names that do not exist, and methods that cannot use the network."""
    from hyperpush.errors import unknown
    from hyperpush.estimators.estimate import check_network

    for name in config.methods:
        if name not in known(config):
            raise unknown("methods", name, known(config))
    wanted = [name for name in known(config) if name in config.methods or not config.methods]
    made = algorithms(config)
    for name in wanted:
        if network is not None and name in made:  # PDBO runs on any
            check_network(made[name](0.1, 0.1), network)
    return wanted


def compare(config: Comparison, run: Any, network: Any, task: Task, personal: Task | None = None) -> list[Compared]:
    """Every method at its best setting of the grid.

    `task` has one hyper for all. `personal` is the same task with hypers that are each client's own, for the methods
    that can do without agreeing on them (PDBO); without it they agree too.
    """
    found = []
    wanted = names(config, network)
    with run.progress("methods", len(wanted)) as bar:
        for name in wanted:
            alternating = name.startswith("PDBO")
            on = personal if alternating and personal is not None else task
            reason = None if alternating else too_large(config, name, on)
            best = Compared(blank(name, reason)) if reason else tuned(config, name, network, on)
            found.append(best)
            run.record(**best.row)
            bar.advance()
    return found


def blank(name: str, reason: str) -> dict[str, Any]:
    return {"method": name, "left_out": reason}


def too_large(config: Comparison, name: str, task: Task) -> str | None:
    """Why a method that forms matrices does not run here, if it does not."""
    import jax

    from hyperpush.declarations import ALGORITHMS

    if not ALGORITHMS[name].matrices:
        return None
    d, h = (sum(leaf[0].size for leaf in jax.tree.leaves(tree)) for tree in task.instance[1:3])
    largest = max(d * d, d * h) if name == "GBDSBO" else d * h
    if largest <= config.most:
        return None
    return (
        f"a matrix of {largest:,} numbers per client, for {d:,} params and {h:,} hypers; the limit is {config.most:,}"
    )


def tuned(config: Comparison, name: str, network: Any, task: Task) -> Compared:
    """A method on the whole grid, and its best setting."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    grid = np.array(list(product(config.outer, config.inner))) * (task.outer_unit, task.inner_unit)
    costs: dict[str, Any] = {}

    def one(outer: Any, inner: Any) -> tuple[Any, Any]:
        return attempt(config, name, network, task, outer, inner, costs)

    if name in UNTRACED:
        seen = lanes([one(float(outer), float(inner)) for outer, inner in grid])
    else:
        seen = jax.vmap(one)(*jnp.asarray(grid.T, jnp.zeros(()).dtype))
    return chosen(name, task, grid, seen, costs)


def lanes(runs: list[Any]) -> Any:
    """Runs side by side, as `chosen` takes them."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)


def chosen(name: str, task: Task, grid: Any, seen: Any, costs: dict[str, Any]) -> Compared:
    """The finite setting of the least outer cost; `seen` is (params, hypers), leaves [settings, points, clients, …]."""
    import jax
    import numpy as np

    measured = jax.jit(jax.vmap(lambda lane: jax.lax.map(lambda point: task.measure(*point), lane)))(seen)
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
        "floats_per_client": int(costs["floats"][-1]),
        "rounds": costs["rounds"],
        "settings": {"outer_step": float(grid[best, 0]), "inner_step": float(grid[best, 1])},
        **settings,
    }
    curve = {
        "method": name,
        "iterations": [int(done) for done in costs["iterations"]],
        "floats_per_client": [float(sent) for sent in costs["floats"]],
        **{key: [float(v) if np.isfinite(v) else None for v in value[best]] for key, value in values.items()},
    }
    params, hypers = jax.tree.map(lambda leaf: leaf[best, -1], seen)
    return Compared(row, curve, params, hypers)


def attempt(
    config: Comparison, name: str, network: Any, task: Task, outer: Any, inner: Any, costs: dict[str, Any]
) -> tuple[Any, Any]:
    """Params and hypers along one run; `costs` takes what it cost. The steps may be traced."""
    import hyperpush as hp

    if name.startswith("PDBO"):
        estimator, solver = estimators(config, task)[name], hp.SGP(config.solver_steps, lambda step: inner)
        return solved(config, solver, estimator, network, task, outer, costs)
    steps = (outer, inner) if name in UNTRACED else (lambda step: outer, lambda step: inner)
    return optimised(config, algorithms(config)[name](*steps), network, task, costs)


def optimised(
    config: Comparison, algorithm: Any, network: Any, task: Task, costs: dict[str, Any], key: Any = None
) -> tuple[Any, Any]:
    """(params, hypers) at the start and along a run of an algorithm, leaves [points, clients, …]."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import hyperpush as hp

    problem, params, hypers, inner_data, outer_data = task.instance
    every = max(1, algorithm.iterations // config.points)
    listener = Listener()
    found = hp.optimise(
        problem,
        algorithm,
        network,
        params,
        hypers,
        inner_data,
        outer_data,
        jax.random.key(config.seed) if key is None else key,
        record=lambda state, ctx: (),
        run=listener,
        every=every,
    )
    done = np.arange(algorithm.iterations // every + 1) * every
    parts = [jax.tree.map(lambda leaf: leaf[None], (params, hypers)), listener.seen[0]]
    if done[-1] < algorithm.iterations:
        done = np.append(done, algorithm.iterations)
        parts.append(jax.tree.map(lambda leaf: leaf[None], (found.params, found.hypers)))
    costs.update(iterations=done, floats=found.floats * done / algorithm.iterations, rounds=found.rounds)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def solved(
    config: Any,
    solver: Any,
    estimator: Any,
    network: Any,
    task: Task,
    rate: Any,
    costs: dict[str, Any],
    key: Any = None,
) -> tuple[Any, Any]:
    """The same of PDBO, after the first inner solve and after each outer step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import hyperpush as hp

    problem, params, hypers, inner_data, outer_data = task.instance
    listener = Listener()
    found = hp.solve(
        problem,
        network,
        inner=solver,
        hypergradient=estimator,
        outer=optax.sgd(rate),
        outer_steps=config.outer_steps,
        params=params,
        hypers=hypers,
        inner_data=inner_data,
        outer_data=outer_data,
        key=jax.random.key(config.seed) if key is None else key,
        restart=False,
        consensus=None if task.personal else hp.OuterConsensus(config.pushes),
        run=listener,
    )
    costs.update(iterations=np.arange(config.outer_steps + 1), floats=found.history.floats, rounds=found.rounds)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *listener.seen)


def privately(
    config: Comparison,
    run: Any,
    network: Any,
    found: list[Compared],
    task: Task,
    personal: Task | None = None,
) -> list[dict[str, Any]]:
    """What can be private, run so, beside what `compare` found: ε as claimed and what it costs in accuracy.

    The same run at next to no noise tells what the noise costs from what its settings cost, which are fixed beforehand.
    """
    privacy = config.privacy
    if privacy is None:
        return []
    rows = []
    for open_run in found:
        name = open_run.row["method"]
        on = personal if name.startswith("PDBO") and personal is not None else task
        row: dict[str, Any] = {"method": name}
        if name != "LDPDSBO" and not name.startswith("PDBO"):
            row["reason"] = "n/a: messages are sent as computed from the data, without noise"
        elif on.constants is None:
            row["reason"] = "n/a: no bounds on the second derivatives of this problem are known"
        else:
            quiet = privacy.model_copy(update={"epsilon": max(QUIET, privacy.epsilon)})
            noisy, claimed = once(config, privacy, name, network, on, private_key(config, name))
            same, _ = once(config, quiet, name, network, on, private_key(config, name, quiet=True))
            row |= {"epsilon": privacy.epsilon, "delta": privacy.delta, "claimed": claimed, **noisy}
            row |= costs_of_privacy(open_run.row, same, noisy)
        rows.append(row)
        run.record(private=True, **row)
    return rows


def once(
    config: Comparison, privacy: Privacy, name: str, network: Any, task: Task, key: Any
) -> tuple[dict[str, Any], float]:
    """The row of one private run, and the ε that it claims."""
    import numpy as np

    costs: dict[str, Any] = {}
    single = name == "LDPDSBO"
    seen, claimed = (single_loop if single else alternating)(config, privacy, name, network, task, costs, key)
    steps = [privacy.outer * task.outer_unit, privacy.inner * task.inner_unit]
    steps = [privacy.loop_outer, privacy.loop_inner] if single else steps
    return chosen(name, task, np.array([steps]), lanes([seen]), costs).row, claimed


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
    """What privacy cost each method, in a sentence; the methods that cannot be private in one line for each reason."""
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


def single_loop(
    config: Comparison, privacy: Privacy, name: str, network: Any, task: Task, costs: dict[str, Any], key: Any
) -> tuple[Any, float]:
    """LDP-DSBO on a data set that it reuses, for a number of iterations that is known; and the ε that it claims.

    The noise on every variable is in proportion to how much an example can change it.
    """
    import hyperpush as hp
    from hyperpush.data.batches import capacity

    assert task.constants is not None
    _, params, hypers, *data = task.instance
    rows = min(capacity(one) for one in data_of_one(data))
    kind, delta = (hp.Gaussian, privacy.delta) if privacy.delta else (hp.Laplace, None)
    inner = hp.Power(privacy.loop_inner)
    steps = {"x": hp.Power(privacy.loop_outer), "y": inner, "z": inner}
    constants = task.constants(privacy.clip, privacy.radius)

    def algorithm(noise):
        return hp.LDPDSBO(privacy.iterations, steps, noise, constants, use="reused", checked=False)

    unscaled = algorithm(kind(1.0)).accountant(network, params, hypers, rows)
    changes = unscaled.sender.sensitivities(privacy.iterations)
    size = {key: unscaled.sender.dims[key] ** (0.5 if kind is hp.Laplace else 0) for key in changes}
    balanced = {key: kind(max(float(change.max()) * size[key], 1e-9)) for key, change in changes.items()}
    account = algorithm(balanced).accountant(network, params, hypers, rows)
    made = algorithm(account.noise_for(privacy.epsilon, privacy.iterations, delta))
    claimed = made.accountant(network, params, hypers, rows).epsilon(privacy.iterations, delta)
    return optimised(config, made, network, task, costs, key), float(claimed.max())


def alternating(
    config: Comparison, privacy: Privacy, name: str, network: Any, task: Task, costs: dict[str, Any], key: Any
) -> tuple[Any, float]:
    """PDBO with noise on everything it sends, and the ε that it claims."""
    import hyperpush as hp

    assert task.constants is not None
    first, delta = (hp.Gaussian(1.0), privacy.delta) if privacy.delta else (hp.Laplace(1.0), None)
    constants, step = task.constants(privacy.clip, privacy.radius), privacy.inner * task.inner_unit
    hypers = "per example" if task.personal and task.per_example else "noisy"
    along_y, along_x = (bound / constants.R for bound in constants.products)  # finite also where C_J is not known
    noise = hp.Noise(first, privacy.clip, along_y, along_x, hypers)
    solver = hp.SGP(privacy.solver_steps, step, privacy=hp.Noise(first, privacy.clip))
    if name == "PDBO + HGP":
        estimator = hp.HGP(privacy.order, config.pushes, step, privacy=noise)
    else:
        estimator = hp.TrackedHGP(privacy.order, step, config.pushes, tolerance=None, privacy=noise)
    consensus = None if task.personal else hp.OuterConsensus(config.pushes)
    run = {"outer_steps": privacy.outer_steps, "consensus": consensus}
    solver, estimator = hp.within(privacy.epsilon, delta, solver, estimator, **run)
    claimed = hp.budget(solver, estimator, **run).epsilon(delta)
    short = config.model_copy(update={"outer_steps": privacy.outer_steps})
    rate = privacy.outer * task.outer_unit
    return solved(short, solver, estimator, network, task, rate, costs, key), float(claimed)


def data_of_one(data: Any) -> Any:
    """One client's data, from those of all."""
    import jax

    return jax.tree.map(lambda leaf: leaf[0], data)


class Listener:
    """An engine that compiles a program as a whole, so that it can be vectorised, and hears every recorded loop.

    `seen` has (params, hypers) of each of them, leaves [records, clients, …].
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def __call__(
        self, program: Any, network: Any, states: Any, data: Any, key: Any, *, record: dict[str, Any], every: int = 1
    ) -> Any:
        import jax

        from hyperpush.engine import simulate
        from hyperpush.engine.layout import one_client
        from hyperpush.engine.outcome import Outcome
        from hyperpush.program import survey

        def hearing(function):
            return lambda state, ctx: (function(state, ctx), (state.params, state.hyper))

        recorders = {name: hearing(function) for name, function in record.items()}

        @jax.jit
        def everything(states, data):
            return simulate.evaluate(program, network, states, data, key, record=recorders, every=every)

        final, history = everything(states, data)
        self.seen = [history[name][1] for name in record]
        found = survey(program, one_client(states), one_client(data), network.clients)
        passes, work = found.passes({}), found.total({})
        rounds = sum(passes[sending.body] * sending.messages(1) for sending in found.sendings)
        return Outcome(
            states=final,
            step=rounds,
            rounds=rounds,
            floats=found.floats({}, 1),
            hessian_products=work["hessian_products"],
            jacobian_products=work["jacobian_products"],
            gradients=work["gradients"],
            history={name: seen[0] for name, seen in history.items()},
        )


def draw(run: Any, name: str, found: list[Compared], metrics: tuple[str, ...]) -> None:
    """A figure of each metric by iteration and by floats sent."""
    from hyperpush.report.figures import panels

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
    """A table of rows that need not have the same columns; settings are spelled out."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def text(value: Any) -> Any:
        if isinstance(value, dict):
            return ", ".join(f"{key} {each:.3g}" for key, each in value.items())
        return value

    run.table(title, columns, [[text(row.get(column)) for column in columns] for row in rows])
