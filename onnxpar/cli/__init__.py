"""The command line: one module for each subcommand, joined by one table.

Takes arguments; gives what `onnxpar` prints, and its exit code: parse, call, print, no logic.
Begin with `shard`, or with the module that has the name of the subcommand.

An error that the user can correct is one message on stderr and exit code 2 (1 if a check fails),
without a traceback unless `ONNXPAR_TRACEBACK=1`. An interrupt, at any time, is one message and exit
code 1. So this module imports little but the standard library until signals are
handled.
"""

import atexit
import errno
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

from onnxpar.core.errors import OnnxparError
from onnxpar.core.garbage import no_collection
from onnxpar.core.version import __version__
from onnxpar_format.place import find_place
from onnxpar_format.texts import message_text

if TYPE_CHECKING:
    import typer

_TRACEBACK = "ONNXPAR_TRACEBACK"
_VERSION = "--version"
_COMPLETION = "completion"  # tells of all the others
# Seconds for which the other ranks wait, so that rank 0 can print the message.
_PATIENCE = 3.0

# Shells and Typer use 128 plus the number of the signal that ended a program.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_INTERRUPTED = tuple(128 + number for number in _SIGNALS)

# The name of each command, and the module with its function `command`, or with an `app` of several
# commands. Modules are listed, not found by scanning, so nothing is registered by accident.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("shard", "onnxpar.cli.shard"),
    ("annotate", "onnxpar.cli.annotate"),
    ("plan", "onnxpar.cli.plan"),
    ("inspect", "onnxpar.cli.inspect"),
    ("run", "onnxpar.cli.run"),
    ("generate", "onnxpar.cli.generate"),
    ("serve", "onnxpar.cli.serve"),
    ("train", "onnxpar.cli.train"),
    ("eval", "onnxpar.cli.eval"),
    ("launch", "onnxpar.cli.launch"),
    ("checkpoint", "onnxpar.cli.checkpoint"),
    ("verify", "onnxpar.cli.verify"),
    ("view", "onnxpar.cli.view"),
    ("trace", "onnxpar.cli.trace"),
    ("report", "onnxpar.cli.report"),
    ("diagnose", "onnxpar.cli.diagnose"),
    ("ops", "onnxpar.cli.ops"),
    ("doctor", "onnxpar.cli.doctor"),
    ("completion", "onnxpar.cli.completion"),
)

# While onnxruntime and MPI compute, Python handles no signals. SIGTERM must end these commands
# directly, as it ends any other process; Ctrl-C waits.
_COMPUTING = ("run", "generate", "serve", "train", "eval", "verify")

# After a signal, also one that comes while they load, these commands exit with the code that shells
# use for it, so that a script can tell an interrupt from a failure. The others exit with 1.
_LONG = ("train", "eval", "launch")


def collect_rarely() -> None:
    """Makes Python's garbage collection rare, for a process that transforms models and ends.

    A model is hundreds of thousands of objects that live as long as the process. To traverse them
    again and again takes a fifth of the time of `shard`.
    """
    gc.set_threshold(1_000_000, 20, 50)
    end_without_collection()


def end_without_collection() -> None:
    """Exempts all objects from garbage collection when the process ends.

    Python would traverse them three times, with those of all modules: a seventh of the processor
    time of a rank that starts and ends, half a second or more after a model was transformed.
    """
    atexit.register(gc.freeze)


