"""megabatch: exact contrastive losses in memory that grows linearly with the batch."""

from megabatch.cached import Encoded, HostSource, ReplaySource, Source, cached_backward
from megabatch.losses import (
    ClipLoss,
    DistillClipLoss,
    Negatives,
    SigLipLoss,
    clip_loss,
    dcl,
    hcl,
    info_nce,
    matryoshka_clip_loss,
    nt_xent,
    siglip_loss,
    soft_clip_loss,
    sup_con,
)
from megabatch.pairwise import pairwise_logsumexp, pairwise_rank, pairwise_softplus
from megabatch.pairwise_self import pairwise_self_logsumexp

__version__ = "0.1.0"

__all__ = [
    "ClipLoss",
    "DistillClipLoss",
    "Encoded",
    "HostSource",
    "Negatives",
    "ReplaySource",
    "SigLipLoss",
    "Source",
    "cached_backward",
    "clip_loss",
    "dcl",
    "hcl",
    "info_nce",
    "matryoshka_clip_loss",
    "nt_xent",
    "pairwise_logsumexp",
    "pairwise_rank",
    "pairwise_self_logsumexp",
    "pairwise_softplus",
    "siglip_loss",
    "soft_clip_loss",
    "sup_con",
]
