"""`mpirun -n N onnxpar run`: equal outputs, and an end within seconds when something is wrong."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.interrupts import MESSAGE
from onnxpar_runtime.marks import SUPERVISED, Marks
from tests.cli import linear
from tests.runtime import hand_made
from tests.runtime.launching import LIMIT, alive, children, mpirun, run, start_mpirun


def save(tmp_path: Path, batch: int, dtype: str = "float32") -> Path:
    x = np.arange(3 * batch).reshape(batch, 3).astype(dtype)
    np.savez(tmp_path / "in.npz", x=x)
    return tmp_path / "in.npz"


@pytest.mark.parametrize(
    ("ranks", "batch"), [(1, 3), (2, 5), pytest.param(4, 9, marks=pytest.mark.full)]
)
def test_equal_outputs(tmp_path: Path, ranks: int, batch: int) -> None:
    atoms = [2] * (ranks // 2)
    split = [[("batch", range(len(atoms)))], [(3, [])]]
    text = (
        "g (float[n, 3] x, int64[1] b) => (float[n, 3] y)"
        " { f = Cast<to: int = 1>(b)  t = Add(x, x)  y = Add(t, f) }"
    )
    directory = hand_made.write(
        tmp_path / "a",
        [text] * ranks,
        atoms=atoms,
        inputs=[hand_made.tensor("x", "float32", ["batch", 3], split)],
        outputs=[hand_made.tensor("y", "float32", ["batch", 3], split)],
        symbols={"batch": {}},
        system_inputs=[{"name": "b", "kind": "symbol", "symbol": "batch"}],
    )
    logs = tmp_path / "logs"
    outcome, outputs = run(ranks, directory, save(tmp_path, batch), "--log-dir", str(logs))
    assert outcome.code == 0, outcome.err
    x = np.arange(3 * batch, dtype=np.float32).reshape(batch, 3)
    # Sums of small integers are exact.
    np.testing.assert_array_equal(np.load(outputs)["y"], 2 * x + batch)
    assert sorted(p.name for p in logs.iterdir()) == [f"rank{r:04d}.log" for r in range(ranks)]


def test_collective_over_mpi(tmp_path: Path) -> None:
    directory = hand_made.reduced(tmp_path / "a", 3)
    outcome, outputs = run(3, directory, save(tmp_path, 4))
    assert outcome.code == 0, outcome.err
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(np.load(outputs)["y"], x.sum(0, keepdims=True))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_wrong_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    outcome, outputs = run(ranks, directory, save(tmp_path, 4))
    assert outcome.code == 2
    (message,) = outcome.messages
    assert f"was made for 2 ranks, got {ranks}" in message and "mpirun -n 2" in message
    assert "Traceback" not in outcome.err + outcome.out and not outputs.exists()


def test_violated_symbol(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2, {"divisor": 4})
    outcome, outputs = run(2, directory, save(tmp_path, 6), "--log-dir", str(tmp_path / "logs"))
    assert outcome.code == 2
    text = "symbol 'batch' is 6, which violates its constraint: 4*N, N >= 1"
    assert outcome.messages == [f"onnxpar: error: {text}"]
    assert all(text in log.read_text() for log in (tmp_path / "logs").iterdir())
    assert "Traceback" not in outcome.err and not outputs.exists()


@pytest.mark.parametrize(
    "what",
    [
        "weights",
        *(
            pytest.param(what, marks=pytest.mark.full)
            for what in ("manifest", "dtype", "input file", "option")
        ),
    ],
)
def test_users_mistakes_are_reported_once(tmp_path: Path, what: str) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    inputs = save(tmp_path, 4, "float64" if what == "dtype" else "float32")
    graph = directory / "rank0001.model.onnx"
    if what == "manifest":
        (directory / "manifest.json").unlink()
    elif what == "weights":
        graph.write_bytes(graph.read_bytes()[:-5])
    elif what == "input file":
        inputs = tmp_path / "none.npz"
    expected = {
        "manifest": "got one without manifest.json",
        "weights": "rank0001.model.onnx: truncated",
        "input file": "none.npz: no such file",
        "dtype": "input 'x': expected float32, got float64",
        "option": "unknown onnxruntime option 'speed'",
    }[what]
    outcome, outputs = run(
        2, directory, inputs, *(["--ort", "speed=1"] if what == "option" else [])
    )
    assert outcome.code == 2
    (message,) = outcome.messages
    assert expected in message
    assert "Traceback" not in outcome.err and not outputs.exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux's /proc")
def test_outputs_that_cannot_be_written_are_found_before_the_run(tmp_path: Path) -> None:
    """No file can be made in /proc, although root has permission to write there."""
    directory = hand_made.failing(tmp_path / "a", 2)  # Its run would fail in another way.
    inputs = str(save(tmp_path, 1))
    arguments = ["run", str(directory), "--inputs", inputs, "--outputs", "/proc/o.npz"]
    outcome = mpirun(2, ["-m", "onnxpar.cli", *arguments])
    assert outcome.code == 2
    (message,) = outcome.messages
    assert "/proc/o.npz: cannot be written: " in message
    assert "Traceback" not in outcome.err and "MPI_ABORT" not in outcome.err


def test_mistake_of_one_rank_names_it(tmp_path: Path) -> None:
    """Only rank 1 cannot load its graph: all ranks end in order, with rank 1's message."""
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    graph = directory / "rank0001.model.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    outcome, _ = run(2, directory, save(tmp_path, 4))
    assert outcome.code == 2
    (message,) = outcome.messages
    assert message.startswith("onnxpar: error: r1 | ") and "rank0001.model.onnx" in message


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    graph = directory / "rank0001.model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    outcome, outputs = run(2, directory, save(tmp_path, 4))
    assert outcome.code == 2 and not outputs.exists()
    (message,) = outcome.messages
    assert message.startswith("onnxpar: error: r1 | ")
    assert "rank0001.model.onnx: its content has changed: expected SHA-256" in message


