"""What `tools/house.py` sees of imports, on packages made up for it."""

from pathlib import Path

import pytest

from tools import house


def package(folder: Path, files: dict[str, str]) -> Path:
    """A repository whose package has these files, and an empty `__init__` in each folder."""
    for name, text in files.items():
        path = folder / "onnxpar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for above in path.relative_to(folder).parents:
            init = folder / above / "__init__.py"
            if above.parts and not init.exists():
                init.write_text("", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "from onnxpar.search.decide import decide",
        "from onnxpar.search import decide",
        "import onnxpar.search.decide",
        "from ..search import decide",
        "from ..search.decide import decide",
        "from onnxpar import shard_model",
        "import typing\nif typing.TYPE_CHECKING:\n    from onnxpar.search import decide",
        "def late():\n    from onnxpar.search import decide",
        "from importlib import import_module\nimport_module('onnxpar.search.decide')",
        "import importlib\nimportlib.import_module('onnxpar.search.decide')",
        "__import__('onnxpar.search.decide')",
    ],
)
def test_an_import_against_the_order_is_found(tmp_path: Path, text: str) -> None:
    root = package(tmp_path, {"graph/plan.py": text, "search/decide.py": ""})
    (found,) = house.upward(root)
    assert found.path == "onnxpar/graph/plan.py" and found.line == text.count("\n") + 1


def test_an_import_with_the_order_is_none_against_it(tmp_path: Path) -> None:
    files = {
        "search/decide.py": "from onnxpar.graph.plan import Plan\nfrom . import find",
        "search/find.py": "from ..graph import plan\nimport onnxpar_runtime",
        "graph/plan.py": "import os",
    }
    assert house.upward(package(tmp_path, files)) == []
    assert house.cycles(tmp_path) == []


def test_an_import_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "ops/control.py": "from onnxpar.ops.find import rules",
        "ops/find.py": "from onnxpar.ops import table",
        "ops/table.py": "def late():\n    from . import control",
        "ops/apart.py": "from onnxpar.ops import table",
    }
    cycle = ["onnxpar.ops.control", "onnxpar.ops.find", "onnxpar.ops.table"]
    assert house.cycles(package(tmp_path, files)) == [cycle]


def test_a_folder_that_is_no_room_is_refused(tmp_path: Path) -> None:
    files = {"attic/old.py": "from onnxpar.graph import plan", "graph/plan.py": ""}
    with pytest.raises(ValueError, match="attic"):
        house.upward(package(tmp_path, files))


def test_the_table_counts_files_lines_statements_and_imports(tmp_path: Path) -> None:
    files = {
        "graph/plan.py": '"""Not a statement."""\n\na = 1; b = 2\n',
        "search/find.py": "from onnxpar.graph import plan\n",
    }
    lines = house.table(package(tmp_path, files))
    (graph,) = (line for line in lines if line.startswith("graph "))
    (search,) = (line for line in lines if line.startswith("search "))
    assert graph.split() == ["graph", "2", "3", "2", "-"]
    assert search.split() == ["search", "2", "1", "1", "graph", "1"]
