"""What a large batch gives on photographs: recall against batch size on Flickr8k, trained by `megabatch.trainer`.

    python benchmarks/image_study.py --data FOLDER --parts choose rate        tower, crops and learning rate at 1,024 pairs
    python benchmarks/image_study.py --data FOLDER --parts study losses       batch sizes and learning rates; other losses
    python benchmarks/image_study.py --report                                 table, plot and text, on any machine

A small CLIP is trained from scratch on 7,091 photographs with five captions each. 1,000 other photographs are held out, and
recall is that among them. Settings are chosen by recall among 1,000 of the 7,091, which then are not trained on. Captions of
one photograph are not each other's negatives (`ids`), but for the comparison of losses, since the other losses know no ids.
Photographs are decoded once and stay on the GPU, where each epoch crops them differently.

Parts, each of which builds on the lines of the parts before:
    choose  resolution and crops at 1,024 pairs, with one learning rate and equal operations of the image tower
    rate    the learning rate at 1,024 pairs
    study   batches of 256 to 32,768 pairs, equal samples, the rate constant or grown with the root of the batch or the batch
    steps   batches above 4,096 pairs with as many steps as 4,096 pairs have, at the best rule of their size
    losses  4,096 pairs with our loss, open_clip's dense loss and inf_cl's, from the same seeds
    siglip  SigLIP at 1,024 and 8,192 pairs

Each run is a line in image_study.jsonl and is not repeated, so that the study can be cut into slices (`--seconds`). Several
runs share the GPU (`--beside`): one alone does not keep it busy. NVIDIA's MPS (`nvidia-cuda-mps-control -d` before the command)
lets kernels of several runs work at the same time. After a slice, image_study_gallery.png shows the photographs
that the best model finds for a few captions.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from flickr8k_data import TEST, Captioned
from image_study_report import mean_recall, report
from image_study_settings import BASE, CROPS, FIRST_RATE, TINY, TRIAL, Setting, Sizes, setting, wanted
from image_study_worker import CHUNK, add_model, make_run, pictures, start_worker
from record import arguments

from megabatch import machine, towers
from megabatch.evaluation import results
from megabatch.evaluation.embedding import embed, encode
from megabatch.evaluation.search import search
from megabatch.evaluation.sheet import Found, draw

STAGES = (("choose",), ("rate",), ("study",), ("steps", "losses", "siglip"))  # each needs the results of those before
SEEDS = (0, 1, 2)
QUERIES = (  # of the gallery
    "a brown dog runs through the grass",
    "a surfer rides a wave",
    "a climber on a steep rock",
    "children play in the water",
    "football players on a field",
    "snow on a mountain",
)
FOUND = 5  # photographs for each
GRACE = 15.0  # seconds after the limit in which a run may still end
FIRST_GUESS = 40_000.0  # pairs a second of all runs together, until one has been measured


class Bench:
    """Runs that are not in the file yet, several at a time, while there is time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.sizes = options, TINY if options.tiny else Sizes(samples=options.samples)
        self.file = options.output / f"{options.name}.jsonl"
        self.until = time.monotonic() + options.seconds
        self.machine = machine.summary(machine.describe())
        self.scratch = Path(tempfile.mkdtemp(prefix="image-study-"))
        self.rehearsal = Rehearsal(self)
        self.stage_pairs = 0  # that all runs of a stage see
        self.rates = {line["batch_size"]: _rate(line) for line in self.known() if line.get("beside") == options.beside}

    def known(self) -> list[dict[str, Any]]:
        """All lines of the file."""
        return results.read(self.file) if self.file.exists() else []

    def pool(self, processes: int, compiler_threads: int | None = None) -> ProcessPoolExecutor:
        """Processes that make runs."""
        given = self.options.data, self.sizes, self.options.beside, self.options.compile, compiler_threads
        return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker, given)

    def work(self) -> None:
        """All parts in order; a stage begins when the one before it is complete."""
        self.rehearsal.start()
        try:
            with self.pool(self.options.beside, compiler_threads=1) as pool:  # they find compiled kernels on the disk
                for stage in STAGES:
                    parts = [part for part in stage if part in self.options.parts]
                    if parts and not self.finish(parts, pool):
                        print(f"{' and '.join(parts)}: incomplete, run the same command again", flush=True)
                        break
                _kill(pool)
            self.draw_gallery()
        finally:
            self.rehearsal.stop()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def finish(self, parts: list[str], pool: ProcessPoolExecutor) -> bool:
        """Makes the missing runs of some parts; whether all are there now."""
        asked = [one for part in parts for one in wanted(part, self.known(), self.sizes, self.options)]
        done = {setting(line) for line in self.known()}
        todo = [one for one in dict.fromkeys(asked) if one not in done]
        print(f"{' and '.join(parts)}: {len(todo)} runs to do, {len(asked) - len(todo)} known", flush=True)
        compiled = parts != ["choose"]  # trials of several towers are not: each compilation takes a minute
        if compiled and todo:
            self.rehearsal.wait()
        self.stage_pairs = sum(one.batch_size * one.steps for one in todo)
        running: dict[Future[dict[str, Any]], tuple[Setting, Path]] = {}
        waiting = iter(todo)
        left = self._started(waiting, running, pool, compiled=compiled)
        while running:
            remaining = self.until + GRACE - time.monotonic()
            ended, _ = wait(running, timeout=max(0.0, remaining), return_when=FIRST_COMPLETED)
            if not ended:
                print(f"{len(running)} runs did not end in time", flush=True)
                return False
            for future in ended:
                one, folder = running.pop(future)
                self._note(one, future.result(), folder)
            left += self._started(waiting, running, pool, compiled=compiled)
        return not left

    def _started(
        self, waiting: Iterator[Setting], running: dict[Any, Any], pool: ProcessPoolExecutor, *, compiled: bool
    ) -> int:
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
            running[pool.submit(make_run, one, folder, compiled)] = one, folder
        return left

    def expected(self, one: Setting) -> float:
        """Seconds of a run, from the last run of the nearest batch size with as many runs beside it.

        Not more than all runs of the stage take together: a long run has fewer beside it in the end, and is faster then.
        """
        near = min(self.rates, key=lambda size: abs(math.log(size / one.batch_size)), default=None)
        rate = FIRST_GUESS / self.options.beside if near is None else self.rates[near]
        return min(one.batch_size * one.steps / rate, self.stage_pairs / (rate * self.options.beside))

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
        """What the best model finds among held-out photographs."""
        about = self.options.best / "line.json"
        if not about.exists():
            return
        line = json.loads(about.read_text())
        add_model(line["tower"], self.sizes)
        pair = towers.load_saved(self.options.best)
        test = Captioned(pictures(self.options.data), self.sizes.held_out, TEST)
        images = test.items()
        first = [i for i in range(len(test)) if i == 0 or images[i] != images[i - 1]]  # one caption of each photograph
        embeddings = embed(pair.first, test, 0, first)
        matches = search(encode(pair.second, QUERIES), embeddings, FOUND)
        found = [
            [Found(test.read(first[i], 0), "", score) for i, score in zip(indices, scores, strict=True)]
            for indices, scores in zip(matches.indices.tolist(), matches.scores.tolist(), strict=True)
        ]
        title = f"Best matches among {len(first):,} photographs that were never trained on"
        place = self.options.output / f"{self.options.name}_gallery.png"
        draw(place, QUERIES, found, title=title, credits=test.credits)
        print(f"wrote {place}: recall@1 by text {line['text_to_image_R@1']:.1%}", flush=True)


