"""The ranks of one operation: who they are, what each of them has, and the messages between them.

`Ranks.post` starts a batch of messages and returns; `Pending.wait` ends it. NCCL moves them on a stream of its own, gloo on its
own threads. Gloo cannot reach a GPU, so there tensors go through pinned host memory. Every byte that is sent is counted.
Errors say who waited for whom.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.ring.routes import Nodes
from megabatch.ring.topology import AUTO, resolved
from megabatch.world import World


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
def counted() -> Iterator[Traffic]:
    """Counts the bytes of blocks and sums that this process sends within it, from all threads: backward has its own."""
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


@dataclass(frozen=True)
class Ranks(World):
    """The ranks of one operation, as this one sees them. `agreement.agree` finds out what each of them has."""

    operation: str = ""  # for messages
    route: str = AUTO  # as asked for
    rows: tuple[int, ...] = ()  # of each rank
    columns: tuple[int, ...] = ()
    nodes: Nodes = ()

    @classmethod
    def at(cls, address: str, operation: str, device: torch.device) -> "Ranks":
        """The ranks of an address (`topology.address`) that is not empty."""
        route, purpose, group = resolved(address)
        return cls(device, group, f"{operation} ({purpose})" if purpose else operation, route)

    @property
    def staged(self) -> bool:
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
                buffer = pending.incoming(tensor)
                operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer))
        for peer, tensors, crosses in sends:
            for tensor in filter(Tensor.numel, tensors):
                _count(tensor.nbytes, crosses)
                operations.append(dist.P2POp(dist.isend, self._outgoing(tensor), group=self.group, group_peer=peer))
        if operations:
            if self.staged:
                torch.cuda.current_stream(self.device).synchronize()  # what is sent has reached the host
            pending.begin(operations)
        return pending

    def _outgoing(self, tensor: Tensor) -> Tensor:
        return _pinned(tensor).copy_(tensor, non_blocking=True) if self.staged else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of this shape that each rank has, by rank."""
        own = tensor.cpu() if self.staged else tensor
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

    def incoming(self, tensor: Tensor) -> Tensor:
        """Where to receive what belongs into `tensor`."""
        if not self.ranks.staged:
            return tensor
        self._staged.append((tensor, _pinned(tensor)))
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


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _count(size: int, crosses: bool) -> None:
    for traffic in _counters:
        traffic.bytes += size
        traffic.crossing += size if crosses else 0
        traffic.messages += 1
