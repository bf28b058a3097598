"""Check the arguments of a verb. A wrong argument raises InvalidInput with the allowed values in one line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from hyperpush.base.errors import InvalidInput
from hyperpush.data.sets import rows
from hyperpush.engines.base import Engine
from hyperpush.methods.base import Method
from hyperpush.networks import Network
from hyperpush.task.task import Task

CONCRETE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def branch_refused(name: str) -> InvalidInput:
    """Return the error to raise if JAX raised one of `CONCRETE`: a program branches in Python on a traced number."""
    given = "a branch in Python on a number that changes without compiling"
    allowed = "jnp.where or jax.lax.cond, or a field with eqx.field(static=True), which compiles per value"
    return InvalidInput(name, given, allowed)


def check_hypers(task: Task) -> None:
    """Raise InvalidInput if no cost and no penalty of the task depends on the hypers."""
    if not task.uses_hypers and not task.joint:
        given = "hypers that no cost or penalty contains"
        raise InvalidInput("task.hypers", given, "an inner cost, outer cost or penalty that depends on its hyper")


def check_common(task: Task, method: Method) -> None:
    """Raise InvalidInput unless algorithm and task agree on whether hypers are common to all clients or personal."""
    from hyperpush.methods.registry import registered  # the registry imports every method

    agree = bool(method.info.fixed_point)
    if agree == task.common:
        return
    fits = [name for name, each in registered("algorithms").items() if bool(each.info.fixed_point) == task.common]
    name = type(method).__name__
    what = "makes all hypers agree" if agree else "gives every client its own hypers"
    ask = "hp.Task(…, common=True)" if agree else "common=False"
    raise InvalidInput("task.common", task.common, f"{ask} for {name}, which {what}; or one of {', '.join(fits)}")


def check_task(given: Any) -> Task:
    """Raise InvalidInput unless `given` is a Task with concrete arrays."""
    if isinstance(getattr(given, "task", None), Task):  # `given` is a result or a loaded run
        allowed = f"its task: .{'result.' * hasattr(given, 'result')}task is the task at the point reached"
        raise InvalidInput("task", f"a {type(given).__name__}", allowed)
    if not isinstance(given, Task):
        raise InvalidInput(
            "task", _describe(given), "hp.Task(…) as the first argument: verb(task, method, network, key=…)"
        )
    if given.is_multi_seed:
        allowed = "the task of one run: a result of several seeds lacks a single end point"
        raise InvalidInput("task", "the task of several seeds", allowed)
    leaves = jax.tree.leaves((given._params, given._hypers, [each.given for each in given._sets.values()]))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        allowed = "a call outside of jax.jit, vmap and grad; inside them use hp.extend.evaluate, which is pure"
        raise InvalidInput("task", "arrays that JAX is tracing", allowed)
    return given


def check_method(given: Any, kind: type[Method]) -> None:
    """Raise InvalidInput unless `given` is a method of this kind.

    The message names the verb that takes this method, or shows how to construct a method.
    """
    if isinstance(given, kind):
        return
    label = {"InnerSolver": "an inner solver", "HypergradientEstimator": "a hypergradient estimator"}
    wanted = f"{label.get(kind.__name__, 'a bilevel algorithm')} such as {kind.sample}"
    if isinstance(given, type) and issubclass(given, kind):
        raise InvalidInput("method", _describe(given), f"an object such as {given.usage()}, not the class")
    if isinstance(given, Method):
        verbs = {"InnerSolver": "train", "HypergradientEstimator": "hypergradient", "Algorithm": "solve"}
        verb = next((verbs[base.__name__] for base in type(given).__mro__ if base.__name__ in verbs), "solve")
        raise InvalidInput("method", type(given).__name__, f"{wanted}; hp.{verb} takes {type(given).__name__}")
    raise InvalidInput("method", _describe(given), wanted)


def check_engine(given: Any, task: Task) -> None:
    """Raise InvalidInput unless `given` is an engine; for the task of one party it must run one client only."""
    check_engine_kind(given)
    if task.owner is not None and not given.hosts_one:
        name = task.names[task.owner]
        allowed = f"hp.Peers({name!r}, …), which hosts one client, for one party's task"
        raise InvalidInput("engine", type(given).__name__, allowed)
    given.check_task(task)


def check_engine_kind(given: Any) -> None:
    """Raise InvalidInput unless `given` is an engine."""
    if not isinstance(given, Engine):
        raise InvalidInput("engine", _describe(given), "an object such as hp.Simulate(), hp.Shard() or hp.Threads()")


def check_batch_size(method: Method, task: Task) -> None:
    """Raise InvalidInput if mini-batches have more examples than any client.

    Clients with fewer examples than a mini-batch use all of their examples.
    """
    size = method.option("batch_size")
    most = rows(task.train, one=False) if task.owner is None else task.most_examples
    if isinstance(size, int) and most is not None and size > most:
        allowed = f"at most {most}, the examples of a client; None takes all"
        raise InvalidInput(f"{type(method).__name__}.batch_size", size, allowed)


def check_key(given: Any) -> PRNGKeyArray:
    """Return a JAX key from a key or a whole number."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and 0 <= given < 2**32:
        return jax.random.key(int(given))
    if isinstance(given, jax.Array) and jnp.issubdtype(given.dtype, jax.dtypes.prng_key) and given.shape == ():
        return given
    if isinstance(given, jax.Array) and given.dtype == jnp.uint32 and given.shape == (2,):
        return jax.random.wrap_key_data(given)
    raise InvalidInput("key", _describe(given), "a whole number from 0 to 2³² − 1, or jax.random.key(…)")


def check_network(given: Any, task: Task, method: Method) -> None:
    """Raise InvalidInput unless `given` is a network of the task's size with links that the method can use."""
    check_network_kind(given)
    if given.clients != task.clients:
        allowed = f"a network of {task.clients} clients, as the task has"
        raise InvalidInput("network", f"{type(given).__name__} of {given.clients} clients", allowed)
    for part in (method, *method.parts()):
        check_links(part, given)


def check_network_kind(given: Any) -> None:
    """Raise InvalidInput unless `given` is a network."""
    if isinstance(given, Network):
        return
    if type(given).__module__.startswith("networkx"):
        allowed = "hp.networks.FromGraph(graph), which makes a network of a networkx graph"
        raise InvalidInput("network", type(given).__name__, allowed)
    raise InvalidInput("network", _describe(given), "a network such as hp.networks.RandomDirected(20)")


def check_links(method: Method, network: Network) -> None:
    """Raise InvalidInput if the method cannot use the links of the network.

    The message gives the reason, and names the methods of the same kind that work on this network.
    """
    kind = method.info.network
    fits = {"two-way": network.two_way(), "undirected": not network.directed}
    if not fits.get(kind, True):
        from hyperpush.methods.registry import kind_of, registered  # the registry imports every method

        known = registered(kind_of(method) or "algorithms")
        others = ", ".join(name for name, each in known.items() if fits.get(each.info.network, True))
        reason = {"two-way": "links that can run both ways", "undirected": "links that run both ways at once"}[kind]
        name, noisy = type(method).__name__, method.option("noise") is not None
        given = f"{network.name}, which is directed"
        private = " (with noise on a task of task.private(…))" if noisy else ""
        raise InvalidInput("network", given, f"{reason}, for {name}. Methods that run here{private}: {others}")


def _describe(given: Any) -> Any:
    """Return an argument in the form that error messages show; arrays and long values appear by their type only."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    text = repr(given)
    return given if len(text) <= 60 and not hasattr(given, "shape") else f"a {type(given).__name__}"
