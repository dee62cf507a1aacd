"""Trained models for other programs: folders that transformers, sentence-transformers, open_clip and onnxruntime load."""

import copy
import dataclasses
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch_train import towers
from megabatch_train.data.dataset import IMAGE
from megabatch_train.towers import Pair, Tower, huggingface, lora, models, open_clip
from megabatch_train.towers.huggingface import TextEncoder
from megabatch_train.towers.huggingface_inputs import HashedWords, ImageInputs, TokenInputs
from megabatch_train.towers.models import TEXT_OPTIONS
from megabatch_train.towers.sentence_transformer import write_tensors

LOG = logging.getLogger("megabatch")

# ----------------------------------------------------------------------------------------------------------------------
# ONNX: a file for each side, `image.onnx` and `text.onnx`, from the inputs of the tower to embeddings of unit length.

SAMPLE_TEXTS = ("a photo of a cat", "two dogs", "")
TOLERANCE = 1e-4  # of embeddings of unit length, in float32
_PURPOSE = "Export to ONNX"


def export_onnx(pair: Pair, folder: Path) -> None:
    """Writes the files, and what rebuilds the preprocessing. If onnxruntime is installed, its embeddings are compared."""
    for module in ("onnx", "onnxscript"):
        extras.load(module, purpose=_PURPOSE)
    if any(getattr(getattr(tower.collate, "__self__", None), "prompt_tokens", None) is not None for tower in pair.towers):
        raise ValueError(
            "export --to onnx must have a model that pools all tokens, got model_options.include_prompt = false, whose pooling "
            "depends on the prompt of each side; --to hf keeps it"
        )
    for tower in {tower.kind: tower for tower in pair.towers}.values():
        _write(tower, folder / f"{tower.kind}.onnx")
    models.keep(pair, folder)


