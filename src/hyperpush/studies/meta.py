"""Decentralized meta-learning: clients agree on a representation on which heads of new tasks need few examples.

Hypers are the layers of the representation, params the heads of all clients' tasks (tasks/representation.py;
docs/bilevel.md). The counterpart of figure 1 of "Locally differentially private decentralized stochastic bilevel
optimization", at a size for two cores.
"""

from math import comb
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from hyperpush.runs.experiment import Experiment
from hyperpush.studies.comparison import Compared, Comparison, Count, Positive

SOURCES = Literal["auto", "digits", "mnist", "emnist", "cifar10", "cifar100"]


class Meta(Comparison):
    """Options of meta-learning, beside those of every comparison."""

    data: SOURCES = Field(
        default="auto", description="Images; auto: CIFAR-10 if it is there, else scikit-learn's digits."
    )
    side: Count = Field(default=8, description="Images are shrunk to so many pixels a side.")
    clients: Annotated[int, Field(ge=2)] = Field(default=5, description="How many share the data.")
    tasks: Count = Field(default=4, description="Training tasks of each client.")
    ways: Annotated[int, Field(ge=2)] = Field(default=3, description="Classes of a task.")
    shots: Count = Field(default=3, description="Support examples of each class of a task.")
    queries: Count = Field(default=6, description="Query examples of each class of a training task.")
    new_classes: Annotated[int, Field(ge=2)] = Field(default=3, description="Classes that no training task has.")
    test_tasks: Count = Field(default=50, description="New tasks of known classes, and as many of new classes.")
    test_queries: Count = Field(default=15, description="Query examples of each class of a new task.")
    widths: tuple[Count, ...] = Field(default=(16,), min_length=1, description="Units of each layer, tanh after each.")
    l2: Positive = Field(default=0.03, description="L2 rate of a head.")
    loss: Literal["cross-entropy", "squares"] = Field(default="cross-entropy", description="Misfit of a head.")
    joint_steps: Count = Field(default=500, description="Steps of SGP that train one classifier of all known classes.")
    outer: tuple[Positive, ...] = Field(
        default=(0.3, 1.0, 3.0), min_length=1, description="Outer steps to try; rates of the joint classifier too."
    )
    inner: tuple[Positive, ...] = Field(
        default=(0.3, 1.0), min_length=1, description="Inner steps to try, in units of 1/λ_max of a client's Hessian."
    )


class Drawn(NamedTuple):
    """Images and which of them make up the tasks: of the clients, of new combinations of classes, of new classes."""

    inputs: Any
    labels: Any
    known: Any  # classes
    training: Any  # [clients, tasks, ways, shots + queries]
    tests: tuple[Any, Any]  # [tests, ways, shots + test_queries] each
    described: dict[str, Any]


