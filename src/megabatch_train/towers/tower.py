"""A tower: an encoder with its preprocessing. This file also checkpoints and compiles the blocks of towers."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from megabatch import extras
from megabatch.cached import second_pass
from megabatch.cached.replay import stack
from megabatch.cached.streaming import map_rows
from megabatch.cached.tower import as_encoded, call
from megabatch.world import World
from megabatch_train.data.dataset import AUDIO, IMAGE
from megabatch_train.data.media.images import TrainingImages
from megabatch_train.machine import ran_out_of_memory
from megabatch_train.towers.layers.fast_layers import replace_patch_convolutions, replace_self_attention
from megabatch_train.towers.tokens import ImageTokens

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# The blocks that a tower repeats, such as the layers of a transformer, and their activation checkpointing.
#
# A checkpointed block keeps only its inputs for the backward pass, and computes its activations again there.


def layers(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks in a tower's lists of equal blocks, or the tower itself if it has no such list."""
    blocks: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        if isinstance(part, nn.ModuleList | nn.Sequential) and _repeats(list(part)):
            blocks.extend(part)
        else:
            for child in part.children():
                walk(child)

    walk(module)
    return blocks or [module]


def _repeats(parts: list[nn.Module]) -> bool:
    """Returns whether the parts are at least two blocks of one class, which all have submodules."""
    return len(parts) > 1 and len({type(part) for part in parts}) == 1 and all(any(part.children()) for part in parts)


def set_checkpointing(modules: Sequence[nn.Module], on: bool) -> None:
    """Turns activation checkpointing of the towers' blocks on or off. The names of parameters do not change."""
    for layer in {id(layer): layer for module in modules for layer in layers(module)}.values():
        own: Any = vars(layer)
        before = own.get("forward")  # a `forward` that is set on the instance, as Accelerate does
        if isinstance(before, _Checkpointed):
            if not on:
                del own["forward"]
                if before.own is not None:
                    own["forward"] = before.own
        elif on:
            own["forward"] = _Checkpointed(layer.forward, before)


