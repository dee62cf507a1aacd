"""Does a larger batch help? Recall against batch size on WordNet, for three ways to scale the learning rate.

    pip install "megabatch[train,wordnet]"
    python benchmarks/batch_size_study.py                                                             one GPU, minutes
    python benchmarks/batch_size_study.py --samples 24000 --batch-sizes 256 1024 4096 --lr 4e-3       two CPU cores, minutes

A small text tower learns to match words with their definitions. Every run sees the same number of pairs, at another batch size.
All runs have the same learning rate at 1,024 pairs: the smallest of five rates that is nearly as good as the best, by one run
each with a seed that is not used again. At other batch sizes the rate is constant, or grows with the root of the batch, or with
the batch. The test data are 5,000 definitions that are not in training, with all their words: a reverse dictionary. Words of
one meaning share its definition, and are not each other's negatives (`ids`).

Each run is a line in batch_size_study.jsonl and is not repeated, so the study can be stopped and continued, or extended by
seeds, sizes and learning rates. The tables and the plot (mean and standard deviation over seeds) are made from all lines.
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
from megabatch_train.bench.measure import paragraphs
from megabatch_train.data.demo import WordNet
from megabatch_train.data.order import Order
from megabatch_train.display import plots
from megabatch_train.display.tables import TextTable
from megabatch_train.evaluation import results, retrieval
from megabatch_train.towers.small import n_grams

RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # the learning rate grows with the batch to this power
BASE = 1024  # pairs in the batch at which all rules agree
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # learning rates that are tried there
NEARLY = 0.97  # of the best recall, by the smallest of them: rules that make it larger need room
TRIAL = 1000  # the seed they are tried with
BY = "word_to_definition_R@10"
BUCKETS, GRAMS, LONGEST = 1 << 15, (3, 4), 96  # of n-grams; the longest definitions are cut
WIDTH = 256
CHUNK = 8192  # samples encoded at once
WARM_UP = 0.1  # of all steps
NAMES = ("definition", "word")
GROWTH = {"none": "constant", "sqrt": "∝ root of batch", "linear": "∝ batch"}
COLOURS = {"none": plots.BLUE, "sqrt": plots.GREEN, "linear": plots.ORANGE}


class Tower(nn.Module):
    """The mean of the embeddings of a text's n-grams, and a hidden layer beside it. 0 is no n-gram."""

    def __init__(self) -> None:
        super().__init__()
        self.grams = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", padding_idx=0)
        nn.init.normal_(self.grams.weight, std=WIDTH**-0.5)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, grams: Tensor) -> Tensor:  # (n, LONGEST) int32 -> (n, WIDTH)
        """Embeddings of unit length."""
        bag = self.norm(self.grams(grams))
        return F.normalize(bag + self.hidden(bag), dim=-1)


class Pairs(NamedTuple):
    """A split on the device: texts as numbers, once each definition."""

    words: Tensor  # (pairs, LONGEST) int32
    definitions: Tensor  # (meanings, LONGEST) int32
    meanings: Tensor  # (pairs,) int64, rows of `definitions`


class Setting(NamedTuple):
    """One run."""

    batch_size: int
    lr: float
    seed: int
    samples: int


