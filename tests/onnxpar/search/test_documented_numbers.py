"""The numbers in design notes that are constants of the search."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import onnxpar

NOTES = Path(__file__).parents[3] / "docs/design"
ROOMS = ("search", "facts")
WORDS = {"a sixteenth": 1 / 16, "two": 2, "three": 3, "four": 4, "five": 5, "eight": 8}


@pytest.mark.parametrize("note", ["0011-planning.md", "0029-configurations.md"])
def test_numbers_are_those_of_the_code(note: str) -> None:
    """A number is followed by its constant: 1.5 (`configurations.NEAR`)."""
    words = "|".join(WORDS)
    stated = re.compile(rf"\b({words}|[\d.,]*\d)\s\(`(\w+)\.([A-Z_]+)`\)")
    text = (NOTES / note).read_text(encoding="utf-8")
    found = stated.findall(text)
    assert found
    for number, module, name in found:
        (room,) = (
            r for r in ROOMS if (Path(onnxpar.__file__).parent / r / f"{module}.py").exists()
        )
        value = getattr(import_module(f"onnxpar.{room}.{module}"), name)
        expected = WORDS[number] if number in WORDS else float(number.replace(",", ""))
        assert value == expected, f"{note}: {number} ({module}.{name}), got {value}"
