"""Rows of records: those of the entry, the time of each row, and the traffic until then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hyperpush as hp
from hyperpush.engines.compiled import chunks
from hyperpush.engines.planning import Planner
from hyperpush.engines.result import Recorder
from hyperpush.engines.simulate import evaluate
from hyperpush.programs import Average, Exchange, Local, Repeat, Sequence, Server

ENGINES = [hp.Simulate(), hp.Shard(2), hp.Threads()]
IDS = ["simulate", "shard", "threads"]
NETWORK, KEY, NOTHING = hp.networks.Ring(3), jax.random.key(0), jnp.zeros((3, 1))
START = (jnp.zeros(3), jnp.arange(3.0))


def count(state, ctx):
    return state[0] + 1, state[1]


def shown(state, ctx):
    return state[0] + 100 * jax.random.uniform(ctx.key) ** 0


def talk(floats):
    return Exchange(lambda s, ctx: jnp.full(floats, s[1]), lambda s, inbox, ctx: s)


def enough(times):
    """Return a condition: the counter is a multiple of `times`."""
    return lambda state, ctx: state[0] % times == 0


COUNT = Local(count)


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.parametrize("every", [1, 3])
def test_the_entry_is_row_zero(engine, every, monkeypatch):
    monkeypatch.setattr(chunks, "FIRST_CHUNK", 2)  # several chunks
    program = Sequence(COUNT, Repeat(Sequence(COUNT, talk(2)), 7, name="loop"))
    both = [
        engine.run(program, NETWORK, START, NOTHING, KEY, record={"loop": Recorder(shown, entry)}, every=every)
        for entry in (True, False)
    ]
    rows = np.arange(0, 8, every)
    np.testing.assert_array_equal(both[0].history["loop"][:, 1], 101 + rows)
    np.testing.assert_array_equal(both[1].history["loop"], both[0].history["loop"][1:])
    for result, skipped in zip(both, (0, 1), strict=True):
        clock = result.clocks["loop"]
        np.testing.assert_array_equal(clock.rounds, rows[skipped:])
        np.testing.assert_array_equal(clock.floats, 2 * rows[skipped:])
    _, history = evaluate(program, NETWORK, START, NOTHING, KEY, record={"loop": Recorder(shown, True)}, every=every)
    np.testing.assert_array_equal(history["loop"], both[0].history["loop"])


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.parametrize("entry", [True, False])
def test_the_last_iteration_has_a_row(engine, entry, monkeypatch):
    monkeypatch.setattr(chunks, "FIRST_CHUNK", 2)  # several chunks
    rows = np.array([0, 3, 6, 7][not entry :])
    program, record = Repeat(Sequence(COUNT, talk(2)), 7, name="loop"), {"loop": Recorder(shown, entry, last=7)}
    for hooks in ((), (hp.hooks.Hook(),)):
        result = engine.run(program, NETWORK, START, NOTHING, KEY, record=record, every=3, hooks=hooks)
        np.testing.assert_array_equal(result.history["loop"][:, 1], 100 + rows)
        np.testing.assert_array_equal(result.clocks["loop"].rounds, rows)
    planned = Planner().run(program, NETWORK, START, NOTHING, KEY, record=record, every=3)
    assert planned.clocks["loop"].step.shape == rows.shape


def test_the_last_iteration_has_a_row_where_the_host_walks_the_loop():
    inner = Repeat(COUNT, 2, name="inner")
    record = {"loop": Recorder(shown, last=5), "inner": Recorder(shown)}
    result = hp.Simulate().run(
        Repeat(inner, 5, name="loop"), NETWORK, START, NOTHING, KEY, record=record, every=2, hooks=[hp.hooks.Hook()]
    )
    np.testing.assert_array_equal(result.history["loop"][:, 0], [104, 108, 110])


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_a_loop_that_never_runs_is_entered(engine):
    record = {"loop": Recorder(shown, True)}
    result = engine.run(Repeat(COUNT, 0, name="loop"), NETWORK, START, NOTHING, KEY, record=record)
    np.testing.assert_array_equal(result.history["loop"], np.full((1, 3), 100))
    assert result.clocks["loop"].step.tolist() == [0]


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.long
def test_what_was_sent_at_each_row(engine):
    """Count traffic with loops of fixed and agreed lengths; the recorded loop is entered twice."""
    vote = Repeat(Sequence(COUNT, talk(5)), 9, until=enough(3), name="vote")
    mean = Average(lambda s, ctx: (s[1], jnp.ones(())), lambda s, mean, mass, ctx: s, 4)
    served = Server(lambda s, ctx: s[1], lambda messages, key: messages, lambda s, answer, ctx: s)
    inside = Repeat(Sequence(talk(1), Repeat(talk(7), 2), vote), 3, name="inside")
    outer = Repeat(Sequence(mean, Repeat(talk(11), 2), inside, served, talk(13)), 2, name="outer")
    program = Sequence(talk(17), vote, outer, talk(19))
    record = {"inside": Recorder(shown, True), "outer": Recorder(shown, True), "vote": Recorder(shown)}
    found = {
        name: engine.run(program, NETWORK, START, NOTHING, KEY, record={name: record[name]})
        for name in record
        if name != "vote"
    }
    agreement = NETWORK.flood_rounds()
    before = 17 + 3 * (5 + agreement)  # the vote takes three passes each time
    body = 1 + 2 * 7 + 3 * (5 + agreement)
    begins = 4 * 2 + 2 * 11
    ends = 1 + 13
    one = begins + 3 * body + ends
    assert found["outer"].clocks["outer"].floats.tolist() == [before, before + one, before + 2 * one]
    rows = [before + begins + k * body for k in range(4)]
    assert found["inside"].clocks["inside"].floats.tolist() == [*rows, *(row + one for row in rows)]
    for result in found.values():
        assert result.floats == before + 2 * one + 19
    rounds = [1 + 3 * (1 + agreement) + 4 + 2 + k * (1 + 2 + 3 * (1 + agreement)) for k in range(4)]
    assert found["inside"].clocks["inside"].rounds.tolist()[:4] == rounds


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_rows_of_a_loop_of_an_agreed_length(engine):
    program = Repeat(Sequence(COUNT, talk(5)), 20, until=enough(7), name="vote")
    result = engine.run(program, NETWORK, START, NOTHING, KEY, record={"vote": Recorder(shown, True)}, every=2, step=10)
    agreement = NETWORK.flood_rounds()
    clock = result.clocks["vote"]
    assert clock.floats.tolist() == [k * (5 + agreement) for k in (0, 2, 4, 6)]
    assert clock.rounds.tolist() == [k * (1 + agreement) for k in (0, 2, 4, 6)]
    assert clock.step.tolist() == [10 + k for k in clock.rounds.tolist()]
    assert result.floats == 7 * (5 + agreement)


def test_loops_of_one_name_share_their_rows():
    loop = Repeat(talk(3), 2, name="loop")
    record = {"loop": Recorder(shown, True)}
    result = hp.Simulate().run(Sequence(loop, talk(1), loop), NETWORK, START, NOTHING, KEY, record=record)
    assert result.clocks["loop"].floats.tolist() == [0, 3, 6, 7, 10, 13]


def test_a_plan_has_the_rows_of_the_run():
    program = Repeat(Repeat(COUNT, 5, name="loop"), 2)
    record = {"loop": Recorder(shown, True)}
    run = hp.Simulate().run(program, NETWORK, START, NOTHING, KEY, record=record, every=2)
    with Planner().active():
        planned = hp.Simulate().run(program, NETWORK, START, NOTHING, KEY, record=record, every=2)
    # Both loops have this name: the inner loop gives three rows each time, the outer one two rows.
    assert planned.history["loop"].shape == run.history["loop"].shape == (8, 3)
    assert planned.clocks["loop"].step.shape == (8,)
