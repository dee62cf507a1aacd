"""Measures time and memory of every loss on a GPU, and compares them with libraries and with the bare products.

Embeddings are bf16. Each loss is first compared with its dense formula in float64, at a smaller batch on the same device. Then
it takes turns with the library that is known for it, or with the dense formula if there is no library, and with the bare
products. These are the matmuls that the formula needs at least. If a baseline does not fit at the large batch, smaller batches
are tried. Some libraries also normalize embeddings, which takes a thousandth of their time.
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
    with_gradients,
)
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable, cell, gib, ratio

OURS, BARE, ROUGH = "megabatch", "bare products", "imprecise"
SECONDS_A_ROUND = 0.06
IMPRECISE = {"cuda": 0.2, "cpu": 1e-3}  # errors of logits in bfloat16; errors of differences of nearly equal float32 numbers


def errors(subject: Case, loss: Loss, definition: Loss) -> tuple[float, float]:
    """Returns the error of the value, relative to itself or to 1, and the largest relative error of a gradient, by norm."""
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in subject.leaves)
    value, *gradients = with_gradients(definition, exact)
    found_value, *own_gradients = with_gradients(loss, subject.leaves)
    relative = torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(own_gradients, gradients, strict=True)])
    return (abs(found_value.double() - value) / value.abs().clamp_min(1.0)).item(), relative.max().item()  # torch keeps a NaN


def verdict(loss_error: float, gradient_error: float, device: str) -> str:
    """Returns the status for these errors. NaN is wrong."""
    tolerance = HALF_TOLERANCE if device == "cuda" else {"loss": TOLERANCE, "gradient": TOLERANCE}
    if loss_error <= tolerance["loss"] and gradient_error <= tolerance["gradient"]:
        return OK
    return ROUGH if loss_error <= IMPRECISE[device] and gradient_error <= IMPRECISE[device] else WRONG


class Family:
    """Measures the losses one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.rows, self.width = (256, 48) if args.tiny else (args.rows, args.width)
        self.record = Record.of_script("family_gpu", args, args.seconds, width=self.width, checks=[])
        self.rounds, self.seconds = (1, 0.005) if args.tiny else (args.rounds, SECONDS_A_ROUND)
        self.verdicts: dict[tuple[str, str], str] = {}

    def batches(self, peer: Any) -> list[int]:
        """Returns the batches that a baseline is tried at, largest first."""
        if self.args.tiny:
            return [self.rows, self.rows // 2] if peer.batches == LARGE else [self.rows // 4, self.rows // 8]
        return [rows for rows in peer.batches if rows <= self.rows]

    def check(self, name: str) -> None:
        """Compares every system of a loss with float64, at a batch that fits for all."""
        largest = 128 if self.args.tiny else 8192
        small_case = case(name, 64, self.width, "cpu")
        systems = {OURS: largest} | {key: min(largest, self.batches(peer)[-1] // 2) for key, peer in small_case.peers.items()}
        for system, rows in systems.items():
            result = {"loss": name, "system": system, "rows": rows}
            try:
                subject = case(name, rows, self.width, self.device)
                loss = subject.ours if system == OURS else subject.peers[system].loss(self.device)
                result["loss_error"], result["gradient_error"] = errors(subject, loss, subject.meant(system))
                result["status"] = verdict(result["loss_error"], result["gradient_error"], self.device)
            except Exception as error:  # a library can fail in any way; the others are still measured
                result["status"] = failure(error)
            self.verdicts[name, system] = result["status"]
            self.record["checks"].append(result)
            clear(self.device)
        gc.freeze()  # all libraries are imported, and the garbage collector does not need to check them again

    def measure(self, name: str, rows: int, systems: list[str]) -> list[str]:
        """Measures the correct systems. Returns the systems that could not run."""
        subject = case(name, rows, self.width, self.device)
        works: dict[str, Callable[[], Any]] = {}
        results: list[dict[str, Any]] = []
        for system in systems:
            result = {"loss": name, "rows": rows, "system": system, "status": self.verdicts[name, system]}
            results.append(result)
            if result["status"] not in (OK, ROUGH):
                continue
            try:
                loss = subject.ours if system == OURS else subject.peers[system].loss(self.device)
                work = lambda loss=loss: with_gradients(loss, subject.leaves)  # noqa: E731
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
        bare = sum(count * times[part] for count, part in zip(subject.products, ("S", "dX", "dY"), strict=True))
        for result in results:
            if result["system"] in works:
                result["ms"] = times[result["system"]]
        results.append({"loss": name, "rows": rows, "system": BARE, "status": OK, "ms": bare})
        results[-1] |= {
            "products": subject.products,
            "parts": {part: times[part] for part in ("S", "dX", "dY")},
            "note": subject.note,
        }
        self.record["results"].extend(results)
        clear(self.device)
        return [r["system"] for r in results if "ms" not in r]

    def run(self) -> None:
        """Measures all losses at the large batch, and then the baselines that did not fit at smaller batches."""
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


COLORS = {
    "sentence-transformers": plots.ORANGE,
    "info-nce-pytorch": plots.VIOLET,
    "pytorch-metric-learning": plots.OCHRE,
    "open_clip": plots.BLUE,
    "lightly": plots.INK,
    "pairwise_logsumexp(z, z)": plots.MINT,
    DENSE: plots.GREY,
}
LABEL_POINTS = 9.5  # at least 9 pixels if the plot is 390 pixels wide
HEADINGS = ["loss", "B", "system", "ms", "× megabatch", "products", "bare ÷ time", "extra GiB", "value", "error"]


def markdown(record: dict[str, Any]) -> str:
    """Returns the Markdown of a record."""
    checks = {(c["loss"], c["system"]): c for c in record["checks"]}
    rows = []
    for group in groups(record["results"], "loss", "rows").values():
        own_ms = next((r.get("ms") for r in group if r["system"] == OURS), None)
        bare = next((r for r in group if r["system"] == BARE), None)
        for r in group:
            ms, check = r.get("ms"), checks.get((r["loss"], r["system"]), {})
            name = r["system"] + (", imprecise" if ms and r["status"] == "imprecise" else "")
            cells = [r["loss"], f"{r['rows']:,}", name, cell(ms, ".2f") or r["status"], ratio(ms, own_ms)]
            cells += [f"{sum(bare['products']):g}" if bare else "", ratio(bare and bare["ms"], ms, ".3f")]
            cells += [gib(r.get("peak_bytes")), cell(r.get("value"), ".4f")]
            rows.append([*cells, *(cell(check.get(key), ".0e") for key in ("loss_error", "gradient_error"))])
    notes = (
        f"D = {record['width']}. Products: the least number of matmuls of B × B × D that the formula needs. Bare: the time of "
        "these matmuls in PyTorch, in strips. Extra: peak memory in addition to the inputs, including gradients. Errors: "
        "compared with float64 at a smaller batch. The error of the value is relative to itself or to 1, whichever is larger. "
        "The gradient error is the largest of all gradients, relative to their norms. Imprecise: the error is larger than bf16 "
        "inputs explain, but not larger than bf16 logits explain."
    )
    return paragraphs(
        TextTable([*HEADINGS, "gradient error"], rows, names=(0, 2)).markdown(),
        " ".join((notes, record.get("note", ""))).strip(),
        _tabulate_products(record),
    )


def _tabulate_products(record: dict[str, Any]) -> str:
    """Returns the table of the products of each loss, at its largest batch."""
    by_loss = groups([r for r in record["results"] if r["system"] == BARE], "loss")
    rows = [[name, *(f"{count:g}" for count in first["products"]), first["note"]] for (name,), (first, *_) in by_loss.items()]
    return TextTable(["loss", "S", "dX", "dY", "counted matmuls"], rows, names=(0, 4)).markdown()


def draw(record: dict[str, Any]) -> Any:
    """Draws time and memory at the largest batch, with a bar for megabatch and a mark for each library.

    If a library cannot run this batch, its largest batch is written next to the name of the loss.
    """
    most = max(r["rows"] for r in record["results"])
    names = list(dict.fromkeys(r["loss"] for r in record["results"] if r["rows"] == most and "ms" in r))
    title = f"Losses of {most:,} × {record['width']}, forward and backward; {chip(record)}"
    figure, panels = plots.panels(title, 2, height=1.4 + 0.42 * len(names))
    large = [r for r in record["results"] if r["rows"] == most and r["loss"] in names]
    for axes, key, unit, label in zip(
        panels, ("ms", "peak_bytes"), (1.0, 2**30), ("milliseconds", "peak memory beyond inputs, GiB"), strict=True
    ):
        for system, color in {OURS: plots.GREEN, BARE: plots.INK, **COLORS}.items():
            values = {names.index(r["loss"]): r[key] / unit for r in large if r["system"] == system and key in r}
            if not values:
                continue
            legend = "only the matmuls" if system == BARE else system
            if system == OURS:
                axes.barh(list(values), list(values.values()), color=color, height=0.36, label=legend)
            else:
                mark = {"marker": "|", "markersize": 13, "markeredgewidth": 2} if system == BARE else {"marker": "D"}
                axes.plot(
                    list(values.values()), list(values), linestyle="", color=color, label=legend, **{"markersize": 5} | mark
                )
        axes.set_ylim(len(names) - 0.6, -0.9)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_yticks([])
        plots.log_axis(axes, "x")
        axes.set_xlabel(label)
        for position, name in enumerate(names):
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": LABEL_POINTS}
            limits = "" if key == "ms" else describe_largest_batches(record, name, most)
            axes.annotate(f"{name} ({limits})" if limits else name, (0.01, position - 0.4), **place, color=plots.INK)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=LABEL_POINTS, labelcolor=plots.INK
        )
    return figure


def describe_largest_batches(record: dict[str, Any], name: str, rows: int) -> str:
    """Returns the largest batch of each baseline that could not run the largest batch."""
    parts = []
    for system in COLORS:
        tried = [r for r in record["results"] if r["loss"] == name and r["system"] == system]
        worked = [r["rows"] for r in tried if "ms" in r]
        if (worked and rows not in worked) or any(r["status"] == "out of memory" for r in tried):
            parts.append(f"{system}: up to {max(worked):,}" if worked else f"{system}: {tried[-1]['status'].split(' (')[0]}")
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--losses", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help="losses to measure (default: all)"
    )
    number_options(parser, rows=(65536, "large batch, in pairs"), width=(768, "embedding dimension"), rounds=ROUNDS_OPTION)
    arguments(parser, "family_gpu", 200)
    family = Family(parser.parse_args())
    family.run()
    family.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
