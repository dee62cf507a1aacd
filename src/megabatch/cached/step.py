"""Gradient caching. `cached_backward` encodes chunks without graphs, computes the loss once, and encodes the chunks again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megabatch.cached import second_pass
from megabatch.cached.second_pass import ALL, AUTO, COPIES_OF_EMBEDDINGS, Budget, Keeper, parameters_in
from megabatch.cached.streaming import BACKWARD, FORWARD, LOSS, phase
from megabatch.cached.tower import DEVICE, HOST, Encoded, Reductions, Role, ShardRanks, find_unreached
from megabatch.world import default_group

# ----------------------------------------------------------------------------------------------------------------------
# Checks of the arguments of `cached_backward`, before any computation.


def check_gradients_are_possible() -> None:
    """Raises in a call under `no_grad` or `inference_mode`."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("cached_backward must be called with gradients enabled, got a call under torch.inference_mode()")
    if not torch.is_grad_enabled():
        raise RuntimeError("cached_backward must be called with gradients enabled, got a call under torch.no_grad()")


def check_roles(towers: Any, chunk_size: Any, *, further_rows: bool = False) -> list[Role]:
    """Checks the pairs (tower, inputs) and the chunk sizes. Returns one role for each pair."""
    if not isinstance(towers, Sequence) or isinstance(towers, str):
        raise TypeError(f"towers must be a list of pairs (tower, inputs), got {_kind(towers)}")
    if not towers:
        raise ValueError("towers must have at least one pair (tower, inputs), got an empty list")
    for i, pair in enumerate(towers):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
            raise TypeError(f"towers[{i}] must be a pair (tower, inputs), got {_kind(pair)}{length}")
        if not callable(pair[0]):
            raise TypeError(f"towers[{i}][0] must be a module or another callable, got {_kind(pair[0])}")
    sizes = _chunk_sizes(chunk_size, len(towers))
    roles = [Role(i, tower, inputs, size) for i, ((tower, inputs), size) in enumerate(zip(towers, sizes, strict=True))]
    for role in roles:
        if any(getattr(module, "static_graph", False) for module in role.shared):
            raise ValueError(
                f"{role.name}[0] must be wrapped without static_graph=True, got a DistributedDataParallel with it, which "
                "cannot skip a reduction; gradient caching has a backward pass for every chunk but only one reduction"
            )
        for module in role.modules:
            if type(module).__module__.split(".")[0] == "deepspeed":
                raise ValueError(
                    f"{role.name}[0] must be a module, or wrapped in DDP or FSDP2, got {type(module).__name__} of DeepSpeed, "
                    "whose own backward pass reduces gradients; use FSDP2, which shards like ZeRO and reduces once in a step"
                )
    counts = [len(role.source) for role in roles]
    if len(set(counts)) > 1 and not further_rows:
        raise ValueError(
            f"towers must all have the same number of samples, got {', '.join(map(str, counts))} (rows of their inputs)"
        )
    return roles


def _chunk_sizes(value: Any, towers: int) -> list[int]:
    sizes = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Tensor) else [value] * towers
    if len(sizes) != towers:
        raise ValueError(f"chunk_size must be one number or one for each of the {towers} towers, got {len(sizes)} numbers")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"chunk_size must be an integer or a list of integers, got {_kind(size)}")
        if size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {size}")
    return [int(size) for size in sizes]


