"""Images of training: decoded whole or named as damaged, and cropped the same whatever reads them."""

import io

import pytest
import torch

from megabatch.cached import ReplayMismatchError
from megabatch_train.data.dataset import UnreadableSampleError
from megabatch_train.data.loader import ReaderProcesses
from megabatch_train.data.media import images
from megabatch_train.data.media.images import EncodedImage, RandomCrop, TrainingImages
from photos import Files, picture, resized, stored

Image = pytest.importorskip("PIL.Image", reason="images are made with Pillow")
pytest.importorskip("torchvision", reason="decodes JPEGs")

TRAINING = TrainingImages(RandomCrop((12, 9), area=(0.5, 1.0)), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "pixels")


def rotated(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return stored(image, exif=exif)


def grey(image):
    data = io.BytesIO()
    images.to_pillow(image).convert("L").save(data, "JPEG")
    return data.getvalue()


def cmyk(image):
    data = io.BytesIO()
    images.to_pillow(image).convert("CMYK").save(data, "JPEG")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (stored(picture(0, 20, 30)), (20, 30)),
        (stored(picture(0, 20, 300), progressive=True), (20, 300)),
        (rotated(picture(0, 20, 30), 1), (20, 30)),
        (rotated(picture(0, 20, 30), 6), None),
        (grey(picture(0, 20, 30)), None),
        (cmyk(picture(0, 20, 30)), None),
        (stored(picture(0, 20, 30), "PNG"), None),
        (stored(picture(0, 20, 30))[:-200], None),
        (b"\xff\xd8\xff", None),
        (b"\xff\xd8\xff\xe1\xff\xd9", None),
        (b"", None),
    ],
)
def test_which_files_any_jpeg_decoder_reads(data, plain):
    assert images.plain_jpeg_size(data) == plain


