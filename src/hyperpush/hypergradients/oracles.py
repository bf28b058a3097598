"""Hypergradients on one machine with all clients' data: the reference for decentralized estimates.

The hypergradient of the mean outer cost F̄ is, with inner costs f and outer costs F,

    d_{λ_i} F̄ = (1/n)∂_λ F_i − B_i (Σ_k H_k)^{-1} (1/n)Σ_j ∂_x F_j,   H_k = ∂²_xx f_k,  B_i = ∂²_λx f_i

Each client's derivatives are taken at its own params, which are all equal at the solution of the inner problem. `dense`
and `recurrent` form matrices and suit small problems. `Pooled` takes products only. All numbers are float64.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from scipy import optimize
from scipy.sparse.linalg import LinearOperator, cg

from hyperpush.data.batches import Data, full_batch
from hyperpush.hypergradients.lanczos import Lanczos
from hyperpush.methods.base import Target
from hyperpush.networks import Network
from hyperpush.task.problem import Problem

LANCZOS, NUMBERS = 128, 1 << 26  # largest number of Lanczos steps, and of numbers that they keep
POLISH = 3  # Newton steps after the minimization, which cannot resolve costs below rounding
FAR = 1e8  # largest trust region

Vector = Float[np.ndarray, " size"]


def dense(problem: Problem, params: PyTree, hypers: PyTree, data: Data) -> PyTree:
    """Return the closed form of the hypergradient with explicit Hessians, as NumPy arrays."""
    hessians, mixed, along_x, along_hyper = derivatives(problem, params, hypers, data)
    q = np.linalg.solve(hessians.sum(0), along_x.mean(0))
    return _as_hypers(along_hyper / len(hessians) - mixed @ q, hypers)


def recurrent(
    problem: Problem,
    params: PyTree,
    hypers: PyTree,
    data: Data,
    network: Network,
    step_size: float,
    variant: Literal["gradient-first", "gradient-after"],
    weights: Literal["push", "gossip"] = "push",
) -> PyTree:
    """Return the derivative at the fixed point of the expected step of SGP or DSGD, the target of recurrent estimators.

    It is B̄(I − Ā)^{-1}c_x + c_λ, with the symbols of `recurrent.py`.
    """
    hessians, mixed, along_x, along_hyper = derivatives(problem, params, hypers, data)
    (n, d), means = along_x.shape, network.means(weights)
    mass = means.stationary()
    back = np.kron(means.weights, np.eye(d))  # m_i = Σ_j p̄_{i→j} u_j
    bend, down = np.zeros((n, d, n, d)), np.zeros((n, mixed.shape[1], n, d))
    for i in range(n):
        bend[i, :, i], down[i, :, i] = step_size / mass[i] * hessians[i], -step_size * mixed[i]
    bend, down = bend.reshape(n * d, n * d), down.reshape(-1, n * d)
    after = variant == "gradient-after"
    onward = back - bend if after else back - bend @ back
    u = np.linalg.solve(np.eye(n * d) - onward, (along_x / n / mass[:, None]).ravel())
    return _as_hypers((down @ (u if after else back @ u)).reshape(n, -1) + along_hyper / n, hypers)


def derivatives(problem: Problem, params: PyTree, hypers: PyTree, data: Data) -> tuple[np.ndarray, ...]:
    """Return every client's H, B, ∂_x F and ∂_λ F as arrays, with flattened params and hypers."""
    with jax.enable_x64(True):
        params, hypers, data = as_float64((params, hypers, data))
        back_x, back_hyper = _unravel(params), _unravel(hypers)

        def of_one(x: PyTree, hyper: PyTree, own: Data):
            def inner(x, hyper):
                return problem.inner_cost(back_x(x), back_hyper(hyper), full_batch(own.train))

            def outer(x, hyper):
                return problem.outer_cost(back_x(x), back_hyper(hyper), full_batch(own.outer))

            at = ravel_pytree(x)[0], ravel_pytree(hyper)[0]
            return jax.hessian(inner)(*at), jax.jacfwd(jax.grad(inner, 1), 0)(*at), *jax.grad(outer, (0, 1))(*at)

        return tuple(np.asarray(a) for a in jax.jit(jax.vmap(of_one))(params, hypers, data))


