"""The model card of an export: how to load it, and the data, batch, evaluation, curves and settings of its run."""

import json
from pathlib import Path

from megabatch.data import cache
from megabatch.data import load as data
from megabatch.display import metrics, numbers, plots
from megabatch.export.onnx import sample_inputs
from megabatch.names import shown
from megabatch.report import curves, saved_run
from megabatch.report.page import setting
from megabatch.towers import Pair, Tower
from megabatch.towers.huggingface_inputs import Tokens

NAME = "README.md"
# Code that loads a model from its folder, or by its name on the hub.
_DOWNLOADED = """
from huggingface_hub import snapshot_download

folder = snapshot_download("{folder}")
"""
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
from transformers import AutoModel

model = AutoModel.from_pretrained("{folder}")  # tokens are the hashed words of `megabatch.towers`
states = model(input_ids=tokens, attention_mask=mask).last_hidden_state  # (n, T, H)
embeddings = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
"""
_TWO = """
import torch
from safetensors.torch import load_file
from transformers import AutoModel

images = AutoModel.from_pretrained(folder + "/image")
projection = load_file(folder + "/image/projection.safetensors")["weight"]
states = images(pixel_values=pixels).last_hidden_state  # (n, places, H), or (n, H, h, w)
pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
image_embeddings = torch.nn.functional.normalize(pooled @ projection.T, dim=-1)
"""
_TEXTS = """
from sentence_transformers import SentenceTransformer

texts = SentenceTransformer(folder + "/text")
text_embeddings = texts.encode_document(["a photo of a cat"])
"""
_SESSION = """
session = onnxruntime.InferenceSession(folder + "/{kind}.onnx")
{kind}_embeds = session.run(None, {{{inputs}}})[0]
"""


def write_card(pair: Pair, form: str, folder: Path, *, run: Path | None, name: str | None = None) -> Path:
    """Writes README.md, and its pictures if the run has curves.

    Args:
        pair: the exported model.
        form: its format.
        folder: of the export.
        run: the folder of its run; None for a model by name.
        name: on the hub (default: the folder).
    """
    parts = [_header(pair, form), f"# {(name or folder.resolve().name).rpartition('/')[2]}", _about(pair, run)]
    parts += ["## Use", *_use(pair, form, name or str(folder), on_hub=name is not None)]
    if run is not None:
        parts += _run(saved_run.read(run), folder)
    path = folder / NAME
    cache.write(path, lambda file: file.write(("\n\n".join(part for part in parts if part) + "\n").encode()))
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
    bias = "" if pair.logit_bias is None else f" and adds {numbers.short(pair.logit_bias)}"
    told = f"Embeddings of {sides}, of unit length; the similarity of two is their product. Towers: `{pair.name}`."
    scaled = f"The loss multiplies similarities by {numbers.short(pair.logit_scale)}{bias}."
    return " ".join([told, scaled, *(["Trained with megabatch."] if run is not None else [])])


def _use(pair: Pair, form: str, folder: str, *, on_hub: bool) -> list[str]:
    prompts = [
        f"Texts of the {side} side begin with {json.dumps(pair.options[key])}."
        for side, key in (("first", "query_prompt"), ("second", "document_prompt"))
        if pair.options.get(key)
    ]
    texts = getattr(pair.second.collate, "__self__", None)
    files = _DOWNLOADED.format(folder=folder) if on_hub else f'folder = "{folder}"\n'
    if form == "open_clip":
        code = _OPEN_CLIP.format(scheme="hf-hub" if on_hub else "local-dir", folder=folder)
    elif form == "onnx":
        towers = {tower.kind: tower for tower in pair.towers}
        sessions = [_SESSION.format(kind=kind, inputs=_inputs(tower)) for kind, tower in towers.items()]
        code = f"import onnxruntime\n\n{files}" + "".join(sessions)
        prompts.append("Inputs are those of the model's own preprocessing, whose files are beside.")
    elif pair.name.startswith("open_clip:"):
        code = _CLIP.format(folder=folder)
    elif pair.first.kind == pair.second.kind:
        code = (_SENTENCES if isinstance(texts, Tokens) else _ENCODER).format(folder=folder)
    else:
        code = files + _TWO + (_TEXTS if isinstance(texts, Tokens) else "")
    return [f"```python\n{code.strip()}\n```", *prompts]


def _inputs(tower: Tower) -> str:
    """The inputs of an ONNX session, as a dict's items."""
    return ", ".join(f'"{name}": {name}' for name in sample_inputs(tower))


def _run(run: saved_run.SavedRun, folder: Path) -> list[str]:
    """Data, batch, evaluation, curves and settings."""
    batch = f", in batches of {run.config['batch_size']:,} pairs" if "batch_size" in run.config else ""
    parts = ["## Training", f"Data: `{shown(run.training_data)}`{batch}." if run.training_data else ""]
    if (table := setting(run)) is not None:
        parts.append(table.markdown())
    if run.evaluations:
        last = run.evaluations[-1]
        part = "the held-out part of " if run.config.get("holdout") else ""
        on = f" on {part}`{shown(run.test_data[0])}`" if run.test_data else ""
        told = metrics.table(last["evaluation"]).markdown()
        parts += ["## Evaluation", f"After step {last['step']:,}{on}:", told]
    if plots.available() and (drawn := [one for one in (curves.loss(run), curves.recalls(run)) if one is not None]):
        parts.append("## Curves")
        for number, (described, figure) in enumerate(drawn, 1):
            plots.save(figure, folder / f"curve_{number}.png")
            parts.append(f"![{described}](curve_{number}.png)")
    if run.config_text:
        parts += ["## Settings", f"```toml\n{shown(run.config_text).strip()}\n```"]
    credits = data.credits(run.training_data)
    return [*parts, *(["## Credits", *credits] if credits else [])]
