"""What only a GPU can show; skipped, with the reason, where there is none (`tools/test-gpu`).

The comparisons themselves are tried without one, by the CPU in the GPU's place.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from onnxpar.cli import main
from onnxpar_runtime.devices import SHARES_SINCE, machine, obstacle
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from tests.children import with_tests
from tests.gpu import captured_worker
from tests.gpu.requests_worker import directory

# Models are sharded once for all tests.
pytestmark = pytest.mark.xdist_group("test_on_gpu")

ROOT = Path(__file__).parents[2]
STEPS, BATCH, SEQ, VOCAB = 20, 8, 16, 256
# Rounding grows with training; what PyTorch's own CPU and GPU differ by in as many steps is alike.
TOLERANCE = 1e-4
STAGES = "stages"
CAPTURED = ["--ort", "cuda.enable_cuda_graph=1"]
SHARDINGS = [("dp", 1), ("dp", 2), ("tp", 2), (STAGES, 2), ("dp", 4), ("tp", 4)]
EXPORTS = {
    "mlp": ["mlp.py", "--hidden", "64", "64"],
    "transformer": [
        *["transformer.py", "--layers", "2", "--d-model", "64", "--heads", "4"],
        *["--vocab", str(VOCAB), "--max-positions", str(SEQ)],
    ],
}


@pytest.fixture(scope="session")
def gpu() -> None:
    """A machine whose GPU can be used."""
    if why := obstacle(machine()):
        pytest.skip(f"no GPU: {why}")


def call(*command: str, ranks: int = 1) -> None:
    """Runs a program of this Python, on so many ranks."""
    start: list[str] = []
    if ranks > 1:
        start = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    environment = with_tests(mpirun_environment())
    # Where there are fewer GPUs than ranks.
    environment.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    done = subprocess.run(
        [*start, sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data for the models, which are written beside them when they are first sharded."""
    made = tmp_path_factory.mktemp("gpu")
    rng = np.random.default_rng(0)
    count = STEPS * BATCH
    images = rng.standard_normal((count, 1, 28, 28), dtype=np.float32)
    np.savez(made / "mlp.npz", x=images, labels=rng.integers(0, 10, count))
    tokens = [rng.integers(0, VOCAB, (count, SEQ)) for _ in range(2)]
    np.savez(made / "transformer.npz", input_ids=tokens[0], labels=tokens[1])
    return made


def shard(folder: Path, model: str, axis: str, ranks: int) -> Path:
    """Returns the model sharded for training, along a mesh axis or in stages; sharded once."""
    out = folder / f"{model}-{axis}{ranks}"
    if not out.exists():
        file = folder / f"{model}.onnx"
        if not file.exists():
            script, *options = EXPORTS[model]
            call(str(ROOT / "models" / script), "-o", str(file), *options)
        strategy = f"{axis}={ranks}"
        if axis == STAGES:
            strategy = str(folder / f"{model}.yaml")
            stages = {"stages": ranks, "micro_batches": 2 * ranks}
            Path(strategy).write_text(json.dumps({"devices": ranks, "pipeline": stages}))
        where = [str(file), "--strategy", strategy, "-o", str(out)]
        kind = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "adamw"]
        assert main(["shard", *where, *kind]) == 0
    return out


def train(folder: Path, model: str, axis: str, ranks: int, device: str, *more: str) -> list[float]:
    """Returns the losses of 20 steps."""
    log = log_of(folder, model, axis, ranks, device)
    data = ["--data", f"npz:{folder / model}.npz", "--batch-size", str(BATCH), "--lr", "1e-3"]
    options = ["--steps", str(STEPS), "--device", device, "--log", str(log), *more]
    out = str(shard(folder, model, axis, ranks))
    call("-m", "onnxpar.cli", "train", out, *data, *options, ranks=ranks)
    return losses(log)


def log_of(folder: Path, model: str, axis: str, ranks: int, device: str) -> Path:
    return folder / f"{model}-{axis}{ranks}-{device}.jsonl"


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def check_losses(folder: Path, model: str, axis: str, ranks: int, device: str) -> None:
    """Compares the losses of ranks on a device with those of one rank on the CPU."""
    log = log_of(folder, model, "dp", 1, "cpu")
    expected = losses(log) if log.exists() else train(folder, model, "dp", 1, "cpu")
    assert len(expected) == STEPS and expected[-1] != expected[0]
    np.testing.assert_allclose(
        train(folder, model, axis, ranks, device), expected, rtol=TOLERANCE, atol=0
    )


def floats_on_cpu(profiles: Sequence[Path]) -> tuple[set[str], set[str], int]:
    """Returns from onnxruntime's profiles which operators copied between devices, and which made
    floats on the CPU; and how many nodes ran on the GPU."""
    copied, fell, computed = set(), set(), 0
    for profile in profiles:
        for event in json.loads(profile.read_text(encoding="utf-8")):
            if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
                continue
            operator, args = event["args"]["op_name"], event["args"]
            if operator.startswith("Memcpy"):
                copied.add(event["name"])
            elif args["provider"] == "CUDAExecutionProvider":
                computed += 1
            elif any("float" in kind for out in args["output_type_shape"] for kind in out):
                fell.add(f"{operator} {event['name']}")
    return copied, fell, computed


