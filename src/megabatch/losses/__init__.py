"""Contrastive losses. Each is a few lines on top of the pairwise operations."""

from megabatch.losses.clip import clip_loss, matryoshka_clip_loss, siglip_loss, soft_clip_loss
from megabatch.losses.info_nce import dcl_loss, hcl_loss, info_nce_loss
from megabatch.losses.late_interaction import late_distillation_loss, late_interaction_loss
from megabatch.losses.modules import ClipLoss, DistillClipLoss, SigLipLoss
from megabatch.losses.negatives import Negatives
from megabatch.losses.self_supervised import nt_xent_loss, sup_con_loss

__all__ = [
    "ClipLoss",
    "DistillClipLoss",
    "Negatives",
    "SigLipLoss",
    "clip_loss",
    "dcl_loss",
    "hcl_loss",
    "info_nce_loss",
    "late_distillation_loss",
    "late_interaction_loss",
    "matryoshka_clip_loss",
    "nt_xent_loss",
    "siglip_loss",
    "soft_clip_loss",
    "sup_con_loss",
]
