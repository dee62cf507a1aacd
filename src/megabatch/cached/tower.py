"""The part of `cached_backward` for one tower: both passes over its chunks, the check that their embeddings are equal, and
the reductions of a tower under DDP or FSDP2.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.cached import second_pass
from megabatch.cached.second_pass import States, list_autocasts, list_tensors, measure_graph, parameters_in
from megabatch.cached.sources import Source, Span, TensorSource, as_source, longest_first, spans
from megabatch.cached.streaming import DATA, close_at_the_end, map_rows, phase, tensors
from megabatch.world import World, compute_device, is_sharded

# ----------------------------------------------------------------------------------------------------------------------
# The call of a tower. A mapping becomes keyword arguments, a tuple or list becomes positional arguments, and a tensor is the
# only argument.
#
# A tower returns embeddings, or `Encoded(embeddings, auxiliary_loss)`. A plain tuple raises an error. Many encoders return a
# tuple whose second entry is not a loss but a logit scale or the tokens before pooling, so the loss would be wrong.


def call(tower: Callable[..., Any], inputs: Any) -> Any:
    """Calls the tower with one chunk of inputs."""
    if isinstance(inputs, Mapping):
        return tower(**inputs)
    if isinstance(inputs, tuple | list):
        return tower(*inputs)
    return tower(inputs)


class Encoded(NamedTuple):
    """The output of a tower that has an auxiliary loss.

    Attributes:
        embeddings: (n, D), one row for each sample of the chunk.
        auxiliary_loss: a scalar (the mean over the chunk), (n,) with one number for each sample, or None for no loss.
            `cached_backward` adds its mean over the whole batch to the loss.

    Examples:
        ```python
        class Tower(nn.Module):
            def forward(self, x):
                return megabatch.Encoded(self.head(x), self.router_loss(x))
        ```
    """

    embeddings: Tensor
    auxiliary_loss: Tensor | None = None


def as_encoded(answer: Any, name: str) -> Encoded:
    """Converts the output of a tower to `Encoded`. `name` is the name of the tower in messages."""
    embeddings: Any
    embeddings, auxiliary = answer if isinstance(answer, Encoded) else (answer, None)
    if not isinstance(embeddings, Tensor):
        within = " in megabatch.Encoded" if isinstance(answer, Encoded) else ""
        raise TypeError(
            f"{name} must return embeddings, a tensor of shape (n, D), or megabatch.Encoded(embeddings, auxiliary_loss), "
            f"got {_kind(embeddings)}{within}; wrap the tower in a module that returns only these"
        )
    return Encoded(embeddings, auxiliary)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


# ----------------------------------------------------------------------------------------------------------------------
# Comparison of both passes. If a tower returns different embeddings in the second pass, its gradients are wrong.


class Comparison:
    """Compares the last embedding of each chunk of one tower. The numbers stay on the device until `warn`."""

    def __init__(self) -> None:
        self._first: dict[int, Tensor] = {}  # number of the pass → (D,)
        self._difference: Tensor | None = None  # (), the largest relative difference so far

    def remember(self, i: int, embeddings: Tensor) -> None:  # (n, D)
        """Keeps the last embedding of a chunk in the first pass."""
        self._first[i] = embeddings.detach()[-1].clone()

    def compare(self, i: int, embeddings: Tensor) -> None:  # (n, D)
        """Compares a chunk in the second pass. A dummy pass is not compared."""
        if i not in self._first:
            return
        dtype = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
        before, now = self._first.pop(i).to(dtype), embeddings.detach()[-1].to(dtype)
        difference = (now - before).norm() / before.norm().clamp_min(torch.finfo(dtype).tiny)
        self._difference = difference if self._difference is None else torch.maximum(self._difference, difference)

    def warn(self, name: str, parameters: Iterable[Tensor]) -> None:
        """Warns if the difference is larger than rounding errors. The dtypes of the parameters determine the bound."""
        if self._difference is None:
            return
        dtypes = {p.dtype for p in parameters if p.dtype.is_floating_point}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in list_autocasts()}
        if torch.get_float32_matmul_precision() != "highest":
            dtypes.add(torch.bfloat16)
        bound = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps) ** 0.5
        value = self._difference.item()
        if value > bound:
            warn(
                f"{name} must give the same embeddings in both passes, got a relative difference of {value:.1e}, so its "
                "gradients are wrong. Does the tower change a state between calls, or use its own random generator?",
                RuntimeWarning,
                stacklevel=4,
            )


# ----------------------------------------------------------------------------------------------------------------------
# A role is one (tower, inputs) pair of a step. It stores the chunks, and the state of each chunk between the passes.


DEVICE, HOST = "device", "host"


class Role:
    """One (tower, inputs) pair of a step."""

    def __init__(self, index: int, tower: Callable[..., Any], inputs: Any, chunk_size: int) -> None:
        self.index, self.name, self.tower = index, f"towers[{index}]", tower
        self.modules = modules_of(tower)
        self.parameters = [p for module in self.modules for p in module.parameters()]
        self.device = compute_device(self.parameters[0]) if self.parameters else None
        self.source: Source = as_source(inputs, f"{self.name}[1]", self.device)
        inputs_train = isinstance(self.source, TensorSource) and self.source.requires_grad
        self.shared = find_distributed_modules(self.modules)
        self.batch_norms = second_pass.list_batch_norms(
            [*self.modules, *_find_named_modules(tower)]
        )  # `find_batch_norms` adds to it
        self.chunk_size = chunk_size
        self.order: Tensor | None = None  # (N,) the samples from long to short, if they are encoded in that order
        self.spans = self._spans()
        self.passes = len(self.spans)  # larger if another rank has more chunks; the additional passes are dummy passes
        # A function whose modules are unknown counts as trained until a pass shows otherwise.
        self.trains = not self.modules or inputs_train or any(p.requires_grad for p in self.parameters)
        self.devices = {compute_device(p) for p in self.parameters}  # the devices whose random generators are replayed
        self.states: dict[int, States] = {}
        self.kept: dict[int, Encoded] = {}
        self.graph_bytes: dict[tuple[Any, ...], int] = {}  # shapes of a chunk's inputs → measured bytes
        self.comparison = Comparison()
        self.auxiliary: Tensor | None = None  # (), Σ n · auxiliary loss over chunks
        self.embeddings: Tensor | None = None  # (N, D)
        self.gradient: Tensor | None = None  # (N, D)

    def _spans(self) -> list[Span]:
        """Returns the chunks. Sorts a source that has lengths.

        With batch normalization it does not sort, because the statistics would depend on the order.
        """
        source, lengths = self.source, self.source.lengths
        if lengths is not None and not self.batch_norms:
            self.order = longest_first(lengths, source.width)
        if lengths is None or self.order is None:
            return [(i, min(i + self.chunk_size, len(source))) for i in range(0, len(source), self.chunk_size)]
        self.source = source.reorder(self.order)
        return spans(lengths[self.order].tolist(), source.width, self.chunk_size)

    @contextmanager
    def keep_called_wrappers(self) -> Iterator[None]:
        """Removes wrappers from `shared` that the pass in the context does not call.

        A method, for example, may use only one of two wrapped parts.
        """
        if len(self.shared) < 2:
            yield
            return
        called: list[nn.Module] = []
        hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in self.shared]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if called:  # empty if a wrapper is reached without its forward hooks
            self.shared[:] = [module for module in self.shared if module in called]

    @contextmanager
    def find_batch_norms(self, *, in_step: bool) -> Iterator[None]:
        """Adds the batch-norm layers that a function calls in the first pass. They are unknown before the function runs.

        Args:
            in_step: whether all ranks encode equally often, which SyncBatchNorm needs.
        """

        def add_layers(module: nn.Module) -> None:
            known = {id(layer) for _, layer in self.batch_norms}
            new = [(name, layer) for name, layer in second_pass.list_batch_norms([module]) if id(layer) not in known]
            for name, layer in new:
                if not in_step and second_pass.waits_for_ranks(layer):
                    raise ValueError(
                        f"{self.name}[0] must be a module if it has SyncBatchNorm, because all ranks must encode equally "
                        "often, and the layers of a function are unknown before it runs; got "
                        f"{type(self.tower).__name__} that calls {type(module).__name__} with SyncBatchNorm {name!r}"
                    )
            self.batch_norms += new

        if isinstance(self.tower, nn.Module):
            yield
        else:
            with second_pass.watch_calls(add_layers):
                yield

    def rows(self, i: int) -> int:
        """Returns the number of samples in pass i. It is 0 for a dummy pass."""
        return self.spans[i][1] - self.spans[i][0] if i < len(self.spans) else 0

    def chunks(self, passes: Sequence[int]) -> Generator[tuple[int, Any], None, None]:
        """Yields the number and the inputs of these passes, in order."""
        iterator = self.source.chunks([self.spans[i] for i in passes if i < len(self.spans)], self.device)
        with close_at_the_end(iterator):
            for i in passes:
                if i < len(self.spans):
                    try:
                        with phase(DATA):
                            chunk = next(iterator)
                    except StopIteration:
                        raise ValueError(
                            f"{self.name}[1] must yield a chunk for each requested span, got none for {self._samples(i)}"
                        ) from None
                else:
                    chunk = self.source.placeholder(self.device)
                yield i, chunk
                del chunk

    def encode(self, inputs: Any, rows: int) -> Encoded:
        """Calls the tower and checks its output. The auxiliary loss is averaged. `rows` is 0 for a dummy sample."""
        answer, auxiliary = as_encoded(call(self.tower, inputs), self.name)
        if is_sharded(answer):
            answer = answer.full_tensor()  # type: ignore[attr-defined]
        if answer.dim() != 2 or (rows and len(answer) != rows) or not answer.dtype.is_floating_point:
            dtype = str(answer.dtype).removeprefix("torch.")
            raise ValueError(
                f"{self.name} must return embeddings of shape ({rows or 'n'}, D) for a chunk of {rows or 'n'} samples, "
                f"got shape {tuple(answer.shape)} of {dtype}"
            )
        if torch.is_grad_enabled() and answer.is_inference():
            raise ValueError(
                f"{self.name} must not run in inference mode, because it is trained; got an inference tensor from it "
                "(for a frozen tower use torch.no_grad())"
            )
        return Encoded(answer, None if auxiliary is None else self._mean(auxiliary, rows))

    def encode_with_graph(self, inputs: Any, rows: int) -> tuple[Encoded, int]:
        """Encodes a chunk. Returns the bytes of its graph as well, including the inputs that the graph keeps alive.

        On CUDA, the bytes are measured once for each shape of inputs.
        """
        if self.source.reuses_memory:
            inputs = map_rows(torch.clone, inputs)
        held = [tensor for _, tensor in tensors(inputs, self.name)]
        shapes = tuple(tuple(tensor.shape) for tensor in held)
        on_cuda = self.device is not None and self.device.type == "cuda"
        if on_cuda and shapes in self.graph_bytes:
            return self.encode(inputs, rows), self.graph_bytes[shapes]
        held_anyway = isinstance(self.source, TensorSource)
        with measure_graph(self.device, [*list_tensors(self.modules), *(held if held_anyway else ())]) as graph:
            encoded = self.encode(inputs, rows)
        if on_cuda and not held_anyway:
            graph.bytes += sum(tensor.nbytes for tensor in held)
        self.graph_bytes[shapes] = graph.bytes
        return encoded, graph.bytes

    def _mean(self, auxiliary: Any, rows: int) -> Tensor:
        if not isinstance(auxiliary, Tensor) or (rows and auxiliary.shape not in ((), (1,), (rows,))):
            shape = f"shape {tuple(auxiliary.shape)}" if isinstance(auxiliary, Tensor) else type(auxiliary).__name__
            raise ValueError(
                f"{self.name} must return an auxiliary loss that is a scalar (the mean over the chunk) or has one number for "
                f"each of the {rows} samples, got {shape}"
            )
        return auxiliary.mean()

    def store(self, i: int, embeddings: Tensor, where: str) -> None:
        """Copies a chunk's embeddings into the (N, D) buffer. The first chunk allocates the buffer."""
        if self.embeddings is None:
            shape = len(self.source), embeddings.shape[1]
            self.embedding_device = embeddings.device
            if where == HOST:
                pinned = embeddings.device.type == "cuda"
                self.embeddings = torch.empty(shape, dtype=embeddings.dtype, pin_memory=pinned)
            else:
                self.embeddings = torch.empty(shape, dtype=embeddings.dtype, device=embeddings.device)
        if not self.rows(i):
            return
        start, stop = self.spans[i]
        place = self.embeddings[start:stop]
        if place.shape != embeddings.shape or place.dtype != embeddings.dtype:
            raise ValueError(
                f"{self.name} must return embeddings of one dimension and dtype, got ({place.shape[1]}, {place.dtype}) first "
                f"and ({embeddings.shape[1]}, {embeddings.dtype}) for {self._samples(i)}"
            )
        place.copy_(embeddings.detach(), non_blocking=True)
        if self.trains:
            self.comparison.remember(i, embeddings)

    def _samples(self, i: int) -> str:
        """Describes the samples of pass i for messages."""
        start, stop = self.spans[i]
        if self.order is None:
            return f"samples {start} to {stop - 1}"
        return f"{stop - start} samples such as {int(self.order[start])}"

    def leaf(self) -> Tensor:  # (N, D)
        """Returns the embeddings as a leaf for the loss, in the original order and on the device.

        It requires a gradient if the tower is trained.
        """
        assert self.embeddings is not None, "all chunks have been encoded"
        leaf = self.embeddings.to(self.embedding_device, non_blocking=True).detach()
        if self.order is not None:
            leaf = leaf.index_select(0, _copy_to(self.order.argsort(), leaf.device))
            if self.embeddings.device == leaf.device:
                self.embeddings = None  # the leaf is a copy
        return leaf.requires_grad_(self.trains)

    def take_gradient(self, leaf: Tensor) -> None:
        """Stores the gradient of the embeddings. It reuses the buffer of the embeddings if that is in host memory."""
        held, self.embeddings, gradient = self.embeddings, None, leaf.grad
        if gradient is not None and self.order is not None:
            gradient = gradient.index_select(0, _copy_to(self.order, gradient.device))
            leaf.grad = None
        if gradient is not None and held is not None and held.device != gradient.device:
            gradient = held.copy_(gradient, non_blocking=True)
        self.gradient = gradient

    def gradient_of(self, i: int, encoded: Encoded) -> Tensor:  # (n, D)
        """Returns the gradient of the embeddings of pass i, or zero in a dummy pass or if the loss does not use the tower."""
        if self.gradient is None or not self.rows(i):
            return torch.zeros_like(encoded.embeddings)
        start, stop = self.spans[i]
        return self.gradient[start:stop].to(encoded.embeddings.device, non_blocking=True)


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device` through pinned memory. A copy from pageable memory would wait for all queued kernels."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def modules_of(tower: Any) -> list[nn.Module]:
    """Returns the modules of a tower: the module itself, the owner of a method, or the modules in a partial.

    The modules of other functions are unknown.
    """
    if isinstance(tower, nn.Module):
        return [tower]
    if isinstance(tower, partial):
        parts = [tower.func, *tower.args, *tower.keywords.values()]
        return [module for part in parts for module in modules_of(part)]
    owner = getattr(tower, "__self__", None)
    return [owner] if isinstance(owner, nn.Module) else []


def _find_named_modules(tower: Any) -> list[nn.Module]:
    """Returns modules among the globals and closure variables that a function's code names, even if it is compiled."""
    while isinstance(tower, partial):
        tower = tower.func
    function = inspect.unwrap(tower)
    if not isinstance(function, FunctionType):
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            named.append(cell.cell_contents)
    return [value for value in named if isinstance(value, nn.Module)]


# ----------------------------------------------------------------------------------------------------------------------
# Towers under DDP or FSDP2: one reduction of gradients for each step, and equally many passes on every rank.
#
# DDP and FSDP2 reduce gradients in every backward pass. Gradient caching has one backward pass for each chunk but needs only
# one reduction. FSDP2 also gathers parameters in every pass, so ranks with different numbers of chunks would wait forever.


def find_distributed_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the DDP wrappers in these modules and the outermost modules that FSDP2 shards."""
    distributed: list[nn.Module] = []
    for module in modules:
        _collect(module, distributed)
    return distributed


def _collect(module: nn.Module, distributed: list[nn.Module]) -> None:
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module):
        if module not in distributed:
            distributed.append(module)
        return
    for child in module.children():
        _collect(child, distributed)


def is_fully_sharded(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was applied to this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Reductions:
    """Reduces every gradient once in a step, in the last backward pass that reaches its module.

    Args:
        modules: the DDP and FSDP2 modules of each role.
        sync: whether to reduce in this step. It is False while gradients are accumulated over steps.
    """

    def __init__(self, modules: Sequence[Sequence[nn.Module]], sync: bool) -> None:
        self._modules = modules
        self._pending: list[nn.Module] = []
        self._final: dict[int, list[nn.Module]] = {}  # role → the modules that are reduced in its last pass
        if sync:
            for module in (module for group in modules for module in group):
                off = isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync  # in no_sync()
                if not off and module not in self._pending:
                    self._pending.append(module)

    def schedule(self, encoding_again: Sequence[int]) -> None:
        """Assigns the reduction of each module to the last role that uses it. Takes the roles that encode again, in order."""
        for module in self._pending:
            users = [role for role in encoding_again if module in self._modules[role]]
            if users:
                self._final.setdefault(users[-1], []).append(module)

    @contextmanager
    def hold_back(self, role: int) -> Iterator[None]:
        """Makes forward and backward passes in the context accumulate gradients without a reduction."""
        with self._only(self._modules[role], ()):
            yield

    @contextmanager
    def last_pass(self, role: int) -> Iterator[list[nn.Module]]:
        """Makes passes in the context reduce the modules that no later role uses. Yields these modules."""
        final = self._final.get(role, [])
        with self._only(self._modules[role], final):
            yield final

    def done(self, modules: Sequence[nn.Module]) -> None:
        """Records that a backward pass has reduced these modules."""
        self._pending = [module for module in self._pending if module not in modules]

    def find_unreduced(self, roles: Iterable[int]) -> Iterator[int]:
        """Yields roles that need another pass for the reduction, because the graphs of all their chunks were kept."""
        for role in roles:
            own = [module for module in self._pending if module in self._modules[role]]
            if own:
                self._final[role] = own
                yield role

    @contextmanager
    def _only(self, modules: Sequence[nn.Module], final: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as held:
            for module in modules:
                reduce = module in final
                if isinstance(module, DistributedDataParallel):
                    if not reduce:
                        held.enter_context(module.no_sync())
                else:
                    _reduce_fully_sharded(module, reduce)
                    held.callback(_reduce_fully_sharded, module, True)  # the default of FSDP2
            yield


def _reduce_fully_sharded(module: Any, reduce: bool) -> None:
    module.set_requires_gradient_sync(reduce)
    module.set_is_last_backward(reduce)


def find_unreached(modules: Iterable[nn.Module], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns parameters that already have a gradient and that this backward pass does not reach.

    DDP reduces after all its parameters have got a gradient in *this* backward pass, so it would wait for the returned
    parameters forever. An example is a learned scale, which got its gradient in the backward pass of the loss. With
    `find_unused_parameters`, DDP finds these parameters itself.
    """
    waiting = [
        parameter
        for module in modules
        if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters
        for parameter in module.module.parameters()
        if parameter.requires_grad and parameter.grad is not None
    ]
    if not waiting:
        return []
    reached = parameters_in(outputs)
    if reached is None:  # hidden by reentrant activation checkpointing; DDP raises an error if a parameter has no gradient
        return []
    return [parameter for parameter in waiting if id(parameter) not in reached]


class ShardRanks:
    """All ranks that share the towers.

    The wrappers of the towers have one process group, or one for each dimension of a mesh.
    """

    def __init__(self, worlds: Sequence[World]) -> None:
        self._worlds = worlds

    @classmethod
    def of(
        cls, modules: Sequence[nn.Module], synchronized: Sequence[nn.Module], device: torch.device | None
    ) -> "ShardRanks | None":
        """Returns the ranks of DDP and FSDP2 modules and of SyncBatchNorm layers, or None for a single process."""
        worlds = [World.of(group, device) for group in _groups(modules, synchronized)]
        return cls(worlds) if worlds else None

    def smallest(self, number: int) -> int:
        """Returns the smallest number over all ranks."""
        return min(line[0] for line in self.gather_integers([number]))

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the integers of every rank, in equal order on all ranks. This takes one all-gather for each process group."""
        table = [list(values)]
        for world in self._worlds:
            flat = [value for line in table for value in line]
            gathered = [value for line in world.gather_integers(flat) for value in line]
            table = [gathered[i : i + len(values)] for i in range(0, len(gathered), len(values))]
        return table


def _groups(modules: Sequence[nn.Module], synchronized: Sequence[nn.Module]) -> list["dist.ProcessGroup"]:
    """Returns the process groups of the first module that has any, one for each mesh dimension.

    All towers must be on the same ranks.
    """
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            return [module.process_group] if module.process_group.size() > 1 else []
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
    for layer in synchronized:
        group = getattr(layer, "process_group", None) or dist.group.WORLD
        if dist.is_initialized() and group is not None:
            return [group] if group.size() > 1 else []
    return []
