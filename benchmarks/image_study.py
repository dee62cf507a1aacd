"""What a large batch gives on photographs: recall against batch size on Flickr8k, trained by `megabatch.trainer`.

    python benchmarks/image_study.py --data FOLDER --parts choose rate        tower, crops and learning rate at 1,024 pairs
    python benchmarks/image_study.py --data FOLDER --parts study losses       batch sizes and learning rates; other losses
    python benchmarks/image_study.py --report                                 table, plot and text, on any machine

A small CLIP is trained from scratch on 7,091 photographs with five captions each. 1,000 other photographs are held out, and
recall is that among them. Captions of one photograph are not each other's negatives (`ids`), but for the comparison of losses,
since the other losses know no ids. Photographs are decoded once and stay on the GPU, where each epoch crops them differently.

Parts, each of which builds on the lines of the parts before:
    choose  resolution, patches and crops at 1,024 pairs, with one learning rate
    rate    the learning rate at 1,024 pairs
    study   batches of 256 to 32,768 pairs, equal samples, the rate constant or grown with the root of the batch or the batch
    steps   batches above 4,096 pairs with as many steps as 4,096 pairs have, at the best rule of their size
    losses  4,096 pairs with our loss, open_clip's dense loss and inf_cl's, from the same seeds
    siglip  SigLIP at 1,024 and 8,192 pairs

Each run is a line in image_study.jsonl and is not repeated, so that the study can be cut into slices (`--seconds`). Several
runs share the GPU (`--beside`): one alone does not keep it busy. After a slice, the best model draws what it finds for a few
captions (image_study_gallery.png).
"""

import argparse
import dataclasses
import gc
import json
import logging
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flickr8k_data import HELD_OUT, Captioned, Pictures, invented, read
from image_study_report import mean_recall, report
from record import arguments
from torch import Tensor

from megabatch import machine, towers
from megabatch.bench.loss_systems import DENSE, INF_CL, MEGABATCH, loss_of, open_clip_losses
from megabatch.data.crops import RandomCrop
from megabatch.data.resident import Resident
from megabatch.evaluation import results
from megabatch.evaluation.embedding import embed, encode
from megabatch.evaluation.search import search
from megabatch.evaluation.sheet import Found, draw
from megabatch.towers.tower import Pair
from megabatch.trainer import config as configs
from megabatch.trainer.loop import Trainer
from megabatch.trainer.observers import METRICS, MetricsFile
from megabatch.world import World

