"""Writes and reads one checkpoint: its manifest with checksums, and the files that store the training state.

A checkpoint is a folder such as `step_00000160`. It is written under a temporary name. Its files are flushed to disk, the
manifest `checkpoint.json` with their sizes and checksums is written last, and then the folder is renamed. Therefore a folder
with its final name is complete, even if the process is killed at any time. Before a checkpoint is used, its files are compared
with the manifest.
"""

import errno
import io
import json
import logging
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached import second_pass
from megabatch.world import World, is_sharded
from megabatch_train.towers.layers.lora import find_trained
from megabatch_train.trainer.build import Average

# ----------------------------------------------------------------------------------------------------------------------
# A checkpoint on disk: a complete folder with a manifest.

LOG = logging.getLogger("megabatch")
MANIFEST = "checkpoint.json"
DISK_FULL = "the disk is full"
_PIECE = 1 << 24  # number of bytes that are read at once
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint could not be written or read."""


def write(partial: Path, write_files: Callable[[Path], None]) -> None:
    """Calls `write_files(partial)`, which writes files into the folder, and flushes these files to disk."""
    old_files = set(partial.iterdir())
    write_files(partial)
    for path in set(partial.iterdir()) - old_files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def finish(partial: Path, final: Path, entries: dict[str, Any]) -> None:
    """Writes the manifest with these entries, and renames the folder from `partial` to `final`."""
    manifest = {**entries, "files": {path.name: [path.stat().st_size, _checksum(path)] for path in sorted(partial.iterdir())}}
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # the run has repeated this step
        final.rename(free_name(final, ".deleted"))
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of an intact checkpoint.

    Raises:
        CheckpointError: if a file is missing or does not match its checksum.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {MANIFEST} cannot be read: {error}") from error
    for name, (size, check) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes instead of {size}")
        if _checksum(file) != check:
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} does not match its checksum")
    return manifest


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest intact checkpoint in a folder and its manifest, or None. Logs a warning for each damaged one."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, read_manifest(path)
        except CheckpointError as error:
            LOG.warning("%s. The checkpoint before it is tried next", error)
    return None


def free_name(path: Path, prefix: str) -> Path:
    """Returns the first path of `prefix_NAME`, `prefix_NAME_1`, … that does not exist."""
    number = 0
    while (other := path.with_name(f"{prefix}_{path.name}" + (f"_{number}" if number else ""))).exists():
        number += 1
    return other


def describe_failure(error: BaseException) -> str:
    """Returns the reason why something could not be written."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return DISK_FULL
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


# ----------------------------------------------------------------------------------------------------------------------
# Files without pickles. Tensors are in safetensors files. A sharded state has one file per rank and a manifest in JSON.
#
# The planners of PyTorch's distributed checkpoints decide which rank writes and reads which part. Therefore a run can resume
# with another number of ranks. PyTorch's storage is not used, because its metadata is a pickle, and reading a pickle can
# execute code.

