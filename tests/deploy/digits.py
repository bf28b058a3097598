"""scikit-learn's digits on clients with few classes each: a shared softmax regression with personal biases."""

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import hyperpush as hp

TRAIN, VALIDATION, TEST = 60, 40, 200


def scores(params, hyper, inputs):
    return inputs @ params["w"] + params["b"] + hyper


def cross_entropy(params, hyper, batch):
    inputs, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, hyper, inputs), labels)


def decay(params, hyper):
    return 0.01 * jnp.sum(params["w"] ** 2) + 0.01 * jnp.sum(params["b"] ** 2)


def keep_small(params, hyper):
    return 0.005 * jnp.sum(hyper**2)


def parts(clients, seed):
    """Return every client's own examples, with different class proportions."""
    images, labels = load_digits(return_X_y=True)
    images, labels = np.asarray(images, np.float32) / 16, np.asarray(labels, np.int32)
    random = np.random.default_rng(seed)
    classes = [random.permutation(np.flatnonzero(labels == each)).tolist() for each in range(10)]
    made = []
    for client in range(clients):
        likes = np.where(np.arange(10) % clients == client, 6.0, 1.0)
        chosen = []
        while len(chosen) < TRAIN + VALIDATION + TEST:
            weights = likes * [bool(left) for left in classes]
            chosen.append(classes[random.choice(10, p=weights / weights.sum())].pop())
        made.append((images[chosen], labels[chosen]))
    return np.stack([each[0] for each in made]), np.stack([each[1] for each in made])


def digits(clients, seed):
    images, labels = parts(clients, seed)

    def share(start, stop):
        return jnp.asarray(images[:, start:stop]), jnp.asarray(labels[:, start:stop])

    return hp.Task(
        inner=cross_entropy,
        penalty=decay,
        outer=cross_entropy,
        outer_penalty=keep_small,
        params={"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
        hypers=jnp.zeros(10),
        train=share(0, TRAIN),
        validation=share(TRAIN, TRAIN + VALIDATION),
    )


def accuracy(params, hypers, clients, seed, of=slice(None)):
    """Return the accuracy in percent of each of these clients' models on its own test examples, averaged over them."""
    images, labels = (
        each[of if isinstance(of, slice) else list(of), TRAIN + VALIDATION :] for each in parts(clients, seed)
    )
    made = np.einsum("nkd,ndc->nkc", images, params["w"]) + params["b"][:, None] + hypers[:, None]
    return 100 * float((made.argmax(2) == labels).mean())
