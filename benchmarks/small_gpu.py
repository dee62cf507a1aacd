"""Measures small batches on a GPU: the time of a step, and the time of the host to launch it, without CUDA graphs.

`clip_loss` is compared with a dense loss in PyTorch with autocast, with this loss after torch.compile, with open_clip, with
Liger and with the bare products. `siglip_loss` is compared with a dense loss and the bare products, and the other losses are
compared with dense losses. Before a loss of megabatch is timed, its value and gradients at the same size are compared with
float64. A wrong loss has no time.

"Host" is the time until a step returns, without waiting for the device. It is measured for consecutive steps, and for the first
step after a pause, in which the caches and clocks of the host cool down. `make test-gpu` tests other dtypes, unusual sizes,
hostile inputs and repeated runs.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dense_losses import LOSSES, dense_clip, inputs_of, relative_errors, step_of, truth_of
from torch import Tensor

from megabatch_train.bench.losses import DENSE, LIGER, bare_products, loss_of
from megabatch_train.bench.measure import (
    Record,
    arguments,
    chip,
    clear,
    device_of,
    groups,
    number_options,
    paragraphs,
    take_turns,
    with_gradients,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, ratio

SIZES = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (512, 1024)
OTHER_SIZES = (64, 256, 1024, 4096, 8192, 16384, 32768)
PRODUCTS = {"clip_loss": ("S", "S", "dX", "dY"), "siglip_loss": ("S", "dX", "dY")}  # matmuls that an exact loss needs
ROUNDS, SECONDS_A_ROUND = 9, 0.015  # systems take turns, because the speed of a host changes with time
OURS, DENSE_PYTORCH, COMPILED, BARE = "megabatch", "dense PyTorch", "compiled", "bare products"
SLOW_FROM = {COMPILED: 32768, LIGER: 32768}  # fewest pairs for which a system is skipped
PAUSE = 0.002  # seconds before a step that measures a cold host
GRADIENT_ERROR, LOSS_ERROR, SCALE_ERROR = 8e-3, 2e-5, 1e-3  # bf16 relative to float64: two roundings, and sums
Loss = Callable[..., Tensor]


def is_right(record: Record, name: str, loss_function: Loss, inputs: tuple[Tensor, ...]) -> bool:
    """Whether value and gradients agree with float64 up to rounding."""
    loss, dx, dy, dscale = errors = relative_errors(with_gradients(loss_function, inputs), truth_of(LOSSES[name][1], inputs))
    right = loss <= LOSS_ERROR and max(dx, dy) <= GRADIENT_ERROR and dscale <= SCALE_ERROR
    size = "x".join(map(str, inputs[0].shape))
    record["checks"].append({"loss": f"{name} {size}, {OURS}", "dtype": "bfloat16", "errors": errors, "right": right})
    if not right:
        record.say(f"WRONG {name} {size}: loss, dx, dy, dscale " + " ".join(f"{error:.0e}" for error in errors))
    return right


def host_milliseconds(step: Callable[[], Any], calls: int, pause: float = 0.0) -> float:
    """Returns the median milliseconds until a step returns without waiting for the device, after a pause in seconds."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(pause)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return 1000 * sorted(times)[ROUNDS // 2]


class _Nothing(torch.autograd.Function):
    """A function that computes nothing, forward and backward. It measures the minimum time of the host."""

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


def clip_peers(device: str, record: Record, tiny: bool) -> dict[str, Loss]:
    """Returns the CLIP losses of the baselines that are installed."""
    losses: dict[str, Loss] = {}
    for name in (DENSE, LIGER):
        with attempt(record, name):
            losses[name] = loss_of(name, device)
    if not tiny:
        losses[COMPILED] = autocast(torch.compile(dense_clip, dynamic=True), device)
    return losses


@contextmanager
def attempt(record: Record, what: str) -> Iterator[None]:
    """Records an exception, so that the run continues."""
    try:
        yield
    except ImportError as error:
        record.say(f"{what} is not installed: {error}")
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        record.say(f"FAILED {what}: {type(error).__name__}: {str(error)[:300]}")
        record["failures"].append({"what": what, "trace": lines[-12:]})
        clear("cuda" if torch.cuda.is_available() else "cpu")


def measure(record: Record, name: str, candidates: dict[str, Loss], B: int, D: int, device: str) -> None:
    """Measures one loss in all systems at one size."""
    inputs = inputs_of(B, D, device)
    steps: dict[str, Callable[[], Any]] = {}
    for system, loss in candidates.items():
        if SLOW_FROM.get(system, B + 1) <= B:
            continue
        with attempt(record, f"{name}, {system} at {B}x{D}"):
            if system == OURS and not is_right(record, name, loss, inputs):
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
        calls = 50 if B <= 4096 else 10 if B <= 8192 else 2  # fewer launches than the queue can hold
        for system in (OURS, DENSE_PYTORCH):
            if system in steps:
                row["host_ms"][system] = host_milliseconds(steps[system], calls)
                row["host_after_pause_ms"][system] = host_milliseconds(steps[system], 1, PAUSE)
    record["results"].append(row)
    times, host = (", ".join(f"{system} {ms:.3f}" for system, ms in row[key].items()) for key in ("ms", "host_ms"))
    record.say(f"{name} {B}x{D} ms: {times}; host: {host}")
    record.save()


