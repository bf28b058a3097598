"""Every hyper-gradient estimator on one problem and several networks: error by rounds and by floats sent.

Logistic regression with L2 rates as hyper-parameters, at its exact inner solution. HGP is run on a whole grid of
pushes and step sizes, tracked HGP with its defaults. Estimators that go back through SGP are compared with their own
target, the derivative of SGP's expected step, all others with the closed form.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Size = tuple[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=2)]]

NETWORKS = ("random-directed", "k-out", "one-peer-exponential", "static-undirected", "directed-ring")
REACHED = (1e-4, 1e-6)


class Estimators(Config):
    """Options of the comparison of estimators."""

    sizes: tuple[Size, ...] = Field(
        default=((3, 6), (50, 100)), min_length=1, description="Pairs of a number of clients and of parameters."
    )
    networks: tuple[str, ...] = Field(default=NETWORKS, min_length=1, description="Names of networks.")
    out_links: Count = Field(default=3, description="Links of each client on k-out graphs, where there are as many.")
    examples: Count = Field(default=100, description="Training examples per client, and as many for validation.")
    hyper: float = Field(default=0.01, gt=0, description="Every client's L2 rate on each parameter.")
    pushes: tuple[Count, ...] = Field(
        default=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000), description="HGP's grid: pushes per order."
    )
    steps: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.5, 1.0, 1.5), description="HGP's grid: step sizes, in units of 1/λ_max of the mean Hessian."
    )
    order: Count = Field(default=150, description="Largest order of HGP and of the one-machine estimators.")
    tolerance: float = Field(default=1e-8, gt=0, description="Where tracked HGP may end.")
    recurrent: int = Field(default=1000, ge=0, description="Rounds of the estimators that go back through SGP.")
    recurrent_step: float = Field(default=0.5, gt=0, description="Their step size, in units of 1/λ_max.")
    seed: int = Field(default=0, ge=0, description="Decides the data, the networks and every draw.")
    precision: Literal["float32", "float64"] = "float64"


def run_estimators(config: Estimators, run: Any) -> dict[str, Any]:
    """All curves, and what each network takes to come within 1e-4 and 1e-6."""
    curves, summary = [], []
    with run.progress("networks", len(config.sizes) * len(config.networks)) as bar:
        for clients, width in config.sizes:
            comparison = Comparison(config, clients, width)
            for name in config.networks:
                found = comparison.on(name)
                for curve in found:
                    run.record(**curve)
                curves += found
                summary.append(_summarise(name, clients, width, found))
                run.figure(f"{name}-{clients}", _draw(name, clients, found))
                bar.advance()
    run.table(
        "floats sent per client and parameter until the error stays below",
        list(summary[0]),
        [["–" if cell is None else cell for cell in row.values()] for row in summary],
    )
    return {"curves": curves, "summary": summary}


class Comparison:
    """One problem at its inner solution, and what estimators make of it."""

    def __init__(self, config: Estimators, clients: int, width: int):
        import jax
        import jax.numpy as jnp
        import numpy as np

        import hyperpush as hp
        from hyperpush.hypergradients import oracles

        made = hp.tasks.logistic(clients, config.seed, examples=config.examples, features=width - 1, rate=config.hyper)
        self.config, self.clients, self.width = config, clients, width
        solution = oracles.minimise(made.problem, made.params, made.hypers, made.data)
        self.task = made.at(params=jnp.asarray(solution, made.params.dtype))
        self.point = (made.problem, self.task.params, made.hypers, made.data)
        self.truth = oracles.dense(*self.point)
        hessians, *_ = oracles.derivatives(*self.point)
        self.unit = 1 / float(np.linalg.eigvalsh(hessians.mean(0))[-1])
        self.key = jax.random.key(config.seed)
        self.least: int | None = None  # orders that HGP takes with exact averages

    def on(self, name: str) -> list[dict[str, Any]]:
        """The curves of all estimators that the network allows."""
        import hyperpush as hp
        from hyperpush.hypergradients import oracles
        from hyperpush.studies.common.estimates import current_value

        config, d = self.config, self.width
        options = {"k": min(config.out_links, self.clients - 1)} if name == "k-out" else {}
        network = hp.networks.by_name(name, self.clients, config.seed, **options)
        curves = [*self.grid(network, "push")]
        if not network.directed:
            curves += self.grid(network, "gossip")
        curves += [
            self.tracked(network),
            self.recorded(network, hp.hypergradients.ImplicitCG(min(config.order, 2 * d)), "ImplicitCG", self.implied),
            self.recorded(network, hp.hypergradients.ImplicitNeumann(config.order, self.unit), "HGP", current_value),
        ]
        if not config.recurrent or not network.two_way():
            return curves
        step = config.recurrent_step * self.unit
        estimators = [
            (hp.hypergradients.DirectedRB(config.recurrent, step), current_value),
            (hp.hypergradients.VRHGP(config.recurrent, step), lambda state, ctx: state.back.value),
        ]
        if not network.directed:
            estimators.append((hp.hypergradients.ExactRB(config.recurrent, step), current_value))
        if self.clients * d * config.recurrent <= TAPE:
            itd = hp.hypergradients.ITDBackward(hp.SGP(config.recurrent, step))
            estimators.append((itd, lambda state, ctx: state.kept.value))
        target = oracles.recurrent(*self.point, network, step, hp.hypergradients.DirectedRB(1, step).variant)
        for estimator, reader in estimators:
            curves.append(self.recorded(network, estimator, type(estimator).__name__, reader, target))
        return curves

    def implied(self, state: Any, ctx: Any) -> Any:
        """−B_i q: the hyper-gradient that a solution q implies (these outer costs do not see the hypers)."""
        from hyperpush.data.batches import everything

        q = state.q.reshape(-1)
        return -self.task.problem.jacobian_product(state.params, state.hyper, everything(ctx.data.train), q)

    def curve(self, method: str, network: Any, rounds: Any, floats: Any, values: Any, truth: Any = None, **more: Any):
        """One curve of the result; `values` has the records on axis 0."""
        import numpy as np

        truth = self.truth if truth is None else truth
        norm = float(np.linalg.norm(truth))
        errors = np.linalg.norm((np.asarray(values, np.float64) - truth).reshape(len(rounds), -1), axis=1) / norm
        finite = np.isfinite(errors) & (errors < 1e6)
        end = len(errors) if finite.all() else int(np.argmin(finite))  # what diverges is cut there
        return {
            "method": method,
            "network": network.name,
            "clients": self.clients,
            "width": self.width,
            "true_norm": norm,
            **more,
            "rounds": [int(r) for r in rounds][:end],
            "floats_per_client": [int(f) for f in floats][:end],
            "relative_error": errors[:end].tolist(),
        }

    def recorded(self, network: Any, estimator: Any, loop: str, reader: Any, truth: Any = None) -> dict[str, Any]:
        """The curve of an estimator whose loop is recorded; what came before it is counted, too."""
        from hyperpush.studies.common.estimates import run

        found = run(self.task, estimator, network, self.key, {loop: reader})
        clock = found.clocks[loop]
        return self.curve(type(estimator).__name__, network, clock.rounds, clock.floats, found.history[loop], truth)

    def tracked(self, network: Any) -> dict[str, Any]:
        """Tracked HGP with its defaults but for the tolerance; votes and the search for settings are counted."""
        import hyperpush as hp
        from hyperpush.studies.common.estimates import run

        def reader(state, ctx):
            return self.implied(state, ctx), state.pushes

        found = run(
            self.task,
            hp.TrackedHGP(tolerance=self.config.tolerance),
            network,
            self.key,
            {"TrackedHGP": reader},
        )
        (values, pushes), clock = found.history["TrackedHGP"], found.clocks["TrackedHGP"]
        return self.curve("TrackedHGP", network, clock.rounds, clock.floats, values, pushes=int(pushes[0, 0]))

    def grid(self, network: Any, averaging: Literal["push", "gossip"]) -> list[dict[str, Any]]:
        """HGP's grid of pushes and step sizes.

        Once some point of the grid has come below 1e-4, numbers of pushes that would cost more even if their averages
        were exact are left out.
        """
        if self.least is None:
            self.least = min(len(_until(curve, REACHED[0])) for curve in self.row(network, 1, "exact"))
        found, best = [], None
        for pushes in self.config.pushes:
            if best is not None and pushes * self.least * self.width >= best:
                break
            found += self.row(network, pushes, averaging)
            costs = [cost for curve in found if (cost := reached(curve, REACHED[0])) is not None]
            best = min(costs, default=None)
        return found

    def row(self, network: Any, pushes: int, by: Literal["push", "gossip", "exact"]) -> list[dict[str, Any]]:
        """HGP with all step sizes of the grid and one number of pushes."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        import hyperpush as hp
        from hyperpush.studies.common.estimates import current_value, recorded

        config = self.config

        @jax.jit
        def run(network, steps):
            def one(step):
                method = hp.HGP(config.order, pushes, step, averaging=by)
                return recorded(self.task, method, network, self.key, {"HGP": current_value})["HGP"]

            return jax.vmap(one)(steps)

        floats = pushes * (self.width + (by == "push"))
        orders = np.arange(1, config.order + 1)
        more = {"pushes": pushes, "averaging": by}
        return [
            self.curve("HGP", network, pushes * orders, floats * orders, values, step=step, **more)
            for step, values in zip(config.steps, run(network, jnp.asarray(config.steps) * self.unit), strict=True)
        ]


