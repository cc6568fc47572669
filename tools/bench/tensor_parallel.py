#!/usr/bin/env python
"""Compares the preset `tp=N` with propagation alone, and with a strategy written by an expert.

    tools/bench/tensor_parallel.py [NAME|FILE …] [--preset tp=2] [--models FOLDER]

For each network of models/zoo.py (or those that you name; a file is an ONNX model), the script
prints the bytes that a device sends in one forward run, at typical sizes of the symbols and at
sixteen times these sizes, the bytes of parameters that it holds, and how many nodes are sharded.
Bytes are those of the collectives in the ranks' graphs, as rings send them. They include resharding
the outputs to the shardings that propagation gives them. An expert's strategy is the file
`tests/experts/PRESET/NAME.yaml`, or else `tests/experts/NAME.yaml` on the mesh of the preset.
Networks are exported once into --models, a folder.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from plan_search import exported
from yaml import safe_load

from onnxpar.api.plan_strategy import read_workload
from onnxpar.core.machine import Link, Machine
from onnxpar.cost.growth import large_sizes
from onnxpar.graph.local_builder import Collective
from onnxpar.graph.plan import Plan
from onnxpar.graph.shapes import itemsize
from onnxpar.partition.partition import partition
from onnxpar.resharding.routes import ReshardStep, plan_reshard
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, load_strategy, resolve

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = ROOT / "tests" / "experts"
WIRE = Machine("wire", {"float32": 1e30}, 1e30, 1 << 62, 0.0, (Link(0, 1.0, 0.0),))
"""A second is a byte that is sent; computing takes no time."""


@dataclass(frozen=True)
class Sent:
    """A plan in numbers.

    Attributes:
        typical: Bytes that a device sends at typical sizes.
        large: Bytes that a device sends at large sizes.
        held: Bytes of parameters that a device holds.
        sharded: Number of nodes that are sharded.
    """

    typical: int
    large: int
    held: int
    sharded: int


def sent(workload: Workload, plan: Plan, outputs: Plan) -> Sent:
    """Returns a plan in numbers; its outputs are brought to the shardings of another plan."""
    program = workload.program
    table = program.env.table
    calls: list[Collective | ReshardStep] = [*partition(program, plan).builder.collectives]
    for value in program.graph.outputs:
        made, wanted = (p.outputs[value.name or ""] for p in (plan, outputs))
        calls += plan_reshard(made, wanted, plan.mesh, table, itemsize(value))

    def bytes_at(sizes: Mapping[str, int]) -> int:
        return sum(table.typical(call.bytes, sizes) for call in calls)

    return Sent(
        bytes_at({}),
        bytes_at(large_sizes(program)),
        workload.price(plan, WIRE, {}).held,
        sum(any(node.factors.values()) for node in plan.nodes.values()),
    )


def compare(path: Path, preset: str) -> Iterator[tuple[str, Sent, float]]:
    """Yields the name of each plan of a model, what it sends, and the seconds to make it."""
    workload = read_workload(path, {})
    started = process_time()
    seeds = resolve(load_strategy(preset), workload.program)
    propagated = workload.plan(seeds)
    yield "propagation", sent(workload, propagated, propagated), process_time() - started
    started = process_time()
    decided = workload.plan(decide_parameter_axes(seeds, workload))
    yield preset, sent(workload, decided, propagated), process_time() - started
    expert, own = EXPERTS / f"{path.stem}.yaml", EXPERTS / preset / f"{path.stem}.yaml"
    if expert.exists():
        started = process_time()
        data = safe_load((own if own.exists() else expert).read_text())
        if not own.exists():
            data["mesh"] = dict(load_strategy(preset).axes)
        plan = workload.plan(resolve(Strategy.from_dict(data), workload.program))
        yield "expert", sent(workload, plan, propagated), process_time() - started


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME|FILE")
    parser.add_argument("--preset", default="tp=2")
    parser.add_argument("--models", type=Path, help="a folder that keeps exported networks")
    options = parser.parse_args()
    print("| network | plan | bytes sent | at large sizes | parameters held | nodes sharded | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with TemporaryDirectory(prefix="onnxpar-tp-") as scratch:
        folder = options.models or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.names or sorted(path.stem for path in EXPERTS.glob("*.yaml")):
            path = exported(name, folder)
            for plan, found, seconds in compare(path, options.preset):
                print(
                    f"| {path.stem} | {plan} | {found.typical:,.0f} | {found.large:.3g} | "
                    f"{found.held:,} | {found.sharded} | {seconds:.2f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
