"""One complete training step of a million pairs, and one of four million, on one GPU, beside what `megabatch plan` says first.

    python benchmarks/million.py --data FOLDER

A small CLIP on Flickr8k, by `megabatch.trainer`: 35,000 pairs of a photograph and a caption, repeated until the batch is full.
Each repetition has a crop of its own; pairs of one photograph are not each other's negatives (`ids`). Photographs and tokens
are on the GPU, crops are made for each chunk and again in the second pass, and no graph is kept (`memory.graphs` is 0): the
step that the plan describes. A run of a smaller batch compiles the towers and loads the kernels first, and is not counted.

Writes a JSON file after every batch size; `million_report.py` makes the table and the plot of it, on any machine.
"""

import argparse
import copy
import dataclasses
import gc
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flickr8k_data import HELD_OUT, TRAIN, Captioned, invented, read
from image_study_settings import Sizes
from image_study_worker import add_model
from million_report import report, table
from record import Record, arguments, device_of
from torch import Tensor

from megabatch import towers
from megabatch.data.resident import Resident
from megabatch.evaluation import results
from megabatch.planning import gpus, models, step
from megabatch.planning.losses import MEGABATCH
from megabatch.trainer import config as configs
from megabatch.trainer.loop import Trainer
from megabatch.trainer.observers import METRICS, MetricsFile
from megabatch.world import World

BATCHES = [1 << 20, 1 << 22]
TOWER, CHUNK = "conv1@64", 4096
WARM_UP = 1 << 17  # pairs, more than the batches whose gradients are computed with the loss


class Repeated(Resident):
    """The samples of a resident dataset several times, each time with crops of their own."""

    def __init__(self, once: Resident, times: int) -> None:
        vars(self).update(vars(once))
        self._once, self._times = once, times
        self._kept = {side: dataclasses.replace(kept, rows=kept.rows.repeat(times)) for side, kept in once._kept.items()}

    def __len__(self) -> int:
        """All repetitions."""
        return self._times * len(self._once)

    def read(self, index: int, side: int) -> Any:
        """As the first time."""
        return self._once.read(index % len(self._once), side)

    def name(self, index: int) -> str:
        """As the first time."""
        return self._once.name(index % len(self._once))

    def ids(self, indices: Sequence[int]) -> Tensor | None:  # (n,) int64
        """As the first time."""
        return self._once.ids(torch.as_tensor(indices) % len(self._once))  # type: ignore[arg-type]


class Bench:
    """Towers, data and record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(device_of(args))
        self.record = Record("million", args, args.seconds, tower=args.tower, chunk=args.chunk)
        self.sizes = Sizes((1, 1), 32) if args.tiny else Sizes()
        self.name = f"open_clip:{add_model(args.tower, self.sizes)}"
        torch.manual_seed(0)
        self.pair = towers.load(self.name)
        pictures = invented(48) if args.data is None else read(args.data)
        self.once = Resident(Captioned(pictures, 12 if args.tiny else HELD_OUT, TRAIN), self.pair.towers, self.device)
        self.record.say(f"{len(self.once):,} pairs on the device")

    def planned(self, batch: int) -> dict[str, float]:
        """Seconds and bytes, before the step."""
        model = models.model(self.name)
        plan = step.make(model, step.Setup(gpus.find("H200"), 1), self.args.chunk)
        seconds = plan.seconds(batch)
        return {
            "forward": seconds.encode,
            "loss": seconds.loss,
            "backward": seconds.recompute + seconds.backward,
            "seconds": seconds.total,
            "gpu_bytes": plan.cached(batch, MEGABATCH, step.REPLAY).total,
        }

    def measured(self, batch: int, steps: int = 1) -> dict[str, Any]:
        """The last step of a run."""
        config = configs.resolved(
            {
                "data": "Flickr8k",
                "model": self.name,
                "batch_size": batch,
                "chunk_size": self.args.chunk,
                "steps": steps,
                "workers": 0,
                "compile": self.args.compile,
                "memory": {"graphs": 0.0},
                "checkpoint": {"every": steps},
            }
        )
        data = Repeated(self.once, -(-batch // len(self.once)))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            Trainer(
                config, copy.deepcopy(self.pair), data, Path(folder), observers=[MetricsFile()], world=World(self.device)
            ).fit()
            lines = results.read(Path(folder) / METRICS)
        last = [line for line in lines if "loss" in line][-1]
        return {
            **last["phases"],
            "seconds": batch / last["pairs_per_second"],
            "loss_value": last["loss"],
            "gpu_bytes": last["memory_bytes"],
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def work(self) -> None:
        """All batch sizes; the plan comes first."""
        self.measured(min(WARM_UP, *self.args.batches), steps=2)
        for batch in self.args.batches:
            plan = self.planned(batch)
            self.record.say(f"{batch:,} pairs: the plan says {plan['seconds']:.1f} s, {plan['gpu_bytes'] / 2**30:.1f} GiB")
            found = self.measured(batch)
            self.record["results"].append({"batch": batch, "planned": plan, "measured": found})
            self.record.say(f"{batch:,} pairs: {found['seconds']:.1f} s, {found['gpu_bytes'] / 2**30:.1f} GiB")
            self.record.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with Flickr8k's .bin and .json; left out, a tiny run invents some")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="pairs (1048576 4194304)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="pairs encoded at once (%(default)s)")
    parser.add_argument("--tower", default=TOWER, help="of `image_study.py` (%(default)s)")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="as in the trainer (%(default)s)")
    arguments(parser, "million", 500)
    args = parser.parse_args()
    if args.tiny:
        args.batches, args.chunk, args.tower = [512, 2048], 64, "conv1@32"
    elif args.data is None:
        parser.error("--data is needed: the folder with Flickr8k's .bin and .json")
    bench = Bench(args)
    bench.work()
    report(bench.record.path)
    table(bench.record.contents).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
