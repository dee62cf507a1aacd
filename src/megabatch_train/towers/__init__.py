"""Loads encoders by name: `towers.load("small")`, "open_clip:ViT-B-32", "hf:NAME". Saves and loads trained encoders.

Optional packages are imported when they are needed.
"""

from megabatch_train.towers.models import load, load_saved, save
from megabatch_train.towers.tower import Pair, Tower

__all__ = ["Pair", "Tower", "load", "load_saved", "save"]
