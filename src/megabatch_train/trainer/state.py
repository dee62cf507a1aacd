"""The state that a checkpoint stores, in files without pickles, also for sharded weights."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached import randomness
from megabatch.cached.memory import is_sharded
from megabatch.world import World
from megabatch_train.towers.lora import find_trained
from megabatch_train.trainer.build import Average

# ----------------------------------------------------------------------------------------------------------------------
# Checkpoint files without pickles: tensors in safetensors, and for a sharded state a file of each rank and a manifest in
# JSON.
#
# The planners of PyTorch's distributed checkpoints decide which rank writes and reads what, so that another number of ranks
# can resume. PyTorch's own storage is not used, because its metadata is a pickle, and reading a pickle can execute code.

MANIFEST = "manifest.json"
_PICKLED_MANIFEST = ".metadata"  # of PyTorch's own storage
_DTYPES = {  # names in the header of a safetensors file
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
    """Writes a safetensors file, one tensor after another. `safetensors.torch.save` would hold a copy of the file in memory."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Large elements come first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(dense.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    with _open(path) as file:
        # safe_open has keys and is no mapping.
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class ShardedWriter:
    """Writes a sharded state. The ranks exchange messages only in `agree`.

    Args:
        state: nested dictionaries of tensors, DTensors and values that JSON can represent, in host memory.
        world: the ranks.
    """

    def __init__(self, state: dict[str, Any], world: World) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self._world, self._planner = world, DefaultSavePlanner()
        self._planner.set_up_planner(state, None, world.rank == 0)
        self._plan: Any = self._planner.create_local_plan()
        self._manifest: dict[str, Any] = {}

    def agree(self) -> None:
        """Decides which rank writes what. All ranks must call it."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        values = {item.index.fqn: self._planner.lookup_object(item.index) for item in self._plan.items if _is_value(item)}
        gathered = self._world.gather_objects((self._plan, values))
        plans, metadata = self._planner.create_global_plan([plan for plan, _ in gathered])
        ranks = {_key(item.index): rank for rank, plan in enumerate(plans) for item in plan.items}
        self._plan = self._planner.finish_plan(plans[self._world.rank])
        self._manifest = {
            "values": {name: value for _, own in gathered for name, value in own.items()},
            "tensors": {
                name: {
                    "dtype": _DTYPES[about.properties.dtype],
                    "size": list(about.size),
                    "parts": [
                        {
                            "rank": ranks[_name_part(name, part.offsets)],
                            "offsets": list(part.offsets),
                            "sizes": list(part.sizes),
                        }
                        for part in about.chunks
                    ],
                }
                for name, about in metadata.state_dict_metadata.items()
                if isinstance(about, TensorStorageMetadata)
            },
        }

    def write(self, folder: Path) -> None:
        """Writes the tensors of this rank; the first rank writes the manifest too."""
        items = [item for item in self._plan.items if not _is_value(item)]
        tensors: dict[str, Any] = {_key(item.index): self._planner.resolve_data(item) for item in items}
        write_tensors(folder / _of_rank(self._world.rank), tensors)
        if self._world.rank == 0:
            # Options of an optimizer may be dtypes. A resumed run takes all options from its settings.
            (folder / MANIFEST).write_text(json.dumps(self._manifest, default=str), "utf-8")


def read_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Reads a checkpoint, which any number of ranks wrote, into a state with the same names. Each rank reads its part."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType

    manifest, size = _read_manifest(folder), torch.Size
    about: dict[str, Any] = {name: BytesStorageMetadata() for name in manifest["values"]}
    for name, tensor in manifest["tensors"].items():
        chunks = [ChunkStorageMetadata(size(part["offsets"]), size(part["sizes"])) for part in tensor["parts"]]
        about[name] = TensorStorageMetadata(TensorProperties(dtype=_dtype(tensor)), size(tensor["size"]), chunks)
    ranks = {_name_part(name, part["offsets"]): part["rank"] for name, part in _parts(manifest)}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, Metadata(about), is_coordinator=False)
    with _ShardFiles(folder) as files:
        for item in planner.finish_plan(planner.create_local_plan()).items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickle(manifest["values"][item.storage_index.fqn]))
                continue
            key = _key(item.storage_index)
            part = files.read(ranks[key], key)[_window(item.storage_offsets, item.lengths)]
            target = planner.resolve_tensor(item)
            target.detach().copy_(part)
            planner.commit_tensor(item, target)


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it, each put together from its parts."""
    manifest = _read_manifest(folder)
    found: dict[str, Tensor] = {}
    with _ShardFiles(folder) as files:
        for name, part in _parts(manifest):
            if not name.startswith(prefix):
                continue
            about = manifest["tensors"][name]
            tensor = found.setdefault(name.removeprefix(prefix), torch.empty(about["size"], dtype=_dtype(about)))
            tensor[_window(part["offsets"], part["sizes"])] = files.read(part["rank"], _name_part(name, part["offsets"]))
    return found


