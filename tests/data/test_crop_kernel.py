"""The kernel that crops images against PyTorch's resizing in float64: on a GPU if there is one, otherwise interpreted."""

import pytest
import torch

from megabatch.data.crops import Box, RandomCrop
from photos import resized

pytest.importorskip("triton")
from megabatch.data.crop_kernel import crop_images

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]


def cropped(pictures, boxes, size):
    return crop_images([image.to(DEVICE) for image in pictures], boxes, size).cpu()


def check(found, image, box, size):
    """Each pixel is the nearest whole number; within 0.001 of a half, either."""
    assert (found.double() - resized(image, box, size)).abs().max() < 0.501, (image.shape, box)


@pytest.mark.parametrize(
    ("image", "box", "size"),
    [
        ((9, 11), (0, 0, 9, 11), (9, 11)),
        ((9, 11), (0, 0, 9, 11), (40, 70)),  # larger, in several tiles
        ((70, 60), (0, 0, 70, 60), (14, 12)),  # smaller by 5
        ((70, 7), (3, 1, 61, 5), (11, 17)),  # smaller and larger
        ((20, 30), (0, 0, 12, 13), (8, 9)),  # at each corner
        ((20, 30), (8, 17, 12, 13), (8, 9)),
        ((20, 30), (0, 17, 12, 13), (8, 9)),
        ((20, 30), (8, 0, 12, 13), (8, 9)),
        ((38, 40), (2, 3, 34, 36), (33, 33)),  # in tiles of one row or column
        ((1, 1), (0, 0, 1, 1), (4, 5)),
        ((1, 90), (0, 4, 1, 80), (3, 4)),
        ((5, 4), (2, 1, 1, 1), (3, 2)),
        ((2, 3), (0, 0, 2, 3), (1, 1)),
        ((3, 2), (0, 0, 3, 2), (7, 9)),  # narrower than the filter
    ],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_crop_is_antialiased_resizing(image, box, size, mirrored):
    (picture,) = noise(image)
    (found,) = cropped([picture], [Box(*box, mirrored)], size)
    check(found, picture, Box(*box, mirrored), size)


def test_images_of_many_sizes_in_one_launch():
    generator = torch.Generator().manual_seed(0)
    crop = RandomCrop((10, 13), area=(0.3, 1.0), flip=True)
    pictures = noise(*torch.randint(5, 45, (16, 2), generator=generator).tolist())
    boxes = [crop.box(crop.draw(generator), *image.shape[1:]) for image in pictures]
    for image, box, found in zip(pictures, boxes, cropped(pictures, boxes, crop.size), strict=True):
        check(found, image, box, crop.size)
    assert 3 < sum(box.mirrored for box in boxes) < 13


def test_a_crop_has_the_same_bits_in_every_launch():
    pictures = noise((20, 31), (7, 9), (15, 40), (20, 31))
    boxes = [Box(3, 2, 13, 28, True), Box(0, 0, 7, 9, False), Box(1, 20, 14, 20, False), Box(0, 0, 20, 31, True)]
    together = cropped(pictures, boxes, (12, 34))
    for i in range(4):
        assert torch.equal(cropped(pictures[i : i + 1], boxes[i : i + 1], (12, 34))[0], together[i])
    assert torch.equal(cropped(pictures[::-1], boxes[::-1], (12, 34)).flip(0), together)


def test_the_filter_keeps_a_plain_image_and_does_not_leave_the_range():
    plain = [torch.full((3, 23, 37), value, dtype=torch.uint8) for value in (0, 1, 128, 255)]
    found = cropped(plain, [Box(1, 2, 20, 33, False)] * 4, (9, 40))
    assert torch.equal(found, torch.stack([image[:, :9, :1].expand(3, 9, 40) for image in plain]))
    edge = torch.zeros(3, 12, 12, dtype=torch.uint8)
    edge[:, 4:8, 4:8] = 255  # around an edge, a bicubic filter is below 0 and above 255
    (found,) = cropped([edge], [Box(0, 0, 12, 12, False)], (30, 30))
    check(found, edge, Box(0, 0, 12, 12, False), (30, 30))
    assert found.min() == 0
    assert found.max() == 255


def test_nothing_outside_of_the_box_is_used():
    (image,) = noise((30, 40))
    box = Box(6, 9, 17, 22, True)
    (wanted,) = cropped([image], [box], (8, 25))
    around = torch.full_like(image, 255)
    around[:, 6:23, 9:31] = image[:, 6:23, 9:31]
    (found,) = cropped([around], [box], (8, 25))
    assert torch.equal(found, wanted)


def test_an_image_that_is_not_contiguous():
    (image,) = noise((20, 30))
    box = Box(2, 3, 12, 20, False)
    (found,) = crop_images([image.to(DEVICE).mT], [box._replace(height=20, width=12)], (8, 9)).cpu()
    check(found, image.mT, box._replace(height=20, width=12), (8, 9))
