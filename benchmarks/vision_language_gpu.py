"""Compares gradient caching with the cached loss of sentence-transformers, for an encoder with the shape of Qwen3-VL-2B.

The model has random bf16 weights, trains LoRA adapters, and pools the last token. Queries are texts. Documents are images of
256 to 1,024 visual tokens. megabatch reads the images by replay: threads resize each image when its chunk is due, for each of
the two passes. sentence-transformers gets the whole batch preprocessed on the GPU, as its trainer does. The tokenizer is tiny
and made here, so nothing is downloaded. `--peers FOLDER` can provide PEFT. Without PEFT, the last decoder layers are trained.

Before the timing, the gradients of both systems are compared with a plain step, in float32 with a small model.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.cached.streaming import map_rows
from megabatch_train.bench.measure import (
    LATE,
    OK,
    WRONG,
    Record,
    arguments,
    clear,
    device_of,
    failure,
    now,
    paragraphs,
    peak_memory,
    relative_error,
    take_gradients,
)
from megabatch_train.display.tables import TextTable, cell, gib, ratio
from megabatch_train.machine import peak_rates
from megabatch_train.towers.layers.lora import inject
from megabatch_train.towers.tokens import AS_STORED
from megabatch_train.towers.tower import LoraConfig, Pair, set_checkpointing
from megabatch_train.towers.vision_language import build_pair
from megabatch_train.trainer.build import ADAPTED, forward_flops

SCALE, RANK, TRAINED_LAYERS = 20.0, 16, 4
CHECKED, TOLERANCE = 6, 1e-3  # pairs, relative error of the norm of all gradients in float32
WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ("<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|unknown|>")
OURS, THEIRS = "megabatch", "sentence-transformers"
FLOP_SAMPLES = 8  # samples whose operations are counted
WORKERS = 8  # threads that resize images


@dataclass(frozen=True)
class Shape:
    """A model and its images."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    sides: tuple[int, int]  # smallest and largest side of an image, in visual tokens
    batches: tuple[int, ...]  # pairs, in ascending order
    chunks: tuple[tuple[int, bool], ...]  # samples of a chunk, and whether to use activation checkpointing


LARGE = Shape(
    "Qwen3-VL-2B",
    {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 151936}
    | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
    {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16, "out_hidden_size": 2048}
    | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
    (16, 32),
    (64, 512),
    ((4, False), (16, True)),
)
TINY = Shape(
    "tiny",
    {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
    | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    (2, 4),
    (8, 12),
    ((2, False), (4, True)),
)


def build(shape: Shape, device: str, half: bool) -> tuple[Pair, str]:
    """Returns towers with random weights, and words for the trained parameters."""
    from transformers import AutoConfig, AutoModel

    ids = {f"{name}_token_id": SPECIAL.index(f"<|{token}|>") for name, token in TOKENS.items()}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    rope["mrope_section"] = [24, 20, 20] if shape is LARGE else [2, 1, 1]
    text = {**shape.text, "rope_parameters": rope, "rope_scaling": rope, "pad_token_id": 0}
    vision = {**shape.vision, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    try:
        with torch.device(device):
            model = AutoModel.from_config(config)
    finally:
        torch.set_default_dtype(before)
    trained = f"LoRA of rank {RANK}"
    try:
        inject(model, LoraConfig(RANK))
    except ModuleNotFoundError:
        trained = f"the last {TRAINED_LAYERS} decoder layers"
        model.requires_grad_(False)
        for layer in model.language_model.layers[-TRAINED_LAYERS:]:
            layer.float().requires_grad_(True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    pair = build_pair(model, _processor(shape), shape.name, None, AS_STORED, ())
    pair.first.module.to(device)
    return pair, trained


TOKENS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _processor(shape: Shape) -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<|unknown|>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=list(SPECIAL[1:]),
    )
    size = {"shortest_edge": 1, "longest_edge": (2 * shape.vision["patch_size"] * shape.sides[1]) ** 2}
    options = {"patch_size": shape.vision["patch_size"], "merge_size": 2, "temporal_patch_size": 2, "size": size}
    videos = transformers.Qwen3VLVideoProcessor(**options)
    return transformers.Qwen3VLProcessor(transformers.Qwen2VLImageProcessor(**options), tokenizer, videos)


class Batch:
    """Texts, and images whose sides are between two numbers of visual tokens."""

    def __init__(self, shape: Shape, pairs: int) -> None:
        draw = random.Random(0)
        self._unit = 2 * shape.vision["patch_size"]
        self.texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 40))) for _ in range(pairs)]
        self.sizes = [tuple(draw.randint(*shape.sides) for _ in range(2)) for _ in range(pairs)]

    def image(self, index: int) -> Tensor:  # (3, H, W) uint8
        """Returns an image of random tiles, which is 5 % larger than the image that the model encodes."""
        height, width = (int(1.05 * self._unit * side) for side in self.sizes[index])
        tiles = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(index)) * 255
        return F.interpolate(tiles, (height, width), mode="nearest")[0].to(torch.uint8)

    def visual_tokens(self, index: int) -> int:
        """Returns an estimate of the number of tokens of an image."""
        return math.prod(self.sizes[index]) + 4


