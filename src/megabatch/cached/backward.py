"""A training step in memory that does not grow with the batch: encode in chunks, one loss, encode again and go back.

The loss of a contrastive batch depends on the encoders only through the embeddings. So every tower first encodes all chunks
without a graph; the loss is computed once, on all embeddings, and gives their gradients; then each chunk is encoded again,
with a graph and the same random numbers, and its rows of that gradient go back through it. The sum over chunks is the exact
gradient. See docs/cached.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any, NamedTuple
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.cached import batchnorm, checks, randomness
from megabatch.cached.budget import COPIES_OF_EMBEDDINGS, Keeper
from megabatch.cached.graphs import parameters_in, stored, weighed
from megabatch.cached.roles import DEVICE, Role
from megabatch.cached.sharding import Ranks, Reductions, not_reached
from megabatch.cached.sources import TensorSource
from megabatch.cached.tower_io import Encoded, map_rows

ENCODE, BACKWARD = "encode", "backward"


class Progress(NamedTuple):
    """What `on_chunk` is told after each chunk."""

    stage: str  # "encode", the first pass; "backward", the second
    tower: int  # its place in the list
    done: int  # chunks of this stage, of all towers
    total: int


def cached_backward(
    loss_fn: Callable[..., Tensor],
    towers: Sequence[tuple[Callable[..., Any], Any]],
    *,
    chunk_size: int | Sequence[int] = 256,
    budget: int | float | str | None = None,
    scaler: Any = None,
    sync: bool = True,
    embeddings: str = DEVICE,
    on_chunk: Callable[[Progress], None] | None = None,
) -> Tensor:  # ()
    """`loss_fn` of all towers' embeddings, and its gradients, with the activations of one chunk at a time.

    Same value and gradients as

        loss = loss_fn(*(tower(inputs) for tower, inputs in towers))
        loss.backward()

    Gradients are added to `.grad` of the towers' parameters and of what `loss_fn` uses itself (a learned scale). Dropout and
    other random numbers are the same in both passes; autocast is whatever is on where this is called.

    Args:
        loss_fn: called once, with the (N, D) embeddings of each tower; returns a scalar.
        towers: pairs (tower, inputs). A tower is a module or another callable that returns (n, D) embeddings of n samples, or
            `megabatch.Encoded(embeddings, auxiliary_loss)`; one module may occur several times. Inputs are a tensor, a mapping
            of tensors (keyword arguments), a tuple or list of them (positional arguments), or a `Source`; all with the same
            number of samples. An auxiliary loss is a mean over its chunk, or one number for each sample; its mean over all
            samples is added to the loss.
        chunk_size: samples a tower encodes at once; one number, or one for each tower.
        budget: memory for graphs that are kept from the first pass, whose chunks are not encoded again: bytes (an int), a share
            of the free memory (a float up to 1.0), "auto", `math.inf` for all of them, or None for none.
        scaler: a `GradScaler`; the loss is scaled before it goes back, and returned as it was.
        sync: whether DDP and FSDP2 reduce gradients in this step, once; False while accumulating over steps.
        embeddings: "device", or "host" to keep embeddings and their gradients there while the towers work; for the loss they
            are on the device.
        on_chunk: called with a `Progress` after each chunk.

    Returns:
        The loss, detached. With `group=` in the loss it is this rank's share, as always.
    """
    checks.gradients_possible()
    checks.options(loss_fn, budget, scaler, embeddings, on_chunk)
    roles = checks.roles(towers, chunk_size)
    step = _Step(roles, scaler, sync, embeddings, on_chunk)
    step.keep_in_step()
    for role in roles:
        batchnorm.warn(role.batch_norms, role.name, role.chunk_size, len(role.source))
    try:
        step.encode(budget)
        for role in roles:  # what only calls have shown
            batchnorm.warn(role.batch_norms, role.name, role.chunk_size, len(role.source))
        loss = step.differentiate(loss_fn)
        step.go_back()
    finally:
        torch.clear_autocast_cache()  # casts of parameters that an optimizer is about to change
    return loss


class _Step:
    """One call; what it holds is gone with it."""

    def __init__(
        self, roles: list[Role], scaler: Any, sync: bool, where: str, on_chunk: Callable[[Progress], None] | None
    ) -> None:
        self.roles, self.scaler, self.where, self.on_chunk = roles, scaler, where, on_chunk
        self.reductions = Reductions([role.shared for role in roles], sync)
        self.share = 0.0  # of one sample in a mean over the batch; the mean over ranks of their sums is the whole
        self.graph_mode: bool | None = None
        self.loss_trains = False
        self.ranks: Ranks | None = None

    def keep_in_step(self) -> None:
        """Makes all ranks encode equally often: as often as the one with the most chunks, and at least once."""
        shared = [module for role in self.roles for module in role.shared]
        synchronised = [
            layer for role in self.roles for _, layer in role.batch_norms if isinstance(layer, torch.nn.SyncBatchNorm)
        ]
        if shared or synchronised:
            ranks = Ranks(shared, synchronised, next((role.device for role in self.roles if role.device), None))
            self.ranks = ranks if ranks.size > 1 else None
        rows = len(self.roles[0].source)
        alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        if rows == 0 and self.ranks is None and alone:
            raise ValueError("towers must have at least one sample, got inputs with 0 rows")
        unknown = [role.index for role in self.roles if rows == 0 and role.source.placeholder(role.device) is None]
        own = [rows, unknown[0] if unknown else -1, *(role.passes for role in self.roles)]
        table = [own] if self.ranks is None else self.ranks.everyone(own)
        for rank, (_, without, *_passes) in enumerate(table):
            if without >= 0:
                raise ValueError(
                    f"towers[{without}][1] must have at least one sample on every rank, because all ranks encode at least once "
                    "and this source cannot show what a sample looks like without one; got none"
                    + (f" on rank {rank}" if self.ranks is not None else "")
                )
        for role, *passes in zip(self.roles, *(line[2:] for line in table), strict=True):
            role.passes = max(1, *passes)
        self.share = len(table) / max(1, sum(line[0] for line in table))

    # The first pass

    def encode(self, budget: int | float | str | None) -> None:
        """Every tower's embeddings, and graphs of the chunks that fit the budget."""
        keeper = Keeper(budget, self._smallest if self.ranks is not None else None)
        progress = self._progress(ENCODE, sum(role.passes for role in self.roles))
        for role in self.roles:
            keeper.begin(role.device)
            finding = role.finding_batch_norms(in_step=self.ranks is not None)
            with closing(role.chunks(range(role.passes))) as chunks, finding:
                for i, inputs in chunks:
                    self._encode_chunk(role, i, inputs, keeper)
                    progress(role)

    def _encode_chunk(self, role: Role, i: int, inputs: Any, keeper: Keeper) -> None:
        rows, with_graph = role.rows(i), role.trains and keeper.wants()
        if role.trains:
            role.states[i] = randomness.capture(role.devices, role.states.get(i - 1))
        held = self.reductions.held_back(role.index) if with_graph else nullcontext()
        aside = nullcontext() if rows else _aside(role)
        noticing = role.noticing() if i == 0 and len(role.shared) > 1 else nullcontext()
        with held, aside, noticing, self._graph(with_graph):
            if not with_graph:
                encoded = role.encode(inputs, rows)
            else:
                views = isinstance(role.source, TensorSource)
                known = stored(role.modules)
                if views:
                    map_rows(known.append, inputs)
                with weighed(role.device, known) as weight:
                    if role.source.reuses_memory:
                        inputs = map_rows(torch.clone, inputs)
                    encoded = role.encode(inputs, rows)
                role.trains = any(part is not None and part.requires_grad for part in encoded)
                if role.trains and keeper.weighed(weight.bytes, role.passes, self._other_bytes(encoded.embeddings)):
                    role.kept[i] = encoded
        role.store(i, encoded.embeddings, self.where)
        if encoded.auxiliary_loss is not None and rows:
            part = rows * encoded.auxiliary_loss.detach()
            role.auxiliary = part if role.auxiliary is None else role.auxiliary + part

    def _other_bytes(self, embeddings: Tensor) -> int:
        """What the step still has to allocate beside graphs."""
        parameters = {id(p): p for role in self.roles for module in role.modules for p in module.parameters()}
        missing = sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad and p.grad is None)
        rows = sum(len(role.source) for role in self.roles)
        return missing + COPIES_OF_EMBEDDINGS * rows * embeddings.shape[1] * embeddings.element_size()

    def _smallest(self, number: int) -> int:
        assert self.ranks is not None
        return min(line[0] for line in self.ranks.everyone([number]))

    # The loss

    def differentiate(self, loss_fn: Callable[..., Tensor]) -> Tensor:  # ()
        """The loss, and for each role the gradient of its embeddings."""
        leaves = [role.leaf() for role in self.roles]
        with self._graph(True):
            loss = loss_fn(*leaves)
        checks.loss(loss)
        total = loss.detach().reshape(()).clone()
        for role in self.roles:
            if role.auxiliary is not None:
                total = total + (role.auxiliary * self.share).to(total)
        if loss.requires_grad:
            found = parameters_in([loss])
            self.loss_trains = found is None or bool(found - {id(leaf) for leaf in leaves})
            with _outside_autocast():
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        elif not any(role.trains for role in self.roles):
            raise ValueError(_NOTHING_TO_TRAIN)
        for role, leaf in zip(self.roles, leaves, strict=True):
            role.take_gradient(leaf)
        return total

    # The second pass

    def go_back(self) -> None:
        """The gradients of all parameters: through the graphs that were kept, then chunk by chunk through fresh ones."""
        for role in self.roles:
            if role.gradient is None and role.auxiliary is None and not role.shared:
                role.trains = False  # the loss does not depend on it
        learning = [role for role in self.roles if role.trains]
        self.reductions.schedule([role.index for role in learning if len(role.kept) < role.passes])
        progress = self._progress(BACKWARD, sum(role.passes for role in learning))
        after = randomness.capture({device for role in self.roles for device in role.devices})
        differences: list[tuple[Role, Tensor]] = []
        try:
            for role in learning:  # all that is kept first, so that its memory is free for the rest
                for i in list(role.kept):
                    with self.reductions.held_back(role.index):
                        self._backpropagate(role, i, role.kept.pop(i), ())
                    role.states.pop(i)
                    progress(role)
            for role in learning:
                self._encode_again(role, progress, differences)
            for index in self.reductions.left_over([role.index for role in learning if role.trains]):
                role = self.roles[index]
                kept = batchnorm.running_statistics_kept(role.batch_norms)
                with self.reductions.last_pass(index) as reducing, kept, _aside(role), self._graph(True):
                    placeholder = role.encode(role.source.placeholder(role.device), 0)
                    self._backpropagate(role, role.passes, placeholder, reducing)
        finally:
            randomness.restore(after)
        if not self.loss_trains and not any(role.trains for role in self.roles):
            raise ValueError(_NOTHING_TO_TRAIN)
        _compare(differences)

    def _encode_again(self, role: Role, progress: Callable[[Role], None], differences: list[tuple[Role, Tensor]]) -> None:
        again = sorted(role.states)  # those whose graph was not kept
        difference: Tensor | None = None
        with closing(role.chunks(again)) as chunks:
            for i, inputs in chunks:
                last = i == again[-1]
                randomness.restore(role.states.pop(i))
                around = self.reductions.last_pass(role.index) if last else self.reductions.held_back(role.index)
                with around as reducing, batchnorm.running_statistics_kept(role.batch_norms):
                    with nullcontext() if role.rows(i) else _aside(role), self._graph(True):
                        encoded = role.encode(inputs, role.rows(i))
                    if not any(part is not None and part.requires_grad for part in encoded):
                        role.trains = False  # a frozen tower that could not be told from others before
                        return
                    if i in role.samples:
                        difference = _larger(difference, encoded.embeddings, role.samples.pop(i))
                    self._backpropagate(role, i, encoded, reducing or ())
                del encoded
                progress(role)
        if difference is not None:
            differences.append((role, difference))

    def _backpropagate(self, role: Role, i: int, encoded: Encoded, reducing: Sequence[torch.nn.Module]) -> None:
        outputs, gradients = [], []
        if encoded.embeddings.requires_grad:
            outputs.append(encoded.embeddings)
            gradients.append(role.gradient_of(i, encoded))
        if encoded.auxiliary_loss is not None and encoded.auxiliary_loss.requires_grad:
            weight = torch.full_like(encoded.auxiliary_loss, role.rows(i) * self.share, requires_grad=False)
            outputs.append(encoded.auxiliary_loss)
            gradients.append(weight if self.scaler is None else self.scaler.scale(weight))
        for parameter in not_reached(reducing, outputs):
            outputs.append(parameter.view_as(parameter))
            gradients.append(parameter.new_zeros(()).expand_as(parameter))
        with _outside_autocast():
            torch.autograd.backward(outputs, gradients)
        self.reductions.done(reducing)

    def _progress(self, stage: str, total: int) -> Callable[[Role], None]:
        done = 0

        def after(role: Role) -> None:
            nonlocal done
            done += 1
            if self.on_chunk is not None:
                self.on_chunk(Progress(stage, role.index, done, total))

        return after

    @contextmanager
    def _graph(self, enabled: bool) -> Iterator[None]:
        # Autocast remembers the casts of parameters. Those made without a graph would cut the gradients off.
        if self.graph_mode is not enabled:
            torch.clear_autocast_cache()
            self.graph_mode = enabled
        with torch.set_grad_enabled(enabled):
            yield


