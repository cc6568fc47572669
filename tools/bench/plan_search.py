#!/usr/bin/env python
"""Measures how long the search for a strategy takes, and how good its plans are.

    tools/bench/plan_search.py --zoo [NAME|FILE …] [--devices 8 16] [--machine cpu] [--check]
    tools/bench/plan_search.py --scale [--layers 6 12 24 48 96] [--devices 1024] [--check]

--zoo compares halving (`recursive`) with the exact search (`ilp`), forward and in training. The
networks are those of models/zoo.py, GPT-2 and Llama with 32 layers, and a GPT of 32 layers in the
sizes of a model of 7 billion parameters; or those that you name (a file is an ONNX model). For each
search, the table has its CPU seconds, the cost of a step, and the gap to the proved bound.

--scale runs `onnxpar plan` for a GPT in the sizes of one of 175 billion parameters, with more and
more layers. It prints the CPU seconds of each phase, and the exponent of a power law through the
totals.

Networks are exported once into --models, a folder. With --check, the exit code is 1 if a goal is
missed. The goals of --zoo are halving in 2 s at no more than 1.10 times the exact cost, and a gap
of 1 % in 60 s. The goals of --scale are an exponent of 1.1, and 30 s for the largest model.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import numpy as np

from onnxpar.api.plan_strategy import plan_strategy, read_workload, searching
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import collect_rarely
from onnxpar.core.errors import OnnxparError
from onnxpar.search.find_plan import Found
from onnxpar.search.limited_search import search
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, load_strategy, resolve
from onnxpar.strategy.save import write_strategy

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"batch": 64, "seq": 64}
ALL_SIZES = {**SIZES, "target": 48}
"""Of all networks; each has some of them."""
RATIO, HALVING, EXACT, GAP = 1.10, 2.0, 60.0, 0.01
EXPONENT, LARGEST = 1.1, 30.0
DEEP = {"gpt2-32": ("gpt2", "32"), "llama-32": ("llama", "32")}
"""Networks of the zoo with more layers."""
SEVEN = {"d-model": 4096, "heads": 32, "vocab": 32000, "max-positions": 2048, "layers": 32}
LARGE = {"d-model": 12288, "heads": 96, "vocab": 50304, "max-positions": 2048}


@dataclass(frozen=True)
class Timed:
    """A search's result and the processor's seconds that it took."""

    found: Found
    seconds: float


def exported(name: str, folder: Path) -> Path:
    """Returns the file of a network, which is exported where the folder does not have it."""
    path = Path(name) if name.endswith(".onnx") else folder / f"{name}.onnx"
    if path.exists():
        return path
    if name == "gpt-7b":
        command = ["transformer.py", "--no-weights", *flags(SEVEN)]
    elif name.startswith("gpt-"):
        layers = int(name.removeprefix("gpt-"))
        command = ["transformer.py", "--no-weights", *flags({**LARGE, "layers": layers})]
    elif name in DEEP:
        command = ["zoo.py", DEEP[name][0], "--layers", DEEP[name][1]]
    else:
        command = ["zoo.py", name]
    script = str(ROOT / "models" / command[0])
    done = subprocess.run(
        [sys.executable, script, *command[1:], "-o", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{name}: {(done.stderr.strip().splitlines() or ['not exported'])[-1]}")
    return path


def flags(sizes: Mapping[str, int]) -> list[str]:
    """Returns sizes as options of an exporter."""
    return [text for name, size in sizes.items() for text in (f"--{name}", str(size))]


def zoo() -> list[str]:
    """Returns the names of the networks."""
    listed = subprocess.run(
        [sys.executable, str(ROOT / "models" / "zoo.py"), "--list"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [*(line.split()[0] for line in listed.stdout.splitlines()), *DEEP, "gpt-7b"]


def strategy(
    algorithm: str, devices: int, machine: str, sizes: Mapping[str, int] = SIZES
) -> Strategy:
    """Returns what leaves everything to a search."""
    wanted = searching(load_strategy(f"auto:{algorithm}", devices))
    entry = wanted.search.model_copy(update={"machine": machine, "sizes": sizes})
    return replace(wanted, search=entry)


def timed(workload: Workload, wanted: Strategy) -> Timed:
    """Searches."""
    seeds = resolve(wanted, workload.program)
    began = process_time()
    found = search(wanted, workload, seeds)
    return Timed(found, process_time() - began)


def compare(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Prints the table of networks; gives what is missed."""
    print(
        "| network | workload | nodes | devices | recursive, s | a step, ms | ilp, s | a step, ms "
        "| gap | ratio |\n|" + " --- |" * 10
    )
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
    machine = options.machine
    for name in options.zoo or zoo():
        path = exported(name, folder)
        for what, training in (("forward", None), ("training", spec)):
            workload = read_workload(path, {}, training)
            nodes = len(list(workload.program.graph))
            for devices in options.devices or (8, 16):
                label = f"{name} {what}, {devices} devices"
                begin = f"| {name} | {what} | {nodes} | {devices} |"
                try:
                    halved = timed(workload, strategy("recursive", devices, machine, ALL_SIZES))
                    exact = timed(workload, strategy("ilp", devices, machine, ALL_SIZES))
                except OnnxparError as error:
                    print(f"{begin} {error} |", flush=True)
                    yield f"{label}: {error}"
                    continue
                chosen = exact.found.chosen
                cost, least = halved.found.chosen.seconds, chosen.seconds
                bound = min(c.bound for c in exact.found.candidates if not c.reason)
                gap = max(0.0, 1 - bound / least) if least else 0.0
                ratio = cost / least if least else 1.0
                print(
                    f"{begin} {halved.seconds:.2f} | {cost * 1e3:.4g} | {exact.seconds:.2f} | "
                    f"{least * 1e3:.4g} | {gap:.2%} | {ratio:.3f} |",
                    flush=True,
                )
                if halved.seconds > HALVING:
                    yield f"{label}: halving takes {halved.seconds:.2f} s"
                if ratio > RATIO:
                    yield f"{label}: halving costs {ratio:.3f} times the optimum"
                if exact.seconds > EXACT or gap > GAP:
                    yield f"{label}: a gap of {gap:.2%} in {exact.seconds:.1f} s"


