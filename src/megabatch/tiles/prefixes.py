"""Several widths at once: the product over the first d columns is a partial sum of the product over all.

s_ij at width d is scale · row_factor_i · col_factor_j · ⟨x_i[:d], y_j[:d]⟩, with factors that bring a prefix to unit length. A
tile of products grows by one piece of the width after another and is used at every width on its way: forward costs one product
over the largest width. In backward every width has its own weights h; a piece of dx gets those of all widths that contain it,
Σ_{d' ≥ d} h, so that there too all widths together cost the products of the largest. docs/losses.md counts them.

In PyTorch operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.tiles import plan
from megabatch.tiles.block import Block, windows
from megabatch.tiles.in_memory import diagonal_of
from megabatch.tiles.logsum import LogSum, weighted_softmax
from megabatch.tiles.precision import BFLOAT16, TF32, add_product, multiply_into, round_to_tf32, rounded


@dataclass(frozen=True)
class Prefixes:
    """A block of similarities at several widths. Its ids and its diagonal are left out at every one."""

    block: Block
    widths: tuple[int, ...]  # ascending
    row_factor: Tensor  # (N, W)
    col_factor: Tensor  # (M, W)

    @classmethod
    def of_unit_length(cls, block: Block, widths: tuple[int, ...]) -> "Prefixes":
        """Cosines, times the scale."""
        return cls(block, widths, *(_inverse_lengths(block, side, widths) for side in (block.x, block.y)))

    @property
    def pieces(self) -> list[slice]:
        """What each width has more than the one before."""
        return pieces(self.widths)


def pieces(widths: tuple[int, ...]) -> list[slice]:
    """[0, widths[-1]), cut at every width."""
    return [slice(start, stop) for start, stop in zip((0, *widths), widths, strict=False)]


# What a vector is divided by at least to be brought to unit length, as in F.normalize.
SHORTEST = 1e-12


def _inverse_lengths(block: Block, side: Tensor, widths: tuple[int, ...]) -> Tensor:  # (K, W)
    return (_products_by_row(block, side, side, widths).sqrt_().clamp_min_(SHORTEST)).reciprocal_()


def _products_by_row(block: Block, x: Tensor, y: Tensor, widths: tuple[int, ...]) -> Tensor:  # (K, W)
    """⟨x_i[:d], y_i[:d]⟩ at every width, from the same rounded inputs as the tiles."""
    out = block.zeros(len(x), len(widths))
    for rows in windows(len(x), plan.rows_at_once(x.device, x.shape[1])):
        a, b = (rounded(values[rows], block.precision).to(block.dtype) for values in (x, y))
        for k, piece in enumerate(pieces(widths)):
            out[rows, k] = (a[:, piece] * b[:, piece]).sum(1)
    return out.cumsum_(1)


class PrefixSums(NamedTuple):
    """What a gradient walk adds to, for rows or for columns. Neither is multiplied by the scale yet."""

    d: Tensor  # (K, D)
    products: Tensor  # (K, W) Σ h_ij · ⟨x_i[:d], y_j[:d]⟩, from which come the gradients of factors and scale

    @classmethod
    def zeros(cls, block: Block, size: int, widths: int) -> "PrefixSums":
        """Nothing yet."""
        return cls(block.zeros(size, block.D), block.zeros(size, widths))


class _Tiles:
    """The tiles of one block, each at all widths, in buffers that are used again."""

    def __init__(self, given: Prefixes) -> None:
        block = given.block
        whole = plan.eager_tile(block.x.device, block.dtype)
        size = plan.TileSize(max(1, whole.rows // len(given.widths)), whole.columns).fitted(block.N, block.M)
        self.given = given
        self.rows = list(windows(block.N, size.rows))
        self.columns = list(windows(block.M, size.columns))
        self._elements = size.rows * size.columns
        self._products, self._similarities, self._spare = self.buffer(1), self.buffer(1), self.buffer(1)

    def buffer(self, tiles: int) -> Tensor:
        """Room for some tiles."""
        return torch.empty(tiles, self._elements, dtype=self.given.block.dtype, device=self.given.block.x.device)

    def spare(self, like: Tensor) -> Tensor:
        """A tile to write to."""
        return view(self._spare[0], like)

    def at_every_width(
        self, rows: slice, columns: slice, x: Tensor, y: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor]]:  # (n, m), (n, m)
        """(number of the width, products, similarities), −inf where the pair is left out; each overwrites the one before."""
        given, block = self.given, self.given.block
        shape = (len(x), len(y))
        products = self._products[0, : shape[0] * shape[1]].view(shape)
        s = view(self._similarities[0], products)
        for k, piece in enumerate(given.pieces):
            if k == 0:
                multiply_into(products, x[:, piece], y[:, piece].T)
            else:
                add_product(products, x[:, piece], y[:, piece].T)
            torch.mul(products, block.scale * given.row_factor[rows, k, None], out=s).mul_(given.col_factor[columns, k])
            if block.row_ids is not None and block.col_ids is not None:
                s.masked_fill_(block.row_ids[rows, None] == block.col_ids[columns], -torch.inf)
            if block.skip_diagonal:
                diagonal_of(s, rows, columns).fill_(-torch.inf)
            yield k, products, s


def view(room: Tensor, like: Tensor) -> Tensor:
    """The beginning of a buffer, in the shape of a tile."""
    return room[: like.numel()].view(like.shape)


def statistics(given: Prefixes) -> tuple[LogSum, LogSum]:  # (N, W), (M, W)
    """Row sums and column sums of exp(s) at every width, from one pass over the tiles."""
    block, tiles = given.block, _Tiles(given)
    row, col = (
        LogSum(block.zeros(size, len(given.widths)) - torch.inf, block.zeros(size, len(given.widths)))
        for size in (block.N, block.M)
    )
    for rows in tiles.rows:
        x = rounded(block.x[rows], block.precision)
        for columns in tiles.columns:
            y = rounded(block.y[columns], block.precision)
            for k, _, s in tiles.at_every_width(rows, columns, x, y):
                _at(row, rows, k).add_exponentials_(s, dim=1, out=tiles.spare(s))
                _at(col, columns, k).add_exponentials_(s, dim=0, out=s)
    return row, col


def _at(sums: LogSum, window: slice, k: int) -> LogSum:
    return LogSum(sums.shift[window, k], sums.total[window, k])


def gradients(
    given: Prefixes,
    row: LogSum,  # (N, W) the whole sums, of which the block may be a part
    col: LogSum,  # (M, W)
    drow: Tensor,  # (N, W)
    dcol: Tensor,  # (M, W)
    by_row: PrefixSums,
    by_column: PrefixSums,
) -> None:
    """Adds the gradients of ⟨drow, log row⟩ + ⟨dcol, log col⟩."""
    block, tiles = given.block, _Tiles(given)
    of_rows, of_columns = row.softmax_factors(drow), col.softmax_factors(dcol)
    room = tiles.buffer(len(given.widths))
    for rows in tiles.rows:
        x = rounded(block.x[rows], block.precision)
        for columns in tiles.columns:
            y = rounded(block.y[columns], block.precision)
            h: list[Tensor] = []
            for k, products, s in tiles.at_every_width(rows, columns, x, y):
                h.append(view(room[k], s))
                weighted_softmax(s, *(factor[rows, k, None] for factor in of_rows), out=h[k])
                h[k].add_(weighted_softmax(s, *(factor[columns, k] for factor in of_columns), out=s))
                h[k].mul_(given.row_factor[rows, k, None]).mul_(given.col_factor[columns, k])
                terms = torch.mul(h[k], products, out=tiles.spare(s))
                by_row.products[rows, k] += terms.sum(1)
                by_column.products[columns, k] += terms.sum(0)
            _multiply_down(given, h, x, y, by_row.d[rows], by_column.d[columns])


def _multiply_down(given: Prefixes, h: list[Tensor], x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> None:
    """From the last piece to the first: each gets the weights of all widths that contain it."""
    precision, wide = given.block.precision, given.block.x.device.type == "cuda"
    for k in range(len(h) - 1, -1, -1):
        piece = given.pieces[k]
        if k + 1 < len(h):
            h[k].add_(h[k + 1])
        factor = h[k]
        if wide and precision == BFLOAT16:
            factor = factor.bfloat16()
        elif wide and precision == TF32:
            factor = round_to_tf32(factor)
        # Factors of short prefixes are large: what float16 cannot hold is multiplied in float32.
        add_product(dx[:, piece], factor, y[:, piece].to(factor.dtype))
        add_product(dy[:, piece], factor.T, x[:, piece].to(factor.dtype))


def matching_products(given: Prefixes) -> Tensor:  # (N, W)
    """⟨x_i[:d], y_i[:d]⟩ at every width."""
    return _products_by_row(given.block, given.block.x, given.block.y, given.widths)


def add_matching(given: Prefixes, h: Tensor, by_row: PrefixSums, by_column: PrefixSums) -> None:
    """Adds the gradients of the matching pairs, whose weights are h (N, W)."""
    terms = h * matching_products(given)
    for sums, partners in ((by_row, given.block.y), (by_column, given.block.x)):
        sums.products.add_(terms)
        _add_rows(given, sums.d, h, partners)


def subtract_along(given: Prefixes, sums: PrefixSums, own: Tensor, factor: Tensor) -> None:
    """Takes away what a change of length alone would do, because a prefix has unit length; one too short to have does not."""
    along = torch.where(factor < 0.999 / SHORTEST, -sums.products * factor.square(), 0.0)
    _add_rows(given, sums.d, along, own)


def _add_rows(given: Prefixes, d: Tensor, h: Tensor, values: Tensor) -> None:
    """d_i += Σ h_i · values_i[:width] over all widths."""
    block, down = given.block, h.flip(1).cumsum(1).flip(1)
    for rows in windows(len(d), plan.rows_at_once(block.x.device, block.D)):
        these = rounded(values[rows], block.precision).to(block.dtype)
        for k, piece in enumerate(given.pieces):
            d[rows, piece].addcmul_(down[rows, k, None], these[:, piece])
