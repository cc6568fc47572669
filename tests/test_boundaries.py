"""The rules that hold between the rooms of the house, checked on the source text."""

import ast
import dataclasses
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXECUTION = {"mpi4py", "onnxruntime", "onnxpar_runtime"}
MAX_LINES = 600


def sources(folder: str, *suffixes: str) -> list[Path]:
    """The files under a folder of the repository with one of the suffixes; never none."""
    wanted = suffixes or (".py",)
    found = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in wanted)
    assert found, f"no source under {folder}"
    return found


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute module name of every import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(paths: list[Path], forbidden: set[str]) -> list[str]:
    """`file:line: module` of every import of a forbidden module or of one inside it."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in paths
        for line, module in imported(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    ]


def names_an_operator(node: ast.AST) -> bool:
    """Whether the expression compares an operator's type, or matches on it."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        operands = [node.subject]
    else:
        return False
    return any(
        (isinstance(part, ast.Attribute) and part.attr == "op_type")
        or (isinstance(part, ast.Name) and part.id == "op_type")
        for operand in operands
        for part in ast.walk(operand)
    )


def test_the_transformer_imports_nothing_that_executes() -> None:
    seam = ROOT / "onnxpar" / "execute"
    assert seam.exists()
    paths = [path for path in sources("onnxpar") if seam not in path.parents]
    assert violations(paths, EXECUTION) == []


def test_the_runtime_imports_nothing_of_the_transformer() -> None:
    assert violations(sources("runtime/onnxpar_runtime"), {"onnxpar"}) == []


def test_analysis_takes_data_and_nothing_else_from_passes() -> None:
    imports = {
        module
        for path in sources("onnxpar/analysis")
        for _, module in imported(path)
        if module.startswith("onnxpar.passes") and not module_exists(module)
    }
    assert [name for name in imports if not is_frozen_data(name)] == []


def module_exists(name: str) -> bool:
    """Whether the dotted name is a module, and not something inside one."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_frozen_data(name: str) -> bool:
    """Whether the dotted name is that of a frozen dataclass, or of a text."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, str):
        return True
    return dataclasses.is_dataclass(found) and found.__dataclass_params__.frozen


def test_operators_are_told_apart_in_ops_alone() -> None:
    ops = ROOT / "onnxpar" / "ops"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("onnxpar")
        if ops not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.Compare | ast.Match) and names_an_operator(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('node.op_type == "MatMul"', True),
        ('op_type in {"Add", "Sub"}', True),
        ('"Add" != self.node.op_type', True),
        ('(node.domain, node.op_type) == ("", "Add")', True),
        ('match node.op_type:\n  case "Add": pass', True),
        ('node.name == "MatMul"', False),
        ("table[node.op_type]", False),
    ],
)
def test_what_counts_as_naming_an_operator(text: str, expected: bool) -> None:
    assert any(names_an_operator(node) for node in ast.walk(ast.parse(text))) == expected


@pytest.mark.parametrize("folder", ["onnxpar", "runtime", "models", "tools", "tests"])
def test_no_file_is_longer_than_one_can_read(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(folder, ".py", ".h", ".cc", ".cpp", ".sh", "")
        if path.is_file()
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_only_the_two_packages_are_installed() -> None:
    # So that nothing called runtime, models or tools gets into anyone's environment.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert sorted(packages) == ["onnxpar", "runtime/onnxpar_runtime"]


def fresh(code: str, folder: Path) -> str:
    """What a new interpreter, started in that folder, prints on running the code."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "use",
    [
        "import onnxpar; [getattr(onnxpar, name) for name in onnxpar.__all__]",
        "from onnxpar.cli import build_app; build_app()",
    ],
)
def test_the_transformer_loads_nothing_that_executes(use: str, tmp_path: Path) -> None:
    code = f"import sys\n{use}\nprint(sorted({EXECUTION!r} & set(sys.modules)))"
    assert fresh(code, tmp_path) == "[]"
