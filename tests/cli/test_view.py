"""`onnxpar view`: serves the graph of the rank that was asked for."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from onnxpar.cli import main
from tests.runtime import hand_made


def test_serves_until_interrupted(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    command = ["view", str(directory), "--rank", "1", "--no-browser", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "onnxpar.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("{"):
                break
        found = json.loads(lines[-1])
        assert found["file"] == str(directory / "rank0001.model.onnx")
        page = urllib.request.urlopen(found["url"], timeout=10).read().decode()
        assert "rank0001.model.onnx" in page
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "2"], "expected a rank from 0 to 1, got 2"),
        (["--program", "train"], "no program 'train'; it has model"),
    ],
)
def test_users_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    assert main(["view", str(directory), "--no-browser", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "{", "[]", '{"programs": {"model": {}}}'])
def test_no_readable_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert main(["view", str(tmp_path), "--no-browser"]) == 2
    assert "manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["view"], ["run", "--inputs", "i.npz", "--outputs", "o.npz"]]
)
def test_a_missing_directory_is_named_one_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    target = str(tmp_path / "none")
    assert main([arguments[0], target, *arguments[1:]]) == 2
    assert f"onnxpar: error: {target}: no such directory" in capfd.readouterr().err


def test_rank_that_was_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    (directory / "rank0001.model.onnx").unlink()
    assert main(["view", str(directory), "--rank", "1", "--no-browser"]) == 2
    assert "the graph of rank 1 was not written" in capsys.readouterr().err
