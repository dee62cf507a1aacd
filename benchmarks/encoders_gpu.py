"""Compares packed and padded texts for encoders with the shapes of MiniLM-L6 and ModernBERT-base, with sentence-transformers.

The encoders have random weights, train all of them in float32 with bf16 autocast, and pool the mean. Texts are random tokens
with lognormal lengths from 8 to 256. They are queries and documents, without hard negatives. MiniLM is measured with the
dropout of its config and without dropout. ModernBERT has no dropout.

Before the timing, the gradients of every system are compared with a plain step, in float32 with small encoders and without
dropout. Chunk sizes and warm-up are as in `decoders_gpu.py`. All systems of a library use one chunk size, which is the fastest
for the first system of the library.
"""

import argparse
import sys
from functools import partial
from typing import Any

import decoders_gpu
from decoders_gpu_systems import (
    COMPILED,
    OURS,
    OURS_LIBRARY,
    PADDED,
    SYSTEMS,
    THEIRS,
    THEIRS_COMPILED,
    THEIRS_TOKENS,
    WITH_COMPILER,
    Shape,
    System,
    ours,
)

from megabatch_train.bench.measure import arguments, chip, write_report
from megabatch_train.display import plots

LEAST, LONGEST = 8, 256  # tokens of a text
TEXTS: dict[str, Any] = {"means": (24, 96), "spread": 0.8}
PADDED_COMPILED = "megabatch, padded, compiled"
ORDER = (COMPILED, THEIRS_COMPILED, PADDED_COMPILED, OURS, PADDED, THEIRS, THEIRS_TOKENS)
ALL_SYSTEMS = {**SYSTEMS, PADDED_COMPILED: System(ours, OURS_LIBRARY, 1, compiled=True)}
WAYS = {name: ALL_SYSTEMS[name] for name in ORDER}
CHECKED_AS = {name: same for name, same in {**WITH_COMPILER, PADDED_COMPILED: PADDED}.items() if name in WAYS}

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 500}
_SMALL |= {"max_position_embeddings": 512}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
SHAPES = {
    "minilm": Shape("MiniLM-L6", _MINILM, False, (4096,), (65536, 131072, 262144), "bert", **TEXTS),
    "plain": Shape("MiniLM-L6, no dropout", _MINILM | _NO_DROPOUT, False, (4096,), (65536, 131072, 262144), "bert", **TEXTS),
    "modernbert": Shape(
        "ModernBERT-base", {"vocab_size": 50368}, False, (4096,), (32768, 65536, 131072), "modernbert", **TEXTS
    ),
}
TINY = [
    Shape("tiny BERT", _SMALL | _NO_DROPOUT, False, (24,), (256, 1024), "bert", **TEXTS),
    Shape("tiny ModernBERT", _SMALL | _SPECIAL | {"local_attention": 16}, False, (24,), (256,), "modernbert", **TEXTS),
]
markdown = partial(
    decoders_gpu.markdown, what="Texts have 8 to 256 tokens, and a batch has no hard negatives.", checked="small encoders"
)


def draw(record: dict[str, Any]) -> Any:
    """Draws a bar for each measured system of each model."""
    rows = [row for row in record["results"] if "seconds" in row]
    if len(rows) < 2:
        return None
    bars = [(f"{row['model']}: {row['system']}", row["B"] / row["seconds"]) for row in rows]
    colors = [plots.GREEN if "megabatch" in row["system"] else plots.ORANGE for row in rows]
    title = f"Pairs per second of a step; {chip(record)}"
    figure, (axes,) = plots.panels(title, 1, height=1.0 + 0.4 * len(bars), width=7.5)
    plots.bars(axes, bars, "{:,.0f}", colors)
    return figure


class EncoderBench(decoders_gpu.Bench):
    """Measures all shapes of encoders."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, "encoders_gpu", WAYS, CHECKED_AS, TINY, LONGEST, LEAST)

    def report(self) -> None:
        """Writes the table and the plot of the measurements so far."""
        write_report(self.record.path, markdown, draw)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="models to measure (default: all)"
    )
    arguments(parser, "encoders_gpu", 120)
    args = parser.parse_args()
    bench = EncoderBench(args)
    bench.check()
    bench.run(TINY if args.tiny else [SHAPES[name] for name in args.models])
    bench.record.finish(markdown, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
