"""Memory and FLOPs of towers, measured on tensors that have shapes but no data."""

import importlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabatch import extras
from megabatch_train.names import MODELS, PYTHON
from megabatch_train.planning.gpus import STAND_IN, number
from megabatch_train.towers.layers.lora import store_frozen
from megabatch_train.towers.small import SmallConfig, SmallImageTower, SmallTextTower
from megabatch_train.towers.tokens import INPUT, check_dropout, count_kept
from megabatch_train.towers.tower import LoraConfig, flops

# ----------------------------------------------------------------------------------------------------------------------
# Memory and operations of PyTorch code, measured by running it on tensors that have shapes but no data.
#
# This allocates nothing and needs no GPU. Operators return only the shapes of their results, and the meter adds up the storages
# that are alive. Tensors that autograd saves live as long as their graph, so the peaks of forward and backward are correct.
#
# The device of the tensors is the CPU, because PyTorch can run backward passes there without a GPU. Two properties of CUDA are
# imitated: under autocast, normalizations and softmax compute in float32, and allocations are rounded up to 512 bytes.

ALLOCATION_UNIT = 512  # bytes; PyTorch's CUDA allocator rounds up to multiples of it

# Functions in towers that autocast runs in float32 on CUDA, but in half precision on a CPU.
_IN_FLOAT32: set[Callable[..., Any]] = {
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.normalize,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    torch.softmax,
    torch.log_softmax,
    torch.norm,
    Tensor.softmax,
    Tensor.log_softmax,
    Tensor.norm,
}


