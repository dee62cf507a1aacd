"""`megabatch train`: trains a model on pairs."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch import extras
from megabatch_train import settings
from megabatch_train.commands import (
    CHUNK_HELP,
    DATA_HELP,
    LORA_HELP,
    RUNS,
    WORKERS_HELP,
    add_columns,
    add_trust,
    describe,
    describe_runs,
    list_runs,
)
from megabatch_train.names import format_row, sanitize
from megabatch_train.settings import SourceField, read_fields

if TYPE_CHECKING:
    from megabatch.world import World
    from megabatch_train.data.dataset import Dataset
    from megabatch_train.data.loader import WorkerProcess
    from megabatch_train.machine import StartClock
    from megabatch_train.trainer.config import TrainConfig
    from megabatch_train.trainer.loop import Trainer
    from megabatch_train.trainer.run import Observer


LOG = logging.getLogger("megabatch")
PROBLEMS_NAMED = 5  # largest number of problems that are logged for the data
FAILED = 3  # exit status of a run that failed or did not learn
AUTO = "auto"
PACKAGES = {"open_clip": ("open_clip",), "hf": ("transformers",), "hf-config": ("transformers",)}  # by the prefix of a model
TUNED = "a model with weights"  # trainer/config.py defines its defaults
DESCRIPTION = """
Trains two encoders (towers) with a contrastive loss, which makes each sample similar to its match.

  megabatch train                       train the demo on two cores: emoji and names, 1 to 2 minutes
  megabatch train --data pairs.csv --model open_clip:ViT-B-32 --batch-size 16384
  megabatch train --data photos.csv --columns image=file text=description --validation coco.csv
  megabatch train --data "cc12m/{00000..01242}.tar" --model open_clip:ViT-B-16 --batch-size 65536
  megabatch train --data triples.jsonl --loss info_nce --model hf:BAAI/bge-small-en --holdout 0.01
  megabatch train --data qa.jsonl --loss info_nce --model hf:Qwen/Qwen3-Embedding-0.6B --lora 16
  torchrun --nproc-per-node 8 -m megabatch train --config run.toml
  megabatch train --resume runs/emoji-1     continue a run from its last checkpoint

The batch size is the number of pairs in a step, over all processes. It does not depend on
memory, because towers encode one chunk at a time and the loss does not store the matrix of logits.
By default, megabatch chooses the chunk size. On a GPU it compiles the towers and computes in bf16.

`megabatch config` lists all settings. A flag sets one of them, and --set sets any of them:

  megabatch train --set freeze=first                freeze the first tower (LiT)
  megabatch train --set parallel=fsdp               shard the towers over ranks
  megabatch train --set optimizer.scaling=sqrt      let the learning rate grow with the batch size
  megabatch train --set memory.checkpointing=on     use larger chunks and one more forward pass

