"""Tiles of the kernels and the choice of a kernel, as data, each with the measurement that chose it. `plan` has the rest."""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from megabatch.tiles.block import BFLOAT16, FLOAT16, FLOAT32, TF32, Block
from megabatch.tiles.plan import TileSize


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

# Kernels of small batches that compute their matmuls (`plan.kernels_compute_matmuls`): rows × weights of a step × dims of a
# gradient.
SMALL_PRODUCT = KernelTile(rows=64, columns=64, width=128, warps=4, stages=3)

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


# Versions of Triton that `kernels.hopper` was compiled and run with; Gluon is experimental.
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
    679 / 730 / 756 (`kernels.logsumexp`), softmax weights 519 / 622 / 653 (`kernels.gradient`).
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
