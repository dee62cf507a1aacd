"""Gradient caching in other trainers: a loop with Accelerate, transformers' `Trainer`, and Lightning. The first sections have
the helpers of all integrations: towers in models wrapped in DDP or FSDP2, and a learned scale.

| trainer | name |
|---|---|
| Accelerate | `cached_backward` |
| transformers' `Trainer` | `CachedTrainer`, a mixin |
| Lightning | `CachedModule`, a mixin |

The module imports none of these packages.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megabatch as mb
from megabatch.cached import Budget
from megabatch.cached import cached_backward as plain_cached_backward
from megabatch.cached.sources import as_source
from megabatch.cached.tower import as_encoded, call, find_distributed_modules, is_fully_sharded, modules_of
from megabatch.dispatch import Backend, Reduction
from megabatch.late import Similarities
from megabatch.world import default_group, is_sharded

__all__ = ["CachedModule", "CachedTrainer", "cached_backward", "default_group", "full_tensor"]

# ----------------------------------------------------------------------------------------------------------------------
# Towers that are parts of a model wrapped in DDP or FSDP2. Calls go through the wrapper.
#
# DDP and FSDP2 gather parameters and prepare the reduction when the wrapper itself is called. A tower that is a part or a
# method of the model would bypass the wrapper, and its gradients would not be averaged.

Towers = Sequence[tuple[Callable[..., Any], Any]]


class CachedOptions:
    """The options of `megabatch.cached_backward` as attributes of a trainer or module.

    Attributes:
        chunk_size: the number of samples that a tower encodes at once, as one number or one for each tower.
        budget: bytes for graphs that are kept from the first pass, as for `megabatch.cached_backward`.
        budget_fraction: the budget as a fraction of the free memory.
    """

    chunk_size: int | Sequence[int] = 256
    budget: Budget = None
    budget_fraction: float | None = None

    @property
    def _options(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size, "budget": self.budget, "budget_fraction": self.budget_fraction}


def unwrap(model: Any) -> Any:
    """Returns the module that was passed to DDP or `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def full_tensor(parameter: Tensor) -> Tensor:
    """Returns a parameter that the loss uses, gathered if FSDP2 shards it. Its gradient is averaged over ranks."""
    if not is_sharded(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    sharded: Any = parameter
    mesh = sharded.device_mesh
    gathered: Tensor = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if gathered.requires_grad:
        # The gradient is divided here, because `Partial("avg")` computes a sum in PyTorch 2.8 with gloo.
        gathered.register_hook(lambda gradient: gradient / mesh.size())  # type: ignore[no-untyped-call]
    return gathered


def route_through_wrappers(towers: Towers, model: Any) -> list[tuple[Callable[..., Any], Any]]:
    """Returns the pairs. A tower that is a part of `model` becomes a function that calls it through its wrappers.

    Args:
        towers: pairs (tower, inputs), as for `cached_backward`. A tower may be the module in `model`, a part of this module or
            one of its methods.
        model: the trainer's model, which is a module, DDP's wrapper, or a module sharded by FSDP2. None means that no model
            contains the towers.
    """
    if model is None:
        return _check_towers(towers)
    module = unwrap(model)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, nothing is sharded
    first_version = fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel)
    if first_version or isinstance(model, nn.DataParallel) or not isinstance(module, nn.Module):
        raise TypeError(f"model must be a module, wrapped in DDP, sharded by FSDP2 or neither, got {type(model).__name__}")
    routed = []
    for tower, inputs in towers:
        if tower is module:
            tower = model
        elif tower is not model:
            for outer, inner in reversed(_around(modules_of(tower), model, module)):
                if inner is not tower:
                    tower = partial(_through, outer, _Part(inner, tower))
        routed.append((tower, inputs))
    return _check_towers(routed)


def _around(modules: Sequence[nn.Module], model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Returns the wrappers around these parts as (module to call, module whose `forward` the tower replaces), outermost first.

    Wrappers are the model, if it is wrapped or sharded, and modules between the model and the parts that FSDP2 shards. A
    function with unknown modules counts as a part of the model.
    """
    inside = {id(part) for part in modules}

    def contains(outer: nn.Module) -> bool:
        return any(id(part) in inside for part in outer.modules())

    wrapped = model is not module or is_fully_sharded(model)
    first = [(model, module)] if wrapped and (not modules or contains(module)) else []
    return first + [
        (part, part) for part in module.modules() if part is not module and is_fully_sharded(part) and contains(part)
    ]


class _Part(NamedTuple):
    """A tower to call in the wrapper, and the module whose `forward` it replaces."""

    module: Any
    tower: Callable[..., Any]


def _through(model: Callable[..., Any], part: _Part, *args: Any, **kwargs: Any) -> Any:
    """Calls the wrapper. During this call, the tower replaces `module.forward`."""
    own = vars(part.module)
    before = own.get("forward")  # set on the instance by Accelerate

    def restore() -> None:
        own.pop("forward", None)
        if before is not None:
            own["forward"] = before

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()  # the tower may call the module
        return part.tower(*args, **kwargs)

    own["forward"] = forward
    try:
        return model(*args, **kwargs)
    finally:
        restore()


def _check_towers(towers: Towers) -> list[tuple[Callable[..., Any], Any]]:
    """Raises if there are several processes and no wrapper would average the gradients of a trained tower."""
    if default_group() is not None:
        for i, (tower, _) in enumerate(towers):
            modules = modules_of(tower)
            learns = any(parameter.requires_grad for module in modules for parameter in module.parameters())
            if learns and not find_distributed_modules(modules):
                raise ValueError(
                    f"towers[{i}] must belong to the model, or be wrapped in DDP or FSDP2 itself, because there are "
                    f"{dist.get_world_size()} processes and its gradients would not be averaged; got {type(tower).__name__}"
                )
    return list(towers)


@torch.no_grad()
def encode_towers(towers: Towers, chunk_size: int | Sequence[int]) -> list[Tensor]:  # of (N, D)
    """Computes the embeddings of each tower in chunks and without gradients, for evaluation."""
    sizes = chunk_size if isinstance(chunk_size, Sequence) else [chunk_size] * len(towers)
    embeddings = []
    for i, ((tower, inputs), size) in enumerate(zip(towers, sizes, strict=True)):
        parameters = [parameter for module in modules_of(tower) for parameter in module.parameters()]
        device = parameters[0].device if parameters else None
        source = as_source(inputs, f"towers[{i}][1]", device)
        spans = [(start, min(start + size, len(source))) for start in range(0, len(source), size)]
        outputs = (call(tower, chunk) for chunk in source.chunks(spans, device))
        embeddings.append(torch.cat([as_encoded(output, f"towers[{i}]").embeddings for output in outputs]))
    return embeddings


# ----------------------------------------------------------------------------------------------------------------------
# A learned temperature for a loss that runs its backward pass in the trainer's forward pass.


class LearnedScale(nn.Module):
    """1 / temperature, whose logarithm is a parameter.

    Its gradient is computed in the trainer's forward pass, before gradient accumulation and loss scaling apply their factors.
    So the gradient is kept and added to the graph of the loss that the trainer backpropagates.

    Args:
        initial: the initial value.
        largest: the upper bound.
    """

    gradient: Tensor | None = None

    def __init__(self, initial: float, largest: float) -> None:
        super().__init__()
        if not 0 < initial <= largest:
            raise ValueError(f"max_scale must be at least the initial scale, {initial}, got {largest}")
        self.bias = nn.Parameter(
            torch.tensor(math.log(initial))
        )  # named bias, because trainers do not apply weight decay to biases
        self.largest = largest

    def forward(self) -> Tensor:  # ()
        """Clamps the parameter and returns a copy of it as a separate leaf."""
        with torch.no_grad():
            self.bias.clamp_(max=math.log(self.largest))
        return self.bias.detach().requires_grad_()

    def keep(self, gradient: Tensor) -> None:
        """Keeps the gradient from the loss. It is averaged over ranks here, because no wrapper does that for this parameter."""
        if default_group() is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self.gradient = gradient

    def attach(self, loss: Tensor) -> Tensor:  # ()
        """Returns the loss with a graph through which backward also reaches the parameter."""
        assert self.gradient is not None, "the loss has been computed"
        gradient, self.gradient = self.gradient, None
        return loss + (self.bias - self.bias.detach()) * gradient


def differentiate(
    loss_of: Callable[[float | Tensor], Tensor], scale: float, learned: LearnedScale | None, *, with_backward: bool
) -> Tensor:  # ()
    """Computes the loss.

    With `with_backward`, it also computes the gradients of the embeddings (in `.grad`) and of the scale (in `learned`).
    """
    logarithm = None if learned is None else learned()
    loss = loss_of(scale if logarithm is None else logarithm.exp())
    if not with_backward:
        return loss
    with torch.autocast(loss.device.type, enabled=False):  # the dtypes of backward follow from forward
        loss.backward()  # type: ignore[no-untyped-call]
    if learned is not None:
        assert logarithm is not None
        assert logarithm.grad is not None
        learned.keep(logarithm.grad)
    return loss.detach()


# ----------------------------------------------------------------------------------------------------------------------
# Late interaction, for sentence-transformers and PyLate.


def ranking_loss(
    columns: Sequence[Tensor],  # (N, L, D) each: queries, their documents, hard negatives of each query
    masks: Sequence[Tensor | None],  # (N, L) each
    scale: float,
    *,
    normalize: bool = False,
    gather: bool = False,
    reduction: Reduction = "mean",
    backend: Backend = "auto",
    with_backward: bool = False,
) -> Tensor:  # ()
    """Computes the loss of all columns. `with_backward` stores the gradients in the `.grad` of the leaves of the columns."""
    if len(columns) < 2:
        raise ValueError(f"the dataset must have at least two columns, queries and their documents, got {len(columns)}")

    def loss(scale: float | Tensor) -> Tensor:
        return mb.late_interaction_loss(
            columns[0],
            columns[1],
            scale=scale,
            query_mask=masks[0],
            document_mask=masks[1],
            negatives=[mb.Tokens(column, mask) for column, mask in zip(columns[2:], masks[2:], strict=True)],
            normalize=normalize,
            reduction=reduction,
            group=default_group() if gather else None,
            backend=backend,
        )

    return differentiate(loss, scale, None, with_backward=with_backward)


def candidate_scores(
    queries_embeddings: Tensor,  # (N, Lq, D)
    documents_embeddings: Tensor,  # (N, K, Ld, D)
    queries_mask: Tensor | None = None,  # (N, Lq)
    documents_mask: Tensor | None = None,  # (N, K, Ld)
    *,
    normalize: bool = False,
) -> Tensor:  # (N, K)
    """Computes the MaxSim scores of each query with its own K documents.

    It has the arguments of `colbert_kd_scores` in both libraries. The dot products of some queries are in memory at a time,
    and backward computes them again.
    """
    documents = documents_embeddings.flatten(0, 1)
    masks = queries_mask, None if documents_mask is None else documents_mask.flatten(0, 1)
    return Similarities(queries_embeddings, documents, 1.0, masks=masks, normalize=normalize).of_own()[0]


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
