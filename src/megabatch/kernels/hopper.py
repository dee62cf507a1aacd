"""The warp-specialized kernel for Hopper GPUs, written in Gluon, with its epilogues."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.device import log1p, product_less_one
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import Operands
from megabatch.kernels.plan import HopperTile
from megabatch.tiles import plan

# ----------------------------------------------------------------------------------------------------------------------
# Epilogues of the warp-specialized kernel. They turn half a tile of dot products into sums, softmax weights or sigmoid weights.
#
# Each epilogue processes 128 rows × 64 columns in registers, in the layout that the tensor cores use for their results.


@gluon.jit
def halves(s):
    """Returns the left and the right half of the columns of a tile. The values stay in their registers."""
    columns: gl.constexpr = s.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    left, right = s.reshape((s.shape[0], 2, columns)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def tile_offsets(s, n, m):
    """Returns offs_n and offs_m of half a tile that starts at (n, m)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, s.shape[1], 16])
    offs_n = n + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    return offs_n, m + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))


@gluon.jit
def _exclude(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL: gl.constexpr, EDGES: gl.constexpr, VALUE: gl.constexpr):
    """Returns t with VALUE on the diagonal and beyond the edges."""
    if SKIP_DIAGONAL:
        if (n < m + t.shape[1]) & (m < n + t.shape[0]):
            t = gl.where(offs_n[:, None] == offs_m[None, :], VALUE, _keep_branch(t))
    if EDGES:
        if (n + t.shape[0] > N) | (m + t.shape[1] > M):
            t = gl.where((offs_n < N)[:, None] & (offs_m < M)[None, :], _keep_branch(t), VALUE)
    return t


