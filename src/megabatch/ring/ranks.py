"""The ranks of a process group: who they are, how they are connected, and whether they agree about a call."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import dispatch
from megabatch.ring import routes
from megabatch.ring.routes import Nodes, Route
from megabatch.world import World

# ----------------------------------------------------------------------------------------------------------------------
# Process groups as strings, the nodes they span, and the route that was asked for.
#
# PyTorch operators take tensors, numbers and strings. A group therefore goes into them as a string, its *address*: the
# route, the purpose of the operation and the loss with its settings, where a loss has named them, and the group's name,
# `"auto@@@0"`. An empty string is one process. What belongs to PyTorch's internals is wrapped here.

AUTO, RING, TWO_LEVEL, GATHER = "auto", "ring", "two_level", "gather"
ROUTES = (AUTO, RING, TWO_LEVEL, GATHER)
VARIABLE = "MEGABATCH_RING"


def check_route(value: Any, name: str = "route") -> str:
    """One of the names, or "two_level:4" for nodes of four ranks each."""
    kind, colon, size = value.partition(":") if isinstance(value, str) else (None, "", "")
    if kind not in ROUTES or (colon and not (kind == TWO_LEVEL and size.isdecimal() and int(size) > 0)):
        names = ", ".join(map(repr, ROUTES))
        raise ValueError(f"{name} must be one of {names}, or 'two_level:4' for nodes of 4 ranks, got {value!r}")
    return str(value)


# Read once, because the compiler cannot trace the reading; `use_route` changes it.
_route = check_route(os.environ.get(VARIABLE, AUTO), f"the environment variable {VARIABLE}")


@contextmanager
def use_route(route: str) -> Iterator[None]:
    """Within it, losses over a group use this route: "auto", "ring", "two_level", "two_level:4" or "gather".

    All ranks have to choose the same. The backward pass goes the way its forward pass went. The environment variable
    MEGABATCH_RING sets it for the whole program.
    """
    global _route
    before, _route = _route, check_route(route)
    try:
        yield
    finally:
        _route = before


def address(group: "dist.ProcessGroup | None", purpose: str = "", loss: str = "") -> str:
    """A process group as operators take it; empty for one process.

    Args:
        group: the processes.
        purpose: of the operation; all ranks have to agree on it, and messages name it.
        loss: the name and the settings of the loss; the same.
    """
    return "" if group is None or group.size() == 1 else f"{_route}@{purpose}@{loss}@{group.group_name}"


def resolve(address: str) -> tuple[str, str, str, "dist.ProcessGroup"]:
    """(route, purpose, loss, process group) of an address that is not empty."""
    route, purpose, loss, name = address.split("@", 3)
    return route, purpose, loss, dist.distributed_c10d._resolve_process_group(name)  # type: ignore


@dispatch.constant
def rank_at(address: str) -> int:
    """This process's rank in the group of an address."""
    return dist.get_rank(resolve(address)[-1]) if address else 0


def own_node() -> int:
    """The node of this process, from the variables that torchrun sets; 0 without them."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def nodes_from(node_of: list[int]) -> Nodes:
    """Ranks by node, from the node of each rank."""
    return tuple(tuple(r for r, node in enumerate(node_of) if node == n) for n in sorted(set(node_of)))


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of one operation: who they are, what each of them has, and the messages between them.
#
# `Ranks.post` starts a batch of messages and returns; `Pending.wait` ends it. NCCL moves them on a stream of its own, gloo
# on its own threads. Gloo cannot reach a GPU, so there tensors go through pinned host memory. Every byte that is sent is
# counted. Errors say who waited for whom.


class Parcel(NamedTuple):
    """What goes to a rank, or comes from it."""

    peer: int
    tensors: Sequence[Tensor]
    crosses: bool = False  # whether it goes between nodes


class RingError(RuntimeError):
    """A message that failed: a rank died, or did not make the call. Says who waited for whom, and where."""


@dataclass(eq=False)
class Traffic:
    """What this process has sent."""

    bytes: int = 0
    crossing: int = 0  # of these, between nodes
    messages: int = 0


_counters: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes of blocks and sums that this process sends within it, from all threads: backward has its own."""
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