def minimize(problem: Problem, params: PyTree, hypers: PyTree, data: Data) -> PyTree:
    """Return the shared inner solution, from the mean of the clients' params; NumPy arrays, equal for all clients."""
    with jax.enable_x64(True):
        params, hypers, data = as_float64((params, hypers, data))
        return jax.tree.map(np.asarray, Pooled(problem, data, False).minimize(params, hypers).params)


def as_float64(tree: PyTree) -> PyTree:
    """Return the tree with all floating-point numbers in float64; call it where float64 is enabled."""
    leaves = jax.tree.map(jnp.asarray, tree)
    return jax.tree.map(lambda a: a.astype(float) if jnp.issubdtype(a.dtype, jnp.floating) else a, leaves)


class Minimum(NamedTuple):
    """A minimum of an inner problem and its quality."""

    params: PyTree  # clients on axis 0
    gradient_norm: float
    first_norm: float  # norm of the gradient at the start
    newton_step: float  # length of the next Newton step relative to the params, an estimate of the remaining distance


class Pooled(eqx.Module):
    """All clients' inner problem as functions of one flat vector, which SciPy's solvers take.

    Clients share one model. If they are `alone`, each has its own, and the vector concatenates them. Then the Hessian
    consists of the clients' own blocks. All numbers are float64; call the methods where float64 is enabled.
    """

    problem: Problem
    data: Data  # clients on axis 0
    alone: bool = eqx.field(static=True)

    @eqx.filter_jit
    def spread(self, vector: Float[Array, " size"], like: PyTree) -> PyTree:
        """Return a flat vector as a pytree of params like `like`, with clients on axis 0."""
        n = jax.tree.leaves(like)[0].shape[0]
        rows = vector.reshape(n if self.alone else 1, -1)
        return jax.vmap(_unravel(like))(jnp.broadcast_to(rows, (n, rows.shape[1])))

    @eqx.filter_jit
    def gather(self, rows: PyTree) -> Float[Array, " size"]:
        """Return one flat vector from the clients' pytrees: their mean, or their concatenation if `alone`."""
        flat = jax.vmap(lambda row: ravel_pytree(row)[0])(rows)
        return flat.ravel() if self.alone else jnp.mean(flat, axis=0)

    @eqx.filter_jit
    def of_each(self, name: str, params: PyTree, hypers: PyTree, *more: PyTree, on: str = "train") -> PyTree:
        """Return the results of a method of the problem for every client, on all its examples of a data set."""
        method = getattr(self.problem, name)

        def one(x: PyTree, hyper: PyTree, own: PyTree, *own_more: PyTree) -> PyTree:
            return method(x, hyper, full_batch(own), *own_more)

        return jax.vmap(one)(params, hypers, self.data.train if on == "train" else self.data.outer, *more)

    @eqx.filter_jit
    def cost_and_gradient(self, vector: Float[Array, " size"], params: PyTree, hypers: PyTree):
        """Return the mean of the inner costs (the sum if `alone`) and its gradient; `params` give the shapes."""
        at = self.spread(vector, params), hypers
        costs, gradients = (self.of_each(name, *at) for name in ("inner_cost", "inner_gradient"))
        return (jnp.sum if self.alone else jnp.mean)(costs), self.gather(gradients)

    @eqx.filter_jit
    def hessian_product(self, params: PyTree, hypers: PyTree, vector: Float[Array, " size"]) -> Float[Array, " size"]:
        """Return the mean of the clients' products H_k · vector, or their concatenation if clients are `alone`.

        Each H_k is evaluated at the client's own params.
        """
        return self.gather(self.of_each("hessian_product", params, hypers, self.spread(vector, params)))

    def hessian(self, params: PyTree, hypers: PyTree) -> LinearOperator:
        """Return the Hessian as a SciPy operator."""
        size = self.gather(params).size

        def product(vector: Vector) -> Vector:
            return np.asarray(self.hessian_product(params, hypers, jnp.asarray(vector.ravel())))

        return LinearOperator((size, size), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]

    def minimize(self, params: PyTree, hypers: PyTree, steps: int = 50) -> Minimum:
        """Return the minimum, by at most `steps` trust-region Newton steps from the mean of all params."""

        def cost(vector: Vector) -> tuple[float, Vector]:
            value, gradient = self.cost_and_gradient(jnp.asarray(vector), params, hypers)
            return float(value), np.asarray(gradient)

        def hessian_at(vector: Vector) -> LinearOperator:
            return self.hessian(self.spread(jnp.asarray(vector), params), hypers)

        start = np.asarray(self.gather(params))
        first = float(np.linalg.norm(cost(start)[1]))
        options = {"maxiter": steps, "gtol": 1e-14 * first + 1e-300, "max_trust_radius": FAR}
        with np.errstate(all="ignore"):  # without a minimum, numbers may overflow; the result shows it
            x = optimize.minimize(
                cost, start, jac=True, hessp=lambda x, v: hessian_at(x) @ v, method="trust-ncg", options=options
            ).x
            gradient, step = cost(x)[1], np.zeros_like(x)
            for _ in range(POLISH):
                step = solve(hessian_at(x), gradient)
                after = cost(x - step)[1]
                if not np.linalg.norm(after) < np.linalg.norm(gradient):
                    break
                x, gradient = x - step, after
        missing = np.linalg.norm(step) / (1 + np.linalg.norm(x))
        return Minimum(self.spread(jnp.asarray(x), params), float(np.linalg.norm(gradient)), first, float(missing))

    def hypergradient(self, target: Target, params: PyTree, hypers: PyTree) -> tuple[PyTree, float]:
        """Return the true result of an estimator with this target, and the relative residual of its linear systems.

        `"local"` requires clients that are `alone`.
        """
        along_x, direct = self.of_each("outer_gradients", params, hypers, on="outer")
        if target == "direct":
            return direct, 0.0
        operator, n = self.hessian(params, hypers), jax.tree.leaves(params)[0].shape[0]
        by_client = [np.asarray(row) for row in jax.vmap(lambda row: ravel_pytree(row)[0])(along_x)]
        rights = by_client if target == "client" else [np.asarray(self.gather(along_x))]
        q = [solve(operator, right) for right in rights]
        stacked = jnp.stack(q)
        vectors = jax.vmap(_unravel(params))(stacked) if target == "client" else self.spread(stacked[0], params)
        # The mean Hessian is 1/n of the sum. In the mean outer cost, both terms have a factor 1/n.
        direct_share, indirect_share = {"global": (n, n), "client": (1, n), "local": (1, 1)}[target]
        value = jax.tree.map(
            lambda own, product: own / direct_share - product / indirect_share,
            direct,
            self.of_each("jacobian_product", params, hypers, vectors),
        )
        missing = [np.linalg.norm(operator @ x - b) / (np.linalg.norm(b) or 1) for x, b in zip(q, rights, strict=True)]
        return value, float(np.max(missing))

    def spectrum(self, params: PyTree, hypers: PyTree, key: PRNGKeyArray) -> tuple[float, float]:
        """Return the smallest and largest eigenvalue of the Hessian, by Lanczos steps.

        They are exact if the number of steps equals the dimension. Otherwise they are approached from inside, and the
        largest is close early.
        """
        size = self.gather(params).size
        steps = min(size, LANCZOS, max(2, NUMBERS // size))
        held = Lanczos.start(jax.random.normal(key, (size,)), steps)
        for number in range(steps):
            held = held.advance(self.hessian_product(params, hypers, held.vector), number)
        return held.ends()


def solve(operator: LinearOperator, right: Vector) -> Vector:
    """Return the solution of a system by conjugate gradients, or the last iterate at the step limit."""
    return cg(operator, right, rtol=1e-12, maxiter=min(10 * right.size, 2000))[0]


def _unravel(rows: PyTree):
    """Return the function that turns a flat vector into one client's pytree."""
    return ravel_pytree(jax.tree.map(lambda leaf: leaf[0], rows))[1]


def _as_hypers(values: np.ndarray, hypers: PyTree) -> PyTree:
    """Return one flat row per client in the shape of the hypers, as NumPy arrays."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.vmap(_unravel(as_float64(hypers)))(jnp.asarray(values)))
