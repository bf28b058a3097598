"""How far hyper-gradient push is from the true hyper-gradient, by order, pushes, batch size and inner solution.

The counterpart of figure 1(a)(b) of Terashita and Hara, "Decentralized hyper-gradient computation over time-varying
directed networks", and of the trends that its theorems predict.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
MILESTONES = (0.6, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.998, 0.9998)


class ErrorStudy(Config):
    """Options of the error study; the defaults are the paper's setting."""

    clients: int = Field(default=3, ge=2, description="Number of clients.")
    examples: int = Field(default=100, ge=2, description="Training examples per client, and as many for validation.")
    hyper: float = Field(
        default=0.01, gt=0, description="Every client's L2 rate on each parameter, where it is evaluated."
    )
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    inner_steps: Count = Field(default=5000, description="Steps of stochastic gradient push to the inner solution.")
    inner_rate: float = Field(default=2.0, gt=0, description="Its first learning rate, lowered tenfold at milestones.")
    order: Count = Field(default=1000, description="Largest order M of the hyper-gradient's series.")
    pushes: tuple[Count, ...] = Field(default=(1, 2, 5, 10, 100), min_length=1, description="Push-sum steps per order.")
    step: float = Field(default=1.0, gt=0, description="Step size of the hyper-gradient's fixed-point iteration.")
    batches: tuple[Count, ...] = Field(
        default=(100, 20),
        min_length=1,
        description="Batch sizes of the products; `examples` or more is the full batch.",
    )
    runs: int = Field(default=10, ge=2, description="Runs of the estimator on the one problem, with different seeds.")
    trend_batches: tuple[Count, ...] = Field(
        default=(5, 10, 20, 40, 80), description="Batch sizes of the trend against batch size."
    )
    trend_inner_steps: tuple[Count, ...] = Field(
        default=(5, 10, 20, 50, 100, 200, 500), description="Inner steps of the trend against inexact inner solutions."
    )
    trend_pushes: Count = Field(default=10, description="Push-sum steps per order in both trends.")
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Literal["float32", "float64"] = "float32"


