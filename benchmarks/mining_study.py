"""What hard negatives change: recall after `megabatch mine` and further training, on WordNet and on Flickr8k.

    pip install "megabatch[wordnet,huggingface,open_clip,bench]"
    python benchmarks/mining_study.py --data FOLDER                                 both data sets, one GPU, minutes
    python benchmarks/mining_study.py --parts wordnet --name mining_study_cpu       a smaller encoder, one core, 13 minutes

The commands `train`, `mine` and `eval` do all the work; this script calls them. Each seed trains a base model, and mines hard
negatives with it. Then three models go on from its weights, with the same pairs in the same order:

    control     without mined negatives
    mined       only negatives whose similarity to the query is 0.05 below that of its match, or less (`--absolute-margin`)
    unfiltered  the most similar negatives

All three read a table that `mine` wrote; the control leaves out its columns of negatives. The three see the same number of
pairs. Steps with mined negatives encode more texts and take longer.

The script stops if a negative is a text of the pair's own word or image. It also stops if the loss of the first step is not
larger with mined negatives than without them: batch and weights are the same, so the negatives were not used.

wordnet: words find definitions. Each word keeps one of its definitions. With all of them, words of several meanings would
connect a third of WordNet, and `train` takes connected pairs for one id, whose pairs are not each other's negatives. The other
definitions of a word are false negatives that are known, so they show what the filter does. Held-out pairs have words and
definitions that are not in the training data.

flickr8k: images find captions; 1,000 images are held out. Captions of one image share its path, and so an id. The images are
written as files, because `mine` names them in its table.

Each model is a line of results and is not trained again, so the study can be stopped and continued. On a GPU the seeds run at
the same time (`--beside`).
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flickr8k_data import HELD_OUT
from image_study import Sizes as ImageSizes
from image_study import add_model
from mining_study_data import MEANINGS, flickr_tables, read_table, text_model, wordnet_tables, write_table
from mining_study_report import ARMS, BASE, CONTROL, MINED, UNFILTERED, WAYS, report
from record import arguments

from megabatch import cli, machine
from megabatch.evaluation import results
from megabatch.towers.saved import WEIGHTS
from megabatch.trainer.observers import METRICS

WORDNET, FLICKR = "wordnet", "flickr8k"
MARGIN = 0.05  # of the docs; NV-Retriever's best with a margin (arXiv 2407.15831)
FILTERS = {MINED: ["--absolute-margin", str(MARGIN)], UNFILTERED: []}
COLUMNS = {WORDNET: ["query=query", "document=document"], FLICKR: ["image=image", "text=caption"]}  # without the negatives
WARM_UP = 0.1
RESIDENT = 0.1  # of the free memory, for the data of the base model
GRAPHS = 0.2  # of the free memory, for each of the seeds that share the GPU


class Size(NamedTuple):
    """How large the study of one data set is."""

    pairs: int  # to train on, at most
    model: Any  # layers, width and vocabulary of an encoder of texts; or an image tower and the sizes of `image_study.py`
    batch_size: int
    steps: int  # of the base model
    further: int  # steps of each of the others
    lr: float
    further_lr: float
    weight_decay: float
    negatives: int
    held_out: int = HELD_OUT  # images

    def described(self) -> str:
        """The model in words."""
        if isinstance(self.model[0], str):
            tower, sizes = self.model
            return f"CLIP {tower}, {sizes.layers[0]} and {sizes.layers[1]} layers of width {sizes.width}"
        layers, width, vocabulary = self.model
        return f"BERT, {layers} layer{'s' * (layers > 1)} of width {width}, {vocabulary:,} tokens"


SIZES = {
    (WORDNET, "gpu"): Size(200_000, (2, 256, 16_384), 1024, 400, 100, 1e-3, 3e-4, 0.01, 4),
    (WORDNET, "cpu"): Size(60_000, (1, 128, 8192), 512, 240, 40, 3e-3, 1e-3, 0.01, 2),
    (WORDNET, "tiny"): Size(300, (1, 32, 400), 32, 40, 6, 3e-3, 1e-3, 0.01, 2),
    (FLICKR, "gpu"): Size(40_000, ("96/16", ImageSizes()), 1024, 400, 60, 1e-3, 2e-4, 0.2, 4),
    (FLICKR, "cpu"): Size(10_000, ("64/16", ImageSizes((2, 2), 128)), 256, 200, 40, 1e-3, 3e-4, 0.2, 2),
    (FLICKR, "tiny"): Size(200, ("32/16", ImageSizes((1, 1), 32)), 32, 60, 3, 3e-3, 1e-3, 0.0, 2, 12),
}


class Prepared(NamedTuple):
    """Data and model of a part, ready for the commands."""

    part: str
    size: Size
    folder: Path  # of the runs
    train: Path
    test: Path
    model: str  # with random weights
    meanings: Path | None  # the definitions of words that have several


def prepared(part: str, which: str, options: argparse.Namespace) -> Prepared:
    """Writes tables and model, or finds those of an earlier call."""
    size, folder = SIZES[part, which], options.work / f"{part}_{which}"
    if part == FLICKR:
        folder = folder if options.data is not None else options.work / "invented"
        flickr_tables(options.data, folder, size.held_out, size.pairs)
        return Prepared(part, size, folder, folder / "train.jsonl", folder / "test.jsonl", "", None)
    whole = options.work / WORDNET
    wordnet_tables(whole)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = read_table(whole / "train.jsonl")[: size.pairs]
    write_table(folder / "train.jsonl", ("query", "document"), [(word, definition) for word, definition in pairs])
    test = whole / "test.jsonl"
    if which == "tiny":
        test = folder / "test.jsonl"
        write_table(test, ("query", "document"), [(word, text) for word, text in read_table(whole / "test.jsonl")[:100]])
    model = text_model(folder / "model", [text for pair in pairs for text in pair], *size.model)
    return Prepared(part, size, folder, folder / "train.jsonl", test, model, whole / MEANINGS)


class Seed:
    """The models of one seed, one after another.

    Args:
        given: data and model.
        seed: of the base model's weights and of the order of all runs.
        file: of the results.
        until: the time (`time.time`) after which no run begins.
        readers: of images.
    """

    def __init__(self, given: Prepared, seed: int, file: Path, until: float, readers: int) -> None:
        self.given, self.seed, self.file, self.until = given, seed, file, until
        self.readers = readers if given.part == FLICKR else 0
        self.folder = given.folder / f"seed_{seed}"
        self.base = self.folder / BASE

    def known(self) -> dict[str, dict[str, Any]]:
        """{arm: its line}. A seed whose base model is gone begins again, unless all of its lines are there."""
        setting = self.setting()
        lines = results.read(self.file) if self.file.exists() else []
        found = {line["arm"]: line for line in lines if all(line[key] == value for key, value in setting.items())}
        return found if len(found) == len(ARMS) or (self.base / WEIGHTS).exists() else {}

    def setting(self) -> dict[str, Any]:
        """What a line is of, but for the arm."""
        size = {**self.given.size._asdict(), "model": self.given.size.described()}
        return {"data": self.given.part, "seed": self.seed, **size}

    def work(self) -> bool:
        """Trains the models that are missing; whether all are there now."""
        if self.given.part == FLICKR:
            tower, sizes = self.given.size.model
            self.given = self.given._replace(model=f"open_clip:{add_model(tower, sizes)}")
        known = self.known()
        for arm in ARMS:
            if arm in known:
                continue
            if time.time() > self.until:
                return False
            if arm == BASE:
                shutil.rmtree(self.folder, ignore_errors=True)  # tables that another base model mined
            began = time.perf_counter()
            with quiet(self.folder / "commands.log"):
                found = self.first() if arm == BASE else self.second(arm)
            found |= {"seconds": time.perf_counter() - began, "machine": machine.summary(machine.describe())}
            if arm in FILTERS:
                control, mined = known[CONTROL]["first_loss"], found["first_loss"]
                assert mined > control, f"the mined negatives were not used: first loss {mined}, and {control} without them"
            known[arm] = {**self.setting(), "arm": arm, **found}
            results.append(self.file, known[arm])
            told = ", ".join(f"{name} {found[metric]:.1%}" for metric, name in at_one(self.given.part).items())
            print(f"{self.given.part} seed {self.seed} {arm:<10} R@1: {told}; {found['seconds']:.0f} s", flush=True)
        return True

    def first(self) -> dict[str, Any]:
        """The base model."""
        size, resident = self.given.size, ("--set", f"memory.resident={RESIDENT}")
        self.train(self.base, self.given.train, self.given.model, size.steps, size.lr, 0, *resident)
        return self.tested(self.base)

    def second(self, arm: str) -> dict[str, Any]:
        """A model that goes on from the base model's weights."""
        size, folder = self.given.size, self.folder / arm
        filtered = MINED if arm == CONTROL else arm
        table = self.folder / f"{filtered}.jsonl"
        told = self.mine(table, FILTERS[filtered])
        weights = f"hf:{self.base}" if self.given.part == WORDNET else f"{self.given.model}@{self.base / WEIGHTS}"
        further = ["--set", f"loss.scale={self.steps(self.base)[-1]['scale']}"]
        if arm == CONTROL:
            told = {}
            further += ["--columns", *COLUMNS[self.given.part]]
        self.train(folder, table, weights, size.further, size.further_lr, self.readers, *further)
        return {**self.tested(folder), **told}

    def train(self, folder: Path, data: Path, model: str, steps: int, lr: float, readers: int, *further: str) -> None:
        """`megabatch train`. InfoNCE in both directions is CLIP's loss; mined negatives are in the first direction."""
        size = self.given.size
        shutil.rmtree(folder, ignore_errors=True)
        settings = ["loss.symmetric=true", f"checkpoint.every={steps}", "checkpoint.minutes=0.0", f"memory.graphs={GRAPHS}"]
        megabatch(
            *("train", "--data", data, "--model", model, "--output", folder, "--seed", self.seed, "--loss", "info_nce"),
            *("--batch-size", size.batch_size, "--chunk-size", size.batch_size, "--steps", steps, "--lr", lr),
            *("--warm-up", WARM_UP, "--weight-decay", size.weight_decay, "--workers", readers, "--compile", "off"),
            *("--no-report", *(word for setting in settings for word in ("--set", setting)), *further),
        )
        shutil.rmtree(folder / "checkpoints")

    def mine(self, table: Path, filters: Sequence[str]) -> dict[str, Any]:
        """`megabatch mine`, if the table is not there; returns counts of its negatives."""
        if not table.exists():
            output = self.folder / "candidates.jsonl"  # one name for all filters, whose embeddings are then those kept
            megabatch(
                *("mine", self.base, "--data", self.given.train, "--output", output, "--keep-embeddings", *filters),
                *("--negatives", self.given.size.negatives, "--chunk-size", 1024, "--workers", self.readers),
            )
            output.rename(table)
        return counted(self.given, table)

    def tested(self, folder: Path) -> dict[str, Any]:
        """`megabatch eval`, and the first and the last loss."""
        file = folder / "recall.jsonl"
        megabatch(
            *("eval", folder, "--data", self.given.test, "--output", file),
            *("--chunk-size", 1024, "--workers", self.readers),
        )
        found = results.read(file)[-1]
        kept = {key: found[key] for key in found if "_R@" in key or key.startswith("num_")}
        steps = self.steps(folder)
        return {**kept, "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"], "scale": steps[-1]["scale"]}

    def steps(self, folder: Path) -> list[dict[str, Any]]:
        """The metrics of each step of a run."""
        return [line for line in results.read(folder / METRICS) if "loss" in line]


