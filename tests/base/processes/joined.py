"""Two processes, forked from one that has imported everything; each checks the results that they compute together.

python joined.py FOLDER PORT
"""

import os
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

import hyperpush as hp
from hyperpush.base import processes
from hyperpush.data.batches import Ragged
from hyperpush.runs.checkpoints import Policy
from hyperpush.runs.checkpoints.journal import Journal, values_digest
from hyperpush.runs.checkpoints.store import CheckpointFolder
from hyperpush.runs.models import load_models, save_models
from hyperpush.tasks.logistic import logistic

LOADED = (hp.train, hp.SGP)  # imported here once, not in every process

CLIENTS = 5  # on two devices, which requires padding


class Cut(BaseException):
    """Raised at the point where the processes would have been killed."""


def member(folder: Path, port: str, index: int) -> None:
    # These are the variables that `mpirun` sets on one host. JAX finds the address, the number of processes and this
    # process's index in them.
    os.environ |= {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:9", "JAX_COORDINATOR_PORT": port}
    os.environ |= {f"OMPI_COMM_WORLD_{name}": str(index) for name in ("RANK", "LOCAL_RANK")}
    os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
    processes.join(None, None, None)
    assert (processes.count(), processes.first_process()) == (2, index == 0)
    assert processes.gather_texts(f"from {index}, ä") == ["from 0, ä", "from 1, ä"]
    assert processes.agree(index == 0, index == 1) == (True, True)

    # Each process makes its own clients' data, and none holds all data.
    made_here = []

    def make(client: int):
        made_here.append(client)
        return {"x": np.full((2, 3), client, np.float32)}

    rows = processes.stack(make, 4)["x"]
    assert made_here == [2 * index, 2 * index + 1]
    assert rows.shape == (4, 2, 3)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(2, 2, 3)]
    np.testing.assert_array_equal(processes.visible(rows)[:, 0, 0], made_here)
    np.testing.assert_array_equal(processes.gather(rows)[:, 0, 0], np.arange(4))

    network = hp.networks.RandomDirected(CLIENTS)
    task = logistic(CLIENTS, 0, examples=8)

    def train(**options):
        return hp.train(task, hp.SGP(60, 0.3, batch_size=4), network, key=3, every=1, **options)

    def same(found, truth):
        assert np.abs(truth.params).max() > 0.1
        np.testing.assert_allclose(found.params, truth.params, rtol=1e-5, atol=1e-6)
        assert found.history.cost.shape == (61, CLIENTS)
        np.testing.assert_allclose(found.history.cost, truth.history.cost, rtol=1e-5)
        np.testing.assert_array_equal(found.history.rounds, truth.history.rounds)
        assert (found.costs, found.task.point.step) == (truth.costs, truth.task.point.step)

    alone = train(engine=hp.Shard(devices=jax.local_devices()[:1]))
    same(train(), alone)

    # Interrupted after a checkpoint of both processes, the two resume together.
    store = CheckpointFolder(folder / "checkpoints", print)
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
    with Journal(CheckpointFolder(folder / "checkpoints", print), Policy(None, 30)).active():
        same(train(), alone)
    beyond_one_process(folder, index)
    processes.barrier("the end")


def beyond_one_process(folder: Path, index: int) -> None:
    """Check results that are too large for one process: here, larger than sixty bytes."""
    before, processes.GATHERED = processes.GATHERED, 60
    own = range(2 * index, 2 * index + 2)
    examples = np.arange(24, dtype=np.float32).reshape(12, 2)
    owned = [np.arange(3 * i, 3 * i + 3 - i % 2) for i in range(4)]

    def block(first: int, end: int):
        rows, labels = np.zeros((end - first, 3, 2), np.float32), np.zeros((end - first, 3), int)
        for place, client in enumerate(range(first, end)):
            count = len(owned[client])
            rows[place, :count], labels[place, :count] = (examples[owned[client]] - client) / 2, owned[client] % 3
        return rows, labels, np.array([len(each) for each in owned[first:end]])

    made = processes.stack_blocks(block, 4)
    stacked = Ragged(made[:2], made[2])
    for row, client in zip(processes.visible(stacked.examples[0]), own, strict=True):
        truth = np.zeros((3, 2))
        truth[: len(owned[client])] = (examples[owned[client]] - client) / 2
        np.testing.assert_allclose(row, truth)
    np.testing.assert_array_equal(processes.gather(stacked.counts), [3, 2, 3, 2])

    # The size of a tree is that of all its leaves together: no single leaf of this one is too large.
    tree = {"a": stacked.examples[0][:, 0], "b": stacked.examples[1], "c": stacked.counts}
    assert all(leaf.nbytes <= 60 for leaf in tree.values())
    assert all(processes.spread(leaf) for leaf in processes.gather(tree).values())
    means = processes.by_client(lambda rows: rows.examples[0].sum((1, 2)) / rows.counts, stacked)
    np.testing.assert_allclose(means, [((examples[o] - i) / 2).sum() / len(o) for i, o in enumerate(owned)], rtol=1e-6)

    # Every process writes the models of its own clients.
    save_models(folder / "models" / "tree", {**tree, "all": np.arange(4.0)}, index == 0)
    processes.barrier("models")
    assert len(list((folder / "models" / "tree").iterdir())) == 2  # one file per process
    saved = load_models(folder / "models" / "tree")
    np.testing.assert_array_equal(saved["all"], np.arange(4.0))
    np.testing.assert_array_equal(saved["a"][list(own)], processes.visible(tree["a"]))

    # The digest equals that of a single process with all data.
    processes.GATHERED = before
    everything = jax.tree.map(np.asarray, processes.gather(tree))
    assert values_digest(tree, 4) == values_digest(everything, 4)

    # Results that cannot be divided over the devices are refused before the run.
    processes.GATHERED = 10
    with pytest.raises(hp.HyperpushError, match="a multiple of the 2 devices"):
        hp.train(logistic(CLIENTS, 0, examples=8), hp.SGP(3, 0.3), hp.networks.RandomDirected(CLIENTS), key=3)
    processes.GATHERED = before


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
