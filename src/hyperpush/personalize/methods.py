"""Every method by its name: what it trains, and on which networks it can run."""

from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray, PyTree

from hyperpush.bilevel.solve import solve
from hyperpush.bilevel.stopping import EarlyStopping
from hyperpush.data.batches import Data, capacity
from hyperpush.engine import simulate
from hyperpush.engine.layout import one_client
from hyperpush.engine.outcome import Outcome
from hyperpush.errors import unknown
from hyperpush.estimators.alone import DirectGradient
from hyperpush.estimators.estimate import Estimator
from hyperpush.inner.alone import Alone
from hyperpush.inner.fedavg import FedAvg
from hyperpush.inner.sgp import SGP
from hyperpush.inner.step import Solver, Trained, milestones
from hyperpush.networks import Network
from hyperpush.personalize.baselines import ClusteredFL, FedAvgPlus, FedEM, FedProx, PFedMe
from hyperpush.personalize.recipe import Recipe, stacked
from hyperpush.personalize.recipes import DA, MTL, PL, Head, Interpolation, Shared
from hyperpush.personalize.scores import accuracy
from hyperpush.personalize.tasks import Task
from hyperpush.program import program_of


class Setting(NamedTuple):
    """How long and how fast everything runs."""

    clients: int
    examples: int | None  # of the data set; None: all
    large: bool  # the papers' model instead of a small one
    steps: int  # of SGP, or alone
    rounds: int  # of FedAvg and other methods with local epochs
    again: int | None  # SGP steps after each outer step, from where it stands; None: `steps` from the start
    outer_steps: int
    batch: int
    rate: float
    ensemble_rate: float  # of several models: each gets a part of the gradient
    order: int  # of HGP
    step: float  # η
    l2: float = 1e-3
    outer_rate: float | None = None  # None: the recipe's own


class Fitted(NamedTuple):
    """Personal models, clients on axis 0."""

    recipe: Recipe
    params: PyTree
    hypers: PyTree
    curve: list[float]  # mean validation accuracy by outer step
    best_step: int
    rounds: int
    floats: int  # sent by each client


# Recipe and Adam's rate: MTL's from "Cooperative personalized bilevel optimization over random directed networks", PL's
# from Terashita and Hara, those with DA from "Personalized decentralized bilevel optimization over stochastic and
# directed networks"; the others are ours.
RECIPES: dict[str, tuple[Recipe, float]] = {
    "pl": (PL(), 0.1),
    "mtl": (MTL(), 1.0),
    "da": (DA(), 0.1),
    "mtl-da": (DA(5e-4, MTL()), 0.1),
    "head": (Head(), 0.003),
    "interpolation": (Interpolation(), 0.1),
}
PLAIN: dict[str, tuple[Recipe, bool]] = {  # recipe, whether everyone is alone
    "local": (Shared(), True),
    "sgp": (Shared(), False),
    "local-mtl": (MTL(), True),
    "sgp-mtl": (MTL(), False),
}
FEDERATED = ("fedprox", "fedavg+", "clustered-fl", "pfedme", "fedem")
NAMES = (*PLAIN, *RECIPES, *(f"{name}-direct" for name in RECIPES), *FEDERATED)


def check(name: str) -> None:
    """Refuse a name that is not there."""
    if name not in NAMES:
        raise unknown("methods", name, NAMES)


def why_not(name: str, network: Network) -> str | None:
    """Why a method cannot run on a network; None if it can."""
    if name not in FEDERATED or network.name == "fully-connected":
        return None
    if name != "fedem":
        return "needs a server"
    if network.directed or network.varying:
        return "needs a server, or doubly stochastic weights that stay: static and undirected links"
    return None


def kind(network: Network) -> Literal["server", "gossip", "push"]:
    """How params are averaged: by epochs where all hear all or links stay and run both ways, else by SGP."""
    if network.name == "fully-connected":
        return "server"
    return "push" if network.directed or network.varying else "gossip"


