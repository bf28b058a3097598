"""Programs built inside compiled code: a new number needs no compilation and changes nothing else."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.simulate import evaluate
from hyperpush.programs import (
    Average,
    Exchange,
    Local,
    ProgramRecipe,
    Repeat,
    Scope,
    Sequence,
    as_recipe,
    profile,
    program_of,
)

ENGINES = [hp.Simulate(), hp.Shard(2), hp.Threads()]
IDS = ["simulate", "shard", "threads"]
NETWORK = hp.networks.RandomDirected(3)
START, DATA, KEY = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]), jnp.ones((3, 2)), jax.random.key(0)
NUMBERS = (0.01, 0.02, 0.3, 0.4, 0.5)
PROBLEM = hp.extend.Problem(lambda x, hyper, batch: jnp.sum(x), lambda x, hyper, batch: jnp.sum(x))


class Descent(eqx.Module):
    """A method with steps towards the data's zero, an exchange after each, and an average at the end."""

    step_size: Any
    steps: int = eqx.field(static=True, default=6)

    def program(self, problem):
        def down(x, ctx):
            return x - self.step_size * x * ctx.data

        def receive(x, inbox, ctx):
            return down(inbox.mix(x), ctx)

        push = Exchange(lambda x, ctx: x, receive)
        mean = Average(lambda x, ctx: (x, jnp.ones(())), lambda x, mean, mass, ctx: mean * self.step_size, 2)
        return Sequence(Local(down), Repeat(push, self.steps, name="push"), mean)


class Nested(eqx.Module):
    """A nested method: each of its steps runs another method from a separate recipe."""

    inner: Descent
    rate: Any

    def program(self, problem):
        body = Scope(
            program_of(self.inner, problem).program(),
            lambda x, ctx: x * self.rate,
            lambda before, x, ctx: before + self.rate * x,
        )
        return Repeat(body, 3, name="outer")


@pytest.fixture
def compiled():
    """Count the compilations by XLA."""
    counts = [0]

    def count(event, duration_secs, **kwargs):
        counts[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    yield counts
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.parametrize(
    ("make", "record"),
    [(Descent, None), (lambda number: Nested(Descent(number, 3), 2 * number), {"push": lambda x, ctx: x[0]})],
    ids=["plain", "nested and recorded"],
)
@pytest.mark.long
def test_a_new_number_compiles_nothing(engine, make, record, compiled):
    def run(program):
        result = engine.run(program, NETWORK, START, DATA, KEY, record=record)
        return jax.tree.map(np.asarray, (result.states, result.history))

    run(program_of(make(0.1), PROBLEM))
    before = compiled[0]
    found = [run(program_of(make(number), PROBLEM)) for number in NUMBERS]
    assert compiled[0] == before
    fresh = run(
        ProgramRecipe(lambda method: method.program(PROBLEM), (make(NUMBERS[0]),))
    )  # another function, so it is compiled anew
    assert compiled[0] > before
    jax.tree.map(np.testing.assert_array_equal, fresh, found[0])
    # XLA rounds differently if the numbers are constants.
    constant = run(make(NUMBERS[0]).program(PROBLEM))
    jax.tree.map(lambda *each: np.testing.assert_allclose(*each, rtol=1e-6), constant, found[0])
    assert len({each[0].tobytes() for each in found}) == len(NUMBERS)


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_take_the_precision_of_the_run(wide):
    with jax.enable_x64(wide):
        recipe = ProgramRecipe(lambda rate: Local(lambda x, ctx: x * rate), (0.1,))
        (number,) = jax.tree.leaves(recipe.traceable())
        assert number.weak_type
        assert number.dtype == (jnp.float64 if wide else jnp.float32)
        assert recipe.parts == (0.1,)
        for dtype in (jnp.float32, jnp.bfloat16):
            states = hp.Simulate().run(recipe, NETWORK, START.astype(dtype), DATA.astype(dtype), KEY).states
            assert states.dtype == dtype


def test_structure_is_compiled_anew_and_numbers_are_not_part_of_it():
    def kind(method):
        return jax.tree.flatten(program_of(method, PROBLEM).shapes())

    assert kind(Descent(0.1)) == kind(Descent(0.2))
    assert kind(Descent(0.1)) != kind(Descent(0.1, steps=7))
    assert kind(Descent(0.1)) != kind(Descent(1))  # integers are part of the structure


def test_the_profile_of_a_recipe_is_that_of_its_program_and_is_found_once():
    state, data = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    first, again = (profile(program_of(Descent(number), PROBLEM), state, data, 3) for number in (0.1, 0.2))
    assert first is again
    plain = profile(Descent(0.1).program(PROBLEM), state, data, 3)
    assert [(s.path, s.floats, s.body) for s in first.sendings] == [(s.path, s.floats, s.body) for s in plain.sendings]


def test_numbers_can_be_mapped_over():
    def solved(number):
        return evaluate(program_of(Descent(number), PROBLEM), NETWORK, START, DATA, KEY)[0]

    found = jax.jit(jax.vmap(solved))(jnp.array(NUMBERS))
    for number, each in zip(NUMBERS, found, strict=True):
        alone = hp.Simulate().run(program_of(Descent(number), PROBLEM), NETWORK, START, DATA, KEY).states
        np.testing.assert_allclose(each, alone, rtol=1e-5)


def test_a_finished_program_is_a_recipe_of_itself():
    program = Local(lambda x, ctx: x)
    assert as_recipe(program).program() == program
    recipe = ProgramRecipe(lambda: program, ())
    assert as_recipe(recipe) is recipe
