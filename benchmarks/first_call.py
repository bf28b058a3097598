"""The first call of a new user, in a new process; it needs only `pip install .`.

`time python benchmarks/first_call.py` measures the waiting time; compilation takes most of it.
"""

import jax.numpy as jnp
import numpy as np

import hyperpush as hp


def loss(x, hyper, batch):  # one client's losses, one per example
    inputs, targets = batch
    return (inputs @ x - targets) ** 2


def l2(x, hyper):  # added to the training cost; each client has its own rate
    return jnp.exp(hyper) * jnp.sum(x**2)


n, draw = 20, np.random.default_rng(0)
inputs = draw.normal(size=(n, 60, 5))  # clients on axis 0, or a list of clients of any sizes
targets = inputs @ np.arange(5.0) + 3 * draw.normal(size=(n, 60))
task = hp.Task(
    inner=loss,
    penalty=l2,
    outer=loss,
    params=jnp.zeros(5),
    hypers=0.0,
    train=(inputs[:, :10], targets[:, :10]),
    validation=(inputs[:, 10:], targets[:, 10:]),
)
network = hp.networks.RandomDirected(n, probability=(0.4, 0.8))
method = hp.PDBO(
    inner=hp.SGP(steps=600, step_size=0.1),
    hypergradient=hp.Automatic(),
    outer=hp.optimizer("adam", learning_rate=0.1),
    steps=5,
)
solution = hp.solve(task, method, network, key=0)
print(solution)
