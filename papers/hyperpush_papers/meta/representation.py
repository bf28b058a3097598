"""Meta-learning: a representation that all clients agree on, and a head on top of it for every task.

The hypers are the weights of the representation, the params the heads of all clients' tasks side by side. The inner
cost of a client looks at the support examples of its own tasks, the outer cost at their query examples.
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
FITTING = 100  # steps to the head of a task


class Examples(NamedTuple):
    """Examples of one or several tasks: inputs, the class within the task, and the number of the task."""

    inputs: Float[Array, "*batch m d"]
    labels: Int[Array, "*batch m"]
    tasks: Int[Array, "*batch m"]


def layers(key: PRNGKeyArray, sizes: tuple[int, ...]) -> Layers:
    """Random layers from `sizes[0]` inputs to `sizes[-1]` features; pre-activations are of order 1."""
    keys = jax.random.split(key, len(sizes) - 1)
    return tuple(
        {"weight": jax.random.normal(own, shape) / np.sqrt(shape[0]), "bias": jnp.zeros(shape[1])}
        for own, shape in zip(keys, pairwise(sizes), strict=True)
    )


def features(hyper: PyTree, inputs: Float[Array, "... d"]) -> Float[Array, "... p"]:
    """φ = (h/√k, 1), where h are the k units of the last layer, tanh after each layer: ‖φ‖² ≤ 2."""
    for layer in hyper:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    ones = jnp.ones((*inputs.shape[:-1], 1), inputs.dtype)
    return jnp.concatenate([inputs / np.sqrt(inputs.shape[-1]), ones], -1)


def misfit(loss: Loss, scores: Float[Array, "m ways"], labels: Int[Array, " m"]) -> Float[Array, " m"]:
    """Cross-entropy, or half the squared distance from the label's unit vector, of each example."""
    wanted = jax.nn.one_hot(labels, scores.shape[-1], dtype=scores.dtype)
    if loss == "squares":
        return 0.5 * jnp.sum((scores - wanted) ** 2, -1)
    return -jnp.sum(wanted * jax.nn.log_softmax(scores), -1)


def curvature(rate: float, loss: Loss = "cross-entropy") -> float:
    """The largest eigenvalue that one example's inner Hessian can have: c·‖φ‖² + rate, with ‖φ‖² ≤ 2.

    c = 1 for squares, ½ for cross-entropy (Böhning 1992).
    """
    return (2.0 if loss == "squares" else 1.0) + rate


def losses(loss: Loss, params: PyTree, hyper: PyTree, batch: Examples) -> Float[Array, " m"]:
    """The misfit of the heads on the examples of their own tasks."""
    scores = jnp.einsum("mp,mpw->mw", features(hyper, batch.inputs), params[batch.tasks])
    return misfit(loss, scores, batch.labels)


LOSSES = {loss: partial(losses, loss) for loss in ("cross-entropy", "squares")}  # the same objects compile once


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
    """Numbers of examples: `count` tasks of `ways` random classes, `each` examples of every one.

    `rows[c]` are the examples of class c. Each is used at most once, so that an example is one row of the data; or
    with `again` at most once in a task. Combinations of classes are `only` some, where given, and `never` others.
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
    """Of a new task; one of which more is left is likelier, so that all last long."""
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
    """The drawn examples; the tasks of the last batch axis are numbered from `first`, over all batches."""
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
    """Meta-learning: a representation as hypers, and a head on top of it for every task of every client as params.

    The inner cost is the misfit of the heads y on the own tasks' support + ½·rate·‖y‖² over all heads, the outer cost
    the misfit on the query. A client lacks examples of others' tasks: its cost pulls their heads to zero. So in the
    mean of the costs of n clients with k tasks each, n·k times the rate stands beside a task's misfit. `l2` is what
    stands there, as in `fit_head`.

    Args:
        inputs: All examples, one row each.
        drawn: The rows of every client's tasks, by class: [clients, tasks, ways, each], as of `draw_tasks`.
        shots: Number of `each` for support (inner cost); the rest are query (outer cost).
        key: Decides the representation to start from, the same at every client. Heads start at zero.
        widths: Units of each layer, tanh after each.
        l2: Rate of the penalty on a head, above 0.
        loss: `"cross-entropy"` or `"squares"`.
        common: True asks for one common representation.

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
    """The head of one task: argmin of misfit on the support + ½·rate·‖head‖².

    Accelerated gradient steps (Nesterov 2004), as the curvature is at most the mean of c·‖φ‖² + rate (`curvature`).
    No matrix is factorized: with jaxlib 0.10 two batches of LAPACK calls at once can wait for each other for ever on
    two cores.
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
    """Of each new task: the share of query examples that a head fitted on its support gets right.

    Tasks are on axis 0 of both.
    """

    def one(support: Examples, query: Examples):
        head = fit_head(hyper, support, ways, rate, loss)
        scores = features(hyper, query.inputs) @ head
        return jnp.mean(jnp.argmax(scores, -1) == query.labels, dtype=scores.dtype)

    return jax.vmap(one)(support, query)


def shrink_images(images: Float[np.ndarray, "m h w *c"], side: int) -> Float[np.ndarray, "m d"]:
    """Images shrunk to `side` × `side` by means of blocks, then each shifted and scaled by itself: mean 0, variance 1.

    Nothing is learned from other images, so nothing has to be shared for it.
    """
    check_integer("side", side, minimum=1, maximum=min(images.shape[1:3]))
    block = [size // side for size in images.shape[1:3]]
    first = [(size - side * step) // 2 for size, step in zip(images.shape[1:3], block, strict=True)]
    cut = images[:, first[0] : first[0] + side * block[0], first[1] : first[1] + side * block[1]]
    small = cut.reshape(len(cut), side, block[0], side, block[1], -1).mean((2, 4)).reshape(len(cut), -1)
    small = small - small.mean(1, keepdims=True)
    return small / np.maximum(small.std(1, keepdims=True), 1e-6)
