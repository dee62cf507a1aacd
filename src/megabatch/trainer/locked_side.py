"""Locked-image tuning (LiT): one side of a trained model is frozen, and the other learns to match it.

A frozen tower always gives the same embeddings for the same inputs. Without augmentation they are computed once and stored in
the run's folder; later epochs and resumed runs read them.
"""

import logging
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.cached import batchnorm
from megabatch.cached.dtensors import is_sharded
from megabatch.cached.graphs import parameters_in
from megabatch.cached.replay import checksum
from megabatch.cached.tower_io import call, map_rows
from megabatch.data import cache
from megabatch.data.dataset import Dataset
from megabatch.evaluation.embedding import embed
from megabatch.towers.tower import SIDES, Pair
from megabatch.world import World

LOG = logging.getLogger("megabatch")
ROWS = 1 << 16  # per file: small enough for memory, large enough to keep the number of files low


def lock(pair: Pair, side: int, samples: Sequence[Any]) -> None:
    """Freezes one side, and puts it into evaluation mode.

    Args:
        pair: the towers, which may be one module with parts for each side.
        side: 0 or 1.
        samples: inputs of a few samples of each side; they show which parts of a common module each side uses.
    """
    tower, other = pair.towers[side], pair.towers[1 - side]
    if tower.module is other.module:
        mine, theirs = (_used(tower.module, samples[number]) for number in (side, 1 - side))
        if mine & theirs:
            raise ValueError(
                f'lock must be "none" for {pair.name or "this model"}, because its two sides share parameters, got '
                f"{SIDES[side]!r}"
            )
    else:
        mine = {id(parameter) for parameter in tower.module.parameters()}
    for parameter in tower.module.parameters():
        if id(parameter) in mine:
            parameter.requires_grad_(False)
    _evaluating(tower.module)


def _used(module: nn.Module, inputs: Any) -> set[int]:
    device = next(module.parameters()).device
    with torch.enable_grad(), batchnorm.running_statistics_kept(batchnorm.layers([module])):
        found = parameters_in([call(module, map_rows(lambda tensor: tensor.to(device), inputs))])
    if found is None:
        raise ValueError("lock must be used without reentrant checkpoints, which hide the parameters of a side")
    return found


def _evaluating(module: nn.Module) -> None:
    """Puts every part without trained parameters into evaluation mode."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for part in module.children():
        _evaluating(part)


class KeptEmbeddings:
    """Embeddings of one side of a whole dataset, on disk, without augmentation.

    Args:
        folder: shared by all ranks; existing files are used if they come from the same tower.
        dataset: to encode.
        side: 0 or 1.
        pair: the towers.
        chunk_size: samples encoded at once.
        workers: as for `Dataset.source`.
        world: the ranks, each of which encodes a part.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        side: int,
        pair: Pair,
        *,
        chunk_size: int,
        workers: Any,
        world: World,
    ) -> None:
        tower = pair.towers[side]
        self._places = [
            folder / f"{_fingerprint(tower.module, dataset)}_{start:010d}.pt" for start in range(0, len(dataset), ROWS)
        ]
        for number, place in enumerate(self._places):
            if number % world.size == world.rank and not _whole(place):
                rows = range(number * ROWS, min((number + 1) * ROWS, len(dataset)))
                LOG.info("encoding samples %d to %d of %d once, with a frozen tower", rows.start, rows.stop - 1, len(dataset))
                found = embed(tower, dataset, side, rows, chunk_size=chunk_size, workers=workers).cpu()
                failures = {index: dataset.failures[index] for index in rows if index in dataset.failures}
                cache.write(place, partial(torch.save, {"embeddings": found, "failures": failures}))
        world.gather_objects(None)  # a barrier: all blocks are written
        self._blocks: list[Tensor] = []
        for place in self._places:
            block = torch.load(place, mmap=True, weights_only=True)
            self._blocks.append(block["embeddings"])
            dataset.failures |= {index: reason for index, reason in block["failures"].items() if index not in dataset.failures}

    def rows(self, indices: Tensor) -> Tensor:  # (n,) int64 -> (n, D)
        """Embeddings of these samples."""
        result = self._blocks[0].new_empty(len(indices), self._blocks[0].shape[1])
        blocks = indices // ROWS
        for number in sorted(set(blocks.tolist())):
            here = blocks == number
            result[here] = self._blocks[number][indices[here] - number * ROWS]
        return result


def _fingerprint(module: nn.Module, dataset: Dataset) -> str:
    """Checksum of the number of samples and of the frozen weights."""
    value = zlib.crc32(f"{len(dataset)}".encode())
    fixed = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    for name, tensor in (*fixed, *module.named_buffers()):
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        value = zlib.crc32(f"{name} {checksum(whole)}".encode(), value)
    return f"{value:08x}"


def _whole(place: Path) -> bool:
    try:
        torch.load(place, mmap=True, weights_only=True)
    except Exception:  # missing or damaged: it is written again
        return False
    return True
