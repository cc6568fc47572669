#!/usr/bin/env python3
"""Compares training steps on two nodes with and without overlap, and with PyTorch's, in one run.

    tools/bench/two_nodes.py                       # the GPT of tools/bench/step.py, SGD, 1 Gbit/s
    tools/bench/two_nodes.py --rate 10gbit --optimizer adamw
    tools/bench/two_nodes.py --quick               # tiny model: does every side run, and agree?

All steps are data parallel over 2 ranks with 1 thread each. A node is a network namespace of
tools/two-nodes, which acts as a machine. First both ranks are on one node: this shows how long the
computation takes, and its forward pass alone. Then each rank is on a node of its own. The sides are
onnxpar at several levels of optimizer parallel, with and without overlap; PyTorch's
DistributedDataParallel over gloo, if PyTorch is installed; and a plain socket that sends in both
directions at once. Turns are as in tools/bench/step.py; the losses of the first steps must equal
those on one node to 5 decimals.

The table has the median and the least time of a step, its CPU time (both ranks), its two parts, the
bytes that a node sends (counted by its network interface), and the time that the wire needs for
them at the socket's rate. A second table says how much overlap hides of what it can hide:

    (step without overlap - step with overlap) / min(computation, wire)

The computation is the backward pass, or from level 1 on, where parameters are gathered in the
forward pass, both passes. The second table is of least times, because other work on the machine
only makes times longer, and it may change medians by more than overlap does.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import step_socket
from bench_options import conditions, parser_of, with_rounds
from step_cases import MODELS, OPTIMIZERS, Job, Side
from step_sides import DECIMALS, PreparedModels, Row, measure

LEVELS = (0, 1, 3)
COMPARED = 5  # steps whose losses are compared
BOTH_PASSES = 1  # the first level that communicates in the forward pass
ONE_NODE = Side("onnxpar", "dp", 2, 1)
FORWARD = Side("onnxpar", "forward", 2, 1)


def sides(rate: str, levels: Sequence[int]) -> list[Side]:
    """All sides; the first is what the others are compared with."""
    found = [ONE_NODE, FORWARD, Side("socket", "wire", 2, 1, link=rate)]
    for level in levels:
        ours = Side("onnxpar", "dp", 2, 1, link=rate, level=level)
        found += [ours, replace(ours, overlap=False)]
    if find_spec("torch") is not None:
        found.append(Side("torch", "dp", 2, 1, link=rate))
    return found


def middle(values: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return statistics.median(values) * 1e3


def line(row: Row, rate: float) -> str:
    """A row of the first table."""
    parts = [middle(row.parts[p]) for p in ("forward_backward", "update")]
    sent = statistics.median(row.sent)
    numbers = [middle(row.seconds), min(row.seconds) * 1e3, middle(row.processor), *parts]
    place = f"at {row.side.link}" if row.side.link else "one node"
    return (
        f"{row.side.label:34s}{place:10s}{' '.join(f'{x:9.0f}' for x in numbers)}"
        f"{sent / 1e6:9.1f} {sent / rate * 1e3:9.0f} {row.difference:10.1e}"
    )


def hidden(rows: Sequence[Row], rate: float) -> list[str]:
    """The second table."""
    by_side = {row.side: row for row in rows}
    both = min(by_side[ONE_NODE].parts["forward_backward"])
    backward = both - min(by_side[FORWARD].seconds)
    lines = []
    for row in rows:
        alone = by_side.get(replace(row.side, overlap=False))
        if not row.side.link or not row.side.overlap or alone is None:
            continue
        computation = both if row.side.level >= BOTH_PASSES else backward
        wire = statistics.median(row.sent) / rate
        saved = min(alone.seconds) - min(row.seconds)
        lines.append(
            f"level {row.side.level}: {saved * 1e3:6.0f} ms saved; computation "
            f"{computation * 1e3:.0f} ms, wire {wire * 1e3:.0f} ms: "
            f"{saved / min(computation, wire):.0%} hidden"
        )
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--level", type=int, nargs="+", choices=range(4), default=list(LEVELS))
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in the form of tc, such as 1gbit"
    )
    return with_rounds(parser, 0.3, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is asked for; the exit code is 1 where losses differ."""
    options = parse(arguments)
    job = Job(model=options.model, optimizer=options.optimizer, quick=options.quick)
    print(
        f"{job.model}, {job.optimizer}, {conditions()}, {options.rounds} rounds",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="onnxpar-bench-") as name:
        prepared = PreparedModels(Path(name), options.quick)
        every = sides(options.rate, options.level)
        rows = measure(every, job, prepared, options.rounds, options.turn, COMPARED)
    (wire,) = [row for row in rows if row.side.system == "socket"]
    rate = step_socket.BYTES / statistics.median(wire.seconds)
    print(f"socket, both directions at once: {rate / 1e6:.1f} MB/s each way")
    titles = ("ms/step", "least", "cpu ms", "fwd+bwd", "update")
    print(f"{'side':34s}{'':10s}{' '.join(f'{t:>9s}' for t in titles)}{'sent MB':>9s} ", end="")
    print(f"{'wire ms':>9s} {'loss diff.':>10s}")
    steps = [row for row in rows if row.side not in (FORWARD, wire.side)]
    for row in steps:
        print(line(row, rate))
    for text in hidden(rows, rate):
        print(text)
    wrong = [row.side.label for row in steps if not row.difference <= DECIMALS]
    for label in wrong:
        print(f"wrong: the losses of {label} are not those of one node")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
