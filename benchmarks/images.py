"""The task of large benchmarks: a convolutional network on random images, with scales of the logits as hypers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from script import option

from hyperpush.base import processes
from hyperpush.task.starts import per_client
from hyperpush.task.task import Task
from hyperpush.tasks import clients as loaded
from hyperpush_papers.common.models import cnn

NETWORKS = {"emnist": cnn.EMNIST, "influence": cnn.INFLUENCE}
L2 = 0.001


@dataclass(frozen=True)
class OfImages:
    """Options that benchmarks on this task share."""

    model: str = option("emnist", "a network of 2,278,334 parameters, or influence, of 13,750", choices=tuple(NETWORKS))
    seed: int = option(0, "seed of the model, the images and the network", 0)


def images(
    name: str, clients: int, seed: int, examples: int, validation: int | None = None, spread: bool = False
) -> Task:
    """Make a task with `examples` training and `validation` images per client; None: equally many of both.

    With `spread` every process makes and holds its own clients' part only.
    """
    model, key = NETWORKS[name], jax.random.key(seed)

    def losses(params, scales, batch):
        inputs, labels = batch
        chances = jax.nn.log_softmax(scales * model.apply(params, inputs))
        return -jnp.take_along_axis(chances, labels[:, None], axis=1)[:, 0]

    def draw_examples(count: int, which: int) -> Any:
        def load(client: int) -> Any:
            generator = np.random.default_rng([seed, which, client])
            inputs = generator.standard_normal((count, model.size, model.size), np.float32)
            return inputs, generator.integers(0, model.classes, count, dtype=np.int32)

        return processes.stack(load, clients) if spread else loaded(load, clients)

    params: Any = model.init(key)
    hypers: Any = jnp.ones(model.classes)
    if spread:
        start = jax.tree.map(np.asarray, (params, hypers))
        params, hypers = map(per_client, processes.stack(lambda client: start, clients))
    return Task(
        inner=losses,
        outer=losses,
        params=params,
        hypers=hypers,
        train=draw_examples(examples, 0),
        validation=draw_examples(examples if validation is None else validation, 1),
    ).with_l2(L2)