class Bench:
    """Runs the settings that are not in the file yet. Texts are tokenized once, before the first run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.splits: list[Pairs] = []

    def known(self) -> list[dict[str, Any]]:
        """All lines of the file."""
        return results.read(self.file) if self.file.exists() else []

    def results(self, wanted: Sequence[Setting]) -> list[dict[str, Any]]:
        """A line for each setting."""
        done = {_setting(line) for line in self.known()}
        todo = [setting for setting in wanted if setting not in done]
        print(f"{len(todo)} runs to do, {len(wanted) - len(todo)} known from {self.file}", flush=True)
        if todo:
            self._run(todo)
        lines = {_setting(line): line for line in self.known()}
        return [lines[setting] for setting in wanted]

    def _run(self, todo: Sequence[Setting]) -> None:
        self.splits = self.splits or [tokenize(WordNet(split), self.device) for split in ("train", "test")]
        for i, setting in enumerate(todo, 1):
            found = run(setting, *self.splits, self.device)
            results.append(self.file, {**setting._asdict(), **found, "machine": machine.summary(machine.describe())})
            told = f"batch {setting.batch_size:,}, rate {setting.lr:.1e}, seed {setting.seed}"
            print(f"[{i}/{len(todo)}] {told}: {BY} {found[BY]:.1%}, {found['seconds']:.0f} s", flush=True)


def settings(options: argparse.Namespace) -> list[Setting]:
    """Large batches first: they are quick, and the picture appears early. At `BASE` the rules are one run."""
    found = {
        Setting(size, options.lr * (size / BASE) ** RULES[rule], seed, options.samples): None
        for size in sorted(options.batch_sizes, reverse=True)
        for seed in options.seeds
        for rule in options.rules
    }
    return list(found)


def tokenize(data: WordNet, device: torch.device) -> Pairs:
    """All texts as the numbers of their n-grams; a word of many texts is looked up once."""
    of_word: dict[str, Tensor] = {}

    def grams(text: str) -> Tensor:  # (LONGEST,) int32
        row = torch.zeros(LONGEST, dtype=torch.int32)
        start = 0
        for word in text.lower().split():
            if word not in of_word:
                of_word[word] = n_grams(word, BUCKETS - 1, GRAMS).to(torch.int32) + 1
            found = of_word[word][: LONGEST - start]
            row[start : start + len(found)] = found
            start += len(found)
        return row

    everyone = range(len(data))
    known, meanings = torch.unique(data.ids(everyone), return_inverse=True)
    first = torch.full((len(known),), len(data)).scatter_reduce(0, meanings, torch.arange(len(data)), "amin")
    words = torch.stack([grams(data.read(i, 0)) for i in everyone])
    definitions = torch.stack([grams(data.read(i, 1)) for i in first.tolist()])
    return Pairs(words.to(device), definitions.to(device), meanings.to(device))


def run(setting: Setting, train: Pairs, test: Pairs, device: torch.device) -> dict[str, Any]:
    """Trains from scratch and tests."""
    torch.manual_seed(setting.seed)
    tower = Tower().to(device)
    log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), device=device))
    optimizer = torch.optim.AdamW(
        [*tower.parameters(), log_scale], lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    steps = max(1, setting.samples // setting.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    began = time.perf_counter()
    loss = torch.tensor(math.nan)
    for batch in Order(len(train.words), setting.batch_size, setting.seed).batches(0, steps):
        chosen = batch.indices.to(device, non_blocking=True)
        meanings = train.meanings[chosen]
        with autocast:
            loss = mb.cached_backward(
                lambda word, definition, ids=meanings: mb.clip_loss(word, definition, log_scale.exp(), ids=ids),
                [(tower, train.words[chosen]), (tower, train.definitions[meanings])],
                chunk_size=CHUNK,
                budget="all",  # a bag's graph is small: nothing is encoded twice
            )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            log_scale.clamp_(max=math.log(100))
    last = loss.item()  # waits for the device
    seconds = time.perf_counter() - began
    return {"steps": steps, "loss": last, "seconds": seconds, **evaluate(tower, test)}


@torch.no_grad()
def evaluate(tower: Tower, test: Pairs) -> dict[str, float]:
    """Recall both ways; of a definition with several words the best of them counts."""
    tower.eval()
    definitions, words = (torch.cat([tower(part) for part in side.split(CHUNK)]) for side in (test.definitions, test.words))
    return retrieval(definitions, words, test.meanings, names=NAMES)


def warm_up_and_cosine(step: int, steps: int) -> float:
    warm_up = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _setting(line: dict[str, Any]) -> Setting:
    return Setting(*(line[name] for name in Setting._fields))


def report(path: Path) -> None:
    """Writes a table for each learning rate at `BASE` pairs (.md), and the plot (.svg), beside the lines."""
    lines = [line for line in results.read(path) if line["seed"] != TRIAL]
    base_rates = sorted({line["lr"] for line in lines if line["batch_size"] == BASE}, reverse=True)
    if not base_rates:
        print(f"No report: a learning rate is named by its runs with {BASE:,} pairs, and there are none")
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
    """Runs that are missing leave their cells empty."""
    rows = []
    for size in sorted({line["batch_size"] for line in lines}):
        cells = [f"{size:,}", f"{max(1, samples // size):,}"]
        for rule in RULES:
            lr = base_lr * (size / BASE) ** RULES[rule]
            one, ten = (summary(lines, size, lr, f"word_to_definition_R@{k}") for k in (1, 10))
            cells.append("" if one is None or ten is None else f"{lr:.1e}, {_plus_minus(one)}, {_plus_minus(ten)}")
        rows.append(cells)
    seeds = len({line["seed"] for line in lines})
    notes = f"Words find definitions among 5,000; {samples:,} pairs seen by every run; {seeds} seeds, mean ± deviation."
    return TextTable(
        ["pairs in a batch", "steps", *(f"{rule}: rate, R@1, R@10" for rule in RULES)], rows, notes=notes, names=(2, 3, 4)
    )


def summary(lines: Sequence[dict[str, Any]], size: int, lr: float, metric: str) -> tuple[float, float, int] | None:
    """Mean, standard deviation over seeds, and their number."""
    found = [line[metric] for line in lines if line["batch_size"] == size and math.isclose(line["lr"], lr, rel_tol=1e-9)]
    if not found:
        return None
    values = torch.tensor(found, dtype=torch.float64)
    return values.mean().item(), values.std().item() if len(values) > 1 else 0.0, len(values)


def _plus_minus(value: tuple[float, float, int]) -> str:
    return f"{100 * value[0]:.1f} ± {100 * value[1]:.1f} %"


def draw(lines: Sequence[dict[str, Any]], base_rates: Sequence[float]) -> Any:
    """Recall against the batch size for each learning rate at `BASE` pairs, with the deviation over seeds."""
    seeds = len({line["seed"] for line in lines})
    title = f"WordNet: words find definitions, {lines[0]['samples']:,} pairs seen by every run, {seeds} seeds"
    figure, panels = plots.panels(title, len(base_rates))
    sizes = sorted({line["batch_size"] for line in lines})
    for axes, base_lr in zip(panels, base_rates, strict=True):
        for rule, power in RULES.items():
            known = [(size, summary(lines, size, base_lr * (size / BASE) ** power, "word_to_definition_R@1")) for size in sizes]
            found = [(size, 100 * value[0], 100 * value[1]) for size, value in known if value is not None]
            plots.line(axes, [(size, mean) for size, mean, _ in found], f"rate {GROWTH[rule]}", COLOURS[rule])
            for size, mean, deviation in found:
                axes.plot([size, size], [mean - deviation, mean + deviation], color=COLOURS[rule], linewidth=1.2)
        axes.set_ylabel(f"recall@1, %, rate {base_lr:g} at {BASE:,}")
        plots.batch_axis(axes, sizes, "pairs in a batch")
        plots.label_lines(axes)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [256 << power for power in range(8)]
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=sizes, help="(default: 256 to 32,768, each twice the last)")
    add("--rules", nargs="+", choices=tuple(RULES), default=list(RULES), help="(default: all)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    add("--samples", type=int, default=800_000, help="pairs that every run sees (default: %(default)s)")
    add("--lr", type=float, help=f"learning rate at {BASE:,} pairs (default: chosen of {', '.join(map(str, RATES))})")
    add("--output", type=Path, default=Path("runs/batch_size_study"), help="folder (default: %(default)s)")
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
