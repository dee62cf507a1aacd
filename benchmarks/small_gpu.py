"""Small batches on a GPU: the time of a step, and how long the host takes to launch it, without CUDA graphs.

First values and gradients of all losses with a path for small batches are compared with float64: types, sizes, hostile inputs,
repeated runs. Then `clip_loss` is timed beside a dense loss in PyTorch (autocast), the same compiled, open_clip, Liger and the
bare products, and the other losses beside dense ones. "Host" is the time in which a step returns without waiting for the
device. "In memory" and "over tiles" are the two ways of megabatch, wherever both are possible.

Writes a JSON file; `small_gpu_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import cProfile
import io
import math
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from dense_losses import LOSSES, data, dense_clip, dense_info_nce, errors, outcome, step_of
from record import Record, arguments, device_of
from small_gpu_report import report
from timing import take_turns
from torch import Tensor

import megabatch as mb
from megabatch.bench.loss_systems import DENSE, LIGER, loss_of
from megabatch.bench.losses import bare_products
from megabatch.tiles import plan

SIZES = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (512, 1024)
OTHER_SIZES = (64, 256, 1024, 4096, 8192, 16384)
ROUNDS, SECONDS_A_ROUND = 9, 0.015  # systems take turns, because the speed of a host changes from one moment to the next
MOST_IN_MEMORY = 16384  # pairs; beyond it the similarities take more than a gibibyte
OURS, IN_MEMORY, OVER_TILES, BARE = "megabatch", "in memory", "over tiles", "bare products"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRADIENT_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5}  # relative to float64; two roundings and sums
LOSS_ERROR = 2e-5


TILED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # as if the pairs did not fit in memory
    "clip_loss over tiles": (lambda x, y, s: limited(0, mb.clip_loss)(x, y, s), dense_clip),
    "info_nce_loss over tiles": (lambda x, y, s: limited(0, mb.info_nce_loss)(x, y, scale=s), dense_info_nce),
}


@contextmanager
def small_up_to(pairs: int) -> Iterator[None]:
    """Batches of up to this many pairs are computed in memory."""
    before, plan.SMALL_PAIRS = plan.SMALL_PAIRS, pairs**2
    try:
        yield
    finally:
        plan.SMALL_PAIRS = before


def check(record: Record, device: str, sizes: tuple[int, ...], few: tuple[int, ...]) -> int:
    """Compares all losses with float64 and returns the number of failures; `few` sizes in types other than bf16."""
    failures = 0
    for name, (mine, dense) in (LOSSES | TILED).items():
        for dtype in DTYPES:
            worst = [0.0] * 4
            for B in sizes if dtype == torch.bfloat16 else few:
                found = errors(mine, dense, data(B, 512, dtype, device))
                worst = [max(a, b) if b == b else b for a, b in zip(worst, found, strict=True)]
            loss, dx, dy, dscale = worst
            limit = GRADIENT_ERROR[dtype]
            right = loss <= LOSS_ERROR and dx <= limit and dy <= limit and dscale <= 1e-3
            failures += not right
            shown = " ".join(f"{error:.0e}" for error in worst)
            record.say(f"{'ok   ' if right else 'WRONG'} {name} {str(dtype)[6:]}: loss, dx, dy, dscale {shown}")
            record["checks"].append({"loss": name, "dtype": str(dtype)[6:], "errors": worst, "right": right})
    return failures


def hostile(record: Record, device: str) -> int:
    """Certain pairs, enormous scales, an outlier, equal rows, repeated runs."""
    failed = []
    eye, scale = torch.eye(64, device=device), torch.tensor(80.0, device=device, requires_grad=True)
    loss, dscale = outcome(lambda s: mb.clip_loss(eye, eye, s), (scale,))
    right = 63 * torch.tensor(-80.0, dtype=torch.float64).exp().item()
    if abs(loss.item() / right - 1) > 1e-5 or abs(dscale.item() / right + 1) > 1e-5:
        failed.append(f"certain pairs: {loss.item()}, {dscale.item()} instead of {right}")
    x, y, _ = data(1000, 128, torch.float32, device)
    for big in (1e8, 1e30):
        scale = torch.tensor(big, device=device, requires_grad=True)
        for name, (mine, _) in (LOSSES | TILED).items():
            if name != "siglip_loss":
                value, dx, *_ = outcome(mine, (x, y, scale))
                largest = 1000 * (dx.double() / big).norm(dim=1).max().item()
                if not (value.isfinite() and value >= 0 and largest <= 8):
                    failed.append(f"{name} at scale {big:.0e}: loss {value.item()}, largest gradient {largest}")
    same = torch.full((512, 16), 0.25, device=device)
    if abs(mb.clip_loss(same, same, 1.0).item() - math.log(512)) > 1e-6:
        failed.append("equal rows: not the logarithm of their number")
    for name, (mine, _) in (LOSSES | TILED).items():
        inputs = data(1000, 128, torch.bfloat16, device)
        first = outcome(mine, inputs)
        if not all(all(torch.equal(a, b) for a, b in zip(first, outcome(mine, inputs), strict=True)) for _ in range(20)):
            failed.append(f"{name}: other bits in another run")
    for line in failed:
        record.say(f"WRONG {line}")
    record["hostile"].extend(failed)
    record.say(f"hostile inputs: {len(failed)} failures")
    return len(failed)


def host_milliseconds(steps: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """The median times in which steps return without waiting for the device."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(calls):
                step()
            found[name].append((time.perf_counter() - begun) / calls)
    torch.cuda.synchronize()
    return {name: 1000 * sorted(times)[ROUNDS // 2] for name, times in found.items()}


def autocast(loss: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(*inputs)

    return run


def limited(pairs: int, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor, **options: Tensor) -> Tensor:
        with small_up_to(pairs):
            return loss(*inputs, **options)

    return run


def systems(B: int, device: str) -> dict[str, Callable[..., Tensor]]:
    """CLIP losses by name; of megabatch, what is usual for B, and both ways where both are possible."""
    found: dict[str, Callable[..., Tensor]] = {OURS: mb.clip_loss}
    if B <= MOST_IN_MEMORY:
        found[IN_MEMORY] = limited(MOST_IN_MEMORY, mb.clip_loss)
    found[OVER_TILES] = limited(0, mb.clip_loss)
    found["dense PyTorch"] = autocast(dense_clip, device)
    return found


def peers(device: str, record: Record, tiny: bool) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {}
    for name, label in ((DENSE, "open_clip"), (LIGER, "Liger")):
        with attempt(record, label):
            found[label] = loss_of(name, device)
    if not tiny:
        found["compiled"] = autocast(torch.compile(dense_clip, dynamic=True), device)
    return found


@contextmanager
def attempt(record: Record, what: str) -> Iterator[None]:
    """One failure does not end the run."""
    try:
        yield
    except ImportError as error:
        record.say(f"{what} is not there: {error}")
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        record.say(f"FAILED {what}: {type(error).__name__}: {str(error)[:300]}")
        record["failures"].append({"what": what, "trace": lines[-12:]})
        torch.cuda.empty_cache() if torch.cuda.is_available() else None


def measure(record: Record, name: str, candidates: dict[str, Callable[..., Tensor]], B: int, D: int, device: str) -> None:
    """Times of one loss in all systems at one size."""
    inputs = data(B, D, torch.bfloat16, device)
    steps: dict[str, Callable[[], Any]] = {}
    for system, loss in candidates.items():
        if B >= 32768 and system in ("compiled", "Liger"):
            continue
        with attempt(record, f"{name}, {system} at {B}x{D}"):
            step = step_of(loss, inputs)
            step()
            step()
            steps[system] = step
    row: dict[str, Any] = {"loss": name, "B": B, "D": D, "host_ms": {}}
    row["ms"] = take_turns(steps, device, ROUNDS, SECONDS_A_ROUND)
    if name == "clip_loss":
        bare = take_turns(bare_products(inputs[0].detach(), inputs[1].detach()), device, ROUNDS, SECONDS_A_ROUND)
        row["ms"][BARE] = 2 * bare["S"] + bare["dX"] + bare["dY"]
    if device == "cuda":
        ours = {system: steps[system] for system in (OURS, IN_MEMORY, OVER_TILES, "dense PyTorch") if system in steps}
        row["host_ms"] = host_milliseconds(ours, 10 if B <= 8192 else 2)
    record["results"].append(row)
    shown = ", ".join(f"{system} {ms:.3f}" for system, ms in row["ms"].items())
    host = ", ".join(f"{system} {ms:.3f}" for system, ms in row["host_ms"].items())
    record.say(f"{name} {B}x{D} ms: {shown}; host: {host}")
    record.save()


def kernels_of(record: Record, step: Callable[[], Any], what: str) -> None:
    """Time of each kernel in a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    rows = [
        (e.self_device_time_total / 5, e.count // 5, e.key[:60]) for e in found.key_averages() if e.self_device_time_total > 0
    ]
    rows.sort(reverse=True)
    record["kernels"][what] = rows[:14]
    record.say(f"kernels of {what}, µs a step × calls: " + "; ".join(f"{us:.0f}×{n} {key}" for us, n, key in rows[:14]))


def host_profile(record: Record, step: Callable[[], Any], what: str) -> None:
    """Where the host's time goes in a step."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(200):
        step()
    profiler.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(22)
    kept = [line[:150] for line in text.getvalue().splitlines() if any(mark in line for mark in (".py:", "{", "ncalls"))]
    record["host_profile"][what] = kept
    record.say(f"host profile of {what}, 200 steps:\n" + "\n".join(kept))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="pairs of clip_loss (64 to 32768)")
    parser.add_argument("--widths", nargs="*", type=int, default=WIDTHS, help="of its embeddings (512 1024)")
    parser.add_argument("--others", nargs="*", type=int, default=OTHER_SIZES, help="pairs of the other losses (64 to 16384)")
    arguments(parser, "small_gpu", 260)
    args = parser.parse_args()
    device = device_of(args)
    beginning: dict[str, Any] = {"checks": [], "failures": [], "hostile": [], "kernels": {}, "host_profile": {}}
    record = Record("small_gpu", args, args.seconds, **beginning)
    sizes, widths, others = ((32, 48), (16,), (32,)) if args.tiny else (args.sizes, args.widths, args.others)
    wrong = 0
    with attempt(record, "checks"):
        wrong += check(record, device, *(((2, 33), (33,)) if args.tiny else ((64, 300, 4096), (300,))))
    with attempt(record, "hostile inputs"):
        wrong += hostile(record, device)
    record.save()
    if device == "cuda":
        for B in (256, 4096):
            step = step_of(mb.clip_loss, data(B, 512, torch.bfloat16, device))
            step()
            with attempt(record, f"kernels at {B}"):
                kernels_of(record, step, f"{B}x512")
            if B == 256:
                with attempt(record, "host profile"):
                    host_profile(record, step, f"{B}x512")
        with attempt(record, "kernels at 8192, in memory"):
            step = step_of(limited(8192, mb.clip_loss), data(8192, 512, torch.bfloat16, device))
            step()
            kernels_of(record, step, "8192x512 in memory")
    compared = peers(device, record, args.tiny)
    for D in widths:
        for B in sizes:
            if record.left() > 15:
                with attempt(record, f"clip_loss {B}x{D}"):
                    measure(record, "clip_loss", systems(B, device) | compared, B, D, device)
        if widths[0] == D:
            for name, (mine, dense) in LOSSES.items():
                candidates = {OURS: mine, "dense PyTorch": autocast(dense, device), OVER_TILES: limited(0, mine)}
                for B in others if name != "clip_loss" else ():
                    if record.left() > 35:
                        with attempt(record, f"{name} {B}"):
                            measure(record, name, candidates, B, D, device)
    if device == "cuda" and record.left() > 10:
        with attempt(record, "kernels at 16384"):
            step = step_of(mb.clip_loss, data(16384, 512, torch.bfloat16, device))
            step()
            kernels_of(record, step, "16384x512")
            host_profile(record, partial(step), "16384x512")
    record.save()
    with attempt(record, "report"):
        report(record.path)
        print(record.path.with_suffix(".md").read_text())
    record.say(f"{wrong} checks failed, {len(record['failures'])} errors")
    return 1 if wrong or record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
