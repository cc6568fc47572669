"""The reports of a run: a printed line for each step, a file of JSON lines, and a live line.

Only rank 0 reports. Errors are raised on all ranks.
"""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, TextIO

from onnxpar_format.manifest import Training
from onnxpar_format.new_file import check_file
from onnxpar_format.place import find_place
from onnxpar_runtime.closing import Closing
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.live_line import LiveLine
from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.step_record import StepRecord, json_line
from onnxpar_runtime.user_code import users_code

if TYPE_CHECKING:
    from rich.live import Live

SHOWN = 5
"""Untrained or shared tensors that are named one by one."""


class Reporter(Closing):
    """Prints and logs what happens; used in a `with` statement.

    Args:
        first: Whether this is rank 0. Other ranks report nothing.
        log: File of JSON lines to write, or None.
        keep: The number of steps before the run was resumed; their lines are kept.
        every: Print each step of an epoch whose number this divides; 0 prints none.
        out: The stream for printed lines.
        live: Whether to draw a live line; by default if the output is shown on a terminal.
        callbacks: Are told what is reported, on rank 0.

    Raises:
        InputError: The log file cannot be written.
    """

    def __init__(
        self,
        first: bool,
        *,
        log: str | Path | None = None,
        keep: int = 0,
        every: int = 1,
        out: TextIO | None = None,
        live: bool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Opens the log file."""
        self._first = first
        self._callbacks = callbacks if first else ()
        self._done = 0
        self._every = every
        self._out = sys.stdout if out is None else out
        self._path = log
        self._file: FileIO | None = None
        self._open = ExitStack()
        if first and log is not None:
            check_file(log, InputError)
            try:
                # Closed by the stack, with the run. Without a buffer, a full disk is reported at
                # the step, and not again when the file is closed.
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o666)
                regular = S_ISREG(os.fstat(descriptor).st_mode)
                if regular:
                    _lock(Path(log), descriptor)
                stream = open(descriptor, "wb", buffering=0)  # noqa: SIM115
                self._file = self._open.enter_context(stream)
                if regular:
                    # Lines to keep are not written again, so that a kill here does not lose them.
                    kept = _length(Path(log), keep)
                    self._file.truncate(kept)
                    self._file.seek(kept)
            except OSError as error:
                raise self._cannot_write(error) from None
        self._live: Live | None = None
        self._line = LiveLine(None)
        if first and (on_terminal(self._out) if live is None else live):
            self._live = _live(self._out)

    def begin(self, steps: int | None, done: int = 0) -> None:
        """Begins a run of `steps` steps (None if unknown), of which `done` are done."""
        self._done = done
        if self._live is not None:
            self._line = LiveLine(steps, done)
            self._live.update(self._line)
            self._live.start()

    def tell(self, text: str) -> None:
        """Prints a line."""
        if not self._first:
            return
        if self._live is not None and self._live.is_started:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            self._out.write(text + "\n")
            self._out.flush()

    def step(self, record: StepRecord) -> None:
        """Reports a step.

        Raises:
            InputError: The log file cannot be written.
        """
        self._done = record.run_step
        if not self._first:
            return
        if self._every and record.step % self._every == 0:
            self.tell(record.line)
        self._line.show(record)
        self._write(record.json)
        self._tell_callbacks(lambda callback: callback.on_step(self._done, record))

    def evaluated(self, epoch: int, result: Evaluated, where: str = "") -> None:
        """Reports an evaluation; `where` is the place in the epoch, if it is not the end.

        Raises:
            InputError: The log file cannot be written.
        """
        self.tell(f"epoch: {epoch} {where}evaluated on {result.samples} samples: {result.text}")
        values = {
            "epoch": epoch,
            "run_step": self._done,
            "evaluation_loss": result.loss,
            "evaluation_accuracy": result.accuracy,
            **{f"evaluation_{name}": value for name, value in result.metrics.items()},
        }
        self._write(json_line(values))
        self._tell_callbacks(lambda callback: callback.on_evaluation(self._done, result))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Reports that the checkpoint of a step was begun, and its folder."""
        self._tell_callbacks(lambda callback: callback.on_checkpoint(step, folder))

    def end(self, result: Fitted) -> None:
        """Reports the end of the run."""
        self._tell_callbacks(lambda callback: callback.on_end(result))

    def _tell_callbacks(self, tell: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            with users_code(f"callback {type(callback).__name__}"):
                tell(callback)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line.encode() + b"\n")
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> InputError:
        return InputError(f"{self._path}: cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """Removes the live line and closes the file."""
        if self._live is not None:
            self._live.stop()
        self._open.close()


def _lock(log: Path, descriptor: int) -> None:
    """Locks the log for this process; closes the descriptor if it raises.

    Raises:
        InputError: Another run writes to it: its lines and ours would be mixed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"--log {log}: another run is writing to this file") from None
    except OSError:
        pass  # The file system has no locks; a log without one is better than none.


def _length(path: Path, steps: int) -> int:
    """Returns the bytes of the complete lines at the beginning of a log, up to a step of the run.

    In a log without numbers of steps in the run, each line counts as a step.
    """
    if not steps or not path.exists():
        return 0
    length = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n") or _run_step(line, number) > steps:
            break
        length += len(line)
    return length


def _run_step(line: bytes, number: int) -> int:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return number
    found = entry.get("run_step") if isinstance(entry, dict) else None
    return found if isinstance(found, int) else number


def _live(out: TextIO) -> "Live":
    """Returns what draws a line again and again on a terminal."""
    # Loading it takes a tenth of a second, so only rank 0 does.
    from rich import console, live

    # A rank's standard output belongs to mpirun, so rich cannot tell that it is a terminal, nor
    # how wide it is.
    shown = console.Console(file=out, force_terminal=True, highlight=False, width=_width())
    # The stream itself is left as it is: other lines are printed by `tell`.
    return live.Live(console=shown, transient=True, redirect_stdout=False, redirect_stderr=False)


def _width() -> int | None:
    """Returns the columns of mpirun's terminal; None without mpirun, or if they are not known."""
    if find_place() is None:
        return None
    try:
        terminal = os.open(f"/proc/{os.getppid()}/fd/1", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.get_terminal_size(terminal).columns or None
    except OSError:
        return None
    finally:
        os.close(terminal)


def on_terminal(stream: TextIO) -> bool:
    """Whether the stream is shown on a terminal.

    Open MPI gives every rank a pseudo-terminal, whatever its own output is. So under mpirun the
    output of the parent process decides (on Linux; elsewhere the answer is no).
    """
    try:
        if not stream.isatty():
            return False
        if find_place() is None:
            return True
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith("/dev/pts/")
    except (OSError, ValueError):
        return False


def what_is_trained(training: Training) -> list[str]:
    """Returns lines about the trained, untrained and shared parameters, and the notices."""
    tensors = [t for t in training.tensors if t.parameter]
    trained = [t for t in tensors if t.trained]
    elements, of = (sum(t.elements for t in group) for group in (trained, tensors))
    # The model computes a loss of this kind itself.
    loss = "the model's own loss" if training.loss.kind == "output" else training.loss.kind
    lines = [
        f"training {elements:,} of {of:,} parameters, in {len(trained)} of {len(tensors)} "
        f"tensors, with {training.optimizer} on {loss}"
    ]
    lines += _some(
        [
            f"not trained: {t.name} ({t.elements:,}): {t.reason or 'the loss does not need it'}"
            for t in tensors
            if not t.trained
        ]
    )
    lines += _some(
        [f"shared: {t.name} by {', '.join(t.used_by)}" for t in trained if len(t.used_by) > 1]
    )
    return lines + [f"notice: {notice}" for notice in training.notices]


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    kind = lines[0].split(":")[0] if lines else ""
    return [*lines[:SHOWN], *([f"{kind}: and {more} more"] if more > 0 else [])]
