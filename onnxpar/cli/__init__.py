"""The command line: one module for each subcommand, joined by one table.

Takes arguments; gives what `onnxpar` prints, and its exit code: parse, call, print, no logic.
Begin with `shard`, or with the module that has the name of the subcommand.

Every module parses, calls and prints. An error that a user can mend is one message on stderr and
exit code 2 (1 where a check does not hold), without a traceback unless `ONNXPAR_TRACEBACK=1`. So is
an interrupt, at any time: exit code 1. This module therefore imports the standard library only,
and all else once signals are handled.
"""

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from onnxpar.core.version import __version__

if TYPE_CHECKING:
    import typer

_TRACEBACK = "ONNXPAR_TRACEBACK"
_VERSION = "--version"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# Seconds for which a rank that tells nothing waits for the one that tells.
_PATIENCE = 3.0

# 128 and the number of a signal that ends a program, as shells and Typer have it.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_INTERRUPTED = tuple(128 + number for number in _SIGNALS)

# Name on the command line -> module whose function `command` it is, or whose `app` has commands of
# its own. Modules are named here and not found by scanning, so that nothing is registered by
# accident.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("shard", "onnxpar.cli.shard"),
    ("annotate", "onnxpar.cli.annotate"),
    ("plan", "onnxpar.cli.plan"),
    ("inspect", "onnxpar.cli.inspect"),
    ("run", "onnxpar.cli.run"),
    ("train", "onnxpar.cli.train"),
    ("eval", "onnxpar.cli.eval"),
    ("launch", "onnxpar.cli.launch"),
    ("checkpoint", "onnxpar.cli.checkpoint"),
    ("verify", "onnxpar.cli.verify"),
    ("view", "onnxpar.cli.view"),
    ("ops", "onnxpar.cli.ops"),
)

# onnxruntime and MPI give Python no turn for as long as they compute; then SIGTERM has to end the
# process as it does any other. Ctrl-C waits for the turn.
_COMPUTING = ("run", "train", "eval", "verify")

# An interrupt ends these with the code that shells have for it, since a script that starts a long
# run must tell an interrupt from a failure; the others end with 1.
_LONG = ("train", "eval", "launch")


def collect_rarely() -> None:
    """Lets Python look for garbage seldom, in a process that transforms models and ends.

    A model is hundreds of thousands of objects that live as long as the process; looking through
    them again and again takes a fifth of the time of `shard`.
    """
    gc.set_threshold(100_000, 20, 50)


def build_app(only: str | None = None) -> "typer.Typer":
    """Returns the application with every subcommand, or with that one of them which `only` names.

    Loading the transformer takes a second, which eight ranks of `run` would each waste.
    """
    import typer

    app = typer.Typer(
        name="onnxpar",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    version = typer.Option(
        False, _VERSION, is_eager=True, callback=_show, help="Show the version and exit."
    )

    def group(version: bool = version) -> None:
        """Partition an ONNX model into one program for each device, and run it."""

    app.callback()(group)
    known = only == _VERSION or only in [name for name, _ in COMMANDS]
    for name, module in COMMANDS:
        if known and name != only:
            continue
        found = importlib.import_module(module)
        if hasattr(found, "app"):
            app.add_typer(found.app, name=name)
        else:
            app.command(name)(found.command)
    return app


def _show(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"onnxpar {__version__}\n")
        raise SystemExit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: What follows `onnxpar`; the process's own by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not {*given[:1]} & {*_COMPUTING, "launch"}:
        collect_rarely()
    with _interruptible(ours=arguments is None) as interrupts:
        try:
            return _run(given, interrupts)
        except BaseException:
            # What was loading or cleaning up may have made another exception of the interrupt.
            if not interrupts.seen:
                raise
            interrupts.tell()
            return 1


def _run(given: list[str], interrupts: "_ProgramSignals") -> int:
    name = given[0] if given else None
    app = build_app(name)
    import typer

    command = typer.main.get_command(app)
    interrupts.begin(name)
    try:
        left: object = command.main(args=given, prog_name="onnxpar", standalone_mode=False)
    except SystemExit as leave:
        left = leave.code
    except Exception as error:
        # The error trees of transformer and runtime share no module, only this attribute, which
        # Typer's errors of usage have too; those alone show themselves, with the usage.
        code = getattr(error, "exit_code", None)
        show = getattr(error, "show", None)
        if not isinstance(code, int) or (os.environ.get(_TRACEBACK) == "1" and show is None):
            raise
        if not _speaks():
            # mpirun ends all ranks when the first of them fails, and with them what is not told.
            time.sleep(_PATIENCE)
        elif show is None:
            _tell(str(error))
        else:
            show()
        return code
    code = left if isinstance(left, int) else 0
    if code in _INTERRUPTED:
        interrupts.tell()
        return code if name in _LONG else 1
    return code


def _speaks() -> bool:
    """Whether this process tells what is wrong: every rank of mpirun finds the same mistake."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def _tell(message: str) -> None:
    if _speaks():
        sys.stderr.write(f"onnxpar: error: {message}\n")
        sys.stderr.flush()


class _ProgramSignals:
    """What SIGINT, SIGTERM and SIGHUP do: at first they end the process, then they raise.

    While a directory is written, `onnxpar.emit.atomic_directory` holds them back on top of this.

    Attributes:
        seen: Whether one of them has come.
    """

    def __init__(self) -> None:
        self.seen = False
        self._loading = True
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Takes over the signals that are not ignored, as `nohup` has them."""
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous in (signal.SIG_DFL, signal.default_int_handler):
                self._previous[number] = previous
                signal.signal(number, self._receive)

    def begin(self, command: str | None) -> None:
        """Says that everything is loaded: there may be something to clean up from now on."""
        self._loading = False
        # Ranks are ended by mpirun, which tells it.
        if command in _COMPUTING or any(name in os.environ for name in _RANKS):
            for number in [n for n in self._previous if n != signal.SIGINT]:
                signal.signal(number, self._previous.pop(number))

    def restore(self, ours: bool) -> None:
        """Gives the signals back; where the process is ours and about to end, lets it end."""
        ending = ours and (self.seen or signal.SIGTERM in self._previous)
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ending else previous)

    def tell(self) -> None:
        """Says that the program was interrupted, and hears of no further signal."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        _tell("interrupted")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        again, self.seen = self.seen, True
        if self._loading or again:
            # An exception could end in whatever is being imported, or in the handling of the first.
            # What has to be cleaned up holds signals back meanwhile.
            self.tell()
            os._exit(1)
        raise KeyboardInterrupt


@contextmanager
def _interruptible(ours: bool) -> Iterator[_ProgramSignals]:
    interrupts = _ProgramSignals()
    # Only the main thread may install handlers, and only there do signals arrive.
    with suppress(ValueError):
        interrupts.install()
    try:
        yield interrupts
    finally:
        interrupts.restore(ours)
