"""Late interaction in the trainers of sentence-transformers and PyLate, against their own losses: values and gradients.

A tiny model looks its tokens up in a table; the classes do the rest. In float64, results agree to rounding: to that of float32
with sentence-transformers, which rounds its scores, of 16 at most, to it.
"""

import pytest
import torch
import torch.nn.functional as F

VOCABULARY, WIDTH = 30, 6
ROUNDED_SCORES = 16 * torch.finfo(torch.float32).eps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::SyntaxWarning")


class Table(torch.nn.Module):
    """A vector for each token, all of them in one half of the space: no product of two is negative."""

    do_query_expansion, skiplist = False, (3,)

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.rand(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, features, task=None):
        vectors = F.normalize(self.weight[features["input_ids"]], dim=-1)
        return {"token_embeddings": vectors, "attention_mask": features["attention_mask"]}


def columns(rows, widths=(4, 7, 5, 6)):
    generator = torch.Generator().manual_seed(1)
    made = []
    for width in widths:
        lengths = torch.randint(2, width + 1, (rows, 1), generator=generator)
        ids = torch.randint(4, VOCABULARY, (rows, width), generator=generator)
        made.append({"input_ids": ids, "attention_mask": (torch.arange(width) < lengths).long()})
    return made


def outcome(loss_class, features, labels=None, **options):
    model = Table()
    loss = loss_class(model, **options)
    value = loss(features, labels)
    value.backward()
    return value.detach(), model.weight.grad


def assert_same(found, wanted, factor=1.0, tolerance=1e-12):
    torch.testing.assert_close(found[0], wanted[0].double(), rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1] * factor, wanted[1], rtol=0, atol=tolerance * factor)


def test_queries_alone_are_refused():
    from megabatch.integrations.trainers import ranking_loss

    with pytest.raises(ValueError, match="at least two columns, queries and their documents, got 1"):
        ranking_loss([torch.ones(2, 3, 4)], [None], 1.0)


def test_sentence_transformers_ranking():
    pytest.importorskip("sentence_transformers.multi_vector_encoder")  # since version 6; PyLate 1.6 needs an older one
    from sentence_transformers.multi_vector_encoder import losses, scoring

    from megabatch.integrations import sentence_transformers as ours

    for options in ({}, {"scale": 4.0, "similarity_fct": scoring.mean_colbert_scores}):
        pair = (
            outcome(source.CachedMultiVectorMultipleNegativesRankingLoss, columns(9), mini_batch_size=4, **options)
            for source in (ours, losses)
        )
        assert_same(*pair, tolerance=ROUNDED_SCORES)
    with pytest.raises(ValueError, match="similarity_fct must be colbert_scores"):
        ours.CachedMultiVectorMultipleNegativesRankingLoss(Table(), similarity_fct=scoring.XTRScores())


def test_sentence_transformers_distillation():
    pytest.importorskip("sentence_transformers.multi_vector_encoder")  # since version 6; PyLate 1.6 needs an older one
    from sentence_transformers.multi_vector_encoder import losses

    from megabatch.integrations import sentence_transformers as ours

    teacher = torch.randn(5, 3, dtype=torch.float64)
    pair = (outcome(source.MultiVectorDistillKLDivLoss, columns(5), teacher, temperature=0.5) for source in (ours, losses))
    assert_same(*pair, tolerance=ROUNDED_SCORES)
    assert ours.MultiVectorDistillKLDivLoss(Table()).get_config_dict()["similarity_fct"] == "colbert_kd_scores"


def test_pylate_contrastive():
    pytest.importorskip("pylate")
    from pylate import losses, scores

    from megabatch.integrations import pylate

    features = columns(9, (4, 7, 7))  # PyLate stacks the columns of documents
    for options in ({"temperature": 0.5}, {"size_average": False}):
        found, wanted = (
            outcome(source.CachedContrastive, features, mini_batch_size=4, **options) for source in (pylate, losses)
        )
        assert_same(found, wanted, factor=9.0 if options.get("size_average", True) else 1.0)  # they backpropagate the sum
    with pytest.raises(ValueError, match="score_metric must be pylate"):
        pylate.CachedContrastive(Table(), score_metric=scores.XTRScores())


def test_pylate_distillation():
    pytest.importorskip("pylate")
    from pylate import losses

    from megabatch.integrations import pylate

    (query,), (document,) = columns(4, (4,)), columns(12, (7,))
    teacher = torch.randn(4, 3, dtype=torch.float64)
    for normalize in (True, False):
        pair = (
            outcome(source.Distillation, [query, document], teacher, normalize_scores=normalize) for source in (pylate, losses)
        )
        assert_same(*pair)
