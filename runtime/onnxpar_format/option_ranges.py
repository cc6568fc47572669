"""The ranges of options, for callers in Python; the command line compares them itself."""

from dataclasses import is_dataclass
from typing import Any, get_type_hints

from onnxpar_format.option import Option


def check_numbers(options: Any) -> None:
    """Compares the numbers of a dataclass of options with what they may be, as commands do.

    Raises:
        ValueError: One is too small or too large; the message begins with the option.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if is_dataclass(value):
            check_numbers(value)
        for option in getattr(hint, "__metadata__", ()):
            if not isinstance(option, Option) or not isinstance(value, int | float):
                continue
            least, most = option.minimum, option.maximum
            if (least is not None and value < least) or (most is not None and value > most):
                limits = f">= {least}" if most is None else f"from {least} to {most}"
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag}: expected a number {limits}, got {value}")
