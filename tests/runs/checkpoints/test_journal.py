"""Programs that are interrupted at any of their checkpoints and resumed give bit-identical results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.base.errors import HyperpushError
from hyperpush.engines.faults import Faults
from hyperpush.engines.shard import Shard
from hyperpush.engines.simulate import Simulate
from hyperpush.programs import Exchange, Local, Repeat, Scope, Sequence, Server
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal, values_digest
from hyperpush.runs.checkpoints.store import CheckpointFolder
from hyperpush.verbs.hooks import Hook, Progress

NETWORK = hp.networks.RandomDirected(6, probability=(0.4, 0.8))
KEY = jax.random.key(5)
DATA = jnp.arange(6.0)
RECORD = {"inner": lambda s, ctx: s["x"], "outer": lambda s, ctx: (s["x"] * 2, s["count"])}


class Cut(BaseException):
    """Raised at the point where a process would have been killed."""


def receive(state, inbox, ctx):
    x, mass = inbox.mix((state["x"], state["mass"]))
    noise = 0.1 * jax.random.normal(ctx.key, x.shape)
    return {**state, "x": x + noise, "mass": mass, "count": state["count"] + 1}


INNER = Scope(
    Repeat(Exchange(lambda s, ctx: (s["x"], s["mass"]), receive, conserved=True), 6, name="inner"),
    enter=lambda s, ctx: {**s, "x": s["x"] + ctx.data, "mass": jnp.ones(())},
    leave=lambda s, inner, ctx: {**s, "x": inner["x"] / inner["mass"], "count": inner["count"]},
)
OUTER = Repeat(Sequence(INNER, Local(lambda s, ctx: {**s, "x": 0.5 * s["x"]})), 3, name="outer")


def ended(state, ctx):
    return state["count"] >= 30


COUNTED = Repeat(Local(lambda s, ctx: {**s, "count": s["count"] + 1}), 20, until=ended, name="last")
RANKED = Repeat(
    Server(
        lambda s, ctx: s["x"],
        lambda messages, key: np.argsort(np.argsort(np.asarray(messages)), stable=True).astype(np.float32),
        lambda s, answer, ctx: {**s, "x": s["x"] + answer},
        host=True,
    ),
    4,
    name="ranked",
)


def states(n=6):
    return {"x": jnp.arange(float(n)), "count": jnp.zeros(n, jnp.int32), "key": jax.random.split(jax.random.key(1), n)}


def two_pieces(run, tree, record):
    """Run two calls, the second of which starts where the first ended."""
    first = run(tree, NETWORK, states(), DATA, KEY, record=record)
    return first, run(tree, NETWORK, first.states, DATA, jax.random.key(6), record=record, step=first.step)


def cut_off(folder, computed, saves, warnings, policy=None):
    """Return the result of a run under a journal that is interrupted after `saves` checkpoints (None: never)."""
    store = CheckpointFolder(folder, warnings.append)
    journal = Journal(store, policy or Policy(minutes=None, rounds=4))
    shown = []
    progress = Progress(lambda name, done, total: shown.append(name))
    write, written = store.save, []

    def save(*arguments):
        done = write(*arguments)
        written.append(done)
        if saves is not None and len(written) >= saves:
            raise Cut
        return done

    store.save = save  # type: ignore[method-assign]
    with journal.active(progress):
        return computed(), written, shown


def same(found, truth, **tolerance):
    for mine, theirs in zip(found, truth, strict=True):
        for name in ("step", "rounds", "floats", "work", "late"):
            assert getattr(mine, name) == getattr(theirs, name), name
        np.testing.assert_array_equal(mine.bytes, theirs.bytes)
        pairs = (jax.tree.leaves((each.states, each.history)) for each in (mine, theirs))
        for a, b in zip(*pairs, strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            if tolerance:
                np.testing.assert_allclose(a, b, **tolerance)
            else:
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert jax.tree.structure(mine.history) == jax.tree.structure(theirs.history)


FEW = {"inner": RECORD["inner"]}
CASES = {
    "nested": (Simulate().run, Sequence(OUTER, COUNTED, RANKED), RECORD, (1, 3, 4)),
    "faulty": (Simulate(faults=Faults(loss=0.2, delay=2)).run, INNER, FEW, (2,)),
    "shard": (Shard(4).run, INNER, FEW, (1,)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_cut_off_ends_in_the_same_bits(tmp_path, case):
    run, tree, record, cuts = CASES[case]
    computed = partial(two_pieces, run, tree, record)
    truth = computed()
    shown, warnings = [], []
    for saves in cuts:  # one run, interrupted several times
        with pytest.raises(Cut):
            cut_off(tmp_path, computed, saves, warnings)
    found, _, shown = cut_off(tmp_path, computed, None, warnings)
    same(found, truth)
    assert warnings == []
    _, _, everything = cut_off(tmp_path / "anew", computed, None, [])
    assert len(shown) < len(everything)  # finished parts are not computed again


def test_data_whose_values_have_changed_are_noticed(tmp_path):
    tree = Repeat(Local(lambda s, ctx: {**s, "x": 0.5 * s["x"] + ctx.data}), 30, name="loop")

    def computed(data):
        return Simulate().run(tree, NETWORK, states(), data, KEY, hooks=[Hook()])

    with pytest.raises(Cut):
        cut_off(tmp_path, lambda: computed(DATA), 1, [])
    with pytest.raises(HyperpushError, match=r"checkpoint 0 was computed from other data: the values"):
        cut_off(tmp_path, lambda: computed(DATA.at[3].add(1)), None, [])
    # equal data in another array
    found = cut_off(tmp_path, lambda: computed(jnp.array(np.asarray(DATA))), None, [])[0]
    x = np.arange(6.0)
    for _ in range(30):
        x = 0.5 * x + np.arange(6.0)
    np.testing.assert_allclose(found.states["x"], x, rtol=1e-6)


def test_the_digest_of_data_is_of_every_byte_and_of_no_padding():
    rows = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(4)}
    first = values_digest(rows, 4)
    assert values_digest(jax.tree.map(np.copy, rows), 4) == first
    padded = {"a": np.vstack([rows["a"], rows["a"][:1]]), "b": np.append(rows["b"], 9)}
    assert values_digest(padded, 4) == first
    swapped = {**rows, "a": rows["a"][[1, 0, 2, 3]]}
    flipped = {**rows, "a": -rows["a"]}  # changes even 0, to -0
    narrow = {**rows, "b": rows["b"].astype(np.int32)}
    assert len({first, *(values_digest(each, 4) for each in (swapped, flipped, narrow))}) == 4
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("clients",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("clients"))
    assert values_digest({**rows, "a": jax.device_put(rows["a"], spread)}, 4) == first
