"""`optimum-cli hies ...`: our command line inside Optimum's.

optimum-cli imports this file at every start, so it imports nothing heavy. There must be no `__init__.py` beside it: the
folder is one of Optimum's namespaces.
"""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class HiesCommand(BaseOptimumCLICommand):
    """`optimum-cli hies COMMAND ...` is `hies-export COMMAND ...`: all arguments, `--help` included, are left to it."""

    COMMAND = CommandInfo(name="hies", help="Remove attention heads without training, ship and measure what is left.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Accept every argument as it is."""
        # Where no character begins an option, --help and the like are arguments too.
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Parse, run, and exit as hies-export does."""
        from hies_export.cli import main as cli

        sys.exit(cli.main(self.args.arguments, parser=cli.build_parser("optimum-cli hies")))


REGISTER_COMMANDS = [HiesCommand]
