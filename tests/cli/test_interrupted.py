"""A command that is interrupted ends with one message."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar import __version__
from onnxpar.cli import main
from tests.cli import linear
from tests.tiers import FULL

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
SIGNALS = pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.full)]
)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=["INT", "TERM"])
def test_one_message_and_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("onnxpar.cli.shard.shard_model", interrupted)
    assert main(["shard", "m.onnx", "--strategy", "tp=2", "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "onnxpar: error: interrupted\n"


SHARD = ("shard", "m", "--strategy", "tp=2", "-o", "out")


def interrupted(
    folder: Path, module: str, text: str, name: str, command: tuple[str, ...] = SHARD
) -> tuple[int, str, str]:
    """Code, output and errors of `onnxpar`, signalled when our `module` prints a line."""
    (folder / f"{module}.py").write_text(text)
    path = os.pathsep.join([str(folder), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxpar.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out, err


@posix
@SIGNALS
@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_while_modules_load(tmp_path: Path, module: str, name: str) -> None:
    result = interrupted(tmp_path, module, LOADING, name)
    assert result == (1, "", "onnxpar: error: interrupted\n")


@posix
@pytest.mark.parametrize("module", ["typer", *(["onnxruntime"] if FULL else [])])
def test_while_launch_loads(tmp_path: Path, module: str) -> None:
    """It ended with 1 or 130, as if Ctrl-C had been pressed; 143 is promised."""
    result = interrupted(tmp_path, module, LOADING, "SIGTERM", ("launch", "--", "train", "d"))
    assert result == (128 + signal.SIGTERM, "", "onnxpar: error: interrupted\n")


LOADING = """
import time
print("here", flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError("not now")
"""
"""It takes an exception for a reason to do without something, as some modules do."""


@posix
@SIGNALS
def test_while_a_command_works(tmp_path: Path, name: str) -> None:
    # Loaded by the interpreter before anything else.
    text = """
import importlib, sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "onnxpar.cli.shard":
            sys.meta_path.remove(self)
            import onnxpar.api.shard_model
            def wait(*given, **options):
                print("here", flush=True)
                time.sleep(60)
            onnxpar.api.shard_model.shard_model = wait
sys.meta_path.insert(0, Slow())
"""
    result = interrupted(tmp_path, "sitecustomize", text, name)
    assert result == (1, "", "onnxpar: error: interrupted\n")
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["sitecustomize.py"]


@posix
@SIGNALS
def test_one_that_comes_when_all_is_done(tmp_path: Path, name: str) -> None:
    text = f"""
import os, signal, sys
from onnxpar.cli import main
sys.argv[1:] = ["--version"]
code = main()
os.kill(os.getpid(), signal.{name})
raise SystemExit(code)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert main(["--version"]) == 0
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"onnxpar {__version__}\n"
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk(tmp_path: Path) -> None:
    directory = linear.shard(tmp_path, 1)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "onnxpar.cli", "inspect", str(directory)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    message = "onnxpar: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)
