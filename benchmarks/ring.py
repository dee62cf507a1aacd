"""The loss over ranks on one CPU: memory of each rank, time and bytes sent, beside open_clip's losses and Inf-CL's exchange.

This is the ablation of Inf-CL's table 4. Ranks are processes that share the cores, so the time shows how much work there is
in all, not how it scales. Every measurement starts fresh processes. The loss and sampled rows of both gradients, averaged over
ranks as DDP would, are compared with float64 first. Bytes are counted where they are sent.

Two systems are only measured here. "Two rings" follows the scheme of Inf-CL (arXiv 2410.17243): row sums of x against the
travelling y, then of y against the travelling x. Backward makes one lap for each again, in which a block's gradient makes R
hops. The logits are computed in megabatch's tiles, so that only the schemes differ.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megabatch
from megabatch import ring
from megabatch.ring import lap
from megabatch.ring.ranks import Parcel, Ranks
from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.sums import LogSum
from megabatch_train.bench import losses
from megabatch_train.bench.losses import ClipTruth, Loss, pairs, truth_of
from megabatch_train.bench.measure import OK, Record, arguments, fresh_process, paragraphs
from megabatch_train.commands import whole
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell

BATCH, WIDTH, WORLDS = 8192, 256, [1, 2, 4, 8]
SYNCHRONOUS, GATHER, TWO_RINGS = "ring, synchronous", "gather, tiles", "two rings"
ABOUT = {  # in the order of the table
    losses.VANILLA: losses.ABOUT_LEVELS[losses.VANILLA],
    losses.LOCAL: losses.ABOUT_LEVELS[losses.LOCAL],
    TWO_RINGS: "Inf-CL's exchange, one ring for each direction, in our tiles",
    losses.BLOCKS: losses.ABOUT_LEVELS[losses.BLOCKS],
    SYNCHRONOUS: "tiles, without overlap: every message is waited for",
    GATHER: "tiles, after an all-gather",
    losses.TILES: losses.ABOUT_LEVELS[losses.TILES],
}


@contextmanager
def synchronous(rows: int) -> Iterator[Loss]:
    lap.OVERLAP, before = False, lap.OVERLAP
    try:
        yield losses.ring_loss
    finally:
        lap.OVERLAP = before


def gather_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    with ring.use_route("gather"):
        return megabatch.clip_loss(image, text, scale, group=dist.group.WORLD)


def two_rings(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The same loss as `clip_loss` over the default group, for ranks with equally many pairs."""
    match = scale * (image * text).sum(1)
    row: Tensor = _RowSums.apply(image, text, scale)
    col: Tensor = _RowSums.apply(text, image, scale)
    return ((row - match) + (col - match)).mean() / 2


class _RowSums(torch.autograd.Function):
    """log Σ_j exp s_ij over the columns of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        ranks = _ranks(x)
        sums = LogSum.empty(len(x), dtype=x.dtype, device=x.device)
        here = y.contiguous()
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else _pass_on(ranks, here)
            sums.add_(eager.logsumexp_statistics(Block(x, here, scale, "float32"))[0])
            if coming is not None:
                here = coming()
        ctx.save_for_backward(x, y, scale, sums.pack())
        return sums.value()

    @staticmethod
    def backward(ctx: Any, drow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale, packed = ctx.saved_tensors
        ranks, row = _ranks(x), LogSum.unpack(packed)
        dx, dscale = torch.zeros_like(x), torch.zeros_like(scale)
        here, dy_coming = y.contiguous(), None
        nothing = LogSum.empty(len(y), dtype=x.dtype, device=x.device)
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else _pass_on(ranks, here)
            dy = torch.zeros_like(y)
            block = Block(x, here, scale, "float32")
            sums, needs = ColumnGradients(dy, None), Needs(True, True, True)
            for rows, dx_rows, dscale_rows, _ in eager.logsumexp_gradients(block, row, nothing, drow, None, sums, needs):
                assert dx_rows is not None
                assert dscale_rows is not None
                dx[rows] += dx_rows
                dscale += dscale_rows.sum()
            if dy_coming is not None:
                dy += dy_coming()
            dy_coming = _pass_on(ranks, dy)
            if coming is not None:
                here = coming()
        assert dy_coming is not None
        return dx * scale, dy_coming() * scale, dscale


def _ranks(x: Tensor) -> Ranks:
    return Ranks(x.device, dist.group.WORLD, "two rings")


def _pass_on(ranks: Ranks, tensor: Tensor) -> Any:
    """Starts sending to the next rank; the returned function waits for the previous rank's tensor and returns it."""
    rank, size = ranks.rank, ranks.size
    if size == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    sends, receives = [Parcel((rank + 1) % size, [tensor])], [Parcel((rank - 1) % size, [received])]
    pending = ranks.post(sends, receives, where="on the way")

    def wait() -> Tensor:
        pending.wait()
        return received

    return wait