class _Loss:
    def __call__(self, query: Tensor, document: Tensor) -> Tensor:
        return mb.info_nce_loss(query, document, scale=SCALE)


@dataclass
class Setting:
    """The inputs of a step."""

    pair: Pair
    batch: Batch
    chunk: int
    device: str
    half: bool

    @property
    def encoder(self) -> nn.Module:
        """The model."""
        return self.pair.first.module

    def cast(self) -> Any:
        """Returns the autocast context of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.half)

    def everything(self, count: int | None = None) -> list[dict[str, Tensor]]:
        """Returns the inputs of both sides of the whole batch, on the device."""
        prepare, collate = self.pair.first.prepare, self.pair.first.collate
        chosen = range(len(self.batch.texts) if count is None else count)
        texts = collate([prepare(self.batch.texts[index], None) for index in chosen])
        with ThreadPoolExecutor(WORKERS) as threads:
            images = collate(list(threads.map(lambda index: prepare(self.batch.image(index), None), chosen)))
        return [{key: value.to(self.device) for key, value in side.items()} for side in (texts, images)]


def plain(s: Setting) -> Tensor:
    """A step with one graph for the whole batch, and a dense loss."""
    with s.cast():
        query, document = (s.encoder(**side) for side in s.everything())
        loss = F.cross_entropy(SCALE * query @ document.T, torch.arange(len(query), device=query.device))
    loss.backward()
    return loss.detach()


def ours(s: Setting, features: None = None) -> Tensor:
    """A step with `cached_backward`. The samples are read by replay."""
    prepare, collate = s.pair.first.prepare, s.pair.first.collate
    options: dict[str, Any] = {"workers": WORKERS if s.device == "cuda" else 0, "collate": collate}
    rows = range(len(s.batch.texts))
    texts = mb.ReplaySource(
        rows, lambda index, _: prepare(s.batch.texts[index], None), length=lambda index: len(s.batch.texts[index]), **options
    )
    images = mb.ReplaySource(
        rows, lambda index, _: prepare(s.batch.image(index), None), length=s.batch.visual_tokens, **options
    )
    with s.cast():
        return mb.cached_backward(_Loss(), [(s.encoder, texts), (s.encoder, images)], chunk_size=[64, s.chunk])


class _Features(nn.Module):
    """The model with the interface of sentence-transformers."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Returns the features and the embeddings."""
        inputs = {key: features[key] for key in ("input_ids", "attention_mask", "patches", "grids")}
        return {**features, "sentence_embedding": self.encoder(**inputs)}


