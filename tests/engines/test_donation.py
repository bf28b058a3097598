"""Large states: chunks overwrite arrays that no one else holds, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.errors import Diverged
from hyperpush.engines.compiled import chunks, compile
from hyperpush.engines.simulate import Simulate
from hyperpush.programs import Local, Repeat, Scope
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal
from hyperpush.runs.checkpoints.store import CheckpointFolder

NETWORK = hp.networks.Ring(3)
ROUNDS = 70
SHARED = jnp.arange(12.0).reshape(3, 4)
START = {"x": SHARED, "kept": SHARED * 2, "twin": SHARED}


def program(rate):
    body = Local(lambda s, ctx: {**s, "x": rate * s["x"] + s["kept"], "twin": s["x"]})
    return Scope(Repeat(body, ROUNDS, name="loop"), lambda s, ctx: s, lambda before, s, ctx: s)


def truth(rate):
    x = np.asarray(SHARED, np.float64)
    kept, twin = 2 * x, x
    for _ in range(ROUNDS):
        x, twin = rate * x + kept, x
    return x, kept, twin


def run(rate=0.5, **options):
    seen = {"loop": lambda s, ctx: s["x"][0]}
    return Simulate().run(program(rate), NETWORK, START, jnp.zeros(3), jax.random.key(0), record=seen, **options)


def test_what_others_hold_is_not_overwritten():
    a, b = jnp.arange(3.0), jnp.arange(4.0)
    rest, free = chunks.split_donatable({"a": a, "b": b, "twins": (b + 1,), "none": jnp.zeros(0)}, {"other": [a]})
    assert rest["a"] is a
    assert free["a"] is None
    assert free["b"] is b
    assert rest["b"] is None
    assert free["none"] is None
    c = b + 2
    _, free = chunks.split_donatable((c, c), ())
    assert free == (None, None)


def test_what_is_handed_through_is_not_copied():
    found = run().states
    assert found["kept"].unsafe_buffer_pointer() == START["kept"].unsafe_buffer_pointer()
    assert found["x"].unsafe_buffer_pointer() != START["x"].unsafe_buffer_pointer()


def test_chunks_that_overwrite_compute_the_same_and_leave_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LARGE", 0)
    given = []
    compiled = compile.call

    def noting(function, arguments, donated, level):
        given.extend([] if donated is None else [jax.tree.leaves(donated)])
        return compiled(function, arguments, donated, level)

    monkeypatch.setattr(compile, "call", noting)
    with Journal(CheckpointFolder(tmp_path, print), Policy(None, 20)).active():
        found = run()
    assert len(given) > 1
    # All arrays were overwritten except those that the caller holds.
    assert all(leaf.is_deleted() for leaves in given for leaf in leaves)
    assert max(len(leaves) for leaves in given) >= 2
    x, kept, twin = truth(0.5)
    np.testing.assert_array_equal(START["x"], np.arange(12.0).reshape(3, 4))
    np.testing.assert_allclose(found.states["x"], x, rtol=1e-6)
    np.testing.assert_allclose(found.states["kept"], kept)
    np.testing.assert_allclose(found.states["twin"], twin, rtol=1e-6)
    assert found.history["loop"].shape == (ROUNDS, 3)
    monkeypatch.setattr(chunks, "LARGE", 1 << 40)
    with Journal(CheckpointFolder(tmp_path, print), Policy(None, 20)).active():  # resumes from the checkpoint
        np.testing.assert_array_equal(run().states["x"], found.states["x"])


def test_a_large_state_that_diverges_is_named(monkeypatch):
    monkeypatch.setattr(chunks, "LARGE", 0)
    with pytest.raises(Diverged, match=r"loop diverged \(NaN or infinity\) in round \d+. It may have diverged earlier"):
        run(10.0)  # fails after the first chunk, which overwrites nothing because the start is the caller's memory
