"""Every bilevel algorithm on one problem with closed forms: where each ends, by iteration and by floats sent.

Unlike quadratics with one hyper for all clients (docs/bilevel.md). Distances are of the farthest client, relative to
the start's.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]


class BilevelQuadratic(Config):
    """Options of the comparison of bilevel algorithms."""

    clients: Annotated[int, Field(ge=2)] = 5
    network: str = Field(default="ring", description="Name of the network; it has to be undirected.")
    methods: tuple[str, ...] = Field(default=(), description="Which to run, by their first word; all if left out.")
    iterations: Count = Field(default=1000, description="Iterations of methods that end at a point at constant steps.")
    steps: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.1, 0.03, 0.01), description="Constant steps of methods that are as far off as their steps are large."
    )
    passes: Annotated[float, Field(gt=0)] = Field(
        default=40, description="Their iterations, times the step: how often they could forget where they started."
    )
    falling: Count = Field(default=100_000, description="Iterations of the same methods with falling steps.")
    outer_steps: Count = Field(default=40, description="Outer steps of the methods that solve the inner problem first.")
    seed: int = Field(default=0, ge=0, description="Decides the problem and every draw.")
    precision: Literal["float32", "float64"] = "float64"


def algorithms(config: BilevelQuadratic) -> list[tuple[str, Any]]:
    """Every bilevel algorithm whose hypers agree, with its constants; a method is a line."""
    import hyperpush as hp
    from hyperpush.optimizers import Power

    many, fall, slow = config.iterations, Power(0.5, 0.8), Power(1, 0.7)
    found: list[tuple[str, Any]] = [
        ("INTERACT", hp.algorithms.INTERACT(many, 0.05, 0.2)),
        ("SVRINTERACT", hp.algorithms.SVRINTERACT(many, 0.05, 0.15, period=7)),
        ("SPDB", hp.algorithms.SPDB(many, 0.15, 0.2, penalty=0.8)),
        ("FedBiO", hp.algorithms.FedBiO(many, 0.05, 0.2)),
        ("FedBiO, 5 local steps", hp.algorithms.FedBiO(config.falling, fall, 0.2, local_steps=5)),
        ("FedBiOAcc", hp.algorithms.FedBiOAcc(many, 0.05, 0.2, forget=0.5)),
        ("MDBO", hp.algorithms.MDBO(many, 0.05, 0.1, 0.7, 0.9, 0.8)),
        ("VRDBO", hp.algorithms.VRDBO(many, 0.05, 0.1, 0.7, 0.9, 0.8)),
        ("BSA", hp.algorithms.BSA(many, 0.1, 0.2)),
        ("TTSA", hp.algorithms.TTSA(many, 0.05, 0.2)),
        ("FedNest", hp.algorithms.FedNest(many, 0.05, 0.2, inner_steps=3)),
        ("DSBOJHIP, tracked", hp.algorithms.DSBOJHIP(many, 0.1, 0.15, 0.2, tracked=True)),
        ("MADSBO, tracked", hp.algorithms.MADSBO(many, 0.1, 0.15, 0.2, tracked=True)),
        ("GBDSBO, tracked", hp.algorithms.GBDSBO(many, 0.1, 0.15, tracked=True)),
        ("DSBOJHIP, falling steps", hp.algorithms.DSBOJHIP(config.falling, fall, fall, fall, 3, 3)),
        ("MADSBO, falling steps", hp.algorithms.MADSBO(config.falling, fall, fall, fall, 3, 3)),
        ("GBDSBO, falling steps", hp.algorithms.GBDSBO(config.falling, fall, fall, slow)),
        ("LDPDSBO, falling steps", hp.algorithms.LDPDSBO(config.falling, fall, use="reused")),
    ]
    for step in config.steps:
        long = max(1, round(config.passes / step))
        found += [
            (f"DSBOJHIP, step {step:g}", hp.algorithms.DSBOJHIP(long, step, step, step, 3, 3)),
            (f"MADSBO, step {step:g}", hp.algorithms.MADSBO(long, step, step, step, 3, 3)),
            (f"GBDSBO, step {step:g}", hp.algorithms.GBDSBO(long, step, step, step)),
            (f"LDPDSBO, step {step:g}", hp.algorithms.LDPDSBO(long, Power(step), use="reused")),
        ]
    decay = hp.schedule("milestones", 0.1, at=(60, 600))  # to about 1e-3 of its bias at 0.1, of order γ
    nested: Any = {"steps": config.outer_steps, "restart": False, "pushes": 5}
    shared = {**nested, "inner": hp.SGP(4000, decay), "outer": hp.optimizer("sgd", learning_rate=0.3)}
    alone = {**nested, "inner": hp.LocalSGD(1000, 0.2), "outer": hp.optimizer("sgd", learning_rate=0.05)}
    return [
        *found,
        ("CDBO + HGP", hp.CDBO(hypergradient=hp.HGP(40, 20, 0.4), **shared)),
        ("CDBO + TrackedHGP", hp.CDBO(hypergradient=hp.TrackedHGP(), **shared)),
        ("CDBOLocal", hp.algorithms.CDBOLocal(hypergradient=hp.hypergradients.LocalGradient(), **alone)),
    ]


def run_bilevel_quadratic(config: BilevelQuadratic, run: Any) -> dict[str, Any]:
    """A row and a curve for every method."""
    import jax.numpy as jnp
    import numpy as np

    import hyperpush as hp
    from hyperpush.errors import unknown
    from hyperpush.tasks.quadratic import outer_fixed_points

    known = [(label, label.replace(",", "").split()[0], algorithm) for label, algorithm in algorithms(config)]
    names = {name for _, name, _ in known}
    for name in config.methods:
        if name not in names:
            raise unknown("methods", name, names)
    network = hp.networks.by_name(config.network, config.clients, config.seed)
    task = hp.tasks.quadratic(config.clients, config.seed, common=True)
    task = task.at(hypers=jnp.zeros_like(task.hypers))
    points = outer_fixed_points(task.train, task.validation)

    rows, curves = [], []
    chosen = [(label, each) for label, name, each in known if name in config.methods or not config.methods]
    with run.progress("methods", len(chosen)) as bar:
        for label, method in chosen:
            found = hp.solve(task, method, network, key=config.seed)
            aim, history = method.info.fixed_point, found.history
            last = {name: _distances(found.hypers[None], points[name]) for name in (aim, "x_G")}
            rows.append(
                {
                    "method": label,
                    "fixed_point": aim,
                    "distance": float(last[aim][0]),
                    "distance_to_global": float(last["x_G"][0]),
                    "floats_per_client": found.costs.floats,
                    "rounds": found.costs.rounds,
                }
            )
            curves.append(
                {
                    "method": label,
                    "iterations": history.steps.tolist(),
                    "floats_per_client": history.floats.tolist(),
                    "distance": _distances(history.hypers, points[aim]).tolist(),
                }
            )
            run.record(**rows[-1])
            bar.advance()
    run.table(
        f"distances relative to the start's, {config.network}", list(rows[0]), [list(row.values()) for row in rows]
    )
    _draw(run, curves)
    gaps = {
        name: float(np.linalg.norm(points[name] - points["x_G"]) / np.linalg.norm(points["x_G"])) for name in points
    }
    return {"rows": rows, "fixed_points_from_global": gaps, "curves": curves}


def _distances(hypers: Any, point: Any) -> Any:
    """Of the farthest client from a point, by record, in units of the point's distance from zero, where all start."""
    import numpy as np

    return np.linalg.norm(np.asarray(hypers, np.float64) - point, axis=-1).max(-1) / np.linalg.norm(point)


def _draw(run: Any, curves: list[dict[str, Any]]) -> None:
    """Errors by iteration and by floats: one figure of what ends at a point at constant steps, one of the rest."""
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    groups = {
        "constant-steps": [curve for curve in curves if "step" not in curve["method"]],
        "by-step": [curve for curve in curves if "step" in curve["method"]],
    }
    for name, group in groups.items():
        figure, axes = panels(2)
        for axis, x, label in zip(
            axes, ("iterations", "floats_per_client"), ("iterations", "floats per client"), strict=True
        ):
            drawn = [Curve(curve["method"], curve[x], curve["distance"]) for curve in group]
            error_curves(axis, drawn, x_label=label, y_label="distance from its fixed point", log_x=True)
            axis.legend(fontsize=5)
        if group:
            run.figure(name, figure)


EXPERIMENT = Experiment(
    "bilevel-quadratic",
    "Every bilevel algorithm on unlike quadratics: where each ends, by iteration and by floats.",
    BilevelQuadratic,
    run_bilevel_quadratic,
)