@gluon.jit
def _keep_branch(t):
    """Returns t, copied by an instruction that the compiler treats as a side effect.

    Without this copy, the compiler would compute the rare branch around it in every tile, and then select one of two results.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def tile_sums(s, k, base, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Returns row sums of 2^t, and column sums over the rows that one thread owns, (4, 8, columns)."""
    offs_n, offs_m = tile_offsets(s, n, m)
    e = gl.exp2(_exclude(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, -float("inf")))
    pairs = gl.sum(e.reshape((s.shape[0] // 16, 2, 8, s.shape[1])), 1)
    return gl.sum(e, 1), gl.sum(pairs.reshape((s.shape[0] // 64, 4, 8, s.shape[1])), 0)


@gluon.jit
def softmax(s, k, base, a, col_weight, capped, row_cap, col_cap, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Returns softmax weights. If `capped` is set, each exponential is at most its row sum and its column sum.

    Weights beyond the edges are arbitrary and are not stored.
    """
    offs_n, offs_m = tile_offsets(s, n, m)
    b = gl.load(col_weight + offs_m)
    e = gl.exp2(_exclude(s * k + base, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, False, -float("inf")))
    if capped:
        e = gl.minimum(gl.minimum(_keep_branch(e), gl.load(row_cap + offs_n)[:, None]), gl.load(col_cap + offs_m)[None, :])
    return e * (a[:, None] + b[None, :])


@gluon.jit
def negated_exponents(s, k, row_offset, n, m, N, M, SKIP_DIAGONAL: gl.constexpr):
    """Returns −t in units of log 2. A separate negation of t would take one more instruction."""
    LOG2E: gl.constexpr = 1.4426950408889634
    offs_n, offs_m = tile_offsets(s, n, m)
    t = s * (k * -LOG2E)
    if row_offset is not None:
        t += (gl.load(row_offset + gl.minimum(offs_n, N - 1)) * -LOG2E)[:, None]
    return _exclude(t, offs_n, offs_m, n, m, N, M, SKIP_DIAGONAL, True, float("inf"))


@gluon.jit
def sigmoid(t, row_weight, n, m, N):
    """Returns sigmoid weights, their row sums, and 1 − Π(1 − sigmoid) of each row, given −t from `negated_exponents`.

    `kernels.device.decode_softplus` computes the row sum of softplus from the third value. Every instruction counts, because in
    code of this length, a warp needs three or four clocks to fetch an instruction.
    """
    r = 1.0 + gl.exp2(t)  # infinite if the weight is below the range of fp32; the computed weight is then 0
    g = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [r], dtype=gl.float32, is_pure=True, pack=1)
    row_sums, product = gl.sum(g, 1), gl.reduce(g, 1, complement_product)
    if row_weight is not None:
        weight = gl.load(row_weight + gl.minimum(tile_offsets(t, n, m)[0], N - 1))
        g, row_sums = weight[:, None] * g, weight * row_sums
    return g, row_sums, product


@gluon.jit
def complement_product(a, b):
    """Returns 1 − (1 − a)·(1 − b)."""
    return (a + b) - a * b


@gluon.jit
def softplus(t):
    """Returns row sums of softplus, given −t from `negated_exponents`. The result is accurate for sums of any size."""
    e = gl.exp2(-gl.abs(t))  # exp(−|t|) cannot overflow
    return gl.sum(gl.minimum(t, 0.0), 1) * -0.6931471805599453 + log1p(gl.reduce(e, 1, product_less_one))


# ----------------------------------------------------------------------------------------------------------------------
# One warp-specialized kernel computes sums of exp(s) and gradient strips on Hopper. It needs half precision, and it does not
# support ids, limits or offsets, except the row offsets of a sigmoid.
#
# A program owns panels of BLOCK columns and loops over the rows. One producer warp copies rows and columns into a ring of slots
# in shared memory. Two consumer warpgroups take turns with the tensor cores: while one multiplies its tile, the other one runs
# the epilogue of its previous tile. The columns of a panel stay in shared memory during the whole loop. This halves the load on
# the L2 cache, which would otherwise be the limit. If the columns do not fit, only the columns of some steps of the matmul
# stay. The columns of the other steps are copied again for every tile. Programs that work on the same rows at the same time
# find these rows in the L2 cache (`kernels.plan.panel_programs`).
#
# `kernels.logsumexp` and `kernels.gradient` contain kernels that do the same computations and support all inputs.


# Epilogues.
SUMS, SOFTMAX, SIGMOID = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

BLOCK = kernel_plan.HOPPER_BLOCK


@gluon.jit
def _store_columns(folded, col_part, WHICH: gl.constexpr, START: gl.constexpr, panel, tiles_n, columns, BLOCK: gl.constexpr):
    """Stores the column sums of a panel. Each warpgroup of each program that shares the panel has its own row of `col_part`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = tiles_n.to(gl.int64) * gl.cdiv(columns, BLOCK)
    first_program = ((panel.to(gl.int64) * tiles_n + 1) * gl.num_programs(0) - 1) // tiles
    offs_m = panel * BLOCK + START + gl.arange(0, folded.shape[2], layout)
    sums = gl.convert_layout(gl.sum(gl.sum(folded, 0), 0), layout)
    offs_part = (2 * (gl.program_id(0) - first_program) + WHICH) * columns + offs_m
    gl.store(col_part + offs_part, sums, mask=offs_m < columns)


@gluon.jit
def _count_streamed(step, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """Returns how many of the steps before this one have streamed columns. Streamed steps are spread evenly over a tile."""
    return step * (STEPS - RESIDENT) // STEPS


@gluon.jit
def _is_streamed(step, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """Returns whether the columns of this step are copied for every tile. If any step is streamed, the last one is."""
    return _count_streamed(step + 1, STEPS, RESIDENT) > _count_streamed(step, STEPS, RESIDENT)


@gluon.jit
def _producer(x_desc, y_desc, slots, barriers, window, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """The producer warp. It copies resident columns for every panel, and rows and streamed columns for every tile."""
    full, empty, panel_full, panel_empty = barriers
    first_row, first_column, _rows, _columns, _N, _M, tiles_n, first_tile, last_tile = window
    RING: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = slots.shape[1]
    BLOCK_D: gl.constexpr = slots.shape[2]
    BYTES: gl.constexpr = BLOCK * BLOCK_D * 2
    index = 0
    panels = 0
    previous = -1
    for tile in range(first_tile, last_tile):
        panel = tile // tiles_n
        n, m = first_row + (tile % tiles_n) * BLOCK, first_column + panel * BLOCK
        if panel != previous:
            mbarrier.wait(panel_empty, (panels & 1) ^ 1)
            mbarrier.expect(panel_full, RESIDENT * BYTES)
            for step in range(STEPS):
                if not _is_streamed(step, STEPS, RESIDENT):
                    slot = step - _count_streamed(step, STEPS, RESIDENT)
                    tma.async_copy_global_to_shared(y_desc, [m, step * BLOCK_D], panel_full, slots.index(slot))
            previous = panel
            panels += 1
        for step in range(STEPS):
            slot = index % RING
            mbarrier.wait(empty.index(slot), ((index // RING) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(x_desc, [n, step * BLOCK_D], full.index(slot), slots.index(RESIDENT + slot))
            index += 1
            if _is_streamed(step, STEPS, RESIDENT):
                slot = index % RING
                mbarrier.wait(empty.index(slot), ((index // RING) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                tma.async_copy_global_to_shared(y_desc, [m, step * BLOCK_D], full.index(slot), slots.index(RESIDENT + slot))
                index += 1


@gluon.jit
def _consumer(
    WHICH: gl.constexpr,
    slots,
    barriers,
    turns,
    staging,
    g_desc,
    vectors,
    window,
    KIND: gl.constexpr,
    SKIP_DIAGONAL: gl.constexpr,
    STEPS: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """One of the two consumer warpgroups. It multiplies every second tile and runs the epilogue of the tile."""
    full, empty, panel_full, panel_empty = barriers
    exponent_scale, row_offset, row_weight, col_weight, row_cap, col_cap, softplus_part, row_part, col_part = vectors
    first_row, first_column, rows, columns, N, M, tiles_n, first_tile, last_tile = window
    RING: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = slots.shape[1]
    HALF: gl.constexpr = BLOCK // 2  # columns of one epilogue
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16]))
    k, base, capped = gl.load(exponent_scale), gl.load(exponent_scale + 2), gl.load(exponent_scale + 3) != 0
    first_panel, last_panel = first_tile // tiles_n, gl.maximum(last_tile - 1, first_tile) // tiles_n
    previous = (first_tile + WHICH) // tiles_n
    released = first_panel
    turn = 1 - WHICH
    if KIND == SUMS:
        zeros = halves(gl.zeros((BLOCK, BLOCK), gl.float32, layout))[0]
        left_columns = tile_sums(zeros, k, -float("inf"), 0, 0, N, M, False)[1]  # zeros in the layout of the sums
        right_columns = left_columns
    for tile in range(first_tile + WHICH, last_tile, 2):
        panel = tile // tiles_n
        n, m = first_row + (tile % tiles_n) * BLOCK, first_column + panel * BLOCK
        for done in range(released, panel):
            mbarrier.wait(panel_full, (done - first_panel) & 1)
            mbarrier.arrive(panel_empty)
        released = panel
        if KIND == SOFTMAX:  # loaded while the tile is multiplied
            offs_n = n + gl.arange(0, BLOCK, row_layout)
            a = gl.load(row_weight + offs_n)
        mbarrier.wait(panel_full, (panel - first_panel) & 1)
        # The parity of a barrier distinguishes only two consecutive rounds of the ring. So a warpgroup must not wait for a slot
        # before the other warpgroup has passed all slots of its tile. Otherwise it could read the slot in a wrong round.
        mbarrier.wait(turns.index(WHICH), turn & 1)
        turn += 1
        index = (tile - first_tile) * (2 * STEPS - RESIDENT)
        s = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        for step in range(STEPS):
            x_slot = index % RING
            mbarrier.wait(full.index(x_slot), (index // RING) & 1)
            y_slot = step - _count_streamed(step, STEPS, RESIDENT)
            if _is_streamed(step, STEPS, RESIDENT):
                y_slot = RESIDENT + (index + 1) % RING
                mbarrier.wait(full.index((index + 1) % RING), ((index + 1) // RING) & 1)
            s = warpgroup_mma(slots.index(RESIDENT + x_slot), slots.index(y_slot).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            if step > 0:  # the matmul of the previous step is finished
                mbarrier.arrive(empty.index((index - 1) % RING))
                if _is_streamed(step - 1, STEPS, RESIDENT):
                    mbarrier.arrive(empty.index((index - 2) % RING))
            index += 1
            if _is_streamed(step, STEPS, RESIDENT):
                index += 1
        mbarrier.arrive(turns.index(1 - WHICH))
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(empty.index((index - 1) % RING))
        if STEPS > RESIDENT:
            mbarrier.arrive(empty.index((index - 2) % RING))

        left, right = halves(s)
        offs_n = tile_offsets(left, n, m)[0]
        offs_part, mask_n = panel.to(gl.int64) * rows + (offs_n - first_row), offs_n < N
        if KIND == SUMS:
            if panel != previous:
                _store_columns(left_columns, col_part, WHICH, 0, previous, tiles_n, columns, BLOCK)
                _store_columns(right_columns, col_part, WHICH, HALF, previous, tiles_n, columns, BLOCK)
                left_columns, right_columns = left_columns * 0.0, right_columns * 0.0
                previous = panel
            left_rows, folded = tile_sums(left, k, base, n, m, N, M, SKIP_DIAGONAL)
            left_columns += folded
            right_rows, folded = tile_sums(right, k, base, n, m + HALF, N, M, SKIP_DIAGONAL)
            right_columns += folded
            gl.store(row_part + offs_part, left_rows + right_rows, mask=mask_n)
        else:
            row_sums = gl.zeros_like(offs_n).to(gl.float32)
            product = row_sums
            if KIND == SIGMOID:
                left = negated_exponents(left, k, row_offset, n, m, N, M, SKIP_DIAGONAL)
                right = negated_exponents(right, k, row_offset, n, m + HALF, N, M, SKIP_DIAGONAL)
            for half in gl.static_range(2):
                part = left if half == 0 else right
                mh = m + half * HALF
                if KIND == SOFTMAX:
                    g = softmax(part, k, base, a, col_weight, capped, row_cap, col_cap, n, mh, N, M, SKIP_DIAGONAL)
                else:
                    g, added, more = sigmoid(part, row_weight, n, mh, N)
                    row_sums += added
                    product = complement_product(product, more)
                if g_desc is not None:
                    tma.store_wait(0)
                    staging.store(g.to(g_desc.dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(g_desc, [n - first_row, mh - first_column], staging)
            if row_part is not None:
                gl.store(row_part + offs_part, row_sums, mask=mask_n)
            if softplus_part is not None:
                if gl.max(product, 0) > 0.5:  # the product of 1 − sigmoid has lost digits, so the sums are computed from t
                    product = -(softplus(left) + softplus(right))
                gl.store(softplus_part + offs_part, product, mask=mask_n)
    for done in range(released, last_panel):  # the other warpgroup may still need the next panel
        mbarrier.wait(panel_full, (done - first_panel) & 1)
        mbarrier.arrive(panel_empty)
    if KIND == SUMS:
        if first_tile + WHICH < last_tile:
            _store_columns(left_columns, col_part, WHICH, 0, previous, tiles_n, columns, BLOCK)
            _store_columns(right_columns, col_part, WHICH, HALF, previous, tiles_n, columns, BLOCK)
    elif g_desc is not None:
        tma.store_wait(0)


@gluon.jit
def _warp_specialized_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    g_desc,  # (rows, columns), or None
    exponent_scale,  # (4,)
    row_offset,  # (N,) or None
    row_weight,  # (N,) or None
    col_weight,  # (M,) or None
    row_cap,  # (N,) or None
    col_cap,  # (M,) or None; for a softmax, weights and caps are padded by `pad_to_tiles`
    softplus_part,  # (panels, rows) in the form of `decode_softplus`, or None
    row_part,  # (panels, rows) or None
    col_part,  # (2 · programs that share a panel, columns) or None
    first_row,
    first_column,
    rows,
    columns,
    N,
    M,
    KIND: gl.constexpr,
    SKIP_DIAGONAL: gl.constexpr,
    STEPS: gl.constexpr,
    RESIDENT: gl.constexpr,
    RING: gl.constexpr,
    BLOCK: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    tiles_n = gl.cdiv(rows, BLOCK)
    tiles = tiles_n.to(gl.int64) * gl.cdiv(columns, BLOCK)
    first_tile = (tiles * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    last_tile = (tiles * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    slots = gl.allocate_shared_memory(x_desc.dtype, [RESIDENT + RING, BLOCK, BLOCK_D], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    panel_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    panel_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if g_desc is not None:
        staging0 = gl.allocate_shared_memory(g_desc.dtype, [BLOCK, BLOCK // 2], g_desc.layout)
        staging1 = gl.allocate_shared_memory(g_desc.dtype, [BLOCK, BLOCK // 2], g_desc.layout)
    else:
        staging0 = slots.index(0)
        staging1 = slots.index(0)
    for slot in gl.static_range(RING):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.init(panel_full, count=1)
    mbarrier.init(panel_empty, count=2)
    fence_async_shared()
    barriers = (full, empty, panel_full, panel_empty)
    vectors = (exponent_scale, row_offset, row_weight, col_weight, row_cap, col_cap, softplus_part, row_part, col_part)
    window = (first_row, first_column, rows, columns, N, M, tiles_n, first_tile, last_tile)
    gl.warp_specialize(
        [
            (_consumer, (0, slots, barriers, turns, staging0, g_desc, vectors, window, KIND, SKIP_DIAGONAL, STEPS, RESIDENT)),
            (_consumer, (1, slots, barriers, turns, staging1, g_desc, vectors, window, KIND, SKIP_DIAGONAL, STEPS, RESIDENT)),
            (_producer, (x_desc, y_desc, slots, barriers, window, STEPS, RESIDENT)),
        ],
        [4, 1],
        [240, 24],
    )


class _Vectors(NamedTuple):
    """Optional arguments of the kernel, in the order of its parameters."""

    row_offset: Tensor | None = None
    row_weight: Tensor | None = None
    col_weight: Tensor | None = None
    row_cap: Tensor | None = None
    col_cap: Tensor | None = None
    softplus_part: Tensor | None = None
    row_part: Tensor | None = None
    col_part: Tensor | None = None


def sums(
    tile: HopperTile,
    operands: Operands,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) receives the partial row sums
    skip_diagonal: bool,
) -> Tensor:  # (partial sums, m)
    """Writes partial row sums of 2^t and returns partial column sums."""
    # Each program that may share a panel has two rows of `col_part`, one for each warpgroup.
    sharing = 2 * (kernel_plan.multiprocessors(operands.x.device) // len(row_part) + 2)
    col_part = torch.zeros(sharing, columns.stop - columns.start, dtype=torch.float32, device=operands.x.device)
    _launch(SUMS, tile, operands, rows, columns, skip_diagonal, _Vectors(row_part=row_part, col_part=col_part))
    return col_part


def softmax_weights(
    tile: HopperTile,
    operands: Operands,
    row: tuple[Tensor | None, Tensor | None],  # (N,) weights and caps
    col: tuple[Tensor | None, Tensor | None],  # (M,) weights and caps
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) receives the weights
    skip_diagonal: bool,
) -> None:
    """Computes g = min(2^t, caps) · (row weight + column weight). Caps apply only if an exponent may be above `CAPPED_ABOVE`.

    The kernel does not compute row or column sums of g, because only bias gradients need them, and `kernels.plan.hopper_tile`
    rejects biases.
    """
    vectors = _Vectors(row_weight=row[0], col_weight=col[0], row_cap=row[1], col_cap=col[1])
    _launch(SOFTMAX, tile, operands, rows, columns, skip_diagonal, vectors, g)


def sigmoid_weights(
    tile: HopperTile,
    operands: Operands,
    row_weight: Tensor | None,  # (N,), or None if all weights are 1
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) receives the weights
    parts: tuple[Tensor | None, Tensor | None],  # (panels, n) each, receive partial row sums of softplus, and of g
    skip_diagonal: bool,
) -> None:
    """Computes g = row weight · sigmoid(t), and partial row sums for `add_partial_sums`."""
    vectors = _Vectors(operands.row_offset, row_weight, softplus_part=parts[0], row_part=parts[1])
    _launch(SIGMOID, tile, operands, rows, columns, skip_diagonal, vectors, g)


def _launch(
    kind: gl.constexpr,
    tile: HopperTile,
    operands: Operands,
    rows: slice,
    columns: slice,
    skip_diagonal: bool,
    vectors: _Vectors,
    g: Tensor | None = None,
) -> None:
    panels = plan.tiles(columns.stop - columns.start, BLOCK)
    launch(
        _warp_specialized_kernel,
        (kernel_plan.panel_programs(panels, kernel_plan.multiprocessors(operands.x.device)),),
        (
            _descriptor(operands.x, tile.dims),
            _descriptor(operands.y, tile.dims),
            None if g is None else _descriptor(g, BLOCK // 2),
            operands.exponent_scale,
            *vectors,
        ),
        (
            rows.start,
            columns.start,
            rows.stop - rows.start,
            columns.stop - columns.start,
            len(operands.x),
            len(operands.y),
        ),
        KIND=kind.value,
        SKIP_DIAGONAL=skip_diagonal,
        STEPS=plan.tiles(operands.x.shape[1], tile.dims),
        RESIDENT=tile.resident,
        RING=tile.ring,
        BLOCK=BLOCK,
        BLOCK_D=tile.dims,
        num_warps=4,
    )


_GLUON_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(values: Tensor, columns: int) -> TensorDescriptor:
    shape = [BLOCK, columns]
    return TensorDescriptor(values, list(values.shape), list(values.stride()), shape, _layout(values.dtype, columns))


@cache
def _layout(dtype: torch.dtype, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK, columns], _GLUON_DTYPE[dtype])
