"""The sizes of strips and of the tiles of PyTorch operations, each with the measurement that decided it.

`kernels.plan` contains the tiles of the kernels.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileSize:
    """The rows and columns of one tile of logits."""

    rows: int
    columns: int

    def fit_to(self, N: int, M: int) -> "TileSize":
        """Returns a tile that fits into N×M. If one side becomes shorter, the other grows to keep the number of elements."""
        elements = self.rows * self.columns
        rows = max(1, min(N, self.rows))
        columns = max(1, min(M, elements // rows))
        return TileSize(max(1, min(N, elements // columns)), columns)


# Two cores of an AVX-512 server, fp32, D = 512, 4096 rows and columns. Time of forward + backward, divided by the time of one
# matmul of the same shape, for each tile: 256×1024 2.69, 512×2048 2.60, 1024×1024 2.42, 1024×4096 2.40, 2048×4096 2.41. The
# tile and its spare copy (4 MiB each) stay in the last-level cache, and the matmuls are long enough in every dimension.
CPU = TileSize(rows=1024, columns=1024)

# One H200, 32k rows and columns, D = 512, bf16 / fp32, clip_loss forward + backward in ms: 1024×1024 693 / 590,
# 2048×2048 187 / 189, 4096×4096 72 / 143, 8192×8192 52 / 132. Small tiles are launch-bound. With the chosen size, all buffers
# of a pass (at most 15 bytes per element) stay below the 512 MiB limit of a workspace. With 8192×8192 they would exceed it.
ACCELERATOR = TileSize(rows=4096, columns=8192)
ACCELERATOR_FLOAT64 = TileSize(rows=4096, columns=4096)


def eager_tile(device: torch.device, dtype: torch.dtype) -> TileSize:
    """Returns the tile of the PyTorch engine on `device`, for logits of `dtype`."""
    if device.type == "cpu":
        return CPU
    return ACCELERATOR_FLOAT64 if dtype == torch.float64 else ACCELERATOR


def topk_tile(device: torch.device, dtype: torch.dtype, k: int) -> TileSize:
    """Returns the tile of `eager.topk`. It is wide, because only about √(columns·k) candidates of a row are sorted.

    On a CPU it has 16 MiB in float32. Time in ms for each tile, on two cores, with 1,024 rows:

    | columns | D | k | 1024×1024 | 512×8192 | 256×16384 | 128×32768 | only the matmul, 1024×1024 |
    |---|---|---|---|---|---|---|---|
    | 131,072 | 256 | 16 | 746 | 661 | 722 | 901 | 384 |
    | 131,072 | 256 | 128 | 1589 | 729 | 753 | 1022 | 395 |
    | 32,768 | 128 | 100 | 266 | 166 | 156 | 157 | 48 |
    | 32,768 | 128 | 1,024 | 433 | 724 | 383 | 281 | 50 |

    The matmul is slower in tiles with few rows.
    """
    if device.type == "cpu":
        columns = min(max(8192, 128 * k), 32768)
        return TileSize(2**22 // columns, columns)
    size = eager_tile(device, dtype)
    elements = size.rows * size.columns
    columns = max(size.columns, min(512 * k, elements // 256))
    return TileSize(max(1, elements // columns), columns)


# Rows T of the squares on the diagonal of a symmetric block. Both halves of a square are computed, which is T/N more work than
# the upper triangle needs (12 % at 64k rows). T is a multiple of 256, which is a multiple of every kernel's tile. Smaller
# squares need more launches and are launch-bound. H200, 64k × 768: squares of 4096 take 159 ms if the operands are prepared for
# each rectangle, and the full matrix takes 40 ms. Squares of 8192 take 23 ms with operands that are prepared once
# (`kernels.logsumexp`).
SYMMETRIC_SQUARE = 8192


# Scores of late interaction. A strip takes 64 MiB. At most 2^27 elements of documents are processed at once, because their
# vectors may have to be copied to the device, or to another dtype, which takes up to 512 MiB.
SCORE_STRIP = TileSize(rows=4096, columns=4096)
SCORE_ELEMENTS = 2**27


def symmetric_square(device: torch.device, dtype: torch.dtype, eager: bool) -> int:
    """Returns the rows of a square on the diagonal: an eager tile, or enough rows to be worth a kernel launch."""
    return eager_tile(device, dtype).rows if eager else SYMMETRIC_SQUARE


def rows_at_once(device: torch.device, D: int) -> int:
    """Returns how many rows of embeddings one elementwise operation processes.

    Accelerators process 32 MiB in float32, for few launches. CPUs process few rows, which stay in the cache.
    """
    return CPU.rows if device.type == "cpu" else max(1024, 2**23 // D)


# Bytes of a strip of gradients: half of the 512 MiB limit of a workspace, because other buffers exist at the same time. The
# sides of the strip decide how well the tiles of dx and dy fill the multiprocessors. H200, bf16, 64k×64k, both gradient matmuls
# with fp32 sums, ms at D = 512 / 768 / 1024: 8192×16384 11.2 / 17.4 / 22.5, 16384×8192 11.3 / 16.7 / 23.1, 11008×16384 11.9 /
# 17.8 / 25.6, 13312×13312 12.5 / 18.7 / 25.6.
_STRIP_BYTES = 256 * 2**20


def _strip_rows(D: int) -> int:
    return 16384 if 512 < D < 1024 else 8448


def strip_size(N: int, M: int, D: int, element_size: int) -> TileSize:
    """Returns the rows and columns of one strip of gradients. Strips have equal sizes and are as few as the workspace allows.

    The strip's rows of dx and a temporary of the same size exist at the same time, in fp32. They take at most 64 MiB each.
    """
    rows = _even(N, min(_strip_rows(D), max(256, 2**24 // D)))
    return TileSize(rows, _even(M, _STRIP_BYTES // element_size // rows))


# Bytes of a strip on one GPU (`operators.one_gpu`): the full limit of a workspace. The gradients are allocated after the strip
# is freed, so the float32 sums of dx fit as well (`dispatch.Limits.one_gpu_elements`). 16,384 pairs in half precision are one
# strip, because every strip needs two launches and two matmuls, and such a batch is launch-bound. With 65,536 pairs, strips of
# 16384×16384 need two thirds of the memory traffic of 8192×16384 for both sums. H200, bf16, D = 512 / 768 / 1024, ms:
# `clip_loss` 27.2 / 40.8 / 54.5 instead of 27.6 / 41.3 / 55.1, `siglip_loss` 23.0 / 32.1 / 41.5 instead of 23.2 / 33.0 / 42.2.
_PAIR_STRIP_BYTES = 512 * 2**20
_PAIR_STRIP_ROWS = 16384


def pair_strip(N: int, element_size: int) -> TileSize:
    """Returns the rows and columns of one strip of gradients on one GPU."""
    rows = _even(N, _PAIR_STRIP_ROWS)
    return TileSize(rows, _even(N, _PAIR_STRIP_BYTES // element_size // rows))


def fits_one_square(N: int, element_size: int) -> bool:
    """Returns whether all logits of N rows with themselves are one strip. Their symmetry then saves no time.

    H200, bf16, D = 512, `nt_xent_loss`: 16,384 views take 2.3 ms in one strip, and 3.3 ms if symmetric rectangles are computed
    once, because they need more launches. 32,768 views take 9.2 and 4.3 ms.
    """
    return min(_PAIR_STRIP_ROWS, math.isqrt(_PAIR_STRIP_BYTES // element_size)) >= N


def pair_square(N: int, element_size: int) -> int:
    """Returns the rows of a square strip, of which the logits of a batch with itself consist. N rows are divided evenly."""
    most = math.isqrt(_PAIR_STRIP_BYTES // element_size) // 256 * 256
    return _even(N, min(_PAIR_STRIP_ROWS, most))


def _even(length: int, most: int) -> int:
    """Divides `length` into equal parts, each a multiple of 256 and at most `most`. Returns the size of a part."""
    parts = max(1, -(-length // (most // 256 * 256)))
    return -(-length // parts // 256) * 256


def tiles(length: int, size: int) -> int:
    """Returns how many tiles of `size` cover `length`. `triton.cdiv` would take 3 µs, because kernels can call it as well."""
    return -(-length // size)


# Rows of the squares in which a dense matrix on a CPU is added to its transpose. One / two threads, ms for 1,024 and 2,048
# rows: full matrix 8.1 / 4.6 and 45 / 25, squares of 256 4.3 / 2.4 and 17.5 / 10.7, squares of 512 4.9 / 2.4 and 18.9 / 9.9.
TRANSPOSED_CPU = 512
# Rows of a dense matrix on a CPU whose sigmoids are computed at once. Four matrices of this height stay in the cache, and
# none of them needs new memory. One / two threads, ms of `siglip_loss` until its weights are computed, for 1,024 and 2,048
# rows: all rows 27 / 16 and 96 / 67, 128 rows 18.5 / 10.1 and 63 / 40, 256 rows 18.5 / 10.4 and 59 / 35, 512 rows 21 / 12.6
# and 64 / 38.
SIGMOID_CPU = 256

# Rows up to which the kernels of the dense path compute half-precision matmuls themselves, because the launch of a cuBLAS
# matmul takes 50 µs of host time. H200, bf16, D = 512, µs of GPU time with matmuls by kernels / by cuBLAS: 24 / 29 at 256 rows,
# 217 / 200 at 4,096, 808 / 686 at 8,192. With D = 1024 and 4,096 rows it is 341 / 277, but the host needs longer.
KERNEL_MATMUL_ROWS = 4096
_KERNEL_MATMUL_TERMS = 4096**2 * 1024  # multiplications of one matmul


def kernels_compute_matmuls(N: int, D: int) -> bool:
    """Returns whether the kernels of the dense path compute its matmuls."""
    return N <= KERNEL_MATMUL_ROWS and N * N * D <= _KERNEL_MATMUL_TERMS
