"""One module for each command of `megabatch`, with `add_arguments(parser)` and `run(args)`, which returns the exit status."""
