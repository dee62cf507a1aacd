"""`torch.compile` for the layers of towers, and patch embeddings as matmuls."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.cached import randomness
from megabatch.cached.streaming import map_rows
from megabatch.world import World
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.tower import forward_backward, layers

# ----------------------------------------------------------------------------------------------------------------------
# Patch embeddings as matrix products.
#
# A vision transformer embeds patches by a convolution whose windows do not overlap. Each pixel is in one window, so the
# convolution is one product of windows and weights, which cuDNN does not make use of. On an H200, in bf16, the convolution
# of ViT-B/32 takes 8.4 ms for 1,024 images and 17.8 ms with its backward pass, the product 0.8 and 1.2 ms.


class PatchConv2d(nn.Conv2d):
    """A convolution whose windows do not overlap, as one matrix product. Same parameters and results as `nn.Conv2d`."""

    def forward(self, input: Tensor) -> Tensor:  # (N, C, H, W) → (N, out_channels, rows, columns)
        """The convolution. The result is a view of (N, rows, columns, out_channels), the layout of tokens."""
        height, width = self.kernel_size
        if input.dim() != 4 or input.shape[1] != self.in_channels or input.shape[2] < height or input.shape[3] < width:
            return super().forward(input)  # an image without a batch, or PyTorch's error message
        if torch.is_autocast_enabled(input.device.type) and input.dtype == torch.float32:
            input = input.to(torch.get_autocast_dtype(input.device.type))  # before half as many bytes are rearranged
        rows, columns = input.shape[2] // height, input.shape[3] // width
        covered = input[:, :, : rows * height, : columns * width]
        windows = covered.view(len(input), self.in_channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        return F.linear(windows.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def use_products(modules: Sequence[nn.Module]) -> None:
    """Makes matrix products of all convolutions whose windows do not overlap, in place: parameters and names stay.

    Subclasses of `nn.Conv2d` stay as they are, because they may compute something else. So do windows of one pixel: there is
    nothing to rearrange, and a product would only change the memory layout for the layers after it.

    Args:
        modules: of the two sides, before they are wrapped or sharded. Both may be one.
    """
    for module in modules:
        for part in module.modules():
            if type(part) is nn.Conv2d and _windows_do_not_overlap(part):
                part.__class__ = PatchConv2d


def _windows_do_not_overlap(layer: nn.Conv2d) -> bool:
    windows = layer.kernel_size == layer.stride != (1, 1) and layer.padding in ((0, 0), "valid")
    return windows and (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros")


# ----------------------------------------------------------------------------------------------------------------------
# Compiled towers: `torch.compile` for each layer of a tower, in place, so that names of parameters stay as they are.
#
# The blocks of a transformer are equal, so one compilation serves them all, in a fraction of the time that the whole tower
# would take. A tower without repeated blocks is compiled whole. The compiler is tried first: where it fails, for lack of a
# C compiler for example, the towers stay as they are.
#
# Layers are compiled when they are first called, for the sizes of that call, and once more for any size if another one
# comes. The compiler chooses kernels by the sizes that it sees, so the first call is one with a whole chunk (`warm_up`).
# Layers of packed texts are compiled for any size at once, because no two chunks have equally many tokens.


LOG = logging.getLogger("megabatch")

# The random numbers of PyTorch itself. The second pass of the cached step has to repeat those of the first, and the compiler's
# own depend on the graph, which is another one without gradients.
OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}
# For layers of any size: one kernel for the sums over rows and over columns of a normalisation's backward pass, whatever the
# number of rows. Else the compiler decides by that number, guards it (4,096 rows, and others), and compiles small chunks again.
ANY_SIZE = "mix_order_reduction_non_strict_mode"  # not in all versions of PyTorch

# Compilations of one function, which are all layers of all towers: for each kind of layer two sizes (the second compilation is
# for any size), with and without gradients, in training and in evaluation, and again under FSDP2. The default is 8.
COMPILATIONS = 64
MESSAGE = 300  # characters of an error; the compiler's go on for pages
NOISE = (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",)  # by the compiler itself


def compile_towers(modules: Sequence[nn.Module], world: World) -> bool:
    """Makes towers compile themselves when they are called, and patch embeddings matrix products.

    If the compiler fails on any rank, it only warns, and the towers stay as they are.

    Args:
        modules: of the two sides, before they are wrapped or sharded. Both may be one.
        world: the ranks.

    Returns:
        Whether the compiler works.
    """
    problem = None
    try:
        with settings(strict=True):
            _try_compiler(world.device)
    except Exception as error:  # of whatever part of the compiler
        problem = " ".join([f"{type(error).__name__}:", *str(error).split()])[:MESSAGE]
    problems = [text for text in world.gather_objects(problem) if text is not None]
    if problems:
        if world.rank == 0:
            LOG.warning("the towers cannot be compiled, and the run is slower without: %s", problems[0])
        return False
    use_products(modules)
    for module in {id(module): module for module in modules}.values():
        compile_layers(module, any_size=getattr(module, "packed", False))
    return True


def compile_layers(module: nn.Module, *, any_size: bool = False) -> None:
    """Makes the layers of a tower compile themselves when they are called, with one compilation for all of them.

    Args:
        module: the tower. Its frozen parameters are known by now.
        any_size: whether the first compilation is for any size already.
    """
    chosen = dict(OPTIONS)
    if any_size:
        chosen["dynamic"] = True
        if "options" in chosen and _has_any_size():
            chosen["options"] = {**chosen["options"], f"triton.{ANY_SIZE}": True}
    found = layers(module)
    for layer in found:
        layer.compile(**chosen)
    trained = [layer for layer in found if any(parameter.requires_grad for parameter in layer.parameters())]
    if len(trained) > 1:
        trained[0]._compiled_call_impl = _input_with_gradient(trained[0]._compiled_call_impl)


def _has_any_size() -> bool:
    import torch._inductor.config as inductor

    return hasattr(inductor.triton, ANY_SIZE)


def _input_with_gradient(call: Any) -> Callable[..., Any]:
    """The call of the first trained layer, whose input requires a gradient as the inputs of the layers after it do.

    After frozen embeddings it would not, and the compiler would compile this layer apart. The gradient itself is not used; it
    takes the products of the layer's first projections.
    """

    def call_layer(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and torch.is_grad_enabled() and not args[0].requires_grad:
            args = (args[0].detach().requires_grad_(args[0].is_floating_point()), *args[1:])
        return call(*args, **kwargs)

    return call_layer


class _CompiledLayer(nn.Module):
    """A layer of ours: the compiler of PyTorch 2.8 does not compile a `Sequential` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(torch.nn.functional.gelu(self.linear(x)))
        return found


