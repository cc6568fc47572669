"""ONNX's own backend node tests, sharded along the legal factors of each node.

They run twice: one node at a time in lockstep, with garbage in the padding; and as models (also of
expanded function bodies) that pass through all passes and are run by all ranks over the threads
transport.
"""

import random
from collections import defaultdict
from functools import lru_cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as state

from onnxpar.core.errors import ModelError
from onnxpar.core.mesh import Mesh
from onnxpar.ops.table import REGISTRY
from tests.lockstep import evaluator
from tests.onnxpar.ops.op_harness import FULL, HALF, SEED, Case, chosen
from tools.operators import backend

# ONNX makes all of its cases at once, in ten seconds.
pytestmark = pytest.mark.xdist_group("backend")

MESH = Mesh((), (2, 2))
QUICK_CASES, QUICK_SPLITS = 4, 2

# Operands that models hold as constants; the tests give them as inputs.
_CONSTANT = {
    "Reshape": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "CumSum": (1,),
    "Trilu": (1,),
    "Dropout": (1, 2),
    "Clip": (1, 2),
    "Pad": (1, 2, 3),
    "Tile": (1,),
    "TopK": (1,),
    "OneHot": (1,),
}
# Element types that numpy or the comparison cannot hold.
_TYPES = {
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.UINT16,
    TensorProto.UINT32,
    TensorProto.UINT64,
    TensorProto.BOOL,
}
# What onnxruntime raises for an operator that it has no kernel for.
_NO_KERNEL = (state.Fail, state.NotImplemented, state.InvalidArgument, state.InvalidGraph)


@lru_cache(maxsize=1)
def node_tests() -> dict[str, list[tuple[str, onnx.ModelProto, list[np.ndarray]]]]:
    """All one-node tests by operator."""
    found = defaultdict(list)
    for case in backend.cases().values():
        if case.op_type:
            found[case.op_type].append((case.name, case.model, list(case.feeds.values())))
    return found


def as_case(model: onnx.ModelProto, arrays: list[np.ndarray]) -> Case | None:
    """The case of a backend test; None where its types are not of dense numbers."""
    values = [*model.graph.input, *model.graph.output]
    if any(v.type.tensor_type.elem_type not in _TYPES for v in values):
        return None
    if not all(isinstance(a, np.ndarray | np.generic) and a.size for a in arrays):
        return None
    model = onnx.ModelProto.FromString(model.SerializeToString())
    node = model.graph.node[0]
    node.name = "node"
    feeds = {v.name: np.asarray(a) for v, a in zip(model.graph.input, arrays, strict=True)}
    fixed = {node.input[i] for i in _CONSTANT.get(node.op_type, ()) if i < len(node.input)}
    fixed |= {n for n in node.input if node.op_type.startswith("Reduce") and n in node.input[1:]}
    for value in [v for v in model.graph.input if v.name in fixed]:
        model.graph.input.remove(value)
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds[value.name], value.name))
    opset = next(o.version for o in model.opset_import if not o.domain)
    consts = {n: feeds.pop(n) for n in fixed if n}
    return Case(
        str(onnx.printer.to_text(node)),
        consts=consts,
        feeds=feeds,
        opset=opset,
        reference=not runs(model, feeds),
        rtol=HALF if any(a.dtype == np.float16 for a in feeds.values()) else 1e-5,
        proto=model,
    )


def runs(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    """Whether onnxruntime has the node."""
    try:
        evaluator(model, False)(feeds)
    except _NO_KERNEL:
        return False
    return True


@pytest.mark.parametrize("op_type", sorted({d.op_type for d in REGISTRY.defs}))
def test_backend_nodes_hold_when_they_are_sharded(op_type: str) -> None:
    for name, model, arrays in chosen(node_tests()[op_type], QUICK_CASES):
        case = as_case(model, arrays)
        if case is None:
            continue
        try:
            splits = list(case.assignments(MESH))
        except ModelError:
            continue  # replicated
        if not case.stands_alone:
            continue  # folded or replaced; models are sharded below
        for factors in chosen(splits, QUICK_SPLITS):
            try:
                case.check(MESH, factors)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


SHARDED = 24 if not FULL else None


def test_complete_models_are_sharded_and_run() -> None:
    """A sample of what `tools/operator_table.py --run` does with all."""
    names = sorted(backend.cases())
    draw = random.Random(SEED)
    found: dict[str, list[str]] = defaultdict(list)
    for name in names if SHARDED is None else draw.sample(names, SHARDED):
        outcome = backend.examine(backend.cases()[name], 1, SEED)
        if outcome is not None:
            found[outcome.status].append(f"{name}: {outcome.detail}")
    assert not found[backend.WRONG] and not found[backend.CRASHED], dict(found)
    assert found[backend.PASSED]
