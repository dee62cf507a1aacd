"""The cases of `family_gpu.py`. A case is a loss of megabatch with its dense formula, its baselines, and its number of matmuls.

The functions of a case take the embeddings that need gradients. They contain the other inputs of the loss, such as labels or
the embeddings of a guide. `dense` works in every dtype. In float64 it is the reference. In bfloat16 it is the baseline if no
library has the loss. `products` counts the matmuls of rows × rows × width that an exact method needs at least: S is the logits
(forward, and again backward), and dX and dY are the products of their gradient with both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch_train.bench.losses import open_clip_losses, pairs

SCALE = 20.0
LARGE = (65536, 16384, 4096)  # batches at which a baseline is tried, until it fits
CUBIC = (4096, 2048, 1024)  # batches for a baseline that stores rows³ numbers
DENSE = "dense PyTorch"
MARGIN, GUIDE_MARGIN = -0.1, -0.05  # exclude a few of the most similar keys of every query
BETA, TAU_PLUS, HCL_SCALE = 1.0, 0.1, 2.0
GTE = ("query-key", "query-query", "key-query", "key-key")
GTE_OF_LIBRARY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
BIAS = -10.0
ROWS_OF_A_LABEL, PAIRS_OF_AN_ID = 64, 4
SMOOTHING = 0.1

Loss = Callable[..., Tensor]
Products = tuple[float, float, float]  # S, dX, dY
TWO_SIDES: Products = (2, 1, 1)
SYMMETRIC: Products = (1, 0.5, 0.5)  # half of S, twice; both halves contribute to the gradient of a row


@dataclass(frozen=True)
class Peer:
    """A baseline. Building it raises an ImportError if it is not installed."""

    build: Callable[[], Loss]
    batches: Sequence[int] = LARGE
    definition: Loss | None = None  # its definition, if it differs from the formula
    normalizes: bool = True  # whether it divides embeddings by their length 1, so its gradient is orthogonal to them
    library: bool = True  # whether it runs with autocast, as in training

    def loss(self, device: str) -> Loss:
        """Builds the loss for a device."""
        inner = self.build()
        if not self.library or device != "cuda":
            return inner

        def cast(*embeddings: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return inner(*embeddings)

        return cast


def normalize_inputs(loss: Loss) -> Loss:
    """Returns a loss that first normalizes its embeddings."""
    return lambda *embeddings: loss(*(F.normalize(part, dim=1) for part in embeddings))


def formula(loss: Loss) -> Peer:
    """Returns a baseline from a function of this file."""
    return Peer(lambda: loss, normalizes=False, library=False)


@dataclass(frozen=True)
class Case:
    """A loss at one batch size."""

    leaves: tuple[Tensor, ...]
    ours: Loss
    dense: Loss
    products: Products
    peers: dict[str, Peer] = field(default_factory=dict)
    note: str = ""

    def meant(self, system: str) -> Loss:
        """Returns the definition of what a system computes, for float64."""
        peer = self.peers.get(system)
        if peer is None:
            return self.dense
        definition = peer.definition or self.dense
        return normalize_inputs(definition) if peer.normalizes else definition


@dataclass(frozen=True)
class CaseSize:
    """The size and the device of a case."""

    rows: int
    width: int
    device: str

    @property
    def backend(self) -> str:
        """On a GPU, the kernels by name, so that no other backend is measured."""
        return "triton" if self.device == "cuda" else "auto"

    def further(self) -> Tensor:  # (N, D)
        """Returns embeddings that match no embedding of the batch."""
        generator = torch.Generator(self.device).manual_seed(1)
        rows = F.normalize(torch.randn(self.rows, self.width, generator=generator, device=self.device), dim=1)
        return rows.to(torch.bfloat16 if self.device == "cuda" else torch.float32)


def widen(x: Tensor) -> Tensor:
    """Casts logits to float32, in which exponentials are computed. float64 is unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def logits_of(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, M)
    return widen(x @ y.to(x.dtype).T) * scale


