#!/usr/bin/env python
"""Compares a complete plan of training with a published configuration.

    tools/bench/complete_plan.py MODEL.onnx --devices 1024 --batch 512 [--seq 2048]
        [--machine h100] [--compute bfloat16] [--beside published/gpt-175b.yaml] [-o PLAN.yaml]

The script prints the seconds that `plan` takes, of the processor (user and system) and of wall
time. For its plan and for the published configuration it prints the seconds of a step and the bytes
of a device, by the same cost model. If --devices differs from the number of devices in the
configuration's file, the axis `dp` is made longer or shorter. Each data rank of the configuration
has one sample in a micro-batch, or `--samples`. If the configuration does not fit into the memory
of a device, it is also priced with recomputation of all layers. `models/transformer.py
--no-weights` and `tools/bench/large_models.py` write models without weights.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from time import perf_counter, process_time

import yaml

from onnxpar.api.plan_strategy import plan_strategy, read_workload, searching
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import collect_rarely
from onnxpar.report.found_strategy import seconds_text
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.rival_plans import Pricing, Way
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import load_strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.recompute_entry import RecomputeOptions
from onnxpar.strategy.schema import Strategy
from onnxpar_format.texts import bytes_text


def published(
    options: argparse.Namespace, spec: TrainingSpec, sizes: dict[str, int]
) -> Iterator[Way]:
    """Yields the plan of the configuration beside which the found plan is put, priced.

    If it does not fit, its plan with recomputation of all layers follows.
    """
    text = Path(options.beside).read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    mesh, pipeline = data["mesh"], data.pop("pipeline", {})
    stages, chunks = pipeline.get("stages", 1), pipeline.get("chunks", 1)
    fewest = stages * prod(mesh.values()) // mesh["dp"]
    if options.devices % fewest:
        raise SystemExit(
            f"{options.beside}: expected a multiple of {fewest} devices, got {options.devices}"
        )
    mesh["dp"] = options.devices // fewest
    strategy = Strategy.from_dict(data, source=options.beside)
    ranks = mesh["dp"] * mesh.get("ep", 1)
    micro_batches = max(options.batch // ranks // options.samples, 1)
    split = PipelineSplit(stages, micro_batches, pipeline.get("schedule", "1f1b"), chunks)
    workload = read_workload(options.model, {}, spec, strategy.optimizer_parallel)
    seeds = decide_parameter_axes(resolve(strategy, workload.program), workload)
    machine, plan = load_machine(options.machine), workload.plan(seeds)
    axes = ",".join(f"{name}={size}" for name, size in {"pp": stages, **mesh}.items() if size > 1)
    parts = [f"{chunks} chunks"] if chunks > 1 else []
    parts += [f"{micro_batches} micro-batches"] if micro_batches > 1 else []
    parts.append(f"optimizer parallel {strategy.optimizer_parallel.level}")
    again = RecomputeOptions(layers=1)
    for recompute in dict.fromkeys((strategy.recompute, again)):
        named = [*parts, "recompute all layers"] if recompute == again else parts
        pricing = Pricing(workload, machine, sizes, split, recompute)
        way = pricing.way(f"{axes}, {', '.join(named)}", plan)
        yield way
        if way.fits(machine.memory):
            return


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    for name in ("devices", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seq", type=int, help="tokens in a sequence; leave it out for images")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--compute", help="float16 or bfloat16")
    parser.add_argument(
        "--beside", metavar="FILE", help="the published configuration: a strategy file with a mesh"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help="samples of a micro-batch on a data rank of the configuration",
    )
    parser.add_argument("-o", "--out", type=Path, help="write the strategy that is found")
    options = parser.parse_args()
    collect_rarely()  # as `onnxpar plan` does
    spec = TrainingSpec(
        parse_loss("softmax_cross_entropy"),
        parse_optimizer("adamw"),
        compute=options.compute and parse_compute(options.compute),
    )
    sizes = {"batch": options.batch} | ({"seq": options.seq} if options.seq else {})
    wanted = searching(load_strategy("auto", options.devices))
    entry = wanted.search.model_copy(update={"machine": options.machine, "sizes": sizes})
    begun, used = perf_counter(), process_time()
    planned = plan_strategy(options.model, replace(wanted, search=entry), training=spec)
    seconds, used = perf_counter() - begun, process_time() - used
    if options.out:
        options.out.write_text(yaml.safe_dump(planned.data), encoding="utf-8")
    print("| plan | a step | states | memory |\n| --- | --- | --- | --- |")
    best = planned.ways[0]
    ways = [replace(best, name=planned.choices or best.name)]
    if options.beside:
        ways += published(options, spec, sizes)
    for way in ways:
        cells = (way.name, seconds_text(way.seconds), bytes_text(way.held), bytes_text(way.peak))
        print(f"| {' | '.join(cells)} |")
    print(f"planned in {used:.1f} s of the processor, {seconds:.1f} s of wall time")


if __name__ == "__main__":
    main()
