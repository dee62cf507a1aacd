"""Passes over the tiles of a block of logits on one device. This package does not use `ring`."""
