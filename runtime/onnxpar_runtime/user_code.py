"""Functions of the user, which a text `module:function` names, and the errors that they raise."""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxpar_runtime.errors import InputError, OnnxparRuntimeError

_OURS = {Path(__file__).parent, Path(importlib.__file__).parent}
_SHOWN = 3500
"""Characters of a traceback, so that it fits the message on which ranks agree."""


class UserCodeError(OnnxparRuntimeError):
    """The user's own code raised an exception; the message has the traceback."""

    exit_code = 1


def named_function(text: str, where: str, expected: str) -> Callable[..., Any]:
    """Returns the function that `module:function` names; modules of the current folder are found.

    Args:
        text: The name.
        where: The option, for messages.
        expected: The forms that the option takes, for messages.

    Raises:
        InputError: There is no such module or function.
        UserCodeError: The module raised an exception when it was imported.
    """
    # `python -m` finds modules in the current folder; the script that mpirun starts does not.
    if "" not in sys.path:
        sys.path.insert(0, "")
    module, _, name = text.partition(":")
    try:
        with users_code(where):
            found = importlib.import_module(module)
        function = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{where}: {error}; expected {expected}") from None
    if not callable(function):
        raise InputError(f"{where}: {name!r} in {module!r} is not a function")
    result: Callable[..., Any] = function
    return result


@contextmanager
def users_code(where: str) -> Iterator[None]:
    """Turns exceptions that the user's code raises into `UserCodeError`, with the traceback.

    So are calls of `sys.exit`, which would leave the other ranks waiting.

    Errors of the import system itself, such as a module that is not found, pass.

    Args:
        where: The option that named the code, for messages.
    """
    try:
        yield
    except OnnxparRuntimeError:
        raise
    except (Exception, SystemExit) as error:
        shown = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in shown.stack if _is_users(frame.filename)]
        if not frames and isinstance(error, ImportError | ValueError):
            raise
        shown.stack = traceback.StackSummary.from_list(frames)
        text = "".join(shown.format()).rstrip()
        if len(text) > _SHOWN:
            text = f"…{text[-_SHOWN:]}"
        raise UserCodeError(f"{where}: this code failed:\n{text}") from None


def _is_users(file: str) -> bool:
    """Whether a frame of a traceback is neither ours nor of Python's import system."""
    return not file.startswith("<frozen") and not _OURS & {*Path(file).parents}