def test_each_copy_of_a_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks read the same weights; that of rank 1, as on another machine, has changed."""
    for name in "01":
        linear.shard(tmp_path, 2).rename(tmp_path / name)
    (weights,) = (tmp_path / "1").glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    script = (
        "import os; from onnxpar_format.options import Execution, TrainingRun;"
        "from onnxpar_runtime.training.commands import train;"
        "wanted = TrainingRun('digits', lr=0.1, batch_size=100, steps=1);"
        "raise SystemExit(train(os.environ['OMPI_COMM_WORLD_RANK'], wanted, Execution()))"
    )
    monkeypatch.chdir(tmp_path)
    outcome = mpirun(2, ["-c", script])
    assert outcome.code == 2, outcome.err
    (message,) = outcome.messages
    assert message.startswith(f"onnxpar: error: r1 | 1/{weights.name}: its content has changed")


def test_all_ranks_need_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has a directory that fits in all but its contents."""
    hand_made.data_parallel(tmp_path / "0", 2)
    hand_made.data_parallel(tmp_path / "1", 2, {"divisor": 4})
    script = (
        "import os, sys; from onnxpar_runtime.commands import run;"
        "raise SystemExit(run(os.environ['OMPI_COMM_WORLD_RANK'], sys.argv[1], 'out.npz'))"
    )
    monkeypatch.chdir(tmp_path)
    outcome = mpirun(2, ["-c", script, str(save(tmp_path, 4))])
    assert outcome.code == 2, outcome.err
    (message,) = outcome.messages
    assert "0: expected the same directory on all ranks" in message
    assert "manifest of rank 1 differs from that of rank 0" in message


