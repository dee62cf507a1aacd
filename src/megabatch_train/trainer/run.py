"""The folder of a run, the lock on it, and the observers that write its files."""

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
from megabatch_train.towers import models
from megabatch_train.towers.lora import store_frozen
from megabatch_train.towers.open_clip import split_name
from megabatch_train.towers.tower import SIDES, Pair
from megabatch_train.trainer.build import AUTOCAST_TYPES, distinct
from megabatch_train.trainer.checkpoints import find_newest, list_checkpoints, read_manifest, read_weights, step_of
from megabatch_train.trainer.config import TrainConfig, anchor_paths

# ----------------------------------------------------------------------------------------------------------------------
# A run's folder: its name, its files, and whether it can be written to.

LOG = logging.getLogger("megabatch")
CONFIG, COMMAND, ENVIRONMENT = "config.toml", "command.txt", "environment.json"
CHECKPOINTS, BEST, FROZEN, TEACHER = "checkpoints", "best", "frozen", "teacher"  # folders
BEST_ABOUT = "best.json"  # in the folder of the best weights
_WRITTEN = re.compile(  # names of files that a run writes through a temporary file
    r"config\.toml|command\.txt|environment\.json|metrics\.jsonl|report\.html|best\.json|(adapter_)?model\.safetensors"
    r"|open_clip_config\.json|modules\.json|config\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    r"|[0-9a-f]{8}_\d{10}\.pt"
)
PROBE = 1 << 16  # bytes: more than settings and the first lines of metrics take


@dataclass
class Run:
    """A run, as observers see it."""

    folder: Path
    config: TrainConfig
    command: str  # the command line
    total_steps: int
    first_step: int = 0  # steps done before this run resumed
    step: int = 0  # steps done so far
    pairs: int = 0  # trained on so far
    seconds: float = 0.0  # of all steps so far
    health: dict[str, Any] = field(default_factory=dict)  # `Health.state` after the last step

    @property
    def batch_size(self) -> int:
        """Pairs in a step."""
        return self.config.batch_size

    def write(self, about: Mapping[str, Any]) -> None:
        """Writes settings, command line, and the environment (`about`) with the date into the folder.

        The settings are complete, so that the run can be resumed and evaluated. If a URL in them has a user, a password or a
        query, only the user of this process can read the file.
        """
        table = settings.table(self.config)
        text, private = settings.to_toml(table), redact(table) != table
        file_io.write(self.folder / CONFIG, lambda file: file.write(text.encode()), private=private)
        place, now = self.folder / ENVIRONMENT, time.strftime("%Y-%m-%d %H:%M:%S %z")
        started = json.loads(place.read_text("utf-8")).get("started", now) if self.first_step and place.is_file() else now
        environment = json.dumps({"started": started, "last_start": now, **about}, indent=1)
        file_io.write(place, lambda file: file.write(environment.encode()))
        if self.command:
            place = self.folder / COMMAND
            earlier = place.read_text("utf-8") if self.first_step and place.is_file() else ""
            commands = redact(f"{earlier}{self.command}\n")
            file_io.write(place, lambda file: file.write(commands.encode()))


def environment(config: TrainConfig, pair: Pair, world: World, samples: int, steps: int) -> dict[str, Any]:
    """Hardware, versions and sizes, for a report that can be cited."""
    of_sides = zip(SIDES, pair.towers, strict=True)
    return {
        "directory": os.getcwd(),  # that relative paths of the settings are relative to
        "machine": machine.describe(),
        "device": world.device.type,
        "processes": world.size,
        "parameters": sum(p.numel() for p in pair.parameters()),
        "trained_parameters": sum(p.numel() for p in pair.parameters() if p.requires_grad),
        "parameters_of": {side: sum(p.numel() for p in tower.module.parameters()) for side, tower in of_sides},
        "samples": samples,
        "pairs_per_step": config.batch_size,
        "steps": steps,
        "precision": config.precision,
    }


