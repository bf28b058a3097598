"""Tests that every registered method of any kind passes. A new method is included by its registration."""

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

import equinox as eqx
import jax
import numpy as np
import pytest
import tomli_w
from repeats import some

import hyperpush as hp
from hyperpush.methods.base import Method
from hyperpush.methods.registry import build, kind_of, table
from hyperpush.programs import Server, contains

CLIENTS = 4
NETWORK = hp.networks.Ring(CLIENTS)  # a network on which every method runs
ENGINE = hp.Simulate()
# one engine combines sharding and batches, which saves a compilation
ENGINES = [hp.Shard(devices=2, clients_per_batch=1), hp.Threads()]


def scaled(method, factor):
    """Return the same method with its numbers scaled."""
    numbers, rest = eqx.partition(method, lambda leaf: isinstance(leaf, float))
    return eqx.combine(jax.tree.map(lambda number: factor * number, numbers), rest)


def has_host_server(method):
    """Return whether the method has a server in plain Python, which peers lack; recipes have no program."""
    if not isinstance(method, Method):
        return False
    program = method.program(hp.tasks.quadratic(CLIENTS, seed=0).problem)
    return contains(program, lambda node: isinstance(node, Server) and node.host)


@pytest.fixture
def compiled():
    """Count the compilations by XLA."""
    counts = [0]

    def count(event, duration_secs, **kwargs):
        counts[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counts
    jax.monitoring.unregister_event_duration_listener(count)


class CommonSuite:
    """Base of the suites: a subclass names methods and says how to run one.

    The methods in `FEW` cover the kinds of nodes. They run on all engines in `make test`, all others in `make
    test-long`.
    """

    METHODS: Mapping[str, Any]
    FEW: Collection[str]
    REPEATED: Collection[str] = ("test_engines_agree",)  # tests that `make test` runs for the methods of `FEW` only

    def pytest_generate_tests(self, metafunc):
        repeated = metafunc.function.__name__ in self.REPEATED
        metafunc.parametrize("method", some(self.METHODS, self.FEW if repeated else self.METHODS))

    @staticmethod
    def run(method: Any, engine: Any = ENGINE, network: Any = NETWORK) -> Any:
        raise NotImplementedError

    @staticmethod
    def values(result: Any) -> Any:
        """Return the numbers of a result that engines must agree on."""
        raise NotImplementedError

    @classmethod
    @cache
    def reference(cls, method):
        return cls.run(method)

    def test_same_key_gives_the_same_bits_and_a_new_number_compiles_nothing(self, method, compiled):
        first = self.values(self.reference(method))
        before = compiled[0]
        again, other = self.values(self.run(method)), self.values(self.run(scaled(method, 0.9)))
        assert compiled[0] == before
        jax.tree.map(np.testing.assert_array_equal, again, first)
        # A damping of 0 stays 0, and some methods have no numeric options.
        matters = any(leaf > 0 for leaf in jax.tree.leaves(method) if isinstance(leaf, float))
        assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (other, first)), strict=True)) == matters

    @pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
    def test_engines_agree(self, method, engine):
        if isinstance(engine, hp.Threads) and has_host_server(method):
            with pytest.raises(hp.HyperpushError, match="in plain Python runs on simulate and shard only"):
                self.run(method, engine)
            return
        expected, found = self.reference(method), self.run(method, engine)
        # the values must not all be zero
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(self.values(expected))) > 0.01
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
            self.values(found),
            self.values(expected),
        )
        assert found.costs == expected.costs

    def test_a_network_that_it_cannot_use_is_refused(self, method):
        if not isinstance(method, Method) or method.info.network != "undirected":
            return
        with pytest.raises(hp.InvalidInput, match=r"which is directed.*Methods that run here: ") as refused:
            self.run(method, network=hp.networks.DirectedRing(CLIENTS))
        assert type(method).__name__ not in refused.value.allowed.split("here: ")[1].split(", ")

    def test_status_has_a_reason(self, method):
        assert self.reference(method).status.reason

    def test_toml_round_trip(self, method):
        written = tomllib.loads(tomli_w.dumps({"method": table(method)}))["method"]
        again = build(kind_of(method) or "", written, "method")
        assert again == method
        assert hash(again) == hash(method)

    def test_an_option_out_of_range_is_named(self, method):
        hints = get_type_hints(type(method))
        wrong = []
        for name, value in method.options().items():
            if type(value) in (int, float) or (value is None and {int, float} & set(get_args(hints[name]))):
                wrong.append((name, -1))
                wrong += [(name, 0)] if name in ("batch_size", "pushes", "step_size", "tolerance") else []
                wrong += [(name, np.nan)] if type(value) is float else []
        for name, given in wrong:
            with pytest.raises(hp.InvalidInput) as refused:
                method.with_options(**{name: given})
            assert refused.value.field == f"{type(method).__name__}.{name}"
