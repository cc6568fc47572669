#!/usr/bin/env python
"""A complete plan of training beside a configuration that people have published.

    tools/bench/complete_plan.py MODEL.onnx --devices 1024 --batch 512 --seq 2048
        [--machine h100] [--compute bfloat16] [--beside pp=8,dp=16,tp=8 --micro-batches 32
        [--chunks 1] [--level 1] [--recompute 0]]

Prints the seconds of the processor that `plan` takes, and for its plan and the configuration beside
it the seconds of a step and the bytes of a device, priced by the same cost model. Models without
weights: `models/transformer.py --no-weights`.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from time import process_time

from onnxpar.api.plan_strategy import plan_strategy, read_workload, searching
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import collect_rarely
from onnxpar.core.machine import bytes_text
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.report.found_strategy import seconds_text
from onnxpar.search.rival_plans import Pricing, Way
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import load_strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.recompute_entry import RecomputeOptions


def published(options: argparse.Namespace, spec: TrainingSpec, sizes: dict[str, int]) -> Way:
    """Returns the plan of the configuration beside which the found plan is put, priced."""
    strategy = load_strategy(options.beside)
    parallel = OptimizerParallel(options.level)
    workload = read_workload(options.model, {}, spec, parallel)
    one = replace(strategy, pipeline=None)
    plan = workload.plan(resolve(one, workload.program))
    schedule = "interleaved" if options.chunks > 1 else "1f1b"
    split = PipelineSplit(strategy.stages, options.micro_batches, schedule, options.chunks)
    recompute = RecomputeOptions(layers=options.recompute)
    pricing = Pricing(workload, load_machine(options.machine), sizes, split, recompute)
    return pricing.way(options.beside, plan)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    for name in ("devices", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--compute", help="float16 or bfloat16")
    parser.add_argument("--beside", metavar="AXES", help="such as pp=8,dp=16,tp=8")
    for name, default in (("micro-batches", 1), ("chunks", 1), ("level", 1), ("recompute", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    collect_rarely()  # as `onnxpar plan` does
    spec = TrainingSpec(
        parse_loss("softmax_cross_entropy"),
        parse_optimizer("adamw"),
        compute=options.compute and parse_compute(options.compute),
    )
    sizes = {"batch": options.batch, "seq": options.seq}
    wanted = searching(load_strategy("auto", options.devices))
    entry = wanted.search.model_copy(update={"machine": options.machine, "sizes": sizes})
    began = process_time()
    planned = plan_strategy(options.model, replace(wanted, search=entry), training=spec)
    spent = process_time() - began
    print("| plan | a step | states | memory |\n| --- | --- | --- | --- |")
    ways = [planned.ways[0], *([published(options, spec, sizes)] if options.beside else [])]
    for way in ways:
        cells = (way.name, seconds_text(way.seconds), bytes_text(way.held), bytes_text(way.peak))
        print(f"| {' | '.join(cells)} |")
    print(f"planned in {spent:.1f} s of the processor")


if __name__ == "__main__":
    main()
