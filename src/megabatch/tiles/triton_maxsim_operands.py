"""Queries and documents as the late-interaction kernels read them.

A query takes one slot of SLOT rows of a tile, a power of two, or several if it is longer than a tile. Items that all have the
same number of vectors need no tables: where one begins is arithmetic, and no load has to wait for a table.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles import kernel_plan
from megabatch.tiles.precision import FLOAT32
from megabatch.tiles.tokens import LateBlock, Tokens
from megabatch.tiles.triton_operands import operand


@triton.jit
def rows_of_queries(
    rows,
    q_start,  # (n,) int64, or None if all queries have WIDTH vectors
    q_length,  # (n,) int64 or None
    q_valid,  # (Tq,) int8 or None
    queries,
    SLOTS: tl.constexpr,
    SLOT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(query of each row, its vector, whether it counts) for rows in the order of slots."""
    slot = rows // SLOT
    query = slot // SLOTS
    token = (slot % SLOTS) * SLOT + rows % SLOT
    exists = query < queries
    if q_start is None:
        counts = exists & (token < WIDTH)
        vector = query * WIDTH + token
    else:
        counts = exists & (token < tl.load(q_length + query, mask=exists, other=0))
        vector = tl.load(q_start + query, mask=exists, other=0) + token
    if q_valid is not None:
        counts = counts & (tl.load(q_valid + vector, mask=counts, other=0) != 0)
    return query, vector, counts


@triton.jit
def first_vector(d_start, first_document, j, WIDTH: tl.constexpr):
    """The first vector of a document, int64."""
    start = (first_document + j).to(tl.int64) * WIDTH
    if d_start is not None:
        start = tl.load(d_start + j)
    return start


@dataclass(frozen=True)
class Side:
    """The queries, or the documents."""

    values: Tensor  # (T, D) rounded
    width: int
    starts: Tensor | None  # (N,) int64; None if each item has `width` vectors
    lengths: Tensor | None  # (N,) int64
    valid: Tensor | None  # (T,) int8

    @classmethod
    def of(cls, tokens: Tokens, precision: str) -> "Side":
        """Rounded to `precision`."""
        valid = None if tokens.valid is None else tokens.valid.to(torch.int8)
        starts = None if tokens.lengths is None else tokens.starts()
        return cls(operand(tokens.values, precision), tokens.width, starts, tokens.lengths, valid)

    def tables(self, items: slice) -> tuple[Tensor | None, Tensor | None]:
        """(starts, lengths) of some items; None if all have the same length."""
        if self.starts is None or self.lengths is None:
            return None, None
        return self.starts[items], self.lengths[items]


def query_slots(block: LateBlock) -> tuple[int, int]:
    """(rows of a slot, slots of a query)."""
    tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
    slot = min(tile.rows, max(16, triton.next_power_of_2(block.query.width)))
    return slot, triton.cdiv(block.query.width, slot)


class MaxsimOperands:
    """A block as the kernels read it."""

    def __init__(self, block: LateBlock) -> None:
        self.block = block
        self.q, self.d = (Side.of(side, block.precision) for side in (block.query, block.document))
        self.tile = kernel_plan.maxsim_tile(block.precision, block.device, block.query.D)
        self.slot, self.slots = query_slots(block)
        self.block_d = min(self.tile.width, max(16, triton.next_power_of_2(block.query.D)))
        self.precision = "ieee" if block.precision == FLOAT32 else "tf32"

    def queries(self, rows: slice, vectors: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """(starts, lengths, valid, vectors): from the first vector of the queries on, if these need no starts."""
        first = rows.start * self.q.width if self.q.starts is None else 0
        valid = self.q.valid
        if first:
            valid, vectors = None if valid is None else valid[first:], vectors[first:]
        return *self.q.tables(rows), valid, vectors

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time arguments of every kernel; a width is 0 if tables tell where items begin."""
        widths = {"WIDTH": self.d.width if self.d.starts is None else 0, "QUERY_WIDTH": self.q.width}
        return {"D": self.block.query.D, **widths, "SLOTS": self.slots, "SLOT": self.slot}
