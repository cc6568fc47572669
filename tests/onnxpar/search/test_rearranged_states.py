"""States of weights that are transposed before a product reads them, as those of other weights."""

import pytest

from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.search.cost_weights import CostWeights
from onnxpar.search.node_options import Option, options
from onnxpar.search.problem import MOMENTS, build
from onnxpar.search.rearranged_states import saved_behind
from onnxpar.search.value_flow import Item, flow
from tests.onnxpar.search.test_training import MACHINE, MESH, SIZES, TEXT, products

TURNED = TEXT.replace("[second]", "[turn] t = Transpose(v)\n    [second]").replace("SECOND", "t")


def _sharded(item: Item, dim: int | None, cost: CostModel) -> Option:
    """The option by which all devices shard a dim of the result, or nothing."""
    every = options(item, [(0, 1)], cost)
    if dim is None:
        return next(o for o in every if o.places == (None,))
    return next(o for o in every if o.plan.outputs[0].dims[dim][0].atoms == (0, 1))


def counted(text: str, parallel: OptimizerParallel, *, batch: bool) -> float:
    """Bytes of the states if the batch, or what the weights make, is sharded over all devices."""
    workload = products("v", parallel, text=text)
    seen = flow(workload.program, list(workload.gradients))
    cost = CostModel(MACHINE, MESH, workload.program.env.table, SIZES)
    # Of the products, the batch or the features of the result; so of the transposed weight.
    ways = {"MatMul": 0 if batch else 1, "Transpose": None if batch else 1}
    chosen = [_sharded(item, ways.get(item.view.node.op_type), cost) for item in seen.items]
    weights = CostWeights(parallel=parallel, kept=0.0, working=0.0)
    problem = build(seen, [(option,) for option in chosen], cost, {}, weights)
    memory = problem.memory([0] * len(problem.variables))
    return memory - saved_behind(seen, chosen, cost, weights, MOMENTS)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("level", [0, 1])
def test_they_are_counted_alike(level: int, batch: bool) -> None:
    """Two weights of 256 KiB, with gradients; of the moments, each of four devices has a quarter.

    A transposed weight is also held as its product reads it.
    """
    parallel = OptimizerParallel(level, threshold=0)
    direct, turned = (counted(text, parallel, batch=batch) for text in (TEXT, TURNED))
    size = (1 << 18) / (1 if batch else 4)
    # The constants of the loss have 16 bytes.
    assert direct == 2 * size * (4 if level == 0 or not batch else 2.5) + 16
    assert turned == direct + size
