"""Runs the command line for `python -m megabatch` and `torchrun -m megabatch`."""

import sys

from megabatch_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
