"""A convolutional network on random images, with scales of the logits as hypers: what large benchmarks work on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hyperpush import processes
from hyperpush.bench.config import ModelName
from hyperpush.starts import per_client
from hyperpush.studies.models import cnn
from hyperpush.task import Task
from hyperpush.tasks import clients as loaded

MODELS = {"emnist": cnn.EMNIST, "influence": cnn.INFLUENCE}
L2 = 0.001


def images(
    name: ModelName, clients: int, seed: int, examples: int, validation: int | None = None, spread: bool = False
) -> Task:
    """So many training and validation images per client; as many of both if the latter are left out.

    With `spread` every process makes and holds its own clients' part only.
    """
    model, key = MODELS[name], jax.random.key(seed)

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
