"""Sources: what they give, that replay repeats itself to the bit, that it says so when it does not, and that workers end."""

import multiprocessing
import random
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

import megabatch as mb
from helpers import PATIENCE
from megabatch.cached import ReplayMismatchError
from megabatch.cached.replay import PIECE, checksum, sample_seed, stack
from steps import Loss, cached, data, plain, tower

IMAGES = data(6, 0, 50)


def augmented(index, generator):
    """Crop, flip and noise, drawn from the sample's own generator."""
    image = IMAGES[index]
    if torch.rand((), generator=generator) < 0.5:
        image = image.flip(0)
    return image + 0.1 * torch.randn(6, generator=generator, dtype=torch.float64)


def augmented_by_globals(index, generator):
    image = IMAGES[index] * random.random() + float(np.random.rand())
    return image + torch.rand(6, dtype=torch.float64)


def in_memory(read, references, seed):
    """All samples at once, by definition."""
    samples = []
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for i, reference in enumerate(references):
        own = sample_seed(seed, i)
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own % 2**32)
        samples.append(read(reference, torch.Generator().manual_seed(own)))
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return torch.stack(samples)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("budget", [None, 700])
def test_replay_equals_the_batch_in_memory_bit_for_bit(workers, budget):
    references = [int(i) for i in torch.randperm(50, generator=torch.Generator().manual_seed(1))[:41]]
    image, text, loss = tower(6, 0, dropout=0.5), tower(5, 1), Loss()
    texts, modules = (text, data(5, 1, 41)), (image, text, loss)
    torch.manual_seed(5)
    wanted = cached(loss, [(image, in_memory(augmented, references, 9)), texts], modules, chunk_size=20, budget=budget)
    torch.manual_seed(5)
    source = mb.ReplaySource(references, augmented, seed=9, workers=workers)
    found = cached(loss, [(image, source), texts], modules, chunk_size=20, budget=budget)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    torch.manual_seed(5)
    other = cached(loss, [(image, mb.ReplaySource(references, augmented, seed=10)), texts], modules, chunk_size=20)
    assert not torch.equal(other[0], wanted[0])


def test_global_randomness_is_replayed_without_workers_and_leaves_no_trace():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    texts, modules = (text, data(5, 1, 7)), (image, text, loss)
    wanted = cached(loss, [(image, in_memory(augmented_by_globals, range(7), 3)), texts], modules, chunk_size=3)
    before = torch.get_rng_state(), random.getstate()
    source = mb.ReplaySource(range(7), augmented_by_globals, seed=3)
    found = cached(loss, [(image, source), texts], modules, chunk_size=3)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.thorough
