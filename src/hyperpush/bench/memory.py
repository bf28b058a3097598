"""How much memory the hyper-gradient of a large model takes, all clients on one machine."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Method = Literal["hgp", "tracked", "automatic"]
STEP_SIZE = 0.01  # where it is given


class Memory(Config):
    """Options of the benchmark of memory."""

    clients: int = Field(default=20, ge=2, description="Number of clients.")
    examples: int = Field(default=32, ge=1, description="Training images per client, and validation images.")
    model: Literal["emnist", "influence"] = Field(
        default="emnist", description="A convolutional network of 2,278,334 parameters, or one of 13,750."
    )
    methods: tuple[Method, ...] = Field(
        default=("hgp", "tracked", "automatic"),
        min_length=1,
        description="HGP; TrackedHGP with given settings and one kept change; TrackedHGP as it is by default.",
    )
    batches: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(1, 0), min_length=1, description="Numbers of clients computed at a time; 0 for all at once."
    )
    steps: int = Field(default=2, ge=1, description="HGP's order, and TrackedHGP's steps with given settings.")
    pushes: int = Field(default=2, ge=1, description="Push-sum steps per order of HGP.")
    automatic_steps: int = Field(default=10, ge=1, description="TrackedHGP's steps, at most, as it is by default.")
    seed: int = Field(default=0, ge=0, description="Decides the model, the images and the network.")


class Case(NamedTuple):
    """An estimate to be made, and the numbers in the clients' states meanwhile."""

    parameters: int  # of each client
    numbers: int  # in the state of each client
    estimate: Callable[[], Any]


def run_memory(config: Memory, run: Any) -> dict[str, Any]:
    """Measure every method with every batch."""
    from hyperpush.bench.timing import machine

    where, rows = machine(), []
    with run.progress("memory", len(config.methods) * len(config.batches)) as bar:
        for method in config.methods:
            for batch in config.batches:
                # In a fresh process nothing that ran before has left memory behind.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    rows.append(process.submit(measure, config, method, batch).result())
                run.record(**rows[-1])
                bar.advance()
    columns = [name.replace("megabytes", "MB").replace("_", " ") for name in rows[0]]
    run.table(f"{config.clients} clients, {config.model}", columns, [list(row.values()) for row in rows])
    return {"memory": rows, "machine": where}


def measure(config: Memory, method: Method, batch: int) -> dict[str, Any]:
    """What the states of all clients take, the most that was resident from start to end, and the time once compiled."""
    from hyperpush.bench.timing import peak_megabytes

    row: dict[str, Any] = {"method": method, "batch": batch}

    def everything() -> None:
        case = prepare(config, method, batch or None)
        case.estimate()  # compiles
        began = perf_counter()
        products = case.estimate().costs.hessian_products
        seconds = perf_counter() - began
        row["parameters"] = case.parameters
        row["vectors"] = case.numbers // case.parameters
        row["states_megabytes"] = 4 * config.clients * case.numbers / 2**20
        row["products"] = products
        row["seconds_per_product"] = seconds / products

    row["peak_megabytes"] = peak_megabytes(everything)
    return row


def prepare(config: Memory, method: Method, batch: int | None) -> Case:
    """The hypergradient by scales of the logits, one for each class and client, on random images."""
    import jax

    import hyperpush as hp
    from hyperpush.bench.images import images
    from hyperpush.programs import HypergradientState, Scope, one_client, traced

    task = images(config.model, config.clients, config.seed, config.examples)
    network = hp.networks.RandomDirected(config.clients, seed=config.seed)
    estimator = {
        "hgp": hp.HGP(config.steps, config.pushes, STEP_SIZE),
        "tracked": hp.TrackedHGP(config.steps, STEP_SIZE, pushes=1, tolerance=None, acceleration=1),
        "automatic": hp.TrackedHGP(config.automatic_steps),
    }[method]

    def estimate():
        engine = hp.Simulate(clients_per_batch=batch)
        done = hp.hypergradient(task, estimator, network, key=config.seed, engine=engine)
        jax.block_until_ready(done.value)
        return done

    program = estimator.on(network).program(task.problem)
    assert isinstance(program, Scope)
    start = HypergradientState(task.params, task.hypers, task.hypers)
    state, _ = traced(program.enter, config.clients, *one_client((task.data, start)))
    return Case(_numbers(one_client(task.params)), _numbers(state), estimate)


def _numbers(tree: Any) -> int:
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(tree))


BENCH = Experiment("memory", "Memory of the hyper-gradient of a large model.", Memory, run_memory)
