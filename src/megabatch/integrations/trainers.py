"""Gradient caching in other trainers: a loop with Accelerate, transformers' `Trainer`, and Lightning.

| trainer | name |
|---|---|
| Accelerate | `cached_backward` |
| transformers' `Trainer` | `CachedTrainer`, a mixin |
| Lightning | `CachedModule`, a mixin |

The module imports none of these packages.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.cached import cached_backward as plain_cached_backward
from megabatch.integrations.wrapping import CachedOptions, Towers, encode_towers, full_tensor, route_through_wrappers, unwrap
from megabatch.world import default_group

__all__ = ["CachedModule", "CachedTrainer", "cached_backward", "default_group", "full_tensor"]

# ----------------------------------------------------------------------------------------------------------------------
# Accelerate, with its accumulation, precision, scaler, DDP or FSDP2.

_ALTERNATIVES = {
    "FSDP": "; set fsdp_version: 2 in the accelerator's settings to use FSDP2",
    "DEEPSPEED": ", whose backward pass would reduce gradients once for each chunk. FSDP2 shards like ZeRO and reduces once in "
    "a step: set fsdp_version: 2 in the accelerator's settings, and fsdp_offload_params to offload as ZeRO-Offload does",
}
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP")


def cached_backward(
    accelerator: Any,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor],
    towers: Towers,
    **options: Any,
) -> Tensor:  # ()
    """Replaces the forward pass, the loss and `accelerator.backward(loss)`.

    The gradients are equal, but only the activations of one chunk are in memory. The loss is divided by the accelerator's
    accumulation steps and scaled by its scaler. Towers and loss run under its autocast. Gradients are reduced only in the last
    step of `accelerator.accumulate(model)`.

    Args:
        accelerator: an `accelerate.Accelerator`; one process, DDP or FSDP2.
        model: the module returned by `accelerator.prepare`, which contains the towers, or None if each tower is prepared.
        loss_fn: a function that is called once with the (N, D) embeddings of each tower and returns a scalar. To use negatives
            of all processes, pass `group=default_group()` to its loss. With FSDP2, use `full_tensor(parameter)` instead of a
            parameter of the model.
        towers: pairs (tower, inputs), as for `megabatch.cached_backward`. A tower may be a part of the model
            (`accelerator.unwrap_model(model).text`) or one of its methods. It is called through the wrapper.
        options: other arguments of `megabatch.cached_backward`: `chunk_size`, `budget` or `budget_fraction`, `embeddings`,
            `on_chunk`.

    Returns:
        The detached loss, which is not divided by the accumulation steps.
    """
    kind = accelerator.distributed_type.value
    if kind not in _KINDS or (kind == "FSDP" and not accelerator.is_fsdp2):
        name = "FSDP in its first version" if kind == "FSDP" else kind
        raise ValueError(f"accelerator must use one process, DDP or FSDP2, got {name}{_ALTERNATIVES.get(kind, '')}")
    steps: int = accelerator.gradient_accumulation_steps
    with accelerator.autocast():
        divided = plain_cached_backward(
            lambda *embeddings: loss_fn(*embeddings) / steps,
            route_through_wrappers(towers, model),
            scaler=accelerator.scaler,
            sync=accelerator.sync_gradients or bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")),
            **options,
        )
    return divided * steps


# ----------------------------------------------------------------------------------------------------------------------
# transformers' `Trainer`, which uses Accelerate.


class CachedTrainer(CachedOptions):
    """A mixin that adds batches of any size to a `transformers.Trainer`:

        class ContrastiveTrainer(CachedTrainer, Trainer):
            chunk_size = 64

            def towers(self, module, inputs):
                return [(module.text, inputs["query"]), (module.text, inputs["document"])]

            def embedding_loss(self, module, query, document, *, group):
                return mb.info_nce_loss(query, document, scale=full_tensor(module.log_scale).exp(), group=group)

    Each batch of the trainer (`per_device_train_batch_size` on every process) has one loss with in-batch negatives. An
    optimizer step uses the mean gradient of `gradient_accumulation_steps` batches, or of the last batches of an epoch. The
    trainer controls the fp16 scaler, bf16, clipping, DDP and FSDP2. Evaluation returns the loss of each batch.

    `chunk_size`, `budget` and `budget_fraction` are attributes, as in the example (`CachedOptions`).
    """

    # Attributes of the trainer.
    accelerator: Any
    optimizer: Any
    current_gradient_accumulation_steps: int

    def towers(self, module: Any, inputs: Any) -> Towers:
        """Returns the pairs (tower, inputs) of a batch. Towers are the module, parts of it or its methods.

        Args:
            module: the model that was passed to the trainer, without DDP's wrapper.
            inputs: the data collator's result.
        """
        raise NotImplementedError(f"{type(self).__name__} must define towers(module, inputs) to return pairs (tower, inputs)")

    def embedding_loss(self, module: Any, *embeddings: Tensor, group: Any) -> Tensor:  # ()
        """Returns the loss of all embeddings of a batch.

        Args:
            module: as for `towers`.
            embeddings: (N, D) of each tower.
            group: the process group whose ranks share the batch, for `group=` of the loss. It is None for one process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define embedding_loss(module, *embeddings, group): a scalar")

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:  # ()
        """Computes the gradients of one batch. The trainer calls it."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        module, steps = unwrap(model), self.current_gradient_accumulation_steps
        return cached_backward(
            self.accelerator,
            model,
            lambda *embeddings: self.embedding_loss(module, *embeddings, group=default_group()) / steps,
            self.towers(module, inputs),
            **self._options,
        )

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Computes the loss of one batch without gradients. The trainer calls it."""
        module = unwrap(model)
        with self.accelerator.autocast():
            embeddings = encode_towers(route_through_wrappers(self.towers(module, inputs), model), self.chunk_size)
            return self.embedding_loss(module, *embeddings, group=default_group()).detach(), None, None