@dataclass(frozen=True)
class Ranks(World):
    """The ranks of one operation, as this one sees them. `agree` finds out what each of them has."""

    operation: str = ""  # for messages
    route: str = AUTO  # as asked for
    rows: tuple[int, ...] = ()  # of each rank
    columns: tuple[int, ...] = ()
    nodes: Nodes = ()
    loss: str = ""  # with its settings, for which the operation is done

    @classmethod
    def at(cls, address: str, operation: str, device: torch.device) -> "Ranks":
        """The ranks of an address (`address`) that is not empty."""
        route, purpose, loss, group = resolve(address)
        return cls(device, group, f"{operation} ({purpose})" if purpose else operation, route, loss=loss)

    @property
    def is_staged(self) -> bool:
        """Whether messages go through host memory: gloo sends nothing else."""
        return self.device.type == "cuda" and self.group._get_backend(self.device).name() == "gloo"

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, where: str) -> "Pending":
        """Starts sending and receiving. Empty tensors are not sent: both sides know that they are empty.

        Args:
            sends: tensors that must not change before the end of `wait`.
            receives: tensors to write to.
            where: for messages: the step of the lap.
        """
        pending = Pending(self, where, [send.peer for send in sends], [receive.peer for receive in receives])
        operations = []
        # Receives first: gloo asks for a message over the connection it sends on, and would ask only after its own has gone.
        # Where two ranks send to each other, that halves the bandwidth (measured: 6.0 against 11.7 MB/s on a link of 12.5).
        for peer, tensors, _ in receives:
            for tensor in filter(Tensor.numel, tensors):
                buffer = pending.buffer_for(tensor)
                operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer))
        for peer, tensors, crosses in sends:
            for tensor in filter(Tensor.numel, tensors):
                _count(tensor.nbytes, crosses)
                operations.append(dist.P2POp(dist.isend, self._stage(tensor), group=self.group, group_peer=peer))
        if operations:
            if self.is_staged:
                torch.cuda.current_stream(self.device).synchronize()  # what is sent has reached the host
            pending.begin(operations)
        return pending

    def _stage(self, tensor: Tensor) -> Tensor:
        return _empty_pinned(tensor).copy_(tensor, non_blocking=True) if self.is_staged else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of this shape that each rank has, by rank."""
        own = tensor.cpu() if self.is_staged else tensor
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, own, group=self.group)
        except RuntimeError as error:
            others = [rank for rank in range(self.size) if rank != self.rank]
            self.fail("before the first step", f"waiting for {_ranks(others)}", error)
        return [part.to(tensor.device) for part in gathered]

    def fail(self, where: str, doing: str, error: Exception) -> NoReturn:
        """Raises a `RingError`."""
        raise RingError(
            f"rank {self.rank} of {self.size} failed {where} of {self.operation}, {doing}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Another rank has probably died, or did not "
            "make the same call; what it says itself is nearer to the cause"
        ) from error


@dataclass
class Pending:
    """Messages under way."""

    ranks: Ranks
    where: str
    targets: list[int]
    sources: list[int]
    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _kept: list[dist.P2POp] = field(default_factory=list)  # buffers live until the messages have gone

    @property
    def is_under_way(self) -> bool:
        """Whether `wait` has not been called yet."""
        return bool(self._works)

    def buffer_for(self, tensor: Tensor) -> Tensor:
        """Where to receive what belongs into `tensor`."""
        if not self.ranks.is_staged:
            return tensor
        self._staged.append((tensor, _empty_pinned(tensor)))
        return self._staged[-1][1]

    def begin(self, operations: list[dist.P2POp]) -> None:
        """All at once, so that no two ranks wait for each other's receive."""
        self._kept = operations
        try:
            self._works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._fail(error)

    def wait(self) -> None:
        """Until all has arrived and all has gone; on CUDA with NCCL it is the stream that waits, not the process."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._fail(error)
        for tensor, buffer in self._staged:
            tensor.copy_(buffer, non_blocking=True)
        self._works, self._staged, self._kept = [], [], []

    def _fail(self, error: Exception) -> NoReturn:
        parts = [f"sending to {_ranks(self.targets)}"] if self.targets else []
        parts += [f"receiving from {_ranks(self.sources)}"] if self.sources else []
        self.ranks.fail(self.where, " and ".join(parts), error)


def _ranks(ranks: list[int]) -> str:
    """By their numbers; of many in a row the first and the last."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {', '.join(parts)}"


def _empty_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _count(size: int, crosses: bool) -> None:
    for traffic in _counters:
        traffic.bytes += size
        traffic.crossing += size if crosses else 0
        traffic.messages += 1


# ----------------------------------------------------------------------------------------------------------------------
# Before a lap, the ranks compare their arguments: one small message each, so that all of them raise the same error, or
# none.
#
# The message also has the number of rows and columns of the rank, which may differ, and its node.


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
    terms = {**terms, "the loss": ranks.loss or "none"}
    values = [ranks.operation, *(_shorten(str(value)) for value in terms.values())]
    texts = _gather(ranks, "\n".join([*values, str(rows), str(columns), str(own_node())]))
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


def _shorten(text: str) -> str:
    """Different for different texts, whatever their length."""
    if len(text) <= TERM_BYTES:
        return text
    return f"{text[: TERM_BYTES - 14]}... #{hashlib.sha256(text.encode()).hexdigest()[:9]}"


def _gather(ranks: Ranks, text: str) -> list[str]:
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


def choose_route(ranks: Ranks, column_bytes: int) -> Route:
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
