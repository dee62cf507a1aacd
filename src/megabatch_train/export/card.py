"""The model card of an export: how to load it, and the data, batch, evaluation, curves and settings of its run."""

import json
from pathlib import Path

from megabatch import file_io
from megabatch_train.data import load as data
from megabatch_train.display import plots, report, tables
from megabatch_train.display.report import setting
from megabatch_train.evaluation import results
from megabatch_train.export.formats import write_code
from megabatch_train.names import sanitize
from megabatch_train.towers import Pair
from megabatch_train.towers.huggingface_inputs import HashedWords, ImageInputs, TokenInputs
from megabatch_train.towers.open_clip import split_name

NAME = "README.md"
# Code that loads a model from its folder, or by its name on the hub.
_OPEN_CLIP = """
import open_clip

model, _, transform = open_clip.create_model_and_transforms("{scheme}:{folder}")
tokenizer = open_clip.get_tokenizer("{scheme}:{folder}")
"""
_CLIP = """
import html

import ftfy
from transformers import CLIPModel, CLIPProcessor

model, processor = CLIPModel.from_pretrained("{folder}"), CLIPProcessor.from_pretrained("{folder}")


def cleaned(text):  # by open_clip's tokenizer in training, and not by transformers': quotation marks, ligatures, HTML
    return html.unescape(ftfy.fix_text(text))


tokens = processor(text=[cleaned("a dog’s tail")], padding=True, return_tensors="pt")
"""
_SENTENCES = """
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
queries, documents = model.encode_query(["a question"]), model.encode_document(["an answer"])
"""
_ENCODER = """
import torch
from megabatch_train.towers.huggingface_inputs import HashedWords
from transformers import AutoModel

model, words = AutoModel.from_pretrained("{folder}"), HashedWords({vocabulary}, {longest})
inputs = words.collate([words.prepare(text, None) for text in ("a question", "an answer")])
states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]  # (n, T, H), (n, T)
embeddings = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
"""
_TWO = """
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

image = Image.new("RGB", (256, 256), "red")  # or Image.open("photo.jpg").convert("RGB")
{pixels}

images = AutoModel.from_pretrained(folder + "/image")
projection = load_file(folder + "/image/projection.safetensors")["weight"]
states = images(pixel_values=pixels).last_hidden_state  # (n, places, H), or (n, H, h, w)
pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
image_embeddings = torch.nn.functional.normalize(pooled @ projection.T, dim=-1)
"""
_PROCESSED = """
from transformers import AutoImageProcessor

pixels = AutoImageProcessor.from_pretrained(folder + "/image")(images=[image], return_tensors="pt")["pixel_values"]
"""
_FITTED = """
import numpy
from megabatch_train.towers.huggingface_inputs import ImageInputs
from transformers import AutoConfig

processor = ImageInputs(AutoConfig.from_pretrained(folder + "/image"), None)
pixels = processor.prepare(torch.from_numpy(numpy.array(image)).permute(2, 0, 1), None)[None]
"""
_TEXTS = """
from sentence_transformers import SentenceTransformer

texts = SentenceTransformer(folder + "/text")
text_embeddings = texts.encode_document(["a photo of a cat"])
"""


def write_card(
    pair: Pair, form: str, folder: Path, *, run: Path | None, step: int | None = None, name: str | None = None
) -> Path:
    """Writes README.md, and its pictures if the run has curves.

    Args:
        pair: the exported model.
        form: its format.
        folder: of the export.
        run: the folder of its run; None for a model by name.
        step: of the run that the weights are from (default: its last one).
        name: on the hub (default: the folder).
    """
    parts = [_header(pair, form), f"# {(name or folder.resolve().name).rpartition('/')[2]}", _about(pair, run)]
    parts += ["## Use", *_use(pair, form, name or str(folder), on_hub=name is not None)]
    if run is not None:
        parts += _run(results.read_run(run), folder, step)
    path = folder / NAME
    file_io.write(path, lambda file: file.write(("\n\n".join(part for part in parts if part) + "\n").encode()))
    return path


def _header(pair: Pair, form: str) -> str:
    texts = pair.first.kind == pair.second.kind
    library = {"onnx": "onnx", "open_clip": "open_clip", "hf": "sentence-transformers" if texts else "transformers"}[form]
    lines = [
        f"library_name: {library}",
        f"pipeline_tag: {'sentence-similarity' if texts else 'zero-shot-image-classification'}",
        "tags: [contrastive, megabatch]",
    ]
    return "\n".join(["---", *lines, "---"])


