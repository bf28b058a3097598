"""Check the arguments of a verb once and together, and make a `Call` from them."""

from collections.abc import Callable, Sequence
from typing import Any

from hyperpush.algorithms.base import Algorithm
from hyperpush.engines.simulate import Simulate
from hyperpush.inner.base import InnerSolver
from hyperpush.methods.base import Method
from hyperpush.verbs.call import Call
from hyperpush.verbs.checks import (
    check_batch_size,
    check_common,
    check_engine,
    check_hypers,
    check_key,
    check_method,
    check_network,
    check_task,
)


def fit(
    task: Any,
    method: Any,
    network: Any,
    engine: Any = Simulate(),
    *,
    kind: type[Method],
    key: Any,
    verb: Callable[..., Any],
    hooks: Sequence[Any] = (),
) -> Call:
    """Return the call of a verb if task, method, network and engine fit together; raise InvalidInput otherwise.

    Objects check their own options when they are made. This function checks what depends on several arguments: the
    method's kind, the links that the method needs, mini-batch sizes, and hypers. It also checks that a private task's
    data leave a client only with noise. The call binds the method once.
    """
    check_task(task)
    check_method(method, kind)
    check_engine(engine, task)
    check_network(network, task, method)
    task.check()
    method.check(task, network)
    for part in (method, *method.parts()):
        check_batch_size(part, task)
    if not isinstance(method, InnerSolver):
        check_hypers(task)
    if isinstance(method, Algorithm):
        check_common(task, method)
    call = Call(verb, task, method, network, check_key(key), engine, hooks)
    call.check_releases()
    return call
