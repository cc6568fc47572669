#!/usr/bin/env python
"""Compares the predictions of the cost model, and the plans found, with measurements.

    tools/bench/plan.py --rank [--model gpt|mlp] [--devices 4] [--strategies 24] [--check]
    tools/bench/plan.py --speed [--devices 2 4] [--check]
    tools/bench/plan.py --time [--places 2 2@1gbit 4@1gbit] [--strategies 24] [--check]

--rank compares the cost model's order of strategies with the measured order (Spearman's
correlation), forward and in training. The strategies are the presets, the one found, and random
ones: nodes of randomly chosen kinds get random options, and the rest is searched for around them.

--speed compares a step of the plan that `onnxpar plan` finds with the better one of pure data and
pure tensor parallelism. The plan found is loaded twice; the ratio of the two shows the error of the
measurement. If its rank graphs are those of the preset, the two are the same program, and no ratio
is taken.

--time compares the seconds that the cost model predicts for a training step with the measured ones,
for strategies on one machine and on two (`4@1gbit`: 4 ranks on the two nodes of tools/two-nodes,
joined at 1 Gbit/s). The strategies are presets with levels of optimizer parallel, and random ones
as above. The error of a strategy is |predicted - measured| / measured.

Ranks are processes under mpirun on this machine. They have one thread each if there are as many
ranks as cores. The strategies run in turn, and the median of the ratios of each round counts. First
tools/calibrate.py measures the machine, with as many ranks at the same place, unless `--machine`
names one. With --check, the exit code is 1 if a goal is missed. The goals are a correlation of 0.8,
and a ratio of 1, or that of the plan loaded twice if it is larger; with --time, a correlation of
0.95 and a median error of 15 %.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import onnx
from plan_ranks import MODELS
from scipy.stats import spearmanr
from step_cases import ROOT, Model, Side
from step_sides import Running, two_nodes

from onnxpar.api.plan_strategy import plan_strategy, read_workload, searching
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar.core.mesh import Mesh
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import OptimizerParallel
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
TRAINING = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer(OPTIMIZER))
CORRELATION = 0.8
ORDER, ERROR = 0.95, 0.15
WARM = 2
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
        link: Rate of the link between two nodes that have half of the ranks each; nothing if all
            ranks are on one.
    """

    model: Model
    path: Path
    training: TrainingSpec | None
    devices: int
    machine: str
    link: str = ""

    @property
    def threads(self) -> int:
        """Threads of a rank."""
        return threads_of(self.devices)

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
        what = f"{self.model.name} {'training' if self.training else 'forward'}"
        return f"{what}, {self.devices} ranks{' at ' if self.link else ''}{self.link}"


@dataclass(frozen=True)
class Entry:
    """A strategy and what it is predicted to cost.

    Attributes:
        name: Its name in the table.
        data: The content of its file, or `preset`, the name of one.
        seconds: Predicted seconds of a step.
        level: Of optimizer parallel.
    """

    name: str
    data: Mapping[str, Any]
    seconds: float
    level: int = 0


def priced(case: Case, workload: Workload, name: str, level: int = 0) -> Entry:
    """A preset, at a level of optimizer parallel."""
    if level:
        parallel = OptimizerParallel(level)
        workload = read_workload(case.path, {}, case.training, parallel)
    strategy = load_strategy(name, case.devices)
    seeds = resolve(strategy, workload.program)
    title = f"{name} level {level}" if level else name
    return Entry(title, {"preset": name}, case.price(workload, seeds), level)


def found(case: Case) -> Entry:
    """The plan that `onnxpar plan` finds."""
    strategy = searching(load_strategy("auto:ilp", case.devices))
    entry = strategy.search.model_copy(update={"machine": case.machine, "sizes": case.sizes})
    strategy = replace(strategy, search=entry)
    planned = plan_strategy(case.path, strategy, training=case.training)
    best = planned.ways[0]
    return Entry("found", planned.data, best.seconds, best.parallel.level)


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


