"""Every method by its name: what it trains, and on which networks it can run."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

import hyperpush as hp
from hyperpush.data.batches import capacity
from hyperpush.errors import unknown
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.inner.base import InnerSolver
from hyperpush.networks import Network
from hyperpush.optimizers import Optimizer, Schedule
from hyperpush.personalize import DA, MTL, ClusteredFL, FedAvgPlus, FedEM, FedProx, Model, PFedMe, Recipe, Shared
from hyperpush.programs import one_client
from hyperpush.registry import registered
from hyperpush.studies.personalize.config import Outer, Setting
from hyperpush.studies.personalize.scenarios import Scenario
from hyperpush.studies.personalize.settings import Kind


class Fitted(NamedTuple):
    """Personal models, clients on axis 0."""

    recipe: Recipe
    params: PyTree
    hypers: PyTree
    curve: list[float]  # mean validation accuracy by outer step
    best_step: int
    rounds: int
    floats: int  # sent by each client


PULLS = 4  # pFedMe's local rounds
PLAIN: dict[str, tuple[Recipe, bool]] = {  # recipe, whether everyone is alone
    "local": (Shared(), True),
    "sgp": (Shared(), False),
    "local-mtl": (MTL(), True),
    "sgp-mtl": (MTL(), False),
}
# Every registered recipe, and one of two; each moves as it says itself unless a setting knows better.
RECIPES: dict[str, tuple[Callable[[Outer], Recipe], Outer]] = {
    **{
        name.lower(): (lambda outer, recipe=recipe: recipe(l2=outer.l2), Outer(recipe.rate, recipe().l2))
        for name, recipe in registered("recipes").items()
        if recipe is not Shared
    },
    "mtl-da": (lambda outer: DA(outer.label_l2, MTL(l2=outer.l2)), Outer(0.1, 1e-2, 0.1, 5e-4)),
}
# From a setting, rounds, and the rates of one and of several models by mini-batches.
FEDERATED: dict[str, Callable[[Setting, int, Schedule, Schedule, Kind], InnerSolver]] = {
    "fedprox": lambda made, rounds, rate, _, by: FedProx(rounds, rate, batch_size=made.batch, penalty=made.prox),
    "fedavg+": lambda made, rounds, rate, _, by: FedAvgPlus(
        hp.FedAvg(rounds, rate, batch_size=made.batch), made.rate / 10
    ),
    "clustered-fl": lambda made, rounds, rate, _, by: ClusteredFL(rounds, rate, batch_size=made.batch),
    # From 2 / pull on, steps towards the common model diverge.
    "pfedme": lambda made, rounds, rate, _, by: PFedMe(
        rounds, min(made.rate, 1.5 / made.pull), made.pull, local_steps=PULLS, batch_size=made.batch
    ),
    "fedem": lambda made, rounds, _, rate, by: FedEM(
        rounds, rate, averaging="server" if by == "server" else "gossip", batch_size=made.batch
    ),
}
NAMES = (*PLAIN, *RECIPES, *(f"{name}-direct" for name in RECIPES), *FEDERATED)


def check(name: str) -> None:
    """Refuse a name that is not there."""
    if name not in NAMES:
        raise unknown("methods", name, NAMES)


def recipe_of(name: str, setting: Setting) -> tuple[Recipe, Outer | None, bool]:
    """What a method trains, how its hypers move (None: they stay), and whether everyone is alone."""
    if name in PLAIN:
        recipe, alone = PLAIN[name]
        return recipe, None, alone
    if name in FEDERATED:
        return MTL() if name == "fedem" else Shared(), None, False
    make, own = RECIPES[name.removesuffix("-direct")]
    outer = setting.outer.get(name.removesuffix("-direct"), own)
    if setting.outer_rate:
        outer = outer._replace(rate=setting.outer_rate, label_rate=outer.label_rate and setting.outer_rate)
    return make(outer), outer, False


def why_not(name: str, network: Network, model: Model | None = None) -> str | None:
    """Why a method cannot run on a network, or with a model; None if it can."""
    plain = name.removesuffix("-direct")
    if plain in RECIPES and model is not None:
        make, outer = RECIPES[plain]
        return make(outer).why_unfit(model)
    if name not in FEDERATED or network.name == "fully-connected":
        return None
    if name != "fedem":
        return "needs a server"
    if network.directed or network.varying:
        return "needs a server, or doubly stochastic weights that stay: static and undirected links"
    return None


def kind(network: Network) -> Kind:
    """How params are averaged: by epochs where all hear all or links stay and run both ways, else by SGP."""
    if network.name == "fully-connected":
        return "server"
    return "push" if network.directed or network.varying else "gossip"


def falling_rate(rate: float, steps: int, at: tuple[float, float]) -> Schedule:
    """A tenth of the rate from each of these shares of the steps on; where both are one step, it falls once."""
    return hp.schedule("milestones", rate, tuple(dict.fromkeys(max(1, round(share * steps)) for share in at)))


class Fitting:
    """Fits methods to one scenario on one network; what several of them start from is trained once."""

    def __init__(
        self, scenario: Scenario, network: Network, setting: Setting, key: PRNGKeyArray, at_a_time: int | None = 1
    ):
        # A client that owns fewer examples than a batch takes all of them.
        batch = min(setting.batch, capacity(one_client(scenario.train)))
        self.scenario, self.network, self.key = scenario, network, key
        self.setting = setting.model_copy(update={"batch": batch})
        self.engine = hp.Simulate(clients_per_batch=at_a_time)
        self._started: dict[tuple[Recipe, bool], hp.Training] = {}

    def solver(self, recipe: Recipe, alone: bool, *, again: bool = False) -> InnerSolver:
        """What trains the params: all of it, or what follows an outer step."""
        made = self.setting
        steps = made.again if again and made.again is not None else made.steps
        rate = made.ensemble_rate if recipe.is_ensemble else made.rate
        by = kind(self.network)
        if alone:
            return hp.LocalSGD(steps, falling_rate(rate, steps, made.falls), made.batch)
        if by == "push":
            return hp.SGP(steps, falling_rate(rate, steps, made.falls), "gradient-after", made.batch)
        rounds = max(1, round(made.rounds * steps / max(made.steps, 1)))
        return hp.FedAvg(rounds, self.rate_by_epochs(rate, rounds), batch_size=made.batch, averaging=by)

    def rate_by_epochs(self, rate: float, rounds: int) -> Schedule:
        """The rate of so many local epochs, falling at half and three quarters of them."""
        batches = -(-capacity(one_client(self.scenario.train)) // self.setting.batch)
        return falling_rate(rate, rounds * batches, (0.5, 0.75))

    def task(self, recipe: Recipe) -> hp.Task:
        """A recipe's task: both levels fit the training examples, and the validation examples choose the step."""
        made = self.scenario
        sets = {"train": made.train, "validation": made.validation}
        return recipe.task(made.model, **sets, outer_on="train", key=self.key, l2=self.setting.l2)

    def train(self, solver: InnerSolver, recipe: Recipe) -> hp.Training:
        """A recipe's task, trained from the start."""
        return hp.train(self.task(recipe), solver, self.network, key=self.key, engine=self.engine)

    def first_training(self, recipe: Recipe, alone: bool) -> hp.Training:
        """hp.Training with nothing personal, from the start."""
        if (recipe, alone) not in self._started:
            self._started[recipe, alone] = self.train(self.solver(recipe, alone), recipe)
        return self._started[recipe, alone]

    def start(self, recipe: Recipe, alone: bool) -> tuple[hp.Task, int, int]:
        """The task at the start of a recipe's outer loop, and the rounds and floats that it took to get there."""
        task = self.task(recipe)
        hypers = recipe.with_own(task.hypers, lambda: self.first_training(Shared(), True).params)
        if self.setting.again is None or self.setting.again >= self.setting.steps:
            return task.at(hypers=hypers), 0, 0  # the outer loop begins with a solve that is as long
        first = self.first_training(MTL() if recipe.is_ensemble else Shared(), alone)
        params, hypers = recipe.continue_from(self.scenario.model, first.params, hypers)
        return task.at(params, hypers), first.costs.rounds, first.costs.floats

    def fit(self, name: str, estimator: HypergradientEstimator) -> Fitted:
        """A method by its name; `estimator` is for the recipes that cooperate."""
        check(name)
        if name in FEDERATED:
            return self.fit_federated(name)
        recipe, outer, alone = recipe_of(name, self.setting)
        # Plain ones take as many steps as the recipes, and are chosen among them alike; only the hypers stay.
        direct = name in PLAIN or name.endswith("-direct")
        return self.fit_recipe(recipe, alone, hp.hypergradients.DirectGradient() if direct else estimator, outer)

    def fit_recipe(self, recipe: Recipe, alone: bool, estimator: HypergradientEstimator, outer: Outer | None) -> Fitted:
        """The outer loop; what was best on the validation examples is kept."""
        setting = self.setting
        task, rounds, floats = self.start(recipe, alone)
        steps = setting.outer_steps if outer is not None or setting.again is not None else 0
        method = hp.PDBO(
            inner=self.solver(recipe, alone, again=True),
            hypergradient=estimator,
            outer=_adam(outer, setting.betas),
            steps=steps,
            restart=setting.again is None,
            stop=hp.EarlyStopping(hp.personalize.accuracy(task), "validation", steps + 1, "max", weighted=True),
        )
        found = hp.solve(task, method, self.network, key=jax.random.fold_in(self.key, 1), engine=self.engine)
        assert found.history.watched is not None
        curve = found.history.watched[:, 0].tolist()  # the same at all clients
        sent = found.costs.rounds + rounds, found.costs.floats + floats
        if alone:  # but for the choice of the step, nothing is sent
            sent = 0, 0
        return Fitted(recipe, found.params, found.hypers, curve, found.best_step, *sent)

    def fit_federated(self, name: str) -> Fitted:
        """Methods that train by local epochs and a server's mean, or neighbors'."""
        made = self.setting
        more = made.outer_steps * (made.again or 0) / max(made.steps, 1)
        rounds = max(1, round(made.rounds * (1 + more)))  # as many as the recipes take in all
        rate, several = (self.rate_by_epochs(rate, rounds) for rate in (made.rate, made.ensemble_rate))
        recipe, _, _ = recipe_of(name, made)
        done = self.train(FEDERATED[name](made, rounds, rate, several, kind(self.network)), recipe)
        return Fitted(recipe, done.params, done.task.hypers, [], 0, done.costs.rounds, done.costs.floats)


@lru_cache(maxsize=16)
def _adam(outer: Outer | None, betas: tuple[float, float]) -> Optimizer | optax.GradientTransformation:
    """What moves the hypers; kept, since raw Optax transformations are compiled by identity."""
    if outer is None:
        return optax.set_to_zero()
    if outer.label_rate is None:
        return hp.optimizer("adam", learning_rate=outer.rate, b1=betas[0], b2=betas[1])
    rates = {"labels": outer.label_rate, "of": outer.rate}

    def scale(updates: PyTree, _: Any) -> PyTree:
        return {name: jax.tree.map(lambda leaf, rate=rates[name]: -rate * leaf, part) for name, part in updates.items()}

    return optax.chain(optax.scale_by_adam(*betas), optax.stateless(scale))
