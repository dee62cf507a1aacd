"""Time and memory of contrastive losses on a GPU: megabatch, the bare products it is made of, and other projects' losses.

All systems get the same bf16 embeddings and take turns in one process, so that the clock of a power-limited chip favours none.
Before a system is timed, its loss and sampled rows of its gradients are compared with float64. An error larger than bf16
explains is marked WRONG, and the system is not timed. "Bare products" are the four matrix products that every exact loss needs
(S, S again, dX, dY; three for SigLIP), computed by cuBLAS, each in the fastest of several shapes of strips.

Writes a JSON file; `loss_gpu_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loss_gpu_report import markdown
from timing import milliseconds
from torch import Tensor

import megabatch as mb
from megabatch import machine
from megabatch.bench.accuracy import SCALE, clip_truth, is_right, pairs
from megabatch.bench.loss_systems import CUT, DENSE, INF_CL, LIGER, MEGABATCH, loss_of
from megabatch.bench.losses import bare_products
from megabatch.tiles.plan import TileSize, pair_strip, strip_size

SIZES = ["16384x512", "32768x512", "65536x512", "131072x512", "262144x512", "65536x768", "65536x1024"]
BIAS = -10.0
BARE_STRIPS = ((8192, 16384), (16384, 8192), (16384, 16384), (8192, 65536), (65536, 8192), (32768, 32768))  # up to 2 GiB
SECONDS_A_ROUND = 0.15
SYSTEMS = (MEGABATCH, DENSE, INF_CL, CUT, LIGER)
SLOW = {INF_CL: 65536, CUT: 65536}  # not tried on larger batches: seconds for one call
Step = Callable[[], tuple[Tensor, ...]]  # loss, d image, d text


def with_gradients(loss: Callable[..., Tensor], image: Tensor, text: Tensor, *numbers: Tensor) -> Step:
    def step() -> tuple[Tensor, ...]:
        value = loss(image, text, *numbers)
        return value.detach(), *torch.autograd.grad(value, (image, text, *numbers))[:2]

    return step


def clip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    """How to build each system; an ImportError says that it is not installed."""
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    return {name: partial(lambda name: with_gradients(loss_of(name, "cuda"), image, text, scale), name) for name in SYSTEMS}


def siglip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    numbers = [torch.tensor(value, device="cuda", requires_grad=True) for value in (SCALE, BIAS)]
    log_scale = torch.tensor(math.log(SCALE), device="cuda", requires_grad=True)

    def megabatch() -> Step:
        return with_gradients(partial(mb.siglip_loss, backend="triton"), image, text, *numbers)

    def siglip_kernel() -> Step:
        from siglip_kernel import fused_siglip_loss

        return with_gradients(fused_siglip_loss, image, text, log_scale, numbers[1])

    return {"megabatch": megabatch, "siglip-kernel": siglip_kernel}


def siglip_truth(image: Tensor, text: Tensor, sample: Tensor) -> tuple[float, Tensor, Tensor]:
    """The loss, and rows `sample` of both gradients, in float64, written out from the definition."""
    x, y = image.detach().double(), text.detach().double()
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for start in range(0, len(x), 512):
        s = SCALE * x[start : start + 512] @ y.T + BIAS
        total += F.softplus(s, threshold=50.0).sum()
    match = SCALE * (x * y).sum(1) + BIAS
    loss = (total - match.sum()) / len(x)

    def rows(a: Tensor, b: Tensor) -> Tensor:
        g = (SCALE * a[sample] @ b.T + BIAS).sigmoid()
        return SCALE * (g @ b - b[sample]) / len(a)

    return loss.item(), rows(x, y), rows(y, x)


def bare_shapes(image: Tensor, text: Tensor) -> dict[str, dict[str, Callable[[], None]]]:
    """The bare products in strips of each shape, among them the strips of the loss. Sides are cut to the batch."""
    B, size = len(image), image.element_size()
    own = [pair_strip(B, size), strip_size(B, B, image.shape[1], size)]
    sides = {(min(rows, B), min(columns, B)) for rows, columns in (*BARE_STRIPS, *((s.rows, s.columns) for s in own))}
    return {f"{rows}x{columns}": bare_products(image, text, TileSize(rows, columns)) for rows, columns in sorted(sides)}


def check(step: Step, right: tuple[Any, ...], sample: Tensor) -> tuple[float, float, float, int]:
    """(loss, its relative error, that of the sampled gradient rows, peak bytes beyond the inputs)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, *gradients = step()
    peak = torch.cuda.max_memory_allocated() - before
    errors = [((g[sample].double() - w).norm() / w.norm()).item() for g, w in zip(gradients, right[1:3], strict=True)]
    return loss.item(), abs(loss.item() - right[0]) / right[0], max(errors), peak


