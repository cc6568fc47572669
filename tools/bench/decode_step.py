#!/usr/bin/env python3
"""Compares the processor time of a step of a growing cache with that of a plain loop.

    python models/decoder.py llama -o /tmp/llama.onnx --set hidden_size=128
    tools/bench/decode_step.py /tmp/llama.onnx

Only the time of the main thread counts, and onnxruntime has one thread. So other work on the
machine adds little. Rounds alternate: a sequence of the plain loop, then one of `Generator` on one
device. The plain loop binds two buffers for each state, which take turns, and the inputs, and takes
the best token. Both make the same tokens.

The table has medians over the steps: of all, of the part inside onnxruntime, and of the rest.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.generation.generator import Generator

WARM = 20
"""Steps of a sequence that are not counted."""


@dataclass(frozen=True)
class Taken:
    """What a step took, in seconds of processor time.

    Attributes:
        token: The new token.
        all: The step.
        inside: The part inside onnxruntime.
    """

    token: int
    all: float
    inside: float


class Timed:
    """A session whose runs are timed; it is used in its place.

    Attributes:
        inside: The seconds of runs since this was set to 0.
    """

    def __init__(self, session: Any) -> None:
        """Takes the place of a session's `run_with_iobinding`."""
        self.inside = 0.0
        self._run = session.run_with_iobinding
        session.run_with_iobinding = self._timed

    def _timed(self, *arguments: Any) -> None:
        start = time.thread_time()
        self._run(*arguments)
        self.inside += time.thread_time() - start


def plain(session: Any, timed: Timed, prompt: Sequence[int], count: int) -> Iterator[Taken]:
    """Yields the steps of a loop that somebody writes who knows onnxruntime well."""
    inputs = {value.name: value for value in session.get_inputs()}
    caches = [name for name in inputs if name.startswith("past")]
    made = [value for value in session.get_outputs() if value.name != "logits"]
    vocabulary = next(v.shape[2] for v in session.get_outputs() if v.name == "logits")
    length = len(prompt) + count
    sizes = {name: (inputs[name].shape[1], inputs[name].shape[3]) for name in caches}
    buffers = [
        [np.zeros(heads * length * width, np.float32) for _ in range(2)]
        for heads, width in sizes.values()
    ]
    io, past, new = session.io_binding(), 0, list(prompt)
    for step in range(count):
        timed.inside, start = 0.0, time.thread_time()
        total = past + len(new)
        io.bind_cpu_input("input_ids", np.array([new], np.int64))
        if "attention_mask" in inputs:
            io.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
        if "position_ids" in inputs:
            io.bind_cpu_input("position_ids", np.arange(past, total, dtype=np.int64)[None])
        for name, output, pair in zip(caches, made, buffers, strict=True):
            heads, width = sizes[name]
            now, later = (pair[(step + turn) % 2].ctypes.data for turn in (0, 1))
            io.bind_input(name, "cpu", 0, np.float32, (1, heads, past, width), now)
            io.bind_output(output.name, "cpu", 0, np.float32, (1, heads, total, width), later)
        logits = np.empty((1, len(new), vocabulary), np.float32)
        io.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        session.run_with_iobinding(io)
        past, new = total, [int(logits[0, -1].argmax())]
        yield Taken(new[0], time.thread_time() - start, timed.inside)


def generated(
    generator: Generator, timed: Timed, prompt: Sequence[int], count: int
) -> Iterator[Taken]:
    """Yields the steps of `Generator`."""
    steps = generator.steps([prompt], max_new_tokens=count)
    for _ in range(count):
        timed.inside, start = 0.0, time.thread_time()
        token = next(steps).tokens[0]
        yield Taken(token, time.thread_time() - start, timed.inside)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a decoder whose cache grows, in float32")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=200, help="new tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=7, help="sequences of each side")
    wanted = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(wanted.model), options, providers=["CPUExecutionProvider"]
    )
    prompt = np.random.default_rng(0).integers(0, 90, wanted.prompt).tolist()
    found: dict[str, list[Taken]] = {"plain loop": [], "Generator": []}
    with tempfile.TemporaryDirectory() as folder:
        out = shard_model(wanted.model, "replicate", Path(folder) / "out", devices=1).out
        with Generator(out, device="cpu", ort_options={"intra_op_num_threads": "1"}) as generator:
            own, theirs = Timed(session), Timed(generator._decoder.executors[0].session)
            for _ in range(wanted.rounds):
                sides = (
                    list(plain(session, own, prompt, wanted.new)),
                    list(generated(generator, theirs, prompt, wanted.new)),
                )
                first, second = ([step.token for step in side] for side in sides)
                if first != second:
                    raise SystemExit("the two sides make different tokens")
                for steps, side in zip(found.values(), sides, strict=True):
                    steps += side[WARM:]
    print("| side | a step ms | in onnxruntime ms | the rest ms |\n| --- | --- | --- | --- |")
    for name, steps in found.items():
        numbers = (
            [s.all for s in steps],
            [s.inside for s in steps],
            [s.all - s.inside for s in steps],
        )
        print(
            f"| {name} | " + " | ".join(f"{1e3 * statistics.median(n):.3f}" for n in numbers) + " |"
        )


if __name__ == "__main__":
    main()
