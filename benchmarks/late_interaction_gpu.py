"""Measures time and memory of late interaction on a GPU, and compares megabatch with other projects and the bare products.

All systems get the same bf16 vectors and take turns in one process. Before a system is timed, its gradients of sampled queries
and documents are compared with float64. So are the logsumexps of megabatch, and two of its runs must be bitwise identical.
"Bare products" are the four matmuls of all query vectors with all document vectors: the inner products, the inner
products again, and both gradients. cuBLAS computes them in strips. "Chunked PyTorch" is the method of PyLate and
sentence-transformers, which computes the scores of 32 queries at a time. For more than 2^41 inner products, a step of megabatch
is timed only once, and the bare products are extrapolated.

Up to 1,024 pairs, megabatch is also measured without its dense path ("two passes"). `--variants` names sizes at which other
tiles of the dense path are measured. `--scores` measures scores without gradients, and the search of the best documents.
The last table has the times of all systems in one row for each size.

Other projects are measured if they are installed. `--peers FOLDER` names a folder with packages (late_interaction_kernels,
flash_maxsim).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch import dispatch
from megabatch.kernels import plan
from megabatch.kernels.plan import KernelTile
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
    draw_systems,
    failure,
    groups,
    now,
    number_options,
    paragraphs,
    peak_memory,
    take_turns,
    with_gradients,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio

SIZES = ("32x32x128", "64x32x128", "128x32x128", "256x32x128", "32x32x1024", "256x32x1024", "32x128x2048", "256x128x2048")
SIZES += (
    "32x128x8192",
    "128x128x8192",
    "1024x32x128",
    "4096x32x128",
    "1024x32x512",
    "4096x32x512",
    "16384x32x128",
    "1024x128x1024",
)
D, CHUNK = 128, 32
LARGE = 2**41  # inner products
TUNED_SMALL = 2**36  # above this number a system first runs 64 pairs, because autotuning takes minutes at full size
SCORED, SCORED_TINY = ((1, 20000), (64, 20000), (1024, 20000)), ((3, 5),)  # queries and documents of `--scores`
TOLERANCE = 0.02  # relative error of gradients; bf16 softmax weights and results explain 0.005
SECONDS_A_ROUND = 0.06
CHUNKED, LIK, FLASH = "chunked PyTorch", "late-interaction-kernels", "flash-maxsim"
MOST = {CHUNKED: 4096, LIK: 4096, FLASH: 4096}  # most pairs; with more, a step takes seconds or raises an illegal memory access
OURS, TWO_PASSES, BARE = "megabatch", "megabatch, two passes", "bare products"
LONG = 2048  # vectors of a document from which chunked PyTorch is not tried, because it stores all dot products of a chunk
# Other tiles of the dense path: the names in `kernels.plan`, and the tiles.
VARIANTS: dict[str, dict[str, KernelTile]] = {
    "gather 8": {"MAXSIM_SMALL_GATHER": KernelTile(rows=8, columns=1, dims=128, warps=2, stages=3)},
    "gather 32": {"MAXSIM_SMALL_GATHER": KernelTile(rows=32, columns=1, dims=128, warps=4, stages=3)},
    "listed 64×128": {"_MAXSIM_SMALL_LISTED": KernelTile(rows=64, columns=128, dims=128, warps=4, stages=3)},
    "listed 128×64": {"_MAXSIM_SMALL_LISTED": KernelTile(rows=128, columns=64, dims=128, warps=8, stages=3)},
    "listed 64×32": {"_MAXSIM_SMALL_LISTED": KernelTile(rows=64, columns=32, dims=128, warps=4, stages=4)},
    "scores 128×128": {"_MAXSIM": KernelTile(rows=128, columns=128, dims=128, warps=4, stages=3)},
    "scan 4096": {"MAXSIM_SCAN": KernelTile(rows=1, columns=4096, dims=1, warps=8, stages=2)},
}
Step = Callable[[], tuple[Tensor, ...]]  # loss, dquery, ddocument


class Size(NamedTuple):
    """B pairs of a query with Lq vectors and a document with Ld vectors."""

    B: int
    Lq: int
    Ld: int

    def vectors(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns unit vectors. A document begins with vectors near its query, as in a model that has begun to learn."""
        generator = torch.Generator(device).manual_seed(0)
        random = [torch.randn(self.B, L, D, device=device, generator=generator) for L in (self.Lq, self.Ld)]
        shared = min(self.Lq, self.Ld)
        random[1][:, :shared] += 0.5 * random[0][:, :shared]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        query, document = (F.normalize(part, dim=-1).to(dtype).requires_grad_() for part in random)
        return query, document


