"""Do mined batches, or batches of one source, give more recall than random batches? Recall against the batch size.

    python benchmarks/batches_study.py --data wordnet                                            text pairs, minutes
    python benchmarks/batches_study.py --data flickr8k --folder FOLDER                           photographs, on a GPU
    python benchmarks/batches_study.py --pairs 8000 --samples 32000 --batch-sizes 128 512        two CPU cores

All runs train the model "small" from random weights with `megabatch train`'s trainer, and see the same number of pairs. "mined"
groups the pairs with the current weights, at the first step and after each eighth of the run. "source" has a source in each
batch: for wordnet a quarter of the pairs in the order of its files, which is mostly by part of speech, and for Flickr8k one of
the five captions of each photograph. The learning rate grows with the root of the batch size and is the same for all three.
The first loss is the loss of the first step. All runs of a seed have the same weights there, so it compares the batches.

Each run writes a line to batches_study.jsonl and is not repeated, so the study can be stopped and continued. `--folder` has the
files of Flickr8k (benchmarks/flickr8k_data.py).
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flickr8k_data import HELD_OUT, TEST, TRAIN, Captioned, Pictures, make_noise, read
from torch import Tensor

from megabatch.world import World
from megabatch_train import machine, settings, towers
from megabatch_train.bench.measure import number_options, paragraphs
from megabatch_train.data.dataset import Dataset
from megabatch_train.data.demo import WordNet
from megabatch_train.data.load import Mix
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results
from megabatch_train.trainer.config import TrainConfig
from megabatch_train.trainer.loop import Trainer

KINDS = ("random", "source", "mined")
SEARCHES = 8  # searches for groups in a run
RATE, BASE = 3e-3, 1024  # learning rate at this batch size
METRICS = {"wordnet": "query_to_text", "flickr8k": "text_to_image"}
KEYS = ("data", "batches", "batch_size", "seed", "samples", "pairs")


class Losses:
    """An observer that keeps the losses of all steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, record: Mapping[str, Any]) -> None:
        """Called after a step."""
        self.losses.append(record["loss"])

    def start(self, run: Any) -> None:
        """Called before the first step."""

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Called after an evaluation."""

    def on_save(self, path: Path) -> None:
        """Called after a file was written."""

    def finish(self, run: Any) -> None:
        """Called at the end."""


def divide(dataset: Dataset, name: str) -> Mix:
    """Returns the pairs as a mixture of sources, in which every pair occurs once."""
    everything = range(len(dataset))
    if name == "flickr8k":
        return Mix([_Source(dataset, everything[caption::5]) for caption in range(5)])
    return Mix([_Source(dataset, everything[len(dataset) * i // 4 : len(dataset) * (i + 1) // 4]) for i in range(4)])


class _Source(Dataset):
    """Some samples of a dataset in memory."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        super().__init__()
        self.whole, self.indices, self.sides = dataset, list(indices), dataset.sides

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.indices)

    def read(self, index: int, side: int) -> Any:
        """Reads a sample of the whole dataset."""
        return self.whole.read(self.indices[self.check(index)], side)

    def name(self, index: int) -> str:
        """Returns the name in the whole dataset."""
        return self.whole.name(self.indices[self.check(index)])

    def ids(self, indices: Sequence[int]) -> Tensor | None:
        """Returns the ids in the whole dataset."""
        return self.whole.ids([self.indices[index] for index in indices])


