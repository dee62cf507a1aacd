"""Decoders as encoders of texts, Qwen3-0.6B and Qwen3-8B by shape: our cached step against sentence-transformers' cached loss.

The decoders have random weights and pool the last token. Texts are random tokens of lognormal lengths: queries, documents, and
one hard negative for each query. The 0.6B is trained whole, in float32 under bf16 autocast. The 8B is in bf16 and is trained by
LoRA; without PEFT (`--peers FOLDER` names a folder that has it), its last layers are trained.

Before anything is timed, the gradients of every system are compared with a plain step's, in float32 with a small decoder.
Every system tries several chunk sizes on a small batch and then uses its fastest; layers are compiled for all systems that say
so. `--tiny` runs the same code on a CPU. Writes a JSON record after every measurement; `decoders_gpu_report.py` makes the table
and the plot of it.
"""

import argparse
import inspect
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decoders_gpu_report import markdown, report
from record import Record, arguments, device_of
from timing import clear, failure
from torch import Tensor, nn

import megabatch as mb
from megabatch.bench.measure import peak_memory
from megabatch.cached import Budget
from megabatch.machine import peak_rates
from megabatch.towers.blocks import layers
from megabatch.towers.huggingface import TextEncoder
from megabatch.towers.lora import LoraConfig, inject
from megabatch.trainer import compiling

SCALE, RANK = 20.0, 16
LONGEST, SPREAD = 512, 0.6  # tokens; the deviation of the logarithm of lengths
MEANS = (24, 128, 128)  # tokens of a query, a document, a hard negative
TRAINED_LAYERS = 4  # of the 8B without PEFT
CHECK, CHECK_TOKENS, TOLERANCE = 12, 200, 1e-3  # float32 against float32, by the length of all gradients
OURS, PADDED, COMPILED = "megabatch, packed", "megabatch, padded", "megabatch, packed, compiled"
KEPT = "megabatch, packed, compiled, graphs kept"
THEIRS = "sentence-transformers"
THEIRS_TOKENS, THEIRS_COMPILED = f"{THEIRS}, by tokens", f"{THEIRS}, by tokens, compiled"
Features = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A decoder, and what is measured of it."""

    name: str
    config: dict[str, Any]
    adapters: bool  # LoRA in bf16 weights, or all weights in float32
    batches: tuple[int, ...]
    tuning: int  # pairs
    tokens: tuple[int, ...]  # of a chunk, to choose from


_HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151669, "max_position_embeddings": 32768}
SMALL = Shape(
    "Qwen3-0.6B",
    {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, **_HEADS},
    False,
    (2048, 512, 8192),
    256,
    (16384, 32768, 65536),
)
LARGE = Shape(
    "Qwen3-8B",
    {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, **_HEADS},
    True,
    (256, 64, 1024),
    32,
    (8192, 16384, 32768),
)
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"head_dim": 8, "vocab_size": 500, "max_position_embeddings": 512}
TINY = [Shape("tiny, whole", _TINY, False, (24, 8), 8, (256, 1024)), Shape("tiny, in part", _TINY, True, (24, 8), 8, (256,))]


class Texts(nn.Module):
    """The decoder as sentence-transformers calls it: padded texts, the state of the last token."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Features) -> Features:
        """Embeddings beside the features."""
        found = self.encoder(features["input_ids"], features["attention_mask"])
        return {**features, "sentence_embedding": found}


