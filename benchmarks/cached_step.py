"""Memory and speed of one training step against the batch: plain, cached, and the schemes of other projects, in one run.

CLIP towers with random weights, synthetic images, bf16 autocast. Before anything is timed, every system's gradients are
compared with those of the plain step, in float32 on a small batch; the gradient of the scale is reported apart. "Towers alone"
is one forward pass and one forward and backward pass of every chunk without any loss, the most that a step without kept graphs
can reach.

A step that would take longer than `--longest` is timed on its first 16 chunks, while the loss is that of the whole batch, and
extended to all chunks; the result says so. Writes a JSON file after every measurement, and at the end a table, the ratios that
matter and a plot (`cached_step_report.py` makes them again).
"""

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cached_step_report import markdown, report
from record import Record, arguments, device_of
from replayed_images import Normalised, replay
from torch import Tensor, nn

import megabatch as mb
from megabatch.bench.measure import peak_memory
from megabatch.bench.steps import SYSTEMS, Setting, cached
from megabatch.bench.towers import SIZES, SyntheticImages, tokens, towers

CHECK, CHECK_CHUNK = 32, 8
TOLERANCE = 1e-3  # of the length of a gradient, float32 against float32
LARGEST = {"accum-freq": 65536}  # computes the loss once for every chunk: hours beyond this
PLAIN, BUDGET_0, AUTO, ALONE, REPLAY = "plain step", "cached, budget 0", "cached, auto", "towers alone", "cached, replay"
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


def setting(model: str, rows: int, args: argparse.Namespace, made: tuple[nn.Module, nn.Module], chunk: int) -> Setting:
    size = SIZES[model]
    log_scale = nn.Parameter(torch.tensor(2.66, device=args.device))
    images = SyntheticImages(rows, size, args.device)
    return Setting(*made, log_scale, images, tokens(rows, args.device), chunk, args.device, autocast=True, backend=args.backend)


def clear(s: Setting) -> None:
    for p in s.parameters():
        p.grad = None
    gc.collect()
    if s.device == "cuda":
        torch.cuda.empty_cache()


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
        pairs = list(zip(found[:-1], wanted[:-1], strict=True))
        off, length = (torch.stack([part.norm() for part in parts]) for parts in ([a - b for a, b in pairs], wanted[:-1]))
        worst, of_all = (off / length.clamp_min(1e-12)).max().item(), (off.norm() / length.norm()).item()
        scale = (found[-1] / wanted[-1]).item()
        verdict = "ok" if of_all <= TOLERANCE and abs(scale - 1) <= TOLERANCE else "WRONG"
        result = {"model": model, "system": name, "loss": value, "error": of_all, "worst": worst, "scale": scale}
        record["checks"].append(result | {"status": verdict})
        record.say(f"{model} {name}: gradient error {of_all:.1e}, scale's gradient × {scale:.4f} {verdict}")
    clear(s)
    record.save()


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(s: Setting, step: Callable[[Setting], Tensor], enough: float, at_least: int = 1) -> dict[str, Any]:
    """The fastest of up to three steps, as long as they have not taken `enough` seconds, and the peak."""
    clear(s)
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step but the first
    held = torch.cuda.memory_allocated() if s.device == "cuda" else 0
    times: list[float] = []
    try:
        while len(times) < at_least or (len(times) < 3 and sum(times) < enough):
            took, peak = peak_memory(lambda: seconds(lambda: step(s), s.device), s.device)
            times.append(took)
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    finally:
        clear(s)
    return {"status": "ok", "seconds": min(times), "steps": len(times), "peak_bytes": peak, "held_bytes": held}


def loss_seconds(rows: int, width: int, device: str, backend: str) -> float:
    """Of the loss alone, forward and backward."""
    made = (torch.randn(rows, width, device=device) for _ in range(2))
    x, y = (nn.functional.normalize(part, dim=1).bfloat16().requires_grad_() for part in made)
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    work = lambda: mb.clip_loss(x, y, scale, backend=backend).backward()  # noqa: E731
    seconds(work, device)
    return min(seconds(work, device) for _ in range(2))


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
        cached(warm)
        clear(warm)

    def run(self, job: Job) -> dict[str, Any]:
        """One measurement, or why there is none."""
        _, rows, name = job
        result = {"model": self.name, "B": rows, "chunk": self.chunk, "system": name}
        if name in self.failed:
            return result | {"status": "out of memory"}  # a smaller batch was
        expected = rows / self.pace.get(name, min(self.pace.values(), default=math.inf))
        encoded = rows
        known = name in (BUDGET_0, ALONE) or (name == AUTO and rows in self.marginal)  # how long the other chunks would take
        if expected > self.args.longest and known and rows > CHUNKS_TIMED * self.chunk:
            encoded = CHUNKS_TIMED * self.chunk
            expected *= encoded / rows
        if rows > LARGEST.get(name, rows) or expected > self.record.left():
            return result | {"status": "too slow to try"}
        self.record.say(f"{self.name} B = {rows} {name}, about {expected:.0f} s a step, {self.record.left():.0f} s left")
        if name == BUDGET_0:
            result["loss_seconds"] = loss_seconds(rows, self.size.embedding, self.args.device, self.args.backend)
        result |= self._measured(rows, encoded, name)
        if result["status"] != "ok":
            self.failed.add(name)
            return result
        self._extend(result, encoded)
        self.pace[name] = result["pairs_per_second"] = rows / result["seconds"]
        self.record.say(f"    {result['pairs_per_second']:.0f} pairs/s, peak {result['peak_bytes'] / 2**30:.2f} GiB")
        return result

    def _measured(self, rows: int, encoded: int, name: str) -> dict[str, Any]:
        s = setting(self.name, encoded, self.args, self.made, self.chunk)
        if name == REPLAY:
            s.image, s.images = Normalised(self.made[0]), replay(rows, self.size, self.args.workers, seed=rows)
        if encoded == rows or name == ALONE:
            # The first step that keeps graphs asks the device for memory, piece by piece, which later ones have.
            return measure(s, SYSTEMS.get(name, cached), self.enough, at_least=2 if name == AUTO else 1)
        rest = (torch.randn(rows - encoded, self.size.embedding, device=s.device) for _ in range(2))
        first, second = (nn.functional.normalize(part, dim=1).requires_grad_() for part in rest)
        s.beside = first, second
        found = measure(s, SYSTEMS[name], self.enough)
        if found["status"] == "ok":  # these embeddings are part of a step
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
    parser.add_argument("--backend", default=None, help="of the loss (triton on a GPU, eager elsewhere)")
    arguments(parser, "cached_step", 300)
    args = parser.parse_args()
    args.device = device_of(args)
    args.backend = args.backend or ("triton" if args.device == "cuda" else "eager")
    if args.tiny:
        args.cases, args.workers, args.longest = TINY, 2, 0.3
    return args


def main() -> int:
    args = parse()
    record = Record("cached_step", args, args.seconds, checks=[], towers={}, checked=not args.no_check)
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
    record.save()
    report(record.path)
    print(markdown(record.contents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