class _Checkpointed:
    """The `forward` of a checkpointed block. `own` is a `forward` that was set on the instance before."""

    def __init__(self, forward: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self.forward, self.own = forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# A tower: a module that encodes samples, and its preprocessing.


INITIAL_SCALE = 1 / 0.07  # as in CLIP
SIDES = ("first", "second")  # names of the two towers of a pair, in files and settings


@dataclass(frozen=True)
class Tower:
    """One side of a model. `module(collate([prepare(sample, generator), …]))` returns the embeddings of samples."""

    module: nn.Module
    kind: str  # kind of the samples, as in `Dataset.sides`: "image", "text", "audio", "value" or "file"
    prepare: Callable[[Any, torch.Generator | None], Any]  # preprocesses one sample; augments it if there is a generator
    collate: Callable[[list[Any]], Any] = stack  # results of `prepare` → inputs of the module (default: stacks tensors)
    keep: Callable[[Path], None] | None = None  # writes the files that rebuild the tower, except the weights
    # Returns the number of used tokens of each sample of collated inputs. Inputs can be trimmed after the longest sample.
    lengths: Callable[[Any], Tensor | None] | None = None
    training_images: TrainingImages | None = None  # replaces `prepare` and `collate` for training images
    tokens: ImageTokens | None = None  # patches of images, if the module has the argument `kept_patches`
    # Returns the number of tokens of a stored sample without preparing it. If set, a step reads the samples chunk by chunk, and
    # puts samples of similar length together.
    measure: Callable[[Any], int] | None = None

    def resize(self, side: int) -> "Tower":
        """Returns the tower with training images of another size. A tower without training images does not change."""
        if self.training_images is None:
            return self
        crop = replace(self.training_images.crop, size=(side, side))
        return replace(self, training_images=replace(self.training_images, crop=crop))

    @property
    def plural(self) -> str:
        """The word for several samples of the tower."""
        return "recordings" if self.kind == AUDIO else f"{self.kind}s"

    @property
    def patches(self) -> int:
        """The number of patches of a training image; 0 if the patches cannot be dropped."""
        if self.tokens is None:
            return 0
        return self.tokens.count(self.tokens.size if self.training_images is None else self.training_images.crop.size)


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of all models except "small"."""

    rank: int = 0  # LoRA rank of the adapters; 0 trains all weights without adapters
    alpha: float | None = None  # adapters are multiplied by alpha / rank (default: twice the rank)
    dropout: float = 0.0  # dropout of the inputs of an adapter
    targets: tuple[str, ...] = ()  # endings of the names of layers (default: all linear layers)
    quantize: Literal["none", "int8", "nf4"] = "none"  # how frozen weights of "hf:" models are stored, by bitsandbytes
    merge: bool = False  # whether the saved model has the adapters added to its weights

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.rank < 0:
            raise ValueError(f"lora.rank must be at least 0, got {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"lora.alpha must be more than 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and less than 1, got {self.dropout}")
        for name in ("alpha", "dropout", "targets", "quantize", "merge"):
            value = getattr(self, name)
            if not self.rank and value != getattr(LoraConfig, name):
                raise ValueError(f"lora.{name} must not be set without lora.rank, got {value!r}")
        if self.quantize != "none" and self.merge:
            raise ValueError(
                f"lora.merge must be false with lora.quantize, got lora.quantize = {self.quantize!r}. Adapters are so "
                "small that rounding to quantized weights removes them. Merge the adapters with the original weights instead "
                "(PEFT: merge_and_unload)"
            )


@dataclass(frozen=True)
class Pair:
    """Two towers, which may share a module, with the initial scale and bias of the loss."""

    first: Tower
    second: Tower
    logit_scale: float = INITIAL_SCALE  # exponentiated
    logit_bias: float | None = None  # for sigmoid losses
    name: str = ""  # argument of `load`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of `load`
    lora: LoraConfig | None = None  # configuration of the trained adapters; None if there are none

    @property
    def towers(self) -> tuple[Tower, Tower]:
        """Both towers, in the order of a dataset's sides."""
        return self.first, self.second

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of both towers, which may be the same module."""
        return [tower.module for tower in self.towers]

    @property
    def base_is_elsewhere(self) -> bool:
        """Whether the files of the pair contain only trained weights, because the frozen weights can be loaded by its name."""
        return self.lora is not None and self.name.startswith("hf:")

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of both towers, each once."""
        return list({id(p): p for tower in self.towers for p in tower.module.parameters()}.values())

    def describe_parameters(self) -> str:
        """Returns the number of parameters of each tower as text, and how many are trained if some are frozen."""
        total, learned = (sum(p.numel() for p in self.parameters() if p.requires_grad or frozen) for frozen in (True, False))
        trained = "" if learned == total else f", {learned:,} of them trained"
        if self.first.module is self.second.module:
            return f"one tower for both sides, {total:,} parameters{trained}"
        counts = (f"{tower.kind} tower {sum(p.numel() for p in tower.module.parameters()):,}" for tower in self.towers)
        return f"{' + '.join(counts)} parameters{trained}"


SAMPLE_TEXTS = ("a photo of a cat", "two dogs", "")


@contextmanager
def use_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Sets evaluation mode within the context, and then restores the mode of every submodule."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def sample_inputs(tower: Tower) -> dict[str, Tensor]:
    """Returns inputs of the tower's module for three samples: noise, or texts of different lengths."""
    noise = torch.randint(0, 256, (3, 3, 64, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = list(noise if tower.kind == IMAGE else SAMPLE_TEXTS)
    inputs = tower.collate([tower.prepare(sample, None) for sample in samples])
    return inputs if isinstance(inputs, dict) else {"images": inputs}


def forward_backward(module: nn.Module, inputs: Any) -> None:
    """Runs a forward pass, and a backward pass if gradients are enabled. Running statistics do not change."""
    with second_pass.keep_running_statistics(second_pass.list_batch_norms([module])):
        output: Any = as_encoded(call(module, inputs), type(module).__name__).embeddings
        if output.requires_grad:
            output.float().sum().backward()


# ----------------------------------------------------------------------------------------------------------------------
# Compiled towers: `torch.compile` is applied to each layer of a tower in place, so the names of parameters do not change.
#
# The blocks of a transformer are equal, so one compilation serves all of them, and takes a fraction of the time that the whole
# tower would take. A tower without repeated blocks is compiled as a whole. The compiler is tried first. If it fails, because
# there is no C compiler for example, the towers are not compiled.
#
# Layers are compiled for the sizes of their first call. If a call with another size follows, they are compiled once more, for
# any size. The compiler chooses kernels by the sizes that it sees, so the first call has a full chunk (`warm_up`). Layers of
# packed texts are compiled for any size at once, because chunks differ in their number of tokens.


# Makes compiled code use PyTorch's random numbers. The second pass of gradient caching must repeat the random numbers of the
# first pass. The compiler's own random numbers depend on the graph, which differs without gradients.
COMPILER_OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}
# Option for layers that are compiled for any size. The backward pass of a normalization sums over rows and over columns. With
# this option, one kernel computes both sums for any number of rows. Without it, the compiler decides by the number of rows,
# adds guards (at 4,096 rows, for example), and compiles small chunks again.
ANY_SIZE = "mix_order_reduction_non_strict_mode"  # not in all versions of PyTorch

# Limit of compilations of one function. All layers of all towers count as one function. Each kind of layer is compiled for two
# sizes (the second one is any size), with and without gradients, in training and in evaluation, and again under FSDP2. The
# default of PyTorch is 8.
COMPILATIONS = 64
MESSAGE = 300  # maximum number of characters of a compiler error; full messages have several pages
NOISE = (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",)  # the compiler causes this warning


def compile_towers(modules: Sequence[nn.Module], world: World) -> bool:
    """Makes towers compile themselves when they are called, with faster patch embeddings and self-attention.

    If the compiler fails on any rank, this function logs a warning, and the towers are not compiled.

    Args:
        modules: the modules of the two sides, before they are wrapped or sharded. Both can be the same module.
        world: the ranks.

    Returns:
        Whether the compiler works.
    """
    problem = None
    try:
        with compiler_settings(strict=True):
            _try_compiler(world.device)
    except Exception as error:  # any part of the compiler can fail
        problem = " ".join([f"{type(error).__name__}:", *str(error).split()])[:MESSAGE]
    problems = [text for text in world.gather_objects(problem) if text is not None]
    if problems:
        if world.rank == 0:
            LOG.warning("the towers cannot be compiled, so the run is slower: %s", problems[0])
        return False
    replace_patch_convolutions(modules)
    replace_self_attention(modules, world.device)
    for module in {id(module): module for module in modules}.values():
        compile_layers(module, any_size=getattr(module, "packed", False))
    return True


def compile_layers(module: nn.Module, *, any_size: bool = False) -> None:
    """Makes the layers of a tower compile themselves when they are called, with one compilation for all of them.

    Args:
        module: the tower. Parameters that will be frozen must already be frozen.
        any_size: whether the first compilation is already for any size.
    """
    options = dict(COMPILER_OPTIONS)
    if any_size:
        options["dynamic"] = True
        if "options" in options and _has_any_size():
            options["options"] = {**options["options"], f"triton.{ANY_SIZE}": True}
    blocks = layers(module)
    for layer in blocks:
        layer.compile(**options)
    trained = [layer for layer in blocks if any(parameter.requires_grad for parameter in layer.parameters())]
    if len(trained) > 1:
        trained[0]._compiled_call_impl = _input_with_gradient(trained[0]._compiled_call_impl)


def _has_any_size() -> bool:
    import torch._inductor.config as inductor

    return hasattr(inductor.triton, ANY_SIZE)


def _input_with_gradient(call: Any) -> Callable[..., Any]:
    """Returns a call of the first trained layer that makes its input require a gradient, as the inputs of later layers do.

    After frozen embeddings, the input would not require a gradient, and the compiler would compile this layer separately. The
    gradient is not used. It costs the matmuls of the layer's first projections.
    """

    def call_layer(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and torch.is_grad_enabled() and not args[0].requires_grad:
            args = (args[0].detach().requires_grad_(args[0].is_floating_point()), *args[1:])
        return call(*args, **kwargs)

    return call_layer


class _CompiledLayer(nn.Module):
    """A small layer to try the compiler with. It is not a `Sequential`, which PyTorch 2.8 does not compile as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(torch.nn.functional.gelu(self.linear(x)))
        return output


def _try_compiler(device: torch.device) -> None:
    """Compiles and runs a layer. Raises an error if the compiler fails, or if evaluation runs the code of training."""
    x, layer, switched = torch.ones(8, 8, device=device), _CompiledLayer().to(device), _CompiledLayer().to(device)
    layer.compile(**COMPILER_OPTIONS)
    layer(x).sum().backward()
    switched.compile(backend="eager")  # Dynamo chooses the code, independently of the backend
    switched(x)
    if (switched.eval()(x) == 0).any():  # dropout has zeroed values
        raise RuntimeError("compiled layers keep their dropout in evaluation, a bug of Python 3.13.0; 3.13.1 has fixed it")


def warm_up(modules: Sequence[nn.Module], inputs: Sequence[Any], world: World) -> None:
    """Encodes as training does, with and without a graph, so that towers are compiled for these sizes. All ranks must call it.

    Args:
        modules: the modules of the two sides.
        inputs: inputs of a full chunk for each module.
        world: the ranks.
    """
    if world.rank == 0:
        LOG.info("compiling the towers, once per run")
    began = time.perf_counter()
    try:
        with second_pass.preserve_generators([world.device]):
            for module, chunk in zip(modules, inputs, strict=True):
                _run_once(module, map_rows(lambda tensor: tensor.to(world.device), chunk))
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        return  # the first step runs out of memory too, and handles the error
    if world.rank == 0:
        LOG.info("compiled the towers in %.0f s", time.perf_counter() - began)


def _run_once(module: nn.Module, chunk: Any) -> None:
    try:
        with torch.no_grad():
            forward_backward(module, chunk)
        torch.clear_autocast_cache()  # the cached casts have no graph
        if any(parameter.requires_grad for parameter in module.parameters()):
            forward_backward(module, chunk)
    finally:
        torch.clear_autocast_cache()
        module.zero_grad(set_to_none=True)  # needed even if backward ran out of memory


@contextmanager
def compiler_settings(*, strict: bool = False) -> Iterator[None]:
    """Sets the compiler's options within the context: enough compilations, and no messages about its choices.

    Args:
        strict: whether a layer that cannot be compiled raises an error. If false, PyTorch logs it and runs the plain layer.
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
    """Runs the towers uncompiled within the context, for calls with other sizes than in training."""
    parts = [part for module in modules for part in module.modules()]
    calls = {part: part._compiled_call_impl for part in parts if part._compiled_call_impl is not None}
    _set_calls(dict.fromkeys(calls))
    try:
        yield
    finally:
        _set_calls(calls)


def _set_calls(calls: Mapping[nn.Module, Any]) -> None:
    for layer, compiled in calls.items():
        layer._compiled_call_impl = compiled


# ----------------------------------------------------------------------------------------------------------------------
# Code in the files of a model runs only if the user allows it (`--trust-remote-code`). A file cannot allow it.


_ALLOWED: ContextVar[bool] = ContextVar("megabatch_remote_code", default=False)


@contextmanager
def allow_remote_code(allowed: bool = True) -> Iterator[None]:
    """Lets models that are loaded within the context run code of their files, if `allowed`."""
    before = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def allows_remote_code() -> bool:
    """Returns the argument `trust_remote_code` of transformers."""
    return _ALLOWED.get()


@contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """Raises an error that names the flag if a model needs code of its files, instead of a prompt in the terminal."""
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
            f"{name} must be a model without custom code, got one whose files contain code: --trust-remote-code runs it with "
            "all rights of your user account"
        ) from error
    finally:
        module.TIME_OUT_REMOTE_CODE = before


def check_kernels(name: str | Path, **options: Any) -> None:
    """Raises if a config names the repository of a kernel, because transformers would download the kernel and run its code."""
    if allows_remote_code():
        return
    transformers = extras.load("transformers", purpose="A transformers encoder")
    content, _ = transformers.PretrainedConfig.get_config_dict(name, **options)
    if repositories := [text for text in _implementations(content) if "/" in text]:
        raise ValueError(
            f"{name} must be a model without custom code, got one whose config names the kernels of {repositories[0]!r}: "
            "--trust-remote-code downloads and runs them with all rights of your user account"
        )


def _implementations(value: Any, key: str = "") -> Iterator[str]:
    """Yields the values of keys such as "attn_implementation", also in nested dictionaries."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _implementations(part, key if key.endswith("_implementation") else str(name))
    elif isinstance(value, str) and "_implementation" in key:
        yield value


# ----------------------------------------------------------------------------------------------------------------------
# Floating-point operations of matmuls, convolutions and attention.
#
# PyTorch's `FlopCounterMode` also attributes operations to modules through hooks. The hooks keep tensors alive that a
# checkpointed block computes again. Without gradients, they fail if a module is called with a view of a parameter, as in the
# attention pool of SigLIP's vision tower. Therefore only the formulas of `FlopCounterMode` are used here.


# Formulas for attention on a CPU, which the registry lacks. The arguments are the arguments of the operators.
_MISSING: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop(
        q.shape, k.shape, v.shape
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dout, q, k, v, *rest, **more: (
        sdpa_backward_flop(dout.shape, q.shape, k.shape, v.shape)
    ),
}


def flops(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the number of operations of one operator call in a dispatch mode."""
    name = operator._overloadpacket
    formula = flop_registry.get(name) or _MISSING.get(name)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class FlopCounter(TorchDispatchMode):
    """Adds up all floating-point operations within the context in `total`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and counts one operator."""
        result = func(*args, **(kwargs or {}))
        self.total += flops(func, args, kwargs or {}, result)
        return result
