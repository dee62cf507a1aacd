"""The cached losses of sentence-transformers without a similarity matrix and without an all-gather of embeddings.

The classes inherit from the original classes, which split a batch into mini-batches, encode them twice and hook into the
trainer's backward pass. They also inherit the support of tokenizers, images, flattened inputs and DDP. Two parts are replaced.
`megabatch.info_nce_loss` computes the loss of all embeddings. Texts are encoded from long to short, because the original
truncates a mini-batch to its longest text. In a script, only the import changes:

    from megabatch.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch import extras
from megabatch.cached import second_pass
from megabatch.cached.sources import from_mask, longest_first
from megabatch.dispatch import Backend
from megabatch.integrations.trainers import LearnedScale, candidate_scores, differentiate, ranking_loss
from megabatch.losses.negatives import Contrast
from megabatch.world import default_group

extras.load("sentence_transformers", purpose="megabatch.integrations.sentence_transformers")

from sentence_transformers import MultiVectorEncoder, SentenceTransformer  # noqa: E402
from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses  # noqa: E402
from sentence_transformers.multi_vector_encoder import scoring  # noqa: E402
from sentence_transformers.sentence_transformer import losses as originals  # noqa: E402
from sentence_transformers.util import cat_padded_token_embeddings, cos_sim, dot_score  # noqa: E402

__all__ = [
    "CachedGISTEmbedLoss",
    "CachedMultiVectorMultipleNegativesRankingLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "MultiVectorDistillKLDivLoss",
]

QUERY_TO_DOC, DOC_TO_QUERY, DOC_TO_DOC = "query_to_doc", "doc_to_query", "doc_to_doc"
_CONTRASTS: dict[str, Contrast] = {
    QUERY_TO_DOC: "query-key",
    "query_to_query": "query-query",
    DOC_TO_QUERY: "key-query",
    DOC_TO_DOC: "key-key",
}

_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}  # features with one row for each text


class _LinearMemory:
    """The base of both losses: checks of the model, and a temperature that may be learned."""

    model: Any
    learned_scale: LearnedScale | None
    _order: _Order

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:  # ()
        """Computes the loss. Its backward pass runs through the model one mini-batch at a time."""
        if self.learned_scale is not None and "calculate_loss" in vars(self):
            raise ValueError(
                "learn_temperature must be False in MatryoshkaLoss, got True; "
                "CachedMultipleNegativesRankingLoss takes matryoshka_dims instead"
            )
        parent: Any = super()
        with self._order.of(sentence_features, self.model) as longest_first:
            loss: Tensor = parent.forward(longest_first, labels)
        return loss if self.learned_scale is None or not torch.is_grad_enabled() else self.learned_scale.attach(loss)

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the configuration for a model card."""
        parent: Any = super()
        own = {"learn_temperature": self.learned_scale is not None, "sort_by_length": self._order.enabled}
        return {**parent.get_config_dict(), **own}