def run_error_study(config: ErrorStudy, run: Any) -> dict[str, Any]:
    """Solve the inner problem once, estimate its hyper-gradient many times, compare with the closed form."""
    import equinox as eqx
    import jax
    import numpy as np

    import hyperpush as hp
    from hyperpush.hypergradients import oracles
    from hyperpush.runs.report.figures import Curve, error_curves, panels
    from hyperpush.studies.common.estimates import current_value, recorded

    network = hp.networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    task = hp.tasks.logistic(config.clients, config.seed, examples=config.examples, rate=config.hyper)
    training_key, estimation_key = jax.random.split(jax.random.key(config.seed))

    def solve(steps: int) -> Any:
        """Params after `steps` of SGP with the paper's milestones in proportion."""
        step_size = hp.schedule("milestones", config.inner_rate, at=sorted({round(at * steps) for at in MILESTONES}))
        with run.progress(f"inner problem, {steps} steps", steps) as bar:
            told = hp.hooks.Progress(lambda _, done, total: bar.update(done))
            return hp.train(task, hp.SGP(steps, step_size), network, key=training_key, hooks=(told,)).params

    @eqx.filter_jit
    def all_runs(estimator, at, keys):
        def one(key):
            return recorded(task.at(params=at), estimator, network, key, {"HGP": current_value})["HGP"]

        return jax.vmap(one)(keys)

    keys = jax.random.split(estimation_key, config.runs)

    def errors(at, pushes: int, batch: int, truth) -> np.ndarray:
        """ℓ2 errors of all runs, [runs, order]."""
        size = None if batch >= config.examples else batch
        estimates = np.asarray(all_runs(hp.HGP(config.order, pushes, config.step, size), at, keys), np.float64)
        found = np.sqrt(np.sum((estimates - truth) ** 2, axis=(2, 3)))
        if not np.all(np.isfinite(found)):
            first = int(np.argmin(np.all(np.isfinite(found), axis=0))) + 1
            raise hp.Diverged(f"HGP with {pushes} pushes", first, f"a smaller step than {config.step} may help")
        return found

    at = solve(config.inner_steps)
    solution = oracles.minimise(task.problem, task.params, task.hypers, task.data)
    truth_here, truth = (oracles.dense(task.problem, x, task.hypers, task.data) for x in (at, solution))
    true_norm = float(np.linalg.norm(truth))
    wanted = sorted({m for m in (10, 50, 100, 200, 500, 1000) if m < config.order} | {config.order})
    orders = np.arange(1, config.order + 1)
    rows, figure, axes = [], *panels(len(config.batches))
    with run.progress("estimates", len(config.batches) * len(config.pushes)) as bar:
        for axis, batch in zip(axes, config.batches, strict=True):
            curves = []
            for pushes in config.pushes:
                found = errors(at, pushes, batch, truth_here)
                mean, spread = found.mean(0), found.std(0, ddof=1)
                curves.append(Curve(f"S = {pushes}", orders, mean, spread))
                run.record(
                    method="HGP", pushes=pushes, batch=batch, error_mean=mean.tolist(), error_std=spread.tolist()
                )
                rows += [
                    {
                        "method": "HGP",
                        "pushes": pushes,
                        "batch": batch,
                        "order": m,
                        "error_mean": float(mean[m - 1]),
                        "error_std": float(spread[m - 1]),
                    }
                    for m in wanted
                ]
                bar.advance()
            size = "full batch" if batch >= config.examples else f"batches of {batch}"
            error_curves(axis, curves, x_label="order M", y_label="error of the hyper-gradient", title=size)
    run.figure("errors", figure)

    def trend(points: list[tuple[int, np.ndarray]], name: str) -> list[dict[str, Any]]:
        return [
            {name: x, "error_mean": float(found[:, -1].mean()), "error_std": float(found[:, -1].std(ddof=1))}
            for x, found in points
        ]

    with run.progress("trends", len(config.trend_batches) + len(config.trend_inner_steps)) as bar:
        by_batch, by_steps, distances = [], [], []
        for batch in config.trend_batches:
            by_batch.append((batch, errors(at, config.trend_pushes, batch, truth_here)))
            bar.advance()
        for steps in config.trend_inner_steps:
            inexact = solve(steps)
            by_steps.append((steps, errors(inexact, config.trend_pushes, config.examples, truth)))
            distances.append(float(np.linalg.norm(inexact - solution)))
            bar.advance()
    batch_rows, step_rows = trend(by_batch, "batch"), trend(by_steps, "inner_steps")
    step_rows = [{**row, "distance": d} for row, d in zip(step_rows, distances, strict=True)]
    figure, axes = panels(2)
    for axis, points, x, label in (
        (axes[0], batch_rows, "batch", "batch size"),
        (axes[1], step_rows, "distance", "distance of the inner solution"),
    ):
        if points:
            points = sorted(points, key=lambda point: point[x])
            curve = Curve(
                f"S = {config.trend_pushes}",
                [p[x] for p in points],
                [p["error_mean"] for p in points],
                [p["error_std"] for p in points],
            )
            error_curves(axis, [curve], x_label=label, y_label="error of the hyper-gradient", log_x=True)
    axes[0].set_xticks(config.trend_batches, labels=[str(batch) for batch in config.trend_batches])
    axes[0].minorticks_off()
    run.figure("trends", figure)
    run.save_models("inner-solution", at)

    run.table(
        f"error at the inner solution reached, mean of {config.runs} runs; true norm {true_norm:.4g}",
        ("batch", "pushes", *(f"order {m}" for m in wanted)),
        [
            (batch, pushes, *(f"{r['error_mean']:.1e}" for r in rows if (r["batch"], r["pushes"]) == (batch, pushes)))
            for batch in config.batches
            for pushes in config.pushes
        ],
    )
    return {
        "true_norm": true_norm,
        "errors": rows,
        "by_batch": batch_rows,
        "by_inner_steps": step_rows,
        # Errors are taken against the closed form at the inner solution that was reached; this is how far that is from
        # the closed form at the exact one.
        "inner_distance": float(np.linalg.norm(at - solution)),
        "inner_effect": float(np.linalg.norm(truth_here - truth)),
    }


EXPERIMENT = Experiment(
    "error-study", "Error of hyper-gradient push against the closed form.", ErrorStudy, run_error_study
)
