#!/usr/bin/env python3
"""Measures onnxpar on GPUs: losses as on the CPU, times of steps, collectives, share of products.

    tools/bench/gpu.py                         # everything, on the GPUs of this machine
    tools/bench/gpu.py --quick                 # tiny models: does every part run?
    tools/bench/gpu.py --device cpu --quick    # without a GPU: the parts that have a CPU side

`tools/test-gpu` calls this script after the tests. Each part prints a table (`--only` selects
parts):

- parity: compares the losses of 20 steps on 1, 2 and 4 ranks of the device with those of one CPU
  rank; they must agree within a relative difference of 1e-4.
- steps: compares a training step with PyTorch's on the same GPU, eager (goal 1.0) and compiled
  (goal 1.1). The sides take turns in one run, as in tools/bench/step.py. The model is the GPT of 12
  layers, d 1024, in bfloat16 and in float32. Data and tensor parallel runs have several ranks, one
  for each GPU, or all on one if there is only one; tensors travel by NCCL, or staged through the
  host. The last column is the share of a step that its matrix products would take at the rate of
  one large product.
- collectives: compares AllReduce in a session with ncclAllReduce itself
  (tools/bench/gpu_collectives.py).

Exit codes: 0; 1 if parity does not hold or a side of onnxpar's fails, or if a goal is missed and
--check is given; 3 if there is no GPU, so that nothing ran.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from step_cases import BATCHES, Job, Side
from step_sides import PreparedModels, Row, SideError, measure

from onnxpar_runtime.devices import SHARES, SHARES_SINCE, describe, machine, obstacle
from onnxpar_runtime.launch import find_mpirun, mpirun_environment, own_messages

HERE = Path(__file__).resolve().parent
PARTS = ("parity", "steps", "collectives")
NOTHING_RAN = 3
PARITY = 1e-4  # of the loss; rounding grows with training
EAGER_GOAL, COMPILED_GOAL = 1.0, 1.1
RANKS = (2, 4)


def parity(
    device: str, prepared: PreparedModels, quick: bool, tell: Callable[[str], None]
) -> list[str]:
    """Compares losses of 20 steps with those of one rank on the CPU; returns what does not hold."""
    base = Side("onnxpar", "one", 1, 2)
    sides = [base, replace(base, device=device)]
    for ranks in RANKS:
        sides += [Side("onnxpar", way, ranks, 1, device) for way in ("dp", "tp")]
    tell(f"parity: losses of {BATCHES} steps beside one CPU rank, at most {PARITY:g} apart")
    tell(f"{'model':8s} {'side':24s} {'difference':>12s}")
    wrong = []
    for model in ("mlp", "gpt"):
        job = Job(model=model, optimizer="adamw", quick=quick)
        for side in sides[1:]:
            name = f"{side.label} {device}"
            try:
                # By pairs: not all that a side needs fits beside all others on one GPU.
                found = measure([base, side], job, prepared, 1, 0.0)[1]
            except SideError as error:
                # The others are compared all the same.
                tell(f"{model:8s} {name:24s} failed: {_last(error)}")
                wrong.append(f"parity: {model} {name}: failed")
                continue
            tell(f"{model:8s} {name:24s} {found.difference:12.1e}")
            if not found.difference <= PARITY * found.least:
                wrong.append(f"parity: {model} {name}: losses differ by {found.difference:.2g}")
    return wrong


def products(model: str, quick: bool) -> float:
    """Floating-point operations of a step's matrix products: three times those of the forward."""
    case = Job(model=model, optimizer="adamw", quick=quick).case
    if not case.tokens:
        widths = [28 * 28, *map(int, case.options[1:]), case.classes]
        return 6.0 * case.shape[0] * sum(a * b for a, b in pairwise(widths))
    options = dict(zip(case.options[::2], case.options[1::2], strict=True))
    width, layers, vocab = (int(options[f"--{k}"]) for k in ("d-model", "layers", "vocab"))
    batch, seq = case.shape
    # Of a token and layer: 12 d^2 weights, and the products of attention with seq keys and values.
    return 6.0 * batch * seq * (layers * (12 * width**2 + 2 * seq * width) + vocab * width)


