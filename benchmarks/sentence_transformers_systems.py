"""The systems of `sentence_transformers_gpu.py`: a MiniLM-sized encoder with random weights, and steps over it by name.

Each step is a function of a `Setting` that leaves gradients in the encoder and returns the loss, InfoNCE with cosines times 20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch as mb
from megabatch.cached import Budget

SCALE = 20.0
PLAIN, THEIRS, ALONE = "plain step", "sentence-transformers", "towers alone"
OURS, OURS_AUTO, INTEGRATION = "megabatch", "megabatch, budget auto", "megabatch's loss in sentence-transformers"
Features = dict[str, Tensor]


class Words(nn.Module):
    """A BERT, as sentence-transformers' first module: token embeddings beside the features."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width, "vocab_size": vocabulary}
        self.bert = BertModel(BertConfig(num_attention_heads=12, **shape), add_pooling_layer=False)

    def forward(self, features: Features) -> Features:
        """Token embeddings."""
        states = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": states}


class Mean(nn.Module):
    """Mean pooling, the second."""

    def forward(self, features: Features) -> Features:
        """Sentence embeddings."""
        mask = features["attention_mask"][:, :, None].to(features["token_embeddings"].dtype)
        return {**features, "sentence_embedding": (features["token_embeddings"] * mask).sum(1) / mask.sum(1)}


class Tower(nn.Module):
    """The encoder as `cached_backward` calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # (n, D)
        """Unit length."""
        found: Tensor = self.model({"input_ids": input_ids, "attention_mask": attention_mask})["sentence_embedding"]
        return F.normalize(found, dim=1)


def encoder(width: int, layers: int, vocabulary: int, device: str) -> nn.Module:
    """Six layers of 384 are MiniLM's size."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(Words(width, layers, vocabulary), Mean())


def texts(rows: int, tokens: int, vocabulary: int, device: str) -> tuple[Features, Features]:
    """Queries and documents of random tokens; half of a document's are its query's."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(5, vocabulary, (2, rows, tokens), generator=generator, device=device)
    ids[1, :, : tokens // 2] = ids[0, :, : tokens // 2]
    mask = torch.ones(rows, tokens, dtype=torch.int64, device=device)
    return {"input_ids": ids[0], "attention_mask": mask}, {"input_ids": ids[1], "attention_mask": mask.clone()}


@dataclass
class Setting:
    """The inputs of a step."""

    model: nn.Module
    columns: tuple[Features, Features]
    chunk: int
    device: str
    autocast: bool = True
    group: Any = None  # of ranks that share the batch

    def cast(self) -> Any:
        """The autocast region of a step."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast and self.device == "cuda")


def plain(s: Setting) -> Tensor:
    """One graph over everything, and a dense loss."""
    tower = Tower(s.model)
    with s.cast():
        query, key = (tower(**column) for column in s.columns)
        loss = F.cross_entropy(SCALE * query @ key.T, torch.arange(len(query), device=query.device))
    loss.backward()
    return loss.detach()


def ours(s: Setting, budget: Budget = None, lengths: Literal["auto"] | None = "auto") -> Tensor:
    """`cached_backward` and `info_nce_loss`; without `lengths`, texts keep their order and padding."""
    tower = Tower(s.model)
    backend = "triton" if s.device == "cuda" else "auto"

    def loss(query: Tensor, key: Tensor) -> Tensor:
        return mb.info_nce_loss(query, key, scale=SCALE, group=s.group, backend=backend)

    towers = [(tower, column if lengths else mb.HostSource(column, lengths=None)) for column in s.columns]
    with s.cast():
        return mb.cached_backward(loss, towers, chunk_size=s.chunk, budget=budget)


def _in_their_classes(kind: Any, s: Setting, **options: Any) -> Tensor:
    options = {"scale": SCALE, "mini_batch_size": s.chunk, "gather_across_devices": s.group is not None, **options}
    loss = kind(s.model, **options)
    with s.cast():  # backward too: there the model encodes again, and its trainer has autocast around the model
        value: Tensor = loss([dict(column) for column in s.columns], None)
        value.backward()
    return value.detach()


def theirs(s: Setting, **options: Any) -> Tensor:
    """`CachedMultipleNegativesRankingLoss`."""
    try:
        from sentence_transformers.sentence_transformer import losses
    except ImportError:  # versions before 6
        from sentence_transformers import losses
    return _in_their_classes(losses.CachedMultipleNegativesRankingLoss, s, **options)


def integration(s: Setting) -> Tensor:
    """Our class of the same name, which keeps their step."""
    from megabatch.integrations import sentence_transformers

    return _in_their_classes(sentence_transformers.CachedMultipleNegativesRankingLoss, s)


def towers_alone(s: Setting) -> Tensor:
    """One forward pass and one forward and backward pass of every chunk, and nothing else."""
    tower, total = Tower(s.model), torch.zeros((), device=s.device)
    chunks = [
        {key: value[i : i + s.chunk] for key, value in column.items()}
        for column in s.columns
        for i in range(0, len(column["input_ids"]), s.chunk)
    ]
    with s.cast():
        with torch.no_grad():
            for chunk in chunks:
                total += tower(**chunk).sum()
        for chunk in chunks:
            embeddings = tower(**chunk)
            embeddings.backward(torch.full_like(embeddings, 1e-3))
    return total


SYSTEMS: dict[str, Callable[[Setting], Tensor]] = {
    OURS: ours,
    THEIRS: theirs,
    INTEGRATION: integration,
    OURS_AUTO: lambda s: ours(s, "auto"),
    ALONE: towers_alone,
}
