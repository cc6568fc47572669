"""One rank of tools/bench/plan.py: runs several sharded programs in turns and times them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from step_cases import Batch, gpt, mlp

from onnxpar_format.options import Settings
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.session import Session
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.trainer import Trainer

MODELS = {"mlp": mlp(512, 128), "gpt": gpt(2, 256, 4, 64, 8, 1024)}
"""Small enough that many strategies of each are measured in minutes."""
WARM = 2


def main(text: str) -> int:
    """Times the programs of a job; rank 0 writes the seconds of each in every round.

    Args:
        text: JSON: `model` (of `MODELS`), `directories`, `training` (the optimizer or null),
            `rounds`, `steps` in each of them, `out`.
    """
    job = json.loads(text)
    case = MODELS[job["model"]]
    rank = init()

    def stepping(directory: str, batch: Batch) -> Callable[[], object]:
        if job["training"] is None:
            session = Session(directory, rank=rank, device="cpu")
            # What is timed is the program, not how a global batch is sharded for it.
            feeds = session._inputs.shard_inputs({case.input: batch[case.input]})
            return lambda: session._runs.run(feeds, session.counters)
        trainer = Trainer(directory, rank=rank, device="cpu")
        prepared = trainer.prepare(batch)
        hyper = hyperparameters(job["training"], Settings()).at(1, 1e-6)
        return lambda: trainer.train_step([prepared], hyper)

    def body() -> int:
        batch = case.batches()[0]
        programs = [stepping(directory, batch) for directory in job["directories"]]
        times: list[list[float]] = [[] for _ in programs]
        for number in range(WARM + job["rounds"]):
            for program, seconds in zip(programs, times, strict=True):
                rank.all_reduce(np.zeros(1))
                begin = perf_counter()
                for _ in range(job["steps"]):
                    program()
                spent = np.array([(perf_counter() - begin) / job["steps"]])
                slowest = float(rank.all_reduce(spent, op="max")[0])
                if number >= WARM:
                    seconds.append(slowest)
        if rank.index == 0:
            Path(job["out"]).write_text(json.dumps(times), encoding="utf-8")
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
