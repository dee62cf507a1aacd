"""Pairs to train on and to search in, each readable again by its number: see dataset.py."""

from megabatch.data.dataset import IMAGE, TEXT, Dataset, Preparation, UnreadableSampleError

__all__ = ["IMAGE", "TEXT", "Dataset", "Preparation", "UnreadableSampleError"]
