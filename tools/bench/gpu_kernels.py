#!/usr/bin/env python3
"""Shows which kernels a training step runs on a GPU and what each takes, by PyTorch's profiler.

    tools/bench/gpu_kernels.py onnxpar --compute bfloat16
    tools/bench/gpu_kernels.py torch --compute bfloat16
    tools/bench/gpu_kernels.py onnxpar --device cpu --quick    # does it run?

The profiler sees all kernels of a process, also those that onnxruntime starts. The model and the
two sides are those of tools/bench/gpu.py, on one rank. The lines say how long a step takes without
the profiler (median of 10), how much of the GPU's memory is in use, how long the GPU computes or
copies in a step, and then, for each kernel, its time and number in a step.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from step_cases import LARGE, MODELS, Batch, Job, Side, Spent
from step_sides import PreparedModels

Step = Callable[[int, Batch], float]
WARM, TIMED, PROFILED = 5, 10, 3
MEBI = 1 << 20


def profiled(steps: Callable[[], object], device: str) -> list[Any]:
    """Returns what ran on the device: events with a name, a start and a duration in nanoseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = device == "cuda"
    kind = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        steps()
        if gpu:
            torch.cuda.synchronize()
    events: list[Any] = seen.profiler.kineto_results.events()
    return [event for event in events if not gpu or "CUDA" in str(event.device_type())]


def busy(spans: Sequence[tuple[int, int]]) -> int:
    """Returns the length of the union of spans."""
    total, end = 0, 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def show(step: Step, job: Job, most: int) -> None:
    """Runs steps and prints the table."""
    batches = job.case.batches()

    def run(number: int) -> float:
        return step(number, batches[(number - 1) % len(batches)])

    losses = [run(number) for number in range(1, WARM + 1)]
    print("losses", *(f"{loss:.6f}" for loss in losses))
    seconds = []
    for number in range(WARM + 1, WARM + TIMED + 1):
        begin = time.perf_counter()
        run(number)
        seconds.append(time.perf_counter() - begin)
    print(
        f"a step: {statistics.median(seconds) * 1e3:.2f} ms, at least {min(seconds) * 1e3:.2f} ms"
    )
    if job.device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        print(f"memory of the GPU in use: {(total - free) // MEBI} MiB")
    last = WARM + TIMED
    numbers = range(last + 1, last + PROFILED + 1)
    events = profiled(lambda: [run(number) for number in numbers], job.device)
    kernels: dict[str, list[int]] = defaultdict(list)
    for event in events:
        kernels[event.name()].append(event.duration_ns())
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    print(
        f"the device is busy for {busy(spans) / PROFILED / 1e6:.2f} ms of a step, with "
        f"{len(events) / PROFILED:.0f} kernels and copies"
    )
    for name, times in sorted(kernels.items(), key=lambda found: -sum(found[1]))[:most]:
        print(
            f"{sum(times) / PROFILED / 1e6:9.3f} ms {len(times) / PROFILED:7.1f} times, longest "
            f"{max(times) / 1e3:9.1f} us  {name}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=("onnxpar", "torch"))
    parser.add_argument("--model", choices=[*MODELS, *LARGE], default="gpt1024")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--most", type=int, default=45, help="number of kernels that are shown")
    parser.add_argument("--ort", action="append", default=[], help="options, as of `train`")
    options = parser.parse_args(arguments)
    compute = "" if options.compute == "float32" else options.compute
    side = Side(options.system, "one", 1, 2, options.device, compute)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxpar-kernels-")))
        job = Job(
            options.model,
            "adamw",
            options.quick,
            options=tuple(options.ort),
            files=str(PreparedModels(folder, options.quick).files(side, options.model, "adamw")),
            threads=side.threads,
            device=side.device,
            compute=compute,
        )
        if options.system == "torch":
            import step_torch

            step = step_torch.stepper(job, 0, Spent())
        else:
            import step_onnxpar

            from onnxpar_runtime.launch import init

            step = stack.enter_context(step_onnxpar.stepper(job, init("threads", job.device)))
        show(step, job, options.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())
