"""Images on a CUDA device: decoded as on a CPU, cropped as PyTorch resizes, chunks made ahead by a thread, damage named."""

import threading
from contextlib import closing

import pytest
import torch

import megabatch as mb
from megabatch.data import crops
from megabatch.data.crops import RandomCrop, TrainingImages
from photos import Files, picture, resized, stored

pytestmark = pytest.mark.gpu
pytest.importorskip("PIL.Image", reason="images are made with Pillow")

TRAINING = TrainingImages(RandomCrop((224, 224), flip=True), (0.5,) * 3, (0.25,) * 3, "pixels")


def jpeg(seed, height=256, width=300):
    return stored(picture(seed, height, width), quality=90)


class Preparation:
    training_images = TRAINING


def test_crops_are_antialiased_resizing():
    generator = torch.Generator().manual_seed(0)
    sizes = [*torch.randint(20, 500, (50, 2), generator=generator).tolist(), [1, 1], [1, 900], [1200, 2]]
    many = [torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]
    boxes = [TRAINING.crop.box(TRAINING.crop.draw(generator), *image.shape[1:]) for image in many]
    with torch.autocast("cuda", dtype=torch.bfloat16):  # as in training
        found = TRAINING.crop.many([image.cuda() for image in many], boxes)
    assert torch.equal(found, TRAINING.crop.many([image.cuda() for image in many], boxes))
    assert torch.equal(found[7:9], TRAINING.crop.many([image.cuda() for image in many[7:9]], boxes[7:9]))
    for image, box, one in zip(many, boxes, found.cpu(), strict=True):
        # The nearest whole number; within 0.001 of a half, either.
        assert (one.double() - resized(image, box, TRAINING.crop.size)).abs().max() < 0.501


def test_images_are_decoded_on_the_device():
    if not crops.decodes_on(torch.device("cuda")):
        pytest.skip("torchvision was built without nvJPEG")
    data = Files([jpeg(i, 200 + i, 300 - i) for i in range(40)])
    for decodes in (True, False):
        source = data.source(range(40), 0, Preparation(), decodes=decodes, workers=2, hold=10**9)
        first, again = (
            torch.cat([chunk["pixels"].clone() for chunk in source.chunks([(0, 17), (17, 34), (34, 40)], torch.device("cuda"))])
            for _ in range(2)
        )
        assert torch.equal(first, again)
        if decodes:
            by_gpu = first
    # Decoders round differently, and the CPU's crop rounds between its two directions.
    assert (by_gpu - first).abs().mean() < 2 / 255 / 0.25
    assert not data.failures


def test_a_damaged_image_is_named_and_skipped_alone():
    files = [jpeg(i) for i in range(12)]
    files[4] = files[4][:2000] + b"\xff\xd9"
    files[9] = b"\xff\xd8\xff" + bytes(500) + b"\xff\xd9"
    wanted = Files([jpeg(i) for i in range(12)])
    data = Files(files)
    decodes = crops.decodes_on(torch.device("cuda"))
    found, others = (
        torch.cat(
            [
                c["pixels"].clone()
                for c in one.source(range(12), 0, Preparation(), decodes=decodes, workers=2).chunks(
                    [(0, 12)], torch.device("cuda")
                )
            ]
        )
        for one in (data, wanted)
    )
    assert 9 in data.failures
    assert set(data.failures) <= {4, 9}
    for i in set(range(12)) - {4, 9}:
        assert (found[i] - others[i]).abs().mean() < 2 / 255 / 0.25


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
