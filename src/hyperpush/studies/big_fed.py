"""BiG-Fed on the karate club: do both costs fall together, and who has the lowest test loss (docs/big-fed.md)?

34 clients, each with a function of its own that follows from its place in the club's graph, regress it with linear
layers of which the middle one is everybody's. All methods start from the same layers and choose their steps from
equally many, by the validation loss averaged over rounds and seeds.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
REACH = 5.0  # inputs are from −5 to 5


class Tuned(Config):
    """What BiG-Fed and whom it is compared with choose from."""

    rounds: Annotated[int, Field(ge=10)] = Field(default=300, description="Rounds of every method.")
    seeds: Annotated[int, Field(ge=1)] = Field(default=5, description="Runs, each with draws of its own.")
    width: Annotated[int, Field(ge=1)] = Field(default=8, description="Width of the layers.")
    rates: tuple[Positive, ...] = Field(
        default=(0.03, 0.1, 0.3, 1.0), min_length=1, description="Inner steps to choose from."
    )
    outer_steps: tuple[Positive, ...] = Field(
        default=(0.003, 0.03), min_length=1, description="First outer steps to choose from."
    )
    outer_exponent: Annotated[float, Field(ge=0)] = Field(
        default=0.6, description="The outer step of round k is the first one / (k + 1)^this."
    )
    damping: Positive = Field(default=1.0, description="Added to the diagonal of every block.")
    solver_steps: Count = Field(default=20, description="Conjugate gradient steps of every solve with a block.")
    negatives: Positive = Field(default=5.0, description="Negative samples for each link.")
    seed: int = Field(default=0, ge=0, description="The first of the seeds.")
    precision: Literal["float32", "float64"] = "float32"


class BigFed(Tuned):
    """Options of the comparison on the karate club."""

    examples: Annotated[int, Field(ge=2)] = Field(
        default=50, description="Of each client, as often for training, validation and test."
    )
    multipliers: tuple[float, float] | Literal["raw"] = Field(
        default=(0.1, 0.6), description="Range of b in y = a·sin(bx); raw: the coordinate itself."
    )
    start: Positive = Field(default=0.25, description="Size of the first and last layer at the start, in units of 1.")
    same_start: bool = Field(default=True, description="Whether all clients start from the same layers.")
    clusters: tuple[Count, ...] = Field(default=(4, 8, 16), description="Of FeSEM and FL+HC.")
    network: str = Field(default="random-undirected", description="Name of the network of the form without a server.")
    frozen_rate: Positive = Field(default=0.03, description="Inner step of the runs with a frozen kernel.")

    @field_validator("multipliers")
    @classmethod
    def _ordered(cls, value: Any) -> Any:
        if value != "raw" and not 0 <= value[0] < value[1]:
            raise ValueError("two numbers, 0 ≤ low < high, or 'raw'")
        return value


class Club(NamedTuple):
    """Seeds on axis 0, clients on axis 1."""

    train: Any  # (inputs [seeds, clients, examples, 1], outputs [seeds, clients, examples])
    validation: Any
    test: Any
    params: Any
    kernels: Any


class Method(NamedTuple):
    """A method with all steps to choose from."""

    name: str
    steps: list[tuple[float, ...]]
    program: Callable[..., Any]  # from one choice of steps
    begin: Callable[[Any, Any], Any]  # the states from params and kernels
    loops: tuple[str, ...]  # to record, in turn
    network: Any  # None: a server
    model: Callable[[Any], Any]  # what has params and hyper in a recorded state


def functions(weights: Any, multipliers: Any, generator: Any) -> tuple[Any, Any]:
    """Amplitude and multiplier of each client: the coordinates of its node by DeepWalk."""
    from hyperpush.studies.data.deepwalk import embedding

    amplitude, multiplier = embedding(weights, 2, generator).T
    if multipliers != "raw":
        low, high = multipliers
        multiplier = low + (high - low) * (multiplier - multiplier.min()) / np.ptp(multiplier)
    return amplitude, multiplier


def club(config: BigFed, weights: Any, seed: int) -> Club:
    """One seed's functions, examples and start; layers as PyTorch starts them, the outer two `start` times as large."""
    generator, n = np.random.default_rng(seed), len(weights)
    amplitude, multiplier = functions(weights, config.multipliers, generator)

    def examples() -> tuple[Any, Any]:
        inputs = generator.uniform(-REACH, REACH, (n, config.examples))
        return inputs[..., None], amplitude[:, None] * np.sin(multiplier[:, None] * inputs)

    train, validation, test = (examples() for _ in range(3))
    width = config.width
    layers = generator.uniform(-1, 1, (n, width, 2)) * np.array([1, width**-0.5]) * config.start
    kernel = generator.uniform(-1, 1, (width, width)) * width**-0.5
    params = np.broadcast_to(layers[:1], layers.shape) if config.same_start else layers
    return Club(train, validation, test, params, np.broadcast_to(kernel, (n, width, width)))


