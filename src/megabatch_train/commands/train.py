"""`megabatch train`: trains a model on pairs."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch import extras
from megabatch_train import names, settings
from megabatch_train.commands.model import add_columns, add_trust
from megabatch_train.names import sanitize

if TYPE_CHECKING:
    from megabatch.world import World
    from megabatch_train.data.dataset import Dataset
    from megabatch_train.trainer.config import TrainConfig
    from megabatch_train.trainer.loop import Trainer
    from megabatch_train.trainer.run import Observer


LOG = logging.getLogger("megabatch")
RUNS = Path("runs")
PROBLEMS_NAMED = 5
FAILED = 3  # exit status of a run that learned nothing
FLAGS = (  # that are settings
    *("data", "validation", "model", "batch_size", "chunk_size", "epochs", "steps", "precision", "seed", "workers", "compile"),
    *("holdout", "evaluate_every", "lora.rank", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm"),
)
AUTO = "auto"
LOSSES = ("clip", "siglip", "info_nce", "dcl", "hcl", "nt_xent", "sup_con", "matryoshka", "distill")
DESCRIPTION = f"""
Trains two encoders (towers) with a contrastive loss: each sample becomes most similar to its own match.

  megabatch train                                  emoji and their names; two small towers, two cores, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384 --epochs 10 --lr 5e-4
  megabatch train --data "cc12m/{{00000..01242}}.tar" --validation coco.csv --model open_clip:ViT-B-16 --batch-size 65536
  megabatch train --data photos.csv --columns image=file text=description --batch-size 4096
  megabatch train --data triples.jsonl --loss info_nce --model hf:BAAI/bge-small-en --holdout 0.01
  megabatch train --data triples.jsonl --loss info_nce --model hf:Qwen/Qwen3-Embedding-0.6B --lora 16
  megabatch train --data wordnet --batch-size 8192 --set optimizer.scaling=sqrt
  torchrun --nproc-per-node 8 -m megabatch train --config run.toml
  megabatch train --resume runs/emoji-1            from its last checkpoint, with its settings

The batch size is the number of pairs over all processes. It does not depend on memory: towers encode one
chunk at a time, and the loss needs no similarity matrix. The chunk size is chosen automatically. On a GPU the
towers are compiled and compute in bf16.

data    {f"{chr(10)}        ".join(names.DATA)}
model   {f"{chr(10)}        ".join(names.MODELS)}

Settings are merged in this order: defaults for the model and the data, --config, flags, --set. Later ones
win. The run's config.toml records all of them; pass it to --config to repeat a run. `megabatch config` lists
all settings. Some of them:

  freeze = "first"               freeze the first tower and compute its embeddings once (LiT)
  precision = "auto"             bf16 on a GPU, fp32 on a CPU; or "bf16", "fp16", "fp32"
  parallel = "fsdp"              shard the towers over ranks; "ddp" replicates them
  optimizer.name = "adafactor"   or "adamw", "lion"
  optimizer.scaling = "sqrt"     or "linear": the learning rate grows with the batch size
  loss.name = "siglip"           the same as --loss siglip
  ema = 0.999                    evaluate and save averaged weights
  collapse = "warn"              train on if the model learns nothing; by default the run ends with status 3
  memory.checkpointing = "on"    compute activations again in the backward pass, for larger chunks
  memory.chunk = 0.25            fraction of free memory for the activations of a chunk
  checkpoint.every = 500         steps between checkpoints, at most checkpoint.minutes = 15; checkpoint.keep = 2

