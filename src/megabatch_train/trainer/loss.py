"""Computes the training loss over the readable pairs of all ranks, reads its other inputs, and stores embeddings."""

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
from megabatch.cached.replay import checksum
from megabatch.losses import (
    Negatives,
    clip_loss,
    dcl_loss,
    hcl_loss,
    info_nce_loss,
    late_interaction_loss,
    matryoshka_clip_loss,
    nt_xent_loss,
    siglip_loss,
    soft_clip_loss,
    sup_con_loss,
)
from megabatch.world import World, is_sharded
from megabatch_train.data.dataset import Dataset, count_others
from megabatch_train.data.load import WithNegatives
from megabatch_train.data.tables import Table
from megabatch_train.evaluation.embedding import embed
from megabatch_train.evaluation.late_interaction import connect
from megabatch_train.towers.late_interaction import average, pack, unpack
from megabatch_train.towers.tower import Pair
from megabatch_train.trainer.config import CONTRASTS, LATE, LossConfig
from megabatch_train.trainer.health import pair_statistics

LOG = logging.getLogger("megabatch")
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0  # initial values of the SigLIP paper
WITHOUT_IDS = ("nt_xent", "sup_con")  # losses that ignore ids


class LossInputs(NamedTuple):
    """Inputs of a loss on this rank, in addition to the embeddings of the pairs."""

    labels: Tensor | None = None  # (n,) int64 classes
    teacher: tuple[Tensor, Tensor] | None = None  # (n, E), (n, E) embeddings by a teacher or a guide
    owners: Tensor | None = None  # (m,) int64: the index of the pair that each hard negative belongs to
    negative_ids: Tensor | None = None  # (m,) or (m, 2) int64

    def select(self, usable: Tensor) -> "LossInputs":  # (n,) bool
        """Returns the inputs of the usable pairs and of their hard negatives."""
        rows = None if self.owners is None else usable[self.owners]
        return LossInputs(
            None if self.labels is None else self.labels[usable],
            None if self.teacher is None else (self.teacher[0][usable], self.teacher[1][usable]),
            None if self.owners is None else (usable.cumsum(0) - 1)[self.owners[rows]],
            None if self.negative_ids is None else self.negative_ids[rows],
        )

    def to(self, device: torch.device) -> "LossInputs":
        """Returns the inputs on a device."""
        tensors = [value if value is None else value.to(device) for value in (self.labels, self.owners, self.negative_ids)]
        teacher = None if self.teacher is None else (self.teacher[0].to(device), self.teacher[1].to(device))
        return LossInputs(tensors[0], teacher, *tensors[1:])


NO_INPUTS = LossInputs()