def theirs(s: Setting, features: list[dict[str, Tensor]] | None = None) -> Tensor:
    """A step with `CachedMultipleNegativesRankingLoss`, in mini-batches with a number of samples.

    Args:
        s: the inputs.
        features: the preprocessed batch (default: it is preprocessed here).
    """
    try:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Loss
    except ImportError:  # versions before 6
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss as Loss
    loss = Loss(nn.Sequential(_Features(s.encoder)), scale=SCALE, mini_batch_size=s.chunk)
    with s.cast():
        value: Tensor = loss([dict(side) for side in features or s.everything()], None)
        value.backward()
    return value.detach()


SYSTEMS: dict[str, Callable[..., Tensor]] = {OURS: ours, THEIRS: theirs}


class Bench:
    """Measures both systems."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record.of_script("vision_language_gpu", args, args.seconds, checks=[], models={})
        self.usable = dict.fromkeys(SYSTEMS, OK)
        self.pace: dict[str, float] = {}  # seconds per pair

    def check(self) -> None:
        """Compares the gradients of both systems with the plain step."""
        pair, trained = build(TINY, self.device, half=False)
        s = Setting(pair, Batch(TINY, CHECKED), 2, self.device, half=False)
        plain(s)
        expected = take_gradients(s.encoder)
        for name, step in SYSTEMS.items():
            result: dict[str, Any] = {"system": name, "trained": trained}
            try:
                step(s)
                result["gradient_error"] = relative_error(take_gradients(s.encoder), expected)
                result["status"] = OK if result["gradient_error"] <= TOLERANCE else WRONG
            except Exception as error:  # a library can fail in any way; the other is still measured
                result["status"] = failure(error)
            self.usable[name] = result["status"]
            self.record["checks"].append(result)
            self.record.say(f"{name}: {result['status']}, {result.get('gradient_error', math.nan):.1e}")
            take_gradients(s.encoder)

    def run(self, shape: Shape) -> None:
        """Measures all batches."""
        pair, trained = build(shape, self.device, half=self.device == "cuda")
        parameters = list(pair.first.module.parameters())
        counts = [sum(p.numel() for p in parameters if p.requires_grad or frozen) for frozen in (True, False)]
        first = Setting(pair, Batch(shape, shape.batches[-1]), 1, self.device, self.device == "cuda")
        flops = self._count(first)
        self.record["models"][shape.name] = {"parameters": counts[0], "trained_parameters": counts[1], "trained": trained}
        self.record["models"][shape.name] |= {"flops_per_pair": flops}
        self.record.say(f"{shape.name}: {counts[0] / 1e6:,.0f} M parameters, {trained}, {flops / 1e12:.2f} TFLOP per pair")
        chosen: dict[str, tuple[int, bool]] = {}
        for pairs in shape.batches:
            for name in SYSTEMS:
                result = self._row(shape, pair, pairs, name, chosen)
                rate = peak_rates(torch.cuda.get_device_name()) if self.device == "cuda" else None
                if rate is not None and "seconds" in result:
                    result["utilization"] = flops * pairs / result["seconds"] / (1e12 * rate.half)
                self.record["results"].append(result)
                self.record.save()

    def _count(self, s: Setting) -> float:
        """Returns the necessary operations of a step with adapters, for one pair."""
        total = 0.0
        count = min(FLOP_SAMPLES, len(s.batch.texts))
        for side in s.everything(count):
            for i in range(count):
                one = map_rows(lambda tensor, i=i: tensor[i : i + 1], side)
                with s.cast():
                    total += forward_flops(s.encoder, one, torch.device(self.device))
        return ADAPTED * total / count

    def _row(self, shape: Shape, pair: Pair, pairs: int, name: str, chosen: dict[str, tuple[int, bool]]) -> dict[str, Any]:
        result: dict[str, Any] = {"model": shape.name, "B": pairs, "system": name, "status": self.usable[name]}
        if result["status"] != OK:
            return result
        if self.record.seconds_left() <= 1.2 * self.pace.get(name, 0.0) * pairs:
            return result | {"status": LATE}
        choices = [chosen[name]] if name in chosen else shape.chunks
        measured: dict[tuple[int, bool], dict[str, Any]] = {}
        for chunk, checkpointing in choices:
            s = Setting(pair, Batch(shape, pairs), chunk, self.device, self.device == "cuda")
            set_checkpointing([s.encoder], checkpointing)
            try:
                if name not in chosen:
                    SYSTEMS[name](s)  # warm-up
                    take_gradients(s.encoder)
                measured[chunk, checkpointing] = self._step(name, s)
            except Exception as error:  # larger chunks can need too much memory
                result["status"] = failure(error)
            take_gradients(s.encoder)
            clear(self.device)
        if measured:
            best = min(measured, key=lambda choice: float(measured[choice]["seconds"]))
            chosen[name] = best
            result |= {"status": OK, "chunk": best[0], "checkpointing": best[1], **measured[best]}
            self.pace[name] = result["seconds"] / pairs
            self.record.say(
                f"B = {pairs} {name}: {result['seconds']:.2f} s, {pairs / result['seconds']:.1f} pairs/s, GPU "
                f"{result['peak_bytes'] / 2**30:.1f} GiB, host {result['host_bytes'] / 2**30:.1f} GiB, "
                f"loss {result['loss']:.4f}"
            )
        else:
            self.record.say(f"B = {pairs} {name}: {result['status']}")
        return result

    def _step(self, name: str, s: Setting) -> dict[str, Any]:
        """Measures a step: its time, its loss, and its peak of GPU and host memory without the weights."""
        losses: list[float] = []

        def work() -> float:
            features = s.everything() if name == THEIRS else None  # in the memory, but not in the time
            start = now(self.device)
            losses.append(SYSTEMS[name](s, features).item())
            return now(self.device) - start

        if self.device == "cpu":
            seconds, host = peak_memory(work, "cpu")
            return {"seconds": seconds, "peak_bytes": 0, "host_bytes": host, "loss": losses[-1]}
        (seconds, peak), host = peak_memory(lambda: peak_memory(work, self.device), "cpu")
        return {"seconds": seconds, "peak_bytes": peak, "host_bytes": host, "loss": losses[-1]}


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    errors = {check["system"]: check.get("gradient_error") for check in record["checks"]}
    rows: list[Sequence[Any]] = []
    for r in record["results"]:
        seconds, share = r.get("seconds"), r.get("utilization")
        memory = [gib(r.get("peak_bytes")), gib(r.get("host_bytes"))]
        cells = [f"{r['B']:,}", r["system"], cell(seconds, ".2f") or r["status"], ratio(r["B"], seconds, ".1f")]
        cells += [*memory, cell(share, ".1%"), cell(r.get("loss"), ".4f"), cell(errors.get(r["system"]), ".0e")]
        rows.append(cells)
    headings = ["B", "system", "step, s", "pairs/s", "peak GPU GiB", "peak host GiB", "of peak FLOPs", "loss", "gradient error"]
    models = "; ".join(
        f"{name}: {entry['parameters'] / 1e6:,.0f} M parameters, trained: {entry['trained']} "
        f"({entry['trained_parameters'] / 1e6:,.1f} M)"
        for name, entry in record["models"].items()
    )
    notes = (
        f"{models}. Queries are texts of 4 to 40 tokens. Documents are images of 256 to 1,024 visual tokens. Peak: memory in "
        "addition to the weights. megabatch resizes the images during the step, twice. The steps of sentence-transformers "
        "do not include resizing. Gradient error: relative to a plain step of a small model in float32."
    )
    return paragraphs(TextTable(headings, rows, names=(1,)).markdown(), notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with further packages, such as PEFT")
    arguments(parser, "vision_language_gpu", 200)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    bench = Bench(args)
    bench.check()
    bench.run(TINY if args.tiny else LARGE)
    bench.record.finish(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
