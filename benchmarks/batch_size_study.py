"""Does a larger batch help? Recall against batch size on WordNet, for three ways to scale the learning rate.

    pip install "megabatch[train,wordnet]"
    python benchmarks/batch_size_study.py                                                             one GPU, minutes
    python benchmarks/batch_size_study.py --samples 24000 --batch-sizes 256 1024 4096 --lr 4e-3       two CPU cores, minutes

A small text tower learns to match words with their definitions. Every run sees the same number of pairs, with another batch
size. All runs have the same learning rate at 1,024 pairs: the smallest of five rates whose recall is nearly the best. Each rate
is tried in one run, with a seed that other runs do not use. At other batch sizes the rate is constant, or grows with the
square root of the batch size, or with the batch size. The test data are 5,000 definitions that are not in the training data,
with all their words, as in a reverse dictionary. Words with the same meaning share a definition, so they are not negatives of
each other (`ids`).

Each run writes a line to batch_size_study.jsonl and is not repeated. So the study can be stopped and continued, and extended by
seeds, sizes and learning rates. The tables and the plot show mean and standard deviation over seeds, from all lines.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch_train import machine
from megabatch_train.bench.measure import number_options, paragraphs
from megabatch_train.data.demo import WordNet
from megabatch_train.data.loader import Order
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results, retrieval
from megabatch_train.towers.small import n_grams

RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # the learning rate grows with this power of the batch size
BASE = 1024  # batch size at which all rules have the same rate
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # learning rates that are tried at this batch size
NEARLY = 0.97  # fraction of the best recall; the smallest such rate is taken, because rules can make it larger
TRIAL = 1000  # seed of the runs that try the rates
BY = "word_to_definition_R@10"
BUCKETS, GRAMS, LONGEST = 1 << 15, (3, 4), 96  # n-grams: number of buckets, lengths in characters, most n-grams of a text
WIDTH = 256
CHUNK = 8192  # samples encoded at once
WARM_UP = 0.1  # fraction of all steps
NAMES = ("definition", "word")
GROWTH = {"none": "constant", "sqrt": "∝ root of batch", "linear": "∝ batch"}
COLORS = {"none": plots.BLUE, "sqrt": plots.GREEN, "linear": plots.ORANGE}


class Tower(nn.Module):
    """A tower that adds the mean embedding of the n-grams of a text and the output of a hidden layer. The id 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.grams = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", padding_idx=0)
        nn.init.normal_(self.grams.weight, std=WIDTH**-0.5)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, grams: Tensor) -> Tensor:  # (n, LONGEST) int32 -> (n, WIDTH)
        """Returns embeddings of unit length."""
        bag = self.norm(self.grams(grams))
        return F.normalize(bag + self.hidden(bag), dim=-1)


class Pairs(NamedTuple):
    """A split on the device. Texts are ids of n-grams, and each definition is stored once."""

    words: Tensor  # (pairs, LONGEST) int32
    definitions: Tensor  # (meanings, LONGEST) int32
    meanings: Tensor  # (pairs,) int64, rows of `definitions`


class Setting(NamedTuple):
    """The settings of a run."""

    batch_size: int
    lr: float
    seed: int
    samples: int


