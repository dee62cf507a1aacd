"""The ranks of a process group: their connections, the messages between them, and the check that they agree about a call."""

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
# Process groups as strings, the nodes they span, and the requested route.
#
# PyTorch operators take tensors, numbers and strings, so they take a group as a string, its *address*. It contains the route,
# the purpose of the operation, the loss with its settings, and the name of the group, as in `"auto@@@0"`. Purpose and loss may
# be empty. An empty address means one process. Only this section uses PyTorch's internal functions for groups.

AUTO, RING, TWO_LEVEL, GATHER = "auto", "ring", "two_level", "gather"
ROUTES = (AUTO, RING, TWO_LEVEL, GATHER)
VARIABLE = "MEGABATCH_RING"


def check_route(value: Any, name: str = "route") -> str:
    """Returns `value`, one of `ROUTES` or "two_level:4" for nodes of four ranks each. Raises `ValueError` for other values."""
    kind, colon, size = value.partition(":") if isinstance(value, str) else (None, "", "")
    if kind not in ROUTES or (colon and not (kind == TWO_LEVEL and size.isdecimal() and int(size) > 0)):
        names = ", ".join(map(repr, ROUTES))
        raise ValueError(f"{name} must be one of {names}, or 'two_level:4' for nodes of 4 ranks, got {value!r}")
    return str(value)


# The variable is read once, because the compiler cannot trace the access. `use_route` changes the value.
_route = check_route(os.environ.get(VARIABLE, AUTO), f"the environment variable {VARIABLE}")


@contextmanager
def use_route(route: str) -> Iterator[None]:
    """Sets the route of losses over a process group: "auto", "ring", "two_level", "two_level:4" or "gather".

    All ranks have to choose the same route. A backward pass uses the route of its forward pass. The environment variable
    MEGABATCH_RING sets the route of the whole program.
    """
    global _route
    before, _route = _route, check_route(route)
    try:
        yield
    finally:
        _route = before


def address(group: "dist.ProcessGroup | None", purpose: str = "", loss: str = "") -> str:
    """Returns the address of a process group, which operators take. It is empty for one process.

    Args:
        group: the process group.
        purpose: the purpose of the operation. All ranks have to agree on it, and error messages contain it.
        loss: the name and the settings of the loss. All ranks have to agree on them, and error messages contain them.
    """
    return "" if group is None or group.size() == 1 else f"{_route}@{purpose}@{loss}@{group.group_name}"


def resolve(address: str) -> tuple[str, str, str, "dist.ProcessGroup"]:
    """Returns (route, purpose, loss, process group) of a non-empty address."""
    route, purpose, loss, name = address.split("@", 3)
    return route, purpose, loss, dist.distributed_c10d._resolve_process_group(name)  # type: ignore


@dispatch.constant
def rank_at(address: str) -> int:
    """Returns the rank of this process in the group of an address."""
    return dist.get_rank(resolve(address)[-1]) if address else 0


