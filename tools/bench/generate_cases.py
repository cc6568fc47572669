"""What tools/bench/generate.py measures: the job that each rank gets, and its answers.

Imported by all sides, so it loads neither onnxruntime nor onnxpar.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from step_cases import Sent, driver_at

WARM = 9
"""New tokens of a first sequence, which is not measured: memory is there then."""


@dataclass(frozen=True)
class Job(Sent):
    """What one process is to do, as its only argument.

    Attributes:
        files: The folder of the model, or the directory that onnxpar made.
        prompt: Tokens of the prompt.
        new: New tokens of a sequence.
        vocabulary: Number of tokens that there are.
        threads: Threads of the process.
        address: The driver's socket.
        ranks: Number of processes.
        options: `key=value` options of onnxruntime.
    """

    files: str
    prompt: int
    new: int
    vocabulary: int
    threads: int = 1
    address: str = ""
    ranks: int = 1

    @property
    def tokens(self) -> list[int]:
        """The prompt, the same in every process."""
        rng = np.random.default_rng(0)
        return [int(token) for token in rng.integers(0, self.vocabulary, self.prompt)]

    def sequences(self) -> Iterator[int]:
        """Yields the number of new tokens of one sequence after the other; the first warms up."""
        return chain([WARM], repeat(self.new))


def serve(job: Job, rank: int, tokens: Iterator[int]) -> None:
    """Makes as many tokens as the driver asks for, until it asks for none.

    Args:
        job: The job.
        rank: Number of the rank.
        tokens: New tokens, of one sequence after the other, each made when it is asked for.
    """
    with driver_at(job.address, rank) as driver:
        while count := driver.recv():
            start, used = time.perf_counter(), time.process_time()
            made = [next(tokens) for _ in range(count)]
            used, taken = time.process_time() - used, time.perf_counter() - start
            driver.send((taken, used, made, {}, 0, 0))
