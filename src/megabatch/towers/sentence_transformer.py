"""The files that make a folder with a transformers encoder a model of sentence-transformers.

They describe pooling, the projection and unit length, in the format that all versions of sentence-transformers read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megabatch import extras
from megabatch.data import cache

_LIBRARY = "sentence_transformers.models"


def write(folder: Path, width: int, longest: int, head: nn.Module, prompts: Mapping[str, str], *, last_token: bool) -> None:
    """Writes the files beside an encoder's own.

    Args:
        folder: with config, weights and tokenizer.
        width: of the encoder's states.
        longest: tokens of a text.
        head: a linear layer without bias after the pooling, or the identity.
        prompts: that texts begin with, by the names "query" and "document".
        last_token: whether the state of the last token is the text's, and not the mean of all.
    """
    pooling = {"pooling_mode_mean_tokens": not last_token, "pooling_mode_lasttoken": last_token}
    modules: list[tuple[str, Mapping[str, Any] | None]] = [
        ("Transformer", None),
        ("Pooling", {"word_embedding_dimension": width, **pooling}),
    ]
    if isinstance(head, nn.Linear):
        projection = {"in_features": width, "out_features": head.out_features, "bias": False}
        modules.append(("Dense", {**projection, "activation_function": "torch.nn.modules.linear.Identity"}))
    modules.append(("Normalize", {}))
    described = []
    for number, (name, config) in enumerate(modules):
        path = f"{number}_{name}" if config is not None else ""
        described.append({"idx": number, "name": str(number), "path": path, "type": f"{_LIBRARY}.{name}"})
        if config is not None:
            _write(folder / path / "config.json", config)
        if name == "Dense":
            write_tensors(folder / path / "model.safetensors", {"linear.weight": head.get_parameter("weight")})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": dict(prompts), "similarity_fn_name": "cosine"})
    _write(folder / "modules.json", described)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file of PyTorch's format."""
    safetensors = extras.load("safetensors.torch", extra="train", purpose="Saving a model")
    data = safetensors.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, {"format": "pt"})
    cache.write(path, lambda file: file.write(data))


def _write(path: Path, content: Any) -> None:
    cache.write(path, lambda file: file.write(json.dumps(content, indent=2).encode()))
