"""Which training examples help or hurt everyone: predicted without moving data, checked by retraining without them.

The counterpart of section 5.2 and appendix A.2 of Terashita and Hara, "Decentralized hyper-gradient computation over
time-varying directed networks"; then groups, whole clients, damping, and a hunt for wrong labels (docs/influence.md).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.errors import InvalidInput
from hyperpush.runs.config import Config
from hyperpush.runs.experiment import Experiment

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
MILESTONES = (0.6, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.998, 0.9998)  # of the steps: the rate falls tenfold
PAPER = {  # table 4 there, by model and whether mini-batches were used
    ("logistic", False): {"r2": 0.99, "f1": 1.00},
    ("cnn", False): {"r2": 0.53, "f1": 1.00},
    ("cnn", True): {"r2": 0.41, "f1": 0.91},
}
WORST = {"worst_10": 0.1, "worst_20": 0.2}  # shares of a client's examples in which wrong labels are looked for
TIMED = 5  # runs of each kind, of which the median counts


class Hunt(Config):
    """The hunt for wrong labels on scikit-learn's digits."""

    seeds: int = Field(default=3, ge=0, description="How often, with data and flips of their own; 0: not at all.")
    clients: Annotated[int, Field(ge=2)] = Field(default=5, description="Number of clients.")
    noisy: Count = Field(default=2, description="How many of them have wrong labels.")
    share: float = Field(default=0.1, gt=0, lt=1, description="Share of their labels that is wrong.")
    kinds: tuple[Literal["random", "systematic"], ...] = Field(
        default=("random", "systematic"),
        min_length=1,
        description="Wrong labels: random ones, or those of neighbours in the order of labels become the next label.",
    )
    damping: float = Field(default=0.01, ge=0, description="Added to the mean Hessian.")
    steps: Count = Field(default=2000, description="Steps of stochastic gradient push.")
    rate: Positive = Field(default=0.5, description="Its first learning rate.")
    l2: Positive = Field(default=1e-3, description="L2 rate of the softmax regression.")

    @model_validator(mode="after")
    def _enough_clients(self) -> "Hunt":
        if self.noisy > self.clients:
            raise InvalidInput("hunt.noisy", self.noisy, f"at most {self.clients}, the clients")
        return self


class InfluenceStudy(Config):
    """Options of the study of influence; what is left out depends on the model."""

    model: Literal["logistic", "cnn"] = Field(default="logistic", description="What is trained.")
    clients: Annotated[int, Field(ge=2)] = Field(default=3, description="Number of clients.")
    network: str = Field(default="random-directed", description="Name of the network.")
    network_options: dict[str, Any] = Field(default={}, description="Options of the network, such as probability.")
    examples: Annotated[int, Field(ge=2)] = Field(
        default=100, description="Logistic regression: training examples per client, and as many for validation."
    )
    data: Literal["auto", "emnist", "mnist", "digits"] = Field(
        default="auto",
        description="CNN: images of digits; auto is EMNIST if HYPERPUSH_DATA has it, else scikit-learn's.",
    )
    images: Annotated[int, Field(ge=20)] = Field(
        default=600, description="CNN: images in all, of which 60 % are for training and 20 % for validation."
    )
    concentration: Positive = Field(default=0.4, description="CNN: of the Dirichlet split of each label's images.")
    steps: Count | None = Field(default=None, description="Steps of SGP: 5000, CNN 1000.")
    rate: Positive | None = Field(default=None, description="Its first learning rate: 2, CNN 0.05.")
    batches: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1, description="Batch sizes to train with, 0 for all examples: [0], CNN [0, 64]."
    )
    l2: Annotated[float, Field(ge=0)] | None = Field(default=None, description="L2 rate: 0.01, CNN 0.001.")
    removals: Count | None = Field(default=None, description="Examples to remove one by one: 50, CNN 20.")
    at_once: Count | None = Field(default=None, description="Retrainings side by side: 64, CNN 1.")
    damping: float = Field(default=0.0, ge=0, description="Added to the mean Hessian.")
    dampings: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 0.01, 0.1, 1.0), description="Others, whose effect is measured."
    )
    order: Count | None = Field(default=None, description="HGP's order, and most steps of TrackedHGP: 500, CNN 1000.")
    pushes: Count = Field(default=100, description="HGP's pushes per order.")
    step: Positive | None = Field(default=None, description="HGP's step: 1, CNN 0.05.")
    unrolled: bool = Field(default=True, description="Also differentiate the training run itself, by ITDBackward.")
    groups: tuple[Count, ...] = Field(default=(5, 20, 60), description="Sizes of groups to remove together.")
    leave: bool = Field(default=True, description="Also let every client leave once.")
    hunt: Hunt = Hunt()
    seed: int = Field(default=0, ge=0, description="Decides the data, the network and every draw.")
    precision: Literal["float32", "float64"] = "float32"

    def chosen(self) -> "InfluenceStudy":
        """With the model's own values for all that was left out."""
        cnn = self.model == "cnn"
        own: dict[str, Any] = {
            "steps": 1000 if cnn else 5000,
            "rate": 0.05 if cnn else 2.0,
            "batches": (0, 64) if cnn else (0,),
            "l2": 1e-3 if cnn else 1e-2,
            "removals": 20 if cnn else 50,
            "at_once": 1 if cnn else 64,  # convolutions of one run fill the cores
            "order": 1000 if cnn else 500,
            "step": 0.05 if cnn else 1.0,
        }
        return self.model_copy(update={name: value for name, value in own.items() if getattr(self, name) is None})