_NOTHING_TO_TRAIN = (
    "towers or loss_fn must have a parameter that requires a gradient, got none that the loss depends on: all towers are "
    "frozen, or run under torch.no_grad()"
)


@contextmanager
def _aside(role: Role) -> Iterator[None]:
    """For a placeholder, which leaves no trace: it draws nothing, and no statistics move."""
    with randomness.untouched(role.devices), batchnorm.at_rest(role.batch_norms):
        yield


@contextmanager
def _outside_autocast() -> Iterator[None]:
    """For backward passes, which take the types from their forward pass."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _larger(difference: Tensor | None, now: Tensor, before: Tensor) -> Tensor:  # ()
    """The larger of what was found so far and how far the last embedding of a chunk has moved. Stays on the device."""
    dtype = torch.float64 if now.dtype == torch.float64 else torch.float32
    before, now = before.to(dtype), now.detach()[-1].to(dtype)
    found = (now - before).norm() / before.norm().clamp_min(torch.finfo(dtype).tiny)
    return found if difference is None else torch.maximum(difference, found)


def _compare(differences: list[tuple[Role, Tensor]]) -> None:
    """Says so if a second pass was not a repetition of the first; rounding that differs is no reason."""
    for role, difference in differences:
        dtypes = {p.dtype for module in role.modules for p in module.parameters() if p.dtype.is_floating_point}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        if torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.bfloat16)
        bound = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps) ** 0.5
        value = difference.item()
        if value > bound:
            warn(
                f"{role.name} must give the same embeddings in both passes, got some that differ by {value:.1e} of their "
                "length, so its gradients are not those of the loss. Does it change a state, or have a generator of its own?",
                RuntimeWarning,
                stacklevel=4,
            )