@pytest.mark.full
def test_axes_that_lie_across_machines(tmp_path: Path) -> None:
    """Ranks 0 and 1 say that they are on one machine, ranks 2 and 3 on another."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x) => (float[batch, 8] y)'
        " <float[8, 8] v = {" + "1, " * 63 + "1}, float[8, 8] w = {" + "1, " * 63 + "1}>"
        " { h = MatMul(x, v)  y = MatMul(h, w) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    shard_model(tmp_path / "m.onnx", "tp=2,dp=2", tmp_path / "out")
    np.savez(tmp_path / "in.npz", x=np.ones((4, 8), np.float32))
    script = (
        "import socket; from onnxpar.cli import main; from onnxpar_format.place import find_place;"
        "socket.gethostname = lambda: 'ab'[find_place().rank // 2]; raise SystemExit(main())"
    )
    files = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    outcome = mpirun(4, ["-c", script, "run", str(tmp_path / "out"), *files])
    assert outcome.code == 0, outcome.err
    (notice,) = (line for line in outcome.err.splitlines() if line.startswith("notice: "))
    assert "100% of the bytes" in notice and "in the order dp=2,tp=2, 0% would" in notice
    assert (np.load(tmp_path / "out.npz")["y"] == 64).all()


def test_a_rank_that_never_starts_ends_all(tmp_path: Path) -> None:
    """Rank 1 never reaches MPI, and the others wait for it there.

    It does not stop itself by SIGSTOP: mpirun lets a stopped process continue before it ends it,
    and if the process then connects to mpirun, Open MPI 5.0.11 waits for a lock of its own
    forever. `launch` ends such an mpirun, because the marks tell it that rank 0 failed.
    """
    script = (
        "import os, time; from onnxpar_runtime.launch import init;"
        "int(os.environ['OMPI_COMM_WORLD_RANK']) == 1 and time.sleep(600);"
        "init()"
    )
    outcome = mpirun(2, ["-c", script], {"ONNXPAR_TIMEOUT": "2", SUPERVISED: str(tmp_path)})
    assert outcome.code == 1 and outcome.seconds < LIMIT / 2
    (message,) = outcome.messages
    assert message.startswith("r0 | waited 10 s for all 2 ranks to start; ")
    assert Marks(tmp_path).failed() == [0]


def test_a_rank_that_fails_in_the_middle_ends_all(tmp_path: Path) -> None:
    directory = hand_made.failing(tmp_path / "a", 3)
    logs = tmp_path / "logs"
    outcome, outputs = run(3, directory, save(tmp_path, 1), "--log-dir", str(logs))
    assert outcome.code != 0 and outcome.seconds < LIMIT / 2
    assert any(m.startswith("r2 | ") and "indices" in m for m in outcome.messages), outcome.err
    assert "Traceback" not in outcome.err and not outputs.exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux's /proc")
@pytest.mark.parametrize(
    "waits", ["none", *(pytest.param(w, marks=pytest.mark.full) for w in ("first", "last"))]
)
def test_an_interrupt_is_reported_once_and_ends_all_ranks(tmp_path: Path, waits: str) -> None:
    """An interrupt during a computation, and while a rank waits in a collective."""
    directory = hand_made.endless(tmp_path / "a", {"none": None, "first": 0, "last": 1}[waits])
    logs, out = tmp_path / "logs", tmp_path / "out.npz"
    arguments = ["run", str(directory), "--inputs", str(save(tmp_path, 1)), "--outputs", str(out)]
    process = start_mpirun(2, ["-m", "onnxpar.cli", *arguments, "--log-dir", str(logs)])
    ranks: list[int] = []
    try:
        until = time.monotonic() + LIMIT
        # A line reports that a rank's graph is loaded; the run follows.
        while not all(loaded(logs / f"rank{r:04d}.log") for r in range(2)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        ranks = children(process.pid)
        assert len(ranks) == 2
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
        seconds = time.monotonic() - start
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert seconds < 5 and process.returncode != 0
    lines = [line.strip(" \0") for line in errors.splitlines() if "onnxpar" in line]
    assert lines == [MESSAGE.strip()], (seconds, errors)
    # Open MPI kills the other ranks when one has ended: none ends before all have had time.
    assert len(list(logs.glob("*.calls.json"))) == 2
    assert "Traceback" not in errors and not out.exists()
    # mpirun has ended; the process that adopts its ranks needs a moment to collect them.
    while any(alive(rank) for rank in ranks) and time.monotonic() < start + 5:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)


def loaded(log: Path) -> bool:
    """Whether a rank's log says that its graph is loaded."""
    return log.exists() and " of 2: " in log.read_text()


