"""At home in other people's trainers: open_clip, transformers, Accelerate, Lightning, sentence-transformers.

A module for each; none is imported before it is asked for, and none imports its package before it needs it. See
docs/integrations.md and docs/sentence_transformers.md.
"""