def load(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Returns the pairs for training and for the evaluation."""
    if options.data == "wordnet":
        train, test = WordNet("train"), WordNet("test")
        return (_thin(train, options.pairs), _thin(test, options.pairs // 4)) if options.pairs else (train, test)
    pictures: Pictures = make_noise(80) if options.folder is None else read(options.folder, 80 if options.tiny else None)
    held_out = min(HELD_OUT, len(pictures.captions) // 4)
    return Captioned(pictures, held_out, TRAIN), Captioned(pictures, held_out, TEST)


def _thin(dataset: Dataset, count: int) -> Dataset:
    """Returns evenly spaced samples of a dataset."""
    return dataset.part(range(0, len(dataset), max(1, len(dataset) // count)))


def run(setting: dict[str, Any], train: Dataset, test: Dataset, device: torch.device) -> dict[str, Any]:
    """Trains a model from random weights and evaluates it."""
    size, steps = setting["batch_size"], max(1, setting["samples"] // setting["batch_size"])
    kind = setting["batches"]
    changes: dict[str, Any] = {
        "data": setting["data"],
        "batch_size": size,
        "steps": steps,
        "seed": setting["seed"],
        "batches": kind,
        "collapse": "warn",
        "checkpoint": {"every": steps},
        "optimizer": {"lr": RATE * math.sqrt(size / BASE), "weight_decay": 0.1},
        "schedule": {"warmup_fraction": 0.1},
        "memory": {"resident": 0.3 if device.type == "cuda" and setting["data"] == "flickr8k" else 0.0},
    }
    if kind == "mined":
        changes["mining"] = {"every": max(1, -(-steps // SEARCHES))}
    torch.manual_seed(setting["seed"])
    pair, observer = towers.load("small", train.sides), Losses()
    data = divide(train, setting["data"]) if kind == "source" else train
    folder = Path(tempfile.mkdtemp(prefix="batches_study"))
    try:
        begin = time.perf_counter()
        config = settings.build(TrainConfig, changes)
        trainer = Trainer(config, pair, data, folder, validation=test, observers=[observer], world=World(device))
        metrics = trainer.fit() or {}
        seconds = time.perf_counter() - begin
    finally:
        shutil.rmtree(folder)
    way = METRICS[setting["data"]]
    recalls = {f"R@{k}": metrics[f"{way}_R@{k}"] for k in (1, 5, 10)}
    return {**recalls, "first_loss": observer.losses[0], "last_loss": observer.losses[-1], "steps": steps, "seconds": seconds}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the Markdown: mean and standard deviation over seeds."""
    parts = []
    for name in dict.fromkeys(line["data"] for line in lines):
        for samples, pairs in sorted({(line["samples"], line["pairs"]) for line in lines if line["data"] == name}):
            own = [line for line in lines if (line["data"], line["samples"], line["pairs"]) == (name, samples, pairs)]
            rows = []
            for size in sorted({line["batch_size"] for line in own}):
                for kind in KINDS:
                    runs = [line for line in own if (line["batch_size"], line["batches"]) == (size, kind)]
                    if runs:
                        values = [_spread([one[f"R@{k}"] for one in runs], 100) for k in (1, 5, 10)]
                        first = _spread([one["first_loss"] for one in runs], 1, 2)
                        seconds = f"{sum(one['seconds'] for one in runs) / len(runs):.0f}"
                        rows.append([f"{size:,}", runs[0]["steps"], kind, *values, first, seconds, len(runs)])
            of = f" of {pairs:,} different ones" if pairs else ""
            title = f"{name}: {METRICS[name].replace('_to_', ' → ')}, {samples:,} pairs{of} seen by every run"
            names = ["pairs in a batch", "steps", "batches", "R@1, %", "R@5, %", "R@10, %", "first loss", "seconds", "seeds"]
            parts += [
                f"### {title}",
                TextTable(names, rows, notes="Values: mean ± deviation over seeds.", names=(2,)).markdown(),
            ]
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    return paragraphs(*parts, f"Machine: {machines}.\n")


def report(path: Path) -> None:
    """Writes the tables of a file of lines (.md)."""
    path.with_suffix(".md").write_text(table(results.read(path)), "utf-8")


def _spread(values: Sequence[float], factor: float, digits: int = 1) -> str:
    numbers = factor * torch.tensor(values, dtype=torch.float64)
    deviation = numbers.std().item() if len(numbers) > 1 else 0.0
    return f"{numbers.mean().item():.{digits}f} ± {deviation:.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", choices=tuple(METRICS), default="wordnet", help="pairs to train on (default: %(default)s)")
    add("--folder", type=Path, help="folder with the files of Flickr8k (default: noise)")
    add("--tiny", action="store_true", help="run the same code with few pairs on a CPU, in less than a minute")
    add("--batches", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of batches (default: all)")
    add("--output", type=Path, default=Path("runs/batches_study"), help="folder for the results (default: %(default)s)")
    number_options(
        parser,
        batch_sizes=([256, 1024, 4096], "batch sizes"),
        seeds=([0, 1, 2], "seeds of the runs"),
        samples=(800_000, "pairs that every run sees"),
        pairs=(0, "different pairs of wordnet in the training data; 0 for all"),
    )
    options = parser.parse_args()
    if options.tiny:
        options.batch_sizes, options.seeds, options.samples, options.pairs = [32], [0], 256, 400
    path, device = options.output / "batches_study.jsonl", torch.device("cuda" if torch.cuda.is_available() else "cpu")
    done = results.read(path) if path.exists() else []
    finished = {tuple(line[key] for key in KEYS) for line in done}
    todo = [
        dict(zip(KEYS, (options.data, kind, size, seed, options.samples, options.pairs), strict=True))
        for seed in options.seeds
        for size in sorted(options.batch_sizes, reverse=True)
        for kind in options.batches
        if (options.data, kind, size, seed, options.samples, options.pairs) not in finished
    ]
    print(f"{len(todo)} runs to do", flush=True)
    if todo:
        train, test = load(options)
    for number, setting in enumerate(todo, 1):
        result = run(setting, train, test, device)
        results.append(path, {**setting, **result, "machine": machine.summary(machine.describe())})
        print(f"[{number}/{len(todo)}] {setting} R@10 {result['R@10']:.1%}, {result['seconds']:.0f} s", flush=True)
    report(path)
    print(table(results.read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
