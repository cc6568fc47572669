"""Compares exposed communication in a trace with what a step takes less without communication.

    python tools/bench/trace.py [--model gpt] [--strategy dp=2] [--rounds 40]

Two ranks on this machine train a GPT, or ResNet-50. In turn they make one step: recorded, not
recorded, recorded with graphs in which every AllReduce is a copy of the rank's own tensor (its
group is the rank alone), and recorded with graphs that lack these copies: what reads the result of
an AllReduce reads its operand. Copies count as computing, so a step without them saves the exposed
communication of the traces, waiting included, and these two are compared. What the copies take is
the difference between the last two kinds of steps. The costs of recording calls, and of recording
operators as well, are those of the recorded steps. Differences are medians over pairs of steps that
followed one another, since a step's time varies by more than what is compared; the machine must be
idle.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from onnxpar import LossKind, LossSpec, OptimizerKind, TrainingSpec, shard_model
from onnxpar_format.trace_times import PARTS, times
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.launch import find_mpirun, guarded, init, mpirun_environment
from onnxpar_runtime.tracing.recording import Recording
from onnxpar_runtime.training.programs import TRAINING
from onnxpar_runtime.training.sources import Batch
from onnxpar_runtime.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
GPT = ("models/transformer.py", "--layers", "4", "--d-model", "512", "--heads", "8",
       "--vocab", "8192", "--max-positions", "128")  # fmt: skip
MODELS = {"gpt": GPT, "resnet50": ("models/zoo.py", "resnet50")}
HYPER = {"lr": 1e-5, "clip_norm": float("inf"), "momentum": 0.9, "dampening": 0.0}
HYPER |= {"weight_decay": 0.0, "momentum_first": 0.0}
WHOLE, COPIES, NONE, PLAIN = "recorded", "copies", "none", "not recorded"
OPERATORS, CALLS = "operators", "calls"


class BenchError(Exception):
    """The graphs communicate in a way for which there is no copy."""


def batch_of(model: str, trainer: Trainer) -> Batch:
    """Returns a batch of a model."""
    rng = np.random.default_rng(0)
    labels = trainer.training.loss.labels
    assert labels is not None, "the appended loss has labels"
    (name,) = (s.name for s in trainer.manifest.program(TRAINING).inputs if s.name != labels)
    if model == "gpt":
        tokens = rng.integers(0, 8192, (2, 64))
        return {name: tokens, labels: np.roll(tokens, -1, 1)}
    return {
        name: rng.standard_normal((16, 3, 128, 128), dtype=np.float32),
        labels: rng.integers(0, 10, 16),
    }


def local(path: Path, rank: int, kind: str) -> None:
    """Makes every AllReduce of a rank's graph a copy of its own tensor, or leaves it out.

    Those that give outputs of the program are copies in any case.
    """
    model = onnx.load(path, load_external_data=False)
    if kind == NONE:
        leave_out(model.graph)
    for node in model.graph.node:
        if node.domain != "onnxpar":
            continue
        for attribute in node.attribute:
            if attribute.name == "group":
                kinds = [a.s.decode() for a in node.attribute if a.name == "op"]
                if (*kinds, node.op_type)[0] != "AllReduce":
                    raise BenchError(f"{path}: expected AllReduce alone, got {node.op_type}")
                attribute.ints[:] = [rank]
    path.unlink()  # a link to the file of the other directory
    onnx.save(model, path)


def leave_out(graph: onnx.GraphProto) -> None:
    """Lets what reads the results of AllReduces read their operands, in the same places."""
    outputs = {value.name for value in graph.output}
    operand: dict[str, str] = {}
    left: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [operand.get(name, name) for name in node.input]
        collective = node.domain == "onnxpar" and node.op_type in ("AllReduce", "Bucket")
        if not collective or outputs & set(node.output):
            # The first AllReduce of a program reads no token.
            while node.input and collective and not node.input[-1]:
                node.input.pop()
            left.append(node)
            continue
        given = [*node.input, *[""] * (len(node.output) - len(node.input))]
        operand |= dict(zip(node.output, given, strict=True))
    graph.ClearField("node")
    graph.node.extend(left)


def prepare(folder: Path, model: str, strategy: str) -> None:
    """Writes the directory, the one with copies, and the one without them."""
    script, *more = MODELS[model]
    command = [sys.executable, str(ROOT / script), *more, "-o", str(folder / "model.onnx")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loss = LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY)
    training = TrainingSpec(loss, OptimizerKind.MOMENTUM)
    shard_model(folder / "model.onnx", strategy, folder / WHOLE, training=training)
    for kind in (COPIES, NONE):
        changed(folder / WHOLE, folder / kind, kind)


def changed(whole: Path, folder: Path, kind: str) -> None:
    """Writes a directory whose ranks do not communicate."""
    shutil.copytree(whole, folder, copy_function=os.link)
    for rank in range(RANKS):
        for path in folder.glob(f"rank{rank:04d}.*.onnx"):
            local(path, rank, kind)
    manifest = folder / "manifest.json"
    found = json.loads(manifest.read_text(encoding="utf-8"))
    for file, entry in found["files"].items():
        data = (folder / file).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.unlink()
    manifest.write_text(json.dumps(found), encoding="utf-8")


class Steps:
    """Steps of one rank, and what they took.

    Args:
        folder: The directories.
        model: The model's name.
        rank: The rank.
    """

    def __init__(self, folder: Path, model: str, rank: Rank) -> None:
        """Opens the directories."""
        self.folder, self.rank = folder, rank
        self.trainers = {kind: Trainer(folder / kind, rank=rank) for kind in (WHOLE, COPIES, NONE)}
        self.trainers[PLAIN] = self.trainers[WHOLE]
        self.batch = [batch_of(model, self.trainers[WHOLE])]
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.parts: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    def step(self, kind: str) -> None:
        """Makes one step."""
        begin = time.perf_counter()
        self.trainers[kind].train_step(self.batch, HYPER)
        self.seconds[kind].append(time.perf_counter() - begin)

    def traced(self, kind: str) -> None:
        """Makes one step, and keeps the means of its parts over the ranks."""
        recording = Recording(self.rank)
        self.step(kind)
        trace = recording.finish("bench", RANKS)
        if trace is not None:
            ranks = [vars(found) for found in times(trace).ranks]
            parts = {part: sum(row[part] for row in ranks) / RANKS for part in (*PARTS, "step")}
            self.parts[kind].append(parts)

    def with_operators(self, count: int) -> None:
        """Makes steps that record operators too, and as many that record calls alone."""
        recording = Recording(self.rank, operators=True)
        self.trainers[OPERATORS] = Trainer(self.folder / WHOLE, rank=self.rank)
        self.trainers[CALLS] = self.trainers[WHOLE]
        for _ in range(count + 1):
            self.step(OPERATORS)
            self.step(CALLS)
        recording.finish("bench", RANKS)


def measure(folder: Path, model: str, rounds: int) -> int:
    """Measures, as one rank; rank 0 prints the results as JSON."""
    rank = init("mpi", "cpu")

    def body() -> int:
        steps = Steps(folder, model, rank)
        for _ in range(rounds + 1):
            steps.traced(WHOLE)
            steps.traced(COPIES)
            steps.traced(NONE)
            steps.step(PLAIN)
        steps.with_operators(rounds // 4)
        if rank.index == 0:
            # The first steps allocate memory.
            seconds = {kind: found[1:] for kind, found in steps.seconds.items()}
            parts = {kind: found[1:] for kind, found in steps.parts.items()}
            print(json.dumps({"seconds": seconds, "parts": parts}), flush=True)
        return 0

    return guarded(rank, body)


def middle(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and half of the interval that has it with a probability of 95 %.

    The interval is that of the order statistics n/2 +- 0.98 sqrt(n) (binomial, p = 1/2).
    """
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    low, high = ordered[max((n - 1) // 2 - reach, 0)], ordered[min(n // 2 + reach, n - 1)]
    return statistics.median(ordered), (high - low) / 2


def show(seconds: dict[str, list[float]], parts: dict[str, list[dict[str, float]]]) -> None:
    """Prints what was measured."""

    def ratio(one: str, other: str) -> str:
        found, reach = middle(
            [a / b - 1 for a, b in zip(seconds[one], seconds[other], strict=True)]
        )
        return f"{found:+.1%} +- {reach:.1%}"

    plain = statistics.median(seconds[PLAIN])
    print(f"{1000 * plain:.1f} ms a step, not recorded")
    print(f"recording calls {ratio(WHOLE, PLAIN)}, operators too {ratio(OPERATORS, CALLS)} more")
    kinds = (WHOLE, COPIES, NONE)
    print(
        f"{'part of a step, ms':<24} " + " ".join(f"{kind:>9}" for kind in kinds) + f" {'saved':>9}"
    )
    saved = {}
    for part in (*PARTS, "step"):
        saved[part] = differences(parts, part, WHOLE, NONE)
        medians = [1000 * statistics.median(row[part] for row in parts[kind]) for kind in kinds]
        less, reach = middle(saved[part])
        said = " ".join(f"{number:9.2f}" for number in medians)
        print(f"{PARTS.get(part, part):<24} {said} {1000 * less:9.2f} +- {1000 * reach:.2f}")
    copying, reach = middle(differences(parts, "step", COPIES, NONE))
    print(f"copies take {1000 * copying:.2f} +- {1000 * reach:.2f} ms")
    # The parts of a step add up to it, so this is the difference in all other parts.
    traced = [a + b for a, b in zip(saved["communication"], saved["waiting"], strict=True)]
    off, reach = middle([a - b for a, b in zip(traced, saved["step"], strict=True)])
    exposed = statistics.median(traced)
    print(
        f"exposed communication and waiting {1000 * exposed:.2f} ms, minus what a step saves:"
        f" {1000 * off:+.2f} +- {1000 * reach:.2f} ms; {off / exposed:+.1%} of it,"
        f" {off / plain:+.2%} of a step"
    )


def differences(
    parts: dict[str, list[dict[str, float]]], part: str, one: str, other: str
) -> list[float]:
    """Returns how much longer a part of a step took, of steps that followed one another."""
    return [a[part] - b[part] for a, b in zip(parts[one], parts[other], strict=True)]


def main() -> int:
    """Measures and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--strategy", default="dp=2")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind; 40")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        return measure(options.folder, options.model, options.rounds)
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-") as name:
        prepare(Path(name), options.model, options.strategy)
        command = [find_mpirun(), "-n", str(RANKS), sys.executable, __file__, "--folder", name]
        command += ["--model", options.model, "--rounds", str(options.rounds)]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=mpirun_environment()
        )
    print(f"{options.model}, {options.strategy}, {options.rounds} steps of each kind")
    show(**json.loads(done.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
