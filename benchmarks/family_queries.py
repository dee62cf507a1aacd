"""Cases of `family_gpu.py`: losses of queries and keys."""

import torch
import torch.nn.functional as F
from family_case import (
    DENSE,
    SCALE,
    SYMMETRIC,
    TWO_SIDES,
    Case,
    Encoder,
    Given,
    Loss,
    Peer,
    formula,
    found,
    others,
    ranking,
    sentence_losses,
    similarities,
    wide,
)
from torch import Tensor

import megabatch as mb
from megabatch.bench.accuracy import pairs

MARGIN, GUIDE_MARGIN = -0.1, -0.05  # leave out a few of the most similar keys of every query
BETA, TAU_PLUS, HCL_SCALE = 1.0, 0.1, 2.0
GTE = ("query-key", "query-query", "key-query", "key-key")
GTE_OF_LIBRARY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def one_direction(q: Tensor, k: Tensor, given: Given) -> Case:
    def build() -> Loss:
        from info_nce import info_nce

        return lambda q, k: info_nce(q, k, temperature=1 / SCALE)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, backend=given.backend),
        lambda q, k: found(similarities(q, k)),
        TWO_SIDES,
        {"sentence-transformers": Peer(ranking()), "info-nce-pytorch": Peer(build)},
    )


def both_directions(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s = similarities(q, k)
        return (found(s) + found(s.T)) / 2

    library = ranking(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, symmetric=True, backend=given.backend),
        dense,
        TWO_SIDES,
        {"sentence-transformers": Peer(library)},
    )


def hard_negatives(q: Tensor, k: Tensor, given: Given) -> Case:
    return Case(
        (q, k, given.further().requires_grad_()),
        lambda q, k, n: mb.info_nce_loss(q, k, scale=SCALE, negatives=n[:, None], backend=given.backend),
        lambda q, k, n: found(torch.cat((similarities(q, k), similarities(q, n)), 1)),
        (4, 2, 2),
        {"sentence-transformers": Peer(ranking())},
        "keys and as many hard negatives",
    )


def memory_bank(q: Tensor, k: Tensor, given: Given) -> Case:
    bank = given.further()

    def build() -> Loss:
        loss = ranking()()
        return lambda q, k: loss(q, k, bank)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, negatives=bank, backend=given.backend),
        lambda q, k: found(torch.cat((similarities(q, k), similarities(q, bank)), 1)),
        (4, 2, 1),
        {"sentence-transformers": Peer(build)},
        "keys and as many earlier ones, which get no gradient",
    )


def moco(q: Tensor, k: Tensor, given: Given) -> Case:
    bank = given.further()

    def dense(q: Tensor, k: Tensor) -> Tensor:
        match = wide((q * k).sum(1, keepdim=True)) * SCALE
        logits = torch.cat((match, similarities(q, bank)), 1)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64, device=q.device))

    def build() -> Loss:
        from info_nce import info_nce

        return lambda q, k: info_nce(q, k, bank, temperature=1 / SCALE)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, negatives=bank, contrast=(), backend=given.backend),
        dense,
        (2, 1, 0),
        {"info-nce-pytorch": Peer(build)},
        "earlier keys alone",
    )


def with_margin(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s = wide(q @ k.T)
        limit = s.detach().diagonal()[:, None] + MARGIN
        likely = (s.detach() > limit).fill_diagonal_(False)
        return found((s * SCALE).masked_fill(likely, -torch.inf))

    ours = lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, margin=MARGIN, backend=given.backend)  # noqa: E731
    return Case((q, k), ours, dense, TWO_SIDES)


def guided(q: Tensor, k: Tensor, given: Given) -> Case:
    seen = [t.detach() for t in pairs(len(q), given.width // 2, given.device)[:2]]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        by_guide = wide(seen[0].to(q.dtype) @ seen[1].to(q.dtype).T)
        likely = (by_guide > by_guide.diagonal()[:, None] + GUIDE_MARGIN).fill_diagonal_(False)
        return found(similarities(q, k).masked_fill(likely, -torch.inf))

    def build() -> Loss:
        """Its constructor wants tokenizers, its forward does not."""
        kind = sentence_losses().GISTEmbedLoss
        loss = kind.__new__(kind)
        torch.nn.Module.__init__(loss)
        options = {"margin_strategy": "absolute", "margin": -GUIDE_MARGIN, "temperature": 1 / SCALE}
        options |= dict.fromkeys(("contrast_anchors", "contrast_positives", "gather_across_devices", "must_retokenize"), False)
        options |= {"similarity_fct": torch.nn.CosineSimilarity(dim=-1), "cross_entropy_loss": torch.nn.CrossEntropyLoss()}
        options |= {"model": Encoder("model"), "guide": Encoder("guide")}
        for name, value in options.items():
            setattr(loss, name, value)
        return lambda q, k: loss([{"model": x, "guide": g} for x, g in zip((q, k), seen, strict=True)], None)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, guide=(seen[0], seen[1]), margin=GUIDE_MARGIN, backend=given.backend),
        dense,
        (3, 1, 1),
        {"sentence-transformers": Peer(build, (16384, 4096, 2048, 1024)), DENSE: formula(dense)},
        "a guide of half the width has its own similarities, forward and backward; both formed in memory, tile by tile",
    )


def gte(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor, twice: bool = False) -> Tensor:
        across = similarities(q, k)
        back = across.T if twice else across.T.clone().fill_diagonal_(-torch.inf)
        return found(torch.cat((across, back, others(q, q), others(k, k)), 1))

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, contrast=GTE, backend=given.backend),
        dense,
        tuple(a + 2 * b for a, b in zip(TWO_SIDES, SYMMETRIC, strict=True)),  # type: ignore[arg-type]
        {"sentence-transformers": Peer(ranking(directions=GTE_OF_LIBRARY), means=lambda q, k: dense(q, k, twice=True))},
        "both directions in one pass, two symmetric halves; ours forms those squares whole; the library counts the match twice",
    )


def decoupled(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        return (others(q, k).logsumexp(1) - SCALE * wide((q * k).sum(1))).mean()

    return Case((q, k), lambda q, k: mb.dcl_loss(q, k, scale=SCALE, backend=given.backend), dense, TWO_SIDES)


def reweighted(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, p = others(q, k, HCL_SCALE), HCL_SCALE * wide((q * k).sum(1))
        n = len(q) - 1
        weighted = n * ((1 + BETA) * s).exp().sum(1) / (BETA * s).exp().sum(1)
        least = n * torch.tensor(-HCL_SCALE, dtype=s.dtype, device=s.device).exp()
        negatives = torch.maximum((weighted - TAU_PLUS * n * p.exp()) / (1 - TAU_PLUS), least)
        return -(p.exp() / (p.exp() + negatives)).log().mean()

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.hcl_loss(q, k, scale=HCL_SCALE, beta=BETA, tau_plus=TAU_PLUS, backend=given.backend)

    return Case((q, k), ours, dense, TWO_SIDES, note="ours walks once for each of two exponents")
