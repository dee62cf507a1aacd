"""At home in other people's trainers: open_clip, transformers' Trainer, Accelerate, Lightning. See docs/integrations.md.

A module for each; none is imported before it is asked for, and none imports its package before it needs it.
"""
