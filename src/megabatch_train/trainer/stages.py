"""The stages of a run, which are consecutive steps with equal settings, and the order of their samples.

For example, steps with small images come before steps with large images. All stages train the same parameters with the same
optimizer. Each entry of `stage` in the settings has its own warm-up and schedule. A model keeps its image size, and
interpolates its positions for the images of a stage (`ImageTokens`).

The order of the samples depends on the setting `batches`. With mined batches, `BatchMiner` computes new groups during the run.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megabatch.world import World
from megabatch_train.data.batches import GROUPS, GroupOrder, SourceOrder, read_groups, read_groups_of, write_groups
from megabatch_train.data.dataset import Dataset, ReadingProgress
from megabatch_train.data.loader import Batch, Mixture, Order
from megabatch_train.evaluation.embedding import Choice, readable
from megabatch_train.evaluation.grouping import find_neighbors, group_pairs, share_inside
from megabatch_train.towers.models import PATCH_DROPOUT
from megabatch_train.towers.tokens import check_dropout, check_image_size
from megabatch_train.towers.tower import SIDES, Pair, Tower
from megabatch_train.trainer.checkpoints import list_checkpoints, step_of
from megabatch_train.trainer.config import StageConfig, TrainConfig, highest_rate, learning_rate

LOG = logging.getLogger("megabatch")


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with equal settings. Steps are counted from 0.

    Attributes:
        first: the first step.
        stop: the step after the last one.
        patch_dropout: the fraction of the patches of an image that a step drops.
        image_size: the side of the training images in pixels; None for the size of the model.
        rate: the highest learning rate of the schedule.
        schedule: the first step of the schedule, and the step after its last one. Two stages can share a schedule.
        config: the settings of the stage.
        order: the order of the samples.
        first_epoch: the epoch of the first step.
    """

    first: int
    stop: int
    patch_dropout: float
    image_size: int | None
    rate: float
    schedule: tuple[int, int]
    config: TrainConfig
    order: Order
    first_epoch: int

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step of the run."""
        begin, end = self.schedule
        return learning_rate(self.config.schedule, self.rate, step - begin, end - begin)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yields the batches of this stage from step `start` on."""
        shift = self.shift
        for batch in self.order.batches(start + shift, self.stop + shift):
            yield batch._replace(number=batch.number - shift)

    @property
    def shift(self) -> int:
        """The number of a batch in the order, minus the number of its step."""
        return self.first_epoch * self.order.batches_per_epoch - self.schedule[0]

    def towers(self, pair: Pair) -> list[Tower]:
        """Returns both towers with the training images of this stage."""
        return [tower if self.image_size is None else tower.resize(self.image_size) for tower in pair.towers]

    def describe(self) -> str:
        """Returns the settings of the stage as text."""
        warm_up, length = self.config.schedule.warm_up(self.schedule[1] - self.schedule[0]), self.stop - self.first
        images = "" if self.image_size is None else f", images of {self.image_size} pixels"
        dropped = f", {self.patch_dropout:.0%} of the patches dropped" if self.patch_dropout else ""
        rate = f"a learning rate up to {self.rate:.2g} after {warm_up:,} of them"
        return f"{length:,} steps of {self.config.batch_size:,} pairs{images}{dropped}, {rate}"


