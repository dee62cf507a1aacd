"""What the command line offers, a module each: `add_arguments(parser)`, and `run(args)`, which returns the exit status."""
