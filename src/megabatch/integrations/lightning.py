"""The cached step inside a LightningModule with manual optimisation."""

from typing import Any

import torch
from torch import Tensor

from megabatch.cached import cached_backward
from megabatch.integrations.wrapping import CachedOptions, Towers, encoded, everyone, routed, whole

__all__ = ["CachedStep", "everyone", "whole"]


class CachedStep(CachedOptions):
    """A mixin that gives a `LightningModule` batches of any size:

        class Model(CachedStep, LightningModule):
            chunk_size = 64

            def towers(self, batch):
                return [(self.image, batch["image"]), (self.text, batch["text"])]

            def embedding_loss(self, image, text, *, group):
                return mb.clip_loss(image, text, whole(self.log_scale).exp(), group=group)

    Each batch (of all processes) is one loss with in-batch negatives. A step of the optimizers follows the mean over
    `accumulate` batches, or over the remaining ones at the end of an epoch. Schedulers are stepped after each step or epoch,
    according to their `interval`. Step a `ReduceLROnPlateau` yourself, because it needs a metric. To clip gradients call
    `self.clip_gradients` in `on_before_optimizer_step`. Precision, the fp16 scaler, DDP and FSDP2 (`ModelParallelStrategy`) are
    the trainer's own. `Trainer(accumulate_grad_batches=…)` does not work with manual optimisation; Lightning raises an error.

    Attributes (beside those of `CachedOptions`: `chunk_size`, `budget`, `budget_fraction`):
        accumulate: batches whose gradients make one step.
    """

    accumulate: int = 1
    _waiting = 0  # batches since the last step
    trainer: Any  # Lightning's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def towers(self, batch: Any) -> Towers:
        """Pairs (tower, inputs) of a batch; towers are this module, parts of it or its methods."""
        raise NotImplementedError(f"{type(self).__name__} must define towers(batch): pairs (tower, inputs)")

    def embedding_loss(self, *embeddings: Tensor, group: Any) -> Tensor:  # ()
        """The loss of all embeddings of a batch.

        Args:
            embeddings: (N, D) of each tower.
            group: process group the batch is sharded over, for `group=` of the loss; None for one process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define embedding_loss(*embeddings, group): a scalar")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # ()
        """Gradients of one batch, and with the last of `accumulate` a step. Returns the loss; over ranks, a share of it."""
        last: bool = self.trainer.is_last_batch
        steps = last or self._waiting + 1 >= self.accumulate
        loss = cached_backward(
            lambda *embeddings: self.embedding_loss(*embeddings, group=everyone()),
            routed(self.towers(batch), self.trainer.model),
            **self._options,
            scaler=getattr(self.trainer.precision_plugin, "scaler", None),
            sync=steps,
        )
        self._waiting += 1
        if steps:
            self._step()
        self._schedule(stepped=steps, last=last)
        return loss

    @torch.no_grad()
    def batch_loss(self, batch: Any) -> Tensor:  # ()
        """The loss of a batch, encoded in chunks and without gradients, for a `validation_step`."""
        found = encoded(routed(self.towers(batch), self.trainer.model), self.chunk_size)
        return self.embedding_loss(*found, group=everyone())

    def _step(self) -> None:
        owner: Any = self
        found = owner.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        if self._waiting > 1:  # divided here, because an epoch may end before `accumulate` batches
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for parameter in {id(p): p for group in groups for p in group["params"] if p.grad is not None}.values():
                parameter.grad /= self._waiting
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._waiting = 0

    def _schedule(self, *, stepped: bool, last: bool) -> None:
        for config in self.trainer.lr_scheduler_configs:
            by_epoch = config.interval == "epoch"
            number = self.trainer.current_epoch + 1 if by_epoch else self.trainer.global_step
            due = (last if by_epoch else stepped) and number % config.frequency == 0
            # ReduceLROnPlateau needs a metric, so the user steps it.
            if due and not isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                config.scheduler.step()
