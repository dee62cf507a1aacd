"""The learning rate of every step: warm-up in a straight line, then a cosine to the end, or a constant. Nothing to remember."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate goes from step to step."""

    name: Literal["cosine", "constant"] = "cosine"
    warm_up: int | float = 0.1  # steps, as a whole number; or a share of all steps, from 0.0 to 1.0
    end: float = 0.0  # share of the highest rate that a cosine ends with

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not self.warm_up >= 0 or (isinstance(self.warm_up, float) and self.warm_up > 1):
            raise ValueError(f"schedule.warm_up must be a number of steps, or a share from 0.0 to 1.0, got {self.warm_up}")
        if not 0 <= self.end <= 1:
            raise ValueError(f"schedule.end must be from 0 to 1, got {self.end}")


def rate(config: ScheduleConfig, highest: float, step: int, steps: int) -> float:
    """The learning rate of step number `step`, from 0, of `steps`.

    The first step of a warm-up of n has 1/n of the highest rate, its last all of it.
    """
    warm_up = round(config.warm_up * steps) if isinstance(config.warm_up, float) else min(config.warm_up, steps)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    if config.name == "constant":
        return highest
    position = (step - warm_up) / max(1, steps - warm_up)
    return highest * (config.end + (1 - config.end) * 0.5 * (1 + math.cos(math.pi * position)))
