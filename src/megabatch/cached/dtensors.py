"""Tensors that FSDP2 shards over ranks (DTensor), without an import of DTensor, which is slow."""

import sys

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. If its module was never imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def working_device(parameter: Tensor) -> torch.device:
    """The device that a module with this parameter computes on. FSDP2 may keep the parameter itself on the host."""
    if is_sharded(parameter) and parameter.device.type == "cpu":
        kind = parameter.device_mesh.device_type  # type: ignore[attr-defined]
        if kind != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device
