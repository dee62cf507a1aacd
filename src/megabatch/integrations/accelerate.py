"""The cached step in a training loop with Accelerate: its accumulation, precision, scaler, DDP or FSDP2."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megabatch.cached import cached_backward as plain_cached_backward
from megabatch.integrations.wrapping import Towers, everyone, routed, whole

__all__ = ["cached_backward", "everyone", "whole"]

_INSTEAD = {
    "FSDP": "; fsdp_version: 2 in the accelerator's settings is FSDP2",
    "DEEPSPEED": ", whose backward pass would reduce gradients once for each chunk. FSDP2 shards what ZeRO shards and reduces "
    "once a step: fsdp_version: 2 in the accelerator's settings, with fsdp_offload_params as for ZeRO-Offload",
}
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "FSDP")


def cached_backward(
    accelerator: Any,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor],
    towers: Towers,
    **options: Any,
) -> Tensor:  # ()
    """Replaces the forward pass, the loss and `accelerator.backward(loss)`: the same gradients, one chunk at a time.

    The loss is divided by the accelerator's accumulation steps and scaled by its scaler. Towers and loss run under its
    autocast. Gradients are reduced only in the last step of `accelerator.accumulate(model)`.

    Args:
        accelerator: an `accelerate.Accelerator`; one process, DDP or FSDP2.
        model: the module returned by `accelerator.prepare`, which contains the towers; None if each tower is itself prepared.
        loss_fn: called once, with the (N, D) embeddings of each tower; returns a scalar. Pass `group=everyone()` to its loss
            for negatives of all processes, and with FSDP2 `whole(parameter)` instead of a parameter of the model.
        towers: pairs (tower, inputs), as for `megabatch.cached_backward`. A tower may be a part of the model
            (`accelerator.unwrap_model(model).text`) or a method of it; it is called through the wrapper.
        options: further arguments of `megabatch.cached_backward`: `chunk_size`, `budget` or `budget_fraction`, `embeddings`,
            `on_chunk`.

    Returns:
        The loss, detached and not divided.
    """
    kind = accelerator.distributed_type.value
    if kind not in _KINDS or (kind == "FSDP" and not accelerator.is_fsdp2):
        name = "FSDP in its first version" if kind == "FSDP" else kind
        raise ValueError(f"accelerator must use one process, DDP or FSDP2, got {name}{_INSTEAD.get(kind, '')}")
    steps: int = accelerator.gradient_accumulation_steps
    with accelerator.autocast():
        share = plain_cached_backward(
            lambda *found: loss_fn(*found) / steps,
            routed(towers, model),
            scaler=accelerator.scaler,
            sync=accelerator.sync_gradients or bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")),
            **options,
        )
    return share * steps
