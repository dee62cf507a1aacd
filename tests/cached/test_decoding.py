"""Samples that one thread decodes ahead: the same rows, decoded once if they fit, in the room they are given."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from helpers import PATIENCE
from megabatch.cached.decoding import GROUP, DecodedSource, Decoder
from megabatch.cached.replay import ReplayMismatchError

CPU = torch.device("cpu")
SAMPLES = 2 * GROUP + 100
SPANS = [(0, 300), (300, 600), (600, 1100), (1100, SAMPLES)]
PLENTY = 10**9


@pytest.fixture
def workers():
    with ThreadPoolExecutor(2) as executor:
        yield executor


def opened(room):
    return Decoder(CPU, room)


class Case:
    """A source of numbers, whose rows are 8 bytes, and the groups that have been decoded."""

    def __init__(self, decoder, workers, *, unreadable=None, undecodable=None, samples=SAMPLES, hold=PLENTY):
        self.decoded, self.reads, self._unreadable, self._undecodable = [], [], unreadable, undecodable
        self.source = DecodedSource(
            range(samples), self.read, decode=self.decode, finish=lambda rows: 2 * rows, row_bytes=8, decoder=decoder,
            workers=workers, hold=hold,
        )  # fmt: skip

    def read(self, reference, generator):
        self.reads.append(reference)
        if reference == self._unreadable:
            raise OSError("truncated")
        return reference

    def decode(self, samples, device):
        self.decoded.append(samples[0] // GROUP)
        if self._undecodable in samples:
            raise ValueError("damaged")
        return torch.tensor(samples, device=device)

    def all_rows(self, spans=SPANS):
        return torch.cat([chunk.clone() for chunk in self.source.chunks(spans, CPU)])


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(("room", "times"), [(PLENTY, 1), (0, 2)])
def test_both_passes_get_the_same_rows(workers, room, times):
    decoder = opened(room)
    case = Case(decoder, workers)
    case.source.start(0)
    for _ in range(2):
        assert torch.equal(case.all_rows(), 2 * torch.arange(SAMPLES))
    assert sorted(case.decoded) == sorted(list(range(3)) * times)
    assert torch.equal(case.all_rows([SPANS[1], SPANS[3]]), 2 * torch.cat([torch.arange(*SPANS[1]), torch.arange(*SPANS[3])]))
    case.source.stop()
    decoder.end()
    assert decoder._used == 0


def test_samples_are_read_once_and_let_go_if_their_rows_stay(workers):
    decoder = opened(PLENTY)
    case = Case(decoder, workers)
    case.source.start(8)
    for _ in range(2):
        case.all_rows()
    assert sorted(case.reads) == list(range(SAMPLES))
    assert (case.source._held, case.source._held_bytes, case.source._coming) == ({}, 0, {})
    case.source.stop()
    decoder.end()


def test_a_source_that_was_never_started_is_decoded_on_demand(workers):
    decoder = opened(PLENTY)
    case = Case(decoder, workers)
    assert torch.equal(case.all_rows(), 2 * torch.arange(SAMPLES))
    case.source.stop()
    decoder.end()


def test_the_next_batch_is_decoded_as_far_as_there_is_room(workers):
    batch = 8 * SAMPLES
    decoder = opened(2 * batch - 1)  # not quite two batches, so that rows do not stay for the second pass
    now, coming = Case(decoder, workers), Case(decoder, workers)
    now.source.start(0)
    coming.source.start(0)
    until(lambda: len(coming.decoded) == 2)
    assert now.decoded == [0, 1, 2]
    now.all_rows()
    until(lambda: len(coming.decoded) == 3)
    assert torch.equal(coming.all_rows(), 2 * torch.arange(SAMPLES))
    for case in (now, coming):
        case.source.stop()
    decoder.end()
    assert decoder._used == 0


@pytest.mark.parametrize("fault", [{"unreadable": 700}, {"undecodable": 700}])
def test_an_error_arrives_with_its_chunk_and_the_next_batch_goes_on(workers, fault):
    decoder = opened(PLENTY)
    bad, good = Case(decoder, workers, **fault), Case(decoder, workers)
    bad.source.start(0)
    good.source.start(0)
    chunks = bad.source.chunks(SPANS, CPU)
    assert torch.equal(next(chunks), 2 * torch.arange(300))
    with pytest.raises((RuntimeError, ValueError), match=r"truncated|damaged"):
        list(chunks)
    bad.source.stop()
    assert torch.equal(good.all_rows(), 2 * torch.arange(SAMPLES))
    good.source.stop()
    decoder.end()
    assert decoder._used == 0


def test_a_group_that_failed_for_lack_of_memory_is_decoded_again(workers):
    decoder, failures = opened(PLENTY), [2, 2, 1]  # groups, the last first
    case = Case(decoder, workers)
    decode = case.source._decode

    def short_of_memory(samples, device):
        if failures and samples[0] // GROUP == failures[-1]:
            failures.pop()
            raise torch.OutOfMemoryError("of the decoder")
        return decode(samples, device)

    case.source._decode = short_of_memory
    for _ in range(len(failures) + 1):  # a step that is repeated
        with suppress(torch.OutOfMemoryError):
            assert torch.equal(case.all_rows(), 2 * torch.arange(SAMPLES))
            break
    else:
        pytest.fail("the error of the decoder was raised each time")
    assert failures == []
    case.source.stop()
    decoder.end()
    assert decoder._used == 0


def test_a_sample_that_differs_is_an_error_however_often_its_group_is_decoded(workers):
    decoder = opened(0)
    case = Case(decoder, workers, hold=0)
    read = case.source._read

    def changing(reference, generator):
        return read(reference, generator) + (reference == 700 and case.reads.count(700) > 1)

    case.source._read = changing
    assert torch.equal(case.all_rows(), 2 * torch.arange(SAMPLES))
    chunks = case.source.chunks(SPANS, CPU)
    next(chunks)
    until(lambda: 1 not in case.source.groups)  # found to differ before its chunk
    with pytest.raises(ReplayMismatchError, match=r"sample 700 \(700\)"):
        list(chunks)
    case.source.stop()
    decoder.end()


def test_an_error_is_not_kept_after_it_was_raised(workers):
    # Its traceback holds the tensors of the step, whose memory the repeated step needs.
    decoder, released = opened(PLENTY), threading.Event()
    case = Case(decoder, workers, undecodable=700)

    def fails():
        held = torch.ones(1)
        weakref.finalize(held, released.set)
        case.all_rows()

    with suppress(ValueError):
        fails()
    until(lambda: gc.collect() >= 0 and released.is_set())
    case.source.stop()
    decoder.end()


def test_stopping_in_the_middle_of_a_group_frees_it(workers):
    decoder, begun, go_on = opened(PLENTY), threading.Event(), threading.Event()
    case = Case(decoder, workers)
    decode = case.source._decode

    def slow(samples, device):
        begun.set()
        assert go_on.wait(PATIENCE)
        return decode(samples, device)

    case.source._decode = slow
    case.source.start(0)
    assert begun.wait(PATIENCE)
    case.source.stop()
    go_on.set()
    decoder.end()
    assert (decoder._used, case.source.groups) == (0, {})
    assert case.decoded == [0]


def test_the_tower_must_be_on_the_decoders_device(workers):
    decoder = opened(PLENTY)
    case = Case(decoder, workers)
    with pytest.raises(ValueError, match="device must be the decoder's, cpu, got None"):
        next(case.source.chunks(SPANS, None))
    decoder.end()


def test_a_decoder_without_a_stream_raises_instead_of_waiting(monkeypatch):
    def no_stream(*args, **kwargs):
        raise RuntimeError("no stream")

    monkeypatch.setattr(torch.cuda, "Stream", no_stream)
    with pytest.raises(RuntimeError, match="no stream"):
        Decoder(torch.device("cuda", 0), PLENTY)
