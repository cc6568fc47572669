"""What the command line makes of small models, as text: a change of the form shows in the diff.

`tools/golden.py` writes the files anew; its text says what they have.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from onnxpar.ops import table
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from tests.children import with_tests
from tools import golden

FILES = golden.files()
AS_IT_IS = ("copied unchanged", "from its body")
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Permute")
# One process that runs a file, in the order in which another hash seed iterates over sets.
AGAIN = """
import sys
from pathlib import Path
from tools import golden
for path in sys.argv[1:]:
    sys.stdout.write(golden.difference(Path(path)))
"""
SENDS = {"all_reduce", "all_gather", "collective", "emit_reshard"}
"""What a local form calls to communicate."""


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


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_a_result_depends_on_nothing_but_its_file(seed: str, tmp_path: Path) -> None:
    # Every thirtieth, and each area's first; the rest is left to the full run with another seed.
    firsts = {path.parent: path for path in reversed(FILES)}
    chosen = sorted({*FILES[::30], *firsts.values()})
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, *map(str, chosen)],
        cwd=tmp_path,
        env=with_tests({"PYTHONHASHSEED": seed, "PATH": "", "COLUMNS": "40"}),
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
    """The models that are sharded, as text."""
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
    """The records of the modules that the table joins, by module."""
    modules = {n: m for n, m in sys.modules.items() if n.startswith(f"{table.__package__}.")}
    return {n: module.DEFS for n, module in modules.items() if hasattr(module, "DEFS")}


def test_every_family_of_operators_is_shown(models: str, made: str) -> None:
    found = families()
    assert sum(map(len, found.values())) == len(table.REGISTRY.defs)
    shown = models + made
    missing = [n for n, defs in found.items() if not any(has(shown, d.op_type) for d in defs)]
    assert missing == []


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def sends(part: object, seen: set[object]) -> bool:
    """Whether a function, or what it refers to in `onnxpar.ops`, may emit a collective."""
    match part:
        case partial():
            return sends(part.func, seen) or any(sends(a, seen) for a in part.args)
        case property():
            return sends(part.fget, seen)
        case cached_property():
            return sends(part.func, seen)
        case staticmethod() | classmethod():
            return sends(part.__func__, seen)
        case type() | FunctionType():
            # What the tools of all local forms can do says nothing of this one.
            foreign = part is LocalNode or not part.__module__.startswith("onnxpar.ops")
            if foreign or part in seen:
                return False
            seen.add(part)
    if isinstance(part, type):
        return any(sends(a, seen) for base in part.__mro__ for a in vars(base).values())
    if not isinstance(part, FunctionType):
        return False
    names = {name for code in codes(part.__code__) for name in code.co_names}
    cells = [cell.cell_contents for cell in part.__closure__ or ()]
    further = [part.__globals__[name] for name in names if name in part.__globals__]
    return bool(names & SENDS) or any(sends(f, seen) for f in (*cells, *further))


def communicating(made: str) -> set[str]:
    """The operators of which a result has a collective that their own local form emitted."""
    named = re.findall(r"for: \S+ \((\w+)(?: over a sharded dim|: halo)\)", made)
    staged = re.findall(r"for: \S+/(\w+) sums over stages", made)
    return {*named, *staged}


def test_every_local_form_that_communicates_is_shown_to_do_so(made: str) -> None:
    """Of every such operator a result has a collective whose reason names it.

    Which operators these are is read off the code of their local forms: those that refer, through
    functions and classes of `onnxpar.ops`, to what emits collectives. This is proved from below
    alone: no result has a collective of another operator. That a form is shown on each of its
    ways, with all the factors that its rule has, is not proved. Sums that a rule leaves partial
    are no part of the local form: `reshard` shows them.
    """
    expected = {d.op_type for d in table.REGISTRY.defs if sends(d.local, set())}
    assert len(expected) > 40
    assert communicating(made) == expected


def written_out() -> set[str]:
    """The operators of nodes that have a scope of nodes in a result: what became of them."""
    found = set()
    for path in FILES:
        case = golden.read(path.read_text("utf-8"))
        results = "\n".join(case.results.values())
        scopes = set(re.findall(r"^ *([\w.]+)/$", results, re.MULTILINE))
        for text in case.given.values():
            named_nodes = re.findall(r"\[([\w.]+)\] [^=]*= (?:\w+\.)*(\w+) ?[<(]", text)
            found |= {op_type for name, op_type in named_nodes if name in scopes}
    return found


def test_every_local_form_is_shown(made: str) -> None:
    """In a result there is a node of the operator, or of the scope of one that is written out.

    Of operators that share a local form one is enough; whether it is the split form is not proved.
    """
    printed = golden.printed_by("onnxpar ops --json")
    rows = [row for row in json.loads(printed) if row["local"] not in AS_IT_IS]
    assert len(rows) > 50
    written = written_out() | communicating(made)
    shown = {r["local"] for r in rows if has(made, r["op_type"]) or r["op_type"] in written}
    assert {row["local"] for row in rows} - shown == set()


@pytest.mark.parametrize("operator", COLLECTIVES)
def test_every_collective_is_shown(operator: str, made: str) -> None:
    assert f"= onnxpar.{operator}<" in made
