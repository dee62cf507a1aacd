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

# A thread of the 4 warps has 8 pixels of a column, which share its weights; so do the channels. Their 24 loads are in flight together.
BLOCK_H = BLOCK_W = 32


@triton.jit
def _window(i, length, SIZE: tl.constexpr):
    """The window of output pixel i of SIZE, in a row or column of `length` pixels.

    Returns its first pixel, the number of its pixels, and the distance of the first pixel from the centre of the filter, as a
    whole number of 1 / (2 · SIZE) pixels: exact in float32, for images of any size.
    """
    centre = (2 * i + 1) * length
    reach = 4 * tl.maximum(length, SIZE)  # the filter is stretched where the image is made smaller
    first = tl.maximum(centre + SIZE - reach, 0) // (2 * SIZE)
    distance = (2 * first + 1) * SIZE - centre
    return first, tl.minimum(tl.cdiv(reach, SIZE), length), distance.to(tl.float32)


@triton.jit
def _weights(pixel, distance, length, SIZE: tl.constexpr):
    """The bicubic filter with a = −0.5, at the distance that `_window` describes; 0 beyond the last pixel."""
    t = tl.abs(distance) * (0.5 / tl.maximum(length, SIZE))
    rest = tl.minimum(t - 2, 0.0)  # 0 beyond the window
    weights = tl.where(t < 1, (1.5 * t - 2.5) * t * t + 1, -0.5 * (t - 1) * rest * rest)
    return tl.where(pixel < length, weights, 0.0)


@triton.jit
def _store_rounded(out, offs, mask, sums):
    """Sums as bytes, rounded half to even: above 2²³ a float32 has no fraction."""
    rounded = tl.minimum(tl.maximum(sums, 0.0), 255.0) + 8388608.0
    tl.store(out + offs, (rounded - 8388608.0).to(tl.uint8), mask)


@triton.jit
def _crop_kernel(
    table,  # (n, 8) int64: address, height and width of each image; top, left, height, width and mirrored of its box
    out,  # (n, 3, H, W) uint8
    H: tl.constexpr,
    W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    tiles_w: tl.constexpr = (W + BLOCK_W - 1) // BLOCK_W
    tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H * tiles_w
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    entry = table + n * 8
    red = tl.load(entry).to(tl.pointer_type(tl.uint8))
    rows, row = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    top, left = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    height, width = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
    mirrored = tl.load(entry + 7)
    green, blue = red + rows * row, red + 2 * rows * row

    offs_h = tile // tiles_w * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs_w = tile % tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    mask = (offs_h < H) & (offs_w < W)
    i = tl.minimum(offs_h, H - 1)  # beyond the edge, any pixel that can be read
    j = tl.minimum(offs_w, W - 1)
    j = tl.where(mirrored != 0, W - 1 - j, j)
    first_h, taps_h, distance_h = _window(i, height, H)
    first_w, taps_w, distance_w = _window(j, width, W)

    red_sums = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    green_sums, blue_sums = red_sums, red_sums
    total_h, total_w = tl.zeros((BLOCK_H, 1), tl.float32), tl.zeros((1, BLOCK_W), tl.float32)
    for tap_h in range(taps_h):
        y = first_h + tap_h
        weights_h = _weights(y, distance_h + 2 * H * tap_h, height, H)
        total_h += weights_h
        start = (top + tl.minimum(y, height - 1)) * row + left
        red_row = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        green_row, blue_row = red_row, red_row
        total_w = tl.zeros((1, BLOCK_W), tl.float32)  # the same in every row
        for tap_w in range(taps_w):
            x = first_w + tap_w
            weights_w = _weights(x, distance_w + 2 * W * tap_w, width, W)
            total_w += weights_w
            offs = start + tl.minimum(x, width - 1)
            red_row += weights_w * tl.load(red + offs).to(tl.float32)
            green_row += weights_w * tl.load(green + offs).to(tl.float32)
            blue_row += weights_w * tl.load(blue + offs).to(tl.float32)
        red_sums += weights_h * red_row
        green_sums += weights_h * green_row
        blue_sums += weights_h * blue_row

    total = total_h * total_w
    out += n.to(tl.int64) * (3 * H * W)
    offs = offs_h * W + offs_w
    _store_rounded(out, offs, mask, red_sums / total)
    _store_rounded(out + H * W, offs, mask, green_sums / total)
    _store_rounded(out + 2 * H * W, offs, mask, blue_sums / total)


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
    entries = [(image.data_ptr(), *image.shape[1:], *box) for image, box in zip(pictures, boxes, strict=True)]
    table = torch.tensor(entries, dtype=torch.int64, device=pictures[0].device)
    out = torch.empty(len(pictures), 3, *size, dtype=torch.uint8, device=table.device)
    tiles = triton.cdiv(size[0], BLOCK_H) * triton.cdiv(size[1], BLOCK_W)
    with torch.cuda.device_of(out):
        _crop_kernel[(len(pictures) * tiles,)](table, out, H=size[0], W=size[1], BLOCK_H=BLOCK_H, BLOCK_W=BLOCK_W)
    return out
