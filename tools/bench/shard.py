#!/usr/bin/env python3
"""Measures how long `onnxpar shard` takes, and how much memory.

    tools/bench/shard.py                    # both parts, 1 GiB of weights
    tools/bench/shard.py graph --layers 12 96
    tools/bench/shard.py weights --gib 4

graph: models of GPT-3's shape (d 12288, 96 heads, vocabulary 50257; Brown et al. 2020) of 12 to 96
layers, from the file to one rank's graph file, weights left where they are. Goal: 96 layers in less
than 10 s and 1 GiB, time linear in the layers.

weights: a model with real weights sharded over 4 ranks, and `cp` of the same bytes beside it in the
same run: shard, cp, shard, cp and so on, so that what else the machine does slows both. Neither is
followed by an fsync: a time ends when the bytes are with the operating system. Goal: less than
1 GiB of memory, at least half the speed of `cp` in the median of the pairs. Shard uses two
processors or more and `cp` one, so that other work slows shard more: processor times tell both.

Every measurement is a process of its own; memory is its peak resident set, the interpreter's too.
The exit code is 1 if a goal is missed.
"""

import argparse
import cProfile
import json
import os
import pstats
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from bench_options import peak_memory

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 1 << 20, 1 << 30
GPT3 = {"d_model": 12288, "heads": 96, "vocab": 50257, "max_positions": 2048}
SMALL = {"d_model": 4096, "heads": 32, "vocab": 8192, "max_positions": 2048}
BLOCK = 64 * MIB