def shard(case: Case, entries: Sequence[Entry], scratch: Path) -> dict[str, Path]:
    """Shards a model by each strategy; the directories of those that can be, by name."""
    directories: dict[str, Path] = {}
    for number, entry in enumerate(entries):
        kind = "training" if case.training else "forward"
        out = scratch / f"{case.model.name}-{kind}-{case.devices}{case.link}-{number}"
        name = entry.data.get("preset")
        if name:
            strategy = load_strategy(str(name), case.devices)
        else:
            strategy = Strategy.from_dict(dict(entry.data), case.devices, entry.name)
        try:
            if not out.exists():
                level = entry.level
                shard_model(
                    case.path, strategy, out, training=case.training, optimizer_parallel=level
                )
        except OnnxparError as error:
            print(f"  {entry.name}: cannot be sharded: {error}", flush=True)
            continue
        directories[entry.name] = out
    return directories


@contextmanager
def running(
    case: Case, directories: Iterable[Path], scratch: Path, steps: int
) -> Iterator[Running]:
    """The ranks of a case, which have loaded the programs and wait for their turns."""
    side = Side("onnxpar", case.label, case.devices, case.threads, link=case.link)
    ranks_ = Running(side, Path(mkdtemp(prefix="ranks-", dir=scratch)))
    job = {
        "model": case.model.name,
        "directories": list(map(str, directories)),
        "training": OPTIMIZER if case.training else None,
        "threads": case.threads,
        "link": case.link,
        "steps": steps,
        "address": ranks_.address,
    }
    command = [sys.executable, str(ROOT / "tools/bench/plan_ranks.py"), json.dumps(job)]
    environment = mpirun_environment()
    try:
        ranks_.start([[*launcher(case.devices, case.link, environment), *command]], environment)
        yield ranks_
    finally:
        ranks_.close()


def measure(
    jobs: Sequence[tuple[Case, Mapping[str, Path]]], scratch: Path, rounds: int, steps: int
) -> list[dict[str, list[float]]]:
    """Seconds of a step in every round, by strategy, of each case; all take turns."""
    with ExitStack() as stack:
        lines = [
            stack.enter_context(running(case, directories.values(), scratch, steps))
            for case, directories in jobs
        ]
        for line in lines:
            line.connect()
        found: list[dict[str, list[float]]] = [{n: [] for n in names} for _, names in jobs]
        for number in range(WARM + rounds):
            for line, times in zip(lines, found, strict=True):
                for program, seconds in enumerate(times.values(), 1):
                    turn = line.steps(program)
                    if number >= WARM:
                        seconds.append(turn.seconds / steps)
    return found


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


