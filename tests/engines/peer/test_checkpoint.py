"""A checkpoint in two files survives a lack of file descriptors and a crash at any point of writing."""

import resource

import numpy as np
import pytest

from hyperpush.base.errors import InUse, InvalidInput
from hyperpush.engines.peer.checkpoint import Checkpoint
from hyperpush.engines.peer.origin import Origin, read_secret

DIGEST = bytes(32)


def facts(step):
    return {"step": step, "x": [np.full(200_000, float(step)), np.arange(step)]}


def saved(path, count):
    store = Checkpoint(path, DIGEST)
    for step in range(1, count + 1):
        store.save(facts(step))
    store.close()
    return store


def found(path):
    stored = Checkpoint(path, DIGEST).load()
    return None if stored is None else (stored["step"], float(stored["x"][0][-1]), len(stored["x"][1]))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_newest_one_is_loaded(count, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    assert found(path) is None
    store = saved(path, count)
    assert found(path) == (count, count, count)
    again = Checkpoint(path, DIGEST)
    again.load()
    again.save(facts(count + 1))
    assert found(path) == (count + 1, count + 1, count + 1)
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in store.paths)
    again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 7, 300, 100_000, 1_000_000, 1_600_000])
def test_whatever_is_left_of_the_last_one_the_one_before_counts(kept, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    store = saved(path, 4)
    newest = store.paths[store._newest]
    whole, older = newest.read_bytes(), (tmp_path / "older").name
    saved(tmp_path / older, 2)  # an older checkpoint in the same file, whose end is still there
    before = (tmp_path / "older-2").read_bytes()
    newest.write_bytes(whole[:kept] + before[kept:])
    assert found(path) == (3, 3, 3)
    newest.write_bytes(whole[:kept])
    assert found(path) == (3, 3, 3)


def test_the_first_one_cut_off_is_none_and_both_broken_are_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    store = saved(path, 1)
    first = store.paths[store._newest]
    first.write_bytes(first.read_bytes()[:500])
    assert found(path) is None  # no message has been sent yet
    store = saved(path, 2)
    for each in store.paths:
        each.write_bytes(b"rubbish")
    with pytest.raises(InvalidInput, match=r"checkpoint: got .*can be read"):
        found(path)


def test_two_processes_do_not_share_one(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    store = Checkpoint(path, DIGEST)
    store.prepare()
    with pytest.raises(InUse, match=r"checkpoint: another process works in .*checkpoint\.safetensors"):
        Checkpoint(path, DIGEST).prepare()
    store.close()
    again = Checkpoint(path, DIGEST)
    again.prepare()
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_when_no_file_can_be_opened(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    store = Checkpoint(path, DIGEST)
    store.prepare()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no descriptor is free
    try:
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "other").touch()
        for step in (1, 2, 3):
            store.save(facts(step))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.close()
    assert found(path) == (3, 3, 3)


@pytest.mark.parametrize("changed", ["data", "start", "problem"])
def test_a_checkpoint_that_began_with_something_else_is_refused_by_name_though_nothing_is_private(changed, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    began = {"data": "d", "start": "s", "problem": "p"}
    store = Checkpoint(path, DIGEST, Origin(**began))
    store.save(facts(1))
    store.close()
    assert Checkpoint(path, DIGEST, Origin(**began)).load() is not None
    with pytest.raises(InvalidInput, match=rf"checkpoint: got 'one that began with (an)?other {changed}'"):
        Checkpoint(path, DIGEST, Origin(**{**began, changed: "other"})).load()


def test_a_secret_that_cannot_be_read_or_written_is_named(tmp_path):
    """A folder instead of the file stands for missing permissions, because an administrator may read every file."""
    (tmp_path / "secret.key").mkdir()
    with pytest.raises(InvalidInput, match=r"secret: got '.*secret.key'; allowed: a file that can be read"):
        read_secret(tmp_path / "secret.key")
    with pytest.raises(InvalidInput, match=r"secret: got .*; allowed: a file that can be written"):
        read_secret(tmp_path / "nowhere" / "secret.key" / "too")
