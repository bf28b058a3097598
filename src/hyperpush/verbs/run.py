"""Run a program that is not part of a method. Arguments are checked and messages counted as for the verbs."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.base.checks import no_type_check
from hyperpush.base.errors import InvalidInput
from hyperpush.engines.base import Engine
from hyperpush.engines.simulate import Simulate
from hyperpush.networks import Network
from hyperpush.programs import Node, ProgramRecipe
from hyperpush.verbs.checks import CONCRETE, branch_refused, check_engine_kind, check_key, check_network_kind
from hyperpush.verbs.costs import Costs


@dataclass(frozen=True)
class Ran:
    """Result of `hp.extend.run`: the clients' states at the end of a program.

    Attributes:
        states: The final states, with clients on axis 0; with `hp.Peers(…)` the party's state, without that axis.
        costs: Communication rounds, and the numbers and bytes that each client sent.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> step = hp.programs.Local(lambda state, ctx: 2 * state)
        >>> hp.extend.run(step, {}, hp.networks.Ring(3), key=0, states=jnp.ones(3)).costs.floats
        0
    """

    states: PyTree
    costs: Costs


@no_type_check
def run(
    program: Node | ProgramRecipe,
    data: PyTree,
    network: Network,
    *,
    key: PRNGKeyArray | int,
    states: PyTree,
    engine: Engine = Simulate(),
) -> Ran:
    """Run a program for all clients, and count its messages.

    **Use it** for computations among clients that need no method, such as means, spectra or statistics. **Avoid it** on
    private data: it neither adds noise nor counts releases.

    Args:
        program: A program of `hp.programs`.
        data: All clients' data, with clients on axis 0. Each client reads its own part as `ctx.data`. `{}` for a
            program without data.
        network: The network: its links, and the rounds in which they are up.
        key: An integer or a JAX key; it determines random draws and random links.
        states: Each client's initial state, with clients on axis 0. With `hp.Peers(…)`, the party's state without that
            axis.
        engine: The engine that runs the clients.

    Returns:
        A `Ran` with `states` and `costs`.

    Raises:
        InvalidInput: An argument is of the wrong kind, or the number of clients does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> import hyperpush as hp
        >>> mean = hp.programs.Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean, 1, "exact")
        >>> found = hp.extend.run(mean, {}, hp.networks.Ring(3), key=0, states=jnp.array([1.0, 2.0, 6.0]))
        >>> found.states.tolist()
        [3.0, 3.0, 3.0]
    """
    if not isinstance(program, Node | ProgramRecipe):
        raise InvalidInput("program", program, "a node of hp.programs, such as hp.programs.Local(…)")
    check_network_kind(network)
    check_engine_kind(engine)
    if not engine.hosts_one:
        for name, tree in (("states", states), ("data", data)):
            _check_axis(name, tree, network.clients)
    try:
        found = engine.run(program, network, states, data, check_key(key))
    except CONCRETE as error:
        raise branch_refused("program") from error
    return Ran(found.states, Costs.of(found))


def _check_axis(name: str, tree: Any, clients: int) -> None:
    """Raise InvalidInput unless all arrays have clients on axis 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if np.shape(leaf)[:1] != (clients,):
            given = f"an array of shape {np.shape(leaf)}"
            raise InvalidInput(f"{name}{jax.tree_util.keystr(path)}", given, f"{clients} clients on axis 0")
