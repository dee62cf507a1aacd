"""info_nce_loss against the libraries whose losses it covers: values and gradients, and where these mean something else."""

import pytest
import torch
import torch.nn.functional as F

import megabatch as mb
from helpers import aligned_pairs, assert_same_outcomes, leaves, unit

ALL = ("query-key", "query-query", "key-query", "key-key")
SCALE = 20.0


def data(K=3):
    query, key = aligned_pairs(23, 8, noise=1.0, seed=0)
    return leaves(query, key, F.normalize(key[:, None] + 0.7 * unit(23, K, 8, seed=7), dim=-1))


def agree_with_library(mine, theirs, embeddings):
    """Libraries divide embeddings by their length themselves; so theirs are given some of other lengths."""
    raw = leaves(*(t * torch.linspace(0.5, 3, len(t), dtype=t.dtype).view(-1, *[1] * (t.dim() - 1)) for t in embeddings))
    assert_same_outcomes(lambda *parts: mine(*(F.normalize(part, dim=-1) for part in parts)), theirs, raw)


def test_info_nce_pytorch():
    theirs = pytest.importorskip("info_nce").info_nce
    query, key, negatives = data()
    unpaired = unit(31, 8, seed=3).requires_grad_()
    agree_with_library(lambda q, k: mb.info_nce_loss(q, k, scale=10.0), theirs, [query, key])
    agree_with_library(
        lambda q, k, n: mb.info_nce_loss(q, k, scale=10.0, negatives=n, contrast=()),
        lambda q, k, n: theirs(q, k, n),
        [query, key, unpaired],
    )
    agree_with_library(
        lambda q, k, n: mb.info_nce_loss(q, k, scale=10.0, negatives=mb.Negatives(n, private=True), contrast=()),
        lambda q, k, n: theirs(q, k, n, negative_mode="paired"),
        [query, key, negatives],
    )


@pytest.fixture(scope="module")
def sentence_losses():
    return pytest.importorskip("sentence_transformers.sentence_transformer.losses")


DIRECTIONS = {
    "query-key": "query_to_doc",
    "query-query": "query_to_query",
    "key-query": "doc_to_query",
    "key-key": "doc_to_doc",
}


@pytest.mark.parametrize("contrast", [("query-key",), ("query-key", "query-query"), ALL])
@pytest.mark.parametrize("hard", [False, True])
def test_multiple_negatives_ranking_loss(sentence_losses, contrast, hard):
    """Its `doc_to_query` counts the matching pair a second time: in its joint softmax, s_ii is in the denominator twice."""
    query, key, negatives = data()
    theirs = sentence_losses.MultipleNegativesRankingLoss(
        None, scale=SCALE, directions=tuple(DIRECTIONS[name] for name in contrast), partition_mode="joint"
    )

    def of_library(q, k, n):
        documents = [k, *(n.unbind(1) if hard else ())]
        loss = theirs.compute_loss_from_embeddings([q, *documents], None)
        return loss + 0.0 * n.sum()

    def mine(q, k, n):
        found = mb.info_nce_loss(q, k, scale=SCALE, contrast=contrast, negatives=n if hard else None)
        return found + 0.0 * n.sum()

    inputs = [query, key, negatives]
    if "key-query" not in contrast:
        agree_with_library(mine, of_library, inputs)
        return
    assert of_library(*inputs) > mine(*inputs)

    def once_more(q, k, n):
        """The pair again, as one more private negative, is what the library computes."""
        further = [mb.Negatives(k[:, None], private=True), *([mb.Negatives(n)] if hard else [])]
        return mb.info_nce_loss(q, k, scale=SCALE, contrast=contrast, negatives=further) + 0.0 * n.sum()

    agree_with_library(once_more, of_library, inputs)