def plan_stages(config: TrainConfig, order_of: Callable[[int], Order], pair: Pair) -> list[Stage]:
    """Returns the stages of a run, in order. Raises an error if the model cannot train as they say.

    Without stages in the settings, the run is one stage. The last fraction of its steps, `schedule.unmask_fraction`, keeps all
    patches, and is then a second stage with the same schedule.

    Args:
        config: the settings of the run.
        order_of: a function from a batch size to the order of the samples.
        pair: the towers.
    """
    dropout, unmasked = pair.options.get(PATCH_DROPOUT, 0.0), config.schedule.unmask_fraction
    if config.stage:
        stages: list[Stage] = []
        for number, entry in enumerate(config.stage):
            _check(entry, number, config, pair)
            stages.append(_resolve(entry, stages, config, order_of, dropout))
        _check_frozen([stage.patch_dropout for stage in stages], config)
        return stages
    if unmasked and not dropout:
        raise ValueError(
            f"schedule.unmask_fraction must be 0 for a run that drops no patches (model_options.patch_dropout), got {unmasked}"
        )
    _check_frozen([dropout], config)
    order = order_of(config.batch_size)
    steps = config.total_steps(order.batches_per_epoch)
    rate = highest_rate(config.optimizer, config.schedule, config.batch_size, steps)
    change = steps - round(unmasked * steps)
    parts = [(0, change, dropout), (change, steps, 0.0)]
    return [Stage(*part, None, rate, (0, steps), config, order, 0) for part in parts if part[0] < part[1]]


def _resolve(
    entry: StageConfig, before: Sequence[Stage], config: TrainConfig, order_of: Callable[[int], Order], dropout: float
) -> Stage:
    """Returns the stage after the stages `before`."""
    optimizer = config.optimizer if entry.lr is None else dataclasses.replace(config.optimizer, lr=entry.lr)
    batch_size = entry.batch_size or config.batch_size
    order = order_of(batch_size)
    steps = entry.steps or max(1, round(entry.epochs * order.batches_per_epoch))
    first = before[-1].stop if before else 0
    return Stage(
        first=first,
        stop=first + steps,
        patch_dropout=dropout if entry.patch_dropout is None else entry.patch_dropout,
        image_size=entry.image_size,
        rate=highest_rate(optimizer, config.schedule, batch_size, steps),
        schedule=(first, first + steps),
        config=dataclasses.replace(config, batch_size=batch_size, optimizer=optimizer),
        order=order,
        # Each stage begins a new epoch, so that samples are augmented in another way.
        first_epoch=before[-1].first_epoch + _count_epochs(before[-1]) if before else 0,
    )


def _count_epochs(stage: Stage) -> int:
    return math.ceil((stage.stop - stage.first) / stage.order.batches_per_epoch)


def _check(entry: StageConfig, number: int, config: TrainConfig, pair: Pair) -> None:
    name, image = f"stage[{number}]", pair.first
    if entry.patch_dropout is not None:
        check_dropout(entry.patch_dropout, image.patches, pair.name, name)
    if entry.image_size is None:
        return
    if image.tokens is None or image.training_images is None or not config.augment:
        raise ValueError(
            f"{name}.image_size must not be set for {pair.name!r} with augment = {str(config.augment).lower()}, got "
            f"{entry.image_size}; vision transformers of open_clip and transformers take random crops of other sizes"
        )
    if config.freeze == SIDES[0]:
        raise ValueError(f"{name}.image_size must not be set with freeze = {config.freeze!r}, got {entry.image_size}")
    check_image_size(entry.image_size, image.tokens, f"{name}.image_size")


