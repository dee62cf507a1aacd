"""Memory and speed of one training step against the batch: plain, cached, and the schemes of other projects, in one run.

CLIP towers with random weights, synthetic images, bf16 autocast. Before anything is timed, every system's gradients are
compared with those of the plain step, in float32 on a small batch; the gradient of the scale is reported apart. "Towers alone"
is one forward pass and one forward and backward pass of every chunk without any loss, the most that a step without kept graphs
can reach.

Writes a JSON file after every measurement, and at the end a table and a plot (`cached_step_report.py` makes them again).
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cached_step_report import report, table
from torch import Tensor, nn

import megabatch as mb
from megabatch.bench import machine
from megabatch.bench.measure import peak_memory
from megabatch.bench.steps import SYSTEMS, Setting, cached
from megabatch.bench.towers import SIZES, Normalised, SyntheticImages, replay, tokens, towers

CHECK, CHECK_CHUNK = 64, 16
TOLERANCE = 1e-3  # of the length of a gradient, float32 against float32
LARGEST = {"accum-freq": 65536}  # computes the loss once for every chunk: hours beyond this


class Bench:
    """One run: what it has measured, and how much time is left."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, self.started = args, time.perf_counter()
        self.path = args.output / f"{args.name}.json"
        self.record: dict[str, Any] = {"command": command, "machine": machine.describe(), "checks": [], "results": []}

    def say(self, text: str) -> None:
        """Progress, with the time."""
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        """What there is so far."""
        self.args.output.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")

    def left(self) -> float:
        """Seconds of the budget."""
        return float(self.args.budget_seconds - (time.perf_counter() - self.started))


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


def check(bench: Bench, model: str, made: tuple[nn.Module, nn.Module]) -> None:
    """Gradients of every system against the plain step; float32, no autocast."""
    s = setting(model, CHECK, bench.args, made, CHECK_CHUNK)
    s.autocast = False
    wanted: list[Tensor] = []
    for name, step in SYSTEMS.items():
        if name == "towers alone":
            continue
        clear(s)
        value = step(s).item()
        found = [p.grad.double().cpu() for p in s.parameters() if p.grad is not None]
        wanted = wanted or found
        error = max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(found[:-1], wanted[:-1], strict=True))
        of_all = (torch.cat([(a - b).flatten() for a, b in zip(found[:-1], wanted[:-1], strict=True)]).norm()).item()
        of_all /= torch.cat([b.flatten() for b in wanted[:-1]]).norm().item()
        scale = (found[-1] / wanted[-1]).item()
        result = {"model": model, "system": name, "loss": value, "error": of_all, "worst": error, "scale": scale}
        bench.record["checks"].append(result)
        verdict = "ok" if of_all <= TOLERANCE and abs(scale - 1) <= TOLERANCE else "WRONG"
        result["status"] = verdict
        bench.say(f"{model} {name}: gradient error {of_all:.1e}, scale's gradient × {scale:.4f} {verdict}")
    clear(s)
    bench.save()


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(bench: Bench, model: str, name: str, s: Setting, step: Callable[[Setting], Tensor], repeat: bool) -> dict[str, Any]:
    """Time and peak of a step. The first one after a change of the batch warms up unless it takes long."""
    rows = len(s.tokens)
    result: dict[str, Any] = {"model": model, "B": rows, "chunk": s.chunk, "system": name, "status": "ok"}
    clear(s)
    for p in s.parameters():
        p.grad = torch.zeros_like(p)  # as in every step but the first
    held = torch.cuda.memory_allocated() if s.device == "cuda" else 0
    try:
        times = []
        for _ in range(3 if repeat else 1):
            took, peak = peak_memory(lambda: seconds(lambda: step(s), s.device), s.device)
            times.append(took)
            if took > 15:
                break
        result |= {"seconds": min(times), "pairs_per_second": rows / min(times), "peak_bytes": peak, "held_bytes": held}
    except torch.OutOfMemoryError:
        result["status"] = "out of memory"
    clear(s)
    return result


