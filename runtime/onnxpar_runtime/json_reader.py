"""Takes parsed JSON apart; what is not as expected is an error that names the place in the file."""

from pathlib import Path
from typing import Any, ClassVar

from onnxpar_runtime.errors import ArtifactError, OnnxparRuntimeError

Interval = tuple[int, int]


class JsonReader:
    """What the readers of manifests share.

    Args:
        path: Where the text was, for messages.

    Attributes:
        path: The same.
        error: What is raised.
    """

    error: ClassVar[type[OnnxparRuntimeError]] = ArtifactError

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path

    def fail(self, where: str, expected: str, got: object) -> OnnxparRuntimeError:
        """Returns the error for a place that has something else than expected."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.error(f"{self.path}: {where}: expected {expected}, got {shown}")

    def get(self, raw: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
        """Returns the value of a key, of one of the kinds; a boolean is no integer."""
        if not isinstance(raw, dict):
            raise self.fail(where, "an object", raw)
        if key not in raw:
            raise self.error(f"{self.path}: {where}: {key!r} is missing")
        value = raw[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise self.fail(f"{where}.{key}", names, value)
        return value

    def integers(self, raw: Any, where: str) -> tuple[int, ...]:
        """Returns a list of integers."""
        if not isinstance(raw, list) or not all(type(v) is int for v in raw):
            raise self.fail(where, "a list of integers", raw)
        return tuple(raw)

    def names(self, raw: Any, key: str, where: str) -> tuple[str, ...]:
        """Returns the list of texts of a key."""
        values = self.get(raw, key, list, where)
        if not all(isinstance(value, str) for value in values):
            raise self.fail(f"{where}.{key}", "a list of names", values)
        return tuple(values)

    def file_name(self, name: Any, where: str) -> str:
        """Returns the name of a file in the folder of what is read."""
        # onnxruntime refuses external data outside a model's folder, and a manifest from elsewhere
        # must not make the runtime read other people's files.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise self.fail(where, "a file name without folders", name)
        return name

    def box(self, raw: Any, key: str, where: str) -> tuple[Interval, ...]:
        """Returns the box of indices of a key: `[start, stop)` for each dim."""
        box = []
        for pair in self.get(raw, key, list, where):
            start, *rest = self.integers(pair, f"{where}.{key}") or (0,)
            if len(rest) != 1 or not 0 <= start <= rest[0]:
                raise self.fail(f"{where}.{key}", "[start, stop] pairs", pair)
            box.append((start, rest[0]))
        return tuple(box)

    def digest(self, raw: Any, key: str, where: str) -> str:
        """Returns the SHA-256 of a key, in hexadecimal digits."""
        text: str = self.get(raw, key, str, where)
        if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
            raise self.fail(f"{where}.{key}", "64 hexadecimal digits", text)
        return text
