"""Measures time and memory of exact top-k: megabatch, `torch.topk` on chunks of inner products, FAISS, and the bare product.

    python benchmarks/topk_gpu.py                                                              on a GPU, bf16
    python benchmarks/topk_gpu.py --cpu --sizes 131072x256x16 --rows 2048 --name topk_cpu      on a CPU, float32

All systems get the same embeddings and take turns in one process. Before a system is timed, its columns for sampled rows are
compared with float64. Rows are independent, so the time of many rows is extrapolated from `--rows` of them. "Bare product" is
the matmul x·yᵀ in strips by cuBLAS, or by MKL on a CPU, without top-k.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch_train.bench.measure import (
    LATE,
    OK,
    ROUNDS_OPTION,
    WRONG,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    failure,
    groups,
    number_options,
    paragraphs,
    peak_memory,
    take_turns,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio

SIZES = ("131072x512x16", "1048576x512x16", "1048576x512x128", "1048576x128x16", "131072x1024x1024")  # columns, dim, k
OURS, BARE, CHUNKS, FAISS = "megabatch", "bare product", "torch.topk on chunks", "faiss"
SECONDS_A_ROUND = 0.1
Search = Callable[[], tuple[Tensor, Tensor]]  # values, indices


class Size(NamedTuple):
    """M columns with D dimensions. Each row has k results."""

    M: int
    D: int
    k: int


def embeddings(rows: int, size: Size, device: str) -> tuple[Tensor, Tensor]:
    """Returns unit vectors. Every row is near one of the columns."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    y = F.normalize(torch.randn(size.M, size.D, device=device, generator=generator), dim=1).to(dtype)
    near = y[torch.randint(size.M, (rows,), device=device, generator=generator)].float()
    x = F.normalize(near + 0.1 * torch.randn(rows, size.D, device=device, generator=generator), dim=1)
    return x.to(dtype), y


def systems(x: Tensor, y: Tensor, k: int, backend: str) -> dict[str, Callable[[], Search]]:
    """Returns a function that builds each system. It raises an ImportError if the system is not installed."""

    def ours() -> Search:
        return lambda: mb.pairwise_topk(x, y, k, backend=backend)

    def chunks() -> Search:
        def search() -> tuple[Tensor, Tensor]:
            parts = [(x[i : i + 1024] @ y.T).topk(k) for i in range(0, len(x), 1024)]
            return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])

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
    """The k largest inner products of sampled rows in float64."""

    def __init__(self, x: Tensor, y: Tensor, k: int) -> None:
        self.sample = torch.linspace(0, len(x) - 1, 8, device=x.device).long()
        self.products = torch.cat([x[self.sample].double() @ part.double().T for part in y.split(2**18)], 1)
        self.values = self.products.topk(k).values

    def error(self, indices: Tensor) -> float:
        """Returns the error of the inner products of these columns. It is infinite if a column is invalid or repeated."""
        columns = indices[self.sample]
        if columns.min() < 0 or any(len(row.unique()) < len(row) for row in columns):
            return float("inf")
        return (self.products.gather(1, columns).sort(1, descending=True).values - self.values).abs().max().item()


