"""Texts of different lengths: a cached step that pads all of them, one that sorts and cuts them, and sentence-transformers'.

A BERT with random weights encodes texts of random tokens, whose lengths are lognormal with a mean of 60, at most 512 tokens.
Before anything is timed, the gradients of every system are compared with those of a plain step on a small batch, in float32.
Systems take turns. Runs on a CPU in less than two minutes; `--device cuda` takes a MiniLM-sized encoder, a larger batch and
bf16 autocast. Writes a JSON record and a Markdown table.
"""

import argparse
import inspect
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import reports
import torch
from record import RESULTS, Record
from sentence_transformers_systems import Features, Setting, encoder, integration, ours, plain, theirs
from torch import Tensor, nn

from megabatch.bench.measure import peak_memory
from megabatch.display.numbers import gib, ratio
from megabatch.display.tables import OURS, Table

MEAN, SPREAD, LONGEST = 60, 0.9, 512  # tokens; the deviation of their logarithm; tokens
CHECK, CHECK_CHUNK, TOLERANCE = 24, 6, 1e-4  # float32 against float32, by the length of all gradients
SIZES = {  # width, layers, vocabulary, pairs, chunk
    "cpu": (96, 2, 1000, 96, 8),
    "cuda": (384, 6, 30522, 8192, 128),
}
PADDED, SORTED = "megabatch, padded", "megabatch, by length"
THEIRS, PACKED, INTEGRATION = "sentence-transformers", "… mini_batch_num_tokens={}", "… with megabatch's loss, by length"


def columns(rows: int, vocabulary: int, device: str) -> tuple[Features, Features]:
    """Queries and documents; the first tokens of a document are its query's."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (2, rows, LONGEST), generator=generator)
    ids[1, :, :4] = ids[0, :, :4]
    drawn = torch.randn(2, rows, generator=generator) * SPREAD + math.log(MEAN) - SPREAD**2 / 2
    lengths = drawn.exp().round().long().clamp(4, LONGEST)
    masks = (torch.arange(LONGEST) < lengths[..., None]).long()
    width = [int(one.max()) for one in lengths]  # as a tokenizer pads
    first, second = (
        {"input_ids": ids[i, :, : width[i]].to(device), "attention_mask": masks[i, :, : width[i]].to(device)} for i in range(2)
    )
    return first, second


def systems(chunk: int, device: str) -> dict[str, Callable[[Setting], Tensor]]:
    """Every system that is installed; on a GPU, `mini_batch_num_tokens` up to `chunk` texts of full length, as ours has."""
    found: dict[str, Callable[[Setting], Tensor]] = {PADDED: partial(ours, lengths=None), SORTED: ours}
    try:
        from megabatch.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss as Loss
    except ImportError:
        return found
    found[THEIRS] = theirs
    if any("mini_batch_num_tokens" in inspect.signature(kind.__init__).parameters for kind in Loss.__mro__):  # since 5.6
        for tokens in (chunk * MEAN, chunk * LONGEST // 3, chunk * LONGEST) if device == "cuda" else (chunk * MEAN,):
            found[PACKED.format(tokens)] = partial(theirs, mini_batch_num_tokens=tokens)
    found[INTEGRATION] = integration
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    """All gradients, which are then cleared."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The difference of gradients, relative to the length of all of them."""
    off = [(a - b).norm() for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(off).norm() / torch.stack([w.norm() for w in wanted]).norm())


def measure(model: nn.Module, step: Callable[[Setting], Tensor], s: Setting) -> dict[str, Any]:
    """One step: its time, its peak of memory, and the tokens that the encoder saw in each of the two passes."""
    tokens = []
    counting = model[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]["input_ids"].numel()))

    def work() -> float:
        begun = time.perf_counter()
        step(s)
        if s.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds, peak = peak_memory(work, s.device)
    counting.remove()
    gradients(model)
    return {"seconds": seconds, "peak_bytes": peak, "tokens": sum(tokens) // 2}


def table(record: dict[str, Any]) -> Table:
    """One row for each system."""
    rows, base = [], record["results"][0]["seconds"]
    for result in record["results"]:
        tokens, seconds = result["tokens"], result["seconds"]
        cells = [result["system"], f"{tokens:,}", f"{1 - record['tokens'] / tokens:.0%}", f"{seconds:.2f}"]
        cells += [f"{record['pairs'] / seconds:,.0f}", ratio(base, seconds), gib(result["peak_bytes"])]
        rows.append([*cells, f"{result['gradient_error']:.0e}"])
    about = (
        f"{record['pairs']:,} pairs, {record['tokens']:,} tokens without padding; chunks of {record['chunk']} texts of full "
        "length. Tokens: encoded in each of the two passes. Gradient error: relative to a plain step on a small batch."
    )
    headings = ["system", "tokens", "padding", "step, s", "pairs/s", "× padded", "peak GiB", "gradient error"]
    return Table(headings, rows, notes=about, marks={1: OURS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--pairs", type=int, help="default: 96 on a CPU, 8192 on a GPU")
    parser.add_argument("--chunk", type=int, help="texts of full length that are encoded at once (8 on a CPU, 128 on a GPU)")
    parser.add_argument("--turns", type=int, default=2, help="steps of each system; the fastest counts (2)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--name", help="name of the files (lengths_cpu or lengths_gpu)")
    args = parser.parse_args()
    args.name = args.name or f"lengths_{'gpu' if args.device == 'cuda' else 'cpu'}"
    width, layers, vocabulary, pairs, chunk = SIZES[args.device]
    pairs, chunk = args.pairs or pairs, args.chunk or chunk
    model = encoder(width, layers, vocabulary, args.device).eval()  # without dropout, so that gradients can be compared
    batch = columns(pairs, vocabulary, args.device)
    used = sum(int(column["attention_mask"].sum()) for column in batch)
    record = Record("lengths", args, math.inf, pairs=pairs, chunk=chunk, tokens=used)
    found = systems(chunk, args.device)
    small = Setting(model, columns(CHECK, vocabulary, args.device), CHECK_CHUNK, args.device, autocast=False)
    results: dict[str, dict[str, Any]] = {}
    plain(small)
    wanted = gradients(model)
    for name, step in found.items():
        step(small)
        off = error(gradients(model), wanted)
        record.say(f"{name}: gradient error {off:.1e}")
        if off > TOLERANCE:
            raise SystemExit(f"{name} has wrong gradients: an error of {off:.1e}, at most {TOLERANCE:.0e} is allowed")
        results[name] = {"system": name, "gradient_error": off}
    s = Setting(model, batch, chunk, args.device, autocast=True)
    for turn in range(args.turns + (args.device == "cuda")):  # on a GPU the first turn asks for memory and compiles
        for name, step in found.items():
            one = measure(model, step, s)
            record.say(f"{name}: {one['seconds']:.2f} s")
            if turn == 0 or one["seconds"] < results[name]["seconds"]:
                results[name].update(one)
    record["results"].extend(results.values())
    record.save()
    reports.write(record.path, lambda found: table(found).markdown())
    table(record.contents).print()


if __name__ == "__main__":
    main()
