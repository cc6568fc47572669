"""A command that is interrupted ends with one message."""

from pathlib import Path

import pytest

from onnxpar.cli import main


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(143)], ids=["INT", "TERM"])
def test_one_message_and_no_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signal: BaseException,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise signal

    monkeypatch.setattr("onnxpar.cli.shard.shard", interrupted)
    assert main(["shard", "m.onnx", "--strategy", "tp=2", "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "onnxpar: error: interrupted\n"
