"""Options of the benchmarks; what they run is imported when it runs."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Seed, Several, option

ModelName = Annotated[
    Literal["emnist", "influence"],
    Field(description="A convolutional network of 2,278,334 parameters, or one of 13,750."),
]
Estimated = Literal["hgp", "tracked", "automatic"]
Trained = Literal["sgp", "tracked"]


class Memory(Config):
    """Options of the benchmark of memory."""

    clients: Several = option(20, "Number of clients.")
    examples: Count = option(32, "Training images per client, and validation images.")
    model: ModelName = "emnist"
    methods: tuple[Estimated, ...] = option(
        ("hgp", "tracked", "automatic"), "HGP; TrackedHGP with given settings; with its defaults.", min_length=1
    )
    batches: tuple[Annotated[int, Field(ge=0)], ...] = option((1, 0), "Clients at a time; 0: all.", min_length=1)
    steps: Count = option(2, "HGP's order, and TrackedHGP's steps with given settings.")
    pushes: Count = option(2, "Push-sum steps per order of HGP.")
    automatic_steps: Count = option(10, "TrackedHGP's steps, at most, as it is by default.")
    seed: Seed = option(0, "Decides the model, the images and the network.")


class Rounds(Config):
    """Options of the benchmark of rounds."""

    clients: tuple[Several, ...] = option((3, 100, 1000), "Numbers of clients to compare at.")
    widths: tuple[Several, ...] = option((6, 1000), "Numbers of parameters to compare at.")
    pushes: tuple[Count, ...] = option((1, 10), "Push-sum steps per order of HGP.")
    examples: tuple[Count, ...] = option((10, 100), "Examples per client; above width 100 the first.", min_length=1)
    growth_clients: tuple[Annotated[int, Field(ge=12)], ...] = option(
        (100, 1_000, 10_000, 100_000), "Numbers of clients on k-out graphs, from few to many."
    )
    growth_width: Several = option(6, "Number of parameters there.")
    seconds: Positive = option(0.5, "How long one measurement lasts, about.")
    repeats: Count = option(5, "Measurements of which the median is taken.")
    seed: Seed = option(0, "Decides the data and the networks.")

    @field_validator("growth_clients")
    @classmethod
    def _rising(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        if list(given) != sorted(set(given)):
            raise InvalidInput("growth_clients", given, "rising numbers")
        return given


class Scale(Config):
    """Options of the benchmark of several processes."""

    clients: Count = option(8, "Clients of the measurement of time; the processes divide them.")
    batch: Count = option(128, "Images per client and round, of the measurement of time.")
    rounds: Count = option(10, "Rounds of one measurement; what a run does once is spread over them.")
    repeats: Count = option(2, "Measurements by the same processes, of which the median is taken.")
    turns: Count = option(3, "How often each number of processes is started, in turn; the median is taken.")
    processes: tuple[Count, ...] = option((1, 2), "Numbers of processes, each on one core.", min_length=1)
    memory_clients: int = option(0, "Clients of the measurement of memory, 100 say; 0: none.", ge=0)
    memory_examples: Count = option(8, "Images per client, of the measurement of memory.")
    methods: tuple[Trained, ...] = option(("sgp", "tracked"), "Whose memory: SGP, TrackedHGP.")
    model: ModelName = "emnist"
    seed: Seed = option(0, "Decides the model, the images and the network.")


class Training(Config):
    """Options of the benchmark of training."""

    clients: tuple[Several, ...] = option((10, 20, 40), "Numbers of clients.", min_length=1)
    batch: Count = option(128, "Images per client and round.")
    model: ModelName = "emnist"
    pushes: tuple[Count, ...] = option((1, 10), "Push-sum steps per order of HGP.", min_length=1)
    rounds: Count = option(6, "Rounds of one measurement; what a run does once is spread over them.")
    repeats: Count = option(3, "Measurements, of which the median is taken.")
    product: Count = option(3000, "Rows and columns of the matrices of the product.")
    at_a_time: int = option(1, "Clients computed at a time; 0 for all.", ge=0)
    seed: Seed = option(0, "Decides the model, the images and the network.")


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
