"""Notices runs that learn nothing, signals that end a run, samples that cannot be read, and batches without negatives."""

import logging
import math
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.world import World
from megabatch_train.data.dataset import IMAGE, Dataset

# ----------------------------------------------------------------------------------------------------------------------
# Notices runs that learn nothing and would still end without an error.
#
# `pair_statistics` measures the embeddings of each batch, at the cost of a few passes over them. `Health` turns the numbers
# into warnings that name the likely cause and the setting to change. If a problem persists, the run ends with
# `TrainingFailedError`.

# Nats. If the part of the logits that tells pairs apart is smaller than this, the softmax over the batch is uniform.
FLAT_LOGITS = 0.1
# Fraction of the largest spread of the run. Before the end of the warm-up, only embeddings that have lost so much have
# collapsed: those of some trained text models are nearly the same at first, and spread in the warm-up.
LOST_SPREAD = 0.1
# Nats by which the logits of matches exceed the others, averaged over `WINDOW` steps and at least `WINDOW_PAIRS` pairs. Runs
# that learn exceed it within tens of steps. The mean of a run that learns nothing has a standard deviation of at most 0.02.
CHANCE_ADVANTAGE = 0.05
WINDOW, WINDOW_PAIRS = 25, 1600
AFTER_WARM_UP = 50  # steps, after which a loss at chance counts
FEWEST_STEPS = 100  # a run of fewer steps may end at chance without failing
FITTED_ADVANTAGE = 10.0  # nats. Gradients of a model that has fitted its data may round to zero
AT_MAX_SCALE = 0.9  # share of the steps. The first steps from the limit may lower the scale


class Patience(NamedTuple):
    """Consecutive steps with a problem before the warning, and before the run ends."""

    warning: int
    end: int


PATIENCE = {
    "not finite": Patience(15, 50),  # a gradient scaler may skip ten steps at the start
    "no gradient": Patience(3, 50),
    "collapse": Patience(5, 50),
    "chance": Patience(25, 500),
}


class TrainingFailedError(Exception):
    """A run learned nothing. Its state is saved. The message names the cause and what to change."""


class PairStatistics(NamedTuple):
    """How the embeddings of a batch are distributed, averaged over ranks. NaN if no rank has two pairs."""

    spread: float = math.nan  # 1 − mean cosine between different samples, geometric mean of both sides; 0 if all are equal
    advantage: float = math.nan  # mean cosine of matching pairs − mean cosine of other pairs


@torch.no_grad()
def pair_statistics(first: Tensor, second: Tensor) -> Tensor:  # (n, D), (n, D) -> (4,) float64
    """Returns n, and n times the spread of each side and the advantage of the matches, so that ranks can be summed.

    Each rank compares only its own pairs. A rank with fewer than two pairs contributes zeros.
    """
    count = len(first)
    if count < 2:
        return torch.zeros(4, dtype=torch.float64, device=first.device)
    x, y = first.detach().float(), second.detach().float()
    squared_norms = [side.square().sum() / count for side in (x, y)]  # 1 for embeddings of unit length
    spreads = [side.var(0).sum() / norm for side, norm in zip((x, y), squared_norms, strict=True)]
    # ⟨mean x, mean y⟩ is the mean over all pairs, matches included, so the difference is scaled by n / (n − 1).
    difference = ((x * y).sum() / count - x.mean(0) @ y.mean(0)) * (count / (count - 1))
    advantage = difference / (squared_norms[0] * squared_norms[1]).sqrt()
    return count * torch.stack([torch.ones_like(advantage), *spreads, advantage]).double()


def average_statistics(total: list[float]) -> PairStatistics:
    """Converts the sum of `pair_statistics` over ranks."""
    count, first, second, advantage = total
    return PairStatistics(math.sqrt(first * second) / count, advantage / count) if count else PairStatistics()


class StepSummary(NamedTuple):
    """The numbers of a step that `Health` reads. They are the same on all ranks."""

    loss: float
    gradient_norm: float
    scale: float
    statistics: PairStatistics


