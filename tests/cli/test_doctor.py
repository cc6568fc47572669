"""`onnxpar doctor`: what it finds here, and what it says about faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.cli import main
from onnxpar_runtime import doctor, installed
from onnxpar_runtime.devices import Facts, no_driver


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


def test_two_packages_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed", lambda names: names)
    section = doctor._onnxruntime(Facts(packages=("onnxruntime", "onnxruntime-gpu")))
    assert "both installed and overwrite each other's files" in section.problems[0]
    assert section.broken  # every other command refuses to start


@pytest.mark.parametrize("package", ["onnxruntime", "onnxruntime-gpu"])
def test_without_a_gpu_no_package_is_advised(package: str) -> None:
    gpu = package.endswith("gpu")
    facts = Facts(
        (package,), gpu, (13, 0) if gpu else (), driver_error=no_driver(OSError("libcuda.so.1")),
        missing=("libcublas.so.13",), nccl_error="pip install 'onnxpar[cuda]' brings NCCL",
    )  # fmt: skip
    assert doctor._gpus(facts).facts == (("GPUs", "none: no NVIDIA driver: libcuda.so.1"),)
    with_gpu = doctor.Facts((package,), gpu, gpus=("NVIDIA H200",), driver=(13, 0))
    assert len(doctor._gpus(with_gpu).facts) == 6


def test_without_onnxruntime() -> None:
    """The report comes with what is missing; a command that needs it says only that."""
    code = """if True:
        import sys
        from onnxpar_runtime import installed
        sys.modules["onnxruntime"] = None
        installed.installed = lambda names: ()
        installed.find_spec = lambda name: None
        from onnxpar.cli import main
        sys.exit(10 * main(["doctor"]) + main(["run", "out", "--inputs", "i.npz",
            "--outputs", "o.npz"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    cure = "onnxruntime is not installed: pip install 'onnxpar[cpu]'"
    assert done.returncode == 12 and done.stderr.startswith(f"onnxpar: error: {cure}")
    titles = [line for line in done.stdout.splitlines() if line[:1] not in ("", " ")]
    assert titles == [
        "versions", "onnxruntime", "operator library", "MPI", "limits", "environment",
        "onnxpar cannot work here",
    ]  # fmt: skip
    assert f"\n  error: {cure}" in done.stdout


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
