"""Time and memory of every loss of the family on a GPU, forward and backward: against libraries and the bare products.

Embeddings are bf16. Each loss is first compared with its dense formula in float64, at a smaller batch on the same device; then
it takes turns with the library that it is known from (or the dense formula, where there is none) and with the matrix products
that its formula needs at least, by PyTorch's library. A peer that does not fit at the large batch is tried at smaller ones
until it does. Libraries that bring embeddings to unit length do that beside the rest; it is a thousandth of their time.

Writes a JSON file after every loss; `family_gpu_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from family_case import LARGE, Case, Loss
from family_cases import CASES, case
from family_gpu_report import markdown, report
from record import Record, arguments, device_of
from timing import clear, failure, take_turns
from torch import Tensor

from megabatch.bench.accuracy import HALF_TOLERANCE, TOLERANCE
from megabatch.bench.losses import bare_products
from megabatch.bench.measure import peak_memory

OURS = "megabatch"
SECONDS_A_ROUND = 0.06
IMPRECISE = {"cuda": 0.2, "cpu": 1e-3}  # what logits rounded to bfloat16 explain; differences of nearly equal float32 numbers
OK, ROUGH, WRONG, LATE = "ok", "imprecise", "WRONG", "no time left"


def with_gradients(loss: Loss, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


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
        self.record = Record("family_gpu", args, args.seconds, width=self.width, checks=[])
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
        results.append({"loss": name, "rows": rows, "system": "bare products", "status": OK, "ms": bare})
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
            if self.record.left() <= 0:
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
                if self.record.left() <= 0:
                    self.record["results"].append({"loss": name, "rows": rows, "system": system, "status": LATE})
                    break
                self.record.say(f"{name}: {system} at {rows}")
                failed = self.measure(name, rows, [OURS, system])
                self.record.save()
                if system not in failed:
                    break
        self.record.save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME", help="all by default")
    parser.add_argument("--rows", type=int, default=65536, help="the large batch (65536)")
    parser.add_argument("--width", type=int, default=768, help="of the embeddings (768)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system; the median is kept (3)")
    arguments(parser, "family_gpu", 200)
    return parser.parse_args()


def main() -> int:
    family = Family(parse())
    family.run()
    report(family.record.path)
    print(markdown(family.record.contents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
