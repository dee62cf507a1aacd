"""Trains towers of your own with `megabatch train`: curves of numbers, and texts that describe them.

    pip install "megabatch[train]"
    python examples/series_to_text.py
    python examples/series_to_text.py --curves 4096 --epochs 20 --output curves

`build` returns both towers, so the name of the model is python:series_to_text:build. A series has any length. Its tower is a
small convolutional network, and the tower of the texts comes from megabatch. The script computes the data, trains, and
evaluates on new curves. All files are in the folder of --output. This takes half a minute on two CPU cores.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch_train import cli
from megabatch_train.data import UnreadableSampleError
from megabatch_train.evaluation import results
from megabatch_train.towers import Pair, Tower, load


class SeriesEncoder(nn.Module):
    """Convolutions over time, and the mean over the positions of a series."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 48, 9, padding=4), nn.GELU(), nn.Conv1d(48, 96, 9, padding=4), nn.GELU())
        self.head = nn.Linear(96, width)

    def forward(self, series: Tensor, mask: Tensor) -> Tensor:  # (n, T), (n, T) -> (n, width)
        states = self.layers(series[:, None]) * mask[:, None]
        return F.normalize(self.head(states.sum(2) / mask.sum(1, keepdim=True)), dim=-1)


def prepare(values: Sequence[float], generator: torch.Generator | None) -> Tensor:
    """One series. `values` are the numbers of the column. Training adds noise from the generator of the sample."""
    series = torch.tensor(values, dtype=torch.float32)
    if not len(series) or not series.isfinite().all():
        raise UnreadableSampleError(f"a series must have finite numbers, got {values}")
    return series if generator is None else series + 0.05 * torch.randn(series.shape, generator=generator)


def collate(series: list[Tensor]) -> dict[str, Tensor]:
    """The arguments of `SeriesEncoder.forward` for a chunk."""
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in series], batch_first=True)
    return {"series": nn.utils.rnn.pad_sequence(series, batch_first=True), "mask": mask}


def build(width: int = 64) -> Pair:
    """Both towers. Options of the model are arguments of this function: --set model_options.width=128."""
    series = Tower(SeriesEncoder(width), "value", prepare, collate)
    texts = load("small", ("text", "text"), width=width).second
    return Pair(series, texts, logit_scale=10.0)


def write_curves(path: Path, count: int, seed: int) -> None:
    """JSON lines with the columns `curve` and `text`."""
    generator, lines = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        length, shape, periods, start = (int(torch.randint(n, (), generator=generator)) for n in (40, 3, 6, 100))
        angle = torch.linspace(0, 2 * math.pi * (periods + 1), 60 + length) + start
        curve = (angle.sin(), angle.sin().sign(), 2 * (angle / (2 * math.pi)).frac() - 1)[shape]
        text = f"a {('sine', 'square', 'sawtooth')[shape]} wave with {periods + 1} periods"
        lines.append(json.dumps({"curve": [round(value, 4) for value in curve.tolist()], "text": text}))
    path.write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=2048, help="number of curves to train on")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("runs/curves"))
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    train, test = args.output / "train.jsonl", args.output / "test.jsonl"
    write_curves(train, args.curves, seed=0)
    write_curves(test, 256, seed=1)
    sys.path.insert(0, str(Path(__file__).parent))  # `megabatch` finds a module in the working directory without this line
    command = ["train", "--model", "python:series_to_text:build", "--data", str(train), "--validation", str(test)]
    command += ["--columns", "value=curve", "text=text", "--batch-size", "128", "--epochs", str(args.epochs), "--lr", "3e-3"]
    if cli.main([*command, "--compile", "off", "--output", str(args.output / "run")]):
        raise SystemExit(1)
    recall = results.read(args.output / "run" / "metrics.jsonl")[-1]["evaluation"]["text_to_value_R@1"]
    print(f"recall@1 of a curve by its text: {recall:.3f}")


if __name__ == "__main__":
    main()
