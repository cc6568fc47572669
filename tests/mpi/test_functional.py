"""`onnxpar.shard` under mpirun: every rank calls, every rank has the result."""

import re
from pathlib import Path

import pytest

from tests.runtime.launching import mpirun

SECONDS = 100
"""The time limit of a job, in seconds; most of it is starting Python on every rank."""

HEAD = """
import os, sys, tempfile
import numpy as np
import onnxpar
import three_blocks
from mpi4py import MPI

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

def numbers(*shape):
    return np.random.default_rng(shape).uniform(-1, 1, shape).astype(np.float32)

def undivided(x):
    import onnx_ir as ir
    import onnxruntime
    model = ir.to_proto(three_blocks.build()).SerializeToString()
    return onnxruntime.InferenceSession(model).run(None, {"x": x})[0]

def leave(text):
    # One line for each rank; longer outputs of several ranks may be mixed.
    os.write(1, f"r{rank} {text}\\n".encode())
"""


def lines(text: str, ranks: int) -> list[str]:
    """The last line that each rank printed."""
    found = [
        [line for line in text.splitlines() if line.startswith(f"r{r} ")] for r in range(ranks)
    ]
    assert all(found), text
    return [of[-1].split(" ", 1)[1] for of in found]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_rank_has_the_complete_result(tmp_path: Path, ranks: int) -> None:
    """Two ranks then give and get slices in the same job."""
    body = """
fn = onnxpar.shard(three_blocks.build(), ((size // 2, 2),), level=2,
                   parameter_plan={"block1.dense2.weight": (size, 1)})
for rows in (16, 32, 5):
    x = numbers(rows, 32)
    # Sums of 32 products a layer, six layers: some hundred roundings of 2^-24.
    assert np.abs(fn(x) - undivided(x)).max() < 1e-5
assert fn.devices == size and len(fn.programs) == 2, fn.programs
# All ranks have loaded; rank 0 removes the directory before it goes on.
MPI.COMM_WORLD.Barrier()
assert not [name for name in os.listdir(tempfile.gettempdir()) if "onnxpar-shard" in name]
"""
    body += SLICES if ranks == 2 else "leave('done')"
    result = mpirun(ranks, ["-c", HEAD + body], {"TMPDIR": str(tmp_path)}, SECONDS)
    assert result.code == 0, result.text
    expected = "input 'x': expected shards of [2, 1] rows on the ranks, got [1, 2]"
    assert lines(result.text, ranks) == [expected if ranks == 2 else "done"] * ranks


SLICES = """
fn = onnxpar.shard(three_blocks.build(), (None,), dataset="data_parallel")
for total, mine in ((8, 4), (7, 4 - rank)):
    x = numbers(total, 32)
    first = 0 if rank == 0 else 4
    got = fn(x[first : first + mine])
    assert got.shape == (mine, 32)
    # Outputs of size 1 in float32, through six layers of sums of 32 terms: 168 roundings of 2^-24.
    assert np.abs(got - undivided(x)[first : first + mine]).max() < 1e-5
try:
    fn(numbers(1 + rank, 32))
except onnxpar.OnnxparError as error:
    leave(error)
"""


@pytest.mark.timeout(2 * SECONDS)
def test_mistakes_are_raised_by_all_ranks() -> None:
    body = """
found = []
def act(f):
    try:
        f()
    except onnxpar.OnnxparError as error:
        found.append(f"{type(error).__name__}: {error}")
fn = onnxpar.shard(three_blocks.build(), (None,), out_strategy=((1, 1, 1),))
act(lambda: fn(numbers(4, 32)))             # found by rank 0, which shards
act(lambda: fn(numbers(4 + rank, 32)))      # ranks differ
act(lambda: fn(numbers(4, 31 + rank)))      # wrong on one rank alone
act(lambda: onnxpar.shard(three_blocks.build(), (None,), devices=3))
act(lambda: fn(numbers(4, 32)) if rank else fn())
leave(found)
if rank == 0:
    fn(numbers(4, 32))  # rank 1 makes no further call
"""
    result = mpirun(2, ["-c", HEAD + body], {"ONNXPAR_TIMEOUT": "3"}, SECONDS)
    assert result.code != 0
    assert re.search(
        r"r0 \| rank 0: \S+, on all ranks on group \[0, 1\]: waited 3 s for rank 1", result.err
    ), result.text
    first, second = lines(result.out, 2)
    assert first == second
    for part in (
        "StrategyError: out_strategy[0], output 'y': expected 2 entries",
        "CallError: input 'x': expected the same on all ranks, got float32[4, 32] on rank 0 and "
        "float32[5, 32] on rank 1",
        "expected an array for input 'x', got none",
        "StrategyError: devices: expected the 2 ranks that mpirun started, got 3",
    ):
        assert part in first, first


@pytest.mark.timeout(2 * SECONDS)
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    body = """
import onnxpar.api.functional
if rank == 0:
    def broken(*_, **__):
        raise RuntimeError("the disk is gone")
    onnxpar.api.functional.write = broken
fn = onnxpar.shard(three_blocks.build(), (None,))
fn(numbers(4, 32))
leave("went on")
"""
    result = mpirun(2, ["-c", HEAD + body], {"TMPDIR": str(tmp_path)}, SECONDS)
    assert result.code != 0
    assert "RuntimeError: the disk is gone" in result.text
    assert "went on" not in result.text
