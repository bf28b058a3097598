"""A TOML file with `[task]`: the sentence of `hyperpush.spec.objects`, run like a study."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hyperpush.runs.experiment import Experiment, defer
from hyperpush.spec.config import Config, named_table

Table = dict[str, Any]
Named = Annotated[Table, BeforeValidator(named_table)]


class SpecConfig(Config):
    """What a spec holds; each table's options are those of what it names."""

    key: int = Field(default=0, ge=0, lt=2**32, description="Decides every random draw.")
    precision: Literal["float32", "float64"] = Field(default="float32", description="Of all numbers.")
    verb: Named | None = Field(
        default=None, description="train, hypergradient, solve or influence; the method's kind decides if left out."
    )
    start: str | None = Field(default=None, description="Folder of a finished run whose params and hypers to take.")
    every: int | None = Field(default=None, ge=1, description="Steps between two rows of the history.")
    task: Named = Field(default={}, description="A ready-made task or module:function, and its options.")
    network: Named = Field(default={}, description="A network or module:Class, and its options.")
    method: Named = Field(default={}, description="A method or module:Class, and its options.")
    train: Named | None = Field(default=None, description="An inner solver that trains before an estimator.")
    engine: Named | None = Field(default=None, description="Where the clients run.")
    metrics: Table = Field(default={}, description="module:function by name, or tables with name and on.")
    hooks: Table = Field(default={}, description="Hooks or module:Class, by name.")
    peers: Table = Field(default={}, description="For hyperpush peer: one table per party.")
    deploy: Table = Field(default={}, description="For hyperpush peer and swarm: how parties talk.")

    def sentence(self) -> dict[str, Any]:
        """The tables without what only deployment needs, and without what is not set."""
        return self.model_dump(exclude_none=True, exclude={"peers", "deploy"})


SPEC = Experiment(
    "spec",
    "A TOML file with [task], [network] and [method].",
    SpecConfig,
    defer("hyperpush.spec.run:run"),
    check=defer("hyperpush.spec.run:check"),
)
