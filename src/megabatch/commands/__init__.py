"""What `megabatch NAME` does, a module for each name: `HELP`, `add_arguments(parser)`, `run(args)` with the exit status."""
