"""Quadratics, different at every client, whose solution and hypergradient have closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from hyperpush.base.checks import check_integer
from hyperpush.task.starts import per_client
from hyperpush.task.task import Task


def inner(params, hyper, data):
    """Return the inner cost ½xᵀAx − bᵀx + λᵀCx of the params x and the hypers λ."""
    return 0.5 * params @ data["hessian"] @ params - data["linear"] @ params + hyper @ data["coupling"] @ params


def outer(params, hyper, data):
    """Return the outer cost ½‖Dx − e‖² + ½‖λ − g‖² of the params x and the hypers λ."""
    misfit = data["map"] @ params - data["target"]
    return 0.5 * jnp.sum(misfit**2) + 0.5 * jnp.sum((hyper - data["hyper_target"]) ** 2)


def quadratic(clients: int, seed: int, *, inner_size: int = 4, hyper_size: int = 3, common: bool = False) -> Task:
    """Make a task of random quadratics, strongly convex in the params and different at every client.

    The inner and outer cost of client i, with the params x and the hypers λ, are

        f_i(x, λ) = ½xᵀA_i x − b_iᵀx + λᵀC_i x,    F_i(x, λ) = ½‖D_i x − e_i‖² + ½‖λ − g_i‖²

    **Use it** to try a method: solutions and hypergradients have closed forms. **Avoid it** where single examples
    matter (mini-batches, influence, privacy): a client's costs are not sums over examples.

    Args:
        clients: Number of clients, at least 1.
        seed: Seed of the costs and of the hypers' start, 0 or more.
        inner_size: Length of the params, which start at zero.
        hyper_size: Length of the hypers, which start at random.
        common: True if all clients must agree on one hyper.

    Example:
        >>> import hyperpush as hp
        >>> hp.tasks.quadratic(3, seed=0)
        Task(3 clients, 4 params each; train 3, validation 3 examples; the outer level fits 'validation')
    """
    for name, given in {"clients": clients, "inner_size": inner_size, "hyper_size": hyper_size}.items():
        check_integer(name, given, minimum=1)
    check_integer("seed", seed, minimum=0)
    generator = np.random.default_rng(seed)
    factor = generator.normal(size=(clients, inner_size, inner_size)) / np.sqrt(inner_size)
    first = {
        "hessian": np.einsum("nij,nkj->nik", factor, factor) + 0.5 * np.eye(inner_size),
        "linear": generator.normal(size=(clients, inner_size)),
        "coupling": generator.normal(size=(clients, hyper_size, inner_size)),
    }
    second = {
        "map": generator.normal(size=(clients, inner_size, inner_size)) / np.sqrt(inner_size),
        "target": generator.normal(size=(clients, inner_size)),
        "hyper_target": generator.normal(size=(clients, hyper_size)),
    }
    hypers, dtype = generator.normal(size=(clients, hyper_size)), jnp.zeros(()).dtype
    hypers, first, second = jax.tree.map(lambda a: jnp.asarray(a, dtype), (hypers, first, second))
    return Task(
        inner=inner,
        outer=outer,
        params=jnp.zeros(inner_size, dtype),
        hypers=per_client(hypers),
        train=first,
        validation=second,
        common=common,
    )


def outer_fixed_points(first: PyTree, second: PyTree) -> dict[str, Float[np.ndarray, " hypers"]]:
    """Return the end points of algorithms with one hyper λ for all clients: `x_G`, `x_L`, `x_M` (algorithms/base.py).

    All three are zeros of an affine function of λ: the mean over clients of λ − g_i − C_i S_i D_iᵀ(D_i y_i(λ) − e_i).
    Here y_i(λ) is an inner solution, S_i an inverse Hessian, and C_i a mixed derivative. `x_G` takes all of them from
    the mean cost, and `x_L` from the client's own cost. `x_M` takes y_i from the mean cost, S_i and C_i from the
    client's own. NumPy computes the points.
    """
    first, second = (jax.tree.map(lambda a: np.asarray(a, np.float64), part) for part in (first, second))
    own = first["hessian"], first["coupling"], first["linear"][..., None]
    mean = tuple(np.broadcast_to(part.mean(0), part.shape) for part in own)
    maps, target = second["map"], second["target"][..., None]

    def zero(solution: tuple[np.ndarray, ...], adjoint: tuple[np.ndarray, ...]) -> np.ndarray:
        hessian, coupling, linear = solution
        still, slope = np.linalg.solve(hessian, linear), -np.linalg.solve(hessian, coupling.mT)  # y_i(λ) is affine
        through = adjoint[1] @ np.linalg.inv(adjoint[0]) @ maps.mT
        constant = (through @ (maps @ still - target)).mean(0)[:, 0]
        bend = (through @ maps @ slope).mean(0)
        return np.linalg.solve(np.eye(len(bend)) - bend, second["hyper_target"].mean(0) + constant)

    return {"x_G": zero(mean, mean), "x_L": zero(own, own), "x_M": zero(mean, own)}
