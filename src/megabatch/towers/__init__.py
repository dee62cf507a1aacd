"""Encoders by name: `towers.load("small")`, "open_clip:ViT-B-32", "hf:…"."""

from megabatch.towers.tower import Pair, Tower

__all__ = ["Pair", "Tower"]
