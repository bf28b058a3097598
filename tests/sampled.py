"""Heterogeneous quadratics whose costs are means over examples, with all derivatives and solutions in NumPy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

import hyperpush as hp
from hyperpush.algorithms.base import LOOP, BilevelState
from hyperpush.programs import program_of
from hyperpush.task.problem import Problem
from hyperpush.tasks.quadratic import inner as one_inner
from hyperpush.tasks.quadratic import outer as one_outer
from hyperpush.tasks.quadratic import outer_fixed_points, quadratic


def _mean(batch):
    return jax.tree.map(lambda leaf: leaf.mean(0), batch)


# Gradients are linear in all numbers that differ between a client's examples, so those of a batch are unbiased.
def inner(params, hyper, batch):
    return one_inner(params, hyper, _mean(batch))


def outer(params, hyper, batch):
    return one_outer(params, hyper, _mean(batch))


PROBLEM = Problem(inner, outer)


class Slopes:
    """Derivatives of all clients at once, by the hypers x and each client's params y."""

    def __init__(self, first, second):
        self.H, self.b, self.J = (first[name] for name in ("hessian", "linear", "coupling"))
        self.D, self.e, self.g = (second[name] for name in ("map", "target", "hyper_target"))

    def inner(self, x, y):
        """Return ∂_y of the inner costs."""
        return np.einsum("nij,nj->ni", self.H, y) - self.b + np.einsum("nhd,nh->nd", self.J, x)

    def outer(self, x, y):
        """Return (∂_y, ∂_x) of the outer costs."""
        return np.einsum("nij,ni->nj", self.D, np.einsum("nij,nj->ni", self.D, y) - self.e), x - self.g

    def through(self, x, y, inverses):
        """Return ∂_xF_i − J_i S_i ∂_yF_i for given matrices S_i."""
        along_y, along_x = self.outer(x, y)
        return along_x - np.einsum("nhd,ndk,nk->nh", self.J, inverses, along_y)

    def own(self, x, y):
        """Return the local hypergradients ∂_xF_i − J_i H_i^{-1} ∂_yF_i."""
        return self.through(x, y, np.linalg.inv(self.H))

    def common(self, x, y, inverse=None):
        """Return ∂_xF_i − J_i S mean_k ∂_yF_k, where S is the inverse of the mean Hessian or a given matrix."""
        inverse = np.linalg.inv(self.H.mean(0)) if inverse is None else inverse
        along_y, along_x = self.outer(x, y)
        return along_x - self.J @ (inverse @ along_y.mean(0))

    def end(self, gradient, common_solution):
        """Return the common x with mean gradient(x, y) = 0; y is the common inner solution or each client's."""
        n, h, d = self.J.shape

        def mean(x):
            right = self.b - np.einsum("nhd,h->nd", self.J, x)
            common = np.broadcast_to(np.linalg.solve(self.H.mean(0), right.mean(0)), (n, d))
            y = common if common_solution else np.linalg.solve(self.H, right[..., None])[..., 0]
            return gradient(np.broadcast_to(x, (n, h)), y).mean(0)

        offset = mean(np.zeros(h))  # mean(x) is affine in x
        return np.linalg.solve(np.stack([mean(unit) - offset for unit in np.eye(h)], axis=1), -offset)


def series(hessian, terms, step):
    """Return η Σ_{m < terms} (I − ηH)^m for one matrix or several."""
    eye = np.eye(hessian.shape[-1])
    powers = [np.broadcast_to(eye, hessian.shape)]
    for _ in range(terms - 1):
        powers.append(powers[-1] @ (eye - step * hessian))
    return step * sum(powers)


def sampled(clients, seed, examples=6, noise=0.3):
    """Return the task, its start (params, hypers, data), its derivatives, and the points x_G, x_L, x_M."""
    made = quadratic(clients, seed)
    generator = np.random.default_rng(seed + 1)

    def spread(name, leaf):
        leaf = np.asarray(leaf)[:, None].repeat(examples, 1)
        if name == "map":
            return leaf
        change = noise * generator.normal(size=leaf.shape)
        change = change + change.swapaxes(-1, -2) if name == "hessian" else change
        return leaf + change - change.mean(1, keepdims=True)

    parts = [{name: spread(name, leaf) for name, leaf in part.items()} for part in (made.train, made.validation)]
    means = [jax.tree.map(lambda leaf: leaf.mean(1), part) for part in parts]
    start = jax.tree.map(jnp.asarray, (made.params, made.hypers, *parts))
    task = task_of(*start)
    return SimpleNamespace(task=task, start=start, slopes=Slopes(*means), ends=outer_fixed_points(*means))


def task_of(params, hypers, train, validation, common=True):
    """Return the task of these costs with other starts or data."""
    return hp.Task(
        inner=inner,
        outer=outer,
        params=hp.per_client(params),
        hypers=hp.per_client(hypers),
        train=train,
        validation=validation,
        common=common,
    )


def recorded(made, algorithm, network):
    """Run from the start; `history` has the hypers and params after every iteration."""
    task, states = made.task, BilevelState(made.task.params, made.task.hypers)
    record = {LOOP: lambda state, ctx: (state.hyper, state.params)}
    program = program_of(algorithm.bind(network), task.problem)
    run = hp.Simulate().run(program, network, states, task.data, jax.random.key(0), record=record)
    ends = {"params": run.states.params, "hypers": run.states.hyper, "history": run.history[LOOP]}
    return SimpleNamespace(**ends, rounds=run.rounds, floats=run.floats)


def distance(hypers, end, start):
    """Return the distance of the farthest client from `end`, relative to the farthest at the start."""
    return np.linalg.norm(hypers - end, axis=-1).max() / np.linalg.norm(start - end, axis=-1).max()
