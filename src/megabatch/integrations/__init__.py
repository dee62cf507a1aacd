"""Losses and the cached step inside other trainers: open_clip, transformers, Accelerate, Lightning, sentence-transformers.

| host | module |
|---|---|
| open_clip | `open_clip` |
| Accelerate, transformers' `Trainer`, Lightning | `trainers` |
| sentence-transformers | `sentence_transformers` |
| PyLate | `pylate` |

No module imports another host. See docs/integrations.md and docs/sentence_transformers.md.
"""
