"""Trained models for other programs: folders that transformers, sentence-transformers, open_clip and onnxruntime load."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from megabatch import towers
from megabatch.export import clip, onnx
from megabatch.export.card import write_card
from megabatch.export.hub import check_token, push
from megabatch.towers import Pair, huggingface, lora, saved
from megabatch.towers.sentence_transformer import write_tensors

FORMATS = ("hf", "open_clip", "onnx")
__all__ = ["FORMATS", "check_token", "export", "push", "write_card"]


def export(pair: Pair, form: str, folder: Path) -> None:
    """Writes the model in one of `FORMATS`.

    Args:
        pair: in evaluation mode, on the CPU.
        form: "hf" for encoders of transformers and CLIP models of open_clip, "open_clip" for its models, "onnx" for all.
        folder: created if it does not exist.
    """
    family = pair.name.partition(":")[0]
    writers: dict[str, dict[str, Callable[[Pair, Path], object]]] = {
        "hf": {"hf": _transformers, "hf-config": _transformers, "open_clip": clip.export},
        "open_clip": {"open_clip": _open_clip},
        "onnx": dict.fromkeys(("hf", "hf-config", "open_clip", "small"), onnx.export),
    }
    if family not in writers[form]:
        possible = " or ".join(name for name in FORMATS if family in writers[name])
        raise ValueError(f"--to must be {possible} for a model {pair.name!r}, got {form}")
    folder.mkdir(parents=True, exist_ok=True)
    writers[form][family](pair, folder)


def _open_clip(pair: Pair, folder: Path) -> None:
    towers.save(pair, folder).replace(folder / "open_clip_model.safetensors")  # the name on the hub


def _transformers(pair: Pair, folder: Path) -> None:
    """One text encoder, or one folder for each of two. Adapters are added to the weights."""
    if pair.lora is not None:
        pair = dataclasses.replace(pair, lora=dataclasses.replace(pair.lora, merge=True))
    if pair.first.module is pair.second.module:
        towers.save(pair, folder)
        return
    for tower in pair.towers:
        place, module = folder / tower.kind, tower.module
        assert tower.keep is not None, "towers of transformers have files"
        tower.keep(place)
        model = module.get_submodule("model")
        weights = model.state_dict() if pair.lora is None else lora.merged(model, model.state_dict())
        write_tensors(place / saved.WEIGHTS, weights)
    write_tensors(folder / "image" / "projection.safetensors", {"weight": pair.first.module.get_parameter("head.weight")})
    huggingface.describe(pair, folder / "text")
