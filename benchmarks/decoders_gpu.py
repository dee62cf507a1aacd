"""Decoders as encoders of texts, Qwen3-0.6B and Qwen3-8B by shape: our cached step against sentence-transformers' cached loss.

The decoders have random weights and pool the last token. Texts are random tokens of lognormal lengths: queries, documents, and
one hard negative for each query. The 0.6B is trained whole, in float32 under bf16 autocast. The 8B is in bf16 and is trained by
LoRA; without PEFT (`--peers FOLDER` names a folder that has it), its last layers are trained.

Before anything is timed, the gradients of every system are compared with a plain step's, in float32 with a small decoder.
The fastest system of each library tries several chunk sizes on a small batch, and all of its systems use the best one. Layers
are compiled where a system says so. `--tiny` runs the same code on a CPU. Writes a JSON record after every measurement;
`decoders_gpu_report.py` makes the table and the plot of it.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from decoders_gpu_report import markdown, report
from decoders_gpu_systems import (
    LARGE,
    LONGEST,
    SMALL,
    SYSTEMS,
    TINY,
    WITH_COMPILER,
    Features,
    Setting,
    Shape,
    System,
    decoder,
    forget_compiled,
    gradients,
    plain,
    texts,
)
from record import Record, arguments, device_of
from timing import clear, failure

from megabatch.bench.measure import peak_memory
from megabatch.machine import peak_rates
from megabatch.towers.huggingface import TextEncoder

CHECK, CHECK_TOKENS, TOLERANCE = 12, 200, 1e-3  # float32 against float32, by the length of all gradients


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
            s = Setting(
                encoder, texts(CHECK, shape.config["vocab_size"], self.device, 64), CHECK_TOKENS, self.device, autocast=False
            )
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
        usable = dict(self.usable)
        small = texts(shape.tuning, shape.config["vocab_size"], self.device, self.longest)
        chosen: dict[str, int] = {}  # tokens of a chunk, by library
        for name, system in SYSTEMS.items():
            if usable[name] == "ok" and system.library not in chosen and self.record.left() > until:
                found = self.best_chunk(f"{shape.name} {name}", system, encoder, small, shape.tokens)
                if isinstance(found, int):
                    chosen[system.library] = found
                else:
                    usable[name] = found
        pace: dict[str, float] = {}  # seconds of a pair
        for number, pairs in enumerate(shape.batches):
            columns = texts(pairs, shape.config["vocab_size"], self.device, self.longest)
            work = necessary(shape, columns, whole=trained == "all weights") if not trained.startswith("the last") else 0.0
            for name, system in SYSTEMS.items():
                if number >= system.batches:
                    continue
                result = {"model": shape.name, "B": pairs, "system": name, "status": usable[name]}
                result["tokens"] = sum(int(column["attention_mask"].sum()) for column in columns)
                if usable[name] == "ok" and system.library not in chosen:
                    result["status"] = "no time left"
                elif usable[name] == "ok":
                    if pace.get(name, 0.0) * pairs * 1.2 > self.record.left() - until:
                        result["status"] = "no time left"
                    else:
                        s = Setting(encoder, columns, chosen[system.library], self.device)
                        before = Setting(encoder, small, s.tokens, self.device) if number == 0 else None
                        self.measure(system, s, result, work, before)
                        pace[name] = result.get("seconds", 0.0) / pairs
                self.record["results"].append(result)
                self.record.save()

    def best_chunk(
        self, what: str, system: System, encoder: TextEncoder, columns: list[Features], sizes: tuple[int, ...]
    ) -> int | str:
        """The fastest number of tokens in a chunk, or why there is none."""
        tried: dict[int, float] = {}
        for tokens in sizes:
            s = Setting(encoder, columns, tokens, self.device)
            try:
                self.warm_up(system, s)
                tried[tokens] = self.seconds(system, s)
            except Exception as error:  # larger chunks would fail too
                reason = failure(error)
                self.record.say(f"{what}, chunks of {tokens} tokens: {reason}")
                gradients(encoder)
                clear(self.device)
                if not tried:
                    return reason
                break
        told = ", ".join(f"{tokens}: {seconds:.2f} s" for tokens, seconds in tried.items())
        self.record.say(f"{what}, chunks of tokens {told}")
        return min(tried, key=lambda tokens: tried[tokens])

    def warm_up(self, system: System, s: Setting) -> None:
        """A step that requests memory and compiles."""
        system.prepare(s.encoder)
        system(s)
        gradients(s.encoder)

    def measure(self, step: System, s: Setting, result: dict[str, Any], work: float, warm_up: Setting | None) -> None:
        """One step: its time, its peak beyond weights and gradients, its share of the chip's rate."""
        gradients(s.encoder)
        clear(self.device)
        try:
            if warm_up is not None:
                self.warm_up(step, warm_up)
            step.prepare(s.encoder)
            for p in s.encoder.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None  # as in every step but the first
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
        forget_compiled()
        clear(bench.device)
    bench.record.save()
    report(bench.record.path)
    print(markdown(json.loads(bench.record.path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
