"""Options of the benchmarks; what they run is imported when it runs."""

from typing import Annotated, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment, defer
from hyperpush.studies.options import Count, Positive, Seed, Several, option

ModelName = Annotated[
    Literal["emnist", "influence"],
    Field(description="A convolutional network of 2,278,334 parameters, or one of 13,750."),
]


class Memory(Config):
    """Memory of the hypergradient of a large model."""

    clients: Several = option(20, "Number of clients.")
    examples: Count = option(32, "Training images per client, and validation images.")
    model: ModelName = "emnist"
    batches: tuple[Annotated[int, Field(ge=0)], ...] = option((1, 0), "Clients at a time; 0: all.", min_length=1)
    seed: Seed = option(0, "Decides the model, the images and the network.")


class Rounds(Config):
    """Time of a round, against a Python loop and by number of clients."""

    clients: tuple[Several, ...] = option((3, 100, 1000), "Numbers of clients to compare at.")
    widths: tuple[Several, ...] = option((6, 1000), "Numbers of parameters to compare at.")
    examples: Count = option(10, "Examples per client.")
    growth_clients: tuple[Annotated[int, Field(ge=12)], ...] = option(
        (100, 1_000, 10_000, 100_000), "Numbers of clients on k-out graphs, from few to many."
    )
    seconds: Positive = option(0.5, "How long one measurement lasts, about.")
    repeats: Count = option(5, "Measurements of which the median is taken.")
    seed: Seed = option(0, "Decides the data and the networks.")


class Scale(Config):
    """What a second process is worth: time and memory of a large model."""

    method: Literal["sgp", "tracked"] = option("sgp", "A round of SGP, or of TrackedHGP.")
    clients: Count = option(8, "Number of clients, which the processes divide.")
    batch: Count = option(128, "Images per client and round.")
    rounds: Count = option(10, "Rounds of one measurement; what a run does once is spread over them.")
    turns: Count = option(3, "How often each number of processes is started, in turn; the median is taken.")
    processes: tuple[Count, ...] = option((1, 2), "Numbers of processes, each on one core.", min_length=1)
    model: ModelName = "emnist"
    seed: Seed = option(0, "Decides the model, the images and the network.")


class Training(Config):
    """Speed of training a large model, as a share of a matrix product's."""

    clients: tuple[Several, ...] = option((10, 20, 40), "Numbers of clients.", min_length=1)
    batch: Count = option(128, "Images per client and round.")
    model: ModelName = "emnist"
    rounds: Count = option(6, "Rounds of one measurement; what a run does once is spread over them.")
    repeats: Count = option(3, "Measurements, of which the median is taken.")
    seed: Seed = option(0, "Decides the model, the images and the network.")


class Peers(Config):
    """Long messages between two peers, against bare Zenoh."""

    megabytes: float = option(9.0, "Size of a message, in 10⁶ bytes.", gt=0, le=200)
    rounds: Count = option(20, "Rounds in a block.")
    blocks: Count = option(7, "Blocks of each kind, of which the median is taken.")
    secure: bool = option(True, "Whether both sides use mutual TLS.")


BENCHES: dict[str, Experiment] = {
    (name := options.__name__.lower()): Experiment(
        name, options.__doc__ or "", options, defer(f"hyperpush.bench.{name}:run")
    )
    for options in (Memory, Rounds, Scale, Training, Peers)
}