@dataclass
class Setting:
    """The inputs of a step."""

    encoder: TextEncoder
    columns: list[Features]
    tokens: int  # of a chunk
    device: str
    autocast: bool = True

    def cast(self) -> Any:
        """The autocast region of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast and self.device == "cuda")


def decoder(shape: Shape, device: str, half: bool) -> tuple[TextEncoder, str]:
    """The decoder with random weights, and what of it is trained."""
    from transformers import AutoModel, Qwen3Config

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    try:
        with torch.device(device):
            model = AutoModel.from_config(Qwen3Config(**shape.config))
    finally:
        torch.set_default_dtype(before)
    trained = "all weights"
    if shape.adapters:
        try:
            inject(model, LoraConfig(RANK))
            trained = f"LoRA of rank {RANK}"
        except ModuleNotFoundError:
            trained = f"the last {TRAINED_LAYERS} layers"
            model.requires_grad_(False)
            for layer in model.layers[-TRAINED_LAYERS:]:
                layer.float().requires_grad_(True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return TextEncoder(model).to(device), trained


def texts(pairs: int, vocabulary: int, device: str, longest: int) -> list[Features]:
    """Queries, documents and hard negatives; the first tokens of a document are its query's."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for mean in MEANS:
        center = math.log(min(mean, longest / 3)) - SPREAD**2 / 2
        drawn = (torch.randn(pairs, generator=generator) * SPREAD + center).exp()
        lengths = drawn.round().long().clamp(4, longest)
        ids = torch.randint(5, vocabulary, (pairs, int(lengths.max())), generator=generator)
        if found:
            ids[:, :4] = found[0]["input_ids"][:, :4].cpu()
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        found.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return found


def plain(s: Setting) -> Tensor:
    """One graph over everything, and a dense loss."""
    with s.cast():
        query, key, hard = (s.encoder(**column) for column in s.columns)
        loss = F.cross_entropy(SCALE * query @ torch.cat([key, hard]).T, torch.arange(len(query), device=query.device))
    loss.backward()
    return loss.detach()


class _Loss:
    further_rows = True

    def __call__(self, query: Tensor, second: Tensor) -> Tensor:
        key, hard = second[: len(query)], second[len(query) :]
        return mb.info_nce_loss(query, key, scale=SCALE, negatives=hard)


