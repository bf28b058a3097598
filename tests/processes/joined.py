"""Two processes, forked by one that has loaded everything: what they compute together, each checks alone.

python joined.py FOLDER PORT
"""

import os
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
from jax._src import xla_bridge

import hyperpush as hp
from hyperpush import processes
from hyperpush.checkpoints import Policy
from hyperpush.checkpoints.journal import Journal
from hyperpush.checkpoints.store import Store
from hyperpush.engine import shard
from hyperpush.problems.logistic import logistic

LOADED = (orbax.checkpoint, hp.train, hp.SGP)  # here, not in every process

CLIENTS = 5  # on two devices: with padding


class Cut(BaseException):
    """Where the processes would have been killed."""


def member(folder: Path, port: str, index: int) -> None:
    processes.join(f"127.0.0.1:{port}", 2, index)
    assert (processes.count(), processes.first_process()) == (2, index == 0)
    assert processes.told("from the first" if index == 0 else None) == "from the first"
    assert processes.agree(index == 0, index == 1) == (True, True)

    # Each makes what its own clients have, and nobody holds all of it.
    made_here = []

    def make(client: int):
        made_here.append(client)
        return {"x": np.full((2, 3), client, np.float32)}

    rows = processes.stack(make, 4)["x"]
    assert made_here == [2 * index, 2 * index + 1]
    assert rows.shape == (4, 2, 3)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(2, 2, 3)]
    np.testing.assert_array_equal(processes.visible(rows)[:, 0, 0], made_here)
    np.testing.assert_array_equal(processes.gathered(rows)[:, 0, 0], np.arange(4))

    made = logistic(CLIENTS, 0, examples=8)
    network = hp.networks.RandomDirected(CLIENTS)
    record = {"SGP": lambda state, ctx: state.mass}

    def train(**options):
        at = (made.params, made.hypers, made.inner_data, jax.random.key(3))
        return hp.train(made.problem, hp.SGP(60, 0.3, batch=4), network, *at, record=record, **options)

    def same(found, truth):
        assert np.abs(truth.params).max() > 0.1
        np.testing.assert_allclose(found.params, truth.params, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.history["SGP"], truth.history["SGP"], rtol=1e-5)
        assert (found.rounds, found.floats, found.step) == (truth.rounds, truth.floats, truth.step)

    alone = train(run=shard.run, devices=jax.local_devices()[:1])
    same(train(), alone)

    # Cut off after a checkpoint of both, they go on together.
    store = Store(folder / "checkpoints", print)
    write = store.save

    def save(*arguments):
        write(*arguments)
        raise Cut

    store.save = save  # type: ignore[method-assign]
    try:
        with Journal(store, Policy(None, 30)).active():
            train()
        raise AssertionError("not cut off")
    except Cut:
        pass
    with Journal(Store(folder / "checkpoints", print), Policy(None, 30)).active():
        same(train(), alone)
    processes.barrier("the end")


if __name__ == "__main__":
    assert not xla_bridge.backends_are_initialized()
    children = []
    for place in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                member(Path(sys.argv[1]), sys.argv[2], place)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
