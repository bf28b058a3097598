"""Meta-learning: a representation that all clients agree on, and a head on top of it for every task.

The hypers are the weights of the representation. The params are the heads of all clients' tasks. A client's inner cost
uses the support examples of its own tasks, and its outer cost their query examples.
"""

from collections.abc import Collection
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from hyperpush.base.checks import check_integer, check_positive
from hyperpush.base.errors import InvalidInput
from hyperpush.task.problem import L2
from hyperpush.task.task import Task

Loss = Literal["cross-entropy", "squares"]
Layers = tuple[dict[str, Array], ...]
FITTING = 100  # gradient steps to fit the head of one task


class Examples(NamedTuple):
    """Examples of one or several tasks: inputs, the class within the task, and the number of the task."""

    inputs: Float[Array, "*batch m d"]
    labels: Int[Array, "*batch m"]
    tasks: Int[Array, "*batch m"]


def layers(key: PRNGKeyArray, sizes: tuple[int, ...]) -> Layers:
    """Draw layers from `sizes[0]` inputs to `sizes[-1]` features, scaled so that pre-activations are of order 1."""
    keys = jax.random.split(key, len(sizes) - 1)
    return tuple(
        {"weight": jax.random.normal(own, shape) / np.sqrt(shape[0]), "bias": jnp.zeros(shape[1])}
        for own, shape in zip(keys, pairwise(sizes), strict=True)
    )


def features(hyper: PyTree, inputs: Float[Array, "... d"]) -> Float[Array, "... p"]:
    """Return φ = (h/√k, 1) with ‖φ‖² ≤ 2. h are the k units of the last layer; a tanh follows each layer."""
    for layer in hyper:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    ones = jnp.ones((*inputs.shape[:-1], 1), inputs.dtype)
    return jnp.concatenate([inputs / np.sqrt(inputs.shape[-1]), ones], -1)


def misfit(loss: Loss, scores: Float[Array, "m ways"], labels: Int[Array, " m"]) -> Float[Array, " m"]:
    """Return each example's cross-entropy, or half its squared distance from the label's unit vector."""
    wanted = jax.nn.one_hot(labels, scores.shape[-1], dtype=scores.dtype)
    if loss == "squares":
        return 0.5 * jnp.sum((scores - wanted) ** 2, -1)
    return -jnp.sum(wanted * jax.nn.log_softmax(scores), -1)


def curvature(rate: float, loss: Loss = "cross-entropy") -> float:
    """Return a bound on the eigenvalues of one example's inner Hessian: c·‖φ‖² + rate, with ‖φ‖² ≤ 2.

    c is 1 for squares and ½ for cross-entropy (Böhning 1992).
    """
    return (2.0 if loss == "squares" else 1.0) + rate


def losses(loss: Loss, params: PyTree, hyper: PyTree, batch: Examples) -> Float[Array, " m"]:
    """Return the misfit of each example under the head of its task."""
    scores = jnp.einsum("mp,mpw->mw", features(hyper, batch.inputs), params[batch.tasks])
    return misfit(loss, scores, batch.labels)


# built once, since equal functions that are other objects compile again
LOSSES = {loss: partial(losses, loss) for loss in ("cross-entropy", "squares")}


Combination = frozenset[int]  # of classes


def draw_tasks(
    generator: np.random.Generator,
    rows: list[Int[np.ndarray, " _"]],
    ways: int,
    each: int,
    count: int,
    *,
    only: Collection[Combination] = (),
    never: Collection[Combination] = (),
    again: bool = False,
) -> Int[np.ndarray, "count ways each"]:
    """Draw `count` tasks of `ways` random classes with `each` examples per class; return the examples' row numbers.

    `rows[c]` are the rows of class c. Each row is used at most once in all, or with `again` at most once per task.
    Combinations of classes come from `only` if it is given, and never from `never`.
    """
    check_integer("ways", ways, minimum=2, maximum=len(rows))
    left = [generator.permutation(own) for own in rows]
    found = np.zeros((count, ways, each), np.int64)
    for task in found:
        for place, c in enumerate(_classes(generator, left, ways, each, set(only), set(never))):
            task[place] = left[c][:each]
            left[c] = generator.permutation(rows[c]) if again else left[c][each:]
    return found