def _about(pair: Pair, run: Path | None) -> str:
    sides = " and ".join(dict.fromkeys(f"{tower.kind}s" for tower in pair.towers))
    bias = "" if pair.logit_bias is None else f" and adds {tables.short(pair.logit_bias)}"
    told = f"Embeddings of {sides}, of unit length; the similarity of two is their product. Towers: `{_name(pair)}`."
    scaled = f"The loss multiplies similarities by {tables.short(pair.logit_scale)}{bias}."
    return " ".join([told, scaled, *(["Trained with megabatch."] if run is not None else [])])


def _name(pair: Pair) -> str:
    """The pair's name, without the places of folders on this machine."""
    family, colon, name = pair.name.partition(":")
    between, parts = ("@", [part for part in split_name(name) if part]) if family == "open_clip" else ("+", name.split("+"))
    return family + colon + between.join(Path(part).name if Path(part).is_absolute() else part for part in parts)


def _use(pair: Pair, form: str, folder: str, *, on_hub: bool) -> list[str]:
    prompts = [
        f"Texts of the {side} side begin with {json.dumps(pair.options[key])}."
        for side, key in (("first", "query_prompt"), ("second", "document_prompt"))
        if pair.options.get(key)
    ]
    images, texts = (getattr(tower.collate, "__self__", None) for tower in pair.towers)
    download = ["from huggingface_hub import snapshot_download", f"folder = snapshot_download({json.dumps(folder)})"]
    place = download if on_hub else [f"folder = {json.dumps(folder)}"]
    if form == "open_clip":
        code = _OPEN_CLIP.format(scheme="hf-hub" if on_hub else "local-dir", folder=folder)
    elif form == "onnx":
        code = write_code(pair, place)
    elif pair.name.startswith("open_clip:"):
        code = _CLIP.format(folder=folder)
    elif isinstance(images, ImageInputs):
        pixels = _FITTED if images.processor is None else _PROCESSED
        code = (
            "\n\n".join(place) + "\n" + _TWO.format(pixels=pixels.strip()) + (_TEXTS if isinstance(texts, TokenInputs) else "")
        )
    elif isinstance(texts, HashedWords):
        code = _ENCODER.format(folder=folder, vocabulary=texts.vocabulary, longest=texts.longest)
    else:
        code = _SENTENCES.format(folder=folder)
    return [f"```python\n{code.strip()}\n```", *prompts]


def _run(run: results.SavedRun, folder: Path, step: int | None) -> list[str]:
    """Data, batch, evaluation of the exported weights, curves and settings."""
    batch = f", in batches of {run.config['batch_size']:,} pairs" if "batch_size" in run.config else ""
    parts = ["## Training", f"Data: `{sanitize(run.training_data)}`{batch}." if run.training_data else ""]
    if step is not None:
        best = ", the step with the best evaluation" if run.best.get("step") == step else ""
        parts.append(f"The weights are from step {step:,}{best}.")
    if (table := setting(run)) is not None:
        parts.append(table.markdown())
    evaluations = [found for found in run.evaluations if step in (None, found["step"])]
    if evaluations:
        last = evaluations[-1]
        part = "the held-out part of " if run.config.get("holdout") else ""
        on = f" on {part}`{sanitize(run.test_data[0])}`" if run.test_data else ""
        told = tables.table(last["evaluation"]).markdown()
        parts += ["## Evaluation", f"After step {last['step']:,}{on}:", told]
    if run.problems:
        parts += ["## Problems in training", "\n".join(f"- {problem}" for problem in run.problems)]
    if plots.available() and (drawn := [one for one in (report.loss(run), report.recalls(run)) if one is not None]):
        parts.append("## Curves")
        for number, (described, figure) in enumerate(drawn, 1):
            plots.save(figure, folder / f"curve_{number}.png")
            parts.append(f"![{described}](curve_{number}.png)")
    if run.config_text:
        parts += ["## Settings", f"```toml\n{sanitize(run.config_text).strip()}\n```"]
    credits = data.credits(run.training_data)
    return [*parts, *(["## Credits", *credits] if credits else [])]
