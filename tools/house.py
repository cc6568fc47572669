#!/usr/bin/env python3
"""Prints the rooms of `onnxpar/` in their order, with their sizes and imports.

    tools/house.py             # one line for each room, and for each other folder of Python code
    tools/house.py --upward    # each import that goes against the order; there should be none
    tools/house.py --cycles    # import cycles between files; there should be none

A room imports only rooms before it in `ROOMS`. `tests/test_boundaries.py` enforces this.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGE = "onnxpar"

ROOMS = (
    "core",
    "graph",
    "resharding",
    "ops",
    "facts",
    "cost",
    "propagation",
    "frontend",
    "strategy",
    "parameters",
    "autodiff",
    "partition",
    "schedule",
    "stages",
    "search",
    "emit",
    "report",
    "api",
    "cli",
)
"""The rooms in their order."""
OTHERS = ("runtime/onnxpar_format", "runtime/onnxpar_runtime", "models", "tools", "tests")
"""Folders of Python code beside the package."""


@dataclass(frozen=True)
class Import:
    """One name that a file imports from the package.

    Attributes:
        path: The file, relative to the repository.
        line: The line of the import.
        source: The module that imports.
        target: The module that is imported, or from which the name is imported.
        name: The name; "" if the module itself is imported.
        inside: Whether the import is inside a function.
    """

    path: str
    line: int
    source: str
    target: str
    name: str
    inside: bool

    def __str__(self) -> str:
        """`file:line: what is imported`."""
        return f"{self.path}:{self.line}: {self.target}{'.' if self.name else ''}{self.name}"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Returns the file of every module of the package, by dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(root: Path = ROOT) -> Sequence[Import]:
    """Returns every import of the package inside the package, anywhere in a file.

    This includes relative imports, and `import_module` of a text.
    """
    known = modules(root)
    found = []
    for source, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node, inside in _statements(tree, False):
            for target, name in _targets(node, package, known):
                if target.split(".")[0] == PACKAGE:
                    where = str(path.relative_to(root))
                    found.append(Import(where, node.lineno, source, target, name, inside))
    return found


Statement = ast.Import | ast.ImportFrom | ast.Call


def _statements(node: ast.AST, inside: bool) -> Iterator[tuple[Statement, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom) or loads(child):
            yield child, inside
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _statements(child, inside or function)


def loads(node: ast.AST) -> TypeGuard[ast.Call]:
    """Returns whether a node of a syntax tree is a call of `import_module` or `__import__`."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in ("import_module", "__import__")


def _targets(node: Statement, package: str, known: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        text = node.args[0] if node.args else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield text.value, ""
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ""
    else:
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{module}.{alias.name}"
            yield (full, "") if full in known else (module, alias.name)


def room(module: str) -> str:
    """Returns the room of a module, or "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def upward(root: Path = ROOT) -> list[Import]:
    """Returns the imports that go against the order of `ROOMS`.

    This includes imports from the package itself, because it takes its names from `api`.

    Raises:
        ValueError: A folder of the package is not in `ROOMS`.
    """
    place = {name: number for number, name in enumerate(ROOMS)}
    wrong = []
    for found in imports(root):
        source, target = room(found.source), room(found.target)
        for name in (source, target):
            if name and name not in place:
                raise ValueError(
                    f"{found.path}: expected a room of {', '.join(ROOMS)}, got {name!r}"
                )
        if source and (not target or place[target] > place[source]):
            wrong.append(found)
    return wrong


def cycles(root: Path = ROOT) -> list[list[str]]:
    """Returns the groups of modules that form import cycles (Tarjan, 1972)."""
    known = modules(root)
    after: dict[str, set[str]] = {name: set() for name in known}
    for found in imports(root):
        if found.target != found.source:
            after[found.source].add(found.target)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(after[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in known:
        if name not in number:
            visit(name)
    return groups


def statements(text: str) -> int:
    """Returns the number of statements in a Python file, without docstrings.

    Comments and the number of lines do not change it.
    """
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(text))
    )


def _size(folder: Path) -> str:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    lines = sum(len(text.splitlines()) for text in texts)
    return f"{len(texts):5} {lines:6} {sum(map(statements, texts)):10}"


def table(root: Path = ROOT) -> list[str]:
    """Returns a line for each room: name, files, lines, statements, and its imports of others."""
    between: Counter[tuple[str, str]] = Counter(
        (room(found.source), room(found.target)) for found in imports(root)
    )
    lines = [f"{'room':16} {'files':>5} {'lines':>6} {'statements':>10}  imports"]
    for name in ROOMS:
        others = [f"{o} {between[name, o]}" for o in ROOMS if o != name and between[name, o]]
        size = _size(root / PACKAGE / name)
        lines.append(f"{name:16} {size}  {', '.join(others) or '-'}")
    for folder in (PACKAGE, *OTHERS):
        lines.append(f"{Path(folder).name:16} {_size(root / folder)}")
    return lines


def main() -> None:
    """Prints what the arguments ask for."""
    parser = argparse.ArgumentParser(description="Print the rooms of the package.")
    parser.add_argument(
        "--upward", action="store_true", help="print imports that go against the order"
    )
    parser.add_argument("--cycles", action="store_true", help="print import cycles between files")
    chosen = parser.parse_args()
    if chosen.upward:
        print("\n".join(map(str, upward())) or "no import goes against the order")
    elif chosen.cycles:
        print("\n".join(" ".join(group) for group in cycles()) or "no import cycle")
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
