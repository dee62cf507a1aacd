"""Sizes as data, each with the measurement that chose it: tiles of PyTorch operations, and strips.

`kernels.plan` has the tiles of the kernels.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileSize:
    """One tile of similarities: rows × columns."""

    rows: int
    columns: int

    def fit_to(self, N: int, M: int) -> "TileSize":
        """This tile cut to N×M. If one side is shorter, the other grows to keep the number of elements."""
        elements = self.rows * self.columns
        rows = max(1, min(N, self.rows))
        columns = max(1, min(M, elements // rows))
        return TileSize(max(1, min(N, elements // columns)), columns)


# Two cores of an AVX-512 server, fp32, D = 512, 4096 rows and columns; forward + backward against the bare product of the
# same shape: 256×1024 2.69, 512×2048 2.60, 1024×1024 2.42, 1024×4096 2.40, 2048×4096 2.41. The tile and its spare copy
# (4 MiB each) stay in the last-level cache, and the products are long enough in every direction.
CPU = TileSize(rows=1024, columns=1024)

# One H200, 32k rows and columns, D = 512, bf16 / fp32, clip_loss forward + backward in ms: 1024×1024 693 / 590,
# 2048×2048 187 / 189, 4096×4096 72 / 143, 8192×8192 52 / 132. Small tiles cost launches. All buffers of a pass (15 bytes an
# element in the worst case) stay below the 512 MiB limit of a workspace at this size; 8192×8192 would exceed it.
ACCELERATOR = TileSize(rows=4096, columns=8192)
ACCELERATOR_FLOAT64 = TileSize(rows=4096, columns=4096)


def eager_tile(device: torch.device, dtype: torch.dtype) -> TileSize:
    """The tile of the eager backend on `device`, for similarities of `dtype`."""
    if device.type == "cpu":
        return CPU
    return ACCELERATOR_FLOAT64 if dtype == torch.float64 else ACCELERATOR


def topk_tile(device: torch.device, dtype: torch.dtype, k: int) -> TileSize:
    """The tile of `eager.topk`, wide because only √(columns·k) candidates of a row are ordered, and on a CPU 16 MiB in float32.

    Two cores, 1,024 rows, ms for 131,072 columns and D = 256 at k = 16 / 128, then for 32,768 columns and D = 128 at k = 100 /
    1,024: tiles of 1 Mi similarities 746 / 1589 / 266 / 433, 512×8192 661 / 729 / 166 / 724, 256×16384 722 / 753 / 156 / 383,
    128×32768 901 / 1022 / 157 / 281. The product in tiles of 1024×1024: 384 / 395 / 48 / 50; few rows make it slower.
    """
    if device.type == "cpu":
        columns = min(max(8192, 128 * k), 32768)
        return TileSize(2**22 // columns, columns)
    size = eager_tile(device, dtype)
    elements = size.rows * size.columns
    columns = max(size.columns, min(512 * k, elements // 256))
    return TileSize(max(1, elements // columns), columns)


# Rows T of the squares on the diagonal of a symmetric block. Squares are computed whole: T/N more products than the upper half
# needs, 12 % at 64k rows. T is a multiple of 256, which every kernel's tile divides. Smaller squares need more launches, and
# the host makes few in a millisecond: H200, 64k × 768, squares of 4096, operands prepared for each: 159 ms, where the whole
# matrix takes 40. Squares of 8192, operands prepared once (`kernels.logsumexp`): 23 ms.
SYMMETRIC_SQUARE = 8192


def symmetric_square(device: torch.device, dtype: torch.dtype, eager: bool) -> int:
    """Rows of a square on the diagonal: an eager tile, or enough rows to be worth a kernel launch."""
    return eager_tile(device, dtype).rows if eager else SYMMETRIC_SQUARE


def rows_at_once(device: torch.device, D: int) -> int:
    """Rows of embeddings for elementwise work: 32 MiB in float32 on an accelerator, for few launches; few on a CPU, for its
    cache.
    """
    return CPU.rows if device.type == "cpu" else max(1024, 2**23 // D)


# Bytes of a strip of gradients: half of the 512 MiB limit of a workspace, because other buffers are alive beside it. Its sides
# decide how well the tiles of dx and dy fill the multiprocessors. H200, bf16, 64k×64k, both products with fp32 sums, ms at
# D = 512 / 768 / 1024: 8192×16384 11.2 / 17.4 / 22.5, 16384×8192 11.3 / 16.7 / 23.1, 11008×16384 11.9 / 17.8 / 25.6,
# 13312×13312 12.5 / 18.7 / 25.6.
_STRIP_BYTES = 256 * 2**20


def _strip_rows(D: int) -> int:
    return 16384 if 512 < D < 1024 else 8448


def strip_size(N: int, M: int, D: int, element_size: int) -> TileSize:
    """Rows and columns of one strip of gradients: strips of equal size, as few as the workspace allows.

    The strip's rows of dx are alive beside it, in fp32, and so is a temporary of that size: 64 MiB each at most.
    """
    rows = _even(N, min(_strip_rows(D), max(256, 2**24 // D)))
    return TileSize(rows, _even(M, _STRIP_BYTES // element_size // rows))


# Bytes of a strip on the fused path (`operators.fused`): the whole limit of a workspace. The gradients are allocated after the
# strip is freed, so that the float32 sums of dx may take their place (`dispatch.Limits.fused_elements`). 16,384 pairs in half
# precision are one strip, because every strip costs the host two launches and two matmuls, and such a batch is launch-bound.
# 65,536 pairs in strips of 16384×16384 instead of 8192×16384, with two thirds of the traffic of both sums (H200, bf16, D = 512
# / 768 / 1024, ms): `clip_loss` 27.2 / 40.8 / 54.5 instead of 27.6 / 41.3 / 55.1, `siglip_loss` 23.0 / 32.1 / 41.5 instead of
# 23.2 / 33.0 / 42.2.
_PAIR_STRIP_BYTES = 512 * 2**20
_PAIR_STRIP_ROWS = 16384


def pair_strip(N: int, element_size: int) -> TileSize:
    """Rows and columns of one strip of gradients on the fused path."""
    rows = _even(N, _PAIR_STRIP_ROWS)
    return TileSize(rows, _even(N, _PAIR_STRIP_BYTES // element_size // rows))


def _even(length: int, most: int) -> int:
    """`length` divided into equal parts, each a multiple of 256 and at most `most`: their size."""
    parts = max(1, -(-length // (most // 256 * 256)))
    return -(-length // parts // 256) * 256


def tiles(length: int, size: int) -> int:
    """How many tiles of `size` cover `length`. `triton.cdiv`, which kernels may call too, takes the host 3 µs."""
    return -(-length // size)


# Rows of the squares in which a dense matrix on a CPU is added to its transpose. One / two threads, ms for 1,024 and 2,048
# rows: all at once 8.1 / 4.6 and 45 / 25, in squares of 256 4.3 / 2.4 and 17.5 / 10.7, of 512 4.9 / 2.4 and 18.9 / 9.9.
TRANSPOSED_CPU = 512
# Rows of a dense matrix on a CPU whose sigmoids are computed at a time: four matrices of this height stay in the cache, and
# none of them needs fresh memory. One / two threads, ms of `siglip_loss` up to its weights for 1,024 and 2,048 rows: all at
# once 27 / 16 and 96 / 67, 128 rows 18.5 / 10.1 and 63 / 40, 256 rows 18.5 / 10.4 and 59 / 35, 512 rows 21 / 12.6 and 64 / 38.
SIGMOID_CPU = 256

# Rows up to which the kernels of the dense path compute matmuls of half precision themselves: the launch of a cuBLAS matmul
# takes the host 50 µs. H200, bf16, D = 512, µs of the device with matmuls by kernels / by cuBLAS: 24 / 29 at 256 rows, 217 /
# 200 at 4,096, 808 / 686 at 8,192; 341 / 277 at 4,096 rows with D = 1024, where the host needs more.
SMALL_PRODUCT_ROWS = 4096
_SMALL_PRODUCT_TERMS = 4096**2 * 1024  # of one matmul


def small_products(N: int, D: int) -> bool:
    """Whether the kernels of the dense path compute its matmuls."""
    return N <= SMALL_PRODUCT_ROWS and N * N * D <= _SMALL_PRODUCT_TERMS
