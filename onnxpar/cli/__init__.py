"""The command line: one module for each subcommand, joined by one table.

Every module parses, calls and prints. An error that a user can mend is one message on stderr and
exit code 2 (1 where a check does not hold), without a traceback unless `ONNXPAR_TRACEBACK=1`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

_TRACEBACK = "ONNXPAR_TRACEBACK"

# 128 and the number of SIGINT or SIGTERM, as shells and Typer have it.
_INTERRUPTED = (130, 143)

# Name on the command line -> module whose function `command` it is. Modules are imported here and
# not found by scanning, so that nothing is registered by accident.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("shard", "onnxpar.cli.shard"),
    ("inspect", "onnxpar.cli.inspect"),
    ("run", "onnxpar.cli.run"),
    ("verify", "onnxpar.cli.verify"),
    ("view", "onnxpar.cli.view"),
    ("ops", "onnxpar.cli.ops"),
)


def build_app(only: str | None = None) -> typer.Typer:
    """Returns the application with every subcommand, or with that one of them which `only` names.

    Loading the transformer takes a second, which eight ranks of `run` would each spend in vain.
    """
    app = typer.Typer(
        name="onnxpar",
        help="Cut an ONNX model into one program for each device, and run it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_group)
    known = only in [name for name, _ in COMMANDS]
    for name, module in COMMANDS:
        if known and name != only:
            continue
        command: Callable[..., Any] = importlib.import_module(module).command
        app.command(name)(command)
    return app


def _group() -> None:
    """Cut an ONNX model into one program for each device, and run it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: What follows `onnxpar`; the process's own by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(build_app(given[0] if given else None))
    try:
        # Typer prints usage errors itself and exits.
        command.main(args=given, prog_name="onnxpar")
    except SystemExit as leave:
        if leave.code in _INTERRUPTED:
            sys.stderr.write("onnxpar: error: interrupted\n")
            return 1
        return leave.code if isinstance(leave.code, int) else 0
    except Exception as error:
        # The error trees of transformer and runtime share no module, only this attribute.
        code = getattr(error, "exit_code", None)
        if not isinstance(code, int) or os.environ.get(_TRACEBACK) == "1":
            raise
        # Under mpirun every rank comes here with the same mistake; one of them tells it.
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            sys.stderr.write(f"onnxpar: error: {error}\n")
        return code
    return 0
