"""Tile sizes and the choice of kernel, as data, each with the measurement that chose it."""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from megabatch.tiles.block import Block
from megabatch.tiles.precision import BFLOAT16, FLOAT16, FLOAT32, TF32


@dataclass(frozen=True)
class TileSize:
    """One tile of similarities: rows × columns."""

    rows: int
    columns: int

    def fitted(self, N: int, M: int) -> "TileSize":
        """This tile cut to N×M. If one side is shorter, the other grows to keep the number of elements."""
        elements = self.rows * self.columns
        rows = max(1, min(N, self.rows))
        columns = max(1, min(M, elements // rows))
        return TileSize(max(1, min(N, elements // columns)), columns)


# Two cores of an AVX-512 server, fp32, D = 512, 4096 rows and columns; forward + backward against the bare product of the
# same shape: 256×1024 2.69, 512×2048 2.60, 1024×1024 2.42, 1024×4096 2.40, 2048×4096 2.41. The tile and its spare copy
# (4 MiB each) stay in the last-level cache, and the products are long enough in every direction.
CPU = TileSize(rows=1024, columns=1024)

# Pairs whose similarities PyTorch operations on a CPU hold in memory at once (`operators.small`): two matrices of 16 MiB in
# float32. Two cores, fp32, D = 256, 2,048 pairs, ms in memory and in tiles: `clip_loss` 50 to 57 and 81 to 89, `info_nce_loss`
# 44 to 45 and 58 to 66, `sup_con_loss` 69 to 77 and 68 to 72.
SMALL_PAIRS_CPU = 2048**2
# Of a loss of rows alone, one matrix of 64 MiB: its dense form has three products, and a pass over tiles four. As above, 4,096
# pairs, `info_nce_loss` 199 to 325 and 340 to 395, dense 256 to 350. Losses of both directions are not faster there in memory.
SMALL_PAIRS_CPU_ROWS = 4096**2

# Rows of the squares in which such a matrix is added to its transpose. One / two threads, ms for 1,024 and 2,048 rows: all at
# once 8.1 / 4.6 and 45 / 25, in squares of 256 4.3 / 2.4 and 17.5 / 10.7, of 512 4.9 / 2.4 and 18.9 / 9.9.
TRANSPOSED_CPU = 512
# Rows of such a matrix whose sigmoids are computed at a time: four matrices of this height stay in the cache, and none of them
# needs fresh memory. One / two threads, ms of `siglip_loss` up to its weights for 1,024 and 2,048 rows: all at once 27 / 16 and
# 96 / 67, 128 rows 18.5 / 10.1 and 63 / 40, 256 rows 18.5 / 10.4 and 59 / 35, 512 rows 21 / 12.6 and 64 / 38.
SIGMOID_CPU = 256

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
# matrix takes 40. Squares of 8192, operands prepared once (`triton_symmetric`): 23 ms.
SYMMETRIC_SQUARE = 8192


def symmetric_square(device: torch.device, dtype: torch.dtype, eager: bool) -> int:
    """Rows of a square on the diagonal: an eager tile, or enough rows to be worth a kernel launch."""
    return eager_tile(device, dtype).rows if eager else SYMMETRIC_SQUARE


def rows_at_once(device: torch.device, D: int) -> int:
    """Rows of embeddings for elementwise work: 32 MiB in float32 on an accelerator, for few launches; few on a CPU, for its
    cache.
    """
    return CPU.rows if device.type == "cpu" else max(1024, 2**23 // D)


@dataclass(frozen=True)
class KernelTile:
    """One tile of a Triton kernel: rows × columns, and `width` of the embeddings' dimensions in each step."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int
    group: int = 8  # tiles of rows that programs finish for some columns before they go on to the next columns
    per_multiprocessor: int = 1

    @property
    def options(self) -> dict[str, int]:
        """The tile as arguments of a launch."""
        blocks = {"BLOCK_N": self.rows, "BLOCK_M": self.columns, "BLOCK_D": self.width}
        return blocks | {"num_warps": self.warps, "num_stages": self.stages}


# H200, bf16, 32k×32k, TFLOP/s at D = 512 / 768 / 1024, diagonal excluded; cuBLAS's bare product in that run: 648 / 681 / 729.
# 256×128, 8 warps, 3 stages: 655 / 712 / 735. 128×128, 4 warps: 598 / 537 / 511. 128×256, 8 warps: 257 / 288 / 326.
_LOGSUMEXP = KernelTile(rows=256, columns=128, width=64, warps=8, stages=3)
_LOGSUMEXP_TF32 = KernelTile(rows=128, columns=128, width=32, warps=8, stages=3)
_LOGSUMEXP_FLOAT32 = KernelTile(rows=64, columns=64, width=32, warps=4, stages=2)
_LOGSUMEXP_SMALL = KernelTile(rows=128, columns=128, width=64, warps=8, stages=2)  # compiled for sm_89, not measured

# H200, bf16, strips of 8448×33792, TFLOP/s at D = 512 / 768 / 1024; cuBLAS's bare product in that run: 633 / 638 / 721.
# 128×128, 4 warps, 3 stages, groups of 8, two programs an SM: 519 / 622 / 653. Groups of 16: 511 / 601 / 633.
# 128×256, 8 warps, 4 stages: 508 / 571 / –. 256×128, 8 warps, 4 stages: 499 / – / 642. All tiles stored in two halves; stored
# whole, they are slower.
_GRADIENT = KernelTile(rows=128, columns=128, width=64, warps=4, stages=3, per_multiprocessor=2)
_GRADIENT_TF32 = KernelTile(rows=128, columns=128, width=32, warps=8, stages=3)
# With half as many columns, Triton 3.6 compiles reads from wrong addresses (`tests/tiles/compile_kernels.py`).
_GRADIENT_FLOAT32 = KernelTile(rows=64, columns=128, width=32, warps=4, stages=2, per_multiprocessor=2)
_GRADIENT_SMALL = KernelTile(rows=128, columns=128, width=64, warps=8, stages=2)  # compiled for sm_89, not measured

# Shared memory of one program that the measured tiles need; chips with less get the small tiles.
_LARGE_SHARED_MEMORY = 152 * 2**10

# For the few rows that are recomputed by online softmax.
ONLINE = KernelTile(rows=64, columns=64, width=32, warps=4, stages=2)

# Rows and panels of columns of one launch of the logsumexp kernel: its partial row sums take 128 MiB at most.
LAUNCH_ROWS, LAUNCH_PANELS = 131072, 256

# Top-k. `TOPK_FEW` candidates are chosen from at once, without a choice of larger runs before.
TOPK_FEW = 2**10
TOPK_STORED_GROUP, TOPK_STORED_PANEL = 8, 32  # columns; in panels of 64 and 16 56 and 57 ms where these take 54
_TOPK_BYTES = 384 * 2**20  # of maxima, or of stored products
_TOPK_COLUMNS, _TOPK_STORED_COLUMNS = 2**20, 2**17  # of a strip; the best columns of strips are merged


def topk_group(M: int, D: int, k: int) -> int | None:
    """Columns whose largest product the kernel stores as one number; None if it stores all products.

    Small groups cost stores, and large groups cost products that are formed again, k·group of a row. H200, 65,536 rows, bf16,
    in ms for groups of 8 / 16 / 32 / all products stored, with 512 MiB of maxima: 1M columns, D = 512, k = 16 134 / 124 / 124 /
    823, k = 128 149 / 151 / 176 / 796; 131,072 columns, k = 16 17.7 / 22.1 / 22.1 / 28.3. The bare product: 117 and 15.
    131,072 columns, D = 1024, k = 1024: 54 with all products stored.
    """
    again = k * max(D, 64)  # values of y for each column of a group
    if 4 * again > M if M <= _TOPK_STORED_COLUMNS else 1.5 * again > M:
        return None
    return 8 if 21 * again > M else 16 if 133 * again > M else 32


def topk_strip(N: int, M: int, group: int | None) -> TileSize:
    """Rows and columns of one launch of the top-k kernel: its maxima, or its stored products, take 384 MiB at most."""
    columns = min(-(-M // 128) * 128, _TOPK_STORED_COLUMNS if group is None else _TOPK_COLUMNS)
    rows = _TOPK_BYTES // 4 * (group or 1) // columns // 256 * 256
    return TileSize(max(256, min(rows, N)), columns)


# Late interaction: vectors of queries × vectors of documents, and the width of a step. With two stages Triton begins to load a
# tile only after the tile before, so three. H200, 1,024 pairs of 32 × 512 vectors, bf16, forward + backward in ms: 256×128 with
# 8 warps 30.3, 128×128 with 4 31.7 and with 8 31.3, 256×64 31.9, 128×64 with 4 31.0, 128×256 33.2.
_MAXSIM = KernelTile(rows=256, columns=128, width=128, warps=8, stages=3)
_MAXSIM_WIDE = KernelTile(rows=128, columns=128, width=64, warps=8, stages=3)  # vectors of both sides are loaded in steps
_MAXSIM_TF32 = KernelTile(rows=128, columns=64, width=64, warps=8, stages=2)
_MAXSIM_FLOAT32 = KernelTile(rows=64, columns=64, width=64, warps=4, stages=2)
_MAXSIM_SMALL = KernelTile(rows=64, columns=64, width=64, warps=4, stages=2)
# Vectors of a part of a document × query vectors of its list in each step. H200, bf16, forward and backward of 1,024 queries of
# 128 vectors and documents of 1,024 / 32 and 128, in ms: 64×128 105.5 / 7.3, 64×64 111.6 / 8.5, 128×64 110.2 / 8.9.
_MAXSIM_LISTED = KernelTile(rows=64, columns=128, width=128, warps=4, stages=3)
_MAXSIM_LISTED_FLOAT32 = KernelTile(rows=64, columns=32, width=64, warps=4, stages=2)
MAXSIM_LIST_ENTRIES = 2**25  # of all lists at a time: 128 MiB
# Query vectors that gather their winners; 16 to 128 of them differ by 3 %.
MAXSIM_GATHER = KernelTile(rows=32, columns=1, width=128, warps=4, stages=3)
MAXSIM_SCORES = TileSize(rows=4096, columns=4096)  # queries and documents of a launch: 64 MiB of scores
_MAXSIM_WINNERS = 2**27  # of a strip: 256 MiB in int16
MAXSIM_DOCUMENTS = 2**15  # of a launch, whose grid may have 65,535 of them


def maxsim_tile(precision: str, device: torch.device, D: int) -> KernelTile:
    """The tile of the late-interaction kernel."""
    half = _MAXSIM if _MAXSIM.width >= D else _MAXSIM_WIDE
    return _tile(half, _MAXSIM_TF32, _MAXSIM_FLOAT32, _MAXSIM_SMALL, precision, device)


def maxsim_listed_tile(precision: str, device: torch.device) -> KernelTile:
    """The tile of a document's gradient: vectors of a part, and query vectors in each step."""
    small = _MAXSIM_LISTED_FLOAT32
    return _tile(_MAXSIM_LISTED, small, small, small, precision, device)


def documents_at_once(width: int, D: int) -> int:
    """Documents of up to `width` vectors whose gradients are summed before they are rounded: 256 MiB in float32."""
    return max(1, 2**26 // (width * D))


def maxsim_is_kept(rows: int, documents: int, element_bytes: int) -> bool:
    """Whether forward keeps the winners of so many query vectors for backward: 256 MiB at most."""
    return rows * documents * element_bytes <= 2 * _MAXSIM_WINNERS


def maxsim_strip(rows_of_a_query: int) -> TileSize:
    """Queries and documents of one strip of backward: 32k query vectors, and as many documents as their winners allow."""
    queries = max(1, 32768 // rows_of_a_query)
    return TileSize(queries, min(MAXSIM_DOCUMENTS, max(1, _MAXSIM_WINNERS // (queries * rows_of_a_query))))


# Bytes of a strip of gradients: half of the 512 MiB limit of a workspace, because other buffers are alive beside it. Its sides
# decide how well the tiles of dx and dy fill the multiprocessors. H200, bf16, 64k×64k, both products with fp32 sums, ms at
# D = 512 / 768 / 1024: 8192×16384 11.2 / 17.4 / 22.5, 16384×8192 11.3 / 16.7 / 23.1, 11008×16384 11.9 / 17.8 / 25.6,
# 13312×13312 12.5 / 18.7 / 25.6.
_STRIP_BYTES = 256 * 2**20


def _strip_rows(D: int) -> int:
    return 16384 if 512 < D < 1024 else 8448


# Bytes of a strip of `pair_loss`: the whole limit of a workspace. Beside the strip are the sums of dy, and the sums of dx,
# which take no more than the gradients, allocated after the strip is freed. 16,384 pairs in half precision are one strip: every
# strip costs the host two launches and two products, and such a batch waits for the host. 65,536 pairs in strips of
# 16384×16384 instead of 8192×16384, whose sums of dx and dy are read and written half as often (H200, bf16, D = 512 / 768 /
# 1024, ms): `clip_loss` 27.2 / 40.8 / 54.5 instead of 27.6 / 41.3 / 55.1, `siglip_loss` 23.0 / 32.1 / 41.5 instead of 23.2 /
# 33.0 / 42.2.
_PAIR_STRIP_BYTES = 512 * 2**20
_PAIR_STRIP_ROWS = 16384


# Pairs whose similarities kernels hold in memory at once (`triton_small`): 256 MiB in float32, and half as much for weights in
# half precision, within the 512 MiB limit of a workspace. H200, bf16, D = 512: 8,192 pairs take 0.6 to 0.8 ms in memory and 1.4
# to 1.8 over tiles, where the host needs that long; 16,384 pairs take 2.2, and 1.5 GiB, in memory and 1.6 over tiles.
SMALL_PAIRS = 8192**2
# Rows up to which its kernels form products of half precision themselves: launching a library product takes the host 50 µs.
# H200, bf16, D = 512, µs of the device with products by kernels / by the library: 24 / 29 at 256 rows, 217 / 200 at 4,096,
# 808 / 686 at 8,192; 341 / 277 at 4,096 rows with D = 1024, where the host needs more.
SMALL_PRODUCT_ROWS = 4096
_SMALL_PRODUCT_TERMS = 4096**2 * 1024  # of one product
SMALL_PRODUCT = KernelTile(rows=64, columns=64, width=128, warps=4, stages=3)  # rows × weights of a step × width of a gradient

# Rows up to which a loss of pairs over tiles computes its gradients with the loss in few launches (`operators.pair_loss`). That
# saves the host several milliseconds up to 32,768 rows. With 65,536 the GPU is busy for longer than the host, but the sums of
# dy need not be zeroed, and strips are larger: `clip_loss` takes 27.2 / 40.8 / 54.5 ms instead of 27.7 / 41.7 / 55.4 (H200,
# D = 512 / 768 / 1024), `siglip_loss` 23.0 / 32.1 / 41.5 instead of 23.9 / 33.4 / 43.0. The price is memory, 0.3 GiB.
PAIR_ROWS = 65536
# The same for the views of `nt_xent_loss`, which forms half the products with more rows (`tiles.symmetric`).
VIEW_ROWS = 32768


def small_products(N: int, D: int) -> bool:
    """Whether the kernels of a small batch form its products."""
    return N <= SMALL_PRODUCT_ROWS and N * N * D <= _SMALL_PRODUCT_TERMS


# Versions of Triton that `gluon_warp_specialized` was compiled and run with; Gluon is experimental.
_GLUON_VERSIONS = ((3, 6), (3, 9))
HOPPER_BLOCK = 128  # a tile of this many rows and columns takes half of a warpgroup's registers


@dataclass(frozen=True)
class HopperTile:
    """The panel of the warp-specialised kernel, and the division of its 192 KiB of slots into resident columns and a ring."""

    resident: int  # steps of the width whose columns stay in shared memory
    ring: int  # slots for rows and streamed columns
    width: int = 64  # of a step, and of a slot
    columns: int = HOPPER_BLOCK


def hopper_tile(block: Block, task: str) -> HopperTile | None:
    """The tile of the warp-specialised kernel if it serves `block` and was measured faster; otherwise None.

    `task` is "sums", "softmax" or "sigmoid".

    H200, bf16, 64k×64k in strips of 8192×16384, TFLOP/s at D = 512 / 768 / 1024; cuBLAS's bare product: 656 / 701 / 710.
    Sums 753 / 747 / 757, softmax weights 676 / 701 / 693, sigmoid weights 528 / 625 / 680. The Triton kernels: sums
    679 / 730 / 756 (`triton_logsumexp`), softmax weights 519 / 622 / 653 (`triton_gradient`).
    By resident steps, softmax / sigmoid / sums: D = 768, 6 steps 701 / 625 / 747, 7 steps 633 / 578 / 685, 8 steps
    563 / 522 / 617; D = 1024, 6 steps 684 / 661 / 722, 5 steps 693 / 639 / 743, 4 steps 675 / 680 / 757.
    D = 1152, 64k pairs, forward + backward, ms: `clip_loss` 65.1 by the Triton kernels, 64.0 / 63.8 / 63.8 with 4 / 3 / 5 steps
    for both passes, of which sums alone 15.2 and 15.6 / 15.6 / 15.4; `siglip_loss` 52.5 and 47.8 / 47.8 / 48.3. With 4 steps at
    D = 1536: 87.9 and 86.6, of which sums 22.9 and 21.2; `siglip_loss` 65.0 and 65.3.
    Twice as many slots of half the width: 631 / 531 / 684 at D = 512, and 0.85 of the above at 768.
    """
    half = block.precision in (BFLOAT16, FLOAT16)
    biased = block.col_bias is not None or (block.row_bias is not None and task != "sigmoid")
    excludes = block.row_ids is not None or block.limit is not None
    if block.D > 1536 or not half or biased or excludes or not has_gluon(block.x.device):
        return None
    steps = -(-block.D // 64)
    if steps <= 8:
        return HopperTile(steps, min(8, 12 - steps))
    if steps <= 12:
        return HopperTile(6, 6)
    return HopperTile(5, 7) if task == "softmax" else HopperTile(4, 8)


@cache
def panel_programs(panels: int, multiprocessors: int) -> int:
    """How many programs divide the tiles of `panels` evenly among themselves.

    Programs that work on the same rows at the same time share them in the L2 cache: 128 panels on 132 multiprocessors run at
    551 TFLOP/s with 132 programs, all at different rows, and at 684 with 128 (softmax weights, D = 1024). So a few
    multiprocessors may be left idle.
    """

    def cost(programs: int) -> float:
        starting_rows = programs // math.gcd(programs, panels)
        return (1 + min(starting_rows, 32) / 200) / programs

    return min(range(multiprocessors, multiprocessors - multiprocessors // 16 - 1, -1), key=cost)


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether the warp-specialised kernel runs on `device`: Hopper, and a tested version of Triton."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and compiles_gluon()


def compiles_gluon() -> bool:
    """Whether the installed Triton is one that the warp-specialised kernel was compiled and run with."""
    import triton

    first, after_last = _GLUON_VERSIONS
    return first <= tuple(map(int, triton.__version__.split(".")[:2])) < after_last


def tiles(length: int, size: int) -> int:
    """How many tiles of `size` cover `length`. `triton.cdiv`, which kernels may call too, takes the host 3 µs."""
    return -(-length // size)


def logsumexp_tile(precision: str, device: torch.device) -> KernelTile:
    """The tile of the logsumexp kernel."""
    return _tile(_LOGSUMEXP, _LOGSUMEXP_TF32, _LOGSUMEXP_FLOAT32, _LOGSUMEXP_SMALL, precision, device)


def gradient_tile(precision: str, device: torch.device) -> KernelTile:
    """The tile of the gradient-strip kernel."""
    return _tile(_GRADIENT, _GRADIENT_TF32, _GRADIENT_FLOAT32, _GRADIENT_SMALL, precision, device)


def _tile(
    half: KernelTile, tf32: KernelTile, float32: KernelTile, small: KernelTile, precision: str, device: torch.device
) -> KernelTile:
    if precision == FLOAT32:
        return float32
    if shared_memory(device) < _LARGE_SHARED_MEMORY:
        return replace(small, width=32) if precision == TF32 else small
    return tf32 if precision == TF32 else half


@cache
def row_splits(panels: int, rows: int, tile_rows: int, multiprocessors: int) -> tuple[int, int]:
    """(programs that split a panel's rows, rows of each): the fewest programs that leave the fewest multiprocessors idle."""
    tiles = -(-rows // tile_rows)

    def idle(splits: int) -> float:
        waves = panels * splits / multiprocessors
        return -(-panels * splits // multiprocessors) / waves

    splits = min(range(1, min(tiles, 8 + multiprocessors // panels) + 1), key=lambda count: (round(idle(count), 2), count))
    split_rows = -(-tiles // splits) * tile_rows
    return -(-rows // split_rows), split_rows


def strip_size(N: int, M: int, D: int, element_size: int) -> TileSize:
    """Rows and columns of one strip of gradients: strips of equal size, as few as the workspace allows.

    The strip's rows of dx are alive beside it, in fp32, and so is a temporary of that size: 64 MiB each at most.
    """
    rows = _even(N, min(_strip_rows(D), max(256, 2**24 // D)))
    return TileSize(rows, _even(M, _STRIP_BYTES // element_size // rows))


def pair_strip(N: int, element_size: int) -> TileSize:
    """Rows and columns of one strip of gradients of `pair_loss`."""
    rows = _even(N, _PAIR_STRIP_ROWS)
    return TileSize(rows, _even(N, _PAIR_STRIP_BYTES // element_size // rows))


def _even(length: int, most: int) -> int:
    """`length` divided into equal parts, each a multiple of 256 and at most `most`: their size."""
    parts = max(1, -(-length // (most // 256 * 256)))
    return -(-length // parts // 256) * 256


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; on a CPU, where kernels are interpreted, more than enough."""
    if device.type != "cuda":
        return 2**20
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