def threads_of(count: int) -> int:
    """Threads of a rank where so many share this machine, whatever nodes they believe in."""
    return max((os.cpu_count() or 1) // count, 1)


def launcher(count: int, link: str, environment: dict[str, str]) -> list[str]:
    """The command to which a program is appended that so many ranks run."""
    if link:
        return two_nodes(link, count, environment)
    return [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(count)]


def machine_of(text: str | None, devices: int, link: str, scratch: Path) -> str:
    """The machine named, else the file of one measured with so many ranks at this place."""
    if text is not None:
        return text
    out = scratch / f"measured{devices}{link}.yaml"
    if not out.exists():
        environment = mpirun_environment()
        command = [*launcher(devices, link, environment), sys.executable]
        command += [str(ROOT / "tools/calibrate.py"), "-o", str(out), "--name", out.stem]
        command += ["--seconds", "10", "--threads", str(threads_of(devices))]
        if link and devices > 2:
            command += ["--block", str(devices // 2)]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        print(out.read_text(), end="", flush=True)
    return str(out)


def cases(arguments: argparse.Namespace, scratch: Path) -> Iterator[Case]:
    """Each model, forward and training, for each number of devices."""
    for name in arguments.model:
        path = scratch / f"{name}.onnx"
        MODELS[name].export(path)
        for devices in arguments.devices:
            machine = machine_of(arguments.machine, devices, "", scratch)
            for training in (None, TRAINING):
                yield Case(MODELS[name], path, training, devices, machine)


def places(name: str, arguments: argparse.Namespace, scratch: Path) -> list[Case]:
    """The training of a model at each place."""
    path = scratch / f"{name}.onnx"
    MODELS[name].export(path)
    found = []
    for text in arguments.places:
        count, _, link = text.partition("@")
        machine = machine_of(arguments.machine, int(count), link, scratch)
        found.append(Case(MODELS[name], path, TRAINING, int(count), machine, link))
    return found


def row(entry: Entry, took: Sequence[float]) -> str:
    """A line of a table."""
    return (
        f"  {entry.name:<28} {entry.seconds * 1e3:10.2f} {median(took) * 1e3:10.2f} "
        f"{min(took) * 1e3:10.2f}"
    )


def rank(case: Case, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Prints the strategies in the order that is predicted; returns what is missed."""
    workload = read_workload(case.path, {}, case.training)
    entries = [found(case)]
    for name in ("replicate", *rival_presets(case.devices)):
        entries.append(priced(case, workload, name))
    more = max(arguments.strategies - len(entries), 0)
    entries += at_random(case, workload, more, arguments.seed)
    directories = shard(case, entries, scratch)
    (times,) = measure([(case, directories)], scratch, arguments.rounds, arguments.steps)
    shown = sorted((e for e in entries if e.name in times), key=lambda e: e.seconds)
    print(f"{case.label}: {'predicted':>10} {'measured':>10} ms (median, least)")
    for entry in shown:
        print(row(entry, times[entry.name]))
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


def steps_in_time(
    places: Sequence[Case], arguments: argparse.Namespace, scratch: Path
) -> list[str]:
    """Prints predicted and measured times of strategies at all places; returns what is missed."""
    jobs: list[tuple[Case, dict[str, Path]]] = []
    every: list[list[Entry]] = []
    for number, case in enumerate(places):
        workload = read_workload(case.path, {}, case.training)
        entries = [priced(case, workload, "replicate")]
        entries += [priced(case, workload, n) for n in rival_presets(case.devices)]
        entries += [priced(case, workload, f"dp={case.devices}", level) for level in (1, 2, 3)]
        share = arguments.strategies * (number + 1) // len(places)
        more = max(share - sum(map(len, every)) - len(entries), 0)
        entries += at_random(case, workload, more, arguments.seed)
        every.append(entries)
        jobs.append((case, shard(case, entries, scratch)))
    measured = measure(jobs, scratch, arguments.rounds, arguments.steps)
    predicted, medians = [], []
    for case, entries, times in zip(places, every, measured, strict=True):
        print(f"{case.label}: {'predicted':>10} {'measured':>10} ms (median, least), error")
        for entry in sorted((e for e in entries if e.name in times), key=lambda e: e.seconds):
            predicted.append(entry.seconds)
            medians.append(median(times[entry.name]))
            apart = entry.seconds / medians[-1] - 1
            print(f"{row(entry, times[entry.name])} {apart:+10.0%}")
    correlation = float(spearmanr(predicted, medians)[0])
    error = median(abs(p / m - 1) for p, m in zip(predicted, medians, strict=True))
    print(
        f"{len(predicted)} strategies: Spearman's correlation {correlation:.3f}, median error "
        f"{error:.1%}",
        flush=True,
    )
    missed = [f"a correlation of {correlation:.3f}"] if correlation < ORDER else []
    return missed + ([f"a median error of {error:.1%}"] if error > ERROR else [])


def speed(case: Case, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Prints a step of the plan found against those of dp and tp; returns what is missed."""
    workload = read_workload(case.path, {}, case.training)
    entries = [found(case)]
    for name in (f"dp={case.devices}", f"tp={case.devices}"):
        entries.append(priced(case, workload, name))
    entries.append(replace(entries[0], name=AGAIN))
    directories = shard(case, entries, scratch)
    (times,) = measure([(case, directories)], scratch, arguments.rounds, arguments.steps)
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
    for name in ("rank", "speed", "time"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["mlp", "gpt"])
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--places", nargs="+", default=["2", "2@1gbit", "4@1gbit"])
    parser.add_argument("--strategies", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", help="a preset or a file, instead of measuring the machine")
    parser.add_argument(
        "--folder", type=Path, help="keep what is measured and sharded here, and use what is there"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    arguments = parser.parse_args()
    arguments.devices = arguments.devices or ([4] if arguments.rank else [2, 4])
    missed: list[str] = []
    with TemporaryDirectory(prefix="onnxpar-plan-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.time:
            for name in arguments.model:
                at = places(name, arguments, folder)
                missed += steps_in_time(at, arguments, folder)
        for case in () if arguments.time else cases(arguments, folder):
            missed += (rank if arguments.rank else speed)(case, arguments, folder)
    for line in missed:
        print(f"missed: {line}", flush=True)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
