"""Exports trained models to folders for transformers, sentence-transformers, open_clip and ONNX, with a model card."""

import copy
import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch_train import towers
from megabatch_train.data import load as data
from megabatch_train.data.dataset import AUDIO, IMAGE
from megabatch_train.data.media.audio import AudioInputs
from megabatch_train.display import plots, report, tables
from megabatch_train.display.report import setting
from megabatch_train.evaluation import results
from megabatch_train.names import PYTHON, sanitize
from megabatch_train.towers import Pair, Tower, huggingface, late_interaction, models, open_clip
from megabatch_train.towers.huggingface import PairEncoder
from megabatch_train.towers.huggingface_inputs import HashedWords, ImageInputs, TokenInputs
from megabatch_train.towers.layers import lora
from megabatch_train.towers.models import TEXT_OPTIONS
from megabatch_train.towers.open_clip import TOLERANCE
from megabatch_train.towers.sentence_transformer import TextEncoder, write_tensors
from megabatch_train.towers.tower import sample_inputs
from megabatch_train.towers.vision_language import VisionLanguageEncoder, write_example
from megabatch_train.towers.vision_language.inputs import VisionLanguageInputs

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# ONNX. Each side has a file, `image.onnx` or `text.onnx`, which maps the inputs of the tower to embeddings of unit length.

_PURPOSE = "Export to ONNX"


def export_onnx(pair: Pair, folder: Path) -> None:
    """Writes the ONNX files and the files of the preprocessing. Compares embeddings if onnxruntime is installed."""
    if AUDIO in (pair.first.kind, pair.second.kind):
        raise ValueError(f"--to onnx needs a model of images or texts, got {pair.name!r} for recordings; --to hf supports it")
    for module in ("onnx", "onnxscript"):
        extras.load(module, purpose=_PURPOSE)
    if isinstance(pair.first.module, VisionLanguageEncoder):
        raise ValueError(f"--to must be hf for a vision-language model, got onnx for {pair.name!r}")
    if getattr(pair.first.module, "takes_patches", False):
        raise ValueError(
            f"--to onnx needs a model that takes images as pixels, got {pair.name!r}, which takes patches, and whose code "
            "depends on the number of patches; --to hf supports it"
        )
    if late_interaction.token_dim(pair):
        raise ValueError(f"--to onnx needs a model with one vector per text, got the late-interaction model {pair.name!r}")
    if any(getattr(getattr(tower.collate, "__self__", None), "prompt_tokens", None) is not None for tower in pair.towers):
        raise ValueError(
            "--to onnx needs a model that pools all tokens, got model_options.include_prompt = false, with which pooling "
            "depends on the prompt of each side; --to hf supports it"
        )
    for tower in {tower.kind: tower for tower in pair.towers}.values():
        _write_onnx(tower, folder / f"{tower.kind}.onnx")
    models.keep(pair, folder)