SHARD_MANIFEST = "manifest.json"
_PICKLED_MANIFEST = ".metadata"  # the file of PyTorch's storage
_DTYPES = {  # names of dtypes in the header of a safetensors file
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file, one tensor after another.

    `safetensors.torch.save` would hold a copy of the file in memory.
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Large elements come first, so that each tensor begins at a multiple of its element size.
    by_element_size = sorted(dense.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in by_element_size:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in by_element_size:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file."""
    with _open(path) as file:
        # The file object has `keys` but is not a mapping.
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class ShardedWriter:
    """Writes a sharded state. The ranks exchange messages only in `agree`.

    Args:
        state: nested dictionaries of tensors, DTensors and values that JSON can represent. All are in host memory.
        world: the ranks.
    """

    def __init__(self, state: dict[str, Any], world: World) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self._world, self._planner = world, DefaultSavePlanner()
        self._planner.set_up_planner(state, None, world.rank == 0)
        self._plan: Any = self._planner.create_local_plan()
        self._manifest: dict[str, Any] = {}

    def agree(self) -> None:
        """Decides which rank writes which part. All ranks must call it."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        values = {item.index.fqn: self._planner.lookup_object(item.index) for item in self._plan.items if _is_value(item)}
        by_rank = self._world.gather_objects((self._plan, values))
        plans, metadata = self._planner.create_global_plan([plan for plan, _ in by_rank])
        ranks = {_key(item.index): rank for rank, plan in enumerate(plans) for item in plan.items}
        self._plan = self._planner.finish_plan(plans[self._world.rank])
        self._manifest = {
            "values": {name: value for _, own in by_rank for name, value in own.items()},
            "tensors": {
                name: {
                    "dtype": _DTYPES[entry.properties.dtype],
                    "size": list(entry.size),
                    "parts": [
                        {
                            "rank": ranks[_name_part(name, part.offsets)],
                            "offsets": list(part.offsets),
                            "sizes": list(part.sizes),
                        }
                        for part in entry.chunks
                    ],
                }
                for name, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            },
        }

    def write(self, folder: Path) -> None:
        """Writes the tensors of this rank. The first rank writes the manifest, too."""
        items = [item for item in self._plan.items if not _is_value(item)]
        tensors: dict[str, Any] = {_key(item.index): self._planner.resolve_data(item) for item in items}
        write_tensors(folder / _of_rank(self._world.rank), tensors)
        if self._world.rank == 0:
            # Options of an optimizer can be dtypes, which become strings. A resumed run takes all options from its settings.
            (folder / SHARD_MANIFEST).write_text(json.dumps(self._manifest, default=str), "utf-8")


def read_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Reads this rank's part of a checkpoint into a state with the same names. The number of ranks may have changed."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType

    manifest, size = _read_shard_manifest(folder), torch.Size
    metadata: dict[str, Any] = {name: BytesStorageMetadata() for name in manifest["values"]}
    for name, tensor in manifest["tensors"].items():
        chunks = [ChunkStorageMetadata(size(part["offsets"]), size(part["sizes"])) for part in tensor["parts"]]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=_dtype(tensor)), size(tensor["size"]), chunks)
    ranks = {_name_part(name, part["offsets"]): part["rank"] for name, part in _parts(manifest)}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, Metadata(metadata), is_coordinator=False)
    with _open_shards(folder) as read:
        for item in planner.finish_plan(planner.create_local_plan()).items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickle(manifest["values"][item.storage_index.fqn]))
                continue
            key = _key(item.storage_index)
            part = read(ranks[key], key)[_window(item.storage_offsets, item.lengths)]
            target = planner.resolve_tensor(item)
            target.detach().copy_(part)
            planner.commit_tensor(item, target)


def _load_state(path: Path, **options: Any) -> Any:
    try:
        return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} must be a state that megabatch wrote, got a damaged file, or a file with code, which was not run"
        ) from error


def assemble_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with the prefix, assembled from the parts of all ranks. Removes the prefix."""
    manifest = _read_shard_manifest(folder)
    tensors: dict[str, Tensor] = {}
    with _open_shards(folder) as read:
        for name, part in _parts(manifest):
            if not name.startswith(prefix):
                continue
            entry = manifest["tensors"][name]
            tensor = tensors.setdefault(name.removeprefix(prefix), torch.empty(entry["size"], dtype=_dtype(entry)))
            tensor[_window(part["offsets"], part["sizes"])] = read(part["rank"], _name_part(name, part["offsets"]))
    return tensors


@contextmanager
def _open_shards(folder: Path) -> Iterator[Callable[[int, str], Tensor]]:
    """Yields a function from a rank and a name to the tensor that this rank has written under this name."""
    files: dict[int, Any] = {}
    with ExitStack() as stack:

        def read(rank: int, key: str) -> Tensor:
            if rank not in files:
                files[rank] = stack.enter_context(_open(folder / _of_rank(rank)))
            tensor: Tensor = files[rank].get_tensor(key)
            return tensor

        yield read


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    safetensors = extras.load("safetensors", purpose="Reading a checkpoint")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a complete safetensors file, but it cannot be read: {error}") from error


def _read_shard_manifest(folder: Path) -> dict[str, Any]:
    path = folder / SHARD_MANIFEST
    if not path.is_file() and (folder / _PICKLED_MANIFEST).exists():
        raise ValueError(
            f"the checkpoint {folder} must have a {SHARD_MANIFEST}, got a checkpoint of an older version with a pickle "
            f"({_PICKLED_MANIFEST}). This version does not read the pickle, because reading it can execute code. Use the "
            "version that wrote the checkpoint"
        )
    manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if not isinstance(manifest, dict) or "tensors" not in manifest:
        raise ValueError(f"{path} must list the tensors of the checkpoint, got another JSON file; the checkpoint is damaged")
    return manifest


def _parts(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, part) for name, entry in manifest["tensors"].items() for part in entry["parts"])


def _dtype(entry: dict[str, Any]) -> torch.dtype:
    return next(dtype for dtype, name in _DTYPES.items() if name == entry["dtype"])


def _window(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _is_value(item: Any) -> bool:
    """Returns whether an item of a plan is a value that is not a tensor."""
    return item.tensor_data is None


def _key(index: Any) -> str:
    return _name_part(index.fqn, index.offset or ())


def _name_part(name: str, offsets: Sequence[int]) -> str:
    """Returns the name that a part of a tensor has in the file of a rank."""
    return f"{name}@{','.join(map(str, offsets))}"


def _of_rank(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def _pickle(value: Any) -> io.BytesIO:
    """Returns a value of the manifest as a pickle, because the planner expects one. No pickle from a file is read here."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


