"""What ranks leave for their supervisor."""

import mmap
import sys
from pathlib import Path

import pytest

from onnxpar_runtime.marks import SUPERVISED, Marks, mark_segments


@pytest.mark.skipif(sys.platform != "linux", reason="ranks read /proc")
def test_only_the_shared_memory_of_the_job_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, shared = tmp_path / "marks", tmp_path / "shm"
    marks.mkdir()
    shared.mkdir()
    own, other, linked = (shared / f"sm_segment.host.0.{n}0001.0" for n in "abc")
    for path in (own, other, tmp_path / "target"):
        path.write_bytes(bytes(4096))
    with own.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        mark_segments(0)
        assert not list(marks.iterdir())
        monkeypatch.setenv(SUPERVISED, str(marks))
        mark_segments(0)
    (marks / "rank0001.segments").write_text(f"{linked}\n{shared / 'absent'}")
    linked.symlink_to(tmp_path / "target")
    Marks(marks).remove_segments()
    assert sorted(shared.iterdir()) == [other, linked]
    # These marks are no ranks.
    assert Marks(marks).empty
