"""Who works on a block: this process alone, or all ranks of a group. What an operator needs to know of it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.ring.agreement import agree, settle
from megabatch.ring.exchange import Exchange
from megabatch.ring.topology import Members
from megabatch.ring.walks import RingWalks
from megabatch.tiles.backends import RowWork, Walks, sums_dtype, walks
from megabatch.tiles.block import Block, Needs


class Team(NamedTuple):
    """What the walks over a block are, and what a mean over all pairs of the batch takes."""

    walks: Walks
    local: RowWork  # what is done row by row, by this rank alone
    share: float  # Σ over local pairs · share, averaged over the ranks, is the mean over all pairs of the batch
    largest: Callable[[Tensor], Tensor] | None = None  # the largest of all ranks' numbers, on all of them


def assemble(
    group: str,
    backend: str,
    block: Block,
    operation: str,
    *,
    needs: Needs | None = None,
    mean: bool = False,
    terms: Mapping[str, Any] = MappingProxyType({}),
) -> Team:
    """The team for one walk over `block`. With a group, all ranks have to come here, and to mean the same.

    Args:
        group: a route (`ring.topology`); empty for this process alone.
        backend: which walks serve this rank's part.
        block: local rows and columns.
        operation: what is done, for messages.
        needs: which gradients the walk is to find, if it is to find any.
        mean: whether there has to be at least one pair, somewhere.
        terms: what else must be the same on all ranks, and its name.
    """
    if not group:
        own = walks(backend, block)
        return Team(own, own, 1 / max(block.N, 1))
    members = Members.of(group)
    exchange = Exchange(members, f"{operation} ({members.purpose})" if members.purpose else operation, block.x.device)
    census = agree(exchange, {**_terms(members, backend, block, needs), **terms}, block.N, block.M)
    if mean and sum(census.rows) == 0:
        raise ValueError("the batch must have at least one pair: the mean over no pairs is undefined, got no rows on any rank")
    column_bytes = block.D * (block.y.element_size() + block.dtype.itemsize)
    schedule = settle(members, census, column_bytes)
    local, sums = walks(backend, block), sums_dtype(backend, block.dtype)
    around = RingWalks(exchange, schedule, census, partial(walks, backend), local, sums)
    share = members.size / max(sum(census.rows), 1)

    def largest(number: Tensor) -> Tensor:
        return torch.cat(exchange.everyone(number.reshape(1))).amax()  # keeps a NaN, and all ranks see the same

    return Team(around, local, share, largest)


def _terms(members: Members, backend: str, block: Block, needs: Needs | None) -> dict[str, Any]:
    dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (block.x, block.y))
    return {
        "the width of the embeddings": block.D,
        "the dtype of the embeddings": dtypes,
        "the precision": block.precision,
        "the backend": backend,
        "the kind of device": block.x.device.type,
        "the schedule": members.schedule,
        "what is excluded": _excluded(block),
        "what ids mean": "positives" if block.ids_are_positives else "no negatives",
        "what a second model sees": _seen(block),
        "what is added": "a column bias" if block.col_bias is not None else "nothing for columns",
        "what needs a gradient": _wanted(needs),
        "what has a gradient": "nothing yet",
    }


def _excluded(block: Block) -> str:
    chosen = {"ids": block.row_ids is not None, "diagonal": block.skip_diagonal, "above a limit": block.limit is not None}
    return " and ".join(name for name, is_so in chosen.items() if is_so) or "nothing"


def _seen(block: Block) -> str:
    if block.companion is None:
        return "nothing"
    return f"a width of {block.companion.D} in {str(block.companion.y.dtype).removeprefix('torch.')}"


def _wanted(needs: Needs | None) -> str:
    if needs is None:
        return "nothing yet"
    return " ".join(name[1:] for name, wanted in zip(Needs._fields, needs, strict=True) if wanted) or "nothing"
