"""Make networks by name, for the command line and the studies."""

import inspect

from hyperpush.networks.base import Network


def network(name: str, clients: int, default_seed: int = 0, **options: object) -> Network:
    """Return the network with a name such as `"random-directed"` or `"module:Class"`.

    Args:
        name: A registered name; `hyperpush list` shows them. Case and dashes do not matter.
        clients: Number of clients.
        default_seed: The seed for network classes with an option `seed`, unless `options` contain `seed`.
        options: Options of the network's class, by name.

    Raises:
        InvalidInput: The network or an option does not exist, or an option is out of range. The message names the key.

    Example:
        >>> import hyperpush as hp
        >>> print(hp.network("k-out", 20, k=3).k)
        3
    """
    from hyperpush.methods.registry import build, find  # the registry imports this package

    if "seed" in inspect.signature(find("networks", name, "network")).parameters:
        options = {"seed": default_seed, **options}
    return build("networks", {"name": name, "clients": clients, **options}, "network")