SYSTEMS = losses.LEVELS | {
    SYNCHRONOUS: synchronous,
    GATHER: partial(losses.leave_unchanged, gather_loss),
    TWO_RINGS: partial(losses.leave_unchanged, two_rings),
}


MIB = 2**20
HEADINGS = ["ranks", "system", "peak MiB of a rank", "s, all ranks on these cores"]
HEADINGS += ["MiB sent by a rank", "loss error", "grad. error"]
LEGEND = (
    "Peak: resident memory beyond the inputs, gradients included, of the rank that needs most. Sent: forward and backward, "
    "without the small messages in which ranks agree; open_clip's collectives are not counted. Errors: of the mean over ranks, "
    "relative to float64."
)
PANELS = (
    ("peak memory of a rank, MiB", "peak", MIB),
    ("seconds, all ranks together", "seconds", 1),
    ("MiB sent by a rank", "sent", MIB),
)


def _title(record: dict[str, Any]) -> str:
    return f"CLIP loss over ranks, forward and backward, float32, {record['batch']:,} pairs in all, D = {record['width']}"


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    rows = []
    for r in record["results"]:
        peak, sent = (None if r[key] is None else r[key] / MIB for key in ("peak", "sent"))
        seconds = f"{r['seconds']:.2f}" if r["status"] == OK else r["status"].split(":")[0]
        cells = [r["world"], r["system"], cell(peak, ".0f"), seconds, cell(sent, ".2f")]
        rows.append([*cells, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    systems = "\n".join(f"- {system}: {about}" for system, about in ABOUT.items())
    return paragraphs(TextTable(HEADINGS, rows, f"{_title(record)}.", LEGEND, names=(1,)).markdown(), systems)


def draw(record: dict[str, Any]) -> Any:
    """Memory, time and bytes sent against the number of ranks."""
    figure, panels = plots.panels(_title(record), 3)
    others = iter((plots.ORANGE, plots.OCHRE, plots.BLUE, plots.VIOLET, plots.GREY, plots.MINT))
    colours = {name: plots.GREEN if name == losses.TILES else next(others) for name in ABOUT}
    for axes, (label, key, unit) in zip(panels, PANELS, strict=True):
        for name in ABOUT:
            points = [(r["world"], r[key] / unit) for r in record["results"] if r["system"] == name and r[key]]
            plots.line(axes, points, name, colours[name], linewidth=2.4 if name == losses.TILES else 1.2)
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["world"] for r in record["results"]], "ranks")
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure


def truth(batch: int, width: int) -> ClipTruth:
    """Runs in a process of its own."""
    return truth_of(*pairs(batch, width))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=whole, nargs="+", default=WORLDS, metavar="R", help="numbers of ranks (1 2 4 8)")
    parser.add_argument("--batch", type=whole, default=BATCH, metavar="B", help=f"pairs of all ranks together ({BATCH})")
    parser.add_argument("--width", type=whole, default=WIDTH, metavar="D", help=f"embedding width ({WIDTH})")
    parser.add_argument("--repeats", type=whole, default=3, metavar="N", help="timed steps; the fastest counts (3)")
    arguments(parser, "ring")
    args = parser.parse_args()
    record = Record.of_script("ring", args, batch=args.batch, width=args.width)
    record.say("float64 reference")
    right = fresh_process(truth, args.batch, args.width)
    for world in args.worlds:
        for name in ABOUT:
            record.say(f"{world} ranks: {name}")
            (result,) = losses.measure_levels({name: SYSTEMS[name]}, world, args.batch, args.width, args.repeats, right)
            if name in (losses.VANILLA, losses.LOCAL):
                result.sent = None  # collectives are not counted
            record["results"].append({"world": world, **asdict(result)})
            record.save()
    record.finish(markdown, draw)
    return 0 if all(result["status"] == OK for result in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