def counted(given: Prepared, table: Path) -> dict[str, Any]:
    """Checks a mined table against the table of pairs, and counts its negatives.

    `mine` leaves out texts by the ids of pairs. The check uses no ids: no negative of a word or an image may be one of the
    texts that the table of pairs has for it.
    """
    pairs, lines = read_table(given.train), read_table(table)
    texts: dict[str, set[str]] = {}
    for first, text in pairs:
        texts.setdefault(name_of(first), set()).add(text)
    meanings = {} if given.meanings is None else json.loads(given.meanings.read_text())
    assert len(lines) == len(pairs), f"{table} must have {len(pairs)} lines, got {len(lines)}"
    count = wrong = 0
    for (first, text), (mined, same, *found) in zip(pairs, lines, strict=True):
        negatives = [negative for negative in found if negative is not None]
        assert (name_of(first), text) == (name_of(mined), same), f"{table} must have the pairs in their order"
        assert not texts[name_of(first)].intersection(negatives), f"a negative of {first} in {table} is a text of its own"
        count += len(negatives)
        wrong += len(set(meanings.get(first, ())).intersection(negatives))
    wanted = len(lines) * given.size.negatives
    assert count, f"{table} must have negatives, got none"
    return {"found": count, "missing": wanted - count} | ({} if given.meanings is None else {"known_false": wrong})