@pytest.mark.parametrize("hard", [False, True])
def test_both_directions_of_sentence_transformers(sentence_losses, hard):
    query, key, negatives = data()
    theirs = sentence_losses.MultipleNegativesRankingLoss(
        None, scale=SCALE, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    agree_with_library(
        lambda q, k, n: mb.info_nce_loss(q, k, scale=SCALE, symmetric=True, negatives=n if hard else None) + 0.0 * n.sum(),
        lambda q, k, n: theirs.compute_loss_from_embeddings([q, k, *(n.unbind(1) if hard else ())], None) + 0.0 * n.sum(),
        [query, key, negatives],
    )


def gist(sentence_losses, embeddings, guide, **options):
    """The library's loss on given embeddings; its constructor wants tokenizers, its forward does not."""
    loss = sentence_losses.GISTEmbedLoss.__new__(sentence_losses.GISTEmbedLoss)
    torch.nn.Module.__init__(loss)
    defaults = {"margin_strategy": "absolute", "margin": 0.0, "contrast_anchors": True, "contrast_positives": True}
    values = {**defaults, **options, "temperature": 1 / SCALE, "gather_across_devices": False, "must_retokenize": False}
    for name, value in values.items():
        setattr(loss, name, value)
    loss.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
    loss.cross_entropy_loss = torch.nn.CrossEntropyLoss()
    module = pytest.importorskip("sentence_transformers.sentence_transformer.losses.gist_embed")
    loss.model, loss.guide = embeddings, guide
    original = module.embed_columns
    module.embed_columns = lambda model, features: list(model)
    try:
        return loss([{} for _ in embeddings], None)
    finally:
        module.embed_columns = original


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("strategy", "margin"), [("absolute", 0.0), ("absolute", 0.1), ("relative", 0.2)])
def test_gist_embed_loss(sentence_losses, hard, strategy, margin):
    query, key, negatives = data(K=1)
    guide = aligned_pairs(23, 5, noise=0.7, seed=3)
    of_negatives = unit(23, 5, seed=4)
    matches = (guide[0] * guide[1]).sum(1)
    mine_margin = -margin if strategy == "absolute" else -margin * matches.abs()
    contrast = ("query-key", "query-query", "key-key")

    def of_library(q, k, n):
        embeddings, seen = [q, k, n[:, 0]], [*guide, of_negatives]
        count = 3 if hard else 2
        loss = gist(sentence_losses, embeddings[:count], seen[:count], margin_strategy=strategy, margin=margin)
        return loss + 0.0 * n.sum()

    def mine(q, k, n):
        # Without owners: the library does not compare keys with hard negatives.
        further = mb.Negatives(n[:, 0], guide=of_negatives) if hard else None
        loss = mb.info_nce_loss(q, k, scale=SCALE, contrast=contrast, negatives=further, guide=guide, margin=mine_margin)
        return loss + 0.0 * n.sum()

    agree_with_library(mine, of_library, [query, key, negatives])


def test_gist_takes_a_query_for_its_own_negative(sentence_losses):
    """Where the guide sees no difference between a query and its key, its limit does not leave out the query itself."""
    query, key, *_ = data()
    seen = unit(23, 5, seed=3)
    theirs = gist(sentence_losses, [query, key], [seen, seen])
    mine = mb.info_nce_loss(query, key, scale=SCALE, contrast=("query-key", "query-query", "key-key"), guide=(seen, seen))
    assert theirs > mine + 1


def test_cross_batch_memory():
    """pytorch-metric-learning's NTXentLoss with keys of earlier steps as its reference embeddings, one positive each."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    query, key, *_ = data()
    bank = unit(40, 8, seed=5)
    labels = torch.arange(23)
    theirs = losses.NTXentLoss(temperature=1 / SCALE)

    def of_library(q, k):
        reference_labels = torch.cat((labels, torch.full((40,), -1)))
        return theirs(q, labels, ref_emb=torch.cat((k, bank)), ref_labels=reference_labels)

    agree_with_library(lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, negatives=bank), of_library, [query, key])
