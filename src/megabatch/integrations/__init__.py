"""Losses and gradient caching in other trainers: open_clip, transformers, Accelerate, Lightning, sentence-transformers.

| trainer | module |
|---|---|
| open_clip | `open_clip` |
| Accelerate, transformers' `Trainer`, Lightning | `trainers` |
| sentence-transformers | `sentence_transformers` |
| PyLate | `pylate` |

Each module imports at most its own trainer. See docs/integrations.md and docs/sentence_transformers.md.
"""
