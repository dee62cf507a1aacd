"""Crops of images on a GPU: one launch for images of any sizes.

A pixel of a crop is a weighted sum over a window of the image, with the weights of the antialiased bicubic filter of
`torch.nn.functional.interpolate`, computed in float32 and rounded once. A program computes a tile of one crop and reads only
its own image, so a crop has the same bits whichever images share the launch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Each thread of 4 warps has 8 pixels of one column. They and the 3 channels share the column's weights, and their 24 loads are
# in flight together. Chosen by counting instructions, and not measured yet.
BLOCK_H = BLOCK_W = 32


@triton.jit
def _window(i, length, SIZE: tl.constexpr):
    """The window of output pixel i of SIZE, in a row or column of `length` pixels.

    Returns its first pixel, its number of pixels, and the distance from the centre of the filter to the first pixel. The
    distance is a whole number of 1 / (2 · SIZE) pixels, so it is exact. All windows have the same number of pixels; near the
    end of the row they begin earlier, with pixels of weight 0, so that none is beyond the end.
    """
    centre = (2 * i + 1) * length
    reach = 4 * tl.maximum(length, SIZE)  # the filter is stretched where the image is made smaller
    pixels = tl.minimum(tl.cdiv(reach, SIZE), length)
    first = tl.minimum(tl.maximum(centre + SIZE - reach, 0) // (2 * SIZE), length - pixels)
    return first, pixels, ((2 * first + 1) * SIZE - centre).to(tl.float32)


@triton.jit
def _weights(distance, length, SIZE: tl.constexpr):
    """The bicubic filter with a = −0.5, for a distance in the unit of `_window`."""
    t = tl.abs(distance) * (0.5 / tl.maximum(length, SIZE))
    rest = tl.minimum(t - 2, 0.0)  # 0 beyond the filter
    return tl.where(t < 1, (1.5 * t - 2.5) * t * t + 1, -0.5 * (t - 1) * rest * rest)


@triton.jit
def _pixels(image, offs):
    """Bytes times 2⁻¹⁴⁹: their bits read as float32, because a GPU converts integers slowly.

    With the hint, neighbouring threads read neighbours in a row; without it, Triton 3.6 gives them neighbours in a column. A
    load stays one byte wide, because an address from a table has no known alignment.
    """
    return tl.load(tl.max_contiguous(image + offs, [1, 2])).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _store_rounded(crop, offs, mask, sums):
    """Sums as bytes, rounded half to even: from 2²³ on, a float32 has no fraction, and its last bits are a whole number."""
    rounded = tl.minimum(tl.maximum(sums, 0.0), 255.0) + 2.0**23
    tl.store(crop + offs, rounded.to(tl.uint32, bitcast=True).to(tl.uint8), mask)


@triton.jit
def _crop_kernel(
    table,  # (n, 9) int64: addresses of image and crop; height and width; top, left, height, width and mirrored of the box
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    tiles_w: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H * tiles_w
    tile = tl.program_id(0) % tiles
    table += tl.program_id(0) // tiles * 9
    red, crop = tl.load(table).to(tl.pointer_type(tl.uint8)), tl.load(table + 1).to(tl.pointer_type(tl.uint8))
    rows, columns = tl.load(table + 2).to(tl.int32), tl.load(table + 3).to(tl.int32)
    top, left = tl.load(table + 4).to(tl.int32), tl.load(table + 5).to(tl.int32)
    height, width = tl.load(table + 6).to(tl.int32), tl.load(table + 7).to(tl.int32)
    green, blue = red + rows * columns, red + 2 * rows * columns

    offs_h = tile // tiles_w * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs_w = tile % tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    mask = (offs_h < H) & (offs_w < W)
    i, j = tl.minimum(offs_h, H - 1), tl.minimum(offs_w, W - 1)  # all pixels of the tile can be computed
    j = tl.where(tl.load(table + 8) != 0, W - 1 - j, j)
    first_h, taps_h, distance_h = _window(i, height, H)
    first_w, taps_w, distance_w = _window(j, width, W)

    red_sums = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    green_sums, blue_sums = red_sums, red_sums
    total_h, total_w = tl.zeros((BLOCK_H, 1), tl.float32), tl.zeros((1, BLOCK_W), tl.float32)
    for tap_h in range(taps_h):
        weights_h = _weights(distance_h + 2 * H * tap_h, height, H)
        total_h += weights_h
        offs_row = (top + first_h + tap_h) * columns + left + first_w
        red_row = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        green_row, blue_row = red_row, red_row
        total_w = tl.zeros((1, BLOCK_W), tl.float32)  # the same in every row
        for tap_w in range(taps_w):
            weights_w = _weights(distance_w + 2 * W * tap_w, width, W)
            total_w += weights_w
            scaled = weights_w * 2.0**126
            offs = (offs_row + tap_w).to(tl.uint32)  # one instruction less than with a sign
            red_row += scaled * _pixels(red, offs)
            green_row += scaled * _pixels(green, offs)
            blue_row += scaled * _pixels(blue, offs)
        red_sums += weights_h * red_row
        green_sums += weights_h * green_row
        blue_sums += weights_h * blue_row

    share = 2.0**23 / (total_h * total_w)
    offs = offs_h * W + offs_w
    _store_rounded(crop, offs, mask, red_sums * share)
    _store_rounded(crop + H * W, offs, mask, green_sums * share)
    _store_rounded(crop + 2 * H * W, offs, mask, blue_sums * share)


def crop_images(pictures: Sequence[Tensor], boxes: Sequence[Sequence[int]], size: tuple[int, int]) -> Tensor:
    """Crops of images on one device.

    Args:
        pictures: (3, height, width) uint8 each, of any heights and widths.
        boxes: top, left, height, width and mirrored of the part of each image.
        size: height and width of the crops.

    Returns:
        (n, 3, *size) uint8.
    """
    pictures = [image.contiguous() for image in pictures]  # alive until the kernel is queued
    crops = torch.empty(len(pictures), 3, *size, dtype=torch.uint8, device=pictures[0].device)
    entries = [
        (image.data_ptr(), crops.data_ptr() + i * 3 * size[0] * size[1], *image.shape[1:], *box)
        for i, (image, box) in enumerate(zip(pictures, boxes, strict=True))
    ]
    table = torch.tensor(entries, dtype=torch.int64, device=crops.device)
    tiles = triton.cdiv(size[0], BLOCK_H) * triton.cdiv(size[1], BLOCK_W)
    with torch.cuda.device_of(crops):
        _crop_kernel[(len(pictures) * tiles,)](table, H=size[0], W=size[1], BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W)
    return crops
