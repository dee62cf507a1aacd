"""Contrastive losses: a few lines each over the pairwise operations."""

from megabatch.losses.clip import ClipLoss, clip_loss
from megabatch.losses.contrast import Negatives
from megabatch.losses.info_nce import info_nce
from megabatch.losses.siglip import SigLipLoss, siglip_loss

__all__ = ["ClipLoss", "Negatives", "SigLipLoss", "clip_loss", "info_nce", "siglip_loss"]
