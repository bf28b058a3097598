"""How long a round takes: against a loop over clients in Python, and as the number of clients grows."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from hyperpush.errors import HyperpushError, InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Pair = Annotated[int, Field(ge=2)]

TOLERANCE = 1e-4
WIDE = 100  # parameters, above which many examples would only fill the memory
CHECKED = 5  # rounds after which engine and loop must agree


class Rounds(Config):
    """Options of the benchmark of rounds."""

    clients: tuple[Pair, ...] = Field(default=(3, 100, 1000), description="Numbers of clients to compare at.")
    widths: tuple[Pair, ...] = Field(default=(6, 1000), description="Numbers of parameters to compare at.")
    pushes: tuple[Count, ...] = Field(default=(1, 10), description="Push-sum steps per order of HGP.")
    examples: tuple[Count, ...] = Field(
        default=(10, 100),
        min_length=1,
        description="Training examples per client; widths above 100 and the growth take the first number only.",
    )
    growth_clients: tuple[Annotated[int, Field(ge=12)], ...] = Field(
        default=(100, 1_000, 10_000, 100_000), description="Numbers of clients on k-out graphs, from few to many."
    )
    growth_width: Pair = Field(default=6, description="Number of parameters there.")
    seconds: float = Field(default=0.5, gt=0, description="How long one measurement lasts, about.")
    repeats: Count = Field(default=5, description="Measurements of which the median is taken.")
    seed: int = Field(default=0, ge=0, description="Decides the data and the networks.")

    @field_validator("growth_clients")
    @classmethod
    def _rising(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        if list(given) != sorted(set(given)):
            raise InvalidInput("growth_clients", given, "rising numbers")
        return given


def run_rounds(config: Rounds, run: Any) -> dict[str, Any]:
    """Compare with the loop, then let the number of clients grow."""
    from hyperpush.bench.timing import machine

    where = machine()
    return {"rounds": _compare(config, run), "growth": _grow(config, run), "machine": where}


def require_same(what: str, ours: Any, theirs: Any) -> None:
    """Refuse to compare the speed of computations whose results differ."""
    import numpy as np

    difference = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
    if not difference <= TOLERANCE:
        raise HyperpushError(f"{what}: engine and loop differ by {difference:.1e}, relative; nothing was measured")


def _compare(config: Rounds, run: Any) -> list[dict[str, Any]]:
    import jax

    from hyperpush.bench import loop, simulated
    from hyperpush.bench.timing import per_round
    from hyperpush.networks import RandomDirected
    from hyperpush.tasks.logistic import logistic

    key = jax.random.key(config.seed)
    methods = [("SGP", 1), *(("HGP", pushes) for pushes in config.pushes)]
    sizes = [
        (clients, width, examples)
        for width in config.widths
        for examples in (config.examples if width <= WIDE else config.examples[:1])
        for clients in config.clients
    ]
    rows = []
    with run.progress("comparison", len(sizes) * len(methods)) as bar:
        for clients, width, examples in sizes:
            task = logistic(clients, config.seed, examples=examples, features=width - 1)
            network = RandomDirected(clients, seed=config.seed)
            step = 1 / width  # the costs' curvature grows with the width
            # At zero, where the task starts, its hypergradient is zero: nothing to compare.
            trained = task.at(params=simulated.sgp(task, network, key, step)(CHECKED))
            for method, pushes in methods:
                if method == "SGP":
                    timed = [side.sgp(task, network, key, step) for side in (simulated, loop)]
                else:
                    timed = [side.hgp(trained, network, key, pushes, step) for side in (simulated, loop)]
                require_same(f"{method}, {clients} clients, width {width}", *(each(CHECKED) for each in timed))
                ours, theirs = per_round(timed, config.seconds, config.repeats)
                row = {
                    "method": method,
                    "pushes": pushes,
                    "clients": clients,
                    "width": width,
                    "examples": examples,
                    "microseconds": ours * 1e6,
                    "loop_microseconds": theirs * 1e6,
                    "ratio": theirs / ours,
                }
                rows.append(row)
                run.record(**row)
                bar.advance()
    if rows:
        columns = [name.replace("microseconds", "µs").replace("_", " ") for name in rows[0]]
        run.table("µs per round on random-directed networks", columns, [list(row.values()) for row in rows])
    return rows


def _grow(config: Rounds, run: Any) -> list[dict[str, Any]]:
    from hyperpush.bench import growth
    from hyperpush.runs.report.figures import panels

    if not config.growth_clients:
        return []
    options = (config.growth_width, config.examples[0], config.seed, config.seconds, config.repeats)
    measured = []
    with run.progress("growth", 1 + len(config.growth_clients)) as bar:
        # What every process holds, however few its clients.
        _, base = growth.alone(growth.FEW, *options)
        bar.advance()
        for clients in config.growth_clients:
            measured.append(growth.alone(clients, *options))
            bar.advance()
    rows = growth.rows(config.growth_clients, measured, base)
    for row in rows:
        run.record(**row)
    run.table(f"SGP on {growth.LINKS}-out graphs", list(rows[0]), [list(row.values()) for row in rows])
    figure, axes = panels(2)
    labels = {"microseconds": "µs per SGP round", "peak_megabytes": "peak memory in MB"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        known = [(row["clients"], row[name]) for row in rows if row[name]]
        if known:
            x, y = zip(*known, strict=True)
            axis.loglog(x, y, marker="o", label="measured")
            # Through the largest size, because fixed costs hide the slope at small ones.
            axis.loglog(x, [y[-1] * n / x[-1] for n in x], linestyle=":", color="gray", label="linear")
            axis.legend()
        axis.set_xlabel("clients")
        axis.set_ylabel(label)
    run.figure("growth", figure)
    return rows


BENCH = Experiment("rounds", "Time of a round, against a Python loop and by number of clients.", Rounds, run_rounds)
