"""Define the experiment `spec`, which runs a TOML file with `[task]` (see `hyperpush.spec.objects`)."""

from typing import Annotated, Any, Literal

from hyperpush.base.annotations import Before
from hyperpush.base.config import Config, as_table, option
from hyperpush.base.limits import OptionalCount, whole
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.spec.config import named_table

Table = dict[str, Any]
Named = Annotated[Table, Before(named_table)]


class SpecConfig(Config):
    """Options of a spec. Each table holds a name, and the options of the object with this name."""

    key: Annotated[int, whole(0, 2**32 - 1)] = option(0, "Decides every random draw.")
    precision: Literal["float32", "float64"] = option("float32", "Precision of all numbers.")
    verb: Named | None = option(
        None, "train, hypergradient, solve or influence; by default chosen by the method's kind."
    )
    start: str | None = option(None, "Folder of a finished run, to start from its params and hypers.")
    every: OptionalCount = option(None, "Steps between two rows of the history.")
    task: Named = option({}, "A ready-made task or module:function, and its options.")
    network: Named = option({}, "A network or module:Class, and its options.")
    method: Named = option({}, "A method or module:Class, and its options.")
    train: Named | None = option(None, "An inner solver that trains before an estimator.")
    engine: Named | None = option(None, "Engine that runs the clients.")
    metrics: Table = option({}, "module:function by name, or tables with name and on.")
    hooks: Table = option({}, "Hooks or module:Class, by name.")
    peers: Table = option({}, "For hyperpush peer: one table per party.")
    deploy: Table = option({}, "For hyperpush peer and swarm: communication of the parties.")

    def tables(self) -> dict[str, Any]:
        """Return the options that are set, without the tables `peers` and `deploy`, which only deployment reads."""
        return {name: each for name, each in as_table(self).items() if name not in ("peers", "deploy")}


SPEC = Experiment(
    "spec",
    "A TOML file with [task], [network] and [method].",
    SpecConfig,
    defer("hyperpush.spec.run:run"),
    check=defer("hyperpush.spec.run:check"),
)