class Bench:
    """Runs the settings that are not in the file. Texts are tokenized once, before the first run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.splits: list[Pairs] = []

    def known(self) -> list[dict[str, Any]]:
        """Returns all lines of the file."""
        return results.read(self.file) if self.file.exists() else []

    def results(self, requests: Sequence[Setting]) -> list[dict[str, Any]]:
        """Returns the line of each setting, after running the missing ones."""
        finished = {_setting(line) for line in self.known()}
        todo = [setting for setting in requests if setting not in finished]
        print(f"{len(todo)} runs to do, {len(requests) - len(todo)} runs in {self.file}", flush=True)
        if todo:
            self._run(todo)
        lines = {_setting(line): line for line in self.known()}
        return [lines[setting] for setting in requests]

    def _run(self, todo: Sequence[Setting]) -> None:
        self.splits = self.splits or [tokenize(WordNet(split), self.device) for split in ("train", "test")]
        for i, setting in enumerate(todo, 1):
            result = run(setting, *self.splits, self.device)
            results.append(self.file, {**setting._asdict(), **result, "machine": machine.summary(machine.describe())})
            description = f"batch {setting.batch_size:,}, rate {setting.lr:.1e}, seed {setting.seed}"
            print(f"[{i}/{len(todo)}] {description}: {BY} {result[BY]:.1%}, {result['seconds']:.0f} s", flush=True)


def settings(options: argparse.Namespace) -> list[Setting]:
    """Returns the settings of all runs, large batches first because they are fast. At `BASE` all rules share a run."""
    unique = {
        Setting(size, options.lr * (size / BASE) ** RULES[rule], seed, options.samples): None
        for size in sorted(options.batch_sizes, reverse=True)
        for seed in options.seeds
        for rule in options.rules
    }
    return list(unique)


def tokenize(data: WordNet, device: torch.device) -> Pairs:
    """Converts all texts to ids of n-grams. The ids of each word are computed once."""
    grams_of: dict[str, Tensor] = {}

    def grams(text: str) -> Tensor:  # (LONGEST,) int32
        row = torch.zeros(LONGEST, dtype=torch.int32)
        start = 0
        for word in text.lower().split():
            if word not in grams_of:
                grams_of[word] = n_grams(word, BUCKETS - 1, GRAMS).to(torch.int32) + 1
            ids = grams_of[word][: LONGEST - start]
            row[start : start + len(ids)] = ids
            start += len(ids)
        return row

    indices = range(len(data))
    unique_ids, meanings = torch.unique(data.ids(indices), return_inverse=True)
    first = torch.full((len(unique_ids),), len(data)).scatter_reduce(0, meanings, torch.arange(len(data)), "amin")
    words = torch.stack([grams(data.read(i, 0)) for i in indices])
    definitions = torch.stack([grams(data.read(i, 1)) for i in first.tolist()])
    return Pairs(words.to(device), definitions.to(device), meanings.to(device))


def run(setting: Setting, train: Pairs, test: Pairs, device: torch.device) -> dict[str, Any]:
    """Trains a tower from random weights and evaluates it."""
    torch.manual_seed(setting.seed)
    tower = Tower().to(device)
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), device=device))
    optimizer = torch.optim.AdamW(
        [*tower.parameters(), log_scale], lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    steps = max(1, setting.samples // setting.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    start = time.perf_counter()
    loss = torch.tensor(math.nan)
    for batch in Order(len(train.words), setting.batch_size, setting.seed).batches(0, steps):
        indices = batch.indices.to(device, non_blocking=True)
        meanings = train.meanings[indices]
        with autocast:
            loss = mb.cached_backward(
                lambda word, definition, ids=meanings: mb.clip_loss(word, definition, log_scale.exp(), ids=ids),
                [(tower, train.words[indices]), (tower, train.definitions[meanings])],
                chunk_size=CHUNK,
                budget="all",  # the graph of this tower is small, so no chunk is encoded twice
            )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            log_scale.clamp_(max=math.log(100))
    last_loss = loss.item()  # waits for the device
    seconds = time.perf_counter() - start
    return {"steps": steps, "loss": last_loss, "seconds": seconds, **evaluate(tower, test)}


@torch.no_grad()
def evaluate(tower: Tower, test: Pairs) -> dict[str, float]:
    """Returns the recall in both directions. If a definition has several words, its best word counts."""
    tower.eval()
    definitions, words = (torch.cat([tower(part) for part in side.split(CHUNK)]) for side in (test.definitions, test.words))
    return retrieval(definitions, words, test.meanings, names=NAMES)


def warm_up_and_cosine(step: int, steps: int) -> float:
    warm_up = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _setting(line: dict[str, Any]) -> Setting:
    return Setting(*(line[name] for name in Setting._fields))


def report(path: Path) -> None:
    """Writes a table for each learning rate at `BASE` pairs (.md) and the plot (.svg) into the folder of the lines."""
    lines = [line for line in results.read(path) if line["seed"] != TRIAL]
    base_rates = sorted({line["lr"] for line in lines if line["batch_size"] == BASE}, reverse=True)
    if not base_rates:
        print(f"No report was written because no run has {BASE:,} pairs.")
        return
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    samples = max(line["samples"] for line in lines)
    parts = []
    for rate in base_rates:
        command = f"Command: `python benchmarks/batch_size_study.py --lr {rate:g} --samples {samples}`"
        parts += [f"### Rate {rate:g} at {BASE:,} pairs", table(lines, rate, samples).markdown(), command]
    path.with_suffix(".md").write_text(paragraphs(*parts, f"Machine: {machines}.\n"), "utf-8")
    if plots.available():
        plots.save(draw(lines, base_rates), path.with_suffix(".svg"))


def table(lines: Sequence[dict[str, Any]], base_lr: float, samples: int) -> TextTable:
    """Returns the table of a base rate. Missing runs have empty cells."""
    rows = []
    for size in sorted({line["batch_size"] for line in lines}):
        cells = [f"{size:,}", f"{max(1, samples // size):,}"]
        for rule in RULES:
            lr = base_lr * (size / BASE) ** RULES[rule]
            one, ten = (summary(lines, size, lr, f"word_to_definition_R@{k}") for k in (1, 10))
            cells.append("" if one is None or ten is None else f"{lr:.1e}, {_plus_minus(one)}, {_plus_minus(ten)}")
        rows.append(cells)
    seeds = len({line["seed"] for line in lines})
    notes = f"Words find definitions among 5,000. Every run sees {samples:,} pairs. Values: mean ± deviation of {seeds} seeds."
    return TextTable(
        ["pairs in a batch", "steps", *(f"{rule}: rate, R@1, R@10" for rule in RULES)], rows, notes=notes, names=(2, 3, 4)
    )


def summary(lines: Sequence[dict[str, Any]], size: int, lr: float, metric: str) -> tuple[float, float, int] | None:
    """Returns mean and standard deviation over seeds, and the number of seeds, or None if there are no runs."""
    recalls = [line[metric] for line in lines if line["batch_size"] == size and math.isclose(line["lr"], lr, rel_tol=1e-9)]
    if not recalls:
        return None
    values = torch.tensor(recalls, dtype=torch.float64)
    return values.mean().item(), values.std().item() if len(values) > 1 else 0.0, len(values)


def _plus_minus(value: tuple[float, float, int]) -> str:
    return f"{100 * value[0]:.1f} ± {100 * value[1]:.1f} %"


def draw(lines: Sequence[dict[str, Any]], base_rates: Sequence[float]) -> Any:
    """Draws recall against the batch size for each learning rate at `BASE` pairs, with the deviation over seeds."""
    seeds = len({line["seed"] for line in lines})
    title = f"WordNet: words find definitions, {lines[0]['samples']:,} pairs seen by every run, {seeds} seeds"
    figure, panels = plots.panels(title, len(base_rates))
    sizes = sorted({line["batch_size"] for line in lines})
    for axes, base_lr in zip(panels, base_rates, strict=True):
        for rule, power in RULES.items():
            summaries = [
                (size, summary(lines, size, base_lr * (size / BASE) ** power, "word_to_definition_R@1")) for size in sizes
            ]
            points = [(size, 100 * value[0], 100 * value[1]) for size, value in summaries if value is not None]
            plots.line(axes, [(size, mean) for size, mean, _ in points], f"rate {GROWTH[rule]}", COLORS[rule])
            for size, mean, deviation in points:
                axes.plot([size, size], [mean - deviation, mean + deviation], color=COLORS[rule], linewidth=1.2)
        axes.set_ylabel(f"recall@1, %, rate {base_lr:g} at {BASE:,}")
        plots.batch_axis(axes, sizes, "pairs in a batch")
        plots.label_lines(axes)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    number_options(
        parser,
        batch_sizes=([256 << power for power in range(8)], "batch sizes"),
        seeds=([0, 1, 2], "seeds of the runs"),
        samples=(800_000, "pairs that every run sees"),
    )
    add(
        "--rules",
        nargs="+",
        choices=tuple(RULES),
        default=list(RULES),
        help="rules that scale the learning rate (default: all)",
    )
    add("--lr", type=float, help=f"learning rate at {BASE:,} pairs (default: chosen from {', '.join(map(str, RATES))})")
    add("--output", type=Path, default=Path("runs/batch_size_study"), help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    bench = Bench(options.output / "batch_size_study.jsonl")
    if options.lr is None:
        tried = bench.results([Setting(BASE, lr, TRIAL, options.samples) for lr in RATES])
        best = max(line[BY] for line in tried)
        options.lr = min(line["lr"] for line in tried if line[BY] >= NEARLY * best)
        print("tried: " + ", ".join(f"{line['lr']} {line[BY]:.1%}" for line in tried) + f"; taken: {options.lr}")
    bench.results(settings(options))
    report(bench.file)
    table([line for line in bench.known() if line["seed"] != TRIAL], options.lr, options.samples).print()


if __name__ == "__main__":
    main()
