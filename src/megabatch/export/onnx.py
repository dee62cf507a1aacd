"""ONNX: a file for each side, `image.onnx` and `text.onnx`, from the inputs of the tower to embeddings of unit length."""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import extras
from megabatch.data.dataset import IMAGE
from megabatch.towers import Pair, Tower, saved
from megabatch.towers.huggingface import TextEncoder

LOG = logging.getLogger("megabatch")
SAMPLE_TEXTS = ("a photo of a cat", "two dogs", "")
TOLERANCE = 1e-4  # of embeddings of unit length, in float32
_PURPOSE = "Export to ONNX"


def export(pair: Pair, folder: Path) -> None:
    """Writes the files, and what rebuilds the preprocessing. If onnxruntime is installed, its embeddings are compared."""
    for module in ("onnx", "onnxscript"):
        extras.load(module, extra="onnx", purpose=_PURPOSE)
    for tower in {tower.kind: tower for tower in pair.towers}.values():
        _write(tower, folder / f"{tower.kind}.onnx")
    saved.keep(pair, folder)


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
    if extras.installed("onnxruntime"):
        LOG.info("%s: embeddings of onnxruntime differ from the model's by at most %.1e", path, _compare(module, inputs, path))


def _is_large(module: nn.Module) -> bool:
    """Whether weights go into a file beside, because an ONNX file has at most 2 GiB."""
    size: int = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    return size > 3 << 29


@torch.no_grad()
def _compare(module: nn.Module, inputs: dict[str, Tensor], path: Path) -> float:
    """The largest difference."""
    runtime = extras.load("onnxruntime", extra="onnx", purpose=_PURPOSE)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    differences: list[float] = []
    for count in (3, 1):
        some = {name: value[:count] for name, value in inputs.items()}
        (found,) = session.run(None, {name: value.numpy() for name, value in some.items()})
        differences.append((torch.from_numpy(found) - module(**some)).abs().max().item())
        if not differences[-1] <= TOLERANCE:
            raise RuntimeError(f"{path} must give the embeddings of the model, got a difference of {differences[-1]:.1e}")
    return max(differences)
