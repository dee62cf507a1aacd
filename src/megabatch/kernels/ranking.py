"""Kernels without a gradient: the k largest logits of each row, and retrieval ranks of matching pairs."""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.kernels import plan as kernel_plan
from megabatch.kernels.device import equal_ids, offsets
from megabatch.kernels.launch import launch
from megabatch.kernels.operands import Operands, dot_precision, logit_operands, matching_products
from megabatch.tiles.block import HALF_DTYPE, Block, RankTargets, targets_on_the_diagonal, windows
from megabatch.tiles.eager import rank_noise
from megabatch.tiles.sums import Best

# ----------------------------------------------------------------------------------------------------------------------
# The k largest dot products of each row, at nearly the speed of the matmul only.
#
# One kernel computes each tile once. It stores the largest dot product of every group of columns, and of every panel of groups.
# The k panels with the largest maxima contain the k best groups, and these contain the k best columns, because a column in
# another group comes after the k maxima. Panels and groups consist of consecutive columns. They are ordered by maximum and
# then by index. Only the dot products of the k groups are computed again. If they would be too many, the kernel also stores all
# dot products, and none is computed again (`kernels.plan.topk_group`).
#
# Each choice is made by one launch of a second kernel, in registers. It finds the k-th largest value bit by bit. If several
# values are equal to it, a running count selects the first of them. The chosen columns stay in the order of their indices until
# the end, when the k best columns are sorted.
#
# A dot product that is computed twice is rounded in two ways. Without a limit, this affects only the order of columns whose dot
# products are equal up to rounding. With a limit, a column may be below the limit in the first pass and above it in the second.
# A place among the k best groups is then wasted, and a better column of another group may be lost. Such a column is above the
# limit by at most the rounding error of two dot products (`_noise`). Rows with a column in this range are searched again, with
# stored dot products.

_COLUMNS_PER_PROGRAM = 32  # columns whose dot products one program of `_group_products_kernel` computes


