"""A folder in use is refused with exit code 6, but a process that only checks the lock never causes a refusal."""

import threading

import pytest

from hyperpush.base.errors import InUse
from hyperpush.base.locks import alone, is_held


def test_a_folder_in_use_is_refused_and_one_that_was_looked_at_is_not(tmp_path):
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with alone(lock, "save", tmp_path):
        assert is_held(lock)
        with (
            pytest.raises(InUse, match=r"save: another process works in .*; end it first") as refused,
            alone(lock, "save", tmp_path),
        ):
            pass
        assert refused.value.exit_code == 6
    held, begins = threading.Event(), threading.Event()

    def look():
        with alone(lock, "look", tmp_path):
            held.set()
            begins.wait(10)

    looking = threading.Thread(target=look)
    looking.start()
    held.wait(10)
    threading.Timer(0.02, begins.set).start()
    with alone(lock, "save", tmp_path):  # waits until the check is over
        assert is_held(lock)
    looking.join()
    assert not is_held(lock)
