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
from hyperpush.networks.torus import Torus as Torus
from hyperpush.networks.trace import Trace as Trace

# FromGraph is missing on purpose: its only input is a Python object, which a configuration cannot hold.
NETWORKS: dict[str, type[Network]] = {
    network.name: network
    for network in (
        FullyConnected,
        StaticUndirected,
        RandomUndirected,
        RandomDirected,
        Ring,
        DirectedRing,
        Torus,
        Star,
        Exponential,
        OnePeerExponential,
        KOut,
        Trace,
    )
}


def by_name(name: str, clients: int, default_seed: int = 0, **options: object) -> Network:
    """The network of that name; options are those of its class, `default_seed` its seed if it has one."""
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    parameters = list(inspect.signature(NETWORKS[name].__init__).parameters.values())[2:]
    for option in options:
        if option not in {parameter.name for parameter in parameters}:
            raise unknown(f"option of {name}", option, [parameter.name for parameter in parameters])
    if any(parameter.name == "seed" for parameter in parameters):
        options = {"seed": default_seed, **options}
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise InvalidInput(parameter.name, None, f"a value: {name} cannot do without")
    build = cast(Callable[..., Network], NETWORKS[name])  # each class has options of its own
    return build(clients, **options)
