"""The machines in the options of mpirun, and those that answer."""

import socket
from pathlib import Path

import pytest

from onnxpar_runtime import hosts
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.hosts import Hosts, hosts_of, slots_of

FILE = """
# the machines
a slots=2 max_slots=4
b   # one rank

c max_slots=3 slots=8
"""


def test_machines_of_files_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(FILE)
    others = ["--map-by", "slot", "-x", "PATH"]
    for named in (["--hostfile", str(path)], [f"-machinefile={path}"]):
        found = hosts_of([*others[:2], *named, *others[2:]])
        assert found == Hosts(("a:2", "b", "c:8"), tuple(others))
    assert hosts_of(["--host", "a:2,b", *others, "-H=c"]) == Hosts(("a:2", "b", "c"), tuple(others))
    assert hosts_of(["-x", "host"]) == Hosts((), ("-x", "host"))
    with pytest.raises(LaunchError, match=r"hostfile .*none: No such file or directory"):
        hosts_of(["--hostfile", str(tmp_path / "none")])


def test_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=4  # faster\n")
    file = ["--hostfile", str(path)]
    assert slots_of([*file, "-x", "A"], open_mpi=True) == {"a": 2, "b": 4}
    assert slots_of([*file, "--host", "a"], open_mpi=True) == {}
    path.write_text("a:2\nb\n")
    assert slots_of(["-f", str(path)], open_mpi=False) == {"a": 2, "b": 1}
    # Open MPI counts the cores of b.
    assert slots_of(file, open_mpi=True) == {}
    assert slots_of(["--host", "a:2,b,a"], open_mpi=True) == {"a": 3, "b": 1}
    assert slots_of(["-hosts", "a,b,a"], open_mpi=False) == {}
    for list_ in ("+n1:2,b", "a:*,b", "^a,b"):
        assert slots_of(["--host", list_], open_mpi=True) == {}
    assert slots_of(["-x", "A"], open_mpi=True) == {}


def test_options_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for open_mpi, name in ((True, "--host"), (False, "-hosts")):
        monkeypatch.setattr(hosts, "is_open_mpi", lambda path, one=open_mpi: one)
        assert Hosts(("a:2", "b"), ("-x", "A")).options("m") == ["-x", "A", name, "a:2,b"]
        assert Hosts((), ("-x", "A")).options("m") == ["-x", "A"]


def test_machines_that_see_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo Open MPI\n'
        f'echo "$@" >> {tmp_path}/calls\nshift 4\nexec "$@"\n'
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(hosts, "find_mpirun", lambda: str(mpirun))
    # An address that is kept for documentation.
    assert Hosts(("203.0.113.1:2", "203.0.113.2"), ()).see(tmp_path)
    assert not Hosts(("203.0.113.1:2", "203.0.113.2"), ()).see(tmp_path / "none")
    assert (tmp_path / "calls").read_text().count("--host 203.0.113.1:2 -n 1 sh") == 2
    for own in ("localhost:2", "127.0.0.1", socket.gethostname(), "no-such-name.invalid"):
        assert Hosts(("203.0.113.1", own), ()).see(tmp_path / "none")
    # mpirun cannot reach it: the ranks will say so.
    mpirun.write_text("#!/bin/sh\nexit 1\n")
    assert Hosts(("203.0.113.1",), ()).see(tmp_path / "none")


def test_machines_that_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot be reached, and one does not end."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo Open MPI\necho "$@" >> {tmp_path}/calls\n'
        'case "$*" in *"--host b "*) exit 1 ;; *"--host c "*) exec sleep 60 ;; esac\n'
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(hosts, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(hosts, "_ANSWERS_S", 2.0)
    assert Hosts(("a:2", "b", "c", "d"), ("-x", "A")).answering().entries == ("a:2", "d")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "-x A --host a:2 -n 1 true" in calls and len(calls) == 4
