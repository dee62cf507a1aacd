"""Time and memory of every loss of the family on a GPU, forward and backward: against libraries and the bare products.

Embeddings are bf16. Each loss is first compared with its dense formula in float64, at a smaller batch on the same device; then
it takes turns with the library that it is known from (or the dense formula, where there is none) and with the matrix products
that its formula needs at least, by PyTorch's library. A peer that does not fit at the large batch is tried at smaller ones
until it does. Libraries that bring embeddings to unit length do that beside the rest; it is a thousandth of their time.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from family_losses import CASES, DENSE, LARGE, Case, Loss, case

from megabatch_train.bench.losses import HALF_TOLERANCE, TOLERANCE, bare_products
from megabatch_train.bench.measure import (
    LATE,
    OK,
    WRONG,
    Record,
    arguments,
    chip,
    clear,
    device_of,
    failure,
    groups,
    paragraphs,
    peak_memory,
    take_turns,
    with_gradients,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio

OURS, BARE, ROUGH = "megabatch", "bare products", "imprecise"
SECONDS_A_ROUND = 0.06
IMPRECISE = {"cuda": 0.2, "cpu": 1e-3}  # what logits rounded to bfloat16 explain; differences of nearly equal float32 numbers


def errors(made: Case, loss: Loss, means: Loss) -> tuple[float, float]:
    """Of the value, in units of itself or of 1, and of the worst of the gradients, by length."""
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in made.leaves)
    value, *gradients = with_gradients(means, exact)
    found, *ours = with_gradients(loss, made.leaves)
    off = torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(ours, gradients, strict=True)])
    return (abs(found.double() - value) / value.abs().clamp_min(1.0)).item(), off.max().item()  # torch's max keeps a NaN


def verdict(loss_error: float, gradient_error: float, device: str) -> str:
    """So written, NaN is wrong."""
    tolerance = HALF_TOLERANCE if device == "cuda" else {"loss": TOLERANCE, "gradient": TOLERANCE}
    if loss_error <= tolerance["loss"] and gradient_error <= tolerance["gradient"]:
        return OK
    return ROUGH if loss_error <= IMPRECISE[device] and gradient_error <= IMPRECISE[device] else WRONG


class Family:
    """The losses one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.rows, self.width = (256, 48) if args.tiny else (args.rows, args.width)
        self.record = Record.of_script("family_gpu", args, args.seconds, width=self.width, checks=[])
        self.rounds, self.seconds = (1, 0.005) if args.tiny else (args.rounds, SECONDS_A_ROUND)
        self.verdicts: dict[tuple[str, str], str] = {}

    def batches(self, peer: Any) -> list[int]:
        """That a peer is tried at, largest first."""
        if self.args.tiny:
            return [self.rows, self.rows // 2] if peer.batches == LARGE else [self.rows // 4, self.rows // 8]
        return [rows for rows in peer.batches if rows <= self.rows]

    def check(self, name: str) -> None:
        """Every system of a loss against float64, at a batch that all of it fits."""
        largest = 128 if self.args.tiny else 8192
        known = case(name, 64, self.width, "cpu")
        systems = {OURS: largest} | {key: min(largest, self.batches(peer)[-1] // 2) for key, peer in known.peers.items()}
        for system, rows in systems.items():
            result = {"loss": name, "system": system, "rows": rows}
            try:
                made = case(name, rows, self.width, self.device)
                loss = made.ours if system == OURS else made.peers[system].loss(self.device)
                result["loss_error"], result["gradient_error"] = errors(made, loss, made.meant(system))
                result["status"] = verdict(result["loss_error"], result["gradient_error"], self.device)
            except Exception as error:  # a library may fail in any way; the others are still measured
                result["status"] = failure(error)
            self.verdicts[name, system] = result["status"]
            self.record["checks"].append(result)
            clear(self.device)
        gc.freeze()  # libraries have been imported by now, and collecting need not look at them again

    def measure(self, name: str, rows: int, systems: list[str]) -> list[str]:
        """Times the correct systems; returns those that could not be run."""
        made = case(name, rows, self.width, self.device)
        works: dict[str, Callable[[], Any]] = {}
        results: list[dict[str, Any]] = []
        for system in systems:
            result = {"loss": name, "rows": rows, "system": system, "status": self.verdicts[name, system]}
            results.append(result)
            if result["status"] not in (OK, ROUGH):
                continue
            try:
                loss = made.ours if system == OURS else made.peers[system].loss(self.device)
                work = lambda loss=loss: with_gradients(loss, made.leaves)  # noqa: E731
                work()
                clear(self.device)
                (value, *_), result["peak_bytes"] = peak_memory(work, self.device)
                result["value"] = value.item()
                works[system] = work
            except Exception as error:
                result["status"] = failure(error)
            clear(self.device)
        q, k = (t.detach() for t in case("info_nce_loss", rows, self.width, self.device).leaves)
        times = take_turns({**works, **bare_products(q, k)}, self.device, self.rounds, self.seconds)
        bare = sum(count * times[part] for count, part in zip(made.products, ("S", "dX", "dY"), strict=True))
        for result in results:
            if result["system"] in works:
                result["ms"] = times[result["system"]]
        results.append({"loss": name, "rows": rows, "system": BARE, "status": OK, "ms": bare})
        results[-1] |= {
            "products": made.products,
            "parts": {part: times[part] for part in ("S", "dX", "dY")},
            "note": made.note,
        }
        self.record["results"].extend(results)
        clear(self.device)
        return [r["system"] for r in results if "ms" not in r]

    def run(self) -> None:
        """All losses at the large batch; then the peers that did not fit, at smaller ones."""
        smaller: list[tuple[str, str, list[int]]] = []
        for name in self.args.losses:
            if self.record.seconds_left() <= 0:
                self.record["results"].append({"loss": name, "rows": self.rows, "system": OURS, "status": LATE})
                continue
            self.record.say(name)
            self.check(name)
            peers = case(name, 64, self.width, "cpu").peers
            systems = [OURS, *(key for key, peer in peers.items() if self.rows in self.batches(peer))]
            failed = self.measure(name, self.rows, systems)
            self.record.save()
            for key, peer in peers.items():
                if self.verdicts[name, key] in (OK, ROUGH) and (key in failed or key not in systems):
                    smaller.append((name, key, [rows for rows in self.batches(peer) if key not in systems or rows < self.rows]))
        for name, system, batches in smaller:
            for rows in batches:
                if self.record.seconds_left() <= 0:
                    self.record["results"].append({"loss": name, "rows": rows, "system": system, "status": LATE})
                    break
                self.record.say(f"{name}: {system} at {rows}")
                failed = self.measure(name, rows, [OURS, system])
                self.record.save()
                if system not in failed:
                    break
        self.record.save()


COLOURS = {
    "sentence-transformers": plots.ORANGE,
    "info-nce-pytorch": plots.VIOLET,
    "pytorch-metric-learning": plots.OCHRE,
    "open_clip": plots.BLUE,
    "lightly": plots.INK,
    "pairwise_logsumexp(z, z)": plots.MINT,
    DENSE: plots.GREY,
}
HEADINGS = ["loss", "B", "system", "ms", "× megabatch", "products", "bare ÷ time", "extra GiB", "value", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Markdown."""
    checks = {(c["loss"], c["system"]): c for c in record["checks"]}
    rows = []
    for group in groups(record["results"], "loss", "rows").values():
        ours = next((r.get("ms") for r in group if r["system"] == OURS), None)
        bare = next((r for r in group if r["system"] == BARE), None)
        for r in group:
            ms, check = r.get("ms"), checks.get((r["loss"], r["system"]), {})
            name = r["system"] + (", imprecise" if ms and r["status"] == "imprecise" else "")
            cells = [r["loss"], f"{r['rows']:,}", name, cell(ms, ".2f") or r["status"], ratio(ms, ours)]
            cells += [f"{sum(bare['products']):g}" if bare else "", ratio(bare and bare["ms"], ms, ".3f")]
            cells += [gib(r.get("peak_bytes")), cell(r.get("value"), ".4f")]
            rows.append([*cells, *(cell(check.get(key), ".0e") for key in ("loss_error", "gradient_error"))])
    about = (
        f"Width {record['width']}. Products: the least number of products of B × B × width that the formula needs. Bare: their "
        "time with PyTorch's matrix product, in strips. Extra: peak memory beyond the inputs, gradients included. Errors: "
        "relative to float64 at a smaller batch; of the value relative to itself or to 1, whichever is larger; the largest of "
        "all gradients, by norm. Imprecise: the error is larger than bf16 inputs explain, and no larger than bf16 logits "
        "explain."
    )
    return paragraphs(
        TextTable([*HEADINGS, "gradient error"], rows, names=(0, 2)).markdown(),
        " ".join((about, record.get("note", ""))).strip(),
        _counted(record),
    )


def _counted(record: dict[str, Any]) -> str:
    """The products of each loss, as its largest batch has them."""
    found = groups([r for r in record["results"] if r["system"] == BARE], "loss")
    rows = [[name, *(f"{count:g}" for count in first["products"]), first["note"]] for (name,), (first, *_) in found.items()]
    return TextTable(["loss", "S", "dX", "dY", "what is counted"], rows, names=(0, 4)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Time and memory at the largest batch: a bar for ours, a mark with its name for each library.

    The largest batch of a library that cannot run it is written beside the memory.
    """
    most = max(r["rows"] for r in record["results"])
    names = list(dict.fromkeys(r["loss"] for r in record["results"] if r["rows"] == most and "ms" in r))
    title = f"Losses of {most:,} × {record['width']}, forward and backward; {chip(record)}"
    figure, panels = plots.panels(title, 2, height=0.6 + 0.36 * len(names))
    large = [r for r in record["results"] if r["rows"] == most and r["loss"] in names]
    for axes, key, unit, label in zip(
        panels, ("ms", "peak_bytes"), (1.0, 2**30), ("milliseconds", "peak beyond the inputs, GiB"), strict=True
    ):
        for place, name in enumerate(names):
            values = {r["system"]: r[key] / unit for r in large if r["loss"] == name and key in r}
            axes.barh(place, values.pop(OURS, 0.0), color=plots.GREEN, height=0.55)
            if BARE in values:
                axes.plot([values[BARE]] * 2, [place - 0.4, place + 0.4], color=plots.INK, linewidth=2)
            peers = sorted((value, system) for system, value in values.items() if system in COLOURS)
            for i, (value, system) in enumerate(peers):
                axes.plot(value, place, "D", color=COLOURS[system], markersize=5)
                offset = (7, 0) if len(peers) == 1 else (7, 4 - 8 * i)
                style = {"textcoords": "offset points", "va": "center", "fontsize": 6.5, "color": COLOURS[system]}
                axes.annotate(system, (value, place), offset, **style)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        plots.log_axis(axes, "x")
        axes.set_xlim(right=axes.get_xlim()[1] * 3)  # for the names
        axes.set_yticks(range(len(names)), names, fontsize=7.5)
        axes.set_xlabel(label)
    panels[0].set_title("green: megabatch; black line: the products that a loss needs", fontsize=9, color=plots.GREY)
    for place, name in enumerate(names):
        panels[1].annotate(
            "  " + where_it_ends(record, name, most), (1, place), xycoords=("axes fraction", "data"), fontsize=6.5
        )
    return figure


def where_it_ends(record: dict[str, Any], name: str, rows: int) -> str:
    """The largest batch of each peer that could not run the largest of all."""
    parts = []
    for system in COLOURS:
        tried = [r for r in record["results"] if r["loss"] == name and r["system"] == system]
        worked = [r["rows"] for r in tried if "ms" in r]
        if (worked and rows not in worked) or any(r["status"] == "out of memory" for r in tried):
            parts.append(f"{system}: up to {max(worked):,}" if worked else f"{system}: {tried[-1]['status'].split(' (')[0]}")
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help="all by default")
    parser.add_argument("--rows", type=int, default=65536, help="the large batch (65536)")
    parser.add_argument("--width", type=int, default=768, help="of the embeddings (768)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system; the median is kept (3)")
    arguments(parser, "family_gpu", 200)
    family = Family(parser.parse_args())
    family.run()
    family.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
