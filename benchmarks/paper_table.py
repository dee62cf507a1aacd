"""Compares `megabatch plan` with table 2 of the paper of Inf-CL (arXiv 2410.17243): ViT-L/14 on 8 and 32 A800 of 80 GB.

The script needs open_clip for the shape of the model. It needs no GPU. It writes paper_table.md.
"""

import argparse
from pathlib import Path

from megabatch_train.display.tables import TextTable
from megabatch_train.planning import gpus, models, step
from megabatch_train.planning.costs import INF_CL, LOCAL, MEGABATCH, VANILLA, loss_bytes
from megabatch_train.planning.step import HOST, REPLAY

GIB, K = 2**30, 1024
CHUNK = 128  # as in the paper
LOSS = {  # GB of loss memory on 8 GPUs, by thousands of pairs
    VANILLA: {32: 16.67, 64: 66.11},
    LOCAL: {32: 2.27, 64: 8.63, 128: 33.64},
    INF_CL: {32: 0.18, 64: 0.36, 128: 0.72, 256: 1.45, 1024: 6.53, 4096: 26.12},
}
LARGEST = {
    (8, LOCAL): 184,
    (32, LOCAL): 368,
    (8, INF_CL): 4096,
    (32, INF_CL): 12288,
}  # thousands of pairs, with inputs on the host
SECONDS = {32: 25.0, 64: 49.4, 128: 98.3, 256: 200.3}  # seconds per iteration of Inf-CL on 8 GPUs, by thousands of pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent / "results", help="folder for the result"
    )
    args = parser.parse_args()
    gpu = gpus.find("A800-80GB")
    eight = step.make(models.model("open_clip:ViT-L-14"), step.Setup(gpu, 8), CHUNK)
    plans = {8: eight, 32: step.on(eight, 4, 8)}
    tables = (loss_table(eight), largest_table(plans), time_table(eight))
    text = "\n\n".join((__doc__.split("\n\n")[0], *(table.markdown() for table in tables))) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "paper_table.md").write_text(text)
    print(text)
    return 0


def loss_table(plan: step.Plan) -> TextTable:
    rows = []
    for thousands in LOSS[INF_CL]:
        cells = []
        for system in step.SYSTEMS:
            paper = LOSS.get(system, {}).get(thousands)
            size = loss_bytes(system, plan.shape(thousands * K)) / GIB
            fits = plan.peak_with_caching(thousands * K, system, REPLAY).total <= plan.setup.gpu.usable
            note = f" ({paper})" if paper else "" if system == MEGABATCH else " (out of memory)"
            cells.append((f"{size:.2f}" if fits else "out of memory") + note)
        rows.append([f"{thousands}k", *cells])
    title = "Loss memory of a GPU in GiB, on 8 GPUs (in brackets: the paper):"
    return TextTable(["pairs", *step.SYSTEMS], rows, title, names=())


def largest_table(plans: dict[int, step.Plan]) -> TextTable:
    rows = []
    for ranks, plan in plans.items():
        cells = []
        for system in step.SYSTEMS:
            paper = LARGEST.get((ranks, system))
            size = plan.largest(system, REPLAY if system == MEGABATCH else HOST) // K
            cells.append(f"{size:,}k" + (f" ({paper:,}k)" if paper else ""))
        rows.append([str(ranks), *cells])
    title = "Largest batch in thousands of pairs, with replay for megabatch, else inputs on the host (in brackets: the paper):"
    return TextTable(["GPUs", *step.SYSTEMS], rows, title, names=())


def time_table(plan: step.Plan) -> TextTable:
    rows = []
    for thousands, paper in SECONDS.items():
        inf_cl, ours = (plan.seconds(thousands * K, system).total for system in (INF_CL, MEGABATCH))
        rows.append([f"{thousands}k", f"{inf_cl:.1f}", str(paper), f"{ours:.1f}"])
    headings = ["pairs", "Inf-CL, planned", "Inf-CL, paper", "megabatch, planned"]
    return TextTable(headings, rows, "Seconds per iteration, on 8 GPUs:", names=())


if __name__ == "__main__":
    raise SystemExit(main())
