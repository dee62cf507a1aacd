"""Measures time and memory of contrastive losses on a GPU, and compares megabatch with other projects and the bare products.

All systems get the same bf16 embeddings and take turns in one process, so that the clock of a power-limited chip favors none of
them. Before a system is timed, its loss and sampled rows of its gradients are compared with float64. If an error is larger than
bf16 explains, the system is marked WRONG and has no time. "Bare products" are the four matmuls that every exact loss needs
(S, S again, dX and dY; SigLIP needs S only once). cuBLAS computes each of them in the fastest of several shapes of strips.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.tiles.plan import TileSize, pair_strip, strip_size
from megabatch_train.bench.losses import (
    CUT,
    DENSE,
    INF_CL,
    LIGER,
    MEGABATCH,
    SCALE,
    ClipTruth,
    bare_products,
    clip_truth,
    is_right,
    loss_of,
    pairs,
    sample_rows,
)
from megabatch_train.bench.measure import (
    OK,
    ROUNDS_OPTION,
    WRONG,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    draw_systems,
    failure,
    groups,
    milliseconds,
    number_options,
    paragraphs,
    peak_memory,
    take_turns,
    with_gradients,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio

SIZES = ["16384x512", "32768x512", "65536x512", "131072x512", "262144x512", "65536x768", "65536x1024"]
BIAS = -10.0
BARE_STRIPS = ((8192, 16384), (16384, 8192), (16384, 16384), (8192, 65536), (65536, 8192), (32768, 32768))  # up to 2 GiB
SECONDS_A_ROUND = 0.15
SYSTEMS = (MEGABATCH, DENSE, INF_CL, CUT, LIGER)
SLOW = {INF_CL: 65536, CUT: 65536}  # largest batch of slow systems; with more pairs, a call takes seconds
BARE, FORWARD = "bare products", "megabatch forward"
Step = Callable[[], tuple[Tensor, ...]]  # loss, d image, d text, further gradients


def clip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    """Returns a function that builds each system. It raises an ImportError if the system is not installed."""
    device = image.device.type
    scale = torch.tensor(SCALE, device=device, requires_grad=True)
    return {name: lambda name=name: partial(with_gradients, loss_of(name, device), (image, text, scale)) for name in SYSTEMS}


def siglip_systems(image: Tensor, text: Tensor) -> dict[str, Callable[[], Step]]:
    log_scale, scale, bias = (
        torch.tensor(value, device=image.device, requires_grad=True) for value in (math.log(SCALE), SCALE, BIAS)
    )

    def megabatch() -> Step:
        loss = partial(mb.siglip_loss, backend="triton" if image.is_cuda else "auto")
        return partial(with_gradients, loss, (image, text, scale, bias))

    def siglip_kernel() -> Step:
        from siglip_kernel import fused_siglip_loss

        return partial(with_gradients, fused_siglip_loss, (image, text, log_scale, bias))

    return {MEGABATCH: megabatch, "siglip-kernel": siglip_kernel}


def siglip_truth(image: Tensor, text: Tensor, scale: float, sample: Tensor) -> ClipTruth:
    """Returns the loss and the rows `sample` of both gradients in float64, from the definition."""
    x, y = image.double(), text.double()
    sums = [F.softplus(scale * rows @ y.T + BIAS, threshold=50.0).sum() for rows in x.split(512)]
    match = scale * (x * y).sum(1) + BIAS
    loss = (torch.stack(sums).sum() - match.sum()) / len(x)

    def rows(a: Tensor, b: Tensor) -> Tensor:
        g = (scale * a[sample] @ b.T + BIAS).sigmoid()
        return scale * (g @ b - b[sample]) / len(a)

    return ClipTruth(loss.item(), rows(x, y), rows(y, x))


KINDS = {"clip": (clip_systems, clip_truth), "siglip": (siglip_systems, siglip_truth)}


def bare_shapes(image: Tensor, text: Tensor) -> dict[str, dict[str, Callable[[], None]]]:
    """Returns the bare products in strips of each shape, including the strips of the loss. No side is larger than the batch."""
    B, size = len(image), image.element_size()
    own = [pair_strip(B, size), strip_size(B, B, image.shape[1], size)]
    sides = {(min(rows, B), min(columns, B)) for rows, columns in (*BARE_STRIPS, *((s.rows, s.columns) for s in own))}
    return {f"{rows}x{columns}": bare_products(image, text, TileSize(rows, columns)) for rows, columns in sorted(sides)}


def measure(B: int, D: int, rounds: int, kind: str, device: str) -> list[dict[str, Any]]:
    """Measures all systems at one size."""
    image, text, _ = pairs(B, D, device)
    sample = sample_rows(B).to(device)
    systems, truth_of = KINDS[kind]
    right = truth_of(image.detach(), text.detach(), SCALE, sample)
    results: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], Any]] = {}
    for name, build in systems(image, text).items():
        result: dict[str, Any] = {"loss_name": kind, "B": B, "D": D, "system": name, "status": OK}
        results.append(result)
        if SLOW.get(name, B) < B:
            result["status"] = "too slow to try"
            continue
        try:
            step = build()
            step()  # compiles
            (loss, dimage, dtext, *_), result["peak_bytes"] = peak_memory(step, device)
        except (ImportError, torch.OutOfMemoryError) as error:
            result["status"] = failure(error)
            clear(device)
            continue
        errors = right.errors(loss.item(), dimage[sample], dtext[sample])
        result |= {"loss": loss.item(), "loss_error": errors[0], "gradient_error": errors[1]}
        if not is_right(loss.item(), *errors, device):
            result["status"] = WRONG
        steps[name] = step
    shapes = bare_shapes(image.detach(), text.detach())
    products = {f"{product} in {shape}": work for shape, by_product in shapes.items() for product, work in by_product.items()}
    if kind == "clip":
        scale, loss = torch.tensor(SCALE, device=device), loss_of(MEGABATCH, device)
        steps[FORWARD] = torch.no_grad()(lambda: loss(image, text, scale))
    best = take_turns({**steps, **products}, device, rounds, SECONDS_A_ROUND)
    for result in results:
        if result["system"] in steps:
            result["ms" if result["status"] == OK else "wrong_ms"] = best[result["system"]]
    bare = {product: min(best[f"{product} in {shape}"] for shape in shapes) for product in ("S", "dX", "dY")}
    all_products = (2 if kind == "clip" else 1) * bare["S"] + bare["dX"] + bare["dY"]
    results.append({"loss_name": kind, "B": B, "D": D, "system": BARE, "status": OK, "ms": all_products, "parts": bare})
    results[-1]["shapes"] = {name: best[name] for name in products}
    if kind == "clip":
        results[0]["forward_ms"] = best[FORWARD]
    return results


def measure_large(B: int, D: int) -> dict[str, Any]:
    """Measures one step at a batch that is too large for a dense loss, and compares sampled rows with float64."""
    scale = torch.tensor(SCALE, device="cuda", requires_grad=True)

    def step_of(batch: int) -> tuple[Tensor, Tensor, Step]:
        image, text, _ = pairs(batch, D, "cuda")
        return image, text, partial(with_gradients, loss_of(MEGABATCH, "cuda"), (image, text, scale))

    small = step_of(65536)[2]
    small()  # compiles
    small_ms = milliseconds(small, "cuda", SECONDS_A_ROUND)
    image, text, step = step_of(B)
    outputs: list[Tensor] = []
    seconds, peak = peak_memory(lambda: milliseconds(lambda: outputs.extend(step()), "cuda", 0.0) / 1000, "cuda")
    loss, dimage, dtext, _ = outputs
    with torch.no_grad():
        row, col = (v.double() for v in mb.pairwise_logsumexp(image, text, SCALE, backend="triton"))
        x, y, sample = image.detach(), text.detach(), torch.linspace(0, B - 1, 8, device="cuda").long()
        errors = {}
        for name, a, b, own, other, gradient in (("image", x, y, row, col, dimage), ("text", y, x, col, row, dtext)):
            s = torch.cat([SCALE * a[sample].double() @ part.double().T for part in b.split(2**20)], dim=1)
            errors[f"logsumexp {name}"] = (s.logsumexp(1) - own[sample]).abs().max().item()
            g = (s - own[sample, None]).exp_() + (s - other).exp_()
            products = [p @ q.double() for p, q in zip(g.split(2**20, 1), b.split(2**20), strict=True)]
            expected = (torch.stack(products).sum(0) - 2 * b[sample].double()) * (SCALE / (2 * B))
            errors[f"gradient {name}"] = ((gradient[sample].double() - expected).norm() / expected.norm()).item()
    result = {"B": B, "D": D, "seconds": seconds, "peak_bytes": peak, "loss": loss.item(), "errors": errors}
    return result | {"against_64k": seconds * 1000 / (small_ms * (B / 65536) ** 2)}


LEGEND = (
    "Bare products: the matmuls that every exact loss needs, four for CLIP and three for SigLIP, by cuBLAS, "
    "{strips}. "
    "Bare ÷ time: their time ÷ the time of the system. × megabatch: multiples of the time of megabatch. "
    "Extra GiB: peak memory in addition to the inputs, including gradients. "
    "Errors: relative to float64, for gradients on sampled rows. WRONG: the error is larger than bf16 explains."
)
HEADINGS = ["loss", "B", "D", "system", "ms", "TFLOP/s", "bare ÷ time", "× megabatch", "extra GiB", "value", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record: the table, the forward passes and the large batches."""
    by_size = list(groups(record["results"], "loss_name", "B", "D").values())
    rows = []
    for group in by_size:
        bare = next(r["ms"] for r in group if r["system"] == BARE)
        ours = next((r.get("ms") for r in group if r["system"] == MEGABATCH), None)
        for r in group:
            ms = r.get("ms")
            operations = (8 if r["loss_name"] == "clip" else 6) * r["B"] ** 2 * r["D"] / 1e9
            wrong = f"WRONG ({r['wrong_ms']:.0f} ms)" if "wrong_ms" in r else r["status"]
            cells = [r["loss_name"], f"{r['B']:,}", r["D"], r["system"], cell(ms, ".2f") or wrong, ratio(operations, ms, ".0f")]
            cells += [ratio(bare, ms, ".3f"), ratio(ms, ours), gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f")]
            rows.append([*cells, *(cell(r.get(key), ".0e") for key in ("loss_error", "gradient_error"))])
    shapes = max(len(r["shapes"]) // 3 if "shapes" in r else 1 for r in record["results"] if r["system"] == BARE)
    strips = "in strips of 256 MiB" if shapes == 1 else f"each in the fastest of up to {shapes} shapes of strips"
    lines = [_describe_forward(group) for group in by_size if "forward_ms" in group[0]]
    return paragraphs(
        "Contrastive losses on a GPU, forward + backward, in bf16, for B pairs of embeddings with D dimensions.",
        TextTable([*HEADINGS, "gradient error"], rows, names=(0, 3)).markdown(),
        LEGEND.format(strips=strips),
        "Only the forward pass: time of the bare product S ÷ time of the forward pass.",
        "\n".join(lines + [_describe_large(r) for r in record.get("large", [])]),
    )


def _describe_forward(group: list[dict[str, Any]]) -> str:
    bare = next(r["parts"]["S"] for r in group if r["system"] == BARE)
    ours = group[0]
    return f"- {ours['B']:,}×{ours['D']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms)"


def _describe_large(r: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {value:.0e}" for name, value in r["errors"].items())
    against = f", {r['against_64k']:.3f} of (B/64k)² times the time at 64k" if "against_64k" in r else ""
    return (
        f"- B = {r['B']:,}, D = {r['D']}: {r['seconds']:.1f} s forward + backward{against}; "
        f"{r['peak_bytes'] / 2**30:.1f} GiB in addition to the inputs, including gradients; loss {r['loss']:.4f}; "
        f"errors on sampled rows relative to float64: {errors}"
    )


def draw(record: dict[str, Any]) -> Any:
    """Draws time and memory of CLIP losses against the batch size."""
    title = f"CLIP loss, forward + backward, bf16, D = 512; {chip(record)}"
    rows = [r for r in record["results"] if r["loss_name"] == "clip" and r["D"] == 512]
    panels = {
        "time, ms": lambda r: r.get("ms"),
        "memory beyond the inputs, GiB": lambda r: r["peak_bytes"] / 2**30 if "peak_bytes" in r else None,
    }
    return draw_systems(title, rows, panels, {MEGABATCH: plots.GREEN, BARE: plots.INK}, dashed=(BARE,)) if rows else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="BxD", help="batches and dims of the CLIP losses")
    parser.add_argument(
        "--siglip", nargs="*", default=["65536x768"], metavar="BxD", help="batches and dims of the SigLIP losses"
    )
    number_options(parser, large=([], "batches with one step each at D = 512, such as 1048576"), rounds=ROUNDS_OPTION)
    arguments(parser, "loss_gpu", 260)
    args = parser.parse_args()
    device = device_of(args)
    if args.tiny:
        args.sizes, args.siglip, args.rounds = ["64x512", "128x512"], ["64x16"], 1
    record = Record.of_script("loss_gpu", args, args.seconds, large=[])
    for kind, sizes in (("clip", args.sizes), ("siglip", args.siglip)):
        for size in sizes:
            if record.seconds_left() <= 0:
                record.say(f"no time left for {kind} {size}")
                continue
            record.say(f"{kind} {size}")
            record["results"].extend(measure(*map(int, size.split("x")), args.rounds, kind, device))
            clear(device)
            record.save()
    for B in args.large:
        record.say(f"one step at {B}x512")
        record["large"].append(measure_large(B, 512))
        clear(device)
        record.save()
    record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