def negative_logits(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, N)
    """Returns the logits with −inf for the matching pairs."""
    return logits_of(x, y, scale).fill_diagonal_(-torch.inf)


def cross_entropy_of_matches(logits: Tensor) -> Tensor:
    """Returns the cross-entropy with label i in row i."""
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def sentence_losses() -> Any:
    try:
        from sentence_transformers.sentence_transformer import losses
    except ImportError:  # versions before 6
        from sentence_transformers import losses  # type: ignore[attr-defined,no-redef]
    return losses


def ranking(**options: Any) -> Callable[[], Loss]:
    """Returns a function that builds MultipleNegativesRankingLoss of sentence-transformers for embeddings."""

    def build() -> Loss:
        loss = sentence_losses().MultipleNegativesRankingLoss(None, scale=SCALE, **options)
        return lambda *embeddings: loss.compute_loss_from_embeddings(list(embeddings), None)

    return build


class Encoder(torch.nn.Module):
    """A model for losses of sentence-transformers that returns given embeddings."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the given embeddings."""
        return {"sentence_embedding": features[self.key]}

    def get_embedding_dimension(self) -> None:
        """Returns None, because the dimension is unknown."""

    get_sentence_embedding_dimension = get_embedding_dimension  # its name before version 6


# ----------------------------------------------------------------------------------------------------------------------
# Losses of queries and keys.


def one_direction_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def build() -> Loss:
        from info_nce import info_nce

        return lambda q, k: info_nce(q, k, temperature=1 / SCALE)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, backend=size.backend),
        lambda q, k: cross_entropy_of_matches(logits_of(q, k)),
        TWO_SIDES,
        {"sentence-transformers": Peer(ranking()), "info-nce-pytorch": Peer(build)},
    )


def both_directions_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s = logits_of(q, k)
        return (cross_entropy_of_matches(s) + cross_entropy_of_matches(s.T)) / 2

    library = ranking(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, symmetric=True, backend=size.backend),
        dense,
        TWO_SIDES,
        {"sentence-transformers": Peer(library)},
    )


def hard_negatives_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    return Case(
        (q, k, size.further().requires_grad_()),
        lambda q, k, n: mb.info_nce_loss(q, k, scale=SCALE, negatives=n[:, None], backend=size.backend),
        lambda q, k, n: cross_entropy_of_matches(torch.cat((logits_of(q, k), logits_of(q, n)), 1)),
        (4, 2, 2),
        {"sentence-transformers": Peer(ranking())},
        "keys, and the same number of hard negatives",
    )


def memory_bank_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    bank = size.further()

    def build() -> Loss:
        loss = ranking()()
        return lambda q, k: loss(q, k, bank)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, negatives=bank, backend=size.backend),
        lambda q, k: cross_entropy_of_matches(torch.cat((logits_of(q, k), logits_of(q, bank)), 1)),
        (4, 2, 1),
        {"sentence-transformers": Peer(build)},
        "keys, and the same number of earlier keys, which get no gradient",
    )


def moco_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    bank = size.further()

    def dense(q: Tensor, k: Tensor) -> Tensor:
        match = widen((q * k).sum(1, keepdim=True)) * SCALE
        logits = torch.cat((match, logits_of(q, bank)), 1)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64, device=q.device))

    def build() -> Loss:
        from info_nce import info_nce

        return lambda q, k: info_nce(q, k, bank, temperature=1 / SCALE)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, negatives=bank, contrast=(), backend=size.backend),
        dense,
        (2, 1, 0),
        {"info-nce-pytorch": Peer(build)},
        "only earlier keys",
    )


def margin_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s = widen(q @ k.T)
        limit = s.detach().diagonal()[:, None] + MARGIN
        excluded = (s.detach() > limit).fill_diagonal_(False)
        return cross_entropy_of_matches((s * SCALE).masked_fill(excluded, -torch.inf))

    ours = lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, margin=MARGIN, backend=size.backend)  # noqa: E731
    return Case((q, k), ours, dense, TWO_SIDES)