def _try_compiler(device: torch.device) -> None:
    """Compiles and runs a layer; an error if the compiler does not work, or gives evaluation the code of training."""
    x, layer, switched = torch.ones(8, 8, device=device), _CompiledLayer().to(device), _CompiledLayer().to(device)
    layer.compile(**OPTIONS)
    layer(x).sum().backward()
    switched.compile(backend="eager")  # the choice of the code is Dynamo's, whatever compiles it
    switched(x)
    if (switched.eval()(x) == 0).any():  # dropped
        raise RuntimeError("compiled layers keep their dropout in evaluation, a fault of Python 3.13.0; 3.13.1 is right")


def warm_up(modules: Sequence[nn.Module], inputs: Sequence[Any], world: World) -> None:
    """Encodes as training does, with and without a graph, so that towers are compiled for these sizes.

    Args:
        modules: of the two sides.
        inputs: of a whole chunk of each.
        world: the ranks, which must all call it.
    """
    if world.rank == 0:
        LOG.info("compiling the towers, once")
    began = time.perf_counter()
    try:
        with randomness.preserve_generators([world.device]):
            for module, chunk in zip(modules, inputs, strict=True):
                _encode(module, map_rows(lambda tensor: tensor.to(world.device), chunk))
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        return  # the first step runs out of memory too, and knows what to do
    if world.rank == 0:
        LOG.info("compiled the towers in %.0f s", time.perf_counter() - began)


def _encode(module: nn.Module, chunk: Any) -> None:
    try:
        with torch.no_grad():
            forward_backward(module, chunk)
        torch.clear_autocast_cache()  # of casts without a graph
        if any(parameter.requires_grad for parameter in module.parameters()):
            forward_backward(module, chunk)
    finally:
        torch.clear_autocast_cache()
        module.zero_grad(set_to_none=True)  # also if memory ran out in the middle of backward


@contextmanager
def settings(*, strict: bool = False) -> Iterator[None]:
    """The compiler's settings inside: enough compilations, and no messages about its choices.

    Args:
        strict: whether a layer that cannot be compiled is an error; else PyTorch says so and calls the layer as it is.
    """
    import torch._dynamo

    logs = [logging.getLogger(name) for name in ("torch._inductor", "torch.utils.cpp_extension")]
    before = [log.level for log in logs]
    limits = {"recompile_limit": COMPILATIONS, "accumulated_recompile_limit": 16 * COMPILATIONS}
    with torch._dynamo.config.patch({**limits, "suppress_errors": not strict}), warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(logs, before, strict=True):
                log.setLevel(level)


@contextmanager
def plain(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The towers without the compiler, for calls with other sizes than in training."""
    parts = [part for module in modules for part in module.modules()]
    found = {part: part._compiled_call_impl for part in parts if part._compiled_call_impl is not None}
    _set(dict.fromkeys(found))
    try:
        yield
    finally:
        _set(found)


def _set(calls: Mapping[nn.Module, Any]) -> None:
    for layer, made in calls.items():
        layer._compiled_call_impl = made