TAPE = 10**6  # numbers that ITD may record


def _until(curve: dict[str, Any], error: float) -> list[float]:
    """The errors up to the first below `error`, that one included."""
    errors = curve["relative_error"]
    return errors[: 1 + next((place for place, found in enumerate(errors) if found <= error), len(errors))]


def reached(curve: dict[str, Any], error: float) -> int | None:
    """Floats per client from which on the error is at most `error`; None if it is not in the end."""
    above = [place for place, found in enumerate(curve["relative_error"]) if found > error]
    place = above[-1] + 1 if above else 0
    return curve["floats_per_client"][place] if place < len(curve["floats_per_client"]) else None


def _summarise(name: str, clients: int, width: int, curves: list[dict[str, Any]]) -> dict[str, Any]:
    """Floats per parameter to each error: HGP at the best point of its grid, tracked HGP, CG with a server."""
    row: dict[str, Any] = {"network": name, "clients": clients}
    for error in REACHED:
        # HGP's grid is only searched until 1e-4.
        for method in ("HGP", "TrackedHGP", "ImplicitCG") if error == REACHED[0] else ("TrackedHGP", "ImplicitCG"):
            costs = [
                (cost, curve)
                for curve in curves
                if curve["method"] == method and (cost := reached(curve, error)) is not None
            ]
            cost, curve = min(costs, key=lambda pair: pair[0], default=(None, None))
            row[f"{method} {error:.0e}"] = None if cost is None else round(cost / width, 1)
            if method == "HGP":
                row[f"pushes {error:.0e}"] = None if curve is None else curve["pushes"]
    return row


def _draw(name: str, clients: int, curves: list[dict[str, Any]]) -> Any:
    """Errors by rounds and by floats: HGP at its best step for each number of pushes, and everything else."""
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    lowest = {}
    for curve in curves:
        label = f"HGP, S = {curve['pushes']}" if curve["method"] == "HGP" else curve["method"]
        if curve["relative_error"]:
            least = min(curve["relative_error"])
            lowest[label] = min(lowest.get(label, (least, curve)), (least, curve), key=lambda pair: pair[0])
    figure, axes = panels(2)
    for axis, x, label in zip(axes, ("rounds", "floats_per_client"), ("rounds", "floats per client"), strict=True):
        drawn = [Curve(each, curve[x], curve["relative_error"]) for each, (_, curve) in lowest.items()]
        error_curves(
            axis, drawn, x_label=label, y_label="relative error", title=f"{name}, {clients} clients", log_x=True
        )
        axis.legend(fontsize=5)
    return figure


EXPERIMENT = Experiment(
    "estimators",
    "Every hyper-gradient estimator on several networks, by rounds and by floats sent.",
    Estimators,
    run_estimators,
)