@pytest.mark.parametrize(
    "mistake", [["--bogus"], *(pytest.param(m, marks=pytest.mark.full) for m in (["--device"], []))]
)
def test_a_mistake_of_usage_is_reported_once(tmp_path: Path, mistake: list[str]) -> None:
    outcome = mpirun(3, ["-m", "onnxpar.cli", "run", str(tmp_path), *mistake])
    assert outcome.code == 2
    assert outcome.err.count("error: ") == 1 and outcome.seconds < LIMIT / 2


SCRIPT = """
import sys, time
from onnxpar_runtime.launch import guarded, init
rank = init()
def body():
    if rank.index == 1:
        {failure}
    rank.all_reduce(__import__("numpy").zeros(1))
    return 0
raise SystemExit(guarded(rank, body))
"""


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise ValueError('the disk is full')", "r1 | ValueError: the disk is full"),
        # As `test_train.py` interrupts a rank.
        pytest.param("raise KeyboardInterrupt", "r1 | interrupted", marks=pytest.mark.full),
    ],
)
def test_an_exception_of_one_rank_ends_all(failure: str, message: str) -> None:
    outcome = mpirun(2, ["-c", SCRIPT.format(failure=failure)])
    assert outcome.code != 0 and outcome.seconds < LIMIT / 2
    assert outcome.messages == [message]
    assert "Traceback" not in outcome.err


def test_local_runs_agree_over_mpi(tmp_path: Path) -> None:
    """Rank 1 has an input of a wrong dtype; both ranks raise its error and run the next batch."""
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    script = tmp_path / "body.py"
    script.write_text(
        "import sys\n"
        "import numpy as np\n"
        "from onnxpar_runtime.errors import OnnxparRuntimeError\n"
        "from onnxpar_runtime.launch import guarded, init\n"
        "from onnxpar_runtime.session import Session\n"
        "rank = init()\n"
        "def body():\n"
        "    session = Session(sys.argv[1], rank=rank, device='cpu')\n"
        "    x = np.full((2, 3), rank.index, 'float32')\n"
        "    try:\n"
        "        session.run({'x': x.astype('float64') if rank.index else x}, {'batch': 4})\n"
        "    except OnnxparRuntimeError as error:\n"
        "        print('caught', str(error)[:14], flush=True)\n"
        "    y = session.run({'x': x}, {'batch': 4})['y']\n"
        "    print('ran', rank.index, y.sum(), flush=True)\n"
        "    return 0\n"
        "raise SystemExit(guarded(rank, body))\n"
    )
    outcome = mpirun(2, [str(script), str(directory)])
    assert outcome.code == 0, outcome.err
    lines = sorted(outcome.out.splitlines())
    # 6 elements of 2·rank + 4.
    assert lines == [*["caught r1 | input 'x'"] * 2, "ran 0 24.0", "ran 1 36.0"]


def test_large_parts_travel_in_pieces(tmp_path: Path) -> None:
    """The gathering of outputs does not depend on the size of its pieces."""
    script = (
        "import numpy as np\n"
        "from onnxpar_runtime import gather\n"
        "from onnxpar_format.boxes import SizedSharding\n"
        "from onnxpar_runtime.launch import guarded, init\n"
        "gather.PIECE_BYTES = 100\n"
        "rank = init()\n"
        "def body():\n"
        "    sized = SizedSharding((2,), (((101, (0,)),), ((7, ()),)))\n"
        "    array = np.arange(707.0).reshape(101, 7)\n"
        "    for _ in range(3):\n"
        "        found = gather.gather_to_root(rank, sized, sized.take(array, rank.index))\n"
        "    if rank.index == 0:\n"
        "        assert (found == array).all()\n"
        "    else:\n"
        "        assert found is None\n"
        "    return 0\n"
        "raise SystemExit(guarded(rank, body))\n"
    )
    outcome = mpirun(2, ["-c", script])
    assert outcome.code == 0, outcome.err
    assert outcome.messages == []
