"""One rank of tools/bench/plan.py: runs several sharded programs in turns and times them."""

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from started_script import expect_driver
from step_cases import Batch, driver_at, gpt, mlp

from onnxpar_format.options import Settings
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.session import Session
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.trainer import Trainer

MODELS = {"mlp": mlp(512, 128), "gpt": gpt(2, 256, 4, 64, 8, 1024)}
"""Small enough that many strategies of each are measured in minutes."""


def main(text: str) -> int:
    """Runs the program, counted from 1, that the driver asks for.

    Args:
        text: JSON: `model` (of `MODELS`), `directories`, `training` (the optimizer or null),
            `threads`, `link` (as in `Case`), `steps` of a turn, `address` of the driver's socket.
    """
    job: dict[str, Any] = json.loads(text)
    options = {"intra_op_num_threads": str(job["threads"])}
    case = MODELS[job["model"]]
    rank = init()

    def stepping(directory: str, batch: Batch) -> Callable[[], object]:
        if job["training"] is None:
            session = Session(directory, rank=rank, device="cpu", ort_options=options)
            # What is timed is the program, not how a global batch is sharded for it.
            feeds = session._inputs.shard_inputs({case.input: batch[case.input]})
            return lambda: session._runs.run(feeds, session.counters)
        trainer = Trainer(directory, rank=rank, device="cpu", ort_options=options)
        prepared = trainer.prepare(batch)
        hyper = hyperparameters(job["training"], Settings()).at(1, 1e-6)
        return lambda: trainer.train_step([prepared], hyper)

    def body() -> int:
        batch = case.batches()[0]
        programs = [stepping(directory, batch) for directory in job["directories"]]
        with driver_at(job["address"], rank.index) as driver:
            while number := driver.recv():
                rank.all_reduce(np.zeros(1))
                begin = perf_counter()
                for _ in range(job["steps"]):
                    programs[number - 1]()
                driver.send((perf_counter() - begin, 0.0, [], {}, 0, 0))
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    expect_driver("tools/bench/plan.py")
    sys.exit(main(sys.argv[1]))
