"""Which training examples help or hurt everyone: predicted without moving data, checked by retraining without them.

The counterpart of section 5.2 and appendix A.2 of Terashita and Hara, "Decentralized hyper-gradient computation over
time-varying directed networks"; then groups, whole clients, damping, and a hunt for wrong labels (docs/influence.md).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hyperpush.config import Config
from hyperpush.errors import InvalidInput
from hyperpush.experiments.registry import Experiment

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


def logistic_losses(params, examples):
    """Binary cross-entropy of every example under a linear classifier."""
    import jax

    from hyperpush.problems.logistic import softplus

    inputs, labels = examples
    scores = params @ jax.lax.optimization_barrier(inputs.T)  # see `problems.logistic.cross_entropy`
    return softplus(scores) - labels * scores


def softmax_losses(params, examples):
    """Cross-entropy of every example under softmax regression."""
    import optax

    inputs, labels = examples
    scores = inputs.reshape(len(inputs), -1) @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def cnn_losses(model):
    """Cross-entropy of every image under a CNN."""
    import optax

    def losses(params, examples):
        images, labels = examples
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels)

    return losses


def images_of(config: InfluenceStudy) -> Any:
    """Digits only, as many as asked for."""
    import numpy as np

    from hyperpush.data.sources import available, load

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


def setting_of(config: InfluenceStudy) -> tuple[Any, str]:
    """The weighted problem with its start and data, and what the data are."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from hyperpush import influence

    if config.model == "logistic":
        from hyperpush.problems.logistic import logistic

        _, params, _, train, validation = logistic(config.clients, config.seed, examples=config.examples)
        made = influence.weighted(logistic_losses, params, train, validation, l2=config.l2 or 0.0)
        return made, f"synthetic, {config.examples} examples per client"

    from hyperpush.data.partition import dirichlet, split, stack
    from hyperpush.models.cnn import CNN, INFLUENCE

    found, generator = images_of(config), np.random.default_rng(config.seed + 1)
    parts = split(dirichlet(found.labels, config.clients, config.concentration, generator), generator)
    model = INFLUENCE if found.inputs.shape[1] == INFLUENCE.size else CNN((20, 20), (), 10, size=16, kernel=3)
    start = model.init(jax.random.key(config.seed))
    params = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], config.clients, axis=0), start)
    train, validation = (stack(found, part) for part in (parts.train, parts.validation))
    made = influence.weighted(cnn_losses(model), params, train, validation, l2=config.l2 or 0.0)
    return made, f"{config.images} digits of {found.note}"


def solver_of(steps: int, rate: float, batch: int) -> Any:
    """SGP whose rate falls tenfold at the paper's milestones, in proportion."""
    import hyperpush as hp

    at = tuple(sorted({round(share * steps) for share in MILESTONES}))
    return hp.SGP(steps, hp.milestones(rate, at), batch=batch or None)


