"""A directory is written completely or not at all, and never over foreign files."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.core.errors import DirectoryError
from onnxpar.core.mesh import Mesh
from onnxpar.emit import check_target, write
from onnxpar.emit.atomic_directory import new_directory
from tests.children import with_tests
from tests.onnxpar.emit.small_models import exposing, parameter, sharding_of, two_layers

MESH = Mesh.of(dp=2, tp=4)
HERE = str(Path(__file__).parent)


def let_in(folder: Path) -> None:
    """Lets other users pass a folder and those of pytest above it."""
    for place in (folder, *folder.parents):
        if place.stat().st_mode & 0o005 != 0o005:
            place.chmod(0o755)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write([two_layers(MESH)], out, model_name="net")
    assert (out / "manifest.json").is_file()
    assert names(tmp_path) == {"out"}


def test_an_existing_directory_is_not_replaced_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_target(out, force=False)
    assert names(tmp_path) == set()
    write([two_layers(MESH)], out, model_name="net")
    before = tree(out)
    with pytest.raises(DirectoryError, match="--force"):
        check_target(out, force=False)
    check_target(out, force=True)
    with pytest.raises(DirectoryError, match="--force"):
        write([two_layers(MESH, seed=1)], out, model_name="net")
    assert tree(out) == before
    write([two_layers(MESH, seed=1)], out, model_name="net", force=True)
    after = tree(out)
    assert set(after) == set(before)
    assert after["weights.0000.safetensors"] != before["weights.0000.safetensors"]
    assert names(tmp_path) == {"out"}


def test_force_replaces_what_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to("disk")
    write([two_layers(MESH)], link, model_name="net")
    write([two_layers(MESH)], link, model_name="net", force=True)
    assert link.is_symlink()
    assert (tmp_path / "disk" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "content",
    [
        {"thesis.tex": b"..."},
        {"manifest.json": b"{}"},
        {"manifest.json": b'{"generator": "webpack 5", "files": {}}'},
        {"manifest.json": b"not json"},
        {"manifest.json": b'{"generator": "onnxpar 0.1.0", "files": {}}', "notes.txt": b"mine"},
        {"manifest.json": b'{"generator": "onnxpar 0.1.0", "files": {}}', "sub/x": b"mine"},
    ],
)
def test_force_replaces_nothing_that_is_not_ours(tmp_path: Path, content: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    for name, data in content.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    with pytest.raises(DirectoryError, match="--force only replaces a directory"):
        write([two_layers(MESH)], out, model_name="net", force=True)
    assert tree(out) == content
    assert names(tmp_path) == {"out"}


def test_a_file_or_a_missing_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "missing/out", "file/out"):
        with pytest.raises(DirectoryError):
            check_target(tmp_path / name, force=True)
    with pytest.raises(DirectoryError, match="expected a directory to write to, got a file"):
        write([two_layers(MESH)], tmp_path / "file", model_name="net", force=True)
    with pytest.raises(DirectoryError, match=r"parent directory .*missing does not exist"):
        write([two_layers(MESH)], tmp_path / "missing" / "out", model_name="net")
    with pytest.raises(DirectoryError, match=r"parent directory .*file does not exist"):
        write([two_layers(MESH)], tmp_path / "file" / "out", model_name="net")
    assert names(tmp_path) == {"file"}


def test_a_disk_that_is_too_small_is_found_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(DirectoryError, match=r"not enough space on its disk: expected \d+ bytes"),
        new_directory(tmp_path / "out", force=False, need=1 << 60),
    ):
        pytest.fail("nothing may be written")
    assert names(tmp_path) == set()


def test_any_exception_leaves_nothing(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt, SystemExit, MemoryError):
        with (
            pytest.raises(error),
            new_directory(tmp_path / "out", force=False) as folder,
        ):
            (folder / "half").write_bytes(b"x")
            raise error
        assert names(tmp_path) == set()


def test_an_exception_keeps_what_was_to_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write([two_layers(MESH)], out, model_name="net")
    before = tree(out)
    with pytest.raises(DirectoryError, match="JSON"):
        write([two_layers(MESH)], out, model_name="n", force=True, report={"x": object()})
    assert tree(out) == before
    assert names(tmp_path) == {"out"}


def child(body: str, folder: Path, **options: object) -> "subprocess.Popen[str]":
    """Runs Python code with `out` = folder/out in a process of its own."""
    code = (
        "from pathlib import Path\n"
        "from tests.onnxpar.emit.small_models import *\n"
        "from onnxpar.emit import write\n"
        "from onnxpar.core.errors import DirectoryError\n"
        f"folder = Path({str(folder)!r}); out = folder / 'out'; MESH = Mesh.of(dp=2, tp=4)\n{body}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=with_tests(os.environ),
        **options,  # type: ignore[call-overload]
    )


TRY = """
try:
    write([two_layers(MESH)], out, model_name="net")