class Health:
    """Watches the steps of a run. All ranks see the same numbers, so all come to the same conclusions.

    Args:
        batch_size: pairs in a step.
        max_scale: limit of the learned scale.
        warm_up: steps of the warm-up.
        highest_rate: the highest learning rate of the run.
    """

    def __init__(self, *, batch_size: int, max_scale: float, warm_up: int, highest_rate: float) -> None:
        self._max_scale, self._warm_up, self._highest_rate = max_scale, warm_up, highest_rate
        self._persistent = dict.fromkeys(PATIENCE, 0)  # consecutive steps with each problem
        self._messages: dict[str, str] = {}  # the warning of each problem that was reported and persists
        self._advantages: deque[float] = deque(maxlen=max(WINDOW, -(-WINDOW_PAIRS // batch_size)))  # nats
        self._largest_spread = 0.0
        self._steps = self._steps_at_max_scale = 0  # since the run began or resumed

    @property
    def problems(self) -> list[str]:
        """The warnings about problems that persist."""
        return list(self._messages.values())

    def check(self, number: int, step: StepSummary) -> list[str]:
        """Reads a step and returns new warnings.

        Args:
            number: of the step, from 1.
            step: its numbers.
        """
        self._steps += 1
        self._steps_at_max_scale += step.scale >= self._max_scale * (1 - 1e-6)
        if math.isfinite(step.statistics.advantage):
            self._advantages.append(step.scale * step.statistics.advantage)
            self._largest_spread = max(self._largest_spread, step.statistics.spread)
        found, news = self._find_problems(number, step), []
        for name, patience in PATIENCE.items():
            self._persistent[name] = self._persistent[name] + 1 if name in found else 0
            if name in found and self._persistent[name] == patience.warning:
                self._messages[name] = found[name]
                news.append(found[name])
            elif name not in found and self._messages.pop(name, ""):
                news.append(f"step {number}: the problem of the last warning ({name}) is gone")
        return news

    def failure(self) -> str | None:
        """Returns why the run must end now, or None."""
        over = [name for name, patience in PATIENCE.items() if self._persistent[name] >= patience.end]
        return self._messages[over[0]] if over else None

    def final_failure(self, steps: int) -> str | None:
        """Returns why the model after `steps`, the last step of the run, is of no use, or None."""
        if self._messages:
            return next(iter(self._messages.values()))
        return self._describe_chance() if steps >= FEWEST_STEPS and self._is_at_chance() else None

    def conclude(self) -> list[str]:
        """Returns new warnings after the last step."""
        warnings = []
        if self._steps >= WINDOW and self._steps_at_max_scale >= AT_MAX_SCALE * self._steps:
            warnings.append(
                f"the scale was at its limit, loss.max_scale = {self._max_scale:g}, in {self._steps_at_max_scale:,} of "
                f"{self._steps:,} steps. This is usual for "
                "models that were trained up to the limit, such as OpenAI's CLIP. Otherwise raise the limit or lower loss.scale"
            )
        if not self._messages and self._is_at_chance():
            warnings.append(self._describe_chance())
        return warnings

    def state(self) -> dict[str, Any]:
        """The problems so far, for a checkpoint."""
        return {
            "messages": dict(self._messages),
            "advantages": list(self._advantages),
            "largest_spread": self._largest_spread,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with the problems of a checkpoint. The patience until the end of the run starts at the warning."""
        self._messages.update(state.get("messages", {}))
        self._persistent.update({name: PATIENCE[name].warning for name in self._messages})
        self._advantages.extend(state.get("advantages", ()))
        self._largest_spread = state.get("largest_spread", 0.0)

    def _find_problems(self, number: int, step: StepSummary) -> dict[str, str]:
        """Returns the problems of this step, each with its message."""
        found = {}
        if not (math.isfinite(step.loss) and math.isfinite(step.gradient_norm)):
            found["not finite"] = (
                f"step {number}: the loss ({step.loss:g}) or the gradient norm ({step.gradient_norm:g}) is not finite, and the "
                'optimizer skips these steps. precision = "bf16" or "fp32", or a smaller optimizer.lr may help'
            )
        if step.gradient_norm == 0 and not step.scale * step.statistics.advantage > FITTED_ADVANTAGE:
            found["no gradient"] = (
                f"step {number}: all gradients are zero, so nothing is learned. Either no trained weight influences the loss, "
                "or no pair of the batch has a negative (pairs with equal ids are not each other's negatives)"
            )
        spread, after_warm_up = step.statistics.spread, number - self._warm_up
        if step.scale * spread < FLAT_LOGITS and (after_warm_up > 0 or spread < LOST_SPREAD * self._largest_spread):
            found["collapse"] = (
                f"step {number}: the embeddings have collapsed. All samples have nearly the same embedding (1 − mean cosine is "
                f"{spread:.1e}), and the loss is at chance. Usually the learning rate is too high (its highest "
                f"value is {self._highest_rate:.1e}) or rises too fast (in {self._warm_up} steps of warm-up). Start again with "
                "a smaller --lr or a longer --warmup. Data with the same image or text in every row has the same effect"
            )
        elif after_warm_up > AFTER_WARM_UP and self._is_at_chance():
            found["chance"] = f"step {number}: {self._describe_chance()}"
        return found

    def _is_at_chance(self) -> bool:
        full = len(self._advantages) == self._advantages.maxlen
        return full and sum(self._advantages) / len(self._advantages) < CHANCE_ADVANTAGE

    def _describe_chance(self) -> str:
        steps = len(self._advantages)
        return (
            f"the loss is at chance: in the last {steps} steps, matching pairs were on average only "
            f"{sum(self._advantages) / steps:.2g} nats more similar than other pairs. Check that each row of the data has its "
            "own image or text and that both sides belong together, then try another --lr or more steps"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM end a run after the current step, so that it can be saved first.


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """A run was stopped by a signal and has been saved. The message says how to resume.

    Args:
        message: shown to the user.
        number: of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Request:
    """The signal received so far."""

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0 for none


@contextmanager
def requests(impatient: bool) -> Iterator[Request]:
    """Records signals instead of ending at once. Works in the main thread; elsewhere no signal is recorded.

    Args:
        impatient: whether a second Ctrl-C ends the process at once. Not under torchrun, which forwards each signal twice.
    """
    request = Request()

    def collect(number: int, frame: FrameType | None) -> None:
        if request.number and number == signal.SIGINT and impatient:
            raise KeyboardInterrupt
        request.number = number

    before: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            before[number] = signal.signal(number, collect)
    except ValueError:  # not the main thread
        before.clear()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------------------
# Samples that cannot be read: they are skipped, counted and named; a run that can hardly read any ends.


LOG = logging.getLogger("megabatch")
NAMED = 5  # unreadable samples that are named
JUDGED_AFTER = 1024  # pairs, after which most must have been readable


class Unreadable:
    """Logs the samples that this rank could not read, and ends a run that can hardly read any.

    Args:
        dataset: of the samples.
        pairs: of an epoch.
    """

    def __init__(self, dataset: Dataset, pairs: int) -> None:
        self._failures, self._images = dataset.failures, IMAGE in dataset.sides
        self._judged_after = min(pairs, JUDGED_AFTER)
        self._tried = self._read = self._named = 0

    def check(self, step: int, tried: int, read: int, world: World) -> None:
        """Raises an error on all ranks if no pair of the first batch could be read, or most pairs so far could not."""
        self._tried, self._read = self._tried + tried, self._read + read
        if self._read and (self._tried < self._judged_after or 2 * self._read >= self._tried):
            return
        reason = next((found for found in world.gather_objects(next(iter(self._failures.values()), None)) if found), "")
        hint = "; paths in a table are relative to its folder, or to --set data_options.root=FOLDER" if self._images else ""
        raise ValueError(
            f"the run stops at step {step}, because {self._tried - self._read:,} of {self._tried:,} pairs could not be read: "
            f"{reason}{hint}"
        )

    def name_new(self) -> None:
        """Logs new failures by name, the first few."""
        if self._named == min(NAMED, len(self._failures)):
            return
        for reason in list(self._failures.values())[self._named : NAMED]:
            LOG.warning("skipped: %s", reason)
            self._named += 1
        if self._named == NAMED:
            LOG.warning("further unreadable samples are counted, not named")

    def count(self) -> None:
        """Logs how many samples could not be read."""
        if self._failures:
            LOG.warning("%d samples could not be read and were skipped", len(self._failures))


# ----------------------------------------------------------------------------------------------------------------------
# Pairs without a negative in their batch: they learn nothing, and are counted.


class MissingNegatives:
    """Logs the first step with such pairs, and at the end how many there were."""

    def __init__(self) -> None:
        self._count = self._pairs = 0

    def note(self, step: int, count: int, pairs: int) -> None:
        """Counts the pairs of a step, of which `count` have no negative."""
        self._pairs += pairs
        if count and not self._count:
            LOG.warning(
                "step %d: %s of %s pairs have no negatives, because they share an image or a text with every other pair of the "
                "batch; they are counted",
                *(step, f"{count:,}", f"{pairs:,}"),
            )
        self._count += count

    def count(self) -> None:
        """Logs how many pairs had no negatives."""
        if self._count:
            LOG.warning("%s of %s pairs had no negatives in their batch", f"{self._count:,}", f"{self._pairs:,}")