@triton.jit
def _maxima_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    group_maxima,  # (rows of this launch, groups)
    panel_maxima,  # (rows of this launch, panels)
    products,  # (rows of this launch, tiles · BLOCK_M), or None
    first_row,
    last_row,
    first_column,
    tiles_m,
    N,
    M,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PANEL: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_M // GROUP
    PANELS: tl.constexpr = BLOCK_M // PANEL
    HALF: tl.constexpr = BLOCK_M // 2
    tiles_n = tl.cdiv(last_row - first_row, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_m, PROGRAMS, flatten=True):
        tile_m = tile // tiles_n  # so programs that run at the same time share columns
        n, m = first_row + (tile % tiles_n) * BLOCK_N, first_column + tile_m * BLOCK_M
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
        offs_n, offs_m = n + tl.arange(0, BLOCK_N), m + tl.arange(0, BLOCK_M)
        # This addition has no branch. With a branch, ptxas would make every matmul wait for the previous one.
        s = s + offsets(None, 0.0, offs_m, M, 0)
        if row_ids is not None:
            s = tl.where(equal_ids(row_ids, col_ids, offs_n, offs_m, N, M), -float("inf"), s)
        if limit is not None:
            highest = tl.load(limit + offs_n, mask=offs_n < N, other=0.0)
            s = tl.where(s > highest[:, None], -float("inf"), s)
        if SKIP_DIAGONAL:
            if (n < m + BLOCK_M) & (m < n + BLOCK_N):
                s = tl.where(offs_n[:, None] == offs_m[None, :], -float("inf"), s)
        place = (offs_n - first_row).to(tl.int64)[:, None] * tiles_m + tile_m
        mask_n = (offs_n < last_row)[:, None]
        largest = tl.max(s.reshape(BLOCK_N, GROUPS, GROUP), 2)  # ignores NaN, unless all values are NaN
        tl.store(group_maxima + place * GROUPS + tl.arange(0, GROUPS)[None, :], largest, mask=mask_n)
        largest = tl.max(largest.reshape(BLOCK_N, PANELS, PANEL // GROUP), 2)
        tl.store(panel_maxima + place * PANELS + tl.arange(0, PANELS)[None, :], largest, mask=mask_n)
        if products is not None:
            # The tile is stored in two halves, because a store of the full tile needs more shared memory.
            left, right = s.reshape(BLOCK_N, 2, HALF).permute(0, 2, 1).split()
            out = products + place * BLOCK_M + tl.arange(0, HALF)[None, :]
            tl.store(out, left, mask=mask_n)
            tl.store(out + HALF, right, mask=mask_n)


@triton.jit
def _group_products_kernel(
    x,  # (N, D)
    y,  # (M, D)
    chosen,  # (rows of this launch, k) int32 indices of groups, −1 for none
    products,  # (rows of this launch, k · GROUP)
    first_row,
    first_column,
    M,
    x_stride,
    y_stride,
    k,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = offs < k * GROUP
    group = tl.load(chosen + row * k + offs // GROUP, exists, -1)
    offs_m = first_column + group * GROUP + offs % GROUP
    mask_m = (offs_m < M) & (group >= 0)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        own = tl.load(x + (first_row + row) * x_stride + offs_d, mask_d, 0.0)
        others = tl.load(y + offs_m.to(tl.int64)[:, None] * y_stride + offs_d[None, :], mask_m[:, None] & mask_d[None, :], 0.0)
        total += own.to(tl.float32)[None, :] * others.to(tl.float32)
    tl.store(products + row * k * GROUP + offs, tl.where(mask_m, tl.sum(total, 1), -float("inf")), exists)


@triton.jit
def _choice_kernel(
    values,  # (n, stride)
    runs,  # (n, m / RUN) int32 indices of runs of values, −1 for none; None if all values of a row are candidates
    found_values,  # (n, k) or None
    found_indices,  # (n, k)
    stride,
    m,  # number of candidates of a row
    k,
    RUN: tl.constexpr,
    GATHERED: tl.constexpr,  # whether `values` contains only the candidates, one run after another
    BLOCK: tl.constexpr,
):
    """Stores the k best candidates of a row in the order of their indices.

    A candidate that is NaN or −inf gets the value −inf and the index −1.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    exists, index = offs < m, offs
    if runs is not None:
        run = tl.load(runs + row * (m // RUN) + offs // RUN, exists, -1)
        exists, index = run >= 0, run * RUN + offs % RUN
    v = tl.load(values + row * stride + (offs if GATHERED else index), exists, -float("inf"))
    v = tl.where(v == v, v, -float("inf")) + 0.0  # adding 0.0 turns −0, which has different bits, into 0
    bits = v.to(tl.uint32, bitcast=True)
    ordered = bits ^ tl.where(bits >> 31 == 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)  # unsigned, and sorts like the values
    ordered = tl.where(offs < m, ordered, 0)  # less than −inf

    last = tl.zeros((), tl.uint32)  # the k-th largest number, which is the largest one that at least k candidates reach
    bit, reached = tl.full((), 0x80000000, tl.uint32), m
    while (bit > 0) & (reached != k):
        trial = last | bit
        count = tl.sum((ordered >= trial).to(tl.int32), 0)
        last, reached = tl.where(count >= k, trial, last), tl.where(count >= k, count, reached)
        bit = bit >> 1
    above = (ordered > last) & (offs < m)
    equal = (ordered == last) & (offs < m)
    counts = tl.cumsum((above.to(tl.int32) << 16) + equal.to(tl.int32), 0)  # m is at most 2¹⁵
    free = k - tl.sum(above.to(tl.int32), 0)
    equals = counts & 0xFFFF
    place = (counts >> 16) + tl.minimum(equals, free) - 1
    taken = above | (equal & (equals <= free))
    found = tl.where(v == -float("inf"), -1, index)
    tl.store(found_indices + row * k + place, found, taken)
    if found_values is not None:
        tl.store(found_values + row * k + place, v, taken)


def topk(block: Block, k: int) -> Best:  # (N, k)
    """Returns the k largest dot products ⟨x_i, y_j⟩ of each row, like `eager.topk`."""
    best, is_unsure = _search(block, k, kernel_plan.topk_group(block.M, block.D, k))
    if is_unsure is not None and len(rows := is_unsure.nonzero().flatten()):
        best.values[rows], best.indices[rows] = _search(_select_rows(block, rows), k, None)[0]
    return best


def _search(block: Block, k: int, group: int | None) -> tuple[Best, Tensor | None]:  # (N, k), (N,) bool
    """Returns the best columns of each row. With a limit, also returns a mask of the rows that may miss such a column.

    A row may miss a column if a dot product was computed twice. Without `group`, no dot product is computed twice.
    """
    operands = logit_operands(block)
    best = Best.none(block.N, k, block.zeros(0))
    noise = None if block.limit is None or group is None else _noise(operands)
    is_unsure = None if noise is None else torch.zeros_like(noise, dtype=torch.bool)
    strip = kernel_plan.topk_strip(block.N, block.M, group)
    for rows in windows(block.N, strip.rows):
        merged = Best(best.values[rows], best.indices[rows])
        for columns in windows(block.M, strip.columns):
            part = merged if columns.start == 0 else Best.none(len(merged.values), k, merged.values)
            if group is None:
                _choose_from_stored(part, block, operands, rows, columns)
            else:
                groups, panels, _ = _maxima(block, operands, rows, columns, group)
                chosen = _best_groups(groups, panels, k)
                s = _products(block, operands, rows, columns, chosen, group)
                if noise is not None and is_unsure is not None and block.limit is not None:
                    limit = block.limit[rows, None]
                    above = s > limit
                    is_unsure[rows] |= (above & (s <= limit + noise[rows, None])).any(1)
                    s.masked_fill_(above, -torch.inf)
                _choose(*part, s, chosen, group, gathered=True)
            if columns.start > 0:
                part.indices.add_(columns.start).masked_fill_(part.values == -torch.inf, -1)
                values, indices = (torch.cat(both, 1) for both in zip(merged, part, strict=True))  # in the order of columns
                place = torch.empty_like(merged.indices)
                _choose(merged.values, place, values)
                merged.indices.copy_(indices.gather(1, place.clamp_min_(0)).masked_fill_(merged.values == -torch.inf, -1))
    for rows in windows(block.N, max(1, 2**24 // k)):  # a stable sort keeps equal values in the order of columns
        values, order = best.values[rows].sort(dim=1, descending=True, stable=True)
        best.values[rows], best.indices[rows] = values, best.indices[rows].gather(1, order)
    return best, is_unsure


def _noise(operands: Operands) -> Tensor:  # (N,)
    """Returns a bound for each row. If fp32 computes a dot product in two orders, the results differ by less than this bound.

    The error of a sum of D terms is at most D·2⁻²³·‖x‖·‖y‖, even if every addition truncates. Norms that are NaN count as 0,
    because a column with NaN is never chosen.
    """
    x, y = (torch.linalg.vector_norm(side, dim=1, dtype=torch.float32) for side in (operands.x, operands.y))
    noise: Tensor = x * y.nan_to_num(0.0, torch.inf).amax() * (operands.x.shape[1] * 2.0**-22)
    return noise


def _select_rows(block: Block, rows: Tensor) -> Block:  # (n,) int64
    """Returns a block of some rows. Ids express an excluded diagonal, because it is not the diagonal of these rows."""
    assert not (block.skip_diagonal and block.row_ids is not None), "a search excludes the diagonal or equal ids, not both"
    row_ids = None if block.row_ids is None else block.row_ids[rows]
    row_ids, col_ids = (rows, torch.arange(block.M, device=rows.device)) if block.skip_diagonal else (row_ids, block.col_ids)
    limit = None if block.limit is None else block.limit[rows]
    return replace(block, x=block.x[rows], row_ids=row_ids, col_ids=col_ids, skip_diagonal=False, limit=limit)


def _maxima(
    block: Block, operands: Operands, rows: slice, columns: slice, group: int, *, store: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:  # (n, groups), (n, panels), (n, columns)
    """Returns the largest dot product of each group and of each panel, and with `store` all dot products.

    The dot products of excluded pairs are replaced by −inf.
    """
    choose_tile = kernel_plan.gradient_tile if store else kernel_plan.logsumexp_tile
    tile = choose_tile(block.precision, block.x.device)
    panel = min(tile.columns, kernel_plan.TOPK_STORED_PANEL) if store else tile.columns
    n, tiles = rows.stop - rows.start, triton.cdiv(columns.stop - columns.start, tile.columns)
    padded_columns = tiles * tile.columns
    sizes = (padded_columns // group, padded_columns // panel, padded_columns if store else 0)
    groups, panels, products = (torch.empty(n, size, dtype=torch.float32, device=block.x.device) for size in sizes)
    programs = kernel_plan.multiprocessors(block.x.device) * tile.per_multiprocessor
    launch(
        _maxima_kernel,
        (min(programs, tiles * triton.cdiv(n, tile.rows)),),
        (
            *operands.descriptors(tile),
            operands.row_ids,
            operands.col_ids,
            None if block.limit is None else block.limit.contiguous(),
            groups,
            panels,
            products if store else None,
        ),
        (rows.start, rows.stop, columns.start, tiles, block.N, columns.stop),
        D=block.D,
        GROUP=group,
        PANEL=panel,
        SKIP_DIAGONAL=block.skip_diagonal,
        PRECISION=dot_precision(block),
        **tile.options,
        PROGRAMS=programs,
    )
    return groups, panels, products if store else None


def _choose(
    best_values: Tensor | None,  # (n, k) receives the values
    best_indices: Tensor,  # (n, k) receives the indices
    values: Tensor,  # (n, m)
    runs: Tensor | None = None,  # (n, c) int32
    run: int = 1,
    *,
    gathered: bool = False,
) -> None:
    """Chooses the k best values of each row, in the order of their indices. With `runs`, only the values in these runs count.

    `run` is the number of values in a run. If `gathered` is set, `values` contains only the values of the runs.
    """
    stride, k = values.shape[1], best_indices.shape[1]
    m = stride if runs is None else runs.shape[1] * run
    size = triton.next_power_of_2(m)
    assert size <= 2**15, "the kernel counts in 16 bits"
    launch(
        _choice_kernel,
        (len(values),),
        (values, runs, best_values, best_indices),
        (stride, m, k),
        RUN=run,
        GATHERED=gathered,
        BLOCK=size,
        num_warps=min(16, max(1, size // 1024)),
    )


def _best_groups(groups: Tensor, panels: Tensor, k: int) -> Tensor:  # (n, groups), (n, panels) → (n, k) int32, −1 for none
    def choose(values: Tensor, *runs: Any) -> Tensor:
        indices = values.new_full((len(values), k), -1, dtype=torch.int32)
        _choose(None, indices, values, *runs)
        return indices

    run = groups.shape[1] // panels.shape[1]
    if groups.shape[1] <= max(kernel_plan.TOPK_FEW, k * run):
        return choose(groups)
    return choose(groups, choose(panels), run)


def _choose_from_stored(best: Best, block: Block, operands: Operands, rows: slice, columns: slice) -> None:
    group, k = kernel_plan.TOPK_STORED_GROUP, best.values.shape[1]
    groups, panels, products = _maxima(block, operands, rows, columns, group, store=True)
    assert products is not None
    if products.shape[1] <= max(kernel_plan.TOPK_FEW, k * group):
        _choose(*best, products)
    else:
        _choose(*best, products, _best_groups(groups, panels, k), group)


def _products(
    block: Block, operands: Operands, rows: slice, columns: slice, chosen: Tensor, group: int
) -> Tensor:  # (n, k·group)
    """Returns the dot products with the columns of the chosen groups, and −inf for excluded pairs."""
    n, k = chosen.shape
    s = torch.empty(n, k * group, dtype=torch.float32, device=block.x.device)
    launch(
        _group_products_kernel,
        (n, triton.cdiv(k * group, _COLUMNS_PER_PROGRAM)),
        (operands.x, operands.y, chosen, s),
        (rows.start, columns.start, columns.stop, operands.x.stride(0), operands.y.stride(0), k),
        D=block.D,
        GROUP=group,
        BLOCK_M=_COLUMNS_PER_PROGRAM,
        BLOCK_D=min(triton.next_power_of_2(block.D), 256 if block.precision in HALF_DTYPE else 128),
    )
    if operands.row_ids is None and not block.skip_diagonal:
        return s
    indices = columns.start + (chosen[:, :, None] * group + torch.arange(group, device=chosen.device)).flatten(1)
    if operands.row_ids is not None and operands.col_ids is not None:
        col_ids = operands.col_ids[indices.clamp(0, block.M - 1)]
        s.masked_fill_(operands.row_ids[rows, None] == col_ids, -torch.inf)
    if block.skip_diagonal:
        s.masked_fill_(indices == torch.arange(rows.start, rows.stop, device=s.device)[:, None], -torch.inf)
    return s


# ----------------------------------------------------------------------------------------------------------------------
# Retrieval ranks: the number of entries in each row and each column that come before its target, such as the matching pair. All
# ranks are counted in one pass.
#
# Counts are integers, so atomics give the same result in any order, and there are no partial sums.


@triton.jit
def _rank_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    scale,  # ()
    row_match,  # (N,)
    col_match,  # (M,)
    row_target,  # (N,) int64, the column of each row's target
    col_target,  # (M,) int64, the row of each column's target
    row_index,  # (N,) int64, the number of each row
    col_index,  # (M,) int64, the number of each column
    row_noise,  # (N,)
    col_noise,  # (M,)
    row_rank,  # (N,) int64
    col_rank,  # (M,) int64
    N,
    M,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n, m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for d in range(0, D, BLOCK_D):
        s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
    s = s * tl.load(scale)
    offs_n, offs_m = n + tl.arange(0, BLOCK_N), m + tl.arange(0, BLOCK_M)
    mask_n, mask_m = offs_n < N, offs_m < M
    i = tl.load(row_index + offs_n, mask_n, 0)[:, None]
    j = tl.load(col_index + offs_m, mask_m, 0)[None, :]
    near = tl.load(row_noise + offs_n, mask_n, 0.0)[:, None] * tl.load(col_noise + offs_m, mask_m, 0.0)[None, :]
    exists = mask_n[:, None] & mask_m[None, :]
    target = tl.load(row_target + offs_n, mask_n, 0)[:, None]
    match = tl.load(row_match + offs_n, mask_n, 0.0)[:, None]
    before = ~((s < match - near) | ((s <= match + near) & (j > target))) & exists & (j != target)
    tl.atomic_add(row_rank + offs_n, tl.sum(before.to(tl.int64), 1), mask=mask_n)
    target = tl.load(col_target + offs_m, mask_m, 0)[None, :]
    match = tl.load(col_match + offs_m, mask_m, 0.0)[None, :]
    before = ~((s < match - near) | ((s <= match + near) & (i > target))) & exists & (i != target)
    tl.atomic_add(col_rank + offs_m, tl.sum(before.to(tl.int64), 0), mask=mask_m)


def rank_counts(block: Block, targets: RankTargets | None = None) -> tuple[Tensor, Tensor]:  # (N,), (M,) int64
    """Counts how many entries of row i, and of column i, come before s_ii, or before the entries in `targets`.

    Ties are decided in the same way as in `eager.rank_counts`.
    """
    if targets is None:
        targets = targets_on_the_diagonal(block, matching_products(block))
    row_rank, col_rank = (torch.zeros(size, dtype=torch.int64, device=block.x.device) for size in (block.N, block.M))
    tile = kernel_plan.gradient_tile(block.precision, block.x.device)
    _rank_kernel[(triton.cdiv(block.N, tile.rows), triton.cdiv(block.M, tile.columns))](
        *logit_operands(block).descriptors(tile),
        block.scale,
        *(part.contiguous() for part in targets),
        *rank_noise(block),
        row_rank,
        col_rank,
        block.N,
        block.M,
        D=block.D,
        PRECISION=dot_precision(block),
        **tile.options,
    )
    return row_rank, col_rank
