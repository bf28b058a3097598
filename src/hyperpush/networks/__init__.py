"""Who can talk to whom, when, and with which weights."""

import inspect
from collections.abc import Callable
from typing import cast

from hyperpush.errors import InvalidInput, unknown
from hyperpush.networks.base import Network as Network
from hyperpush.networks.base import Weights as Weights
from hyperpush.networks.circulant import DirectedRing as DirectedRing
from hyperpush.networks.circulant import Exponential as Exponential
from hyperpush.networks.circulant import OnePeerExponential as OnePeerExponential
from hyperpush.networks.circulant import Ring as Ring
from hyperpush.networks.complete import FullyConnected as FullyConnected
from hyperpush.networks.erdos_renyi import StaticUndirected as StaticUndirected
from hyperpush.networks.graph import FromGraph as FromGraph
from hyperpush.networks.independent import RandomDirected as RandomDirected
from hyperpush.networks.independent import RandomUndirected as RandomUndirected
from hyperpush.networks.k_out import KOut as KOut
from hyperpush.networks.links import Links as Links
from hyperpush.networks.means import Means as Means
from hyperpush.networks.mixing import combine as combine
from hyperpush.networks.mixing import lowest as lowest
from hyperpush.networks.mixing import matrix as matrix
from hyperpush.networks.star import Star as Star
from hyperpush.networks.table import Listed as Listed
from hyperpush.networks.table import Table as Table
from hyperpush.networks.table import adjacency as adjacency
from hyperpush.networks.torus import Torus as Torus
from hyperpush.networks.trace import Trace as Trace
from hyperpush.networks.weights import doubly_stochastic as doubly_stochastic


def by_name(name: str, clients: int, default_seed: int = 0, **options: object) -> Network:
    """The network of that name; options are those of its class, `default_seed` its seed if it has one."""
    from hyperpush.registry import find  # which imports this package

    build = cast(Callable[..., Network], find("networks", name, "network"))  # each class has options of its own
    parameters = list(inspect.signature(build).parameters.values())[1:]
    for option in options:
        if option not in {parameter.name for parameter in parameters}:
            raise unknown(f"option of {name}", option, [parameter.name for parameter in parameters])
    if any(parameter.name == "seed" for parameter in parameters):
        options = {"seed": default_seed, **options}
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise InvalidInput(parameter.name, None, f"a value: {name} requires it")
    return build(clients, **options)
