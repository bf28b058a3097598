"""Every registered class equals its copies and pickles, and functions that use `hp` can be sent to other processes."""

import copy
import pickle

import cloudpickle
import pytest

import hyperpush as hp
from hyperpush.engines.base import Engine
from hyperpush.methods.base import Method
from hyperpush.methods.registry import KINDS, registered, table
from hyperpush.networks import Network

CLIENTS = 6
OPTIONS = {"k-out": {"k": 2}, "trace": {"steps": [[[0, 1], [1, 0]]], "clients": 2}}
ENGINES = {"Peers": ("a", {"a": "127.0.0.1:7800", "b": None})}
VALUES = {
    "optimizer": lambda: hp.optimizer("adam", learning_rate=hp.schedule("cosine", 0.1, steps=5)),
    "by name": lambda: hp.optimizer("by-name", x=hp.optimizer("sgd", learning_rate=0.1)),
    "schedule": lambda: hp.schedule("milestones", 0.1, at=(3, 5)),
    "faults": lambda: hp.Faults(loss=0.1, delay=2),
}


def makers():
    for kind in KINDS:
        for name, cls in registered(kind).items():
            if issubclass(cls, Method):
                yield name, cls.example
            elif kind == "recipes":
                yield name, cls
            elif kind == "engines":
                options = {"tls": False} if name == "Peers" else {}
                yield name, lambda cls=cls, name=name, options=options: cls(*ENGINES.get(name, ()), **options)
            elif kind == "networks" and name != "trace":
                yield name, lambda name=name: hp.network(name, CLIENTS, **OPTIONS.get(name, {}))


MAKERS = {**dict(makers()), **VALUES}


@pytest.mark.parametrize("name", MAKERS)
def test_everything_that_has_a_name_equals_its_copies_and_its_pickle(name):
    made = MAKERS[name]()
    for remake in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        again = remake(made)
        assert type(again) is type(made)
        assert again == made
        if not isinstance(made, Network | Engine | hp.Faults):
            assert hash(again) == hash(made)
            assert table(again) == table(made)


def test_functions_that_mention_the_library_can_be_sent():
    send = cloudpickle.dumps(lambda steps: hp.SGP(steps, 0.1))
    assert pickle.loads(send)(3) == hp.SGP(3, 0.1)