def scale(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Prints the seconds of planning by the number of layers; gives what is missed."""
    print("| layers | nodes | reading | searching | pricing | writing | all | wall |")
    print("|" + " --- |" * 8)
    devices = (options.devices or [1024])[0]
    counts, totals = [], []
    for layers in options.layers:
        path = exported(f"gpt-{layers}", folder)
        wanted = strategy(options.algorithm, devices, options.machine)
        stages: list[float] = []
        began = perf_counter()

        def progress(stage: str, number: int, count: int, stages: list[float] = stages) -> None:
            if len(stages) < 2 or (len(stages) == 2 and stage.startswith("pricing")):
                stages.append(process_time())

        planned = plan_strategy(path, wanted, progress=progress)
        stages.append(process_time())
        write_strategy(planned.data, "")
        stages.append(process_time())
        wall = perf_counter() - began
        counts.append(len(list(planned.program.model.graph)))
        totals.append(stages[-1] - stages[0])
        cells = [b - a for a, b in pairwise(stages)]
        print(
            f"| {layers} | {counts[-1]} | "
            + " | ".join(f"{s:.2f}" for s in (*cells, totals[-1], wall))
            + " |",
            flush=True,
        )
    if len(counts) > 1:
        exponent = float(np.polyfit(np.log(counts), np.log(totals), 1)[0])
        each, least = np.polyfit(counts, totals, 1)
        print(
            f"seconds = {least:.2f} + {each * 1e3:.3f}e-3 · nodes; as a power of the nodes, the "
            f"exponent is {exponent:.2f}"
        )
        if exponent > EXPONENT:
            yield f"the exponent is {exponent:.2f}"
    if totals[-1] > LARGEST:
        yield f"{options.layers[-1]} layers take {totals[-1]:.1f} s"


def main() -> int:
    """Prints the table that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--zoo", nargs="*", metavar="NAME|FILE")
    what.add_argument("--scale", action="store_true")
    parser.add_argument(
        "--devices", nargs="+", type=int, help="by default 8 and 16 for --zoo, 1024 for --scale"
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 24, 48, 96])
    parser.add_argument("--algorithm", default="recursive", help="the algorithm of --scale")
    parser.add_argument("--machine", default="h100", help="a preset or a file")
    parser.add_argument("--models", type=Path, help="a folder that keeps exported networks")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    options = parser.parse_args()
    collect_rarely()  # as `onnxpar plan` does
    with TemporaryDirectory(prefix="onnxpar-plan-") as scratch:
        folder = options.models or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        missed = list((scale if options.scale else compare)(options, folder))
    for line in missed:
        print(f"missed: {line}", flush=True)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