def softmax_losses(params, rate, examples):
    """Cross-entropy of every example under softmax regression."""
    import optax

    inputs, labels = examples
    scores = inputs.reshape(len(inputs), -1) @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def cnn_losses(model):
    """Cross-entropy of every image under a CNN."""
    import optax

    def losses(params, rate, examples):
        images, labels = examples
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels)

    return losses


def l2(params, rate):
    """½·rate·‖params‖²."""
    import jax.numpy as jnp
    import optax

    return 0.5 * rate * jnp.asarray(optax.tree.norm(params, squared=True))


def images_of(config: InfluenceStudy) -> Any:
    """Digits only, as many as asked for."""
    import numpy as np

    from hyperpush.studies.data.sources import available, load

    name = config.data
    if name == "auto":
        name = "emnist" if available("emnist") else "digits"
    found = load(name)
    digits = np.flatnonzero(found.labels < 10)
    if len(digits) < config.images:
        raise InvalidInput("images", config.images, f"at most {len(digits)}, the digits in {name}")
    generator = np.random.default_rng(config.seed)
    found = found.rows(np.sort(generator.choice(digits, config.images, replace=False)))
    if name == "digits":  # 8×8 pixels are too few for two convolutions
        found = found._replace(inputs=found.inputs.repeat(2, axis=1).repeat(2, axis=2))
    return found


def task_of(config: InfluenceStudy) -> tuple[Any, str]:
    """The task before training, and what its data are."""
    import jax
    import numpy as np

    import hyperpush as hp

    rate = config.l2 or 0.0
    if config.model == "logistic":
        made = hp.tasks.logistic(config.clients, config.seed, examples=config.examples, rate=rate)
        return made, f"synthetic, {config.examples} examples per client"

    from hyperpush.studies.data.partition import dirichlet, split, stack
    from hyperpush.studies.models.cnn import CNN, INFLUENCE

    found, generator = images_of(config), np.random.default_rng(config.seed + 1)
    parts = split(dirichlet(found.labels, config.clients, config.concentration, generator), generator)
    model = INFLUENCE if found.inputs.shape[1] == INFLUENCE.size else CNN((20, 20), (), 10, size=16, kernel=3)
    start = model.init(jax.random.key(config.seed))
    losses, (train, validation) = cnn_losses(model), (stack(found, part) for part in (parts.train, parts.validation))
    made = hp.Task(
        inner=losses, outer=losses, penalty=l2, params=start, hypers=rate, train=train, validation=validation
    )
    return made, f"{config.images} digits of {found.note}"


