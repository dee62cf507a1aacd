"""Support for open_clip: losses in linear memory, its loss factory, gradient caching for its models, and its checkpoints.

`ClipLoss`, `SigLipLoss` and `DistillClipLoss` have open_clip's constructors and call signatures, so they can replace its
losses.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import extras, file_io
from megabatch.cached import HostSource
from megabatch.cached import cached_backward as plain_cached_backward
from megabatch.cached.sources import TensorSource
from megabatch.integrations.trainers import full_tensor, unwrap
from megabatch.losses import ClipLoss, DistillClipLoss, SigLipLoss
from megabatch.world import is_sharded

__all__ = [
    "ClipLoss",
    "DistillClipLoss",
    "Installed",
    "SigLipLoss",
    "cached_backward",
    "install",
    "load_checkpoint",
    "save_checkpoint",
]

# ----------------------------------------------------------------------------------------------------------------------
# The text side of open_clip's models.


@dataclass(frozen=True)
class CausalTexts:
    """The text side of a model in which tokens after the end token have no effect, so that texts may be truncated there.

    Attention is causal, and the embedding comes from the end token. open_clip's `encode_text` takes only texts of full length.
    """

    parts: Any  # the module that has the transformer
    pool_type: str
    end_id: Any

    @classmethod
    def of(cls, model: Any) -> "CausalTexts | None":
        """Returns the text side of a model, or None if texts may not be truncated.

        Texts may not be truncated if the model does not pool the end token, attends in both directions, or has a text encoder
        of transformers.
        """
        parts = getattr(model, "text", model)  # CustomTextCLIP has a module for the text side
        prefix = "text_" if parts is model else ""
        pool_type = getattr(parts, f"{prefix}pool_type", None)
        if pool_type not in ("argmax", "eos") or getattr(parts, "attn_mask", None) is None:
            return None
        if getattr(parts, "cls_emb", None) is not None or getattr(parts, "output_tokens", False):  # CoCa
            return None
        return cls(parts, pool_type, getattr(parts, f"{prefix}eos_id", None))

    def ends(self, text: Tensor) -> Tensor:  # (n, L) -> (n,)
        """Returns the position of each end token: the largest id, or the first token with the id of the end token."""
        return (text if self.pool_type == "argmax" else text.eq(self.end_id).int()).argmax(1)

    def lengths(self, inputs: dict[str, Tensor]) -> Tensor:  # (n,)
        """Returns the number of tokens up to and including the end token."""
        return self.ends(inputs["text"]) + 1

    def encode(self, text: Tensor) -> Tensor:  # (n, L) -> (n, D)
        """Encodes texts. The result equals open_clip's `encode_text` of the texts at full length."""
        parts, tokens = self.parts, text.shape[1]
        dtype = parts.transformer.get_cast_dtype()
        x = parts.token_embedding(text).to(dtype) + parts.positional_embedding[:tokens].to(dtype)
        x = parts.transformer(x, attn_mask=parts.attn_mask[:tokens, :tokens])
        x = parts.ln_final(x[torch.arange(len(x), device=x.device), self.ends(text)])
        projection = parts.text_projection
        if projection is not None:
            x = projection(x) if isinstance(projection, nn.Linear) else x @ projection
        features: Tensor = x
        return features


# ----------------------------------------------------------------------------------------------------------------------
# The losses that replace open_clip's losses.

_LOSSES: tuple[type[nn.Module], ...] = (ClipLoss, SigLipLoss, DistillClipLoss)


class Installed(AbstractContextManager["Installed"]):
    """The result of `install`. Use it in a `with` statement, or call `uninstall`, to restore open_clip's losses.

    Attributes:
        replaced: the replaced classes of open_clip by name.
    """

    def __init__(self, modules: Sequence[Any], replaced: dict[str, type[nn.Module]]) -> None:
        self._modules = modules
        self.replaced = replaced

    def uninstall(self) -> None:
        """Restores open_clip's classes."""
        for module in self._modules:
            for name, theirs in self.replaced.items():
                setattr(module, name, theirs)
        self.replaced = {}

    def __exit__(self, *error: object) -> None:
        """Restores open_clip's classes."""
        self.uninstall()

    def __str__(self) -> str:
        """Describes the effect for the log of a run."""
        if not self.replaced:
            return "open_clip.create_loss builds open_clip's losses"
        effect = (
            "open_clip.create_loss and open_clip's tasks now build"
            if len(self._modules) > 1
            else "open_clip.create_loss now builds"
        )
        return f"{effect} megabatch's {', '.join(self.replaced)}; CoCaLoss is still open_clip's"


