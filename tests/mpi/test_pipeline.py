"""Pipelines under mpirun: the same steps as one device, and an end for all ranks.

`ONNXPAR_FULL` runs all cases.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.hand_staged import Reference, Shape, batch_of, staged
from tests.runtime.launching import LIMIT, mpirun
from tests.tiers import FULL

SCRIPT = """
import os
import signal
import sys
import numpy as np
from tests.runtime.hand_staged import batch_of
from onnxpar_runtime import Trainer, guarded, init
from onnxpar_runtime.pipeline.work import VirtualStages

rank = init()
compute = VirtualStages.compute
def failing(self, action):
    if rank.index == int(sys.argv[3]) and action.micro_batch == 2:
        if sys.argv[4] == 'raise':
            raise RuntimeError('it broke')
        os.kill(os.getpid(), signal.SIGKILL)
    compute(self, action)
VirtualStages.compute = failing
def body():
    with Trainer(sys.argv[1], rank=rank, device='cpu') as trainer:
        for step in range(3):
            batches = [batch_of(size, 10 * step + k) for k, size in enumerate((3, 1, 4))]
            result = trainer.train_step(batches, {'lr': 0.1})
            print(rank.index, repr(result.loss), repr(result.grad_norm), flush=True)
        outputs = trainer.evaluate(batch_of(5), outputs=True)['outputs']
        arrays = {name: trainer.gather(name) for name in trainer.training.states}
        if rank.index == 0:
            np.savez(sys.argv[2], **arrays, p=outputs['p'])
    return 0
raise SystemExit(guarded(rank, body))
"""


def script_in(folder: Path) -> str:
    script = folder / "body.py"
    script.write_text(SCRIPT)
    return str(script)


SHAPES = {
    "2x2": Shape(stages=2, size=2, tied=True),
    "zb-h1": Shape(stages=3, split=True, schedule="zb-h1"),
    "interleaved": Shape(stages=2, chunks=2, schedule="interleaved"),
}
# Whether ranks on one machine share memory, or send messages like ranks on several machines.
CASES = [(name, memory) for name in SHAPES for memory in ("1", "0")]
ENDS = [(rank, how) for rank in (2, 0) for how in ("raise", "kill")]


@pytest.mark.parametrize(("name", "memory"), CASES if FULL else [("2x2", "1")])
def test_steps_over_mpi(tmp_path: Path, name: str, memory: str) -> None:
    shape = SHAPES[name]
    directory, found = staged(tmp_path / "a", shape), tmp_path / "found.npz"
    outcome = mpirun(
        shape.ranks,
        [script_in(tmp_path), str(directory), str(found), "-1", ""],
        {"ONNXPAR_SHARED_MEMORY": memory},
    )
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    reference = Reference(shape)
    for step in range(3):
        batches = [batch_of(size, 10 * step + k) for k, size in enumerate((3, 1, 4))]
        expected = reference.step(batches, 0.1)
        for rank in range(shape.ranks):
            mine = [line[1:] for line in lines if line[0] == str(rank)][step]
            # The weights of micro-batches are float32.
            np.testing.assert_allclose([float(n) for n in mine], expected, rtol=2.0**-22)
    arrays = np.load(found)
    for weight, array in reference.weights.items():
        np.testing.assert_allclose(arrays[weight], array, atol=2.0**-22 * np.abs(array).max())
    np.testing.assert_allclose(arrays["p"], reference.forward(batch_of(5))[1], rtol=1e-5)
    np.testing.assert_array_equal(arrays["seen"], reference.seen)


@pytest.mark.parametrize(("rank", "how"), ENDS if FULL else ENDS[:1])
def test_a_rank_that_ends_in_the_middle_ends_all(tmp_path: Path, rank: int, how: str) -> None:
    directory = staged(tmp_path / "a", Shape(stages=3))
    arguments = [script_in(tmp_path), str(directory), str(tmp_path / "f"), str(rank), how]
    outcome = mpirun(3, arguments)
    assert outcome.code not in (0, None) and outcome.seconds < LIMIT / 2
    if how == "raise":
        assert f"r{rank} | RuntimeError: it broke" in outcome.err
