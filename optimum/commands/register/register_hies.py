"""`optimum-cli hies ...` and `optimum-cli export hies MODEL DIR`: our command line inside Optimum's.

optimum-cli imports this file at every start, so it imports nothing heavy. There must be no `__init__.py` beside it: the
folder is one of Optimum's namespaces.
"""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser
from types import ModuleType

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class _ForwardedCommand(BaseOptimumCLICommand):
    """A command that leaves all its arguments, `--help` included, to a parser of hies_export."""

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Accept every argument as it is."""
        # Where no character begins an option, --help and the like are arguments too.
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Parse, run, and exit as hies-export does."""
        from hies_export.cli import main as cli

        sys.exit(cli.main(self.args.arguments, parser=self.build_parser(cli)))


class HiesCommand(_ForwardedCommand):
    """`optimum-cli hies COMMAND ...` is `hies-export COMMAND ...`."""

    COMMAND = CommandInfo(name="hies", help="Remove attention heads without training, ship and measure what is left.")

    @staticmethod
    def build_parser(cli: ModuleType) -> ArgumentParser:
        """Return the parser of every command."""
        return cli.build_parser("optimum-cli hies")


class HiesExportCommand(_ForwardedCommand):
    """`optimum-cli export hies MODEL DIR ...` is `hies-export export MODEL -o DIR ...`."""

    COMMAND = CommandInfo(
        name="hies", help="Export a checkpoint, slim or not, to an ONNX folder checked against torch."
    )

    @staticmethod
    def build_parser(cli: ModuleType) -> ArgumentParser:
        """Return the parser of `export`, whose folder is an argument as in Optimum's own exporters."""
        return cli.build_optimum_export_parser()


REGISTER_COMMANDS = [HiesCommand, (HiesExportCommand, ExportCommand)]