class _ShardFiles:
    """The open files of the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._open: dict[int, Any] = {}

    def __enter__(self) -> "_ShardFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, rank: int, key: str) -> Tensor:
        if rank not in self._open:
            self._open[rank] = self._stack.enter_context(_open(self._folder / _of_rank(rank)))
        found: Tensor = self._open[rank].get_tensor(key)
        return found


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    safetensors = extras.load("safetensors", purpose="Reading a checkpoint")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got one that is not: {error}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file() and (folder / _PICKLED_MANIFEST).exists():
        raise ValueError(
            f"the checkpoint {folder} must have a {MANIFEST}, got one of an earlier version with a pickle "
            f"({_PICKLED_MANIFEST}), which is not read, because reading it can execute code"
        )
    manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return manifest


def _parts(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, part) for name, about in manifest["tensors"].items() for part in about["parts"])


def _dtype(about: dict[str, Any]) -> torch.dtype:
    return next(dtype for dtype, name in _DTYPES.items() if name == about["dtype"])


def _window(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _is_value(item: Any) -> bool:
    """Whether a planner's item is no tensor."""
    return item.tensor_data is None


def _key(index: Any) -> str:
    return _name_part(index.fqn, index.offset or ())


def _name_part(name: str, offsets: Sequence[int]) -> str:
    """The name of a part of a tensor in a rank's file."""
    return f"{name}@{','.join(map(str, offsets))}"


