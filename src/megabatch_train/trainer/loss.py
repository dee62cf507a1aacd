"""The training loss over all ranks, with a learned scale and bias, over the pairs that could be read."""

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch import file_io
from megabatch.cached.memory import is_sharded
from megabatch.cached.replay import checksum
from megabatch.losses import (
    Negatives,
    clip_loss,
    dcl_loss,
    hcl_loss,
    info_nce_loss,
    matryoshka_clip_loss,
    nt_xent_loss,
    siglip_loss,
    soft_clip_loss,
    sup_con_loss,
)
from megabatch.world import World
from megabatch_train.data.dataset import Dataset, count_others
from megabatch_train.evaluation.embedding import embed
from megabatch_train.towers.tower import Pair
from megabatch_train.trainer.config import CONTRASTS, LossConfig
from megabatch_train.trainer.health import pair_statistics

LOG = logging.getLogger("megabatch")
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0  # initial values of the SigLIP paper
WITHOUT_IDS = ("nt_xent", "sup_con")  # losses that ignore the ids of pairs


class NoNegativesError(ValueError):
    """No pair of a batch has a negative. All ranks raise it."""


class LossInputs(NamedTuple):
    """Inputs of a loss beside the embeddings of a batch's pairs, on this rank."""

    labels: Tensor | None = None  # (n,) int64 classes
    teacher: tuple[Tensor, Tensor] | None = None  # (n, E), (n, E) embeddings of a teacher or a guide
    owners: Tensor | None = None  # (m,) int64: the pair that each hard negative belongs to
    negative_ids: Tensor | None = None  # (m,) or (m, 2) int64

    def of_readable(self, usable: Tensor) -> "LossInputs":  # (n,) bool
        """The same for the pairs that could be read, and for their negatives."""
        kept = None if self.owners is None else usable[self.owners]
        return LossInputs(
            None if self.labels is None else self.labels[usable],
            None if self.teacher is None else (self.teacher[0][usable], self.teacher[1][usable]),
            None if self.owners is None else (usable.cumsum(0) - 1)[self.owners[kept]],
            None if self.negative_ids is None else self.negative_ids[kept],
        )

    def to(self, device: torch.device) -> "LossInputs":
        """The same on a device."""
        moved = [value if value is None else value.to(device) for value in (self.labels, self.owners, self.negative_ids)]
        teacher = None if self.teacher is None else (self.teacher[0].to(device), self.teacher[1].to(device))
        return LossInputs(moved[0], teacher, *moved[1:])


NO_INPUTS = LossInputs()