def check_options(loss_fn: Any, budget: Any, budget_fraction: Any, scaler: Any, embeddings: Any, on_chunk: Any) -> None:
    """Checks the other arguments of `cached_backward`."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the embeddings of each tower, got {_kind(loss_fn)}")
    _budget(budget, budget_fraction)
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"scaler must be a GradScaler or None, got {_kind(scaler)}")
    if embeddings not in (DEVICE, HOST):
        raise ValueError(f"embeddings must be 'device' or 'host', got {embeddings!r}")
    if on_chunk is not None and not callable(on_chunk):
        raise TypeError(f"on_chunk must be a function of a Progress or None, got {_kind(on_chunk)}")


def _budget(value: Any, fraction: Any) -> None:
    is_named = value is None or (isinstance(value, str) and value in (AUTO, ALL))
    if not is_named and (isinstance(value, bool) or not isinstance(value, Integral) or value < 0):
        hint = "; for a fraction of the free memory use budget_fraction" if isinstance(value, float) else ""
        raise ValueError(f'budget must be a number of bytes (an int), "auto", "all" or None, got {value!r}{hint}')
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"budget_fraction must be more than 0 and at most 1, got {fraction!r}")
    if value is not None:
        raise ValueError(f"budget must not be set with budget_fraction={fraction}, got {value!r}")


def check_loss(value: Any) -> None:
    """Checks the value that `loss_fn` returned."""
    if not isinstance(value, Tensor):
        raise TypeError(f"loss_fn must return a scalar tensor, got {_kind(value)}")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(f"loss_fn must return a scalar, got {_kind(value)} of shape {tuple(value.shape)}")


def _kind(value: Any) -> str:
    return f"a tensor of {str(value.dtype).removeprefix('torch.')}" if isinstance(value, Tensor) else type(value).__name__


# ----------------------------------------------------------------------------------------------------------------------
# Gradient caching (GradCache): gradients of a batch of any size, with the activations of one chunk in memory.
#
# The loss depends on the towers only through their embeddings. First, every tower encodes all chunks without an autograd
# graph. Then the loss and the gradient of each embedding are computed once, on all embeddings. Last, each chunk is encoded
# again, with a graph and equal random numbers, and its rows of the gradient are backpropagated. The sum over chunks is the
# exact gradient. See docs/cached.md.


ENCODE = "encode"


class Progress(NamedTuple):
    """The argument of `on_chunk`, which is called after each chunk."""

    stage: str  # "encode" in the first pass, "backward" in the second
    tower: int  # index in the list of towers
    done: int  # number of finished chunks of this stage, over all towers
    total: int  # number of chunks of this stage, over all towers


def cached_backward(
    loss_fn: Callable[..., Tensor],
    towers: Sequence[tuple[Callable[..., Any], Any]],
    *,
    chunk_size: int | Sequence[int] = 256,
    budget: Budget = None,
    budget_fraction: float | None = None,
    scaler: Any = None,
    sync: bool = True,
    embeddings: Literal["device", "host"] = "device",
    on_chunk: Callable[[Progress], None] | None = None,
) -> Tensor:  # ()
    """Computes `loss_fn` of the embeddings of all towers, and all gradients, with the activations of one chunk in memory.

    It has the same value and gradients as

        loss = loss_fn(*(tower(inputs) for tower, inputs in towers))
        loss.backward()

    Gradients are added to `.grad` of the towers' parameters and of parameters that `loss_fn` uses, such as a learned scale.
    Dropout and other random numbers are equal in both passes. Both passes run under the caller's autocast.

        loss = mb.cached_backward(
            lambda image, text: mb.clip_loss(image, text, log_scale.exp()),
            [(image_tower, images), (text_tower, tokens)],
            chunk_size=256,
        )
        optimizer.step()

    Args:
        loss_fn: a function that is called once with the (N, D) embeddings of each tower and returns a scalar.
        towers: pairs (tower, inputs). A tower is a module or another callable that returns (n, D) embeddings of n samples, or
            `megabatch.Encoded(embeddings, auxiliary_loss)`. One module may occur several times. Inputs are a tensor, a mapping
            of tensors (keyword arguments), a tuple or list of tensors (positional arguments), or a `Source`. All towers have
            the same number of samples, unless `loss_fn.further_rows` is true, as for hard negatives. Padded texts with an
            `attention_mask` are sorted by length and truncated for the tower. Their embeddings return in the original order.
            `lengths` of `HostSource` changes that. An auxiliary loss is the mean over its chunk, or one number for each sample.
            Its mean over all samples is added to the loss.
        chunk_size: the number of samples that a tower encodes at once, as one number or one for each tower. A chunk of
            truncated texts may have more samples.
        budget: bytes for graphs that are kept from the first pass, so that their chunks are not encoded again. "auto" uses
            most of the free memory, "all" keeps every graph, and None keeps no graph.
        budget_fraction: the budget as a fraction of the free memory, more than 0 and at most 1, instead of `budget`.
        scaler: a `GradScaler`. The loss is scaled for the backward pass and returned unscaled.
        sync: whether DDP and FSDP2 reduce gradients at the end of this step. Set it to False while accumulating over steps.
        embeddings: "device" or "host". With "host", embeddings and their gradients are in host memory while the towers run.
            The loss always gets them on the device.
        on_chunk: called with a `Progress` after each chunk.

    Returns:
        The detached loss. If the loss uses `group=`, it is this rank's part of the mean.
    """
    check_gradients_are_possible()
    check_options(loss_fn, budget, budget_fraction, scaler, embeddings, on_chunk)
    roles = check_roles(towers, chunk_size, further_rows=bool(getattr(loss_fn, "further_rows", False)))
    step = _Step(roles, scaler, sync, embeddings, on_chunk)
    step.equalize_passes()
    for role in roles:
        second_pass.warn_about_batch_norms(role.batch_norms, role.name, role.chunk_size, len(role.source))
    try:
        with phase(FORWARD):
            step.encode(budget, budget_fraction)
        for role in roles:  # here, because some layers are found only when a tower is called
            second_pass.warn_about_batch_norms(role.batch_norms, role.name, role.chunk_size, len(role.source))
        with phase(LOSS):
            loss = step.differentiate(loss_fn)
        with phase(BACKWARD):
            step.backpropagate()
    finally:
        torch.clear_autocast_cache()  # the cached casts are stale after the optimizer step
    return loss


class _Step:
    """The state of one call of `cached_backward`."""

    def __init__(
        self, roles: list[Role], scaler: Any, sync: bool, where: str, on_chunk: Callable[[Progress], None] | None
    ) -> None:
        self.roles, self.scaler, self.where, self.on_chunk = roles, scaler, where, on_chunk
        self.reductions = Reductions([role.shared for role in roles], sync)
        self.sample_weight = 0.0  # weighted sums over samples, averaged over ranks, are the mean over the batch
        self.graph_mode: bool | None = None  # whether the last pass had a graph
        self.loss_trains = False  # whether the loss has trainable parameters
        self.ranks: ShardRanks | None = None

    def equalize_passes(self) -> None:
        """Makes all ranks encode as often as the rank with the most chunks, because FSDP's collectives need every rank."""
        shared = [module for role in self.roles for module in role.shared]
        synchronized = [
            layer for role in self.roles for _, layer in role.batch_norms if isinstance(layer, torch.nn.SyncBatchNorm)
        ]
        self.ranks = ShardRanks.of(shared, synchronized, next((role.device for role in self.roles if role.device), None))
        rows = len(self.roles[0].source)
        if rows == 0 and self.ranks is None and default_group() is None:
            raise ValueError("towers must have at least one sample, got inputs with 0 rows")
        no_dummy = [role.index for role in self.roles if rows == 0 and role.source.placeholder(role.device) is None]
        own = [rows, no_dummy[0] if no_dummy else -1, *(role.passes for role in self.roles)]
        table = [own] if self.ranks is None else self.ranks.gather_integers(own)  # one line for each rank
        for rank, (_, tower, *_passes) in enumerate(table):
            if tower >= 0:
                raise ValueError(
                    f"towers[{tower}][1] must have at least one sample on every rank, because every rank encodes at least "
                    "once and this source cannot create a dummy sample; got none"
                    + (f" on rank {rank}" if self.ranks is not None else "")
                )
        for role, *passes in zip(self.roles, *(line[2:] for line in table), strict=True):
            role.passes = max(1, *passes)
        self.sample_weight = len(table) / max(1, sum(line[0] for line in table))

    # The first pass

    def encode(self, budget: Budget, budget_fraction: float | None) -> None:
        """Runs the first pass. It computes the embeddings of every tower and keeps the graphs that fit the budget."""
        keeper = Keeper(budget, budget_fraction, None if self.ranks is None else self.ranks.smallest)
        progress = self._progress(ENCODE, sum(role.passes for role in self.roles))
        for role in self.roles:
            keeper.begin(role.device)
            finding = role.find_batch_norms(in_step=self.ranks is not None)
            with closing(role.chunks(range(role.passes))) as chunks, finding:
                for i, inputs in chunks:
                    self._encode_chunk(role, i, inputs, keeper)
                    progress(role)

    def _encode_chunk(self, role: Role, i: int, inputs: Any, keeper: Keeper) -> None:
        rows, with_graph = role.rows(i), role.trains and keeper.should_build()
        if role.trains:
            role.states[i] = second_pass.capture_generators(role.devices, role.states.get(i - 1))
        held = self.reductions.hold_back(role.index) if with_graph else nullcontext()
        without_trace = nullcontext() if rows else _without_trace(role)
        first = role.keep_called_wrappers() if i == 0 else nullcontext()
        with held, without_trace, first, self._graph(with_graph):
            if not with_graph:
                encoded = role.encode(inputs, rows)
            else:
                encoded, graph_bytes = role.encode_with_graph(inputs, rows)
                role.trains = _has_graph(encoded)
                if role.trains and keeper.should_keep(graph_bytes, role.passes, self._other_bytes(encoded.embeddings)):
                    role.kept[i] = encoded
        role.store(i, encoded.embeddings, self.where)
        if encoded.auxiliary_loss is not None and rows:
            part = rows * encoded.auxiliary_loss.detach()
            role.auxiliary = part if role.auxiliary is None else role.auxiliary + part

    def _other_bytes(self, embeddings: Tensor) -> int:
        """Returns the bytes that the step still has to allocate in addition to graphs: missing gradients and embeddings."""
        parameters = {id(p): p for role in self.roles for p in role.parameters}
        missing = sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad and p.grad is None)
        rows = sum(len(role.source) for role in self.roles)
        return missing + COPIES_OF_EMBEDDINGS * rows * embeddings.shape[1] * embeddings.element_size()

    # The loss

    def differentiate(self, loss_fn: Callable[..., Tensor]) -> Tensor:  # ()
        """Computes the loss and the gradient of the embeddings of each role."""
        leaves = [role.leaf() for role in self.roles]
        with self._graph(True):
            loss = loss_fn(*leaves)
        check_loss(loss)
        total = loss.detach().reshape(()).clone()
        for role in self.roles:
            if role.auxiliary is not None:
                total = total + (role.auxiliary * self.sample_weight).to(total)
        if loss.requires_grad:
            reached = parameters_in([loss])
            self.loss_trains = reached is None or bool(reached - {id(leaf) for leaf in leaves})
            with _outside_autocast():
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        elif not any(role.trains for role in self.roles):
            raise ValueError(_NOTHING_TO_TRAIN)
        for role, leaf in zip(self.roles, leaves, strict=True):
            role.take_gradient(leaf)
        return total

    # The second pass

    def backpropagate(self) -> None:
        """Runs the second pass. It backpropagates through the kept graphs, then encodes each other chunk again."""
        for role in self.roles:
            if role.gradient is None and role.auxiliary is None and not role.shared:
                role.trains = False  # the loss does not depend on the role
        learning = [role for role in self.roles if role.trains]
        self.reductions.schedule([role.index for role in learning if len(role.kept) < role.passes])
        progress = self._progress(BACKWARD, sum(role.passes for role in learning))
        after = second_pass.capture_generators({device for role in self.roles for device in role.devices})
        try:
            for role in learning:  # kept graphs first, so that their memory is free for the other chunks
                for i in list(role.kept):
                    with self.reductions.hold_back(role.index), second_pass.restore_running_statistics(role.batch_norms):
                        self._backpropagate(role, i, role.kept.pop(i), ())
                    role.states.pop(i)
                    progress(role)
            for role in learning:
                self._encode_again(role, progress)
            for index in self.reductions.find_unreduced([role.index for role in learning if role.trains]):
                role = self.roles[index]
                kept = second_pass.keep_running_statistics(role.batch_norms)
                with self.reductions.last_pass(index) as reducing, kept, _without_trace(role), self._graph(True):
                    placeholder = role.encode(role.source.placeholder(role.device), 0)
                    self._backpropagate(role, role.passes, placeholder, reducing)
        finally:
            second_pass.restore_generators(after)
        if not self.loss_trains and not any(role.trains for role in self.roles):
            raise ValueError(_NOTHING_TO_TRAIN)
        for role in learning:
            if role.trains:
                role.comparison.warn(role.name, role.parameters)

    def _encode_again(self, role: Role, progress: Callable[[Role], None]) -> None:
        again = sorted(role.states)  # chunks whose graph was not kept
        with closing(role.chunks(again)) as chunks:
            for i, inputs in chunks:
                last = i == again[-1]
                second_pass.restore_generators(role.states.pop(i))
                around = self.reductions.last_pass(role.index) if last else self.reductions.hold_back(role.index)
                with around as reducing, second_pass.keep_running_statistics(role.batch_norms):
                    with nullcontext() if role.rows(i) else _without_trace(role), self._graph(True):
                        encoded = role.encode(inputs, role.rows(i))
                    if not _has_graph(encoded):
                        role.trains = False  # the tower is a function that calls a frozen module
                        return
                    role.comparison.compare(i, encoded.embeddings)
                    self._backpropagate(role, i, encoded, reducing or ())
                del encoded
                progress(role)

    def _backpropagate(self, role: Role, i: int, encoded: Encoded, reducing: Sequence[torch.nn.Module]) -> None:
        outputs, gradients = [], []
        if encoded.embeddings.requires_grad:
            outputs.append(encoded.embeddings)
            gradients.append(role.gradient_of(i, encoded))
        if encoded.auxiliary_loss is not None and encoded.auxiliary_loss.requires_grad:
            weight = torch.full_like(encoded.auxiliary_loss, role.rows(i) * self.sample_weight, requires_grad=False)
            outputs.append(encoded.auxiliary_loss)
            gradients.append(weight if self.scaler is None else self.scaler.scale(weight))
        for parameter in find_unreached(reducing, outputs):
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
        # Autocast caches casts of parameters. A cast from a pass without a graph would block the gradients.
        if self.graph_mode is not enabled:
            torch.clear_autocast_cache()
            self.graph_mode = enabled
        with torch.set_grad_enabled(enabled):
            yield


_NOTHING_TO_TRAIN = (
    "towers or loss_fn must have a parameter that requires a gradient, got none that the loss depends on: all towers are "
    "frozen or run under torch.no_grad()"
)


def _has_graph(encoded: Encoded) -> bool:
    return any(part is not None and part.requires_grad for part in encoded)


@contextmanager
def _without_trace(role: Role) -> Iterator[None]:
    """Leaves random generators and running statistics unchanged by the pass of a dummy sample."""
    with second_pass.preserve_generators(role.devices), second_pass.use_running_statistics(role.batch_norms):
        yield


@contextmanager
def _outside_autocast() -> Iterator[None]:
    """Disables autocast for a backward pass, whose dtypes follow from the forward pass."""
    with ExitStack() as stack:
        for kind in second_pass.list_autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
