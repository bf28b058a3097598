"""Error curves of all estimators, and their costs on each network for errors of 1e-4 and 1e-6."""

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
TAPE = 10**6  # largest number of values that ITDBackward may record
Row = dict[str, Any]
Reader = Callable[[Any, Context], PyTree]


def run(config: Estimators, run: StudyRun) -> dict[str, Any]:
    """Run every estimator on every network, for every size of the problem."""
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
        self.least: int | None = (
            None  # order at which HGP with exact averages first has an error below 1e-4; None: not yet known
        )

    def curves_on(self, name: str) -> list[Row]:
        """Return the curves of all estimators that can run on the network of this name."""
        config, known, network = self.config, hp.hypergradients, self.network(name)
        curves = self.grid_curves(network, "push") + ([] if network.directed else self.grid_curves(network, "gossip"))
        # without a second right-hand side
        server = known.ImplicitCG(min(config.order, 2 * self.width), singular="minimum-norm")
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
        """Return the network of this name."""
        options = {"k": min(self.config.out_links, self.clients - 1)} if name == "k-out" else {}
        return hp.network(name, self.clients, self.config.seed, **options)

    def automatic_curve(self, network: Network, faults: hp.Faults | None = None) -> Row:
        """Return the curve of `hp.Automatic`, here TreeCG: a loop with a second right-hand side, and one without."""
        estimator = hp.Automatic(tolerance=self.config.tolerance)
        return self.recorded_curve(network, estimator, TREE_LOOPS, self.implied_value, self.truth, faults)

    def stop(self, name: str, estimator: HypergradientEstimator, faults: hp.Faults | None = None) -> Row:
        """Return the error and costs of an estimator that decides by itself when to stop."""
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
        """Return floats per parameter to an error of 1e-4 on lossy links: Automatic, and the best TrackedHGP.

        TrackedHGP has a fixed length and its best number of pushes here.
        """
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
        """Return the estimate −B_i q for a solution q of the linear system; outer costs do not depend on hypers."""
        batch, q = full_batch(ctx.data.train), getattr(state, "x" if hasattr(state, "x") else "q").reshape(-1)
        return -self.task.problem.jacobian_product(state.params, state.hyper, batch, q)

    def implied_value_and_pushes(self, state: Any, ctx: Context) -> PyTree:
        """Return the estimate that q implies, and the number of pushes that TrackedHGP chose."""
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
        """Return an error curve as a row of the result; `values` holds the recorded estimates on axis 0."""
        norm = float(np.linalg.norm(truth))
        errors = np.linalg.norm((np.asarray(values, np.float64) - truth).reshape(len(rounds), -1), axis=1) / norm
        finite = np.isfinite(errors) & (errors < 1e6)
        end = len(errors) if finite.all() else int(np.argmin(finite))  # cut a curve where it diverges
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
        """Run an estimator and return its curve from the recorded loops; costs before these loops count, too."""
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
        """Return the curves of HGP on its grid of pushes and step sizes.

        Once a point of the grid has reached an error of 1e-4, larger numbers of pushes are skipped if they would cost
        more even with exact averages.
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
        """Return the curves of HGP with one number of pushes and all step sizes of the grid."""

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
    """Return the number of records up to and including the first with at most this error; all if there is none."""
    errors = curve["relative_error"]
    return min(len(errors), 1 + next((place for place, found in enumerate(errors) if found <= error), len(errors)))


def floats_until(curve: Row, error: float) -> int | None:
    """Return the floats per client after which the error stays at most `error`; None if the last error is larger."""
    above = [place for place, found in enumerate(curve["relative_error"]) if found > error]
    place = above[-1] + 1 if above else 0
    return curve["floats_per_client"][place] if place < len(curve["floats_per_client"]) else None


def summarize(name: str, clients: int, width: int, curves: Sequence[Row]) -> Row:
    """Return floats per parameter to each error, for HGP at the best point of its grid and for all other estimators."""
    row: Row = {"network": name, "clients": clients}
    for error in REACHED:
        # The search on HGP's grid stops at an error of 1e-4, so HGP lacks numbers for smaller errors.
        methods = ("TrackedHGP", "Automatic", "ImplicitCG")
        for method in ("HGP", *methods) if error == REACHED[0] else methods:
            own = [curve for curve in curves if curve["method"] == method and floats_until(curve, error) is not None]
            best = min(own, key=lambda curve: floats_until(curve, error) or 0, default=None)
            row[f"{method} {error:.0e}"] = None if best is None else round((floats_until(best, error) or 0) / width, 1)
            if method == "HGP":
                row[f"pushes {error:.0e}"] = None if best is None else best["pushes"]
    return row


def best_by_label(curves: Sequence[Row]) -> dict[str, Row]:
    """Return curves by label: HGP at its best step size for each number of pushes, and all other methods."""
    best: dict[str, Row] = {}
    for curve in sorted(curves, key=lambda curve: min(curve["relative_error"], default=np.inf)):
        label = f"HGP, S = {curve['pushes']}" if curve["method"] == "HGP" else curve["method"]
        if curve["relative_error"]:
            best.setdefault(label, curve)
    return best
