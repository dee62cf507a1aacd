"""The contents of a checkpoint: weights, optimizer, averaged weights, scaler, and the random generators of every rank.

With DDP it is one file, written by the first rank. With FSDP2 it is a PyTorch distributed checkpoint, with a part from each
rank, so that another number of ranks can resume. Each rank writes its generators to a file of its own. The order of the data,
augmentation and learning rate follow from the number of the step and are not saved.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megabatch.cached import randomness
from megabatch.cached.dtensors import is_sharded
from megabatch.towers.lora import trained
from megabatch.trainer.ema import Average
from megabatch.world import World

WHOLE = "state.pt"


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

    def copied(self, folder: Path) -> "Files":
        """Copies the state to host memory, to be written into a folder. The memory of the copy before is used again."""
        generators = {_of_rank(self._world.rank): _generators(self._world.device)}
        if self._sharded:
            return _Parts(generators, self._host(self._parts()), folder, self._world)
        return Files(generators | ({WHOLE: self._host(self._all())} if self._world.rank == 0 else {}))

    def read(self, folder: Path) -> bool:
        """Loads a checkpoint. All ranks must call it.

        Returns:
            Whether the random generators were restored; not if the number of ranks has grown.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups]
        if (folder / WHOLE).is_file():
            self._read_whole(folder / WHOLE)
        else:
            self._read_parts(folder)
        for group, wanted in zip(self._optimizer.param_groups, options, strict=True):
            group.update(wanted)  # weight decay etc. come from this run's settings
        place = folder / _of_rank(self._world.rank)
        known = self._world.sum([place.is_file()])[0] == self._world.size
        if known:
            _restore(torch.load(place, weights_only=True), self._world.device)
        return known

    def _read_whole(self, path: Path) -> None:
        if self._sharded:
            raise ValueError(f'parallel must be "ddp" to continue from {path.parent}, which is in one piece, got "fsdp"')
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._modules.load_state_dict(state["model"], strict=not self._trained_only)
        self._optimizer.load_state_dict(state["optimizer"])
        for name, value in state["average"].items():
            self._averages()[name].copy_(value)
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _read_parts(self, folder: Path) -> None:
        """Loads a distributed checkpoint, written by any number of ranks."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        parts, alone = self._parts(), self._world.group is None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose, for one process
            load(parts, storage_reader=FileSystemReader(folder), process_group=self._world.group, no_dist=alone)
        set_state_dict(
            self._modules,
            self._optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=StateDictOptions(ignore_frozen_params=self._trained_only, strict=not self._trained_only),
        )

    def _all(self) -> dict[str, Any]:
        model = self._modules.state_dict()
        if self._trained_only:
            names = trained(self._modules)
            model = {name: value for name, value in model.items() if name in names}
        return {
            "model": model,
            "optimizer": self._optimizer.state_dict(),
            "average": self._averages(),
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


class Files:
    """A copied state: values by the names of their files."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def write(self, folder: Path) -> None:
        """Writes this rank's files."""
        for name, value in self._values.items():
            with (folder / name).open("wb") as file:
                torch.save(value, file)

    def agree(self) -> None:
        """Does nothing: the files are independent."""

    def complete(self) -> None:
        """Does nothing."""


class _Parts(Files):
    """A copied state that is sharded, as a distributed checkpoint of PyTorch.

    As `torch.distributed.checkpoint.save` does it, but with the ranks' messages before and after the files are written.
    """

    def __init__(self, values: dict[str, Any], parts: dict[str, Any], folder: Path, world: World) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        super().__init__(values)
        self._world, self._writer, self._planner = world, FileSystemWriter(folder, sync_files=True), DefaultSavePlanner()
        self._planner.set_up_planner(parts, self._writer.storage_meta(), world.rank == 0)
        self._writer.set_up_storage_writer(world.rank == 0)
        self._plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        self._metadata: Any = None
        self._results: Any = None

    def agree(self) -> None:
        """All ranks find who writes what."""
        plans, self._metadata = self._planner.create_global_plan(self._world.gather_objects(self._plan))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[self._world.rank])

    def write(self, folder: Path) -> None:
        """Writes this rank's files."""
        super().write(folder)
        self._results = self._writer.write_data(self._plan, self._planner).wait()

    def complete(self) -> None:
        """The first rank writes where everything is."""
        results = self._world.gather_objects(self._results)
        if self._world.rank == 0:
            self._writer.finish(self._metadata, results)


class _HostCopies:
    """Copies of nested values in host memory. Tensors from CUDA go into pinned memory, which the next copy uses again."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """A copy of dictionaries, lists, tuples and tensors. Waits for the device."""
        made = self._copied(value, ())
        if self._pinned:
            torch.cuda.synchronize()
        return made

    def _copied(self, value: Any, place: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._copied(part, (*place, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(part, (*place, i)) for i, part in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_cuda or is_sharded(value):
            return value.detach().to("cpu", copy=True)
        known = self._pinned.get(place)
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            known = self._pinned[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return known.copy_(value.detach(), non_blocking=True)


def _of_rank(rank: int) -> str:
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
