"""Cache results of functions of a network as long as the network exists, so that its links are examined once."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from hyperpush.networks.base import Network

P = ParamSpec("P")
R = TypeVar("R")


def remembered(function: Callable[Concatenate[Network, P], R]) -> Callable[Concatenate[Network, P], R]:
    """Return the function with a cache for each network, by the further arguments, which must be hashable.

    Networks never change, so the cache identifies them by `id`. Results for networks with traced arrays are not kept.
    """
    kept: dict[int, dict[Any, R]] = {}

    @functools.wraps(function)
    def of_network(network: Network, *args: P.args, **kwargs: P.kwargs) -> R:
        place = id(network)
        if place not in kept:
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(network)):
                return function(network, *args, **kwargs)
            kept[place] = {}
            weakref.finalize(network, kept.pop, place, None)
        results, key = kept[place], (args, *kwargs.items())
        if key not in results:
            results[key] = function(network, *args, **kwargs)
        return results[key]

    return of_network
