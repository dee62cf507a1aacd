"""The folder of a run, its lock, and the observers of a run."""

import json
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megabatch import extras, file_io
from megabatch.world import World
from megabatch_train import machine, settings, towers
from megabatch_train.evaluation import results
from megabatch_train.names import redact
from megabatch_train.towers import custom, models
from megabatch_train.towers.layers.lora import store_frozen
from megabatch_train.towers.open_clip import quiet, split_name
from megabatch_train.towers.tower import SIDES, Pair
from megabatch_train.trainer.build import AUTOCAST_TYPES, unique_modules
from megabatch_train.trainer.checkpoints import find_newest, list_checkpoints, read_manifest, read_weights, step_of
from megabatch_train.trainer.config import TrainConfig, anchor_paths

# ----------------------------------------------------------------------------------------------------------------------
# The folder of a run: its name, its files, and a check that the run can write into it.

LOG = logging.getLogger("megabatch")
CONFIG, COMMAND, ENVIRONMENT = "config.toml", "command.txt", "environment.json"
CHECKPOINTS, BEST, FROZEN, TEACHER = "checkpoints", "best", "frozen", "teacher"  # names of folders
BEST_ABOUT = "best.json"  # file in the folder of the best weights
_RUN_FILES = re.compile(  # names of files that a run first writes under a temporary name
    r"config\.toml|command\.txt|environment\.json|metrics\.jsonl|report\.html|best\.json|(adapter_)?model\.safetensors"
    r"|open_clip_config\.json|modules\.json|config\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|[0-9a-f]{8}_\d{10}\.pt"
)
PROBE = 1 << 16  # size of a test file in bytes, more than the settings and the first lines of metrics take


@dataclass
class Run:
    """A run and its progress, for observers."""

    folder: Path
    config: TrainConfig
    command: str  # the command line
    total_steps: int
    first_step: int = 0  # number of completed steps when this run resumed
    step: int = 0  # number of completed steps
    pairs: int = 0  # number of pairs in the completed steps
    seconds: float = 0.0  # duration of the completed steps
    health: dict[str, Any] = field(default_factory=dict)  # `Health.state` after the last step

    @property
    def batch_size(self) -> int:
        """The number of pairs in a step."""
        return self.config.batch_size

    def write(self, about: Mapping[str, Any]) -> None:
        """Writes the settings, the command line, and the environment (`about`) with the date into the folder.

        The settings are complete, so that the run can be resumed and evaluated. If a URL in them contains a user name, a
        password or a query, only the user of this process can read the file.
        """
        table = settings.table(self.config)
        text, private = settings.to_toml(table), redact(table) != table
        file_io.write(self.folder / CONFIG, lambda file: file.write(text.encode()), private=private)
        path, now = self.folder / ENVIRONMENT, time.strftime("%Y-%m-%d %H:%M:%S %z")
        started = json.loads(path.read_text("utf-8")).get("started", now) if self.first_step and path.is_file() else now
        environment = json.dumps({"started": started, "last_start": now, **about}, indent=1)
        file_io.write(path, lambda file: file.write(environment.encode()))
        if self.command:
            path = self.folder / COMMAND
            earlier_commands = path.read_text("utf-8") if self.first_step and path.is_file() else ""
            commands = redact(f"{earlier_commands}{self.command}\n")
            file_io.write(path, lambda file: file.write(commands.encode()))


def environment(config: TrainConfig, pair: Pair, world: World, samples: int, steps: int) -> dict[str, Any]:
    """Returns the hardware, versions and sizes of a run, for its report."""
    sides = zip(SIDES, pair.towers, strict=True)
    return {
        "directory": os.getcwd(),  # relative paths in the settings are relative to it
        "machine": machine.describe(),
        "device": world.device.type,
        "processes": world.size,
        "parameters": sum(p.numel() for p in pair.parameters()),
        "trained_parameters": sum(p.numel() for p in pair.parameters() if p.requires_grad),
        "parameters_of": {side: sum(p.numel() for p in tower.module.parameters()) for side, tower in sides},
        "samples": samples,
        "pairs_per_step": config.batch_size,
        "steps": steps,
        "precision": config.precision,
    }


def began_in(folder: Path) -> str | None:
    """Returns the directory that relative paths in the settings of a run are relative to, or None if it is not recorded."""
    path = folder / ENVIRONMENT
    directory = json.loads(path.read_text("utf-8")).get("directory") if path.is_file() else None
    return directory if isinstance(directory, str) else None


