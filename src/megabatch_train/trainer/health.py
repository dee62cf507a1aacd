"""Detects runs that learn nothing, signals that end a run, samples that cannot be read, and pairs without negatives."""

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
from megabatch_train.data.dataset import MIXED, STORED_IN_FILES, Dataset

# ----------------------------------------------------------------------------------------------------------------------
# Runs that learn nothing, and would otherwise end without an error.
#
# `pair_statistics` measures the embeddings of each batch, at the cost of a few passes over them. `Health` converts the numbers
# to warnings that name the likely cause and the setting to change. If a problem persists, the run ends with
# `TrainingFailedError`.

# In nats. If the part of the logits that tells pairs apart is smaller than this, the softmax over the batch is uniform.
FLAT_LOGITS = 0.1
# Fraction of the largest spread of the run. In the warm-up, embeddings count as collapsed only if their spread is also below
# this fraction. The reason is that some trained text models start with nearly equal embeddings, which spread in the warm-up.
LOST_SPREAD = 0.1
# In nats. The loss is at chance if the mean logit of matches exceeds the mean logit of other pairs by less than this, averaged
# over `WINDOW` steps and at least `WINDOW_PAIRS` pairs. Runs that learn exceed this limit within tens of steps. In a run that
# learns nothing, the average has a standard deviation of at most 0.02.
CHANCE_ADVANTAGE = 0.05
WINDOW, WINDOW_PAIRS = 25, 1600
AFTER_WARM_UP = 50  # number of steps after the warm-up in which a loss at chance is not a problem
FEWEST_STEPS = 100  # a run of fewer steps may end at chance without an error
SMALL_SCALE = 1.0  # with a scale below this, flat logits are not a sign of collapsed embeddings
FITTED_ADVANTAGE = 10.0  # in nats. Above it, the model has fitted its data, so its gradients can round to zero
AT_MAX_SCALE = 0.9  # share of steps at the limit that causes a warning. A scale that starts there can decrease at first


class Patience(NamedTuple):
    """After `warning` consecutive steps with a problem, a warning is logged. After `end` such steps, the run ends."""

    warning: int
    end: int


PATIENCE = {
    "not finite": Patience(15, 50),  # a gradient scaler may skip ten steps at the start
    "no gradient": Patience(3, 50),
    "collapse": Patience(5, 50),
    "small scale": Patience(5, 50),
    "chance": Patience(25, 500),
}


class TrainingFailedError(Exception):
    """Raised if a run learned nothing. The state of the run is saved. The message names the cause and what to change."""


class PairStatistics(NamedTuple):
    """Statistics of the embeddings of a batch, averaged over ranks. They are NaN if no rank has two pairs."""

    spread: float = math.nan  # 1 − mean cosine of different samples, geometric mean of both sides. 0 if all samples are equal
    advantage: float = math.nan  # mean cosine of matching pairs − mean cosine of other pairs


@torch.no_grad()
def pair_statistics(first: Tensor, second: Tensor) -> Tensor:  # (n, D), (n, D) -> (4,)
    """Returns n, the spread of the first side, the spread of the second side and the advantage.

    The spreads and the advantage are multiplied by n, so that they can be summed over ranks. Each rank compares only its own
    pairs. A rank with fewer than two pairs returns zeros.
    """
    count = len(first)
    if count < 2:
        return torch.zeros(4, device=first.device)
    x, y = first.detach().float(), second.detach().float()
    squared_norms = [side.square().sum() / count for side in (x, y)]  # 1 for embeddings of unit length
    spreads = [side.var(0).sum() / norm for side, norm in zip((x, y), squared_norms, strict=True)]
    # ⟨mean x, mean y⟩ is the mean over all pairs, including the matches, so the difference is scaled by n / (n − 1).
    difference = ((x * y).sum() / count - x.mean(0) @ y.mean(0)) * (count / (count - 1))
    advantage = difference / (squared_norms[0] * squared_norms[1]).sqrt()
    return count * torch.stack([torch.ones_like(advantage), *spreads, advantage])


def average_statistics(total: list[float]) -> PairStatistics:
    """Returns the statistics from the sum of `pair_statistics` over ranks."""
    count, first, second, advantage = total
    return PairStatistics(math.sqrt(first * second) / count, advantage / count) if count else PairStatistics()