SIGLIP = "siglip"
BASE, SIZES = 1024, [256 << power for power in range(8)]
RULES = ("none", "sqrt", "linear")  # `optimizer.scaling`
TOWERS = ("96/16", "64/8", "128/16")  # pixels of a side / of a patch
CROPS = ((0.9, False), (0.4, True))  # least share of the area, and whether half of the images are mirrored
FIRST_RATE, RATES = 1e-3, (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
NEARLY = 0.97  # of the best mean recall: the smallest such rate is taken, because two rules make it larger
TRIAL = 1000  # the seed of choices, which the study does not use
SEEDS = (0, 1, 2)
EQUAL_STEPS_OF = 4096  # pairs
SIGLIP_SIZES = (1024, 8192)
CHUNK = 2048  # pairs encoded at once: 6 to 10 GB of activations
GRAPHS = 0.3  # of the free memory, for graphs of all runs together
WEIGHT_DECAY, WARM_UP = 0.2, 0.1
QUERIES, FOUND = 5, 5  # captions of the gallery, and photographs for each
GRACE = 15.0  # seconds after the limit in which a run may still end
FIRST_GUESS = 40_000.0  # pairs a second of all runs together, until one has been measured


class Setting(NamedTuple):
    """One run."""

    tower: str
    area: float
    flip: bool
    batch_size: int
    lr: float  # at `BASE` pairs
    rule: str
    steps: int
    seed: int
    loss: str = MEGABATCH
    ids: bool = True


class Sizes(NamedTuple):
    """What a tiny run has smaller."""

    layers: tuple[int, int] = (6, 4)  # of images and texts
    width: int = 256
    base: int = BASE
    sizes: Sequence[int] = SIZES
    samples: int = 1 << 20
    equal_steps_of: int = EQUAL_STEPS_OF
    siglip: Sequence[int] = SIGLIP_SIZES
    towers: Sequence[str] = TOWERS
    rates: Sequence[float] = RATES
    held_out: int = HELD_OUT


TINY = Sizes((1, 1), 32, 16, (16, 64), 256, 16, (16,), ("32/16",), (1e-3, 2e-3), 12)


# Which runs


def wanted(part: str, lines: list[dict[str, Any]], sizes: Sizes, options: argparse.Namespace) -> list[Setting]:
    """The runs of a part, the most telling first; earlier parts have chosen tower, crops and rate."""
    steps = sizes.samples // sizes.base
    if part == "choose":
        return [Setting(name, *crop, sizes.base, FIRST_RATE, "none", steps, TRIAL) for crop in CROPS for name in sizes.towers]
    chosen = best(part, "choose", lines, wanted("choose", lines, sizes, options))
    if part == "rate":
        return [chosen._replace(lr=rate) for rate in sizes.rates]
    tried = [line for line in lines if setting(line) in wanted("rate", lines, sizes, options)]
    if options.lr is None and len({line["lr"] for line in tried}) < len(sizes.rates):
        raise SystemExit(f"{part} needs the results of rate, or --lr")
    most = max((mean_recall(line) for line in tried), default=0.0)
    rate = options.lr or min(line["lr"] for line in tried if mean_recall(line) >= NEARLY * most)
    base = chosen._replace(lr=rate)
    if part == "study":
        return [
            base._replace(batch_size=size, rule=rule, steps=sizes.samples // size, seed=seed)
            for seed in options.seeds
            for size in sorted(sizes.sizes, reverse=True)
            for rule in (("none",) if size == sizes.base else RULES)  # there the rules agree
        ]
    study = [line for line in lines if setting(line) in set(wanted("study", lines, sizes, options))]

    def of(size: int) -> Setting:
        """The best rule of a batch size, by the mean over its seeds so far."""
        known: dict[str, list[float]] = {}
        for line in study:
            if line["batch_size"] == size:
                known.setdefault(line["rule"], []).append(mean_recall(line))
        untried = "none" if size == sizes.base else "sqrt"
        rule = max(known, key=lambda name: sum(known[name]) / len(known[name]), default=untried)
        return base._replace(batch_size=size, rule=rule, steps=sizes.samples // size)

    if part == "steps":
        steps, larger = sizes.samples // sizes.equal_steps_of, [size for size in sizes.sizes if size > sizes.equal_steps_of]
        return [of(size)._replace(steps=steps, seed=seed) for size in larger for seed in options.seeds]
    if part == "losses":
        return [
            of(sizes.equal_steps_of)._replace(seed=seed, loss=loss, ids=False)
            for seed in options.seeds
            for loss in (MEGABATCH, DENSE, INF_CL)
        ]
    return [of(size)._replace(seed=seed, loss=SIGLIP) for seed in options.seeds for size in sizes.siglip]


def best(part: str, before: str, lines: list[dict[str, Any]], candidates: list[Setting]) -> Setting:
    """The candidate with the best recall."""
    known = [line for line in lines if setting(line) in candidates]
    if not known:
        raise SystemExit(f"{part} needs the results of {before}")
    return setting(max(known, key=mean_recall))


def setting(line: dict[str, Any]) -> Setting:
    """The run that a line is of."""
    return Setting(*(line[name] for name in Setting._fields))


# One run


class Worker:
    """A process that makes one run after another; the data stay on the device between them."""

    def __init__(self, folder: Path | None, sizes: Sizes, beside: int, compiled: str) -> None:
        for name in (None, "megabatch"):  # open_clip warns of weights that are not pretrained
            logging.getLogger(name).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.sizes, self.beside, self.compiled = sizes, beside, compiled
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pictures = pictures(folder)
        self._data: tuple[Any, list[Resident]] = (None, [])

    def pair(self, wanted: Setting) -> Pair:
        """New towers, with the weights of the run's seed."""
        name = add_model(wanted.tower, self.sizes)
        torch.manual_seed(wanted.seed)
        made = towers.load(f"open_clip:{name}")
        training = made.first.training_images
        assert training is not None
        crop = RandomCrop(training.crop.size, area=(wanted.area, 1.0), flip=wanted.flip)
        first = dataclasses.replace(made.first, training_images=dataclasses.replace(training, crop=crop))
        return dataclasses.replace(made, first=first)

    def data(self, wanted: Setting, pair: Pair) -> list[Resident]:
        """Training and test data on the device; kept for the next run of the same tower."""
        key = wanted.tower, wanted.area, wanted.flip
        if self._data[0] != key:
            self._data = (None, [])  # the memory of the data before
            both = [Captioned(self.pictures, self.sizes.held_out, test=test) for test in (False, True)]
            kept = [Resident(one, pair.towers, self.device, augment=i == 0) for i, one in enumerate(both)]
            self._data = (key, kept)
        return self._data[1]

    def run(self, wanted: Setting, folder: Path) -> dict[str, Any]:
        """Trains and tests; the model stays in the folder."""
        pair = self.pair(wanted)
        train, test = self.data(wanted, pair)
        trainer = Trainer(
            self.config(wanted), pair, train, folder, validation=test, observers=[MetricsFile()], world=World(self.device)
        )
        if wanted.loss in (DENSE, INF_CL):
            trainer.objective.forward = other_loss(wanted.loss, trainer.objective, self.device.type)  # type: ignore[method-assign]
        began = time.perf_counter()
        found = trainer.fit()
        assert found is not None
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {**found, **summary(results.read(folder / METRICS)), "seconds": time.perf_counter() - began}

    def config(self, wanted: Setting) -> Any:
        """The settings of `megabatch train`."""
        return configs.resolved(
            {
                "data": "Flickr8k",
                "model": f"open_clip:{add_model(wanted.tower, self.sizes)}",
                "batch_size": wanted.batch_size,
                "chunk_size": min(CHUNK, wanted.batch_size),
                "steps": wanted.steps,
                "seed": wanted.seed,
                "workers": 0,
                "compile": self.compiled,
                "loss": {"name": "siglip" if wanted.loss == SIGLIP else "clip", "ids": wanted.ids},
                "optimizer": {
                    "lr": wanted.lr,
                    "scaling": wanted.rule,
                    "reference_batch": self.sizes.base,
                    "weight_decay": WEIGHT_DECAY,
                },
                "schedule": {"name": "cosine", "warm_up_fraction": WARM_UP},
                "memory": {"graphs": GRAPHS / self.beside},
                "checkpoint": {"every": wanted.steps, "minutes": 0.0, "keep": 1},
            }
        )


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Losses, the scale, time by phase, and the rate of the second half, from the metrics of a run."""
    steps = [record for record in records if "loss" in record]
    half = steps[len(steps) // 2 :]
    phases: dict[str, float] = {}
    for record in steps:
        for name, seconds in record["phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds
    return {
        "losses": [round(record["loss"], 5) for record in steps[:: max(1, len(steps) // 64)]],
        "scale": steps[-1]["scale"],
        "pairs_per_second": sorted(record["pairs_per_second"] for record in half)[len(half) // 2],
        "memory_bytes": max(record["memory_bytes"] for record in steps),
        "phases": phases,
    }


def other_loss(name: str, objective: Any, device: str) -> Callable[..., Tensor]:
    """The loss of another project in place of the trainer's, with the trainer's learned scale."""
    loss: Any = open_clip_losses().ClipLoss() if name == DENSE else loss_of(name, device)

    def forward(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
        scale = objective.log_scale.exp()
        if name == INF_CL:  # its kernels know no autocast
            first, second = first.bfloat16(), second.bfloat16()
        found: Tensor = loss(first, second, scale)
        return found

    return forward


def add_model(tower: str, sizes: Sizes) -> str:
    """Makes open_clip know a model of this resolution and patch size, and returns its name."""
    import open_clip

    pixels, patch = map(int, tower.split("/"))
    name, layers = f"flickr-{pixels}-{patch}-{sizes.width}", sizes.layers
    about = {
        "embed_dim": sizes.width,
        "vision_cfg": {"image_size": pixels, "layers": layers[0], "width": sizes.width, "patch_size": patch, "head_width": 32},
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": sizes.width,
            "heads": sizes.width // 32,
            "layers": layers[1],
        },
    }
    if name not in open_clip.list_models():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / f"{name}.json"
            place.write_text(json.dumps(about))
            open_clip.add_model_config(place)
    return name


def pictures(folder: Path | None) -> Pictures:
    return invented(48) if folder is None else read(folder)


WORKER: Worker | None = None  # of this process


def start_worker(*given: Any) -> None:
    global WORKER
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # processes share the memory
    WORKER = Worker(*given)


def make_run(wanted: Setting, folder: Path) -> dict[str, Any]:
    assert WORKER is not None
    try:
        return WORKER.run(wanted, folder)
    except ImportError as error:
        return {"missing": str(error)}
    except FloatingPointError as error:  # the loss is not finite any more
        return {"failed": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not machine.ran_out_of_memory(error):
            raise
        return {"missing": "no memory beside the other runs; a later call with fewer of them (--beside) may have it"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# Many runs


class Bench:
    """Runs that are not in the file yet, several at a time, while there is time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.sizes = options, TINY if options.tiny else Sizes(samples=options.samples)
        self.file = options.output / f"{options.name}.jsonl"
        self.until = time.monotonic() + options.seconds
        self.machine = machine.summary(machine.describe())
        self.scratch = Path(tempfile.mkdtemp(prefix="image-study-"))
        self.rates = {line["batch_size"]: _rate(line) for line in self.known() if line.get("beside") == options.beside}

    def known(self) -> list[dict[str, Any]]:
        """All lines of the file."""
        return results.read(self.file) if self.file.exists() else []

    def work(self) -> None:
        """All parts in order; a part begins when the one before it is complete."""
        options = self.options
        context = multiprocessing.get_context("spawn")
        given = (options.data, self.sizes, options.beside, options.compile)
        with ProcessPoolExecutor(options.beside, context, start_worker, given) as pool:
            for part in options.parts:
                if not self.finish(part, pool):
                    print(f"{part} is incomplete: run the same command again", flush=True)
                    break
            for process in list(pool._processes.values()):
                process.kill()  # a run that is over the time, and a GPU's memory
        self.draw_gallery()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def finish(self, part: str, pool: ProcessPoolExecutor) -> bool:
        """Makes the missing runs of a part; whether all are there now."""
        asked = wanted(part, self.known(), self.sizes, self.options)
        done = {setting(line) for line in self.known()}
        todo = [one for one in dict.fromkeys(asked) if one not in done]
        print(f"{part}: {len(todo)} runs to do, {len(asked) - len(todo)} known", flush=True)
        running: dict[Future[dict[str, Any]], tuple[Setting, Path]] = {}
        waiting = iter(todo)
        left = self._started(waiting, running, pool)
        while running:
            remaining = self.until + GRACE - time.monotonic()
            ended, _ = wait(running, timeout=max(0.0, remaining), return_when=FIRST_COMPLETED)
            if not ended:
                print(f"{len(running)} runs did not end in time", flush=True)
                return False
            for future in ended:
                one, folder = running.pop(future)
                self._note(one, future.result(), folder)
            left += self._started(waiting, running, pool)
        return not left

    def _started(self, waiting: Iterator[Setting], running: dict[Any, Any], pool: ProcessPoolExecutor) -> int:
        """Starts runs until all processes are busy. Returns how many are left out for lack of time."""
        left = 0
        while len(running) < self.options.beside:
            one = next(waiting, None)
            if one is None:
                return left
            if time.monotonic() + self.expected(one) > self.until:
                left += 1
                continue
            folder = Path(tempfile.mkdtemp(dir=self.scratch))
            running[pool.submit(make_run, one, folder)] = one, folder
        return left

    def expected(self, one: Setting) -> float:
        """Seconds of a run, from the last run of the nearest batch size with as many runs beside it."""
        near = min(self.rates, key=lambda size: abs(math.log(size / one.batch_size)), default=None)
        return one.batch_size * one.steps / (FIRST_GUESS / self.options.beside if near is None else self.rates[near])

    def _note(self, one: Setting, found: dict[str, Any], folder: Path) -> None:
        """Appends a line, but for a run that could not be made here."""
        about = f"{one.batch_size:>6} {one.rule:<6} {one.loss} {one.tower} {one.area:g} rate {one.lr:g} seed {one.seed}"
        if "missing" in found:
            print(f"{about}: {found['missing']}", flush=True)
            return
        line = {**one._asdict(), **found, "beside": self.options.beside, "machine": self.machine}
        if "failed" not in found:
            self.rates[one.batch_size] = _rate(line)
            self._keep_best(line, folder)
            told = f"mean recall {mean_recall(line):.1%}, {found['pairs_per_second']:,.0f} pairs/s, {found['seconds']:.0f} s"
        else:
            told = found["failed"]
        results.append(self.file, line)
        print(f"[{self.until - time.monotonic():4.0f} s left] {about}: {told}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _keep_best(self, line: dict[str, Any], folder: Path) -> None:
        """The model of the best run of this machine, for the gallery."""
        place = self.options.best
        about = place / "line.json"
        if about.exists() and mean_recall(json.loads(about.read_text())) >= mean_recall(line):
            return
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        about.write_text(json.dumps(line))

    def draw_gallery(self) -> None:
        """What the best model finds among held-out photographs for some of their captions."""
        about = self.options.best / "line.json"
        if not about.exists():
            return
        line = json.loads(about.read_text())
        add_model(line["tower"], self.sizes)
        pair = towers.load_saved(self.options.best)
        test = Captioned(pictures(self.options.data), self.sizes.held_out, test=True)
        images = test.items()
        first = [i for i in range(len(test)) if i == 0 or images[i] != images[i - 1]]  # one caption of each photograph
        embeddings = embed(pair.first, test, 0, first)
        queries = [test.name(first[i]) for i in range(0, len(first), max(1, len(first) // QUERIES))][:QUERIES]
        matches = search(encode(pair.second, queries), embeddings, FOUND)
        found = [
            [
                Found(test.read(first[i], 0), "its own photograph" if test.name(first[i]) == query else "", score)
                for i, score in zip(indices, scores, strict=True)
            ]
            for query, indices, scores in zip(queries, matches.indices.tolist(), matches.scores.tolist(), strict=True)
        ]
        title = f"Best matches among {len(first):,} photographs that were never trained on"
        place = self.options.output / f"{self.options.name}_gallery.png"
        draw(place, queries, found, title=title, credits=test.credits)
        print(f"wrote {place}: recall@1 by text {line['text_to_image_R@1']:.1%}", flush=True)


def _rate(line: dict[str, Any]) -> float:
    """Pairs a second of a whole run; of a failed one nothing is known."""
    return line["batch_size"] * line["steps"] / line["seconds"] if "seconds" in line else FIRST_GUESS / line["beside"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("choose", "rate", "study", "steps", "losses", "siglip")
    parser.add_argument("--data", type=Path, help="folder with Flickr8k's .bin and .json; left out, a tiny run invents some")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="(default: all, in this order)")
    parser.add_argument("--beside", type=int, default=6, help="runs that share the GPU (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="(default: 0 1 2)")
    parser.add_argument("--samples", type=int, default=Sizes().samples, help="pairs that a run sees (%(default)s)")
    parser.add_argument("--lr", type=float, help=f"learning rate at {BASE:,} pairs (default: chosen by the part rate)")
    parser.add_argument("--compile", choices=("on", "off"), default="off", help="(%(default)s: each run would compile anew)")
    parser.add_argument(
        "--best", type=Path, default=Path("runs/image_study_best"), help="folder for the best model (%(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="make the table, the plot and the text of the lines, and no run")
    arguments(parser, "image_study", 500)
    options = parser.parse_args()
    if not options.report and not options.tiny and options.data is None:
        parser.error("--data is needed: the folder with Flickr8k's .bin and .json")
    return options


def main() -> None:
    options = parse()
    if not options.report:
        Bench(options).work()
    report(options.output / f"{options.name}.jsonl")


if __name__ == "__main__":
    main()