def guide_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    guide_embeddings = [t.detach() for t in pairs(len(q), size.width // 2, size.device)[:2]]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        by_guide = widen(guide_embeddings[0].to(q.dtype) @ guide_embeddings[1].to(q.dtype).T)
        excluded = (by_guide > by_guide.diagonal()[:, None] + GUIDE_MARGIN).fill_diagonal_(False)
        return cross_entropy_of_matches(logits_of(q, k).masked_fill(excluded, -torch.inf))

    def build() -> Loss:
        """Builds the loss without its constructor, which needs tokenizers. Its forward does not need them."""
        kind = sentence_losses().GISTEmbedLoss
        loss = kind.__new__(kind)
        torch.nn.Module.__init__(loss)
        options = {"margin_strategy": "absolute", "margin": -GUIDE_MARGIN, "temperature": 1 / SCALE}
        options |= dict.fromkeys(("contrast_anchors", "contrast_positives", "gather_across_devices", "must_retokenize"), False)
        options |= {"similarity_fct": torch.nn.CosineSimilarity(dim=-1), "cross_entropy_loss": torch.nn.CrossEntropyLoss()}
        options |= {"model": Encoder("model"), "guide": Encoder("guide")}
        for name, value in options.items():
            setattr(loss, name, value)
        return lambda q, k: loss([{"model": x, "guide": g} for x, g in zip((q, k), guide_embeddings, strict=True)], None)

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(
            q, k, scale=SCALE, guide=(guide_embeddings[0], guide_embeddings[1]), margin=GUIDE_MARGIN, backend=size.backend
        ),
        dense,
        (3, 1, 1),
        {"sentence-transformers": Peer(build, (16384, 4096, 2048, 1024)), DENSE: formula(dense)},
        "the logits of a guide with half the dim, forward and backward; both are stored tile by tile",
    )


def gte_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor, twice: bool = False) -> Tensor:
        across = logits_of(q, k)
        back = across.T if twice else across.T.clone().fill_diagonal_(-torch.inf)
        return cross_entropy_of_matches(torch.cat((across, back, negative_logits(q, q), negative_logits(k, k)), 1))

    return Case(
        (q, k),
        lambda q, k: mb.info_nce_loss(q, k, scale=SCALE, contrast=GTE, backend=size.backend),
        dense,
        tuple(a + 2 * b for a, b in zip(TWO_SIDES, SYMMETRIC, strict=True)),  # type: ignore[arg-type]
        {"sentence-transformers": Peer(ranking(directions=GTE_OF_LIBRARY), definition=lambda q, k: dense(q, k, twice=True))},
        "both directions in one pass, and two symmetric halves, both computed in full; the library counts the match twice",
    )


def dcl_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        return (negative_logits(q, k).logsumexp(1) - SCALE * widen((q * k).sum(1))).mean()

    return Case((q, k), lambda q, k: mb.dcl_loss(q, k, scale=SCALE, backend=size.backend), dense, TWO_SIDES)


def hcl_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, p = negative_logits(q, k, HCL_SCALE), HCL_SCALE * widen((q * k).sum(1))
        n = len(q) - 1
        weighted = n * ((1 + BETA) * s).exp().sum(1) / (BETA * s).exp().sum(1)
        least = n * torch.tensor(-HCL_SCALE, dtype=s.dtype, device=s.device).exp()
        negatives = torch.maximum((weighted - TAU_PLUS * n * p.exp()) / (1 - TAU_PLUS), least)
        return -(p.exp() / (p.exp() + negatives)).log().mean()

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.hcl_loss(q, k, scale=HCL_SCALE, beta=BETA, tau_plus=TAU_PLUS, backend=size.backend)

    return Case((q, k), ours, dense, TWO_SIDES, note="megabatch computes the logits once for each of two exponents")


# ----------------------------------------------------------------------------------------------------------------------
# Losses of views, of labels, of images and texts.


