"""The rules that hold between the rooms of the house, checked on the source text."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tools import house

# The source is parsed once for all tests.
pytestmark = pytest.mark.xdist_group("test_boundaries")

ROOT = Path(__file__).parents[1]
EXECUTION = {"mpi4py", "onnxruntime", "onnxpar_runtime"}
SEAMS = (
    "onnxpar.api.pytorch",
    "onnxpar.api.runtime",
    "onnxpar.strategy.validation_errors",
    "typer",
)
"""Modules that are imported when needed: they load slowly, and most commands do not need them."""
PUBLIC = ("shard_model", "plan")
"""Functions that a room names beside its modules."""
MAX_LINES = 600


def sources(folder: str, *suffixes: str) -> list[Path]:
    """The files under a folder of the repository with one of the suffixes; never none."""
    wanted = suffixes or (".py",)
    found = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in wanted)
    assert found, f"no source under {folder}"
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(parsed(path)))


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Line and absolute module name of every import, wherever in the file it stands."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


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


def test_a_room_imports_only_rooms_that_stand_before_it() -> None:
    assert [str(found) for found in house.upward()] == []


def test_there_are_no_import_cycles() -> None:
    assert house.cycles() == []


def test_every_folder_is_a_room_and_no_file_is_outside_of_one() -> None:
    package = ROOT / "onnxpar"
    folders = {path.parent for path in package.glob("*/*.py")}
    assert {folder.name for folder in folders} == set(house.ROOMS)
    assert [path.name for path in package.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("room", house.ROOMS)
def test_a_room_says_what_it_takes_what_it_gives_and_where_to_begin(room: str) -> None:
    text = (ROOT / "onnxpar" / room / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "\nTakes " in docstring and "gives " in docstring and "Begin with " in docstring
    named = re.findall(r"`(\w+)`", docstring[docstring.index("Begin with ") :])
    files = {path.stem for path in (ROOT / "onnxpar" / room).iterdir()}
    known = {*files, *house.ROOMS, *PUBLIC}
    assert named and known.issuperset(n for n in named if n.islower())


def test_functions_import_the_seams_alone() -> None:
    inside = [
        (path, child)
        for path in sources("onnxpar")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
        if isinstance(child, ast.Import | ast.ImportFrom)
    ]
    names = [
        f"{path.relative_to(ROOT)}:{child.lineno}: {module}{alias.name}"
        for path, child in inside
        for module in ([f"{child.module}."] if isinstance(child, ast.ImportFrom) else [""])
        for alias in child.names
        if not any(f"{module}{alias.name}.".startswith(f"{seam}.") for seam in SEAMS)
    ]
    assert names == []


def test_only_public_names_commands_and_operators_are_loaded_by_name() -> None:
    """The source does not show what `import_module` loads."""
    loaders = {
        str(path.relative_to(ROOT))
        for path in sources("onnxpar")
        for node in nodes_of(path)
        if house.loads(node)
    }
    packages = {f"onnxpar/{name}__init__.py" for name in ("", "api/runtime/", "cli/")}
    assert loaders == {*packages, "onnxpar/ops/table.py"}


def test_the_transformer_imports_nothing_that_executes() -> None:
    seam = ROOT / "onnxpar" / "api" / "runtime"
    assert seam.exists()
    paths = [path for path in sources("onnxpar") if seam not in path.parents]
    assert violations(paths, EXECUTION) == []


def test_only_its_seam_imports_pytorch() -> None:
    seam = ROOT / "onnxpar" / "api" / "pytorch"
    packages = ("onnxpar", "runtime/onnxpar_runtime", "runtime/onnxpar_format")
    paths = [path for name in packages for path in sources(name) if seam not in path.parents]
    assert violations(paths, {"torch", "transformers"}) == []
    assert violations(sources(str(seam.relative_to(ROOT))), {"torch"})


def test_the_runtime_imports_nothing_of_the_transformer() -> None:
    assert violations(sources("runtime/onnxpar_runtime"), {"onnxpar"}) == []


def test_the_format_imports_arrays_alone() -> None:
    """What both sides share needs neither side, nor symbolic algebra, nor a library of schemas."""
    packages = {"numpy", "ml_dtypes", "onnxpar_format", *sys.stdlib_module_names}
    foreign = {
        module.partition(".")[0]
        for path in sources("runtime/onnxpar_format")
        for _, module in imported(path)
    }
    assert foreign <= packages


def test_the_table_of_operators_is_an_argument() -> None:
    """Its name is read where it is the default of a parameter, so that nobody need patch it."""
    wrong = []
    for path in sources("onnxpar"):
        defaults = {
            id(default)
            for node in nodes_of(path)
            if isinstance(node, ast.arguments)
            for default in (*node.defaults, *node.kw_defaults)
        }
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in nodes_of(path)
            if isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and (node.id if isinstance(node, ast.Name) else node.attr) == "REGISTRY"
            and id(node) not in defaults
        ]
    assert wrong == []


def stem(name: str) -> str:
    """A name without its ending: annotate, annotation, annotated and annotating are one."""
    for ending in ("ations", "ation", "ating", "ings", "ing", "ions", "ion", "ed", "es", "e", "s"):
        if name.endswith(ending) and len(name) - len(ending) >= 4:
            return name[: -len(ending)]
    return name


def test_no_two_modules_have_names_that_differ_by_an_ending() -> None:
    """Families of operators and subcommands differ by their folder."""
    known: dict[str, list[str]] = {}
    for module in house.modules():
        if module.count(".") > 1 and house.room(module) not in ("ops", "cli"):
            known.setdefault(stem(module.rpartition(".")[2]), []).append(module)
    assert {key: found for key, found in known.items() if len(found) > 1} == {}


def test_no_two_classes_have_one_name() -> None:
    known: dict[str, list[str]] = {}
    for path in sources("onnxpar"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                known.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in known.items() if len(found) > 1} == {}


def test_records_of_files_have_names_of_their_own() -> None:
    """A class of the format is not one of the transformer's or the runtime's of the same name."""
    classes = {
        folder: {
            node.name
            for path in sources(folder)
            for node in parsed(path).body
            if isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and path.name not in ("option.py", "options.py")
        }
        for folder in ("onnxpar", "runtime/onnxpar_format", "runtime/onnxpar_runtime")
    }
    shared = classes.pop("runtime/onnxpar_format")
    assert {folder: sorted(shared & names) for folder, names in classes.items()} == {
        "onnxpar": [],
        "runtime/onnxpar_runtime": [],
    }


def test_only_ops_tells_operators_apart() -> None:
    ops = ROOT / "onnxpar" / "ops"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("onnxpar")
        if ops not in path.parents
        for node in nodes_of(path)
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


def test_only_the_packages_are_installed() -> None:
    # So that nothing called runtime, models or tools gets into anyone's environment.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert sorted(packages) == ["onnxpar", "runtime/onnxpar_format", "runtime/onnxpar_runtime"]


def fresh(code: str, folder: Path) -> str:
    """What a new interpreter, started in that folder, prints on running the code."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_transformer_loads_nothing_that_executes(tmp_path: Path) -> None:
    use = "import onnxpar; [getattr(onnxpar, name) for name in onnxpar.__all__]"
    use += "\nfrom onnxpar.cli import build_app; build_app()"
    code = f"import sys\n{use}\nprint(sorted({EXECUTION!r} & set(sys.modules)))"
    assert fresh(code, tmp_path) == "[]"


def test_ranks_load_neither_symbolic_algebra_nor_schemas(tmp_path: Path) -> None:
    use = "import onnxpar_runtime, onnxpar.cli.run, onnxpar.cli.train, onnxpar.cli.eval"
    code = f"import sys\n{use}\nprint(sorted({{'sympy', 'pydantic'}} & set(sys.modules)))"
    assert fresh(code, tmp_path) == "[]"
