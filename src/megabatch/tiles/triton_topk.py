"""The k largest products of each row, at nearly the speed of the bare product.

A kernel forms each tile once and stores the largest product of every group of GROUP columns. The k groups with the largest
maxima hold the k best columns: a column in another group comes after the maxima of all k. So only the products of k groups are
formed again, k·GROUP of M. Groups are ordered like columns, by maximum and then by index, and are found in two steps:
supergroups of GROUP groups first. If k groups have more than a few percent of the columns, library products form
tiles in memory (`eager`).

The two passes round products differently. Without a limit this only orders columns whose products are equal to rounding. With
one, a column may be below the limit in the first pass and above it in the second. Its group then took a place for nothing, and
a better column of another group is lost. Such a column is above the limit by no more than the rounding error of two products
(`_noise`). Rows with a column in that range are searched again in tiles in memory, where each product is formed once.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import eager, plan
from megabatch.tiles.block import Block, windows
from megabatch.tiles.precision import HALF_DTYPE
from megabatch.tiles.topk import Best, best
from megabatch.tiles.triton_device import equal_ids
from megabatch.tiles.triton_operands import Operands, dot_precision, similarity_operands

MOST_CANDIDATES = 16384  # of a row, in the registers of eight warps


@triton.jit
def _group_maxima_kernel(
    x_desc,  # (N, D)
    y_desc,  # (M, D)
    row_ids,  # (N,) or None
    col_ids,  # (M,) or None
    limit,  # (N,) or None
    maxima,  # (rows of this launch, groups)
    first_row,
    last_row,
    groups,
    split_rows,
    N,
    M,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SKIP_DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M
    offs_m = m + tl.arange(0, BLOCK_M)
    offs_g = m // GROUP + tl.arange(0, BLOCK_M // GROUP)
    begin = first_row + tl.program_id(1) * split_rows
    for n in tl.range(begin, tl.minimum(begin + split_rows, last_row), BLOCK_N, flatten=True):
        s = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for d in range(0, D, BLOCK_D):
            s = tl.dot(x_desc.load([n, d]), y_desc.load([m, d]).T, s, input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        if row_ids is not None:
            s = tl.where(equal_ids(row_ids, col_ids, offs_n, offs_m, N, M), -float("inf"), s)
        if limit is not None:
            highest = tl.load(limit + offs_n, mask=offs_n < N, other=0.0)
            s = tl.where(s > highest[:, None], -float("inf"), s)
        if SKIP_DIAGONAL:
            if (n < m + BLOCK_M) & (m < n + BLOCK_N):
                s = tl.where(offs_n[:, None] == offs_m[None, :], -float("inf"), s)
        if m + BLOCK_M > M:
            s = tl.where((offs_m < M)[None, :], s, -float("inf"))
        largest = tl.max(s.reshape(BLOCK_N, BLOCK_M // GROUP, GROUP), 2)  # ignores NaN, unless all are
        largest = tl.where(largest == largest, largest, -float("inf"))
        offs = (offs_n - first_row).to(tl.int64)[:, None] * groups + offs_g[None, :]
        tl.store(maxima + offs, largest, mask=(offs_n < last_row)[:, None] & (offs_g < groups)[None, :])


@triton.jit
def _group_products_kernel(
    x,  # (N, D)
    y,  # (M, D)
    chosen,  # (rows of this launch, k) int64, groups; −1 for none
    products,  # (rows of this launch, k, GROUP)
    first_row,
    M,
    x_stride,
    y_stride,
    k,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, place = tl.program_id(0), tl.program_id(1)
    group = tl.load(chosen + row.to(tl.int64) * k + place)
    offs_m = tl.maximum(group, 0) * GROUP + tl.arange(0, GROUP)
    mask_m = (offs_m < M) & (group >= 0)
    total = tl.zeros((GROUP, BLOCK_D), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        own = tl.load(x + (first_row + row).to(tl.int64) * x_stride + offs_d, mask_d, 0.0)
        others = tl.load(y + offs_m.to(tl.int64)[:, None] * y_stride + offs_d[None, :], mask_m[:, None] & mask_d[None, :], 0.0)
        total += own.to(tl.float32)[None, :] * others.to(tl.float32)
    offs = (row.to(tl.int64) * k + place) * GROUP + tl.arange(0, GROUP)
    tl.store(products + offs, tl.where(mask_m, tl.sum(total, 1), -float("inf")))


@triton.jit
def _best_kernel(
    values,  # (n, m)
    indices,  # (n, m) int64, or None for 0 to m − 1
    found_values,  # (n, k)
    found_indices,  # (n, k) int64
    m,
    k,
    BLOCK: tl.constexpr,
):
    """The k best of a row, one after the other: of the largest values the smallest index, which then leaves the row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    v = tl.load(values + row * m + offs, offs < m, -float("inf"))
    v = tl.where(v == v, v, -float("inf"))
    index = offs.to(tl.int64)
    if indices is not None:
        index = tl.load(indices + row * m + offs, offs < m, -1)
    for place in range(k):
        largest = tl.max(v, 0)
        first = tl.min(tl.where(v == largest, index, 1 << 62), 0)
        tl.store(found_values + row * k + place, largest)
        tl.store(found_indices + row * k + place, tl.where(largest == -float("inf"), -1, first))
        v = tl.where(index == first, -float("inf"), v)


