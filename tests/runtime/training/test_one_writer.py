"""What a run writes: a log that no other run writes to, and nothing in the user's folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.log import Reporter


def test_a_second_run_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with Reporter(True, log=log, live=False):
        log.write_text('{"step": 1}\n')
        with (
            pytest.raises(InputError, match=r"log\.jsonl: another run is writing to this file"),
            Reporter(True, log=log, live=False),
        ):
            pass
        assert log.read_text() == '{"step": 1}\n'
    with Reporter(True, log=log, keep=1, live=False):
        assert log.read_text() == '{"step": 1}\n'
    with Reporter(True, log=log, live=False):
        assert log.read_text() == ""


def test_devices_are_not_locked() -> None:
    with Reporter(True, log="/dev/null", live=False), Reporter(True, log="/dev/null", live=False):
        pass


def test_onnxruntime_writes_nothing_to_the_cache(tmp_path: Path) -> None:
    code = "import onnxpar_runtime, onnxruntime; onnxruntime.get_available_providers()"
    unset = ("XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env["HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-B", "-c", code], env=env, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []
