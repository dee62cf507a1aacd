"""The `megabatch` command: training, data, towers, evaluation, search, mining, planning, export and reports."""
