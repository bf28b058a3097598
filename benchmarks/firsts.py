"""Time of first calls in a new process, with an empty cache and with the compiled code of an earlier process."""

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measured import first
from script import Row

import hyperpush as hp

TITLE, PROCESSES, FROM_DISK = "First calls", 5, True
LARGE = 1_000_000


def readme() -> Row:
    return first(lambda: runpy.run_path(str(Path(__file__).with_name("first_call.py")))["solution"].params)


def scores() -> Row:
    task, network = hp.tasks.logistic(10, 0), hp.networks.RandomDirected(10)
    return first(lambda: hp.influence.scores(task, hp.Automatic(), network, key=0).task.params)


def hypergradient(clients: int) -> Row:
    task = regression(clients, examples=50, width=6)
    network = hp.networks.RandomDirected(clients) if clients > 1 else hp.networks.FullyConnected(1)
    return first(lambda: hp.hypergradient(task, hp.Automatic(), network, key=0).value)


def large(method: Any) -> Row:
    task, network = regression(4, examples=2, width=LARGE), hp.networks.RandomDirected(4)
    return first(lambda: hp.hypergradient(task, method, network, key=0).value)


def regression(clients: int, examples: int, width: int) -> hp.Task:
    """Return linear regression on random numbers, with an L2 rate for each client."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((clients, examples, width), np.float32) / np.float32(np.sqrt(width))
    data = (inputs, inputs.sum(axis=2))
    return hp.Task(
        inner=squared, penalty=l2, outer=squared, params=jnp.zeros(width), hypers=0.0, train=data, validation=data
    )


def squared(x: Any, hyper: Any, batch: Any) -> Any:
    return (batch[0] @ x - batch[1]) ** 2


def l2(x: Any, hyper: Any) -> Any:
    return jnp.exp(hyper) * jnp.sum(x**2)


def by_jaxopt() -> Row:
    from jaxopt import LBFGS  # pyright: ignore[reportMissingImports]

    cost, x, hyper = one_machine()
    solver = LBFGS(cost, implicit_diff=True)
    outer = lambda h: cost(solver.run(x, h).params, -jnp.inf)  # noqa: E731
    return first(lambda: jax.jit(jax.grad(outer))(hyper))


def by_optimistix() -> Row:
    import optimistix  # pyright: ignore[reportMissingImports]

    cost, x, hyper = one_machine()
    solver = optimistix.BFGS(rtol=1e-5, atol=1e-5)
    outer = lambda h: cost(optimistix.minimise(cost, solver, x, h, throw=False).value, -jnp.inf)  # noqa: E731
    return first(lambda: jax.jit(jax.grad(outer))(hyper))


def by_dattri() -> Row:
    """Compute the influence of all training examples by dattri, with as many examples and params as in `scores`."""
    import torch  # pyright: ignore[reportMissingImports]
    from dattri.algorithm.influence_function import IFAttributorCG  # pyright: ignore[reportMissingImports]
    from dattri.task import AttributionTask  # pyright: ignore[reportMissingImports]

    inputs, targets = (torch.tensor(np.asarray(leaf).copy()) for leaf in hp.tasks.logistic(10, 0).train)
    data = torch.utils.data.TensorDataset(inputs.flatten(0, 1), targets.flatten().float())
    model = torch.nn.Linear(inputs.shape[2], 1, bias=False)

    def loss(params: Any, batch: Any) -> Any:
        made = torch.func.functional_call(model, params, batch[0]).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(made, batch[1])

    def work() -> Any:
        task = AttributionTask(loss, model, model.state_dict())
        scores = IFAttributorCG(task, max_iter=10, regularization=0.01)
        loader = torch.utils.data.DataLoader(data, batch_size=len(data))
        scores.cache(loader)
        return scores.attribute(loader, loader).detach().numpy()

    return first(work)


def one_machine() -> tuple[Callable[..., Any], Any, Any]:
    """Return cost, params and hyper of `hypergradient(1)` for other libraries, which also solve the inner problem."""
    inputs, targets = (leaf[0] for leaf in regression(1, 50, 6).train)
    return lambda x, h: jnp.mean(squared(x, h, (inputs, targets))) + l2(x, h), jnp.zeros(6), jnp.zeros(())


CASES: dict[str, Callable[[], Row]] = {
    "README's first example": readme,
    "influence.scores, 10 clients": scores,
    "influence by dattri, conjugate gradients": by_dattri,
    "hypergradient(Automatic), one machine": partial(hypergradient, 1),
    "the same by jaxopt, with its inner problem": by_jaxopt,
    "the same by optimistix, with its inner problem": by_optimistix,
    "hypergradient(Automatic), 10 clients": partial(hypergradient, 10),
    "Automatic, 4 clients of 1e6 params": partial(large, hp.Automatic()),
    "TrackedHGP, 4 clients of 1e6 params": partial(large, hp.TrackedHGP()),
}
