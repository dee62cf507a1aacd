"""A tower: an encoder with its preprocessing, its blocks, and how these are checkpointed and compiled."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from megabatch import extras
from megabatch.cached import batchnorm, randomness
from megabatch.cached.streaming import map_rows
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World
from megabatch_train.data.dataset import IMAGE
from megabatch_train.data.images import TrainingImages
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.lora import LoraConfig

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# The blocks that a tower repeats, such as a transformer's layers, and activation checkpointing of them.
#
# A checkpointed block keeps its inputs alone for the backward pass, and computes its activations again there.


def layers(module: nn.Module) -> list[nn.Module]:
    """The blocks of a tower's lists of equal blocks, or else the tower itself."""
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        if isinstance(part, nn.ModuleList | nn.Sequential) and _repeats(list(part)):
            found.extend(part)
        else:
            for child in part.children():
                walk(child)

    walk(module)
    return found or [module]


def _repeats(parts: list[nn.Module]) -> bool:
    """Whether these are blocks of one class, made of several modules each."""
    return len(parts) > 1 and len({type(part) for part in parts}) == 1 and all(any(part.children()) for part in parts)


def set_checkpointing(modules: Sequence[nn.Module], on: bool) -> None:
    """Turns activation checkpointing of the towers' blocks on or off; names of parameters stay as they are."""
    for layer in {id(layer): layer for module in modules for layer in layers(module)}.values():
        own: Any = vars(layer)
        before = own.get("forward")  # set on the instance, as Accelerate does
        if isinstance(before, _Checkpointed):
            if not on:
                del own["forward"]
                if before.own is not None:
                    own["forward"] = before.own
        elif on:
            own["forward"] = _Checkpointed(layer.forward, before)


