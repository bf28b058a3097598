"""Invalid arguments of a verb each give one line with the argument's name and the correct form."""

from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import hyperpush

hp: Any = hyperpush  # the library must find these mistakes, not a type checker

INPUTS = np.random.default_rng(0).normal(size=(3, 8, 2))
DATA = (INPUTS, INPUTS.sum(axis=2))


def loss(x, hyper, batch):
    return (batch[0] @ x - batch[1]) ** 2


def l2(x, hyper):
    return jnp.exp(hyper) * jnp.sum(x**2)


def make(**changes):
    given = {"inner": loss, "penalty": l2, "outer": loss, "params": jnp.zeros(2), "hypers": 0.0}
    return hp.Task(**{**given, "train": DATA, "validation": DATA, **changes})


TASK, NETWORK = make(), hp.networks.RandomDirected(3)
SGP, HGP = hp.SGP(5, 0.1), hp.HGP(2, 2, 0.1)
ADAM = hp.optimizer("adam", learning_rate=0.1)


def pdbo(**changes):
    return hp.PDBO(**{"inner": SGP, "hypergradient": HGP, "outer": ADAM, "steps": 1, **changes})


VERBS = {
    "swapped": (lambda: hp.train(SGP, TASK, NETWORK, key=0), r"task: got.*hp\.Task\(…\) as the first argument"),
    "a class": (
        lambda: hp.train(TASK, hp.SGP, NETWORK, key=0),
        r"method: got 'the class SGP'; allowed: an object such as",
    ),
    "a name": (
        lambda: hp.train(TASK, "SGP", NETWORK, key=0),
        r"method: got 'SGP'; allowed: an inner solver such as SGP",
    ),
    "another kind": (lambda: hp.train(TASK, HGP, NETWORK, key=0), r"method: got 'HGP'.*hp\.hypergradient takes HGP"),
    "a solver to solve": (lambda: hp.solve(TASK, SGP, NETWORK, key=0), r"method: got 'SGP'.*hp\.train takes SGP"),
    "a graph": (lambda: hp.train(TASK, SGP, nx.cycle_graph(3), key=0), r"network: got 'Graph'.*FromGraph"),
    "a number of clients": (lambda: hp.train(TASK, SGP, 3, key=0), r"network: got 3; allowed: a network such as"),
    "another size": (
        lambda: hp.train(TASK, SGP, hp.networks.Ring(5), key=0),
        r"network: got 'Ring of 5 clients'; allowed: a network of 3 clients, as the task has",
    ),
    "a name for an engine": (
        lambda: hp.train(TASK, SGP, NETWORK, key=0, engine="shard"),
        r"engine: got 'shard'; allowed: an object such as hp\.Simulate\(\)",
    ),
    "a class for an engine": (lambda: hp.train(TASK, SGP, NETWORK, key=0, engine=hp.Shard), r"engine: got.*Shard"),
    "a text for a key": (lambda: hp.train(TASK, SGP, NETWORK, key="0"), r"key: got '0'; allowed: a whole number"),
    "a negative key": (lambda: hp.train(TASK, SGP, NETWORK, key=-1), r"key: got -1"),
    "several keys": (lambda: hp.train(TASK, SGP, NETWORK, key=jax.random.split(jax.random.key(0))), r"key: got 'a"),
    "a float for an optimizer": (lambda: pdbo(outer=0.1), r"PDBO\.outer: got 0\.1.*hp\.optimizer"),
    "a class for an estimator": (lambda: pdbo(hypergradient=hp.HGP), r"PDBO\.hypergradient.*an object such as HGP"),
    "an estimator's name": (lambda: pdbo(hypergradient="HGP"), r"PDBO\.hypergradient: got 'HGP'.*an object such as"),
    "no step size": (lambda: hp.SGP(5), r"SGP\.step_size: got None"),
    "two step sizes": (lambda: hp.SGP(5, 0.1, optimizer=ADAM), r"SGP\.step_size: got 0\.1"),
    "a step size that climbs": (
        lambda: hp.SGP(5, lambda step: -0.1),
        r"SGP\.step_size: got 'a function that gives -0\.1",
    ),
    "a step size by coordinate": (lambda: hp.SGP(5, lambda step: jnp.ones(3)), r"SGP\.step_size.*per step"),
    "a step size of nothing": (lambda: hp.SGP(5, lambda: 0.1), r"SGP\.step_size.*fails with TypeError"),
    "steps as a float": (lambda: hp.SGP(5.0, 0.1), r"SGP\.steps: got 5\.0"),
    "an unknown optimizer": (
        lambda: hp.optimizer("adm", learning_rate=0.1),
        r"optimizer: got 'adm'.*did you mean 'adam'",
    ),
    "an unknown option": (lambda: hp.optimizer("adam", learning_rat=0.1), r"optimizer\.adam\.learning_rat"),
    "an unknown schedule": (
        lambda: hp.schedule("cosin", 0.1, steps=3),
        r"schedule: got 'cosin'.*did you mean 'cosine'",
    ),
    "own problem's derivative": (
        lambda: pdbo(hypergradient=hp.hypergradients.LocalGradient()),
        r"PDBO\.hypergradient: got 'LocalGradient after SGP'",
    ),
    "no shared problem": (lambda: pdbo(inner=hp.LocalSGD(5, 0.1)), r"PDBO\.hypergradient: got 'HGP after LocalSGD'"),
    "undirected links": (
        lambda: hp.solve(make(common=True), hp.algorithms.MDBO(2, 0.1, 0.1), NETWORK, key=0),
        r"network: got 'random-directed, which is directed'.*MDBO\. Methods that run here: .*PDBO",
    ),
    "one hyper for all": (
        lambda: hp.solve(TASK, hp.algorithms.MDBO(2, 0.1, 0.1), hp.networks.Ring(3), key=0),
        r"task\.common: got False.*common=True.*MDBO.*PDBO",
    ),
    "hypers of one's own": (
        lambda: hp.solve(make(common=True), pdbo(), NETWORK, key=0),
        r"task\.common: got True.*CDBO",
    ),
    "hypers nowhere": (
        lambda: hp.hypergradient(make(penalty=None), HGP, NETWORK, key=0),
        r"task\.hypers: got 'hypers that no cost or penalty contains'",
    ),
    "no direct gradient": (
        lambda: hp.hypergradient(TASK, hp.hypergradients.DirectGradient(), NETWORK, key=0),
        r"DirectGradient",
    ),
    "a batch beyond the data": (
        lambda: hp.train(TASK, hp.SGP(5, 0.1, batch_size=99), NETWORK, key=0),
        r"batch_size: got 99",
    ),
    "a metric that is none": (lambda: hp.train(TASK, SGP, NETWORK, key=0, metrics={"a": 1}), r"metrics\.a: got 1"),
    "a list of metrics": (lambda: hp.train(TASK, SGP, NETWORK, key=0, metrics=[loss]), r"metrics: got"),
    "a metric on nothing": (
        lambda: hp.train(TASK, SGP, NETWORK, key=0, metrics={"a": ("tset", loss)}),
        r"metrics\.a: got 'tset'; allowed: train, validation",
    ),
    "a metric that fails": (
        lambda: hp.train(TASK, SGP, NETWORK, key=0, metrics={"a": lambda x, h, b: b["inputs"]}),
        r"metrics\.a.*fails with TypeError",
    ),
    "every 0 steps": (lambda: hp.train(TASK, SGP, NETWORK, key=0, every=0), r"every: got 0"),
    "a function for a hook": (
        lambda: hp.train(TASK, SGP, NETWORK, key=0, hooks=[print]),
        r"hooks: got.*hp\.hooks\.Hook",
    ),
    "choosing on the test set": (
        lambda: hp.tune(make(test=DATA), SGP, NETWORK, key=0, over={"step_size": [0.1]}, on="test"),
        r"on: got 'test'.*nothing may be chosen",
    ),
    "a data set that is no name": (
        lambda: hp.tune(TASK, SGP, NETWORK, key=0, over={"step_size": [0.1]}, on=None),
        r"on: got None",
    ),
    "an optimizer's option of another kind": (
        lambda: hp.optimizer("adam", learning_rate=0.1, b1="x"),
        r"optimizer\.adam: got \{'b1': 'x'\}; allowed: options that Optax can use",
    ),
    "one device twice": (
        lambda: hp.Shard(devices=[jax.devices()[0]] * 2),
        r"Shard\.devices: got .*different devices",
    ),
    "one client to remove": (
        lambda: hp.influence.without(TASK, clients=2),
        r"without\.clients: got 2; allowed: a list of clients",
    ),
    "a key among the params": (
        lambda: hp.train(make(hypers={"a": 0.0, "key": jax.random.key(0)}), SGP, NETWORK, key=0),
        r"hypers\['key'\].*key",
    ),
    "tuning on an engine that compiles no grid": (
        lambda: hp.tune(TASK, SGP, NETWORK, key=0, over={"step_size": [0.1]}, on="train", engine=hp.Shard()),
        r"engine: got Shard.*allowed: hp\.Simulate",
    ),
    "tuning nothing": (lambda: hp.tune(TASK, SGP, NETWORK, key=0, over={}, on="train"), r"over: got \{\}"),
    "tuning a misspelling": (
        lambda: hp.tune(TASK, SGP, NETWORK, key=0, over={"step_sise": [0.1]}, on="train"),
        r"over\.step_sise: got 'step_sise'.*did you mean 'step_size'",
    ),
    "tuning out of range": (
        lambda: hp.tune(TASK, SGP, NETWORK, key=0, over={"step_size": [-0.1]}, on="train"),
        r"SGP\.step_size: got -0\.1",
    ),
    "no validation to stop on": (
        lambda: hp.solve(TASK, pdbo(stop=hp.EarlyStopping("cost", "holdout", 2)), NETWORK, key=0),
        r"PDBO\.stop\.on: got 'holdout'",
    ),
    "stopping on the test set": (
        lambda: hp.solve(make(test=DATA), pdbo(stop=hp.EarlyStopping("cost", "test", 2)), NETWORK, key=0),
        r"PDBO\.stop\.on: got 'test'",
    ),
    "an optax optimizer that is none": (lambda: pdbo(outer=optax.adam), r"PDBO\.outer"),
    "one client's task in a simulation": (
        lambda: hp.train(TASK.for_client(0), SGP, NETWORK, key=0),
        r"engine: got 'Simulate'.*one party's task",
    ),
    "a client who is not there": (lambda: TASK.for_client("eve"), r"client: got 'eve'"),
}


@pytest.mark.parametrize(("call", "message"), VERBS.values(), ids=VERBS)
def test_a_mistake_is_named(call, message):
    with pytest.raises(hp.InvalidInput, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_verb_inside_jit_says_what_is_pure():
    def inside(inputs):
        return hp.train(make(train=(inputs, DATA[1])), SGP, NETWORK, key=0).params

    with pytest.raises(hp.InvalidInput, match=r"task: got 'arrays that JAX is tracing'.*hp\.extend\.evaluate"):
        jax.jit(inside)(jnp.asarray(INPUTS))


@pytest.mark.long
def test_stopping_on_what_is_fitted_is_warned_of():
    with pytest.warns(UserWarning, match="'validation' is what the outer level fits"):
        hp.solve(TASK, pdbo(stop=hp.EarlyStopping("cost", "validation", 2)), NETWORK, key=0)
