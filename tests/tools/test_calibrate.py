"""tools/calibrate.py writes a machine file that is read, of numbers that a computer may have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.strategy.machine_file import load_machine
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.tiers import FULL

TOOL = str(Path(__file__).parents[2] / "tools" / "calibrate.py")


@pytest.mark.parametrize(("ranks", "blocks"), [(1, ()), (4, (2,))] if FULL else [(1, ())])
def test_what_it_writes_is_read(ranks: int, blocks: tuple[int, ...], tmp_path: Path) -> None:
    out = tmp_path / "machine.yaml"
    command = [sys.executable, TOOL, "-o", str(out), "--seconds", "0.2", "--memory", "3GiB"]
    command += [word for k in blocks for word in ("--block", str(k))]
    if ranks > 1:
        command = [find_mpirun(), "--oversubscribe", "-n", str(ranks), *command]
    subprocess.run(command, check=True, env=mpirun_environment(), timeout=120, capture_output=True)
    machine = load_machine(str(out))
    assert [link.devices for link in machine.links] == [*blocks, 0]
    assert machine.memory == 3 << 30
    # Between a slow core that others use, too, and more than a processor of today has.
    assert 1e8 < machine.flops["float64"] < machine.flops["float32"] * 1.5 < 1e13
    assert 1e7 < machine.bandwidth < 1e12
    assert 0 <= machine.overhead < 1e-3
    for link in machine.links:
        assert 1e6 < link.bandwidth < 1e12
        assert 0 < link.latency < 1
        assert 0 <= link.wait < 1


@pytest.mark.full
def test_a_busy_machine_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "machine.yaml"
    command = [find_mpirun(), "--oversubscribe", "-n", "2", sys.executable, TOOL, "-o", str(out)]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            done = subprocess.run(
                [*command, "--seconds", "0.2"],
                check=True,
                env=mpirun_environment(),
                timeout=120,
                capture_output=True,
                text=True,
            )
        finally:
            other.kill()
    notice = re.search(r"other processes took (\d+\.\d) cores while this was measured", done.stderr)
    assert notice and float(notice[1]) > 0
    assert notice[0] in out.read_text().splitlines()[0]
    assert load_machine(str(out)).links


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block", "2"], "--block: expected different divisors of 1 ranks"),
        (["--memory", "much"], "--memory: expected a size such as 80GiB, got 'much'"),
        (["--out", "none/m.yaml"], "--out: expected a file in a folder that exists"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(
    tmp_path: Path, options: list[str], message: str
) -> None:
    command = [sys.executable, TOOL, "-o", "m.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())
