"""`megabatch train`: trains a model on pairs."""

import argparse
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch import extras, settings, towers
from megabatch.cached import randomness
from megabatch.data import load as data
from megabatch.data.dataset import Dataset
from megabatch.towers.load import POSSIBLE, image_size
from megabatch.trainer import config as configs
from megabatch.trainer import run as runs
from megabatch.trainer.checkpoint import CheckpointError
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.loop import Trainer
from megabatch.trainer.observers import MetricsFile, Observer
from megabatch.trainer.stopping import StoppedError
from megabatch.world import World, joined

LOG = logging.getLogger("megabatch")
RUNS = Path("runs")
AUTO = "auto"
PROBLEMS_NAMED = 5
DESCRIPTION = f"""
Trains two encoders (towers) with a contrastive loss: each sample becomes most similar to its own match.

  megabatch train                                  emoji and their names; two small towers, two cores, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384 --epochs 10 --lr 5e-4
  megabatch train --data "cc12m/{{00000..01242}}.tar" --validation coco.csv --model open_clip:ViT-B-16 --batch-size 65536
  megabatch train --data wordnet --batch-size 8192 --set optimizer.scaling=sqrt
  torchrun --nproc-per-node 8 -m megabatch train --config run.toml
  megabatch train --resume runs/emoji-1            from its last checkpoint, with its settings

The batch size is the number of pairs over all processes. It does not depend on memory: towers encode one
chunk at a time, and the loss needs no similarity matrix. The chunk size is chosen automatically. On a GPU the
towers are compiled and compute in bf16.

data    {f"{chr(10)}        ".join(data.POSSIBLE)}
model   {f"{chr(10)}        ".join(POSSIBLE)}

Settings are merged in this order: defaults for the model and the data, --config, flags, --set. Later ones
win. The run's config.toml records all of them; pass it to --config to repeat a run. Some settings:

  lock = "first"                 freeze the first tower and compute its embeddings once (LiT)
  precision = "auto"             bf16 on a GPU, fp32 on a CPU; or "bf16", "fp16", "fp32"
  compile = "auto"               compile the towers on a GPU; or "on", "off"
  workers = "auto"               readers for the cores of a GPU machine; or their number
  parallel = "fsdp"              shard the towers over ranks; "ddp" replicates them
  optimizer.name = "adafactor"   or "adamw", "lion"
  optimizer.scaling = "sqrt"     or "linear": the learning rate grows with the batch size
  loss.name = "siglip"           or "clip"
  ema = 0.999                    evaluate and save averaged weights
  memory.chunk = 0.25            fraction of free memory for the activations of a chunk
  checkpoint.every = 500         steps between checkpoints; checkpoint.keep = 2 keeps the last two

Ctrl-C and SIGTERM save a checkpoint first. --resume auto resumes the last run, or starts a new one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch train`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", metavar="DATA", help="training data (default: emoji)")
    add("--validation", metavar="DATA", help="evaluation data (default: the test split of emoji and wordnet)")
    add("--model", metavar="MODEL", help="towers to train (default: small)")
    add("--batch-size", type=int, metavar="N", help="pairs in a step, over all processes (default: 512 for emoji, else 1024)")
    add("--chunk-size", type=_number_or_auto, metavar="N", help='samples encoded at once, or "auto" (default)')
    add("--epochs", type=float, metavar="N", help="passes over the data (default: 28 for emoji, 4 for wordnet, else 32)")
    add("--lr", type=float, metavar="RATE", help="highest learning rate (default: 3e-3 for small, else 5e-4)")
    add("--precision", choices=(AUTO, "bf16", "fp16", "fp32"), help="dtype of the towers' products (default: bf16 on a GPU)")
    add("--seed", type=int, metavar="N", help="for initial weights, order and augmentation (default: 0)")
    add("--output", type=Path, metavar="FOLDER", help="folder of the run (default: runs/DATA-1, or the next number)")
    add("--config", type=Path, metavar="TOML", help="settings from a file, such as another run's config.toml")
    add("--resume", metavar="auto|PATH", help='resume a run, a checkpoint, or with "auto" the last run if there is one')
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, such as optimizer.weight_decay=0.05")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    add("--no-report", action="store_true", help="write no report.html at the end")


def run(args: argparse.Namespace) -> int:
    """Trains."""
    given = _given(args)
    folder, checkpoint = _places(args, settings.build(TrainConfig, configs.merged(*given)).data)
    config = configs.resolved(_before(folder, checkpoint), *given)
    with joined(config.device) as world:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        folder, checkpoint = world.from_first((folder, checkpoint))
        _check_writable(folder, world, args.resume)
        trainer = _trainer(config, folder, world, args)
        _continue(trainer, args.resume, checkpoint)
        try:
            trainer.fit()
        except StoppedError as stopped:
            if world.rank == 0:
                LOG.warning("%s", stopped)
            return 128 + stopped.number
        except CheckpointError as error:
            if world.rank == 0:
                LOG.error("%s; earlier checkpoints are unchanged, and --resume %s continues from the last one", error, folder)
            return 1
        if world.rank == 0:
            _finish(folder, args)
    return 0


def _given(args: argparse.Namespace) -> list[settings.Table]:
    """The given settings; later tables win."""
    flags: settings.Table = {}
    for name in ("data", "validation", "model", "batch_size", "chunk_size", "epochs", "precision", "seed"):
        if getattr(args, name) is not None:
            flags[name] = getattr(args, name)
    if args.lr is not None:
        flags["optimizer"] = {"lr": args.lr}
    read = settings.read(args.config) if args.config is not None else {}
    return [read, flags, *(settings.assignment(text) for text in args.set)]


def _places(args: argparse.Namespace, source: str) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to resume from if one is named."""
    name = _run_name(source)
    if args.resume not in (None, AUTO):
        return _named(Path(args.resume), args.output)
    if args.resume == AUTO:
        folder = args.output or runs.newest(RUNS, name) or runs.unused(RUNS, name)
        return folder, None
    folder = args.output or runs.unused(RUNS, name)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output must be a folder, got {folder}, which is a file")
    if (folder / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"--output must be a folder without a run in it, got {folder}; --resume auto continues the run there")
    return folder, None