If several sources give a setting, the last one counts: defaults for the model and the data,
--config, flags, --set. The file config.toml in the folder of the run contains all settings. To
repeat a run, pass this file to --config. Ctrl-C and SIGTERM save a checkpoint and end the run.
"""


class Flag(NamedTuple):
    """A flag for a setting. Its type, default and help come from the definition of the setting."""

    key: str
    metavar: str | None = None
    text: str = ""  # help that replaces the description
    default: str = ""  # default in words, if it depends on the model or the data


FLAGS = {
    "--data": Flag("data", "DATA", text=f"training data: {DATA_HELP}"),
    "--validation": Flag(
        "validation", "DATA", text="one or more datasets to evaluate on", default="the test split of emoji or wordnet"
    ),
    "--holdout": Flag("holdout", "X", default="none"),
    "--workers": Flag("workers", "N", text=f'{WORKERS_HELP}; "auto" is the number of cores minus 1 with a GPU, or else 0'),
    "--model": Flag("model", "MODEL", text="model by name, such as open_clip:ViT-B-32 or hf:NAME; see `megabatch help models`"),
    "--lora": Flag("lora.rank", "RANK", text=LORA_HELP, default="none"),
    "--batch-size": Flag("batch_size", "N", default="512 for emoji, else 1024"),
    "--batches": Flag("batches", text='samples of a batch: "random", of one "source" of a mixture, or "mined" groups'),
    "--batch-groups": Flag(
        "batch_groups", "FILE", text="groups of `megabatch mine --batches`, for --batches mined", default="none"
    ),
    "--chunk-size": Flag("chunk_size", "N", text=f'{CHUNK_HELP}, or "auto"'),
    "--precision": Flag("precision"),
    "--compile": Flag("compile"),
    "--loss": Flag("loss.name", text="loss function; `megabatch config loss` lists its settings"),
    "--epochs": Flag("epochs", "N", default=f"28 for emoji, 4 for wordnet, 3 for {TUNED}, else 32"),
    "--steps": Flag("steps", "N", text="number of steps, instead of --epochs", default="the number of steps in --epochs"),
    "--lr": Flag("optimizer.lr", "RATE", default=f"3e-3 for small, 2e-5 for {TUNED}, 2e-4 with --lora, else auto"),
    "--weight-decay": Flag(
        "optimizer.weight_decay",
        "X",
        default=f"0.1 for small, 0.01 for {TUNED}, 0 with --lora, else 0.2",
    ),
    "--clip-norm": Flag("optimizer.clip_norm", "X"),
    "--seed": Flag("seed", "N"),
    "--evaluate-every": Flag("evaluate_every", "N"),
}
FLAGS_OF_BATCHES = ("--batch-size", "--batches", "--batch-groups", "--chunk-size", "--precision", "--compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch train`, in groups."""
    describe(parser, DESCRIPTION)
    parser.usage = "%(prog)s [OPTION ...]"
    fields = read_fields()

    def add_flags(group: Any, *names: str) -> None:
        for name in names:
            _add_flag(group, name, fields)

    data = parser.add_argument_group("data")
    add_flags(data, "--data", "--validation", "--holdout", "--workers")
    add_columns(data)
    model = parser.add_argument_group("model")
    add_flags(model, "--model", "--lora")
    add_trust(model)
    add_flags(parser.add_argument_group("batch and memory"), *FLAGS_OF_BATCHES)
    optimization = parser.add_argument_group("optimization")
    add_flags(optimization, "--loss", "--epochs", "--steps", "--lr")
    optimization.add_argument(
        "--warmup",
        type=_steps_or_fraction,
        metavar="N",
        help="warm-up in steps, or as a fraction of the run, such as 0.1 (default: 0.3 for emoji, 20 for small, else 0.1, but "
        "at least 50 steps or half of the run)",
    )
    add_flags(optimization, "--weight-decay", "--clip-norm", "--seed")
    output = parser.add_argument_group("output and settings")
    add = output.add_argument
    add("--output", type=Path, metavar="FOLDER", help=f"folder of the run (default: {RUNS}/DATA-1, or the next unused number)")
    add_flags(output, "--evaluate-every")
    add("--resume", metavar="auto|PATH", help="run or checkpoint to continue; auto continues the last run, or starts a run")
    add("--config", type=Path, metavar="TOML", help="TOML file with settings, such as the config.toml of another run")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="value of any setting, such as ema=0.999; can be repeated",
    )
    add("--wandb", metavar="PROJECT", help="log to this project of Weights & Biases, too; needs `wandb login`")
    add("--trackio", metavar="PROJECT", help="log to this project of trackio, too; `trackio show` opens its curves")
    add("--no-report", action="store_true", help="do not write report.html")