def topk(block: Block, k: int) -> Best:  # (N, k)
    """The k largest products ⟨x_i, y_j⟩ of each row, as `eager.topk`."""
    group = plan.TOPK_GROUP
    if k * group * plan.TOPK_SHARE > block.M:
        return eager.topk(block, k)
    operands = similarity_operands(block)
    found = Best.none(block.N, k, block.zeros(0))
    limits = None if block.limit is None else (block.limit, block.limit + _noise(operands))
    unsure = torch.zeros(block.N, dtype=torch.bool, device=block.x.device)
    for rows in windows(block.N, plan.topk_rows(block.M)):
        chosen = _best_groups(_group_maxima(block, operands, rows, group), k, group)
        s, indices = _among_groups(block, operands, rows, chosen, group)
        if limits is not None:
            limit, noisy = (part[rows, None] for part in limits)
            above = s > limit
            unsure[rows] = (above & (s <= noisy)).any(1)
            s.masked_fill_(above, -torch.inf)
        found.values[rows], found.indices[rows] = _best(s, indices, k)
    if limits is not None and len(again := unsure.nonzero().flatten()):
        found.values[again], found.indices[again] = eager.topk(_some_rows(block, again), k)
    return found


def _noise(operands: Operands) -> Tensor:  # (N,)
    """More than two products of a row with any column can differ by, if fp32 adds up the same factors in two orders.

    A sum of D terms is off by D·2⁻²³·|x|·|y| at most, even if every addition truncates. A column with NaN is never chosen.
    """
    x, y = (torch.linalg.vector_norm(side, dim=1, dtype=torch.float32) for side in (operands.x, operands.y))
    noise: Tensor = x * y.nan_to_num(0.0, torch.inf).amax() * (operands.x.shape[1] * 2.0**-22)
    return noise


def _some_rows(block: Block, rows: Tensor) -> Block:  # (n,) int64
    """These rows; the main diagonal, which they no longer have, as ids."""
    assert not (block.skip_diagonal and block.row_ids is not None), "`exclude` is either"
    row_ids = None if block.row_ids is None else block.row_ids[rows]
    row_ids, col_ids = (rows, torch.arange(block.M, device=rows.device)) if block.skip_diagonal else (row_ids, block.col_ids)
    limit = None if block.limit is None else block.limit[rows]
    return replace(block, x=block.x[rows], row_ids=row_ids, col_ids=col_ids, skip_diagonal=False, limit=limit)


def _group_maxima(block: Block, operands: Operands, rows: slice, group: int) -> Tensor:  # (n, groups)
    """The groups fill whole supergroups; groups without a column have the maximum −inf."""
    tile = plan.logsumexp_tile(block.precision, block.x.device)
    n, groups = rows.stop - rows.start, triton.cdiv(block.M, group)
    padded = triton.cdiv(groups, group) * group
    maxima = torch.empty(n, padded, dtype=torch.float32, device=block.x.device)
    maxima[:, groups:] = -torch.inf
    panels = triton.cdiv(block.M, tile.columns)
    splits, split_rows = plan.row_splits(panels, n, tile.rows, plan.multiprocessors(block.x.device))
    _group_maxima_kernel[(panels, splits)](
        *operands.descriptors(tile),
        operands.row_ids,
        operands.col_ids,
        None if block.limit is None else block.limit.contiguous(),
        maxima,
        rows.start,
        rows.stop,
        padded,
        split_rows,
        block.N,
        block.M,
        D=block.D,
        GROUP=group,
        SKIP_DIAGONAL=block.skip_diagonal,
        PRECISION=dot_precision(block),
        **tile.options,
    )
    return maxima


def _best(values: Tensor, indices: Tensor | None, k: int) -> Best:  # (n, m) each → (n, k)
    """`topk.best` by a kernel, if the candidates of a row fit in its registers."""
    n, m = values.shape
    if m > MOST_CANDIDATES:
        return best(values, torch.arange(m, device=values.device) if indices is None else indices, k)
    found = Best.none(n, k, values)
    size = triton.next_power_of_2(m)
    _best_kernel[(n,)](values, indices, *found, m, k, BLOCK=size, num_warps=min(8, max(1, size // 1024)))
    return found


def _best_groups(maxima: Tensor, k: int, group: int) -> Tensor:  # (n, groups) → (n, k) int64, −1 for none
    supergroups = maxima.view(len(maxima), -1, group)
    above = _best(supergroups.amax(2), None, k).indices
    members = above.clamp_min(0)[:, :, None] * group + torch.arange(group, device=maxima.device)
    members, missing = members.flatten(1), (above < 0).repeat_interleave(group, 1)
    return _best(maxima.gather(1, members).masked_fill_(missing, -torch.inf), members, k).indices


def _among_groups(block: Block, operands: Operands, rows: slice, chosen: Tensor, group: int) -> Best:  # (n, k·group)
    """The products of the chosen groups and their columns, unordered; −inf for excluded pairs."""
    n, k = chosen.shape
    products = torch.empty(n, k, group, dtype=torch.float32, device=block.x.device)
    _group_products_kernel[(n, k)](
        operands.x,
        operands.y,
        chosen,
        products,
        rows.start,
        block.M,
        operands.x.stride(0),
        operands.y.stride(0),
        k,
        D=block.D,
        GROUP=group,
        BLOCK_D=min(triton.next_power_of_2(block.D), 256 if block.precision in HALF_DTYPE else 128),
    )
    indices = chosen[:, :, None] * group + torch.arange(group, device=chosen.device)
    s, indices = products.flatten(1), indices.flatten(1)
    if operands.row_ids is not None and operands.col_ids is not None:
        theirs = operands.col_ids[indices.clamp(0, block.M - 1)]
        s.masked_fill_(operands.row_ids[rows, None] == theirs, -torch.inf)
    if block.skip_diagonal:
        s.masked_fill_(indices == torch.arange(rows.start, rows.stop, device=s.device)[:, None], -torch.inf)
    return Best(s, indices)
