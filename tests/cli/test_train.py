"""`onnxpar train` and `onnxpar eval` on one device, and the mistakes that can be made."""

import importlib
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from onnxpar.cli import main
from onnxpar_runtime.checkpoint.folder import complete_steps
from onnxpar_runtime.training.permutation import permutation
from onnxpar_runtime.training.step_trainer import StepTrainer
from tests.cli import linear

CLOSE = 34 * 2.0**-24
"""Of float32 losses: products of 64 terms, a logarithm and means of some hundred rows."""
RUN = ["--data", "digits", "--batch-size", "100", "--lr", "0.5", "--device", "cpu"]


@pytest.fixture(autouse=True)
def outside_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear.shard(tmp_path_factory.mktemp("sgd"), 1)


def test_trains_as_numpy_does(sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, saved = tmp_path / "log.jsonl", tmp_path / "w.safetensors"
    arguments = [*RUN, "--epochs", "3", "--seed", "7", "--log", str(log), "--save", str(saved)]
    arguments += ["--peak-flops", "1e9"]
    assert main(["train", str(sgd), *arguments]) == 0
    printed = capfd.readouterr()
    losses, w = linear.trained(0.5, 100, 3, 7)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    keys = ["epoch", "step", "run_step", "loss", "lr", "samples_per_s", "grad_norm"]
    keys += ["step_s", "input_s", "memory_bytes", "flops_per_s", "mfu"]
    keys += ["communication_s", "optimizer_s", "checkpoint_s", "eta_s"]
    assert all(list(line) == keys for line in lines)
    # Forward, and the gradient of the weights: 64 by 10, two operations for each product.
    np.testing.assert_allclose(
        [line["flops_per_s"] for line in lines],
        [line["samples_per_s"] * 2 * 2 * 64 * 10 for line in lines],
        rtol=1e-14,  # both are divided by the same seconds
    )
    assert all(line["eta_s"] > 0 for line in lines[:-1]) and lines[-1]["eta_s"] == 0
    assert all(line["mfu"] == line["flops_per_s"] / 1e9 for line in lines)
    assert all(0 <= line["input_s"] < line["step_s"] for line in lines)
    # Numpy and onnxruntime alone take more than 50 MB.
    assert all(line["memory_bytes"] > 50e6 for line in lines)
    # float32 against float64: some 1e-7 a step, which 45 steps do not make worse than tenfold.
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=CLOSE)
    np.testing.assert_allclose(load_file(saved)["w"], w, rtol=0, atol=2e-6)
    # 1437 samples: 14 full batches and one of 37.
    assert [(line["epoch"], line["step"]) for line in lines] == [
        (epoch, step) for epoch in (1, 2, 3) for step in range(1, 16)
    ]
    out = printed.out.splitlines()
    assert out[0] == (
        "training 640 of 640 parameters, in 1 of 1 tensors, with sgd on softmax_cross_entropy"
    )
    assert all(re.fullmatch(r"epoch: \d+ step: \d+, loss is [\d.]+", line) for line in out[1:-1])
    assert len(out) == 1 + 45 + 1 and out[-1] == f"wrote {saved}"
    assert printed.err == ""


