"""What a comparison would take, before anything is trained."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hyperpush.networks import Network
from hyperpush.personalize import PFedMe, Recipe
from hyperpush.studies.data.catalogue import entries
from hyperpush.studies.personalize import methods
from hyperpush.studies.personalize.config import Setting
from hyperpush.studies.personalize.scenarios import MODELS

# Examples of each data set, for those of which all are taken; 60 % of them are trained on, of CIFAR 30 %.
EXAMPLES = {"digits": 1_797, "emnist": 814_255, "cifar10": 60_000, "cifar100": 60_000, "shakespeare": None}
SHAPES = {"digits": (8, 8), "emnist": (28, 28), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
PRODUCTS = {"vr-hgp": 6}  # gradients that one order of an estimator takes, about; others: 3, one product


def costs(data: str, network: Network, setting: Setting, chosen: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Of every (method, its name in tables): parameters, gradients of a batch by each client, hours for all clients.

    From measured gradients on inputs of zeros. Where training is by local epochs, every client is taken to have as
    many examples as the mean.
    """
    examples, seconds, rows = _zeros(data, setting), {}, []
    for name, title in chosen:
        recipe, outer, _ = methods.recipe_of(name, setting)
        task = recipe.task(MODELS[data][setting.large], train=[examples], outer_on="train", key=0, l2=setting.l2)
        params, hypers = jax.tree.map(lambda leaf: leaf[0], (task.params, task.hypers))
        if recipe not in seconds:
            seconds[recipe] = _seconds(partial(jax.jit(task.problem.inner_gradient), params, hypers, examples))
        gradients = _steps(name, data, network, setting, outer is not None)
        if name in methods.RECIPES:
            gradients += PRODUCTS.get(setting.estimator, 3) * setting.order * setting.outer_steps
        if _needs_own(recipe, hypers):
            gradients += setting.steps
        rows.append(
            {
                "method": title,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
                "gradients_per_client": gradients,
                "hours": gradients * setting.clients * seconds[recipe] / 3600,
            }
        )
    return rows


def _steps(name: str, data: str, network: Network, setting: Setting, moves: bool) -> int:
    """Steps of training, or batches of local epochs, in all."""
    by_epochs = name in methods.FEDERATED or (methods.kind(network) != "push" and not name.startswith("local"))
    first, again = setting.steps, setting.again
    if again is None:
        steps = first * (setting.outer_steps + 1 if moves else 1)
    else:
        steps = again * (setting.outer_steps + 1) + (first if again < first else 0)
    if not by_epochs:
        return steps
    rounds = round(setting.rounds * steps / max(first, 1))
    if name == "pfedme":
        return rounds * methods.PULLS * PFedMe(rounds, setting.rate).inner_steps
    examples = setting.examples or EXAMPLES[data]
    if examples is None:
        return steps
    own = examples * (0.3 if data.startswith("cifar") else 0.6) / setting.clients
    return rounds * -(-round(own) // setting.batch)


def _needs_own(recipe: Recipe, hypers: PyTree) -> bool:
    """Whether a recipe starts from a model that everyone has trained alone."""
    asked = []
    recipe.with_own(hypers, lambda: asked.append(True))
    return bool(asked)


def _seconds(compute: Callable[[], PyTree]) -> float:
    """The median of three, after one that compiles."""
    times = []
    for _ in range(4):
        began = perf_counter()
        jax.block_until_ready(compute())
        times.append(perf_counter() - began)
    return median(times[1:])


def _zeros(data: str, setting: Setting) -> tuple[jax.Array, jax.Array]:
    labels = jnp.zeros(setting.batch, jnp.int32)
    if data == "shakespeare":
        return jnp.zeros((setting.batch, 200 if setting.large else 40), jnp.uint8), labels
    return jnp.zeros((setting.batch, *SHAPES[data])), labels


def describe_files(data: str) -> str:
    """Which files of a data set are there, in words."""
    found = {entry.name: entry for entry in entries()}[data]
    if found.here == "yes":
        return f"{found.title}: all there"
    return f"{found.title}: {'no files' if found.here == 'no' else found.here} there ({found.files})"
