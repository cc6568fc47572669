"""A file is written completely or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from onnxpar_format.new_file import check_file, new_file


class Refused(Exception):
    """The error of a caller."""


def test_a_file_and_those_beside_it_appear_together(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    out.write_text("old")
    with new_file(out, Refused) as file:
        file.write_text("new")
        file.with_name("m.data").write_text("weights")
        assert out.read_text() == "old" and not (tmp_path / "m.data").exists()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "m.onnx": "new",
        "m.data": "weights",
    }
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "a"
    out.write_text("old")
    with pytest.raises(ZeroDivisionError), new_file(out, Refused) as file:
        file.write_text("half")
        raise ZeroDivisionError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    with new_file(link, Refused) as file:
        file.write_text("text")
    assert link.is_symlink() and real.read_text() == "text"
    with new_file("/dev/null", Refused) as file:
        assert file == Path("/dev/null")


def test_what_cannot_be_written_is_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_file(tmp_path / "out", Refused)
    assert os.listdir(tmp_path) == []
    with pytest.raises(Refused, match="got a directory"):
        check_file(tmp_path, Refused)
    with pytest.raises(Refused, match=r"out: its folder .*/nowhere does not exist$"):
        check_file(tmp_path / "nowhere" / "out", Refused)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("onnxpar_format.new_file.TemporaryDirectory", refused)
    with pytest.raises(Refused, match=rf"{tmp_path} cannot be written to \(Read-only file system"):
        check_file(tmp_path / "out", Refused)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names of POSIX")
@pytest.mark.timeout(20)
def test_a_pipe_is_refused_before_work_starts(tmp_path: Path) -> None:
    """To open one waits until somebody reads it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(Refused, match=f"{name}: expected a file to write to, got a pipe"):
            check_file(tmp_path / name, Refused)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_is_named() -> None:
    def write() -> None:
        with new_file("/dev/full", Refused) as file, file.open("wb") as stream:
            stream.write(bytes(100_000))

    with pytest.raises(Refused, match=r"^/dev/full: the disk is full"):
        write()