def sample_inputs(tower: Tower) -> dict[str, Tensor]:
    """Inputs of the tower's module for three samples: noise, or texts of different lengths."""
    noise = torch.randint(0, 256, (3, 3, 64, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = list(noise if tower.kind == IMAGE else SAMPLE_TEXTS)
    inputs = tower.collate([tower.prepare(sample, None) for sample in samples])
    return inputs if isinstance(inputs, dict) else {"images": inputs}


def _write(tower: Tower, path: Path) -> None:
    LOG.info("writing %s", path)
    inputs, module = sample_inputs(tower), copy.deepcopy(tower.module).float()
    if isinstance(module, TextEncoder):
        module.pad()  # the sizes of packed texts depend on values
    # The first axis is the batch; the second of texts is their length, if the model takes any length.
    axes: Any = {0: torch.export.Dim.DYNAMIC, **({} if tower.kind == IMAGE else {1: torch.export.Dim.AUTO})}
    attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # ONNX has no operator for it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about PyTorch's own deprecated functions and names of axes
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
        LOG.info("%s: embeddings of onnxruntime differ from the model's by at most %.1e", path, _compare(module, inputs, path))


def _is_large(module: nn.Module) -> bool:
    """Whether weights go into a file beside, because an ONNX file has at most 2 GiB."""
    size: int = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    return size > 3 << 29


@torch.no_grad()
def _compare(module: nn.Module, inputs: dict[str, Tensor], path: Path) -> float:
    """The largest difference."""
    runtime = extras.load("onnxruntime", purpose=_PURPOSE)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    differences: list[float] = []
    for count in (3, 1):
        some = {name: value[:count] for name, value in inputs.items()}
        (found,) = session.run(None, {name: value.numpy() for name, value in some.items()})
        differences.append((torch.from_numpy(found) - module(**some)).abs().max().item())
        if not differences[-1] <= TOLERANCE:
            raise RuntimeError(f"{path} must give the embeddings of the model, got a difference of {differences[-1]:.1e}")
    return max(differences)


# ----------------------------------------------------------------------------------------------------------------------
# The code of a model card for ONNX files: it opens the files, preprocesses and embeds, and runs as it stands.
#
# transformers and open_clip preprocess the inputs of their models, from the files beside the ONNX files. megabatch
# preprocesses the inputs of "small", and of encoders without a tokenizer or an image processor.


class _Code(NamedTuple):
    """The preprocessing of one side."""

    imports: tuple[str, ...]
    setup: str  # runs once
    function: str


_TOKENS = _Code(
    ("from transformers import AutoTokenizer",),
    'tokenizer = AutoTokenizer.from_pretrained(folder$place, padding_side="right")',
    """
def embed_texts(texts, prompt=$prompt):
    texts = [prompt + text for text in texts]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=$longest, return_tensors="np")
    inputs = {name: tokens[name].astype("int64") for name in ("input_ids", "attention_mask")}
    return text_session.run(None, inputs)[0]
""",
)
_WORDS = _Code(
    ("from megabatch_train.towers.huggingface_inputs import HashedWords",),
    "words = HashedWords($vocabulary, $longest)",
    """
def embed_texts(texts, prompt=$prompt):
    inputs = words.collate([words.prepare(prompt + text, None) for text in texts])
    return text_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_SMALL_TEXTS = _Code(
    ("from megabatch_train import towers",),
    'small = towers.load("small", $kinds, **$options)',
    """
def embed_texts(texts, prompt=$prompt):
    inputs = small.second.collate([small.second.prepare(prompt + text, None) for text in texts])
    return text_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_CLIP_TEXTS = _Code(
    ("import open_clip",),
    'tokenizer = open_clip.get_tokenizer("local-dir:" + folder)',
    """
def embed_texts(texts, prompt=$prompt):
    tokens = tokenizer([prompt + text for text in texts])
    return text_session.run(None, {"text": tokens.numpy()})[0]
""",
)
_PROCESSOR = _Code(
    ("from transformers import AutoImageProcessor",),
    "processor = AutoImageProcessor.from_pretrained(folder$place)",
    """
def embed_images(images):
    inputs = processor(images=[image.convert("RGB") for image in images], return_tensors="np")
    return image_session.run(None, {"pixel_values": inputs["pixel_values"]})[0]
""",
)
_IMAGES = _Code(
    (
        *("import numpy", "import torch", "from transformers import AutoConfig"),
        "from megabatch_train.towers.huggingface_inputs import ImageInputs",
    ),
    "processor = ImageInputs(AutoConfig.from_pretrained(folder$place), None)",
    """
def embed_images(images):
    pixels = [torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    inputs = processor.collate([processor.prepare(image, None) for image in pixels])
    return image_session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
""",
)
_SMALL_IMAGES = _Code(
    ("import numpy", "import torch", "from megabatch_train import towers"),
    _SMALL_TEXTS.setup,
    """
def embed_images(images):
    pixels = [torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    inputs = small.first.collate([small.first.prepare(image, None) for image in pixels])
    return image_session.run(None, {"images": inputs.numpy()})[0]
""",
)
_CLIP_IMAGES = _Code(
    ("import json", "import numpy", "from open_clip.transform import PreprocessCfg, image_transform_v2"),
    """with open(folder + "/open_clip_config.json") as file:
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


def write_code(pair: Pair, place: Sequence[str]) -> str:
    """A program that embeds an image and texts, or queries and documents.

    Args:
        pair: the exported model.
        place: lines that set `folder`; imports come first.
    """
    towers = {tower.kind: tower for tower in pair.towers}
    imports, setups, functions = {"import onnxruntime", *place[:-1]}, [place[-1]], []
    for kind, tower in towers.items():
        code, fields = _choose(pair, tower)
        imports |= set(code.imports)
        setups += [_SESSION.replace("$kind", kind), Template(code.setup).substitute(fields)]
        functions.append(Template(code.function).substitute(fields))
    use = Template(_WITH_QUERIES).substitute(prompt=repr(pair.options.get("query_prompt", "")))
    if IMAGE in towers:
        imports, use = imports | {"from PIL import Image"}, _WITH_IMAGES
    begin = "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))
    return "\n".join([begin, "", *dict.fromkeys(setups), "", *functions, use])


def _choose(pair: Pair, tower: Tower) -> tuple[_Code, dict[str, Any]]:
    """The preprocessing of a side, and the values of its fields."""
    made, module = getattr(tower.collate, "__self__", None), tower.module
    side = models.folder_of(pair, 0 if tower.kind == IMAGE else 1)
    fields: dict[str, Any] = {"place": f' + "/{side}"' if side else "", "prompt": repr(pair.options.get("document_prompt", ""))}
    if pair.name.startswith("open_clip:"):
        model: Any = module.get_submodule("model")
        return (_CLIP_IMAGES if tower.kind == IMAGE else _CLIP_TEXTS), fields | {"size": repr(model.visual.image_size)}
    if isinstance(made, TokenInputs):
        return _TOKENS, fields | {"longest": made.longest}
    if isinstance(made, HashedWords):
        return _WORDS, fields | {"longest": made.longest, "vocabulary": made.vocabulary}
    if isinstance(made, ImageInputs):
        return (_IMAGES if made.processor is None else _PROCESSOR), fields
    options = {key: value for key, value in pair.options.items() if key not in (*TEXT_OPTIONS, "augmentation")}
    kinds = tuple(one.kind for one in pair.towers)
    return (_SMALL_IMAGES if tower.kind == IMAGE else _SMALL_TEXTS), fields | {"options": options, "kinds": kinds}


# ----------------------------------------------------------------------------------------------------------------------
# A CLIP model of open_clip as `CLIPModel` of transformers, with tokenizer and image processor.


_CLIP_PURPOSE = "Export to transformers"
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


def export_clip(pair: Pair, folder: Path) -> None:
    """Writes the model; an error for models that are no plain CLIP with a vision transformer.

    The embeddings of both are compared before anything is written.
    """
    transformers = extras.load("transformers", purpose=_CLIP_PURPOSE)
    module: Any = pair.first.module
    described = dict(open_clip.Description.of(pair).config.model)
    try:
        config = _config(transformers, described, module.model)
        model = transformers.CLIPModel(config)
        state = convert_weights(module.model.state_dict())
        state["logit_scale"] = torch.tensor(math.log(pair.logit_scale))
        model.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"--to hf must have a CLIP model with a vision transformer and a plain text transformer, got {pair.name!r}; "
            f"--to open_clip and --to onnx take it ({str(error).splitlines()[0]})"
        ) from error
    model.eval()
    _compare_clip(model.get_image_features, pair.first, "pixel_values")
    _compare_clip(model.get_text_features, pair.second, "input_ids")
    model.save_pretrained(folder)
    _processor(transformers, module.model).save_pretrained(folder)
    _write_tokenizer(transformers, pair.second, config.text_config.max_position_embeddings, folder)


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


def convert_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
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
def _compare_clip(features: Any, tower: Tower, name: str) -> None:
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
        file_io.write(folder / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    transformers.CLIPTokenizer(*files, model_max_length=longest).save_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------------------
# A model in one of the formats.


FORMATS = ("hf", "open_clip", "onnx")


def export(pair: Pair, form: str, folder: Path) -> None:
    """Writes the model in one of `FORMATS`.

    Args:
        pair: in evaluation mode, on the CPU.
        form: "hf" for encoders of transformers and CLIP models of open_clip, "open_clip" for its models, "onnx" for all.
        folder: created if it does not exist.
    """
    family = pair.name.partition(":")[0]
    writers: dict[str, dict[str, Callable[[Pair, Path], object]]] = {
        "hf": {"hf": _transformers, "hf-config": _transformers, "open_clip": export_clip},
        "open_clip": {"open_clip": _open_clip},
        "onnx": dict.fromkeys(("hf", "hf-config", "open_clip", "small"), export_onnx),
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
        weights = model.state_dict() if pair.lora is None else lora.merge_adapters(model, model.state_dict())
        write_tensors(place / models.WEIGHTS, weights)
    write_tensors(folder / "image" / "projection.safetensors", {"weight": pair.first.module.get_parameter("head.weight")})
    huggingface.describe(pair, folder / "text", pair.second.module.state_dict())


# ----------------------------------------------------------------------------------------------------------------------
# A folder on the Hugging Face hub.


def check_token() -> None:
    """Raises an error if nobody is logged in, before anything is written."""
    hub = extras.load("huggingface_hub", purpose="A model on the hub")
    if hub.get_token() is None:
        raise ValueError("--push must have a token of the Hugging Face hub, got none: `hf auth login` or HF_TOKEN gives one")


def push(folder: Path, name: str) -> str:
    """Uploads the folder as a model and returns its address. Creates a private model if there is none of this name.

    Args:
        folder: of an export.
        name: "USER/MODEL", or "MODEL" of the user who is logged in.
    """
    api = extras.load("huggingface_hub", purpose="A model on the hub").HfApi()
    address = api.create_repo(name, repo_type="model", private=True, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=address.repo_id, repo_type="model", commit_message="megabatch export")
    return str(address)
