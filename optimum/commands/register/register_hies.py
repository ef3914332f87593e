"""`optimum-cli hies ...` and `optimum-cli export hies MODEL DIR`: the command line of hies_export inside Optimum's.

optimum-cli imports this file at every start, so nothing heavy may be imported here, and there must be no
`__init__.py` beside it: the folder is one of Optimum's namespaces.
"""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser
from types import ModuleType

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class _Passed(BaseOptimumCLICommand):
    """A command whose arguments, --help included, are those of a parser of hies_export, which `make_parser` makes."""

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take everything as it is."""
        # Without a character that begins an option, all that follows is one list.
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Parse, run, and exit with the code of hies-export."""
        from hies_export.cli import main as cli

        sys.exit(cli.main(self.args.arguments, parser=self.make_parser(cli)))


class HiesCommand(_Passed):
    """`optimum-cli hies COMMAND ...` is `hies-export COMMAND ...`."""

    COMMAND = CommandInfo(name="hies", help="Remove attention heads without training, ship and measure what is left.")

    @staticmethod
    def make_parser(cli: ModuleType) -> ArgumentParser:
        """The parser of every command."""
        return cli.build_parser("optimum-cli hies")


class HiesExportCommand(_Passed):
    """`optimum-cli export hies MODEL DIR ...` is `hies-export export MODEL -o DIR ...`."""

    COMMAND = CommandInfo(
        name="hies", help="Export a checkpoint, slim or not, to an ONNX folder checked against torch."
    )

    @staticmethod
    def make_parser(cli: ModuleType) -> ArgumentParser:
        """The parser of the one command, with Optimum's two folders."""
        return cli.build_optimum_export_parser()


REGISTER_COMMANDS = [HiesCommand, (HiesExportCommand, ExportCommand)]
