"""The decoders of `decoders_gpu.py`, their texts, and the steps that are compared."""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.cached import Budget
from megabatch_train.towers.layers.lora import inject
from megabatch_train.towers.sentence_transformer import TextEncoder
from megabatch_train.towers.tower import LoraConfig, compile_layers, compiler_settings, layers

SCALE, RANK = 20.0, 16
LONGEST, SPREAD = 512, 0.6  # most tokens of a text; standard deviation of the logarithm of lengths
MEANS = (24, 128, 128)  # mean number of tokens of a query, a document and a hard negative
PADDING = 4  # length of the longest text ÷ mean length of documents
TRAINED_LAYERS = 4  # trained layers of the 8B model without PEFT
OURS, PADDED, COMPILED = "megabatch, packed", "megabatch, padded", "megabatch, packed, compiled"
KEPT = "megabatch, packed, compiled, graphs kept"
OURS_LIBRARY, THEIRS = "megabatch", "sentence-transformers"
THEIRS_TOKENS, THEIRS_COMPILED = f"{THEIRS}, by tokens", f"{THEIRS}, by tokens, compiled"
Features = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A decoder, and the sizes of its measurements."""

    name: str
    config: dict[str, Any]
    adapters: bool  # whether to train LoRA adapters of bf16 weights, or all weights in float32
    batches: tuple[int, ...]  # pairs, in ascending order
    tokens: tuple[int, ...]  # numbers of tokens of a chunk with padding, to choose from, in ascending order
    family: str = "qwen3"  # of transformers
    means: tuple[int, ...] = MEANS  # mean number of tokens of each column
    spread: float = SPREAD


_HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151669, "max_position_embeddings": 32768}
SMALL = Shape(
    "Qwen3-0.6B",
    {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, **_HEADS},
    False,
    (256, 1024, 4096, 8192),
    (16384, 32768, 65536),
)
LARGE = Shape(
    "Qwen3-8B",
    {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, **_HEADS},
    True,
    (64, 128, 512, 1024),
    (8192, 16384, 32768),
)
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"head_dim": 8, "vocab_size": 500, "max_position_embeddings": 512}
TINY = [Shape("tiny, whole", _TINY, False, (8, 24), (256, 1024)), Shape("tiny, in part", _TINY, True, (8, 24), (256,))]


class Texts(nn.Module):
    """The decoder with the interface of sentence-transformers, for padded texts. It returns the state of the last token.

    With a `multiple`, texts are padded to the next multiple above the longest text, and a mini-batch of one text is encoded
    twice. So every mini-batch has more than one text, and a mask that is aligned for the attention of PyTorch. If these
    conditions changed, the compiler would compile the layers again.
    """

    def __init__(self, encoder: TextEncoder, multiple: int = 0) -> None:
        super().__init__()
        self.encoder, self.multiple = encoder, multiple

    def forward(self, features: Features) -> Features:
        """Returns the features and the embeddings."""
        ids, mask = features["input_ids"], features["attention_mask"]
        if self.multiple:
            ids, mask = (F.pad(part, (0, self.multiple - part.shape[1] % self.multiple)) for part in (ids, mask))
            ids, mask = (part.repeat(2 if len(part) == 1 else 1, 1) for part in (ids, mask))
        return {**features, "sentence_embedding": self.encoder(ids, mask)[: len(features["input_ids"])]}


@dataclass
class Setting:
    """The inputs of a step."""

    encoder: TextEncoder
    columns: list[Features]
    tokens: int  # tokens of a chunk with padding
    device: str
    autocast: bool = True

    def cast(self) -> Any:
        """Returns the autocast context of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast and self.device == "cuda")


def decoder(shape: Shape, device: str, half: bool) -> tuple[TextEncoder, str]:
    """Returns the decoder or encoder with random weights, and words for its trained parameters."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
    try:
        with torch.device(device):
            model = AutoModel.from_config(AutoConfig.for_model(shape.family, **shape.config))
    finally:
        torch.set_default_dtype(old_dtype)
    trained_in_words = "all weights"
    if shape.adapters:
        try:
            inject(model, LoraConfig(RANK))
            trained_in_words = f"LoRA of rank {RANK}"
        except ModuleNotFoundError:
            trained_in_words = f"the last {TRAINED_LAYERS} layers"
            model.requires_grad_(False)
            for layer in model.layers[-TRAINED_LAYERS:]:
                layer.float().requires_grad_(True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return TextEncoder(model).to(device), trained_in_words


def texts(
    pairs: int, vocabulary: int, device: str, longest: int, means: Sequence[int] = MEANS, spread: float = SPREAD, least: int = 4
) -> list[Features]:
    """Returns queries, documents and hard negatives. A document begins with the first tokens of its query."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for mean in means:
        center = math.log(min(mean, longest / 3)) - spread**2 / 2
        random_lengths = (torch.randn(pairs, generator=generator) * spread + center).exp()
        lengths = random_lengths.round().long().clamp(least, longest)
        ids = torch.randint(5, vocabulary, (pairs, int(lengths.max())), generator=generator)
        if columns:
            ids[:, :4] = columns[0]["input_ids"][:, :4].cpu()
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        columns.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return columns