def own_node() -> int:
    """Returns the node of this process, from the variables that torchrun sets, or 0 without them."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return dist.get_rank() // int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def nodes_from(node_of: list[int]) -> Nodes:
    """Returns the ranks of each node, given the node of each rank."""
    return tuple(tuple(r for r, node in enumerate(node_of) if node == n) for n in sorted(set(node_of)))


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of one operation: their numbers of rows and columns, and the messages between them.
#
# `Ranks.post` starts a batch of messages and returns. `Pending.wait` waits until they have arrived. NCCL moves them on its own
# stream, and gloo on its own threads. Gloo cannot access a GPU, so tensors on a GPU go through pinned host memory. Every byte
# that is sent is counted. Errors name the waiting rank and the ranks that it waited for.


class Parcel(NamedTuple):
    """Tensors that are sent to one rank, or received from it."""

    peer: int
    tensors: Sequence[Tensor]
    crosses: bool = False  # whether the message goes from one node to another


class RingError(RuntimeError):
    """A message between ranks failed, because a rank died or did not make the call.

    The error names the rank, the ranks that it waited for, and the step.
    """


@dataclass(eq=False)
class Traffic:
    """The number of bytes and messages that this process has sent."""

    bytes: int = 0
    crossing: int = 0  # bytes between nodes, which `bytes` includes
    messages: int = 0


_counters: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes of blocks and sums that this process sends inside the `with` block.

    All threads are counted, because the backward pass runs in its own thread.
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


@dataclass(frozen=True)
class Ranks(World):
    """The ranks of one operation. `agree` fills in the numbers of rows and columns, and the nodes."""

    operation: str = ""  # for messages
    route: str = AUTO  # the requested route
    rows: tuple[int, ...] = ()  # number of rows on each rank
    columns: tuple[int, ...] = ()  # number of columns on each rank
    nodes: Nodes = ()
    loss: str = ""  # the loss that calls the operation, with its settings

    @classmethod
    def at(cls, address: str, operation: str, device: torch.device) -> "Ranks":
        """Returns the ranks of a non-empty address (see `address`)."""
        route, purpose, loss, group = resolve(address)
        return cls(device, group, f"{operation} ({purpose})" if purpose else operation, route, loss=loss)

    @property
    def is_staged(self) -> bool:
        """Returns whether messages go through host memory, because gloo cannot send GPU memory."""
        return self.device.type == "cuda" and self.group._get_backend(self.device).name() == "gloo"

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, where: str) -> "Pending":
        """Starts sending and receiving. Empty tensors are not sent, because both sides know that they are empty.

        Args:
            sends: tensors that must not change before `wait` returns.
            receives: tensors to write to.
            where: the step of the lap, for error messages.
        """
        pending = Pending(self, where, [send.peer for send in sends], [receive.peer for receive in receives])
        operations = []
        # Receives come first, because gloo requests a message over the connection on which it sends. If sends came first, it
        # would send the request after its own message. If two ranks send to each other, this halves the bandwidth (measured:
        # 6.0 instead of 11.7 MB/s on a link of 12.5 MB/s).
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
                torch.cuda.current_stream(self.device).synchronize()  # wait for the copies to host memory
            pending.begin(operations)
        return pending

    def _stage(self, tensor: Tensor) -> Tensor:
        return _empty_pinned(tensor).copy_(tensor, non_blocking=True) if self.is_staged else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank. They have equal shapes."""
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
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Another rank has probably died or has not "
            "made the same call. Its own error message is closer to the cause"
        ) from error


@dataclass
class Pending:
    """Messages that have been started and have not arrived yet."""

    ranks: Ranks
    where: str
    targets: list[int]
    sources: list[int]
    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _kept: list[dist.P2POp] = field(default_factory=list)  # keeps buffers alive until the messages have been sent

    @property
    def is_in_flight(self) -> bool:
        """Returns whether `wait` has not been called yet."""
        return bool(self._works)

    def buffer_for(self, tensor: Tensor) -> Tensor:
        """Returns the buffer to receive into: `tensor`, or host memory that `wait` copies to `tensor`."""
        if not self.ranks.is_staged:
            return tensor
        self._staged.append((tensor, _empty_pinned(tensor)))
        return self._staged[-1][1]

    def begin(self, operations: list[dist.P2POp]) -> None:
        """Starts all messages at once, so that no two ranks wait for each other's receive."""
        self._kept = operations
        try:
            self._works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._fail(error)

    def wait(self) -> None:
        """Waits until all messages have been sent and received. With NCCL, the CUDA stream waits instead of the process."""
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
    """Lists the ranks, as in "ranks 0, 2 to 5"."""
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
# Before a lap, the ranks compare their arguments. Each rank sends one small message, so either all ranks raise the same error
# or none does.
#
# The message also contains the rank's number of rows, its number of columns, and its node. These may differ.


