"""The machines in the options of mpirun, and those that answer."""

from pathlib import Path

import pytest

from onnxpar_runtime import hosts
from onnxpar_runtime.hosts import Hosts, hosts_of

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
    assert hosts_of(["--hostfile", str(tmp_path / "none")]).entries == ()


def test_options_of_machines() -> None:
    assert Hosts(("a:2", "b"), ("-x", "A")).options == ["-x", "A", "--host", "a:2,b"]
    assert Hosts((), ("-x", "A")).options == ["-x", "A"]


def test_machines_that_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot be reached, and one does not end."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        'case "$*" in *"--host b "*) exit 1 ;; *"--host c "*) exec sleep 60 ;; esac\n'
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(hosts, "find_mpirun", lambda: str(mpirun))
    monkeypatch.setattr(hosts, "_ANSWERS_S", 2.0)
    assert Hosts(("a:2", "b", "c", "d"), ("-x", "A")).answering().entries == ("a:2", "d")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "-x A --host a:2 -n 1 true" in calls and len(calls) == 4