class _Checkpointed:
    """A block's `forward`; `own` is the one that was set on the instance before."""

    def __init__(self, forward: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self.forward, self.own = forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# A tower: a module that encodes samples, and its preprocessing.


INITIAL_SCALE = 1 / 0.07  # CLIP's
SIDES = ("first", "second")  # names of the two towers of a pair, in files and settings


@dataclass(frozen=True)
class Tower:
    """One side of a model. `module(collate([prepare(sample, generator), …]))` gives the embeddings of samples."""

    module: nn.Module
    kind: str  # "image" or "text"
    prepare: Callable[[Any, torch.Generator | None], Any]  # preprocesses one sample; augments it if there is a generator
    collate: Callable[[list[Any]], Any]  # results of `prepare` → inputs of the module
    keep: Callable[[Path], None] | None = None  # writes the files, besides weights, that rebuild the tower
    # Tokens used of each sample of collated inputs; the module takes inputs that are cut after the longest.
    lengths: Callable[[Any], Tensor | None] | None = None
    training_images: TrainingImages | None = None  # preprocesses images in training, in place of `prepare` and `collate`


@dataclass(frozen=True)
class Pair:
    """Two towers, which may share a module, with the initial scale and bias of the loss."""

    first: Tower
    second: Tower
    logit_scale: float = INITIAL_SCALE  # exponentiated
    logit_bias: float | None = None  # for sigmoid losses
    name: str = ""  # argument of `load`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of `load`
    lora: LoraConfig | None = None  # of the adapters that are trained; None if there are none

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """Both towers, in the order of a dataset's sides."""
        return self.first, self.second

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of both towers, which may be one."""
        return [tower.module for tower in self.towers]

    @property
    def base_is_elsewhere(self) -> bool:
        """Whether frozen weights can be loaded again by the pair's name, so that its files hold trained weights only."""
        return self.lora is not None and self.name.startswith("hf:")

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of both towers, each once."""
        return list({id(p): p for tower in self.towers for p in tower.module.parameters()}.values())

    def describe_parameters(self) -> str:
        """The number of parameters of each tower, and how many are trained if some are frozen."""
        total, learned = (sum(p.numel() for p in self.parameters() if p.requires_grad or kind) for kind in (True, False))
        trained = "" if learned == total else f", {learned:,} of them trained"
        if self.first.module is self.second.module:
            return f"one tower for both sides, {total:,} parameters{trained}"
        counts = (f"{tower.kind} tower {sum(p.numel() for p in tower.module.parameters()):,}" for tower in self.towers)
        return f"{' + '.join(counts)} parameters{trained}"


SAMPLE_TEXTS = ("a photo of a cat", "two dogs", "")


def sample_inputs(tower: Tower) -> dict[str, Tensor]:
    """Inputs of the tower's module for three samples: noise, or texts of different lengths."""
    noise = torch.randint(0, 256, (3, 3, 64, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = list(noise if tower.kind == IMAGE else SAMPLE_TEXTS)
    inputs = tower.collate([tower.prepare(sample, None) for sample in samples])
    return inputs if isinstance(inputs, dict) else {"images": inputs}


def forward_backward(module: nn.Module, inputs: Any) -> None:
    """A forward and, with gradients enabled, a backward pass; running statistics stay as they were."""
    with batchnorm.keep_running_statistics(batchnorm.layers([module])):
        output: Any = as_encoded(call(module, inputs), type(module).__name__).embeddings
        if output.requires_grad:
            output.float().sum().backward()


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


# The random numbers of PyTorch itself. The second pass of the cached step has to repeat those of the first, and the compiler's
# own depend on the graph, which is another one without gradients.
COMPILER_OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}
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
        with compiler_settings(strict=True):
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
    chosen = dict(COMPILER_OPTIONS)
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
    layer.compile(**COMPILER_OPTIONS)
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
                _run_once(module, map_rows(lambda tensor: tensor.to(world.device), chunk))
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        return  # the first step runs out of memory too, and knows what to do
    if world.rank == 0:
        LOG.info("compiled the towers in %.0f s", time.perf_counter() - began)


def _run_once(module: nn.Module, chunk: Any) -> None:
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
def compiler_settings(*, strict: bool = False) -> Iterator[None]:
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
def without_compiler(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The towers without the compiler, for calls with other sizes than in training."""
    parts = [part for module in modules for part in module.modules()]
    found = {part: part._compiled_call_impl for part in parts if part._compiled_call_impl is not None}
    _set_calls(dict.fromkeys(found))
    try:
        yield
    finally:
        _set_calls(found)


def _set_calls(calls: Mapping[nn.Module, Any]) -> None:
    for layer, made in calls.items():
        layer._compiled_call_impl = made


# ----------------------------------------------------------------------------------------------------------------------
# Code in the files of a model runs only if the user asks for it (`--trust-remote-code`), and never because a file asks.


_ALLOWED: ContextVar[bool] = ContextVar("megabatch_remote_code", default=False)


@contextmanager
def allow_remote_code(allowed: bool = True) -> Iterator[None]:
    """Models that are loaded inside may run code of their files, if `allowed`."""
    before = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def allows_remote_code() -> bool:
    """The argument `trust_remote_code` of transformers."""
    return _ALLOWED.get()


@contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """An error that names the flag, if a model needs code of its files; transformers asks nothing in the terminal."""
    if not extras.is_installed("transformers"):
        yield
        return
    module: Any = extras.load("transformers.dynamic_module_utils", purpose="A transformers encoder")
    before = getattr(module, "TIME_OUT_REMOTE_CODE", 0)
    module.TIME_OUT_REMOTE_CODE = 0  # seconds that transformers waits for an answer
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} must be a model without code of its own, got one whose files have code: --trust-remote-code runs it, with "
            "all rights that you have"
        ) from error
    finally:
        module.TIME_OUT_REMOTE_CODE = before


# ----------------------------------------------------------------------------------------------------------------------
# Floating-point operations of matrix products, convolutions and attention.
#
# PyTorch's `FlopCounterMode` also follows modules, by hooks. They keep the tensors that a checkpoint computes again, and
# without gradients they fail where a module is called with a view of a parameter, as in the attention pool of SigLIP's vision
# tower. Its formulas are used here, without its modules.


# Attention on a CPU, which the registry does not know. The arguments are those of the operators.
_MISSING: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(
        q.shape, k.shape, v.shape
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dout, q, k, v, *rest, **more: (
        sdpa_backward_flop(dout.shape, q.shape, k.shape, v.shape)
    ),
}


def flops(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of one call of an operator that a dispatch mode sees."""
    name = operator._overloadpacket
    formula = flop_registry.get(name) or _MISSING.get(name)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of everything inside the context, in `total`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operator."""
        result = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, result)
        return result