def falling(rate: float, steps: int, at: tuple[float, float]) -> Any:
    """A tenth of the rate from each of these shares of the steps on."""
    return milestones(rate, tuple(max(1, round(share * steps)) for share in at))


class Fitting:
    """Fits methods to one task on one network; what several of them start from is trained once."""

    def __init__(self, task: Task, network: Network, setting: Setting, key: PRNGKeyArray, batch: int | None = 1):
        self.task, self.network, self.setting, self.key = task, network, setting, key
        self.batch = batch  # clients computed at a time
        self._started: dict[tuple[Recipe, bool], Outcome] = {}

    def solver(self, recipe: Recipe, alone: bool, *, again: bool = False) -> Solver:
        """What trains the params: all of it, or what follows an outer step."""
        made = self.setting
        steps = made.again if again and made.again is not None else made.steps
        rate = made.ensemble_rate if ensemble(recipe) else made.rate
        by = kind(self.network)
        if alone:
            return Alone(steps, falling(made.rate, steps, (5 / 6, 11 / 12)), made.batch)
        if by == "push":
            return SGP(steps, falling(rate, steps, (5 / 6, 11 / 12)), "gradient-after", made.batch)
        rounds = max(1, round(made.rounds * steps / max(made.steps, 1)))
        return FedAvg(rounds, self.by_epochs(rate, rounds), batch=made.batch, averaging=by)

    def by_epochs(self, rate: float, rounds: int) -> Any:
        """The rate of so many local epochs, falling at half and three quarters of them."""
        return falling(rate, rounds * -(-capacity(one_client(self.task.train)) // self.setting.batch), (0.5, 0.75))

    def trained(self, solver: Solver, recipe: Recipe, params: PyTree, hypers: PyTree) -> Outcome:
        """A solver's program, run."""
        data, problem = Data(self.task.train, self.task.train), recipe.problem(self.task.model, self.setting.l2)
        start = Trained(params, hypers)
        return simulate.run(program_of(solver, problem), self.network, start, data, self.key, batch=self.batch)

    def started(self, recipe: Recipe, alone: bool) -> Outcome:
        """Training with nothing personal, from the start."""
        if (recipe, alone) not in self._started:
            start = stacked(recipe, self.task.model, self.network.clients, self.key)
            self._started[recipe, alone] = self.trained(self.solver(recipe, alone), recipe, *start)
        return self._started[recipe, alone]

    def start(self, recipe: Recipe, alone: bool) -> tuple[PyTree, PyTree, int, int]:
        """Params and hypers for a recipe's outer loop, and the rounds and floats that they took."""
        params, hypers = stacked(recipe, self.task.model, self.network.clients, self.key)
        if isinstance(recipe, Interpolation):
            hypers = recipe.with_own(hypers, self.started(Shared(), True).states.params)
        if self.setting.again is None or self.setting.again >= self.setting.steps:
            return params, hypers, 0, 0  # the outer loop begins with a solve that is as long
        first = self.started(MTL() if ensemble(recipe) else Shared(), alone)
        params = first.states.params
        if isinstance(recipe, Head):
            name = recipe.name(self.task.model)
            params = dict(params)
            hypers = params.pop(name)
        return params, hypers, first.rounds, first.floats

    def fit(self, name: str, estimator: Estimator) -> Fitted:
        """A method by its name; `estimator` is for the recipes that cooperate."""
        check(name)
        if name in FEDERATED:
            return self.federated(name)
        if name in PLAIN:
            # In as many steps as the recipes take, and chosen among them alike; only the hypers stay.
            recipe, alone = PLAIN[name]
            return self.improved(recipe, alone, DirectGradient(), None)
        recipe, rate = RECIPES[name.removesuffix("-direct")]
        gradient = DirectGradient() if name.endswith("-direct") else estimator
        return self.improved(recipe, False, gradient, self.setting.outer_rate or rate)

    def improved(self, recipe: Recipe, alone: bool, estimator: Estimator, rate: float | None) -> Fitted:
        """The outer loop; what was best on the validation examples is kept."""
        task, setting = self.task, self.setting
        params, hypers, rounds, floats = self.start(recipe, alone)
        outer_steps = setting.outer_steps if rate is not None or setting.again is not None else 0
        found = solve(
            recipe.problem(task.model, setting.l2),
            self.network,
            inner=self.solver(recipe, alone, again=True),
            hypergradient=estimator,
            outer=_adam(rate),
            outer_steps=outer_steps,
            params=params,
            hypers=hypers,
            inner_data=task.train,
            outer_data=task.train,
            key=jax.random.fold_in(self.key, 1),
            restart=setting.again is None,
            stop=EarlyStopping(_metric(recipe, task.model), task.validation, outer_steps + 1, "max", weighted=True),
            trace=False,
            batch=self.batch,
        )
        assert found.history.mean_metric is not None
        curve = np.asarray(found.history.mean_metric, np.float64).tolist()
        sent = found.rounds + rounds, found.floats + floats
        if alone:  # but for the choice of the step, nothing is sent
            sent = 0, 0
        return Fitted(recipe, found.params, found.hypers, curve, found.best_step, *sent)

    def federated(self, name: str) -> Fitted:
        """Methods that train by local epochs and a server's mean, or neighbours'."""
        made, task = self.setting, self.task
        more = made.outer_steps * (made.again or 0) / max(made.steps, 1)
        rounds = max(1, round(made.rounds * (1 + more)))  # as many as the recipes take in all
        rate, several = self.by_epochs(made.rate, rounds), self.by_epochs(made.ensemble_rate, rounds)
        epochs: Any = {"batch": made.batch}
        recipe: Recipe = MTL() if name == "fedem" else Shared()
        by = "server" if kind(self.network) == "server" else "gossip"
        solver: Solver = {
            "fedprox": lambda: FedProx(rounds, rate, 0.1, **epochs),
            "fedavg+": lambda: FedAvgPlus(FedAvg(rounds, rate, **epochs), 0.1 * made.rate),
            "clustered-fl": lambda: ClusteredFL(rounds, rate, **epochs),
            "pfedme": lambda: PFedMe(rounds, made.rate, local_rounds=4, **epochs),
            "fedem": lambda: FedEM(task.model, rounds, several, l2=made.l2, averaging=by, **epochs),
        }[name]()
        start = stacked(recipe, task.model, self.network.clients, self.key)
        done = self.trained(solver, recipe, *start)
        return Fitted(recipe, done.states.params, done.states.hyper, [], 0, done.rounds, done.floats)


def ensemble(recipe: Recipe) -> bool:
    """Whether a recipe trains several models."""
    return isinstance(recipe.of if isinstance(recipe, DA) else recipe, MTL)


@lru_cache(maxsize=16)
def _adam(rate: float | None) -> optax.GradientTransformation:
    return optax.set_to_zero() if rate is None else optax.adam(rate)


@lru_cache(maxsize=16)
def _metric(recipe: Recipe, model: Any) -> Any:
    return partial(accuracy, recipe, model)


def personal(recipe: Recipe, hypers: PyTree) -> dict[str, np.ndarray]:
    """What the hypers mean, [clients, …]: weights of models, weights of labels; empty where that says nothing."""
    if isinstance(recipe, DA):
        own = {"labels": np.asarray(_weights(hypers["labels"]))}
        return own | personal(recipe.of, hypers["of"])
    if isinstance(recipe, PL):
        return {"labels": np.asarray(_weights(hypers))}
    if isinstance(recipe, MTL):
        return {"models": np.asarray(jax.nn.softmax(hypers, axis=1))}
    if isinstance(recipe, Interpolation):
        return {"models": np.asarray(jax.nn.softmax(hypers["weights"], axis=1))}
    return {}


def _weights(scores: jnp.ndarray) -> jnp.ndarray:
    return scores.shape[1] * jax.nn.softmax(scores, axis=1)
