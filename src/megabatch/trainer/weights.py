"""The towers of a run with its newest weights, which may be in a checkpoint, to search and evaluate with during the run."""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megabatch import settings, towers
from megabatch.towers.lora import store_frozen
from megabatch.towers.tower import SIDES, Pair
from megabatch.trainer.checkpoint import contents
from megabatch.trainer.checkpoints import Checkpoints
from megabatch.trainer.config import TrainConfig
from megabatch.trainer.parallel import distinct
from megabatch.trainer.precision import AUTOCAST_TYPES
from megabatch.trainer.run import CHECKPOINTS
from megabatch.trainer.state import WHOLE
from megabatch.world import World


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int | None]:
    """The towers of a run after its last saved step: from `model.safetensors`, or from a newer checkpoint.

    Args:
        folder: of a run, or another one with a model; of a checkpoint, for its weights.
        device: of the modules.

    Returns:
        The towers in evaluation mode, and the step of the checkpoint; None for the weights of `model.safetensors`.
    """
    if (folder / towers.saved.WEIGHTS).is_file():
        step, checkpoints = towers.saved.step(folder), Checkpoints(folder / CHECKPOINTS, 1, World(torch.device("cpu")))
        if step is None or (checkpoints.last_step() or 0) <= step:
            return towers.load_saved(folder, device), None
        found = checkpoints.newest()  # intact
        if found is None or found[1]["step"] <= step:
            return towers.load_saved(folder, device), None
    return load_checkpoint(folder, device)


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> tuple[Pair, int]:
    """The towers with the weights that the run would save now, in evaluation mode, and the number of steps done.

    Args:
        folder: of a run, whose newest intact checkpoint is used, or of a checkpoint.
        device: of the modules.
    """
    if (folder / CHECKPOINTS).is_dir():
        found = Checkpoints(folder / CHECKPOINTS, 1, World(torch.device("cpu"))).newest()
    else:
        found = (folder, contents(folder)) if folder.name.startswith("step_") else None
    if found is None:
        raise FileNotFoundError(f"{folder} has no model.safetensors and no intact checkpoint: the run has saved nothing yet")
    path, about = found
    config = settings.build(TrainConfig, about["config"])
    model = config.model.partition("@")[0]  # the weights come from the checkpoint
    pair = replace(towers.load(model, tuple(about["sides"]), lora=config.lora, **config.model_options), name=config.model)
    modules = dict(zip(SIDES, distinct(pair.modules), strict=False))
    state = _state(path)
    state = state["model"] | state["average"]  # the average is what a run saves
    for name, module in modules.items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        module.load_state_dict(own, strict=not pair.base_is_elsewhere)
        module.to(device).eval()
    if pair.base_is_elsewhere:
        store_frozen(list(modules.values()), AUTOCAST_TYPES.get(config.on(torch.device(device)).precision, torch.float32))
    bias = state.get("loss.bias")
    scale = math.exp(state["loss.log_scale"].item())
    return replace(pair, logit_scale=scale, logit_bias=pair.logit_bias if bias is None else bias.item()), about["step"]


def _state(path: Path) -> dict[str, Any]:
    """Weights and averages by name: of a checkpoint in one file, or of a distributed one."""
    if (path / WHOLE).is_file():
        found: dict[str, Any] = torch.load(path / WHOLE, map_location="cpu", weights_only=True)
        return found
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    tensors = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and key.startswith(("model.", "average."))
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose, for one process
        load(tensors, storage_reader=reader, no_dist=True)
    parts = ("model", "average")
    return {part: {k.removeprefix(f"{part}."): v for k, v in tensors.items() if k.startswith(f"{part}.")} for part in parts}
