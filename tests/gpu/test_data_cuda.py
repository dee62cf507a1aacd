"""Images on a CUDA device: as on a CPU, chunks made ahead by a thread, damage named."""

import threading
from contextlib import closing

import pytest
import torch

import megabatch as mb
from megabatch_train.data.media.images import RandomCrop, TrainingImages
from photos import Files, picture, stored

pytestmark = pytest.mark.gpu
pytest.importorskip("PIL.Image", reason="images are made with Pillow")

TRAINING = TrainingImages(RandomCrop((224, 224), flip=True), (0.5,) * 3, (0.25,) * 3, "pixels")


def jpeg(seed, height=256, width=300):
    return stored(picture(seed, height, width), quality=90)


class Preparation:
    training_images = TRAINING


def pixels(data, device, **options):
    source = data.source(range(len(data)), 0, Preparation(), **options)
    spans = [(start, min(start + 17, len(data))) for start in range(0, len(data), 17)]
    return [torch.cat([chunk["pixels"].clone() for chunk in source.chunks(spans, torch.device(device))]) for _ in range(2)]


def test_the_images_of_a_cpu():
    data = Files([jpeg(i, 200 + i, 300 - i) for i in range(40)])
    with torch.autocast("cuda", dtype=torch.bfloat16):  # as in training
        first, again = pixels(data, "cuda", workers=2, hold=10**9)
    assert torch.equal(first, again)
    wanted, _ = pixels(data, "cpu")
    torch.testing.assert_close(first.cpu(), wanted, rtol=0, atol=1e-6)
    assert not data.failures


def test_a_damaged_image_is_named_and_skipped_alone():
    files = [jpeg(i) for i in range(12)]
    files[4] = files[4][:300] + b"\xff\xd9"
    files[9] = b"\xff\xd8\xff" + bytes(500) + b"\xff\xd9"
    data = Files(files)
    found, _ = pixels(data, "cuda", workers=2)
    wanted, _ = pixels(Files([jpeg(i) for i in range(12)]), "cuda", workers=2)
    assert set(data.failures) == {4, 9}
    for i in set(range(12)) - {4, 9}:
        assert torch.equal(found[i], wanted[i])


def test_a_thread_makes_chunks_ahead_and_slow_kernels_see_their_own():
    def finish(samples, device):
        return torch.stack(samples).to(device, non_blocking=True)[:, None].expand(-1, 1 << 20).contiguous()

    source = mb.ReplaySource(range(200), lambda i, generator: torch.tensor(float(i)), workers=2, finish=finish)
    spans = [(start, start + 10) for start in range(0, 200, 10)]
    sums = []
    for chunk in source.chunks(spans, torch.device("cuda")):
        torch.cuda._sleep(5_000_000)  # kernels are queued long before they run
        sums.append(chunk.sum(1, dtype=torch.float64) / (1 << 20))
    torch.cuda.synchronize()
    assert torch.equal(torch.cat(sums).cpu(), torch.arange(200.0, dtype=torch.float64))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]


def test_memory_of_chunks_made_ahead_is_bounded():
    def finish(samples, device):
        return torch.zeros(len(samples), 1 << 20, device=device)

    source = mb.ReplaySource(range(400), lambda i, generator: torch.tensor(float(i)), workers=2, finish=finish)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for chunk in source.chunks([(start, start + 10) for start in range(0, 400, 10)], torch.device("cuda")):
        torch.cuda._sleep(5_000_000)
        chunk.add_(1)
        del chunk
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 10 * 4 << 20


@pytest.mark.parametrize("where", ["read", "finish", "tower"])
def test_errors_arrive_and_the_thread_ends(where):
    def read(i, generator):
        if where == "read" and i == 25:
            raise OSError("truncated")
        return torch.tensor(float(i))

    def finish(samples, device):
        if where == "finish" and samples[0] == 20:
            raise OSError("truncated")
        return torch.stack(samples).to(device)

    source = mb.ReplaySource(range(100), read, workers=2, finish=finish)

    def use():
        with closing(source.chunks([(s, s + 10) for s in range(0, 100, 10)], torch.device("cuda"))) as chunks:
            for position, _ in enumerate(chunks):
                if where == "tower" and position == 2:
                    raise KeyError("truncated")

    with pytest.raises((OSError, RuntimeError, KeyError), match="truncated"):
        use()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megabatch")]


def test_groups_of_hard_negatives_are_the_same_on_both_devices():
    from megabatch_train.evaluation.embedding import Choice
    from megabatch_train.evaluation.grouping import find_neighbors, group_pairs

    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(40, 32, generator=generator)
    pairs = centers[torch.randint(40, (3000,), generator=generator)] + 0.3 * torch.randn(3000, 32, generator=generator)
    neighbors = find_neighbors(pairs.half(), pairs.half(), Choice(16), device=torch.device("cuda"))
    for ids in (None, torch.arange(3000) // 3):
        for group_size in (32, 20):
            own = group_pairs(neighbors, group_size, ids=ids, device=torch.device("cuda"))
            assert torch.equal(own, group_pairs(neighbors, group_size, ids=ids))