def unwritable(folder: Path) -> str | None:
    """Returns the reason why a run cannot write into its folder, or None if it can. The folder need not exist."""
    for path in (folder, folder / CHECKPOINTS):  # the second folder can belong to another user
        existing = next(part for part in (path, *path.parents) if os.path.lexists(part))
        try:
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"{existing}: {error.strerror or error}"
    return None


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files of a killed run. The caller must hold the lock of the run."""
    for parent in (folder, folder / BEST):
        for subfolder in (parent, *(parent / side for side in SIDES), *parent.glob("[0-9]_*")):
            file_io.remove_leftovers(subfolder, _is_run_file)
    for name in (FROZEN, TEACHER):
        file_io.remove_leftovers(folder / name, _is_run_file)


def _is_run_file(name: str) -> bool:
    return _RUN_FILES.fullmatch(name) is not None


def read_best(folder: Path) -> dict[str, Any] | None:
    """Returns the step, metric and value of the best weights, or None if there are none."""
    path = folder / BEST / BEST_ABOUT
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def write_best(folder: Path, about: dict[str, Any]) -> None:
    """Writes the step, metric and value of the best weights."""
    file_io.write(folder / BEST / BEST_ABOUT, lambda file: file.write(json.dumps(about).encode()))


def remove_best(folder: Path) -> None:
    """Removes the best weights of an earlier run in the folder, with their step, metric and value."""
    for name in (BEST_ABOUT, models.WEIGHTS):
        (folder / BEST / name).unlink(missing_ok=True)


def find_unused(parent: Path, name: str) -> Path:
    """Returns the first path of `parent/name-1`, `parent/name-2`, … that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def newest(parent: Path, name: str) -> Path | None:
    """Returns the last path of `parent/name-1`, `parent/name-2`, … that has checkpoints, or None."""
    folders = [path for path in parent.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()]
    folders = [path for path in folders if (path / CHECKPOINTS).is_dir()]
    return max(folders, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


# ----------------------------------------------------------------------------------------------------------------------
# Disk space: a check that the model and the checkpoints of a run fit on the disk.


def check_disk_space(
    folder: Path, pair: Pair, moments: float, keep: int, world: World, *, models: int, checkpoints: Sequence[Path]
) -> None:
    """Raises an error if the disk has no space for the model and one checkpoint. Warns if it has no space for all checkpoints.

    Args:
        folder: the folder of the run.
        pair: the towers.
        moments: the bytes that a checkpoint has for each byte of trained weights, in addition to the weights themselves.
        keep: the number of checkpoints that the run keeps.
        world: the ranks.
        models: the number of models in the folder: the last model, and the best model if the run keeps it.
        checkpoints: the checkpoints that the run already has.
    """
    trained, model = _count_trained_bytes(pair), model_bytes(pair)
    checkpoint = int(model + moments * trained)
    free, existing = world.from_first((free_bytes(folder), len(checkpoints)))
    sizes = (
        f"the disk of {folder} has {free / 1e6:,.1f} MB free; the model takes {model / 1e6:,.1f} MB"
        + (", the best model (checkpoint.best) takes as much," if models > 1 else "")
        + f" and each checkpoint takes {checkpoint / 1e6:,.1f} MB"
    )
    if free + checkpoint * max(0, existing - 1) < models * model + checkpoint:  # all checkpoints but the newest can be deleted
        other = f"--resume {folder / CHECKPOINTS}/step_… --output OTHER_FOLDER" if existing else "another folder (--output)"
        raise ValueError(f"{sizes}. Free disk space, or use {other}")
    if free < models * model + checkpoint * (keep + 1 - existing) and world.rank == 0:
        LOG.warning(
            "%s. %d checkpoints and the temporary copy of the next one may not fit. Free disk space, or lower checkpoint.keep",
            sizes,
            keep,
        )


def model_bytes(pair: Pair) -> int:
    """Returns the size of the file in which a run saves its model, without the header of the file."""
    weights = (value for module in unique_modules(pair.modules) for value in module.state_dict().values())
    return _count_trained_bytes(pair) if pair.base_is_elsewhere else _count_bytes(weights)


def _count_trained_bytes(pair: Pair) -> int:
    return _count_bytes(parameter for parameter in pair.parameters() if parameter.requires_grad)


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_bytes(folder: Path) -> int:
    """Returns the free space of the disk that the folder is on, or will be on."""
    return shutil.disk_usage(next(path for path in (folder, *folder.resolve().parents) if path.exists())).free


# ----------------------------------------------------------------------------------------------------------------------
# The towers of a run with its newest weights, which can be in a checkpoint. So commands can use a run before it has ended.


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int | None]:
    """Returns the towers of a run after its last saved step, from `model.safetensors` or from a newer checkpoint.

    Args:
        folder: the folder of a run, or another folder with a model. The folder of a checkpoint selects the weights of this
            checkpoint.
        device: the device of the modules.

    Returns:
        The towers in evaluation mode, and the step of the checkpoint, which is None for the weights of `model.safetensors`.
    """
    if (folder / models.WEIGHTS).is_file():
        step, checkpoints = models.read_step(folder), list_checkpoints(folder / CHECKPOINTS)
        if step is None or not checkpoints or step_of(checkpoints[-1]) <= step:
            return towers.load_saved(folder, device), None
        newest = find_newest(folder / CHECKPOINTS)
        if newest is None or newest[1]["step"] <= step:
            return towers.load_saved(folder, device), None
    return load_checkpoint(folder, device)


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int]:
    """Returns the towers of a checkpoint in evaluation mode, and its step. They have the averaged weights, if there are any.

    Args:
        folder: the folder of a checkpoint, or the folder of a run, whose newest intact checkpoint is used.
        device: the device of the modules.
    """
    if (folder / CHECKPOINTS).is_dir():
        newest = find_newest(folder / CHECKPOINTS)
    else:
        newest = (folder, read_manifest(folder)) if folder.name.startswith("step_") else None
    if newest is None:
        raise FileNotFoundError(f"{folder} has no model.safetensors and no intact checkpoint: the run has saved nothing yet")
    path, manifest = newest
    config = settings.build(TrainConfig, anchor_paths(manifest["config"], manifest.get("directory")))
    config = replace(config, model=models.find_bases(config.model, path.parent, manifest.get("bases", {})))
    custom.check(config.model, path)
    family, _, name = config.model.partition(":")
    model = f"{family}:{split_name(name)[0]}" if family == "open_clip" else config.model  # the checkpoint has the weights
    options = {**config.model_options, **manifest.get("text_options", {})}  # options of the run override the model's files
    with quiet():
        pair = replace(towers.load(model, tuple(manifest["sides"]), lora=config.lora, **options), name=config.model)
    modules = dict(zip(SIDES, unique_modules(pair.modules), strict=False))
    model_weights, average = read_weights(path)
    state = model_weights | average  # averaged weights replace live weights, as in the saved model
    for name, module in modules.items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        module.load_state_dict(own, strict=not pair.base_is_elsewhere)
        module.to(device).eval()
    if pair.base_is_elsewhere:
        store_frozen(list(modules.values()), AUTOCAST_TYPES.get(config.on(torch.device(device)).precision, torch.float32))
    bias = state.get("loss.bias")
    scale = math.exp(state["loss.log_scale"].item())
    return replace(pair, logit_scale=scale, logit_bias=pair.logit_bias if bias is None else bias.item()), manifest["step"]