SYSTEMS = {OURS: plots.GREEN, DENSE_PYTORCH: plots.ORANGE, COMPILED: plots.VIOLET, DENSE: plots.BLUE, LIGER: plots.OCHRE}
LEGEND = (
    "ms: forward + backward, several steps in flight, no CUDA graphs. Host: time until a step returns without waiting for the "
    "GPU, for consecutive steps. Cold: the host time of one step after 2 ms without work. Dense PyTorch: all logits, with "
    "autocast. Compiled: dense PyTorch after torch.compile. Bare products: the four matmuls of an exact CLIP loss, or three "
    "matmuls of SigLIP."
)


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record: a table of the CLIP losses and a table of the other losses."""
    clip = [row for row in record["results"] if row["loss"] == "clip_loss"]
    other = [row for row in record["results"] if row["loss"] != "clip_loss"]
    ends = ["host, ms", "cold, ms", "dense ÷ time", "bare ÷ time"]
    columns = [name for name in (*SYSTEMS, BARE) if any(name in row["ms"] for row in clip)]
    headings = ["B", "D", *(f"{name}, ms" for name in columns), *ends]
    tables = [TextTable(headings, [_cells(row, columns) for row in clip], names=()).markdown()]
    if other:
        columns = [OURS, DENSE_PYTORCH, BARE]
        headings = ["loss", "B", "D", *(f"{name}, ms" for name in columns), *ends]
        tables.append(TextTable(headings, [[row["loss"], *_cells(row, columns)] for row in other]).markdown())
    wrong = [f"{c['loss']} {c['dtype']}" for c in record["checks"] if not c["right"]]
    check_sentence = (
        f"{len(record['checks'])} results of megabatch were compared with float64. Wrong results: {', '.join(wrong) or 'none'}."
    )
    legend = LEGEND
    if record.get("nothing_host_ms"):  # not on a CPU
        warm, cold = record["nothing_host_ms"]
        legend += f" An autograd function that computes nothing takes {warm:.3f} ms of the host, and {cold:.3f} ms when cold."
    return paragraphs(
        "Small batches on a GPU, in bf16, for B pairs of embeddings with D dimensions.", *tables, legend, check_sentence
    )


def _cells(row: dict[str, Any], columns: list[str]) -> list[object]:
    ms, host = row["ms"], [cell(row.get(key, {}).get(OURS), ".3f") for key in ("host_ms", "host_after_pause_ms")]
    ratios = [ratio(ms.get(name), ms.get(OURS)) for name in (DENSE_PYTORCH, BARE)]
    return [f"{row['B']:,}", row["D"], *(cell(ms.get(name), ".3f") for name in columns), *host, *ratios]


def draw(record: dict[str, Any]) -> Any:
    """Draws the time of CLIP losses against the batch size, for each dim."""
    of_width = groups([row for row in record["results"] if row["loss"] == "clip_loss"], "D")
    figure, panels = plots.panels(f"CLIP loss, forward + backward, bf16; {chip(record)}", len(of_width), height=3.8)
    for axes, ((D,), rows) in zip(panels, of_width.items(), strict=True):  # type: ignore[misc]
        for name, color in (SYSTEMS | {BARE: plots.INK}).items():
            points = [(row["B"], row["ms"][name]) for row in rows if name in row["ms"]]
            plots.line(axes, points, name, color, linestyle="--" if name == BARE else "-")
        host = [(row["B"], row["host_ms"][OURS]) for row in rows if OURS in row["host_ms"]]
        plots.line(axes, host, "megabatch, host", plots.GREEN, linestyle=":")
        axes.set_ylabel(f"time, ms, D = {D}")
        plots.batch_axis(axes, [row["B"] for row in rows])
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    number_options(parser, sizes=(SIZES, "batch sizes of clip_loss, in pairs"), widths=(WIDTHS, "dimensions of clip_loss"))
    number_options(parser, others=(OTHER_SIZES, "batch sizes of the other losses, in pairs"))
    arguments(parser, "small_gpu", 260)
    args = parser.parse_args()
    device = device_of(args)
    record = Record.of_script("small_gpu", args, args.seconds, checks=[], failures=[], nothing_host_ms=[])
    sizes, widths, others = ((32, 48), (16,), (32,)) if args.tiny else (args.sizes, args.widths, args.others)
    if device == "cuda":
        nothing = step_of(lambda *inputs: _Nothing.apply(*inputs), inputs_of(256, 512, device))
        nothing()
        record["nothing_host_ms"].extend([host_milliseconds(nothing, 50), host_milliseconds(nothing, 1, PAUSE)])
    compared = clip_peers(device, record, args.tiny)
    candidates = {name: {OURS: ours, DENSE_PYTORCH: autocast(dense, device)} for name, (ours, dense) in LOSSES.items()}
    candidates["clip_loss"] |= compared
    cases = [("clip_loss", B, D) for D in widths for B in sizes]
    cases[len(sizes) : len(sizes)] = [(name, B, widths[0]) for name in LOSSES if name != "clip_loss" for B in others]
    for name, B, D in cases:
        if record.seconds_left() > (15 if name == "clip_loss" else 35):
            with attempt(record, f"{name} {B}x{D}"):
                measure(record, name, candidates[name], B, D, device)
    record.finish(markdown, draw)
    wrong = sum(not check["right"] for check in record["checks"])
    record.say(f"{wrong} of {len(record['checks'])} checks failed, {len(record['failures'])} errors")
    return 1 if wrong or record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