def test_the_loss_is_read_every_few_steps(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    arguments = [*RUN, "--steps", "17", "--seed", "7", "--log-every", "4", "--log", str(log)]
    folder = ["--checkpoint", str(tmp_path / "ck"), "--every", "3"]
    assert main(["train", str(sgd), *arguments, *folder]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    losses, _ = linear.trained(0.5, 100, 2, 7)
    # Of every fourth step, and of the last one, which is the second of the second epoch.
    at = [(1, 4), (1, 8), (1, 12), (2, 1), (2, 2)]
    assert [(line["epoch"], line["step"]) for line in lines] == at
    assert [line["run_step"] for line in lines] == [4, 8, 12, 16, 17]
    assert capfd.readouterr().out.count("loss is") == 5
    # Equal to a run that reads every step: each loss depends on all steps before it.
    wanted = [losses[4 * n - 1] for n in (1, 2, 3, 4)] + [losses[16]]
    np.testing.assert_allclose([line["loss"] for line in lines], wanted, rtol=CLOSE)


def test_evaluates_as_numpy_does(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, w = linear.trained(0.5, 100, 3, 7)
    save_file({"w": w.astype(np.float32)}, tmp_path / "w.safetensors")
    arguments = ["eval", str(sgd), "--data", "digits", "--device", "cpu", "--json"]
    assert main([*arguments, "--parameters", str(tmp_path / "w.safetensors")]) == 0
    report = json.loads(capfd.readouterr().out)
    loss, _, accuracy = linear.loss_of(w, *linear.digits(test=True))
    assert report["loss"] == pytest.approx(loss, rel=CLOSE)
    assert (report["samples"], report["labels"], report["notice"]) == (360, 360, "")
    assert report["accuracy"] == pytest.approx(accuracy) and accuracy > 0.85
    assert report["correct"] == round(accuracy * 360)
    # JSON has no NaN, which Python would write.
    save_file({"w": np.full_like(w, np.nan, np.float32)}, tmp_path / "w.safetensors")
    assert main([*arguments, "--parameters", str(tmp_path / "w.safetensors")]) == 1
    text = capfd.readouterr().out
    assert '"loss": null,' in text and "NaN" not in text
    # Without the file the weights of the directory are evaluated.
    assert main(arguments[:-1]) == 0
    loss, _, accuracy = linear.loss_of(linear.start().astype(float), *linear.digits(test=True))
    text = capfd.readouterr().out
    assert text.startswith("digits: 360 samples: loss is ")
    assert float(text.split("loss is ")[1].split(",")[0]) == pytest.approx(loss, rel=CLOSE)
    assert f"accuracy is {accuracy:.2%} ({round(accuracy * 360)} of 360)" in text


def test_begins_with_what_was_saved(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved, log = tmp_path / "w.safetensors", tmp_path / "log.jsonl"
    arguments = ["train", str(sgd), *RUN, "--print-every", "0", "--eval"]
    assert main([*arguments, "--steps", "5", "--save", str(saved)]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == 3 and printed[1].startswith(
        "epoch: 1 evaluated on 360 samples: loss is "
    )
    again = [*arguments, "--steps", "1", "--parameters", str(saved), "--log", str(log)]
    assert main(again) == 0
    x, classes = linear.digits(test=False)
    rows = permutation(len(x), 0, 1)(np.arange(100))
    loss, _, _ = linear.loss_of(load_file(saved)["w"].astype(float), x[rows], classes[rows])
    step, evaluation = map(json.loads, log.read_text().splitlines())
    assert step["loss"] == pytest.approx(loss, rel=CLOSE)
    assert evaluation.keys() == {"epoch", "run_step", "evaluation_loss", "evaluation_accuracy"}
    assert (
        evaluation["run_step"] == 1
        and f"{evaluation['evaluation_loss']:.7g}" in (capfd.readouterr().out.splitlines()[1])
    )


def npz(path: Path, count: int, **changed: np.ndarray) -> str:
    """Writes so many of the digits that are held out as arrays of the inputs."""
    x, classes = linear.digits(test=True)
    arrays = {"x": x[:count].astype(np.float32), "labels": classes[:count]}
    np.savez(path, **{**arrays, **changed})
    return f"npz:{path}"


NOT_HELD_OUT = "notice: --eval evaluates on the training data: "


def test_evaluates_on_data_of_its_own(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved, held_out = tmp_path / "w.safetensors", npz(tmp_path / "a.npz", 300)
    arguments = ["train", str(sgd), *RUN, "--steps", "5", "--save", str(saved), "--print-every"]
    x, classes = (array[:300] for array in linear.digits(test=True))
    for more in (["0"], ["0", "--eval"]):  # implied
        assert main([*arguments, *more, "--eval-data", held_out]) == 0
        _, printed, _ = capfd.readouterr().out.splitlines()
        assert printed.startswith("epoch: 1 evaluated on 300 samples: loss is ")
        loss, _, accuracy = linear.loss_of(load_file(saved)["w"].astype(float), x, classes)
        assert float(printed.split("loss is ")[1].split(",")[0]) == pytest.approx(loss, rel=CLOSE)
        assert f"accuracy is {accuracy:.2%}" in printed


@pytest.mark.parametrize(
    ("data", "more", "noticed"),
    [
        ("npz", [], True),
        ("npz", ["--eval-data", "npz"], False),  # the user has said so
        ("digits:train", [], True),
        ("digits", [], False),
    ],
)
def test_evaluation_on_the_training_data_is_reported_once(
    sgd: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    data: str,
    more: list[str],
    noticed: bool,
) -> None:
    named = {"npz": npz(tmp_path / "a.npz", 300)}
    options = ["--data", named.get(data, data), "--epochs", "2", "--eval"]
    options += [named.get(option, option) for option in more]
    assert main(["train", str(sgd), *RUN, *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    notices = [(n, line) for n, line in enumerate(lines) if line.startswith("notice")]
    # Right after what is trained, before the first step.
    expected = f"{NOT_HELD_OUT}{named.get(data, data)} has no test split; name "
    assert notices == ([(1, expected + "other data with --eval-data")] if noticed else [])
    assert sum(" evaluated on " in line for line in lines) == 2


FUNCTIONS = """
import numpy as np

ASKED = []

def batches(batch_size):
    ASKED.append(batch_size)
    for _ in range(2):
        yield {"x": np.ones((batch_size, 64), np.float32), "labels": np.zeros(batch_size, int)}

def parted(batch_size, train):
    ASKED.append((batch_size, train))
    yield from batches(batch_size + (not train))
"""


def test_a_function_is_asked_for_batches_of_the_size_that_training_has(
    sgd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_mine.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = importlib.import_module("of_mine").ASKED
    arguments = ["train", str(sgd), *RUN, "--batch-size", "6", "--steps", "2", "--eval", "--data"]
    for options, samples, calls in (
        (["of_mine:batches"], 12, [6, 6]),
        (["of_mine:parted"], 14, [(6, True), 6, (6, False), 7]),
        (["digits", "--eval-data", "of_mine:batches"], 12, [6]),
        (["digits", "--eval-data", "of_mine:parted"], 14, [(6, False), 7]),
    ):
        asked.clear()
        assert main([*arguments, *options]) == 0
        out = capfd.readouterr().out
        assert f"epoch: 1 evaluated on {samples} samples: " in out and asked == calls
        # What takes `train` may hold data out.
        assert (NOT_HELD_OUT in out) == (options == ["of_mine:batches"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": np.zeros(300)}, "input 'labels': expected int64, got float64, which is not"),
        ({"y": np.zeros(300)}, "inputs: expected ['x', 'labels'], got ['labels', 'x', 'y']: "),
        ({"labels": np.zeros(299, int)}, "expected the same number of samples in dim 0 of ['x', "),
        ({"x": np.zeros((300, 63), np.float32)}, "input 'x', dim 1: expected 64, got 63"),
        (
            {"labels": np.arange(300) // 29},
            "input 'labels': expected elements from 0 to 9 for node 'onnxpar.loss/"
            "SoftmaxCrossEntropyLoss' (SoftmaxCrossEntropyLoss), got 10 at [290] of the data\n",
        ),
    ],
)
def test_data_are_checked_before_the_first_step(
    sgd: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    changed: dict[str, np.ndarray],
    message: str,
) -> None:
    held_out = npz(tmp_path / "a.npz", 300, **changed)
    assert main(["train", str(sgd), *RUN, "--eval-data", held_out]) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith(f"onnxpar: error: --eval-data {held_out}: {message}")
    assert printed.out == "" and printed.err.count("\n") == 1
    assert main(["train", str(sgd), *RUN[2:], "--data", held_out]) == 2
    assert capfd.readouterr() == ("", printed.err.replace("--eval-data", "--data"))
    assert main(["eval", str(sgd), "--data", held_out, "--device", "cpu"]) == 2
    assert f"--data {held_out}: {message}" in capfd.readouterr().err


def test_an_evaluation_that_is_not_finite(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = npz(tmp_path / "a.npz", 20)
    arrays = dict(np.load(given.removeprefix("npz:")))
    (name,) = (n for n, array in arrays.items() if array.dtype == np.float32)
    arrays[name][3] = np.nan
    np.savez(tmp_path / "a.npz", **arrays)
    assert main(["eval", str(sgd), "--data", given, "--device", "cpu"]) == 1
    printed = capfd.readouterr()
    assert "loss is nan" in printed.out and "the loss is nan: expected a finite one" in printed.err


def test_accumulation_and_schedule(sgd: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    more = ["--accumulate", "3", "--schedule", "linear", "--warmup", "2", "--steps", "6"]
    assert main(["train", str(sgd), *RUN, *more, "--log", str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Quarters of 0.5: exact.
    assert [line["lr"] for line in lines] == [0, 0.25, 0.5, 0.375, 0.25, 0.125]
    x, classes = linear.digits(test=False)
    rows = permutation(len(x), 0, 1)(np.arange(100))
    loss, gradient, _ = linear.loss_of(linear.start().astype(float), x[rows], classes[rows])
    # Micro-batches of 34, 33 and 33 whose weights are float32.
    assert lines[0]["loss"] == pytest.approx(loss, rel=2e-6)
    assert lines[0]["grad_norm"] == pytest.approx(np.sqrt((gradient**2).sum()), rel=2e-6)


def test_a_divisor_drops_the_last_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = linear.shard(tmp_path, 1, "--symbol", "batch:divisor=8")
    capfd.readouterr()
    arguments = ["--data", "digits", "--batch-size", "256", "--lr", "0.1", "--log", "log"]
    arguments[-1] = str(tmp_path / "log")
    assert main(["train", str(directory), *arguments]) == 0
    printed = capfd.readouterr().out.splitlines()
    # 1437 = 5 * 256 + 157
    assert printed[1] == (
        "notice: the last 157 samples of each epoch are left out: symbol 'batch' must be 8*N, N "
        ">= 1"
    )
    assert len((tmp_path / "log").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data", "words"],
            "--data words: expected digits[:train|:test], npz:FILE, parquet:FILE",
        ),
        (["--data", "npz:nowhere.npz"], "nowhere.npz: no such file"),
        (["--data", "idx:nowhere"], "nowhere: none of the files train-images-idx3-ubyte"),
        (["--eval-data", "words"], "--eval-data words: expected digits[:train|:test], npz:FILE"),
        (["--eval-data", "npz:nowhere.npz"], "nowhere.npz: no such file"),
        (["--eval-data", "no.such:f"], "--eval-data no.such:f: No module named 'no'"),
        (["--batch-size", "0"], "--batch-size and --accumulate: expected numbers >= 1"),
        (["--epochs", "0"], "--epochs: expected a number >= 1, got 0"),
        (["--lr", "-1"], "--lr: expected a number >= 0, got -1"),
        (
            ["--momentum", "0.9"],
            "--momentum: the directory's optimizer sgd does not have this setting",
        ),
        (["--betas", "0.9"], "--betas: expected two numbers A,B, got '0.9'"),
        (["--clip-norm", "0"], "--clip-norm: expected a number > 0, got 0"),
        (["--schedule", "step"], "--schedule: expected one of constant, linear, cosine"),
        (["--warmup", "99"], "--warmup: expected fewer steps than the run has (15), got 99"),
        (["--device", "tpu"], "device: expected auto, cpu, cuda or cuda:NUMBER, got 'tpu'"),
        (["--transport", "tcp"], "transport: expected one of auto, mpi, nccl, threads, got 'tcp'"),
        (["--peak-flops", "0"], "--peak-flops: expected a number > 0, got 0"),
        (["--log", "/nowhere/log"], "/nowhere/log: its folder /nowhere does not exist"),
        (["--save", "/nowhere/w"], "/nowhere/w: its folder /nowhere does not exist"),
        (["--parameters", "nowhere.st"], "nowhere.st: cannot be read: No such file"),
    ],
)
def test_users_mistakes(
    sgd: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["train", str(sgd), *RUN, *options]) == 2
    error = capfd.readouterr().err
    assert error.startswith("onnxpar: error: ") and message in error
    assert error.count("\n") == 1 and "Traceback" not in error


def test_parameters_that_do_not_fit(
    sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arrays, message in (
        ({"v": linear.start()}, "no trained parameters and statistics v;"),
        (
            {"w": linear.start().T.copy()},
            "parameter 'w': expected float32 (64, 10), got float32 (1",
        ),
    ):
        save_file(arrays, tmp_path / "w")
        assert main(["train", str(sgd), *RUN, "--parameters", str(tmp_path / "w")]) == 2
        assert message in capfd.readouterr().err


def test_a_directory_without_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    linear.shard(tmp_path, 1)
    arguments = [str(tmp_path / "linear.onnx"), "--strategy", "dp", "--devices", "1"]
    assert main(["shard", *arguments, "-o", str(tmp_path / "forward")]) == 0
    assert main(["train", str(tmp_path / "forward"), *RUN]) == 2
    assert "forward" in capfd.readouterr().err


def test_more_devices_than_ranks_says_what_to_type(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = linear.shard(tmp_path, 2)
    for command, options in (("train", RUN), ("eval", ["--data", "digits"])):
        assert main([command, str(directory), *options]) == 2
        assert f"onnxpar launch -- {command} {directory} …" in capfd.readouterr().err


def test_an_interrupt_is_reported_once_and_has_its_own_code(
    sgd: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("onnxpar_runtime.training.step_trainer.StepTrainer.train_step", interrupted)
    assert main(["train", str(sgd), *RUN]) == 130
    assert capfd.readouterr().err == "onnxpar: error: interrupted\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_single_rank_with_a_grace_time_writes_a_last_checkpoint(
    name: str,
    sgd: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    number, folder = signal.Signals[name], tmp_path / "ck"
    step = StepTrainer.train_step

    sent = iter([number])

    def interrupted(self: StepTrainer, *arguments: Any, **options: Any) -> Any:
        # Only once: a second signal ends the process.
        for first in sent:
            signal.raise_signal(first)
        return step(self, *arguments, **options)

    monkeypatch.setattr(StepTrainer, "train_step", interrupted)
    options = [*RUN, "--checkpoint", str(folder), "--grace", "30"]
    assert main(["train", str(sgd), *options]) == 1
    (last,) = complete_steps(folder)
    expected = f"{name}: stopped after step {last}, with a last checkpoint in {folder}"
    assert expected in capfd.readouterr().err
    # Nothing ends this process when the time is over.
    assert not any(
        isinstance(thread, threading.Timer) and not thread.finished.is_set()
        for thread in threading.enumerate()
    )


@pytest.mark.parametrize("text", ["0", "nan", "inf"])
def test_a_grace_time_is_a_number_of_seconds(
    text: str, sgd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*RUN, "--checkpoint", str(tmp_path / "ck"), "--grace", text]
    assert main(["train", str(sgd), *options]) == 2
    wanted = "a finite number" if text in ("nan", "inf") else "a number >= 1"
    assert f"--grace: expected {wanted}, got {text}" in capfd.readouterr().err


def test_accuracy_of_what_has_no_classes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    linear.shard(tmp_path, 1)
    arguments = ["shard", str(tmp_path / "linear.onnx"), "--strategy", "dp", "--devices", "1"]
    out = tmp_path / "mse"
    assert main([*arguments, "-o", str(out), "--train", "--loss", "mse", "--optimizer", "sgd"]) == 0
    x = np.ones((4, 64), np.float32)
    np.savez(tmp_path / "a.npz", x=x, labels=np.zeros((4, 10), np.float32))
    evaluation = ["eval", str(out), "--data", f"npz:{tmp_path / 'a.npz'}"]
    capfd.readouterr()
    assert main(evaluation) == 0
    expected = float(((x.astype(float) @ linear.start()) ** 2).mean())
    printed = capfd.readouterr().out
    assert "accuracy is" not in printed
    # float32 sums of 64 terms: printed with 7 digits.
    assert float(printed.split("loss is ")[1]) == pytest.approx(expected, rel=5e-6)
    assert main([*evaluation, "--metric", "accuracy"]) == 2
    assert (
        "--metric accuracy: the loss mse of the directory has no classes" in capfd.readouterr().err
    )
    assert main([*evaluation, "--metric", "recall"]) == 2
    assert "or module:function, got 'recall'" in capfd.readouterr().err
