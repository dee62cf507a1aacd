"""Dense reference implementations of all operations. The tests compare with them in float64.

They store the whole N×M matrix and share no code with the rest of the package.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def similarities(
    x: Tensor,  # (N, D)
    y: Tensor,  # (M, D)
    scale: float | Tensor = 1.0,
    row_bias: Tensor | None = None,  # (N,)
    col_bias: Tensor | None = None,  # (M,)
    left_out: Tensor | None = None,  # (N, M) bool
) -> Tensor:  # (N, M)
    """Computes all logits. Excluded pairs (`left_out`) get −inf."""
    s = scale * (x @ y.T)
    if row_bias is not None:
        s = s + row_bias[:, None]
    if col_bias is not None:
        s = s + col_bias[None, :]
    if left_out is not None:
        s = s.masked_fill(left_out, float("-inf"))
    return s


def logsumexp(s: Tensor, dim: int) -> Tensor:
    """Computes `torch.logsumexp`. The gradient of a sum without pairs is 0 instead of NaN."""
    is_empty = (s == float("-inf")).all(dim, keepdim=True)
    result = torch.logsumexp(s.masked_fill(is_empty, 0.0), dim)
    return result.masked_fill(is_empty.squeeze(dim), float("-inf"))


def pairwise_logsumexp(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    row_bias: Tensor | None = None,
    col_bias: Tensor | None = None,
    left_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the row and column logsumexps."""
    s = similarities(x, y, scale, row_bias, col_bias, left_out)
    return logsumexp(s, 1), logsumexp(s, 0)


def pairwise_softplus(x: Tensor, y: Tensor, scale: float | Tensor = 1.0, bias: float | Tensor = 0.0) -> Tensor:
    """Computes the row sums of softplus, log(1 + exp s) = −log sigmoid(−s)."""
    return -F.logsigmoid(-(scale * (x @ y.T) + bias)).sum(1)


def pairwise_rank(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the retrieval ranks of the matching pairs: their positions in their sorted rows and columns."""
    s = x @ y.T
    target = torch.arange(len(s), device=s.device)[:, None]

    def position(rows: Tensor) -> Tensor:
        order = torch.sort(rows, dim=1, descending=True, stable=True).indices
        return (order == target).nonzero()[:, 1]

    return position(s), position(s.T)


def maxsim(
    queries: list[Tensor],  # (Lq, D) each
    documents: list[Tensor],  # (Ld, D) each
    scale: float | Tensor = 1.0,
    normalize: bool = False,
) -> Tensor:  # (N, M)
    """Computes late-interaction scores: the sum, over query vectors, of the largest dot product with a document vector.

    The score of a document without vectors is −inf.
    """

    def score(query: Tensor, document: Tensor) -> Tensor:
        if len(document) == 0:
            return query.new_full((), float("-inf"))
        best = (query @ document.T).max(1).values.sum()  # among equal maxima, the first one gets the gradient
        return scale * best / max(len(query), 1) if normalize else scale * best

    return torch.stack([torch.stack([score(query, document) for document in documents]) for query in queries])


def same_id(ids: Tensor | None, N: int) -> Tensor | None:  # (N, N) bool
    """Returns a mask of the pairs with equal ids, which are not negatives. The mask is False on the diagonal."""
    if ids is None:
        return None
    columns = ids[:, None] if ids.dim() == 1 else ids  # (N, 1) or (N, 2)
    return (columns[:, None] == columns[None, :]).any(2) & ~torch.eye(N, dtype=torch.bool, device=ids.device)


def clip_loss(image: Tensor, text: Tensor, logit_scale: float | Tensor, ids: Tensor | None = None) -> Tensor:
    """Computes the mean of the cross-entropies of both directions."""
    logits = similarities(image, text, logit_scale, left_out=same_id(ids, len(image)))
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def negatives_of(query: Tensor, key: Tensor, scale: float | Tensor, further: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes the logits of each query and its negatives, (N, N − 1 + M), and of each query and its own key, (N,).

    The negatives are the other keys and the `further` keys.
    """
    others = ~torch.eye(len(query), dtype=torch.bool, device=query.device)
    s = scale * (query @ key.T)
    negatives = s[others].reshape(len(s), -1)
    if further is not None:
        negatives = torch.cat((negatives, scale * (query @ further.T)), 1)
    return negatives, s.diagonal()


def info_nce_loss(query: Tensor, key: Tensor, scale: float | Tensor, further: Tensor | None = None) -> Tensor:
    """Computes the cross-entropy of each query's own key against that key and the negatives."""
    negatives, match = negatives_of(query, key, scale, further)
    return (torch.cat((match[:, None], negatives), 1).logsumexp(1) - match).mean()


def dcl_loss(query: Tensor, key: Tensor, scale: float | Tensor, further: Tensor | None = None) -> Tensor:
    """Computes `info_nce_loss` without the query's own key in the denominator."""
    negatives, match = negatives_of(query, key, scale, further)
    return (negatives.logsumexp(1) - match).mean()


def hcl_loss(query: Tensor, key: Tensor, scale: Tensor, beta: float, tau_plus: float, further: Tensor | None = None) -> Tensor:
    """Computes InfoNCE with negatives weighted by exp(β·s), minus the expected part τ⁺ of false negatives."""
    s, match = negatives_of(query, key, scale, further)
    n = s.shape[1]
    weighted = n * ((1 + beta) * s).exp().sum(1) / (beta * s).exp().sum(1)
    negatives = torch.maximum((weighted - tau_plus * n * match.exp()) / (1 - tau_plus), n * (-scale).exp())
    return -(match.exp() / (match.exp() + negatives)).log().mean()


def soft_clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    teacher_image: Tensor,
    teacher_text: Tensor,
    teacher_scale: float | Tensor,
) -> Tensor:
    """Computes the mean of the cross-entropies of both directions under a teacher's softmax."""
    logits, targets = logit_scale * (image @ text.T), teacher_scale * (teacher_image @ teacher_text.T)
    return (F.cross_entropy(logits, targets.softmax(1)) + F.cross_entropy(logits.T, targets.T.softmax(1))) / 2