# ----------------------------------------------------------------------------------------------------------------------
# Lightning, with manual optimization.


class CachedModule(CachedOptions):
    """A mixin that adds batches of any size to a `LightningModule`:

        class Model(CachedModule, LightningModule):
            chunk_size = 64

            def towers(self, batch):
                return [(self.image, batch["image"]), (self.text, batch["text"])]

            def embedding_loss(self, image, text, *, group):
                return mb.clip_loss(image, text, full_tensor(self.log_scale).exp(), group=group)

    Each batch of all processes has one loss with in-batch negatives. A step of the optimizers uses the mean gradient of
    `accumulate` batches, or of the remaining batches at the end of an epoch. Schedulers are stepped after each step or epoch,
    according to their `interval`. Step a `ReduceLROnPlateau` yourself, because it needs a metric. To clip gradients, call
    `self.clip_gradients` in `on_before_optimizer_step`. The trainer controls precision, the fp16 scaler, DDP and FSDP2
    (`ModelParallelStrategy`). Lightning raises an error for `Trainer(accumulate_grad_batches=…)`, because this option does not
    work with manual optimization.

    Attributes (in addition to `chunk_size`, `budget` and `budget_fraction` of `CachedOptions`):
        accumulate: the number of batches whose gradients are used for one step.
    """

    accumulate: int = 1
    _waiting = 0  # batches since the last step
    trainer: Any  # the trainer of Lightning

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def towers(self, batch: Any) -> Towers:
        """Returns the pairs (tower, inputs) of a batch. Towers are this module, parts of it or its methods."""
        raise NotImplementedError(f"{type(self).__name__} must define towers(batch) to return pairs (tower, inputs)")

    def embedding_loss(self, *embeddings: Tensor, group: Any) -> Tensor:  # ()
        """Returns the loss of all embeddings of a batch.

        Args:
            embeddings: (N, D) of each tower.
            group: the process group whose ranks share the batch, for `group=` of the loss. It is None for one process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define embedding_loss(*embeddings, group): a scalar")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # ()
        """Computes the gradients of one batch, and makes a step after `accumulate` batches.

        Returns this rank's part of the mean loss.
        """
        last: bool = self.trainer.is_last_batch
        steps = last or self._waiting + 1 >= self.accumulate
        loss = plain_cached_backward(
            lambda *embeddings: self.embedding_loss(*embeddings, group=default_group()),
            route_through_wrappers(self.towers(batch), self.trainer.model),
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
        """Computes the loss of a batch in chunks and without gradients, for a `validation_step`."""
        embeddings = encode_towers(route_through_wrappers(self.towers(batch), self.trainer.model), self.chunk_size)
        return self.embedding_loss(*embeddings, group=default_group())

    def _step(self) -> None:
        owner: Any = self
        one_or_more = owner.optimizers()
        optimizers = one_or_more if isinstance(one_or_more, list) else [one_or_more]
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
