#!/usr/bin/env python
"""What planning promises, measured on this machine.

    tools/bench/plan.py --rank [--model gpt|mlp] [--devices 4] [--strategies 24] [--check]
    tools/bench/plan.py --speed [--devices 2 4] [--check]

--rank: the cost model's order of strategies against the measured one (Spearman's correlation),
forward and training. Strategies are the presets, the one found, and random ones: a random share of
the kinds of nodes gets random options, the rest is searched for around them.

--speed: a step of the plan that `onnxpar plan` finds against the better of pure data and pure
tensor parallelism. The plan found is loaded twice, and the ratio of the two says what measuring
differs by. Where the graphs of all ranks are equal, it is the same program: no ratio is taken.

Ranks are processes under mpirun on this machine; what is compared is run in turns, and the median
of the ratios of one round counts. The machine is measured first by tools/calibrate.py with as many
ranks, unless `--machine` names one. With --check the exit code is 1 where a goal is missed: a
correlation of 0.8, a ratio of 1 or what the same program twice has, whichever is more.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from plan_ranks import MODELS
from scipy.stats import spearmanr
from step_cases import ROOT, Model

from onnxpar.api.plan_strategy import plan_strategy, read_workload, searching
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar.core.mesh import Mesh
from onnxpar.cost.cost_model import CostModel
from onnxpar.graph.seeds import Seeds
from onnxpar.search.eliminate import solve
from onnxpar.search.find_plan import seeds_of
from onnxpar.search.node_options import options
from onnxpar.search.problem import build
from onnxpar.search.rival_plans import rival_presets
from onnxpar.search.value_flow import flow
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, load_strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.save import strategy_data
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

OPTIMIZER = "adamw"
CORRELATION = 0.8
AGAIN = "found again"
SHARES = (0.1, 0.3, 0.6, 1.0)
"""How many of the kinds of nodes are placed at random."""


@dataclass(frozen=True)
class Case:
    """A model to plan for.

    Attributes:
        model: It and its batches.
        path: Its ONNX file.
        training: How it is trained; None for forward only.
        devices: Number of ranks.
        machine: What they are: a preset or a machine file.
    """

    model: Model
    path: Path
    training: TrainingSpec | None
    devices: int
    machine: str

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model's symbols."""
        return dict(zip(("batch", "seq"), self.model.labels, strict=False))

    def price(self, workload: Workload, seeds: Seeds) -> float:
        """Seconds that the cost model gives a step of the plan that follows from seeds."""
        machine = load_machine(self.machine)
        return workload.price(workload.plan(seeds), machine, self.sizes).seconds

    @property
    def label(self) -> str:
        """For tables."""
        return (
            f"{self.model.name} {'training' if self.training else 'forward'}, {self.devices} ranks"
        )


@dataclass(frozen=True)
class Entry:
    """A strategy and what it is predicted to cost."""

    name: str
    data: Mapping[str, Any]
    seconds: float


def priced(case: Case, workload: Workload, name: str) -> Entry:
    """A preset."""
    strategy = load_strategy(name, case.devices)
    seeds = resolve(strategy, workload.program)
    return Entry(name, {"preset": name}, case.price(workload, seeds))


def found(case: Case) -> Entry:
    """The plan that `onnxpar plan` finds."""
    strategy = searching(load_strategy("auto:ilp", case.devices))
    entry = strategy.search.model_copy(update={"machine": case.machine, "sizes": case.sizes})
    strategy = replace(strategy, search=entry)
    planned = plan_strategy(case.path, strategy, training=case.training)
    return Entry("found", planned.data, planned.ways[0].seconds)


