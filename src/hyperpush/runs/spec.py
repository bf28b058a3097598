"""A TOML file with `[task]`: the sentence of `hyperpush.spec`, run like a study."""

from typing import Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Table = dict[str, Any]


class SpecConfig(Config):
    """What a spec holds; each table's options are those of what it names."""

    key: int = Field(default=0, ge=0, lt=2**32, description="Decides every random draw.")
    precision: Literal["float32", "float64"] = Field(default="float32", description="Of all numbers.")
    verb: Literal["train", "hypergradient", "solve", "influence"] | None = Field(
        default=None, description="What to do; the method's kind decides if left out."
    )
    every: int | None = Field(default=None, ge=1, description="Steps between two rows of the history.")
    task: Table = Field(default={}, description="A ready-made task or module:function, and its options.")
    network: Table = Field(default={}, description="A network or module:Class, and its options.")
    method: Table = Field(default={}, description="A method or module:Class, and its options.")
    train: Table | None = Field(default=None, description="An inner solver that trains before an estimator.")
    engine: Table | None = Field(default=None, description="Where the clients run.")
    metrics: Table = Field(default={}, description="module:function by name, or tables with name and on.")
    hooks: Table = Field(default={}, description="Hooks or module:Class, by name.")
    peers: Table = Field(default={}, description="For hyperpush peer: one table per party.")
    deploy: Table = Field(default={}, description="For hyperpush peer and swarm: how parties talk.")

    def sentence(self) -> dict[str, Any]:
        """The tables without what only deployment needs, and without what is not set."""
        return self.model_dump(exclude_none=True, exclude={"peers", "deploy"})


def run_spec(config: SpecConfig, run: Any) -> dict[str, Any]:
    """Run the sentence, write every owner's model, and report what it cost."""
    from hyperpush import spec
    from hyperpush.hooks import Progress

    made = spec.read(config.sentence())
    with run.progress(made.verb, 1) as bar:

        def advance(loop: str, done: int, total: int) -> None:
            bar.update(done / max(total, 1))

        result = made.run(hooks=(Progress(advance),))
    return report(result, made, run)


def report(result: Any, made: Any, run: Any) -> dict[str, Any]:
    """What a run folder and a terminal hold of a result."""
    import numpy as np

    costs = {name: getattr(result.costs, name) for name in ("rounds", "floats", "bytes", "largest_bytes")}
    costs |= {name: getattr(result.costs, name) for name in ("gradients", "hessian_products", "jacobian_products")}
    status = {"converged": result.status.converged, "reason": result.status.reason}
    found: dict[str, Any] = {"verb": made.verb, "costs": {**costs, "accesses": dict(result.costs.accesses)}}
    found |= {"status": {**status, "residual": result.status.residual, "error": result.status.error}}
    history = getattr(result, "history", None)
    columns = history.columns() if history is not None and hasattr(history, "columns") else {}
    for row in range(len(columns.get("step", ()))):
        values = {name: float(column[row]) for name, column in columns.items() if np.isfinite(column[row])}
        run.record(
            **{name: int(value) if name in ("step", "rounds", "floats") else value for name, value in values.items()}
        )
    if columns:
        found["history"] = {
            name: [float(value) if np.isfinite(value) else None for value in column] for name, column in columns.items()
        }
    for name in ("params", "hypers", "value"):
        if getattr(result, name, None) is not None:
            run.save_models("hypergradients" if name == "value" else name, getattr(result, name), result.names)
    if hasattr(result, "examples"):
        found["scores"] = {owner: own.tolist() for owner, own in zip(result.names, result.examples, strict=True)}
        found["clients"] = dict(zip(result.names, result.clients.tolist(), strict=True))
    last = {name: float(column[-1]) for name, column in columns.items() if np.isfinite(column[-1])}
    found["rows"] = [{"method": type(made.method).__name__, **last}]  # what `hyperpush sweep` chooses by and reports
    if "cost" in columns:
        found["cost_before"], found["cost_after"] = float(columns["cost"][0]), float(columns["cost"][-1])
    rows = [(name.replace("_", " "), value) for name, value in costs.items()]
    rows += [(name.replace("_", " "), found[name]) for name in ("cost_before", "cost_after") if name in found]
    run.table(repr(result).split(";")[0] + ")", ("quantity", "value"), [*rows, ("status", str(result.status))])
    return found


def check(config: SpecConfig) -> None:
    """Refuse a sentence that cannot be read; `hyperpush sweep` asks for every run before the first."""
    from hyperpush import spec

    spec.read(config.sentence())


SPEC = Experiment(
    "spec",
    "A TOML file with [task], [network] and [method].",
    SpecConfig,
    run_spec,
    check=check,
)
