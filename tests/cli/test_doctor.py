"""`onnxpar doctor`: what it finds here, and what it says about faults."""

import json
from pathlib import Path

import pytest

from onnxpar.cli import main
from onnxpar_runtime import doctor
from onnxpar_runtime.devices import Facts


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sections = {section["title"]: section for section in found["sections"]}
    assert found["ok"] is True
    assert sections["versions"]["facts"]["onnxpar"]
    assert sections["onnxruntime"]["facts"]["CPUExecutionProvider"] == "runs a session"
    assert "Open MPI" in sections["MPI"]["facts"]["mpirun"]
    assert "sum is right on all ranks" in sections["two ranks"]["facts"]["AllReduce"]
    assert {"cores", "memory", "open files"} <= sections["limits"]["facts"].keys()


def test_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = doctor.Section("versions", (("Python", "3"), ("onnxpar", "1")))
    bad = doctor.Section("two ranks", (), ("an AllReduce under mpirun fails: no",), broken=True)
    monkeypatch.setattr("onnxpar.api.runtime.examine", lambda: [good, bad], raising=False)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "versions\n  Python   3\n  onnxpar  1\n\n"
        "two ranks\n  error: an AllReduce under mpirun fails: no\n\n"
        "onnxpar cannot work here\n"
    )
    monkeypatch.setattr("onnxpar.api.runtime.examine", lambda: [good], raising=False)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("onnxpar works here\n")


def test_two_packages_of_onnxruntime() -> None:
    section = doctor._onnxruntime(Facts(packages=("onnxruntime", "onnxruntime-gpu")))
    assert "both installed and overwrite each other's files" in section.problems[0]
    assert not section.broken


def test_ranks_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho 'r1 | the sum is wrong' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(doctor, "find_mpirun", lambda: str(script))
    section = doctor._self_test("cpu")
    assert section.broken
    assert section.problems == ("an AllReduce under mpirun fails: r1 | the sum is wrong",)


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MIN_SHARED", 1 << 60)
    section = doctor._limits()
    assert "docker run --shm-size=1g" in section.problems[0] and not section.broken