def _of_rank(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def _pickle(value: Any) -> io.BytesIO:
    """A value of the manifest as the planner takes it. The pickle comes from this process."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


# ----------------------------------------------------------------------------------------------------------------------
# The contents of a checkpoint: weights, optimizer, averaged weights, scaler, and the random generators of every rank.
#
# With DDP the first rank writes all weights into one safetensors file, and the state of the optimizer into another file.
# With FSDP2 each rank writes its part (`ShardedWriter`), so that another number of ranks can resume. Each rank writes its
# generators to a file of its own. The order of the data, augmentation and learning rate follow from the number of the step
# and are not saved.
#
# Weights are in files without pickles, because commands that only read a model must not unpickle anything. The files of the
# optimizer and the generators are pickles, which only a resumed run reads, with `weights_only=True`.


MODEL, AVERAGE = "model.", "average."  # before the names of weights and averaged weights
OPTIMIZER = "state.pt"  # and the scaler
WEIGHTS = "weights.safetensors"


class State:
    """Everything that training changes, to save and load as one.

    Args:
        modules: of the towers and the loss by name; unwrapped.
        optimizer: of their parameters.
        average: averaged weights, or None.
        scaler: for fp16, or None.
        world: the ranks.
        sharded: whether FSDP2 shards the towers.
        trained_only: whether frozen weights are left out, because the towers have them before a checkpoint is read.
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
        self._modules, self._optimizer, self._average, self._scaler = nn.ModuleDict(modules), optimizer, average, scaler
        self._world, self._sharded, self._trained_only = world, sharded, trained_only
        self._host = _HostCopies()

    def copy_to_host(self) -> "Files":
        """Copies the state to host memory, to be written into a folder. The memory of the copy before is used again."""
        values: dict[str, Any] = {_state_of_rank(self._world.rank): _generators(self._world.device)}
        if self._sharded:
            return _StateParts(values, ShardedWriter(self._host(self._parts()), self._world))
        if self._world.rank == 0:
            values |= {WEIGHTS: self._host(self._weights()), OPTIMIZER: self._host(self._optimizer_state())}
        return Files(values)

    def read(self, folder: Path) -> bool:
        """Loads a checkpoint. All ranks must call it.

        Returns:
            Whether the random generators were restored; not if the number of ranks has grown.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        if (folder / OPTIMIZER).is_file():
            self._read_whole(folder)
        else:
            self._read_parts(folder)
        for group, wanted in zip(self._optimizer.param_groups, options, strict=True):
            group.update(wanted)  # weight decay etc. come from this run's settings
        place = folder / _state_of_rank(self._world.rank)
        known = self._world.sum([place.is_file()])[0] == self._world.size
        if known:
            _restore(torch.load(place, weights_only=True), self._world.device)
        return known

    def _read_whole(self, folder: Path) -> None:
        if self._sharded:
            raise ValueError(f'parallel must be "ddp" to continue from {folder}, which is in one piece, got "fsdp"')
        state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        if "model" in state:  # an earlier version wrote one file
            model, average = state["model"], state["average"]
        else:
            model, average = read_weights(folder)
        self._modules.load_state_dict(model, strict=not self._trained_only)
        self._optimizer.load_state_dict(state["optimizer"])
        for name, value in average.items():
            self._averages()[name].copy_(value)
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _read_parts(self, folder: Path) -> None:
        """Loads a checkpoint in parts, written by any number of ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        parts = self._parts()
        read_sharded(folder, parts)
        set_state_dict(
            self._modules,
            self._optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=StateDictOptions(ignore_frozen_params=self._trained_only, strict=not self._trained_only),
        )

    def _weights(self) -> dict[str, torch.Tensor]:
        model = self._modules.state_dict()
        if self._trained_only:
            names = find_trained(self._modules)
            model = {name: value for name, value in model.items() if name in names}
        average = {f"{AVERAGE}{name}": value for name, value in self._averages().items()}
        return {f"{MODEL}{name}": value for name, value in model.items()} | average

    def _optimizer_state(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def _parts(self) -> dict[str, Any]:
        """The same with parameters by name instead of index, as distributed checkpoints need it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(ignore_frozen_params=self._trained_only)
        model, optimizer = get_state_dict(self._modules, self._optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "average": self._averages()}

    def _averages(self) -> dict[str, torch.Tensor]:
        return {} if self._average is None else self._average.values


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and averaged weights of a checkpoint by name. Unpickles nothing."""
    if (folder / OPTIMIZER).is_file() and not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"the checkpoint {folder} must have a {WEIGHTS}, got one of an earlier version with its weights in a pickle "
            f"({OPTIMIZER}), which only `megabatch train --resume` reads"
        )
    if not (folder / WEIGHTS).is_file():
        return read_whole(folder, MODEL), read_whole(folder, AVERAGE)
    found = read_tensors(folder / WEIGHTS)
    model, average = (
        {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        for prefix in (MODEL, AVERAGE)
    )
    return model, average


class Files:
    """A copied state: values by the names of their files."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def write(self, folder: Path) -> None:
        """Writes this rank's files."""
        for name, value in self._values.items():
            if name == WEIGHTS:
                write_tensors(folder / name, value)
                continue
            with (folder / name).open("wb") as file:
                torch.save(value, file)

    def agree(self) -> None:
        """Does nothing: the files are independent."""


class _StateParts(Files):
    """A copied state that is sharded."""

    def __init__(self, values: dict[str, Any], parts: ShardedWriter) -> None:
        super().__init__(values)
        self._parts = parts

    def agree(self) -> None:
        """All ranks decide who writes what."""
        self._parts.agree()

    def write(self, folder: Path) -> None:
        """Writes this rank's files."""
        super().write(folder)
        self._parts.write(folder)


class _HostCopies:
    """Copies of nested values in host memory. Tensors from CUDA go into pinned memory, which the next copy uses again."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """A copy of dictionaries, lists, tuples and tensors. Waits for the device."""
        made = self._copy(value, ())
        if self._pinned:
            torch.cuda.synchronize()
        return made

    def _copy(self, value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copy(part, (*place, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(part, (*place, i)) for i, part in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_cuda or is_sharded(value):
            return value.detach().to("cpu", copy=True)
        known = self._pinned.get(place)
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            known = self._pinned[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return known.copy_(value.detach(), non_blocking=True)


def _state_of_rank(rank: int) -> str:
    return f"generators_{rank:05d}.pt"


def _generators(device: torch.device) -> dict[str, Any]:
    states = randomness.capture([device])
    numpy = None
    if states.numpy is not None and states.numpy["bit_generator"] == "MT19937":
        inner = states.numpy["state"]
        numpy = [inner["key"].tolist(), int(inner["pos"]), states.numpy["has_gauss"], float(states.numpy["gauss"])]
    return {"cpu": states.cpu, "cuda": [state for _, state in states.cuda], "python": states.python, "numpy": numpy}


def _restore(known: dict[str, Any], device: torch.device) -> None:
    cuda = tuple((device, state) for state in known["cuda"][:1] if device.type == "cuda")
    numpy = None if known["numpy"] is None else ("MT19937", *known["numpy"])
    randomness.restore(randomness.States(known["cpu"], cuda, known["python"], numpy))
