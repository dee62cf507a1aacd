"""Reader processes: they answer, fail and end as the work of an executor does."""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Executor

import pytest
import torch

from megabatch_train.data import loader
from megabatch_train.data.loader import ReaderProcesses, open_readers, start_processes


class Counted:
    """An object that knows how often it was pickled."""

    pickled = 0

    def __init__(self):
        self.values = list(range(1000))

    def __getstate__(self):
        Counted.pickled += 1
        return {"values": self.values}


def last(counted):
    return counted.values[-1]


class AwkwardError(Exception):
    """Cannot be built again from its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def raises(what):
    raise AwkwardError(what, 2) if what == "awkward" else ValueError(what)


@pytest.fixture
def timeout(request):
    """Seconds after which the program's sockets give up; None: they wait."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(request.param)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.quick({"timeout": 0.1})
@pytest.mark.parametrize("timeout", [None, 0.1], indirect=True)
def test_work_runs_in_other_processes(timeout):
    """Whatever the timeout: neither a task that takes longer ends a reader, nor a wait for one."""
    Counted.pickled = 0
    shared = Counted()
    with ReaderProcesses(1, [shared]) as executor:
        futures = [executor.submit(last, shared) for _ in range(20)]
        assert [future.result() for future in futures] == [999] * 20
        assert Counted.pickled == 1  # sent once
        assert executor.submit(time.sleep, 0.2).result() is None
        time.sleep(0.2)  # the reader waits for a task
        assert executor.submit(os.getpid).result() != os.getpid()
        main = "__import__('sys').modules['__main__'].__dict__.get('__file__')"
        assert executor.submit(eval, main).result() is None  # the user's program is not imported
        with pytest.raises(ValueError, match="damaged"):
            executor.submit(raises, "damaged").result()
        with pytest.raises(RuntimeError, match="AwkwardError: awkward 2"):
            executor.submit(raises, "awkward").result()
        os.kill(executor.submit(os.getpid).result(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a data-loader worker ended unexpectedly"):
            executor.submit(os.getpid).result()


def test_processes_that_were_started_early_become_workers():
    with start_processes(2) as started:
        with open_readers(1, [], processes=True, started=started) as executor:
            assert executor.submit(os.getpid).result() == started[0]._process.pid
            assert executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result() >= min(19, loader.NICENESS)
        assert started[0]._process.returncode == 0
        assert started[1]._process.poll() is None
    assert started[1]._process.poll() is not None  # nobody used it


def test_processes_import_packages_before_they_get_work():
    packages = ["colorsys", "no.such.package"]
    with start_processes(1, packages) as started, open_readers(1, [], processes=True, started=started) as executor:
        assert executor.submit(eval, "'colorsys' in __import__('sys').modules").result()
    with open_readers(1, [], processes=True) as executor:
        assert not executor.submit(eval, "'colorsys' in __import__('sys').modules").result()


def test_workers_are_started_beyond_those_that_run():
    with start_processes(1) as started, open_readers(2, [], processes=True, started=started) as executor:
        assert len(executor._processes) == 2
        assert executor._processes[0] is started[0]


@pytest.mark.thorough
def test_a_class_that_processes_cannot_load_is_used_by_threads(caplog, monkeypatch):
    monkeypatch.setattr(Counted, "__module__", "__main__")  # as in the user's script
    monkeypatch.setattr(sys.modules["__main__"], "Counted", Counted, raising=False)
    shared = Counted()
    with ReaderProcesses(1, [shared]) as executor:
        assert executor.submit(last, shared).result() == 999
        assert executor.submit(os.getpid).result() == os.getpid()
    assert caplog.text.count("samples are read by threads instead of processes") == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).view(2, 3).T,
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True]),
        torch.zeros(2, dtype=torch.bfloat16),
    ],
)
def test_tensors_travel(value):
    found, again, other = travelled([value, value, (value.clone(), "text")])
    assert found is again
    assert torch.equal(other[0], value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found, value)


def travelled(value):
    """The value after its way through a socket."""
    from megabatch_train.data.loader import _dump, _load, _receive, _send

    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=_send, args=(here, _dump(value, {})))
        sender.start()
        message = _receive(there, loader._Memory(pinned=False))
        sender.join()
    return _load(message, [])


def test_tensors_of_many_kinds_keep_their_places():
    many = [torch.full((1 + i % 3, 2), i, dtype=(torch.int64, torch.bfloat16)[i % 2]) for i in range(40)]
    for found, wanted in zip(travelled({"many": many})["many"], many, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_waiting_work_is_dropped_at_the_end():
    with open_readers(1, [], processes=False) as executor:
        futures = [executor.submit(time.sleep, 0.05) for _ in range(200)]
    assert futures[-1].cancelled()


def test_threads_or_none():
    with open_readers(0, [], processes=True) as executor:
        assert executor == 0
    with open_readers(2, [], processes=False) as executor:
        assert isinstance(executor, Executor)
        assert executor.submit(os.getpid).result() == os.getpid()


def test_what_cannot_be_sent_is_read_by_threads(caplog):
    with open_readers(2, [threading.Lock()], processes=True) as executor:
        assert executor.submit(os.getpid).result() == os.getpid()
    assert "samples are read by threads instead of processes" in caplog.text


def test_tensors_share_slabs_and_never_memory(monkeypatch):
    """On a machine without a GPU ordinary memory takes the place of pinned memory."""
    empty = torch.empty
    monkeypatch.setattr(loader.torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    monkeypatch.setattr(loader, "SLAB", 1000)
    memory = loader._Memory(pinned=True)
    sizes = [10, 100, 600, 200, 200, 5000, 0, 1, 300]
    types = [torch.uint8, torch.int64, torch.bfloat16]
    taken = [memory.take(types[i % 3], (size // 10, 2)).fill_(i) for i, size in enumerate(sizes)]
    assert [part.shape for part in taken] == [(size // 10, 2) for size in sizes]
    assert all((part == i).all() for i, part in enumerate(taken))
    assert len({part.untyped_storage().data_ptr() for part in taken[:3]}) == 1
    assert all(part.data_ptr() % part.element_size() == 0 for part in taken)