def views_case(q: Tensor, k: Tensor, size: CaseSize, share: int = 1) -> Case:
    def dense(a: Tensor, b: Tensor) -> Tensor:
        z = torch.cat((a, b))
        return F.cross_entropy(negative_logits(z, z), torch.arange(len(z), device=z.device).roll(len(a)))

    def metric_learning() -> Loss:
        from pytorch_metric_learning.losses import NTXentLoss
        from pytorch_metric_learning.reducers import MeanReducer

        loss = NTXentLoss(temperature=1 / SCALE, reducer=MeanReducer())
        return lambda a, b: loss(torch.cat((a, b)), torch.arange(len(a), device=a.device).repeat(2))

    def lightly() -> Loss:
        from lightly.loss import NTXentLoss

        built: Loss = NTXentLoss(temperature=1 / SCALE)
        return built

    rows = len(q) // share
    peers = {"lightly": Peer(lightly), DENSE: formula(dense)}
    if share > 1:
        peers["pytorch-metric-learning"] = Peer(metric_learning, CUBIC)
    return Case(
        (q.detach()[:rows].requires_grad_(), k.detach()[:rows].requires_grad_()),
        lambda a, b: mb.nt_xent_loss(a, b, SCALE, backend=size.backend),
        dense,
        tuple(count * (2 / share) ** 2 for count in SYMMETRIC),  # type: ignore[arg-type]
        peers,
        "the symmetric half, with twice as many rows" if share == 1 else "the symmetric half",
    )


def sup_con_case(q: Tensor, k: Tensor, size: CaseSize, form: str = "out") -> Case:
    labels = torch.arange(len(q), device=q.device) % max(4, len(q) // ROWS_OF_A_LABEL)
    z = F.normalize(q.detach() + k.detach()[labels], dim=1).requires_grad_()

    def dense(z: Tensor) -> Tensor:
        s = negative_logits(z, z)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        if form == "out":
            return (s.logsumexp(1) - s.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).mean()
        return (s.logsumexp(1) - s.masked_fill(~positive, -torch.inf).logsumexp(1) + positive.sum(1).log()).mean()

    def build() -> Loss:
        from pytorch_metric_learning.losses import SupConLoss

        loss = SupConLoss(temperature=1 / SCALE)
        return lambda z: loss(z, labels)

    backend = size.backend if form == "out" else "auto"
    peers = {"pytorch-metric-learning": Peer(build)} if form == "out" else {DENSE: formula(dense)}
    note = "the symmetric half" + ("" if form == "out" else "; PyTorch operations for the positives")
    return Case((z,), lambda z: mb.sup_con_loss(z, labels, SCALE, form=form, backend=backend), dense, SYMMETRIC, peers, note)


def several_positives_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    ids = torch.arange(len(q), device=q.device) // PAIRS_OF_AN_ID

    def dense(q: Tensor, k: Tensor) -> Tensor:
        logits = logits_of(q, k) + BIAS
        same = ids[:, None] == ids
        return -F.logsigmoid(torch.where(same, logits, -logits)).sum() / len(q)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.siglip_loss(q, k, SCALE, BIAS, ids=ids, ids_are_positives=True, backend=size.backend)

    return Case((q, k), ours, dense, (1, 1, 1), note="S is computed once, for the loss and its gradient")


def distillation_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    teacher = [F.normalize(t + size.further(), dim=1) for t in (q.detach(), k.detach())]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, t = logits_of(q, k), logits_of(teacher[0].to(q.dtype), teacher[1])
        ways = ((s, t), (s.T, t.T))
        return sum((F.cross_entropy(a, b.softmax(1)) for a, b in ways), torch.zeros((), device=q.device)) / 2

    def build() -> Loss:
        module = open_clip_losses().DistillClipLoss()

        def loss(q: Tensor, k: Tensor) -> Tensor:
            ways = zip(module.get_logits(*teacher, SCALE), module.get_logits(q, k, SCALE), strict=True)
            return sum((module.dist_loss(b, a) for b, a in ways), torch.zeros((), device=q.device)) / 2

        return loss

    return Case(
        (q, k),
        lambda q, k: mb.soft_clip_loss(q, k, SCALE, teacher[0], teacher[1], SCALE, backend=size.backend),
        dense,
        (4, 1, 1),
        {"open_clip": Peer(build, normalizes=False)},
        "the logits of the teacher, too, forward and backward; both are stored tile by tile",
    )


def matryoshka_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    widths = [size.width // part for part in (12, 6, 3)] + [2 * size.width // 3, size.width]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        total = torch.zeros((), device=q.device)
        for width in widths:
            s = logits_of(*(F.normalize(side[:, :width], dim=1) for side in (q, k)))
            total = total + (cross_entropy_of_matches(s) + cross_entropy_of_matches(s.T)) / 2
        return total

    def build() -> Loss:
        losses, model = sentence_losses(), Encoder("model")
        ways = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model, scale=SCALE, **ways), widths)
        return lambda q, k: loss([{"model": q}, {"model": k}], None)

    return Case(
        (q, k),
        lambda q, k: mb.matryoshka_clip_loss(q, k, SCALE, widths=widths, backend=size.backend),
        dense,
        TWO_SIDES,
        {"sentence-transformers": Peer(build)},
        f"dims {', '.join(map(str, widths))}; kernels compute {sum(widths) / size.width:.3g} × these products",
    )


