"""How much memory the hyper-gradient of a large model takes, for all clients on one machine."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperpush.config import Config
from hyperpush.experiments.registry import Experiment

Method = Literal["hgp", "tracked", "automatic"]
L2 = 0.001


class Memory(Config):
    """Options of the benchmark of memory."""

    clients: int = Field(default=20, ge=2, description="Number of clients.")
    examples: int = Field(default=32, ge=1, description="Images per client, for training and for validation.")
    model: Literal["emnist", "influence"] = Field(
        default="emnist", description="A convolutional network of 2,278,334 parameters, or one of 13,750."
    )
    methods: tuple[Method, ...] = Field(
        default=("hgp", "tracked", "automatic"),
        min_length=1,
        description="HGP, TrackedHGP with given settings, or TrackedHGP as it is by default.",
    )
    batches: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(1, 0), min_length=1, description="Clients computed at a time; 0 for all at once."
    )
    steps: int = Field(default=2, ge=1, description="HGP's order and TrackedHGP's steps with given settings.")
    automatic_steps: int = Field(default=10, ge=1, description="TrackedHGP's steps, at most, by default.")
    pushes: int = Field(default=2, ge=1, description="Push-sum steps per order of HGP.")
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


def run_memory(config: Memory, run: Any) -> dict[str, Any]:
    """Measure every method with every batch, each in a process of its own."""
    from hyperpush.bench.timing import machine

    where, rows = machine(), []
    with run.progress("memory", len(config.methods) * len(config.batches)) as bar:
        for method in config.methods:
            for batch in config.batches:
                # In a fresh process nothing that ran before has left memory behind.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    row = process.submit(measure, config, method, batch).result()
                rows.append(row)
                run.record(**row)
                bar.advance()
    columns = [name.replace("megabytes", "MB").replace("_", " ") for name in rows[0]]
    title = f"{config.clients} clients of {rows[0]['parameters']:,} parameters"
    run.table(title, columns, [list(row.values()) for row in rows])
    return {"memory": rows, "machine": where}


def measure(config: Memory, method: Method, batch: int) -> dict[str, Any]:
    """One row: the memory that the states of all clients need, what was resident at the peak, and how long it took."""
    from time import perf_counter

    from hyperpush.bench.timing import peak_megabytes

    row: dict[str, Any] = {"method": method, "batch": batch}

    def everything():
        floor, estimate = prepare(config, method, batch or None)
        row.update(floor)
        estimate()  # compiles
        began = perf_counter()
        done = estimate()
        row["seconds"] = perf_counter() - began
        row["products"] = done.hessian_products
        row["seconds_per_product"] = row["seconds"] / max(done.hessian_products, 1)

    peak = peak_megabytes(everything)
    return {**row, "peak_megabytes": peak}


def prepare(config: Memory, method: Method, batch: int | None) -> tuple[dict[str, Any], Callable[[], Any]]:
    """What the states of all clients take, and a function that estimates the hyper-gradient."""
    import jax
    import jax.numpy as jnp

    import hyperpush as hp
    from hyperpush.data.batches import Data
    from hyperpush.engine.compiled import one_client
    from hyperpush.estimators.estimate import start
    from hyperpush.models import cnn
    from hyperpush.program import Within, program_of, traced

    n, model = config.clients, cnn.EMNIST if config.model == "emnist" else cnn.INFLUENCE
    first, second, third = jax.random.split(jax.random.key(config.seed), 3)

    def cost(params, hyper, batch):
        """Cross-entropy of logits that each client scales by class."""
        images, labels = batch
        chances = jax.nn.log_softmax(hyper * model.apply(params, images))
        return -jnp.mean(jnp.take_along_axis(chances, labels[:, None], axis=1))

    def examples(key):
        shape = (n, config.examples)
        images, labels = jax.random.split(key)
        return jax.random.normal(images, (*shape, model.size, model.size)), jax.random.randint(
            labels, shape, 0, model.classes
        )

    estimator = {
        "hgp": hp.HGP(config.steps, config.pushes, 0.01),
        "tracked": hp.TrackedHGP(config.steps, 0.01, 1, tolerance=None, acceleration=1),
        "automatic": hp.TrackedHGP(config.automatic_steps),
    }[method]
    problem = hp.Problem(cost, cost).with_l2(L2)
    params = jax.tree.map(lambda leaf: jnp.tile(leaf, (n,) + (1,) * leaf.ndim), model.init(first))
    hypers, data = jnp.ones((n, model.classes)), Data(examples(second), examples(third))

    program = program_of(estimator, problem)
    assert isinstance(program, Within)
    state = traced(program.enter, n, one_client(data), one_client(start(params, hypers)))[0]
    parameters, numbers = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, state))
    floor = {
        "parameters": parameters // n,
        "vectors": n * numbers // parameters,
        "floor_megabytes": 4 * n * numbers / 2**20,
    }

    def estimate():
        done = hp.hypergradient(
            *(
                problem,
                estimator,
                hp.networks.RandomDirected(n, seed=config.seed),
                params,
                hypers,
                data.inner,
                data.outer,
            ),
            jax.random.key(config.seed),
            batch=batch,
        )
        jax.block_until_ready(done.value)
        return done

    return floor, estimate


BENCH = Experiment("memory", "Memory of the hyper-gradient of a large model.", Memory, run_memory)
