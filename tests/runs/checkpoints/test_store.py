"""Checkpoints on disk are complete and unchanged, or refused with the reason."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.base.errors import HyperpushError
from hyperpush.runs.checkpoints import store as stores
from hyperpush.runs.checkpoints.store import CheckpointFolder, ClientRows

ARRAYS = {
    "table": np.arange(2000, dtype=np.float32).reshape(50, 40),
    "half": jnp.arange(3, dtype=jnp.bfloat16),
    "nothing": np.zeros((0, 4), np.int32),
    "flags": np.array([True, False]),
    "scalar": np.float32(2.5).reshape(()),
}
SAVED = {name: ClientRows(array) for name, array in ARRAYS.items()}


@pytest.fixture
def store(tmp_path):
    made = CheckpointFolder(tmp_path / "checkpoints", lambda text: None)
    for number in range(2):
        made.save("state", SAVED, {"round": number})
    return made


def test_arrays_come_back_bit_by_bit(store):
    newest, before = store.find()
    assert (newest.facts["round"], before.facts["round"]) == (1, 0)
    loaded = newest.load()
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        found = loaded[name].read()
        assert (loaded[name].shape, loaded[name].dtype) == (found.shape, found.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(found, np.asarray(array))


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_changed_or_torn_file_is_found(store, damage):
    newest, before = store.find()
    (file,) = newest.files
    good = bytearray(file.read_bytes())
    good[len(good) // 2] ^= 1
    file.write_bytes({"torn": good[: len(good) // 2], "flipped": good, "empty": b""}[damage])
    warned = []
    assert CheckpointFolder(store.folder, warned.append).find() == [before]
    assert "checkpoint 000001-state is damaged" in warned[0]
    assert "other bytes than were written" in warned[0]
    # the damaged one was put aside, with one warning
    assert CheckpointFolder(store.folder, warned.append).find() == [before]
    assert len(warned) == 1


def test_a_checkpoint_that_lacks_a_part_is_removed(store):
    """One of two processes was killed before it had written its part."""
    newest, before = store.find()
    (file,) = newest.files
    file.rename(file.with_name(file.name.replace("0of1", "0of2")))
    assert store.find() == [before]
    assert [each.name for each in store.folder.iterdir()] == [before.files[0].name]


def test_a_full_disk_leaves_the_checkpoint_before_it(store, monkeypatch):
    def full(file, arrays, header):
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "_write", full)
    with pytest.raises(HyperpushError, match=r"checkpoint 2 could not be written: the disk is full; the one before it"):
        store.save("state", SAVED, {})
    assert [path.name[:12] for path in sorted(store.folder.iterdir())] == ["000000-state", "000001-state"]
    assert [saved.number for saved in store.find()] == [1, 0]


def test_what_was_cut_off_while_it_was_written_is_removed(store):
    (store.folder / ".000002-state-0of1.new").touch()
    again = CheckpointFolder(store.folder, lambda text: None)
    assert [saved.number for saved in again.find()] == [1, 0]
    assert again.save("state", SAVED, {}).number == 2
    assert len(list(store.folder.iterdir())) == 3


def test_rows_of_padding_are_not_saved_and_blocks_are_read_as_needed(tmp_path):
    """Four devices pad 6 clients to 8; readers load only the rows they need, whichever axis is divided."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("clients",))
    spec = jax.sharding.PartitionSpec
    rows = jax.device_put(np.arange(16.0).reshape(8, 2), jax.sharding.NamedSharding(mesh, spec("clients")))
    table = jax.device_put(np.arange(24).reshape(3, 8), jax.sharding.NamedSharding(mesh, spec(None, "clients")))
    store = CheckpointFolder(tmp_path, lambda text: None)
    loaded = store.save("state", {"rows": ClientRows(rows, 0, 6), "history": ClientRows(table, 1, 6)}, {}).load()
    assert (loaded["rows"].shape, loaded["history"].shape) == ((6, 2), (3, 6))
    np.testing.assert_array_equal(loaded["rows"].read(1, 4), np.arange(2.0, 8.0).reshape(3, 2))
    np.testing.assert_array_equal(loaded["history"].read(4, 6), np.arange(24).reshape(3, 8)[:, 4:6])
