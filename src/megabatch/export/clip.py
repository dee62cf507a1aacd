"""A CLIP model of open_clip as `CLIPModel` of transformers, with tokenizer and image processor."""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch.data import cache
from megabatch.export.onnx import TOLERANCE, sample_inputs
from megabatch.towers import Pair, Tower

LOG = logging.getLogger("megabatch")
_PURPOSE = "Export to transformers"
_BLOCK = {  # of a transformer
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_NAMES = {
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",  # spelled so in transformers
    "visual.ln_post": "vision_model.post_layernorm",
    "logit_scale": "logit_scale",
}
_RESBLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")


def export(pair: Pair, folder: Path) -> None:
    """Writes the model; an error for models that are no plain CLIP with a vision transformer.

    The embeddings of both are compared before anything is written.
    """
    transformers = extras.load("transformers", extra="huggingface", purpose=_PURPOSE)
    module: Any = pair.first.module
    described = _described(pair)
    try:
        config = _config(transformers, described, module.model)
        model = transformers.CLIPModel(config)
        state = converted(module.model.state_dict())
        state["logit_scale"] = torch.tensor(math.log(pair.logit_scale))
        model.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"--to hf must have a CLIP model with a vision transformer and a plain text transformer, got {pair.name!r}; "
            f"--to open_clip and --to onnx take it ({str(error).splitlines()[0]})"
        ) from error
    model.eval()
    _compare(model.get_image_features, pair.first, "pixel_values")
    _compare(model.get_text_features, pair.second, "input_ids")
    model.save_pretrained(folder)
    _processor(transformers, module.model).save_pretrained(folder)
    _write_tokenizer(transformers, pair.second, config.text_config.max_position_embeddings, folder)


def _described(pair: Pair) -> dict[str, Any]:
    open_clip = extras.load("open_clip", extra="open_clip", purpose=_PURPOSE)
    found: dict[str, Any] = open_clip.get_model_config(pair.name.partition(":")[2].partition("@")[0])
    return found


def _config(transformers: Any, described: dict[str, Any], model: Any) -> Any:
    vision, text = described["vision_cfg"], described["text_cfg"]
    activation = "quick_gelu" if described.get("quick_gelu") else "gelu"
    shared = {"projection_dim": described["embed_dim"], "hidden_act": activation, "layer_norm_eps": 1e-5}
    width = vision["width"]
    return transformers.CLIPConfig(
        projection_dim=described["embed_dim"],
        vision_config={
            **shared,
            "hidden_size": width,
            "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": width // vision.get("head_width", 64),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
        text_config={
            **shared,
            "vocab_size": model.token_embedding.num_embeddings,
            "hidden_size": text["width"],
            "intermediate_size": int(text["width"] * text.get("mlp_ratio", 4.0)),
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": model.context_length,
            # Any value but 2, which old configs have: the embedding is that of the first end token.
            "bos_token_id": model.token_embedding.num_embeddings - 2,
            "eos_token_id": model.token_embedding.num_embeddings - 1,
            "pad_token_id": model.token_embedding.num_embeddings - 1,
        },
    )


def converted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip model by transformers' names."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in ("visual.proj", "text_projection"):
            found[{"visual.proj": "visual_projection"}.get(name, name) + ".weight"] = value.T.contiguous()
        elif block := _RESBLOCK.fullmatch(name):
            prefix = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}"
            inner, _, kind = block[3].rpartition(".")
            if kind.startswith("in_proj_"):
                for part, piece in zip("qkv", value.chunk(3), strict=True):
                    found[f"{prefix}.self_attn.{part}_proj.{kind.removeprefix('in_proj_')}"] = piece.contiguous()
            else:
                found[f"{prefix}.{_BLOCK[inner]}.{kind}"] = value
        elif name in _NAMES:
            found[_NAMES[name]] = value
        elif name != "attn_mask":
            inner, _, kind = name.rpartition(".")
            found[f"{_NAMES[inner]}.{kind}"] = value
    return found


@torch.no_grad()
def _compare(features: Any, tower: Tower, name: str) -> None:
    inputs = sample_inputs(tower)
    made = features(**{name: next(iter(inputs.values()))})
    made = getattr(made, "pooler_output", made)  # transformers 5 returns the states too
    worst = (torch.nn.functional.normalize(made, dim=-1) - tower.module(**inputs)).abs().max().item()
    if not worst <= TOLERANCE:
        raise ValueError(
            f"--to hf must have a model that transformers' CLIPModel computes too, got a difference of {worst:.1e} in the "
            f"embeddings of {tower.kind}s; --to open_clip and --to onnx take it"
        )
    LOG.info("embeddings of %ss by transformers' CLIPModel differ from the model's by at most %.1e", tower.kind, worst)


def _processor(transformers: Any, model: Any) -> Any:
    visual = model.visual
    size = visual.image_size if isinstance(visual.image_size, int) else visual.image_size[0]
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=list(visual.image_mean),
        image_std=list(visual.image_std),
    )


def _write_tokenizer(transformers: Any, tower: Tower, longest: int, folder: Path) -> None:
    """CLIP's tokenizer from the vocabulary of open_clip's; another one is left to the user."""
    texts: Any = getattr(tower.collate, "__self__", None)
    own: Any = getattr(texts, "tokenizer", None)
    if not hasattr(own, "bpe_ranks"):
        return
    # The last two are the tokens before and after a text, which transformers looks for by its own names.
    words = [*list(own.encoder)[:-2], "<|startoftext|>", "<|endoftext|>"]
    vocabulary = json.dumps({word: number for number, word in enumerate(words)})
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in own.bpe_ranks)])
    for name, text in (("vocab.json", vocabulary), ("merges.txt", merges)):
        cache.write(folder / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    transformers.CLIPTokenizer(*files, model_max_length=longest).save_pretrained(folder)