class Run:
    """Measures the sizes one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, "cpu" if args.cpu else device_of(args)
        self.backend = "triton" if self.device == "cuda" else "eager"
        self.record = Record.of_script("topk_gpu", args, args.seconds, device=self.device)

    def measure(self, size: Size) -> None:
        """Measures all systems at one size."""
        rows = min(self.args.rows, size.M)
        x, y = embeddings(rows, size, self.device)
        truth = Truth(x, y, size.k)
        results: list[dict[str, Any]] = []
        works: dict[str, Callable[[], Any]] = {}
        for name, build in systems(x, y, size.k, self.backend).items():
            result: dict[str, Any] = {**size._asdict(), "rows": rows, "system": name, "status": OK}
            results.append(result)
            try:
                search = build()
                search()  # compiles
                (_, indices), result["peak_bytes"] = peak_memory(search, self.device)
                result["error"] = truth.error(indices)
                # Rounding can exchange columns with a smaller difference. megabatch rounds to float32, chunks to bf16.
                tolerance = 1e-5 if name == OURS else 1e-2
                result["status"] = OK if result["error"] <= tolerance else WRONG
                if result["status"] == OK:
                    works[name] = search
            except Exception as error:  # a library can fail in any way; the others are still measured
                result["status"] = failure(error)
            clear(self.device)
        rounds, seconds = (1, 0.005) if self.args.tiny else (self.args.rounds, SECONDS_A_ROUND)
        times = take_turns({**works, BARE: bare_product(x, y)}, self.device, rounds, seconds)
        results.append({**size._asdict(), "rows": rows, "system": BARE, "status": OK})
        for result in results:
            if result["system"] in times:
                result["ms"] = times[result["system"]]
        self.record["results"].extend(results)

    def run(self) -> None:
        """Measures all sizes until the time limit."""
        for text in self.args.sizes:
            size = Size(*map(int, text.split("x")))
            if self.record.seconds_left() <= 0:
                self.record["results"].append({**size._asdict(), "rows": 0, "system": OURS, "status": LATE})
                continue
            self.record.say(f"{size.M} columns, D = {size.D}, k = {size.k}")
            self.measure(size)
            clear(self.device)
            self.record.save()


LEGEND = (
    "Bare ÷ time: the time of the bare product ÷ the time of the system. × megabatch: multiples of the time of megabatch. All "
    "rows: extrapolated to as many rows as columns. Extra GiB: peak memory in addition to the inputs. Error: of the inner "
    "products of the results, compared with float64."
)
HEADINGS = ["columns", "D", "k", "rows", "system", "ms", "TFLOP/s"]
HEADINGS += ["bare ÷ time", "× megabatch", "all rows, s", "extra GiB", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    rows = []
    for group in groups(record["results"], "M", "D", "k").values():
        bare, ours = (next((r.get("ms") for r in group if r["system"] == name), None) for name in (BARE, OURS))
        for r in group:
            ms = r.get("ms")
            cells = [f"{r['M']:,}", r["D"], r["k"], f"{r['rows']:,}", r["system"], cell(ms, ".1f") or r["status"]]
            cells += [ratio(2 * r["rows"] * r["M"] * r["D"] / 1e9, ms, ".3g"), ratio(bare, ms, ".3f"), ratio(ms, ours)]
            all_rows = None if ms is None or not r["rows"] else ms * r["M"] / r["rows"] / 1000
            rows.append([*cells, cell(all_rows, ".2f"), gib(r.get("peak_bytes")), cell(r.get("error"), ".0e")])
    return paragraphs(
        f"The k largest inner products of each row, on a {'CPU, float32' if record.get('device') == 'cpu' else 'GPU, bf16'}.",
        TextTable(HEADINGS, rows, names=(4,)).markdown(),
        LEGEND,
    )


def draw(record: dict[str, Any]) -> Any:
    """Draws the time of each system in multiples of the time of the bare product."""
    sizes = list(groups(record["results"], "M", "D", "k").items())
    figure, panels = plots.panels(f"Top-k, time ÷ time of the bare product; {chip(record)}", len(sizes), height=1.4)
    for axes, (size, group) in zip(panels, sizes, strict=True):
        bare = next((r.get("ms") for r in group if r["system"] == BARE), None)
        timed = [r for r in group if r.get("ms") and bare]
        colors = [{OURS: plots.GREEN, BARE: plots.GREY}.get(r["system"], plots.ORANGE) for r in timed]
        plots.bars(axes, [(r["system"], r["ms"] / bare) for r in timed], "%.2f", colors)
        axes.set_title("{:,} columns, D = {}, k = {}".format(*size), fontsize=9)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, in float32, with the eager backend")
    parser.add_argument(
        "--sizes", nargs="*", default=None, metavar="MxDxK", help=f"columns, dim and k (default: {' '.join(SIZES)})"
    )
    number_options(parser, rows=(65536, "number of rows, at most as many as columns"), rounds=ROUNDS_OPTION)
    arguments(parser, "topk_gpu", 150)
    args = parser.parse_args()
    if args.sizes is None:
        args.sizes = ["300x16x5", "200x8x64"] if args.tiny else SIZES
    run = Run(args)
    run.run()
    run.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