class Objective(nn.Module):
    """The loss with its learned scale and bias.

    Args:
        config: of the loss.
        scale: of the model, exponentiated.
        bias: of the model; None if it was not trained with SigLIP.
        dtype: of the two parameters.
    """

    def __init__(self, config: LossConfig, scale: float, bias: float | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.bias: nn.Parameter | None = None
        if config.name == "siglip":
            if bias is None:  # the model's scale is for another loss
                scale, bias = SIGLIP_SCALE, SIGLIP_BIAS
            self.bias = nn.Parameter(torch.tensor(bias if config.bias is None else config.bias, dtype=dtype))
        beginning = min(scale if config.scale is None else config.scale, config.max_scale)
        self.log_scale = nn.Parameter(torch.tensor(math.log(beginning), dtype=dtype))
        self.inputs_of: Callable[[Tensor], LossInputs] = lambda indices: NO_INPUTS  # of the samples of a batch
        self.teacher_scale = 1.0
        self._told = False  # about the full dimension

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        ids: Tensor | None,
        world: World,
        inputs: LossInputs = NO_INPUTS,
        negatives: Tensor | None = None,
    ) -> Tensor:  # ()
        """This rank's share of the loss over all ranks. `negatives` are the embeddings of hard negatives, (m, D)."""
        scale, group, config = self.log_scale.exp(), world.group, self.config
        if config.name in CONTRASTS:
            return self._contrast(first, second, ids, world, inputs, negatives)
        if config.name == "siglip":
            assert self.bias is not None
            return siglip_loss(first, second, scale, self.bias, ids=ids, group=group)
        if config.name == "nt_xent":
            return nt_xent_loss(first, second, scale, group=group)
        if config.name == "sup_con":
            assert inputs.labels is not None
            return sup_con_loss(torch.cat([first, second]), inputs.labels.repeat(2), scale, group=group)
        if config.name == "matryoshka":
            widths = self._all_widths(first.shape[1], world)
            return matryoshka_clip_loss(first, second, scale, widths=widths, ids=ids, group=group)
        loss = clip_loss(first, second, scale, ids=ids, group=group)
        if config.name == "distill":
            assert inputs.teacher is not None
            targets = soft_clip_loss(first, second, scale, *inputs.teacher, self.teacher_scale, group=group)
            loss = loss + config.teacher_weight * targets
        return loss

    def _all_widths(self, full: int, world: World) -> list[int]:
        """The widths of the config and the full dimension, because columns beyond the largest width would not be trained."""
        given = list(self.config.widths)
        if max(given) >= full:
            return given
        if not self._told and world.rank == 0:
            LOG.info("loss.widths %s do not include the full dimension %d, which is trained too", given, full)
        self._told = True
        return [*given, full]

    def _contrast(
        self, first: Tensor, second: Tensor, ids: Tensor | None, world: World, inputs: LossInputs, negatives: Tensor | None
    ) -> Tensor:  # ()
        config = self.config
        hard = None
        if negatives is not None and inputs.owners is not None:
            hard = Negatives(negatives, ids=None if ids is None else inputs.negative_ids, owner=inputs.owners)
        options: dict[str, Any] = {"beta": config.beta, "tau_plus": config.tau_plus} if config.name == "hcl" else {}
        loss: Any = {"info_nce": info_nce_loss, "dcl": dcl_loss, "hcl": hcl_loss}[config.name]
        share: Tensor = loss(
            first,
            second,
            scale=self.log_scale.exp(),
            negatives=hard,
            symmetric=config.symmetric,
            ids=ids,
            margin=config.margin,
            guide=inputs.teacher,
            group=world.group,
            **options,
        )
        return share

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamps the scale to `max_scale`, after a step of the optimizer."""
        self.log_scale.clamp_(max=math.log(self.config.max_scale))

    def numbers(self) -> dict[str, float]:
        """Current scale and bias, for logs and for the saved model."""
        found = {"scale": self.log_scale.detach().exp().item()}
        return found if self.bias is None else {**found, "bias": self.bias.detach().item()}


class ReadablePairs:
    """The loss of one step as a function of embeddings; pairs with an unreadable side are skipped.

    Args:
        objective: the loss.
        world: the ranks.
        usable: returns a mask of this rank's readable pairs; called after both sides have been read.
        ids: (n,) or (n, 2), of this rank's pairs, or None.
        known: embeddings of a frozen side, by the index of the side.
        indices: of this rank's samples.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        usable: Callable[[], Tensor],
        ids: Tensor | None,
        known: dict[int, Tensor],
        indices: Tensor | None = None,  # (n,) int64
    ) -> None:
        self._objective, self._world, self._usable, self._ids, self._known = objective, world, usable, ids, known
        self._inputs = NO_INPUTS if indices is None else objective.inputs_of(indices)
        self.pairs = 0  # readable pairs on all ranks; set by the call
        self.statistics = torch.zeros(4, dtype=torch.float64)  # `pair_statistics` of this rank's pairs; set by the call
        self.without_negatives = 0  # those of them that have no negative in the batch; set by the call

    @property
    def further_rows(self) -> bool:
        """Whether the second side has hard negatives after the pairs, for `cached_backward`."""
        return self._inputs.owners is not None

    def __call__(self, *encoded: Tensor) -> Tensor:  # ()
        """This rank's share of the loss; zero, with zero gradients, if no rank has a readable pair.

        Raises:
            NoNegativesError: no pair of the batch has a negative, on all ranks.
        """
        first, second = self._both(encoded)
        usable = self._usable().to(first.device)  # (n,)
        owners = self._inputs.owners
        further = 0 if owners is None else int(usable[owners.to(usable.device)].sum())
        self.pairs, tried, further = map(round, self._world.sum([int(usable.sum()), len(usable), further]))
        if self.pairs == 0:
            return sum((part.sum() for part in encoded), self._objective.log_scale.sum()) * 0
        ids = None if self._ids is None else self._ids.to(first.device)
        inputs, negatives = self._inputs.to(first.device), None
        if inputs.owners is not None:  # hard negatives come after the pairs
            second, negatives = second[: len(usable)], second[len(usable) :]
        if not bool(usable.all()):
            negatives = None if negatives is None or inputs.owners is None else negatives[usable[inputs.owners]]
            first, second, ids = first[usable], second[usable], None if ids is None else ids[usable]
            inputs = inputs.of_readable(usable)
        self.without_negatives = 0 if further else self._count_without_negatives(ids)
        if self.without_negatives == self.pairs == tried:
            raise NoNegativesError(_explain_missing_negatives(tried))
        self.statistics = pair_statistics(first, second)
        loss: Tensor = self._objective(first, second, ids, self._world, inputs, negatives)
        return loss

    def _count_without_negatives(self, ids: Tensor | None) -> int:
        """The number of pairs on all ranks that are related to every other pair of the batch."""
        if ids is None or self._objective.config.name in WITHOUT_IDS:
            return int(self.pairs == 1)
        return int((count_others(self._world.gather_rows(ids).cpu()) == 0).sum())

    def _both(self, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        waiting = iter(encoded)
        first, second = (self._known[side] if side in self._known else next(waiting) for side in (0, 1))
        return first, second


def _explain_missing_negatives(pairs: int) -> str:
    if pairs == 1:
        return "batch_size must be at least 2, because the negatives of a pair are the other pairs of its batch, got 1"
    return (
        f"a batch must have negatives, got {pairs:,} pairs that all share an image or a text with one another, so that none is "
        "a negative of another and the loss is 0. If the columns are right (--columns), hard negatives (--loss info_nce) or "
        "loss.ids=false, which makes every other pair a negative, may help"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Embeddings of a frozen side. They are the same in every epoch, so without augmentation they are computed once and stored in
# the run's folder; later epochs and resumed runs read them.


ROWS = 1 << 16  # per file: small enough for memory, large enough to keep the number of files low


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
                file_io.write(place, partial(torch.save, {"embeddings": found, "failures": failures}))
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