def ours(s: Setting, budget: Budget = None) -> Tensor:
    """`cached_backward`; hard negatives are further documents."""
    query, key, hard = s.columns
    width = max(key["input_ids"].shape[1], hard["input_ids"].shape[1])
    both = {name: torch.cat([F.pad(part[name], (0, width - part[name].shape[1])) for part in (key, hard)]) for name in query}
    sizes = [max(1, s.tokens // column["input_ids"].shape[1]) for column in (query, both)]
    with s.cast():
        return mb.cached_backward(_Loss(), [(s.encoder, query), (s.encoder, both)], chunk_size=sizes, budget=budget)


def theirs(s: Setting, *, by_tokens: bool = False) -> Tensor:
    """`CachedMultipleNegativesRankingLoss`, in mini-batches of as many texts or tokens."""
    try:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Loss
    except ImportError:  # versions before 6
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss as Loss
    options: dict[str, Any] = {"mini_batch_size": max(1, s.tokens // s.columns[1]["input_ids"].shape[1])}
    if by_tokens:
        if "mini_batch_num_tokens" not in inspect.signature(Loss.__init__).parameters:  # versions before 5.6
            raise ImportError("mini_batch_num_tokens")
        options = {"mini_batch_size": 4 * options["mini_batch_size"], "mini_batch_num_tokens": s.tokens // 2}
    loss = Loss(nn.Sequential(Texts(s.encoder)), scale=SCALE, **options)
    with s.cast():
        value: Tensor = loss([dict(column) for column in s.columns], None)
        value.backward()
    return value.detach()


@dataclass(frozen=True)
class System:
    """A step, and how the decoder is prepared for it, which is not timed."""

    step: Callable[[Setting], Tensor]
    packed: bool = False
    compiled: bool = False

    def prepare(self, encoder: TextEncoder) -> None:
        """Packs or pads texts, and compiles layers, or calls them as they are."""
        for block in layers(encoder):
            block._compiled_call_impl = None
        if not self.packed:
            encoder.pad()
        elif not encoder.packed and not encoder.pack():
            raise RuntimeError("this version of transformers cannot pack texts")
        for block in layers(encoder) if self.compiled else ():
            if block not in _COMPILED:
                block.compile(dynamic=True, **compiling.OPTIONS)
                _COMPILED[block] = block._compiled_call_impl
            block._compiled_call_impl = _COMPILED[block]

    def __call__(self, s: Setting) -> Tensor:
        """One step: gradients in the decoder, and the loss."""
        with compiling.settings(strict=True) if self.compiled else nullcontext():
            return self.step(s)


_COMPILED: dict[nn.Module, Any] = {}
SYSTEMS = {  # the most important first, in case time runs out
    COMPILED: System(ours, packed=True, compiled=True),
    THEIRS_COMPILED: System(lambda s: theirs(s, by_tokens=True), compiled=True),
    OURS: System(ours, packed=True),
    THEIRS: System(theirs),
    THEIRS_TOKENS: System(lambda s: theirs(s, by_tokens=True)),
    KEPT: System(lambda s: ours(s, budget="auto"), packed=True, compiled=True),
    PADDED: System(ours),
}
WITH_COMPILER = {COMPILED: OURS, KEPT: OURS, THEIRS_COMPILED: THEIRS_TOKENS}


def gradients(model: nn.Module) -> list[Tensor]:
    """All gradients, which are then cleared."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


class Bench:
    """The measurements of all shapes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record("decoders_gpu", args, args.seconds, checks=[], models={})
        rates = peak_rates(torch.cuda.get_device_name()) if self.device == "cuda" else None
        self.peak = 1e12 * rates.half if rates is not None else 0.0
        self.usable = dict.fromkeys(SYSTEMS, "ok")
        self.longest = 64 if args.tiny else LONGEST

    def check(self) -> None:
        """Gradients of every system that is not compiled against the plain step's, whole and with adapters."""
        for shape in TINY:
            encoder, trained = decoder(shape, self.device, half=False)
            s = Setting(encoder, texts(CHECK, _TINY["vocab_size"], self.device, 64), CHECK_TOKENS, self.device, autocast=False)
            encoder.pad()
            plain(s)
            wanted = gradients(encoder)
            length = torch.stack([one.norm() for one in wanted]).norm()
            for name, step in SYSTEMS.items():
                if name in WITH_COMPILER or self.usable[name] != "ok":
                    continue
                result: dict[str, Any] = {"system": name, "trained": trained, "status": "ok"}
                try:
                    step.prepare(encoder)
                    step(s)
                    off = [(a - b).norm() for a, b in zip(gradients(encoder), wanted, strict=True)]
                    result["gradient_error"] = float(torch.stack(off).norm() / length)
                    result["status"] = "ok" if result["gradient_error"] <= TOLERANCE else "WRONG"
                except Exception as error:  # a library may fail in any way; the others are still measured
                    result["status"] = failure(error)
                self.usable[name] = result["status"]
                self.record["checks"].append(result)
                self.record.say(f"{name}, {trained}: {result['status']}, {result.get('gradient_error', math.nan):.1e}")
                gradients(encoder)
        for name, same in WITH_COMPILER.items():
            self.usable[name] = self.usable[same] if self.device == "cuda" else "only on a GPU"

    def run(self, shape: Shape, until: float) -> None:
        """One decoder: the fastest chunk of every system, then all batches, until so many seconds are left."""
        encoder, trained = decoder(shape, self.device, half=shape.adapters and self.device == "cuda")
        self.record["models"][shape.name] = {
            "parameters": sum(p.numel() for p in encoder.parameters()),
            "trained_parameters": sum(p.numel() for p in encoder.parameters() if p.requires_grad),
            "trained": trained,
        }
        self.record.say(f"{shape.name}: {trained}")
        usable, pace, chosen = dict(self.usable), dict[str, float](), dict[str, int]()
        small = texts(shape.tuning, shape.config["vocab_size"], self.device, self.longest)
        for name, step in SYSTEMS.items():
            tried: dict[int, float] = {}
            for tokens in shape.tokens:
                s = Setting(encoder, small, tokens, self.device)
                if usable[name] != "ok" or self.record.left() < until:
                    break
                try:
                    step.prepare(encoder)
                    step(s)  # asks for memory, and compiles
                    tried[tokens] = self.seconds(step, s)
                except Exception as error:
                    reason = failure(error)
                    self.record.say(f"{shape.name} {name}, chunks of {tokens} tokens: {reason}")
                    if reason != "out of memory" and not tried:
                        usable[name] = reason
                    gradients(encoder)
                    clear(self.device)
                    break
            if tried:
                chosen[name] = min(tried, key=lambda tokens: tried[tokens])
                pace[name] = tried[chosen[name]] / shape.tuning
                told = ", ".join(f"{tokens}: {seconds:.2f} s" for tokens, seconds in tried.items())
                self.record.say(f"{shape.name} {name}, chunks of tokens {told}")
            elif usable[name] == "ok":
                usable[name] = "no time left" if self.record.left() < until else "out of memory"
        for pairs in shape.batches:
            columns = texts(pairs, shape.config["vocab_size"], self.device, self.longest)
            work = necessary(shape, columns, whole=trained == "all weights") if not trained.startswith("the last") else 0.0
            for name, step in SYSTEMS.items():
                result = {"model": shape.name, "B": pairs, "system": name, "status": usable[name]}
                result["tokens"] = sum(int(column["attention_mask"].sum()) for column in columns)
                if usable[name] == "ok":
                    if pace[name] * pairs * 1.2 > self.record.left() - until:
                        result["status"] = "no time left"
                    else:
                        s = Setting(encoder, columns, chosen[name], self.device)
                        self.measure(step, s, result, work)
                self.record["results"].append(result)
                self.record.save()

    def measure(self, step: System, s: Setting, result: dict[str, Any], work: float) -> None:
        """One step: its time, its peak beyond weights and gradients, its share of the chip's rate."""
        gradients(s.encoder)
        clear(self.device)
        for p in s.encoder.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None  # as in every step but the first
        try:
            step.prepare(s.encoder)
            seconds, result["peak_bytes"] = peak_memory(lambda: self.seconds(step, s, result), self.device)
            result |= {"seconds": seconds, "chunk_tokens": s.tokens}
            if self.peak and work:
                result["share_of_peak"] = work / seconds / self.peak
            told = f"{seconds:.2f} s, {result['B'] / seconds:.0f} pairs/s, {result['peak_bytes'] / 2**30:.1f} GiB"
            self.record.say(f"{result['model']} B = {result['B']} {result['system']}: {told}, loss {result['loss']:.4f}")
        except Exception as error:
            result["status"] = failure(error)
            self.record.say(f"{result['model']} B = {result['B']} {result['system']}: {result['status']}")
        gradients(s.encoder)

    def seconds(self, step: System, s: Setting, result: dict[str, Any] | None = None) -> float:
        """Of one step."""
        begun = time.perf_counter()
        value = step(s).item()  # waits for the device
        if self.device == "cuda":
            torch.cuda.synchronize()
        if result is not None:
            result["loss"] = value
        return time.perf_counter() - begun


def necessary(shape: Shape, columns: list[Features], *, whole: bool) -> float:
    """Operations without recomputation and padding: a forward pass, and one or two products for each of its products.

    Frozen weights need no gradient, so their layers have one product in the backward pass.
    """
    c = shape.config
    heads = c["num_attention_heads"] * c["head_dim"]
    width, inner = c["hidden_size"], c["intermediate_size"]
    layer = 2 * width * heads + 2 * width * c["num_key_value_heads"] * c["head_dim"] + 3 * width * inner
    total = 0.0
    for column in columns:
        lengths = column["attention_mask"].sum(1).double()
        linear = 2.0 * layer * c["num_hidden_layers"] * float(lengths.sum())
        attention = 2.0 * heads * c["num_hidden_layers"] * float(lengths.square().sum())  # causal: half of both products
        total += linear * (3 if whole else 2) + attention * 3
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["0.6B", "8B"], choices=["0.6B", "8B"], help="both by default")
    parser.add_argument("--peers", type=Path, help="folder of packages, such as PEFT")
    arguments(parser, "decoders_gpu", 400)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    bench = Bench(args)
    bench.check()
    shapes = TINY if args.tiny else [{"0.6B": SMALL, "8B": LARGE}[name] for name in args.models]
    for number, shape in enumerate(shapes):
        bench.run(shape, until=bench.record.left() * (len(shapes) - 1 - number) / (len(shapes) - number))
        _COMPILED.clear()
        clear(bench.device)
    bench.record.save()
    report(bench.record.path)
    print(markdown(json.loads(bench.record.path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
