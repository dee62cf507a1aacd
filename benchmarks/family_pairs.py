"""Cases of `family_gpu.py`: losses of views, of labels, of images and texts."""

import torch
import torch.nn.functional as F
from family_case import (
    CUBIC,
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
    sentence_losses,
    similarities,
)
from torch import Tensor

import megabatch as mb
from megabatch.bench.loss_systems import open_clip_losses

BIAS = -10.0
ROWS_OF_A_LABEL, PAIRS_OF_AN_ID = 64, 4
SMOOTHING = 0.1


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


def half_views(q: Tensor, k: Tensor, given: Given) -> Case:
    return views(q, k, given, share=2)


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


def labelled_in(q: Tensor, k: Tensor, given: Given) -> Case:
    return labelled(q, k, given, form="in")


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
