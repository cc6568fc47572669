"""Random programs trained under random strategies: all devices together differentiate as one does.

The loss is the sum of all results, each weighted at random. Forward nodes have strategies of their
own, which their backward nodes follow; parameters and inputs lie at random. As in
`test_programs.py` a case is one seed, `ONNXPAR_FUZZ_SEED` shifts the seeds and `ONNXPAR_FULL` runs
many more; `case(seed)` repeats a failure.
"""

import os
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar.autodiff.differentiate import Differentiated, differentiate
from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Symbol
from onnxpar.facts.program import Program
from onnxpar.frontend.expand import expand_by_body
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.builder import ir_shape
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.propagation.propagate import propagate
from tests.lockstep import Array, run_model
from tests.random_programs import Sizes, feeds, is_narrow, program, taken, unless_refused
from tests.random_strategies import pinned, seeds_of
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 600 if FULL else 10
BATCHES = 10
LOSS, WEIGHT = "onnxpar.loss", "onnxpar.weight."
# As in test_programs.py; a LayerNormalization of float64 has its statistics in float32.
EXACT, ROUNDED = 1e-9, 2e-3


def trained(
    proto: onnx.ModelProto, constraints: dict[str, Symbol]
) -> tuple[Program, Differentiated] | None:
    """The program, its loss, and gradients by its parameters and inputs; None without a loss."""
    model = normalise(ir.from_proto(proto))
    graph = model.graph
    builder = GlobalBuilder.over(
        graph, model.opset_imports[""], shapes(model, symbol_table(model, constraints))
    )
    variables = [
        v
        for v in (*graph.inputs, *graph.initializers.values())
        if v.dtype is not None and v.dtype.is_floating_point() and (v.name or "")[0] in "wx"
    ]
    kind = variables[0].dtype
    total: ir.Value | None = None
    for result in [v for v in graph.outputs if v.dtype == kind]:
        shape = builder.shape_of(result)
        weight = ir.Value(name=f"{WEIGHT}{result.name}")
        builder.declare(weight, kind, shape)
        weight.shape = ir_shape(shape)
        graph.inputs.append(weight)
        part = builder.op("Mul", result, weight, shape=shape)
        part = builder.reduce("ReduceSum", part, range(len(shape))) if shape else part
        total = part if total is None else builder.op("Add", total, part, shape=[])
    if total is None:
        return None
    del graph.outputs[:]
    builder.rename(total, LOSS)
    graph.outputs.append(total)
    expand_by_body(model, REGISTRY, builder, variables, total)
    done = differentiate(model, builder.env, REGISTRY, LOSS, [v.name or "" for v in variables])
    return Program.of(model, done.env, REGISTRY), done


def partitioned(analysed: Program, done: Differentiated, seeds: Seeds) -> PartitionedModel:
    a = analysed
    plan = propagate(a, seeds, done.links)
    return partition(a, plan)


def by_seed(analysed: Program, done: Differentiated, seed: int) -> PartitionedModel | None:
    """The program by the strategy of a seed; None where a random split is refused."""
    inputs = [v for v in analysed.model.graph.inputs if not (v.name or "").startswith(WEIGHT)]
    seeds = seeds_of(analysed, inputs, seed)
    backward = {n.name for n in analysed.model.graph if GRADIENT_OF in n.metadata_props}
    drawn = pinned(analysed, seeds, seed)
    forward = {name: found for name, found in drawn.nodes.items() if name not in backward}
    seeds = replace(drawn, nodes=forward)
    return unless_refused(lambda: partitioned(analysed, done, seeds))


def training_program(
    seed: int,
) -> tuple[Sizes, onnx.ModelProto, Program, Differentiated] | None:
    """A random program, also with its loss and gradients; None without a loss."""
    sizes, proto = Sizes(seed), program(seed)
    found = trained(proto, sizes.constraints)
    return None if found is None else (sizes, proto, *found)


def case(seed: int) -> bool:
    """Runs a case; whether its strategy was taken."""
    found = training_program(seed)
    if found is None:
        return False
    sizes, proto, analysed, done = found
    parted = by_seed(analysed, done, seed)
    if parted is None:
        return False
    one = partitioned(analysed, done, Seeds(Mesh.of(), {}, {}))
    # The operator has its statistics in float32.
    narrow = any(n.op_type == "LayerNormalization" for n in proto.graph.node) or is_narrow(proto)
    symbols = sizes.draw()
    data = feeds(proto, symbols, seed) | weights(analysed, symbols, seed)
    # Few operators have float64 in onnxruntime.
    want = run_model(one, data, symbols, reference=True)
    got = run_model(parted, data, symbols, reference=True)
    assert got.keys() == want.keys() == {LOSS, *done.gradients.values()}
    # Of all gradients, since each may be the difference of some that are larger.
    scale = max(1.0, *(float(np.abs(array).max()) for array in want.values()))
    assert np.isfinite(scale), "the undivided program itself overflows"
    for name, array in want.items():
        where = f"{name!r} at {symbols}"
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, where
        error = float(np.abs(got[name] - array).max())
        bound = (ROUNDED if narrow else EXACT) * scale
        assert error <= bound, f"{where}: expected an error up to {bound:.1e}, got {error:.1e}"
    return True


def weights(analysed: Program, symbols: dict[str, int], seed: int) -> dict[str, Array]:
    """What the results are weighted by."""
    rng, env = np.random.default_rng(seed), analysed.env
    made: dict[str, Array] = {}
    for value in analysed.model.graph.inputs:
        name = value.name or ""
        if name.startswith(WEIGHT) and value.dtype is not None:
            shape = [int(env.table.evaluate(d, symbols)) for d in env.shapes[name]]
            made[name] = rng.standard_normal(shape).astype(value.dtype.numpy())
    return made


@pytest.mark.parametrize("batch", range(BATCHES))
def test_training_programs(batch: int) -> None:
    count = CASES // BATCHES
    found = taken(case, range(SEED + batch * count, SEED + (batch + 1) * count))
    assert found, "some random strategies are taken"
