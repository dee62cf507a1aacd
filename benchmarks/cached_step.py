"""Memory and speed of one training step against the batch: plain, cached, and the schemes of other projects, in one run.

CLIP towers with random weights, synthetic images, bf16 autocast. Before anything is timed, every system's gradients are
compared with those of the plain step, in float32 on a small batch; the gradient of the scale is reported apart. "Towers alone"
is one forward pass and one forward and backward pass of every chunk without any loss, the most that a step without kept graphs
can reach.

A step that would take longer than `--longest` is timed on its first 16 chunks, while the loss is that of the whole batch, and
extended to all chunks; the result says so.
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
TOLERANCE = 1e-3  # of the length of a gradient, float32 against float32
LARGEST = {"accum-freq": 65536}  # computes the loss once for every chunk: hours beyond this
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
CHUNKS_TIMED = 16  # of a step that takes too long; more than "auto" keeps graphs of
ENOUGH = 3.0  # seconds of steps of one system at one batch


class Job(NamedTuple):
    """One measurement."""

    model: str
    rows: int
    system: str


def jobs(cases: list[str]) -> list[Job]:
    """The measurements of the cases, MODEL:BATCH,…:SYSTEM,…, in their order."""
    found = []
    for text in cases:
        try:
            model, batches, systems = text.split(":")
            names = [*SYSTEMS] if systems == "all" else [SHORT[name] for name in systems.split(",")]
            found += [Job(model, int(rows), name) for rows in batches.split(",") for name in names]
            SIZES[model]
        except (ValueError, KeyError):
            known = f"models are {', '.join(SIZES)}; systems are all, {', '.join(SHORT)}"
            sys.exit(f"--cases must be like ViT-B/32:4096,16384:cached,towers, got {text!r}; {known}")
    return found


def setting(model: str, rows: int, args: argparse.Namespace, made: tuple[nn.Module, nn.Module], chunk: int) -> StepSetting:
    size = SIZES[model]
    log_scale = nn.Parameter(torch.tensor(2.66, device=args.device))
    images = SyntheticImages(rows, size, args.device)
    return StepSetting(
        *made, log_scale, images, tokens(rows, args.device), chunk, args.device, autocast=True, backend=args.backend
    )


def clear(s: StepSetting) -> None:
    for p in s.parameters():
        p.grad = None
    measuring.clear(s.device)


def check(record: Record, args: argparse.Namespace, model: str, made: tuple[nn.Module, nn.Module], systems: set[str]) -> None:
    """Gradients of the systems against the plain step; float32, no autocast."""
    s = setting(model, CHECK, args, made, CHECK_CHUNK)
    s.autocast = False
    wanted: list[Tensor] = []
    for name in (PLAIN, *(name for name in SYSTEMS if name in systems - {PLAIN, ALONE})):
        for p in s.parameters():
            p.grad = None
        value = SYSTEMS[name](s).item()
        found = [p.grad for p in s.parameters() if p.grad is not None]
        wanted = wanted or found
        error, scale = relative_error(found[:-1], wanted[:-1]), (found[-1] / wanted[-1]).item()
        verdict = OK if error <= TOLERANCE and abs(scale - 1) <= TOLERANCE else WRONG
        result = {"model": model, "system": name, "loss": value, "error": error, "scale": scale, "status": verdict}
        record["checks"].append(result)
        record.say(f"{model} {name}: gradient error {error:.1e}, scale's gradient × {scale:.4f} {verdict}")
    clear(s)
    record.save()


def measure(s: StepSetting, step: Callable[[StepSetting], Tensor], enough: float, at_least: int = 1) -> dict[str, Any]:
    """The fastest of up to three steps, as long as they have not taken `enough` seconds, and the peak."""
    clear(s)
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step but the first
    held = torch.cuda.memory_allocated() if s.device == "cuda" else 0
    times: list[float] = []
    try:
        while len(times) < at_least or (len(times) < 3 and sum(times) < enough):
            took, peak = peak_memory(lambda: seconds_of(lambda: step(s), s.device), s.device)
            times.append(took)
    except torch.OutOfMemoryError:
        return {"status": MEMORY}
    finally:
        clear(s)
    return {"status": OK, "seconds": min(times), "steps": len(times), "peak_bytes": peak, "held_bytes": held}


def loss_seconds(rows: int, width: int, device: str, backend: str) -> float:
    """Of the loss alone, forward and backward."""
    made = (torch.randn(rows, width, device=device) for _ in range(2))
    x, y = (nn.functional.normalize(part, dim=1).bfloat16().requires_grad_() for part in made)
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    work = lambda: mb.clip_loss(x, y, scale, backend=backend).backward()  # noqa: E731
    seconds_of(work, device)
    return min(seconds_of(work, device) for _ in range(2))


class Model:
    """One pair of towers, and its speed so far."""

    def __init__(self, record: Record, args: argparse.Namespace, name: str) -> None:
        self.record, self.args, self.name, self.size = record, args, name, SIZES[name]
        self.chunk, self.enough = args.chunk or self.size.chunk, 0.0 if args.tiny else ENOUGH
        image, text, library = towers(self.size, args.device)
        self.made = image, text
        record["towers"][name] = library
        self.pace: dict[str, float] = {}  # pairs a second of each system at the batch before
        self.marginal: dict[int, float] = {}  # by batch: seconds of one more pair without a kept graph
        self.failed: set[str] = set()

    def warm_up(self) -> None:
        """Compiles kernels and lets libraries choose theirs."""
        warm = setting(self.name, 2 * self.chunk, self.args, self.made, self.chunk)
        step_with_caching(warm)
        clear(warm)

    def run(self, job: Job) -> dict[str, Any]:
        """One measurement, or why there is none."""
        _, rows, name = job
        result = {"model": self.name, "B": rows, "chunk": self.chunk, "system": name}
        if name in self.failed:
            return result | {"status": MEMORY}  # a smaller batch was
        expected = rows / self.pace.get(name, min(self.pace.values(), default=math.inf))
        encoded = rows
        known = name in (BUDGET_0, ALONE) or (name == AUTO and rows in self.marginal)  # how long the other chunks would take
        if expected > self.args.longest and known and rows > CHUNKS_TIMED * self.chunk:
            encoded = CHUNKS_TIMED * self.chunk
            expected *= encoded / rows
        if rows > LARGEST.get(name, rows) or expected > self.record.seconds_left():
            return result | {"status": "too slow to try"}
        self.record.say(
            f"{self.name} B = {rows} {name}, about {expected:.0f} s a step, {self.record.seconds_left():.0f} s left"
        )
        if name == BUDGET_0:
            result["loss_seconds"] = loss_seconds(rows, self.size.embedding, self.args.device, self.args.backend)
        result |= self._measured(rows, encoded, name)
        if result["status"] != OK:
            self.failed.add(name)
            return result
        self._extend(result, encoded)
        self.pace[name] = result["pairs_per_second"] = rows / result["seconds"]
        self.record.say(f"    {result['pairs_per_second']:.0f} pairs/s, peak {result['peak_bytes'] / 2**30:.2f} GiB")
        return result

    def _measured(self, rows: int, encoded: int, name: str) -> dict[str, Any]:
        s = setting(self.name, encoded, self.args, self.made, self.chunk)
        if name == REPLAY:
            s.image, s.images = UnitRange(self.made[0]), read_images_twice(rows, self.size, self.args.workers, seed=rows)
        if encoded == rows or name == ALONE:
            # The first step that keeps graphs asks the device for memory, piece by piece, which later ones have.
            return measure(s, SYSTEMS.get(name, step_with_caching), self.enough, at_least=2 if name == AUTO else 1)
        rest = (torch.randn(rows - encoded, self.size.embedding, device=s.device) for _ in range(2))
        first, second = (nn.functional.normalize(part, dim=1).requires_grad_() for part in rest)
        s.beside = first, second
        found = measure(s, SYSTEMS[name], self.enough)
        if found["status"] == OK:  # these embeddings are part of a step
            size = 2 * first.numel() * first.element_size()
            found |= {"peak_bytes": found["peak_bytes"] + size, "held_bytes": max(0, found["held_bytes"] - size)}
        return found

    def _extend(self, result: dict[str, Any], encoded: int) -> None:
        """Extends the seconds of the timed chunks to all chunks."""
        rows, took = result["B"], result["seconds"]
        if result["system"] in (BUDGET_0, ALONE):  # every chunk takes as long, and the loss comes once
            self.marginal.setdefault(rows, (took - result.get("loss_seconds", 0.0)) / encoded)
        if encoded < rows:
            result |= {"encoded": encoded, "timed_seconds": took}
            result["seconds"] = took + (rows - encoded) * self.marginal[rows]


COLOURS = {
    PLAIN: plots.INK,
    BUDGET_0: plots.GREEN,
    AUTO: plots.MINT,
    REPLAY: plots.BLUE,
    "accum-freq": plots.ORANGE,
    "GradCache": plots.VIOLET,
    ALONE: plots.GREY,
}
HEADINGS = ["model", "B", "chunk", "system", "pairs/s"]
HEADINGS += ["÷ towers alone", "peak GiB", "beyond weights, gradients", "loss, share"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    return paragraphs(_steps(record), _checks(record), _towers(record))


def _steps(record: dict[str, Any]) -> str:
    results = record["results"]
    bare = [r for r in results if r["system"] == ALONE and "seconds" in r]
    rows = []
    for r in results:
        pace, peak = r.get("pairs_per_second"), r.get("peak_bytes")
        # The largest batch of the towers alone that is not larger than this one.
        base = next((b["pairs_per_second"] for b in reversed(bare) if b["model"] == r["model"] and r["B"] >= b["B"]), None)
        shown = f"{pace:.0f}{' †' if 'encoded' in r else ''}" if pace else r["status"]
        cells = [r["model"], f"{r['B']:,}", r["chunk"], r["system"], shown, ratio(pace, base, ".3f")]
        rows.append([*cells, gib(peak and peak + r["held_bytes"]), gib(peak), _loss_share(r)])
    part = "† Some chunks of the step were timed, with the loss of the whole batch, and extended to all chunks."
    notes = (part if any("encoded" in r for r in results) else "", record.get("note", ""))
    return paragraphs(TextTable(HEADINGS, rows, names=(0, 3)).markdown(), *notes)


def _loss_share(r: dict[str, Any]) -> str:
    return f"{100 * r['loss_seconds'] / r['seconds']:.1f} %" if "loss_seconds" in r else ""


def _checks(record: dict[str, Any]) -> str:
    if not record["checks"]:
        return "Gradients were not compared in this run."
    headings = ["model", "system", "error of all towers' gradients", "scale's gradient ÷ the right one", ""]
    rows = [[c["model"], c["system"], f"{c['error']:.0e}", f"{c['scale']:.4f}", c["status"]] for c in record["checks"]]
    title = "Gradients against the plain step, float32, a small batch in chunks:"
    return TextTable(headings, rows, title, names=(0, 1, 4)).markdown()


def _towers(record: dict[str, Any]) -> str:
    where = ", ".join(f"{model} from {library}" for model, library in record.get("towers", {}).items())
    return f"Towers: {where}; random weights, synthetic images, bf16 autocast."


def draw(record: dict[str, Any]) -> Any:
    """For each model, speed and memory against the batch."""
    found = groups(record["results"], "model")
    figure, panels = plots.panels(f"One training step; {chip(record)}", 2 * len(found))
    for i, ((model,), rows) in enumerate(found.items()):  # type: ignore[misc]
        speed, memory = panels[2 * i : 2 * i + 2]
        for name, colour in COLOURS.items():
            chosen = sorted((r for r in rows if r["system"] == name and "seconds" in r), key=lambda r: r["B"])
            style = "--" if name == ALONE else "-"
            plots.line(speed, [(r["B"], r["pairs_per_second"]) for r in chosen], name, colour, linestyle=style)
            if name != ALONE:
                points = [(r["B"], (r["peak_bytes"] + r["held_bytes"]) / 2**30) for r in chosen if "peak_bytes" in r]
                plots.line(memory, points, name, colour)
        for axes, label in ((speed, "pairs a second"), (memory, "peak, GiB")):
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
        help=f"in the order of the models; systems are all, {', '.join(SHORT)} ({' '.join(CASES)})",
    )
    parser.add_argument("--longest", type=float, default=25.0, help="seconds of a step; of a longer one a part is timed (25)")
    parser.add_argument("--no-check", action="store_true", help="do not compare gradients first; noted in the result")
    parser.add_argument("--workers", type=int, default=12, help="threads that read for replay (12)")
    parser.add_argument("--chunk", type=int, default=0, help="samples encoded at once (default: by model)")
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
            check(record, args, name, model.made, {job.system for job in mine})
        model.warm_up()
        for job in mine:
            record["results"].append(model.run(job))
            record.save()
        del model
    record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
