"""The stages of a run: consecutive steps with equal settings, such as steps with small images before steps with large images.

All stages train the same parameters with the same optimizer. Each entry of `stage` in the settings has its own warm-up and
schedule. A model keeps its image size, and interpolates its positions for the images of a stage (`ImageTokens`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megabatch_train.data.loader import Batch, Order
from megabatch_train.towers.models import PATCH_DROPOUT
from megabatch_train.towers.tokens import check_dropout, check_image_size
from megabatch_train.towers.tower import SIDES, Pair, Tower
from megabatch_train.trainer.config import StageConfig, TrainConfig, highest_rate, learning_rate


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
        shift = self.first_epoch * self.order.batches_per_epoch - self.schedule[0]
        for batch in self.order.batches(start + shift, self.stop + shift):
            yield batch._replace(number=batch.number - shift)

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
