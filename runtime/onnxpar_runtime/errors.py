"""The errors of the runtime that a user can cause, with the exit code of the command line.

Every class derives from `OnnxparRuntimeError`, whose message is complete without a traceback.
`exit_code` is 2 for a mistake of the user, and 1 for a run that failed.
"""

from typing import Self


class OnnxparRuntimeError(RuntimeError):
    """A failure with a message for people; no traceback is needed to understand it.

    Attributes:
        exit_code: The exit code of the command line.
        agreed: Whether every rank raises it in the same place, so that one rank can print it and
            all can end in order.
    """

    exit_code = 2
    agreed = False

    def as_agreed(self) -> Self:
        """Returns this error, which every rank raises in the same place."""
        self.agreed = True
        return self


class DirectoryError(OnnxparRuntimeError):
    """A directory that is missing, incomplete, or does not match its manifest."""


class CheckpointError(OnnxparRuntimeError):
    """A checkpoint that is missing, incomplete, changed, or does not fit the directory."""


class InputError(OnnxparRuntimeError):
    """An input array that is missing, unknown, or of the wrong dtype or shape."""


class SymbolValueError(OnnxparRuntimeError):
    """The value of a symbolic dimension breaks its constraint, or ranks disagree about it."""


class LaunchError(OnnxparRuntimeError):
    """The program was started with a wrong number of ranks, transport, device, or option."""


class TrainingError(OnnxparRuntimeError):
    """Training cannot go on: the loss is not a number, or infinite."""

    exit_code = 1


class NotFiniteError(TrainingError):
    """A value is NaN or infinite, and `--debug-nan` has found where it comes from."""


class StoppedError(OnnxparRuntimeError):
    """A signal asked the ranks to stop, and they did so in order."""

    exit_code = 1


class ScheduleError(OnnxparRuntimeError):
    """A pipeline schedule that is impossible, or cannot be played to its end."""


class ReplicaError(OnnxparRuntimeError):
    """Ranks that should hold the same shard of a state hold different ones."""

    exit_code = 1


class RankError(OnnxparRuntimeError):
    """A rank failed while all were running; the message begins with the first rank that failed.

    Attributes:
        rank: The first rank that failed.
    """

    exit_code = 1

    def __init__(self, rank: int, message: str, exit_code: int = 1) -> None:
        """Makes the error of `rank`; the command line exits with `exit_code`."""
        super().__init__(f"r{rank} | {message}")
        self.rank = rank
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """Returns an error's text on one line, shortened to 2000 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 2000 else text[:2000] + " …"
