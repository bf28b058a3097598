"""All curves, and the costs on each network for errors of 1e-4 and 1e-6."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

import hyperpush as hp
from hyperpush.data.batches import full_batch
from hyperpush.hypergradients import oracles
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.networks import Network
from hyperpush.programs import Context
from hyperpush.runs.run import StudyRun
from hyperpush_papers.common.estimates import current_value, records, run_recorded
from hyperpush_papers.common.figures import draw_errors
from hyperpush_papers.estimators.config import Estimators

REACHED = (1e-4, 1e-6)
TREE_LOOPS = ("TreeCG", "TreeCG without probe")
TAPE = 10**6  # numbers that ITD may record
Row = dict[str, Any]
Reader = Callable[[Any, Context], PyTree]


def run(config: Estimators, run: StudyRun) -> dict[str, Any]:
    """Every estimator on every network, for every size of the problem."""
    curves, summary, stops, lossy = [], [], [], []
    with run.progress("networks", len(config.sizes) * len(config.networks)) as bar:
        for clients, width in config.sizes:
            comparison = Comparison(config, clients, width)
            for name in config.networks:
                found = comparison.curves_on(name)
                for curve in found:
                    run.record(**curve)
                curves += found
                summary.append(summarize(name, clients, width, found))
                stops += [comparison.stop(name, estimator) for estimator in (hp.Automatic(), hp.TrackedHGP())]
                if config.loss:
                    lossy.append(comparison.compare_under_loss(name, found, hp.Faults(loss=config.loss)))
                run.record(summary=summary[-1], stops=stops[-2:], lossy=lossy[-1:])
                title = f"{name}, {clients} clients"
                best, by = best_by_label(found), ("rounds", "floats_per_client")
                draw_errors(run, f"{name}-{clients}", best, "relative_error", by, "relative error", title)
                bar.step()
    run.table(
        "floats sent per client and parameter until the error stays below",
        list(summary[0]),
        [["–" if cell is None else cell for cell in row.values()] for row in summary],
    )
    for title, rows in (("where estimators stop by themselves", stops), (f"a loss of {config.loss:.0%}", lossy)):
        if rows:
            run.table(title, list(rows[0]), [["–" if cell is None else cell for cell in row.values()] for row in rows])
    return {"curves": curves, "summary": summary, "stops": stops, "lossy": lossy}


class Comparison:
    """One problem at its inner solution, and the estimators' results on it."""

    def __init__(self, config: Estimators, clients: int, width: int):
        made = hp.tasks.logistic(clients, config.seed, examples=config.examples, features=width - 1, rate=config.hyper)
        self.config, self.clients, self.width = config, clients, width
        solution = oracles.minimize(made.problem, made.params, made.hypers, made.data)
        self.task = made.at(params=jnp.asarray(solution, made.params.dtype))
        self.point = (made.problem, self.task.params, made.hypers, made.data)
        self.truth = oracles.dense(*self.point)
        hessians, *_ = oracles.derivatives(*self.point)
        self.unit = 1 / float(np.linalg.eigvalsh(hessians.mean(0))[-1])
        self.key = jax.random.key(config.seed)
        self.least: int | None = None  # orders that HGP takes with exact averages

    def curves_on(self, name: str) -> list[Row]:
        """The curves of all estimators that the network allows."""
        config, known, network = self.config, hp.hypergradients, self.network(name)
        curves = self.grid_curves(network, "push") + ([] if network.directed else self.grid_curves(network, "gossip"))
        server = known.ImplicitCG(min(config.order, 2 * self.width), singular="minimum-norm")  # no second system
        cases: list[tuple[HypergradientEstimator, str, Reader, np.ndarray]] = [
            (hp.TrackedHGP(tolerance=config.tolerance), "TrackedHGP", self.implied_value_and_pushes, self.truth),
            (server, "ImplicitCG", self.implied_value, self.truth),
        ]
        curves.append(self.automatic_curve(network))
        if config.recurrent and network.two_way():
            rounds, step = config.recurrent, config.recurrent_step * self.unit
            solver = hp.SGP(rounds, step, observe=True)
            target = oracles.recurrent(*self.point, network, step, solver.variant)
            seen = hp.train(self.task, solver, network, key=self.key).task.point
            backward: list[tuple[HypergradientEstimator, str, Reader, np.ndarray]] = [
                (known.DirectedRB(rounds, step), "DirectedRB", current_value, target),
                (known.VRHGP(rounds, step), "VRHGP", lambda state, ctx: state.back.value, target),
            ]
            if not network.directed:
                backward.append((known.ExactRB(rounds, step), "ExactRB", current_value, target))
            curves += [self.recorded_curve(network, *case, task=self.task.at(point=seen)) for case in backward]
            if self.clients * self.width * rounds <= TAPE:
                itd = known.ITDBackward(hp.SGP(rounds, step))
                cases.append((itd, "ITDBackward", lambda state, ctx: state.value, target))
        return curves + [self.recorded_curve(network, *case) for case in cases]

    def network(self, name: str) -> Network:
        """The network of a name."""
        options = {"k": min(self.config.out_links, self.clients - 1)} if name == "k-out" else {}
        return hp.network(name, self.clients, self.config.seed, **options)

    def automatic_curve(self, network: Network, faults: hp.Faults | None = None) -> Row:
        """The default's, which is `TreeCG`: two loops, with and without its second system."""
        estimator = hp.Automatic(tolerance=self.config.tolerance)
        return self.recorded_curve(network, estimator, TREE_LOOPS, self.implied_value, self.truth, faults)

    def stop(self, name: str, estimator: HypergradientEstimator, faults: hp.Faults | None = None) -> Row:
        """Return the error and costs of an estimator that ends by itself."""
        engine = hp.Simulate(faults=faults)
        found = hp.hypergradient(self.task, estimator, self.network(name), key=self.key, engine=engine)
        error = np.linalg.norm(np.asarray(found.value, np.float64) - self.truth) / np.linalg.norm(self.truth)
        return {
            "network": name,
            "clients": self.clients,
            "method": type(estimator).__name__,
            "floats": round(found.costs.floats / self.width, 1),  # per parameter
            "rounds": found.costs.rounds,
            "relative error": float(error),
            "converged": found.status.converged,
        }

    def compare_under_loss(self, name: str, curves: Sequence[Row], faults: hp.Faults) -> Row:
        """The default, and TrackedHGP of fixed length with its best number of pushes: floats per parameter to 1e-4."""
        network, config, error = self.network(name), self.config, REACHED[0]
        usual = next(curve["pushes"] for curve in curves if curve["method"] == "TrackedHGP")
        best, pushes = None, None
        for each in dict.fromkeys(max(1, round(factor * usual)) for factor in config.factors):
            method = hp.TrackedHGP(config.lossy_steps, pushes=each, tolerance=None)
            curve = self.recorded_curve(network, method, "TrackedHGP", self.implied_value, self.truth, faults)
            cost = floats_until(curve, error)
            if cost is not None and (best is None or cost < best):
                best, pushes = cost, each
        own = floats_until(self.automatic_curve(network, faults), error)
        stop = self.stop(name, hp.Automatic(), faults)
        return {
            "network": name,
            "clients": self.clients,
            f"Automatic {error:.0e}": None if own is None else round(own / self.width, 1),
            **{f"Automatic {field}": stop[field] for field in ("floats", "rounds", "relative error", "converged")},
            f"TrackedHGP {error:.0e}": None if best is None else round(best / self.width, 1),
            "pushes": pushes,
        }

    def implied_value(self, state: Any, ctx: Context) -> PyTree:
        """−B_i q: the hypergradient that a solution q implies (these outer costs do not see the hypers)."""
        batch, q = full_batch(ctx.data.train), getattr(state, "x" if hasattr(state, "x") else "q").reshape(-1)
        return -self.task.problem.jacobian_product(state.params, state.hyper, batch, q)

    def implied_value_and_pushes(self, state: Any, ctx: Context) -> PyTree:
        """The same, and how many pushes TrackedHGP chose."""
        return self.implied_value(state, ctx), state.pushes

    def curve(
        self,
        method: str,
        network: Network,
        rounds: Sequence[int] | np.ndarray,
        floats: Sequence[int] | np.ndarray,
        values: Array | np.ndarray,
        truth: np.ndarray,
        **more: Any,
    ) -> Row:
        """One curve of the result; `values` has the records on axis 0."""
        norm = float(np.linalg.norm(truth))
        errors = np.linalg.norm((np.asarray(values, np.float64) - truth).reshape(len(rounds), -1), axis=1) / norm
        finite = np.isfinite(errors) & (errors < 1e6)
        end = len(errors) if finite.all() else int(np.argmin(finite))  # diverged curves are cut there
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

    def recorded_curve(
        self,
        network: Network,
        estimator: HypergradientEstimator,
        loops: str | tuple[str, ...],
        reader: Reader,
        truth: np.ndarray,
        faults: hp.Faults | None = None,
        task: hp.Task | None = None,
    ) -> Row:
        """Return the curve of an estimator with recorded loops; earlier costs are counted, too."""
        names = (loops,) if isinstance(loops, str) else loops
        found = run_recorded(task or self.task, estimator, network, self.key, dict.fromkeys(names, reader), faults)
        ran = [name for name in names if name in found.clocks]
        values = jax.tree.map(lambda *parts: np.concatenate(parts), *(found.history[name] for name in ran))
        rounds, floats = (
            np.concatenate([getattr(found.clocks[name], field) for name in ran]) for field in ("rounds", "floats")
        )
        more = {}
        if isinstance(values, tuple):
            values, more = values[0], {"pushes": int(values[1][0, 0])}
        return self.curve(type(estimator).__name__, network, rounds, floats, values, truth, **more)

    def grid_curves(self, network: Network, averaging: Literal["push", "gossip"]) -> list[Row]:
        """HGP's grid of pushes and step sizes.

        Once some point of the grid has come below 1e-4, numbers of pushes that would cost more even if their averages
        were exact are left out.
        """
        if self.least is None:
            self.least = min(orders_until(curve, REACHED[0]) for curve in self.curves_with(network, 1, "exact"))
        found, best = [], None
        for pushes in self.config.pushes:
            if best is not None and pushes * self.least * self.width >= best:
                break
            found += self.curves_with(network, pushes, averaging)
            best = min((cost for curve in found if (cost := floats_until(curve, REACHED[0])) is not None), default=None)
        return found

    def curves_with(self, network: Network, pushes: int, by: Literal["push", "gossip", "exact"]) -> list[Row]:
        """HGP with all step sizes of the grid and one number of pushes."""

        @jax.jit
        def values(network, steps):
            def one(step):
                method = hp.HGP(self.config.order, pushes, step, averaging=by)
                return records(self.task, method, network, self.key, {"HGP": current_value})["HGP"]

            return jax.vmap(one)(steps)

        rounds = pushes * np.arange(1, self.config.order + 1)
        floats = rounds * (self.width + (by == "push"))
        steps, more = self.config.steps, {"pushes": pushes, "averaging": by}
        return [
            self.curve("HGP", network, rounds, floats, own, self.truth, step=step, **more)
            for step, own in zip(steps, values(network, jnp.asarray(steps) * self.unit), strict=True)
        ]


