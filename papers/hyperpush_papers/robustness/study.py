"""Run every estimator on every family and network; count results as right or wrong, and as flagged or not."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

import hyperpush as hp
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.methods.registry import build
from hyperpush.networks import Network
from hyperpush.runs.run import StudyRun
from hyperpush_papers.robustness.config import Family, Robustness
from hyperpush_papers.robustness.families import LOSS, UNSOLVABLE, Quadratics, draw

TRAINED = 0.05  # relative error below which a result at trained params is right: statuses promise 3 %
STEPS = 300  # training steps of SGP
# kinds of outcomes; their counts add up to the number of runs
COUNTS = ("wrong_silent", "wrong_flagged", "right", "right_flagged")


class Outcome(NamedTuple):
    """Outcome of one run; rounds and floats are None if it diverged."""

    kind: str  # of COUNTS
    rounds: int | None = None
    floats: int | None = None  # mean number of floats that a client sent


def run(config: Robustness, run: StudyRun) -> dict[str, Any]:
    """Run the study; return a row of counts for each estimator, precision, network and family."""
    cells = list(product(config.dtypes, config.estimators, config.networks, config.families))
    rows = []
    with run.progress("cells", len(cells)) as bar:
        for dtype, name, link, family in cells:
            with jax.enable_x64(dtype == "float64"):
                estimator = build("hypergradients", {"name": name}, "estimators")
                outcomes = run_family(config, estimator, family, network_of(config, link), dtype)
            rows.append({"estimator": name, "dtype": dtype, "family": family, "network": link, **summarize(outcomes)})
            run.record(**rows[-1])
            bar.step()
    run.table(
        "runs, over all networks: wrong without a mark, wrong and marked, right, right but marked",
        ("estimator", "dtype", "family", *COUNTS),
        [(*case, *(found[name] for name in COUNTS)) for case, found in totals(rows).items()],
    )
    return {"families": rows}


def network_of(config: Robustness, name: str) -> Network:
    """Return the network of this name with the study's number of clients."""
    options = {"k": min(config.out_links, config.clients - 1)} if name == "k-out" else {}
    return hp.network(name, config.clients, config.seed, **options)


def run_family(
    config: Robustness, estimator: HypergradientEstimator, family: Family, network: Network, dtype: str
) -> list[Outcome]:
    """Run one estimator on a family for all seeds, and return the outcomes."""
    outcomes = []
    for seed in range(config.seed, config.seed + config.seeds):
        case = draw(family, network.name, seed, config.clients, config.params, config.hypers)
        # the true hypergradient is that of the rounded numbers
        case = Quadratics(*(part.astype(dtype) for part in case))
        outcomes.append(judge(family, case, estimator, network, seed, config.tolerance))
    return outcomes


def judge(
    family: Family,
    case: Quadratics,
    estimator: HypergradientEstimator,
    network: Network,
    key: int,
    tolerance: float,
) -> Outcome:
    """Run the estimator once and judge its result; without a true hypergradient every result is wrong.

    A run that diverges counts as flagged, because it raises an error.
    """
    truth = None if family in UNSOLVABLE else case.hypergradient()
    engine = hp.Simulate(faults=hp.Faults(loss=LOSS)) if family.startswith("lossy") else hp.Simulate()
    try:
        task = task_of(case)
        if family == "trained":
            task, truth, tolerance = train(task, case, network, key), case.trained(), TRAINED
        found = hp.hypergradient(task, estimator, network, key=key, engine=engine)
    except hp.Diverged:
        return Outcome("wrong_flagged")
    right = truth is not None and relative_error(found.value, truth) <= tolerance
    flagged = found.status.converged is False
    count = ("right_flagged" if flagged else "right") if right else ("wrong_flagged" if flagged else "wrong_silent")
    return Outcome(count, found.costs.rounds, found.costs.floats)


def train(task: hp.Task, case: Quadratics, network: Network, key: int) -> hp.Task:
    """Return the task after training by SGP with falling steps; its hypergradient depends on the params."""
    trained = task.replace(outer=bent_losses).at(hypers=case.direct)
    falling = hp.schedule("power", 0.5 / np.linalg.norm(case.hessians, 2, (1, 2)).max(), 0.6)
    return hp.train(trained, hp.SGP(STEPS, falling), network, key=key, certify=False).task


def relative_error(found: Any, truth: Float[np.ndarray, "n m"]) -> float:
    """Return the largest relative error of all clients; NaN counts as infinite."""
    errors = np.linalg.norm(np.asarray(found, np.float64) - truth, axis=1) / np.linalg.norm(truth, axis=1)
    return float(np.nan_to_num(errors, nan=np.inf).max())


def summarize(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the counts of outcomes, and the costs of the runs that did not diverge."""
    outcomes = list(outcomes)
    counts = Counter(outcome.kind for outcome in outcomes)
    rounds = [outcome.rounds for outcome in outcomes if outcome.rounds is not None]
    floats = [outcome.floats for outcome in outcomes if outcome.floats is not None]
    return {
        "runs": len(outcomes),
        **{name: counts[name] for name in COUNTS},
        "median_rounds": float(np.median(rounds)) if rounds else None,
        "p90_rounds": float(np.quantile(rounds, 0.9)) if rounds else None,
        "median_floats": float(np.median(floats)) if floats else None,
    }


def totals(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], Counter]:
    """Sum the counts over all networks, by estimator, precision and family."""
    found: dict[tuple[str, str, str], Counter] = {}
    for row in rows:
        counts = found.setdefault((row["estimator"], row["dtype"], row["family"]), Counter())
        counts.update({name: row[name] for name in COUNTS})
    return found


def task_of(case: Quadratics) -> hp.Task:
    """Return the task at its inner solution; each client has one example, which holds its matrices."""
    (clients, params), hypers = case.slopes.shape, case.direct.shape[1]
    hessians, couplings, slopes, direct = (part[:, None] for part in case)
    zeros = np.zeros((clients, params + hypers), case.slopes.dtype)
    return hp.Task(
        inner=inner_losses,
        outer=outer_losses,
        params=hp.per_client(zeros[:, :params]),
        hypers=hp.per_client(zeros[:, params:]),
        train=(hessians, couplings),
        validation=(slopes, direct),
    )


# Module-level functions for all problems, so that an estimator compiles only once per network and precision.
def inner_losses(x: Float[Array, " d"], hyper: Float[Array, " m"], batch: tuple[Array, Array]) -> Float[Array, ""]:
    hessians, couplings = batch
    return 0.5 * x @ hessians[0] @ x + hyper @ couplings[0] @ x


def outer_losses(x: Float[Array, " d"], hyper: Float[Array, " m"], batch: tuple[Array, Array]) -> Float[Array, ""]:
    slopes, direct = batch
    return slopes[0] @ x + direct[0] @ hyper


def bent_losses(x: Float[Array, " d"], hyper: Float[Array, " m"], batch: tuple[Array, Array]) -> Float[Array, ""]:
    return outer_losses(x, hyper, batch) + 0.5 * x @ x
