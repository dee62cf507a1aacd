"""Images of a run: the same bits whoever reads them, when, and how often; the next batch is read while this one trains."""

import functools
import io
import tarfile
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import runs
from helpers import PATIENCE
from megabatch.world import World
from megabatch_train.data import loader
from megabatch_train.data.media import images
from megabatch_train.data.media.images import RandomCrop, TrainingImages
from megabatch_train.data.shards import Shards
from megabatch_train.towers.tower import Pair, Tower
from megabatch_train.trainer import loop
from megabatch_train.trainer.build import SAMPLES_SHOWN

pytest.importorskip("PIL.Image", reason="images are made with Pillow")

SIZE = 8


class ImageNet(nn.Module):
    """Channel means of an image's quarters, and one layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 8)

    def forward(self, pixels):
        return F.normalize(self.linear(F.avg_pool2d(pixels, SIZE // 2).flatten(1)), dim=1)


class TextNet(nn.Module):
    """The mean of the embeddings of a text's characters."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(128, 8)

    def forward(self, letters):
        return F.normalize(self.letters(letters).mean(1), dim=1)


def letters(text, generator):
    return torch.tensor([ord(letter) for letter in text.ljust(12)[:12]])


def stack(samples):
    return torch.stack(samples)


def pair():
    torch.manual_seed(0)
    training = TrainingImages(RandomCrop((SIZE, SIZE), area=(0.3, 1.0)), (0.5,) * 3, (0.25,) * 3, "pixels")
    return Pair(
        Tower(ImageNet(), "image", first_sample, stack, training_images=training),
        Tower(TextNet(), "text", letters, stack),
        5.0,
        name="photos",
    )


def first_sample(image, generator):
    """For evaluation, and for what the trainer shows to towers first."""
    return F.interpolate(image[None].float() / 255, (SIZE, SIZE))[0]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for i in range(40):
            noise = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(i))
            pixels = (F.interpolate(noise, (20 + i, 30)) * 255)[0].to(torch.uint8)
            data = io.BytesIO()
            images.to_pillow(pixels).save(data, "PNG" if i % 3 == 0 else "JPEG")
            stored = data.getvalue()[:60] if i == 7 else data.getvalue()
            for name, contents in ((f"{i}.jpg", stored), (f"{i}.txt", f"photo {i}".encode())):
                member = tarfile.TarInfo(name)
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
    return tmp_path


def trained(folder, photos, **changes):
    made = runs.trainer(folder, {"steps": 5, **changes}, pair=pair(), data=Shards(photos / "0.tar"))
    made.fit()
    assert list(made.dataset.failures) == [7]
    return runs.weights(made)


def test_the_same_bits_whoever_reads_and_how_often(photos):
    wanted = trained(photos / "plain", photos)
    assert runs.same_bits(trained(photos / "twice", photos, memory={"graphs": 0.0, "inputs": 0.0}), wanted) == []
    assert runs.same_bits(trained(photos / "threads", photos, workers=3), wanted) == []


@pytest.mark.thorough
def test_the_same_bits_if_processes_read(photos, monkeypatch):
    wanted = trained(photos / "plain", photos)
    opened = functools.partial(_as_processes, loader.open_readers)
    monkeypatch.setattr(loop.loader, "open_readers", opened)
    assert runs.same_bits(trained(photos / "processes", photos, workers=1), wanted) == []


def test_data_on_the_device_are_read_once_and_train_alike(photos, pool, monkeypatch):
    wanted = trained(photos / "plain", photos, memory={"resident": 0.5}, augment=False)
    assert runs.same_bits(trained(photos / "read", photos, augment=False), wanted) == []
    read, reads = Shards.read, []
    monkeypatch.setattr(Shards, "read", lambda self, index, side: reads.append(index) or read(self, index, side))
    wanted = trained(photos / "crops", photos, memory={"resident": 0.5})
    shown = 2 * (SAMPLES_SHOWN + 1)
    assert len(reads) == shown + 2 * 40  # the run has 60 samples
    assert runs.same_bits(trained(photos / "twice", photos, memory={"resident": 0.5, "graphs": 0.0}), wanted) == []
    for found in pool.run(_on_rank, 2, photos, {"memory": {"resident": 0.5}}):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def _as_processes(opened, count, shared, *, processes, started):
    return opened(count, shared, processes=True, started=started)


def test_two_ranks_see_the_pictures_of_one(photos, pool):
    wanted = trained(photos / "one", photos)
    for found in pool.run(_on_rank, 2, photos, {}):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def _on_rank(group, rank, photos, changes):
    world = World(torch.device("cpu"), group)
    made = runs.trainer(photos / "two", {"steps": 5, **changes}, pair=pair(), data=Shards(photos / "0.tar"), world=world)
    made.fit()
    return runs.weights(made)


def test_the_first_batch_is_read_while_chunk_sizes_are_chosen(tmp_path, monkeypatch):
    class Watched(runs.Numbers):
        def read(self, index, side):
            if threading.current_thread().name.startswith("megabatch-read"):
                is_reading.set()
            return super().read(index, side)

    def choose(*args):
        chosen.append(is_reading.wait(PATIENCE))
        return choose_fit(*args)

    chosen, is_reading, choose_fit = [], threading.Event(), loop.choose_fit
    monkeypatch.setattr(loop, "choose_fit", choose)
    made = runs.trainer(tmp_path / "ahead", {"steps": 2, "workers": 1}, data=Watched())
    made.fit()
    assert chosen == [True]
    wanted = runs.trainer(tmp_path / "alone", {"steps": 2})
    wanted.fit()
    assert runs.same_bits(runs.weights(made), runs.weights(wanted)) == []


def test_a_batch_that_is_read_ahead_stops_if_no_chunk_size_fits(tmp_path, monkeypatch):
    def fails(*args):
        raise MemoryError("a chunk of one sample must fit")

    monkeypatch.setattr(loop, "choose_fit", fails)
    stopped = []
    monkeypatch.setattr(loop.StepInputs, "stop", lambda inputs: stopped.append(inputs.batch.number))
    with pytest.raises(MemoryError, match="one sample"):
        runs.trainer(tmp_path, {"workers": 1}).fit()
    assert stopped == [0]


def test_the_next_batch_is_read_while_this_one_trains(tmp_path):
    data = runs.Numbers()
    made = runs.trainer(tmp_path, {"batch_size": 40, "workers": 2, "steps": 4, "chunk_size": 40}, data=data)
    record, reads = made._record, []

    def after_step(*args):
        begun = len(reads)
        ahead = 0 if begun == 3 else 80
        end = time.monotonic() + PATIENCE
        while data.reads < 6 + 80 * (begun + 1) + ahead and time.monotonic() < end:  # 6 were shown to the towers first
            time.sleep(0.01)
        reads.append(data.reads)
        record(*args)

    made._record = after_step
    made.fit()
    assert reads == [166, 246, 326, 326]
