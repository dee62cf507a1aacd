"""Measures memory and speed of one training step: the plain step, gradient caching, and the methods of other projects.

The CLIP towers have random weights, the images are synthetic, and the steps use bf16 autocast. Before the timing, the gradients
of every system are compared with the plain step, in float32 on a small batch. The gradient of the scale is compared separately.
"Towers alone" is a forward pass, and a forward and a backward pass of every chunk without a loss. A step that keeps no graphs
cannot be faster.

If a step would take longer than `--longest`, only its first 16 chunks are timed, with the loss of the whole batch. The time is
extended to all chunks, and the result is marked.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import megabatch as mb
from megabatch_train.bench import measure as measuring
from megabatch_train.bench.measure import (
    MEMORY,
    OK,
    WRONG,
    Record,
    arguments,
    chip,
    device_of,
    groups,
    number_options,
    paragraphs,
    peak_memory,
    relative_error,
    seconds_of,
)
from megabatch_train.bench.steps import (
    ALONE,
    CACHED,
    PLAIN,
    SIZES,
    SYSTEMS,
    StepSetting,
    SyntheticImages,
    UnitRange,
    read_images_twice,
    step_with_caching,
    tokens,
    towers,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, gib, ratio

CHECK, CHECK_CHUNK = 32, 8
TOLERANCE = 1e-3  # relative error of the norm of the gradients; both are float32
LARGEST = {"accum-freq": 65536}  # largest batch of a system; it computes the loss once per chunk, which takes hours
(BUDGET_0, AUTO), REPLAY = CACHED, "cached, replay"
SHORT = {"plain": PLAIN, "cached": BUDGET_0, "auto": AUTO, "accum": "accum-freq", "gradcache": "GradCache"}
SHORT |= {"towers": ALONE, "replay": REPLAY}
CASES = [
    "ViT-B/32:1024,2048:plain,cached,auto,towers",
    "ViT-B/32:4096,16384:all",
    "ViT-B/32:16384:replay",
    "ViT-B/32:65536:cached,auto,towers",
    "ViT-B/32:262144:cached,towers",
    "ViT-L/14:4096,16384:cached,auto,towers",
]
TINY = ["tiny:64,256:all", "tiny:256:replay", "tiny:1024:cached,auto,towers"]
CHUNKS_TIMED = 16  # timed chunks of a step that takes too long; "auto" keeps graphs of fewer chunks
ENOUGH = 3.0  # seconds of steps of one system at one batch size


class Job(NamedTuple):
    """The settings of a measurement."""

    model: str
    rows: int
    system: str


def jobs(cases: list[str]) -> list[Job]:
    """Parses cases of the form MODEL:BATCH,…:SYSTEM,… and returns their measurements in the same order."""
    planned = []
    for text in cases:
        try:
            model, batches, systems = text.split(":")
            names = [*SYSTEMS] if systems == "all" else [SHORT[name] for name in systems.split(",")]
            planned += [Job(model, int(rows), name) for rows in batches.split(",") for name in names]
            SIZES[model]
        except (ValueError, KeyError):
            choices = f"models are {', '.join(SIZES)}; systems are all, {', '.join(SHORT)}"
            sys.exit(f"--cases must be like ViT-B/32:4096,16384:cached,towers, got {text!r}; {choices}")
    return planned


def setting(
    model: str, rows: int, args: argparse.Namespace, both_towers: tuple[nn.Module, nn.Module], chunk: int
) -> StepSetting:
    size = SIZES[model]
    log_scale = nn.Parameter(torch.tensor(2.66, device=args.device))
    images = SyntheticImages(rows, size, args.device)
    return StepSetting(
        *both_towers, log_scale, images, tokens(rows, args.device), chunk, args.device, autocast=True, backend=args.backend
    )


def clear(s: StepSetting) -> None:
    for p in s.parameters():
        p.grad = None
    measuring.clear(s.device)


def check(
    record: Record, args: argparse.Namespace, model: str, both_towers: tuple[nn.Module, nn.Module], systems: set[str]
) -> None:
    """Compares the gradients of the systems with the plain step, in float32 without autocast."""
    s = setting(model, CHECK, args, both_towers, CHECK_CHUNK)
    s.autocast = False
    expected: list[Tensor] = []
    for name in (PLAIN, *(name for name in SYSTEMS if name in systems - {PLAIN, ALONE})):
        for p in s.parameters():
            p.grad = None
        value = SYSTEMS[name](s).item()
        gradients = [p.grad for p in s.parameters() if p.grad is not None]
        expected = expected or gradients
        error, scale = relative_error(gradients[:-1], expected[:-1]), (gradients[-1] / expected[-1]).item()
        verdict = OK if error <= TOLERANCE and abs(scale - 1) <= TOLERANCE else WRONG
        result = {"model": model, "system": name, "loss": value, "error": error, "scale": scale, "status": verdict}
        record["checks"].append(result)
        record.say(f"{model} {name}: gradient error {error:.1e}, gradient of the scale × {scale:.4f}, {verdict}")
    clear(s)
    record.save()


def measure(s: StepSetting, step: Callable[[StepSetting], Tensor], enough: float, at_least: int = 1) -> dict[str, Any]:
    """Measures the fastest of up to three steps, and the peak memory. No step starts after `enough` seconds."""
    clear(s)
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step except the first
    held_bytes = torch.cuda.memory_allocated() if s.device == "cuda" else 0
    times: list[float] = []
    try:
        while len(times) < at_least or (len(times) < 3 and sum(times) < enough):
            seconds, peak = peak_memory(lambda: seconds_of(lambda: step(s), s.device), s.device)
            times.append(seconds)
    except torch.OutOfMemoryError:
        return {"status": MEMORY}
    finally:
        clear(s)
    return {"status": OK, "seconds": min(times), "steps": len(times), "peak_bytes": peak, "held_bytes": held_bytes}


def loss_seconds(rows: int, width: int, device: str, backend: str) -> float:
    """Returns the seconds of only the loss, forward and backward."""
    random = (torch.randn(rows, width, device=device) for _ in range(2))
    x, y = (nn.functional.normalize(part, dim=1).bfloat16().requires_grad_() for part in random)
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    work = lambda: mb.clip_loss(x, y, scale, backend=backend).backward()  # noqa: E731
    seconds_of(work, device)
    return min(seconds_of(work, device) for _ in range(2))


class Model:
    """A pair of towers, and the speed of its measurements so far."""

    def __init__(self, record: Record, args: argparse.Namespace, name: str) -> None:
        self.record, self.args, self.name, self.size = record, args, name, SIZES[name]
        self.chunk, self.enough = args.chunk or self.size.chunk, 0.0 if args.tiny else ENOUGH
        image, text, library = towers(self.size, args.device)
        self.both_towers = image, text
        record["towers"][name] = library
        self.pace: dict[str, float] = {}  # pairs per second of each system at the previous batch size
        self.marginal: dict[int, float] = {}  # by batch size: seconds of one more pair without a kept graph
        self.failed: set[str] = set()

    def warm_up(self) -> None:
        """Compiles kernels, and lets libraries choose their kernels."""
        warm = setting(self.name, 2 * self.chunk, self.args, self.both_towers, self.chunk)
        step_with_caching(warm)
        clear(warm)

    def run(self, job: Job) -> dict[str, Any]:
        """Runs a measurement, or returns the reason why it is skipped."""
        _, rows, name = job
        result = {"model": self.name, "B": rows, "chunk": self.chunk, "system": name}
        if name in self.failed:
            return result | {"status": MEMORY}  # a smaller batch ran out of memory
        expected = rows / self.pace.get(name, min(self.pace.values(), default=math.inf))
        encoded = rows
        can_extend = name in (BUDGET_0, ALONE) or (
            name == AUTO and rows in self.marginal
        )  # whether the time of the other chunks is known
        if expected > self.args.longest and can_extend and rows > CHUNKS_TIMED * self.chunk:
            encoded = CHUNKS_TIMED * self.chunk
            expected *= encoded / rows
        if rows > LARGEST.get(name, rows) or expected > self.record.seconds_left():
            return result | {"status": "too slow to try"}
        self.record.say(
            f"{self.name} B = {rows} {name}, about {expected:.0f} s per step, {self.record.seconds_left():.0f} s left"
        )
        if name == BUDGET_0:
            result["loss_seconds"] = loss_seconds(rows, self.size.embedding, self.args.device, self.args.backend)
        result |= self._measure(rows, encoded, name)
        if result["status"] != OK:
            self.failed.add(name)
            return result
        self._extend(result, encoded)
        self.pace[name] = result["pairs_per_second"] = rows / result["seconds"]
        self.record.say(f"    {result['pairs_per_second']:.0f} pairs/s, peak {result['peak_bytes'] / 2**30:.2f} GiB")
        return result

    def _measure(self, rows: int, encoded: int, name: str) -> dict[str, Any]:
        s = setting(self.name, encoded, self.args, self.both_towers, self.chunk)
        if name == REPLAY:
            s.image, s.images = UnitRange(self.both_towers[0]), read_images_twice(rows, self.size, self.args.workers, seed=rows)
        if encoded == rows or name == ALONE:
            # The first step that keeps graphs requests memory from the device in many pieces. Later steps have this memory.
            return measure(s, SYSTEMS.get(name, step_with_caching), self.enough, at_least=2 if name == AUTO else 1)
        rest = (torch.randn(rows - encoded, self.size.embedding, device=s.device) for _ in range(2))
        first, second = (nn.functional.normalize(part, dim=1).requires_grad_() for part in rest)
        s.further = first, second
        result = measure(s, SYSTEMS[name], self.enough)
        if result["status"] == OK:  # in a real step, these embeddings count for the peak
            size = 2 * first.numel() * first.element_size()
            result |= {"peak_bytes": result["peak_bytes"] + size, "held_bytes": max(0, result["held_bytes"] - size)}
        return result

    def _extend(self, result: dict[str, Any], encoded: int) -> None:
        """Extends the seconds of the timed chunks to all chunks."""
        rows, timed = result["B"], result["seconds"]
        if result["system"] in (BUDGET_0, ALONE):  # every chunk takes the same time, and the loss is computed once
            self.marginal.setdefault(rows, (timed - result.get("loss_seconds", 0.0)) / encoded)
        if encoded < rows:
            result |= {"encoded": encoded, "timed_seconds": timed}
            result["seconds"] = timed + (rows - encoded) * self.marginal[rows]


COLORS = {
    PLAIN: plots.INK,
    BUDGET_0: plots.GREEN,
    AUTO: plots.MINT,
    REPLAY: plots.BLUE,
    "accum-freq": plots.ORANGE,
    "GradCache": plots.VIOLET,
    ALONE: plots.GREY,
}
HEADINGS = ["model", "B", "chunk", "system", "pairs/s"]
HEADINGS += ["÷ towers alone", "peak GiB", "without weights, gradients", "share of loss"]


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    return paragraphs(_steps(record), _checks(record), _towers(record))


def _steps(record: dict[str, Any]) -> str:
    results = record["results"]
    bare = [r for r in results if r["system"] == ALONE and "seconds" in r]
    rows = []
    for r in results:
        pace, peak = r.get("pairs_per_second"), r.get("peak_bytes")
        # The base is the largest batch of the towers alone that is not larger than this batch.
        base = next((b["pairs_per_second"] for b in reversed(bare) if b["model"] == r["model"] and r["B"] >= b["B"]), None)
        pace_text = f"{pace:.0f}{' †' if 'encoded' in r else ''}" if pace else r["status"]
        cells = [r["model"], f"{r['B']:,}", r["chunk"], r["system"], pace_text, ratio(pace, base, ".3f")]
        rows.append([*cells, gib(peak and peak + r["held_bytes"]), gib(peak), _loss_share(r)])
    footnote = (
        "† Only some chunks of the step were timed, with the loss of the whole batch. The time is extended to all chunks."
    )
    notes = (footnote if any("encoded" in r for r in results) else "", record.get("note", ""))
    return paragraphs(TextTable(HEADINGS, rows, names=(0, 3)).markdown(), *notes)


def _loss_share(r: dict[str, Any]) -> str:
    return f"{100 * r['loss_seconds'] / r['seconds']:.1f} %" if "loss_seconds" in r else ""


def _checks(record: dict[str, Any]) -> str:
    if not record["checks"]:
        return "Gradients were not compared in this run."
    headings = ["model", "system", "error of the gradients of the towers", "gradient of the scale ÷ correct value", ""]
    rows = [[c["model"], c["system"], f"{c['error']:.0e}", f"{c['scale']:.4f}", c["status"]] for c in record["checks"]]
    title = "Gradients compared with the plain step, in float32, on a small batch in chunks:"
    return TextTable(headings, rows, title, names=(0, 1, 4)).markdown()


def _towers(record: dict[str, Any]) -> str:
    where = ", ".join(f"{model} from {library}" for model, library in record.get("towers", {}).items())
    return f"Towers: {where}. They have random weights. Images are synthetic, and steps use bf16 autocast."


def draw(record: dict[str, Any]) -> Any:
    """Draws speed and memory against the batch size, for each model."""
    by_model = groups(record["results"], "model")
    figure, panels = plots.panels(f"One training step; {chip(record)}", 2 * len(by_model))
    for i, ((model,), rows) in enumerate(by_model.items()):  # type: ignore[misc]
        speed, memory = panels[2 * i : 2 * i + 2]
        for name, color in COLORS.items():
            measured = sorted((r for r in rows if r["system"] == name and "seconds" in r), key=lambda r: r["B"])
            style = "--" if name == ALONE else "-"
            plots.line(speed, [(r["B"], r["pairs_per_second"]) for r in measured], name, color, linestyle=style)
            if name != ALONE:
                points = [(r["B"], (r["peak_bytes"] + r["held_bytes"]) / 2**30) for r in measured if "peak_bytes" in r]
                plots.line(memory, points, name, color)
        for axes, label in ((speed, "pairs per second"), (memory, "peak, GiB")):
            axes.set_ylabel(f"{label}, {model}")
            axes.set_ylim(0, 1.1 * max((y for line in axes.lines for y in line.get_ydata()), default=1.0))
            plots.batch_axis(axes, [r["B"] for r in rows])
            plots.label_lines(axes)
    return figure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases",
        nargs="*",
        default=CASES,
        metavar="MODEL:B,…:SYSTEM,…",
        help=f"cases, grouped by model; systems: all, {', '.join(SHORT)} (default: {' '.join(CASES)})",
    )
    parser.add_argument(
        "--longest", type=float, default=25.0, help="seconds of a step; of a longer step, only a part is timed (default: 25)"
    )
    parser.add_argument("--no-check", action="store_true", help="do not compare gradients; the report mentions it")
    number_options(parser, workers=(12, "number of threads that read images for replay"))
    number_options(parser, chunk=(None, "samples encoded at once (default: by model)"))
    arguments(parser, "cached_step", 300)
    args = parser.parse_args()
    args.device = device_of(args)
    args.backend = "triton" if args.device == "cuda" else "eager"
    if args.tiny:
        args.cases, args.workers, args.longest = TINY, 2, 0.3
    return args


def main() -> int:
    args = parse()
    record = Record.of_script("cached_step", args, args.seconds, checks=[], towers={}, checked=not args.no_check)
    planned = jobs(args.cases)
    for name, group in itertools.groupby(planned, key=lambda job: job.model):
        mine = list(group)
        model = Model(record, args, name)
        if not args.no_check:
            check(record, args, name, model.both_towers, {job.system for job in mine})
        model.warm_up()
        for job in mine:
            record["results"].append(model.run(job))
            record.save()
        del model
    record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
