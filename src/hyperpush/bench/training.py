"""How fast a large model is trained: an SGP round and a round of HGP against a large matrix product."""

from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]


class Training(Config):
    """Options of the benchmark of training."""

    clients: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        default=(10, 20, 40), min_length=1, description="Numbers of clients."
    )
    batch: Count = Field(default=128, description="Images per client and round.")
    model: Literal["emnist", "influence"] = Field(
        default="emnist", description="A convolutional network of 2,278,334 parameters, or one of 13,750."
    )
    pushes: tuple[Count, ...] = Field(default=(1, 10), min_length=1, description="Push-sum steps per order of HGP.")
    rounds: Count = Field(default=6, description="Rounds of one measurement; what a run does once is spread over them.")
    repeats: Count = Field(default=3, description="Measurements, of which the median is taken.")
    product: Count = Field(default=3000, description="Rows and columns of the matrices of the product.")
    at_a_time: int = Field(default=1, ge=0, description="Clients computed at a time; 0 for all.")
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


def run_training(config: Training, run: Any) -> dict[str, Any]:
    """Time every number of clients, the matrix product before and after each."""
    import jax

    from hyperpush.bench.timing import exponent, machine, peak_megabytes

    where, rows = machine(), []
    before: dict[str, tuple[int, float]] = {}  # clients and seconds of each kind of round, the number before
    with run.progress("training", len(config.clients)) as bar:
        for clients in config.clients:
            cases = prepare(config, clients)
            peaks = [peak_megabytes(task) for _, _, task in cases]  # compiles, too
            times: list[list[float]] = [[] for _ in cases]
            reference = []
            for _ in range(config.repeats):
                reference += [product_speed(config.product) for _ in range(3)]
                for own, (_, _, task) in zip(times, cases, strict=True):
                    began = perf_counter()
                    task()
                    own.append((perf_counter() - began) / config.rounds)
            reference += [product_speed(config.product) for _ in range(3)]
            for (label, operations, _), own, peak in zip(cases, times, peaks, strict=True):
                seconds, speed = median(own), median(reference)
                rows.append(
                    {
                        "round": label,
                        "clients": clients,
                        "seconds": seconds,
                        "gflops": operations / seconds / 1e9,
                        "product_gflops": speed,
                        "share": operations / seconds / 1e9 / speed,
                        "exponent": exponent(before[label], (clients, seconds)) if label in before else None,
                        "peak_megabytes": peak,
                    }
                )
                run.record(**rows[-1])
                before[label] = clients, seconds
            jax.clear_caches()
            bar.advance()
    run.table(
        f"{config.model}, batch {config.batch}",
        [name.replace("_", " ") for name in rows[0]],
        [list(r.values()) for r in rows],
    )
    return {"training": rows, "machine": where}


def operations_of(model: Any) -> int:
    """Additions and multiplications of one image's logits in convolutions and dense layers: 2 per weight and place."""
    total, side, depth = 0, model.size, model.colors
    for channels in model.channels:
        side = side - model.kernel + 1
        total += 2 * side**2 * model.kernel**2 * depth * channels
        side, depth = side // 2, channels
    units = (side**2 * depth, *model.hidden, model.classes)
    return total + sum(2 * a * b for a, b in pairwise(units))


def prepare(config: Training, clients: int) -> list[tuple[str, int, Any]]:
    """(what it is, operations per round of all clients, a task of `rounds` rounds).

    A gradient takes three times the operations of the logits (forward; backward to inputs and to weights), a product
    with the second derivative six times: the same again along the direction. What mixing takes is not counted.
    """
    import jax

    import hyperpush as hp
    from hyperpush.bench.images import MODELS, images

    # The outer cost is not what is measured: one image will do.
    task = images(config.model, clients, config.seed, config.batch, validation=1)
    network = hp.networks.RandomDirected(clients, seed=config.seed)
    options: Any = {"key": config.seed, "engine": hp.Simulate(clients_per_batch=config.at_a_time or None)}
    sgp = hp.SGP(config.rounds, 0.01, "gradient-after")

    def train() -> None:
        jax.block_until_ready(hp.train(task, sgp, network, **options).params)

    def estimate(estimator: Any) -> None:
        jax.block_until_ready(hp.hypergradient(task, estimator, network, **options).value)

    forward = operations_of(MODELS[config.model]) * clients * config.batch
    cases: list[tuple[str, int, Any]] = [("SGP", 3 * forward, train)]
    for pushes in config.pushes:
        estimator = hp.HGP(config.rounds, pushes, 0.01)
        cases.append((f"HGP, S = {pushes}", 6 * forward, lambda estimator=estimator: estimate(estimator)))
    return cases


def product_speed(size: int) -> float:
    """GFLOP/s of a product of two square float32 matrices."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, a))
    began = perf_counter()
    jax.block_until_ready(multiply(a, a))
    return 2 * size**3 / (perf_counter() - began) / 1e9


BENCH = Experiment(
    "training", "Speed of training a large model, as a share of a matrix product's.", Training, run_training
)
