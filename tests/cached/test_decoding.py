"""Samples that one thread decodes ahead: the same rows, decoded once if they fit, in the room they are given."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import PATIENCE
from megabatch.cached.decoding import GROUP, DecodedSource, Decoder

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

    def __init__(self, decoder, workers, *, unreadable=None, undecodable=None, samples=SAMPLES):
        self.decoded, self.reads, self._unreadable, self._undecodable = [], [], unreadable, undecodable
        self.source = DecodedSource(
            range(samples), self.read, decode=self.decode, finish=lambda rows: 2 * rows, row_bytes=8, decoder=decoder,
            workers=workers, hold=PLENTY,
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