def _write_onnx(tower: Tower, path: Path) -> None:
    LOG.info("writing %s", path)
    inputs, module = sample_inputs(tower), copy.deepcopy(tower.module).float()
    if isinstance(module, TextEncoder):
        module.pad()  # ONNX does not support shapes that depend on values, as in packed texts
    # Axis 0 is the batch. Axis 1 of texts is their length, if the model accepts any length.
    axes: Any = {0: torch.export.Dim.DYNAMIC, **({} if tower.kind == IMAGE else {1: torch.export.Dim.AUTO})}
    attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # ONNX has no operator for the fast path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about its own deprecated functions and about names of axes
            torch.onnx.export(
                module,
                (),
                path,
                kwargs=inputs,
                input_names=list(inputs),
                output_names=[f"{tower.kind}_embeds"],
                dynamo=True,
                dynamic_shapes=dict.fromkeys(inputs, axes),
                external_data=_is_large(module),
                verbose=False,
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(attention)
    if extras.is_installed("onnxruntime"):
        LOG.info("%s: embeddings of onnxruntime and of the model differ by at most %.1e", path, _compare(module, inputs, path))


def _is_large(module: nn.Module) -> bool:
    """Whether the weights need a file of their own, because an ONNX file is limited to 2 GiB."""
    size: int = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    return size > 3 << 29


@torch.no_grad()
def _compare(module: nn.Module, inputs: dict[str, Tensor], path: Path) -> float:
    """Returns the largest difference between the embeddings of onnxruntime and of the model."""
    runtime = extras.load("onnxruntime", purpose=_PURPOSE)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    differences: list[float] = []
    for count in (3, 1):
        few_inputs = {name: value[:count] for name, value in inputs.items()}
        (embeddings,) = session.run(None, {name: value.numpy() for name, value in few_inputs.items()})
        differences.append((torch.from_numpy(embeddings) - module(**few_inputs)).abs().max().item())
        if not differences[-1] <= TOLERANCE:
            raise RuntimeError(f"{path} must give the same embeddings as the model, got a difference of {differences[-1]:.1e}")
    return max(differences)


# ----------------------------------------------------------------------------------------------------------------------
# The code of a model card for ONNX files. It is a complete program that opens the files, preprocesses inputs and encodes them.
#
# transformers and open_clip preprocess the inputs of their models. The files for it are in the folder of the ONNX files.
# megabatch preprocesses the inputs of "small", and of encoders without a tokenizer or an image processor.


class _Preprocessing(NamedTuple):
    """Code that preprocesses the inputs of one side."""

    imports: tuple[str, ...]
    setup: str  # lines that run once
    function: str  # function that encodes inputs


_TOKENS = _Preprocessing(
    ("from transformers import AutoTokenizer",),
    "tokenizer = AutoTokenizer.from_pretrained(folder$place, padding_side=$side)",
    """
def embed_texts(texts, prompt=$prompt):
    texts = [prompt + text for text in texts]
    tokens = tokenizer(texts, padding=$padding, truncation=True, max_length=$longest, return_tensors="np")
    inputs = {name: tokens[name].astype("int64") for name in $names}
    return text_session.run(None, inputs)[0]
""",
)
_WORDS = _Preprocessing(
    ("from megabatch_train.towers.huggingface_inputs import HashedWords",),
    "words = HashedWords($vocabulary, $longest)",
    """
def embed_texts(texts, prompt=$prompt):
    inputs = words.collate([words.prepare(prompt + text, None) for text in texts])
    return text_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_SMALL_TEXTS = _Preprocessing(
    ("from megabatch_train import towers",),
    'small = towers.load("small", $kinds, **$options)',
    """
def embed_texts(texts, prompt=$prompt):
    inputs = small.second.collate([small.second.prepare(prompt + text, None) for text in texts])
    return text_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_CLIP_TEXTS = _Preprocessing(
    ("import open_clip",),
    'tokenizer = open_clip.get_tokenizer("local-dir:" + folder$place)',
    """
def embed_texts(texts, prompt=$prompt):
    tokens = tokenizer([prompt + text for text in texts])
    return text_session.run(None, {"text": tokens.numpy()})[0]
""",
)
_PROCESSOR = _Preprocessing(
    ("from transformers import AutoImageProcessor",),
    "processor = AutoImageProcessor.from_pretrained(folder$place)",
    """
def embed_images(images):
    inputs = processor(images=[image.convert("RGB") for image in images], return_tensors="np")
    return image_session.run(None, {"pixel_values": inputs["pixel_values"]})[0]
""",
)
_IMAGES = _Preprocessing(
    (
        *("import numpy", "import torch", "from transformers import AutoConfig"),
        "from megabatch_train.towers.huggingface_inputs import ImageInputs",
    ),
    "processor = ImageInputs(AutoConfig.from_pretrained(folder$place)$part, None)",
    """
def embed_images(images):
    pixels = [torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    inputs = processor.collate([processor.prepare(image, None) for image in pixels])
    return image_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_SMALL_IMAGES = _Preprocessing(
    ("import numpy", "import torch", "from megabatch_train import towers"),
    _SMALL_TEXTS.setup,
    """
def embed_images(images):
    pixels = [torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    inputs = small.first.collate([small.first.prepare(image, None) for image in pixels])
    return image_session.run(None, {"images": inputs.numpy()})[0]
""",
)
_CLIP_IMAGES = _Preprocessing(
    ("import json", "import numpy", "from open_clip.transform import PreprocessCfg, image_transform_v2"),
    """with open(folder$place + "/open_clip_config.json") as file:
    preprocessing = PreprocessCfg(size=$size, **json.load(file)["preprocess_cfg"])
transform = image_transform_v2(preprocessing, is_train=False)""",
    """
def embed_images(images):
    return image_session.run(None, {"image": numpy.stack([transform(image) for image in images])})[0]
""",
)
_SESSION = '$kind_session = onnxruntime.InferenceSession(folder + "/$kind.onnx", providers=["CPUExecutionProvider"])'
_WITH_IMAGES = """
image_embeds = embed_images([Image.new("RGB", (256, 256), "red")])  # or Image.open("photo.jpg")
text_embeds = embed_texts(["a red square", "a photo of a cat"])
print(image_embeds @ text_embeds.T)  # similarities
"""
_WITH_QUERIES = """
query_embeds = embed_texts(["what do cats eat?"], prompt=$prompt)
document_embeds = embed_texts(["Cats eat fish.", "The sky is blue."])
print(query_embeds @ document_embeds.T)  # similarities
"""


def write_code(pair: Pair, folder_lines: Sequence[str]) -> str:
    """Returns a program that encodes an image and texts, or queries and documents.

    Args:
        pair: the exported model.
        folder_lines: lines of the program. The last line sets the variable `folder`, and the other lines are its imports.
    """
    towers = {tower.kind: tower for tower in pair.towers}
    imports, setups, functions = {"import onnxruntime", *folder_lines[:-1]}, [folder_lines[-1]], []
    for kind, tower in towers.items():
        code, fields = _choose_code(pair, tower)
        imports |= set(code.imports)
        setups += [_SESSION.replace("$kind", kind), Template(code.setup).substitute(fields)]
        functions.append(Template(code.function).substitute(fields))
    use = Template(_WITH_QUERIES).substitute(prompt=repr(pair.options.get("query_prompt", "")))
    if IMAGE in towers:
        imports, use = imports | {"from PIL import Image"}, _WITH_IMAGES
    begin = "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))
    return "\n".join([begin, "", *dict.fromkeys(setups), "", *functions, use])


def _choose_code(pair: Pair, tower: Tower) -> tuple[_Preprocessing, dict[str, Any]]:
    """Returns the preprocessing code of a side, and the values of its fields."""
    preparation, module = getattr(tower.collate, "__self__", None), tower.module
    side = models.folder_of(pair, 0 if tower.kind == IMAGE else 1)
    fields: dict[str, Any] = {"place": f' + "/{side}"' if side else "", "prompt": repr(pair.options.get("document_prompt", ""))}
    if pair.name.startswith("open_clip:"):
        model: Any = module.get_submodule("model")
        return (_CLIP_IMAGES if tower.kind == IMAGE else _CLIP_TEXTS), fields | {"size": repr(model.visual.image_size)}
    if isinstance(preparation, TokenInputs):
        return _TOKENS, fields | _describe_tokens(preparation)
    if isinstance(preparation, HashedWords):
        return _WORDS, fields | {"longest": preparation.longest, "vocabulary": preparation.vocabulary}
    if isinstance(preparation, ImageInputs):
        part = ".vision_config" if isinstance(module, PairEncoder) else ""
        return (_IMAGES if preparation.processor is None else _PROCESSOR), fields | {"part": part}
    options = {key: value for key, value in pair.options.items() if key not in (*TEXT_OPTIONS, "augmentation")}
    kinds = tuple(one.kind for one in pair.towers)
    return (_SMALL_IMAGES if tower.kind == IMAGE else _SMALL_TEXTS), fields | {"options": options, "kinds": kinds}


def _describe_tokens(texts: TokenInputs) -> dict[str, Any]:
    """Returns the arguments of the tokenizer as code."""
    names = ("input_ids",) if texts.fixed else ("input_ids", "attention_mask")
    padding = '"max_length"' if texts.fixed else "True"
    return {"longest": texts.longest, "padding": padding, "names": names, "side": f'"{texts.padding_side}"'}


# ----------------------------------------------------------------------------------------------------------------------
# Export in one of the formats.


FORMATS = ("hf", "open_clip", "onnx")


def export(pair: Pair, form: str, folder: Path) -> None:
    """Writes the model in one of `FORMATS`.

    Args:
        pair: model in evaluation mode, on the CPU.
        form: "hf" for models of transformers and CLIP models of open_clip, "open_clip" for models of open_clip, or "onnx" for
            all models.
        folder: folder to write. It is created if it does not exist.
    """
    family = pair.name.partition(":")[0]
    writers: dict[str, dict[str, Callable[[Pair, Path], object]]] = {
        "hf": {"hf": _export_transformers, "hf-config": _export_transformers, "open_clip": open_clip.export_clip},
        "open_clip": {"open_clip": _export_open_clip},
        "onnx": dict.fromkeys(("hf", "hf-config", "open_clip", "small"), export_onnx),
    }
    if pair.name.startswith(PYTHON):
        raise ValueError(
            f"--to {form} needs a model of transformers, open_clip or megabatch, got {pair.name!r}, whose modules and "
            "preprocessing are code of your own; towers.load_saved loads the run with this code"
        )
    if family not in writers[form]:
        possible = " or ".join(name for name in FORMATS if family in writers[name])
        raise ValueError(f"--to must be {possible} for a model {pair.name!r}, got {form}")
    folder.mkdir(parents=True, exist_ok=True)
    writers[form][family](pair, folder)


def _export_open_clip(pair: Pair, folder: Path) -> None:
    """Writes one model. LoRA adapters are merged into the weights."""
    if pair.lora is not None:
        pair = dataclasses.replace(pair, lora=dataclasses.replace(pair.lora, merge=True))
    towers.save(pair, folder).replace(folder / "open_clip_model.safetensors")  # the file name that open_clip expects on the hub


def _export_transformers(pair: Pair, folder: Path) -> None:
    """Writes one model, or a folder for each of two encoders. LoRA adapters are merged into the weights."""
    if pair.lora is not None:
        pair = dataclasses.replace(pair, lora=dataclasses.replace(pair.lora, merge=True))
    if pair.first.module is pair.second.module:
        towers.save(pair, folder)
        return
    for tower in pair.towers:
        tower_folder, module = folder / tower.kind, tower.module
        assert tower.keep is not None, "a tower of transformers can write its files"
        tower.keep(tower_folder)
        model = module.get_submodule("model")
        weights = model.state_dict() if pair.lora is None else lora.merge_adapters(model, model.state_dict())
        write_tensors(tower_folder / models.WEIGHTS, weights)
    write_tensors(folder / "image" / "projection.safetensors", {"weight": pair.first.module.get_parameter("head.weight")})
    huggingface.describe(pair, folder / "text", pair.second.module.state_dict())


# ----------------------------------------------------------------------------------------------------------------------
# A folder on the Hugging Face hub.


def check_token() -> None:
    """Raises an error if the user is not logged in to the hub."""
    hub = extras.load("huggingface_hub", purpose="A model on the hub")
    if hub.get_token() is None:
        raise ValueError("--push needs a token of the Hugging Face hub; run `hf auth login` or set HF_TOKEN")


def push(folder: Path, name: str) -> str:
    """Uploads a folder as a model and returns the URL. Creates a private model if no model has this name.

    Args:
        folder: folder of an export.
        name: "USER/MODEL", or "MODEL" for the user who is logged in.
    """
    api = extras.load("huggingface_hub", purpose="A model on the hub").HfApi()
    url = api.create_repo(name, repo_type="model", private=True, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=url.repo_id, repo_type="model", commit_message="megabatch export")
    return str(url)


# ----------------------------------------------------------------------------------------------------------------------
# The model card. It contains code that loads the export, and the data, batch, evaluation, curves and settings of the run.


CARD = "README.md"
# Code that loads a model from its folder or from the hub.
_LOAD_OPEN_CLIP = """
import open_clip

model, _, transform = open_clip.create_model_and_transforms("{scheme}:{folder}")
tokenizer = open_clip.get_tokenizer("{scheme}:{folder}")
"""
_LOAD_CLIP = """
import html

import ftfy
from transformers import CLIPModel, CLIPProcessor

model, processor = CLIPModel.from_pretrained("{folder}"), CLIPProcessor.from_pretrained("{folder}")


def clean(text):  # quotation marks, ligatures and HTML, as in training by the tokenizer of open_clip
    return html.unescape(ftfy.fix_text(text))


tokens = processor(text=[clean("a dog’s tail")], padding=True, return_tensors="pt")
"""
_LOAD_SENTENCES = """
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
queries, documents = model.encode_query(["a question"]), model.encode_document(["an answer"])
"""
_LOAD_ENCODER = """
import torch
from megabatch_train.towers.huggingface_inputs import HashedWords
from transformers import AutoModel

model, words = AutoModel.from_pretrained("{folder}"), HashedWords({vocabulary}, {longest})
inputs = words.collate([words.prepare(text, None) for text in ("a question", "an answer")])
states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]  # (n, T, H), (n, T)
embeddings = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
"""
_LOAD_PAIR = """
import torch
from PIL import Image
from transformers import AutoModel, AutoTokenizer

image = Image.new("RGB", (256, 256), "red")  # or Image.open("photo.jpg").convert("RGB")
{pixels}
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side={side})
tokens = tokenizer(["a photo of a cat"], padding={padding}, truncation=True, max_length={longest}, return_tensors="pt")


def normalize(features):  # transformers 5 returns the states too
    return torch.nn.functional.normalize(getattr(features, "pooler_output", features), dim=-1)


model = AutoModel.from_pretrained(folder)
image_embeddings = normalize(model.get_image_features(**pixels))
text_embeddings = normalize(model.get_text_features(**{{name: tokens[name] for name in {names}}}))
"""
_LOAD_TWO = """
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

image = Image.new("RGB", (256, 256), "red")  # or Image.open("photo.jpg").convert("RGB")
{pixels}

images = AutoModel.from_pretrained(folder + "/image")
projection = load_file(folder + "/image/projection.safetensors")["weight"]
states = images(**pixels).last_hidden_state  # (n, positions, H), or (n, H, h, w)
pooled = states.mean(1) if states.dim() == 3 else states.mean((2, 3))
image_embeddings = torch.nn.functional.normalize(pooled @ projection.T, dim=-1)
"""
_LOAD_PROCESSED = """
from transformers import AutoImageProcessor

pixels = AutoImageProcessor.from_pretrained({place})(images=[image], return_tensors="pt")
"""
_LOAD_FITTED = """
import numpy
from megabatch_train.towers.huggingface_inputs import ImageInputs
from transformers import AutoConfig

processor = ImageInputs(AutoConfig.from_pretrained({place}){part}, None)
pixels = {{"pixel_values": processor.prepare(torch.from_numpy(numpy.array(image)).permute(2, 0, 1), None)[None]}}
"""
_LOAD_AUDIO = """
import torch
from transformers import AutoFeatureExtractor, AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
extractor = AutoFeatureExtractor.from_pretrained(folder)
rate = extractor.sampling_rate
recording = torch.zeros(rate).numpy()  # samples of one channel at this rate
audio = extractor([recording], sampling_rate=rate, return_tensors="pt")
texts = tokenizer(["the sound of rain", "a dog barks"], padding=True, return_tensors="pt")
with torch.no_grad():
    is_longer = torch.zeros(1, 1, dtype=torch.bool)  # as in training, where long recordings are cropped
    output = model(input_features=audio["input_features"], is_longer=is_longer, **texts)
print(output.audio_embeds @ output.text_embeds.T)  # similarities
"""
_LOAD_TEXTS = """
from sentence_transformers import SentenceTransformer

texts = SentenceTransformer(folder + "/text")
text_embeddings = texts.encode_document(["a photo of a cat"])
"""


def write_card(
    pair: Pair, form: str, folder: Path, *, run: Path | None, step: int | None = None, name: str | None = None
) -> Path:
    """Writes the model card README.md, and pictures if the run has curves.

    Args:
        pair: the exported model.
        form: format of the export.
        folder: folder of the export.
        run: folder of the run, or None for a model by name.
        step: step of the weights (default: last step of the run).
        name: name on the hub (default: name of the folder).
    """
    parts = [_card_header(pair, form), f"# {(name or folder.resolve().name).rpartition('/')[2]}", _card_about(pair, form, run)]
    parts += ["## Use", *_card_use(pair, form, name or str(folder), on_hub=name is not None)]
    if run is not None:
        parts += _card_run(results.read_run(run), folder, step)
    path = folder / CARD
    file_io.write(path, lambda file: file.write(("\n\n".join(part for part in parts if part) + "\n").encode()))
    return path


def _card_header(pair: Pair, form: str) -> str:
    texts = pair.first.kind == pair.second.kind or isinstance(pair.first.module, VisionLanguageEncoder)
    media = "audio" if pair.first.kind == AUDIO else "image"
    library = {"onnx": "onnx", "open_clip": "open_clip", "hf": "sentence-transformers" if texts else "transformers"}[form]
    lines = [
        f"library_name: {library}",
        f"pipeline_tag: {'sentence-similarity' if texts else f'zero-shot-{media}-classification'}",
        "tags: [contrastive, megabatch]",
    ]
    return "\n".join(["---", *lines, "---"])


def _card_about(pair: Pair, form: str, run: Path | None) -> str:
    sides = " and ".join(dict.fromkeys(tower.plural for tower in pair.towers))
    if late_interaction.token_dim(pair):
        return f"Towers: `{_public_name(pair)}`. {late_interaction.describe_scores(pair)}"
    bias = "" if pair.logit_bias is None else f" and adds {tables.short(pair.logit_bias)}"
    sentences = (
        f"Towers: `{_public_name(pair)}`. Embeddings of {sides} have unit length, and their similarity is the inner product."
    )
    encoder = pair.second.module
    if (
        isinstance(encoder, TextEncoder)
        and form == "hf"
        and not encoder.files.normalize
        and pair.first.kind == pair.second.kind
    ):
        sentences += (
            " SentenceTransformer returns them without unit length, because the original model has no Normalize module."
        )
    loss_sentence = f"The loss multiplies similarities by {tables.short(pair.logit_scale)}{bias}."
    return " ".join([sentences, loss_sentence, *(["The model was trained with megabatch."] if run is not None else [])])


def _public_name(pair: Pair) -> str:
    """Returns the name of the model, without absolute paths of this machine."""
    family, colon, name = pair.name.partition(":")
    between, parts = (
        ("@", [part for part in open_clip.split_name(name) if part]) if family == "open_clip" else ("+", name.split("+"))
    )
    return family + colon + between.join(Path(part).name if Path(part).is_absolute() else part for part in parts)


def _card_use(pair: Pair, form: str, folder: str, *, on_hub: bool) -> list[str]:
    prompts = [
        f"Each text of the {side} side must begin with {json.dumps(pair.options[key])}."
        for side, key in (("first", "query_prompt"), ("second", "document_prompt"))
        if pair.options.get(key)
    ]
    images, texts = (getattr(tower.collate, "__self__", None) for tower in pair.towers)
    download = ["from huggingface_hub import snapshot_download", f"folder = snapshot_download({json.dumps(folder)})"]
    folder_lines = download if on_hub else [f"folder = {json.dumps(folder)}"]
    if form == "open_clip":
        code = _LOAD_OPEN_CLIP.format(scheme="hf-hub" if on_hub else "local-dir", folder=folder)
    elif form == "onnx":
        code = write_code(pair, folder_lines)
    elif pair.name.startswith("open_clip:"):
        code = _LOAD_CLIP.format(folder=folder)
    elif isinstance(images, AudioInputs):
        code = "\n\n".join(folder_lines) + "\n" + _LOAD_AUDIO
    elif isinstance(images, ImageInputs):
        is_pair = isinstance(pair.first.module, PairEncoder)
        place = {"place": "folder", "part": ".vision_config"} if is_pair else {"place": 'folder + "/image"', "part": ""}
        pixels = (_LOAD_FITTED if images.processor is None else _LOAD_PROCESSED).strip().format(**place)
        code = "\n\n".join(folder_lines) + "\n"
        if is_pair and isinstance(texts, TokenInputs):
            code += _LOAD_PAIR.format(pixels=pixels, **_describe_tokens(texts))
        else:
            code += _LOAD_TWO.format(pixels=pixels) + (_LOAD_TEXTS if isinstance(texts, TokenInputs) else "")
    elif isinstance(texts, VisionLanguageInputs):
        code, prompts = write_example(pair, folder), []
    elif late_interaction.token_dim(pair):  # the files contain the prompts
        code, prompts = late_interaction.write_example(folder), []
    elif isinstance(texts, HashedWords):
        code = _LOAD_ENCODER.format(folder=folder, vocabulary=texts.vocabulary, longest=texts.longest)
    else:
        code = _LOAD_SENTENCES.format(folder=folder)
    return [f"```python\n{code.strip()}\n```", *prompts]


def _card_run(run: results.SavedRun, folder: Path, step: int | None) -> list[str]:
    """Returns the sections about the run: data, batch, evaluation of the exported weights, problems, curves and settings."""
    batch = f", in batches of {run.config['batch_size']:,} pairs" if "batch_size" in run.config else ""
    parts = ["## Training", f"Data: `{sanitize(run.training_data)}`{batch}." if run.training_data else ""]
    if step is not None:
        best = ", the step with the best evaluation" if run.best.get("step") == step else ""
        parts.append(f"The weights are from step {step:,}{best}.")
    if (table := setting(run)) is not None:
        parts.append(table.markdown())
    evaluations = [evaluation for evaluation in run.evaluations if step in (None, evaluation["step"])]
    if evaluations:
        last = evaluations[-1]
        part = "the held-out part of " if run.config.get("holdout") else ""
        on = f" on {part}`{sanitize(run.test_data[0])}`" if run.test_data else ""
        table_text = tables.table(last["evaluation"]).markdown()
        parts += ["## Evaluation", f"After step {last['step']:,}{on}:", table_text]
    if run.problems:
        parts += ["## Problems in training", "\n".join(f"- {problem}" for problem in run.problems)]
    if plots.available() and (plots_of_run := [one for one in (report.loss(run), report.recalls(run)) if one is not None]):
        parts.append("## Curves")
        for number, (described, figure) in enumerate(plots_of_run, 1):
            plots.save(figure, folder / f"curve_{number}.png")
            parts.append(f"![{described}](curve_{number}.png)")
    if run.config_text:
        parts += ["## Settings", f"```toml\n{sanitize(run.config_text).strip()}\n```"]
    credits = data.credits(run.training_data)
    return [*parts, *(["## Credits", *credits] if credits else [])]