def draw(config: Meta) -> Drawn:
    """Split images, classes and combinations of classes so that new tasks share none with training."""
    import numpy as np

    from hyperpush.errors import InvalidInput
    from hyperpush.studies.data.sources import available, load
    from hyperpush.tasks.representation import draw_tasks, prepared

    name = config.data
    if name == "auto":
        name = "cifar10" if available("cifar10") else "digits"
    found, generator = load(name), np.random.default_rng(config.seed)
    most = found.classes - config.ways - 1
    if not config.ways <= config.new_classes <= most:
        allowed = f"from {config.ways} (ways) to {most}, so that there are tasks of known and of new classes"
        raise InvalidInput("new_classes", config.new_classes, allowed)
    order = generator.permutation(found.classes)
    new, known = order[: config.new_classes], order[config.new_classes :]
    rows = {c: generator.permutation(np.flatnonzero(found.labels == c)) for c in order}
    # A fifth of the combinations of known classes, at most twenty, and of their images is for testing.
    unseen: set[frozenset[int]] = set()
    while len(unseen) < min(20, -(-comb(len(known), config.ways) // 5)):
        unseen.add(frozenset(generator.choice(len(known), config.ways, replace=False).tolist()))
    ends = {c: len(rows[c]) // 5 for c in known}
    each = config.shots + config.queries
    training = [
        draw_tasks(
            generator,
            [rows[c][ends[c] + k :: config.clients] for c in known],
            config.ways,
            each,
            config.tasks,
            never=unseen,
        )
        for k in range(config.clients)
    ]
    each, known_rows = config.shots + config.test_queries, [rows[c][: ends[c]] for c in known]
    tests = (
        draw_tasks(generator, known_rows, config.ways, each, config.test_tasks, only=unseen, again=True),
        draw_tasks(generator, [rows[c] for c in new], config.ways, each, config.test_tasks, again=True),
    )
    described = {
        "data": name,
        "known_classes": known.tolist(),
        "new_classes": new.tolist(),
        "training_images_per_client": config.tasks * config.ways * (config.shots + config.queries),
    }
    return Drawn(prepared(found.inputs, config.side), found.labels, known, np.stack(training), tests, described)


def run_meta(config: Meta, run: Any) -> dict[str, Any]:
    """References, then every method: accuracy on new tasks, by iteration and by floats."""
    import jax
    import jax.numpy as jnp

    import hyperpush as hp
    from hyperpush import networks
    from hyperpush.studies.comparison import Benchmark, compare, names, privately, table, tell
    from hyperpush.studies.comparison import draw as plot
    from hyperpush.tasks.representation import (
        Examples,
        curvature,
        examples,
        few_shot_accuracy,
        fit_head,
        representation,
    )

    network = networks.by_name(config.network, config.clients, config.seed)
    names(config, network)
    drawn = draw(config)
    task = representation(
        drawn.inputs,
        drawn.training,
        config.shots,
        jax.random.key(config.seed),
        widths=config.widths,
        l2=config.l2,
        loss=config.loss,
        common=True,
    )
    # Each new task by itself.
    tests = [
        (
            examples(drawn.inputs, each[:, None, :, : config.shots]),
            examples(drawn.inputs, each[:, None, :, config.shots :]),
        )
        for each in drawn.tests
    ]

    def measure(params: Any, hypers: Any) -> dict[str, Any]:
        """Means over clients, each with the representation it holds."""

        def one(hyper: Any):
            return [jnp.mean(few_shot_accuracy(hyper, *test, config.ways, config.l2, config.loss)) for test in tests]

        accuracy, new_classes = jax.vmap(one)(hypers)
        costs = jax.vmap(task.problem.outer_cost)(params, hypers, task.validation)
        return {
            "outer_cost": jnp.mean(costs),
            "accuracy": jnp.mean(accuracy),
            "accuracy_new_classes": jnp.mean(new_classes),
        }

    @jax.jit
    def measured(hypers: Any) -> dict[str, Any]:
        """The same with the best heads for a representation."""

        def heads(hyper: Any, support: Examples):
            by_task = jax.tree.map(lambda leaf: leaf.reshape(config.tasks, -1, *leaf.shape[1:]), support)
            return jax.vmap(lambda own: fit_head(hyper, own, config.ways, config.l2, config.loss))(by_task)

        found = jax.vmap(heads)(hypers, task.train)
        return measure(jnp.broadcast_to(found.reshape(task.params.shape[1:]), task.params.shape), hypers)

    def reported(hypers: Any) -> dict[str, float]:
        return {key: float(value) for key, value in measured(hypers).items()}

    most = curvature(config.l2 / (config.clients * config.tasks), config.loss)

    def constants(clip: float, radius: float) -> Any:
        # What depends on the size of the heads has no bound but clipping.
        return hp.privacy.Constants(C_y=clip, C_b=clip, C_x=clip, R=radius, C_H=most, C_Jz=clip * radius)

    references = {"random": reported(task.hypers), "joint": joint(config, network, drawn, task.hypers, reported)}
    # A head sees one in k of a client's examples: its curvature is about that of one example over k.
    common = Benchmark(task, measure, inner_unit=config.tasks / curvature(0, config.loss), constants=constants)
    found = compare(config, run, network, common)
    private = privately(config, run, network, found, common)
    table(
        run, f"new tasks on {drawn.described['data']}", [{"method": name, **each} for name, each in references.items()]
    )
    table(run, "methods", [each.row for each in found])
    if private:
        table(run, "with privacy", private)
        tell(run, private)
    metrics = ("accuracy", "accuracy_new_classes", "outer_cost")
    levels = [level(name, each, found) for name, each in references.items() if "accuracy" in each]
    plot(run, "meta", [*found, *levels], metrics)
    return {
        **drawn.described,
        "rows": [each.row for each in found],
        "references": references,
        "privacy": {row["method"]: row for row in private} if private else None,
        "curves": [each.curve for each in found if each.curve is not None],
    }


def level(name: str, reference: dict[str, Any], found: list[Compared]) -> Compared:
    """A reference as a horizontal line along the methods' curves."""
    curves = [each.curve for each in found if each.curve is not None]
    ends = {x: [1, max([1, *(curve[x][-1] for curve in curves)])] for x in ("iterations", "floats_per_client")}
    values = {key: [value, value] for key, value in reference.items() if isinstance(value, float)}
    return Compared({"method": name}, {"method": name, **ends, **values})


def joint(config: Meta, network: Any, drawn: Drawn, layers: Any, reported: Any) -> dict[str, Any]:
    """One classifier of all known classes on all that clients have, trained by SGP from the same representation.

    Of the rates, the one whose representation gives the training tasks the least outer cost is taken, as with methods.
    """
    import jax.numpy as jnp
    import numpy as np

    import hyperpush as hp
    from hyperpush.errors import Diverged
    from hyperpush.problem import L2
    from hyperpush.tasks.representation import features, misfit

    def losses(params, hyper, batch):
        return misfit(config.loss, features(params[0], batch[0]) @ params[1], batch[1])

    chosen = drawn.training.reshape(config.clients, -1)
    number = np.zeros(drawn.labels.max() + 1, np.int32)
    number[drawn.known] = np.arange(len(drawn.known))
    data = jnp.asarray(drawn.inputs[chosen], jnp.zeros(()).dtype), jnp.asarray(number[drawn.labels[chosen]])
    heads = jnp.zeros((config.clients, config.widths[-1] + 1, len(drawn.known)))
    start = hp.per_client((layers, heads))
    task = hp.Task(inner=losses, outer=losses, penalty=L2(1e-3), params=start, hypers=0.0, train=data, validation=data)
    tried = []
    for rate in config.outer:
        try:
            trained = hp.train(task, hp.SGP(config.joint_steps, rate), network, key=config.seed)
        except Diverged:
            continue
        costs = {"floats_per_client": trained.costs.floats, "rounds": trained.costs.rounds, "settings": {"rate": rate}}
        tried.append({**reported(trained.params[0]), **costs})
    if not tried:
        return {"left_out": "diverged at every rate"}
    return min(tried, key=lambda each: each["outer_cost"])


EXPERIMENT = Experiment(
    "meta", "Decentralized meta-learning: few-shot accuracy of an agreed representation, by method.", Meta, run_meta
)