def install() -> Installed:
    """Makes `open_clip.create_loss` build the losses of this library.

    It replaces `ClipLoss`, `SigLipLoss` and `DistillClipLoss` in `open_clip.factory`. A script that imported `create_loss`
    before gets the new losses as well. In open_clip 4, the names in `open_clip.loss` are also replaced, because its tasks
    (`CLIPTask`, `SigLIPTask`, `CLAPTask`) read them when they are built. `CoCaLoss` is not replaced. If open_clip's losses take
    arguments that ours do not take, an error is raised and nothing is replaced.

    With `--accum-freq k`, open_clip's loop adds the gradients of scale and bias k times, so the losses raise an error.
    `cached_backward` replaces this option.

        print(install())
        open_clip_train.main.main(sys.argv[1:])
    """
    factory: Any = extras.load("open_clip.factory", purpose="Installing losses in open_clip")
    theirs: dict[str, Any] = {loss.__name__: getattr(factory, loss.__name__, None) for loss in _LOSSES}
    if getattr(factory.create_loss, "__globals__", None) is not vars(factory):
        raise RuntimeError(
            "open_clip.factory.create_loss must be open_clip's own function, got another function that replaces it"
        )
    replaced = {name: kind for name, kind in theirs.items() if kind is not _BUILDERS[name]}
    for loss in _LOSSES:
        if loss.__name__ in replaced:
            _check_arguments(replaced[loss.__name__], loss)
    modules = [factory]
    if extras.is_installed("open_clip.task"):
        modules.append(extras.load("open_clip.loss", purpose="Installing losses in open_clip"))
    for module in modules:
        for name, build in _BUILDERS.items():
            setattr(module, name, build)
    return Installed(modules, replaced)


