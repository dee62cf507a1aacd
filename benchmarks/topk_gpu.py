"""Time and memory of exact top-k: megabatch, `torch.topk` on chunks of products, FAISS, and the bare product.

    python benchmarks/topk_gpu.py                                                              on a GPU, bf16
    python benchmarks/topk_gpu.py --cpu --sizes 131072x256x16 --rows 2048 --name topk_cpu      on a CPU, float32

All systems get the same embeddings and take turns in one process. Before a system is timed, the columns found for sampled
rows are compared with float64. Rows are independent, so the time of many rows is extrapolated from `--rows` of them. "Bare
product" is x·yᵀ by the library (cuBLAS, on a CPU MKL) in strips, without any top-k.

Writes a JSON file; `topk_gpu_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from record import Record, arguments, device_of
from timing import clear, failure, milliseconds, take_turns
from topk_gpu_report import BARE, OURS, markdown, report
from torch import Tensor

import megabatch as mb
from megabatch.bench.measure import peak_memory
from megabatch.tiles import kernel_plan

SIZES = ("131072x512x16", "1048576x512x16", "1048576x512x128", "1048576x128x16", "131072x1024x1024")  # columns, width, k
CHUNKS, FAISS = "torch.topk on chunks", "faiss"
SECONDS_A_ROUND = 0.1
Search = Callable[[], tuple[Tensor, Tensor]]  # values, indices


class Size(NamedTuple):
    """M columns of width D, k of them for each row."""

    M: int
    D: int
    k: int


def embeddings(rows: int, size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Unit vectors; every row is near one of the columns."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    y = F.normalize(torch.randn(size.M, size.D, device=device, generator=generator), dim=1).to(dtype)
    near = y[torch.randint(size.M, (rows,), device=device, generator=generator)].float()
    x = F.normalize(near + 0.1 * torch.randn(rows, size.D, device=device, generator=generator), dim=1)
    return x.to(dtype), y


def systems(x: Tensor, y: Tensor, k: int, backend: str) -> dict[str, Callable[[], Search]]:
    """How to build each; an ImportError says that it is not installed."""

    def ours() -> Search:
        return lambda: mb.pairwise_topk(x, y, k, backend=backend)

    def chunks() -> Search:
        def search() -> tuple[Tensor, Tensor]:
            found = [(x[i : i + 1024] @ y.T).topk(k) for i in range(0, len(x), 1024)]
            return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])

        return search

    def faiss() -> Search:
        import faiss  # type: ignore[import-not-found]

        index = faiss.IndexFlatIP(y.shape[1])
        if x.is_cuda:
            index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
        index.add(y.float().cpu().numpy())

        def search() -> tuple[Tensor, Tensor]:
            values, indices = index.search(x.float().cpu().numpy(), k)
            return torch.from_numpy(values).to(x.device), torch.from_numpy(indices).to(x.device)

        return search

    return {OURS: ours, CHUNKS: chunks, FAISS: faiss}


def bare_product(x: Tensor, y: Tensor) -> Callable[[], None]:
    columns = min(len(y), 16384)
    out = torch.empty(min(len(x), 8192), columns, dtype=x.dtype, device=x.device)

    def run() -> None:
        for i in range(0, len(x) - len(out) + 1, len(out)):
            for j in range(0, len(y) - columns + 1, columns):
                torch.mm(x[i : i + len(out)], y[j : j + columns].T, out=out)

    return run


class Truth:
    """The k largest products of sampled rows in float64."""

    def __init__(self, x: Tensor, y: Tensor, k: int) -> None:
        self.sample = torch.linspace(0, len(x) - 1, 8, device=x.device).long()
        self.products = torch.cat([x[self.sample].double() @ part.double().T for part in y.split(2**18)], 1)
        self.values = self.products.topk(k).values

    def error(self, indices: Tensor) -> float:
        """How far the products of the columns found are from the best ones; and every column has to be another one."""
        chosen = indices[self.sample]
        if chosen.min() < 0 or any(len(row.unique()) < len(row) for row in chosen):
            return float("inf")
        return (self.products.gather(1, chosen).sort(1, descending=True).values - self.values).abs().max().item()


class Run:
    """The sizes one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, "cpu" if args.cpu else device_of(args)
        self.backend = "triton" if self.device == "cuda" else "eager"
        self.record = Record("topk_gpu", args, args.seconds, device=self.device, tuned=[])

    def measure(self, size: Size) -> None:
        """All systems at one size."""
        rows = min(self.args.rows, size.M)
        x, y = embeddings(rows, size, self.device)
        truth = Truth(x, y, size.k)
        results: list[dict[str, Any]] = []
        works: dict[str, Callable[[], Any]] = {}
        for name, build in systems(x, y, size.k, self.backend).items():
            result: dict[str, Any] = {**size._asdict(), "rows": rows, "system": name, "status": "ok"}
            results.append(result)
            try:
                search = build()
                search()  # compiles
                (_, indices), result["peak_bytes"] = peak_memory(search, self.device)
                result["error"] = truth.error(indices)
                # Rounding may exchange columns whose products differ by less: in float32 for us, in bf16 for chunks.
                tolerance = 1e-5 if name == OURS else 1e-2
                result["status"] = "ok" if result["error"] <= tolerance else "WRONG"
                if result["status"] == "ok":
                    works[name] = search
            except Exception as error:  # a library may fail in any way; the others are still measured
                result["status"] = failure(error)
            clear(self.device)
        rounds, seconds = (1, 0.005) if self.args.tiny else (self.args.rounds, SECONDS_A_ROUND)
        times = take_turns({**works, BARE: bare_product(x, y)}, self.device, rounds, seconds)
        results.append({**size._asdict(), "rows": rows, "system": BARE, "status": "ok"})
        for result in results:
            if result["system"] in times:
                result["ms"] = times[result["system"]]
        self.record["results"].extend(results)

    def tune(self, size: Size) -> None:
        """Other groups of columns, other rows of a launch and other kernels; and where the time goes."""
        x, y = embeddings(min(self.args.rows, size.M), size, self.device)
        truth = Truth(x, y, size.k)
        group = kernel_plan.topk_group(size.M, size.D, size.k)
        tries: dict[str, dict[str, Any]] = {
            f"products stored, groups of {width} in panels of {panel}": {
                "topk_group": lambda M, D, k: None,
                "TOPK_STORED_GROUP": width,
                "TOPK_STORED_PANEL": panel,
            }
            for width, panel in ((8, 32), (8, 64), (8, 16), (4, 16))[: 1 if group else 4]
        }
        for width, mebibytes in product((8, 16, 32), (256, 512)) if group else ():
            tries[f"groups of {width}, {mebibytes} MiB of maxima"] = {
                "topk_group": lambda M, D, k, width=width: width,
                "_TOPK_BYTES": mebibytes * 2**20,
            }
        for name, changes in tries.items():
            if self.record.left() <= 0:
                break
            with patch.multiple(kernel_plan, **changes):
                try:
                    error = truth.error(mb.pairwise_topk(x, y, size.k, backend=self.backend).indices)
                    work = partial(mb.pairwise_topk, x, y, size.k, backend=self.backend)
                    ms = milliseconds(work, self.device, SECONDS_A_ROUND)
                    self.record["tuned"].append({**size._asdict(), "change": name, "ms": ms, "error": error})
                    self.record.say(f"{size.M}x{size.D}x{size.k}, {name}: {ms:.1f} ms, error {error:.0e}")
                    if self.backend == "triton":
                        self.parts(size, x, y)
                except Exception as failed:
                    self.record.say(f"{name}: {failure(failed)}")
            self.record.save()

    def parts(self, size: Size, x: Tensor, y: Tensor) -> None:
        """The kernels one by one, on the first strip; times are for all strips."""
        from megabatch.tiles import triton_topk
        from megabatch.tiles.block import Block
        from megabatch.tiles.topk import Best
        from megabatch.tiles.triton_operands import similarity_operands

        block = Block.of(x, y, None, "bfloat16" if self.device == "cuda" else "float32")
        operands = similarity_operands(block)
        group = kernel_plan.topk_group(block.M, block.D, size.k)
        strip = kernel_plan.topk_strip(block.N, block.M, group)
        rows, columns = slice(0, min(block.N, strip.rows)), slice(0, min(block.M, strip.columns))
        strips = block.N / rows.stop * block.M / columns.stop
        width, store = group or kernel_plan.TOPK_STORED_GROUP, group is None
        groups, panels, products = triton_topk._maxima(block, operands, rows, columns, width, store=store)
        chosen = triton_topk._best_groups(groups, panels, size.k)
        works: dict[str, Callable[[], Any]] = {
            "maxima": lambda: triton_topk._maxima(block, operands, rows, columns, width, store=store),
            "choice of groups": lambda: triton_topk._best_groups(groups, panels, size.k),
        }
        if products is None:
            products = triton_topk._products(block, operands, rows, columns, chosen, width)
            works["products"] = lambda: triton_topk._products(block, operands, rows, columns, chosen, width)
        found = Best.none(rows.stop, size.k, products)
        works["choice of columns"] = lambda: triton_topk._choose(*found, products, chosen, width, gathered=not store)
        parts = {name: strips * milliseconds(work, self.device, 0.02) for name, work in works.items()}
        self.record["tuned"][-1]["parts"] = parts
        self.record.say("    of it " + ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items()))

    def run(self) -> None:
        """Everything, until the time is up."""
        for text in self.args.sizes:
            size = Size(*map(int, text.split("x")))
            if self.record.left() <= 0:
                self.record["results"].append({**size._asdict(), "rows": 0, "system": OURS, "status": "no time left"})
                continue
            self.record.say(f"{size.M} columns, width {size.D}, k = {size.k}")
            self.measure(size)
            clear(self.device)
            self.record.save()
        for text in self.args.tune:
            self.tune(Size(*map(int, text.split("x"))))
            clear(self.device)
        self.record.save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in float32, with the eager backend")
    parser.add_argument("--sizes", nargs="*", default=None, metavar="MxDxK", help=f"({' '.join(SIZES)})")
    parser.add_argument("--rows", type=int, default=65536, help="rows that are searched for; M at most (65536)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system; the median is kept (3)")
    parser.add_argument("--tune", nargs="*", default=[], metavar="MxDxK", help="compare groups and kernels at these sizes")
    arguments(parser, "topk_gpu", 150)
    args = parser.parse_args()
    if args.sizes is None:
        args.sizes = ["300x16x5", "200x8x64"] if args.tiny else SIZES
    return args


def main() -> int:
    run = Run(parse())
    run.run()
    report(run.record.path)
    print(markdown(run.record.contents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