class Rehearsal:
    """Compiles the towers in question in processes of their own, beside the first runs, which are not compiled.

    Processes that come later find the kernels in the compiler's folder.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self._began = bench, time.monotonic()
        self._running: list[Future[dict[str, Any]]] = []
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Begins to compile, where towers will be compiled."""
        bench = self._bench
        if bench.options.compile == "off" or max(bench.sizes.sizes) < CHUNK or not torch.cuda.is_available():
            return
        chosen = {line["tower"] for line in bench.known() if line["seed"] != TRIAL}
        names = chosen or bench.sizes.towers
        self._pool = bench.pool(len(names))
        for name in names:
            one = Setting(name, *CROPS[-1], max(bench.sizes.base, CHUNK), FIRST_RATE, "none", 2, TRIAL)
            self._running.append(self._pool.submit(make_run, one, Path(tempfile.mkdtemp(dir=bench.scratch)), True))

    def wait(self) -> None:
        """Until the towers are compiled."""
        for future in self._running:
            future.result()
        if self._running:
            print(f"compiled the towers in {time.monotonic() - self._began:.0f} s", flush=True)
        self._running = []
        self.stop()

    def stop(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            _kill(self._pool)
        self._pool = None


def _kill(pool: ProcessPoolExecutor) -> None:
    """Ends processes at once, also a run that is over the time; they free the GPU's memory."""
    for process in list((pool._processes or {}).values()):
        process.kill()


def _rate(line: dict[str, Any]) -> float:
    """Pairs a second of a whole run; of a failed one nothing is known."""
    return line["batch_size"] * line["steps"] / line["seconds"] if "seconds" in line else FIRST_GUESS / line["beside"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [part for stage in STAGES for part in stage]
    parser.add_argument("--data", type=Path, help="folder with Flickr8k's .bin and .json; left out, a tiny run invents some")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="(default: all)")
    parser.add_argument("--beside", type=int, default=6, help="runs that share the GPU (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="(default: 0 1 2)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="pairs in a batch of the part study (default: 256, 1024, 4096, 8192, 16384, 32768)"
    )
    parser.add_argument(
        "--samples", type=int, default=Sizes().samples, help="pairs that a run of the smallest tower sees (%(default)s)"
    )
    parser.add_argument("--lr", type=float, help=f"learning rate at {BASE:,} pairs (default: chosen by the part rate)")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="as in the trainer (%(default)s)")
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
