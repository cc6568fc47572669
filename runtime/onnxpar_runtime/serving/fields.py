"""Reads the JSON of requests, and says what is wrong with it as OpenAI's servers do."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onnxpar_format.texts import message_text


class Refusal(Exception):
    """A request that gets an error instead of an answer.

    Args:
        message: What is wrong.
        status: The HTTP status.
        field: The field that is wrong.
        code: A name for the error.

    Attributes:
        status: The HTTP status.
        body: The JSON of the answer.
    """

    def __init__(
        self, message: str, status: int = 400, *, field: str | None = None, code: str | None = None
    ) -> None:
        """Writes the answer."""
        message = message_text(message)
        super().__init__(message)
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": field, "code": code}}


class Fields:
    """The fields of a request, each of which may be read once; null is as good as absent.

    Args:
        text: The body of the request.

    Raises:
        Refusal: It is not a JSON object.
    """

    def __init__(self, text: bytes) -> None:
        """Parses the body."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise Refusal("body: expected a JSON object, got something else") from None
        if not isinstance(found, dict):
            raise Refusal(f"body: expected a JSON object, got {_shown(found)}")
        self._left: dict[str, Any] = {k: v for k, v in found.items() if v is not None}

    def take(self, name: str) -> Any:
        """Returns a field as it is; None if it is absent."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """Returns a string; None if it is absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, "a string", value)
        return value

    def flag(self, name: str) -> bool:
        """Returns whether a flag is set."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """Returns an integer; None if it is absent."""
        value: int | None = self.take(name)
        right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value is not None and not right:
            raise wrong(name, f"an integer from {least} to {most}", value)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Returns a number."""
        value = self.take(name)
        if value is None:
            return default
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if not right or not least <= value <= most:
            raise wrong(name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def texts(self, name: str, most: int) -> list[str]:
        """Returns a list of strings that are not empty; a string is a list of one."""
        value = self.take(name)
        found = [] if value is None else [value] if isinstance(value, str) else value
        right = isinstance(found, list) and all(isinstance(x, str) and x for x in found)
        if not right or len(found) > most:
            raise wrong(name, f"a string or a list of at most {most} strings, none empty", value)
        return list(found)

    def neutral(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Refuses fields whose values would change the answer in a way that is not supported."""
        for name, allowed in values.items():
            value = self.take(name)
            if value is not None and value not in allowed:
                raise Refusal(f"{name}: not supported, got {_shown(value)}", field=name)

    def done(self) -> None:
        """Refuses fields that nobody has read."""
        if self._left:
            name = next(iter(self._left))
            raise Refusal(f"{name}: no such field", field=name)


def wrong(name: str, expected: str, got: object) -> Refusal:
    """Returns the refusal of a field's value."""
    return Refusal(f"{name}: expected {expected}, got {_shown(got)}", field=name)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
