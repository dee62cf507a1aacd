"""Measures memory, time and traffic of the loss over ranks on one CPU: megabatch, open_clip, and methods of other projects.

This is the ablation of table 4 of Inf-CL. The ranks are processes that share the cores. So the CPU time of all ranks shows the
total work, but the time does not show how a system scales. Every measurement starts fresh processes. Before a system is timed,
its loss and sampled rows of both gradients are averaged over ranks, as in DDP, and compared with float64. Sent bytes are
counted.

The methods of two projects are implemented here, so that only the methods differ:

- "Two rings" follows Inf-CL (arXiv 2410.17243). One lap computes the row sums of x with the traveling y, and another lap
  computes the row sums of y with the traveling x. The backward pass makes a lap for each of them, in which the gradient of a
  block makes R hops. The logits are computed in the tiles of megabatch.
- "DisCo-CLIP" follows arXiv 2304.08480. Every rank gathers all embeddings and forms the logits of its own rows and its own
  columns. In the backward pass, an all-reduce sums the gradients of the gathered embeddings, and every rank takes its own.

The sigmoid loss is compared with the float64 reference of `loss_gpu.py`.
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
import torch.nn.functional as F
from loss_gpu import BIAS, siglip_truth
from torch import Tensor

import megabatch
from megabatch import ring
from megabatch.ring import lap
from megabatch.ring.ranks import Parcel, Ranks
from megabatch.tiles import eager
from megabatch.tiles.block import Block, ColumnGradients, Needs
from megabatch.tiles.sums import LogSum
from megabatch_train.bench import losses
from megabatch_train.bench.losses import ClipTruth, Loss, pairs, sample_rows, truth_of
from megabatch_train.bench.measure import OK, Record, arguments, fresh_process, number_options, paragraphs
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell

BATCH, WIDTH, WORLDS = 8192, 256, [1, 2, 4, 8]
SYNCHRONOUS, GATHER, TWO_RINGS, DISCO = "ring, synchronous", "gather, tiles", "two rings", "DisCo-CLIP"
SIGMOID_DENSE, SIGMOID_TILES = "sigmoid, open_clip", "sigmoid, megabatch"
SIGMOID = (SIGMOID_DENSE, SIGMOID_TILES)
ABOUT = {  # in the order of the table
    losses.VANILLA: losses.ABOUT_LEVELS[losses.VANILLA],
    losses.LOCAL: losses.ABOUT_LEVELS[losses.LOCAL],
    DISCO: "gathered embeddings, own rows and columns of logits, gradients by all-reduce",
    TWO_RINGS: "exchange of Inf-CL, one ring for each direction, in the tiles of megabatch",
    losses.BLOCKS: losses.ABOUT_LEVELS[losses.BLOCKS],
    SYNCHRONOUS: "tiles, without overlap of messages and computation",
    GATHER: "tiles, after an all-gather",
    losses.TILES: losses.ABOUT_LEVELS[losses.TILES],
    SIGMOID_DENSE: "ring of SigLIP (`SigLipLoss`, dist_impl bidir), which stores each block of logits until backward",
    SIGMOID_TILES: "`siglip_loss` over the ring, tiles",
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
    """Computes the same loss as `clip_loss` over the default process group, for ranks with the same number of pairs."""
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
        columns = y.contiguous()
        for step in range(ranks.size):
            last = step == ranks.size - 1
            receive = None if last else _pass_on(ranks, columns)
            sums.add_(eager.logsumexp_statistics(Block(x, columns, scale, "float32"))[0])
            if receive is not None:
                columns = receive()
        ctx.save_for_backward(x, y, scale, sums.pack())
        return sums.value()

    @staticmethod
    def backward(ctx: Any, drow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, scale, packed = ctx.saved_tensors
        ranks, row = _ranks(x), LogSum.unpack(packed)
        dx, dscale = torch.zeros_like(x), torch.zeros_like(scale)
        columns, receive_dy = y.contiguous(), None
        empty_sums = LogSum.empty(len(y), dtype=x.dtype, device=x.device)
        for step in range(ranks.size):
            last = step == ranks.size - 1
            receive = None if last else _pass_on(ranks, columns)
            dy = torch.zeros_like(y)
            block = Block(x, columns, scale, "float32")
            sums, needs = ColumnGradients(dy, None), Needs(True, True, True)
            for rows, dx_rows, dscale_rows, _ in eager.logsumexp_gradients(block, row, empty_sums, drow, None, sums, needs):
                assert dx_rows is not None
                assert dscale_rows is not None
                dx[rows] += dx_rows
                dscale += dscale_rows.sum()
            if receive_dy is not None:
                dy += receive_dy()
            receive_dy = _pass_on(ranks, dy)
            if receive is not None:
                columns = receive()
        assert receive_dy is not None
        return dx * scale, receive_dy() * scale, dscale


class _Gather(torch.autograd.Function):
    """Gathers the tensors of all ranks. Backward sums the gradients of all ranks by an all-reduce, and returns its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def disco(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Computes the same loss as `clip_loss` over the default process group, for ranks with the same number of pairs."""
    images, texts = _Gather.apply(image), _Gather.apply(text)
    labels = len(image) * dist.get_rank() + torch.arange(len(image))
    rows = slice(int(labels[0]), int(labels[-1]) + 1)
    return (
        F.cross_entropy(scale * images[rows] @ texts.T, labels) + F.cross_entropy(scale * texts[rows] @ images.T, labels)
    ) / 2


def sigmoid_ring(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    with ring.use_route("ring"):
        return megabatch.siglip_loss(image, text, scale, BIAS, group=dist.group.WORLD)


def sigmoid_dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    loss = losses.open_clip_losses().SigLipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    value: Tensor = loss(image, text, scale, torch.tensor(BIAS))
    return value


def _ranks(x: Tensor) -> Ranks:
    return Ranks(x.device, dist.group.WORLD, "two rings")


def _pass_on(ranks: Ranks, tensor: Tensor) -> Any:
    """Starts sending to the next rank. Returns a function that waits for the tensor of the previous rank and returns it."""
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
    DISCO: partial(losses.leave_unchanged, disco),
    SIGMOID_DENSE: partial(losses.leave_unchanged, sigmoid_dense),
    SIGMOID_TILES: partial(losses.leave_unchanged, sigmoid_ring),
}
COLLECTIVES = (losses.VANILLA, losses.LOCAL, DISCO, SIGMOID_DENSE)  # systems whose bytes are not counted
BASELINES = {name: SIGMOID_DENSE if name in SIGMOID else losses.LOCAL for name in SYSTEMS}


MIB = 2**20
HEADINGS = ["ranks", "system", "peak MiB of a rank", "s, all ranks on these cores", "CPU s of all ranks", "× open_clip"]
HEADINGS += ["MiB sent by a rank", "loss error", "grad. error"]
LEGEND = (
    "Peak: resident memory in addition to the inputs, of the rank that needs most, including gradients. CPU s: CPU time of all "
    "ranks, without waiting. × open_clip: the CPU time divided by the CPU time of `open_clip local` on as many ranks or, for "
    "the sigmoid loss, of `sigmoid, open_clip`. Sent: forward and backward, without the small messages in which ranks agree. "
    "The bytes of other libraries' exchanges and of collectives are not counted. Errors: of the mean over ranks, relative to "
    "float64."
)
PANELS = (
    ("peak memory of a rank, MiB", "peak", MIB),
    ("CPU seconds of all ranks", "cpu_seconds", 1),
    ("MiB sent by a rank", "sent", MIB),
)


COLORS = {
    losses.VANILLA: plots.ORANGE,
    losses.LOCAL: plots.OCHRE,
    DISCO: plots.INK,
    TWO_RINGS: plots.BLUE,
    losses.BLOCKS: plots.VIOLET,
    SYNCHRONOUS: plots.GREY,
    GATHER: plots.MINT,
    losses.TILES: plots.GREEN,
    SIGMOID_DENSE: plots.OCHRE,
    SIGMOID_TILES: plots.GREEN,
}


def _systems(record: dict[str, Any]) -> list[str]:
    """Returns the systems of a record, in the order of the table."""
    measured = {r["system"] for r in record["results"]}
    return [name for name in ABOUT if name in measured]


def _title(record: dict[str, Any]) -> str:
    return f"CLIP loss over ranks, forward and backward, float32, {record['batch']:,} pairs in total, D = {record['width']}"


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    rows = []
    cpu_seconds_of = {(r["world"], r["system"]): r["cpu_seconds"] for r in record["results"]}
    for r in record["results"]:
        peak, sent = (None if r[key] is None else r[key] / MIB for key in ("peak", "sent"))
        seconds = f"{r['seconds']:.2f}" if r["status"] == OK else r["status"].split(":")[0]
        baseline = cpu_seconds_of.get((r["world"], BASELINES[r["system"]]))
        ratio = None if baseline is None or r["cpu_seconds"] is None else r["cpu_seconds"] / baseline
        cells = [r["world"], r["system"], cell(peak, ".0f"), seconds, cell(r["cpu_seconds"], ".2f")]
        cells += [cell(ratio, ".2f"), cell(sent, ".2f")]
        rows.append([*cells, cell(r["loss_error"], ".0e"), cell(r["gradient_error"], ".0e")])
    systems = "\n".join(f"- {system}: {ABOUT[system]}" for system in _systems(record))
    return paragraphs(TextTable(HEADINGS, rows, f"{_title(record)}.", LEGEND, names=(1,)).markdown(), systems)


def draw(record: dict[str, Any]) -> Any:
    """Draws memory, CPU time and sent bytes against the number of ranks."""
    figure, panels = plots.panels(_title(record), 3)
    for axes, (label, key, unit) in zip(panels, PANELS, strict=True):
        for name in _systems(record):
            points = [(r["world"], r[key] / unit) for r in record["results"] if r["system"] == name and r[key]]
            width, style = 2.4 if name in (losses.TILES, SIGMOID_TILES) else 1.2, "--" if name in SIGMOID else "-"
            plots.line(axes, points, name, COLORS[name], linewidth=width, linestyle=style)
        axes.set_ylabel(label)
        plots.batch_axis(axes, [r["world"] for r in record["results"]], "ranks")
        plots.log_axis(axes)
        plots.label_lines(axes)
    return figure


def truth(batch: int, width: int) -> ClipTruth:
    """Returns the reference of the CLIP loss. Runs in a fresh process."""
    return truth_of(*pairs(batch, width))


def sigmoid_truth(batch: int, width: int) -> ClipTruth:
    """Returns the reference of the sigmoid loss. Runs in a fresh process."""
    image, text, log_scale = (tensor.detach() for tensor in pairs(batch, width))
    return siglip_truth(image, text, log_scale.exp().item(), sample_rows(batch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    number_options(parser, worlds=(WORLDS, "numbers of ranks"), batch=(BATCH, "pairs of all ranks together"))
    number_options(parser, width=(WIDTH, "embedding dimension"), repeats=(3, "number of timed steps; the fastest counts"))
    parser.add_argument("--systems", nargs="+", choices=list(ABOUT), default=list(ABOUT), metavar="S", help=", ".join(ABOUT))
    arguments(parser, "ring")
    args = parser.parse_args()
    record = Record.of_script("ring", args, batch=args.batch, width=args.width)
    record.say("float64 reference")
    right = {sigmoid: fresh_process(sigmoid_truth if sigmoid else truth, args.batch, args.width) for sigmoid in (False, True)}
    for world in args.worlds:
        for name in args.systems:
            record.say(f"{world} ranks: {name}")
            reference = right[name in SIGMOID]
            (result,) = losses.measure_levels({name: SYSTEMS[name]}, world, args.batch, args.width, args.repeats, reference)
            if name in COLLECTIVES:
                result.sent = None
            record["results"].append({"world": world, **asdict(result)})
            record.save()
    record.finish(markdown, draw)
    return 0 if all(result["status"] == OK for result in record["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
