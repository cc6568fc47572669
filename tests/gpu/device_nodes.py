"""What tests of the kernels for GPUs share: a process that runs nodes, and how results compare."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.tiers import FULL

Array = np.ndarray
TYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
# Half a unit in the last place of numbers of the type, and of what is computed in.
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12, "float64": 2.0**-53}
REAL = {"float32": 2.0**-24, "bfloat16": 2.0**-24, "float16": 2.0**-24, "float64": 2.0**-53}
# Each type is a compilation of a second. In the quick tier, 16 bits are those of a few kernels.
KINDS = list(TYPES) if FULL else ["float32"]
every_type = pytest.mark.parametrize("kind", KINDS)
both_widths = pytest.mark.parametrize("kind", list(TYPES) if FULL else ["float32", "bfloat16"])
# One element, less than a pack, packs with a rest, and more than one block.
SHAPES = [(), (0,), (1,), (3, 5), (257,), (3, 1025)]
Both = Callable[..., tuple[list[Array], list[Array]]]


class Process:
    """The worker, and what it is asked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("node_worker.py"))],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(
        self,
        op: str,
        inputs: Sequence[Array | None],
        attributes: Mapping[str, Any],
        outputs: Sequence[bool],
        runs: int = 2,
        last: Sequence[Array | None] | None = None,
        changed: Sequence[int] = (),
    ) -> tuple[Any, Any]:
        """Returns what it answers, or fails where it died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {"op": op, "inputs": inputs, "attributes": attributes}
        asked |= {"outputs": outputs, "runs": runs, "last": last}
        asked |= {"changed": changed}
        pickle.dump(asked, self.process.stdin)
        self.process.stdin.flush()
        try:
            cpu, cuda = pickle.load(self.process.stdout)
        except EOFError:
            pytest.fail(f"the worker ended with {self.process.wait(10)} in {op}")
        return cpu, cuda

    def close(self) -> None:
        """Lets it end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)


def normal(seed: int, shape: tuple[int, ...], kind: str, scale: float = 1) -> Array:
    drawn = np.random.default_rng(seed).standard_normal(shape) * scale
    return np.asarray(drawn).astype(TYPES[kind])


def close(got: Array, want: Array, kind: str, error: Array | float) -> None:
    """Checks that two results differ by at most `error` and one rounding to the type each."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    narrow = kind in ("float16", "bfloat16")
    # 2^-24 is the least float16, at which rounding stops being relative.
    rounding = (2 * UNIT[kind] * 2 * np.abs(want) + 2.0**-24) if narrow else 0
    assert np.all(np.abs(got - want) <= error + rounding)
