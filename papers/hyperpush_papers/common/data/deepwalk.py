"""DeepWalk: places for the nodes of a graph such that nodes met on the same random walks are close."""

import numpy as np
from jaxtyping import Float, Int
from numpy.random import Generator

WALKS, LENGTH, WINDOW = 10, 40, 5  # walks from every node, their nodes, and how far apart nodes are counted


def walks(
    weights: Float[np.ndarray, "n n"], per_node: int, length: int, generator: Generator
) -> Int[np.ndarray, "m l"]:
    """`per_node` random walks of `length` nodes from every node, each step along a link in proportion to its weight.

    Every node has a link.
    """
    # The last link of each row is put above every draw, so that rounding cannot lead to where there is none.
    reached = np.cumsum(weights, axis=1) / weights.sum(1, keepdims=True)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    reached[np.arange(len(weights)) >= last[:, None]] = np.inf
    at = np.repeat(np.arange(len(weights)), per_node)
    visited = [at]
    for _ in range(length - 1):
        at = np.argmax(reached[at] > generator.random(len(at))[:, None], axis=1)
        visited.append(at)
    return np.stack(visited, axis=1)


def co_occurrences(visited: Int[np.ndarray, "m l"], nodes: int, window: int) -> Float[np.ndarray, "n n"]:
    """Count the places at which v is at most `window` steps from u on a walk, before or after."""
    counts = np.zeros((nodes, nodes))
    for apart in range(1, min(window, visited.shape[1] - 1) + 1):
        np.add.at(counts, (visited[:, :-apart].ravel(), visited[:, apart:].ravel()), 1)
    return counts + counts.T


def embedding(weights: Float[np.ndarray, "n n"], dimensions: int, generator: Generator) -> Float[np.ndarray, "n k"]:
    """e with e_u·e_v ≈ log(#(u, v)·D / (#(u)·#(v))), from the matrix's largest eigenvalues; signs by the largest entry.

    #(u, v) counts how often the two are met within `WINDOW` steps of a walk, one half added, #(u) those of u and D all
    of them. Walks as in Perozzi, Al-Rfou, Skiena 2014. Skip-gram factorizes this matrix (Levy, Goldberg 2014), so
    that its best factors need no training.
    """
    counts = co_occurrences(walks(weights, WALKS, LENGTH, generator), len(weights), WINDOW) + 0.5
    each = counts.sum(1)
    sizes, vectors = np.linalg.eigh(np.log(counts * counts.sum() / (each[:, None] * each)))
    found = (vectors * np.sqrt(np.maximum(sizes, 0)))[:, ::-1][:, :dimensions]
    leading = found[np.abs(found).argmax(0), np.arange(dimensions)]
    return found * np.where(leading < 0, -1.0, 1.0)
