"""The processes that work on a block: this one alone, which is a ring of one step, or all ranks of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megabatch.ring.lap import Tensors
from megabatch.ring.passes import RingPasses, RingTriangle
from megabatch.ring.ranks import Ranks, agree, settle
from megabatch.tiles.backends import Passes, RowWork, backend_for, sums_dtype
from megabatch.tiles.block import Block, Needs
from megabatch.tiles.symmetric import Triangle

Visitor = Callable[[Tensors, bool], None]  # tensors of some blocks, and whether they are this rank's own


@dataclass(frozen=True)
class BlockPasses:
    """The passes over a block, of one process or of all ranks, and what a mean over all pairs of the batch takes."""

    tiles: Passes | RingPasses
    local: RowWork  # work on rows, by this rank alone
    mean_weight: float  # Σ over local pairs · mean_weight, averaged over the ranks, is the mean over all pairs of the batch
    rank: int = 0
    size: int = 1

    def visit(self, own: list[Tensor], visit_block: Visitor) -> None:
        """`visit_block` at the tensors of the own block, then at those of all other ranks."""
        if isinstance(self.tiles, RingPasses):
            self.tiles.visit(own, visit_block)
        else:
            visit_block(own, True)

    def largest(self, number: Tensor) -> Tensor:  # ()
        """The largest of all ranks' numbers; it keeps a NaN, and all ranks see the same."""
        return (
            torch.cat(self.tiles.ranks.all_gather(number.reshape(1))).amax() if isinstance(self.tiles, RingPasses) else number
        )

    def total(self, number: Tensor) -> Tensor:  # ()
        """The sum of all ranks' numbers."""
        return torch.cat(self.tiles.ranks.all_gather(number.reshape(1))).sum() if isinstance(self.tiles, RingPasses) else number

    def symmetric(self, triangle: Triangle) -> Triangle | RingTriangle:
        """The passes over the upper half of a symmetric block."""
        return RingTriangle(triangle, self.tiles) if isinstance(self.tiles, RingPasses) else triangle


def passes_for(
    group: str,
    backend: str,
    block: Block,
    operation: str,
    *,
    needs: Needs | None = None,
    mean: bool = False,
    terms: Mapping[str, Any] = MappingProxyType({}),
) -> BlockPasses:
    """The passes over `block`. With a group, all ranks have to call this with the same terms.

    Args:
        group: an address (`ring.ranks`); empty for one process.
        backend: of this rank's part.
        block: local rows and columns.
        operation: what is done, for messages.
        needs: which gradients the pass has to compute, if any.
        mean: whether there has to be at least one pair, somewhere.
        terms: by name, further values that must be the same on all ranks.
    """
    if not group:
        own = backend_for(backend, block)
        return BlockPasses(own, own, 1 / max(block.N, 1))
    ranks = Ranks.at(group, operation, block.x.device)
    ranks = agree(ranks, {**_terms(ranks, backend, block, needs), **terms}, block.N, block.M)
    if mean and sum(ranks.rows) == 0:
        raise ValueError("the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank")
    column_bytes = block.D * (block.y.element_size() + block.dtype.itemsize)
    local = backend_for(backend, block)
    around = RingPasses(
        ranks, settle(ranks, column_bytes), partial(backend_for, backend), local, sums_dtype(backend, block.dtype)
    )
    return BlockPasses(around, local, ranks.size / max(sum(ranks.rows), 1), ranks.rank, ranks.size)


def _terms(ranks: Ranks, backend: str, block: Block, needs: Needs | None) -> dict[str, Any]:
    dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (block.x, block.y))
    return {
        "the width of the embeddings": block.D,
        "the dtype of the embeddings": dtypes,
        "the precision": block.precision,
        "the backend": backend,
        "the kind of device": block.x.device.type,
        "the route": ranks.route,
        "what is excluded": _describe_exclusions(block),
        "what ids mean": "positives" if block.ids_are_positives else "no negatives",
        "what a second model sees": _describe_second_model(block),
        "what is added": "a column bias" if block.col_bias is not None else "nothing for columns",
        "what needs a gradient": _describe_needs(needs),
        "what has a gradient": "nothing yet",
    }


def _describe_exclusions(block: Block) -> str:
    two = block.row_ids is not None and block.row_ids.dim() == 2
    ids = "ids in two columns" if two else "ids"
    chosen = {ids: block.row_ids is not None, "diagonal": block.skip_diagonal, "above a limit": block.limit is not None}
    return " and ".join(name for name, is_so in chosen.items() if is_so) or "nothing"


def _describe_second_model(block: Block) -> str:
    if block.second_model is None:
        return "nothing"
    return f"a width of {block.second_model.D} in {str(block.second_model.y.dtype).removeprefix('torch.')}"


def _describe_needs(needs: Needs | None) -> str:
    if needs is None:
        return "nothing yet"
    return " ".join(name[1:] for name, wanted in zip(Needs._fields, needs, strict=True) if wanted) or "nothing"
