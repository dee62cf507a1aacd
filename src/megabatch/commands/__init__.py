"""What `megabatch NAME` does, a module for each name: `add_arguments(parser)`, `run(args)` with the exit status."""