def plain(s: Setting) -> Tensor:
    """A step with one graph for the whole batch, and a dense loss."""
    with s.cast():
        query, *documents = (s.encoder(**column) for column in s.columns)
        loss = F.cross_entropy(SCALE * query @ torch.cat(documents).T, torch.arange(len(query), device=query.device))
    loss.backward()
    return loss.detach()


class _Loss:
    further_rows = True

    def __call__(self, query: Tensor, second: Tensor) -> Tensor:
        key, hard = second[: len(query)], second[len(query) :]
        return mb.info_nce_loss(query, key, scale=SCALE, negatives=hard if len(hard) else None)


def ours(s: Setting, budget: Budget = None) -> Tensor:
    """A step with `cached_backward`. Hard negatives are further documents."""
    query, *others = s.columns
    width = max(part["input_ids"].shape[1] for part in others)
    documents = {name: torch.cat([F.pad(part[name], (0, width - part[name].shape[1])) for part in others]) for name in query}
    sizes = [max(1, s.tokens // column["input_ids"].shape[1]) for column in (query, documents)]
    with s.cast():
        return mb.cached_backward(_Loss(), [(s.encoder, query), (s.encoder, documents)], chunk_size=sizes, budget=budget)


def rehearse_loss(s: Setting) -> None:
    """Compiles the kernels of megabatch's loss for this batch."""
    rows, width = len(s.columns[0]["input_ids"]), s.encoder.model.config.hidden_size
    counts = rows, (len(s.columns) - 1) * rows
    query, second = (torch.randn(count, width, device=s.device, requires_grad=True) for count in counts)
    with s.cast():
        loss = _Loss()(query, second)
    loss.backward()


def theirs(s: Setting, *, by_tokens: bool = False, multiple: int = 0) -> Tensor:
    """A step with `CachedMultipleNegativesRankingLoss`, in mini-batches with a number of texts or of tokens.

    The loss counts tokens without padding. It does not sort texts, and pads a mini-batch to its longest text.
    """
    try:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss as Loss
    except ImportError:  # versions before 6
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss as Loss
    options: dict[str, Any] = {"mini_batch_size": max(1, s.tokens // s.columns[1]["input_ids"].shape[1])}
    if by_tokens:
        if "mini_batch_num_tokens" not in inspect.signature(Loss.__init__).parameters:  # versions before 5.6
            raise ImportError("mini_batch_num_tokens")
        options = {"mini_batch_size": 4 * options["mini_batch_size"], "mini_batch_num_tokens": s.tokens // PADDING}
    loss = Loss(nn.Sequential(Texts(s.encoder, multiple)), scale=SCALE, **options)
    with s.cast():
        value: Tensor = loss([dict(column) for column in s.columns], None)
        value.backward()
    return value.detach()


@dataclass(frozen=True)
class System:
    """A step, and the preparation of the decoder, which is not timed."""

    step: Callable[[Setting], Tensor]
    library: str
    batches: int  # number of batches of a shape, smallest first, because slow systems skip large batches
    packed: bool = False
    compiled: bool = False

    def prepare(self, encoder: TextEncoder) -> None:
        """Sets whether texts are packed or padded, and whether layers are compiled."""
        for block in layers(encoder):
            block._compiled_call_impl = None
        if not self.packed:
            encoder.pad()
        elif not encoder.packed and not encoder.pack():
            raise RuntimeError("this version of transformers cannot pack texts")
        if not self.compiled:
            return
        if encoder not in _COMPILED:
            compile_layers(encoder, any_size=True)
            _COMPILED[encoder] = [block._compiled_call_impl for block in layers(encoder)]
        for block, call in zip(layers(encoder), _COMPILED[encoder], strict=True):
            block._compiled_call_impl = call

    def __call__(self, s: Setting) -> Tensor:
        """Runs a step. Adds gradients to the decoder and returns the loss."""
        with compiler_settings(strict=True) if self.compiled else nullcontext():
            return self.step(s)


_COMPILED: dict[TextEncoder, list[Any]] = {}  # compiled calls of the layers, which all systems share
SYSTEMS = {  # the first system of a library chooses the chunk size for all its systems
    COMPILED: System(ours, OURS_LIBRARY, 4, packed=True, compiled=True),
    THEIRS_COMPILED: System(lambda s: theirs(s, by_tokens=True, multiple=8), THEIRS, 2, compiled=True),
    KEPT: System(lambda s: ours(s, budget="auto"), OURS_LIBRARY, 2, packed=True, compiled=True),
    OURS: System(ours, OURS_LIBRARY, 1, packed=True),
    PADDED: System(ours, OURS_LIBRARY, 1),
    THEIRS: System(theirs, THEIRS, 1),
    THEIRS_TOKENS: System(lambda s: theirs(s, by_tokens=True), THEIRS, 1),
}
WITH_COMPILER = {COMPILED: OURS, KEPT: OURS, THEIRS_COMPILED: THEIRS_TOKENS}


def compilations() -> int:
    """Returns the number of compilations of PyTorch in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
