"""Time and memory of contrastive losses on a GPU: megabatch, the bare products it is made of, and other projects' losses.

All systems get the same bf16 embeddings and take turns in one process, so that the clock of a power-limited chip favours none.
Before anything is timed, its loss and sampled rows of its gradients are compared with float64; what is further off than bf16
explains is marked WRONG and gets no speed. "Bare products" are the four matrix products that an exact loss cannot avoid
(S, S again, dX, dY; three for SigLIP), by PyTorch's library, in strips that fit the same workspace.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.bench import machine
from megabatch.bench.truth import clip_truth
from megabatch.tiles import plan

SIZES = ["16384x512", "32768x512", "65536x512", "131072x512", "262144x512", "65536x768", "65536x1024"]
SCALE, NOISE, BIAS = 50.0, 4.0, -10.0
TOLERANCE = {"loss": 2e-2, "gradient": 3e-2}  # a bf16 logit near 50 is off by 0.1; float32 logits stay far below this
SECONDS_A_ROUND = 0.15
SLOW = {"inf_cl": 65536, "cut-cross-entropy": 65536}  # not tried on larger batches: seconds for one call
Step = Callable[[], tuple[Tensor, ...]]  # loss, d image, d text


def pairs(B: int, D: int) -> tuple[Tensor, Tensor]:  # (B, D), (B, D) bf16
    generator = torch.Generator("cuda").manual_seed(0)
    image, noise = (F.normalize(torch.randn(B, D, generator=generator, device="cuda"), dim=1) for _ in range(2))
    text = F.normalize(image + NOISE * noise, dim=1)
    return image.bfloat16().requires_grad_(), text.bfloat16().requires_grad_()


def with_gradients(loss: Callable[..., Tensor], image: Tensor, text: Tensor, *numbers: Tensor) -> Step:
    def step() -> tuple[Tensor, ...]:
        value = loss(image, text, *numbers)
        return value.detach(), *torch.autograd.grad(value, (image, text, *numbers))[:2]

    return step


def open_clip_losses() -> Any:
    """The module of open_clip's losses alone; the whole package wants many others."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ImportError("open_clip")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).parent / "loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    """How to build each system; an ImportError says that it is not installed."""
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    labels = torch.arange(len(image), device="cuda")

    def megabatch() -> Step:
        return with_gradients(mb.clip_loss, image, text, scale)

    def open_clip() -> Step:
        module = open_clip_losses().ClipLoss()

        def loss(*inputs: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return module(*inputs)

        return with_gradients(loss, image, text, scale)

    def inf_cl() -> Step:
        from inf_cl import cal_flash_loss

        def loss(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
            return (cal_flash_loss(x, y, labels, k).mean() + cal_flash_loss(y, x, labels, k).mean()) / 2

        return with_gradients(loss, image, text, scale)

    def cut_cross_entropy() -> Step:
        from cut_cross_entropy import linear_cross_entropy

        def loss(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
            ways = (((k * x).to(x.dtype), y), ((k * y).to(y.dtype), x))
            return sum(linear_cross_entropy(a, b, labels, filter_eps=None, impl="cce") for a, b in ways) / 2

        return with_gradients(loss, image, text, scale)

    def liger() -> Step:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        module = LigerFusedLinearCrossEntropyLoss()

        def loss(x: Tensor, y: Tensor, k: Tensor) -> Tensor:
            return (module(y, (k * x).to(x.dtype), labels) + module(x, (k * y).to(y.dtype), labels)) / 2

        return with_gradients(loss, image, text, scale)

    return {
        "megabatch": megabatch,
        "open_clip": open_clip,
        "inf_cl": inf_cl,
        "cut-cross-entropy": cut_cross_entropy,
        "Liger": liger,
    }


def siglip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    numbers = [torch.tensor(value, device="cuda", requires_grad=True) for value in (SCALE, BIAS)]
    log_scale = torch.tensor(math.log(SCALE), device="cuda", requires_grad=True)

    def megabatch() -> Step:
        return with_gradients(mb.siglip_loss, image, text, *numbers)

    def siglip_kernel() -> Step:
        from siglip_kernel import fused_siglip_loss

        return with_gradients(fused_siglip_loss, image, text, log_scale, numbers[1])

    return {"megabatch": megabatch, "siglip-kernel": siglip_kernel}


def bare_products(image: Tensor, text: Tensor) -> dict[str, Callable[[], None]]:
    """S, dX and dY of the whole batch, strip by strip, bf16 in and out."""
    B, D = image.shape
    size = plan.strip_size(B, B, 2)
    x, y = image.detach(), text.detach()
    strip = torch.randn(min(size.rows, B), min(size.columns, B), device="cuda", dtype=torch.bfloat16)
    dx, dy = x.new_empty(min(size.rows, B), D), x.new_empty(min(size.columns, B), D)
    strips = [(i, j) for i in range(0, B, size.rows) for j in range(0, B, size.columns)]

    def similarities() -> None:
        for i, j in strips:
            a, b = x[i : i + size.rows], y[j : j + size.columns]
            torch.mm(a, b.T, out=strip[: len(a), : len(b)])

    def row_gradients() -> None:
        for i, j in strips:
            a, b = x[i : i + size.rows], y[j : j + size.columns]
            torch.mm(strip[: len(a), : len(b)], b, out=dx[: len(a)])

    def column_gradients() -> None:
        for i, j in strips:
            a, b = x[i : i + size.rows], y[j : j + size.columns]
            torch.mm(strip[: len(a), : len(b)].T, a, out=dy[: len(b)])

    return {"S": similarities, "dX": row_gradients, "dY": column_gradients}


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, with several in flight, as in training: what the host does meanwhile is hidden, as it is there."""
    calls = 1
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end)
        if elapsed >= 1000 * SECONDS_A_ROUND or calls >= 64:
            return elapsed / calls
        calls = min(64, math.ceil(calls * 1000 * SECONDS_A_ROUND / max(elapsed, 0.1)))


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


def check(step: Step, right: tuple[Any, ...], sample: Tensor) -> tuple[float, float, float, int]:
    """(loss, its relative error, that of the sampled gradient rows, bytes at the peak beyond what was there)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, *gradients = step()
    peak = torch.cuda.max_memory_allocated() - before
    errors = [((g[sample].double() - w).norm() / w.norm()).item() for g, w in zip(gradients, right[1:3], strict=True)]
    return loss.item(), abs(loss.item() - right[0]) / right[0], max(errors), peak


def measure(B: int, D: int, rounds: int, kind: str) -> list[dict[str, Any]]:
    image, text = pairs(B, D)
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
        if loss >= 0 and loss_error <= TOLERANCE["loss"] and gradient_error <= TOLERANCE["gradient"]:
            running[name] = step
        else:
            result["status"] = "WRONG"
            running[f"{name} (wrong)"] = step
    products = bare_products(image, text)
    if kind == "clip":
        scale = torch.tensor(SCALE, device="cuda")
        running["megabatch forward"] = torch.no_grad()(lambda: mb.clip_loss(image, text, scale))
    timed = {**running, **products}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, work in timed.items():
            times[name].append(milliseconds(work))
    best = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    for result in results:
        if result["status"] == "ok":
            result["ms"] = best[result["system"]]
        elif result["status"] == "WRONG":
            result["wrong_ms"] = best[f"{result['system']} (wrong)"]
    bare = {name: best[name] for name in products}
    whole = (2 if kind == "clip" else 1) * bare["S"] + bare["dX"] + bare["dY"]
    results.append({"loss_name": kind, "B": B, "D": D, "system": "bare products", "status": "ok", "ms": whole, "parts": bare})
    if kind == "clip":
        results[0]["forward_ms"] = best["megabatch forward"]
    return results


def measure_large(B: int, D: int, small_ms: float | None) -> dict[str, Any]:
    """One step at a batch where a dense loss is out of the question; sampled rows against float64."""
    image, text = pairs(B, D)
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loss = mb.clip_loss(image, text, scale)
    dimage, dtext, _ = torch.autograd.grad(loss, (image, text, scale))
    end.record()
    end.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        row, col = (v.double() for v in mb.pairwise_logsumexp(image, text, SCALE))
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


def table(record: dict[str, Any]) -> str:
    lines = [
        "| loss | B | D | system | ms | TFLOP/s | bare ÷ time | × megabatch | extra GiB | value | error | gradient error |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in groups(record):
        bare = next(r["ms"] for r in group if r["system"] == "bare products")
        ours = next((r.get("ms") for r in group if r["system"] == "megabatch"), None)
        for r in group:
            ms = r.get("ms")
            operations = (8 if r["loss_name"] == "clip" else 6) * r["B"] ** 2 * r["D"]
            wrong = f"WRONG ({r['wrong_ms']:.0f} ms)" if "wrong_ms" in r else r["status"]
            cells = [r["loss_name"], f"{r['B']:,}", r["D"], r["system"], f"{ms:.2f}" if ms else wrong]
            cells += [f"{operations / ms / 1e9:.0f}" if ms else "", f"{bare / ms:.3f}" if ms else ""]
            cells += [f"{ms / ours:.2f}" if ms and ours else "", f"{r['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in r else ""]
            cells += [f"{r['loss']:.4f}" if "loss" in r else ""]
            cells += [f"{r[key]:.0e}" if key in r else "" for key in ("loss_error", "gradient_error")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Forward alone: time of the bare product S ÷ time.", ""]
    for group in groups(record):
        if "forward_ms" in group[0]:
            bare = next(r["parts"]["S"] for r in group if r["system"] == "bare products")
            ours = group[0]
            lines.append(f"- {ours['B']:,}×{ours['D']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms)")
    for r in record.get("large", []):
        errors = ", ".join(f"{name} {value:.0e}" for name, value in r["errors"].items())
        against = f", {r['against_64k']:.3f} of (B/64k)² times the time at 64k" if "against_64k" in r else ""
        lines.append(
            f"- B = {r['B']:,}, D = {r['D']}: {r['seconds']:.1f} s forward + backward{against}; "
            f"{r['peak_bytes'] / 2**30:.1f} GiB beyond the inputs, gradients included; loss {r['loss']:.4f}; "
            f"errors on sampled rows against float64: {errors}"
        )
    return "\n".join(lines)


def groups(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in record["results"]:
        found.setdefault((result["loss_name"], result["B"], result["D"]), []).append(result)
    return list(found.values())


def draw(record: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(f"CLIP loss, forward + backward, bf16, D = 512; {record['machine']['gpu']}")
    names = list(dict.fromkeys(r["system"] for r in record["results"] if r["loss_name"] == "clip"))
    colours = {"megabatch": "#0b6e4f", "bare products": "#222222"}
    others = iter(("#c1440e", "#8e44ad", "#1f77b4", "#b8860b"))
    styles = {name: colours.get(name) or next(others) for name in names}
    for axes, (label, key) in zip(
        figure.subplots(1, 2), (("time, ms", "ms"), ("memory beyond the inputs, GiB", "peak_bytes")), strict=True
    ):
        for name in names:
            chosen = [r for r in record["results"] if r["loss_name"] == "clip" and r["D"] == 512 and r["system"] == name]
            points = sorted((r["B"], r[key] / (2**30 if key == "peak_bytes" else 1)) for r in chosen if r.get(key))
            if points:
                dashed = "--" if name == "bare products" else "-"
                axes.plot(*zip(*points, strict=True), dashed, color=styles[name], marker="o", markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel="batch, pairs", ylabel=label)
        ticks = sorted({r["B"] for r in record["results"] if r["D"] == 512})
        axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


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
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="measure nothing: write the table and the plot of a saved run"
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.draw:
        record = json.loads(args.draw.read_text())
        draw(record, args.draw.with_suffix(".png"))
        about = f"Machine: {machine.summary(record['machine'])}.\n\nCommand: `{record['command']}`\n"
        args.draw.with_suffix(".md").write_text(table(record) + "\n\n" + about)
        return 0
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device; benchmarks/loss_cpu.py is the one for a CPU.")
    command = " ".join(["python", "benchmarks/loss_gpu.py", *sys.argv[1:]])
    record: dict[str, Any] = {"command": command, "machine": machine.describe(), "results": [], "large": []}
    work = [
        (kind, *map(int, size.split("x"))) for kind, sizes in (("clip", args.sizes), ("siglip", args.siglip)) for size in sizes
    ]
    started = time.perf_counter()
    for i, (kind, B, D) in enumerate(work):
        print(f"[{i + 1}/{len(work)}, {time.perf_counter() - started:.0f} s] {kind} {B}x{D}", flush=True)
        record["results"] += measure(B, D, args.rounds, kind)
        torch.cuda.empty_cache()
    for B in args.large:
        print(f"[{time.perf_counter() - started:.0f} s] one step at {B}x512", flush=True)
        image, text = pairs(65536, 512)
        scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
        small = milliseconds(with_gradients(mb.clip_loss, image, text, scale))
        small = milliseconds(with_gradients(mb.clip_loss, image, text, scale))
        record["large"].append(measure_large(B, 512, small))
        torch.cuda.empty_cache()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
