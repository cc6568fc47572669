"""Runs requests of different lengths in a cache that grows: `DIRECTORY DEVICE [compare]`.

Prints how many lines the stand-ins' log had before and after, and the number of runs. With
`compare`, the tokens must be those of each request alone.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.generation.bound_graph import BoundGraph
from onnxpar_runtime.generation.generator import Generator
from tests.decoders import VOCAB, growing

RNG = np.random.default_rng(4)
# The last two begin alike, in as many tokens as are kept together.
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (3, 7, 20, 70)]
PROMPTS.append([*PROMPTS[3][:66], 5])


def directory(folder: Path) -> Path:
    """Writes the decoder for one device."""
    out: Path = shard_model(growing(folder / "m.onnx"), "replicate", folder / "one", devices=1).out
    return out


def logged() -> int:
    """The number of lines in the stand-ins' log."""
    path = os.environ.get("STANDIN_LOG")
    return len(Path(path).read_text().splitlines()) if path else 0


def main(out: str, device: str, compares: bool) -> None:
    """Runs them in three slots."""
    with Generator(out, device=device) as m:
        requests = m.requests(slots=3, length=100)
        for number, prompt in enumerate(PROMPTS):
            requests.submit(prompt, max_new_tokens=4 + number)
        found: list[list[int | None]] = [[] for _ in PROMPTS]
        began = logged()
        with mock.patch.object(BoundGraph, "run", autospec=True, side_effect=BoundGraph.run) as run:
            for event in requests.events():
                found[event.request].append(event.token)
        print(began, logged(), run.call_count)
        assert [len(tokens) for tokens in found] == [4 + n for n in range(len(PROMPTS))]
        if compares:
            assert requests.reused == 64
            for number, prompt in enumerate(PROMPTS):
                assert found[number] == m.generate([prompt], max_new_tokens=4 + number)[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["compare"])