def rewired(weights: Any, generator: Any) -> Any:
    """A graph in which everybody has as many neighbors as before, but others."""
    import networkx as nx

    graph = nx.from_numpy_array(weights)
    nx.double_edge_swap(graph, 10 * graph.number_of_edges(), 10**6, seed=generator)
    return nx.to_numpy_array(graph, nodelist=range(len(weights)))


def problem(outer: Any = None) -> Any:
    """The costs of the paper's clients; their own outer cost, if no other is given, is that of training."""
    import hyperpush as hp
    from hyperpush.big_fed.bilinear import loss, mean_square, model
    from hyperpush.problem import ModelLoss

    return hp.programs.Problem(ModelLoss(model, loss), mean_square if outer is None else outer, outer_on="train")


def cosine(config: Tuned, weights: Any, **options: Any) -> Any:
    """The cost of a graph that the paper's clients sit on."""
    import hyperpush as hp
    from hyperpush.big_fed.bilinear import represent

    return hp.big_fed.Cosine(hp.big_fed.Graph(weights), config.negatives, represent=represent, **options)


def big_fed(config: Tuned, name: str, outer: Any, form: Any = "products", network: Any = None) -> Method:
    """BiG-Fed with every pair of steps and the cost of a graph; None: kernels from the clients' own costs."""
    import hyperpush as hp
    from hyperpush.algorithms.base import LOOP

    def program(rate: Any, first: Any) -> Any:
        falling = hp.schedule("power", first, config.outer_exponent)
        options = {"damping": config.damping, "solver_steps": config.solver_steps}
        return hp.big_fed.BiGFed(config.rounds, falling, rate, form, **options).program(problem(outer))

    steps = [(rate, first) for rate in config.rates for first in config.outer_steps]
    return Method(name, steps, program, hp.algorithms.BilevelState, (LOOP,), network, lambda state: state)


def solver(
    config: Tuned, name: str, make: Callable[[Any], Any], loops: tuple[str, ...], clustered: bool = False
) -> Method:
    """A method with an inner step only, and as many of them to choose from as BiG-Fed has pairs."""
    from hyperpush.inner.base import InnerState

    count = len(config.rates) * len(config.outer_steps)
    steps = [(float(rate),) for rate in np.geomspace(min(config.rates), max(config.rates), count)]

    def program(rate: Any) -> Any:
        return make(rate).program(problem())

    def model(state: Any) -> Any:
        return state.learner if clustered else state

    return Method(name, steps, program, InnerState, loops, None, model)


def local_and_averaged(config: Tuned) -> list[Method]:
    """Everybody alone, and one model for all."""
    import hyperpush as hp

    return [
        solver(config, "Local", lambda rate: hp.LocalSGD(config.rounds, rate), ("LocalSGD",)),
        solver(config, "FedAvg", lambda rate: hp.FedAvg(config.rounds, rate), ("FedAvg",)),
    ]


