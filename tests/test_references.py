"""Modules, their contents and files that docs and docstrings name exist."""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

# The source is parsed once for all tests.
pytestmark = pytest.mark.xdist_group("test_references")

ROOT = Path(__file__).parents[1]
TOPS = {"onnxpar": ROOT, "onnxpar_format": ROOT / "runtime", "onnxpar_runtime": ROOT / "runtime"}
# Names of values and metadata in graphs, and of an option of sessions, which begin as modules do.
VALUES = re.compile(
    r"onnxpar\.(accumulate|annotation|captured|correct|grad|grad_norm|hyper|loss|loss_weight|micro|moment[12]|operators)\b"
)
DOTTED = re.compile(r"`([a-z_]+(?:\.\w+)+)`")
PATHS = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cc|h|md|json|txt|yaml))`")
HISTORY = "CHANGELOG.md"
ENDINGS = ("h", "json", "py", "yaml")
# Files that examples of the docs write, and that commands do.
WRITTEN = {
    "back.py",
    "checkpoint.json",
    "config.json",
    "counting.py",
    "dense.py",
    "export.py",
    "fit.py",
    "genai_config.json",
    "manifest.json",
    "plan.yaml",
    "machine.yaml",
    "strategy.yaml",
    "tiny_gpt.py",
    "tp4.yaml",
}


@cache
def files(*suffixes: str) -> list[Path]:
    """The files of the repository with one of the suffixes."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in done.stdout.split()]
    return [path for path in paths if path.suffix in suffixes and path.exists()]


@cache
def modules() -> Mapping[str, frozenset[str]]:
    """Of each module of the packages the names in it, at any depth."""
    found = {}
    for top, folder in TOPS.items():
        for path in (folder / top).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            names: set[str] = set()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, ast.ImportFrom):
                    names.update(alias.asname or alias.name for alias in node.names)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = frozenset(names)
    return found


@cache
def rooms() -> frozenset[str]:
    """The names of the rooms."""
    return frozenset(m.split(".")[1] for m in modules() if m.startswith("onnxpar."))


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if module in modules():
            return count == len(parts) or parts[count] in modules()[module]
    return False


def wrong_names(text: str) -> Iterator[str]:
    """The dotted names in backticks that begin as a package or a room does and do not exist."""
    for name in DOTTED.findall(text):
        first, second = name.split(".")[:2]
        if second in ENDINGS:
            # A file: see `wrong_paths`.
            continue
        if first in TOPS:
            if not VALUES.match(name) and not exists(name):
                yield name
        elif first in rooms() and not exists(f"onnxpar.{name}"):
            yield name


def wrong_paths(path: Path, text: str) -> Iterator[str]:
    """Paths in backticks that do not exist where a reader would look for them."""
    homes = (
        ROOT,
        ROOT / "onnxpar",
        ROOT / "runtime" / "onnxpar_runtime",
        ROOT / "runtime" / "onnxpar_format",
        ROOT / "runtime",
        ROOT / "runtime" / "csrc",
        ROOT / "models",
        ROOT / "docs",
        path.parent,
    )
    names = {found.name for found in files(".py", ".cc", ".h", ".md", ".json", ".txt", ".yaml")}
    for name in PATHS.findall(text):
        inside = "/" in name and not any((home / name).exists() for home in homes)
        if name not in WRITTEN and (inside or ("/" not in name and name not in names)):
            yield name


@pytest.mark.parametrize("suffix", [".md", ".py"])
def test_names_in_backticks_exist(suffix: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(suffix)
        if path.name != HISTORY
        for name in wrong_names(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_files_in_backticks_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(".md")
        if path.name != HISTORY
        for name in wrong_paths(path, path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def quoted(*names: str) -> str:
    return " ".join(f"`{name}`" for name in names)


def test_what_is_not_there_is_found() -> None:
    wrong = ["onnxpar.attic.old", "search.attic", "onnxpar.search.decide.attic"]
    assert list(wrong_names(quoted(*wrong, "search.decide.decide", "onnxpar.loss"))) == wrong
    wrong = ["attic/old.py", "attic_of_old.py"]
    right = quoted("search/decide.py", "decide.py", "manifest.json")
    assert list(wrong_paths(ROOT / "README.md", f"{quoted(*wrong)} {right}")) == wrong
