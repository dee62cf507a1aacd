"""In which type towers compute: parameters stay as they are, autocast does the rest, and fp16 has its gradients scaled."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """For "bf16" and "fp16"; with "fp32" parameters' own type is what is computed in."""
    if precision not in _TYPES:
        return nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """For fp16, whose smallest numbers are too large for gradients."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
