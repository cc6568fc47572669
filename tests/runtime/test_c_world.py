"""Worlds in the C interface: what calls check, and when MPI begins and ends."""

import ctypes
import sys
from math import nan
from pathlib import Path

import pytest

from onnxpar_runtime.collectives import World
from onnxpar_runtime.library import custom_op_library
from tests.runtime import hand_made
from tests.runtime.c_interface import under_mpi


def test_a_reduction_checks_its_arguments() -> None:
    library = ctypes.CDLL(str(custom_op_library()))
    library.onnxpar_error.restype = ctypes.c_char_p
    data, group, other = (ctypes.c_float * 1)(7), (ctypes.c_int * 1)(0), (ctypes.c_int * 2)(0, 5)
    with World.threads(1) as world:
        for ranks, members, memory, reduction, expected in [
            (group, 1, data, 4, "a reduction: expected 0 to 3, got 4"),
            (group, 1, data, -1, "a reduction: expected 0 to 3, got -1"),
            (None, 1, data, 0, "a group: expected one rank or more, got null"),
            (group, 0, data, 0, "a group: expected one rank or more, got 0"),
            (other, 2, data, 0, "a group: expected ranks from 0 to 0, got 5"),
            (group, 1, None, 0, "expected memory to read and to write, got null"),
        ]:
            done = library.onnxpar_all_reduce(
                world._handle,
                0,
                ranks,
                members,
                memory,
                data,
                ctypes.c_size_t(1),
                1,
                reduction,
                None,
            )
            assert (done, library.onnxpar_error().decode()) == (1, expected)
        assert library.onnxpar_all_reduce(
            world._handle, 0, group, 1, data, data, ctypes.c_size_t(1), 1, 3, None
        ) == 0  # fmt: skip
    library.onnxpar_mpi_world.restype = ctypes.c_void_p
    assert library.onnxpar_mpi_world(ctypes.c_double(nan)) is None
    assert library.onnxpar_error().decode() == "timeout: expected seconds >= 0, got nan"


@pytest.mark.full
def test_the_environment_alone_makes_ranks(tmp_path: Path) -> None:
    """Any binding of onnxruntime can load the library, and call nothing of it."""
    directory = hand_made.reduced(tmp_path / "a", 2)
    code = f"""
import numpy as np, onnxruntime, os
options = onnxruntime.SessionOptions()
options.register_custom_ops_library({str(custom_op_library())!r})
rank = os.environ["OMPI_COMM_WORLD_RANK"]
session = onnxruntime.InferenceSession({str(directory)!r} + f"/rank000{{rank}}.model.onnx", options)
print(session.run(None, {{"x": np.full((1, 3), 1 + int(rank), np.float32)}})[0].tolist())
"""
    outcome = under_mpi(2, [sys.executable, "-c", code], ONNXPAR_WORLD="mpi")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == ["[[3.0, 3.0, 3.0]]"] * 2
    outcome = under_mpi(1, [sys.executable, "-c", code], ONNXPAR_WORLD="mpi")
    message = "rank 1 is not in a world of 1 ranks: start a process for each, as by mpirun"
    assert outcome.returncode == 1 and message in outcome.stderr
    limitless = {"ONNXPAR_WORLD": "mpi", "ONNXPAR_TIMEOUT": "0"}
    outcome = under_mpi(2, [sys.executable, "-c", code], **limitless)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    limitless["ONNXPAR_TIMEOUT"] = "soon"
    outcome = under_mpi(2, [sys.executable, "-c", code], **limitless)
    message = "ONNXPAR_TIMEOUT: expected seconds, got soon"
    assert outcome.returncode == 1 and message in outcome.stderr
    outcome = under_mpi(2, [sys.executable, "-c", code], ONNXPAR_WORLD="tcp")
    assert outcome.returncode == 1 and "ONNXPAR_WORLD: expected mpi, got tcp" in outcome.stderr


TWO_WORLDS = f"""
import ctypes
library = ctypes.CDLL({str(custom_op_library())!r})
library.onnxpar_mpi_world.restype = ctypes.c_void_p
first, second = (ctypes.c_void_p(library.onnxpar_mpi_world(ctypes.c_double(60))) for _ in "ab")
assert library.onnxpar_close(second) == 0
one, out, group = (ctypes.c_float * 1)(1), (ctypes.c_float * 1)(), (ctypes.c_int * 2)(0, 1)
rank = library.onnxpar_rank(first)
count = ctypes.c_size_t(1)
assert library.onnxpar_all_reduce(first, rank, group, 2, one, out, count, 1, 0, None) == 0
assert out[0] == 2
assert library.onnxpar_close(first) == 0
"""


@pytest.mark.full
def test_mpi_lasts_as_long_as_the_last_world() -> None:
    outcome = under_mpi(2, [sys.executable, "-c", TWO_WORLDS])
    assert outcome.returncode == 0, outcome.stderr
    for named in ("", "libm.so.6"):
        outcome = under_mpi(2, [sys.executable, "-c", TWO_WORLDS], ONNXPAR_MPI_LIBRARY=named)
        assert (outcome.returncode == 0) == (named == ""), outcome.stderr
