"""Encoders by name: `towers.load("small")`, "open_clip:ViT-B-32", "hf:NAME". Optional packages are imported when asked for."""

from megabatch.towers.load import load
from megabatch.towers.tower import Pair, Tower

__all__ = ["Pair", "Tower", "load"]
