"""A run's folder has one writer at a time; the lock ends with its process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import runs
from helpers import PATIENCE
from megabatch_train.trainer.run import LOCK_FILE, LockedError, lock_folder

HOLDS = """
import sys, time
from pathlib import Path
from megabatch_train.trainer.run import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=PATIENCE)


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path, holder):
    with (
        pytest.raises(LockedError, match=rf"run is in use by process {holder.pid} on .*, since 20"),
        lock_folder(tmp_path / "run"),
    ):
        pytest.fail("two writers")
    assert (tmp_path / "run" / LOCK_FILE).exists()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(PATIENCE)
    with lock_folder(tmp_path / "run"):
        assert f'"process": {os.getpid()}' in (tmp_path / "run" / LOCK_FILE).read_text()


@pytest.mark.thorough
def test_a_trainer_is_a_writer(tmp_path, holder):
    made = runs.trainer(tmp_path / "run", {"steps": 1})
    with pytest.raises(LockedError, match=f"run is in use by process {holder.pid}"):
        made.fit()


def test_the_holder_may_ask_again_and_still_holds_it(tmp_path):
    def another():
        with pytest.raises(LockedError, match="another thread"), lock_folder(tmp_path):
            pytest.fail("two writers")
        return True

    with lock_folder(tmp_path):
        runs.trainer(tmp_path, {"steps": 1}).fit()
        assert (tmp_path / LOCK_FILE).exists()
        told = subprocess.run([sys.executable, "-c", HOLDS, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE)
        assert "LockedError" in told.stderr
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(another).result()
    assert not (tmp_path / LOCK_FILE).exists()


def test_nothing_is_left_of_a_lock(tmp_path):
    with lock_folder(tmp_path / "deep" / "run"):
        pass
    assert not (tmp_path / "deep").exists()
    with lock_folder(tmp_path):
        (tmp_path / "config.toml").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_folder(tmp_path / "run"):
        assert f'"process": {os.getpid()}' in (tmp_path / "run" / LOCK_FILE).read_text()
    assert f"cannot be locked ({os.strerror(errno.ENOLCK)}). Make sure that no other run writes to it" in caplog.text
    assert not (tmp_path / "run").exists()