def orders_until(curve: Row, error: float) -> int:
    """Return records up to and including the first below `error`; all if none is below."""
    errors = curve["relative_error"]
    return min(len(errors), 1 + next((place for place, found in enumerate(errors) if found <= error), len(errors)))


def floats_until(curve: Row, error: float) -> int | None:
    """Floats per client from which on the error is at most `error`; None if it is not in the end."""
    above = [place for place, found in enumerate(curve["relative_error"]) if found > error]
    place = above[-1] + 1 if above else 0
    return curve["floats_per_client"][place] if place < len(curve["floats_per_client"]) else None


def summarize(name: str, clients: int, width: int, curves: Sequence[Row]) -> Row:
    """Floats per parameter to each error: HGP at the best point of its grid, TrackedHGP, CG with a server."""
    row: Row = {"network": name, "clients": clients}
    for error in REACHED:
        # HGP's grid is only searched until 1e-4.
        methods = ("TrackedHGP", "Automatic", "ImplicitCG")
        for method in ("HGP", *methods) if error == REACHED[0] else methods:
            own = [curve for curve in curves if curve["method"] == method and floats_until(curve, error) is not None]
            best = min(own, key=lambda curve: floats_until(curve, error) or 0, default=None)
            row[f"{method} {error:.0e}"] = None if best is None else round((floats_until(best, error) or 0) / width, 1)
            if method == "HGP":
                row[f"pushes {error:.0e}"] = None if best is None else best["pushes"]
    return row


def best_by_label(curves: Sequence[Row]) -> dict[str, Row]:
    """HGP at its best step for each number of pushes, and everything else."""
    best: dict[str, Row] = {}
    for curve in sorted(curves, key=lambda curve: min(curve["relative_error"], default=np.inf)):
        label = f"HGP, S = {curve['pushes']}" if curve["method"] == "HGP" else curve["method"]
        if curve["relative_error"]:
            best.setdefault(label, curve)
    return best
