"""The arguments of each command. These modules import neither torch nor what the command runs: help appears at once."""