except DirectoryError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_parent_is_refused(tmp_path: Path) -> None:
    # Root may write anywhere, so root becomes somebody else once everything is imported.
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o555)
    let_in(tmp_path)
    body = "import os\nif os.geteuid() == 0: os.seteuid(65534)\n"
    process = child(body + TRY, parent)
    printed, complaint = process.communicate(timeout=60)
    assert "cannot be written to (Permission denied)" in printed, complaint
    assert names(parent) == set()


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_limit_for_files_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    # No file may grow beyond 200 bytes: the write itself fails.
    limit = (200, 200)
    process = child(
        TRY, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    printed, complaint = process.communicate(timeout=60)
    assert "`ulimit -f`" in printed and "disk is full" not in printed, complaint
    assert names(tmp_path) == set()


SLOW = """
import time
from onnxpar.emit import write_directory
def slowly(*args, **options):
    print("writing", flush=True)
    time.sleep(60)
write_directory._write_graph = slowly
write([two_layers(MESH)], out, model_name="net")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    "number",
    # An interrupt is in the next test, too.
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = child(SLOW, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    (partial,) = names(tmp_path)
    assert "weights.0000.safetensors" in names(tmp_path / partial)
    process.send_signal(number)
    begun = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert process.returncode not in (0, -signal.SIGKILL)
    assert names(tmp_path) == set()


SLOW_TO_REMOVE = """
import shutil
remove = shutil.rmtree
def slowly(path, **options):
    if path.exists():
        print("removing", flush=True)
        time.sleep(1)
    remove(path, **options)
shutil.rmtree = slowly
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_second_interrupt_does_not_stop_the_removal(tmp_path: Path) -> None:
    process = child(SLOW.replace("write([", SLOW_TO_REMOVE + "write(["), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "removing\n"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT  # As an uncaught KeyboardInterrupt ends Python.
    assert names(tmp_path) == set()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_what_a_killed_writer_left_goes_and_a_running_ones_stays(tmp_path: Path) -> None:
    killed, running = child(SLOW, tmp_path), child(SLOW, tmp_path)
    for process in (killed, running):
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
    other = tmp_path / ".other.0123456789ab.partial"
    other.mkdir()
    before = names(tmp_path)
    killed.kill()
    killed.communicate(timeout=30)
    assert names(tmp_path) == before and len(before) == 3
    write([two_layers(MESH)], tmp_path / "out", model_name="net")
    after = names(tmp_path)
    assert len(after) == 3 and after - before == {"out"} and other.name in after
    (kept,) = after - {"out", other.name}
    assert "weights.0000.safetensors" in names(tmp_path / kept)
    running.terminate()
    running.communicate(timeout=30)
    assert names(tmp_path) == {"out", other.name}


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_mask_that_forbids_everything_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    let_in(tmp_path.parent)
    body = "import os\nif os.geteuid() == 0: os.seteuid(65534)\nos.umask(0o777)\n"
    printed, complaint = child(body + TRY, tmp_path).communicate(timeout=60)
    assert "cannot be opened" in printed, complaint
    assert names(tmp_path) == set()


def test_an_interrupt_whose_exception_is_caught_is_raised_at_the_end(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        new_directory(tmp_path / "out", force=False) as folder,
    ):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        (folder / "complete").write_bytes(b"x")
    assert names(tmp_path / "out") == {"complete"} and names(tmp_path) == {"out"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_directory_is_not_replaced_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write([two_layers(MESH)], out, model_name="net")
    before = tree(out)
    out.chmod(0o555)
    tmp_path.chmod(0o777)
    let_in(tmp_path.parent)
    body = "import os\nif os.geteuid() == 0: os.seteuid(65534)\n"
    printed, complaint = child(
        body + TRY.replace('"net"', '"net", force=True'), tmp_path
    ).communicate(timeout=60)
    assert printed == f"{out}: cannot be replaced: it is read-only\n", complaint
    assert tree(out) == before
    assert names(tmp_path) == {"out"}


def test_a_source_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    data = tmp_path / "model.data"
    data.write_bytes(bytes(4096))
    tensor = ir.ExternalTensor(
        data.name, 0, 4096, ir.DataType.FLOAT, shape=ir.Shape([1024]), name="w", base_dir=tmp_path
    )
    first = parameter("first", _Shrinking(data), sharding_of([(32, [0])]), MESH)
    second = parameter("w", tensor, sharding_of([(1024, [0])]), MESH)
    with pytest.raises(DirectoryError, match=r"'w': its data file .* became shorter"):
        write([exposing([first, second], MESH)], tmp_path / "out", model_name="m")
    assert names(tmp_path) == {"model.data"}


class _Shrinking(ir.Tensor):
    """A tensor in memory; reading it truncates a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(np.zeros(32, np.float32), name="first")
        self.path = path

    def numpy(self) -> NDArray[Any]:
        os.truncate(self.path, 100)
        return super().numpy()