def test_orientation_in_xmp_is_left_to_pillow():
    whole = stored(picture(0, 20, 30))
    segment = b"http://ns.adobe.com/xap/1.0/\0" + b'<rdf:Description tiff:Orientation="6"/>'
    rotated = whole[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + whole[2:]
    assert images.plain_jpeg_size(rotated) is None
    assert images.decode(EncodedImage(rotated, "a.jpg")).shape[0] == 3


def test_a_small_file_that_claims_to_be_huge_is_unreadable():
    whole = bytearray(stored(picture(0, 20, 30)))
    place = whole.index(b"\xff\xc0") + 5
    whole[place : place + 4] = (60000).to_bytes(2, "big") * 2
    assert images.plain_jpeg_size(bytes(whole)) is None
    with pytest.raises(UnreadableSampleError, match=r"^bomb\.jpg is not an image that can be read: DecompressionBombError"):
        images.decode(EncodedImage(bytes(whole), "bomb.jpg"))


def test_headers_of_any_bytes_do_not_raise():
    generator = torch.Generator().manual_seed(0)
    whole = rotated(picture(0, 20, 30), 6)
    for end in range(0, len(whole), 7):
        assert images.plain_jpeg_size(whole[:end] + b"\xff\xd9") in (None, (20, 30))
    for _ in range(300):
        damaged = bytearray(whole)
        for place in torch.randint(2, 200, (5,), generator=generator).tolist():
            damaged[place] = int(torch.randint(0, 256, (), generator=generator))
        size = images.plain_jpeg_size(bytes(damaged))
        assert size is None or 0 < size[0] * size[1] <= images.MOST_PIXELS


def test_torchvision_decodes_as_pillow_does(monkeypatch):
    files = [stored(picture(0, 20, 30)), rotated(picture(1, 9, 40), 6), grey(picture(2, 8, 8)), cmyk(picture(3, 8, 9))]
    found = [images.decode(EncodedImage(data, "a.jpg")) for data in files]
    monkeypatch.setattr(images, "torchvision_io", lambda: None)
    for one, data in zip(found, files, strict=True):
        assert torch.equal(one, images.decode(EncodedImage(data, "a.jpg")))
    assert found[1].shape == (3, 40, 9)


def test_a_damaged_jpeg_is_named():
    for data in (stored(picture(0, 64, 64))[:300], stored(picture(0, 64, 64))[:300] + b"\xff\xd9", b"\xff\xd8\xff\xd9"):
        with pytest.raises(UnreadableSampleError, match=r"^b/c\.jpg is not an image that can be read: "):
            images.decode(EncodedImage(data, "b/c.jpg"))
    with pytest.raises(UnreadableSampleError, match=r"^b/c\.jpg is empty"):
        images.decode(EncodedImage(b"", "b/c.jpg"))


def test_boxes_are_within_the_image_and_of_the_area_asked_for():
    crop = RandomCrop((8, 8), area=(0.5, 0.6), shape=(0.9, 1.1))
    generator = torch.Generator().manual_seed(0)
    boxes = [crop.box(crop.draw(generator), 100, 120) for _ in range(200)]
    for top, left, height, width, mirrored in boxes:
        assert 0 <= top <= top + height <= 100
        assert 0 <= left <= left + width <= 120
        assert 0.49 < height * width / 12000 < 0.61
        assert 0.88 < width / height < 1.12
        assert not mirrored
    assert len({box.top for box in boxes}) > 15


def test_a_crop_is_antialiased_resizing():
    crop, generator = RandomCrop((50, 40), area=(0.3, 1.0), flip=True), torch.Generator().manual_seed(0)
    for i in range(30):
        image = picture(i, 30 + 5 * i, 200 - 4 * i) // 2 + 60  # resizing in two directions never leaves the range of bytes
        box = crop.box(crop.draw(generator), *image.shape[1:])
        error = crop.one(image, box).double() - resized(image, box, crop.size)
        assert error.abs().max() < 1.5  # rounded after each direction
        assert error.abs().mean() < 0.5


class Preparation:
    training_images = TRAINING


def files():
    made = [stored(picture(i, 20 + 3 * i, 40 - 2 * i)) for i in range(8)]
    made[2] = stored(picture(2, 15, 17), "PNG")
    made[3] = rotated(picture(3, 15, 17), 6)
    made[5] = stored(picture(5, 64, 64))[:300] + b"\xff\xd9"  # damaged, which only the decoder notices
    made[6] = b"nothing"
    return made


def chunks(data, **options):
    source = data.source(range(8), 0, Preparation(), seed=3, epoch=1, **options)
    return [[chunk["pixels"].clone() for chunk in source.chunks([(0, 5), (5, 8)], None)] for _ in range(2)]


@pytest.mark.parametrize("hold", [0, 10**6])
def test_chunks_are_the_same_in_both_passes_and_damaged_images_are_named(hold):
    data = Files(files())
    first, again = chunks(data, hold=hold)
    assert [len(chunk) for chunk in first] == [5, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert data.usable(range(8)).tolist() == [True, True, True, True, True, False, False, True]
    assert {i: reason.split(":")[0] for i, reason in data.failures.items()} == {
        5: "5.jpg is not an image that can be read",
        6: "6.jpg is not an image that can be read",
    }
    for position, i in ((0, 0), (4, 4)):  # by definition
        drawn, image = TRAINING.crop.draw(torch.Generator().manual_seed(own_seed(i))), data.read(i, 0)
        wanted = TRAINING.crop.one(image, TRAINING.crop.box(drawn, *image.shape[1:])).float() / 255
        wanted = (wanted - torch.tensor(TRAINING.mean)[:, None, None]) / torch.tensor(TRAINING.deviation)[:, None, None]
        torch.testing.assert_close(first[0][position], wanted, rtol=0, atol=1e-6)


def own_seed(index):
    from megabatch.cached.replay import sample_seed

    return sample_seed(sample_seed(sample_seed(3, 1), 0), index)


@pytest.mark.thorough
def test_the_same_pictures_whatever_reads_them():
    data = Files(files())
    with ReaderProcesses(1, [data]) as executor:
        wanted, _ = chunks(Files(files()))
        for workers in (2, executor):
            found, _ = chunks(data, workers=workers)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    (other,) = data.source([7, 1, 4], 0, Preparation(), seed=3, epoch=1).chunks([(0, 3)], None)
    for position, (chunk, row) in enumerate(((1, 2), (0, 1), (0, 4))):
        assert torch.equal(other["pixels"][position], wanted[chunk][row])


def test_a_file_that_changes_between_the_passes_is_noticed():
    for later in (stored(picture(1, 20, 30), quality=50), b"nothing"):
        data = Files([stored(picture(0, 20, 30)), stored(picture(1, 20, 30))])
        source = data.source(range(2), 0, Preparation())
        list(source.chunks([(0, 2)], None))
        data.files[1] = later
        with pytest.raises(ReplayMismatchError, match=r"1 of samples 0 to 1 .* sample 1 \(1\)"):
            list(source.chunks([(0, 2)], None))
