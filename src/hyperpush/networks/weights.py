"""Doubly stochastic weights of a fixed undirected graph, in float64 on the host."""

import numpy as np
import scipy.sparse
from jaxtyping import Float

from hyperpush.base.checks import require
from hyperpush.base.errors import InvalidInput, unknown

_LARGEST_SDP = 200
_INTERIOR_POINT = 30


def doubly_stochastic(graph: scipy.sparse.csr_array, mixing: str) -> Float[np.ndarray, " e"]:
    """Return the weight P[i, j] of every link of an undirected graph, in the order of its entries.

    Weights are symmetric, nonnegative, and sum to at most 1 per client; the rest of 1 is the client's own weight.
    `"metropolis"` takes 1 / (1 + max(deg_i, deg_j)). `"fastest-mixing"` minimizes |λ₂| by a semidefinite program, for
    up to 200 clients.

    Args:
        graph: A symmetric matrix with an entry for each link; `hp.networks.adjacency` makes one.
        mixing: `"metropolis"` or `"fastest-mixing"`.

    Raises:
        InvalidInput: The kind of weights is unknown, the graph is too large, or cvxpy is not installed.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.networks.doubly_stochastic(hp.networks.Star(4).possible(), "metropolis"))
        [0.25 0.25 0.25 0.25 0.25 0.25]
    """
    kinds = {"metropolis": metropolis, "fastest-mixing": fastest_mixing}
    if mixing not in kinds:
        raise unknown("mixing", mixing, kinds)
    return kinds[mixing](graph)


def metropolis(graph: scipy.sparse.csr_array) -> Float[np.ndarray, " e"]:
    """Return P[i, j] = 1 / (1 + max(deg_i, deg_j)) (Metropolis–Hastings; Xiao and Boyd 2004)."""
    degrees = np.diff(graph.indptr)
    return 1 / (1 + np.maximum(np.repeat(degrees, degrees), degrees[graph.indices]))


def fastest_mixing(graph: scipy.sparse.csr_array) -> Float[np.ndarray, " e"]:
    """Return the symmetric Markov chain on the graph that mixes fastest (Boyd, Diaconis and Xiao 2004).

    Minimize ‖P − 11ᵀ/n‖₂ over P = Pᵀ ≥ 0, P1 = 1, P[i, j] = 0 off the graph: a semidefinite program in the weights w
    of the undirected links. With P = I − Σ_e w_e (e_i − e_j)(e_i − e_j)ᵀ symmetry and row sums hold by construction.
    """
    clients = len(graph.indptr) - 1
    if clients > _LARGEST_SDP:
        allowed = f"metropolis beyond {_LARGEST_SDP} clients: the SDP is too large"
        raise InvalidInput("mixing", "fastest-mixing", allowed)
    cp = require("cvxpy", "fastest-mixing")
    first, second = np.nonzero(np.triu(graph.toarray()))
    edge = np.arange(len(first))
    places = np.concatenate([end * clients + other for end in (first, second) for other in (first, second)])
    signs = np.repeat([1.0, -1.0, -1.0, 1.0], len(edge))
    laplacian = scipy.sparse.csr_array((signs, (places, np.tile(edge, 4))), shape=(clients**2, len(edge)))
    touches = scipy.sparse.csr_array(
        (np.ones(2 * len(edge)), (np.concatenate([first, second]), np.tile(edge, 2))), shape=(clients, len(edge))
    )
    weights = cp.Variable(len(edge), nonneg=True)
    spread = cp.reshape(laplacian @ weights, (clients, clients), order="C")
    deviation = np.eye(clients) - 1 / clients - spread
    slowest = cp.maximum(cp.lambda_max(deviation), -cp.lambda_min(deviation))
    # Clarabel is more precise, but its time grows with the sixth power of n: 6 s at n = 50, where SCS takes 1 s.
    solver = {"solver": cp.CLARABEL} if clients <= _INTERIOR_POINT else {"solver": cp.SCS, "eps": 1e-7}
    cp.Problem(cp.Minimize(slowest), [cp.Constant(touches) @ weights <= 1]).solve(**solver)
    if weights.value is None:
        raise InvalidInput("mixing", "fastest-mixing", "metropolis: the solver found no solution for this graph")
    # Meet the bounds exactly, which the solution misses by the solver's tolerance.
    best = np.maximum(weights.value, 0)
    best = best / max(1.0, (touches @ best).max())
    chain = np.zeros((clients, clients))
    chain[first, second] = chain[second, first] = best
    return chain[np.repeat(np.arange(clients), np.diff(graph.indptr)), graph.indices]
