"""`tools/kills.py`: a kill of each kind, and that it reports what a command should not leave."""

import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launching import alive
from tools import kills

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm"),
    # What one test leaves on purpose, another one would find.
    pytest.mark.xdist_group("test_kills"),
]
KINDS = [(c, "everything") for c in ("merge", "reshard", "shard")]
KINDS += [("train", whom) for whom in kills.WHOM]
SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> kills.Prepared:
    return kills.prepare(tmp_path_factory.mktemp("made"))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "whom"), KINDS)
def test_a_kill_leaves_nothing(
    tmp_path: Path, made: kills.Prepared, command: str, whom: str
) -> None:
    draw = random.Random(f"{SEED} {command} {whom}")
    target = tmp_path / "target"
    what, wrong = kills.attempt(made, command, whom, draw, target, Counter[str]())
    assert not wrong, what


def killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, whom: str = "everything"
) -> list[str]:
    """What is wrong after a kill of a command, and after its repetition.

    The command is a script, which gets its target; `again` says that it is the repetition. It is
    killed when it ends or waits, and should write `complete`.
    """
    ready, command = folder / "ready", "train" if whom == "mpirun" else "merge"
    first = f"import sys, time\nfrom pathlib import Path\nready = Path({str(ready)!r})\n"
    first += "target, again = Path(sys.argv[1]), ready.exists()\n"
    lines = [sys.executable, "-c", f"{first}{script}\nready.touch()\nagain or time.sleep(60)\n"]
    monkeypatch.setattr(kills, "line_of", lambda command, folder, target: [*lines, str(target)])
    monkeypatch.setattr(kills, "train", lambda *_: [*lines, str(folder / "target")])
    monkeypatch.setattr(kills, "ENDS_S", 0.5)
    kill = kills.kill

    def kill_when_ready(*arguments: Any) -> None:
        until = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.01)
        kill(*arguments)

    monkeypatch.setattr(kills, "kill", kill_when_ready)
    (folder / "merge").write_text("complete")
    made = kills.Prepared(folder, {command: 0.0}, {})
    counts = Counter[str]()
    return kills.attempt(made, command, whom, random.Random(0), folder / "target", counts)[1]


@pytest.mark.parametrize("before", ["target.write_text('complete')", ""], ids=["all", "nothing"])
def test_what_is_complete_or_absent_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    script = f"{before}\nif again: target.write_text('complete')"
    assert killed(tmp_path, monkeypatch, script) == []


def test_a_target_that_is_not_complete_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "target is neither complete nor absent"
    assert killed(tmp_path, monkeypatch, "target.write_text('comp')") == [message, message]


def test_a_file_in_shared_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = kills.SHARED / f"onnxpar-test-{os.getpid()}"
    script = f"target.write_text('complete'); Path({str(left)!r}).touch()"
    try:
        assert killed(tmp_path, monkeypatch, script) == [f"{left} is left"]
    finally:
        left.unlink(missing_ok=True)


def test_a_process_is_reported_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    script = (
        "import subprocess\nif not again:\n"
        "    child = subprocess.Popen(['sleep', '60'], stdin=-3, stdout=-3, stderr=-3)\n"
        f"    Path({str(pid)!r}).write_text(str(child.pid))"
    )
    wrong = killed(tmp_path, monkeypatch, script, "mpirun")
    assert f"process {pid.read_text()} is left" in wrong
    assert not alive(int(pid.read_text()))


def test_a_command_that_fails_when_repeated_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "if again: sys.exit('it is broken')"
    message = "repeated, it ends with code 1: it is broken"
    assert killed(tmp_path, monkeypatch, script) == [message]


def log(path: Path, losses: dict[int, float]) -> None:
    lines = [json.dumps({"epoch": 1, "step": s, "loss": x}) + "\n" for s, x in losses.items()]
    # The kill cuts the last line.
    path.write_text("".join(lines) + '{"epoch": 1, "st')


def test_another_loss_and_a_training_that_stops_early_are_reported(tmp_path: Path) -> None:
    wanted = {(1, step): 1 / step for step in range(1, kills.STEPS + 1)}
    made, target = kills.Prepared(tmp_path, {}, wanted), tmp_path / "t"
    last = target / f"step-{kills.STEPS:08d}"
    last.mkdir(parents=True)
    log(target.with_suffix(".jsonl"), {1: 1.0, 2: 0.5})
    log(target.with_suffix(".resumed.jsonl"), {3: 1 / 3, 4: 0.25})
    assert kills.compared(made, target) == []
    log(target.with_suffix(".resumed.jsonl"), {3: 1 / 3, 4: 0.25000001})
    assert kills.compared(made, target) == [
        "step (1, 4) of the continued run: expected loss 0.25, got 0.25000001"
    ]
    log(target.with_suffix(".resumed.jsonl"), {3: 1 / 3})
    last.rename(target / "step-00000005")
    assert kills.compared(made, target) == ["the continued run has the steps [(1, 3)]"]


def test_a_checkpoint_without_a_file_is_reported(tmp_path: Path) -> None:
    for folder in "points", "t":
        point = tmp_path / folder / "step-00000005"
        point.mkdir(parents=True)
        for name in "checkpoint.json", "rank0.safetensors":
            (point / name).touch()
    made, target = kills.Prepared(tmp_path, {}, {}), tmp_path / "t"
    assert kills.left_points(made, target) == []
    (target / "step-00000005" / "rank0.safetensors").unlink()
    assert kills.left_points(made, target) == ["checkpoint step-00000005 is not complete"]
