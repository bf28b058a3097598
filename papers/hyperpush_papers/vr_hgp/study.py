"""Solve the inner problem once, estimate its hypergradient many times, compare with the target and the bound."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import hyperpush as hp
from hyperpush.base.errors import InvalidInput
from hyperpush.base.figures import Curve, error_curves, panels
from hyperpush.hypergradients import oracles
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush.tasks.logistic import l2, losses
from hyperpush_papers.common.data.sources import available, load
from hyperpush_papers.common.estimates import records
from hyperpush_papers.vr_hgp.config import VRStudy
from hyperpush_papers.vr_hgp.links import compare_links
from hyperpush_papers.vr_hgp.theory import expected_errors, linearize, mu, mu_by_round, theorem

# Grid in which the best weights are searched.
ALPHAS = (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
GRID = np.array(list(product(ALPHAS, (0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1))))


def run(config: VRStudy, run: StudyRun) -> dict[str, Any]:
    """Return measured errors, expected errors and bounds for every pair of weights, and the best weights by theory."""
    network = hp.network(config.network, config.clients, config.seed, probability=config.probability)
    task, drawn = two_digits(config)
    training_key, estimation_key = jax.random.split(jax.random.key(config.seed))
    solver = hp.SGP(config.inner_steps, config.step, variant="gradient-after")
    at = hp.train(task, solver, network, key=training_key).params
    task = task.at(params=at)
    system = linearize(task, network, config.step)
    radius = float(np.abs(np.linalg.eigvals(system.forward())).max())
    if not radius < 1:
        raise InvalidInput("step", config.step, f"a step at which the series converges (Ā has radius {radius:.4g})")
    # The outer cost does not depend on the hypers, so c_λ = 0 and the target is the series.
    target = system.series()
    exact = np.asarray(oracles.dense(task.problem, at, task.hypers, task.data)).ravel()
    keys, weights = jax.random.split(estimation_key, config.runs), np.asarray(config.weights)
    expected = expected_errors(system, weights, config.rounds)
    bounds, constants = theorem(system, weights, config.rounds, config.failure)
    estimates, curves = estimates_of(config, task, network), []
    with run.progress("estimates", len(weights)) as bar:
        for place, (alpha, beta) in enumerate(config.weights):
            errors = np.linalg.norm(np.asarray(estimates(alpha, beta, keys), np.float64) - target, axis=2)
            finite = np.all(np.isfinite(errors), axis=0) & np.isfinite(expected[place])
            if not np.all(finite):
                first = int(np.argmin(finite)) + 1
                raise hp.Diverged(f"VRHGP with {label(alpha, beta)}", first, "A larger step or L2 rate may help.")
            curves.append(
                {
                    "alpha": alpha,
                    "beta": beta,
                    "error": errors.mean(0).tolist(),
                    "error_std": errors.std(0, ddof=1).tolist(),
                    "expected_rms": expected[place].tolist(),
                    "bound": None if bounds is None else bounds[place].tolist(),
                }
            )
            run.record(**curves[-1])
            bar.step()
    last = expected_errors(system, GRID, config.rounds)[:, -1]
    least = int(np.nanargmin(last))
    result = {
        **drawn,
        "true_norm": float(np.linalg.norm(target)),
        # Distance of the target, which follows from SGP's mean step, to the hypergradient at the common solution.
        "target_gap": float(np.linalg.norm(target - exact)),
        "curves": curves,
        "best": {"alpha": GRID[least, 0], "beta": GRID[least, 1], "expected_rms": last[least]},
        "constants": {"radius": radius, **constants},
        **factors(config),
    }
    several, _ = two_digits(replace(config, clients=config.observers))
    result["links"] = compare_links(config, run, several)
    run.save_models("inner-solution", at)
    draw(config, run, curves)
    show(config, run, result)
    return result


def two_digits(config: VRStudy) -> tuple[hp.Task, dict[str, Any]]:
    """Return logistic regression of two digits on each image's mean gray value and a constant, and its random draws."""
    name = config.data if config.data != "auto" else "mnist" if available("mnist", "train") else "digits"
    found, generator = load(name, "all" if name == "digits" else "train"), np.random.default_rng(config.seed)
    pair = generator.choice(10, 2, replace=False)
    rows = generator.permutation(np.flatnonzero(np.isin(found.labels, pair)))
    each = min(config.examples, len(rows) // (2 * config.clients))
    if each == 0:
        raise InvalidInput("clients", config.clients, f"at most {len(rows) // 2}, half the images of {pair.tolist()}")
    rows = rows[: 2 * each * config.clients].reshape(config.clients, 2 * each)
    gray = found.inputs[rows].mean(axis=(2, 3), dtype=np.float64)
    gray = (gray - gray[:, :each].mean()) / gray[:, :each].std()
    dtype = jnp.zeros(()).dtype
    inputs = jnp.asarray(np.stack([gray, np.ones_like(gray)], -1), dtype)
    labels = jnp.asarray(found.labels[rows] == pair[1], dtype)
    train, validation = ((inputs[:, part], labels[:, part]) for part in (slice(each), slice(each, None)))
    hypers = jnp.full(2, config.hyper, dtype)
    start = {"params": jnp.zeros(2, dtype), "hypers": hypers, "train": train, "validation": validation}
    task = hp.Task(inner=losses, penalty=l2, outer=losses, **start)
    return task, {"data": found.name, "digits": pair.tolist(), "examples": each}


def estimates_of(config: VRStudy, task: hp.Task, network: Network) -> Callable[[float, float, Array], Array]:
    """Return a function of (α, β, keys): VR-HGP's estimates by round, [runs, rounds, numbers of all clients]."""

    @jax.jit
    def estimates(alpha, beta, keys):
        method = hp.hypergradients.VRHGP(
            config.rounds, config.step, alpha, beta, variant="gradient-after", links="means"
        )
        record = {"VRHGP": lambda state, ctx: state.back.value}
        return jax.vmap(lambda key: records(task, method, network, key, record)["VRHGP"])(keys)

    return lambda *given: estimates(*given).reshape(config.runs, config.rounds, -1)


def factors(config: VRStudy) -> dict[str, list[dict[str, float]]]:
    """Return μ for all pairs of weights and contractions η, and the pairs of a grid with the least final μ."""
    table = [
        {"eta": eta, "alpha": alpha, "beta": beta, "mu": mu(alpha, beta, eta)}
        for eta, (alpha, beta) in product(config.contractions, config.weights)
    ]
    etas = np.asarray(config.contractions)
    plain = mu_by_round(1, 0, etas, config.rounds)[-1]
    last = mu_by_round(GRID[:, 0, None], GRID[:, 1, None], etas, config.rounds)[-1]
    best = [
        {"eta": eta, "alpha": GRID[least, 0], "beta": GRID[least, 1], "mu": column[least], "mu_plain": of_plain}
        for eta, column, least, of_plain in zip(config.contractions, last.T, last.argmin(0), plain, strict=True)
    ]
    return {"mu": table, "best_mu": best}


def label(alpha: float, beta: float) -> str:
    """Return the label of a pair of weights in figures."""
    return f"α = {alpha:g}, β = {beta:g}"


def draw(config: VRStudy, run: StudyRun, curves: list[dict[str, Any]]) -> None:
    """Draw the factor μ and the measured errors; then compare the first two pairs of weights with theory."""
    rounds, etas = np.arange(1, config.rounds + 1), np.linspace(0.01, 0.99, 99)
    figure, axes = panels(2)
    lines = [Curve(label(*pair), etas, [mu(*pair, eta) for eta in etas]) for pair in config.weights]
    error_curves(axes[0], lines, x_label="contraction η", y_label="factor μ of theorem 1", title="theory")
    by_round: Any = {"x_label": "round m", "y_label": "error of the hypergradient", "log_x": True}
    lines = [Curve(label(curve["alpha"], curve["beta"]), rounds, curve["error"]) for curve in curves]
    error_curves(axes[1], lines, title="measured", **by_round)
    if legend := axes[0].get_legend():  # the panel beside has the same legend; here it would cover lines
        legend.remove()
    run.figure("weights", figure)
    figure, axes = panels(len(curves[:2]))
    for axis, curve in zip(axes, curves[:2], strict=True):
        lines = [
            Curve("measured", rounds, curve["error"], curve["error_std"]),
            Curve("root mean square, exact", rounds, curve["expected_rms"]),
        ]
        if curve["bound"] is not None:
            lines.append(Curve("theorem 1", rounds, curve["bound"]))
        error_curves(axis, lines, title=label(curve["alpha"], curve["beta"]), **by_round)
    run.figure("bound", figure)


def show(config: VRStudy, run: StudyRun, result: dict[str, Any]) -> None:
    """Show tables of errors after some rounds, and of the best weights by theory."""
    wanted = sorted({m for m in (5, 20, 100) if m < config.rounds} | {config.rounds})

    def row(curve: dict[str, Any]) -> tuple[Any, ...]:
        bound = curve["bound"] and f"{curve['bound'][-1]:.1e}"
        errors = (f"{each:.1e}" for each in (*(curve["error"][m - 1] for m in wanted), curve["expected_rms"][-1]))
        return curve["alpha"], curve["beta"], *errors, bound

    run.table(
        f"error on {result['data']}, mean of {config.runs} runs; true norm {result['true_norm']:.4g}",
        ("α", "β", *(f"round {m}" for m in wanted), "exact rms", "theorem 1"),
        [row(curve) for curve in result["curves"]],
    )
    run.table(
        f"weights of least μ after {config.rounds} rounds",
        ("η", "α", "β", "μ", "μ of (1, 0)"),
        [tuple(each.values()) for each in result["best_mu"]],
    )