def smoothing_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, labels = logits_of(q, k), torch.arange(len(q), device=q.device)
        return sum((F.cross_entropy(w, labels, label_smoothing=SMOOTHING) for w in (s, s.T)), s.new_zeros(())) / 2

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.clip_loss(q, k, SCALE, label_smoothing=SMOOTHING, backend=size.backend)

    return Case((q, k), ours, dense, TWO_SIDES)


def symmetric_case(q: Tensor, k: Tensor, size: CaseSize) -> Case:
    def all_pairs(z: Tensor) -> Tensor:
        return mb.pairwise_logsumexp(z, z, SCALE, exclude="diagonal", backend=size.backend)[0].mean()

    def dense(z: Tensor) -> Tensor:
        return negative_logits(z, z).logsumexp(1).mean()

    def ours(z: Tensor) -> Tensor:
        return mb.pairwise_symmetric_logsumexp(z, SCALE, backend=size.backend).mean()

    peers = {"pairwise_logsumexp(z, z)": formula(all_pairs), DENSE: formula(dense)}
    return Case((q,), ours, dense, SYMMETRIC, peers, "the symmetric half")


# ----------------------------------------------------------------------------------------------------------------------
# All cases, by name.


# The most important losses are first.
CASES: dict[str, Callable[[Tensor, Tensor, CaseSize], Case]] = {
    "info_nce_loss": one_direction_case,
    "info_nce_loss, both directions": both_directions_case,
    "info_nce_loss, hard negatives": hard_negatives_case,
    "nt_xent_loss, 2 × B/2 rows": partial(views_case, share=2),
    "sup_con_loss, out": sup_con_case,
    "info_nce_loss, GTE": gte_case,
    "info_nce_loss, margin": margin_case,
    "info_nce_loss, memory bank": memory_bank_case,
    "siglip, several positives": several_positives_case,
    "clip, label smoothing": smoothing_case,
    "matryoshka": matryoshka_case,
    "soft_clip_loss": distillation_case,
    "info_nce_loss, guide": guide_case,
    "dcl_loss": dcl_case,
    "hcl_loss": hcl_case,
    "nt_xent_loss, 2 × B rows": views_case,
    "sup_con_loss, in": partial(sup_con_case, form="in"),
    "pairwise_symmetric_logsumexp": symmetric_case,
    "info_nce_loss, bank alone": moco_case,
}


def case(name: str, rows: int, width: int, device: str) -> Case:
    """Builds a case of CASES for a batch. If it has no baseline, the dense formula is its baseline."""
    q, k, _ = pairs(rows, width, device)
    built = CASES[name](q, k, CaseSize(rows, width, device))
    if not built.peers:
        built.peers[DENSE] = formula(built.dense)
    return built