def loss_seconds(rows: int, width: int, device: str, backend: str) -> float:
    """Of the loss alone, forward and backward."""
    x, y = (torch.randn(rows, width, device=device).bfloat16().requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    work = lambda: mb.clip_loss(x, y, scale, backend=backend).backward()  # noqa: E731
    seconds(work, device)
    return min(seconds(work, device) for _ in range(2))


def run_model(bench: Bench, model: str) -> None:
    args, size = bench.args, SIZES[model]
    image, text, library = towers(size, args.device)
    bench.record.setdefault("towers", {})[model] = library
    check(bench, model, (image, text))
    chunk = args.chunk or size.chunk
    pace: dict[str, float] = {}  # pairs a second of each system at the batch before
    failed: set[str] = set()
    jobs = [(rows, name) for rows in args.batches for name in SYSTEMS if name in args.systems]
    jobs += [(rows, "cached, replay") for rows in args.replay]
    warm = setting(model, 2 * chunk, args, (image, text), chunk)
    cached(warm)
    clear(warm)
    for rows, name in jobs:
        expected = rows / pace[name] if name in pace else rows / min(pace.values(), default=math.inf)
        result = {"model": model, "B": rows, "chunk": chunk, "system": name}
        if name in failed:
            result["status"] = "out of memory"  # a smaller batch was
        elif rows > LARGEST.get(name, rows) or 2 * expected > bench.left():
            result["status"] = "too slow to try"
        else:
            bench.say(f"{model} B = {rows} {name}, about {expected:.0f} s a step, {bench.left():.0f} s left")
            s = setting(model, rows, args, (image, text), chunk)
            step = SYSTEMS.get(name, cached)
            if name == "cached, replay":
                s.image, s.images = Normalised(image), replay(rows, size, args.workers, seed=rows)
            result = measure(bench, model, name, s, step, repeat=4 * expected < bench.left())
            if "seconds" in result:
                pace[name] = result["pairs_per_second"]
                bench.say(f"    {result['pairs_per_second']:.0f} pairs/s, peak {result['peak_bytes'] / 2**30:.2f} GiB")
            else:
                failed.add(name)
            if name == "cached, budget 0" and result["status"] == "ok":
                result["loss_seconds"] = loss_seconds(rows, size.embedding, args.device, args.backend)
            del s
        bench.record["results"].append(result)
        bench.save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["ViT-B/32", "ViT-L/14"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="*", type=int, default=[4096, 16384, 65536, 262144], metavar="B")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--replay", nargs="*", type=int, default=[], metavar="B", help="batches to read and augment twice")
    parser.add_argument("--workers", type=int, default=12, help="threads that read for replay (12)")
    parser.add_argument("--chunk", type=int, default=0, help="samples encoded at once (by default what suits the model)")
    parser.add_argument("--backend", default=None, help="of the loss (triton on a GPU, eager elsewhere)")
    parser.add_argument(
        "--budget-seconds", type=float, default=540.0, help="steps that would take longer than what is left are skipped"
    )
    parser.add_argument("--tiny", action="store_true", help="a minute on a CPU: tiny towers, small batches")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "results", help="folder for the results"
    )
    parser.add_argument("--name", default="cached_step", help="of the files written there (cached_step)")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.backend = args.backend or ("triton" if args.device == "cuda" else "eager")
    if args.tiny:
        args.models, args.batches, args.replay, args.workers = ["tiny"], [64, 256], [256], 2
    elif args.device == "cpu":
        sys.exit("This benchmark needs a CUDA device; --tiny runs anywhere.")
    return args


def main() -> int:
    args = parse()
    bench = Bench(args, " ".join(["python", "benchmarks/cached_step.py", *sys.argv[1:]]))
    for model in args.models:
        run_model(bench, model)
    bench.save()
    report(bench.path)
    print(table(bench.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