def methods(config: BigFed, weights: Any) -> list[Method]:
    """Everybody who takes part."""
    import hyperpush as hp
    from hyperpush.big_fed.strangers import check_strangers
    from hyperpush.errors import InvalidInput

    n = len(weights)
    if max(config.clusters, default=1) > n:
        raise InvalidInput("clusters", max(config.clusters), f"at most {n}, the clients")
    near = cosine(config, weights)
    other = cosine(config, rewired(weights, np.random.default_rng(config.seed)))
    peers = hp.networks.by_name(config.network, n, config.seed)
    check_strangers(near, peers, config.rounds, stride=hp.big_fed.BiGFed(config.rounds, 1.0, 1.0, "peers").exchanges)
    found = [
        big_fed(config, "BiG-Fed", near),
        big_fed(config, "BiG-Fed, no server", near, "peers", peers),
        big_fed(config, "BiG-Fed, rewired graph", other),
        big_fed(config, "kernel from own costs", None),
        *local_and_averaged(config),
    ]
    for k in config.clusters:
        fesem, flhc = ("first", "FeSEM"), ("together", "split", "apart")
        found += [
            solver(
                config, f"FeSEM, {k}", lambda rate, k=k: hp.big_fed.FeSEM(config.rounds, rate, clusters=k), fesem, True
            ),
            solver(
                config, f"FL+HC, {k}", lambda rate, k=k: hp.big_fed.FLHC(config.rounds, rate, clusters=k), flhc, True
            ),
        ]
    return found


def curves(method: Method, made: Club) -> tuple[Any, Any, Any]:
    """Mean squared errors [steps, seeds, rounds, 3], means over clients; and the last params and hypers.

    The three are of training, validation and test. All steps and seeds are one compiled run.
    """
    import jax
    import jax.numpy as jnp

    import hyperpush as hp
    from hyperpush.big_fed.bilinear import mean_square

    # Nobody asks a server for its links.
    network = method.network or hp.networks.FullyConnected(made.params.shape[1])

    def record(state: Any, ctx: Any) -> Any:
        at = method.model(state)
        parts = (ctx.data.sets[name] for name in ("train", "validation", "test"))
        return jnp.stack([mean_square(at.params, at.hyper, part) for part in parts])

    def one(steps: Any, made: Club) -> Any:
        data = hp.programs.Data({"train": made.train, "validation": made.validation, "test": made.test}, "train")
        states, history = hp.programs.evaluate(
            method.program(*steps),
            network,
            method.begin(made.params, made.kernels),
            data,
            jax.random.key(0),
            record=dict.fromkeys(method.loops, record),
        )
        errors = jnp.concatenate([history[loop] for loop in method.loops]).mean(1)
        return errors, states.params, states.hyper

    steps = tuple(jnp.asarray(each) for each in zip(*method.steps, strict=True))
    both = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    return jax.tree.map(np.asarray, jax.jit(both)(steps, made))


def together(config: BigFed, weights: Any, made: Club) -> tuple[Any, Any]:
    """Inner and outer cost [seeds, rounds] while everybody trains alone and the kernel is frozen."""
    import jax

    import hyperpush as hp
    from hyperpush.inner.base import InnerState

    joint = cosine(config, weights)
    costs, network = problem(joint), hp.networks.FullyConnected(len(weights))
    program = hp.LocalSGD(config.rounds, config.frozen_rate).program(costs)

    def record(state: Any, ctx: Any) -> Any:
        at = state.params, state.hyper
        return costs.inner_cost(*at, ctx.data.train), joint.represent(*at)

    @jax.jit
    @jax.vmap
    def run(made: Club) -> Any:
        states, data = InnerState(made.params, made.kernels), hp.programs.Data({"train": made.train}, "train")
        _, history = hp.programs.evaluate(
            program, network, states, data, jax.random.key(0), record={"LocalSGD": record}
        )
        inner, shown = history["LocalSGD"]
        return inner.mean(1), jax.vmap(lambda each: joint.cost(each, 0, expected=True))(shown)

    inner, outer = run(made)
    return np.asarray(inner), np.asarray(outer)


def best_of(found: Any) -> int:
    """The choice of steps with the lowest validation loss over rounds and seeds; one that diverged is none."""
    score = found[..., 1].mean((1, 2))
    if not np.isfinite(score).any():
        from hyperpush.errors import InvalidInput

        raise InvalidInput("rates", "diverges with every choice of steps", "smaller ones")
    return int(np.nanargmin(score))


