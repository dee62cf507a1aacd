"""A tower: an encoder with its preprocessing; when code of its files may run, and how many operations it takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from megabatch import extras
from megabatch.cached import batchnorm
from megabatch.cached.tower import as_encoded, call
from megabatch_train.data.images import TrainingImages
from megabatch_train.towers.lora import LoraConfig

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


def forward_backward(module: nn.Module, inputs: Any) -> None:
    """A forward and, with gradients enabled, a backward pass; running statistics stay as they were."""
    with batchnorm.keep_running_statistics(batchnorm.layers([module])):
        output: Any = as_encoded(call(module, inputs), type(module).__name__).embeddings
        if output.requires_grad:
            output.float().sum().backward()


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