class StepSummary(NamedTuple):
    """The numbers of a step that `Health` checks. They are the same on all ranks."""

    loss: float
    gradient_norm: float
    scale: float
    statistics: PairStatistics


class Health:
    """Checks the steps of a run. All ranks have the same numbers, so all ranks get the same results.

    Args:
        batch_size: the number of pairs in a step.
        max_scale: the limit of the learned scale.
        warm_up: the number of steps of the warm-up.
        highest_rate: the highest learning rate of the run.
    """

    def __init__(self, *, batch_size: int, max_scale: float, warm_up: int, highest_rate: float) -> None:
        self._max_scale, self._warm_up, self._highest_rate = max_scale, warm_up, highest_rate
        self._durations = dict.fromkeys(PATIENCE, 0)  # number of consecutive steps with each problem
        self._messages: dict[str, str] = {}  # warning of each problem that was reported and persists
        self._last_problems: dict[str, str] = {}  # problems of the last step
        self._advantages: deque[float] = deque(maxlen=max(WINDOW, -(-WINDOW_PAIRS // batch_size)))  # nats
        self._largest_spread = 0.0
        self._steps = self._steps_at_max_scale = 0  # numbers of steps since the run began or resumed

    @property
    def problems(self) -> list[str]:
        """The warnings about problems that persist."""
        return list(self._messages.values())

    def check(self, number: int, step: StepSummary) -> list[str]:
        """Checks a step and returns new warnings.

        Args:
            number: the number of the step. The first step is step 1.
            step: the numbers of the step.
        """
        self._steps += 1
        self._steps_at_max_scale += step.scale >= self._max_scale * (1 - 1e-6)
        if math.isfinite(step.statistics.advantage):
            self._advantages.append(step.scale * step.statistics.advantage)
            self._largest_spread = max(self._largest_spread, step.statistics.spread)
        problems, warnings = self._find_problems(number, step), []
        for name, patience in PATIENCE.items():
            self._durations[name] = self._durations[name] + 1 if name in problems else 0
            if name in problems and self._durations[name] == patience.warning:
                self._messages[name] = problems[name]
                warnings.append(problems[name])
            elif name not in problems and self._messages.pop(name, ""):
                warnings.append(f"step {number}: the problem of an earlier warning ({name}) is gone")
        if step.statistics.spread >= LOST_SPREAD * self._largest_spread:
            problems.pop("collapse", None)  # these embeddings never had a spread that they could lose
        self._last_problems = {name: problems[name] for name in ("no gradient", "collapse") if name in problems}
        return warnings

    def failure(self) -> str | None:
        """Returns the reason why the run must end, or None if it can continue."""
        fatal = [name for name, patience in PATIENCE.items() if self._durations[name] >= patience.end]
        return self._messages[fatal[0]] if fatal else None

    def final_failure(self, steps: int) -> str | None:
        """Returns the reason why the trained model is of no use, or None. `steps` is the last step of the run."""
        if self._messages:
            return next(iter(self._messages.values()))
        return self._describe_chance() if steps >= FEWEST_STEPS and self._is_at_chance() else None

    def conclude(self) -> list[str]:
        """Returns new warnings after the last step. In a short run, a problem may not last long enough for `check` to warn."""
        new = {name: message for name, message in self._last_problems.items() if name not in self._messages}
        self._messages.update(new)
        warnings = list(new.values())
        if self._steps >= WINDOW and self._steps_at_max_scale >= AT_MAX_SCALE * self._steps:
            warnings.append(
                f"the scale was at its limit, loss.max_scale = {self._max_scale:g}, in {self._steps_at_max_scale:,} of "
                f"{self._steps:,} steps. This is normal for a model that was already trained up to the limit, such as OpenAI's "
                "CLIP. For other models, raise the limit or lower loss.scale"
            )
        if not self._messages and self._is_at_chance():
            warnings.append(self._describe_chance())
        return warnings

    def state(self) -> dict[str, Any]:
        """Returns the current problems, for a checkpoint."""
        return {
            "messages": dict(self._messages),
            "advantages": list(self._advantages),
            "largest_spread": self._largest_spread,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the problems of a checkpoint. Each problem counts as if its warning had just been logged."""
        self._messages.update(state.get("messages", {}))
        self._durations.update({name: PATIENCE[name].warning for name in self._messages})
        self._advantages.extend(state.get("advantages", ()))
        self._largest_spread = state.get("largest_spread", 0.0)

    def _find_problems(self, number: int, step: StepSummary) -> dict[str, str]:
        """Returns the problems of this step by name, with their messages."""
        problems = {}
        if not (math.isfinite(step.loss) and math.isfinite(step.gradient_norm)):
            problems["not finite"] = (
                f"step {number}: the loss ({step.loss:g}) or the gradient norm ({step.gradient_norm:g}) is not finite, so the "
                'optimizer skips these steps. Try precision = "bf16" or "fp32", or a smaller optimizer.lr'
            )
        if step.gradient_norm == 0 and not step.scale * step.statistics.advantage > FITTED_ADVANTAGE:
            problems["no gradient"] = (
                f"step {number}: all gradients are zero, so the model learns nothing. Either no trained weight influences the "
                "loss, or no pair of the batch has a negative (pairs with equal ids are not negatives of each other). Check "
                "freeze and the data"
            )
        spread, after_warm_up = step.statistics.spread, number - self._warm_up
        if step.scale * spread < FLAT_LOGITS and step.scale < SMALL_SCALE:
            problems["small scale"] = (
                f"step {number}: the scale of the logits is {step.scale:.1e}, so all logits are nearly equal, and the loss is "
                "at chance. If the run began with this scale, set loss.scale to a larger value, such as 14.3. If the scale has "
                "fallen, start again with a smaller --lr"
            )
        elif step.scale * spread < FLAT_LOGITS and (after_warm_up > 0 or spread < LOST_SPREAD * self._largest_spread):
            problems["collapse"] = (
                f"step {number}: the embeddings have collapsed. All samples have nearly the same embedding (1 − mean cosine is "
                f"{spread:.1e}), so the loss is at chance. Usually the learning rate is too high (its highest value is "
                f"{self._highest_rate:.1e}), or it rises too fast (the warm-up has {self._warm_up} steps). Start again with a "
                "smaller --lr or a longer --warmup. Data with the same image or text in every row causes this problem, too"
            )
        elif after_warm_up > AFTER_WARM_UP and self._is_at_chance():
            problems["chance"] = f"step {number}: {self._describe_chance()}"
        return problems

    def _is_at_chance(self) -> bool:
        is_full = len(self._advantages) == self._advantages.maxlen
        return is_full and sum(self._advantages) / len(self._advantages) < CHANCE_ADVANTAGE

    def _describe_chance(self) -> str:
        steps = len(self._advantages)
        return (
            f"the loss is at chance: in the last {steps} steps, the logits of matching pairs were on average only "
            f"{sum(self._advantages) / steps:.2g} nats larger than the logits of other pairs. Check that each row of the data "
            "has its own image or text, and that both sides of a row belong together. Then try another --lr or more steps"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM end a run after the current step, so that the run can be saved first.


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Raised after a signal has stopped a run and the run is saved. The message contains the command that resumes it.

    Args:
        message: the message to the user.
        number: the number of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class StopSignal:
    """The last signal that the process received."""

    def __init__(self) -> None:
        self.number = 0  # number of the signal; 0 if there was none


@contextmanager
def record_signals(end_at_second: bool) -> Iterator[StopSignal]:
    """Records signals, which then do not end the process. Outside of the main thread, no signals are recorded.

    Args:
        end_at_second: whether a second Ctrl-C ends the process at once. It must be false under torchrun, which forwards each
            signal twice.
    """
    stop = StopSignal()

    def record(number: int, frame: FrameType | None) -> None:
        if stop.number and number == signal.SIGINT and end_at_second:
            raise KeyboardInterrupt
        stop.number = number

    old_handlers: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            old_handlers[number] = signal.signal(number, record)
    except ValueError:  # this is not the main thread
        old_handlers.clear()
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------------------
# Samples that cannot be read. They are skipped and counted, and the log names the first few. A run that can read too few
# samples ends.


LOG = logging.getLogger("megabatch")
MOST_NAMED = 5  # number of unreadable samples that are named
FEWEST_PAIRS = 1024  # after this number of pairs, a run ends if fewer than half of its pairs could be read


class UnreadableSamples:
    """Logs the samples that this rank could not read, and ends a run that can read too few samples.

    Args:
        dataset: the dataset of the samples.
        pairs: the number of pairs in an epoch.
    """

    def __init__(self, dataset: Dataset, pairs: int) -> None:
        self._failures = dataset.failures
        self._images = any(kind in (MIXED, *STORED_IN_FILES) for kind in dataset.sides)
        self._fewest_pairs = min(pairs, FEWEST_PAIRS)
        self._tried = self._read = self._named = 0  # numbers of pairs, of readable pairs, and of samples in the log

    def check(self, step: int, tried: int, read: int, world: World) -> None:
        """Raises an error on all ranks if no pair of the first batch, or fewer than half of all pairs so far, could be read."""
        self._tried, self._read = self._tried + tried, self._read + read
        if self._read and (self._tried < self._fewest_pairs or 2 * self._read >= self._tried):
            return
        reason = next((text for text in world.gather_objects(next(iter(self._failures.values()), None)) if text), "")
        hint = "; paths in a table are relative to its folder, or to --set data_options.root=FOLDER" if self._images else ""
        raise ValueError(
            f"the run stops at step {step}, because {self._tried - self._read:,} of {self._tried:,} pairs could not be read: "
            f"{reason}{hint}"
        )

    def log_new(self) -> None:
        """Logs the reasons of new failures, for at most `MOST_NAMED` samples."""
        if self._named == min(MOST_NAMED, len(self._failures)):
            return
        for reason in list(self._failures.values())[self._named : MOST_NAMED]:
            LOG.warning("a sample is skipped: %s", reason)
            self._named += 1
        if self._named == MOST_NAMED:
            LOG.warning("further unreadable samples are counted, but not named")

    def log_total(self) -> None:
        """Logs how many samples could not be read."""
        if self._failures:
            LOG.warning("%d samples could not be read and were skipped", len(self._failures))


# ----------------------------------------------------------------------------------------------------------------------
# Pairs without a negative in their batch. The model learns nothing from them, so they are counted. A batch in which no pair has
# a negative is skipped. In a dataset with many captions per image, for example, a small batch can have captions of one image
# only by chance. If several batches in a row are skipped, the cause is the data, so the run ends.

MOST_SKIPPED = 5  # number of consecutive batches without negatives after which a run ends


class MissingNegatives:
    """Counts pairs without negatives, and ends a run that has only such pairs. All ranks get the same numbers.

    Args:
        steps: the number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self._most = min(MOST_SKIPPED, steps)
        self._count = self._pairs = self._skipped = 0
        self._consecutive = 0  # number of skipped batches since the last batch that was not skipped

    def add(self, step: int, count: int, pairs: int) -> list[str]:
        """Adds a step in which `count` of `pairs` pairs have no negative. Returns new warnings."""
        is_skipped = count == pairs > 0
        self._consecutive = self._consecutive + 1 if is_skipped else 0
        warnings = []
        if is_skipped and not self._skipped:
            warnings.append(
                f"step {step} changes nothing, because none of its {pairs:,} pairs has a negative: all pairs of the batch "
                "share an image or a text with one another. Further batches without negatives are skipped and counted, and the "
                f"run ends after {self._most} consecutive ones"
            )
        elif count and not self._count:
            warnings.append(
                f"step {step}: {count:,} of {pairs:,} pairs have no negatives, because they share an image or a text with "
                "every other pair of the batch. The model learns nothing from them. The log contains their total number at "
                "the end of the run"
            )
        self._pairs, self._count, self._skipped = self._pairs + pairs, self._count + count, self._skipped + is_skipped
        return warnings

    def failure(self) -> str | None:
        """Returns the reason why the run must end, or None if it can continue."""
        if self._consecutive < self._most:
            return None
        return (
            f"the last {self._consecutive} batches had no negatives, because all pairs of a batch share an image or a text "
            "with one another. Check --columns. If the columns are right, use a larger --batch-size, hard negatives (--loss "
            "info_nce), or --set loss.ids=false, which makes every other pair a negative"
        )

    def log_total(self) -> None:
        """Logs how many pairs had no negatives, and how many batches were skipped."""
        if self._count:
            skipped = f". Skipped steps, because no pair had negatives: {self._skipped:,}" if self._skipped else ""
            LOG.warning("%s of %s pairs had no negatives in their batch%s", f"{self._count:,}", f"{self._pairs:,}", skipped)
