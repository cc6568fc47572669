"""What the command line makes of small models, as text: a change of the form shows in the diff.

`tools/golden.py` writes the files anew; its text says what they have.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.ops import table
from onnxpar.ops.operator import OpDef
from tools import golden

TOOL = Path(__file__).parents[2] / "tools" / "golden.py"

FILES = golden.files()
AS_IT_IS = ("copied as it is", "of its body")
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Permute")
# One process that runs a file, in the order in which another hash seed iterates over sets.
AGAIN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(TOOL.parent)!r})
import golden
for path in sys.argv[1:]:
    sys.stdout.write(golden.difference(Path(path)))
"""


def named(path: Path) -> str:
    return str(path.relative_to(golden.FOLDER).with_suffix(""))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_golden(path: Path) -> None:
    found = golden.difference(path)
    if found:
        command = f"python tools/golden.py {named(path)}"
        pytest.fail(
            f"{named(path)} differs; if it should, run `{command}`:\n{found}", pytrace=False
        )


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_result_depends_on_nothing_but_its_file(seed: str, tmp_path: Path) -> None:
    # Every fifteenth, and each area's first; the rest is left to the full run with another seed.
    firsts = {path.parent: path for path in reversed(FILES)}
    chosen = sorted({*FILES[::15], *firsts.values()})
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, *map(str, chosen)],
        cwd=tmp_path,
        env={"PYTHONHASHSEED": seed, "PATH": "", "COLUMNS": "40"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_file_is_kept_as_it_is_but_for_its_results() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert golden.read(text).text == text


def test_a_difference_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    path = tmp_path / "case.txt"
    path.write_text(FILES[0].read_text(encoding="utf-8").replace(" = ", " =  "), encoding="utf-8")
    found = golden.difference(path)
    assert "\n- " in found or "\n-  " in found
    assert found.startswith("--- case.txt (golden)\n+++ case.txt (now)\n")


@pytest.mark.parametrize("text", ["", "# Nothing.\n", "# A.\n$ onnxpar shard m\n", "# A.\nshard\n"])
def test_what_is_no_golden_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        golden.read(text)


@pytest.fixture(scope="module")
def models() -> str:
    """The models that are divided, as text."""
    return "\n".join("\n".join(golden.read(p.read_text("utf-8")).given.values()) for p in FILES)


@pytest.fixture(scope="module")
def made() -> str:
    """All that was made of them."""
    return "\n".join("\n".join(golden.read(p.read_text("utf-8")).results.values()) for p in FILES)


def has(text: str, op_type: str) -> bool:
    """Whether a node of this type is in a text.

    As `= Type(` or `= domain.Type<`, in a plan ` (Type)`, or `/Type/`, the scope of its local form.
    """
    shown = rf"= (?:[\w.]+\.)?{op_type} ?[(<]| \({op_type}\)|/{op_type}(\.\d+)?/$"
    return re.search(shown, text, re.MULTILINE) is not None


def families() -> dict[str, tuple[OpDef, ...]]:
    """The tuples of definitions that the table joins, by name."""
    return {n: defs for n, defs in vars(table).items() if n.isupper() and isinstance(defs, tuple)}


def test_every_family_of_operators_is_shown(models: str, made: str) -> None:
    found = families()
    assert sum(map(len, found.values())) == len(table.REGISTRY.defs)
    shown = models + made
    missing = [n for n, defs in found.items() if not any(has(shown, d.op_type) for d in defs)]
    assert missing == []


def test_every_local_form_is_shown(models: str, made: str) -> None:
    printed = golden.printed_by("onnxpar ops --json")
    rows = [row for row in json.loads(printed) if row["local"] not in AS_IT_IS]
    assert len(rows) > 50
    missing = {row["local"] for row in rows} - {
        row["local"] for row in rows if has(models + made, row["op_type"])
    }
    assert missing == set()


@pytest.mark.parametrize("operator", COLLECTIVES)
def test_every_collective_is_shown(operator: str, made: str) -> None:
    assert f"= onnxpar.{operator}<" in made