def _classes(
    generator: np.random.Generator,
    left: list[Int[np.ndarray, " _"]],
    ways: int,
    each: int,
    only: set[Combination],
    never: set[Combination],
) -> Int[np.ndarray, " ways"]:
    """Draw the classes of a new task; more unused examples make a class likelier, so that none runs out early."""
    often = np.array([len(own) // each for own in left], float)
    if only:
        fit = sorted(sorted(each) for each in only - never if all(often[c] for c in each))
        if fit:
            return generator.permutation(fit[generator.integers(len(fit))])
    elif np.count_nonzero(often) >= ways:
        for _ in range(1000):
            chosen = generator.choice(len(left), ways, replace=False, p=often / often.sum())
            if frozenset(chosen.tolist()) not in never:
                return chosen
    counts = [len(own) for own in left]
    have = f"what is left are {len(left)} classes of {min(counts)} to {max(counts)} examples"
    raise InvalidInput("tasks", f"{ways} classes with {each} examples of each", f"fewer or smaller ones: {have}")


def examples(
    inputs: Float[np.ndarray, "m d"], drawn: Int[np.ndarray, "*batch tasks ways each"], first: int = 0
) -> Examples:
    """Return the drawn examples; tasks along the last batch axis are numbered from `first`, over all batches."""
    *batch, tasks, ways, each = drawn.shape
    number = first + np.arange(int(np.prod([*batch, tasks]))).reshape(*batch, tasks, 1, 1)
    labels = np.broadcast_to(np.arange(ways)[:, None], drawn.shape)
    flat = (*batch, tasks * ways * each)
    chosen = jnp.asarray(inputs[drawn.reshape(flat)], jnp.zeros(()).dtype)
    return Examples(
        chosen,
        jnp.asarray(labels.reshape(flat), jnp.int32),
        jnp.asarray(np.broadcast_to(number, drawn.shape).reshape(flat), jnp.int32),
    )


def representation(
    inputs: Float[np.ndarray, "m d"],
    drawn: Int[np.ndarray, "clients tasks ways each"],
    shots: int,
    key: PRNGKeyArray,
    *,
    widths: tuple[int, ...] = (16,),
    l2: float = 0.1,
    loss: Loss = "cross-entropy",
    common: bool = False,
) -> Task:
    """Make the task of meta-learning: hypers are a representation, params a head for every task of every client.

    A client's inner cost is the misfit of the heads y on the support examples of its own tasks, plus ½·rate·‖y‖² over
    all heads. Its outer cost is the misfit on the query examples. A client lacks examples of others' tasks, so its
    cost pulls the heads of these to zero. In the mean cost of n clients with k tasks each, the effective L2 rate of one
    task's head is therefore n·k times the rate. `l2` is this effective rate, as in `fit_head`.

    Args:
        inputs: All examples, one row each.
        drawn: The rows of every client's tasks, by class: [clients, tasks, ways, each], as of `draw_tasks`.
        shots: Number of support examples (inner cost) among `each`; the others are query examples (outer cost).
        key: Random key of the first representation, the same at every client. Heads start at zero.
        widths: Number of units of each layer; a tanh follows each layer.
        l2: Rate of the penalty on a head, above 0.
        loss: `"cross-entropy"` or `"squares"`.
        common: True: all clients have one common representation.

    Raises:
        InvalidInput: An option is out of range; the message names it and what is allowed.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> import hyperpush as hp
        >>> drawn = np.arange(24).reshape(2, 2, 3, 2)  # 2 clients, 2 tasks each, 3 classes, 2 examples of each
        >>> representation(np.ones((24, 5)), drawn, shots=1, key=jax.random.key(0), common=True)
        Task(2 clients, 204 params each; train 6, validation 6 examples; the outer level fits 'validation')
    """
    n, tasks, ways, each = drawn.shape
    check_integer("shots", shots, minimum=1, maximum=each - 1)
    check_integer("number of layers", len(widths), minimum=1)
    for width in widths:
        check_integer("widths", width, minimum=1)
    if loss not in LOSSES:
        raise InvalidInput("loss", loss, "'cross-entropy' or 'squares'")
    support, query = (examples(inputs, part) for part in (drawn[..., :shots], drawn[..., shots:]))
    return Task(
        inner=LOSSES[loss],
        penalty=L2(check_positive("l2", l2) / (n * tasks)),
        outer=LOSSES[loss],
        params=jnp.zeros((n * tasks, widths[-1] + 1, ways)),
        hypers=layers(key, (inputs.shape[1], *widths)),
        train=support,
        validation=query,
        common=common,
    )


def fit_head(
    hyper: PyTree, support: Examples, ways: int, rate: float, loss: Loss = "cross-entropy"
) -> Float[Array, "p ways"]:
    """Fit the head of one task: the minimizer of the misfit on the support examples + ½·rate·‖head‖².

    It takes accelerated gradient steps (Nesterov 2004) with the bound of `curvature`. It does not factorize matrices:
    with jaxlib 0.10, two batches of LAPACK calls at the same time can deadlock on two cores.
    """
    phi = features(hyper, support.inputs)
    top = (1.0 if loss == "squares" else 0.5) * jnp.mean(jnp.sum(phi**2, -1)) + rate
    momentum = (jnp.sqrt(top) - np.sqrt(rate)) / (jnp.sqrt(top) + np.sqrt(rate))

    def cost(head):
        return jnp.mean(misfit(loss, phi @ head, support.labels)) + 0.5 * rate * jnp.sum(head**2)

    def step(heads, _):
        last, head = heads
        ahead = head + momentum * (head - last)
        return (head, ahead - jax.grad(cost)(ahead) / top), None

    start = jnp.zeros((phi.shape[1], ways), phi.dtype)
    return jax.lax.scan(step, (start, start), length=FITTING)[0][1]


def few_shot_accuracy(
    hyper: PyTree,
    support: Examples,
    query: Examples,
    ways: int,
    rate: float,
    loss: Loss = "cross-entropy",
) -> Float[Array, " tasks"]:
    """Return the accuracy on each new task's query examples of a head that is fitted to its support examples.

    Both arguments have the tasks on axis 0.
    """

    def one(support: Examples, query: Examples):
        head = fit_head(hyper, support, ways, rate, loss)
        scores = features(hyper, query.inputs) @ head
        return jnp.mean(jnp.argmax(scores, -1) == query.labels, dtype=scores.dtype)

    return jax.vmap(one)(support, query)


def shrink_images(images: Float[np.ndarray, "m h w *c"], side: int) -> Float[np.ndarray, "m d"]:
    """Shrink images to `side` × `side` by averaging blocks; then normalize each image to mean 0 and variance 1.

    Each image is normalized on its own, so clients need not share statistics.
    """
    check_integer("side", side, minimum=1, maximum=min(images.shape[1:3]))
    block = [size // side for size in images.shape[1:3]]
    first = [(size - side * step) // 2 for size, step in zip(images.shape[1:3], block, strict=True)]
    cut = images[:, first[0] : first[0] + side * block[0], first[1] : first[1] + side * block[1]]
    small = cut.reshape(len(cut), side, block[0], side, block[1], -1).mean((2, 4)).reshape(len(cut), -1)
    small = small - small.mean(1, keepdims=True)
    return small / np.maximum(small.std(1, keepdims=True), 1e-6)
