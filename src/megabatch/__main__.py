"""`python -m megabatch`, and so `torchrun -m megabatch`: the command line."""

import sys

from megabatch_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