def _check_frozen(dropouts: Sequence[float], config: TrainConfig) -> None:
    if any(dropouts) and config.freeze == SIDES[0]:
        raise ValueError(
            f"model_options.patch_dropout must be 0 with freeze = {config.freeze!r}, because a frozen tower keeps all patches, "
            f"got {max(dropouts)}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# The order of the samples, and new groups of hard negatives during a run.
#
# The folder of a run has a file for each search: the groups, and the order of the epoch in which the search took place, because
# this epoch began with other groups. A resumed run reads the last file before its first step.

MINED = "groups"  # name of the folder


class BatchMiner:
    """The order of the samples of a run, and the groups of mined batches.

    Args:
        config: the settings of the run.
        dataset: the dataset of the pairs.
        folder: the folder of the run, which all ranks share.
        world: the ranks. All must call the same methods in the same order.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, folder: Path, world: World) -> None:
        self._config, self._dataset, self._folder, self._world = config, dataset, folder / MINED, world
        self._checkpoints = folder / "checkpoints"
        self._samples = len(dataset) if dataset.groups is None else dataset.groups
        self._every = config.mining.every if config.batches == "mined" else 0
        self._last: int | None = None  # step of the last search
        self._groups: Tensor | None = None
        if config.batches == "mined":
            self._check_weights()
            path = Path(config.batch_groups)
            if config.batch_groups and (path.exists() or not self._paths()):  # a run keeps a copy
                self._groups = read_groups_of(path, dataset)

    def _check_weights(self) -> None:
        mixture = self._dataset.groups
        if isinstance(mixture, Mixture) and mixture.shares() != [Order(part, 1).batches_per_epoch for part in mixture.parts]:
            raise ValueError(
                'data must be a mixture without weights with batches = "mined", because an epoch has each pair once, '
                f"got the weights {', '.join(f'{weight:g}' for weight in mixture.weights)}"
            )

    def order_of(self, batch_size: int) -> Order:
        """Returns the order of the samples for a batch size."""
        arguments = (self._samples, batch_size, self._config.seed, self._world.rank, self._world.size)
        if self._config.batches == "source":
            return SourceOrder(*arguments)
        return GroupOrder(*arguments, group_of=self._groups) if self._config.batches == "mined" else Order(*arguments)

    def is_due(self, step: int) -> bool:
        """Returns whether new groups are needed before step `step`, counted from 0."""
        return self._every > 0 and step % self._every == 0 and step != self._last and (step > 0 or self._groups is None)

    def start(self) -> None:
        """Removes the groups of an earlier run in the folder, and stores the first groups."""
        if self._config.batch_groups and self._groups is None:
            read_groups(Path(self._config.batch_groups))  # the file is missing, and groups of an earlier run are no copy of it
        if self._world.rank == 0:
            for path in self._paths():
                path.unlink()
            if self._groups is not None:
                self._write(0, self._groups, None)

    def restore(self, stages: list[Stage], step: int, checkpoint: Path | None) -> None:
        """Restores the groups of a run that continues from `step`. Changes the list of the stages.

        Args:
            stages: the stages of the run.
            step: the number of steps that are complete.
            checkpoint: the folder of the checkpoint, or None for a checkpoint of this run.
        """
        if self._config.batches != "mined":
            return
        source = self._folder if checkpoint is None else checkpoint.resolve().parent.parent / MINED
        paths = [path for path in sorted(source.glob("step_*.safetensors")) if step_of(path.with_suffix("")) <= step]
        paths = self._world.from_first(paths)
        if not paths:
            if step == 0:
                return
            raise ValueError(f"{source} must have the groups of the run before step {step + 1}, got none")
        tensors, about = read_groups(paths[-1])
        if len(tensors[GROUPS]) != len(self._dataset):
            raise ValueError(
                f"{paths[-1]} must have the groups of {len(self._dataset):,} pairs, got those of {len(tensors[GROUPS]):,}"
            )
        current = (int(about["epoch"]), tensors["order"]) if "order" in tensors else None
        self._last, self._groups = int(about["step"]), tensors[GROUPS]
        if self._world.rank == 0:
            is_own = source.resolve() == self._folder.resolve()
            for path in self._paths():
                if not is_own or step_of(path.with_suffix("")) > step:  # the run will write new groups of these steps
                    path.unlink()
            if not is_own:
                self._write(self._last, tensors[GROUPS], current)
        self._replace(stages, self._last, tensors[GROUPS], current)

    def mine(self, stages: list[Stage], step: int, pair: Pair, *, chunk_size: int, workers: int | Executor) -> None:
        """Embeds the training data with the weights of `pair`, and groups it. Changes the list of the stages.

        Args:
            stages: the stages of the run.
            step: the first step with the new groups.
            pair: the towers.
            chunk_size: the number of samples that are encoded at once.
            workers: the data-loader workers, as in `Dataset.source`.
        """
        world, count, device = self._world, len(self._dataset), self._world.device
        mine = range(world.rank * count // world.size, (world.rank + 1) * count // world.size)
        sides = []
        for side, tower in enumerate(pair.towers):
            rows = torch.cat(list(readable(tower, self._dataset, side, mine, chunk_size=chunk_size, workers=workers)))
            rows = rows.half() if device.type == "cuda" else rows.float()
            sides.append(world.gather_rows(rows.to(device)))
        result, problem = None, None
        if world.rank == 0:
            try:
                with torch.autocast(device.type, enabled=False):  # as in `megabatch mine`; only the towers need autocast
                    result = self._group(sides[0], sides[1], stages[_find_stage(stages, step)], step)
            except Exception as error:  # the other ranks wait for the groups
                if world.size == 1:
                    raise
                problem = f"{type(error).__name__}: {error}"
        result, problem = world.from_first((result, problem))
        if problem is not None:
            raise RuntimeError(f"the first rank could not group the pairs before step {step + 1}: {problem}")
        self._last = step
        self._replace(stages, step, *result)
        if world.rank == 0:
            self._write(step, *result)
            self._delete_old()

    def _group(
        self, first: Tensor, second: Tensor, stage: Stage, step: int
    ) -> tuple[Tensor, tuple[int, Tensor] | None]:  # (N, D), (N, D)
        """Returns the groups of all pairs, and the rest of the epoch of this step."""
        config, device = self._config.mining, self._world.device
        choice = Choice(
            config.neighbors,
            range_min=config.range_min,
            absolute_margin=config.absolute_margin,
            relative_margin=config.relative_margin,
        )
        ids = self._dataset.ids(range(len(self._dataset)))
        progress = ReadingProgress("pairs searched", len(first))
        neighbors = find_neighbors(first, second, choice, ids=ids, device=device, tell=progress.tell)
        groups = group_pairs(neighbors, config.group_size, ids=ids, device=device)
        share = share_inside(neighbors, groups)
        LOG.info(
            "new groups before step %s: %.1f %% of the hard negatives of a pair are in its group", f"{step + 1:,}", 100 * share
        )

        def group_rest(rest: Tensor) -> Tensor:
            return group_pairs(neighbors, config.group_size, ids=ids, members=rest, device=device)

        assert isinstance(stage.order, GroupOrder), "only mined batches have groups"
        return groups, stage.order.regroup(groups, step + stage.shift, group_rest).current

    def _replace(self, stages: list[Stage], step: int, groups: Tensor, current: tuple[int, Tensor] | None) -> None:
        epochs_of = stages[_find_stage(stages, step)].schedule
        for number, stage in enumerate(stages):
            assert isinstance(stage.order, GroupOrder), "only mined batches have groups"
            own = current if stage.schedule == epochs_of else None  # stages with one schedule share their epochs
            stages[number] = dataclasses.replace(stage, order=dataclasses.replace(stage.order, group_of=groups, current=own))

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("step_*.safetensors"))

    def _write(self, step: int, groups: Tensor, current: tuple[int, Tensor] | None) -> None:
        tensors = {GROUPS: groups} | ({} if current is None else {"order": current[1]})
        about = {"step": step} | ({} if current is None else {"epoch": current[0]})
        write_groups(self._folder / f"step_{step:08d}.safetensors", tensors, about)

    def _delete_old(self) -> None:
        """Deletes the groups that no checkpoint needs."""
        checkpoints = list_checkpoints(self._checkpoints)
        if checkpoints:
            oldest = min(map(step_of, checkpoints))
            before = [path for path in self._paths() if step_of(path.with_suffix("")) <= oldest]
            for path in before[:-1]:
                path.unlink()


def _find_stage(stages: Sequence[Stage], step: int) -> int:
    """Returns the number of the stage that has a step. The step after the last one belongs to the last stage."""
    return next((number for number, stage in enumerate(stages) if step < stage.stop), len(stages) - 1)
