#!/usr/bin/env python3
"""Compares a training step of onnxpar with one of PyTorch, interleaved in one run.

    tools/bench/step.py                       # exported MLP and GPT, SGD and AdamW, all modes
    tools/bench/step.py --model mlp-dynamo --torch-parallel --plot step.svg --json step.json
    tools/bench/step.py --model gpt-dynamo gpt --mode one pp --ranks 2 4 --profile
    tools/bench/step.py --quick               # tiny models: do both sides still run, and agree?

The networks are an MLP at batch 128 and a GPT (4 layers, d 512, 8 heads, seq 128, batch 8,
vocabulary 8192 not tied: 21 M parameters). `mlp` and `gpt` are those of models/mlp.py and
models/transformer.py. Those of step_networks.py (one matrix for queries, keys and values, and
tanh-Gelu) are exported from PyTorch: `gpt-export` by models/export_torch.py, `gpt-dynamo` by
`torch.onnx.export`, `gpt-raw` by `torch.onnx.export(optimize=False)` and `gpt-legacy` by
`torch.onnx.export(dynamo=False)`. `long` and `long-dynamo`, …, are the GPT with 2 sequences of
1,024 tokens, whose attention scores take most of the memory.

Modes are one device with 2 threads; and over the ranks (with 1 thread each) data parallel, tensor
parallel, pipeline parallel with 4 micro-batches and the schedule zb-h1, and optimizer parallel of
level 1 and 3. With --torch-parallel PyTorch's own modes run beside them, over gloo:
DistributedDataParallel, tensor parallel, Schedule1F1B, ZeroRedundancyOptimizer and FSDP2. All sides
begin with the same weights and take the same batches.

Each side has processes of its own, which wait on a socket while other sides have their turn. First
each takes 20 steps, and its losses must equal PyTorch's to 5 decimals. Then come rounds: in each,
every side takes a turn of several steps. A side's ratio is the median, over the rounds, of its time
divided by that of PyTorch's single process in the same round. So other work on the machine slows
both. This does not help if more threads want to run than there are cores: threads that wait
actively for one another, as PyTorch's do, then take many times as long. In that case, look at the
CPU time of a step (cpu ms: that of all threads and ranks, including active waiting), or let
PyTorch's threads sleep with OMP_WAIT_POLICY=passive. A step is all that a user waits for: from
global arrays in memory to the loss as a number.

MiB is the largest resident memory of a rank's process, libraries included.

--profile says for each side of onnxpar what share of the step is matrix products, exposed
communication and idle, by rank, and which operators take the time. Goals are those for 2 ranks on 2
cores. With --check, the exit code is 1 if a goal is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from bench_options import add_results, conditions, parser_of, report_results, with_rounds
from step_cases import MODELS, OPTIMIZERS, Job, Side
from step_plot import plot
from step_profile import profile
from step_sides import PreparedModels, Row, measure

MODES = {
    "one": ("one", 0),
    "dp": ("dp", 0),
    "tp": ("tp", 0),
    "pp": ("pp", 0),
    "level1": ("dp", 1),
    "level3": ("dp", 3),
}
"""Way and level of optimizer parallel by mode."""
BASE = Side("torch", "one", 1, 2)
GOALS = {
    "mlp": {
        "one": (0.68, 0.50),
        "dp": (0.90, 0.65),
        "tp": (0.75, 0.50),
        "pp": (1.2, 0.9),
        "level1": (0.95, 0.70),
        "level3": (1.1, 0.73),
    },
    "gpt": {
        "one": (0.80, 0.80),
        "dp": (0.86, 0.86),
        "tp": (0.85, 0.85),
        "pp": (1.10, 1.10),
        "level1": (0.88, 0.88),
        "level3": (0.95, 0.95),
    },
}
"""The largest ratio by network and mode, with SGD and with AdamW, for 2 ranks on 2 cores."""
LEAST_PARTS = {"mlp": 3}
"""Networks that cannot be cut into more stages than this."""


def sides(system: str, modes: Sequence[str], ranks: Sequence[int], network: str) -> list[Side]:
    """The sides of a system; several ranks have one thread each."""
    found = []
    for mode in modes:
        way, level = MODES[mode]
        for count in (1,) if mode == "one" else ranks:
            if mode == "pp" and count > LEAST_PARTS.get(network, count):
                print(f"{network}, {system} pp{count}: left out, there are fewer parts than stages")
                continue
            found.append(Side(system, way, count, 2 if count == 1 else 1, level=level))
    return found


def goal(row: Row) -> float | None:
    """The largest ratio that a row of a full network may have; None if there is no goal for it."""
    wanted = (row.side.way, row.side.level)
    if row.side.system != "onnxpar" or row.side.ranks > 2:
        return None
    network = row.model.split("-", maxsplit=1)[0]
    for mode, found in GOALS.get(network, {}).items():
        if MODES[mode] == wanted:
            return found[OPTIMIZERS.index(row.optimizer)]
    return None


def tell(rows: Sequence[Row], quick: bool) -> list[str]:
    """Prints a case's lines of the table; returns which goals do not hold."""
    missed = []
    for row in rows:
        most = None if quick else goal(row)
        took = [median(found) * 1e3 for found in (row.seconds, row.processor)]
        numbers = (row.ratio, min(row.ratios), max(row.ratios))
        if row.side.system == "onnxpar":
            missed += row.missed(most)
        print(
            f"{row.model:11s}{row.optimizer:6s} {row.side.label:20s}"
            f"{' '.join(f'{x:9.2f}' for x in took)} {' '.join(f'{x:7.3f}' for x in numbers)} "
            f"{'' if most is None else format(most, '.3f'):>7s} {row.difference:10.1e} "
            f"{row.resident / 2**20:6.0f}",
            flush=True,
        )
    return missed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    default = ["mlp-dynamo", "gpt-dynamo"]
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=default)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="of all but one device")
    parser.add_argument(
        "--torch-parallel", action="store_true", help="also measure PyTorch's own modes"
    )
    parser.add_argument("--ort", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as SVG")
    add_results(parser)
    return with_rounds(parser, 0.5, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for."""
    options = parse(arguments)
    print(
        f"{conditions()}; ratio: median of {options.rounds} rounds, then the least and the "
        f"largest\n"
        f"{'model':11s}{'optim.':6s} {'side':20s}{'ms/step':>9s} {'cpu ms':>9s} {'ratio':>7s} "
        f"{'from':>7s} {'to':>7s} {'goal':>7s} {'loss diff.':>10s} {'MiB':>6s}",
        flush=True,
    )
    every: list[Row] = []
    profiles: dict[tuple[str, str, Side], object] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-") as name:
        prepared = PreparedModels(Path(name), options.quick)
        for model in options.model:
            network = model.split("-", maxsplit=1)[0]
            ours = sides("onnxpar", options.mode, options.ranks, network)
            modes = options.mode if options.torch_parallel else ()
            theirs = sides("torch", modes, options.ranks, network)
            beside = [side for side in theirs if side.ranks > 1]
            for optimizer in options.optimizer:
                job = Job(model=model, optimizer=optimizer, quick=options.quick)
                job = replace(job, options=tuple(options.ort))
                rows = measure([BASE, *ours, *beside], job, prepared, options.rounds, options.turn)
                missed += tell(rows, options.quick)
                every += rows
                for side in ours if options.profile else ():
                    found = profile(side, job, prepared)
                    profiles[model, optimizer, side] = found.data()
                    print("\n".join(found.lines(f"{model} {optimizer} {side.label}")), flush=True)
    if options.plot is not None:
        options.plot.write_text(plot(every), encoding="utf-8")
    data = [
        asdict(row)
        | {"ratio": row.ratio, "profile": profiles.get((row.model, row.optimizer, row.side))}
        for row in every
    ]
    return report_results(options, data, missed)


if __name__ == "__main__":
    sys.exit(main())