def at_random(case: Case, workload: Workload, count: int, seed: int) -> Iterator[Entry]:
    """Strategies in which a random share of the kinds of nodes has random options."""
    rng = random.Random(seed)
    program = workload.program
    seen = flow(program, list(workload.gradients))
    base = resolve(searching(load_strategy("auto", case.devices)), program)
    pairs = [
        {"x": n, "y": case.devices // n} for n in range(2, case.devices) if not case.devices % n
    ]
    meshes = [Mesh.of(axes) for axes in ({"x": case.devices}, *pairs)]
    number = made = 0
    while made < count:
        mesh = meshes[number % len(meshes)]
        cost = CostModel(load_machine(case.machine), mesh, program.env.table, case.sizes)
        axes = [mesh.axis_atoms(name) for name, _ in mesh.axes]
        share = SHARES[number // len(meshes) % len(SHARES)]
        known: dict[object, Any] = {}
        for item in seen.items:
            if item.kind not in known:
                all_of_them = options(item, axes, cost)
                if rng.random() < share:
                    all_of_them = (rng.choice(all_of_them),)
                known[item.kind] = all_of_them
        problem = build(seen, [known[item.kind] for item in seen.items], cost)
        choice = solve(problem).choice
        number += 1
        # Some draws contradict one another: a sum that one leaves partial is made by nobody.
        if problem.seconds(choice) == inf:
            continue
        made += 1
        start = replace(base, mesh=mesh, inputs={})
        seeds = seeds_of(seen, problem.chosen(choice), problem.layouts(choice), start)
        name = f"random {number} ({share:.0%} of {'x'.join(str(n) for _, n in mesh.axes)})"
        yield Entry(name, strategy_data(seeds, program.rules, {}), case.price(workload, seeds))


def measure(
    case: Case, entries: Sequence[Entry], scratch: Path, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, Path]]:
    """Seconds of a step in every round, and the directory, by name, of each that can be sharded."""
    directories: dict[str, Path] = {}
    for number, entry in enumerate(entries):
        out = scratch / f"{case.model.name}-{case.devices}-{bool(case.training)}-{number}"
        name = entry.data.get("preset")
        if name:
            strategy = load_strategy(str(name), case.devices)
        else:
            strategy = Strategy.from_dict(dict(entry.data), case.devices, entry.name)
        try:
            shard_model(case.path, strategy, out, training=case.training)
        except OnnxparError as error:
            print(f"  {entry.name}: cannot be sharded: {error}", flush=True)
            continue
        directories[entry.name] = out
    result = scratch / "times.json"
    job = {
        "model": case.model.name,
        "directories": list(map(str, directories.values())),
        "training": OPTIMIZER if case.training else None,
        "rounds": rounds,
        "steps": steps,
        "out": str(result),
    }
    ranks(case.devices, "bench/plan_ranks.py", json.dumps(job))
    return dict(zip(directories, json.loads(result.read_text()), strict=True)), directories


def graphs(directories: Path) -> dict[str, bytes]:
    """The graphs of all ranks by file, without what is written for people only."""
    result = {}
    for path in sorted(directories.glob("rank*.onnx")):
        model = onnx.load(path, load_external_data=False)
        graph = model.graph
        values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
        for part in (model, graph, *graph.node, *values):
            part.ClearField("metadata_props")
            part.ClearField("doc_string")
        result[path.name] = model.SerializeToString(deterministic=True)
    return result


def ranks(count: int, script: str, *arguments: str) -> None:
    """Runs a script of this repository's tools as so many ranks."""
    path = next(
        p for p in (ROOT / "tools" / "bench" / script, ROOT / "tools" / script) if p.exists()
    )
    command = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(count)]
    command += [sys.executable, str(path), *arguments]
    subprocess.run(command, check=True, env=mpirun_environment(), stdout=subprocess.DEVNULL)


def machine_of(text: str | None, devices: int, scratch: Path) -> str:
    """The machine named, else the file of one measured with so many ranks."""
    if text is not None:
        return text
    out = scratch / f"measured{devices}.yaml"
    if not out.exists():
        ranks(devices, "calibrate.py", "-o", str(out), "--name", out.stem, "--seconds", "10")
        print(out.read_text(), end="", flush=True)
    return str(out)


