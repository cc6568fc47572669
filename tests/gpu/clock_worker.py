"""Trains a directory on the stand-ins of CUDA and prints what its steps took in simulated time.

Under mpirun, one process for each rank; rank 0 prints two JSON lists. The first has, for each step
but the first, to which no step before has left anything, the microseconds of the step, of its
kernels and of its communication. The second has those of the calls of these steps in a trace: in
the foreground, waits for the background included, and in the background. The arguments are the
directory, whether communication runs in the background (`yes` or `no`), and the number of
micro-batches in a step.
"""

import ctypes
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from onnxpar_format.trace import BACKGROUND, CALL, FOREGROUND, THREADS
from onnxpar_runtime import Trainer, guarded, init
from onnxpar_runtime.tracing.calls import logged

STEPS, ROWS = 2, 16
TRACKS = FOREGROUND, BACKGROUND
HYPER = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "momentum_first": 1.0}
HYPER |= {"clip_norm": float("inf"), "weight_decay": 0.0}


def traced(spans: Iterable[tuple[str, int, str, int, int, dict[str, Any]]], track: int) -> float:
    """Returns the microseconds of the calls on a track whose times are those of the GPU."""
    calls = [s for s in spans if s[0] == CALL and s[1] == track and s[5].get("device")]
    return sum(end - begin for _, _, _, begin, end, _ in calls) / 1000


def main() -> int:
    """Returns the exit status."""
    directory, overlap, count = sys.argv[1:]
    rows = ROWS // int(count)
    rank = init(transport="nccl", device="cuda")
    clock = ctypes.CDLL("libcudart.so.13").standin_clock
    clock.restype = ctypes.c_double

    def now() -> np.ndarray:
        return np.array([clock(which) for which in range(3)])

    def body() -> int:
        rng = np.random.default_rng(0)
        steps = []
        with Trainer(directory, rank=rank, device="cuda", overlap=overlap == "yes") as trainer:
            for number in range(1 + STEPS):
                if number == 1:
                    rank.keep_calls(True)
                before = now()
                batches = [
                    {
                        "x": rng.standard_normal((rows, 1, 8, 8), np.float32),
                        "labels": rng.integers(0, 10, rows),
                    }
                    for _ in range(int(count))
                ]
                trainer.train_step(batches, HYPER)
                if number:
                    steps.append(((now() - before) / 1000).tolist())
            spans = list(logged(rank, lambda name: THREADS))
        if rank.index == 0:
            print(json.dumps([steps, [traced(spans, track) for track in TRACKS]]))
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    raise SystemExit(main())
