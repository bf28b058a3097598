"""Methods of the comparison by name: how each is trained, and on which networks it runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

import hyperpush as hp
from hyperpush.base.errors import unknown
from hyperpush.base.schedules import Schedule
from hyperpush.data.batches import capacity
from hyperpush.hypergradients.base import HypergradientEstimator
from hyperpush.inner.base import InnerSolver
from hyperpush.methods import registry
from hyperpush.methods.registry import registered
from hyperpush.networks import Network
from hyperpush.personalize import MTL, ClusteredFL, FedAvgPlus, FedEM, FedProx, Model, PFedMe, Product, Recipe, Shared
from hyperpush.programs import one_client
from hyperpush_papers.personalize.config import Setting
from hyperpush_papers.personalize.scenarios import Scenario
from hyperpush_papers.personalize.settings import Kind


class Fitted(NamedTuple):
    """Result of one method: personal models with clients on axis 0, and what they cost."""

    product: Product
    params: PyTree
    hypers: PyTree
    curve: list[float]  # mean validation accuracy by outer step
    best_step: int
    rounds: int
    floats: int  # sent by each client


PULLS = 4  # pFedMe's local rounds
PLAIN = {  # (True for several models, True for training alone)
    "local": (False, True),
    "sgp": (False, False),
    "local-mtl": (True, True),
    "sgp-mtl": (True, False),
}
STAY = optax.set_to_zero()  # one object, since each new Optax transformation is compiled again
# Functions of a setting, the rounds, and the step sizes of one and of several models by mini-batches.
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
RECIPES = tuple(name.lower() for name, each in registered("recipes").items() if each is not Shared)


def check(name: str, setting: Setting) -> None:
    """Raise InvalidInput for an unknown name, or for options that do not fit."""
    parts = parts_of(name) if is_product(name) else []
    for part in parts:
        if part not in RECIPES and ":" not in part:
            raise unknown("methods", part, RECIPES if len(parts) > 1 else (*PLAIN, *RECIPES, *FEDERATED))
    product_of(name, setting)


def is_product(name: str) -> bool:
    """Return True if a method consists of recipes."""
    return name not in PLAIN and name not in FEDERATED


def parts_of(name: str) -> list[str]:
    """Return the names of a method's recipes: pl and mtl for "pl+mtl-direct"."""
    return name.removesuffix("-direct").split("+")


def product_of(name: str, setting: Setting) -> Product:
    """Return the recipes of a method; a baseline has one without personal parts."""
    if not is_product(name):
        several = name == "fedem" or PLAIN.get(name, (False,))[0]
        return _impersonal(setting.models if several else None)
    parts = parts_of(name)
    return Product([_recipe(part, "+".join(sorted(parts)), setting) for part in parts])


def _impersonal(models: int | None) -> Product:
    """Return recipes without personal parts: one model, or several models with fixed equal weights."""
    return Product([Shared() if models is None else MTL(models)])


def _recipe(part: str, whole: str, setting: Setting) -> Recipe:
    """Return a recipe of a product; its options are the user's, else those of the paper, else the recipe's defaults."""
    kind = registry.find("recipes", part, "methods")
    given, outer = setting.recipes.get(part, {}), setting.outer.get(f"{whole}:{part}", setting.outer.get(part))
    known = ({"models": setting.models} if kind is MTL else {}) | ({} if outer is None else {"l2": outer.l2})
    made = registry.construct(kind, {**known, **given}, f"recipes.{part}")
    if "outer" in given or made.outer.name != "adam":
        return made
    rate = setting.outer_rate or (made.outer.options()["learning_rate"] if outer is None else outer.rate)
    return made.with_options(outer=hp.optimizer("adam", learning_rate=rate, b1=setting.betas[0], b2=setting.betas[1]))


def why_not(name: str, network: Network, setting: Setting, model: Model | None = None) -> str | None:
    """Return the reason why a method cannot run on a network or with a model; None if it can."""
    if is_product(name):
        product = product_of(name, setting)
        if name.endswith("-direct") and not product.changes_predictions:
            return "the direct gradient is zero: no part changes predictions"
        return None if model is None else product.why_unfit(model)
    if name not in FEDERATED or network.name == "fully-connected":
        return None
    if name != "fedem":
        return "needs a server"
    if network.directed or network.varying:
        return "needs a server, or doubly stochastic weights that stay: static and undirected links"
    return None


def kind(network: Network) -> Kind:
    """Choose the kind of training: local epochs on complete or fixed undirected networks, else SGP."""
    if network.name == "fully-connected":
        return "server"
    return "push" if network.directed or network.varying else "gossip"


def falling_rate(rate: float, steps: int, at: tuple[float, float]) -> Schedule:
    """Return a step size that falls to a tenth at each of these shares of the steps; it falls once if both coincide."""
    return hp.schedule("milestones", rate, tuple(dict.fromkeys(max(1, round(share * steps)) for share in at)))