# ----------------------------------------------------------------------------------------------------------------------
# The contents of a checkpoint: weights, optimizer, averaged weights, gradient scaler, and the random generators of every rank.
#
# With DDP, the first rank writes all weights into one safetensors file, and the state of the optimizer into another file. With
# FSDP2, each rank writes its part (`ShardedWriter`). Each rank writes its random generators to its own file. The order of the
# data, the augmentation and the learning rate follow from the number of the step, so they are not saved.
#
# Weights are in files without pickles, because commands that only read a model must not unpickle anything. The files of the
# optimizer and the generators are pickles. Only a resumed run reads them, with `weights_only=True`.

MODEL, AVERAGE = "model.", "average."  # prefixes of the names of weights and averaged weights
OPTIMIZER = "state.pt"  # state of the optimizer and of the gradient scaler
WEIGHTS = "weights.safetensors"


class State:
    """Saves and loads everything that training changes.

    Args:
        modules: the unwrapped modules of the towers and the loss, by name.
        optimizer: the optimizer of their parameters.
        average: the averaged weights, or None.
        scaler: the gradient scaler for fp16, or None.
        world: the ranks.
        sharded: whether FSDP2 shards the towers.
        trained_only: whether to exclude frozen weights. The towers must then have these weights before a checkpoint is read.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        average: Average | None,
        scaler: torch.amp.GradScaler | None,
        world: World,
        *,
        sharded: bool,
        trained_only: bool = False,
    ) -> None:
        self._modules, self._optimizer, self._scaler = nn.ModuleDict(modules), optimizer, scaler
        self._averages: dict[str, Tensor] = {} if average is None else average.values
        self._world, self._sharded, self._trained_only = world, sharded, trained_only
        self._host = _HostCopies()

    def copy_to_host(self) -> "Files":
        """Returns a copy of the state in host memory. It reuses the memory of the previous copy."""
        values: dict[str, Any] = {_state_of_rank(self._world.rank): _generators(self._world.device)}
        if self._sharded:
            return Files(values, ShardedWriter(self._host(self._collect_state()), self._world))
        if self._world.rank == 0:
            values |= {WEIGHTS: self._host(self._weights()), OPTIMIZER: self._host(self._optimizer_state())}
        return Files(values)

    def read(self, folder: Path) -> bool:
        """Loads a checkpoint. All ranks must call it.

        Returns:
            Whether the random generators were restored. They cannot be restored if the number of ranks has grown.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        if (folder / OPTIMIZER).is_file():
            self._read_unsharded(folder)
        else:
            self._read_sharded(folder)
        for group, own_options in zip(self._optimizer.param_groups, options, strict=True):
            group.update(own_options)  # weight decay and other options come from the settings of this run
        path = folder / _state_of_rank(self._world.rank)
        is_complete = self._world.sum([path.is_file()])[0] == self._world.size
        if is_complete:
            _restore(_load_state(path), self._world.device)
        return is_complete

    def _read_unsharded(self, folder: Path) -> None:
        if self._sharded:
            raise ValueError(f'parallel must be "ddp" to continue from {folder}, which is not sharded, got "fsdp"')
        state = _load_state(folder / OPTIMIZER, map_location="cpu")
        if "model" in state:  # older versions wrote the weights into the same file
            model, average = state["model"], state["average"]
        else:
            model, average = read_weights(folder)
        self._modules.load_state_dict(model, strict=not self._trained_only)
        self._optimizer.load_state_dict(state["optimizer"])
        for name, value in average.items():
            self._averages[name].copy_(value)
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _read_sharded(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        state = self._collect_state()
        read_sharded(folder, state)
        set_state_dict(
            self._modules,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=self._trained_only, strict=not self._trained_only),
        )

    def _weights(self) -> dict[str, Tensor]:
        model = self._modules.state_dict()
        if self._trained_only:
            names = find_trained(self._modules)
            model = {name: value for name, value in model.items() if name in names}
        average = {f"{AVERAGE}{name}": value for name, value in self._averages.items()}
        return {f"{MODEL}{name}": value for name, value in model.items()} | average

    def _optimizer_state(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def _collect_state(self) -> dict[str, Any]:
        """Returns the state with parameters by name instead of by index, because distributed checkpoints need names."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(ignore_frozen_params=self._trained_only)
        model, optimizer = get_state_dict(self._modules, self._optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "average": self._averages}


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights and the averaged weights of a checkpoint by name. Does not unpickle anything."""
    if (folder / OPTIMIZER).is_file() and not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"the checkpoint {folder} must have a {WEIGHTS}, got a checkpoint of an older version with its weights in a pickle "
            f"({OPTIMIZER}). Only `megabatch train --resume` reads this checkpoint"
        )
    if not (folder / WEIGHTS).is_file():
        return assemble_tensors(folder, MODEL), assemble_tensors(folder, AVERAGE)
    tensors = read_tensors(folder / WEIGHTS)
    model, average = (
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in (MODEL, AVERAGE)
    )
    return model, average