class Objective(nn.Module):
    """The loss with its learned scale and bias.

    Args:
        config: the settings of the loss.
        scale: the scale of the model, already exponentiated.
        bias: the bias of the model, or None if it was not trained with SigLIP.
        dtype: the dtype of the two parameters.
        token_dim: the dim of a vector of a late-interaction model, whose embeddings are rows of several vectors; 0 for others.
    """

    def __init__(
        self, config: LossConfig, scale: float, bias: float | None, dtype: torch.dtype = torch.float32, token_dim: int = 0
    ) -> None:
        super().__init__()
        if (config.name == LATE) != bool(token_dim):
            model = f"a model with one vector per {'token' if token_dim else 'sample'}"
            raise ValueError(
                f"loss.name must be {LATE!r} for a model with one vector per token, and only for it, got "
                f"{config.name!r} for {model}"
            )
        self.config, self.token_dim = config, token_dim
        self.bias: nn.Parameter | None = None
        if config.name == "siglip":
            if bias is None:  # the scale of the model belongs to another loss
                scale, bias = SIGLIP_SCALE, SIGLIP_BIAS
            self.bias = nn.Parameter(torch.tensor(bias if config.bias is None else config.bias, dtype=dtype))
        initial_scale = min(scale if config.scale is None else config.scale, config.max_scale)
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial_scale), dtype=dtype))
        self.inputs_of: Callable[[Tensor], LossInputs] = lambda indices: NO_INPUTS  # from indices of samples to inputs
        self.teacher_scale = 1.0
        self._full_dim_logged = False

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        ids: Tensor | None,
        world: World,
        inputs: LossInputs = NO_INPUTS,
        negatives: Tensor | None = None,
    ) -> Tensor:  # ()
        """Returns this rank's share of the loss over all ranks. `negatives` are the embeddings of hard negatives, (m, D)."""
        scale, group, config = self.log_scale.exp(), world.group, self.config
        if config.name == LATE:
            return self._late(first, second, ids, world, inputs, negatives)
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
        if config.name not in ("clip", "distill"):
            raise NotImplementedError(f"the loss {config.name!r} must have a branch in Objective.forward")
        loss = clip_loss(first, second, scale, ids=ids, group=group)
        if config.name == "distill":
            assert inputs.teacher is not None
            targets = soft_clip_loss(first, second, scale, *inputs.teacher, self.teacher_scale, group=group)
            loss = loss + config.teacher_weight * targets
        return loss

    def _all_widths(self, full: int, world: World) -> list[int]:
        """Returns the dims of `loss.widths` and the full dim. Without the full dim, the last columns would not be trained."""
        widths = list(self.config.widths)
        if max(widths) >= full:
            return widths
        if not self._full_dim_logged and world.rank == 0:
            LOG.info("loss.widths %s do not contain the full dim %d, so the full dim is trained, too", widths, full)
        self._full_dim_logged = True
        return [*widths, full]

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

    def _late(
        self, first: Tensor, second: Tensor, ids: Tensor | None, world: World, inputs: LossInputs, negatives: Tensor | None
    ) -> Tensor:  # ()
        hard = None
        if negatives is not None:
            if ids is not None and inputs.negative_ids is not None:  # a negative that matches a query of the batch is excluded
                documents = world.gather_rows(ids if ids.dim() == 1 else ids[:, 1])
                own = inputs.negative_ids if inputs.negative_ids.dim() == 1 else inputs.negative_ids[:, 1]
                negatives = negatives[~torch.isin(own, documents)]
            hard = pack(negatives, self.token_dim)
        return late_interaction_loss(
            unpack(first, self.token_dim),
            pack(second, self.token_dim),
            self.log_scale.exp(),
            negatives=hard,
            ids=ids if ids is None or ids.dim() == 1 else connect(ids, world),
            symmetric=self.config.symmetric,
            group=world.group,
        )

    def describe(self, first: Tensor, second: Tensor) -> Tensor:  # (n, D), (n, D) -> (4,) float64
        """Returns `pair_statistics`. For a late-interaction model they are approximate: a text is the mean of its vectors."""
        if not self.token_dim:
            return pair_statistics(first, second)
        statistics = pair_statistics(*(average(side.detach(), self.token_dim) for side in (first, second)))
        statistics[1:] *= first.shape[1] // self.token_dim  # a score is a sum over the vectors of a query
        return statistics

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamps the scale to `max_scale` after an optimizer step."""
        self.log_scale.clamp_(max=math.log(self.config.max_scale))

    def numbers(self) -> dict[str, float]:
        """Returns the current scale and bias, for logs and for the saved model."""
        numbers = {"scale": self.log_scale.detach().exp().item()}
        return numbers if self.bias is None else {**numbers, "bias": self.bias.detach().item()}


class ReadablePairs:
    """The loss of one step as a function of the embeddings. It skips pairs with an unreadable side.

    Args:
        objective: the loss.
        world: the ranks.
        usable: a function that returns a mask of this rank's readable pairs. It is called after both sides have been read.
        ids: the ids of this rank's pairs, (n,) or (n, 2), or None.
        stored: the embeddings of a frozen side, by the index of the side.
        indices: the indices of this rank's samples.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        usable: Callable[[], Tensor],
        ids: Tensor | None,
        stored: dict[int, Tensor],
        indices: Tensor | None = None,  # (n,) int64
    ) -> None:
        self._objective, self._world, self._usable, self._ids, self._stored = objective, world, usable, ids, stored
        self._inputs = NO_INPUTS if indices is None else objective.inputs_of(indices)
        # A call sets these attributes.
        self.pairs = 0  # number of readable pairs on all ranks
        self.statistics = torch.zeros(4, dtype=torch.float64)  # `pair_statistics` of this rank's pairs
        self.without_negatives = 0  # number of readable pairs that have no negative in the batch

    @property
    def further_rows(self) -> bool:
        """Whether the second side has rows of hard negatives after the pairs. `cached_backward` reads this property."""
        return self._inputs.owners is not None

    def __call__(self, *encoded: Tensor) -> Tensor:  # ()
        """Returns this rank's share of the loss. Loss and gradients are zero if no readable pair of any rank has a negative."""
        first, second = self._both_sides(encoded)
        usable = self._usable().to(first.device)  # (n,)
        owners = self._inputs.owners
        negative_count = 0 if owners is None else int(usable[owners.to(usable.device)].sum())
        self.pairs, tried, negative_count = map(round, self._world.sum([int(usable.sum()), len(usable), negative_count]))
        ids = None if self._ids is None else self._ids.to(first.device)
        inputs, negatives = self._inputs.to(first.device), None
        if inputs.owners is not None:  # hard negatives come after the pairs
            second, negatives = second[: len(usable)], second[len(usable) :]
        if not bool(usable.all()):
            negatives = None if negatives is None or inputs.owners is None else negatives[usable[inputs.owners]]
            first, second, ids = first[usable], second[usable], None if ids is None else ids[usable]
            inputs = inputs.select(usable)
        self.without_negatives = 0 if negative_count else self._count_without_negatives(ids)
        if self.without_negatives == tried == 1:
            raise ValueError(
                "batch_size must be at least 2, because the negatives of a pair are the other pairs of its batch, got 1"
            )
        if self.without_negatives == self.pairs:
            return sum((part.sum() for part in encoded), self._objective.log_scale.sum()) * 0
        self.statistics = self._objective.describe(first, second)
        loss: Tensor = self._objective(first, second, ids, self._world, inputs, negatives)
        return loss

    def _count_without_negatives(self, ids: Tensor | None) -> int:
        """Returns the number of pairs on all ranks that share an image or a text with every other pair of the batch."""
        if ids is None or self._objective.config.name in WITHOUT_IDS:
            return int(self.pairs == 1)
        return int((count_others(self._world.gather_rows(ids).cpu()) == 0).sum())

    def _both_sides(self, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rest = iter(encoded)
        first, second = (self._stored[side] if side in self._stored else next(rest) for side in (0, 1))
        return first, second


# ----------------------------------------------------------------------------------------------------------------------
# Embeddings of a frozen side. Without augmentation they are the same in every epoch, so they are computed once and stored in
# the folder of the run. Later epochs and resumed runs read them.


ROWS = 1 << 16  # number of rows of a file. A file fits in memory, and the number of files stays low


class StoredEmbeddings:
    """Embeddings of one side of a dataset, without augmentation, on disk.

    Args:
        folder: a folder that all ranks share. Files that it already contains are used if they come from the same tower.
        dataset: the dataset to encode.
        side: 0 or 1.
        pair: the towers.
        chunk_size: the number of samples that are encoded at once.
        workers: the workers, as in `Dataset.source`.
        world: the ranks. Each rank encodes a part of the dataset.
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
        self._paths = [
            folder / f"{_fingerprint(pair, side, dataset)}_{start:010d}.pt" for start in range(0, len(dataset), ROWS)
        ]
        for number, path in enumerate(self._paths):
            if number % world.size == world.rank and not _is_readable(path):
                rows = range(number * ROWS, min((number + 1) * ROWS, len(dataset)))
                LOG.info("a frozen tower encodes samples %d to %d of %d, only once", rows.start, rows.stop - 1, len(dataset))
                embeddings = embed(tower, dataset, side, rows, chunk_size=chunk_size, workers=workers).cpu()
                failures = {index: dataset.failures[index] for index in rows if index in dataset.failures}
                file_io.write(path, partial(torch.save, {"embeddings": embeddings, "failures": failures}))
        world.gather_objects(None)  # a barrier, after which all files are written
        self._parts: list[Tensor] = []
        for path in self._paths:
            part = torch.load(path, mmap=True, weights_only=True)
            self._parts.append(part["embeddings"])
            dataset.failures |= {index: reason for index, reason in part["failures"].items() if index not in dataset.failures}

    def rows(self, indices: Tensor) -> Tensor:  # (n,) int64 -> (n, D)
        """Returns the embeddings of these samples."""
        result = self._parts[0].new_empty(len(indices), self._parts[0].shape[1])
        file_numbers = indices // ROWS
        for number in sorted(set(file_numbers.tolist())):
            mask = file_numbers == number
            result[mask] = self._parts[number][indices[mask] - number * ROWS]
        return result


def _fingerprint(pair: Pair, side: int, dataset: Dataset) -> str:
    """Returns a checksum of the samples (without the contents of images), the options, the frozen weights and the buffers."""
    value, module = checksum([side, dict(sorted(pair.options.items()))]), pair.towers[side].module
    for index in range(len(dataset)):
        value = zlib.crc32(f"{dataset.key(index, side)}\0".encode("utf-8", "surrogatepass"), value)
    frozen_weights = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    for name, tensor in (*frozen_weights, *module.named_buffers()):
        full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        value = zlib.crc32(f"{name} {checksum(full)}".encode(), value)
    return f"{value:08x}"


def _is_readable(path: Path) -> bool:
    try:
        torch.load(path, mmap=True, weights_only=True)
    except Exception:  # the file is missing or damaged, so it is written again
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Inputs of a loss in addition to the embeddings of a batch: hard negatives, labels, and embeddings by a teacher or a guide.

_EXCLUDE_NEGATIVES = "ignore the hard negatives with --columns … negative= (without a name; for images negative_image=)"


def add_negatives(config: LossConfig, dataset: Dataset, encoded: Sequence[int]) -> WithNegatives | None:
    """Returns the data with its hard negatives, or None if it has none. Raises an error if the loss cannot use the data.

    Args:
        config: the settings of the loss.
        dataset: the dataset of the pairs.
        encoded: the sides that are encoded in each step.
    """
    if config.name == "sup_con" and dataset.label_column is None:
        raise ValueError("the loss sup_con needs a table with a column of labels: --columns image=NAME text=NAME label=NAME")
    columns = dataset.negative_columns
    if not columns or not isinstance(dataset, Table):
        return None
    if config.name not in (*CONTRASTS, LATE) or config.guide:
        reason = f"the loss {config.name}" if config.name not in CONTRASTS else "a loss with a guide (loss.guide)"
        raise ValueError(
            f"the data has hard negatives in the column {columns[0]}, but {reason} cannot use them. Use --loss info_nce "
            f"without loss.guide, or {_EXCLUDE_NEGATIVES}"
        )
    if 1 not in encoded:
        raise ValueError(
            f"the data has hard negatives in the column {columns[0]}, but the stored embeddings of a frozen second side do not "
            f"include hard negatives. Use --set keep_frozen=false, or {_EXCLUDE_NEGATIVES}"
        )
    return WithNegatives(dataset)


def make_input_reader(
    config: LossConfig, dataset: Dataset, negatives: WithNegatives | None, embeddings: list[StoredEmbeddings] | None
) -> Callable[[Tensor], LossInputs]:
    """Returns a function from the indices of this rank's part of a batch, (n,), to the additional inputs of the loss.

    Args:
        config: the settings of the loss.
        dataset: the dataset of the pairs.
        negatives: the result of `add_negatives`.
        embeddings: the embeddings that a teacher or a guide has computed for both sides (`embed_by_teacher`), or None.
    """
    labels = dataset if config.name == "sup_con" and isinstance(dataset, Table) else None

    def inputs_of(indices: Tensor) -> LossInputs:
        samples = indices.tolist()
        return LossInputs(
            None if labels is None else labels.labels(samples),
            None if embeddings is None else (embeddings[0].rows(indices), embeddings[1].rows(indices)),
            None if negatives is None else negatives.owners(samples),
            None if negatives is None else negatives.negative_ids(samples),
        )

    return inputs_of
