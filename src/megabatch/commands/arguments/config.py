"""The arguments of `megabatch config`."""

import argparse

DESCRIPTION = """
Lists the settings of `megabatch train`, with their defaults. Set them in a TOML file (--config) or
by --set KEY=VALUE; many have a flag of their own.

  megabatch config                     all settings
  megabatch config optimizer           settings with this word in their name or description
  megabatch config --of runs/emoji-1   the values of a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `megabatch config`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="*", metavar="WORD", help="show settings with all of these words")
    parser.add_argument("--of", metavar="RUN", help="folder of a run whose values are shown instead of the defaults")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/settings.md")