class Files:
    """A copy of a rank's state. Training does not change the copy.

    Args:
        values: the contents of the files, by their names.
        shards: the writer of a sharded state, or None.
    """

    def __init__(self, values: dict[str, Any], shards: ShardedWriter | None = None) -> None:
        self._values, self._shards = values, shards

    def agree(self) -> None:
        """Decides which rank writes which part. All ranks must call it before they write."""
        if self._shards is not None:
            self._shards.agree()

    def write(self, folder: Path) -> None:
        """Writes this rank's files."""
        for name, value in self._values.items():
            if name == WEIGHTS:
                write_tensors(folder / name, value)
                continue
            with (folder / name).open("wb") as file:
                torch.save(value, file)
        if self._shards is not None:
            self._shards.write(folder)


class _HostCopies:
    """Copies nested values to host memory. CUDA tensors are copied to pinned memory, which the next copy reuses."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """Returns a copy of nested dictionaries, lists, tuples and tensors. Waits for the device."""
        copy = self._copy(value, ())
        if self._pinned:
            torch.cuda.synchronize()
        return copy

    def _copy(self, value: Any, position: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copy(part, (*position, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(part, (*position, i)) for i, part in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if not value.is_cuda or is_sharded(value):
            return value.detach().to("cpu", copy=True)
        pinned = self._pinned.get(position)
        if pinned is None or pinned.shape != value.shape or pinned.dtype != value.dtype:
            pinned = self._pinned[position] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return pinned.copy_(value.detach(), non_blocking=True)


def _state_of_rank(rank: int) -> str:
    return f"generators_{rank:05d}.pt"


def _generators(device: torch.device) -> dict[str, Any]:
    states = second_pass.capture_generators([device])
    numpy = None
    if states.numpy is not None and states.numpy["bit_generator"] == "MT19937":
        inner = states.numpy["state"]
        numpy = [inner["key"].tolist(), int(inner["pos"]), states.numpy["has_gauss"], float(states.numpy["gauss"])]
    kind = states.devices[0][0].type if states.devices else "cuda"
    return {"cpu": states.cpu, kind: [state for _, state in states.devices], "python": states.python, "numpy": numpy}


def _restore(saved: dict[str, Any], device: torch.device) -> None:
    devices = () if device.type == "cpu" else tuple((device, state) for state in saved.get(device.type, [])[:1])
    numpy = None if saved["numpy"] is None else ("MT19937", *saved["numpy"])
    second_pass.restore_generators(second_pass.States(saved["cpu"], devices, saved["python"], numpy))
