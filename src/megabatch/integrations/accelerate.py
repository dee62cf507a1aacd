"""The cached step in a loop of Accelerate's: its accumulation, its precision and scaler, its DDP or FSDP2."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from megabatch.cached import Budget, Progress
from megabatch.cached import cached_backward as plain_cached_backward
from megabatch.integrations.wrapping import Towers, everyone, routed, whole

__all__ = ["cached_backward", "everyone", "whole"]

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP")


def cached_backward(
    accelerator: Any,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor],
    towers: Towers,
    *,
    chunk_size: int | Sequence[int] = 256,
    budget: Budget = None,
    budget_fraction: float | None = None,
    embeddings: Literal["device", "host"] = "device",
    on_chunk: Callable[[Progress], None] | None = None,
) -> Tensor:  # ()
    """In place of the forward pass, the loss and `accelerator.backward(loss)`: the same gradients, one chunk at a time.

    As there, the loss is divided by the accelerator's accumulation steps and scaled by its scaler, towers and loss run under
    its autocast, and gradients are reduced in the last step of `accelerator.accumulate(model)` alone.

    Args:
        accelerator: an `accelerate.Accelerator`; one process, DDP or FSDP2.
        model: what `accelerator.prepare` returned, to which the towers belong; None where each tower is itself prepared.
        loss_fn: called once, with the (N, D) embeddings of each tower; returns a scalar. For negatives of all processes it
            passes `group=everyone()` to its loss, and where FSDP2 is used, `whole(parameter)` for a parameter of the model.
        towers: pairs (tower, inputs), as for `megabatch.cached_backward`. A tower may be a part of the model
            (`accelerator.unwrap_model(model).text`) or a method of it; it is called through the wrapper.
        chunk_size: samples a tower encodes at once; one number, or one for each tower.
        budget: bytes for graphs that are kept from the first pass, as for `megabatch.cached_backward`.
        budget_fraction: the same as a fraction of the free memory.
        embeddings: "device", or "host" to keep them there while the towers work.
        on_chunk: called with a `Progress` after each chunk.

    Returns:
        The loss, detached and not divided.
    """
    kind = accelerator.distributed_type.value
    if kind not in _KINDS or (kind == "FSDP" and not accelerator.is_fsdp2):
        name = "FSDP in its first version" if kind == "FSDP" else kind
        raise ValueError(f"accelerator must use one process, DDP or FSDP2, got {name}")
    steps: int = accelerator.gradient_accumulation_steps
    with accelerator.autocast():
        share = plain_cached_backward(
            lambda *found: loss_fn(*found) / steps,
            routed(towers, model),
            chunk_size=chunk_size,
            budget=budget,
            budget_fraction=budget_fraction,
            scaler=accelerator.scaler,
            sync=accelerator.sync_gradients or bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")),
            embeddings=embeddings,
            on_chunk=on_chunk,
        )
    return share * steps