class Fitting:
    """Fits methods to one scenario on one network; shared starting models are trained once."""

    def __init__(
        self, scenario: Scenario, network: Network, setting: Setting, key: PRNGKeyArray, at_a_time: int | None = 1
    ):
        # Clients with fewer examples than a batch take all their examples.
        batch = min(setting.batch, capacity(one_client(scenario.train)))
        self.scenario, self.network, self.key = scenario, network, key
        self.setting = replace(setting, batch=batch)
        self.engine = hp.Simulate(clients_per_batch=at_a_time)
        self._started: dict[tuple[int | None, bool], hp.Training] = {}

    def solver(self, product: Product, alone: bool, *, again: bool = False) -> InnerSolver:
        """Return the solver of the params, for the first training or for the training after an outer step."""
        made = self.setting
        steps = made.again if again and made.again is not None else made.steps
        rate = made.ensemble_rate if product.count_models() is not None else made.rate
        by = kind(self.network)
        if alone:
            return hp.LocalSGD(steps, falling_rate(rate, steps, made.falls), made.batch)
        if by == "push":
            return hp.SGP(steps, falling_rate(rate, steps, made.falls), "gradient-after", made.batch)
        rounds = max(1, round(made.rounds * steps / max(made.steps, 1)))
        return hp.FedAvg(rounds, self.rate_by_epochs(rate, rounds), batch_size=made.batch, averaging=by)

    def rate_by_epochs(self, rate: float, rounds: int) -> Schedule:
        """Return the step size of this many local epochs, falling after half and three quarters of them."""
        batches = -(-capacity(one_client(self.scenario.train)) // self.setting.batch)
        return falling_rate(rate, rounds * batches, (0.5, 0.75))

    def task(self, product: Product) -> hp.Task:
        """Return a product's task, with the setting's L2 rate and the data set that the outer level fits."""
        made, setting = self.scenario, self.setting
        sets = {"train": made.train, "validation": made.validation}
        return product.task(made.model, **sets, outer_on=setting.outer_on, key=self.key, l2=setting.l2)

    def train(self, solver: InnerSolver, product: Product) -> hp.Training:
        """Return a product's task after training from its first params."""
        return hp.train(self.task(product), solver, self.network, key=self.key, engine=self.engine)

    def first_training(self, models: int | None, alone: bool) -> hp.Training:
        """Return the shared first training, without personal parts."""
        if (models, alone) not in self._started:
            product = _impersonal(models)
            self._started[models, alone] = self.train(self.solver(product, alone), product)
        return self._started[models, alone]

    def start(self, product: Product, alone: bool) -> tuple[hp.Task, int, int]:
        """Return the task at the start of a product's outer loop, with the rounds and floats that led to it."""
        task = self.task(product)
        hypers = product.with_own(task.hypers, lambda: self.first_training(None, True).params)
        if self.setting.again is None or self.setting.again >= self.setting.steps:
            # no first training, since the outer loop begins with a solve of the same length
            return task.at(hypers=hypers), 0, 0
        first = self.first_training(product.count_models(), alone)
        params, own = product.split(self.scenario.model, first.params)
        return task.at(params, hypers | own), first.costs.rounds, first.costs.floats

    def fit(self, name: str, estimator: HypergradientEstimator) -> Fitted:
        """Fit a method by its name; `estimator` is for recipes that use the hypergradient of the mean cost."""
        check(name, self.setting)
        if name in FEDERATED:
            return self.fit_federated(name)
        # Methods without recipes take as many steps, and their best step is selected in the same way. Hypers stay.
        direct = name in PLAIN or name.endswith("-direct")
        return self.fit_product(name, hp.hypergradients.DirectGradient() if direct else estimator)

    def fit_product(self, name: str, estimator: HypergradientEstimator) -> Fitted:
        """Run the outer loop; keep the best step on the validation examples."""
        setting, product, moves = self.setting, product_of(name, self.setting), is_product(name)
        alone = PLAIN.get(name, (False, False))[1]
        task, rounds, floats = self.start(product, alone)
        steps = setting.outer_steps if moves or setting.again is not None else 0
        method = hp.PDBO(
            inner=self.solver(product, alone, again=True),
            hypergradient=estimator,
            outer=product.outer if moves else STAY,
            steps=steps,
            restart=setting.again is None,
            stop=hp.EarlyStopping(hp.personalize.accuracy(task), "validation", steps + 1, "max", weighted=True),
        )
        found = hp.solve(task, method, self.network, key=jax.random.fold_in(self.key, 1), engine=self.engine)
        assert found.history.watched is not None
        curve = found.history.watched[:, 0].tolist()  # the agreed metric, which is equal at all clients
        sent = found.costs.rounds + rounds, found.costs.floats + floats
        if alone:  # clients send nothing except to agree on the step
            sent = 0, 0
        return Fitted(product, found.params, found.hypers, curve, found.best_step, *sent)

    def fit_federated(self, name: str) -> Fitted:
        """Fit a method that trains by local epochs and averages by a server or with neighbors."""
        made = self.setting
        more = made.outer_steps * (made.again or 0) / max(made.steps, 1)
        rounds = max(1, round(made.rounds * (1 + more)))  # the same number of rounds in total as recipes have
        rate, several = (self.rate_by_epochs(rate, rounds) for rate in (made.rate, made.ensemble_rate))
        product = product_of(name, made)
        done = self.train(FEDERATED[name](made, rounds, rate, several, kind(self.network)), product)
        return Fitted(product, done.params, done.task.hypers, [], 0, done.costs.rounds, done.costs.floats)
