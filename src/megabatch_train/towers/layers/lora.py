"""LoRA with PEFT: trains pairs of small matrices that are added to the linear layers of a model.

The weights of the model are frozen. A saved adapter has the file names and tensor names of PEFT, so
`PeftModel.from_pretrained(model, FOLDER)` loads it. If the model has `nn.MultiheadAttention`, `replace_attention` comes first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras
from megabatch.cached.second_pass import parameters_in
from megabatch_train.towers.tower import LoraConfig

NAME = "default"  # name of the adapter in PEFT
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of names in PEFT's files
PARTS = ("lora_A", "lora_B")
ALL = "all-linear"


# ----------------------------------------------------------------------------------------------------------------------
# Attention whose projections are linear layers.
#
# `nn.MultiheadAttention` reads the weights of its projections, so adapters of its layers would have no effect. PEFT adds the
# adapters to the weights before each call and subtracts them after it. This rounds the frozen weights, makes new parameters in
# each call, which FSDP2 and `torch.compile` do not support, and excludes dropout. PEFT 0.21 adds the adapter of the output
# projection twice.


class ProjectedAttention(nn.Module):
    """Equals an `nn.MultiheadAttention`, but calls its projections as the linear layers `in_proj` and `out_proj`."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.batch_first = attention.num_heads, attention.dropout, attention.batch_first
        self.in_proj, self.out_proj = (
            _linear(weight, bias)
            for weight, bias in (
                (attention.in_proj_weight, attention.in_proj_bias),
                (attention.out_proj.weight, attention.out_proj.bias),
            )
        )
        self.train(attention.training)

    def forward(
        self,
        query: Tensor,  # (n, L, E), or (L, n, E) if not `batch_first`
        key: Tensor,  # (n, S, E)
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,  # (L, S) or (n · heads, L, S)
    ) -> tuple[Tensor, None]:
        """Returns the attention output, and None in place of the attention weights."""
        if key_padding_mask is not None:
            raise ValueError("key_padding_mask must be None in a model with LoRA adapters, got a mask; attn_mask is supported")
        of_query = self.in_proj(query)
        of_key = of_query if key is query else self.in_proj(key)
        of_value = of_key if value is key else self.in_proj(value)
        chosen = (part.chunk(3, dim=-1)[place] for place, part in enumerate((of_query, of_key, of_value)))
        q, k, v = (self._split_heads(part) for part in chosen)  # (n, heads, L or S, E / heads)
        if attn_mask is not None:
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(q.dtype)  # PyTorch inverts boolean masks
            attn_mask = attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:]) if attn_mask.dim() == 3 else attn_mask
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout).transpose(1, 2).flatten(2)  # (n, L, E)
        return self.out_proj(output if self.batch_first else output.transpose(0, 1)), None

    def _split_heads(self, states: Tensor) -> Tensor:
        states = states if self.batch_first else states.transpose(0, 1)
        return states.reshape(*states.shape[:2], self.num_heads, -1).transpose(1, 2)


def _linear(weight: Any, bias: Any) -> nn.Linear:
    """Returns a linear layer with these parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    return layer


def replace_attention(model: nn.Module) -> None:
    """Replaces each `nn.MultiheadAttention` with inputs of one dimension by a `ProjectedAttention`, in place."""
    for parent in list(model.modules()):
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            continue  # these read the parameters of their attention
        for name, part in list(parent.named_children()):
            if type(part) is nn.MultiheadAttention and part.in_proj_weight is not None:
                if part.bias_k is None and not part.add_zero_attn:
                    setattr(parent, name, ProjectedAttention(part))


# ----------------------------------------------------------------------------------------------------------------------
# Adapters.


def inject(model: Any, config: LoraConfig, name: str = "") -> None:
    """Adds adapters to a model in place, and freezes its other weights.

    Args:
        model: a model of transformers or open_clip.
        config: configuration of the adapters, with a rank above 0.
        name: name of the model on the hub, which PEFT records.
    """
    peft = extras.load("peft", purpose="LoRA")
    replace_attention(model)
    layers = ALL if hasattr(model, "config") else [key for key, part in model.named_modules() if isinstance(part, nn.Linear)]
    about = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.targets) or layers,
        task_type="FEATURE_EXTRACTION" if hasattr(model, "config") else None,
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
    attentions = [name for name, part in module.named_modules() if isinstance(part, ProjectedAttention)]
    for attention in attentions:
        for kind in ("weight", "bias"):
            if (key := f"{attention}.in_proj.{kind}") in merged:
                merged[f"{attention}.in_proj_{kind}"] = merged.pop(key)
    return merged


def _find_adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if hasattr(part, PARTS[0]) and hasattr(part, "base_layer"):
            yield name, part


def freeze_unused(encoder: nn.Module, *inputs: dict[str, Tensor]) -> None:
    """Freezes parameters that no embedding depends on, such as a pooler's. DDP would wait for their gradients forever.

    Args:
        encoder: the encoder.
        inputs: inputs of one side, or of each side if the encoder serves both.
    """
    training = encoder.training
    encoder.eval()  # evaluation draws no random numbers
    with torch.enable_grad():
        reached = parameters_in([encoder(**of_side) for of_side in inputs])
    assert reached is not None, "no reentrant checkpoints"
    for parameter in encoder.parameters():
        if id(parameter) not in reached:
            parameter.requires_grad_(False)
    encoder.train(training)
