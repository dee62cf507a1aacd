"""`megabatch train`: trains a model on pairs."""

import argparse
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megabatch import extras, settings, towers
from megabatch.cached import randomness
from megabatch.commands.arguments.train import AUTO
from megabatch.data import load as data
from megabatch.data.columns import LABEL, NEGATIVE
from megabatch.data.dataset import Dataset
from megabatch.data.hub import PREFIX
from megabatch.data.mix import BETWEEN
from megabatch.names import shown
from megabatch.towers.load import image_size
from megabatch.trainer import config as configs
from megabatch.trainer import run as runs
from megabatch.trainer.checkpoint import CheckpointError
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.lock import LockedError, locked
from megabatch.trainer.loop import Trainer
from megabatch.trainer.observers import MetricsFile, Observer
from megabatch.trainer.stopping import StoppedError
from megabatch.world import World, joined

LOG = logging.getLogger("megabatch")
RUNS = Path("runs")
PROBLEMS_NAMED = 5
FLAGS = (  # that are settings
    *("data", "validation", "model", "batch_size", "chunk_size", "epochs", "steps", "precision", "seed", "workers", "compile"),
    *("holdout", "evaluate_every", "lora.rank", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm"),
)


def run(args: argparse.Namespace) -> int:
    """Trains."""
    for package in ("numpy", "safetensors"):
        extras.load(package, extra="train", purpose="Saving a model")  # an error now, and not after the training
    given = _given(args)
    folder, checkpoint = _places(args, configs.resolved(*given).data)
    config = configs.resolved(_before(folder, checkpoint), *given)
    with joined(config.device) as world, ExitStack() as held:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        folder, checkpoint = world.from_first((folder, checkpoint))
        _check_writable(folder, world, args.resume)
        folder = _locked(folder, world, args, held)
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
                LOG.error("%s; %s", error, trainer.saved())
            return 1
        if world.rank == 0:
            _finish(folder, args)
    return 0


def _given(args: argparse.Namespace) -> list[settings.Table]:
    """The given settings; later tables win."""
    flags: settings.Table = {}
    if args.steps and args.epochs is not None:
        raise ValueError(f"--epochs must be left out with --steps, got {args.epochs} and {args.steps}")
    for name in FLAGS:
        if (value := getattr(args, name.rpartition(".")[2])) is not None:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            flags = settings.merged(flags, settings.nested(name, value))
    if args.loss is not None:
        flags["loss"] = {"name": args.loss}
    if args.warm_up is not None:
        flags["schedule"] = {"warm_up_steps" if isinstance(args.warm_up, int) else "warm_up_fraction": args.warm_up}
    if args.columns is not None:
        flags["data_options"] = {"columns": args.columns}
        if args.validation is not None and not set(args.validation) & set(data.WITH_SPLITS):
            needed = {role: name for role, name in args.columns.items() if role not in (NEGATIVE, LABEL)}
            flags["validation_options"] = {"columns": needed}
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
        raise ValueError(f"{folder} has a run in it. --resume {folder} continues it; --output names another folder")
    return folder, None


def _run_name(source: str) -> str:
    """The name of a run on this data: the file's name, the folder's for a pattern of files, "mix" for several sources."""
    if BETWEEN in source:
        return "mix"
    path = Path(shown(source.removeprefix(PREFIX)))
    chosen = path.parent if any(mark in path.name for mark in "{*?[") else path
    return re.sub(r"[^\w.-]+", "-", chosen.stem).strip(".-") or "run"


def _named(path: Path, output: Path | None) -> tuple[Path, Path | None]:
    """The same for a path that is a run's folder, or a checkpoint in one."""
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


def _locked(folder: Path, world: World, args: argparse.Namespace, held: ExitStack) -> Path:
    """The run's folder, which this job alone may write to until `held` is closed. A new run without --output takes the next."""
    problem = None
    while world.rank == 0:
        try:
            held.enter_context(locked(folder))
            break
        except LockedError as error:
            if args.output is None and args.resume is None:
                folder = runs.unused(RUNS, folder.name.rpartition("-")[0])
                continue
            problem = f"{error}; wait until it ends, or use another folder (--output)"
            break
    folder, problem = world.from_first((folder, problem))
    if problem is not None:
        raise ValueError(problem)
    return folder


def _trainer(config: TrainConfig, folder: Path, world: World, args: argparse.Namespace) -> Trainer:
    randomness.seed_host(config.seed)
    size = image_size(config.model, config.model_options)
    split = "train" if config.holdout else None
    dataset = data.load(config.data, split, size=size, holdout=config.holdout, **config.data_options)
    validation = _validation(config, size)
    pair = towers.load(config.model, dataset.sides, lora=config.lora, **config.model_options)
    if world.rank == 0:
        both = (problem for read in (dataset, *validation.values()) for problem in getattr(read, "problems", ()))
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


def _validation(config: TrainConfig, size: int | None) -> dict[str, Dataset]:
    """The datasets to evaluate on, by the names of their files."""
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


def _observers(args: argparse.Namespace) -> list[Observer]:
    from megabatch.display.progress import ProgressDisplay

    made: list[Any] = [MetricsFile(), ProgressDisplay()]
    if extras.installed("tensorboard"):
        from megabatch.display.tensorboard import TensorBoardLog

        made.append(TensorBoardLog())
    if not args.no_report:
        from megabatch.report.live import LiveReport

        made.append(LiveReport())
    if args.wandb:
        from megabatch.display.wandb import WandbLog

        made.append(WandbLog(args.wandb))
    return made


def _finish(folder: Path, args: argparse.Namespace) -> None:
    if not args.no_report:
        from megabatch.report import write_report

        LOG.info("report: %s", write_report(folder))
    LOG.info("model: %s", folder / towers.saved.WEIGHTS)
