"""Datasets of pairs, whose samples can be read again by index: see dataset.py."""

from megabatch_train.data.dataset import IMAGE, TEXT, Dataset, Preparation, UnreadableSampleError

__all__ = ["IMAGE", "TEXT", "Dataset", "Preparation", "UnreadableSampleError"]
