"""Data on the device: crops are those of readers up to resizing, and nothing is read after the first pass."""

import pytest
import torch
import torch.nn.functional as F

from megabatch.cached.replay import sample_seed
from megabatch_train.data.dataset import Dataset, UnreadableSampleError
from megabatch_train.data.load import Mix
from megabatch_train.data.media.images import RandomCrop, TrainingImages
from megabatch_train.data.resident import Resident, uniform

TRAINING = TrainingImages(RandomCrop((24, 24), area=(0.3, 1.0), flip=True), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "pixels")
TRAINING_REST = (TRAINING.mean, TRAINING.deviation, TRAINING.key)
CPU = torch.device("cpu")


class Photos(Dataset):
    """Smooth images of several shapes, each with two captions; image 2 is damaged."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __len__(self):
        return 12

    def read(self, index, side):
        self.reads += 1
        if side == 1:
            return "word " * (1 + index % 4)
        if index // 2 == 2:
            raise UnreadableSampleError("photo 2 is damaged")
        waves = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(index // 2))
        size = (90 + 9 * (index // 2), 120)
        return (255 * F.interpolate(waves, size, mode="bicubic").clamp(0, 1))[0].to(torch.uint8)

    def name(self, index):
        return str(index)

    def ids(self, indices):
        return torch.as_tensor(indices) // 2

    def items(self):
        return torch.arange(12) // 2


class Images:
    training_images = TRAINING

    def prepare(self, image, generator):
        return F.interpolate(image[None].float(), (24, 24))[0]

    def collate(self, samples):
        return {"pixels": torch.stack(samples)}


class Texts:
    training_images = None

    def prepare(self, text, generator):
        return torch.tensor([len(word) for word in text.split()])

    def collate(self, samples):
        return {"letters": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    def lengths(self, inputs):
        return inputs["letters"].ne(0).sum(1)


PREPARATIONS = (Images(), Texts())


def whole(source, spans=None):
    return torch.cat([chunk["pixels"] for chunk in source.chunks(spans or [(0, len(source))], CPU)])


def test_numbers_are_those_of_sample_seed():
    indices = torch.tensor([0, 1, 7, 123_456_789, 2**40])
    for seed in (0, 5, 2**63 - 1):
        wanted = [[sample_seed(sample_seed(seed, i), k) / 2**63 for k in range(4)] for i in indices.tolist()]
        found = uniform(seed, indices, 4)
        torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=2**-24)
    many = uniform(1, torch.arange(100_000), 5)
    assert ((many >= 0) & (many < 1)).all()
    torch.testing.assert_close(many.mean(0), torch.full((5,), 0.5), rtol=0, atol=0.005)


def test_crops_are_those_of_readers_up_to_resizing():
    data = Photos()
    resident = Resident(data, PREPARATIONS, CPU)
    indices = [0, 3, 6, 8, 11]
    found = whole(resident.source(indices, 0, PREPARATIONS[0], seed=4, epoch=1))
    numbers = uniform(sample_seed(sample_seed(4, 1), 0), torch.tensor(indices), 5)
    wanted, mirrored = [], 0
    for index, row in zip(indices, numbers.tolist(), strict=True):
        image = data.read(index, 0)
        box = TRAINING.crop.box(row, *image.shape[1:])
        wanted.append(TRAINING.crop.one(image, box))
        mirrored += box.mirrored
    wanted = TRAINING.inputs(wanted, CPU)["pixels"]
    assert 0 < mirrored < 5
    assert (found - wanted).abs().mean() < 0.05  # the values of wanted have a deviation of about 1
    assert (found - wanted.flip(3)).abs().mean() > 0.3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(whole(resident.source(indices, 0, PREPARATIONS[0], seed=4, epoch=1)), found)
    others = whole(resident.source(indices, 0, PREPARATIONS[0], seed=4, epoch=3))
    assert (found - others).abs().mean() > 0.1


def test_crops_of_another_size_are_those_of_the_stored_size_made_smaller():
    class Small(Images):
        training_images = TrainingImages(RandomCrop((12, 12), area=(0.3, 1.0), flip=True), *TRAINING_REST)

    resident = Resident(Photos(), PREPARATIONS, CPU)
    indices = [0, 3, 6, 8, 11]
    large = whole(resident.source(indices, 0, PREPARATIONS[0], seed=4, epoch=1))
    small = whole(resident.source(indices, 0, Small(), seed=4, epoch=1))
    assert small.shape == (5, 3, 12, 12)
    wanted = F.interpolate(large, (12, 12), mode="bilinear", antialias=True)
    torch.testing.assert_close(small, wanted, rtol=1e-5, atol=1e-5)  # interpolation and normalization are linear


def test_nothing_is_read_again_and_order_and_chunks_do_not_matter():
    data = Photos()
    resident = Resident(data, PREPARATIONS, CPU)
    assert data.reads == 6 + 12  # captions of one image share it
    assert data.failures.keys() == resident.failures.keys() == {4, 5}
    assert resident.usable([3, 4, 5]).tolist() == [True, False, False]
    source = resident.source([9, 2, 8, 2], 0, PREPARATIONS[0], seed=1)
    pixels = whole(source)
    assert torch.equal(pixels[1], pixels[3])
    assert not torch.equal(pixels[0], pixels[2])  # one image, two samples
    assert torch.equal(whole(source, [(0, 1), (1, 4)]), pixels)
    texts = resident.source([3, 0], 1, PREPARATIONS[1])
    assert texts.lengths.tolist() == [4, 1]
    (tokens,) = texts.chunks([(0, 2)], CPU)
    assert tokens["letters"].tolist() == [[4, 4, 4, 4], [4, 0, 0, 0]]
    assert data.reads == 18
    evaluated = whole(resident.source([3], 0, PREPARATIONS[0], augment=False))
    assert torch.equal(evaluated, PREPARATIONS[0].collate([PREPARATIONS[0].prepare(data.read(3, 0), None)])["pixels"])


def test_images_without_augmentation_are_kept_as_the_tower_takes_them():
    data = Photos()
    resident = Resident(data, PREPARATIONS, CPU, augment=False)
    reads = data.reads
    found = whole(resident.source([7, 0], 0, PREPARATIONS[0], augment=False))
    assert data.reads == reads
    assert torch.equal(found, whole(data.source([7, 0], 0, PREPARATIONS[0], augment=False)))


def test_a_mixture_is_kept_as_well():
    mixed = Mix([Photos(), Photos()], [3, 1])
    kept = Resident(mixed, PREPARATIONS, CPU)
    assert kept.groups == mixed.groups
    found = whole(kept.source([0, 13, 22], 0, PREPARATIONS[0], seed=3))
    assert torch.equal(found[:1], whole(Resident(Photos(), PREPARATIONS, CPU).source([0], 0, PREPARATIONS[0], seed=3)))
    assert sorted(kept.failures) == [4, 5, 16, 17]


def test_what_cannot_be_kept():
    with pytest.raises(ValueError, match=r"memory.resident must be 0 for a model whose workers augment samples"):
        Resident(Photos(), (Texts(), Texts()), CPU)
    with pytest.raises(ValueError, match=r"memory.resident must allow 0.00 GiB for the samples of the whole dataset, got 0.00"):
        Resident(Photos(), PREPARATIONS, CPU, limit=1000)