def profiled(folder: Path, model: str, device: str, into: Path) -> list[Path]:
    """Returns the profiles of a training's programs."""
    prefix = ["--ort", "enable_profiling=1", "--ort", f"profile_file_prefix={into / 'profile'}"]
    train(folder, model, "dp", 1, device, *prefix)
    return sorted(into.glob("profile*"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("axis", "ranks"), SHARDINGS)
@pytest.mark.parametrize("model", EXPORTS)
def test_losses_are_those_of_the_cpu(folder: Path, model: str, axis: str, ranks: int) -> None:
    check_losses(folder, model, axis, ranks, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("model", EXPORTS)
def test_nothing_falls_back_and_nothing_is_copied(folder: Path, model: str, tmp_path: Path) -> None:
    copied, fell, computed = floats_on_cpu(profiled(folder, model, "cuda", tmp_path))
    assert computed
    assert copied == set()
    assert fell == set()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_runs_are_equal_and_tf32_is_close_to_them(folder: Path) -> None:
    exact = train(folder, "transformer", "dp", 1, "cuda")
    again = train(folder, "transformer", "dp", 1, "cuda")
    assert exact == again  # the same in every run
    fast = train(folder, "transformer", "dp", 1, "cuda", "--ort", "cuda.use_tf32=1")
    np.testing.assert_allclose(fast, exact, rtol=1e-2)  # ten bits of mantissa


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", EXPORTS)
def test_captured_steps_are_equal(folder: Path, model: str, ranks: int) -> None:
    facts = machine()
    if ranks > len(facts.gpus) and facts.nccl < SHARES_SINCE:
        pytest.skip("this NCCL lets no ranks share a GPU, and others are not captured")
    expected = train(folder, model, "dp", ranks, "cuda")
    captured = train(folder, model, "dp", ranks, "cuda", *CAPTURED)
    # The same kernels run, but cuBLAS may choose another one while a graph is captured: a few
    # units of 2^-24 in 20 steps.
    np.testing.assert_allclose(captured, expected, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_captured_tokens_are_equal(tmp_path: Path) -> None:
    out = captured_worker.directory(tmp_path, "replicate", 1)
    for options in ([], CAPTURED[1:]):
        call("-m", "tests.gpu.captured_worker", str(out), *options)


def check_requests(folder: Path, device: str) -> None:
    """Compares the tokens of requests side by side with those of each alone."""
    call("-m", "tests.gpu.requests_worker", str(directory(folder)), device, "compare")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_requests_in_a_cache_that_grows_get_the_tokens_of_each_alone(tmp_path: Path) -> None:
    check_requests(tmp_path, "cuda")


def test_the_comparison_of_requests_works(tmp_path: Path) -> None:
    check_requests(tmp_path, "cpu")


# The quick tier starts the same trainings below, on the stand-ins and with a profile.
@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp", STAGES])
def test_the_comparison_works(folder: Path, axis: str) -> None:
    check_losses(folder, "mlp", axis, 2, "cpu")


@pytest.mark.parametrize(
    ("axis", "options", "word", "count"),
    [
        (STAGES, [], "nccl\tSend\t", STEPS * 2 * 2 * 2),  # 4 micro-batches, there and back
        # The optimizer's steps, on two ranks: the host works out sizes of the training.
        pytest.param("dp", CAPTURED, "graph\t", 2 * (STEPS + 1), marks=pytest.mark.full),
    ],
    ids=["stages", "captured"],
)
def test_ranks_are_started_on_the_stand_ins_as_on_a_gpu(
    folder: Path,
    standin_cuda: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    axis: str,
    options: Sequence[str],
    word: str,
    count: int,
) -> None:
    """The losses are none there, but the call is the same, and values go by NCCL."""
    log = tmp_path / "log"
    monkeypatch.setenv("LD_LIBRARY_PATH", standin_cuda["LD_LIBRARY_PATH"])
    monkeypatch.setenv("STANDIN_DEVICES", "2")
    monkeypatch.setenv("STANDIN_LOG", str(log))
    assert len(train(folder, "mlp", axis, 2, "cuda", *options)) == STEPS
    lines = log.read_text().splitlines()
    assert sum(line.startswith(word) for line in lines) == count
    assert any(line.startswith("nccl\t") for line in lines)


def test_the_profile_is_understood(folder: Path, tmp_path: Path) -> None:
    profiles = profiled(folder, "mlp", "cpu", tmp_path)
    copied, fell, computed = floats_on_cpu(profiles)
    assert len(profiles) == 2  # training and optimizer
    assert not copied and not computed
    assert any(name.startswith("Gemm ") for name in fell)
