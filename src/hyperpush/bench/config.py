"""Options of the benchmarks; what they run is imported when it runs."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Several

ModelName = Annotated[
    Literal["emnist", "influence"],
    Field(description="A convolutional network of 2,278,334 parameters, or one of 13,750."),
]
Estimated = Literal["hgp", "tracked", "automatic"]
Trained = Literal["sgp", "tracked"]


class Memory(Config):
    """Options of the benchmark of memory."""

    clients: Several = Field(default=20, description="Number of clients.")
    examples: Count = Field(default=32, description="Training images per client, and validation images.")
    model: ModelName = "emnist"
    methods: tuple[Estimated, ...] = Field(
        default=("hgp", "tracked", "automatic"),
        min_length=1,
        description="HGP; TrackedHGP with given settings and one kept change; TrackedHGP as it is by default.",
    )
    batches: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(1, 0), min_length=1, description="Numbers of clients computed at a time; 0 for all at once."
    )
    steps: Count = Field(default=2, description="HGP's order, and TrackedHGP's steps with given settings.")
    pushes: Count = Field(default=2, description="Push-sum steps per order of HGP.")
    automatic_steps: Count = Field(default=10, description="TrackedHGP's steps, at most, as it is by default.")
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


class Rounds(Config):
    """Options of the benchmark of rounds."""

    clients: tuple[Several, ...] = Field(default=(3, 100, 1000), description="Numbers of clients to compare at.")
    widths: tuple[Several, ...] = Field(default=(6, 1000), description="Numbers of parameters to compare at.")
    pushes: tuple[Count, ...] = Field(default=(1, 10), description="Push-sum steps per order of HGP.")
    examples: tuple[Count, ...] = Field(
        default=(10, 100),
        min_length=1,
        description="Training examples per client; widths above 100 and the growth take the first number only.",
    )
    growth_clients: tuple[Annotated[int, Field(ge=12)], ...] = Field(
        default=(100, 1_000, 10_000, 100_000), description="Numbers of clients on k-out graphs, from few to many."
    )
    growth_width: Several = Field(default=6, description="Number of parameters there.")
    seconds: Positive = Field(default=0.5, description="How long one measurement lasts, about.")
    repeats: Count = Field(default=5, description="Measurements of which the median is taken.")
    seed: int = Field(default=0, ge=0, description="Decides the data and the networks.")

    @field_validator("growth_clients")
    @classmethod
    def _rising(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        if list(given) != sorted(set(given)):
            raise InvalidInput("growth_clients", given, "rising numbers")
        return given


class Scale(Config):
    """Options of the benchmark of several processes."""

    clients: Count = Field(default=8, description="Clients of the measurement of time; the processes divide them.")
    batch: Count = Field(default=128, description="Images per client and round, of the measurement of time.")
    rounds: Count = Field(
        default=10, description="Rounds of one measurement; what a run does once is spread over them."
    )
    repeats: Count = Field(default=2, description="Measurements by the same processes, of which the median is taken.")
    turns: Count = Field(
        default=3, description="How often each number of processes is started, in turn; the median is taken."
    )
    processes: tuple[Count, ...] = Field(
        default=(1, 2), min_length=1, description="Numbers of processes, each on one core."
    )
    memory_clients: int = Field(default=0, ge=0, description="Clients of the measurement of memory, 100 say; 0: none.")
    memory_examples: Count = Field(default=8, description="Images per client, of the measurement of memory.")
    methods: tuple[Trained, ...] = Field(default=("sgp", "tracked"), description="Whose memory: SGP, TrackedHGP.")
    model: ModelName = "emnist"
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


class Training(Config):
    """Options of the benchmark of training."""

    clients: tuple[Several, ...] = Field(default=(10, 20, 40), min_length=1, description="Numbers of clients.")
    batch: Count = Field(default=128, description="Images per client and round.")
    model: ModelName = "emnist"
    pushes: tuple[Count, ...] = Field(default=(1, 10), min_length=1, description="Push-sum steps per order of HGP.")
    rounds: Count = Field(default=6, description="Rounds of one measurement; what a run does once is spread over them.")
    repeats: Count = Field(default=3, description="Measurements, of which the median is taken.")
    product: Count = Field(default=3000, description="Rows and columns of the matrices of the product.")
    at_a_time: int = Field(default=1, ge=0, description="Clients computed at a time; 0 for all.")
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


SUMMARIES = {
    Memory: "Memory of the hypergradient of a large model.",
    Rounds: "Time of a round, against a Python loop and by number of clients.",
    Scale: "What a second process is worth: time and memory of a large model.",
    Training: "Speed of training a large model, as a share of a matrix product's.",
}
BENCHES = [
    Experiment(name := options.__name__.lower(), summary, options, defer(f"hyperpush.bench.{name}:run"))
    for options, summary in SUMMARIES.items()
]