class CachedMultipleNegativesRankingLoss(_LinearMemory, originals.CachedMultipleNegativesRankingLoss):
    """sentence-transformers' loss of this name, with memory that is linear in the batch.

    It has the same arguments, values and gradients. `gather_across_devices` passes embeddings round a ring (docs/ring.md)
    instead of gathering them, and ranks may have different numbers of pairs. `mini_batch_size` is the number of texts encoded
    at once. The loss does not depend on it. `hardness_mode` doubles the embedding dimension of the matmuls. `similarity_fct` is
    `cos_sim` or `dot_score`.

    Args:
        model: a SentenceTransformer.
        *args: all other arguments of the original.
        **kwargs: keyword arguments of the original.
        learn_temperature: whether `scale` is the initial value of a parameter, which the trainer's optimizer then trains. It
            is not part of the saved model.
        max_scale: the upper bound of a learned scale.
        labels_are_ids: whether the column "label" of the dataset has an integer for each row. Rows with equal integers are then
            not each other's negatives. A query with several positives becomes several rows with one label.
        matryoshka_dims: the dimensions to which embeddings may be truncated later. The loss is the sum over them. Include the
            full dimension, because columns beyond the largest dimension get no gradient. They are supported only without hard
            negatives. The direction must be "query_to_doc", or both directions with `partition_mode="per_direction"`.
        matryoshka_weights: one weight for each dimension (default: all 1).
        sort_by_length: whether texts of similar length are encoded together, which saves padding. Dropout then draws different
            numbers than in the original, as in a batch with another order.
        backend: "auto", "eager" or "triton". It changes the speed but not the result.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *args: Any,
        learn_temperature: bool = False,
        max_scale: float = 100.0,
        labels_are_ids: bool = False,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        sort_by_length: bool = True,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        _one_vector("model", model)
        super().__init__(model, *args, **kwargs)
        if self.similarity_fct not in (cos_sim, dot_score):
            name = getattr(self.similarity_fct, "__name__", type(self.similarity_fct).__name__)
            raise ValueError(f"similarity_fct must be sentence_transformers.util.cos_sim or dot_score, got {name}")
        self.learned_scale = LearnedScale(self.scale, max_scale) if learn_temperature else None
        self.labels_are_ids = labels_are_ids
        self._order = _Order(sort_by_length)
        self.matryoshka_dims, self.matryoshka_weights = matryoshka_dims, matryoshka_weights
        self.backend = backend
        if matryoshka_dims is not None:
            self._check_widths()

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:  # ()
        """Computes the loss of embeddings, which come as a list of mini-batches for each column of the dataset."""
        if self.labels_are_ids and labels is None:
            raise ValueError('labels must be given if labels_are_ids is True, so the dataset needs a column "label"')
        columns = self._order.restore(reps)
        if self.similarity_fct is cos_sim:
            columns = [F.normalize(column, dim=1) for column in columns]
        ids = labels if self.labels_are_ids else None
        return differentiate(
            lambda scale: self._loss(columns, ids, scale), self.scale, self.learned_scale, with_backward=with_backward
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the configuration for a model card."""
        added = ("labels_are_ids", "matryoshka_dims", "matryoshka_weights")
        return {**super().get_config_dict(), **{name: getattr(self, name) for name in added}}

    def _loss(self, columns: list[Tensor], ids: Tensor | None, scale: float | Tensor) -> Tensor:  # ()
        query, key = columns[:2]
        hard = torch.stack(columns[2:], dim=1) if len(columns) > 2 else None  # (N, K, D)
        if self.matryoshka_dims is not None:
            if hard is not None:
                raise ValueError(
                    f"matryoshka_dims must be None with hard negatives, got {self.matryoshka_dims} and {len(columns)} columns; "
                    "MatryoshkaLoss around this loss supports them, one dimension after another"
                )
            return mb.matryoshka_clip_loss(
                query,
                key,
                scale,
                widths=self.matryoshka_dims,
                weights=self.matryoshka_weights,
                symmetric=DOC_TO_QUERY in self.directions,
                ids=ids,
                group=self._group(),
                backend=self.backend,
            )
        symmetric = self.partition_mode == "per_direction" and DOC_TO_QUERY in self.directions
        options: dict[str, Any] = {"scale": scale, "group": self._group(), "backend": self.backend}
        if self.hardness_mode is None or self.hardness_strength == 0:
            negatives = [] if hard is None else [mb.Negatives(hard)]
            contrast = [_CONTRASTS[name] for name in self.directions]
            if symmetric:
                return mb.info_nce_loss(query, key, negatives=negatives, symmetric=True, ids=ids, **options)
            return mb.info_nce_loss(
                query, key, negatives=[*negatives, *self._match_again(key)], contrast=contrast, ids=ids, **options
            )
        forth = self._with_hardness(query, key, hard, ids, options)
        return (forth + mb.info_nce_loss(key, query, ids=ids, **options)) / 2 if symmetric else forth

    def _with_hardness(
        self, query: Tensor, key: Tensor, hard: Tensor | None, ids: Tensor | None, options: dict[str, Any]
    ) -> Tensor:  # ()
        """Computes the loss with hardness. The logits of some negatives are scale·⟨q, k⟩ + strength·⟨q, k⟩.

        The second term has no gradient. The sum is the dot product of [q, q·strength / scale] and [k, k], which have twice the
        dimension. With [k, 0], the second term is 0.
        """
        harder = query.detach() * (
            self.hardness_strength / options["scale"]
        )  # the scale is not detached, because its gradients cancel
        wide, plain_key = torch.cat((query, harder), 1), _double(key, harder=False)
        own = _own_ids(query) if ids is None else ids
        contrast = [_CONTRASTS[name] for name in self.directions]
        if self.partition_mode == "per_direction":
            contrast = [_CONTRASTS[QUERY_TO_DOC]]
        negatives = self._match_again(plain_key)
        if self.hardness_mode != "hard_negatives":
            contrast.remove(_CONTRASTS[QUERY_TO_DOC])
            negatives.append(mb.Negatives(_double(key, harder=True), ids=own))
        if "query-query" in contrast:
            contrast.remove("query-query")
            negatives.append(mb.Negatives(_double(query, harder=False), ids=own))
        if hard is not None:
            negatives += self._hard_negatives(hard, own)
        return mb.info_nce_loss(wide, plain_key, negatives=negatives, contrast=contrast, ids=own, **options)

    def _hard_negatives(self, hard: Tensor, own: Tensor) -> list[mb.Negatives]:
        if self.hardness_mode == "all_negatives":
            return [mb.Negatives(_double(hard, harder=True))]
        if DOC_TO_DOC in self.directions:
            raise ValueError(
                f'hardness_mode must be None or "all_negatives" with the direction "{DOC_TO_DOC}" and hard negatives, '
                f"got {self.hardness_mode!r}"
            )
        others_are_harder = self.hardness_mode == "in_batch_negatives"
        others = _double(hard, harder=others_are_harder).flatten(0, 1)  # (N·K, 2·D)
        return [
            mb.Negatives(others, ids=own.repeat_interleave(hard.shape[1])),
            mb.Negatives(_double(hard, harder=not others_are_harder), private=True),
        ]

    def _match_again(self, key: Tensor) -> list[mb.Negatives]:
        """Returns the matching pair as a negative, because the joint softmax of the original contains it twice."""
        doubled = self.partition_mode == "joint" and DOC_TO_QUERY in self.directions
        return [mb.Negatives(key[:, None], private=True)] if doubled else []

    def _check_widths(self) -> None:
        allowed = set(self.directions) == {QUERY_TO_DOC} or (
            set(self.directions) == {QUERY_TO_DOC, DOC_TO_QUERY} and self.partition_mode == "per_direction"
        )
        if not allowed:
            raise ValueError(
                'directions must be ("query_to_doc",), or with "doc_to_query" and partition_mode="per_direction", if '
                f"matryoshka_dims are given, got {self.directions} and {self.partition_mode!r}"
            )
        if self.similarity_fct is not cos_sim:
            raise ValueError("similarity_fct must be cos_sim if matryoshka_dims are given, got dot_score")
        if self.hardness_mode is not None:
            raise ValueError(f"hardness_mode must be None if matryoshka_dims are given, got {self.hardness_mode!r}")

    def _group(self) -> Any:
        return default_group() if self.gather_across_devices else None


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """sentence-transformers' loss of this name: the mean of both directions, each with its own softmax.

    It equals `CachedMultipleNegativesRankingLoss` with `directions=("query_to_doc", "doc_to_query")` and
    `partition_mode="per_direction"`.

    Args:
        model: a SentenceTransformer.
        scale: the factor of the similarities.
        similarity_fct: `cos_sim` or `dot_score`.
        mini_batch_size: the number of texts encoded at once.
        kwargs: all other arguments of `CachedMultipleNegativesRankingLoss`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Any = cos_sim,
        mini_batch_size: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            scale=scale,
            similarity_fct=similarity_fct,
            mini_batch_size=mini_batch_size,
            directions=(QUERY_TO_DOC, DOC_TO_QUERY),
            partition_mode="per_direction",
            **kwargs,
        )


class CachedGISTEmbedLoss(_LinearMemory, originals.CachedGISTEmbedLoss):
    """sentence-transformers' loss of this name, with memory that is linear in the batch.

    It has the same arguments, values and gradients, except for two things. A query is never its own negative, even if the guide
    gives query and positive equal embeddings. With `gather_across_devices`, anchors are contrasted with the anchors of all
    ranks, as in one process with the whole batch. The original contrasts them only with the anchors of their own rank.

    Args:
        model: a SentenceTransformer.
        guide: another SentenceTransformer. Its similarities decide which texts may be negatives.
        *args: all other arguments of the original.
        **kwargs: keyword arguments of the original.
        learn_temperature: whether 1 / `temperature` is the initial value of a parameter, which the trainer's optimizer then
            trains. It is not part of the saved model.
        max_scale: the upper bound of a learned 1 / temperature.
        sort_by_length: whether texts of similar length are encoded together, which saves padding. Dropout then draws different
            numbers than in the original, as in a batch with another order.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        guide: SentenceTransformer,
        *args: Any,
        learn_temperature: bool = False,
        max_scale: float = 100.0,
        sort_by_length: bool = True,
        **kwargs: Any,
    ) -> None:
        _one_vector("model", model)
        _one_vector("guide", guide)
        super().__init__(model, guide, *args, **kwargs)
        self.learned_scale = LearnedScale(1 / self.temperature, max_scale) if learn_temperature else None
        self._order = _Order(sort_by_length)

    def calculate_loss(
        self, reps: list[list[Tensor]], reps_guided: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:  # ()
        """Computes the loss from embeddings of the model and the guide, which are lists of mini-batches for each column."""
        columns = [F.normalize(column, dim=1) for column in self._order.restore(reps)]
        guide = [F.normalize(column, dim=1) for column in self._order.restore(reps_guided)]
        return differentiate(
            lambda scale: self._loss(columns, guide, scale),
            1 / self.temperature,
            self.learned_scale,
            with_backward=with_backward,
        )

    def _loss(self, columns: list[Tensor], guide: list[Tensor], scale: float | Tensor) -> Tensor:  # ()
        contrast: list[Contrast] = ["query-key"]
        contrast += ["query-query"] if self.contrast_anchors else []
        contrast += ["key-key"] if self.contrast_positives else []
        # Hard negatives have no owners, because the original does not compare positives with them.
        hard = mb.Negatives(torch.cat(columns[2:]), guide=torch.cat(guide[2:])) if len(columns) > 2 else None
        margin: float | Tensor = -self.margin
        if self.margin_strategy == "relative":
            margin = -self.margin * (guide[0] * guide[1]).sum(1).abs()  # (N,)
        return mb.info_nce_loss(
            columns[0],
            columns[1],
            scale=scale,
            negatives=hard,
            contrast=contrast,
            margin=margin,
            guide=(guide[0], guide[1]),
            group=default_group() if self.gather_across_devices else None,
        )


class _Order:
    """Sorts the texts of each column from long to short, and restores the order of their embeddings."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._orders: list[Tensor | None] = []  # (N,) of each column; none outside of a call

    @contextmanager
    def of(self, columns: Iterable[dict[str, Tensor]], model: Any) -> Iterator[list[dict[str, Tensor]]]:
        """Yields the sorted columns.

        They are not sorted for a model with batch normalization, because its statistics depend on the texts of a mini-batch.
        """
        columns, sorting = list(columns), self.enabled and not second_pass.list_batch_norms([model])
        self._orders = [_longest_first(column) if sorting else None for column in columns]
        try:
            yield [
                column if order is None else {key: _rows(value, order) for key, value in column.items()}
                for column, order in zip(columns, self._orders, strict=True)
            ]
        finally:
            self._orders = []

    def restore(self, reps: list[list[Tensor]]) -> list[Tensor]:  # of (N, D)
        """Returns the embeddings of each column in the order of the batch, from the embeddings of its mini-batches."""
        orders = self._orders or [None] * len(reps)
        columns = [torch.cat(parts) for parts in reps]
        return [x if order is None else _rows(x, order.argsort()) for x, order in zip(columns, orders, strict=True)]


def _longest_first(features: dict[str, Any]) -> Tensor | None:  # (N,)
    """Returns the order of the texts from long to short.

    Returns None if the features are not padded tokens, or if sorting would not save padding.
    """
    plain = all(isinstance(value, Tensor | bool | int | float | str | None) for value in features.values())
    rows = {key: value for key, value in features.items() if isinstance(value, Tensor) and value.dim()}
    lengths = from_mask(rows) if plain and rows.keys() <= _TOKENS else None
    return None if lengths is None else longest_first(lengths, features["attention_mask"].shape[1])


def _rows(value: Any, order: Tensor) -> Any:
    return value.index_select(0, order.to(value.device)) if isinstance(value, Tensor) and value.dim() else value


def _one_vector(name: str, model: Any) -> None:
    """Raises for a late-interaction model, which returns one vector for each token."""
    if isinstance(model, MultiVectorEncoder):
        raise TypeError(
            f"{name} must return one vector for each text, got {type(model).__name__}, which returns one for each token; "
            "use CachedMultiVectorMultipleNegativesRankingLoss or MultiVectorDistillKLDivLoss"
        )


def _double(embeddings: Tensor, *, harder: bool) -> Tensor:  # (..., D) → (..., 2·D)
    """Concatenates embeddings with a detached copy of them if `harder`, or else with zeros."""
    second = embeddings.detach() if harder else torch.zeros_like(embeddings, requires_grad=False)
    return torch.cat((embeddings, second), -1)


def _own_ids(rows: Tensor) -> Tensor:  # (N,)
    """Returns one integer for each row. The integers of different ranks differ."""
    first = 0 if default_group() is None else dist.get_rank() << 40
    return torch.arange(first, first + len(rows), device=rows.device)


# ----------------------------------------------------------------------------------------------------------------------
# The losses of `MultiVectorEncoder`: late interaction without score matrices.

_NORMALIZES = {scoring.colbert_scores: False, scoring.mean_colbert_scores: True}
_NORMALIZES_CANDIDATES = {scoring.colbert_kd_scores: False, scoring.mean_colbert_kd_scores: True}


class CachedMultiVectorMultipleNegativesRankingLoss(multi_vector_losses.CachedMultiVectorMultipleNegativesRankingLoss):
    """sentence-transformers' loss of this name, with memory that is linear in the tokens.

    It has the same arguments, values and gradients. `gather_across_devices` passes the tokens of documents round a ring
    (docs/ring.md) instead of gathering them, and ranks may have different numbers of pairs. Scores of float64 inputs are
    float64, but the original rounds them to float32. `score_mini_batch_size` has no effect. `similarity_fct` is
    `colbert_scores` or `mean_colbert_scores`. If all tokens of a positive are masked, the loss is infinite.

    Args:
        model: a MultiVectorEncoder.
        *args: all other arguments of the original.
        **kwargs: keyword arguments of the original.
        backend: "auto", "eager" or "triton". It changes the speed but not the result.
    """

    def __init__(self, model: Any, *args: Any, backend: Backend = "auto", **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._normalize = _divides_scores(self.similarity_fct, _NORMALIZES, "colbert_scores or mean_colbert_scores")
        self.backend = backend

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:  # ()
        """Computes the loss of token embeddings, which come as a list of mini-batches for each column of the dataset."""
        columns = [cat_padded_token_embeddings(parts, masks) for parts, masks in zip(reps, masks_chunks, strict=True)]
        return ranking_loss(
            [values for values, _ in columns],
            [mask for _, mask in columns],
            self.scale,
            normalize=self._normalize,
            gather=self.gather_across_devices,
            backend=self.backend,
            with_backward=with_backward,
        )


class MultiVectorDistillKLDivLoss(multi_vector_losses.MultiVectorDistillKLDivLoss):
    """sentence-transformers' loss of this name. Dot products are stored for some queries at a time.

    Backward computes them again. The arguments, values and gradients are the same. `similarity_fct` is `colbert_kd_scores` or
    `mean_colbert_kd_scores`.

    Args:
        model: a MultiVectorEncoder.
        *args: all other arguments of the original.
        **kwargs: keyword arguments of the original.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        normalize = _divides_scores(self.similarity_fct, _NORMALIZES_CANDIDATES, "colbert_kd_scores or mean_colbert_kd_scores")
        self._normalize = normalize
        self.similarity_fct = partial(candidate_scores, normalize=normalize)

    def get_config_dict(self) -> dict[str, Any]:
        """Returns the configuration for a model card."""
        name = "mean_colbert_kd_scores" if self._normalize else "colbert_kd_scores"
        return {**super().get_config_dict(), "similarity_fct": name}


def _divides_scores(function: Any, known: dict[Any, bool], expected: str) -> bool:
    """Returns whether the scores are divided by the number of query tokens."""
    if function not in known:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"similarity_fct must be {expected} of sentence_transformers, got {name}")
    return known[function]