def test_processes_replay_global_randomness_too():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        source = mb.ReplaySource(range(5), plain_numbers, seed=3, workers=executor)
        first = [chunk.clone() for chunk in source.chunks([(0, 3), (3, 5)], None)]
        again = [chunk.clone() for chunk in source.chunks([(0, 3), (3, 5)], None)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(set(torch.cat(first).tolist())) == 5


def plain_numbers(index, generator):
    return index + random.random()


def test_a_source_that_does_not_repeat_itself_is_caught_and_the_samples_are_named():
    reads = []

    def forgetful(path, generator):
        reads.append(path)
        value = data(6, 0)[int(path[3:])]
        return value + 1e-12 * len(reads) if path in ("img4", "img7") else value

    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    source = mb.ReplaySource([f"img{i}" for i in range(11)], forgetful)
    names = r"read must return equal .* 2 of samples 0 to 10 .*: sample 4 \('img4'\), sample 7 \('img7'\)\. Draw"
    with pytest.raises(ReplayMismatchError, match=names):
        mb.cached_backward(loss, [(image, source), (text, data(5, 1))], chunk_size=(4, 11))


def test_many_mismatches_are_counted_and_a_few_named():
    source = mb.ReplaySource(range(20), lambda i, generator: torch.tensor(time.perf_counter_ns()))
    list(source.chunks([(0, 20)], None))
    with pytest.raises(ReplayMismatchError, match=r"20 of samples 0 to 19 .*sample 4 \(4\) and 15 more"):
        list(source.chunks([(0, 20)], None))


def test_a_collate_that_does_not_repeat_itself_is_noticed():
    counter = iter(range(100))

    def collate(samples):
        return torch.stack(samples) + next(counter)

    source = mb.ReplaySource(range(11), augmented, collate=collate)
    with pytest.warns(RuntimeWarning, match=r"towers\[0\] must give the same embeddings in both passes"):
        mb.cached_backward(Loss(), [(tower(6, 0), source), (tower(5, 1), data(5, 1))], chunk_size=4)


def test_held_samples_are_read_once_and_the_others_twice():
    reads = []

    def read(i, generator):
        reads.append(i)
        return augmented(i, generator)

    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    rows, texts = 3 * PIECE - 5, (text, data(5, 1, 3 * PIECE - 5))
    references = [i % 50 for i in range(rows)]
    modules = (image, text, loss)
    wanted = cached(loss, [(image, in_memory(augmented, references, 4)), texts], modules, chunk_size=20)
    sample = 6 * 8  # bytes
    for hold, twice in ((0, rows), (PIECE * sample, rows - PIECE), (2 * PIECE * sample + 1, PIECE - 5), (10**9, 0)):
        for workers in (0, 2):
            reads.clear()
            source = mb.ReplaySource(references, read, seed=4, workers=workers, hold=hold)
            found = cached(loss, [(image, source), texts], modules, chunk_size=20)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            assert len(reads) == rows + twice


def test_the_next_batch_is_read_ahead_as_far_as_it_may_be_held():
    reads = []

    def read(i, generator):
        reads.append(i)
        return augmented(i, generator)

    with ThreadPoolExecutor(1) as executor:
        mb.ReplaySource(range(50), read, workers=executor).start()  # it may hold nothing
        executor.submit(int).result(PATIENCE)
        assert not reads
        source = mb.ReplaySource(range(50), read, workers=executor, hold=10**6)
        source.start()
        executor.submit(int).result(PATIENCE)
        assert reads == list(range(50))
        assert len(torch.cat(list(source.chunks([(0, 20), (20, 50)], None)))) == 50
        assert reads == list(range(50))


def test_a_piece_that_is_being_taken_is_not_requested_again():
    requests = []

    class Sample:
        def __repr__(self):
            return "sample"

        @property
        def nbytes(self):  # called while a piece is taken
            requests.append(source._request(executor, [0]))
            return 8

    with ThreadPoolExecutor(1) as executor:
        source = mb.ReplaySource(range(PIECE), lambda *_: Sample(), workers=executor, collate=len, hold=8 * PIECE)
        assert list(source.chunks([(0, PIECE)], None)) == [PIECE]
    assert requests == [0] * PIECE


def test_an_executor_that_shuts_down_ends_the_reading_ahead():
    """Each piece that is done requests the next one; the executor cancels pieces under a lock that a request would need."""
    for stops in (True, False):
        executor = ThreadPoolExecutor(2)
        source = mb.ReplaySource(range(100 * PIECE), slow_number, workers=executor, hold=10**9)
        source.start()
        if stops:
            source.stop()
        closing = threading.Thread(target=executor.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()


def slow_number(i, generator):
    time.sleep(1e-4)
    return torch.tensor(i)


def test_reading_ahead_ends_at_the_memory_that_it_may_use():
    with ThreadPoolExecutor(2) as executor:
        source = mb.ReplaySource(range(50 * PIECE), lambda i, generator: torch.zeros(1000), workers=executor, hold=10**6)
        source.start()
        executor.shutdown()
        assert len(source._coming) * PIECE * 4000 <= 10**6 + 6 * PIECE * 4000  # and what was being read


def test_spans_in_any_order_and_twice():
    for workers in (0, 2):
        source = mb.ReplaySource(range(50), augmented, workers=workers)
        parts = list(source.chunks([(40, 50), (0, 16), (0, 50), (10, 20), (10, 20)], None))
        assert torch.equal(parts[0], parts[2][40:])
        assert torch.equal(parts[1], parts[2][:16])
        assert torch.equal(parts[3], parts[2][10:20])
        assert torch.equal(parts[4], parts[3])


def test_finish_gets_samples_and_device():
    source = mb.ReplaySource(range(5), augmented, finish=lambda samples, device: (torch.stack(samples), device))
    (first, device), (second, _) = source.chunks([(0, 3), (3, 5)], torch.device("cpu"))
    assert (first.shape, second.shape, device.type) == ((3, 6), (2, 6), "cpu")


def test_collate_pads():
    def words(n, generator):
        return torch.arange(n)

    def pad(samples):
        return {"tokens": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), "flag": True}

    source = mb.ReplaySource([1, 3, 2], words, collate=pad)
    (first, second) = source.chunks([(0, 2), (2, 3)], None)
    assert first["tokens"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert second["tokens"].tolist() == [[0, 1]]
    assert second["flag"] is True


def test_structured_samples_are_stacked():
    samples = [{"a": torch.ones(2), "b": (1, np.float32(2.5))}, {"a": torch.zeros(2), "b": (3, np.float32(4.5))}]
    made = stack(samples)
    assert made["a"].tolist() == [[1, 1], [0, 0]]
    assert [t.tolist() for t in made["b"]] == [[1, 3], [2.5, 4.5]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.arange(4.0), torch.arange(4.0).flip(0)),
        (torch.arange(4.0), torch.arange(4.0).view(2, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
        ((torch.ones(1), 1), (torch.ones(1), 2)),
        (np.arange(3), np.arange(3)[::-1].copy()),
    ],
)
def test_checksums_see_order_shape_type_and_names(first, second):
    assert checksum(first) == checksum(first)
    assert checksum(first) != checksum(second)


def test_checksum_of_views_and_nothing():
    whole = torch.arange(12).view(3, 4)
    assert checksum(whole.T) == checksum(whole.T.contiguous())
    assert checksum(torch.empty(0, 3)) != checksum(torch.empty(3, 0))


def test_seeds_differ():
    seeds = {sample_seed(seed, i) for seed in range(20) for i in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_workers_read_ahead_in_order_and_wait_when_they_are_ahead():
    started, lock = [], threading.Lock()

    def slow(i, generator):
        with lock:
            started.append(i)
        if i % PIECE == 0:
            time.sleep(0.01 * (3 - i // PIECE % 3))  # later pieces are done first
        return torch.tensor(i)

    spans = [(start, start + 2 * PIECE) for start in range(0, 20 * PIECE, 2 * PIECE)]
    source = mb.ReplaySource(range(20 * PIECE), slow, workers=3, ahead=2)
    chunks = source.chunks(spans, None)
    for position, chunk in enumerate(chunks):
        assert chunk.tolist() == list(range(*spans[position]))
        if position == 2:
            end = time.monotonic() + PATIENCE
            while max(started) < spans[position + 1][0] and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2)  # in which none goes too far
            with lock:
                assert max(started) < spans[position + 2][1]  # this one, and two ahead
                assert max(started) >= spans[position + 1][0]
    assert sorted(started) == list(range(20 * PIECE))


def replay_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("megabatch-replay")]


def test_errors_of_workers_name_the_sample_and_threads_end():
    def broken(path, generator):
        if path == "img20":
            raise OSError("truncated file")
        return torch.zeros(6, dtype=torch.float64)

    source = mb.ReplaySource([f"img{i}" for i in range(40)], broken, workers=2)
    pairs = [(tower(6, 0), source), (tower(5, 1), data(5, 1, 40))]
    with pytest.raises(RuntimeError, match=r"read failed for sample 20 \('img20'\): OSError: truncated file") as error:
        mb.cached_backward(Loss(), pairs, chunk_size=8)
    assert isinstance(error.value.__cause__, OSError)
    assert not replay_threads()


def test_threads_end_when_the_step_fails():
    def fails(x):
        raise KeyError("the tower's own error")

    source = mb.ReplaySource(range(40), augmented, workers=2)
    with pytest.raises(KeyError, match="the tower's own error"):
        mb.cached_backward(Loss(), [(fails, source), (tower(5, 1), data(5, 1, 40))], chunk_size=8)
    assert not replay_threads()


def test_an_executor_stays_open_for_the_next_batch():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    with ThreadPoolExecutor(2) as executor:
        for seed in range(2):
            source = mb.ReplaySource(range(11), augmented, seed=seed, workers=executor)
            batch = [(image, in_memory(augmented, range(11), seed)), (text, data(5, 1))]
            found = cached(loss, [(image, source), batch[1]], (image, text, loss), chunk_size=4)
            wanted = plain(loss, batch, (image, text, loss))
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Numbers(mb.Source):
    """A source of one's own: rows computed from their index."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 11

    def chunks(self, spans, device):
        for start, stop in spans:
            self.asked.append((start, stop))
            yield data(6, 0)[start:stop]


def test_a_source_of_ones_own_is_asked_again_only_for_what_was_not_kept():
    image, text, loss = tower(6, 0), tower(5, 1), Loss()
    modules, source = (image, text, loss), Numbers()
    wanted = plain(loss, [(image, data(6, 0)), (text, data(5, 1))], modules)
    found = cached(loss, [(image, source), (text, data(5, 1))], modules, chunk_size=4)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert source.asked == 2 * [(0, 4), (4, 8), (8, 11)]
    source.asked.clear()
    cached(loss, [(image, source), (text, data(5, 1))], modules, chunk_size=4, budget="all")
    assert source.asked == [(0, 4), (4, 8), (8, 11)]


def test_a_source_that_ends_early_is_named():
    class Short(Numbers):
        def chunks(self, spans, device):
            yield data(6, 0)[: spans[0][1]]

    with pytest.raises(ValueError, match=r"towers\[0\]\[1\] must yield a chunk for each requested span.* samples 4 to 7"):
        mb.cached_backward(Loss(), [(tower(6, 0), Short()), (tower(5, 1), data(5, 1))], chunk_size=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"read": "path"}, TypeError, "read must be a function of a reference and a generator, got str"),
        ({"workers": -1}, ValueError, "workers must be a number of threads.*got -1"),
        ({"workers": "four"}, ValueError, "workers must be .* got 'four'"),
        ({"ahead": 0}, ValueError, "ahead must be a number of chunks of at least 1, got 0"),
        ({"hold": -1}, ValueError, "hold must be a number of bytes of at least 0, got -1"),
        ({"collate": list, "finish": list}, ValueError, "collate must not be set if finish is given"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        mb.ReplaySource(range(3), **{"read": augmented, **options})


def ragged(index, generator):
    return torch.randn(1 + index * 7 % 40, 6, generator=generator, dtype=torch.float64)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Added(torch.nn.Module):
    """Adds the tokens of a sample, and records the shapes of the chunks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.shapes = torch.nn.Linear(6, 4, bias=False).double(), []

    def forward(self, tokens):
        self.shapes.append(tuple(tokens.shape[:2]))
        return self.linear(tokens).sum(1)


@pytest.mark.parametrize("workers", [0, 2, "executor"])
def test_replay_with_lengths_puts_samples_of_similar_length_together(workers):
    """The samples keep their seeds, and the embeddings return in the order of the batch."""

    def loss(first, second):
        return torch.nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))

    references, made = list(range(90)), Added()
    with ThreadPoolExecutor(2) as executor:
        options = {"seed": 4, "workers": executor if workers == "executor" else workers, "collate": padded, "hold": 10**5}
        sources = [
            mb.ReplaySource(references, ragged, length=lambda index: 1 + index * 7 % 40, **{**options, "seed": seed})
            for seed in (4, 5)
        ]
        for source in sources:
            source.start()
        value = mb.cached_backward(loss, [(made, source) for source in sources], chunk_size=8)
    assert sources[0].lengths.tolist() == [1 + index * 7 % 40 for index in references]
    assert sources[0].width == 40
    assert all(rows * width <= 8 * 40 for rows, width in made.shapes if rows > 8)
    assert max(rows for rows, _ in made.shapes) > 16
    plain_tower = Added()
    sides = (
        plain_tower(padded([ragged(i, torch.Generator().manual_seed(sample_seed(seed, i))) for i in references]))
        for seed in (4, 5)
    )
    wanted = loss(*sides)
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.linear.weight.grad, plain_tower.linear.weight.grad, rtol=1e-10, atol=1e-12)


def test_a_length_that_fails_is_an_error_of_the_step():
    def fail(index):
        raise ValueError("no length")

    with ThreadPoolExecutor(1) as executor:
        source = mb.ReplaySource(range(4), ragged, workers=executor, collate=padded, length=fail, hold=100)
        source.start()
        with pytest.raises(ValueError, match="no length"):
            mb.cached_backward(lambda first, second: (first * second).sum(), [(Added(), source)] * 2, chunk_size=2)