class Meter(TorchDispatchMode):
    """Counts current and peak bytes of tensors that are created inside `count_tensors`, and operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.peak = 0
        self.operations = 0  # floating-point operations of matmuls, convolutions and attention
        self._counted: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Excludes these tensors, because they existed before."""
        self._counted.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the storages of all tensors that an operator returns, and its operations."""
        result = func(*args, **(kwargs or {}))
        self.operations += flops(func, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._counted:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT
                self._counted.add(key)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._note_freed, key, size)
        return result

    def _note_freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.alive -= size


@contextmanager
def count_tensors(meter: Meter, half: torch.dtype | None) -> Iterator[None]:
    """Counts tensors that are created within the context. `half` is the autocast dtype or None. Use it inside `nowhere`."""
    autocast = torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None)
    with autocast, _Float32(half is not None), meter:
        yield


@cache
def nowhere() -> AbstractContextManager[Any]:
    """Returns the context in which tensors have a shape but no data. Tensors of two such contexts cannot be mixed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def without_data(module: nn.Module) -> nn.Module:
    """Replaces parameters and buffers on the meta device by CPU tensors of equal shapes. Use it inside `nowhere`."""
    replacements: dict[int, Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            trained = isinstance(tensor, nn.Parameter)
            replacements[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if trained else empty
        return replacements[id(tensor)]

    for part in module.modules():
        for group in (part._parameters, part._buffers):
            for name, tensor in group.items():
                if tensor is not None:
                    group[name] = like(tensor)  # type: ignore[assignment]
    return module


class _Float32(TorchFunctionMode):
    """Imitates autocast on CUDA for the functions that autocast on a CPU treats differently."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._enabled and func in _IN_FLOAT32 and args and isinstance(args[0], Tensor):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------------
# Towers by name, without weights, because a plan needs only the shapes of a model.
#
# The names are as in `towers.load`. Nothing is allocated or downloaded, so the config.json of "hf:NAME" must be a local file.
# If only the number of parameters is known, a transformer with this number replaces the tower.


SMALL_TEXT_GRAMS = 64  # number of n-grams of a name or a short sentence
MOST_LAYERS = 1000


@dataclass(frozen=True)
class ModelSide:
    """One tower without data. `module(**inputs(n))` returns the embeddings of n samples."""

    name: str
    module: nn.Module
    inputs: Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """Two towers, which may share a module."""

    name: str
    sides: tuple[ModelSide, ModelSide]

    @property
    def is_one_tower(self) -> bool:
        """Whether both sides are encoded in the same way by the same module."""
        first, second = self.sides
        return first.module is second.module and first.inputs is second.inputs

    @property
    def parameters(self) -> int:
        """Number of parameters of both towers. Shared parameters count once."""
        return sum(p.numel() for p in self._each_once())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters of both towers. Shared parameters count once."""
        return sum(p.numel() * p.element_size() for p in self._each_once())

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that are trained."""
        return sum(p.numel() for p in self._each_once() if p.requires_grad)

    def _each_once(self) -> Iterable[nn.Parameter]:
        return {id(p): p for side in self.sides for p in side.module.parameters()}.values()


def model(
    spec: str,
    *,
    image_size: int | None = None,
    length: int | None = None,
    patch_dropout: float = 0.0,
    lora: int = 0,
    frozen: torch.dtype = torch.float32,
) -> Model:
    """Builds towers without data, from a name or from numbers of parameters.

    Args:
        spec: a name of `towers.load`, or `STAND_IN`.
        image_size: side length of images in pixels (default: the model's size).
        length: number of tokens of a text (default: the model's length).
        patch_dropout: fraction of the patches of an image that a step drops.
        lora: LoRA rank of adapters that are trained instead of the weights of the model. 0 means no adapters.
        frozen: dtype of the frozen weights of a model with adapters.
    """
    if lora and not spec.startswith(("hf:", "hf-config:", "open_clip:")):
        raise ValueError(f'lora must not be set for models other than "hf:" and "open_clip:", got {lora} for {spec!r}')
    if spec.startswith(PYTHON):
        raise ValueError(
            f"a plan needs the sizes of the inputs, which {spec!r} does not describe. `megabatch train` measures the memory of "
            "the towers and chooses the chunk size"
        )
    family, _, name = spec.partition(":")
    with torch.device("meta"), _offline():
        if spec == "small":
            sides = _small(image_size, length)
        elif family == "open_clip" and name:
            sides = _open_clip(name, image_size, length, lora)
        elif family in ("hf", "hf-config") and name:
            sides = _huggingface(spec, image_size, length, lora)
        elif spec[:1].isdigit():
            sides = _stand_ins(spec)
        else:
            raise ValueError(f"No such model: {spec}. Possible are: {'; '.join(MODELS)}; or {STAND_IN}")
    if patch_dropout:
        sides = (_drop_patches(sides[0], patch_dropout, spec), sides[1])
    with nowhere():
        for module in {id(side.module): side.module for side in sides}.values():
            without_data(module)
        if family in ("hf", "hf-config") or lora:
            _freeze_unused(sides)
        if lora:
            store_frozen([side.module for side in sides], frozen)
    return Model(spec, sides)


def _small(image_size: int | None, length: int | None) -> tuple[ModelSide, ModelSide]:
    config = SmallConfig(image_size=image_size or SmallConfig.image_size)
    size, grams = config.image_size, length or SMALL_TEXT_GRAMS

    def texts(n: int) -> dict[str, Tensor]:
        return {"grams": _ids(n, grams), "mask": torch.ones(n, grams)}

    return (
        ModelSide("image", SmallImageTower(config), lambda n: {"images": torch.zeros(n, 3, size, size)}),
        ModelSide("text", SmallTextTower(config), texts),
    )


def _open_clip(name: str, image_size: int | None, length: int | None, lora: int) -> tuple[ModelSide, ModelSide]:
    from megabatch_train.towers.open_clip import Sides, adapt, find_architecture, package, quiet, split_name

    options: dict[str, Any] = {"force_image_size": image_size}
    if length is not None:
        options["force_context_length"] = length
    try:
        architecture, _ = find_architecture(split_name(name)[0])
        with quiet():
            clip = package().create_model(architecture, device="meta", pretrained_hf=False, **options)
    except OSError as error:
        raise ValueError(
            f"the text tower of {name} is a transformers model whose config.json is not in the local cache of the "
            "Hugging Face hub. A plan downloads nothing"
        ) from error
    for name in ("logit_scale", "logit_bias"):
        if getattr(clip, name, None) is not None:
            getattr(clip, name).requires_grad_(False)
    if lora:
        adapt(clip, LoraConfig(lora))
    size = clip.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    tokens = length or int(clip.context_length)
    module = Sides(clip)
    return (
        ModelSide("image", module, lambda n: {"image": torch.zeros(n, 3, height, width)}),
        ModelSide("text", module, lambda n: {"text": _ids(n, tokens)}),
    )


def _drop_patches(side: ModelSide, dropout: float, spec: str) -> ModelSide:
    """Returns the side of images with inputs that keep the first patches. The choice of patches does not change any shape."""
    with nowhere():
        images = next(iter(side.inputs(1).values()))
    tokens = getattr(side.module, "tokens", None)
    patches = 0 if tokens is None or images.dim() != 4 else tokens.count(images.shape[2:])
    kept = count_kept(patches, check_dropout(dropout, patches, spec))
    return replace(side, inputs=lambda n: {**side.inputs(n), INPUT: _ids(n, kept)})


@contextmanager
def _offline() -> Iterator[None]:
    """Prevents requests to the Hugging Face hub by any package within the context."""
    if not extras.is_installed("huggingface_hub"):
        yield
        return
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _huggingface(spec: str, image_size: int | None, length: int | None, lora: int) -> tuple[ModelSide, ModelSide]:
    from megabatch_train.towers.huggingface import PairEncoder, random_encoders, read_configs
    from megabatch_train.towers.huggingface_inputs import LONGEST, height_and_width, longest

    configs = read_configs(spec)
    if any(hasattr(getattr(config, "vision_config", None), "spatial_merge_size") for config in configs):
        raise ValueError(
            f"--model must not be a vision-language model, got {spec!r}: its memory and time depend on the sizes of the "
            "images, which a plan does not know. megabatch train measures the chunk sizes of such a model"
        )
    of_images, of_texts = getattr(configs[0], "vision_config", configs[0]), getattr(configs[-1], "text_config", configs[-1])
    of_audio = getattr(configs[0], "audio_config", None) if of_images is configs[0] else None
    if of_audio is not None and image_size is not None:
        raise ValueError(f"image_size must not be set for {spec!r}, which encodes recordings, got {image_size}")
    if of_images is not of_texts and image_size is not None:
        of_images.image_size = image_size
    most = getattr(of_texts, "max_position_embeddings", None)
    if length is not None and most is not None and length > most:
        raise ValueError(f"length must be at most {most} tokens for {spec!r}, got {length}")
    encoders = random_encoders(configs, spec, LoraConfig(lora) if lora else None)
    of_pair = isinstance(encoders[0], PairEncoder)
    tokens = length or (min(most or LONGEST, LONGEST) if of_pair else longest(of_texts))
    height, width = height_and_width(of_images)

    def images(n: int) -> dict[str, Tensor]:
        if of_audio is None:
            return {"pixel_values": torch.zeros(n, 3, height, width)}
        # The model stretches shorter recordings to this number of frames.
        bins, channels = of_audio.num_mel_bins, 4 if of_audio.enable_fusion else 1
        return {"input_features": torch.zeros(n, channels, of_audio.spec_size**2 // bins, bins)}

    def texts(n: int) -> dict[str, Tensor]:
        return {"input_ids": _ids(n, tokens), "attention_mask": torch.ones(n, tokens, dtype=torch.int64)}

    if len(encoders) == 1 and not of_pair:
        return ModelSide("first", encoders[0], texts), ModelSide("second", encoders[0], texts)
    return ModelSide("image" if of_audio is None else "audio", encoders[0], images), ModelSide("text", encoders[-1], texts)


def _freeze_unused(sides: tuple[ModelSide, ModelSide]) -> None:
    """Freezes unused parameters as `towers.load` does. Use it inside `nowhere`."""
    from megabatch_train.towers.layers.lora import freeze_unused

    for module in {id(side.module): side.module for side in sides}.values():
        freeze_unused(module, *(side.inputs(2) for side in sides if side.module is module))


class StandIn(nn.Module):
    """A pre-norm transformer over vectors. Its number of layers follows from the number of parameters."""

    def __init__(self, parameters: int, tokens: int, width: int) -> None:
        super().__init__()
        layers = max(1, round(parameters / (12 * width**2)))
        if layers > MOST_LAYERS:
            raise ValueError(f"{parameters:,} parameters of width {width} are {layers:,} layers, more than {MOST_LAYERS:,}")
        heads = next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)
        self.position = nn.Parameter(torch.empty(tokens, width))
        self.blocks = nn.ModuleList([_CountedLayer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:  # (n, tokens, width) -> (n, width)
        """Returns embeddings of unit length."""
        h = tokens + self.position
        for block in self.blocks:
            h = block(h)
        return F.normalize(self.norm(h).mean(1), dim=-1)


class _CountedLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        a = self.before_attention(h)
        h = h + self.attention(a, a, a, need_weights=False)[0]
        added: Tensor = self.hidden(self.before_hidden(h))
        return h + added


_STAND_IN = re.compile(r"([^:]+):([1-9]\d*)x([1-9]\d*)")


def _stand_ins(spec: str) -> tuple[ModelSide, ModelSide]:
    towers = [_STAND_IN.fullmatch(text.strip()) for text in spec.split(",")]
    first, second = towers[0], towers[-1]  # a single description is used for both towers
    if len(towers) > 2 or first is None or second is None:
        raise ValueError(f"model must be {STAND_IN}, got {spec!r}")
    try:
        return _stand_in(first, "first"), _stand_in(second, "second")
    except ValueError as error:
        raise ValueError(f"model must be {STAND_IN}, got {spec!r}: {error}") from error


def _stand_in(described: re.Match[str], name: str) -> ModelSide:
    tokens, width = int(described[2]), int(described[3])
    module = StandIn(number(described[1]), tokens, width)
    return ModelSide(name, module, lambda n: {"tokens": torch.zeros(n, tokens, width)})


def _ids(n: int, tokens: int) -> Tensor:
    return torch.zeros(n, tokens, dtype=torch.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Bytes and operations of a tower that encodes a chunk. They are measured on tensors without data (`count_tensors`).


@dataclass(frozen=True)
class Line:
    """A number of bytes that grows linearly with the number of samples n: `fixed` + `each` · n."""

    fixed: float
    each: float

    def at(self, n: float) -> float:
        """Returns the bytes for n samples."""
        return self.fixed + self.each * n


@dataclass(frozen=True)
class Encoder:
    """One tower at one precision. Bytes are per device, and do not include weights, their gradients and inputs."""

    name: str
    width: int  # embedding dimension D
    embedding_bytes: int  # bytes of one number of an embedding
    input_bytes: int  # bytes of one sample
    casts: int  # bytes of half-precision copies of weights that autocast keeps during a step
    saved: Line  # activations after the forward pass, without casts
    forward: Line  # peak of a forward pass without a graph, without casts
    backward: Line  # peak of a forward and backward pass, without casts
    forward_operations: float  # operations per sample
    backward_operations: float

    @property
    def embedding(self) -> int:
        """Number of bytes of one embedding."""
        return self.width * self.embedding_bytes


def measure(side: ModelSide, chunk: int, half: torch.dtype | None) -> Encoder:
    """Measures a chunk of `chunk` samples and a chunk of half the size, to separate fixed bytes from bytes per sample.

    Args:
        side: the tower without data.
        chunk: number of samples that are encoded at once, at least 2.
        half: autocast dtype, or None without autocast.
    """
    if chunk < 2:
        raise ValueError(f"chunk must be 2 or more, got {chunk}")
    sizes = (chunk // 2, chunk)
    with nowhere():
        plain = [_run(side, n, half, graph=False) for n in sizes]
        graph = [_run(side, n, half, graph=True) for n in sizes]
    embeddings = graph[1].embeddings
    casts = plain[1].alive - _bytes([embeddings])

    def line(first: int, second: int) -> Line:
        each = (second - first) / (sizes[1] - sizes[0])
        return Line(second - each * chunk - casts, each)

    return Encoder(
        name=side.name,
        width=embeddings.shape[1],
        embedding_bytes=embeddings.element_size(),
        input_bytes=graph[1].input_bytes // chunk,
        casts=casts,
        saved=line(graph[0].alive, graph[1].alive),
        forward=line(plain[0].peak, plain[1].peak),
        backward=line(graph[0].peak, graph[1].peak),
        forward_operations=graph[1].forward / chunk,
        backward_operations=(graph[1].operations - graph[1].forward) / chunk,
    )


@dataclass(frozen=True)
class _Run:
    embeddings: Tensor
    input_bytes: int
    alive: int  # bytes after the forward pass
    peak: int  # bytes
    forward: int  # operations of the forward pass
    operations: int  # operations of all passes


def _run(side: ModelSide, n: int, half: torch.dtype | None, *, graph: bool) -> _Run:
    inputs, parameters = side.inputs(n), list(side.module.parameters())
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None  # gradients exist in every step except the first
    meter = Meter()
    meter.ignore([*parameters, *side.module.buffers(), *inputs.values(), *(p.grad for p in parameters if p.grad is not None)])
    with count_tensors(meter, half), torch.set_grad_enabled(graph):
        embeddings: Tensor = side.module(**inputs)
        alive, forward = meter.alive, meter.operations
        if graph:
            with torch.autocast("cpu", enabled=False):
                embeddings.backward(torch.ones_like(embeddings))  # type: ignore[no-untyped-call]
    return _Run(embeddings.detach(), _bytes(inputs.values()), alive, meter.peak, forward, meter.operations)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
