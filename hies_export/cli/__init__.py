"""The command line, `hies-export COMMAND ...`: one file per command.

The input is what a user typed. The output is tables on standard output, progress and messages on standard error, and an
exit code; `--json` adds one line of JSON, last on standard output. Only this folder prints. In the order of reading:

- `main.py`: the parser, assembled from the commands, and what exit code an error or an interrupt becomes;
- `arguments.py`: options that several commands share, and the recipe they describe;
- `terminal.py`: progress bars, warnings and log records on a terminal;
- `run.py`, `bench.py`, ...: a command each. The docstring is its help text; `add_arguments` adds its options; `run`
  does it, prints it for people, and returns what `--json` prints. One that returns nothing has no `--json`.

A new command is such a file and its name in `main.COMMANDS`. Commands import torch, transformers and the stages inside
`run`, because `--help` must answer at once.
"""