def run_big_fed(config: BigFed, run: Any) -> dict[str, Any]:
    """Both figures: a row for each method and seed, and the correlation of the two costs."""
    import jax
    import jax.numpy as jnp
    import networkx as nx

    weights = nx.to_numpy_array(nx.karate_club_graph(), weight=None)  # pyright: ignore[reportArgumentType]
    seeds = range(config.seed, config.seed + config.seeds)
    everyone = methods(config, weights)
    clubs = [club(config, weights, seed) for seed in seeds]
    made = jax.tree.map(lambda *each: jnp.asarray(np.stack(each), jnp.zeros(()).dtype), *clubs)
    inner, outer = together(config, weights, made)
    correlations = [float(np.corrcoef(*pair)[0, 1]) for pair in zip(inner, outer, strict=True)]

    rows, summary, kept = [], [], {}
    with run.progress("methods", len(everyone)) as bar:
        for method in everyone:
            found, _, _ = curves(method, made)
            place = best_of(found)
            test = kept[method.name] = found[place, :, :, 2]
            for seed, curve in zip(seeds, test, strict=True):
                rows.append({"method": method.name, "seed": seed, "test_loss": curve, "final": curve[-1]})
                run.record(**rows[-1])
            behind = test[:, -1] - kept["BiG-Fed"][:, -1]
            summary.append(
                {
                    "method": method.name,
                    "final": test[:, -1].mean(),
                    "spread": test[:, -1].std(),
                    "behind_big_fed": behind.mean(),
                    "standard_error": behind.std(ddof=1) / len(behind) ** 0.5 if len(behind) > 1 else None,
                    "seeds_behind": int((behind > 0).sum()),
                    "mean_over_rounds": test.mean(),
                    "steps": " ".join(f"{step:.3g}" for step in method.steps[place]),
                    "at_edge": place_at_edge(method.steps, place),
                }
            )
            bar.advance()
    shown = [[plain(each) for each in row.values()] for row in summary]
    run.table(f"test loss after {config.rounds} rounds, {config.seeds} seeds", list(summary[0]), shown)
    run.console.print(f"inner and outer cost, kernel frozen: correlation {np.mean(correlations):.3f}")
    _draw(run, inner, outer, kept)
    return {
        "rows": rows,
        "correlation_inner_outer": float(np.mean(correlations)),
        "correlation_by_seed": correlations,
        "frozen": {"inner": inner.mean(0), "outer": outer.mean(0)},
        "summary": summary,
    }


def plain(value: Any) -> Any:
    """A Python number for a NumPy one."""
    return value.item() if isinstance(value, np.generic) else value


def place_at_edge(steps: list[tuple[float, ...]], place: int) -> bool:
    """Whether the best choice has the smallest or largest of some step that there were more than two of."""
    return any(len(set(each)) > 2 and each[place] in (min(each), max(each)) for each in zip(*steps, strict=True))


def _draw(run: Any, inner: Any, outer: Any, kept: dict[str, Any]) -> None:
    from hyperpush.runs.report.figures import Curve, error_curves, panels

    rounds = np.arange(1, inner.shape[1] + 1)
    figure, (axis,) = panels()
    frozen = [
        Curve(f"{name} cost", rounds, each.mean(0), each.std(0)) for name, each in (("inner", inner), ("outer", outer))
    ]
    error_curves(axis, frozen, x_label="rounds", y_label="cost, kernel frozen")
    run.figure("inner-and-outer", figure)
    figure, (axis,) = panels()
    tested = [Curve(name, rounds, each.mean(0), each.std(0)) for name, each in kept.items()]
    error_curves(axis, tested, x_label="rounds", y_label="test loss", log_x=True)
    axis.legend(fontsize=5)
    run.figure("test-loss", figure)


EXPERIMENT = Experiment(
    "big-fed",
    "BiG-Fed on the karate club against FedAvg, FeSEM, FL+HC and training alone, all tuned alike.",
    BigFed,
    run_big_fed,
)