# ----------------------------------------------------------------------------------------------------------------------
# The lock of a run: only one process at a time writes to the folder of a run.
#
# The package filelock locks a file by `flock`. The operating system releases the lock when the process ends, including after
# SIGKILL. The lock works between hosts over NFS. The file names the process and the host that hold the lock.


LOCK_FILE = "run.lock"


class LockedError(ValueError):
    """Raised if another process or thread writes to the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder. Creates the folder, and removes it afterwards if it is empty.

    A thread can lock the same folder twice. A command does so, because the trainer that it calls locks the folder again. On a
    file system without locks, a warning is logged.

    Raises:
        LockedError: if another process or thread holds the lock.
    """
    filelock = extras.load("filelock", purpose="The lock of a run")
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    lock = filelock.FileLock(path.resolve(), timeout=0, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise LockedError(f"{folder} is in use by {_holder(path)}") from error
    except OSError as error:
        LOG.warning("%s cannot be locked (%s). Make sure that no other run writes to it", folder, error.strerror)
    is_nested = lock.lock_counter > 1
    try:
        if not is_nested:
            about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            path.write_text(json.dumps(about))
        yield
    finally:
        if not is_nested:
            path.unlink(missing_ok=True)  # before the lock is released, so that no process removes the file of another one
        lock.release()
        with suppress(OSError):
            for new_folder in new_folders:
                new_folder.rmdir()


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        if (about["process"], about["host"]) == (os.getpid(), socket.gethostname()):
            return "another thread of this process"
        return f"process {about['process']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


# ----------------------------------------------------------------------------------------------------------------------
# Observers of a run: `metrics.jsonl`, displays and logs. The training thread of the first rank calls them.

METRICS = "metrics.jsonl"


class Observer(Protocol):
    """An object that records a run, such as a file, a display or a log."""

    def start(self, run: Run) -> None:
        """Called before the first step. A resumed run starts after step `run.first_step`."""

    def step(self, record: dict[str, Any]) -> None:
        """Called after each step.

        The keys of the record are "step", "epoch", "pairs", "loss", "scale", "bias" (SigLIP), "learning_rate", "gradient_norm",
        "pairs_per_second", "mfu" (share of the GPU's peak rate, if it is known), "memory_bytes", "seconds" and "phases". The
        phases are the seconds of this rank since the previous record: "data", "forward", "loss", "backward", "optimizer",
        "checkpoint", "evaluation" and "other".

        The first record has "start", the seconds of each phase of the start of the run.

        "spread" and "advantage" describe the embeddings (health.py), and "problem" is a warning about this step. If the loss of
        a step is not finite, the record has only "step", "epoch", "loss" and "problem".
        """

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Called after an evaluation. The record has "step", and "evaluation" with the metrics by their names in open_clip."""

    def on_save(self, path: Path) -> None:
        """Called after a checkpoint has been written, and at the end with the file of the model."""

    def finish(self, run: Run) -> None:
        """Called at the end, even if the run was stopped or failed. `run.step` is the last step."""


class Observers:
    """Calls several observers. If one cannot write because a disk is full, the run continues and logs one warning."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        # Method that failed, by the id of the observer. The observer has recovered if this method succeeds. Success of another
        # method proves nothing, because that method may have nothing to write.
        self._failed: dict[int, str] = {}

    def start(self, run: Run) -> None:
        """Calls all observers. An observer that fails here is not called again."""
        self._observers = [observer for observer in self._observers if self._call_one(observer, "start", run)]

    def step(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._call_all("step", record)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._call_all("on_evaluation", record)

    def on_save(self, path: Path) -> None:
        """Calls all observers."""
        self._call_all("on_save", path)

    def finish(self, run: Run) -> None:
        """Calls all observers."""
        self._call_all("finish", run)

    def _call_all(self, method: str, argument: Any) -> None:
        for observer in self._observers:
            self._call_one(observer, method, argument)

    def _call_one(self, observer: Observer, method: str, argument: Any) -> bool:
        name = type(observer).__name__
        try:
            getattr(observer, method)(argument)
        except OSError as error:
            if id(observer) not in self._failed:
                LOG.warning("%s could not write, but the run continues: %s", name, error)
                self._failed[id(observer)] = method
            elif method == "finish":
                LOG.warning("%s could not write everything: %s", name, error)
            return False
        if self._failed.get(id(observer)) == method:
            LOG.warning("%s can write again", name)
            del self._failed[id(observer)]
        return True


class MetricsFile:
    """Writes `metrics.jsonl`. A resumed run removes the lines after the step that it resumes from.

    Lines that cannot be written, because a disk is full for example, are kept in memory and written later.
    """

    def __init__(self) -> None:
        self._queue: deque[dict[str, Any]] = deque()

    def start(self, run: Run) -> None:
        """Removes the lines of steps after `run.first_step`."""
        self._path = run.folder / METRICS
        old_lines = results.read(self._path) if self._path.exists() else []
        lines = [json.dumps(line) + "\n" for line in old_lines if line["step"] <= run.first_step]
        file_io.write(self._path, lambda file: file.write("".join(lines).encode()))

    def step(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def on_save(self, path: Path) -> None:
        """Does nothing."""

    def finish(self, run: Run) -> None:
        """Writes the remaining lines, or raises an error with their number."""
        try:
            self._write()
        except OSError as error:
            message = f"{error.strerror}; {len(self._queue)} lines are missing at the end"
            raise OSError(error.errno, message, str(self._path)) from error

    def _write(self, *records: dict[str, Any]) -> None:
        self._queue.extend(records)
        while self._queue:
            results.append(self._path, self._queue[0])
            self._queue.popleft()
