"""Contrastive losses: a few lines each over the pairwise operations."""

from megabatch.losses.clip import ClipLoss, clip_loss
from megabatch.losses.siglip import SigLipLoss, siglip_loss

__all__ = ["ClipLoss", "SigLipLoss", "clip_loss", "siglip_loss"]
