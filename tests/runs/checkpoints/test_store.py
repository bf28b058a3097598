"""Checkpoints on disk: whole and as written, or refused with the reason."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyperpush.errors import HyperpushError
from hyperpush.runs.checkpoints import store as stores
from hyperpush.runs.checkpoints.store import Damaged, Like, Store, check

ARRAYS = [
    np.arange(2000, dtype=np.float32).reshape(50, 40),
    jnp.arange(3, dtype=jnp.bfloat16),
    np.zeros((0, 4), np.int32),
    np.array([True, False]),
    np.float32(2.5).reshape(()),
]
LIKE = [Like(array.shape, array.dtype) for array in ARRAYS]


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "checkpoints", lambda text: None)
    for number in range(2):
        made.save("state", ARRAYS, {"round": number})
    return made


def test_arrays_come_back_bit_by_bit(store):
    newest, before = store.find()
    assert (newest.facts, before.facts) == ({"round": 1}, {"round": 0})
    check(newest.path)
    for found, array in zip(store.load(newest, range(5), LIKE), ARRAYS, strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(array))
    (one,) = store.load(newest, [3], LIKE[3:4])
    np.testing.assert_array_equal(one, ARRAYS[3])


def test_a_changed_missing_or_torn_file_is_found(store):
    """Every file of the newest checkpoint in turn; the one before it stays good."""
    newest, before = store.find()
    warned = []
    store.warn = warned.append
    files = [file for file in sorted(newest.path.rglob("*")) if file.is_file()]
    assert len(files) > 5
    for file in files:
        good = file.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad, cause in ((good[: len(good) // 2], r"bytes|lines"), (bytes(flipped), "other bytes|cannot be read")):
            file.write_bytes(bad)
            with pytest.raises(Damaged, match=cause):
                check(newest.path)
        file.unlink()
        with pytest.raises(Damaged, match=r"missing|cannot be read"):
            check(newest.path)
        file.write_bytes(good)
        check(newest.path)
    files[0].unlink()
    assert not store.whole(newest)
    assert "is damaged" in warned[0]
    assert files[0].name in warned[0]
    assert [saved.number for saved in store.find()] == [before.number]
    check(before.path)


def test_a_full_disk_leaves_the_checkpoint_before_it(store, monkeypatch):
    def full(path, arrays):
        (path / "part").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "_write", full)
    with pytest.raises(HyperpushError, match=r"checkpoint 2 could not be written: the disk is full; the one before it"):
        store.save("state", ARRAYS, {})
    assert [path.name for path in sorted(store.folder.iterdir())] == ["000000-state", "000001-state"]
    check(store.find()[0].path)


def test_what_was_cut_off_while_it_was_written_is_removed(store):
    (store.folder / ".000002-state.new" / "arrays").mkdir(parents=True)
    again = Store(store.folder, lambda text: None)
    assert [saved.number for saved in again.find()] == [1, 0]
    assert again.save("state", ARRAYS[:1], {}).number == 2
    assert len(list(store.folder.iterdir())) == 3


def test_rows_of_padding_appear_or_go(store):
    """What several devices padded to another number of clients, they, or one of them, read back."""
    newest, _ = store.find()
    (cut,) = store.load(newest, [0], [Like((47, 40), np.dtype(np.float32))])
    np.testing.assert_array_equal(cut, ARRAYS[0][:47])
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("clients",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("clients"))
    (grown,) = store.load(newest, [0], [Like((52, 40), np.dtype(np.float32), spread)])
    np.testing.assert_array_equal(grown[:50], ARRAYS[0])
    assert np.all(np.asarray(grown[50:]) == 0)
