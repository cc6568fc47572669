#!/usr/bin/env python3
"""Lists what onnxpar says to its users: error messages, help texts, and all other prose in strings.

    tools/messages.py                      # everything in onnxpar/ and runtime/
    tools/messages.py onnxpar/cli          # only these files or folders
    tools/messages.py --kind error --kind help

Each line reads `path:line: kind: text`. The kinds are:

- `error`: text inside a `raise` statement, or inside a `throw` statement of C++.
- `help`: a `help=` argument, the first argument of an `Option`, or the docstring of a command.
- `text`: any other string of three words or more: notices, reasons, lines of reports, and messages
  that a helper function builds.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("onnxpar", "runtime/onnxpar_format", "runtime/onnxpar_runtime", "runtime/csrc")
KINDS = ("error", "help", "text")
_WORDS = 3
_CPP = (".cc", ".h")
_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_THROW = re.compile(rf"\bthrow\s+((?:[^;\"]|{_LITERAL})*);")


@dataclass(frozen=True)
class Message:
    """One string in the source that a user may read.

    Attributes:
        path: The file, relative to the repository.
        line: The line on which the string begins.
        kind: One of `KINDS`.
        text: The string; an interpolated expression stands in braces.
    """

    path: str
    line: int
    kind: str
    text: str


def messages(folders: Sequence[str] = FOLDERS) -> Iterator[Message]:
    """Yields the messages of every Python and C++ file in `folders`, by file and line."""
    for folder in folders:
        start = ROOT / folder
        paths = sorted(start.rglob("*")) if start.is_dir() else [start]
        for path in (path for path in paths if path.suffix in (".py", *_CPP)):
            name, source = str(path.relative_to(ROOT)), path.read_text()
            found = thrown(source) if path.suffix in _CPP else _of_python(ast.parse(source))
            for line, kind, text in sorted(found):
                yield Message(name, line, kind, " ".join(text.split()))


def thrown(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind and text of each message that C++ throws."""
    for match in _THROW.finditer(source):
        # Literals and the expressions between them alternate.
        pieces = re.split(f"({_LITERAL})", match[1].partition("(")[2].removesuffix(")"))
        texts = [p[1:-1] if i % 2 else _in_braces(p) for i, p in enumerate(pieces)]
        if len(pieces) > 1:
            yield source.count("\n", 0, match.start()) + 1, "error", "".join(texts)


def _in_braces(expression: str) -> str:
    # What turns it into text, and joins it with the literals beside it, is left out.
    text = re.sub(r"std::(to_)?string", "", expression)
    text = text.lstrip(" +)\n").rstrip(" +(\n")
    if text.count(")") > text.count("("):
        text = text.removesuffix(")")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return f"{{{text}}}" if text else ""


def _of_python(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    yield from _strings(tree, "text", _docstrings(tree))
    yield from _commands(tree)


def _docstrings(tree: ast.Module) -> frozenset[ast.AST]:
    # A string that is a statement documents the code around or above it.
    return frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _commands(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorated = any(ast.unparse(call).startswith("app.") for call in node.decorator_list)
            text = ast.get_docstring(node)
            if text and (decorated or node.name == "command"):
                yield node.body[0].lineno, "help", text


def _strings(
    node: ast.AST, kind: str, skipped: frozenset[ast.AST]
) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind and text of each string below `node` that is not in `skipped`."""
    if node in skipped:
        return
    if isinstance(node, ast.Raise):
        kind = "error"
    elif _is_help(node):
        kind = "help"
    text = _text(node)
    if text is None:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child, kind, skipped)
    elif len(text.split()) >= (_WORDS if kind == "text" else 2):
        assert isinstance(node, ast.expr)
        yield node.lineno, kind, text


def _is_help(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "Option"
    return isinstance(node, ast.keyword) and node.arg == "help"


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else str(part.value)
            for part in node.values
            if isinstance(part, ast.FormattedValue | ast.Constant)
        )
    return None


def main() -> None:
    """Prints the messages that the arguments ask for."""
    parser = argparse.ArgumentParser(description="List the messages of onnxpar.")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="files or folders to read")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; repeatable")
    arguments = parser.parse_args()
    for message in messages(arguments.folders):
        if message.kind in (arguments.kind or KINDS):
            print(f"{message.path}:{message.line}: {message.kind}: {message.text}")


if __name__ == "__main__":
    main()
