"""The cases of `family_gpu.py`: a loss of megabatch, its dense formula, the libraries it is known from, the matmuls it needs.

The functions of a case take the embeddings that get gradients. They hold everything else that a loss needs, such as labels or a
guide's embeddings. `dense` works in every dtype: in float64 it is the truth, in bfloat16 it stands in where no library has the
loss. `products` counts matmuls of rows × rows × width, the least that an exact method can do: S, the logits (forward, and again
backward), dX and dY, the products of their gradient with both sides.
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
LARGE = (65536, 16384, 4096)  # batches that a peer is tried at, until it fits
CUBIC = (4096, 2048, 1024)  # and one that holds rows³ numbers
DENSE = "dense PyTorch"
MARGIN, GUIDE_MARGIN = -0.1, -0.05  # leave out a few of the most similar keys of every query
BETA, TAU_PLUS, HCL_SCALE = 1.0, 0.1, 2.0
GTE = ("query-key", "query-query", "key-query", "key-key")
GTE_OF_LIBRARY = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
BIAS = -10.0
ROWS_OF_A_LABEL, PAIRS_OF_AN_ID = 64, 4
SMOOTHING = 0.1

Loss = Callable[..., Tensor]
Products = tuple[float, float, float]  # S, dX, dY
TWO_SIDES: Products = (2, 1, 1)
SYMMETRIC: Products = (1, 0.5, 0.5)  # half of S, twice; a row's gradient comes from above and from below the diagonal


@dataclass(frozen=True)
class Peer:
    """Another implementation. Building it raises an ImportError where it is not installed."""

    build: Callable[[], Loss]
    batches: Sequence[int] = LARGE
    means: Loss | None = None  # its own definition, if it differs from the formula
    normalises: bool = True  # divides embeddings by their lengths, which are 1: its gradient has no part along them
    library: bool = True  # runs under autocast, as in training

    def loss(self, device: str) -> Loss:
        """As it is used on a device."""
        inner = self.build()
        if not self.library or device != "cuda":
            return inner

        def cast(*embeddings: Tensor) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return inner(*embeddings)

        return cast


def normalised(loss: Loss) -> Loss:
    """Of embeddings brought to unit length."""
    return lambda *embeddings: loss(*(F.normalize(part, dim=1) for part in embeddings))


def formula(loss: Loss) -> Peer:
    """A peer of our own."""
    return Peer(lambda: loss, normalises=False, library=False)


@dataclass(frozen=True)
class Case:
    """One loss at one batch."""

    leaves: tuple[Tensor, ...]
    ours: Loss
    dense: Loss
    products: Products
    peers: dict[str, Peer] = field(default_factory=dict)
    note: str = ""

    def meant(self, system: str) -> Loss:
        """The definition that a system computes, for float64."""
        peer = self.peers.get(system)
        if peer is None:
            return self.dense
        means = peer.means or self.dense
        return normalised(means) if peer.normalises else means


@dataclass(frozen=True)
class Given:
    """The size and device of a case."""

    rows: int
    width: int
    device: str

    @property
    def backend(self) -> str:
        """The kernels by name on a GPU, so that nothing else is measured in their place."""
        return "triton" if self.device == "cuda" else "auto"

    def further(self) -> Tensor:  # (N, D)
        """Rows that match none of the batch."""
        generator = torch.Generator(self.device).manual_seed(1)
        rows = F.normalize(torch.randn(self.rows, self.width, generator=generator, device=self.device), dim=1)
        return rows.to(torch.bfloat16 if self.device == "cuda" else torch.float32)


def wide(x: Tensor) -> Tensor:
    """Logits in the type in which one would take their exponentials."""
    return x if x.dtype == torch.float64 else x.float()


def similarities(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, M)
    return wide(x @ y.to(x.dtype).T) * scale


def others(x: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:  # (N, N)
    """Without the matching pairs."""
    return similarities(x, y, scale).fill_diagonal_(-torch.inf)


def found(logits: Tensor) -> Tensor:
    """Cross-entropy of column i in row i."""
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def sentence_losses() -> Any:
    try:
        from sentence_transformers.sentence_transformer import losses
    except ImportError:  # versions before 6
        from sentence_transformers import losses  # type: ignore[attr-defined,no-redef]
    return losses


def ranking(**options: Any) -> Callable[[], Loss]:
    """sentence-transformers' MultipleNegativesRankingLoss on embeddings."""

    def build() -> Loss:
        loss = sentence_losses().MultipleNegativesRankingLoss(None, scale=SCALE, **options)
        return lambda *embeddings: loss.compute_loss_from_embeddings(list(embeddings), None)

    return build


