"""Where a run takes place: the room on its disk, and hardware, versions and sizes, for a report that can be cited."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megabatch import machine
from megabatch.towers.tower import Pair
from megabatch.trainer import locked_side, run
from megabatch.trainer.checkpoints import Checkpoints
from megabatch.trainer.config import TrainConfig
from megabatch.world import World

LOG = logging.getLogger("megabatch")


def check(
    folder: Path,
    pair: Pair,
    moments: float,
    checkpoints: Checkpoints,
    keep: int,
    world: World,
    *,
    models: int = 1,
) -> None:
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
    modules = {id(tower.module): tower.module for tower in pair.towers}.values()
    learned = _bytes(parameter for parameter in pair.parameters() if parameter.requires_grad)
    model = learned if pair.base_is_elsewhere else _bytes(value for module in modules for value in module.state_dict().values())
    each = int(model + moments * learned)
    free, there = world.from_first((run.free_bytes(folder), checkpoints.count()))
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


def environment(config: TrainConfig, pair: Pair, world: World, samples: int, steps: int) -> dict[str, Any]:
    """Hardware, versions and sizes."""
    of_sides = zip(locked_side.SIDES, pair.towers, strict=True)
    return {
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
