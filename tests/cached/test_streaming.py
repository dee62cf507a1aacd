"""Chunks that a thread makes ahead: in order, boundedly far, with the thread's errors, and ended with their user.

Without a CUDA device its streams and events are stand-ins, and only what the thread does is tested; tests/gpu has the rest.
"""

import threading
import time
from contextlib import closing, contextmanager

import pytest
import torch

from helpers import PATIENCE
from megabatch.cached import streaming


class Event:
    """An event that is done when the user's kernels are: when `finished` has its number."""

    finished = threading.Semaphore(0)

    def __init__(self, blocking=False):
        pass

    def record(self, stream):
        self.recorded = stream

    def synchronize(self):
        if getattr(self, "recorded", None) == "main":
            assert Event.finished.acquire(timeout=PATIENCE)


class Stream:
    def __init__(self, device):
        pass


class Main:
    def wait_event(self, event):
        assert isinstance(event.recorded, Stream)

    def __eq__(self, other):
        return other == "main"

    __hash__ = None


@contextmanager
def within(_):
    yield


@pytest.fixture
def cuda(monkeypatch):
    Event.finished = threading.Semaphore(0)
    for name, value in {"Event": Event, "Stream": Stream, "current_stream": lambda _: Main(), "stream": within}.items():
        monkeypatch.setattr(streaming.torch.cuda, name, value)
    monkeypatch.setattr(streaming.torch.cuda, "device", within)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return torch.device("cuda", 0)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "megabatch-chunks"]


def test_a_thread_makes_two_chunks_ahead_and_waits_for_the_device(cuda):
    made = []

    def make(chunk, device):
        made.append(chunk)
        return torch.full((2,), chunk)

    with closing(streaming.produce_chunks(iter(range(10)), cuda, make, ahead=True)) as chunks:
        for i, chunk in enumerate(chunks):
            assert chunk.tolist() == [i, i]
            assert threads() or i > 7  # it ends with the last one
            end = time.monotonic() + PATIENCE
            while len(made) < min(10, i + 2) and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.02)  # in which none is made too early
            assert len(made) <= i + 2
            Event.finished.release()
    assert made == list(range(10))
    assert not threads()


def test_the_devices_lag_bounds_what_is_made(cuda):
    made = []

    def use():
        with closing(
            streaming.produce_chunks(iter(range(10)), cuda, lambda i, _: made.append(i) or torch.ones(1), ahead=True)
        ) as it:
            next(it)
            next(it)  # the host is through with the first, its kernels are not
            time.sleep(0.1)
            assert made == [0, 1]
            Event.finished.release()
            next(it)
            assert made[:3] == [0, 1, 2]
            Event.finished.release(5)  # the device catches up

    use()
    assert not threads()


@pytest.mark.parametrize("where", ["source", "make", "user"])
def test_errors_arrive_and_the_thread_ends(cuda, where):
    Event.finished.release(20)

    def source():
        for i in range(10):
            if where == "source" and i == 4:
                raise OSError("broken")
            yield i

    def make(i, device):
        if where == "make" and i == 4:
            raise OSError("broken")
        return torch.tensor([i])

    def use():
        with closing(streaming.produce_chunks(source(), cuda, make, ahead=True)) as chunks:
            for i, _ in enumerate(chunks):
                if where == "user" and i == 4:
                    raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        use()
    assert not threads()


def test_without_a_thread_the_main_thread_makes_them():
    seen = []
    chunks = streaming.produce_chunks(iter(range(3)), None, lambda i, device: seen.append((i, device)) or i, ahead=False)
    assert list(chunks) == [0, 1, 2]
    assert seen == [(0, None), (1, None), (2, None)]


@pytest.mark.parametrize("case", ["neighbours", "gap", "copies", "reversed", "transposed"])
def test_neighbours_are_joined_and_others_stay(case):
    whole = torch.arange(120.0).view(10, 3, 4)
    tensors, parts = {
        "neighbours": (list(whole), 1),
        "gap": ([*whole[:4], *whole[5:]], 2),
        "copies": ([row.clone() for row in whole], 10),
        "reversed": (list(whole)[::-1], 10),
        "transposed": ([row.T for row in whole], 10),
    }[case]
    found = list(streaming.merge_adjacent(tensors))
    assert len(found) == parts
    assert torch.equal(torch.cat(found), torch.stack(tensors))
    assert torch.equal(streaming.join_rows(tensors, torch.device("cpu")), torch.stack(tensors))