Ctrl-C and SIGTERM save a checkpoint first. --resume auto resumes the last run, or starts a new one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch train`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", metavar="DATA", help="training data (default: emoji)")
    add(
        "--validation",
        nargs="+",
        metavar="DATA",
        help="evaluation data, one or more (default: the test split of emoji, wordnet)",
    )
    add("--holdout", type=float, metavar="X", help="fraction of the data to hold out for evaluation, such as 0.01")
    add_columns(parser)
    add("--model", metavar="MODEL", help="towers to train (default: small)")
    add_trust(parser)
    add("--lora", dest="rank", type=int, metavar="RANK", help="train adapters of this rank in place of an hf: model's weights")
    add("--batch-size", type=int, metavar="N", help="pairs in a step, over all processes (default: 512 for emoji, else 1024)")
    add("--chunk-size", type=_number_or_auto, metavar="N", help='samples encoded at once, or "auto" (default)')
    add(
        "--epochs",
        type=float,
        metavar="N",
        help="passes over the data (default: 28 for emoji, 4 for wordnet; 3 for a model with weights, else 32)",
    )
    add("--steps", type=int, metavar="N", help="steps, instead of --epochs")
    add(
        "--lr",
        type=float,
        metavar="RATE",
        help="highest learning rate (default: 3e-3 for small; 2e-5 for a model with weights, 2e-4 with --lora; else 5e-4, and "
        "less in a run of fewer than 1,000 steps)",
    )
    add(
        "--warmup",
        type=_steps_or_fraction,
        metavar="N",
        help="steps of the warm-up, or a fraction such as 0.1 (default: 0.1, but at least 50 steps or half of the run)",
    )
    add(
        "--weight-decay",
        type=float,
        metavar="X",
        help="of matrices (default: 0.1 for small; 0.01 for a model with weights, 0 with --lora; else 0.2)",
    )
    add("--clip-norm", type=float, metavar="X", help="largest gradient norm (default: 0, no clipping)")
    add("--evaluate-every", type=int, metavar="N", help="steps between evaluations (default: 0, one at the end)")
    add(
        "--workers",
        type=_number_or_auto,
        metavar="N",
        help='readers of samples, or "auto" (default): the cores of a GPU machine',
    )
    add("--compile", choices=(AUTO, "on", "off"), help="compile the towers (default: on for CUDA)")
    add("--loss", choices=LOSSES, help="the loss (default: clip); `megabatch config loss` lists its settings")
    add("--precision", choices=(AUTO, "bf16", "fp16", "fp32"), help="dtype of the towers' products (default: bf16 on a GPU)")
    add("--seed", type=int, metavar="N", help="for initial weights, order and augmentation (default: 0)")
    add("--output", type=Path, metavar="FOLDER", help="folder of the run (default: runs/DATA-1, or the next number)")
    add("--config", type=Path, metavar="TOML", help="settings from a file, such as another run's config.toml")
    add("--resume", metavar="auto|PATH", help='resume a run, a checkpoint, or with "auto" the last run if there is one')
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting, such as ema=0.999; `megabatch config` lists all",
    )
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases too, after `wandb login`")
    add("--no-report", action="store_true", help="write no report.html, neither during the run nor at the end")


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'must be a whole number or "{AUTO}", got {text!r}') from error


def _steps_or_fraction(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of steps, or a fraction such as 0.1, got {text!r}") from error


def run(args: argparse.Namespace) -> int:
    """Trains."""
    from megabatch.world import join_world
    from megabatch_train.towers.tower import allow_remote_code
    from megabatch_train.trainer import config as configs
    from megabatch_train.trainer.checkpoints import CheckpointError
    from megabatch_train.trainer.health import StoppedError, TrainingFailedError
    from megabatch_train.trainer.step import NotFiniteError

    for package in ("numpy", "safetensors"):
        extras.load(package, extra="train", purpose="Saving a model")  # an error now, and not after the training
    given = _collect_settings(args)
    folder, checkpoint = _places(args, configs.resolve(*given).data)
    config = _with_model_config(configs.resolve(_before(folder, checkpoint), *given))
    with join_world(config.device) as world, ExitStack() as held:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        observers = _observers_of_first(args, world)
        held.enter_context(allow_remote_code(args.trust_remote_code))
        folder, checkpoint = world.from_first((folder, checkpoint))
        _check_writable(folder, world, args.resume)
        folder = _lock_folder(folder, world, args, held)
        trainer = _trainer(config, folder, world, observers)
        _continue(trainer, args.resume, checkpoint)
        LOG.info("%s", _describe_data(trainer))
        try:
            trainer.fit()
        except StoppedError as stopped:
            if world.rank == 0:
                LOG.warning("%s", stopped)
            return 128 + stopped.number
        except (TrainingFailedError, NotFiniteError) as error:
            if world.rank == 0:
                _write_report(folder, args)
                LOG.error("%s", error)
            return FAILED
        except CheckpointError as error:
            if world.rank == 0:
                LOG.error("%s; %s", error, trainer.describe_saved())
            return 1
        if world.rank == 0:
            _finish(folder, args)
    return 0


def _collect_settings(args: argparse.Namespace) -> list[settings.Table]:
    """The given settings; later tables win."""
    from megabatch_train.data import load as data
    from megabatch_train.data.tables import LABEL, NEGATIVE

    flags: settings.Table = {}
    if args.steps and args.epochs is not None:
        raise ValueError(f"--epochs must be left out with --steps, got {args.epochs} and {args.steps}")
    for name in FLAGS:
        if (value := getattr(args, name.rpartition(".")[2])) is not None:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            flags = settings.merge(flags, settings.nest(name, value))
    if args.loss is not None:
        flags["loss"] = {"name": args.loss}
    if args.warmup is not None:
        flags["schedule"] = {"warmup_steps" if isinstance(args.warmup, int) else "warmup_fraction": args.warmup}
    if args.columns is not None:
        flags["data_options"] = {"columns": args.columns}
        if args.validation is not None and not set(args.validation) & set(data.WITH_SPLITS):
            needed = {role: name for role, name in args.columns.items() if role not in (NEGATIVE, LABEL)}
            flags["validation_options"] = {"columns": needed}
    read = settings.read(args.config) if args.config is not None else {}
    return [read, flags, *(settings.assignment(text) for text in args.set)]


def _with_model_config(config: TrainConfig) -> TrainConfig:
    """The settings with the contents of the file of "open_clip:FILE.json", so that the run does not depend on the file."""
    from megabatch_train.towers import open_clip

    family, _, name = config.model.partition(":")
    if family != "open_clip" or "config" in config.model_options or (text := open_clip.read_config(name)) is None:
        return config
    return dataclasses.replace(config, model_options={**config.model_options, "config": text})


def _places(args: argparse.Namespace, source: str) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to resume from if one is named."""
    from megabatch_train.trainer import run as runs

    name = _run_name(source)
    if args.resume not in (None, AUTO):
        return _resolve_run(Path(args.resume), args.output)
    if args.resume == AUTO:
        folder = args.output or runs.newest(RUNS, name) or runs.find_unused(RUNS, name)
        return folder, None
    folder = args.output or runs.find_unused(RUNS, name)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output must be a folder, got {folder}, which is a file")
    if (folder / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"{folder} has a run in it. --resume {folder} continues it; --output names another folder")
    return folder, None


def _run_name(source: str) -> str:
    """The name of a run on this data: the file's name, the folder's for a pattern of files, "mix" for several sources."""
    from megabatch_train.data.load import BETWEEN
    from megabatch_train.data.tables import PREFIX

    if BETWEEN in source:
        return "mix"
    path = Path(sanitize(source.removeprefix(PREFIX)))
    chosen = path.parent if any(mark in path.name for mark in "{*?[") else path
    return re.sub(r"[^\w.-]+", "-", chosen.stem).strip(".-") or "run"


def _resolve_run(path: Path, output: Path | None) -> tuple[Path, Path | None]:
    """The same for a path that is a run's folder, or a checkpoint in one."""
    from megabatch_train.trainer import run as runs

    if not path.is_dir():
        raise ValueError(f"No such run: {path}. --resume takes a run's folder, a checkpoint in it, or auto")
    if path.name.startswith("step_"):
        return output or path.resolve().parent.parent, path
    if output is not None and output != path:
        raise ValueError(f"--output must be left out, or --resume name a checkpoint in {path}, to continue in another folder")
    if not (path / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"{path} has no checkpoint to resume from")
    return path, None


def _before(folder: Path, checkpoint: Path | None) -> settings.Table:
    """The settings of the run to resume; empty for a new run."""
    from megabatch_train.trainer import config as configs
    from megabatch_train.trainer import run as runs

    own = folder if checkpoint is None else checkpoint.resolve().parent.parent
    place = own / runs.CONFIG
    found, directory = settings.read(place) if place.exists() else {}, runs.began_in(own)
    return found if directory in (None, os.getcwd()) else configs.anchor_paths(found, directory)


def _check_writable(folder: Path, world: World, resume: str | None) -> None:
    """Checks the folder on every rank before anything is loaded, because each rank writes its part of a checkpoint."""
    from megabatch_train.trainer import run as runs

    for rank, problem in enumerate(world.gather_objects(runs.unwritable(folder))):
        if problem is not None:
            where = f" on rank {rank}" if world.size > 1 else ""
            elsewhere = f"--resume {folder / runs.CHECKPOINTS}/step_… --output" if resume not in (None, AUTO) else "--output"
            raise ValueError(
                f"--output must be a folder that can be written to, got {folder}, and{where} {problem}; make room or allow "
                f"writing there, or use {elsewhere} OTHER_FOLDER"
            )


def _lock_folder(folder: Path, world: World, args: argparse.Namespace, held: ExitStack) -> Path:
    """The run's folder, which this job alone may write to until `held` is closed. A new run without --output takes the next."""
    from megabatch_train.trainer import run as runs
    from megabatch_train.trainer.run import LockedError, lock_folder

    problem = None
    while world.rank == 0:
        try:
            held.enter_context(lock_folder(folder))
            break
        except LockedError as error:
            if args.output is None and args.resume is None:
                folder = runs.find_unused(RUNS, folder.name.rpartition("-")[0])
                continue
            problem = f"{error}; wait until it ends, or use another folder (--output)"
            break
    folder, problem = world.from_first((folder, problem))
    if problem is not None:
        raise ValueError(problem)
    return folder


def _trainer(config: TrainConfig, folder: Path, world: World, observers: Sequence[Observer]) -> Trainer:
    from megabatch.cached import randomness
    from megabatch_train import towers
    from megabatch_train.data import load as data
    from megabatch_train.towers.models import image_size
    from megabatch_train.trainer.loop import Trainer

    randomness.seed_host(config.seed)
    size = image_size(config.model, config.model_options)
    split = "train" if config.holdout else None
    dataset = data.load(config.data, split, size=size, holdout=config.holdout, **config.data_options)
    validation = _validation(config, size)
    pair = towers.load(config.model, dataset.sides, lora=config.lora, **config.model_options)
    if world.rank == 0:
        both = (problem for read in (dataset, *validation.values()) for problem in read.problems)
        _name_problems(list(dict.fromkeys(both)))  # one file may be both
    return Trainer(
        config,
        pair,
        dataset,
        folder,
        validation=validation,
        observers=observers,
        world=world,
        command=shlex.join(["megabatch", *sys.argv[1:]]),
    )


def _describe_data(trainer: Trainer) -> str:
    """The data of a run in a line: pairs, columns of a table, pairs to evaluate on, and samples of an epoch."""
    from megabatch_train.data.tables import Table

    config, dataset = trainer.config, trainer.dataset
    columns = f" (columns {', '.join(dataset.columns.all)})" if isinstance(dataset, Table) else ""
    others = [f"{len(found):,}{f' of {name}' if name else ''}" for name, found in trainer.validation.items()]
    tested = " and ".join(others) or "none"
    held = f"{tested} held out" if config.holdout else f"{tested} to evaluate on"
    batches = trainer.order.batches_per_epoch
    used = batches * config.batch_size
    return (
        f"data: {len(dataset):,} pairs of {sanitize(config.data)}{columns}, {held}; an epoch has {used:,} samples in "
        f"{batches:,} {'batch' if batches == 1 else 'batches'} of {config.batch_size:,}"
    )


def _name_problems(problems: Sequence[str]) -> None:
    """Logs missing parts of a dataset: the first few, and how many more."""
    for problem in problems[:PROBLEMS_NAMED]:
        LOG.warning("%s", problem)
    if len(problems) > PROBLEMS_NAMED:
        LOG.warning("and %d more like these", len(problems) - PROBLEMS_NAMED)


def _validation(config: TrainConfig, size: int | None) -> dict[str, Dataset]:
    """The datasets to evaluate on, by the names of their files."""
    from megabatch_train.data import load as data

    if config.holdout:
        return {"": data.load(config.data, "test", size=size, holdout=config.holdout, **config.data_options)}
    given = (config.validation,) if isinstance(config.validation, str) else config.validation
    names = [name for name in given if name] or [config.data] * (config.data in data.WITH_SPLITS)
    found: dict[str, Dataset] = {}
    for name in dict.fromkeys(names):
        short = _run_name(name)
        short = short if short not in found else f"{short}-{len(found) + 1}"
        found[short] = data.load(name, "test" if name in data.WITH_SPLITS else None, size=size, **config.validation_options)
    return found


def _continue(trainer: Trainer, resume: str | None, checkpoint: Path | None) -> None:
    from megabatch_train.trainer.checkpoints import CheckpointError

    if resume is None:
        return
    try:
        continued = trainer.resume(checkpoint)
    except CheckpointError as error:
        raise ValueError(f"--resume must name a checkpoint that is whole: {error}") from error
    if not continued and resume != AUTO:
        raise ValueError(f"{resume} has no intact checkpoint to resume from")
    if trainer.world.rank == 0:
        LOG.info("continues after step %d" if continued else "nothing to continue yet: begins with step %d", trainer.step)


def _observers_of_first(args: argparse.Namespace, world: World) -> list[Observer]:
    """The observers, which only the first rank has. They are made before the data is loaded, because a log may need a login."""
    made: list[Observer] = []
    problem = None
    try:
        made = _observers(args) if world.rank == 0 else []
    except (ValueError, ImportError) as error:
        problem = error
    if problem := world.from_first(problem):
        raise problem
    return made


def _observers(args: argparse.Namespace) -> list[Observer]:
    from megabatch_train.display.observers import ProgressDisplay
    from megabatch_train.trainer.run import MetricsFile

    made: list[Any] = [MetricsFile(), ProgressDisplay()]
    if extras.is_installed("tensorboard"):
        from megabatch_train.display.observers import TensorBoardLog

        made.append(TensorBoardLog())
    if not args.no_report:
        from megabatch_train.display.report import LiveReport

        made.append(LiveReport())
    if args.wandb:
        from megabatch_train.display.observers import WandbLog

        made.append(WandbLog(args.wandb))
    return made


def _finish(folder: Path, args: argparse.Namespace) -> None:
    from megabatch_train.towers import models

    _write_report(folder, args)
    LOG.info("model: %s", folder / models.WEIGHTS)


def _write_report(folder: Path, args: argparse.Namespace) -> None:
    if not args.no_report:
        from megabatch_train.display.report import write_report

        LOG.info("report: %s", write_report(folder))
