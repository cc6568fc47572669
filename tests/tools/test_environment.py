"""What the scripts say when Python or the compiler is missing, and when they install again."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "_environment.sh"


def source(code: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run shell code after `tools/_environment.sh`, in an empty folder."""
    return subprocess.run(
        ["bash", "-c", f'set -euo pipefail; . "{SCRIPT}"; {code}', "script"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_python_asked_for_is_taken(tmp_path: Path) -> None:
    done = source("find_python", tmp_path, PYTHON=sys.executable)
    assert done.stdout == f"{sys.executable}\n", done.stderr


def test_a_python_that_does_not_work_is_refused_by_name(tmp_path: Path) -> None:
    done = source("find_python", tmp_path, PYTHON="/no/such/python")
    assert done.returncode == 1
    assert "PYTHON=/no/such/python is not Python 3.11 or newer" in done.stderr


def test_a_script_without_arguments_refuses_them(tmp_path: Path) -> None:
    done = source("no_arguments --help", tmp_path)
    assert done.returncode == 1
    assert "expected no arguments, got: --help" in done.stderr
    assert source("no_arguments", tmp_path).returncode == 0


def test_a_missing_compiler_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    done = source("ready_environment made 1 package", tmp_path, CXX="no-such-compiler -O2")
    assert done.returncode == 1
    assert "no C++ compiler (no-such-compiler -O2): install g++" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_ready_is_left_as_it_is(tmp_path: Path) -> None:
    python = tmp_path / "made" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "made" / "installed").write_text("1 package\n")
    ready = "ready_environment made {} package; command -v python"
    done = source(ready.format(1), tmp_path, CXX="no-such-compiler")
    assert done.stdout == f"{python}\n", done.stderr
    # Another fingerprint installs again, which fails with this Python.
    done = source(ready.format(2), tmp_path, CXX="sh")
    assert done.returncode == 1
    assert "the installation failed" in done.stderr


def test_the_fingerprint_is_of_contents_and_not_of_caches(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "a.py"
    file.write_text("1")
    first = source("fingerprint package", tmp_path).stdout
    (tmp_path / "package" / "a.pyc").write_text("cache")
    assert source("fingerprint package", tmp_path).stdout == first != ""
    file.write_text("2")
    assert source("fingerprint package", tmp_path).stdout != first