def gemm_rate(device: str, compute: str, quick: bool) -> float:
    """Operations a second of a large matrix product, in a process of its own."""
    size = 512 if quick else 8192
    command = [sys.executable, str(HERE / "gpu_gemm.py"), device, compute or "float32", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SideError(f"gpu_gemm.py failed:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def cases(device: str, gpus: int, shares: bool) -> list[tuple[str, str, list[Side]]]:
    """Returns model, compute type and sides of each table; the first side is the reference.

    Args:
        device: `cuda` or `cpu`.
        gpus: Number of GPUs.
        shares: Whether NCCL knows ranks that share a GPU.
    """

    def one(system: str, way: str, compute: str) -> Side:
        return Side(system, way, 1, 2, device, compute)

    found = []
    # The CPU has no kernels of bfloat16: only a GPU computes in it.
    computes = ("bfloat16", "") if device == "cuda" else ("",)
    for model in ("mlp", "gpt", "gpt1024"):
        for compute in computes if model == "gpt1024" else ("",):
            ways = [("torch", "one"), ("torch", "compile"), ("onnxpar", "one")]
            if device == "cpu":
                del ways[1]  # compiling for the CPU takes minutes, and says nothing here
            sides = [one(system, way, compute) for system, way in ways]
            for ranks in RANKS[:1] if gpus < 4 else RANKS:
                for way in ("dp", "tp"):
                    for transport in ("nccl", "mpi") if gpus >= ranks or shares else ("mpi",):
                        wide = Side("onnxpar", way, ranks, 1, device, compute, transport)
                        sides.append(wide)
            found.append((model, compute, sides))
    return found


def steps(
    device: str,
    tables: Sequence[tuple[str, str, list[Side]]],
    prepared: PreparedModels,
    quick: bool,
    rounds: int,
    tell: Callable[[str], None],
) -> tuple[list[str], list[str]]:
    """Times the steps of `cases`; returns what failed, and which goals do not hold."""
    failed, missed = [], []
    rates = {c: gemm_rate(device, c, quick) for _, c, _ in tables}
    for compute, rate in rates.items():
        tell(f"GEMM {compute or 'float32'}: {rate / 1e12:.2f} TFLOP/s")
    tell(
        f"{'model':8s} {'compute':9s} {'side':18s} {'ms/step':>9s} {'of eager':>9s} "
        f"{'loss diff.':>10s} {'GEMM share':>10s}"
    )
    for model, compute, sides in tables:
        job = Job(model=model, optimizer="adamw", quick=quick)
        base = sides[0]
        compiled = None
        reference_shown = False
        for side in sides[1:]:
            try:
                rows = measure([base, side], job, prepared, rounds, 0.05 if quick else 1.0)
            except SideError as error:
                # A side that cannot run here is reported, and the others are measured.
                tell(
                    f"{model:8s} {compute or 'float32':9s} {side.label:18s} failed: {_last(error)}"
                )
                if side.system == "onnxpar":
                    failed.append(f"steps: {model} {compute or 'float32'} {side.label} failed")
                continue
            ideal = products(model, quick) / rates[compute] / side.ranks
            for row in rows[reference_shown:]:
                tell(_line(row, compute, ideal))
            reference_shown, row = True, rows[1]
            if side.way == "compile":
                compiled = row.ratio
            if side.system == "onnxpar" and side.ranks == 1:
                goals = [("eager", EAGER_GOAL)]
                ratios = [row.ratio]
                if compiled is not None:
                    goals.append(("compiled", COMPILED_GOAL))
                    ratios.append(row.ratio / compiled)
                for (name, goal), ratio in zip(goals, ratios, strict=True):
                    if ratio > goal:
                        missed.append(
                            f"steps: {model} {compute or 'float32'}: {ratio:.3f} times PyTorch "
                            f"{name}, at most {goal:.1f} is wanted"
                        )
    return failed, missed


def _line(row: Row, compute: str, ideal: float) -> str:
    seconds = statistics.median(row.seconds)
    return (
        f"{row.model:8s} {compute or 'float32':9s} {row.side.label:18s} {seconds * 1e3:9.2f} "
        f"{row.ratio:9.3f} {row.difference:10.1e} {ideal / seconds:10.1%}"
    )


def _last(error: SideError) -> str:
    said = own_messages(str(error)) or [line for line in str(error).splitlines() if line.strip()]
    return said[-1][:600] if said else "nothing was said"


def collectives(gpus: int, quick: bool, tell: Callable[[str], None]) -> list[str]:
    """Times AllReduce in sessions beside NCCL's own; returns what failed."""
    ranks = max(2, min(gpus, 8))
    command = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command += [sys.executable, str(HERE / "gpu_collectives.py"), *(["--quick"] if quick else [])]
    # Rows that were made before ranks hang or fail are reported.
    process = subprocess.Popen(
        command, env=mpirun_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    late = ""
    try:
        out, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, errors = process.communicate()
        late = " after 600 s"
    tell(out.rstrip())
    if process.returncode == 0:
        return []
    said = own_messages(errors) or errors.strip().splitlines() or ["nothing was said"]
    return [f"collectives: failed{late}: {said[0]}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9, help="number of turns of each side")
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    options = parse(arguments)
    facts = machine()
    print("\n".join(describe(facts)), flush=True)
    if options.device == "cuda" and (why := obstacle(facts)):
        print(f"nothing ran on a GPU: {why}")
        return NOTHING_RAN
    if options.device == "cpu":
        print("nothing here runs on a GPU: --device cpu only tries the parts that have a CPU side")
    gpus = len(facts.gpus) if options.device == "cuda" else 0
    shares = gpus > 0 and facts.nccl >= SHARES_SINCE
    # Ranks of one communicator on one GPU, which NCCL refuses otherwise.
    os.environ.setdefault(SHARES, "1")

    def tell(line: str) -> None:
        print(line, flush=True)

    wrong: list[str] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="onnxpar-gpu-") as name:
        prepared = PreparedModels(Path(name), options.quick)
        if "parity" in options.only:
            wrong += parity(options.device, prepared, options.quick, tell)
        if "steps" in options.only:
            rounds = 2 if options.quick else options.rounds
            if gpus == 1:
                tell("one GPU: several ranks share it, so their steps take longer than one rank's")
            tables = cases(options.device, gpus, shares)
            failed, missed = steps(options.device, tables, prepared, options.quick, rounds, tell)
            wrong += failed
    if "collectives" in options.only and (gpus > 1 or shares):
        wrong += collectives(gpus, options.quick, tell)
    elif "collectives" in options.only:
        tell("collectives: none without two GPUs, or an NCCL that lets ranks share one")
    for line in wrong:
        tell(f"wrong: {line}")
    for line in missed:
        tell(f"missed: {line}")
    return 1 if wrong or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
