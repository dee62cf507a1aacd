"""How long does it take to group a million pairs into groups of hard negatives? Each phase of `megabatch mine --batches`.

    python benchmarks/mining_gpu.py                         on a GPU
    python benchmarks/mining_gpu.py --sizes 4194304x512     four million pairs

The pairs are unit vectors around random centers, so that each pair has hard negatives. Before a size is timed, the neighbors of
sampled pairs are compared with float64. The embeddings are on the device at the beginning. Embedding the data is excluded,
because it depends on the model. The share is the part of all neighbors that are in the group of their pair, and the
baseline is the share of random groups. The order is the order of the samples of one epoch, with whole groups in batches.
"""

import argparse
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch_train.bench.measure import (
    LATE,
    OK,
    WRONG,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    now,
    number_options,
    paragraphs,
    peak_memory,
)
from megabatch_train.data.batches import order_groups
from megabatch_train.display.tables import TextTable, cell, gib
from megabatch_train.evaluation.embedding import Choice
from megabatch_train.evaluation.grouping import find_neighbors, group_pairs, share_inside

SIZES, TINY = ("1048576x384", "1048576x512"), ("4000x16",)  # pairs, dim
PAIRS_OF_A_CENTER = 256
SAMPLED = 64  # pairs whose neighbors are compared with float64
BATCH = 16384  # pairs in a batch, for the order


class Size(NamedTuple):
    """N pairs with D dimensions."""

    N: int
    D: int


def embeddings(size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Returns pairs of unit vectors around random centers."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(count: int) -> Tensor:
        return F.normalize(torch.randn(count, size.D, device=device, generator=generator), dim=1)

    centers = noise(-(-size.N // PAIRS_OF_A_CENTER))
    pairs = centers[torch.randint(len(centers), (size.N,), device=device, generator=generator)] + 0.8 * noise(size.N)
    kind = torch.float16 if device == "cuda" else torch.float32
    first, second = (F.normalize(pairs + 0.3 * noise(size.N), dim=1).to(kind) for _ in range(2))
    return first, second


def error_of(first: Tensor, second: Tensor, neighbors: Tensor) -> float:
    """Returns by how much the similarity of a neighbor of a sampled pair is less than that of the true neighbor, at most."""
    rows = torch.arange(0, len(first), max(1, len(first) // SAMPLED))[:SAMPLED]
    scores = torch.cat([first[row : row + 1].double() @ second.double().T for row in rows.tolist()])
    scores[torch.arange(len(rows)), rows] = -torch.inf
    best = scores.topk(neighbors.shape[1], dim=1).values
    return float((best - scores.gather(1, neighbors[rows].to(scores.device))).abs().max())


def measure(size: Size, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Returns the seconds of each phase, the error and the share of the neighbors in groups."""
    target, seconds = torch.device(device), {}
    first, second = embeddings(size, device)
    choice = Choice(args.neighbors)
    few = slice(0, min(size.N, 20_000))
    warm = find_neighbors(first[few], second[few], choice, device=target)
    group_pairs(warm, args.group_size, device=target)  # compiles the kernels

    def search() -> Tensor:
        return find_neighbors(first, second, choice, device=target)

    begin = now(device)
    neighbors, peak = peak_memory(search, device)
    seconds["neighbors"] = now(device) - begin
    begin = now(device)
    groups = group_pairs(neighbors, args.group_size, device=target)
    seconds["groups"] = now(device) - begin
    begin = now(device)
    order = order_groups(groups, min(BATCH, size.N), torch.Generator().manual_seed(0))
    seconds["order"] = now(device) - begin
    error = error_of(first, second, neighbors)
    sizes = torch.bincount(groups)
    is_balanced = int((sizes == args.group_size).sum()) == size.N // args.group_size
    is_complete = len(torch.unique(order)) == size.N
    tolerance = size.D * 2**-23  # the products of unit vectors are summed in float32
    share = share_inside(neighbors, groups)
    baseline = share_inside(neighbors, groups[torch.randperm(size.N, generator=torch.Generator().manual_seed(1))])
    is_right = is_balanced and is_complete and error <= tolerance and share > baseline
    return {
        **size._asdict(),
        "neighbors": args.neighbors,
        "group_size": args.group_size,
        "seconds": seconds,
        "total": sum(seconds.values()),
        "peak_bytes": peak,
        "error": error,
        "share": share,
        "baseline": baseline,
        "status": OK if is_right else WRONG,
    }


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    rows = []
    for r in record["results"]:
        times = [cell(r.get("seconds", {}).get(name), ".2f") for name in ("neighbors", "groups", "order")]
        shares = [cell(r.get(name), ".1%") for name in ("share", "baseline")]
        total = cell(r.get("total"), ".2f") if r["status"] == OK else r["status"]
        rows.append([f"{r['N']:,}", r["D"], *times, total, gib(r.get("peak_bytes")), cell(r.get("error"), ".0e"), *shares])
    options = f"{record['results'][0].get('neighbors')} neighbors, groups of {record['results'][0].get('group_size')}"
    names = ["pairs", "D", "neighbors, s", "groups, s", "order, s", "total, s", "extra GiB", "error", "share", "random"]
    return paragraphs(f"Mining groups of pairs on {chip(record)}: {options}.", TextTable(names, rows).markdown())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", metavar="NxD", help=f"pairs and dim (default: {' '.join(SIZES)})")
    number_options(parser, neighbors=(32, "hard negatives of each pair"), group_size=(32, "pairs in a group"))
    arguments(parser, "mining_gpu", 180)
    args = parser.parse_args()
    device = device_of(args)
    record = Record.of_script("mining_gpu", args, args.seconds, device=device)
    for text in args.sizes or (TINY if args.tiny else SIZES):
        size = Size(*map(int, text.split("x")))
        if record.seconds_left() <= 0:
            record["results"].append({**size._asdict(), "status": LATE})
            continue
        record.say(f"{size.N:,} pairs, D = {size.D}")
        record["results"].append(measure(size, args, device))
        clear(device)
        record.save()
    record.finish(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