def scale_of(query: Tensor) -> float:  # (B, Lq, D)
    """Returns a scale for which no loss is zero, so that gradients can be compared. Longer queries have larger scores."""
    return min(1.0, 32 / query.shape[1])


def systems(query: Tensor, document: Tensor, backend: str) -> dict[str, Callable[[], Step]]:
    """Returns a function that builds each system. It raises an ImportError if the system is not installed."""
    labels, scale = torch.arange(len(query), device=query.device), scale_of(query)

    def ours() -> Step:
        return partial(with_gradients, partial(mb.late_interaction_loss, scale=scale, backend=backend), (query, document))

    def chunked() -> Step:
        def step() -> tuple[Tensor, ...]:
            leaves = [part.detach().requires_grad_() for part in (query, document)]
            total = torch.zeros((), device=query.device)
            for first in range(0, len(query), CHUNK):
                rows = slice(first, first + CHUNK)
                scores = torch.einsum("ash,bth->abst", leaves[0][rows], leaves[1]).max(-1).values.sum(-1, dtype=torch.float32)
                loss = F.cross_entropy(scale * scores, labels[rows], reduction="sum") / len(query)
                loss.backward()  # as in these libraries, so that only one chunk is in memory
                total += loss.detach()
            return total, *(leaf.grad for leaf in leaves)

        return step

    def kernels() -> Step:
        from late_interaction_kernels.autograd import maxsim

        return partial(with_gradients, lambda q, d: F.cross_entropy(scale * maxsim(q, d), labels), (query, document))

    def flash() -> Step:
        from flash_maxsim import flash_maxsim_batched_train

        def loss(query: Tensor, document: Tensor) -> Tensor:
            return F.cross_entropy(scale * flash_maxsim_batched_train(query, document, shared_docs=True), labels)

        return partial(with_gradients, loss, (query, document))

    def two_passes() -> Step:
        step = ours()

        def run() -> tuple[Tensor, ...]:
            with dispatch.override(late_triton=0):
                return step()

        return run

    found = {OURS: ours, CHUNKED: chunked, LIK: kernels, FLASH: flash}
    return found if len(query) > dispatch.limits().late_triton else {**found, TWO_PASSES: two_passes}


@contextmanager
def use_tiles(tiles: dict[str, KernelTile]) -> Iterator[None]:
    """Replaces tiles inside a `with` block."""
    before = {name: getattr(plan, name) for name in tiles}
    try:
        for name, tile in tiles.items():
            setattr(plan, name, tile)
        yield
    finally:
        for name, tile in before.items():
            setattr(plan, name, tile)


def variants(query: Tensor, document: Tensor, backend: str) -> dict[str, Callable[[], Step]]:
    """Returns functions like those of `systems`, for other tiles of megabatch."""

    def with_tiles(tiles: dict[str, KernelTile]) -> Step:
        step = systems(query, document, backend)[OURS]()

        def run() -> tuple[Tensor, ...]:
            with use_tiles(tiles):
                return step()

        return run

    return {f"{OURS}, {name}": partial(with_tiles, tiles) for name, tiles in VARIANTS.items()}


