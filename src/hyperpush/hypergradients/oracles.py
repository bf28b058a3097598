"""Hypergradients on one machine that sees everyone's data: the truth that decentralized estimates are tested against.

    d_{λ_i} F̄ = (1/n)∂_λ F_i − B_i (Σ_k H_k)^{-1} (1/n)Σ_j ∂_x F_j,   H_k = ∂²_xx f_k,  B_i = ∂²_λx f_i

Each client's derivatives are taken at its own params; at the solution of the inner problem these are all the same.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from hyperpush.data.batches import Data, everything
from hyperpush.networks import Network
from hyperpush.problem import Problem


def dense(problem: Problem, params: PyTree, hypers: PyTree, data: Data) -> PyTree:
    """The closed form with explicit Hessians, in float64 whatever the run's precision; NumPy arrays.

    For small problems: it forms d×d matrices.
    """
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
) -> PyTree:
    """B̄(I − Ā)^{-1}c_x + c_λ: the derivative of the fixed point of SGP's expected step (`recurrent.py`), by NumPy.

    For small problems: it forms an nd×nd matrix.
    """
    hessians, mixed, along_x, along_hyper = derivatives(problem, params, hypers, data)
    (n, d), means = along_x.shape, network.means()
    mass = means.stationary()
    back = np.kron(means.push, np.eye(d))  # m_i = Σ_j p̄_{i→j} u_j
    bend = np.zeros((n, d, n, d))
    down = np.zeros((n, mixed.shape[1], n, d))
    for i in range(n):
        bend[i, :, i] = step_size / mass[i] * hessians[i]
        down[i, :, i] = -step_size * mixed[i]
    bend, down = bend.reshape(n * d, n * d), down.reshape(-1, n * d)
    after = variant == "gradient-after"
    onward = back - bend if after else back - bend @ back
    u = np.linalg.solve(np.eye(n * d) - onward, (along_x / n / mass[:, None]).ravel())
    value = (down @ (u if after else back @ u)).reshape(n, -1) + along_hyper / n
    return _as_hypers(value, hypers)


def derivatives(problem: Problem, params: PyTree, hypers: PyTree, data: Data) -> tuple[np.ndarray, ...]:
    """Every client's H, B, ∂_x F and ∂_λ F as float64 arrays, params and hypers flattened."""
    with jax.enable_x64(True):
        params, hypers, data = jax.tree.map(_wide, (params, hypers, data))
        back_x, back_hyper = (ravel_pytree(jax.tree.map(lambda leaf: leaf[0], t))[1] for t in (params, hypers))

        def derivatives(x, hyper, own: Data):
            def f(x, hyper):
                return problem.inner_cost(back_x(x), back_hyper(hyper), everything(own.train))

            def outer(x, hyper):
                return problem.outer_cost(back_x(x), back_hyper(hyper), everything(own.outer))

            at = ravel_pytree(x)[0], ravel_pytree(hyper)[0]
            return jax.hessian(f)(*at), jax.jacfwd(jax.grad(f, 1), 0)(*at), *jax.grad(outer, (0, 1))(*at)

        return tuple(np.asarray(a, np.float64) for a in jax.jit(jax.vmap(derivatives))(params, hypers, data))


def _as_hypers(values: np.ndarray, hypers: PyTree) -> PyTree:
    """One flat row per client in the shape of the hypers, as NumPy arrays."""
    with jax.enable_x64(True):
        back = ravel_pytree(jax.tree.map(lambda leaf: _wide(leaf)[0], hypers))[1]
        return jax.tree.map(np.asarray, jax.vmap(back)(jnp.asarray(values)))


def _wide(leaf: Array | np.ndarray) -> Array:
    array = np.asarray(leaf)
    return jnp.asarray(array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array)


def _centralized(problem: Problem, params: PyTree, hypers: PyTree, data: Data, solve) -> PyTree:
    """v_i = (1/n)∂_λ F_i − B_i q with q = solve(mean Hessian product, right-hand side) / n."""

    def inner_products(vector):
        return jax.vmap(lambda x, hyper, own: problem.products(x, hyper, everything(own), vector), in_axes=(0, 0, 0))(
            params, hypers, data.train
        )

    def mean_hessian(vector):
        return jax.tree.map(lambda h: jnp.mean(h, axis=0), inner_products(vector)[0])

    along_x, along_hyper = jax.vmap(lambda x, hyper, own: problem.outer_gradients(x, hyper, everything(own)))(
        params, hypers, data.outer
    )
    q = solve(mean_hessian, jax.tree.map(lambda g: jnp.mean(g, axis=0), along_x))
    clients = jax.tree.leaves(params)[0].shape[0]
    return jax.tree.map(lambda own, product: (own - product) / clients, along_hyper, inner_products(q)[1])


def conjugate_gradient(
    problem: Problem, params: PyTree, hypers: PyTree, data: Data, tolerance: float = 1e-10, steps: int | None = None
) -> PyTree:
    """Implicit differentiation with the mean Hessian's inverse applied by conjugate gradients (Pedregosa 2016)."""

    def solve(product, right):
        return jax.scipy.sparse.linalg.cg(product, right, tol=tolerance, maxiter=steps)[0]

    return jax.jit(lambda p, h, d: _centralized(problem, p, h, d, solve))(params, hypers, data)


def neumann(problem: Problem, params: PyTree, hypers: PyTree, data: Data, terms: int, step_size: float) -> PyTree:
    """Implicit differentiation with the inverse as a Neumann series, η Σ_m (I − ηH)^m (Lorraine et al. 2020)."""

    def solve(product, right):
        def term(_, held):
            power, total = held
            power = jax.tree.map(lambda p, h: p - step_size * h, power, product(power))
            return power, jax.tree.map(jnp.add, total, power)

        _, total = jax.lax.fori_loop(0, terms, term, (right, right))
        return jax.tree.map(lambda t: step_size * t, total)

    return jax.jit(lambda p, h, d: _centralized(problem, p, h, d, solve))(params, hypers, data)


def minimise(problem: Problem, params: PyTree, hypers: PyTree, data: Data, steps: int = 50) -> PyTree:
    """The consensus solution of a strongly convex inner problem by damped Newton steps in float64; NumPy arrays.

    Starts from the clients' mean params; the result has the same params at every client.
    """
    with jax.enable_x64(True):
        params, hypers, inner = jax.tree.map(_wide, (params, hypers, data.train))
        x, back = ravel_pytree(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), params))

        @jax.jit
        def cost(x):
            return jnp.mean(
                jax.vmap(lambda hyper, own: problem.inner_cost(back(x), hyper, everything(own)))(hypers, inner)
            )

        gradient, hessian = jax.jit(jax.grad(cost)), jax.jit(jax.hessian(cost))
        for _ in range(steps):
            direction = jnp.linalg.solve(hessian(x), gradient(x))
            length = 1.0
            while length > 1e-8 and not cost(x - length * direction) <= cost(x):
                length /= 2
            x = x - length * direction
            if jnp.linalg.norm(direction) <= 1e-14 * (1 + jnp.linalg.norm(x)):
                break
        clients = jax.tree.leaves(hypers)[0].shape[0]
        return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (clients, *leaf.shape)).copy(), back(x))
