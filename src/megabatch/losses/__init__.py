"""Contrastive losses: a few lines each over the pairwise operations."""

from megabatch.losses.clip import ClipLoss, clip_loss
from megabatch.losses.matryoshka import matryoshka_clip_loss
from megabatch.losses.nt_xent import nt_xent
from megabatch.losses.siglip import SigLipLoss, siglip_loss
from megabatch.losses.sup_con import sup_con

__all__ = ["ClipLoss", "SigLipLoss", "clip_loss", "matryoshka_clip_loss", "nt_xent", "siglip_loss", "sup_con"]