@torch.no_grad()
def scores_of(query: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:  # (n, Lq, D), (m, Ld, D) → (n, m), (n, Lq, m)
    """Returns the scores and the argmax indices in float64, some documents at a time."""
    parts = []
    for some in document.split(max(1, 2**25 // (query.shape[0] * query.shape[1] * document.shape[1]))):
        products = torch.einsum("itd,jud->itju", query.double(), some.double())
        largest, argmax = products.max(3)
        parts.append((scale_of(query) * largest.sum(1), argmax))
    return torch.cat([s for s, _ in parts], 1), torch.cat([w for _, w in parts], 2)


class Truth:
    """Gradients of sampled queries and documents in float64, from the definition and the logsumexps `row` of all queries."""

    def __init__(self, query: Tensor, document: Tensor, row: Tensor) -> None:
        query, document = query.detach(), document.detach()
        B = len(query)
        self.sample = torch.linspace(0, B - 1, 4, device=query.device).long()
        s, argmax = scores_of(query[self.sample], document)  # (4, B), (4, Lq, B)
        self.row = s.logsumexp(1)
        g = (s - self.row[:, None]).exp()
        g[torch.arange(4, device=g.device), self.sample] -= 1
        self.dquery = torch.zeros(4, *query.shape[1:], dtype=torch.float64, device=query.device)
        for j in range(0, B, 256):
            some, window = document[j : j + 256].double(), slice(j, j + 256)
            index = torch.arange(len(some), device=some.device)
            for i in range(4):
                largest = some[index, argmax[i, :, window]]  # (Lq, m, D)
                self.dquery[i] += torch.einsum("j,tjd->td", g[i, window], largest)
        self.dquery *= scale_of(query) / B
        s, argmax = scores_of_columns(query, document[self.sample])  # (B, 4), (B, Lq, 4)
        g = (s - row.double()[:, None]).exp()
        g[self.sample, torch.arange(4, device=g.device)] -= 1
        self.ddocument = torch.zeros(4, *document.shape[1:], dtype=torch.float64, device=query.device)
        for j in range(4):
            weights = g[:, j, None, None] * query.double()
            self.ddocument[j].index_add_(0, argmax[:, :, j].flatten(), weights.flatten(0, 1))
        self.ddocument *= scale_of(query) / B

    def errors(self, gradients: tuple[Tensor, ...]) -> float:
        """Returns the larger of the relative errors of both gradients."""
        pairs = zip(gradients, (self.dquery, self.ddocument), strict=True)
        return max(((gradient[self.sample].double() - exact).norm() / exact.norm()).item() for gradient, exact in pairs)


def scores_of_columns(query: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:  # (B, Lq, D), (m, Ld, D)
    """Returns the result of `scores_of`, computed for some queries at a time."""
    parts = [scores_of(few_queries, document) for few_queries in query.split(4096)]
    return torch.cat([s for s, _ in parts]), torch.cat([w for _, w in parts])


def bare_products(query: Tensor, document: Tensor) -> dict[str, Callable[[], None]]:
    """Returns the matmul of all vectors in strips of 256 MiB, and the matmuls of a strip with the documents and the queries."""
    q, d = (part.detach().flatten(0, 1) for part in (query, document))
    columns = min(len(d), 16384)
    rows = min(len(q), 2**27 // columns)
    strip = torch.zeros(rows, columns, dtype=q.dtype, device=q.device)
    dq, dd = torch.empty_like(q[:rows]), torch.empty_like(d[:columns])

    def walk(work: Callable[[slice, slice], Any]) -> Callable[[], None]:
        def run() -> None:
            for i in range(0, len(q) - rows + 1, rows):
                for j in range(0, len(d) - columns + 1, columns):
                    work(slice(i, i + rows), slice(j, j + columns))

        return run

    return {
        "S": walk(lambda i, j: torch.mm(q[i], d[j].T, out=strip)),
        "dQ": walk(lambda i, j: torch.mm(strip, d[j], out=dq)),
        "dD": walk(lambda i, j: torch.mm(strip.T, q[i], out=dd)),
    }


class Run:
    """Measures the sizes one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.backend = "triton" if self.device == "cuda" else "eager"
        self.record = Record.of_script("late_interaction_gpu", args, args.seconds, scores=[])

    def measure_large(self, size: Size) -> None:
        """Measures one step of megabatch at a large size."""
        small = size._replace(B=min(size.B, 8192))
        small_query, small_document = small.vectors(self.device)
        systems(small_query, small_document, self.backend)[OURS]()()  # compiles
        bare = self.take_turns(bare_products(small_query, small_document))
        bare = {part: ms * (size.B / small.B) ** 2 for part, ms in bare.items()}
        del small_query, small_document
        clear(self.device)
        query, document = size.vectors(self.device)
        forward_start = now(self.device)
        row = mb.maxsim_logsumexp(query.detach(), document.detach(), scale_of(query), backend=self.backend).row
        forward_end = now(self.device)
        truth = Truth(query, document, row)
        clear(self.device)
        step, step_start = systems(query, document, self.backend)[OURS](), now(self.device)
        (loss, *gradients), peak = peak_memory(step, self.device)
        ms, about = 1000 * (now(self.device) - step_start), size._asdict()
        result = {
            **about,
            "system": OURS,
            "status": OK,
            "ms": ms,
            "forward_ms": 1000 * (forward_end - forward_start),
            "peak_bytes": peak,
        }
        result |= {"loss": loss.item(), "gradient_error": truth.errors(tuple(gradients))}
        result |= {"row_error": (row[truth.sample].double() - truth.row).abs().max().item()}
        result["input_bytes"] = sum(part.numel() * part.element_size() for part in (query, document))
        all_products = 2 * bare["S"] + bare["dQ"] + bare["dD"]
        self.record["results"].extend(
            [result, {**about, "system": BARE, "status": "extrapolated", "ms": all_products, "parts": bare}]
        )

    def measure(self, size: Size) -> None:
        """Measures all systems at one size."""
        query, document = size.vectors(self.device)
        row = mb.maxsim_logsumexp(query.detach(), document.detach(), scale_of(query), backend=self.backend).row
        truth = Truth(query, document, row)
        about = {"B": size.B, "Lq": size.Lq, "Ld": size.Ld}
        row_error = (row[truth.sample].double() - truth.row).abs().max().item()
        results: list[dict[str, Any]] = []
        works: dict[str, Callable[[], Any]] = {}
        builders = systems(query, document, self.backend)
        if "x".join(map(str, size)) in self.args.variants:
            builders |= variants(query, document, self.backend)
        for name, build in builders.items():
            result: dict[str, Any] = {**about, "system": name, "status": OK}
            results.append(result)
            too_large = MOST.get(name, size.B) < size.B or (name == CHUNKED and size.Ld >= LONG)
            if too_large or self.record.seconds_left() <= 0:
                result["status"] = "too large to try" if self.record.seconds_left() > 0 else LATE
                continue
            try:
                if size.B**2 * size.Lq * size.Ld > TUNED_SMALL:
                    few = (part[:64].detach().requires_grad_() for part in (query, document))
                    systems(*few, self.backend)[name]()()
                step = build()
                step()  # compiles
                self.record.say(f"  {name} has run once")
                clear(self.device)
                (loss, *gradients), result["peak_bytes"] = peak_memory(step, self.device)
                result["loss"], result["gradient_error"] = loss.item(), truth.errors(tuple(gradients))
                if name == OURS:
                    again = step()
                    result["same_bits"] = all(map(torch.equal, (loss, *gradients), again))
                    result["row_error"] = row_error
                    del again
                del gradients
                if result["gradient_error"] <= TOLERANCE:
                    works[name] = step
                else:
                    result["status"] = WRONG
            except Exception as error:  # a library can fail in any way; the others are still measured
                result["status"] = failure(error)
            clear(self.device)
        plain = query.detach(), document.detach()
        forward_work = {"forward": lambda: mb.late_interaction_loss(*plain, scale=scale_of(query), backend=self.backend)}
        times = self.take_turns({**works, **forward_work, **bare_products(query, document)})
        for result in results:
            if result["system"] in works:
                result["ms"] = times[result["system"]]
        results[0]["forward_ms"] = times["forward"]
        bare = {part: times[part] for part in ("S", "dQ", "dD")}
        all_products = 2 * bare["S"] + bare["dQ"] + bare["dD"]
        results.append({**about, "system": BARE, "status": OK, "ms": all_products, "parts": bare})
        input_bytes = sum(part.numel() * part.element_size() for part in (query, document))
        results[0]["input_bytes"] = input_bytes
        self.record["results"].extend(results)

    def measure_scores(self, N: int, M: int) -> None:
        """Measures the scores of N queries and M documents without gradients, and the search of the best 10 documents."""
        Lq, Ld = (4, 6) if self.args.tiny else (32, 128)
        query, document = (Size(B, Lq, Ld).vectors(self.device)[side].detach() for side, B in enumerate((N, M)))

        def by_kernels() -> Tensor:
            from late_interaction_kernels.autograd import maxsim

            return maxsim(query, document)

        def by_flash() -> Tensor:
            from flash_maxsim import flash_maxsim_batched

            return flash_maxsim_batched(query, document, shared_docs=True)

        K = min(100, M)
        candidates = torch.randint(M, (N, K), device=self.device, generator=torch.Generator(self.device).manual_seed(0))
        chosen = f"{OURS}, {K} candidates"
        works: dict[str, Callable[[], Any]] = {
            OURS: partial(mb.maxsim_scores, query, document, backend=self.backend),
            chosen: partial(mb.maxsim_scores, query, document, candidates=candidates, backend=self.backend),
            f"{OURS}, top 10": lambda: mb.maxsim_topk(query, document, 10, backend=self.backend).values,
            LIK: by_kernels,
            FLASH: by_flash,
        }
        sample = slice(0, min(N, 2))
        exact = scores_of(query[sample], document)[0] / scale_of(query)
        results, ready = [], {}
        for name, work in works.items():
            result = {"N": N, "M": M, "Lq": Lq, "Ld": Ld, "system": name, "kind": "scores", "status": OK}
            results.append(result)
            try:
                work()
                found, result["peak_bytes"] = peak_memory(work, self.device)
                expected = exact.gather(1, candidates[sample]) if name == chosen else exact
                expected = exact.topk(min(10, M)).values if "top" in name else expected
                result["error"] = (found[sample, : expected.shape[1]].double() - expected).abs().max().item()
                ready[name] = work
            except Exception as error:  # a library can fail in any way; the others are still measured
                result["status"] = failure(error)
            clear(self.device)
        times = self.take_turns(ready)
        for result in results:
            result["ms"] = times.get(result["system"])
        self.record["scores"].extend(results)

    def take_turns(self, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Returns the milliseconds of each function."""
        rounds, seconds = (1, 0.005) if self.args.tiny else (self.args.rounds, SECONDS_A_ROUND)
        return take_turns(works, self.device, rounds, seconds)

    def run(self) -> None:
        """Measures all sizes until the time limit."""
        for text in self.args.sizes:
            size = Size(*map(int, text.split("x")))
            if self.record.seconds_left() <= 0:
                self.record["results"].append({**size._asdict(), "system": OURS, "status": LATE})
                continue
            self.record.say(f"{size.B} pairs, {size.Lq} × {size.Ld} vectors")
            if size.B**2 * size.Lq * size.Ld > LARGE:
                self.measure_large(size)
            else:
                self.measure(size)
            clear(self.device)
            self.record.save()
        for N, M in SCORED_TINY if self.args.tiny else SCORED:
            if self.args.scores and self.record.seconds_left() > 0:
                self.record.say(f"scores of {N} queries and {M} documents")
                self.measure_scores(N, M)
                self.record.save()


LEGEND = (
    "Bare products: the matmul of all vectors twice, and the two matmuls of a dense gradient. Bare ÷ time: their time ÷ the "
    "time of the system. × megabatch: multiples of the time of megabatch. Extra GiB: peak memory in addition to the inputs, "
    "including gradients. Gradient error: of sampled gradients, relative to float64."
)
HEADINGS = ["B", "Lq", "Ld", "system", "ms", "bare ÷ time", "× megabatch", "extra GiB", "loss", "gradient error"]


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    rows, lines = [], []
    for group in groups(record["results"], "B", "Lq", "Ld").values():
        bare = next((r["ms"] for r in group if r["system"] == BARE), None)
        ours = next((r for r in group if r["system"] == OURS), {})
        for r in group:
            ms = r.get("ms")
            cells = [f"{r['B']:,}", r["Lq"], r["Ld"], r["system"], cell(ms, ".2f") or r["status"], ratio(bare, ms, ".3f")]
            cells += [ratio(ms, ours.get("ms")), gib(r.get("peak_bytes")), cell(r.get("loss"), ".4f")]
            rows.append([*cells, cell(r.get("gradient_error"), ".0e")])
        if "forward_ms" in ours:
            lines.append(_describe(ours, next(r["parts"]["S"] for r in group if r["system"] == BARE)))
    return paragraphs(
        "Late interaction on a GPU, forward + backward, bf16, D = 128. B queries have Lq vectors, B documents have Ld vectors.",
        TextTable(HEADINGS, rows, names=(3,)).markdown(),
        LEGEND,
        "Time of one bare matmul ÷ time of only the forward pass; memory; error of the logsumexps to float64; repeated runs:",
        "\n".join(lines),
        *_score_table(record.get("scores", [])),
        "Time in ms of a step, forward + backward:",
        _summary(record["results"]),
    )


def _score_table(results: list[dict[str, Any]]) -> list[str]:
    headings = ["queries", "documents", "system", "ms", "extra GiB", "largest error"]
    rows = []
    for r in results:
        cells = [f"{r['N']:,}", f"{r['M']:,}", r["system"], cell(r["ms"], ".3f") or r["status"], gib(r.get("peak_bytes"))]
        rows.append([*cells, cell(r.get("error"), ".0e")])
    title = "Scores without gradients, queries of 32 vectors and documents of 128, error of two queries relative to float64:"
    return [title, TextTable(headings, rows, names=(2,)).markdown()] if rows else []


def _summary(results: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(r["system"] for r in results if r["system"] not in (CHUNKED, BARE)))
    rows = []
    for (B, Lq, Ld), group in groups(results, "B", "Lq", "Ld").items():
        times = {r["system"]: r for r in group}
        cells = [cell(times[name].get("ms"), ".3f") or times[name]["status"] if name in times else "" for name in names]
        rows.append([f"{B:,}", Lq, Ld, *cells])
    return TextTable(["B", "Lq", "Ld", *names], rows).markdown()


def _describe(ours: dict[str, Any], bare: float) -> str:
    gigabytes = {name: ours[name] / 2**30 for name in ("input_bytes", "peak_bytes") if name in ours}
    memory = f"{gigabytes.get('peak_bytes', 0):.2f} GiB in addition to {gigabytes['input_bytes']:.2f} GiB of inputs"
    repeats = {True: "two runs are bitwise identical", False: "two runs are NOT IDENTICAL", None: "one run"}
    return (
        f"- {ours['B']:,} pairs, {ours['Lq']} × {ours['Ld']}: {bare / ours['forward_ms']:.3f} ({ours['forward_ms']:.2f} ms); "
        f"{memory}; {ours.get('row_error', float('nan')):.0e}; {repeats[ours.get('same_bits')]}"
    )


def draw(record: dict[str, Any]) -> Any:
    """Draws time and memory against the batch size, for the lengths that have most batches. Returns None for one batch."""
    (Lq, Ld), rows = max(groups(record["results"], "Lq", "Ld").items(), key=lambda group: len(_batches(group[1])))
    title = f"Late interaction, {Lq} × {Ld} vectors, forward + backward, bf16; {chip(record)}"
    panels = {
        "time, ms": lambda r: r.get("ms"),
        "memory beyond the inputs, GiB": lambda r: r["peak_bytes"] / 2**30 if "peak_bytes" in r else None,
    }
    colors = {OURS: plots.GREEN, BARE: plots.INK}
    return draw_systems(title, rows, panels, colors, dashed=(BARE,)) if len(_batches(rows)) > 1 else None


def _batches(rows: list[dict[str, Any]]) -> set[int]:
    return {row["B"] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=None,
        metavar="BxLQxLD",
        help=f"pairs, vectors of a query, vectors of a document (default: {' '.join(SIZES)})",
    )
    number_options(parser, rounds=ROUNDS_OPTION)
    parser.add_argument("--variants", nargs="*", default=[], metavar="BxLQxLD", help="sizes at which other tiles are measured")
    parser.add_argument("--scores", action="store_true", help="also measure scores without gradients")
    parser.add_argument("--peers", type=Path, help="folder with packages to compare with")
    arguments(parser, "late_interaction_gpu", 190)
    args = parser.parse_args()
    if args.sizes is None:
        args.sizes = ["8x4x6", "12x3x9"] if args.tiny else SIZES
    if args.peers is not None:
        sys.path.append(str(args.peers))
    run = Run(args)
    run.run()
    run.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