def name_of(first: str) -> str:
    """A word, or the name of an image's file; a mined table has its whole path."""
    return first.rpartition("/")[2] if first.endswith((".webp", ".png")) else first


def at_one(part: str) -> dict[str, str]:
    """{metric: direction} of recall@1."""
    return {f"{way}_R@1": name for way, name in WAYS[part].items()}


def megabatch(*words: Any) -> None:
    """Calls a command in this process; an error ends the study."""
    assert cli.main([str(word) for word in words]) == 0, f"megabatch {words[0]} failed; see commands.log"


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[None]:
    """What commands print goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def work(*given: Any) -> bool:
    """One seed, in a process of its own."""
    os.environ["MEGABATCH_TRACEBACK"] = "1"
    torch.set_num_threads(1)
    return Seed(*given).work()


def main() -> None:
    options = parse()
    which = "tiny" if options.tiny else "gpu" if torch.cuda.is_available() else "cpu"
    beside = options.beside or (len(options.seeds) if which == "gpu" else 1)
    readers = len(os.sched_getaffinity(0)) // beside if which == "gpu" else 0
    file, until = options.output / f"{options.name}.jsonl", time.time() + options.seconds
    for part in options.parts:
        given = prepared(part, which, options)
        jobs = [(given, seed, file, until, readers) for seed in options.seeds]
        if beside == 1:
            done = [work(*job) for job in jobs]
        else:
            with ProcessPoolExecutor(beside, multiprocessing.get_context("spawn")) as pool:
                done = list(pool.map(work, *zip(*jobs, strict=True)))
        if not all(done):
            print(f"{part} is incomplete: run the same command again", flush=True)
    report(file)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(WORDNET, FLICKR), default=[WORDNET, FLICKR], help="(default: both)")
    parser.add_argument("--data", type=Path, help="folder with Flickr8k's .bin and .json; left out, a tiny run invents some")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--beside", type=int, help="seeds that share the device (default: all on a GPU, 1 on a CPU)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/mining_study"), help="folder for tables and models (default: %(default)s)"
    )
    arguments(parser, "mining_study", 3600)
    options = parser.parse_args()
    if FLICKR in options.parts and not options.tiny and options.data is None:
        parser.error("--data is needed: the folder with Flickr8k's .bin and .json")
    return options


if __name__ == "__main__":
    main()
