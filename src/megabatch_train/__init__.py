"""The `megabatch` command: trainer, data, towers, evaluation, search, mining, planning, export and reports."""