MESSAGE_BYTES = 1024
TERM_BYTES = 56  # limit of one term; longer terms are cut and compared by a hash

# Every rank may hold the blocks of all ranks and the sums of their gradients if these take at most this many bytes. Then few
# large messages and one large block are faster than many small ones (docs/ring.md contains the measurement).
GATHER_BYTES = 8 * 2**20

# The limit on a GPU while blocks are small is half of the limit of a workspace, because small blocks are launch-bound. An H200
# computes 4,096 × 4,096 pairs in 0.3 ms, forward and backward, and the host takes 3 ms or more to launch the kernels. In a
# ring of 256 ranks, it would launch them 256 times.
SMALL_BLOCK, GATHER_BYTES_OF_SMALL_BLOCKS = 4096**2, 256 * 2**20


def agree(ranks: Ranks, terms: dict[str, Any], rows: int, columns: int) -> Ranks:
    """Returns the ranks, with the rows, columns and node of each. If they disagree, all ranks raise the same `ValueError`.

    If the operations differ, the error names only the operations and the losses, because their other terms cannot be compared.
    """
    terms = {**terms, "the loss": ranks.loss or "none"}
    values = [ranks.operation, *(_shorten(str(value)) for value in terms.values())]
    texts = _gather(ranks, "\n".join([*values, str(rows), str(columns), str(own_node())]))
    table = [text.split("\n") for text in texts]
    operations = [line[0] for line in table]
    compared = {"the operation": operations, "the loss": [line[-4] for line in table]}  # the loss is the last term
    if len(set(operations)) == 1:
        compared = {name: [line[i] for line in table] for i, name in enumerate(terms, start=1)}
    differences = [f"{name} is {_describe_by_rank(by_rank)}" for name, by_rank in compared.items() if len(set(by_rank)) > 1]
    if differences:
        raise ValueError(f"the ranks of the group disagree: {'; '.join(differences)}")
    rows_of, columns_of, node_of = ([int(line[i]) for line in table] for i in (-3, -2, -1))
    return replace(ranks, rows=tuple(rows_of), columns=tuple(columns_of), nodes=nodes_from(node_of))


def _shorten(text: str) -> str:
    """Cuts a long text and appends a hash, so that different texts stay different."""
    if len(text) <= TERM_BYTES:
        return text
    return f"{text[: TERM_BYTES - 14]}... #{hashlib.sha256(text.encode()).hexdigest()[:9]}"


def _gather(ranks: Ranks, text: str) -> list[str]:
    message = text.encode()
    assert len(message) <= MESSAGE_BYTES, "the terms of an operation are few and short"
    # The message uses a separate stream, so that it does not wait for the work that is queued on the device.
    device = ranks.device
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()  # type: ignore[no-untyped-call]
    with stream:
        own = torch.tensor(list(message.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8, device=device)
        texts = torch.stack(ranks.all_gather(own)).cpu()
    return [bytes(line.tolist()).rstrip(b"\0").decode() for line in texts]


def _describe_by_rank(values: list[str]) -> str:
    ranks_by_value: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {' '.join(ranks)}" for value, ranks in ranks_by_value.items()
    )


def _gather_bytes(ranks: Ranks) -> int:
    is_small = max(ranks.rows) * max(ranks.columns) <= SMALL_BLOCK
    return GATHER_BYTES_OF_SMALL_BLOCKS if is_small and ranks.device.type == "cuda" else GATHER_BYTES


def choose_route(ranks: Ranks, column_bytes: int) -> Route:
    """Returns the requested route for these ranks. The result is equal on all of them.

    "auto" chooses "gather" if all blocks are small. Otherwise it chooses "two_level" if there are several nodes with equally
    many ranks, and at least two ranks on each. In all other cases it chooses "ring".

    Args:
        ranks: the ranks, after `agree`.
        column_bytes: the size of one column plus the sums of its gradient.
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
