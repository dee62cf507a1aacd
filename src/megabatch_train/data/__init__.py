"""Datasets of pairs, whose samples can be read again by index: see dataset.py."""

from megabatch_train.data.dataset import IMAGE, TEXT, Audio, Dataset, Preparation, StoredFile, UnreadableSampleError

__all__ = ["IMAGE", "TEXT", "Audio", "Dataset", "Preparation", "StoredFile", "UnreadableSampleError"]
