"""Error messages for what pydantic finds wrong with a file or an option: expected …, got …."""

from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

from onnxpar.core.errors import short

_TYPES: Mapping[str, str] = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "string_type": "text",
    "list_type": "a list",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def in_words(location: Sequence[str | int]) -> str:
    """Returns the keys of a place in a file, with a colon after each."""
    return "".join(f"{part!r}: " for part in location)


def problem(error: ErrorDetails) -> str:
    """Returns a message of one line, without the place."""
    kind, message = error["type"], error["msg"]
    if kind == "value_error":  # from our own validators, whose messages are complete
        return message.removeprefix("Value error, ")
    if kind == "missing":
        return "expected this key, got none"
    if kind == "extra_forbidden":
        return "unknown key"
    got = short(error["input"])
    if kind == "literal_error":
        return f"expected {error['ctx']['expected']}, got {got}"
    if kind in _TYPES:
        return f"expected {_TYPES[kind]}, got {got}"
    if kind in _BOUNDS:
        key, sign = _BOUNDS[kind]
        # A number has no quotes, even if it is text on the command line.
        found = got.strip("'")
        return f"expected a number {sign} {error['ctx'][key]:g}, got {found}"
    if kind == "too_short":
        count = error["ctx"]["min_length"]
        return f"expected at least {count} {'item' if count == 1 else 'items'}, got {got}"
    return f"{message}, got {got}"
