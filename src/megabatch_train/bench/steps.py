"""Benchmarks of training steps with synthetic images and towers of the sizes of CLIP."""

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.cached import Budget
from megabatch.dispatch import Backend
from megabatch_train.bench.losses import dense_clip
from megabatch_train.bench.measure import LATE, MEMORY, OK, WRONG, peak_memory, seconds_of

# ----------------------------------------------------------------------------------------------------------------------
# Towers and images. The towers have the sizes of CLIP and random weights. Synthetic images need no storage.
#
# The towers are from transformers if it is installed, or else from plain PyTorch. The record names the library.

VOCABULARY, CONTEXT = 49408, 77
POOL = 256  # raw images in host memory, which replay reads


@dataclass(frozen=True)
class Size:
    """The size of a CLIP model. `vision` and `text` are (width, layers, heads)."""

    pixels: int
    patch: int
    vision: tuple[int, int, int]
    text: tuple[int, int, int]
    embedding: int
    chunk: int  # samples encoded at once, with a few GiB of activations


SIZES = {
    "ViT-B/32": Size(224, 32, (768, 12, 12), (512, 12, 8), 512, 1024),
    "ViT-B/16": Size(224, 16, (768, 12, 12), (512, 12, 8), 512, 512),
    "ViT-L/14": Size(224, 14, (1024, 24, 16), (768, 12, 12), 768, 256),
    "tiny": Size(32, 8, (64, 2, 2), (32, 2, 2), 32, 16),
}