def _run_name(source: str) -> str:
    """The name of a run on this data: the file's name, or the folder's for a pattern of files."""
    path = Path(source)
    chosen = path.parent if any(mark in path.name for mark in "{*?[") else path
    return re.sub(r"[^\w.-]+", "-", chosen.stem).strip(".-") or "run"


def _named(path: Path, output: Path | None) -> tuple[Path, Path | None]:
    """The same for a path that is a run's folder, or a checkpoint in one."""
    if not path.is_dir():
        raise ValueError(f'--resume must be "auto", a run\'s folder or a checkpoint in it, got {path}, which is no folder')
    if path.name.startswith("step_"):
        return output or path.resolve().parent.parent, path
    if output is not None and output != path:
        raise ValueError(f"--output must be left out, or --resume name a checkpoint in {path}, to continue in another folder")
    if not (path / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"--resume must name a folder with checkpoints, got {path}, which has none")
    return path, None


def _before(folder: Path, checkpoint: Path | None) -> settings.Table:
    """The settings of the run to resume; empty for a new run."""
    place = (folder if checkpoint is None else checkpoint.resolve().parent.parent) / runs.CONFIG
    return settings.read(place) if place.exists() else {}


def _check_writable(folder: Path, world: World, resume: str | None) -> None:
    """Checks the folder on every rank before anything is loaded, because each rank writes its part of a checkpoint."""
    for rank, problem in enumerate(world.gather_objects(runs.unwritable(folder))):
        if problem is not None:
            where = f" on rank {rank}" if world.size > 1 else ""
            elsewhere = f"--resume {folder / runs.CHECKPOINTS}/step_… --output" if resume not in (None, AUTO) else "--output"
            raise ValueError(
                f"--output must be a folder that can be written to, got {folder}, and{where} {problem}; make room or allow "
                f"writing there, or use {elsewhere} OTHER_FOLDER"
            )


def _trainer(config: TrainConfig, folder: Path, world: World, args: argparse.Namespace) -> Trainer:
    randomness.seed_host(config.seed)
    size = image_size(config.model, config.model_options)
    dataset = data.load(config.data, size=size, **config.data_options)
    validation = _validation(config, size)
    pair = towers.load(config.model, dataset.sides, **config.model_options)
    if world.rank == 0:
        both = (problem for read in (dataset, validation) for problem in getattr(read, "problems", ()))
        _name_problems(list(dict.fromkeys(both)))  # one file may be both
    return Trainer(
        config,
        pair,
        dataset,
        folder,
        validation=validation,
        observers=_observers(args) if world.rank == 0 else (),
        world=world,
        command=shlex.join(["megabatch", *sys.argv[1:]]),
    )


def _name_problems(problems: Sequence[str]) -> None:
    """Logs missing parts of a dataset: the first few, and how many more."""
    for problem in problems[:PROBLEMS_NAMED]:
        LOG.warning("%s", problem)
    if len(problems) > PROBLEMS_NAMED:
        LOG.warning("and %d more like these", len(problems) - PROBLEMS_NAMED)


def _validation(config: TrainConfig, size: int | None) -> Dataset | None:
    name = config.validation or (config.data if config.data in data.WITH_SPLITS else "")
    if not name:
        return None
    return data.load(name, "test" if name in data.WITH_SPLITS else None, size=size, **config.validation_options)


def _continue(trainer: Trainer, resume: str | None, checkpoint: Path | None) -> None:
    if resume is None:
        return
    try:
        continued = trainer.resume(checkpoint)
    except CheckpointError as error:
        raise ValueError(f"--resume must name a checkpoint that is whole: {error}") from error
    if not continued and resume != AUTO:
        raise ValueError(f"--resume must name a run with a checkpoint that is whole, got {resume}, which has none")
    if trainer.world.rank == 0:
        LOG.info("continues after step %d" if continued else "nothing to continue yet: begins with step %d", trainer.step)


def _observers(args: argparse.Namespace) -> list[Observer]:
    from megabatch.display.progress import ProgressDisplay

    made: list[Any] = [MetricsFile(), ProgressDisplay()]
    if extras.installed("tensorboard"):
        from megabatch.display.tensorboard import TensorBoardLog

        made.append(TensorBoardLog())
    if args.wandb:
        from megabatch.display.wandb import WandbLog

        made.append(WandbLog(args.wandb))
    return made


def _finish(folder: Path, args: argparse.Namespace) -> None:
    if not args.no_report:
        from megabatch.report import write_report

        LOG.info("report: %s", write_report(folder))
    LOG.info("model: %s", folder / towers.saved.WEIGHTS)


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'must be a whole number or "{AUTO}", got {text!r}') from error