def solver_of(steps: int, rate: float, batch: int) -> Any:
    """SGP whose rate falls tenfold at the paper's milestones, in proportion."""
    import hyperpush as hp

    at = tuple(sorted({round(share * steps) for share in MILESTONES}))
    return hp.SGP(steps, hp.schedule("milestones", rate, at=at), batch_size=batch or None)


def run_influence(config: InfluenceStudy, run: Any) -> dict[str, Any]:
    """Predict, retrain, compare; then groups and clients, and the hunt."""
    import jax

    import hyperpush as hp
    from hyperpush.checks import check_integer
    from hyperpush.studies.data.sources import load

    config = config.chosen()
    if config.hunt.seeds:  # three examples each at least: to train, to validate, to test
        check_integer("hunt.clients", config.hunt.clients, minimum=2, maximum=len(load("digits").labels) // 3)
    network = hp.networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    task, described = task_of(config)
    first_key, second_key = jax.random.split(jax.random.key(config.seed))
    assert config.batches is not None
    cases = [
        _case(_trained(config, run, task, network, first_key, second_key, batch), batch, place == 0)
        for place, batch in enumerate(config.batches)
    ]
    first = cases[0]
    _report(config, run, cases, described)
    result = {
        "model": config.model,
        "data": described,
        **{name: first[name] for name in ("r2", "f1", "kendall", "spearman", "pairs", "timing")},
        "cases": cases,
    }
    if config.hunt.seeds:
        result["label_noise"] = _hunts(config, run)
    return result


@dataclass(frozen=True)
class _Trained:
    """One way of training, and where it led."""

    config: InfluenceStudy
    run: Any
    task: Any  # before training
    network: Any
    solver: Any
    training_key: Any
    key: Any  # of the estimates
    there: Any  # the task at the params reached

    def retrained(self, weights: list[Any], progress: Any = None) -> Any:
        """Σ_k F_k after training with each of these weights, on the links and mini-batches of the training run."""
        from hyperpush import influence

        options: Any = {"at_once": self.config.at_once or 1, "progress": progress}
        return influence.retrain(self.task, self.solver, self.network, weights, key=self.training_key, **options).sum(1)

    def changed(self, weights: list[Any], label: str) -> Any:
        """How retraining with each of these weights changes Σ_k F_k."""
        size = _size(self.solver.batch_size)
        with self.run.progress(f"retraining without {label}, {size}", len(weights)) as bar:
            return self.retrained(weights, bar.update) - self.unchanged

    @cached_property
    def unchanged(self) -> float:
        """Σ_k F_k after training with everything."""
        from hyperpush import influence

        return self.retrained([influence.without(self.task)])[0]


def _size(batch: int | None) -> str:
    return f"batches of {batch}" if batch else "full batch"


def _trained(
    config: InfluenceStudy, run: Any, task: Any, network: Any, training_key: Any, key: Any, batch: int
) -> _Trained:
    import hyperpush as hp

    assert config.steps
    assert config.rate
    solver = solver_of(config.steps, config.rate, batch)
    with run.progress(f"training, {_size(batch)}", config.steps) as bar:
        told = hp.hooks.Progress(lambda _, done, total: bar.update(done))
        there = hp.train(task, solver, network, key=training_key, hooks=(told,)).task
    return _Trained(config, run, task, network, solver, training_key, key, there)


def _case(trained: _Trained, batch: int, write: bool) -> dict[str, Any]:
    """One way of training: its predictions against retraining."""
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    config, run = trained.config, trained.run
    assert config.removals
    assert config.order
    tracked = hp.TrackedHGP(config.order)
    found = influence.scores(trained.there, tracked, trained.network, key=trained.key, damping=config.damping)
    for sentence in found.warnings:
        run.console.print(f"warning: {sentence}")
    if write:
        _write(run, found)
        run.save_models("inner-solution", trained.there.params)
    places = found.top(config.removals)
    removals = [influence.without(trained.task, [place]) for place in places]
    actual = trained.changed(removals, "single examples")

    def predicted(scores):
        return np.array([scores.examples[client][number] for client, number in places])

    pairs = np.stack([predicted(found), actual], 1)
    case = {
        "batch": batch,
        "examples": [len(own) for own in found.examples],
        "damping": config.damping,
        "curvature": None if found.curvature is None else found.curvature._asdict(),
        "warnings": found.warnings,
        **influence.agreement(pairs[:, 0], actual),
        "paper": PAPER.get((config.model, bool(batch))),
        "pairs": pairs,
        "rounds": found.estimate.costs.rounds,
        "floats_per_client": found.estimate.costs.floats,
        "methods": _methods(trained, predicted, actual),
        "timing": _timing(trained, removals) if write and not batch else None,
    }
    if write:
        case |= _groups(trained, found)
    run.record(**case)
    return case


def _methods(trained: _Trained, predicted: Any, actual: Any) -> list[dict[str, Any]]:
    """Other dampings and estimators on the same removals."""
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    config, there = trained.config, (trained.there, trained.key)
    assert config.order
    assert config.step
    ways: list[tuple[float, Any, tuple[Any, Any]]] = [
        (damping, hp.TrackedHGP(config.order), there) for damping in config.dampings
    ]
    ways.append((0.0, hp.HGP(config.order, config.pushes, config.step, trained.solver.batch_size), there))
    if config.unrolled:  # from the start, on the links of the training run
        start = (trained.task, trained.training_key)
        ways.append((0.0, hp.hypergradients.ITDBackward(trained.solver), start))
    rows = []
    with trained.run.progress("estimators", len(ways)) as bar:
        for damping, estimator, (task, key) in ways:
            name = type(estimator).__name__
            row: dict[str, Any] = {"method": name, "damping": damping}
            try:
                scores = influence.scores(task, estimator, trained.network, key=key, damping=damping, curvature_steps=0)
                guess = predicted(scores)
                if not np.all(np.isfinite(guess)):
                    raise hp.Diverged(name, config.order, "numbers are not finite")
                slope = float(guess @ actual / (guess @ guess)) if np.any(guess) else None
                row |= {**influence.agreement(guess, actual), "slope": slope, "rounds": scores.costs.rounds}
            except hp.Diverged as error:
                row["failed"] = str(error)
            rows.append(row)
            bar.advance()
    return rows


def _timing(trained: _Trained, removals: list[Any]) -> dict[str, Any] | None:
    """Seconds of one retraining and of all together, compiled before; taken in turn, medians of a few."""
    import time

    import numpy as np

    if trained.config.model == "cnn":  # as long as everything else together
        return None
    seconds: dict[str, list[float]] = {"one": [], "all": []}
    for _ in range(TIMED):
        for name, weights in (("one", removals[:1]), ("all", removals)):
            begun = time.perf_counter()
            trained.retrained(weights)
            seconds[name].append(time.perf_counter() - begun)
    one, together = (float(np.median(seconds[name])) for name in ("one", "all"))
    return {"one": one, "all": together, "ratio": together / one, "removals": len(removals)}


def _groups(trained: _Trained, found: Any) -> dict[str, Any]:
    """Groups of random and of the most harmful examples, and whole clients."""
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    config = trained.config
    generator = np.random.default_rng(config.seed)
    places = [(client, number) for client, own in enumerate(found.examples) for number in range(len(own))]
    worst = sorted(places, key=lambda place: found.examples[place[0]][place[1]])
    kinds: list[tuple[str, int, list[Any], list[int]]] = []
    for size in config.groups:
        if size < len(places):
            kinds.append(("random", size, [places[i] for i in generator.permutation(len(places))[:size]], []))
            kinds.append(("most harmful", size, worst[:size], []))
    if config.leave:
        kinds += [("client", client, [], [client]) for client in range(config.clients)]
    if not kinds:
        return {"groups": [], "leaving": []}
    weights = [influence.without(trained.task, group, clients) for _, _, group, clients in kinds]
    actual = trained.changed(weights, "groups and clients")
    estimator, rows = hp.TrackedHGP(acceleration=0), []  # clients with nothing left have no curvature
    for (kind, number, group, clients), own, change in zip(kinds, weights, actual, strict=True):
        added = sum(found.examples[client][place] for client, place in group) + sum(found.clients[clients])
        try:
            newton = influence.group_score(
                trained.there, estimator, trained.network, own, key=trained.key, damping=config.damping
            )
        except hp.Diverged:
            newton = None
        rows.append(
            {
                "kind": kind,
                "client" if clients else "size": number,
                "sum_of_scores": float(added),
                "newton": newton if newton is not None and np.isfinite(newton) else None,
                "actual": float(change),
            }
        )
    return {
        "groups": [row for row in rows if row["kind"] != "client"],
        "leaving": [row for row in rows if row["kind"] == "client"],
    }


def _write(run: Any, found: Any) -> None:
    """Every client's own ranking: rank 1 hurts everyone most."""
    import numpy as np

    for client, scores in enumerate(found.examples):
        ranks = np.empty(len(scores), int)
        ranks[found.ranking(client)] = np.arange(1, len(scores) + 1)
        lines = [f"{number},{score:.9g},{rank}" for number, (score, rank) in enumerate(zip(scores, ranks, strict=True))]
        run.write(f"client-{client}/influence.csv", "\n".join(["instance,score,rank", *lines]) + "\n")


def _report(config: InfluenceStudy, run: Any, cases: list[dict[str, Any]], described: str) -> None:
    """Scatter plots and tables."""
    from hyperpush.runs.report.figures import panels

    figure, axes = panels(len(cases))
    for axis, case in zip(axes, cases, strict=True):
        predicted, actual = case["pairs"].T
        ends = [min(predicted.min(), actual.min()), max(predicted.max(), actual.max())]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.scatter(predicted, actual, s=12)
        axis.set_xlabel("predicted change of Σ F")
        axis.set_ylabel("change after retraining")
        axis.set_title(_size(case["batch"]))
        axis.locator_params(axis="x", nbins=5)
    run.figure("removals", figure)
    names = ("r2", "f1", "kendall", "spearman")
    rows = []
    for case in cases:
        size = case["batch"] or "all"
        rows.append((size, "TrackedHGP (chosen)", case["damping"], *(case[name] for name in names), None))
        rows += [
            (size, each["method"], each["damping"], *(each.get(name) for name in names), each.get("slope"))
            for each in case["methods"]
        ]
        if case["paper"]:
            rows.append((size, "HGP (the paper)", 0.0, case["paper"]["r2"], case["paper"]["f1"], None, None, None))
    run.table(
        f"{config.model} on {described}: predictions against {config.removals} retrainings",
        ("batch", "method", "damping", "R²", "F1", "Kendall τ", "Spearman ρ", "slope"),
        rows,
    )
    first = cases[0]
    both = [*first["groups"], *first["leaving"]]
    if both:
        run.table(
            "removed together",
            ("kind", "size or client", "sum of scores", "Newton step", "actual"),
            [
                (row["kind"], row.get("size", row.get("client")), row["sum_of_scores"], row["newton"], row["actual"])
                for row in both
            ],
        )
    if first["timing"]:
        timing = first["timing"]
        run.console.print(
            f"{timing['removals']} retrainings took {timing['all']:.3g} s, {timing['ratio']:.2g} times one"
        )


# ------------------------------------------------------------- wrong labels


def noisy_digits(config: Hunt, kind: str, seed: int) -> tuple[Any, list[Any], Any]:
    """The task on digits, which training labels of each noisy client are wrong, and the generator."""
    import jax.numpy as jnp
    import numpy as np

    import hyperpush as hp
    from hyperpush.studies.data.partition import iid, split, stack
    from hyperpush.studies.data.sources import load

    found, generator = load("digits"), np.random.default_rng(seed)
    parts = split(iid(len(found.labels), config.clients, generator), generator)
    labels = found.labels.copy()
    flips = []
    for own in parts.train[: config.noisy]:
        many = max(1, round(config.share * len(own)))
        if kind == "random":
            chosen, shift = generator.choice(own, many, replace=False), generator.integers(1, found.classes, many)
        else:  # of one label, or of two that follow each other
            by_label = own[np.argsort(labels[own], kind="stable")]
            chosen, shift = np.roll(by_label, -generator.integers(len(own)))[:many], 1
        labels[chosen] = (labels[chosen] + shift) % found.classes
        flips.append(np.isin(own, chosen))
    train = stack(found._replace(labels=labels), parts.train)
    zeros = {"weight": jnp.zeros((64, found.classes)), "bias": jnp.zeros(found.classes)}
    made = hp.Task(
        inner=softmax_losses,
        outer=softmax_losses,
        penalty=l2,
        params=zeros,
        hypers=config.l2,
        train=train,
        validation=stack(found, parts.validation),
    )
    return made, flips, generator


def share_found(scores: Any, flipped: Any, share: float) -> float:
    """The share of the flips among the `share` of a client's examples with the lowest scores."""
    import numpy as np

    worst = np.argsort(scores, kind="stable")[: round(share * len(scores))]
    return float(np.sum(flipped[worst]) / np.sum(flipped))


def _hunts(config: InfluenceStudy, run: Any) -> dict[str, Any]:
    """The share of wrong labels found by influence, by the loss under the shared or the own model, and by chance."""
    from itertools import product

    import jax
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    hunt = config.hunt
    network = hp.networks.by_name(config.network, hunt.clients, config.seed, **config.network_options)
    ways, rows = ("influence", "shared loss", "local loss", "random"), []
    solver = solver_of(hunt.steps, hunt.rate, 0)
    losses = jax.jit(jax.vmap(softmax_losses))
    with run.progress("wrong labels", hunt.seeds * len(hunt.kinds)) as bar:
        for kind, seed in product(hunt.kinds, range(config.seed, config.seed + hunt.seeds)):
            task, flips, generator = noisy_digits(hunt, kind, seed)
            key, second = jax.random.split(jax.random.key(seed))
            shared = hp.train(task, solver, network, key=key)
            alone = hp.train(task, hp.LocalSGD(solver.steps, solver.step_size), network, key=key)
            scores = influence.scores(
                shared.task, hp.TrackedHGP(), network, key=second, damping=hunt.damping, curvature_steps=0
            )
            high = {
                name: losses(found.params, task.hypers, task.train.examples)
                for name, found in (("shared loss", shared), ("local loss", alone))
            }
            for client, flipped in enumerate(flips):
                ranked = {
                    "influence": scores.examples[client],
                    **{name: -np.asarray(values)[client, : len(flipped)] for name, values in high.items()},
                    "random": generator.permutation(len(flipped)),
                }
                for way in ways:
                    found = {name: share_found(ranked[way], flipped, share) for name, share in WORST.items()}
                    rows.append({"wrong": kind, "seed": seed, "client": client, "by": way, **found})
            bar.advance()
    means = []
    for kind, way in product(hunt.kinds, ways):
        own = [row for row in rows if (row["wrong"], row["by"]) == (kind, way)]
        means.append({"wrong": kind, "by": way, **{name: float(np.mean([row[name] for row in own])) for name in WORST}})
    run.table(
        f"share of wrong labels found, mean of {hunt.seeds} seeds and {hunt.noisy} clients with {hunt.share:.0%} wrong",
        ("wrong labels", "by", "in the worst 10 %", "in the worst 20 %"),
        [tuple(row.values()) for row in means],
    )
    return {"found": means, "rows": rows, "share": hunt.share, "noisy_clients": hunt.noisy, "clients": hunt.clients}


EXPERIMENT = Experiment(
    "influence",
    "Which training examples help or hurt everyone: predicted, and checked by retraining without them.",
    InfluenceStudy,
    run_influence,
)
