"""Losses and the cached step inside other trainers: open_clip, transformers, Accelerate, Lightning, sentence-transformers.

One module each, imported by its user alone. See docs/integrations.md and docs/sentence_transformers.md.
"""
