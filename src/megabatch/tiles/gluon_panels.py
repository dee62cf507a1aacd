"""Both kernels over the similarities once more, warp-specialised, for Hopper: plain inputs, half precision.

A program owns a panel of BLOCK columns and marches down the rows. One warp copies into a ring of slots; two warpgroups take
turns with the tensor cores: while one multiplies its tile, the other turns the one before into sums or weights. The panel stays
in shared memory, or as many steps of its width as fit; the others are copied for every tile. Columns that stay halve what is
asked of the L2 cache, which would otherwise set the pace; programs that march in step find their rows in it
(`plan.panel_programs`).

`triton_forward` and `triton_backward` say what is computed, and serve everything that is not served here.
"""

from functools import cache

import torch
import triton
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

from megabatch.tiles import gluon_pieces as pieces
from megabatch.tiles import plan
from megabatch.tiles.plan import Panel
from megabatch.tiles.triton_operands import Operands

# What a tile of exponents becomes.
SUMS, SOFTMAX, SIGMOID = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

BLOCK = 128  # a tile is BLOCK × BLOCK: half of a warpgroup's registers


@gluon.jit
def _store_columns(folded, col_part, WHICH: gl.constexpr, START: gl.constexpr, panel, tiles_n, columns, BLOCK: gl.constexpr):
    """Column sums of what this warpgroup saw of a panel. Programs that share a panel have rows of `col_part` of their own."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles = tiles_n.to(gl.int64) * gl.cdiv(columns, BLOCK)
    first_program = ((panel.to(gl.int64) * tiles_n + 1) * gl.num_programs(0) - 1) // tiles
    offs_m = panel * BLOCK + START + gl.arange(0, folded.shape[2], layout)
    sums = gl.convert_layout(gl.sum(gl.sum(folded, 0), 0), layout)
    place = (2 * (gl.program_id(0) - first_program) + WHICH) * columns + offs_m
    gl.store(col_part + place, sums, mask=offs_m < columns)


@gluon.jit
def _passed(step, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """How many of the steps before this one have columns that do not stay: spread evenly, so that copies come evenly too."""
    return step * (STEPS - RESIDENT) // STEPS


@gluon.jit
def _passes(step, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """Whether the columns of this step are copied for every tile. Where some are, those of the last step are."""
    return _passed(step + 1, STEPS, RESIDENT) > _passed(step, STEPS, RESIDENT)


@gluon.jit
def _copy(x_desc, y_desc, slots, barriers, where, STEPS: gl.constexpr, RESIDENT: gl.constexpr):
    """The copying warp: columns that stay whenever the panel changes, rows and the other columns for every tile."""
    full, empty, panel_full, panel_empty = barriers
    first_row, first_column, _rows, _columns, _N, _M, tiles_n, first_tile, last_tile = where
    RING: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = slots.shape[1]
    BLOCK_D: gl.constexpr = slots.shape[2]
    BYTES: gl.constexpr = BLOCK * BLOCK_D * 2
    index = 0
    panels = 0
    before = -1
    for tile in range(first_tile, last_tile):
        panel = tile // tiles_n
        n, m = first_row + (tile % tiles_n) * BLOCK, first_column + panel * BLOCK
        if panel != before:
            mbarrier.wait(panel_empty, (panels & 1) ^ 1)
            mbarrier.expect(panel_full, RESIDENT * BYTES)
            for step in range(STEPS):
                if not _passes(step, STEPS, RESIDENT):
                    slot = step - _passed(step, STEPS, RESIDENT)
                    tma.async_copy_global_to_shared(y_desc, [m, step * BLOCK_D], panel_full, slots.index(slot))
            before = panel
            panels += 1
        for step in range(STEPS):
            slot = index % RING
            mbarrier.wait(empty.index(slot), ((index // RING) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            tma.async_copy_global_to_shared(x_desc, [n, step * BLOCK_D], full.index(slot), slots.index(RESIDENT + slot))
            index += 1
            if _passes(step, STEPS, RESIDENT):
                slot = index % RING
                mbarrier.wait(empty.index(slot), ((index // RING) & 1) ^ 1)
                mbarrier.expect(full.index(slot), BYTES)
                tma.async_copy_global_to_shared(y_desc, [m, step * BLOCK_D], full.index(slot), slots.index(RESIDENT + slot))
                index += 1


@gluon.jit
def _work(
    WHICH: gl.constexpr,
    slots,
    barriers,
    turns,
    staging,
    g_desc,
    given,
    where,
    KIND: gl.constexpr,
    SKIP_DIAGONAL: gl.constexpr,
    STEPS: gl.constexpr,
    RESIDENT: gl.constexpr,
):
    """One of the two warpgroups: every other tile."""
    full, empty, panel_full, panel_empty = barriers
    exponent_scale, row_offset, row_weight, col_weight, row_cap, col_cap, softplus_part, row_part, col_part = given
    first_row, first_column, rows, columns, N, M, tiles_n, first_tile, last_tile = where
    RING: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = slots.shape[1]
    HALF: gl.constexpr = BLOCK // 2  # columns that are finished at once
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    k, base = gl.load(exponent_scale), gl.load(exponent_scale + 2)
    first_panel, last_panel = first_tile // tiles_n, gl.maximum(last_tile - 1, first_tile) // tiles_n
    before = (first_tile + WHICH) // tiles_n
    released = first_panel
    turn = 1 - WHICH
    if KIND == SUMS:
        nothing = pieces.halves(gl.zeros((BLOCK, BLOCK), gl.float32, layout))[0]
        left_columns = pieces.sums(nothing, k, -float("inf"), 0, 0, N, M, False)[1]  # zeros, laid out as what will be added
        right_columns = left_columns
    for tile in range(first_tile + WHICH, last_tile, 2):
        panel = tile // tiles_n
        n, m = first_row + (tile % tiles_n) * BLOCK, first_column + panel * BLOCK
        for done in range(released, panel):
            mbarrier.wait(panel_full, (done - first_panel) & 1)
            mbarrier.arrive(panel_empty)
        released = panel
        mbarrier.wait(panel_full, (panel - first_panel) & 1)
        # Parities tell only two rounds of the ring apart: nobody may wait for a slot before the other has had all of his.
        mbarrier.wait(turns.index(WHICH), turn & 1)
        turn += 1
        index = (tile - first_tile) * (2 * STEPS - RESIDENT)
        s = gl.zeros((BLOCK, BLOCK), gl.float32, layout)
        for step in range(STEPS):
            x_slot = index % RING
            mbarrier.wait(full.index(x_slot), (index // RING) & 1)
            y_slot = step - _passed(step, STEPS, RESIDENT)
            if _passes(step, STEPS, RESIDENT):
                y_slot = RESIDENT + (index + 1) % RING
                mbarrier.wait(full.index((index + 1) % RING), ((index + 1) // RING) & 1)
            s = warpgroup_mma(slots.index(RESIDENT + x_slot), slots.index(y_slot).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            if step > 0:  # the product before this one is finished
                mbarrier.arrive(empty.index((index - 1) % RING))
                if _passes(step - 1, STEPS, RESIDENT):
                    mbarrier.arrive(empty.index((index - 2) % RING))
            index += 1
            if _passes(step, STEPS, RESIDENT):
                index += 1
        mbarrier.arrive(turns.index(1 - WHICH))
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(empty.index((index - 1) % RING))
        if STEPS > RESIDENT:
            mbarrier.arrive(empty.index((index - 2) % RING))

        left, right = pieces.halves(s)
        offs_n = pieces.places(left, n, m)[0]
        place, mask_n = panel.to(gl.int64) * rows + (offs_n - first_row), offs_n < N
        if KIND == SUMS:
            if panel != before:
                _store_columns(left_columns, col_part, WHICH, 0, before, tiles_n, columns, BLOCK)
                _store_columns(right_columns, col_part, WHICH, HALF, before, tiles_n, columns, BLOCK)
                left_columns, right_columns = left_columns * 0.0, right_columns * 0.0
                before = panel
            left_rows, folded = pieces.sums(left, k, base, n, m, N, M, SKIP_DIAGONAL)
            left_columns += folded
            right_rows, folded = pieces.sums(right, k, base, n, m + HALF, N, M, SKIP_DIAGONAL)
            right_columns += folded
            gl.store(row_part + place, left_rows + right_rows, mask=mask_n)
        else:
            row_sums = gl.zeros_like(offs_n).to(gl.float32)
            product = row_sums
            if KIND == SIGMOID:
                left = pieces.negated(left, k, row_offset, n, m, N, M, SKIP_DIAGONAL)
                right = pieces.negated(right, k, row_offset, n, m + HALF, N, M, SKIP_DIAGONAL)
            for half in gl.static_range(2):
                part = left if half == 0 else right
                mh = m + half * HALF
                if KIND == SOFTMAX:
                    g = pieces.softmax(part, k, base, row_weight, col_weight, row_cap, col_cap, n, mh, N, M, SKIP_DIAGONAL)
                else:
                    g, added, more = pieces.sigmoid(part, row_weight, n, mh, N)
                    row_sums += added
                    product = pieces.either(product, more)
                if g_desc is not None:
                    tma.store_wait(0)
                    staging.store(g.to(g_desc.dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(g_desc, [n - first_row, mh - first_column], staging)
            if row_part is not None:
                gl.store(row_part + place, row_sums, mask=mask_n)
            if softplus_part is not None:
                if gl.max(product, 0) > 0.5:  # a product of 1 − sigmoid that has lost digits
                    product = -(pieces.softplus(left) + pieces.softplus(right))
                gl.store(softplus_part + place, product, mask=mask_n)
    for done in range(released, last_panel):  # the other warpgroup may still need the next panel
        mbarrier.wait(panel_full, (done - first_panel) & 1)
        mbarrier.arrive(panel_empty)
    if KIND == SUMS:
        if first_tile + WHICH < last_tile:
            _store_columns(left_columns, col_part, WHICH, 0, before, tiles_n, columns, BLOCK)
            _store_columns(right_columns, col_part, WHICH, HALF, before, tiles_n, columns, BLOCK)
    elif g_desc is not None:
        tma.store_wait(0)


@gluon.jit
def _panels(
    x_desc,
    y_desc,
    g_desc,  # (rows, columns), or None
    exponent_scale,  # (3,)
    row_offset,  # (N,) or None
    row_weight,  # (N,) or None
    col_weight,  # (M,) or None
    row_cap,  # (N,) or None
    col_cap,  # (M,) or None
    softplus_part,  # (panels, rows) for `triton_rows.add_parts`, or None
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
    given = (exponent_scale, row_offset, row_weight, col_weight, row_cap, col_cap, softplus_part, row_part, col_part)
    where = (first_row, first_column, rows, columns, N, M, tiles_n, first_tile, last_tile)
    gl.warp_specialize(
        [
            (_work, (0, slots, barriers, turns, staging0, g_desc, given, where, KIND, SKIP_DIAGONAL, STEPS, RESIDENT)),
            (_work, (1, slots, barriers, turns, staging1, g_desc, given, where, KIND, SKIP_DIAGONAL, STEPS, RESIDENT)),
            (_copy, (x_desc, y_desc, slots, barriers, where, STEPS, RESIDENT)),
        ],
        [4, 1],
        [240, 24],
    )


def sums(
    panel: Panel,
    given: Operands,
    rows: slice,
    columns: slice,
    row_part: Tensor,  # (panels, n) written
    skip_diagonal: bool,
) -> Tensor:  # (some, m)
    """Partial row sums of 2^t, and partial column sums, which are returned."""
    sharing = 2 * (plan.multiprocessors(given.x.device) // len(row_part) + 2)  # programs that may share a panel
    col_part = torch.zeros(sharing, columns.stop - columns.start, dtype=torch.float32, device=given.x.device)
    _launch(SUMS, panel, given, rows, columns, skip_diagonal, row_part=row_part, col_part=col_part)
    return col_part


def softmax_weights(
    panel: Panel,
    given: Operands,
    of_rows: tuple[Tensor | None, Tensor | None],  # (N,) weights and caps
    of_columns: tuple[Tensor | None, Tensor | None],  # (M,)
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) written
    skip_diagonal: bool,
) -> None:
    """g = min(2^t, caps) · (row weight + column weight). Nothing is summed: only biases ask for that, and `plan.panel` sends
    them away.
    """
    (row_weight, row_cap), (col_weight, col_cap) = of_rows, of_columns
    vectors = {"row_weight": row_weight, "col_weight": col_weight, "row_cap": row_cap, "col_cap": col_cap}
    _launch(SOFTMAX, panel, given, rows, columns, skip_diagonal, g, **vectors)


def sigmoid_weights(
    panel: Panel,
    given: Operands,
    row_weight: Tensor | None,  # (N,), or 1
    rows: slice,
    columns: slice,
    g: Tensor | None,  # (n, m) written
    parts: tuple[Tensor | None, Tensor | None],  # (panels, n) each, written: row sums of softplus, and of g
    skip_diagonal: bool,
) -> None:
    """g = row weight · sigmoid(t), and partial row sums, of softplus and of g, for `triton_rows.add_parts`."""
    given_rows = {"row_offset": given.row_offset, "row_weight": row_weight, "softplus_part": parts[0], "row_part": parts[1]}
    _launch(SIGMOID, panel, given, rows, columns, skip_diagonal, g, **given_rows)


def _launch(
    kind: gl.constexpr,
    panel: Panel,
    given: Operands,
    rows: slice,
    columns: slice,
    skip_diagonal: bool,
    g: Tensor | None = None,
    *,
    row_offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    col_weight: Tensor | None = None,
    row_cap: Tensor | None = None,
    col_cap: Tensor | None = None,
    softplus_part: Tensor | None = None,
    row_part: Tensor | None = None,
    col_part: Tensor | None = None,
) -> None:
    panels = triton.cdiv(columns.stop - columns.start, BLOCK)
    _panels[(plan.panel_programs(panels, plan.multiprocessors(given.x.device)),)](
        _descriptor(given.x, panel.width),
        _descriptor(given.y, panel.width),
        None if g is None else _descriptor(g, BLOCK // 2),
        given.exponent_scale,
        row_offset,
        row_weight,
        col_weight,
        row_cap,
        col_cap,
        softplus_part,
        row_part,
        col_part,
        rows.start,
        columns.start,
        rows.stop - rows.start,
        columns.stop - columns.start,
        len(given.x),
        len(given.y),
        KIND=kind,
        SKIP_DIAGONAL=skip_diagonal,
        STEPS=triton.cdiv(given.x.shape[1], panel.width),
        RESIDENT=panel.resident,
        RING=panel.ring,
        BLOCK=BLOCK,
        BLOCK_D=panel.width,
        num_warps=4,
    )


_KIND = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(values: Tensor, columns: int) -> TensorDescriptor:
    shape = [BLOCK, columns]
    return TensorDescriptor(values, list(values.shape), list(values.stride()), shape, _layout(values.dtype, columns))


@cache
def _layout(dtype: torch.dtype, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK, columns], _KIND[dtype])