class Encoder(torch.nn.Module):
    """The model interface of sentence-transformers' losses, for given embeddings."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The given embeddings."""
        return {"sentence_embedding": features[self.key]}

    def get_embedding_dimension(self) -> None:
        """Unknown."""

    get_sentence_embedding_dimension = get_embedding_dimension  # its name before version 6


# ----------------------------------------------------------------------------------------------------------------------
# Losses of queries and keys.


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


# ----------------------------------------------------------------------------------------------------------------------
# Losses of views, of labels, of images and texts.


def views(q: Tensor, k: Tensor, given: Given, share: int = 1) -> Case:
    def dense(a: Tensor, b: Tensor) -> Tensor:
        z = torch.cat((a, b))
        return F.cross_entropy(others(z, z), torch.arange(len(z), device=z.device).roll(len(a)))

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
        lambda a, b: mb.nt_xent_loss(a, b, SCALE, backend=given.backend),
        dense,
        tuple(count * (2 / share) ** 2 for count in SYMMETRIC),  # type: ignore[arg-type]
        peers,
        "the symmetric half of twice as many rows" if share == 1 else "the symmetric half",
    )


def labelled(q: Tensor, k: Tensor, given: Given, form: str = "out") -> Case:
    labels = torch.arange(len(q), device=q.device) % max(4, len(q) // ROWS_OF_A_LABEL)
    z = F.normalize(q.detach() + k.detach()[labels], dim=1).requires_grad_()

    def dense(z: Tensor) -> Tensor:
        s = others(z, z)
        positive = (labels[:, None] == labels).fill_diagonal_(False)
        if form == "out":
            return (s.logsumexp(1) - s.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).mean()
        return (s.logsumexp(1) - s.masked_fill(~positive, -torch.inf).logsumexp(1) + positive.sum(1).log()).mean()

    def build() -> Loss:
        from pytorch_metric_learning.losses import SupConLoss

        loss = SupConLoss(temperature=1 / SCALE)
        return lambda z: loss(z, labels)

    backend = given.backend if form == "out" else "auto"
    peers = {"pytorch-metric-learning": Peer(build)} if form == "out" else {DENSE: formula(dense)}
    note = "the symmetric half" + ("" if form == "out" else "; positives in PyTorch operations")
    return Case((z,), lambda z: mb.sup_con_loss(z, labels, SCALE, form=form, backend=backend), dense, SYMMETRIC, peers, note)


def several_positives(q: Tensor, k: Tensor, given: Given) -> Case:
    ids = torch.arange(len(q), device=q.device) // PAIRS_OF_AN_ID

    def dense(q: Tensor, k: Tensor) -> Tensor:
        logits = similarities(q, k) + BIAS
        same = ids[:, None] == ids
        return -F.logsigmoid(torch.where(same, logits, -logits)).sum() / len(q)

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.siglip_loss(q, k, SCALE, BIAS, ids=ids, ids_are_positives=True, backend=given.backend)

    return Case((q, k), ours, dense, (1, 1, 1), note="the gradient is formed with the loss, S once")


def distilled(q: Tensor, k: Tensor, given: Given) -> Case:
    teacher = [F.normalize(t + given.further(), dim=1) for t in (q.detach(), k.detach())]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, t = similarities(q, k), similarities(teacher[0].to(q.dtype), teacher[1])
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
        lambda q, k: mb.soft_clip_loss(q, k, SCALE, teacher[0], teacher[1], SCALE, backend=given.backend),
        dense,
        (4, 1, 1),
        {"open_clip": Peer(build, normalises=False)},
        "similarities of the teacher too, forward and backward; both formed in memory, tile by tile",
    )


