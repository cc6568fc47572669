"""What the documentation says that a machine can check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import two_layer
import typer
from _exporter import save
from launching import mpirun

from onnxpar.cli import build_app
from onnxpar.strategy import Strategy

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(page: str) -> list[str]:
    """The YAML blocks of a page."""
    found = YAML.findall((ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no YAML block"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/reference/strategy_file.md"])
def test_strategies_shown_are_legal(page: str) -> None:
    for text in blocks(page):
        # A block that shows one key alone leaves the devices to the command line.
        devices = None if re.search(r"^(mesh|devices):", text, re.MULTILINE) else 8
        Strategy.from_text(text, devices)


def test_the_guide_shows_the_strategy_that_the_quickstart_uses() -> None:
    assert Strategy.from_text(blocks("docs/guide.md")[0]) == Strategy.from_text(
        (ROOT / "models" / "mlp.strategy.yaml").read_text(encoding="utf-8")
    )


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_the_reference_lists_every_option_of_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    commands = typer.main.get_command(build_app()).commands
    assert set(sections) == set(commands)
    for name, command in commands.items():
        real = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
        real = {flag for flag in real if flag.startswith("--")} - {"--help"}
        documented = {
            option
            for line in sections[name].splitlines()
            if line.startswith("| `")
            for option in options(line.split("|")[1])
        }
        assert documented == real, name


def python(kind: str, page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(two_layer.build(), tmp_path / "two_layer.onnx")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(python("python", "docs/reference/python.md"))],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    # Columns then rows: one sum, at the end. The outputs of a batch of 6. And training: evaluation
    # and the first step have the same loss, the fifth step a smaller one.
    assert done.stdout.splitlines() == [
        "{'AllReduce': 1}",
        "(6, 16)",
        "True True (16, 16)",
    ]
    # The program for mpirun trains on what the last block has cut.
    (program,) = python("python mpi", "docs/reference/python.md")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    ran = mpirun(2, ["program.py"])
    assert ran.code == 0, ran.err
    loss, *shape = ran.out.split()
    assert shape == ["(16,", "16)"] and float(loss) > 0