class PlainTower(nn.Module):
    """A pre-norm transformer over patches or tokens. It pools the mean over positions, projects it, and normalizes it."""

    def __init__(self, size: Size, *, image: bool) -> None:
        super().__init__()
        width, layers, heads = size.vision if image else size.text
        positions = (size.pixels // size.patch) ** 2 if image else CONTEXT
        self.embed: nn.Module = nn.Conv2d(3, width, size.patch, size.patch) if image else nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.project = nn.Linear(width, size.embedding, bias=False)
        self.image = image

    def forward(self, x: Tensor) -> Tensor:
        """Returns embeddings (n, D)."""
        h = self.embed(x).flatten(2).transpose(1, 2) if self.image else self.embed(x)
        return F.normalize(self.project(self.blocks(h + self.position).mean(1)), dim=1)


class TransformersTower(nn.Module):
    """One tower of a CLIPModel of transformers."""

    def __init__(self, encoder: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.encoder, self.project = encoder, project

    def forward(self, x: Tensor) -> Tensor:
        """Returns embeddings (n, D)."""
        return F.normalize(self.project(self.encoder(x).pooler_output), dim=1)


def towers(size: Size, device: str) -> tuple[nn.Module, nn.Module, str]:
    """Returns the image tower, the text tower, and the name of the library that built them."""
    torch.manual_seed(0)
    with torch.device(device):  # random weights are initialized much faster on the GPU
        if importlib.util.find_spec("transformers") is None or size is SIZES["tiny"]:
            return PlainTower(size, image=True), PlainTower(size, image=False), "plain PyTorch"
        return *_transformers_towers(size), "transformers"


def _transformers_towers(size: Size) -> tuple[nn.Module, nn.Module]:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    def config(kind: Any, shape: tuple[int, int, int], **more: Any) -> dict[str, Any]:
        width, layers, heads = shape
        tower_config = kind(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads, **more
        )
        return tower_config.to_dict()  # type: ignore[no-any-return]

    model = CLIPModel(
        CLIPConfig(
            text_config=config(CLIPTextConfig, size.text, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT),
            vision_config=config(CLIPVisionConfig, size.vision, image_size=size.pixels, patch_size=size.patch),
            projection_dim=size.embedding,
        )
    )
    image = TransformersTower(model.vision_model, model.visual_projection)
    return image, TransformersTower(model.text_model, model.text_projection)


class SyntheticImages(mb.Source):
    """Images that are computed on the device from their index, so a batch of any size needs no storage."""

    block = 64  # images that are computed together; a span that starts inside a block computes the whole block

    def __init__(self, rows: int, size: Size, device: str) -> None:
        self.rows, self.shape, self.device = rows, (3, size.pixels, size.pixels), device

    def __len__(self) -> int:
        """Returns the number of images."""
        return self.rows

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """Yields images (n, 3, pixels, pixels). The same span always has the same images."""
        for start, stop in spans:
            first = start // self.block
            parts = [self._block(i) for i in range(first, (stop - 1) // self.block + 1)]
            yield torch.cat(parts)[start - first * self.block : stop - first * self.block]

    def _block(self, i: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(i)
        return torch.randn(self.block, *self.shape, generator=generator, device=self.device)

    def all(self) -> Tensor:
        """Returns the whole batch as one tensor, for a plain step."""
        batch = torch.empty(self.rows, *self.shape, device=self.device)
        for start in range(0, self.rows, self.block):
            batch[start : start + self.block] = self._block(start // self.block)[: self.rows - start]
        return batch


def read_images_twice(rows: int, size: Size, workers: int, seed: int) -> mb.ReplaySource:
    """Returns a source of raw images in host memory. Worker threads crop and flip them, in the same way in both passes."""
    raw = size.pixels + 32
    pool = torch.randint(0, 256, (POOL, 3, raw, raw), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def read(i: int, generator: torch.Generator) -> Tensor:
        top, left, flip = torch.randint(0, 32, (3,), generator=generator).tolist()
        image = pool[i % POOL, :, top : top + size.pixels, left : left + size.pixels]
        return (image.flip(-1) if flip < 16 else image).contiguous()

    return mb.ReplaySource(range(rows), read, seed=seed, workers=workers)


class UnitRange(nn.Module):
    """A tower for uint8 images. Copying them takes a quarter of the bytes of float32."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Tensor:
        """Returns embeddings (n, D)."""
        return self.tower(x.float().div_(127.5).sub_(1.0))  # type: ignore[no-any-return]


def tokens(rows: int, device: str) -> Tensor:  # (rows, CONTEXT)
    """Returns random tokens. The last token has the largest id, which is the end of the text in CLIP."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(1, VOCABULARY - 2, (rows, CONTEXT), generator=generator, device=device)
    ids[:, -1] = VOCABULARY - 1
    return ids


# ----------------------------------------------------------------------------------------------------------------------
# Training steps with a large batch: the plain step, gradient caching, and the methods of other projects.
#
# A step is a function of a `StepSetting`. It adds gradients to the parameters and returns the loss. `measure` compares the
# gradients with the gradients of the plain step, and then measures memory and speed. `benchmarks/cached_step.py` is the long
# version for a GPU.


PLAIN, ALONE = "plain step", "towers alone"
CACHED = ("cached, budget 0", "cached, auto")
CHECK, CHECK_CHUNK = 64, 16  # pairs and chunk size of the comparison of gradients
TOLERANCE = 1e-3  # largest relative error of float32 gradients, measured by norms
INITIAL = 2.66  # logarithm of the initial scale of CLIP
LATER_STEPS = {"cpu": 1, "cuda": 2}  # timed steps after the first step, which allocates memory; the fastest step counts


@dataclass
class StepSetting:
    """The inputs of a step."""

    image: nn.Module
    text: nn.Module
    log_scale: nn.Parameter
    images: Any  # SyntheticImages, or another source
    tokens: Tensor  # (B, context)
    chunk: int
    device: str
    autocast: bool = True
    backend: Backend = "auto"
    further: tuple[Tensor, Tensor] | None = None  # more embeddings (n, D) of each side, which only the loss uses

    def parameters(self) -> list[nn.Parameter]:
        """Returns all trained parameters."""
        return [*self.image.parameters(), *self.text.parameters(), self.log_scale]

    def of_batch(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all embeddings for the loss."""
        if self.further is None:
            return image, text
        first, second = (torch.cat((x, rest.to(x.dtype))) for x, rest in zip((image, text), self.further, strict=True))
        return first, second

    def cast(self) -> Any:
        """Returns the autocast context of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast)

    def halves(self) -> Iterator[tuple[nn.Module, Callable[[], Iterator[Tensor]]]]:
        """Yields each tower with a function that returns an iterator over its chunks."""
        spans = [(i, min(i + self.chunk, len(self.tokens))) for i in range(0, len(self.tokens), self.chunk)]
        yield self.image, lambda: iter(self.images.chunks(spans, None))
        yield self.text, lambda: (self.tokens[a:b] for a, b in spans)


def plain(s: StepSetting) -> Tensor:
    """A step with one autograd graph for the whole batch."""
    assert isinstance(s.images, SyntheticImages)
    with s.cast():
        loss = mb.clip_loss(s.image(s.images.all()), s.text(s.tokens), s.log_scale.exp(), backend=s.backend)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def step_with_caching(s: StepSetting, budget: Budget = None) -> Tensor:
    """A step with gradient caching by `cached_backward`."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mb.clip_loss(*s.of_batch(x, y), s.log_scale.exp(), backend=s.backend)

    with s.cast():
        return mb.cached_backward(loss, [(s.image, s.images), (s.text, s.tokens)], chunk_size=s.chunk, budget=budget)


def accum_freq(s: StepSetting) -> Tensor:
    """A step as in open_clip with `--accum-freq`.

    It computes all features without a graph. Then, for every chunk, it encodes the chunk again and computes the whole loss.
    """
    (image, images), (text, texts) = s.halves()
    with torch.no_grad(), s.cast():
        features = [[tower(x) for x in chunks()] for tower, chunks in ((image, images), (text, texts))]
    loss = torch.zeros(())
    for i, (x, y) in enumerate(zip(images(), texts(), strict=True)):
        with s.cast():
            fresh = [
                [*old[:i], tower(part), *old[i + 1 :]] for old, tower, part in zip(features, (image, text), (x, y), strict=True)
            ]
            loss = dense_clip(torch.cat(fresh[0]), torch.cat(fresh[1]), s.log_scale.exp())
        del fresh
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def grad_cache(s: StepSetting) -> Tensor:
    """A step as in GradCache.

    It computes the features and stores the states of the random generators. It computes a dense loss on the features, and
    then backpropagates ⟨features, gradient⟩ of every chunk.
    """
    halves = list(s.halves())
    cached: list[tuple[Tensor, list[Any]]] = []
    for tower, chunks in halves:
        parts, states = [], []
        with torch.no_grad(), s.cast():
            for x in chunks():
                states.append((torch.get_rng_state(), torch.cuda.get_rng_state() if s.device == "cuda" else None))
                parts.append(tower(x))
        cached.append((torch.cat(parts).requires_grad_(), states))
    with s.cast():
        loss = dense_clip(cached[0][0], cached[1][0], s.log_scale.exp())
    loss.backward()  # type: ignore[no-untyped-call]
    for (tower, chunks), (features, states) in zip(halves, cached, strict=True):
        assert features.grad is not None
        for x, (cpu, cuda), gradient in zip(chunks(), states, torch.split(features.grad, s.chunk), strict=True):
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
            with s.cast():
                surrogate = (tower(x) * gradient).sum()
            surrogate.backward()
    return loss.detach()


def towers_alone(s: StepSetting) -> Tensor:
    """A forward pass, and then a forward and a backward pass of every chunk, without a loss.

    Its time is the lower bound of gradient caching with a budget of 0.
    """
    total = torch.zeros((), device=s.device)
    for tower, chunks in s.halves():
        with torch.no_grad(), s.cast():
            for x in chunks():
                total += tower(x).sum()
        for x in chunks():
            with s.cast():
                embeddings = tower(x)
            embeddings.backward(torch.full_like(embeddings, 1e-3))
    return total


SYSTEMS: dict[str, Callable[[StepSetting], Tensor]] = {
    PLAIN: plain,
    CACHED[0]: step_with_caching,
    CACHED[1]: lambda s: step_with_caching(s, "auto"),
    "accum-freq": accum_freq,
    "GradCache": grad_cache,
    ALONE: towers_alone,
}


@dataclass
class StepResult:
    """The result of one system at one batch size. A wrong result is not timed."""

    system: str
    batch: int
    status: str
    error: float | None = None  # relative error of the gradients of both towers, on a small batch
    scale_ratio: float | None = None  # gradient of the scale ÷ its correct value
    seconds: float | None = None
    peak: int | None = None  # bytes beyond weights and gradients


def measure(
    model: str, batches: list[int], chunk: int, device: str, systems: list[str], until: float = math.inf
) -> Iterator[StepResult]:
    """Measures the systems at all batch sizes, smallest first, until the time limit."""
    image, text, _ = towers(SIZES[model], device)
    backend: Backend = "triton" if device == "cuda" else "eager"

    def setting(rows: int, chunk: int, autocast: bool) -> StepSetting:
        log_scale = nn.Parameter(torch.tensor(INITIAL, device=device))
        images = SyntheticImages(rows, SIZES[model], device)
        return StepSetting(
            image, text, log_scale, images, tokens(rows, device), chunk, device, autocast=autocast, backend=backend
        )

    checks = compare(setting(CHECK, CHECK_CHUNK, False), systems)
    failed: set[str] = set()
    for batch in sorted(batches):
        for name in systems:
            error, ratio = checks.get(name, (None, None))
            result = StepResult(name, batch, OK, error, ratio)
            # The comparison is written so that NaN counts as wrong.
            if error is not None and ratio is not None and not (error <= TOLERANCE and abs(ratio - 1) <= TOLERANCE):
                result.status = WRONG
            elif name in failed:
                result.status = MEMORY
            elif time.perf_counter() > until:
                result.status = LATE
            else:
                _time(result, setting(batch, chunk, autocast=device == "cuda"), failed)
            yield result


def compare(s: StepSetting, systems: list[str]) -> dict[str, tuple[float, float]]:
    """Compares the gradients of each system with the gradients of the plain step.

    Returns the relative error of the gradients of the towers, and the gradient of the scale ÷ its correct value.
    """
    expected = _gradients(s, PLAIN)
    errors: dict[str, tuple[float, float]] = {}
    for name in systems:
        if name != ALONE:
            gradients = _gradients(s, name)
            difference = torch.cat([(a - b).flatten() for a, b in zip(gradients[:-1], expected[:-1], strict=True)]).norm()
            length = torch.cat([b.flatten() for b in expected[:-1]]).norm()
            errors[name] = (difference / length).item(), (gradients[-1] / expected[-1]).item()
    return errors


def _gradients(s: StepSetting, name: str) -> list[Tensor]:
    """Returns the gradients of all parameters. The gradient of the scale is last."""
    for p in s.parameters():
        p.grad = None
    SYSTEMS[name](s)
    return [p.grad.double().cpu() for p in s.parameters() if p.grad is not None]


def _time(result: StepResult, s: StepSetting, failed: set[str]) -> None:
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step except the first
    gc.collect()
    if s.device == "cuda":
        torch.cuda.empty_cache()  # cached memory of the step before would slow down this step

    def step() -> float:
        return seconds_of(lambda: SYSTEMS[result.system](s), s.device)

    try:
        first, result.peak = peak_memory(step, s.device)
        result.seconds = min(first, *(step() for _ in range(LATER_STEPS[s.device])))
    except (torch.OutOfMemoryError, MemoryError):
        result.status = MEMORY
        failed.add(result.system)
