"""The stages of a run: consecutive steps with equal settings. Another stage may drop other fractions of the patches."""

from collections.abc import Iterator
from dataclasses import dataclass

from megabatch_train.data.loader import Batch, Order
from megabatch_train.towers.tower import SIDES
from megabatch_train.trainer.config import TrainConfig, highest_rate, learning_rate


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with equal settings. Steps are counted from 0.

    Attributes:
        first: the first step.
        stop: the step after the last one.
        patch_dropout: the fraction of the patches of an image that a step drops.
        rate: the highest learning rate of the schedule.
        schedule: the first step of the schedule, and the step after its last one. Several stages can share a schedule.
        config: the settings of the stage.
        order: the order of the samples.
    """

    first: int
    stop: int
    patch_dropout: float
    rate: float
    schedule: tuple[int, int]
    config: TrainConfig
    order: Order

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step of the run."""
        begin, end = self.schedule
        return learning_rate(self.config.schedule, self.rate, step - begin, end - begin)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yields the batches of this stage from step `start` on."""
        return self.order.batches(start, self.stop)


def plan_stages(config: TrainConfig, order: Order, patch_dropout: float) -> list[Stage]:
    """Returns the stages of a run, in order. The last fraction of the steps, `schedule.unmask_fraction`, keeps all patches.

    Args:
        config: the settings of the run.
        order: the order of the samples.
        patch_dropout: the fraction of the patches that steps drop, from the options of the model.
    """
    steps = config.total_steps(order.batches_per_epoch)
    rate = highest_rate(config.optimizer, config.schedule, config.batch_size, steps)
    unmasked = config.schedule.unmask_fraction
    if unmasked and not patch_dropout:
        raise ValueError(
            f"schedule.unmask_fraction must be 0 for a run that drops no patches (model_options.patch_dropout), got {unmasked}"
        )
    if patch_dropout and config.freeze == SIDES[0]:
        raise ValueError(
            f"model_options.patch_dropout must be 0 with freeze = {config.freeze!r}, because a frozen tower keeps all patches, "
            f"got {patch_dropout}"
        )
    change = steps - round(unmasked * steps)
    parts = [(0, change, patch_dropout), (change, steps, 0.0)]
    return [Stage(*part, rate, (0, steps), config, order) for part in parts if part[0] < part[1]]