def export(folder: Path, layers: int, sizes: dict[str, int]) -> Path:
    """Writes a transformer whose weights are a sparse file, and returns its path."""
    path = folder / f"layers{layers}.onnx"
    fields = {"layers": layers, **sizes}
    options = [x for k, v in fields.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    script = str(ROOT / "models" / "transformer.py")
    command = [sys.executable, script, "-o", str(path), "--no-weights"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return path


def measure(task: str, *arguments: object) -> Iterator[dict[str, Any]]:
    """Runs a task of this file in a process of its own and yields what it measures, when it does.

    Raises:
        subprocess.CalledProcessError: The task failed.
    """
    command = [sys.executable, __file__, "--task", task, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def graph_task(model: str, strategy: str, out: str, profile: str) -> None:
    """From the file to one rank's graph file, without its weights."""
    # Imports are a part of what a user waits for; they are measured too, and named.
    laps: dict[str, float] = {}
    last = perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = perf_counter()
        laps[name] = now - last
        last = now

    from onnxpar.api.shard_model import analyse, partition_forward
    from onnxpar.emit.rank_graph import fill, template
    from onnxpar.emit.weight_layout import layout
    from onnxpar.frontend.load import load
    from onnxpar.report.inspect_data import directory_data
    from onnxpar.strategy import load_strategy

    lap("import")
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    given = load_strategy(strategy, None)
    loaded = load(model)
    lap("load")
    program = analyse(loaded, given.symbols)
    lap("analyse")
    (parted,) = partition_forward(program, given, given.symbols).programs
    lap("partition")
    directory_data((parted,))
    lap("report")
    # As the output directory is written, but for the weights and the other ranks.
    form = template(parted, layout(parted.parameters, parted.plan.mesh))
    Path(out).write_bytes(fill(form, 0).SerializeToString())
    lap("emit")
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    result = {
        "laps": laps,
        "nodes": len(parted.builder.nodes),
        "bytes": Path(out).stat().st_size,
        "peak": peak_memory(),
    }
    print(json.dumps(result))


def weights_task(model: str, strategy: str, folder: str, repeats: str) -> None:
    """All of `onnxpar shard`, and `cp` of its weights, in turn."""
    from onnxpar.api.shard_model import shard_model

    data = f"{model}.data"
    copy, out = Path(folder) / "copy", Path(folder) / "out"
    # Memory that a virtual machine has not used for some seconds is slow at first touch: each is
    # measured right after files of the same size were written and removed, the first one too. And
    # what is still on its way to the disk must not be paid for by what is measured next.
    _copy(data, copy)
    for _ in range(int(repeats)):
        os.sync()
        begun, used = perf_counter(), process_time()
        summary = shard_model(model, strategy, out)
        seconds, used = perf_counter() - begun, process_time() - used
        peak = peak_memory()
        shutil.rmtree(out)
        os.sync()
        copied, copied_cpu = _copy(data, copy)
        result = {
            "cp": copied,
            "cp_cpu": copied_cpu,
            "shard": seconds,
            "write": summary.seconds["write"],
            "cpu": used,
            "peak": peak,
        }
        print(json.dumps(result), flush=True)


def _copy(source: str, target: Path) -> tuple[float, float]:
    """Returns the seconds that `cp` takes, and its processor time."""
    begun, used = perf_counter(), _children_time()
    subprocess.run(["cp", source, target], check=True)
    seconds, used = perf_counter() - begun, _children_time() - used
    target.unlink()
    return seconds, used


def _children_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def graph(folder: Path, layers: list[int], strategy: str, profile: bool) -> bool:
    """Prints the first table; returns whether the goals are met."""
    print(f"graph: GPT-3's shape, strategy {strategy}, one rank's file, weights not read")
    met, base = True, 0.0
    for count in layers:
        model = export(folder, count, GPT3)
        (result,) = measure("graph", model, strategy, folder / "rank.onnx", "x" * profile)
        seconds = sum(result["laps"].values())
        parts = "  ".join(f"{name} {took:.2f}" for name, took in result["laps"].items())
        print(
            f"{count:4d} layers  {result['nodes']:6d} nodes  {seconds:6.2f} s  "
            f"{result['peak'] / MIB:5.0f} MiB  file {result['bytes'] / MIB:.1f} MiB  ({parts})",
            flush=True,
        )
        model.unlink()
        model.with_name(model.name + ".data").unlink()
        # Without what does not depend on the layers, a line through the origin is what is wanted.
        each = (seconds - result["laps"]["import"]) / count
        base = base or each
        if count == 96:
            met &= seconds < 10 and result["peak"] < GIB
        if each > 1.5 * base:
            print(f"     not linear: {each:.4f} s a layer, {base:.4f} s at {layers[0]} layers")
            met = False
    return met


def weights(folder: Path, gib: float, strategy: str, repeats: int) -> bool:
    """Prints the second table; returns whether the goals are met."""
    a_layer = 12 * SMALL["d_model"] ** 2 * 4
    model = export(folder, max(1, round(gib * GIB / a_layer)), SMALL)
    data = model.with_name(model.name + ".data")
    size = data.stat().st_size
    _fill(data, size)
    print(
        f"weights: {size / GIB:.2f} GiB, strategy {strategy}; cp of the same bytes runs beside it, "
        f"in turn, {repeats} times each; no fsync after either; load average "
        f"{os.getloadavg()[0]:.1f} before the start",
        flush=True,
    )
    turns = []
    for turn in measure("weights", model, strategy, folder, repeats):
        turns.append(turn)
        print(
            f"  shard {turn['shard']:6.2f} s, of which writing {turn['write']:6.2f} s, processor "
            f"time {turn['cpu']:6.2f} s   cp {turn['cp']:6.2f} s, processor time "
            f"{turn['cp_cpu']:6.2f} s   shard at {turn['cp'] / turn['shard']:.2f} of the speed of "
            f"cp",
            flush=True,
        )
    seconds = statistics.median(turn["shard"] for turn in turns)
    copied = statistics.median(turn["cp"] for turn in turns)
    wrote = statistics.median(turn["cp"] / turn["write"] for turn in turns)
    ratios = [turn["cp"] / turn["shard"] for turn in turns]
    ratio = statistics.median(ratios)
    peak = max(turn["peak"] for turn in turns)
    print(
        f"  medians: shard {size / MIB / seconds:.0f} MiB/s, cp {size / MIB / copied:.0f} MiB/s; "
        f"the pairs {ratio:.2f} of the speed of cp, from {min(ratios):.2f} to {max(ratios):.2f} "
        f"(writing alone {wrote:.2f}); peak {peak / MIB:.0f} MiB"
    )
    return bool(ratio >= 0.5 and peak < GIB)


def _fill(path: Path, size: int) -> None:
    """Makes a sparse file real: random bytes, a block of them over and over."""
    import random

    block = random.Random(0).randbytes(BLOCK)
    with path.open("r+b") as stream:
        for start in range(0, size, BLOCK):
            stream.write(block[: size - start])


def main() -> int:
    """Runs the parts that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", nargs="?", choices=["graph", "weights", "both"], default="both")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of weights")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of shard and cp")
    parser.add_argument("--graph-strategy", default="dp=2,tp=8")
    parser.add_argument("--weights-strategy", default="tp=4")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument(
        "--dir", type=Path, help="where to write; it needs room for twice the weights"
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1 pair is needed")
    if options.gib <= 0:
        parser.error(f"--gib {options.gib:g}: must be positive")
    met = True
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-", dir=options.dir) as name:
        folder = Path(name)
        if options.part in ("graph", "both"):
            met &= graph(folder, options.layers, options.graph_strategy, options.profile)
        if options.part in ("weights", "both"):
            met &= weights(folder, options.gib, options.weights_strategy, options.repeats)
    print("goals met" if met else "goals missed")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        {"graph": graph_task, "weights": weights_task}[sys.argv[2]](*sys.argv[3:])
    else:
        sys.exit(main())