def siglip_loss(
    image: Tensor, text: Tensor, logit_scale: float | Tensor, logit_bias: float | Tensor, ids: Tensor | None = None
) -> Tensor:
    """Computes the binary cross-entropies of all pairs, summed over rows and averaged over columns."""
    logits = logit_scale * (image @ text.T) + logit_bias
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
    losses = -F.logsigmoid(signs * logits)
    left_out = same_id(ids, len(image))
    if left_out is not None:
        losses = losses.masked_fill(left_out, 0.0)
    return losses.sum() / len(logits)


def nt_xent_loss(z1: Tensor, z2: Tensor, scale: float | Tensor = 10.0) -> Tensor:
    """Computes the cross-entropy of the other view of a sample against all other views."""
    z = torch.cat((z1, z2))
    logits = similarities(z, z, scale, left_out=torch.eye(len(z), dtype=torch.bool, device=z.device))
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(z1)))


def sup_con_loss(z: Tensor, labels: Tensor, scale: float | Tensor = 10.0, form: str = "out") -> Tensor:
    """Computes the mean loss of the rows that have a positive. It is 0 if no row has one."""
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = similarities(z, z, scale, left_out=itself)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(1)
    if form == "out":
        losses = logsumexp(logits, 1) - logits.masked_fill(~positive, 0.0).sum(1) / count.clamp_min(1)
    else:
        losses = (
            logsumexp(logits, 1) - logsumexp(logits.masked_fill(~positive, float("-inf")), 1) + count.double().log().to(z.dtype)
        )
    anchors = losses[count > 0]
    return anchors.sum() / max(1, len(anchors))


def matryoshka_clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    widths: list[int],
    weights: list[float],
    ids: Tensor | None = None,
) -> Tensor:
    """Computes the weighted sum of the losses of normalized prefixes."""
    total = image.new_zeros(())
    for width, weight in zip(widths, weights, strict=True):
        prefixes = [F.normalize(side[:, :width], dim=1) for side in (image, text)]
        total = total + weight * clip_loss(prefixes[0], prefixes[1], logit_scale, ids)
    return total
