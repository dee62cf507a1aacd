"""Numeric types of a run: autocast, the gradient scaler of fp16, and TF32 for products that stay in float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for "bf16" and "fp16"; nothing for "fp32". Parameters keep their dtype."""
    if precision not in AUTOCAST_TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_TYPES[precision])


def grad_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """A scaler for fp16, whose range is too small for gradients; None for other types."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


@contextmanager
def fast_products(precision: str, device: torch.device) -> Iterator[None]:
    """Lets CUDA compute products that autocast leaves in float32 in TF32, and restores the setting afterwards.

    With "fp32" nothing changes: towers and loss are float32 as PyTorch is set. The loss under autocast has autocast's type.
    """
    before = None
    if device.type == "cuda" and precision in AUTOCAST_TYPES:
        with suppress(RuntimeError):  # raised once PyTorch's newer settings are in use, which are then left as they are
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
