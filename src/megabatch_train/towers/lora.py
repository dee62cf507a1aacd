"""LoRA with PEFT: trains pairs of small matrices that are added to the linear layers of a transformers model.

The weights of the model are frozen. A saved adapter has the file names and tensor names of PEFT, so
`PeftModel.from_pretrained(model, FOLDER)` loads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras
from megabatch_train.towers.tower import LoraConfig

NAME = "default"  # name of the adapter in PEFT
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of names in PEFT's files
PARTS = ("lora_A", "lora_B")
ALL = "all-linear"


def inject(model: Any, config: LoraConfig, name: str = "") -> None:
    """Adds adapters to a transformers model in place, and freezes its other weights.

    Args:
        model: a model from `transformers.AutoModel`.
        config: configuration of the adapters, with a rank above 0.
        name: name of the model on the hub, which PEFT records.
    """
    peft = extras.load("peft", purpose="LoRA")
    about = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets) or ALL,
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=name,
    )
    try:
        peft.inject_adapter_in_model(about, model, NAME)
    except ValueError as error:
        if not config.targets:
            raise
        named = ", ".join(
            sorted({key.rpartition(".")[2] for key, part in model.named_modules() if isinstance(part, nn.Linear)})
        )
        raise ValueError(
            f"lora.targets must be endings of names of linear layers, here {named}; got {config.targets}"
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()  # half precision would round small updates to zero


def check_targets(models: Sequence[nn.Module], config: LoraConfig) -> None:
    """Raises an error if a target matches no layer of any model."""
    adapted = [f".{name}" for model in models for name, _ in _find_adapted(model)]
    unknown = [target for target in config.targets if not any(name.endswith(f".{target}") for name in adapted)]
    if unknown:
        raise ValueError(
            f"lora.targets must be endings of names of linear layers, got {', '.join(unknown)}, which no layer has"
        )


def store_frozen(modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Casts frozen weights to the dtype that the towers compute in. Quantized and float64 weights stay unchanged."""
    for module in modules:
        for parameter in module.parameters():
            if not parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != torch.float64:
                parameter.data = parameter.data.to(dtype)


def quantization_options(how: str) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for quantized weights."""
    if how == "none":
        return {}
    transformers = extras.load("transformers", purpose="LoRA")
    if not extras.is_installed("bitsandbytes"):
        raise ModuleNotFoundError(
            f'lora.quantize = "{how}" needs the package "bitsandbytes", which is not installed; pip install bitsandbytes '
            'installs it, and lora.quantize = "none" does not need it'
        )
    options: dict[str, Any] = {"load_in_8bit": True}
    if how == "nf4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    return {"quantization_config": transformers.BitsAndBytesConfig(**options), "device_map": {"": device}}


def find_trained(module: nn.Module) -> set[str]:
    """Returns the names of the tensors in a module's state that training changes: trained weights and buffers."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return trained | ({name for name, _ in module.named_buffers()} & set(module.state_dict()))


def adapter(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the adapters among the weights of a model by their names in PEFT."""
    return {
        PREFIX + key.replace(f".{NAME}.", "."): value
        for key, value in weights.items()
        if any(f".{part}.{NAME}." in key for part in PARTS)
    }


def merge_adapters(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a tower or model by the names of the original model, with each adapter added to its layer."""
    merged = {
        key.replace(".base_layer.", "."): value
        for key, value in weights.items()
        if not any(f".{part}." in key for part in PARTS)
    }
    for name, layer in _find_adapted(module):
        first, second = (weights[f"{name}.{part}.{NAME}.weight"] for part in PARTS)
        wide = torch.promote_types(first.dtype, torch.float32)
        delta = layer.scaling[NAME] * (second.to(wide) @ first.to(wide))
        key = f"{name}.weight"
        base = merged[key]
        merged[key] = (base.to(wide) + (delta.T if layer.fan_in_fan_out else delta)).to(base.dtype).contiguous()
    return merged


def _find_adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if hasattr(part, PARTS[0]) and hasattr(part, "base_layer"):
            yield name, part
