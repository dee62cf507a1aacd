"""Decoders as encoders of texts, Qwen3-0.6B and Qwen3-8B by shape: our cached step against sentence-transformers' cached loss.

The decoders have random weights and pool the last token. Texts are random tokens of lognormal lengths: queries, documents, and
one hard negative for each query. The 0.6B is trained whole, in float32 under bf16 autocast. The 8B is in bf16 and is trained by
LoRA; without PEFT (`--peers FOLDER` names a folder that has it), its last layers are trained.

Before anything is timed, the gradients of every system are compared with a plain step's, in float32 with a small decoder.
The first system of each library tries several chunk sizes on the smallest batch, and all of its systems use the best one.
Layers are compiled where a system says so. A timed step has compiled nothing; else it is timed again. The most important rows
are measured first, each within a share of the time. `--tiny` runs the same code on a CPU. Writes a JSON record after every
measurement; `decoders_gpu_report.py` makes the table and the plot of it.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decoders_gpu_report import markdown, report
from decoders_gpu_systems import (
    COMPILED,
    LARGE,
    LONGEST,
    OURS_LIBRARY,
    SMALL,
    SYSTEMS,
    THEIRS_COMPILED,
    TINY,
    WITH_COMPILER,
    Features,
    Setting,
    Shape,
    System,
    compilations,
    decoder,
    gradients,
    plain,
    rehearse_loss,
    texts,
)
from record import Record, arguments, device_of
from timing import TimeUp, clear, failure, time_limit

from megabatch.bench.measure import LATE, peak_memory
from megabatch.machine import peak_rates
from megabatch.towers.huggingface import TextEncoder

CHECK, CHECK_TOKENS, TOLERANCE = 12, 200, 1e-3  # float32 against float32, by the length of all gradients


KEPT_BACK = 0.2  # of all time, for the stages after the first
FAIR, LEAST = 1.5, 0.25  # a row's limit: this multiple of an equal share of the time left, and this fraction of it at least
WORTH_A_WARM_UP = 10.0  # seconds: longer steps are timed at once, and again if they compiled
ATTEMPTS = 2


@dataclass(eq=False)
class Model:
    """A decoder, and the numbers that later rows need."""

    shape: Shape
    encoder: TextEncoder | None = None
    trained: str = ""
    usable: dict[str, str] = field(default_factory=dict)  # why a system is not measured any more
    tokens: dict[str, int] = field(default_factory=dict)  # of a chunk, by library
    pace: dict[str, float] = field(default_factory=dict)  # seconds of a pair, by system

    def step(self, name: str, pairs: int) -> float:
        """Seconds that a step will take, by the last one; 0 if there is none."""
        return self.pace.get(name, 0.0) * pairs

    def needs(self, name: str, pairs: int) -> float:
        """Seconds that a row will take, with its warm-up and some more."""
        return 1.2 * self.step(name, pairs) * (2 if self.step(name, pairs) < WORTH_A_WARM_UP else 1)


class Bench:
    """The measurements of all shapes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.record = Record("decoders_gpu", args, args.seconds, checks=[], models={}, compiling=[])
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

    def run(self, shapes: Sequence[Shape]) -> None:
        """All stages, with a report after each of them."""
        models = [Model(shape) for shape in shapes]
        for number, rows in enumerate(stages(models)):
            kept = KEPT_BACK * self.args.seconds if number == 0 else 0.0
            for done, (model, batch, name) in enumerate(rows):
                left = self.record.left() - kept
                share = max(FAIR / (len(rows) - done), LEAST)
                self.record["results"].append(self.row(model, batch, name, min(left, share * left)))
                self.record.save()
            report(self.record.path)

    def row(self, model: Model, batch: int, name: str, seconds: float) -> dict[str, Any]:
        """One row of the table, within so many seconds."""
        system, shape, pairs = SYSTEMS[name], model.shape, model.shape.batches[batch]
        status = model.usable.get(name, self.usable[name])
        if status == "ok" and (seconds <= 0 or model.needs(name, pairs) > seconds):
            status = LATE
        result: dict[str, Any] = {"model": shape.name, "B": pairs, "system": name, "status": status}
        if result["status"] != "ok":
            return result
        told = f"{shape.name} B = {pairs} {name}"
        try:
            with time_limit(seconds):
                self.prepare(model)
                self.measure(model, batch, name, result)
        except TimeUp:
            result["status"] = model.usable[name] = LATE
        except Exception as error:  # a library may fail in any way; the others are still measured
            result["status"] = failure(error)
        if result["status"] == "ok":
            model.pace[name], model.tokens[system.library] = result["seconds"] / pairs, result["chunk_tokens"]
            peak = result["peak_bytes"] / 2**30
            told += f": {result['seconds']:.2f} s, {pairs / result['seconds']:.0f} pairs/s, {peak:.1f} GiB"
            self.record.say(f"{told}, loss {result['loss']:.4f}")
        else:
            self.record.say(f"{told}: {result['status']}")
        if model.encoder is not None:
            gradients(model.encoder)
        clear(self.device)
        return result

    def prepare(self, model: Model) -> None:
        """Makes the decoder, when it is first needed."""
        if model.encoder is not None:
            return
        shape = model.shape
        model.encoder, model.trained = decoder(shape, self.device, half=shape.adapters and self.device == "cuda")
        self.record["models"][shape.name] = {
            "parameters": sum(p.numel() for p in model.encoder.parameters()),
            "trained_parameters": sum(p.numel() for p in model.encoder.parameters() if p.requires_grad),
            "trained": model.trained,
        }
        self.record.say(f"{shape.name}: {model.trained}")

    def measure(self, model: Model, batch: int, name: str, result: dict[str, Any]) -> None:
        """The fastest step of those with the chunk sizes in question."""
        system, shape = SYSTEMS[name], model.shape
        assert model.encoder is not None
        columns = texts(shape.batches[batch], shape.config["vocab_size"], self.device, self.longest)
        result["tokens"] = sum(int(column["attention_mask"].sum()) for column in columns)
        known = model.tokens.get(system.library)
        tried: dict[int, dict[str, Any]] = {}
        for tokens in shape.tokens if known is None else (known,):
            s = Setting(model.encoder, columns, tokens, self.device)
            try:
                if model.step(name, shape.batches[batch]) < WORTH_A_WARM_UP:
                    self.warm_up(f"{shape.name} {name}", system, s, first=not tried and name not in model.pace)
                elif system.library == OURS_LIBRARY:
                    rehearse_loss(s)
                tried[tokens] = self.step(system, s)
            except Exception:  # larger chunks would fail too
                if not tried:
                    raise
                break
        if known is None:
            times = ", ".join(f"{tokens}: {found['seconds']:.2f} s" for tokens, found in tried.items())
            self.record.say(f"{shape.name} {name}, chunks of tokens {times}")
        result |= min(tried.values(), key=lambda found: float(found["seconds"]))
        if self.peak and not model.trained.startswith("the last"):
            work = necessary(shape, columns, whole=model.trained == "all weights")
            result["share_of_peak"] = work / result["seconds"] / self.peak

    def warm_up(self, what: str, system: System, s: Setting, *, first: bool) -> None:
        """A step of the same batch, which compiles kernels and requests memory.

        The very first one begins with documents, because the compiler chooses kernels by the first chunk that it sees, and
        queries are few tokens.
        """
        begun, before = time.perf_counter(), compilations()
        system.prepare(s.encoder)
        if first and system.compiled:
            system(dataclasses.replace(s, columns=s.columns[::-1]))
        self.seconds(system, s)
        gradients(s.encoder)
        if compilations() > before:
            self.record["compiling"].append([what, compilations() - before, time.perf_counter() - begun])
            self.record.say(f"{what}: {compilations() - before} compilations, {time.perf_counter() - begun:.0f} s")

    def step(self, system: System, s: Setting) -> dict[str, Any]:
        """A step that compiles nothing: its time, its peak beyond weights and gradients, its loss."""
        found: dict[str, Any] = {"chunk_tokens": s.tokens}
        for _ in range(ATTEMPTS):
            gradients(s.encoder)
            system.prepare(s.encoder)
            for p in s.encoder.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None  # as in every step but the first
            before = compilations()
            found["seconds"], found["peak_bytes"] = peak_memory(lambda: self.seconds(system, s, found), self.device)
            if compilations() == before:
                return found
            self.record.say(f"a timed step had {compilations() - before} compilations, {found['seconds']:.1f} s; once more")
        raise RuntimeError("compiles in every step")

    def seconds(self, system: System, s: Setting, found: dict[str, Any] | None = None) -> float:
        """Of one step."""
        begun = time.perf_counter()
        value = system(s).item()  # waits for the device
        if self.device == "cuda":
            torch.cuda.synchronize()
        if found is not None:
            found["loss"] = value
        return time.perf_counter() - begun


def stages(models: Sequence[Model]) -> list[list[tuple[Model, int, str]]]:
    """Rows of the table, the most important ones first, so that a run without time for all of them is still useful.

    First the compiled systems of both libraries at the smallest batch, for every model. Then our two largest batches, whose
    memory says whether the batch is bounded. Then the rest.
    """
    smallest = [(model, 0, name) for model in models for name in (COMPILED, THEIRS_COMPILED)]
    largest = [(model, len(model.shape.batches) - back, COMPILED) for model in models for back in (2, 1)]
    largest = [row for row in largest if row not in smallest]
    every = [
        (model, batch, name)
        for batch in range(max(len(model.shape.batches) for model in models))
        for model in models
        for name, system in SYSTEMS.items()
        if batch < min(system.batches, len(model.shape.batches))
    ]
    return [smallest, largest, [row for row in every if row not in smallest and row not in largest]]


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
    bench.run(TINY if args.tiny else [{"0.6B": SMALL, "8B": LARGE}[name] for name in args.models])
    bench.record.save()
    print(markdown(json.loads(bench.record.path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