def _builder(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    """Returns the replacement of a class of open_clip. It builds our loss, which rejects open_clip's gradient accumulation."""

    @wraps(kind, updated=())
    def build(*args: Any, **kwargs: Any) -> nn.Module:
        loss = kind(*args, **kwargs)
        loss.register_forward_pre_hook(_reject_accumulation, with_kwargs=True)
        return loss

    return build


_BUILDERS = {loss.__name__: _builder(loss) for loss in _LOSSES}


def _reject_accumulation(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises if open_clip accumulates gradients. The features then consist of several parts of which only one has a graph."""
    if torch.compiler.is_compiling():
        return
    for value in (*args, *kwargs.values()):
        node = value.grad_fn if isinstance(value, Tensor) and value.dim() == 2 else None
        if node is None or node.name() != "CatBackward0":
            continue
        graphs = [before for before, _ in node.next_functions if before is not None]
        parts = len(node.next_functions)
        if len(graphs) == 1 and parts > 1:
            raise ValueError(
                f"open_clip's --accum-freq must be 1 with megabatch's losses, got features of {parts} parts. The loop would "
                f"add the gradients of logit_scale and logit_bias {parts} times. Encode the batch in one step with "
                "megabatch.integrations.open_clip.cached_backward, or use `megabatch train`"
            )


def _check_arguments(theirs: Any, ours: type[nn.Module]) -> None:
    version = getattr(extras.load("open_clip", purpose="open_clip"), "__version__", "of unknown version")
    if not inspect.isclass(theirs):
        raise RuntimeError(
            f"open_clip.factory must have a class {ours.__name__} to replace, got none in open_clip {version}; pass "
            f"megabatch.{ours.__name__} to your loop yourself"
        )
    for method in ("__init__", "forward"):
        supported = inspect.signature(getattr(ours, method)).parameters
        unknown = [name for name in inspect.signature(getattr(theirs, method)).parameters if name not in supported]
        if unknown:
            raise RuntimeError(
                f"open_clip's {ours.__name__}.{method} must take only the arguments of megabatch's, "
                f"got also {', '.join(unknown)} in open_clip {version}; nothing was replaced"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Gradient caching.


def cached_backward(
    model: nn.Module,
    images: Any,
    texts: Any,
    loss: Callable[..., Any],
    *,
    teacher: nn.Module | None = None,
    chunk_size: int | Sequence[int] = 256,
    **options: Any,
) -> dict[str, Tensor]:
    """Replaces open_clip's forward pass, loss and backward pass. Only the activations of one chunk are in memory.

    All losses and gradients, including the gradients of `logit_scale` and `logit_bias`, are the same as with

        output = model(images, texts)
        losses = loss(**output, output_dict=True)
        sum(losses.values()).backward()

    One call with the whole batch replaces `--accum-freq k`, which multiplies the gradient of the scale by k. Texts of similar
    length are encoded together and truncated to the longest text. This does not change the result if attention is causal.
    Models that are compiled, sharded by FSDP2 or not causal get texts of full length.

    Args:
        model: an open_clip `CLIP`, `CustomTextCLIP` or `CLAP` (audio). It may be wrapped in DDP, sharded by FSDP2, or compiled.
            For a task of open_clip 4, pass `task.trainable_module`.
        images: (N, 3, H, W), a dict of NaFlex patches, the dict of audio of a `CLAP`, or a `Source`.
        texts: (N, L) token ids, or a `Source`.
        loss: `ClipLoss`, `SigLipLoss` or `DistillClipLoss` of megabatch or open_clip. It is called with `output_dict=True`.
        teacher: for `DistillClipLoss`, the model to distill from. It gets no gradient.
        chunk_size: the number of samples that are encoded at once, as one number, or one for images and one for texts.
        options: other arguments of `megabatch.cached_backward`: `budget` or `budget_fraction`, `scaler`, `sync`, `on_chunk`.

    Returns:
        The detached losses by name, and their sum as "loss". With several ranks, the loss is the mean of this sum over ranks.
    """
    sizes = list(chunk_size) if isinstance(chunk_size, Sequence) else [chunk_size] * 2
    towers: list[Any] = []
    truncations = []
    for encode, one in ((_features, model), (_encode_by_teacher, teacher)):
        if one is not None:
            truncation = _Truncation.of(one)
            truncations += [] if truncation is None else [truncation]
            first = partial(encode, one, _first_side(one))
            towers += [(first, images), (partial(encode, one, "text"), _by_length(texts, truncation))]
    sizes *= len(towers) // 2
    losses: dict[str, Tensor] = {}

    def total(image: Tensor, text: Tensor, *teacher_features: Tensor) -> Tensor:  # ()
        inputs = {"image_features": image, "text_features": text, **_numbers(model)}
        if teacher is not None:
            names = ("dist_image_features", "dist_text_features")
            inputs |= dict(zip(names, teacher_features, strict=True))
            inputs["dist_logit_scale"] = _numbers(teacher)["logit_scale"].detach()
        output = loss(**inputs, output_dict=True)
        losses.update({name: value.detach() for name, value in output.items()})
        added: Tensor = sum(output.values())
        return added

    with ExitStack() as stack:
        for truncation in truncations:
            stack.enter_context(truncation.allow_any_length())
        sum_of_losses = plain_cached_backward(total, towers, chunk_size=sizes, **options)
    return {**losses, "loss": sum_of_losses}


@dataclass(frozen=True)
class _Truncation:
    """Truncates texts after their end token, for a model that takes only texts of full length."""

    model: Any
    causal: CausalTexts

    @classmethod
    def of(cls, model: Any) -> "_Truncation | None":
        """Returns None for a model that cannot encode truncated texts, or whose methods cannot be replaced."""
        module = unwrap(model)
        compiled = hasattr(model, "_orig_mod") or any(part._compiled_call_impl is not None for part in module.modules())
        if compiled or isinstance(module, torch.jit.ScriptModule) or any(map(is_sharded, module.parameters())):
            return None
        causal = CausalTexts.of(module)
        return None if causal is None else cls(module, causal)

    @contextmanager
    def allow_any_length(self) -> Iterator[None]:
        """Makes the model's `encode_text` accept texts of any length in the context."""
        original = self.model.encode_text

        def encode_text(text: Tensor, normalize: bool = False) -> Tensor:  # (n, L) -> (n, D)
            if text.shape[1] == len(self.causal.parts.attn_mask):
                features: Tensor = original(text, normalize=normalize)
                return features
            features = self.causal.encode(text)
            return F.normalize(features, dim=-1) if normalize else features

        self.model.encode_text = encode_text
        try:
            yield
        finally:
            del self.model.encode_text


def _by_length(texts: Any, truncation: _Truncation | None) -> Any:
    """Returns token ids as a source with the length of each text. Other inputs are returned unchanged."""
    if truncation is None or not isinstance(texts, Tensor) or texts.dim() != 2:
        return texts
    lengths = (truncation.causal.ends(texts) + 1).cpu()
    return TensorSource(texts, lengths=lengths) if texts.is_cuda else HostSource(texts, lengths=lengths)


def _numbers(model: Any) -> dict[str, Tensor]:
    """Returns scale and bias as the model's forward pass returns them."""
    module = unwrap(model)
    numbers = {"logit_scale": full_tensor(module.logit_scale).exp()}
    if getattr(module, "logit_bias", None) is not None:
        numbers["logit_bias"] = full_tensor(module.logit_bias)
    return numbers


def _first_side(model: Any) -> str:
    """Returns the side that the model compares with texts: "image" or "audio"."""
    module = unwrap(model)
    return "audio" if hasattr(module, "encode_audio") and not hasattr(module, "encode_image") else "image"


def _features(model: Callable[..., Any], side: str, /, *inputs: Any, **named: Any) -> Tensor:  # (n, D)
    """Computes the features of one side through the model's wrapper. Dicts, such as NaFlex patches, are passed by name."""
    output = model(**{side: named or inputs[0]})
    supported = (f"{_first_side(model)}_features", "text_features", "logit_scale", "logit_bias")
    if not isinstance(output, dict):
        output = dict(zip(supported, output, strict=False))
    unknown = output.keys() - set(supported)
    if unknown:
        raise TypeError(
            f"model must be an open_clip CLIP, CustomTextCLIP or CLAP, whose loss depends only on features, got "
            f"{type(unwrap(model)).__name__}, which also returns {', '.join(sorted(unknown))}"
        )
    features: Tensor = output[f"{side}_features"]
    return features


@torch.no_grad()
def _encode_by_teacher(teacher: Callable[..., Any], side: str, /, *inputs: Any, **named: Any) -> Tensor:  # (n, E)
    return _features(teacher, side, *inputs, **named)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints of `open_clip_train`.

_PREFIX = "module."  # the prefix of DDP; open_clip writes it with several processes and accepts it everywhere


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: Any, *, epoch: int, scaler: Any = None, name: str = "megabatch"
) -> None:
    """Writes a training checkpoint from which `open_clip_train` can resume (`--resume PATH`), with one or many processes.

    The file is written atomically. Call it on one rank.

    Args:
        path: of the file, usually `epoch_N.pt`.
        model: an open_clip model, wrapped in DDP or not.
        optimizer: the optimizer of the model. open_clip can resume it if it has open_clip's parameter groups.
        epoch: number of completed epochs.
        scaler: a `GradScaler`.
        name: of the run.
    """
    state = unwrap(model).state_dict()
    if any(is_sharded(value) for value in state.values()):
        raise ValueError("model must not be sharded, got one sharded by FSDP2; megabatch_train.towers.save writes its weights")
    checkpoint = {
        "epoch": epoch,
        "name": name,
        "state_dict": {_PREFIX + key: value for key, value in state.items()},
        "optimizer": optimizer.state_dict(),
    }
    if scaler is not None:
        checkpoint["scaler"] = scaler.state_dict()
    file_io.write(Path(path), lambda file: torch.save(checkpoint, file))


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: Any = None, *, scaler: Any = None) -> int:
    """Loads a training checkpoint of `open_clip_train` or `save_checkpoint`. Returns the number of completed epochs.

    To read only the weights, use `megabatch_train.towers.load("open_clip:ViT-B-32@logs/run/checkpoints/epoch_5.pt")`.

    Args:
        path: of the file.
        model: the open_clip model that was trained, wrapped in DDP or not.
        optimizer: if given, its state is loaded.
        scaler: if given, its state is loaded if the checkpoint contains one.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or not {"epoch", "state_dict"} <= checkpoint.keys():
        content = sorted(checkpoint)[:4] if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise ValueError(f"{path} must be a training checkpoint, with epoch and state_dict, got {content}")
    unwrap(model).load_state_dict({key.removeprefix(_PREFIX): value for key, value in checkpoint["state_dict"].items()})
    if optimizer is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
    if scaler is not None and "scaler" in checkpoint:
        scaler.load_state_dict(checkpoint["scaler"])
    return int(checkpoint["epoch"])