def measure(B: int, D: int, rounds: int, kind: str) -> list[dict[str, Any]]:
    image, text, _ = pairs(B, D, "cuda")
    sample = torch.linspace(0, B - 1, 16, device="cuda").long()
    right = (
        clip_truth(image.detach(), text.detach(), SCALE, sample)[:3] if kind == "clip" else siglip_truth(image, text, sample)
    )
    results: list[dict[str, Any]] = []
    running: dict[str, Callable[[], Any]] = {}
    for name, build in (clip_systems if kind == "clip" else siglip_systems)(image, text).items():
        result: dict[str, Any] = {"loss_name": kind, "B": B, "D": D, "system": name, "status": "ok"}
        results.append(result)
        if SLOW.get(name, B) < B:
            result["status"] = "too slow to try"
            continue
        try:
            step = build()
            step()  # compiles
            loss, loss_error, gradient_error, peak = check(step, right, sample)
        except ImportError as error:
            result["status"] = f"not installed ({error.name or error})"
            continue
        except torch.cuda.OutOfMemoryError:
            result["status"] = "out of memory"
            torch.cuda.empty_cache()
            continue
        result |= {"loss": loss, "loss_error": loss_error, "gradient_error": gradient_error, "peak_bytes": peak}
        if is_right(loss, loss_error, gradient_error, "cuda"):
            running[name] = step
        else:
            result["status"] = "WRONG"
            running[f"{name} (wrong)"] = step
    shapes = bare_shapes(image.detach(), text.detach())
    products = {f"{product} in {shape}": work for shape, found in shapes.items() for product, work in found.items()}
    if kind == "clip":
        scale = torch.tensor(SCALE, device="cuda")
        running["megabatch forward"] = torch.no_grad()(lambda: mb.clip_loss(image, text, scale, backend="triton"))
    timed = {**running, **products}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, work in timed.items():
            times[name].append(milliseconds(work, "cuda", SECONDS_A_ROUND))
    best = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    for result in results:
        if result["status"] == "ok":
            result["ms"] = best[result["system"]]
        elif result["status"] == "WRONG":
            result["wrong_ms"] = best[f"{result['system']} (wrong)"]
    bare = {product: min(best[f"{product} in {shape}"] for shape in shapes) for product in ("S", "dX", "dY")}
    whole = (2 if kind == "clip" else 1) * bare["S"] + bare["dX"] + bare["dY"]
    results.append({"loss_name": kind, "B": B, "D": D, "system": "bare products", "status": "ok", "ms": whole, "parts": bare})
    results[-1]["shapes"] = {name: best[name] for name in products}
    if kind == "clip":
        results[0]["forward_ms"] = best["megabatch forward"]
    return results


def measure_large(B: int, D: int, small_ms: float | None) -> dict[str, Any]:
    """One step at a batch where a dense loss is out of the question; sampled rows against float64."""
    image, text, _ = pairs(B, D, "cuda")
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loss = mb.clip_loss(image, text, scale, backend="triton")
    dimage, dtext, _ = torch.autograd.grad(loss, (image, text, scale))
    end.record()
    end.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        row, col = (v.double() for v in mb.pairwise_logsumexp(image, text, SCALE, backend="triton"))
        x, y, sample = image.detach(), text.detach(), torch.linspace(0, B - 1, 8, device="cuda").long()
        errors = {}
        for name, a, b, own, other, gradient in (("image", x, y, row, col, dimage), ("text", y, x, col, row, dtext)):
            s = torch.cat([SCALE * a[sample].double() @ part.double().T for part in b.split(2**20)], dim=1)
            errors[f"logsumexp {name}"] = (s.logsumexp(1) - own[sample]).abs().max().item()
            g = (s - own[sample, None]).exp_() + (s - other).exp_()
            wanted = (
                sum(p @ q.double() for p, q in zip(g.split(2**20, 1), b.split(2**20), strict=True)) - 2 * b[sample].double()
            )
            wanted *= SCALE / (2 * B)
            errors[f"gradient {name}"] = ((gradient[sample].double() - wanted).norm() / wanted.norm()).item()
    seconds = start.elapsed_time(end) / 1000
    result = {"B": B, "D": D, "seconds": seconds, "peak_bytes": peak, "loss": loss.item(), "errors": errors}
    if small_ms is not None:
        result["against_64k"] = seconds * 1000 / (small_ms * (B / 65536) ** 2)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="BxD", help="batches and widths for the CLIP losses")
    parser.add_argument("--siglip", nargs="*", default=["65536x768"], metavar="BxD", help="and for the SigLIP losses")
    parser.add_argument(
        "--large", nargs="*", type=int, default=[], metavar="B", help="one step each at D = 512: 1048576, 4194304 …"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system; the median is kept (3)")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "results", help="folder for the results"
    )
    parser.add_argument("--name", default="loss_gpu", help="of the files written there (loss_gpu)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device; benchmarks/loss_cpu.py is the one for a CPU.")
    said = [word for word in sys.argv[1:] if word not in ("--output", str(args.output))]  # the record has no paths
    command = " ".join(["python", "benchmarks/loss_gpu.py", *said])
    record: dict[str, Any] = {"command": command, "machine": machine.describe(), "results": [], "large": []}
    work = [
        (kind, *map(int, size.split("x"))) for kind, sizes in (("clip", args.sizes), ("siglip", args.siglip)) for size in sizes
    ]
    args.output.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # after every size, so that an interrupted run keeps its results
        (args.output / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")

    started = time.perf_counter()
    for i, (kind, B, D) in enumerate(work):
        print(f"[{i + 1}/{len(work)}, {time.perf_counter() - started:.0f} s] {kind} {B}x{D}", flush=True)
        record["results"] += measure(B, D, args.rounds, kind)
        torch.cuda.empty_cache()
        save()
    for B in args.large:
        print(f"[{time.perf_counter() - started:.0f} s] one step at {B}x512", flush=True)
        image, text, _ = pairs(65536, 512, "cuda")
        scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
        step = with_gradients(partial(mb.clip_loss, backend="triton"), image, text, scale)
        step()  # compiles
        small = milliseconds(step, "cuda", SECONDS_A_ROUND)
        record["large"].append(measure_large(B, 512, small))
        torch.cuda.empty_cache()
        save()
    print(markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
