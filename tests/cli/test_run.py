"""`onnxpar run` without mpirun, and the errors of the command line."""

import signal
from pathlib import Path

import numpy as np
import pytest

from onnxpar import cli
from onnxpar.cli import main
from tests.runtime import hand_made


@pytest.fixture(autouse=True)
def outside_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def one_device(directory: Path) -> Path:
    dims = [[("batch", [])]]
    return hand_made.write(
        directory,
        ["g (float[n] x) => (float[n] y) { y = Add(x, x) }"],
        atoms=[],
        inputs=[hand_made.tensor("x", "float32", ["batch"], dims)],
        outputs=[hand_made.tensor("y", "float32", ["batch"], dims)],
        symbols={"batch": {"divisor": 2}},
    )


def run(directory: Path, inputs: Path, *more: str) -> tuple[int, Path]:
    outputs = inputs.parent / "out.npz"
    arguments = ["run", str(directory), "--inputs", str(inputs), "--outputs", str(outputs), *more]
    return main(arguments), outputs


def save(tmp_path: Path, **arrays: np.ndarray) -> Path:
    np.savez(tmp_path / "in.npz", **arrays)
    return tmp_path / "in.npz"


def test_one_device(tmp_path: Path) -> None:
    inputs = save(tmp_path, x=np.arange(4, dtype=np.float32))
    code, outputs = run(
        one_device(tmp_path / "a"), inputs, "--device", "cpu", "--log-dir", str(tmp_path / "logs"),
        "--ort", "intra_op_num_threads=2",
    )  # fmt: skip
    assert code == 0
    assert np.load(outputs)["y"].tolist() == [0, 2, 4, 6]
    assert "wrote" in (tmp_path / "logs" / "rank0000.log").read_text()


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"z": [0.0, 1.0]}, [], "expected ['x'], got ['z']: missing ['x'], unknown ['z']"),
        ({"x": [0, 1]}, [], "input 'x': expected float32, got int64"),
        ({"x": [[0.0, 1.0]]}, [], "input 'x': expected 1 dims, got shape (1, 2)"),
        ({"x": [0.0, 1.0, 2.0]}, [], "symbol 'batch' is 3, which violates its constraint: 2*N"),
        ({"x": [0.0, 1.0]}, ["--ort", "speed=9"], "unknown onnxruntime option 'speed'"),
        (
            {"x": [0.0, 1.0]},
            ["--device", "tpu"],
            "expected auto, cpu, cuda or cuda:NUMBER, got 'tpu'",
        ),
        ({"x": [0.0, 1.0]}, ["--custom-ops", "none.so"], "custom-op library none.so: no such file"),
    ],
)
def test_users_mistakes(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arrays: dict[str, list[float]],
    options: list[str],
    message: str,
) -> None:
    made = {k: np.array(v, np.float32 if isinstance(np.ravel(v)[0], float) else None)
            for k, v in arrays.items()}  # fmt: skip
    code, outputs = run(one_device(tmp_path / "a"), save(tmp_path, **made), *options)
    error = capfd.readouterr().err
    assert code == 2
    assert error.startswith("onnxpar: error: ") and message in error
    assert error.count("\n") == 1 and "Traceback" not in error
    assert not outputs.exists()


def test_an_interrupt_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("onnxpar_runtime.session.Session.run_global", interrupted)
    code, outputs = run(one_device(tmp_path / "a"), save(tmp_path, x=np.zeros(2, np.float32)))
    assert (code, capfd.readouterr().err) == (1, "onnxpar: error: interrupted\n")
    assert not outputs.exists()


def test_more_devices_than_ranks_says_what_to_type(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 3)
    code, _ = run(directory, save(tmp_path, x=np.zeros((3, 3), np.float32)))
    assert code == 2
    assert f": start it with `onnxpar launch -- run {directory} …`" in capfd.readouterr().err


def test_missing_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = save(tmp_path, x=np.zeros(2, np.float32))
    assert run(tmp_path / "nowhere", inputs)[0] == 2
    assert "nowhere: no such directory" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", inputs)[0] == 2
    assert "got one without manifest.json" in capfd.readouterr().err
    directory = one_device(tmp_path / "a")
    assert run(directory, tmp_path / "none.npz")[0] == 2
    assert "none.npz: no such file" in capfd.readouterr().err
    arguments = ["run", str(directory), "--inputs", str(inputs), "--outputs", "/nowhere/out.npz"]
    assert main(arguments) == 2
    assert "/nowhere/out.npz: its folder /nowhere does not exist" in capfd.readouterr().err


def test_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    said = "onnxpar: error: missing argument 'DIR': see onnxpar run --help\n"
    assert capfd.readouterr().err == said
    assert main(["fly"]) == 2
    assert capfd.readouterr().err == "onnxpar: error: no such command 'fly': see onnxpar --help\n"
    for arguments, said in (
        (["run", "out", "--devic", "cpu"], "no such option: --devic"),
        (["run", "out", "--device"], "option '--device' requires an argument: see onnxpar run"),
        (["doctor", "more"], "got unexpected extra argument"),
        (["checkpoint", "merge", "a"], "missing argument 'DST': see onnxpar checkpoint merge"),
    ):
        assert main(arguments) == 2
        message = capfd.readouterr().err
        assert message.startswith(f"onnxpar: error: {said}") and message.count("\n") == 1
    assert main(["checkpoint"]) == 2
    assert capfd.readouterr().err.startswith("Usage: ")
    assert main(["--help"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name, _ in cli.COMMANDS)


def test_traceback_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXPAR_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="expected key=value"):
        run(one_device(tmp_path / "a"), tmp_path / "in.npz", "--ort", "nothing")
