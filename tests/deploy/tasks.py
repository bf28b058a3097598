"""Tasks that specs in tests name as module:function."""

import jax
import jax.numpy as jnp
import numpy as np
from layered import Layered

import hyperpush as hp
from hyperpush.personalize import PL

CLASSES, INPUTS = 3, 4


def examples(clients, seed, size):
    """Return inputs, and labels by a linear rule; each client has one label more often than others do."""
    generator = np.random.default_rng(seed)
    rule = generator.normal(size=(INPUTS, CLASSES))
    inputs = generator.normal(size=(clients, size, INPUTS)).astype(np.float32)
    scores = inputs @ rule + 2 * np.eye(CLASSES)[np.arange(clients) % CLASSES][:, None]
    return jnp.asarray(inputs), jnp.asarray(scores.argmax(2), jnp.int32)


def personal(clients, seed):
    """Return a PL task: all clients share a classifier, and each scales its logits by personal weights."""
    train, validation = (examples(clients, seed + number, 12) for number in range(2))
    return PL().task(Layered(INPUTS, CLASSES), train=train, validation=validation, key=seed, l2=0.01)


def weighted_labels(clients, seed, names=None):
    """Return a task with personal weights of labels, on clients that own different numbers of examples."""

    def losses(params, hyper, batch):
        inputs, labels = batch
        return -jnp.take_along_axis(jax.nn.log_softmax(inputs @ params), labels[:, None], axis=1)[:, 0]

    def weighted(params, hyper, batch):
        return losses(params, hyper, batch) * jnp.exp(hyper)[batch[1]]

    sizes = [8 + 3 * client for client in range(clients)]
    inputs, labels = examples(clients, seed, 2 * max(sizes))
    first = [(inputs[client, :size], labels[client, :size]) for client, size in enumerate(sizes)]
    second = [(inputs[client, -size:], labels[client, -size:]) for client, size in enumerate(sizes)]
    return hp.Task(
        names=names,
        inner=weighted,
        penalty=lambda params, hyper: 0.05 * jnp.sum(params**2),
        outer=losses,
        outer_penalty=lambda params, hyper: 0.01 * jnp.sum(hyper**2),
        params=jnp.zeros((INPUTS, CLASSES)),
        hypers=jnp.zeros(CLASSES),
        train=first,
        validation=second,
    )


def own(name):
    """Return the examples of the named party."""
    size = {"alice": 5, "bob": 7}[name]
    inputs, labels = examples(1, size, size)
    return {"train": (inputs[0], labels[0]), "validation": (inputs[0][:3], labels[0][:3])}


def spoiled(name):
    """Return examples whose labels are strings, which the task refuses."""
    return {"train": (np.ones((2, INPUTS)), np.array(["a", "b"]))}
