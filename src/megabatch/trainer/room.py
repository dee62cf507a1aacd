"""The room on the disk of a run: whether the model and its checkpoints will fit."""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megabatch.towers.tower import Pair
from megabatch.trainer.checkpoints import Checkpoints
from megabatch.trainer.parallel import distinct
from megabatch.world import World

LOG = logging.getLogger("megabatch")


def check(folder: Path, pair: Pair, moments: float, checkpoints: Checkpoints, keep: int, world: World, *, models: int) -> None:
    """Raises an error if the disk has no room for the model and a checkpoint, and warns if it has none for all of them.

    Args:
        folder: of the run.
        pair: the towers.
        moments: bytes of a checkpoint for each byte of a trained weight, besides the weights.
        checkpoints: of the run.
        keep: number of checkpoints.
        world: the ranks.
        models: number of models in the folder: the last, and the best if it is kept.
    """
    learned = _bytes(parameter for parameter in pair.parameters() if parameter.requires_grad)
    stored = (value for module in distinct(pair.modules) for value in module.state_dict().values())
    model = learned if pair.base_is_elsewhere else _bytes(stored)
    each = int(model + moments * learned)
    free, there = world.from_first((free_bytes(folder), checkpoints.count()))
    told = (
        f"the disk of {folder} has {free / 1e6:,.1f} MB free; the model takes {model / 1e6:,.1f} MB"
        + (", the best one as much (checkpoint.best)," if models > 1 else "")
        + f" and each checkpoint {each / 1e6:,.1f} MB"
    )
    if free + each * max(0, there - 1) < models * model + each:  # all but the newest checkpoint are deleted if need be
        elsewhere = f"--resume {checkpoints.folder}/step_… --output OTHER_FOLDER" if there else "another folder (--output)"
        raise ValueError(f"{told}. Make room, or use {elsewhere}")
    if free < models * model + each * (keep + 1 - there) and world.rank == 0:
        LOG.warning("%s. %d of them, and the next, may not fit (checkpoint.keep)", told, keep)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_bytes(folder: Path) -> int:
    """Free space of the disk that the folder is on, or will be on."""
    return shutil.disk_usage(next(place for place in (folder, *folder.resolve().parents) if place.exists())).free