def _add_flag(group: Any, name: str, fields: dict[str, SourceField]) -> None:
    flag, field = FLAGS[name], fields[FLAGS[name].key]
    hint = ast.unparse(field.annotation)
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    help_text = (flag.text or field.text.replace("`", "")).replace("%", "%%")
    options: dict[str, Any] = {"help": f"{help_text} (default: {flag.default or default})", "dest": flag.key}
    if hint.startswith("Literal["):
        options["choices"] = [ast.literal_eval(choice) for choice in field.annotation.slice.elts]  # type: ignore[attr-defined]
    elif "Literal[" in hint:
        options["type"] = _number_or_auto if hint.startswith("int") else _decimal_or_auto
    elif "tuple[" in hint:
        options["nargs"] = "+"
    else:
        options["type"] = {"int": int, "float": float, "str": str}[hint]
    group.add_argument(name, metavar=flag.metavar, **options)


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'must be a whole number or "{AUTO}", got {text!r}') from error


def _decimal_or_auto(text: str) -> float | str:
    try:
        return text if text == AUTO else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'must be a number or "{AUTO}", got {text!r}') from error


def _steps_or_fraction(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of steps, or a fraction such as 0.1, got {text!r}") from error


def run(args: argparse.Namespace) -> int:
    """Trains a model. Returns 0, or 128 plus the signal that stopped the run, or `FAILED`, or 1 for another error."""
    from megabatch_train.machine import StartClock

    clock = StartClock()
    from megabatch.world import join_world
    from megabatch_train.data import loader
    from megabatch_train.towers import custom
    from megabatch_train.towers.tower import allow_remote_code
    from megabatch_train.trainer import config as configs
    from megabatch_train.trainer.checkpoints import CheckpointError
    from megabatch_train.trainer.health import StoppedError, TrainingFailedError
    from megabatch_train.trainer.step import NotFiniteError

    for package in ("numpy", "safetensors"):
        extras.load(package, purpose="Saving a model")  # raises an error before the training
    tables = _collect_settings(args)
    folder, checkpoint = _choose_folder(args, configs.resolve(*tables).data)
    config = _store_model_config(configs.resolve(_read_old_settings(folder, checkpoint), *tables))
    with join_world(config.device) as world, ExitStack() as stack:
        if world.rank != 0:
            LOG.setLevel(logging.WARNING)
        observers = _build_observers(args, world)
        stack.enter_context(allow_remote_code(args.trust_remote_code))
        folder, checkpoint = world.from_first((folder, checkpoint))
        _check_writable(folder, world, args.resume)
        folder = _lock_folder(folder, world, args, stack)
        count = configs.reader_count(config, world) if world.device.type != "cpu" else 0
        if not any("model" in table for table in tables[1:]):
            custom.check(config.model, args.config or folder)  # only a file names the model, and not the command line
        packages = ["megabatch_train.towers", *_packages_of(config.model)]
        started = stack.enter_context(loader.start_processes(count, packages))
        clock.end_phase("imports")
        trainer = _build_trainer(config, folder, world, observers, started, stack, clock)
        _resume(trainer, args.resume, checkpoint)
        if world.rank == 0:
            _warn_of_training_data(config)
        for label, value in trainer.describe().items():
            LOG.info("%s", format_row(label, value))
        try:
            trainer.fit()
        except StoppedError as stopped:
            if world.rank == 0:
                LOG.warning("%s", stopped)
            return 128 + stopped.number
        except (TrainingFailedError, NotFiniteError) as error:
            if world.rank == 0:
                _write_report(folder, args, trainer)
                LOG.error("%s", error)
            return FAILED
        except CheckpointError as error:
            if world.rank == 0:
                LOG.error("%s; %s", error, trainer.describe_saved())
            return 1
        if world.rank == 0:
            _finish(folder, args, trainer)
    return 0


def _collect_settings(args: argparse.Namespace) -> list[settings.Table]:
    """Returns the settings of the command line as tables. A later table has precedence."""
    from megabatch_train.data import load as data
    from megabatch_train.data.tables import LABEL, NEGATIVE, NEGATIVE_IMAGE

    flags: settings.Table = {}
    if args.steps and args.epochs is not None:
        raise ValueError(f"--epochs cannot be used with --steps, got {args.epochs} and {args.steps}")
    for flag in FLAGS.values():
        if (value := getattr(args, flag.key)) is not None:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            flags = settings.merge(flags, settings.nest(flag.key, value))
    if args.warmup is not None:
        flags["schedule"] = {"warmup_steps" if isinstance(args.warmup, int) else "warmup_fraction": args.warmup}
    if args.columns is not None:
        flags["data_options"] = {"columns": args.columns}
        if args.validation is not None and not set(args.validation) & set(data.WITH_SPLITS):
            columns = {role: name for role, name in args.columns.items() if role not in (NEGATIVE, NEGATIVE_IMAGE, LABEL)}
            flags["validation_options"] = {"columns": columns}
    from_file = settings.read(args.config) if args.config is not None else {}
    return [from_file, flags, *(settings.assignment(text) for text in args.set)]


def _store_model_config(config: TrainConfig) -> TrainConfig:
    """Adds the contents of the config file of "open_clip:FILE.json" to the settings, so that the run does not need the file."""
    from megabatch_train.towers import open_clip

    family, _, name = config.model.partition(":")
    if family != "open_clip" or "config" in config.model_options or (text := open_clip.read_config(name)) is None:
        return config
    return dataclasses.replace(config, model_options={**config.model_options, "config": text})


def _choose_folder(args: argparse.Namespace, source: str) -> tuple[Path, Path | None]:
    """Returns the folder of the run, and the checkpoint to continue from if `--resume` names one."""
    from megabatch_train.trainer import run as runs

    name = _run_name(source)
    if args.resume not in (None, AUTO):
        return _resolve_run(Path(args.resume), args.output)
    if args.resume == AUTO:
        folder = args.output or runs.newest(Path(RUNS), name) or runs.find_unused(Path(RUNS), name)
        return folder, None
    folder = args.output or runs.find_unused(Path(RUNS), name)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output must be a folder, got {folder}, which is a file")
    if (folder / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"{folder} contains a run. Use --resume {folder} to continue it, or --output to name another folder")
    return folder, None


def _run_name(source: str) -> str:
    """Returns the name of a run on this data: the name of the file, or of the folder for a pattern, or "mix" for a mixture."""
    from megabatch_train.data.hub import PREFIX
    from megabatch_train.data.load import BETWEEN

    if BETWEEN in source:
        return "mix"
    path = Path(sanitize(source.removeprefix(PREFIX)))
    named_path = path.parent if any(mark in path.name for mark in "{*?[") else path
    return re.sub(r"[^\w.-]+", "-", named_path.stem).strip(".-") or "run"


def _resolve_run(path: Path, output: Path | None) -> tuple[Path, Path | None]:
    """Returns the folder and the checkpoint for `--resume PATH`, where the path is the folder of a run or a checkpoint."""
    from megabatch_train.trainer import run as runs

    if not path.is_dir():
        known_runs = describe_runs(list_runs(path.parent))
        raise ValueError(
            f"No such run: {path}. --resume must be the folder of a run, a checkpoint in it, or auto. {known_runs}"
        )
    if path.name.startswith("step_"):
        return output or path.resolve().parent.parent, path
    if output is not None and output != path:
        raise ValueError(
            f"--resume must be a checkpoint, such as {path / runs.CHECKPOINTS}/step_…, if --output is another folder"
        )
    if not (path / runs.CHECKPOINTS).is_dir():
        raise ValueError(f"{path} has no checkpoint to resume from")
    return path, None


def _read_old_settings(folder: Path, checkpoint: Path | None) -> settings.Table:
    """Returns the settings of the run that continues, or an empty table for a new run."""
    from megabatch_train.trainer import config as configs
    from megabatch_train.trainer import run as runs

    run_folder = folder if checkpoint is None else checkpoint.resolve().parent.parent
    file = run_folder / runs.CONFIG
    table, directory = settings.read(file) if file.exists() else {}, runs.began_in(run_folder)
    return table if directory in (None, os.getcwd()) else configs.anchor_paths(table, directory)


def _check_writable(folder: Path, world: World, resume: str | None) -> None:
    """Raises an error if a rank cannot write to the folder, because each rank writes its part of a checkpoint."""
    from megabatch_train.trainer import run as runs

    for rank, problem in enumerate(world.gather_objects(runs.unwritable(folder))):
        if problem is not None:
            where = f" on rank {rank}" if world.size > 1 else ""
            elsewhere = f"--resume {folder / runs.CHECKPOINTS}/step_… --output" if resume not in (None, AUTO) else "--output"
            raise ValueError(
                f"--output must be a folder that can be written to, got {folder}, and{where} {problem}; free disk space or "
                f"allow writing there, or use {elsewhere} OTHER_FOLDER"
            )


def _lock_folder(folder: Path, world: World, args: argparse.Namespace, stack: ExitStack) -> Path:
    """Locks the folder of the run until `stack` is closed. If it is locked, a new run without --output takes the next one."""
    from megabatch_train.trainer import run as runs
    from megabatch_train.trainer.run import LockedError, lock_folder

    problem = None
    while world.rank == 0:
        try:
            stack.enter_context(lock_folder(folder))
            break
        except LockedError as error:
            if args.output is None and args.resume is None:
                folder = runs.find_unused(Path(RUNS), folder.name.rpartition("-")[0])
                continue
            problem = f"{error}; wait until it ends, or name another folder with --output"
            break
    folder, problem = world.from_first((folder, problem))
    if problem is not None:
        raise ValueError(problem)
    return folder


def _build_trainer(
    config: TrainConfig,
    folder: Path,
    world: World,
    observers: Sequence[Observer],
    started: Sequence[WorkerProcess],
    stack: ExitStack,
    clock: StartClock,
) -> Trainer:
    from megabatch.cached import second_pass
    from megabatch_train import towers
    from megabatch_train.data import load as data
    from megabatch_train.data.loader import import_packages
    from megabatch_train.towers.models import image_size
    from megabatch_train.trainer.config import LATE
    from megabatch_train.trainer.loop import Trainer, open_workers

    second_pass.seed_host(config.seed)
    size = image_size(config.model, config.model_options)
    split = "train" if config.holdout else None
    with ThreadPoolExecutor(1, thread_name_prefix="megabatch-import") as executor:
        executor.submit(import_packages, _packages_of(config.model))  # while the data is loaded
        dataset = data.load(config.data, split, size=size, holdout=config.holdout, **config.data_options)
        validation = _load_validation(config, size)
    clock.end_phase("data")
    late = {"token_dim": None} if config.loss.name == LATE else {}  # None is the dim of the model's files, or else the default
    pair = towers.load(config.model, dataset.sides, lora=config.lora, **{**late, **config.model_options})
    for name, value in (("retrieval.corpus", config.retrieval.corpus), ("mining.every", config.mining.every)):
        if value and config.loss.name == LATE:
            raise ValueError(f"{name} must not be set for the loss {LATE!r}, got {value!r}")
    clock.end_phase("model")
    if world.rank == 0:
        problems = (problem for source in (dataset, *validation.values()) for problem in source.problems)
        _log_problems(list(dict.fromkeys(problems)))  # training and validation data can contain the same file
    workers = stack.enter_context(open_workers(config, pair, [dataset, *validation.values()], world, started))
    return Trainer(
        config,
        pair,
        dataset,
        folder,
        validation=validation,
        observers=observers,
        world=world,
        command=shlex.join(["megabatch", *sys.argv[1:]]),
        workers=workers,
        clock=clock,
    )


def _packages_of(model: str) -> Sequence[str]:
    """Returns the packages that a model needs, by the prefix of its name."""
    from megabatch_train.towers import custom

    return custom.find_modules(model) or PACKAGES.get(model.partition(":")[0], ())


def _log_problems(problems: Sequence[str]) -> None:
    """Logs the first problems of a dataset, and the number of other problems."""
    for problem in problems[:PROBLEMS_NAMED]:
        LOG.warning("%s", problem)
    if len(problems) > PROBLEMS_NAMED:
        LOG.warning("and %d more problems like these", len(problems) - PROBLEMS_NAMED)


def _warn_of_training_data(config: TrainConfig) -> None:
    """Logs a warning if the run evaluates on data that it trains on."""
    from megabatch_train.data import load as data

    sources = [config.data] if os.path.exists(config.data) else data.parse_spec(config.data)[0]
    trained = [data.anchor(name, Path.cwd()) for name in sources if name not in data.WITH_SPLITS]
    for name in (config.validation,) if isinstance(config.validation, str) else config.validation:
        if data.anchor(name, Path.cwd()) in trained:
            LOG.warning(
                "%s is training data, too, so its metrics do not show how the model performs on new data. Instead, --holdout "
                "0.05 trains on 95 %% of the data and evaluates on the rest",
                sanitize(name),
            )


def _load_validation(config: TrainConfig, size: int | None) -> dict[str, Dataset]:
    """Returns the datasets to evaluate on, by the names of their files."""
    from megabatch_train.data import load as data

    if config.holdout:
        return {"": data.load(config.data, "test", size=size, holdout=config.holdout, **config.data_options)}
    configured = (config.validation,) if isinstance(config.validation, str) else config.validation
    names = [name for name in configured if name] or [config.data] * (config.data in data.WITH_SPLITS)
    datasets: dict[str, Dataset] = {}
    for name in dict.fromkeys(names):
        label = _run_name(name)
        label = label if label not in datasets else f"{label}-{len(datasets) + 1}"
        datasets[label] = data.load(name, "test" if name in data.WITH_SPLITS else None, size=size, **config.validation_options)
    return datasets


def _resume(trainer: Trainer, resume: str | None, checkpoint: Path | None) -> None:
    from megabatch_train.trainer.checkpoints import CheckpointError

    if resume is None:
        return
    try:
        continued = trainer.resume(checkpoint)
    except CheckpointError as error:
        raise ValueError(f"--resume must name an intact checkpoint: {error}") from error
    if not continued and resume != AUTO:
        raise ValueError(f"{resume} has no intact checkpoint to resume from")
    if trainer.world.rank == 0:
        LOG.info(
            "continuing after step %d" if continued else "no checkpoint to continue from: starting at step %d", trainer.step
        )


def _build_observers(args: argparse.Namespace, world: World) -> list[Observer]:
    """Returns the observers of the first rank. This happens before the data is loaded, because a log can need a login."""
    observers: list[Observer] = []
    problem = None
    try:
        observers = _list_observers(args) if world.rank == 0 else []
    except (ValueError, ImportError) as error:
        problem = error
    if problem := world.from_first(problem):
        raise problem
    return observers


def _list_observers(args: argparse.Namespace) -> list[Observer]:
    from megabatch_train.display.observers import ProgressDisplay
    from megabatch_train.trainer.run import MetricsFile

    observers: list[Any] = [MetricsFile(), ProgressDisplay()]
    if extras.is_installed("tensorboard"):
        from megabatch_train.display.observers import TensorBoardLog

        observers.append(TensorBoardLog())
    if not args.no_report:
        from megabatch_train.display.observers import LiveReport

        observers.append(LiveReport())
    if args.wandb:
        from megabatch_train.display.observers import WandbLog

        observers.append(WandbLog(args.wandb))
    if args.trackio:
        from megabatch_train.display.observers import TrackioLog

        observers.append(TrackioLog(args.trackio))
    return observers


def _finish(folder: Path, args: argparse.Namespace, trainer: Trainer) -> None:
    from megabatch_train.towers import models

    _write_report(folder, args, trainer)
    LOG.info("%s", format_row("model", str(folder / models.WEIGHTS)))
    LOG.info("%s", format_row("next", f'megabatch search {shlex.quote(str(folder))} "a text to search for"'))


def _write_report(folder: Path, args: argparse.Namespace, trainer: Trainer) -> None:
    if not args.no_report:
        from megabatch_train.display.report import write_report

        LOG.info("%s", format_row("report", str(write_report(folder, evaluated=trainer.evaluated))))