def matryoshka(q: Tensor, k: Tensor, given: Given) -> Case:
    widths = [given.width // part for part in (12, 6, 3)] + [2 * given.width // 3, given.width]

    def dense(q: Tensor, k: Tensor) -> Tensor:
        total = torch.zeros((), device=q.device)
        for width in widths:
            s = similarities(*(F.normalize(side[:, :width], dim=1) for side in (q, k)))
            total = total + (found(s) + found(s.T)) / 2
        return total

    def build() -> Loss:
        losses, model = sentence_losses(), Encoder("model")
        ways = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model, scale=SCALE, **ways), widths)
        return lambda q, k: loss([{"model": q}, {"model": k}], None)

    return Case(
        (q, k),
        lambda q, k: mb.matryoshka_clip_loss(q, k, SCALE, widths=widths, backend=given.backend),
        dense,
        TWO_SIDES,
        {"sentence-transformers": Peer(build)},
        f"widths {', '.join(map(str, widths))}; kernels form {sum(widths) / given.width:.3g} × these products",
    )


def smoothed(q: Tensor, k: Tensor, given: Given) -> Case:
    def dense(q: Tensor, k: Tensor) -> Tensor:
        s, labels = similarities(q, k), torch.arange(len(q), device=q.device)
        return sum((F.cross_entropy(w, labels, label_smoothing=SMOOTHING) for w in (s, s.T)), s.new_zeros(())) / 2

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return mb.clip_loss(q, k, SCALE, label_smoothing=SMOOTHING, backend=given.backend)

    return Case((q, k), ours, dense, TWO_SIDES)


def against_themselves(q: Tensor, k: Tensor, given: Given) -> Case:
    def whole(z: Tensor) -> Tensor:
        return mb.pairwise_logsumexp(z, z, SCALE, exclude="diagonal", backend=given.backend)[0].mean()

    def dense(z: Tensor) -> Tensor:
        return others(z, z).logsumexp(1).mean()

    def ours(z: Tensor) -> Tensor:
        return mb.pairwise_symmetric_logsumexp(z, SCALE, backend=given.backend).mean()

    peers = {"pairwise_logsumexp(z, z)": formula(whole), DENSE: formula(dense)}
    return Case((q,), ours, dense, SYMMETRIC, peers, "the symmetric half")


# ----------------------------------------------------------------------------------------------------------------------
# All cases, by name.


# The most important first.
CASES: dict[str, Callable[[Tensor, Tensor, Given], Case]] = {
    "info_nce_loss": one_direction,
    "info_nce_loss, both directions": both_directions,
    "info_nce_loss, hard negatives": hard_negatives,
    "nt_xent_loss, 2 × B/2 rows": partial(views, share=2),
    "sup_con_loss, out": labelled,
    "info_nce_loss, GTE": gte,
    "info_nce_loss, margin": with_margin,
    "info_nce_loss, memory bank": memory_bank,
    "siglip, several positives": several_positives,
    "clip, label smoothing": smoothed,
    "matryoshka": matryoshka,
    "soft_clip_loss": distilled,
    "info_nce_loss, guide": guided,
    "dcl_loss": decoupled,
    "hcl_loss": reweighted,
    "nt_xent_loss, 2 × B rows": views,
    "sup_con_loss, in": partial(labelled, form="in"),
    "pairwise_symmetric_logsumexp": against_themselves,
    "info_nce_loss, bank alone": moco,
}


def case(name: str, rows: int, width: int, device: str) -> Case:
    """One of CASES for a batch; with the dense formula as its peer where it has no other."""
    q, k, _ = pairs(rows, width, device)
    made = CASES[name](q, k, Given(rows, width, device))
    if not made.peers:
        made.peers[DENSE] = formula(made.dense)
    return made