def build_app(only: str | None = None) -> "typer.Typer":
    """Returns the application with every subcommand, or only with the one that `only` names.

    Loading the transformer takes a second, which each rank of `run` would waste.
    """
    import typer

    shown = importlib.import_module("onnxpar.cli.grouped_help")
    app = typer.Typer(
        name="onnxpar",
        cls=shown.GroupedHelp,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    version = typer.Option(
        False, _VERSION, is_eager=True, callback=_show, help="Show the version and exit."
    )

    def group(version: bool = version) -> None:
        """Shard an ONNX model over devices, and run or train it."""

    app.callback()(group)
    known = only == _VERSION or only in [n for n, _ in COMMANDS if n != _COMPLETION]
    for name, module in COMMANDS:
        if known and name != only:
            continue
        found = importlib.import_module(module)
        if hasattr(found, "app"):
            app.add_typer(found.app, name=name, epilog=shown.example(name))
        else:
            app.command(name, epilog=shown.example(name))(found.command)
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
    if arguments is None:
        if {*given[:1]} & {*_COMPUTING, "launch"}:
            end_without_collection()
        else:
            collect_rarely()
    name = given[0] if given else None
    with _interruptible(name, ours=arguments is None) as interrupts:
        try:
            return _run(given, name, interrupts)
        except BaseException:
            # Code that was loading or cleaning up may have turned the interrupt into this error.
            if interrupts.seen is None:
                raise
            interrupts.report()
            return interrupts.code


def _run(given: list[str], name: str | None, interrupts: "_ProgramSignals") -> int:
    with no_collection():
        app = build_app(name)
        import typer

    command = typer.main.get_command(app)
    interrupts.begin()
    try:
        _check_text(given)
        left: object = command.main(args=given, prog_name="onnxpar", standalone_mode=False)
    except SystemExit as leave:
        left = leave.code
    except Exception as error:
        # The errors of transformer and runtime share only this attribute. Typer's usage errors have
        # it too, and methods that show and word them.
        code = getattr(error, "exit_code", None)
        show = getattr(error, "show", None)
        if os.environ.get(_TRACEBACK) == "1" and show is None:
            raise
        if not isinstance(code, int):
            if interrupts.seen is not None:
                raise
            if isinstance(error, MemoryError):
                _print_error(f"there is not enough memory: {error}".removesuffix(": "))
                return 1
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                # Such as a name that is too long, or a file that was removed meanwhile.
                _print_error(f"{error.filename!r:.200}: {error.strerror}")
                return 2
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                # Files have errors of their own: this is what is printed.
                _print_error(f"the output cannot be written: {error.strerror}")
                return 2
            _print_error(
                f"internal error in onnxpar {__version__}: {type(error).__name__}: {error}; please "
                f"report it with the output of the same command under {_TRACEBACK}=1"
            )
            return 1
        if not _prints():
            # mpirun ends all ranks when the first one fails; rank 0 must print its message first.
            time.sleep(_PATIENCE)
        elif show is None:
            _print_error(str(error))
        elif (message := _usage_error(error, name)) is not None:
            _print_error(message)
        else:
            show()
        return code
    code = left if isinstance(left, int) else 0
    if code in _INTERRUPTED:
        interrupts.report()
        return interrupts.code if interrupts.seen is not None or name not in _LONG else code
    return code


def _check_text(arguments: Sequence[str]) -> None:
    """Raises OnnxparError unless all arguments are text: they may be written to files of UTF-8."""
    for argument in arguments:
        # Python reads each byte that is not UTF-8 as a lone surrogate.
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise OnnxparError(f"expected arguments in UTF-8, got {argument!r}")


def _usage_error(error: Any, name: str | None) -> str | None:
    """Returns our message for a usage error of Typer; None if this is the help, not an error.

    Args:
        error: The error.
        name: The command, which some errors do not know.
    """
    details = getattr(error.__cause__, "errors", None)
    if details is not None:  # pydantic refuses a value
        from onnxpar.strategy.validation_errors import problem

        return f"{error.param.opts[0]}: {problem(details()[0])}"
    message: str = error.format_message().removesuffix(".")
    if message.startswith("Usage: "):
        return None
    command = f"onnxpar {name}" if name in dict(COMMANDS) else "onnxpar"
    if error.ctx is not None:
        command = error.ctx.command_path
    return f"{message[:1].lower()}{message[1:]}: see {command} --help"


def _prints() -> bool:
    """Whether this process prints errors: every rank of mpirun finds the same mistake."""
    place = find_place()
    return place is None or place.rank == 0


def _print_error(message: str) -> None:
    if _prints():
        sys.stderr.write(f"onnxpar: error: {message_text(message)}\n")
        sys.stderr.flush()


class _ProgramSignals:
    """The effect of SIGINT, SIGTERM and SIGHUP: they end a loading process, and raise later.

    While a directory is written, `onnxpar.emit.atomic_directory` delays them.

    Attributes:
        seen: The first that has arrived; None if none has.
    """

    def __init__(self, command: str | None) -> None:
        self.seen: int | None = None
        self._command = command
        self._loading = True
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Handles the signals that are not ignored (`nohup` ignores one)."""
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous in (signal.SIG_DFL, signal.default_int_handler):
                self._previous[number] = previous
                signal.signal(number, self._receive)

    @property
    def code(self) -> int:
        """The exit code after the signal."""
        return 128 + self.seen if self._command in _LONG and self.seen is not None else 1

    def begin(self) -> None:
        """Notes that everything is loaded: from now on there may be something to clean up."""
        self._loading = False
        # mpirun ends ranks, and reports it.
        if self._command in _COMPUTING or find_place() is not None:
            for number in [n for n in self._previous if n != signal.SIGINT]:
                signal.signal(number, self._previous.pop(number))

    def restore(self, ours: bool) -> None:
        """Restores the handlers; if the process is ours and about to end, ignores signals."""
        ending = ours and (self.seen is not None or signal.SIGTERM in self._previous)
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ending else previous)

    def report(self) -> None:
        """Prints that the program was interrupted, and ignores further signals."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        _print_error("interrupted")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = self.seen is not None
        if self.seen is None:
            self.seen = number
        if self._loading or again:
            # An exception could get lost in an import, or in the handling of the first signal.
            # Code that must clean up delays signals.
            self.report()
            os._exit(self.code)
        raise KeyboardInterrupt


@contextmanager
def _interruptible(command: str | None, ours: bool) -> Iterator[_ProgramSignals]:
    interrupts = _ProgramSignals(command)
    # Only the main thread may install handlers, and only it receives signals.
    with suppress(ValueError):
        interrupts.install()
    try:
        yield interrupts
    finally:
        interrupts.restore(ours)