def cases(arguments: argparse.Namespace, scratch: Path) -> Iterator[Case]:
    """Each model, forward and training, for each number of devices."""
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer(OPTIMIZER))
    for name in arguments.model:
        path = scratch / f"{name}.onnx"
        MODELS[name].export(path)
        for devices in arguments.devices:
            machine = machine_of(arguments.machine, devices, scratch)
            for training in (None, spec):
                yield Case(MODELS[name], path, training, devices, machine)


def rank(case: Case, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Prints the strategies in the order that is predicted; returns what is missed."""
    workload = read_workload(case.path, {}, case.training)
    entries = [found(case)]
    for name in ("replicate", *rival_presets(case.devices)):
        entries.append(priced(case, workload, name))
    more = max(arguments.strategies - len(entries), 0)
    entries += at_random(case, workload, more, arguments.seed)
    times, _ = measure(case, entries, scratch, arguments.rounds, arguments.steps)
    shown = sorted((e for e in entries if e.name in times), key=lambda e: e.seconds)
    print(f"{case.label}: {'predicted':>10} {'measured':>10} ms (median, least)")
    for entry in shown:
        took = times[entry.name]
        print(
            f"  {entry.name:<28} {entry.seconds * 1e3:10.2f} {median(took) * 1e3:10.2f} "
            f"{min(took) * 1e3:10.2f}"
        )
    predicted = [e.seconds for e in shown]
    medians = [median(times[e.name]) for e in shown]
    by_median = float(spearmanr(predicted, medians)[0])
    by_least = float(spearmanr(predicted, [min(times[e.name]) for e in shown])[0])
    print(
        f"{case.label}: Spearman's correlation over {len(shown)} strategies {by_median:.3f} "
        f"(of medians), {by_least:.3f} (of least times)",
        flush=True,
    )
    missed = [f"{case.label}: correlation {by_least:.3f}"] if by_least < CORRELATION else []
    return missed + ([f"{case.label}: {len(shown)} strategies"] if len(shown) < 20 else [])


def speed(case: Case, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Prints a step of the plan found against those of dp and tp; returns what is missed."""
    workload = read_workload(case.path, {}, case.training)
    entries = [found(case)]
    for name in (f"dp={case.devices}", f"tp={case.devices}"):
        entries.append(priced(case, workload, name))
    entries.append(replace(entries[0], name=AGAIN))
    times, directories = measure(case, entries, scratch, arguments.rounds, arguments.steps)
    for entry in entries:
        took = times[entry.name]
        print(
            f"  {entry.name:<12} predicted {entry.seconds * 1e3:9.2f} ms, measured "
            f"{median(took) * 1e3:9.2f} ms (median), {min(took) * 1e3:9.2f} ms (least)"
        )

    def ratio(name: str, other: str) -> float:
        return median(a / b for a, b in zip(times[name], times[other], strict=True))

    better = min(entries[1:3], key=lambda e: median(times[e.name])).name
    twice = ratio(AGAIN, "found")
    apart = max(twice, 1 / twice)
    said = f"the same workload twice: {twice:.3f}"
    if graphs(directories["found"]) == graphs(directories[better]):
        print(f"{case.label}: found is the same workload as {better} ({said})", flush=True)
        return []
    slower = ratio("found", better)
    print(f"{case.label}: found takes {slower:.3f} times {better} ({said})", flush=True)
    return [f"{case.label}: {slower:.3f} times {better}"] if slower > apart else []


def main() -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("rank", "speed"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["mlp", "gpt"])
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--strategies", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", help="preset or file, instead of measuring")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    arguments = parser.parse_args()
    arguments.devices = arguments.devices or ([4] if arguments.rank else [2, 4])
    missed: list[str] = []
    with TemporaryDirectory(prefix="onnxpar-plan-") as folder:
        for case in cases(arguments, Path(folder)):
            missed += (rank if arguments.rank else speed)(case, arguments, Path(folder))
    for line in missed:
        print(f"missed: {line}", flush=True)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
