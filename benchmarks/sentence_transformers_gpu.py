"""sentence-transformers' CachedMultipleNegativesRankingLoss against ours: a step of a MiniLM-sized encoder, batch after batch.

The encoder has random weights, texts are random tokens, all chunks have the same size, bf16 autocast, dropout on. Before
anything is timed, every system's gradients are compared with those of a plain step with a dense loss, in float32 on a small
batch without dropout. Systems take turns at every batch. "Towers alone" is one forward pass and one forward and backward pass
of every chunk without any loss.

`--collectives` counts how often ranks talk to each other in a step instead, on ranks of this CPU, and adds that to the file.
Writes a JSON file after every measurement; `sentence_transformers_gpu_report.py` makes the table and the plot of it, anywhere.
"""

import argparse
import gc
import json
import sys
import time
from typing import Any

import torch
from record import Record, arguments, device_of
from sentence_transformers_exchange import count
from sentence_transformers_gpu_report import markdown, report
from sentence_transformers_systems import ALONE, OURS_AUTO, PLAIN, SYSTEMS, Setting, encoder, plain, texts
from torch import nn

from megabatch.bench.measure import peak_memory

BATCHES = [16384, 65536, 4096, 32768]
WIDTH, LAYERS, VOCABULARY = 384, 6, 30522
CHECK, CHECK_CHUNK, TOLERANCE = 64, 16, 1e-3  # float32 against float32, by the length of all gradients
ENOUGH = 2.0  # seconds of steps of one system at one batch
EXCHANGES = [(2, 16), (2, 4), (4, 16)]  # ranks, and the size of a mini-batch


def clear(model: nn.Module, device: str) -> None:
    """No gradients, and no memory that is kept from before."""
    for p in model.parameters():
        p.grad = None
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Bench:
    """The encoder and its measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, device_of(args)
        self.width, self.layers, self.vocabulary = (48, 2, 500) if args.tiny else (WIDTH, LAYERS, VOCABULARY)
        self.chunk = 32 if args.tiny else args.chunk
        self.record = Record("sentence_transformers_gpu", args, args.seconds, checks=[], chunk=self.chunk, tokens=args.tokens)
        self.model = encoder(self.width, self.layers, self.vocabulary, self.device)
        self.usable: dict[str, str] = {}
        self.pace: dict[str, float] = {}  # seconds of a pair

    def setting(self, rows: int, chunk: int, autocast: bool) -> Setting:
        """A batch."""
        columns = texts(rows, self.args.tokens, self.vocabulary, self.device)
        return Setting(self.model, columns, chunk, self.device, autocast=autocast)

    def check(self) -> None:
        """Gradients against the plain step's; systems that are not installed are left out."""
        s = self.setting(CHECK, CHECK_CHUNK, autocast=False)
        self.model.eval()
        clear(self.model, self.device)
        value = plain(s).item()
        wanted = [p.grad for p in self.model.parameters() if p.grad is not None]
        length = torch.stack([gradient.norm() for gradient in wanted]).norm()
        for name in (PLAIN, *SYSTEMS):
            if name == ALONE:
                self.usable[name] = "ok"
                continue
            result: dict[str, Any] = {"system": name, "loss": value, "gradient_error": 0.0, "status": "ok"}
            try:
                if name != PLAIN:
                    clear(self.model, self.device)
                    result["loss"] = SYSTEMS[name](s).item()
                    found = [p.grad for p in self.model.parameters() if p.grad is not None]
                    off = torch.stack([(a - b).norm() for a, b in zip(found, wanted, strict=True)]).norm()
                    result["gradient_error"] = (off / length).item()
                    result["status"] = "ok" if result["gradient_error"] <= TOLERANCE else "WRONG"
            except ImportError as error:
                result = {"system": name, "status": f"not installed ({error.name or error})"}
            except Exception as error:  # a library may fail in any way; the others are still measured
                result = {"system": name, "status": f"fails ({type(error).__name__}: {str(error)[:100]})"}
            self.usable[name] = result["status"]
            self.record["checks"].append(result)
            self.record.say(f"{name}: {result['status']}, gradient error {result.get('gradient_error', float('nan')):.1e}")
        self.model.train()
        clear(self.model, self.device)
        gc.freeze()

    def measure(self, rows: int) -> None:
        """All systems at one batch, in turns."""
        s = self.setting(rows, self.chunk, autocast=True)
        results: dict[str, dict[str, Any]] = {}
        for turn in range(1 if self.args.tiny else 2):
            for name, step in SYSTEMS.items():
                result = results.setdefault(name, {"B": rows, "system": name, "status": self.usable[name], "times": []})
                if result["status"] != "ok" or sum(result["times"]) > ENOUGH:
                    continue
                if self.pace.get(name, 0.0) * rows > self.record.left():
                    result["status"] = "no time left" if turn == 0 else "ok"
                    continue
                self.one(name, step, s, result)
        for result in results.values():
            if result.get("times"):
                result["seconds"] = min(result["times"])
                self.pace[result["system"]] = result["seconds"] / rows
        self.record["results"].extend(results.values())

    def one(self, name: str, step: Any, s: Setting, result: dict[str, Any]) -> None:
        """A step after one that is not timed, and its peak beyond the weights and their gradients."""
        clear(self.model, self.device)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)  # as in every step but the first

        def work() -> float:
            begun = time.perf_counter()
            value = step(s).item()  # waits for the device
            if self.device == "cuda":
                torch.cuda.synchronize()
            result["loss"] = value
            return time.perf_counter() - begun

        try:
            step(s)  # asks the device for memory, which later steps have
            seconds, result["peak_bytes"] = peak_memory(work, self.device)
            result["times"].append(seconds)
            self.record.say(
                f"B = {len(s.columns[0]['input_ids'])} {name}: {seconds:.2f} s, {result['peak_bytes'] / 2**30:.2f} GiB"
            )
        except torch.OutOfMemoryError:
            result["status"] = "out of memory"

    def run(self) -> None:
        """All batches, after the check and a step that compiles."""
        self.check()
        warm = self.setting(2 * self.chunk, self.chunk, autocast=True)
        for name, step in SYSTEMS.items():
            if self.usable[name] == "ok" and name != OURS_AUTO:
                step(warm)
        for rows in [64, 256] if self.args.tiny else self.args.batches:
            self.measure(rows)
            self.record.save()


def count_exchanges(record: dict[str, Any], cases: list[tuple[int, int]]) -> None:
    """Adds the calls of every system to a record."""
    record["exchange"] = [found for world, chunk in cases for found in count(world, chunk)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, metavar="B", help="the most important first")
    parser.add_argument("--chunk", type=int, default=1024, help="texts that all systems encode at once (1024)")
    parser.add_argument("--tokens", type=int, default=32, help="of a text (32)")
    parser.add_argument("--collectives", action="store_true", help="count messages between ranks, on a CPU; nothing else")
    arguments(parser, "sentence_transformers_gpu", 90)
    return parser.parse_args()


def main() -> int:
    args = parse()
    path = args.output / f"{args.name}.json"
    if args.collectives:
        if not path.exists():
            sys.exit(f"--collectives adds to the results of a run, and there is no {path.name} in --output")
        record = json.loads(path.read_text())
        count_exchanges(record, EXCHANGES)
        path.write_text(json.dumps(record, indent=1) + "\n")
    else:
        bench = Bench(args)
        bench.run()
        if args.tiny:
            count_exchanges(bench.record.contents, EXCHANGES[:1])
        bench.record.save()
    report(path)
    print(markdown(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
