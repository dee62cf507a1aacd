"""Before a lap, the ranks compare their arguments: one small message each, so that all of them raise the same error, or none.

The message also has the number of rows and columns of the rank, which may differ, and its node.
"""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from megabatch.ring import routes
from megabatch.ring.ranks import Ranks
from megabatch.ring.routes import Route
from megabatch.ring.topology import AUTO, GATHER, RING, TWO_LEVEL, nodes_from, own_node

MESSAGE_BYTES = 1024
TERM_BYTES = 56  # at most; longer ones are cut, and compared by a hash

# The blocks of all ranks and the sums of their gradients may be held by every rank when they take no more than this. Then few
# large messages and one large block are better than many small ones (docs/ring.md has the measurement).
GATHER_BYTES = 8 * 2**20

# The same on a GPU while blocks are small: half of a workspace's limit. An H200 computes 4,096 × 4,096 pairs in 0.3 ms,
# forward and backward, and the host takes 3 ms or more to launch it. In a ring of 256 ranks it would do so 256 times.
SMALL_BLOCK, GATHER_BYTES_OF_SMALL_BLOCKS = 4096**2, 256 * 2**20


def agree(ranks: Ranks, terms: dict[str, Any], rows: int, columns: int) -> Ranks:
    """The ranks, with the rows, columns and node of each. Raises the same `ValueError` on all of them if they disagree.

    The operation comes first and alone: terms of different operations have nothing to do with one another.
    """
    values = [ranks.operation, *(_shortened(str(value)) for value in terms.values())]
    texts = _gathered(ranks, "\n".join([*values, str(rows), str(columns), str(own_node())]))
    table = [text.split("\n") for text in texts]
    operations = [line[0] for line in table]
    compared = {"the operation": operations}
    if len(set(operations)) == 1:
        compared = {name: [line[i] for line in table] for i, name in enumerate(terms, start=1)}
    complaints = [f"{name} is {_who_has_what(found)}" for name, found in compared.items() if len(set(found)) > 1]
    if complaints:
        raise ValueError(f"the ranks of the group disagree: {'; '.join(complaints)}")
    own_rows, own_columns, node_of = ([int(line[i]) for line in table] for i in (-3, -2, -1))
    return replace(ranks, rows=tuple(own_rows), columns=tuple(own_columns), nodes=nodes_from(node_of))


def _shortened(text: str) -> str:
    """Different for different texts, whatever their length."""
    if len(text) <= TERM_BYTES:
        return text
    return f"{text[: TERM_BYTES - 14]}... #{hashlib.sha256(text.encode()).hexdigest()[:9]}"


def _gathered(ranks: Ranks, text: str) -> list[str]:
    message = text.encode()
    assert len(message) <= MESSAGE_BYTES, "the terms of an operation are few and short"
    # A stream of its own: what this waits for is the other ranks, not the work that is queued on the device.
    device = ranks.device
    aside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()  # type: ignore[no-untyped-call]
    with aside:
        own = torch.tensor(list(message.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8, device=device)
        texts = torch.stack(ranks.all_gather(own)).cpu()
    return [bytes(line.tolist()).rstrip(b"\0").decode() for line in texts]


def _who_has_what(values: list[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} on rank{'s' if len(who) > 1 else ''} {' '.join(who)}" for value, who in ranks.items())


def _gather_bytes(ranks: Ranks) -> int:
    is_small = max(ranks.rows) * max(ranks.columns) <= SMALL_BLOCK
    return GATHER_BYTES_OF_SMALL_BLOCKS if is_small and ranks.device.type == "cuda" else GATHER_BYTES


def settle(ranks: Ranks, column_bytes: int) -> Route:
    """The route that was asked for, made for these ranks; the same on all of them.

    "auto": gather while everything is small, two levels where several nodes have equally many ranks and more than one, or else
    a ring.

    Args:
        ranks: that have agreed.
        column_bytes: of one column and the sums of its gradient.
    """
    kind, _, given = ranks.route.partition(":")
    nodes = ranks.nodes
    if given:
        size = int(given)
        nodes = nodes_from([rank // size for rank in range(ranks.size)])
    equal = len({len(node) for node in nodes}) == 1
    if kind == AUTO:
        if sum(ranks.columns) * column_bytes <= _gather_bytes(ranks):
            kind = GATHER
        else:
            kind = TWO_LEVEL if equal and 1 < len(nodes) < ranks.size else RING
    if kind == GATHER:
        return routes.gather(nodes)
    if kind == RING:
        return routes.ring(nodes)
    if not equal:
        counts = ", ".join(str(len(node)) for node in nodes)
        raise ValueError(f"the route 'two_level' needs equally many ranks on every node, got {counts}; use 'ring'")
    return routes.two_level(nodes)
