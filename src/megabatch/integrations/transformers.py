"""The cached step inside transformers' `Trainer`."""

from typing import Any

import torch
from torch import Tensor, nn

from megabatch.integrations import accelerate
from megabatch.integrations.wrapping import CachedOptions, Towers, encoded, everyone, routed, unwrapped, whole

__all__ = ["CachedStep", "everyone", "whole"]


class CachedStep(CachedOptions):
    """A mixin that gives a `transformers.Trainer` batches of any size:

        class ContrastiveTrainer(CachedStep, Trainer):
            chunk_size = 64

            def towers(self, module, inputs):
                return [(module.text, inputs["query"]), (module.text, inputs["document"])]

            def embedding_loss(self, module, query, document, *, group):
                return mb.info_nce_loss(query, document, scale=whole(module.log_scale).exp(), group=group)

    Each batch of the trainer (`per_device_train_batch_size` on every process) is one loss with in-batch negatives. A step of
    the optimizer follows the mean over `gradient_accumulation_steps` batches, or over the last ones of an epoch.
    The fp16 scaler, bf16, clipping, DDP and FSDP2 are the trainer's own. Evaluation returns the loss of each batch.

    `chunk_size`, `budget` and `budget_fraction` are attributes, as in the example (`CachedOptions`).
    """

    # The trainer's own:
    accelerator: Any
    optimizer: Any
    current_gradient_accumulation_steps: int

    def towers(self, module: Any, inputs: Any) -> Towers:
        """Pairs (tower, inputs) of a batch; towers are the module, parts of it or its methods.

        Args:
            module: the model as it was given to the trainer, without DDP's wrapper.
            inputs: the data collator's result.
        """
        raise NotImplementedError(f"{type(self).__name__} must define towers(module, inputs): pairs (tower, inputs)")

    def embedding_loss(self, module: Any, *embeddings: Tensor, group: Any) -> Tensor:  # ()
        """The loss of all embeddings of a batch.

        Args:
            module: as for `towers`.
            embeddings: (N, D) of each tower.
            group: process group the batch is sharded over, for `group=` of the loss; None for one process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define embedding_loss(module, *embeddings, group): a scalar")

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:  # ()
        """Gradients of one batch; called by the trainer."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        module, steps = unwrapped(model), self.current_gradient_accumulation_steps
        return accelerate.cached_backward(
            self.accelerator,
            model,
            lambda *embeddings: self.embedding_loss(module, *embeddings, group=everyone()) / steps,
            self.towers(module, inputs),
            **self._options,
        )

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of one batch, without gradients; called by the trainer."""
        module = unwrapped(model)
        with self.accelerator.autocast():
            found = encoded(routed(self.towers(module, inputs), model), self.chunk_size)
            return self.embedding_loss(module, *found, group=everyone()).detach(), None, None
