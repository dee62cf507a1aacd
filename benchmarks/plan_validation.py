"""Compares `megabatch plan` with measurements on a GPU: memory and time of steps with gradient caching.

For each model, chunk size and batch, the script runs a step of `cached_backward` with AdamW, and compares its peak memory with
the plan. The step has all embeddings and the whole loss. The towers encode only the first and the last few chunks. For other
chunks they return random embeddings with a gradient, so that a batch of a million pairs takes seconds. The time of encoding is
measured on complete chunks and multiplied. The last case of ViT-L/14 reads its images by replay.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch_train.bench.measure import (
    LATE,
    OK,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    groups,
    milliseconds,
    number_options,
    paragraphs,
    peak_memory,
)
from megabatch_train.bench.steps import CONTEXT, SIZES, VOCABULARY, Size, SyntheticImages, UnitRange, read_images_twice, towers
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.planning import gpus, step
from megabatch_train.planning.costs import MEGABATCH, Shape, loss_bytes, loss_seconds
from megabatch_train.planning.models import Model, ModelSide, nowhere, without_data

REAL = 2  # number of chunks that are encoded at the beginning and at the end
CASES = [  # (model, chunk size, batch, source of images)
    ("ViT-L/14", 256, 4096, "made"),
    ("ViT-L/14", 128, 65536, "made"),
    ("ViT-L/14", 256, 65536, "made"),
    ("ViT-L/14", 256, 1048576, "replay"),
    ("ViT-B/32", 1024, 4096, "made"),
    ("ViT-B/32", 512, 65536, "made"),
    ("ViT-B/32", 1024, 65536, "made"),
    ("ViT-B/32", 1024, 1048576, "made"),
    ("ViT-B/16", 512, 4096, "made"),
    ("ViT-B/16", 256, 65536, "made"),
    ("ViT-B/16", 512, 65536, "made"),
    ("ViT-B/16", 512, 1048576, "made"),
]
TINY = [("tiny", 16, 64, "made"), ("tiny", 16, 256, "replay")]


class Tokens(mb.Source):
    """A source of random tokens. The last token has the largest id, which is the end of the text in CLIP."""

    def __init__(self, rows: int, device: str) -> None:
        self.rows, self.device = rows, device

    def __len__(self) -> int:
        """Returns the number of texts."""
        return self.rows

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """Yields tokens (n, CONTEXT). The same span always has the same tokens."""
        for start, stop in spans:
            generator = torch.Generator(self.device).manual_seed(start)
            ids = torch.randint(1, VOCABULARY - 2, (stop - start, CONTEXT), generator=generator, device=self.device)
            ids[:, -1] = VOCABULARY - 1
            yield ids


class Truncated(mb.Source):
    """The first and the last chunks of a source. Other chunks contain a number for each sample, which `PartTower` reads."""

    def __init__(self, source: mb.Source, chunk: int) -> None:
        self.source, self.chunk, self.reuses_memory = source, chunk, source.reuses_memory

    def __len__(self) -> int:
        """Returns the number of samples of the other source."""
        return len(self.source)

    def chunks(self, spans: Sequence[tuple[int, int]], device: torch.device | None) -> Iterator[Tensor]:
        """Yields real chunks (n, …), or numbers (n, 1) on the host."""
        real_spans = [span for span in spans if self._is_real(span)]
        with closing(iter(self.source.chunks(real_spans, device))) as real:
            for span in spans:
                yield next(real) if self._is_real(span) else torch.full((span[1] - span[0], 1), span[0])

    def _is_real(self, span: tuple[int, int]) -> bool:
        return span[0] < REAL * self.chunk or span[0] >= len(self) - REAL * self.chunk


class PartTower(nn.Module):
    """A tower that encodes real chunks. For other chunks it returns random unit vectors that depend on a parameter."""

    def __init__(self, tower: nn.Module, width: int, device: str) -> None:
        super().__init__()
        self.tower, self.width, self.device = tower, width, device
        self.one = nn.Parameter(torch.ones(width, device=device))
        self.dtype = torch.float32  # dtype of the real embeddings, which are computed first
        self.after_loss: Any = None  # called once, when the second pass begins

    def forward(self, x: Tensor) -> Tensor:
        """Returns embeddings (n, D)."""
        if self.after_loss is not None:
            self.after_loss()
        if x.shape[-1] != 1:
            embeddings: Tensor = self.tower(x)
            self.dtype = embeddings.dtype
            return embeddings
        generator = torch.Generator(self.device).manual_seed(int(x[0, 0]))
        random = torch.randn(len(x), self.width, generator=generator, device=self.device)
        return (F.normalize(random, dim=1) * self.one).to(self.dtype)


class Clock:
    """Measures seconds between moments on the device without waiting, because the host launches the loss while it encodes."""

    def __init__(self, device: str) -> None:
        self.device, self.moments = device, []

    def mark(self) -> None:
        """Records the current moment of the device."""
        if self.device == "cuda":
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()
        else:
            self.moments.append(time.perf_counter())

    def seconds(self) -> float:
        """Returns the seconds between the last two moments."""
        first, second = self.moments[-2:]
        if self.device == "cuda":
            second.synchronize()
            return float(first.elapsed_time(second)) / 1000
        return float(second - first)


@dataclass
class Subject:
    """A model on the device with its optimizer, and the same model without data for the plan."""

    name: str
    size: Size
    image: nn.Module
    text: nn.Module
    library: str
    log_scale: nn.Parameter
    optimizer: torch.optim.Optimizer
    planned: Model

    def parameters(self) -> list[nn.Parameter]:
        """Returns all trained parameters."""
        return [*self.image.parameters(), *self.text.parameters(), self.log_scale]


def subject(name: str, device: str) -> Subject:
    size = SIZES[name]
    with torch.device(device):
        image, text, library = towers(size, device)
    with torch.device("meta"):
        empty = towers(size, "meta")[:2]
    with nowhere():
        for module in empty:
            without_data(module)
    images = partial(_inputs, (3, size.pixels, size.pixels), torch.float32, "x")
    texts = partial(_inputs, (CONTEXT,), torch.int64, "x")
    planned = Model(name, (ModelSide("image", empty[0], images), ModelSide("text", empty[1], texts)))
    log_scale = nn.Parameter(torch.tensor(2.66, device=device))
    parameters = [*image.parameters(), *text.parameters(), log_scale]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device == "cuda")
    return Subject(name, size, image, text, library, log_scale, optimizer, planned)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, name: str, n: int) -> dict[str, Tensor]:
    return {name: torch.zeros(n, *shape, dtype=dtype)}


def chunk_seconds(s: Subject, chunk: int, device: str) -> tuple[float, float]:
    """Returns the seconds of encoding a chunk of pairs without a graph, and of a forward and a backward pass."""
    images = next(SyntheticImages(chunk, s.size, device).chunks([(0, chunk)], None))
    texts = next(Tokens(chunk, device).chunks([(0, chunk)], None))

    def without() -> None:
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            for tower, x in ((s.image, images), (s.text, texts)):
                tower(x)

    def both() -> None:
        for tower, x in ((s.image, images), (s.text, texts)):
            with torch.autocast(device, dtype=torch.bfloat16):
                embeddings = tower(x)
            embeddings.backward(torch.full_like(embeddings, 1e-3))
            del embeddings

    for work in (without, both):
        work()
    forward_seconds, both_seconds = (milliseconds(work, device, 0.1) / 1000 for work in (without, both))
    return forward_seconds, both_seconds


def run_case(s: Subject, plan: step.Plan, batch: int, source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures a step, and adds the plan of the step."""
    device, chunk = args.device, plan.chunk
    result: dict[str, Any] = {"model": s.name, "chunk": chunk, "B": batch, "source": source, "status": OK}
    width = s.size.embedding
    tower = UnitRange(s.image) if source == "replay" else s.image
    image, text = (PartTower(module, width, device) for module in (tower, s.text))
    images = (
        read_images_twice(batch, s.size, args.workers, seed=batch)
        if source == "replay"
        else SyntheticImages(batch, s.size, device)
    )
    sides = [(image, Truncated(images, chunk)), (text, Truncated(Tokens(batch, device), chunk))]
    clock = Clock(device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        def second_pass() -> None:
            clock.mark()
            image.after_loss = text.after_loss = None

        image.after_loss = text.after_loss = second_pass
        clock.mark()
        return mb.clip_loss(x, y, s.log_scale.exp(), backend=args.backend)

    def run_step() -> float:
        with torch.autocast(device, dtype=torch.bfloat16):
            value = mb.cached_backward(loss, sides, chunk_size=chunk)
        s.optimizer.step()
        for p in (*image.parameters(), *text.parameters(), s.log_scale):
            if p.grad is not None:
                p.grad.zero_()
        return value.item()

    clear(device)
    held_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(1 if batch > 2**18 else 2):  # in the second step of a small batch, everything is compiled
        value, peak = peak_memory(run_step, device)
    result |= {"loss": value, "peak_bytes": peak + held_bytes, "loss_seconds": clock.seconds()}
    memory = plan.peak_with_caching(batch, MEGABATCH, step.REPLAY)
    return result | {
        "planned_bytes": memory.total,
        "planned_parts": vars(memory),
        "planned_loss_bytes": loss_bytes(MEGABATCH, plan.shape(batch)),
        "planned_loss_seconds": loss_seconds(MEGABATCH, plan.shape(batch), plan.setup.gpu, "bf16"),
    }


def validate(record: Record, args: argparse.Namespace) -> None:
    gpu = gpus.find("H200")
    if args.device == "cuda":
        gpu = _this_gpu(gpu)
    record.contents["planned_for"] = gpu.name
    subjects: dict[str, Subject] = {}
    plan_and_times: dict[tuple[str, int], tuple[step.Plan, tuple[float, float]]] = {}
    for name, chunk, batch, source in args.cases:
        expected = 10 + 3 * 8 * batch**2 * SIZES[name].embedding / gpu.rate("bf16") + 0.004 * batch / chunk
        case = {"model": name, "chunk": chunk, "B": batch, "source": source}
        if expected > record.seconds_left():
            record["results"].append(case | {"status": LATE})
            continue
        record.say(f"{name}, chunks of {chunk}, {batch} pairs, {source}")
        if name not in subjects:
            subjects.clear()  # only one model is on the device at a time
            gc.collect()
            subjects[name] = subject(name, args.device)
            prepare(subjects[name], args)
        s = subjects[name]
        try:
            if (name, chunk) not in plan_and_times:
                plan = step.make(s.planned, step.Setup(gpu, 1), chunk)
                plan_and_times[name, chunk] = plan, chunk_seconds(s, chunk, args.device)
            plan, times = plan_and_times[name, chunk]
            result = run_case(s, plan, batch, source, args) | encoding(plan, times, batch, gpu)
        except torch.OutOfMemoryError as error:
            result = case | {"status": f"out of memory: {str(error).splitlines()[0]}"}
        result["towers"] = s.library
        record["results"].append(result)
        record.save()


def prepare(s: Subject, args: argparse.Namespace) -> None:
    """Allocates gradients and optimizer states, as after a first step, and compiles the kernels of the loss."""
    for p in s.parameters():
        p.grad = torch.zeros_like(p)
    s.optimizer.step()
    x, y = (torch.randn(1024, s.size.embedding, device=args.device, requires_grad=True) for _ in range(2))
    with torch.autocast(args.device, dtype=torch.bfloat16):
        mb.clip_loss(x, y, 10.0, backend=args.backend).backward()


def encoding(plan: step.Plan, times: tuple[float, float], batch: int, gpu: gpus.Gpu) -> dict[str, Any]:
    """Returns the seconds of all chunks, the fraction of the peak rate, and the planned seconds."""
    forward, both = times
    operations = sum(2 * tower.forward_operations + tower.backward_operations for tower in plan.encoders) * plan.chunk
    efficiency = operations / (forward + both) / gpu.rate("bf16")
    seconds = plan.seconds(batch)
    return {
        "chunk_seconds": [forward, both],
        "encoder_seconds": (forward + both) * batch / plan.chunk,
        "encoder_efficiency": efficiency,
        "planned_encoder_seconds": seconds.encode + seconds.recompute + seconds.backward,
    }


def _this_gpu(default: gpus.Gpu) -> gpus.Gpu:
    """Returns the entry of the installed GPU in the catalogue, or the default entry with its name."""
    name = torch.cuda.get_device_name()
    for gpu in gpus.CATALOGUE:
        if gpu.name.split("-")[0].lower() in name.lower().replace(" ", ""):
            return gpu
    return replace(default, name=name)


COLORS = {"ViT-B/32": plots.GREEN, "ViT-B/16": plots.BLUE, "ViT-L/14": plots.ORANGE}
GIB = 2**30
LARGE = 2**16  # fewest pairs for which the summary states the error of the planned time


def plan_times_again(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with planned times of the installed version. Measurements and planned memory are unchanged."""
    gpu = {entry.name: entry for entry in gpus.CATALOGUE}.get(
        record["planned_for"], gpus.find("H200")
    )  # the same choice as in the run

    def again(r: dict[str, Any]) -> dict[str, Any]:
        shape = Shape(r["B"], 1, 1, SIZES[r["model"]].embedding, 4, half=True)
        encoders = r["encoder_seconds"] * r["encoder_efficiency"] / gpus.ENCODER_EFFICIENCY
        loss = loss_seconds(MEGABATCH, shape, gpu, "bf16")
        return r | {"planned_loss_seconds": loss, "planned_encoder_seconds": encoders}

    return record | {"results": [again(r) if r["status"] == OK else r for r in record["results"]]}


def table(record: dict[str, Any]) -> str:
    headings = ["model", "chunk", "B", "images", "peak GiB", "planned", "error", "loss ms", "planned", "error"]
    headings += ["encoders s", "planned", "fraction of peak rate"]
    rows = []
    for r in record["results"]:
        cells = [r["model"], r["chunk"], f"{r['B']:,}", r["source"]]
        if r["status"] != OK:
            rows.append([*cells, r["status"], *([""] * 8)])
            continue
        cells += [f"{r['peak_bytes'] / GIB:.2f}", f"{r['planned_bytes'] / GIB:.2f}", _off(r["planned_bytes"], r["peak_bytes"])]
        cells += [f"{1000 * r['loss_seconds']:,.1f}", f"{1000 * r['planned_loss_seconds']:,.1f}"]
        cells.append(_off(r["planned_loss_seconds"], r["loss_seconds"]))
        cells += [f"{r['encoder_seconds']:,.1f}", f"{r['planned_encoder_seconds']:,.1f}", f"{r['encoder_efficiency']:.2f}"]
        rows.append(cells)
    return TextTable(headings, rows, names=(0, 3)).markdown()


def summary(record: dict[str, Any]) -> str:
    done = [r for r in record["results"] if r["status"] == OK]
    if not done:
        return "Nothing was measured."
    memory = max(abs(r["planned_bytes"] / r["peak_bytes"] - 1) for r in done)
    time_errors = [abs(r["planned_loss_seconds"] / r["loss_seconds"] - 1) for r in done if r["B"] >= LARGE]
    time_sentence = (
        f", and the planned time of the loss is within {max(time_errors):.0%} of the measured time from {LARGE:,} pairs on"
        if time_errors
        else ""
    )
    rates = [r["encoder_efficiency"] for r in done]
    return (
        f"The planned memory is within {memory:.1%} of the measured memory{time_sentence}. Encoders reach {min(rates):.2f} to "
        f"{max(rates):.2f} of the peak rate in the datasheet. A plan assumes {gpus.ENCODER_EFFICIENCY:.2f} by default."
    )


NOTES = (
    "Peak: allocated memory in a step with AdamW, including weights. The step has all embeddings and computes the whole loss. "
    "The towers encode only the first and the last two chunks, and return random embeddings for the other chunks. Encoders s: "
    "the time of one chunk, extended to all chunks. Fraction of peak rate: relative to the dense bf16 rate in the datasheet. "
    "Each case was measured once. Memory was planned before the run. Times are planned with the constants of the installed "
    "version, which were fitted to this run and to loss_gpu.md. The plan of small losses is less accurate, because a step of "
    "4,096 pairs takes seconds and its loss takes a millisecond."
)


def _off(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


def draw(record: dict[str, Any]) -> Any:
    """Draws planned values against measured values."""
    done = [r for r in plan_times_again(record)["results"] if r["status"] == OK]
    figure, panels = plots.panels(f"Planned and measured values; {chip(record)}", 2, height=4.4)
    quantities = (
        ("peak memory, GiB", "peak_bytes", "planned_bytes", GIB),
        ("loss, seconds", "loss_seconds", "planned_loss_seconds", 1),
    )
    for axes, (label, measured, planned, unit) in zip(panels, quantities, strict=True):
        values = [r[key] / unit for r in done for key in (measured, planned)]
        ends = (0.7 * min(values), 1.4 * max(values))
        axes.plot(ends, ends, color=plots.GREY, linewidth=1)
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=plots.LINE)
        axes.text(0.03, 0.93, "gray band: within 10 %", transform=axes.transAxes, color=plots.GREY, fontsize=8)
        for (model,), rows in groups(done, "model").items():  # type: ignore[misc]
            points = sorted((r[measured] / unit, r[planned] / unit) for r in rows)
            plots.line(axes, points, model, COLORS.get(model, plots.INK), linestyle="", markersize=6)
        axes.set(xlabel=f"measured {label}", ylabel=f"planned {label}", xlim=ends, ylim=ends)
        for which in ("x", "y"):
            plots.log_axis(axes, which)
        plots.label_lines(axes)
    return figure


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record: summary, table and notes."""
    again = plan_times_again(record)
    return paragraphs(summary(again), table(again), NOTES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="*", choices=[name for name in SIZES if name != "tiny"], help="models to measure (default: all)"
    )
    number_options(parser, workers=(12, "number of threads that read images for replay"))
    arguments(parser, "plan_validation", 540)
    args = parser.parse_args()
    args.device = device_of(args)
    args.backend = "triton" if args.device == "cuda" else "eager"
    args.cases = TINY if args.tiny else [case for case in CASES if not args.models or case[0] in args.models]
    record = Record.of_script("plan_validation", args, args.seconds)
    validate(record, args)
    record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
