"""Trains networks several times with several numbers of threads, and compares all states by bit.

    python tools/same_bits.py [--runs 5] [--threads 1 2 4] [NETWORK …]

The networks are `mlp`, `gpt`, `convolutions` and `lstm`, each on one device and on two ranks by
data and by tensor, on the CPU. A run trains six steps with AdamW. Runs with the same number of
threads must have the same bits in all parameters and moments, or the exit code is 1. For each other
number of threads it prints whether the bits are those of the first one. docs/reference/numbers.md
has the results. It uses the Python on the PATH.
"""

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxpar_format.options import Settings
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.training.hyper import hyperparameters

ROOT = Path(__file__).parents[1]
STEPS, RATE, CLASSES = 6, 1e-3, 10
MESHES = ("dp=1", "dp=2", "tp=2")
SCRIPTS = {"mlp": ["mlp.py"], "gpt": ["transformer.py", "--layers", "2", "--max-positions", "64"]}
HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'
TEXTS = {
    "convolutions": HEAD
    + """g (float[batch, 3, 32, 32] x) => (float[batch, 10] logits)
<float[32, 3, 3, 3] w1, float[64, 32, 3, 3] w2, float[64, 10] w3>
{
    a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (b, w2)
    d = Relu(c)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    logits = MatMul(f, w3)
}""",
    "lstm": HEAD
    + """g (float[seq, batch, 64] x) => (float[batch, 10] logits)
<float[1, 256, 64] w1, float[1, 256, 64] w2, float[64, 10] w3, int64[1] first = {0}>
{
    y, h, c = LSTM <hidden_size = 64> (x, w1, w2)
    s = Squeeze(h, first)
    logits = MatMul(s, w3)
}""",
}
NETWORKS = (*SCRIPTS, *TEXTS)
SIZES = {"batch": 16, "seq": 64}


def write(name: str, path: Path) -> None:
    """Writes a network with random weights."""
    if name in SCRIPTS:
        script, *options = SCRIPTS[name]
        command = [sys.executable, str(ROOT / "models" / script), "-o", str(path), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return
    model = onnx.parser.parse_model(TEXTS[name])
    rng = np.random.default_rng(0)
    declared = [value for value in model.graph.value_info if value.name.startswith("w")]
    for value in declared:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        array = (rng.standard_normal(shape) / 8).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        model.graph.value_info.remove(value)
    onnx.save(model, path)


def shard(model: Path, mesh: str, out: Path) -> None:
    """Shards a network for training with AdamW."""
    line = [sys.executable, "-m", "onnxpar.cli", "shard", str(model), "--strategy", mesh, "--train"]
    line += ["--loss", "softmax_cross_entropy", "--optimizer", "adamw", "-o", str(out)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)


def bits(directory: Path, threads: int) -> str:
    """Trains with a number of threads on each rank; returns a digest of all states."""
    hyper = hyperparameters("adamw", Settings())
    with TrainerGroup(directory, ort_options={"intra_op_num_threads": str(threads)}) as group:
        batch = {
            spec.name: drawn(spec.dtype, [SIZES.get(str(dim), dim) for dim in spec.shape])
            for spec in group.manifest.program("training_model").inputs
        }
        for step in range(1, STEPS + 1):
            group.train_step([batch], hyper.at(step, RATE))
        digest = hashlib.sha256()
        for name in sorted(group.manifest.trained().states):
            digest.update(np.ascontiguousarray(group.gather(name)).tobytes())
    return digest.hexdigest()


def drawn(dtype: str, shape: Sequence[int | str]) -> NDArray[np.generic]:
    """Returns a random input: normal numbers, or integers that any network takes."""
    rng, sizes = np.random.default_rng(1), tuple(int(size) for size in shape)
    if dtype == "int64":
        return rng.integers(0, CLASSES, sizes)
    return rng.standard_normal(sizes).astype(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--runs", type=int, default=5, help="with each number of threads")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.networks} - {*NETWORKS}):
        parser.error(f"expected networks among {', '.join(NETWORKS)}, got {unknown[0]}")
    wrong = 0
    print(
        f"{'network':<12} {'mesh':<5} {options.runs} runs  " + "threads: bits of the first number"
    )
    with TemporaryDirectory(prefix="onnxpar-bits-") as folder:
        for name in options.networks or NETWORKS:
            model = Path(folder, f"{name}.onnx")
            write(name, model)
            for mesh in MESHES:
                directory = Path(folder, f"{name}.{mesh}")
                shard(model, mesh, directory)
                found = {
                    n: {bits(directory, n) for _ in range(options.runs)} for n in options.threads
                }
                equal = all(len(digests) == 1 for digests in found.values())
                wrong += not equal
                first, *others = options.threads
                told = (f"{n}: {'same' if found[n] == found[first] else 'other'}" for n in others)
                print(
                    f"{name:<12} {mesh:<5} {'equal' if equal else 'DIFFER':<7} {', '.join(told)}",
                    flush=True,
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