def began_in(folder: Path) -> str | None:
    """The working directory that relative paths in a run's settings are relative to; None if it is not recorded."""
    place = folder / ENVIRONMENT
    found = json.loads(place.read_text("utf-8")).get("directory") if place.is_file() else None
    return found if isinstance(found, str) else None


def unwritable(folder: Path) -> str | None:
    """Why a run could not write into its folder, which may not exist yet; None if it could. Leaves no files."""
    for wanted in (folder, folder / CHECKPOINTS):  # may belong to another user
        place = next(part for part in (wanted, *wanted.parents) if os.path.lexists(part))
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"{place}: {error.strerror or error}"
    return None


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files that a killed run left behind. The caller must hold the lock of the run."""
    for parent in (folder, folder / BEST):
        for place in (parent, *(parent / side for side in SIDES), *parent.glob("[0-9]_*")):
            file_io.remove_leftovers(place, _is_written)
    for name in (FROZEN, TEACHER):
        file_io.remove_leftovers(folder / name, _is_written)


def _is_written(name: str) -> bool:
    return _WRITTEN.fullmatch(name) is not None


def best(folder: Path) -> dict[str, Any] | None:
    """Step, metric and value of the best weights so far; None if there are none."""
    place = folder / BEST / BEST_ABOUT
    return json.loads(place.read_text("utf-8")) if place.is_file() else None


def write_best(folder: Path, about: dict[str, Any]) -> None:
    """Notes which weights are the best."""
    file_io.write(folder / BEST / BEST_ABOUT, lambda file: file.write(json.dumps(about).encode()))


def forget_best(folder: Path) -> None:
    """Removes the note and the weights that a run before left in the folder."""
    for name in (BEST_ABOUT, models.WEIGHTS):
        (folder / BEST / name).unlink(missing_ok=True)


def find_unused(parent: Path, name: str) -> Path:
    """The first of `parent/name-1`, `name-2` … that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def newest(parent: Path, name: str) -> Path | None:
    """The last of `parent/name-1`, `name-2` … that has checkpoints, or None."""
    found = [path for path in parent.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()]
    found = [path for path in found if (path / CHECKPOINTS).is_dir()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


# ----------------------------------------------------------------------------------------------------------------------
# Disk space: whether the model and the checkpoints of a run fit on the disk.


def check_disk_space(
    folder: Path, pair: Pair, moments: float, keep: int, world: World, *, models: int, checkpoints: Sequence[Path]
) -> None:
    """Raises if the disk has no space for the model and one checkpoint. Warns if it has no space for all checkpoints.

    Args:
        folder: of the run.
        pair: the towers.
        moments: bytes of a checkpoint for each byte of a trained weight, in addition to the weights.
        keep: number of checkpoints that the run keeps.
        world: the ranks.
        models: number of models in the folder: the last, and the best if the run keeps it.
        checkpoints: that the run has already.
    """
    learned, model = _count_learned_bytes(pair), model_bytes(pair)
    each = int(model + moments * learned)
    free, existing = world.from_first((free_bytes(folder), len(checkpoints)))
    found = (
        f"the disk of {folder} has {free / 1e6:,.1f} MB free; the model takes {model / 1e6:,.1f} MB"
        + (", the best model (checkpoint.best) takes as much," if models > 1 else "")
        + f" and each checkpoint takes {each / 1e6:,.1f} MB"
    )
    if free + each * max(0, existing - 1) < models * model + each:  # all checkpoints but the newest can be deleted
        other = f"--resume {folder / CHECKPOINTS}/step_… --output OTHER_FOLDER" if existing else "another folder (--output)"
        raise ValueError(f"{found}. Free disk space, or use {other}")
    if free < models * model + each * (keep + 1 - existing) and world.rank == 0:
        LOG.warning("%s. %d checkpoints and the temporary copy of the next one may not fit (checkpoint.keep)", found, keep)


def model_bytes(pair: Pair) -> int:
    """Returns the size of the file in which a run saves its model, without the header."""
    stored = (value for module in distinct(pair.modules) for value in module.state_dict().values())
    return _count_learned_bytes(pair) if pair.base_is_elsewhere else _bytes(stored)


def _count_learned_bytes(pair: Pair) -> int:
    return _bytes(parameter for parameter in pair.parameters() if parameter.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_bytes(folder: Path) -> int:
    """Returns the free space of the disk that the folder is on, or will be on."""
    return shutil.disk_usage(next(place for place in (folder, *folder.resolve().parents) if place.exists())).free


# ----------------------------------------------------------------------------------------------------------------------
# The towers of a run with its newest weights, which may be in a checkpoint. Commands use them while a run continues.


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int | None]:
    """Returns the towers of a run after its last saved step, from `model.safetensors` or from a newer checkpoint.

    Args:
        folder: of a run, or another folder with a model. The folder of a checkpoint selects the weights of this checkpoint.
        device: of the modules.

    Returns:
        The towers in evaluation mode, and the step of the checkpoint (None for the weights of `model.safetensors`).
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
    """Returns the towers with the weights that the run would save now, in evaluation mode, and the number of its steps.

    Args:
        folder: of a checkpoint, or of a run, whose newest intact checkpoint is used.
        device: of the modules.
    """
    if (folder / CHECKPOINTS).is_dir():
        newest = find_newest(folder / CHECKPOINTS)
    else:
        newest = (folder, read_manifest(folder)) if folder.name.startswith("step_") else None
    if newest is None:
        raise FileNotFoundError(f"{folder} has no model.safetensors and no intact checkpoint: the run has saved nothing yet")
    path, about = newest
    config = settings.build(TrainConfig, anchor_paths(about["config"], about.get("directory")))
    family, _, name = config.model.partition(":")
    model = f"{family}:{split_name(name)[0]}" if family == "open_clip" else config.model  # weights are in the checkpoint
    options = {**config.model_options, **about.get("text_options", {})}  # the run's options override the model's files
    pair = replace(towers.load(model, tuple(about["sides"]), lora=config.lora, **options), name=config.model)
    modules = dict(zip(SIDES, distinct(pair.modules), strict=False))
    model_weights, average = read_weights(path)
    state = model_weights | average  # the average is what a run saves
    for name, module in modules.items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        module.load_state_dict(own, strict=not pair.base_is_elsewhere)
        module.to(device).eval()
    if pair.base_is_elsewhere:
        store_frozen(list(modules.values()), AUTOCAST_TYPES.get(config.on(torch.device(device)).precision, torch.float32))
    bias = state.get("loss.bias")
    scale = math.exp(state["loss.log_scale"].item())
    return replace(pair, logit_scale=scale, logit_bias=pair.logit_bias if bias is None else bias.item()), about["step"]


# ----------------------------------------------------------------------------------------------------------------------
# A run's lock: one process at a time writes to a run's folder.
#
# The lock is filelock's `flock` on a file, so the system releases it when the process ends, including after SIGKILL, and NFS
# passes it on between hosts. The file names the process and the host that hold it.


NAME = "run.lock"


class LockedError(ValueError):
    """Another process or thread writes to the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Creates the folder, and removes it afterwards if nothing is in it.

    The thread that holds it may ask again: a command does, and the trainer that it calls. On a file system without locks, a
    warning is logged.

    Raises:
        LockedError: another process or thread holds it.
    """
    filelock = extras.load("filelock", purpose="The lock of a run")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    lock = filelock.FileLock(path.resolve(), timeout=0, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise LockedError(f"{folder} is in use by {_holder(path)}") from error
    except OSError as error:
        LOG.warning("%s cannot be locked (%s); no other run may write there", folder, error.strerror)
    asked_again = lock.lock_counter > 1
    try:
        if not asked_again:
            about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            path.write_text(json.dumps(about))
        yield
    finally:
        if not asked_again:
            path.unlink(missing_ok=True)  # before the lock is released: nobody removes the file of another
        lock.release()
        with suppress(OSError):
            for place in made:
                place.rmdir()


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        if (about["process"], about["host"]) == (os.getpid(), socket.gethostname()):
            return "another thread of this process"
        return f"process {about['process']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


# ----------------------------------------------------------------------------------------------------------------------
# Observers of a run: `metrics.jsonl`, displays and logs. They are called on the first rank, from the training thread.

METRICS = "metrics.jsonl"


class Observer(Protocol):
    """Something that records a run: a file, a display, a log."""

    def start(self, run: Run) -> None:
        """Before the first step; a resumed run starts after step `run.first_step`."""

    def step(self, record: dict[str, Any]) -> None:
        """After each step: step, epoch, pairs, loss, scale, bias (SigLIP), learning_rate, gradient_norm, pairs_per_second,
        mfu (share of the GPU's peak rate, if it is known), memory_bytes, seconds, and under "phases" the seconds of each phase
        on this rank since the record before: data, forward, loss, backward, optimizer, checkpoint, evaluation, other.

        "spread" and "advantage" describe the embeddings (health.py), and "problem" is a warning about this step. A step whose
        loss is not finite has only step, epoch, loss and problem.
        """

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """After an evaluation: step, and under "evaluation" the metrics by open_clip's names."""

    def on_save(self, path: Path) -> None:
        """After a checkpoint has been written, and at the end with the model's file."""

    def finish(self, run: Run) -> None:
        """At the end, also of a stopped or failed run; `run.step` is the last step."""


class Observers:
    """Calls several observers. If one cannot write, because a disk is full, the run goes on with one warning."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        # Observer id → method that failed. Only that method shows recovery: another one may have nothing to write.
        self._failed: dict[int, str] = {}

    def start(self, run: Run) -> None:
        """Calls all observers; one that fails here is not called again."""
        self._observers = [observer for observer in self._observers if self._tell_one(observer, "start", run)]

    def step(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._tell("step", record)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Calls all observers."""
        self._tell("on_evaluation", record)

    def on_save(self, path: Path) -> None:
        """Calls all observers."""
        self._tell("on_save", path)

    def finish(self, run: Run) -> None:
        """Calls all observers."""
        self._tell("finish", run)

    def _tell(self, method: str, what: Any) -> None:
        for observer in self._observers:
            self._tell_one(observer, method, what)

    def _tell_one(self, observer: Observer, method: str, what: Any) -> bool:
        name = type(observer).__name__
        try:
            getattr(observer, method)(what)
        except OSError as error:
            if id(observer) not in self._failed:
                LOG.warning("%s could not write, and the run goes on: %s", name, error)
                self._failed[id(observer)] = method
            elif method == "finish":
                LOG.warning("%s could not write to the end: %s", name, error)
            return False
        if self._failed.get(id(observer)) == method:
            LOG.warning("%s writes again", name)
            del self._failed[id(observer)]
        return True


class MetricsFile:
    """Writes `metrics.jsonl`. A resumed run removes the lines after the step that it resumes from.

    Lines that cannot be written, because a disk is full, are kept and written later.
    """

    def __init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()

    def start(self, run: Run) -> None:
        """Keeps the lines of steps before `run.first_step`."""
        self._path = run.folder / METRICS
        known = results.read(self._path) if self._path.exists() else []
        kept = [json.dumps(line) + "\n" for line in known if line["step"] <= run.first_step]
        file_io.write(self._path, lambda file: file.write("".join(kept).encode()))

    def step(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def on_evaluation(self, record: dict[str, Any]) -> None:
        """Adds one line."""
        self._write(record)

    def on_save(self, path: Path) -> None:
        """Does nothing."""

    def finish(self, run: Run) -> None:
        """Writes the lines that are left, or raises an error with their number."""
        try:
            self._write()
        except OSError as error:
            lost = f"{error.strerror}; {len(self._waiting)} lines are missing at the end"
            raise OSError(error.errno, lost, str(self._path)) from error

    def _write(self, *records: dict[str, Any]) -> None:
        self._waiting.extend(records)
        while self._waiting:
            results.append(self._path, self._waiting[0])
            self._waiting.popleft()
