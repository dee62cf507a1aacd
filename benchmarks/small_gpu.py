"""Small batches on a GPU: the time of a step, and how long the host takes to launch it, without CUDA graphs.

`clip_loss` is timed beside a dense loss in PyTorch (autocast), the same compiled, open_clip, Liger and the bare products; the
other losses are timed beside dense ones, and `siglip_loss` beside its three bare products. Before a loss of megabatch is timed,
its value and gradients at that very size are compared with float64, and a wrong one gets no time. "Host" is the time in which a
step returns without waiting for the device, one after another, or the first one after a pause, in which the host's caches and
clocks cool down. "In memory" or "over tiles" is the other way of megabatch, where there is one. `make test-gpu` checks other
types, odd sizes, hostile inputs and repeated runs.

Writes a JSON file; `small_gpu_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import cProfile
import io
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from dense_losses import LOSSES, data, dense_clip, errors, step_of
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
OTHER_SIZES = (64, 256, 1024, 4096, 8192, 16384, 32768)
PRODUCTS = {
    "clip_loss": ("S", "S", "dX", "dY"),
    "siglip_loss": ("S", "dX", "dY"),
}  # that an exact loss needs, one after another
ROUNDS, SECONDS_A_ROUND = 9, 0.015  # systems take turns, because the speed of a host changes from one moment to the next
MOST_IN_MEMORY = 16384  # pairs; beyond it the similarities take more than a gibibyte
OURS, IN_MEMORY, OVER_TILES, BARE = "megabatch", "in memory", "over tiles", "bare products"
DENSE_PYTORCH = "dense PyTorch"
PAUSE = 0.002  # seconds, before the step of a host that has cooled down
GRADIENT_ERROR, LOSS_ERROR, SCALE_ERROR = 8e-3, 2e-5, 1e-3  # of bf16, relative to float64: two roundings and sums
Loss = Callable[..., Tensor]


@contextmanager
def small_up_to(pairs: int) -> Iterator[None]:
    """Batches of up to this many pairs are computed in memory."""
    before, plan.SMALL_PAIRS = plan.SMALL_PAIRS, pairs**2
    try:
        yield
    finally:
        plan.SMALL_PAIRS = before


def is_right(record: Record, name: str, system: str, mine: Loss, dense: Loss, inputs: tuple[Tensor, ...]) -> bool:
    """Whether value and gradients are those of float64, up to rounding."""
    found = errors(mine, dense, inputs)
    loss, dx, dy, dscale = found
    right = loss <= LOSS_ERROR and max(dx, dy) <= GRADIENT_ERROR and dscale <= SCALE_ERROR
    size = "x".join(map(str, inputs[0].shape))
    record["checks"].append({"loss": f"{name} {size}, {system}", "dtype": "bfloat16", "errors": found, "right": right})
    if not right:
        record.say(f"WRONG {name} {size}, {system}: loss, dx, dy, dscale " + " ".join(f"{error:.0e}" for error in found))
    return right


def host_milliseconds(step: Callable[[], Any], calls: int, pause: float = 0.0) -> float:
    """The median time in which a step returns without waiting for the device, after a pause of so many seconds."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(pause)
        begun = time.perf_counter()
        for _ in range(calls):
            step()
        found.append((time.perf_counter() - begun) / calls)
    torch.cuda.synchronize()
    return 1000 * sorted(found)[ROUNDS // 2]


class _Nothing(torch.autograd.Function):
    """Computes nothing, forward and backward: what the host needs in any case."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def autocast(loss: Loss, device: str) -> Loss:
    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss(*inputs)

    return run


def limited(pairs: int, loss: Loss) -> Loss:
    def run(*inputs: Tensor, **options: Tensor) -> Tensor:
        with small_up_to(pairs):
            return loss(*inputs, **options)

    return run


def systems(B: int, device: str) -> dict[str, Loss]:
    """CLIP losses by name; of megabatch, what is usual for B, and the other way if it is possible."""
    found: dict[str, Loss] = {OURS: mb.clip_loss}
    if B * B <= plan.SMALL_PAIRS:
        found[OVER_TILES] = limited(0, mb.clip_loss)
    elif B <= MOST_IN_MEMORY:
        found[IN_MEMORY] = limited(MOST_IN_MEMORY, mb.clip_loss)
    found[DENSE_PYTORCH] = autocast(dense_clip, device)
    return found


def peers(device: str, record: Record, tiny: bool) -> dict[str, Loss]:
    found: dict[str, Loss] = {}
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


def measure(record: Record, name: str, candidates: dict[str, Loss], B: int, D: int, device: str) -> None:
    """Times of one loss in all systems at one size."""
    inputs, dense = data(B, D, torch.bfloat16, device), LOSSES[name][1]
    steps: dict[str, Callable[[], Any]] = {}
    for system, loss in candidates.items():
        if B >= 32768 and system in ("compiled", "Liger"):
            continue
        with attempt(record, f"{name}, {system} at {B}x{D}"):
            if system in (OURS, IN_MEMORY, OVER_TILES) and not is_right(record, name, system, loss, dense, inputs):
                continue
            step = step_of(loss, inputs)
            step()
            step()
            steps[system] = step
    row: dict[str, Any] = {"loss": name, "B": B, "D": D, "host_ms": {}, "host_after_pause_ms": {}}
    row["ms"] = take_turns(steps, device, ROUNDS, SECONDS_A_ROUND)
    if name in PRODUCTS:
        bare = take_turns(bare_products(inputs[0].detach(), inputs[1].detach()), device, ROUNDS, SECONDS_A_ROUND)
        row["ms"][BARE] = sum(bare[product] for product in PRODUCTS[name])
    if device == "cuda":
        calls = 50 if B <= 4096 else 10 if B <= 8192 else 2  # fewer launches than the device's queue holds
        for system in (OURS, DENSE_PYTORCH):
            if system in steps:
                row["host_ms"][system] = host_milliseconds(steps[system], calls)
                row["host_after_pause_ms"][system] = host_milliseconds(steps[system], 1, PAUSE)
    record["results"].append(row)
    shown = ", ".join(f"{system} {ms:.3f}" for system, ms in row["ms"].items())
    host = ", ".join(f"{system} {ms:.3f}" for system, ms in row["host_ms"].items())
    host += "".join(f", after a pause {ms:.3f}" for system, ms in row["host_after_pause_ms"].items() if system == OURS)
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
    parser.add_argument("--others", nargs="*", type=int, default=OTHER_SIZES, help="pairs of the other losses (64 to 32768)")
    arguments(parser, "small_gpu", 260)
    args = parser.parse_args()
    device = device_of(args)
    beginning: dict[str, Any] = {"checks": [], "failures": [], "kernels": {}, "host_profile": {}, "nothing_host_ms": []}
    record = Record("small_gpu", args, args.seconds, **beginning)
    sizes, widths, others = ((32, 48), (16,), (32,)) if args.tiny else (args.sizes, args.widths, args.others)
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
        nothing = step_of(lambda *inputs: _Nothing.apply(*inputs), data(256, 512, torch.bfloat16, device))
        nothing()
        record["nothing_host_ms"].extend([host_milliseconds(nothing, 50), host_milliseconds(nothing, 1, PAUSE)])
    compared = peers(device, record, args.tiny)
    for D in widths:
        for B in sizes:
            if record.left() > 15:
                with attempt(record, f"clip_loss {B}x{D}"):
                    measure(record, "clip_loss", systems(B, device) | compared, B, D, device)
        if widths[0] == D:
            for name, (mine, dense) in LOSSES.items():
                for B in others if name != "clip_loss" else ():
                    candidates = {OURS: mine, DENSE_PYTORCH: autocast(dense, device)}
                    if B * B <= plan.SMALL_PAIRS:
                        candidates[OVER_TILES] = limited(0, mine)
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
    wrong = sum(not check["right"] for check in record["checks"])
    record.say(f"{wrong} of {len(record['checks'])} checks failed, {len(record['failures'])} errors")
    return 1 if wrong or record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
