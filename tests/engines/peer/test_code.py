"""Digests of a program's code: one that parties compare, and one that also covers code that cannot be compared."""

import jax.numpy as jnp
import pytest

from hyperpush.engines.peer.code import NOT_COMPARED, code_digest
from hyperpush.engines.transport.zenoh.agreement import difference
from hyperpush.engines.transport.zenoh.control import Card
from hyperpush.programs import Local, as_recipe


def digests(f, examples=5):
    program = Local(lambda state, ctx: f(state, ctx.data))
    return code_digest(as_recipe(program), jnp.zeros(3), jnp.zeros((examples, 3)), 2)


def only_of(examples, rate=1.0):
    """Return a function that refuses all other numbers of examples."""

    def f(state, data):
        if len(data) != examples:
            raise ValueError(f"{len(data)} examples")
        return state - rate * data.mean(0)

    return f


def test_the_number_of_examples_does_not_matter_but_operations_do():
    found = digests(lambda state, data: state - data.mean(0))
    assert found.common == found.own != NOT_COMPARED
    assert not found.undefined
    assert digests(lambda state, data: state - data.mean(0), examples=9) == found
    assert digests(lambda state, data: state - 2 * data.mean(0)).common != found.common


def test_code_that_refuses_the_tried_numbers_of_examples_says_so_and_keeps_a_digest_of_its_own():
    """The noise of a private party depends on the digest: changed code must not draw the same noise again."""
    one, other = digests(only_of(5)), digests(only_of(5, rate=10.0))
    assert one.common == other.common == NOT_COMPARED
    assert one.own != other.own
    assert one.undefined == "its functions refuse 65,536 examples (ValueError: 65536 examples)"
    assert digests(only_of(5)) == one


def test_a_bug_is_not_taken_for_a_number_of_examples():
    with pytest.raises(AttributeError):
        digests(lambda state, data: data.nothing)


def test_a_party_whose_code_cannot_be_compared_runs_other_code_than_one_whose_can():
    """The result follows from the code alone: it either can or cannot be compared."""
    here, there = (Card(bytes(32), code, "0.9") for code in (b"0123456789abcdef", NOT_COMPARED))
    found = difference("bob", there, "alice", here)
    assert found is not None
    assert "runs other code than" in found[1]
    assert difference("bob", there, "alice", there) is None
