"""The comparison that the quickstart's verdict rests on."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "compare_npz.py"
WANT = np.array([1.0, -4.0, 2.0], dtype=np.float32)


def compare(folder: Path, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> int:
    np.savez(folder / "got.npz", **got)
    np.savez(folder / "want.npz", **want)
    command = [sys.executable, SCRIPT, folder / "got.npz", folder / "want.npz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode


@pytest.mark.parametrize(
    ("got", "code"),
    [
        (WANT, 0),
        # The tolerance is 1e-5 of the largest magnitude, 4.
        (WANT + np.float32([3e-5, 0, 0]), 0),
        (WANT + np.float32([5e-5, 0, 0]), 1),
        (WANT.astype(np.float64), 1),
        (WANT[:2], 1),
        (WANT * np.float32([1, 1, np.nan]), 1),
    ],
)
def test_code_tells_whether_the_arrays_agree(tmp_path: Path, got: np.ndarray, code: int) -> None:
    assert compare(tmp_path, {"y": got}, {"y": WANT}) == code


def test_a_missing_array_is_a_difference(tmp_path: Path) -> None:
    assert compare(tmp_path, {}, {"y": WANT}) == 1
    assert compare(tmp_path, {"y": WANT, "z": WANT}, {"y": WANT}) == 1


def test_integers_have_no_tolerance(tmp_path: Path) -> None:
    large = np.array([10**9])
    assert compare(tmp_path, {"y": large}, {"y": large}) == 0
    assert compare(tmp_path, {"y": large + 1}, {"y": large}) == 1