def run_influence(config: InfluenceStudy, run: Any) -> dict[str, Any]:
    """Predict, retrain, compare; then groups and clients, and the hunt."""
    import jax

    from hyperpush import networks
    from hyperpush.checks import whole
    from hyperpush.data.sources import load

    config = config.chosen()
    if config.hunt.seeds:  # three examples each at least: to train, to validate, to test
        whole("hunt.clients", config.hunt.clients, least=2, most=len(load("digits").labels) // 3)
    network = networks.by_name(config.network, config.clients, config.seed, **config.network_options)
    setting, described = setting_of(config)
    keys = jax.random.split(jax.random.key(config.seed))
    assert config.batches is not None
    cases = [
        _case(config, run, setting, network, keys, batch, place == 0) for place, batch in enumerate(config.batches)
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


def _case(
    config: InfluenceStudy, run: Any, setting: Any, network: Any, keys: Any, batch: int, write: bool
) -> dict[str, Any]:
    """One way of training: its predictions against retraining."""
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    assert config.steps
    assert config.rate
    assert config.removals
    assert config.order
    training_key, estimation_key = keys
    solver = solver_of(config.steps, config.rate, batch)
    size = f"batches of {batch}" if batch else "full batch"
    with run.progress(f"training, {size}", config.steps) as bar:
        trained = hp.train(
            setting.problem,
            solver,
            network,
            setting.params,
            setting.hypers,
            setting.inner_data,
            training_key,
            progress=lambda _, done, total: bar.update(done),
        ).params
    damping = config.damping
    tracked = hp.TrackedHGP(config.order)
    found = influence.scores(setting, network, trained, estimation_key, estimator=tracked, damping=damping)
    for sentence in found.warnings:
        run.console.print(f"warning: {sentence}")
    if write:
        _write(run, found)
        run.save_models("inner-solution", trained)

    def retrained(weights, label):
        with run.progress(f"retraining without {label}, {size}", len(weights)) as bar:
            return influence.retrain(
                setting, solver, network, training_key, weights, at_once=config.at_once or 1, progress=bar.update
            ).sum(1)

    places = found.top(config.removals)
    removals = [influence.without(setting, [place]) for place in places]
    everything = retrained([setting.hypers], "nothing")[0]
    actual = retrained(removals, "single examples") - everything

    def predicted(scores):
        return np.array([scores.examples[client][number] for client, number in places])

    pairs = np.stack([predicted(found), actual], 1)
    case = {
        "batch": batch,
        "examples": [len(own) for own in found.examples],
        "damping": damping,
        "curvature": None if found.curvature is None else found.curvature._asdict(),
        "warnings": found.warnings,
        **influence.agreement(pairs[:, 0], actual),
        "paper": PAPER.get((config.model, bool(batch))),
        "pairs": pairs,
        "rounds": found.estimate.rounds,
        "floats_per_client": found.estimate.floats,
        "methods": _methods(
            config, run, setting, network, trained, estimation_key, training_key, solver, predicted, actual
        ),
        "timing": _timing(setting, solver, network, training_key, removals, config) if write and not batch else None,
    }
    if write:
        case |= _groups(config, run, setting, network, trained, estimation_key, found, retrained, everything, damping)
    run.record(**case)
    return case


def _methods(
    config: InfluenceStudy,
    run: Any,
    setting: Any,
    network: Any,
    trained: Any,
    key: Any,
    training_key: Any,
    solver: Any,
    predicted: Any,
    actual: Any,
) -> list[dict[str, Any]]:
    """Other dampings and estimators on the same removals."""
    import numpy as np

    import hyperpush as hp
    from hyperpush import influence

    assert config.order
    assert config.step
    ways: list[tuple[str, float, Any, Any, Any]] = [
        ("TrackedHGP", damping, hp.TrackedHGP(config.order), trained, key) for damping in config.dampings
    ]
    ways.append(("HGP", 0.0, hp.HGP(config.order, config.pushes, config.step, solver.batch), trained, key))
    if config.unrolled:  # from the start, on the links of the training run
        ways.append(("ITDBackward", 0.0, hp.ITDBackward(solver), setting.params, training_key))
    rows = []
    with run.progress("estimators", len(ways)) as bar:
        for name, damping, estimator, at, own_key in ways:
            row: dict[str, Any] = {"method": name, "damping": damping}
            try:
                scores = influence.scores(
                    setting, network, at, own_key, estimator=estimator, damping=damping, curvature_steps=0
                )
                guess = predicted(scores)
                if not np.all(np.isfinite(guess)):
                    raise hp.Diverged(name, config.order, "numbers are not finite")
                slope = float(guess @ actual / (guess @ guess)) if np.any(guess) else None
                row |= {**influence.agreement(guess, actual), "slope": slope, "rounds": scores.estimate.rounds}
            except hp.Diverged as error:
                row["failed"] = str(error)
            rows.append(row)
            bar.advance()
    return rows


def _timing(
    setting: Any, solver: Any, network: Any, key: Any, removals: list[Any], config: InfluenceStudy
) -> dict[str, Any] | None:
    """Seconds of one retraining and of all together, compiled before; taken in turn, medians of a few."""
    import time

    import numpy as np

    from hyperpush import influence

    if config.model == "cnn":  # as long as everything else together
        return None
    seconds: dict[str, list[float]] = {"one": [], "all": []}
    for _ in range(TIMED):
        for name, weights in (("one", removals[:1]), ("all", removals)):
            begun = time.perf_counter()
            influence.retrain(setting, solver, network, key, weights, at_once=config.at_once or 1)
            seconds[name].append(time.perf_counter() - begun)
    one, together = (float(np.median(seconds[name])) for name in ("one", "all"))
    return {"one": one, "all": together, "ratio": together / one, "removals": len(removals)}


def _groups(
    config: InfluenceStudy,
    run: Any,
    setting: Any,
    network: Any,
    trained: Any,
    key: Any,
    found: Any,
    retrained: Any,
    everything: float,
    damping: float,
) -> dict[str, Any]:
    """Groups of random and of the most harmful examples, and whole clients."""
    import numpy as np

    from hyperpush import influence

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
    weights = [influence.without(setting, group, clients) for _, _, group, clients in kinds]
    actual = retrained(weights, "groups and clients") - everything
    rows = []
    for (kind, number, group, clients), own, change in zip(kinds, weights, actual, strict=True):
        added = sum(found.examples[client][place] for client, place in group) + sum(found.clients[clients])
        try:
            newton = influence.group_score(setting, network, trained, key, own, damping=damping)
        except ArithmeticError:  # Diverged
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
    from hyperpush.report.figures import panels

    figure, axes = panels(len(cases))
    for axis, case in zip(axes, cases, strict=True):
        predicted, actual = case["pairs"].T
        ends = [min(predicted.min(), actual.min()), max(predicted.max(), actual.max())]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.scatter(predicted, actual, s=12)
        axis.set_xlabel("predicted change of Σ F")
        axis.set_ylabel("change after retraining")
        axis.set_title(f"batches of {case['batch']}" if case["batch"] else "full batch")
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
    """The weighted problem on digits, which training labels of each noisy client are wrong, and the generator."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from hyperpush import influence
    from hyperpush.data.partition import iid, split, stack
    from hyperpush.data.sources import load

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
    params = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], config.clients, axis=0), zeros)
    made = influence.weighted(softmax_losses, params, train, stack(found, parts.validation), l2=config.l2)
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
    from hyperpush import influence, networks

    hunt = config.hunt
    network = networks.by_name(config.network, hunt.clients, config.seed, **config.network_options)
    ways, rows = ("influence", "shared loss", "local loss", "random"), []
    solver = solver_of(hunt.steps, hunt.rate, 0)
    losses = jax.jit(jax.vmap(softmax_losses))
    with run.progress("wrong labels", hunt.seeds * len(hunt.kinds)) as bar:
        for kind, seed in product(hunt.kinds, range(config.seed, config.seed + hunt.seeds)):
            setting, flips, generator = noisy_digits(hunt, kind, seed)
            key, second = jax.random.split(jax.random.key(seed))
            start = (setting.params, setting.hypers, setting.inner_data)
            shared = hp.train(setting.problem, solver, network, *start, key).params
            alone = hp.train(setting.problem, hp.Alone(solver.steps, solver.rate), network, *start, key).params
            scores = influence.scores(setting, network, shared, second, damping=hunt.damping, curvature_steps=0)
            examples = setting.inner_data.examples.examples
            high = {"shared loss": losses(shared, examples), "local loss": losses(alone, examples)}
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
