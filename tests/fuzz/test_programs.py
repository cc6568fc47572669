"""Random programs under random strategies: all devices together compute what one device does.

A case is one seed: a program, a strategy and sizes. `ONNXPAR_FUZZ_SEED` shifts the seeds,
`ONNXPAR_FULL` runs many more of them. A failure names its seed; `case(seed)` repeats it.
"""

import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.symbols import Symbol
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.lockstep import evaluator, run_model
from tests.random_builder import Array
from tests.random_programs import Sizes, feeds, is_narrow, program, taken, unless_refused
from tests.random_strategies import pinned, seeds_of
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 2000 if FULL else 30
BATCHES = 10
# Rounding of 2^-53 and 2^-24 in sums of at most a few hundred terms, each amplified at most a
# thousandfold by what follows (a norm divides by no less than sqrt(0.1), products multiply).
EXACT, ROUNDED = 1e-9, 2e-3


def partitioned(
    model: onnx.ModelProto, seed: int, constraints: dict[str, Symbol]
) -> PartitionedModel | None:
    """The model partitioned by the strategy of a seed; None where a random split is refused."""
    analysed = analyse(ir.from_proto(model), constraints)
    seeds = seeds_of(analysed, analysed.model.graph.inputs, seed)
    if seed % 2 == 0:
        return propagate_and_partition(analysed, seeds)
    drawn = pinned(analysed, seeds, seed)
    return unless_refused(lambda: propagate_and_partition(analysed, drawn))


def case(seed: int) -> bool:
    """Runs a case; whether its strategy was taken."""
    sizes, model = Sizes(seed), program(seed)
    parted = partitioned(model, seed, sizes.constraints)
    if parted is None:
        return False
    # Without optimizations: onnxruntime's scale fusion rounds scales of float64 to float32.
    undivided = evaluator(model, reference=False)
    narrow = is_narrow(model)
    for _ in range(2):
        symbols = sizes.draw()
        data = feeds(model, symbols, seed)
        want = undivided(data)
        table = parted.builder.table
        for equal in parted.equalities:
            left, right = (table.evaluate(s.size, symbols) for s in (equal.left, equal.right))
            assert left == right, f"{equal} does not hold in a valid run"
        got = run_model(parted, data, symbols)
        assert got.keys() == want.keys()
        for name, array in want.items():
            compare(name, got[name], array, ROUNDED if narrow else EXACT, symbols)
    return True


def compare(name: str, got: Array, want: Array, tolerance: float, symbols: dict[str, int]) -> None:
    where = f"output {name!r} at {symbols}"
    assert got.dtype == want.dtype, where
    assert got.shape == want.shape, f"{where}: expected {want.shape}, got {got.shape}"
    if want.dtype.kind != "f":
        assert (got == want).all(), where
        return
    assert np.isfinite(want).all(), f"{where}: the undivided model itself overflows"
    error = np.abs(got - want).max()
    bound = tolerance * max(1.0, np.abs(want).max())
    assert error <= bound, f"{where}: expected an error up to {bound:.1e}, got {error:.1e}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_programs(batch: int) -> None:
    count = CASES // BATCHES
    found = taken(case, range(SEED + batch * count, SEED + (batch + 1) * count))
    assert found >= count // 3, "most random strategies are taken"
