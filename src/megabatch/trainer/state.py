"""The contents of a checkpoint: weights, optimizer, averaged weights, scaler, and the random generators of every rank.

With DDP it is one file, written by the first rank. With FSDP2 it is a PyTorch distributed checkpoint, with a part from each
rank, so that another number of ranks can resume. Each rank writes its generators to a file of its own. The order of the data,
augmentation and learning rate follow from the number of the step and are not saved.
"""

import importlib
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megabatch.cached import randomness
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
    ) -> None:
        self._modules, self._optimizer, self._average, self._scaler = nn.ModuleDict(modules), optimizer, average, scaler
        self._world, self._sharded = world, sharded

    def write(self, folder: Path) -> None:
        """Writes this rank's files. All ranks must call it."""
        if self._sharded:
            from torch.distributed.checkpoint.filesystem import FileSystemWriter
            from torch.distributed.checkpoint.state_dict_saver import save

            writer = FileSystemWriter(folder, sync_files=True)
            save(self._parts(), storage_writer=writer, process_group=self._world.group)
        elif self._world.rank == 0:
            _save(self._all(), folder / WHOLE)
        _save(_generators(self._world.device), folder / _of_rank(self._world.rank))

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
        self._modules.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, value in state["average"].items():
            self._averages()[name].copy_(value)
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _read_parts(self, folder: Path) -> None:
        """Loads a distributed checkpoint, written by any number of ranks."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        parts, alone = self._parts(), self._world.group is None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose, for one process
            load(parts, storage_reader=FileSystemReader(folder), process_group=self._world.group, no_dist=alone)
        set_state_dict(self._modules, self._optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])

    def _all(self) -> dict[str, Any]:
        return {
            "model": self._modules.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self._averages(),
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def _parts(self) -> dict[str, Any]:
        """The same with parameters by name instead of index, as distributed checkpoints need it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._modules, self._optimizer)
        return {"model": model, "optimizer": optimizer, "average": self._averages()}

    def _averages(self) -> dict[str, torch.Tensor]:
        return {} if self._average is None else self._average.values


def _of_rank(rank: int) -> str:
    return f"generators_{rank:05d}.pt"


def _save(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)


def _generators(device: torch.device) -> dict[str, Any]:
    states = randomness.capture([device])
    numpy = None
    if states.numpy is not None and states.numpy["bit_generator"] == "MT19937":
        inner = states.numpy["state"]
        numpy = [inner["key"].tolist(), int(inner["pos"]), states.numpy["has_gauss"], float(states.numpy["gauss"])]
    return {"cpu": states.cpu, "cuda": [state for _, state in states.cuda], "python": states.python, "numpy": numpy}


def _restore(known: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(known["cpu"])
    if device.type == "cuda" and known["cuda"]:
        torch.cuda.set_rng_state(known["cuda"][0], device)
    random.setstate(known["python"])
    if known["numpy"] is not None:
        numpy = importlib.import_module("numpy.random")
        key, position, has_gauss, gauss = known["numpy"]
        numpy.set_state(("MT19937", key, position, has_gauss, gauss))
