"""Operators' own counts against those of textbooks, undivided and on one of several devices."""

from collections.abc import Mapping

import numpy as np
import pytest

from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.graph.plan import factor_sizes, shardings
from onnxpar.ops.operator import Missing
from tests.onnxpar.ops.op_harness import Case

MESH = Mesh((), (2, 2))
F = 4  # bytes of a float32
I64 = 8


def work(case: Case, split: Mapping[str, tuple[int, ...]] = {}) -> Work:
    """What one device does; `split` says the atoms of each factor."""
    rule, view = case.rule, case.view
    sizes = factor_sizes(rule, view)
    factors = {name: (Component(sizes[name], atoms),) for name, atoms in split.items()}
    plan = shardings(rule, view, factors, MESH)
    own = case.definition.cost
    model = CostModel(PRESETS["cpu"], MESH, case.env.table, dict(case.sizes))
    return model.node(rule, view, plan, None if isinstance(own, Missing) else own)


MATMUL = Case("y = MatMul(a, b)", {"a": "float[8,16]", "b": "float[16,32]"})
GATHER = Case("y = Gather(t, i)", {"t": "float[1000,64]", "i": "int64[4,8]"})
CONV = Case("y = Conv<pads=[1,1]>(x, w)", {"x": "float[2,8,16]", "w": "float[4,8,3]"})
DEPTHWISE = Case("y = Conv<group=8>(x, w)", {"x": "float[2,8,16]", "w": "float[8,1,3]"})
TRANSPOSED = Case("y = ConvTranspose(x, w)", {"x": "float[2,8,16]", "w": "float[8,4,3]"})
FLAT = {"q": "float[2,8,32]", "k": "float[2,16,32]", "v": "float[2,16,32]"}
ATTENTION = Case("y = Attention<q_num_heads=4, kv_num_heads=4>(q, k, v)", FLAT, opset=23)
CACHED = Case(
    'y, nk, nv = Attention(q, k, v, "", pk, pv)',
    {
        **dict.fromkeys(("q", "k", "v"), "float[2,4,1,8]"),
        **dict.fromkeys(("pk", "pv"), "float[2,4,15,8]"),
    },
    opset=23,
)
HEADS = Case("y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)", FLAT)
LSTM = Case(
    "y = LSTM<hidden_size=8>(x, w, r)",
    {"x": "float[5,4,6]", "w": "float[1,32,6]", "r": "float[1,32,8]"},
)
EXPERTS = Case(
    'y = com.microsoft.MoE<k=2, activation_type="gelu">(x, p, w, "", u)',
    {"x": "float[6,8]", "p": "float[6,4]", "w": "float[4,16,8]", "u": "float[4,8,16]"},
)
SCORES = 2 * 2 * 4 * 8 * 16 * 8  # one product of queries and keys


@pytest.mark.parametrize(
    ("case", "split", "flops"),
    [
        (MATMUL, {}, 2 * 8 * 16 * 32),
        (MATMUL, {"K": (0,), "N": (1,)}, 2 * 8 * 8 * 16),
        (GATHER, {}, 0),
        (CONV, {}, 2 * (2 * 4 * 16) * 8 * 3),
        (CONV, {"N": (0,), "C": (1,)}, 2 * (1 * 4 * 16) * 4 * 3),
        (DEPTHWISE, {}, 2 * (2 * 8 * 14) * 3),
        (DEPTHWISE, {"G": (0, 1)}, 2 * (2 * 2 * 14) * 3),
        (TRANSPOSED, {}, 2 * (2 * 8 * 16) * 4 * 3),
        (ATTENTION, {}, 2 * SCORES),
        (ATTENTION, {"h": (0, 1)}, 2 * SCORES // 4),
        (ATTENTION, {"t": (0,)}, 2 * SCORES // 2),
        (CACHED, {}, 2 * 2 * 2 * 4 * 1 * 16 * 8),
        (HEADS, {"b": (0,), "h": (1,)}, 2 * SCORES // 4),
        (LSTM, {}, 2 * 5 * 4 * 32 * (6 + 8)),
        (LSTM, {"b": (0,)}, 2 * 5 * 2 * 32 * (6 + 8)),
        (EXPERTS, {}, 2 * 6 * 2 * (16 * 8 + 8 * 16)),
        (EXPERTS, {"k": (0, 1)}, 2 * 6 * 2 * (4 * 8 + 8 * 4)),
        (Case("y = Relu(x)", {"x": "float[6,8]"}), {"a": (0,)}, 3 * 8),
        (Case("y = Softmax(x)", {"x": "float[6,8]"}), {}, 6 * 8),
        (Case('y = ScatterElements<reduction="add">(x, i, u)',
              {"x": "float[64,8]", "i": "int64[4,8]", "u": "float[4,8]"}), {}, 0),
        (Case("y = MatMulInteger(a, b)", {"a": "uint8[8,16]", "b": "uint8[16,32]"}), {},
         2 * 8 * 16 * 32),
        (Case("y = ConvInteger(x, w)", {"x": "uint8[2,8,16,5]", "w": "uint8[4,8,3,1]"}), {},
         2 * (2 * 4 * 14 * 5) * 8 * 3),
    ],
)  # fmt: skip
def test_arithmetic(case: Case, split: Mapping[str, tuple[int, ...]], flops: int) -> None:
    assert work(case, split).flops == flops


@pytest.mark.parametrize(
    ("case", "traffic"),
    [
        # Of the table only the rows looked up.
        (GATHER, 2 * 32 * 64 * F + 32 * I64),
        (Case("y = GatherElements(x, i)", {"x": "float[900,8]", "i": "int64[4,8]"}),
         2 * 32 * F + 32 * F),
        (MATMUL, (8 * 16 + 16 * 32 + 8 * 32) * F),
        (Case("y = Transpose(x)", {"x": "float[6,8]"}), 2 * 48 * F),
    ],
)  # fmt: skip
def test_traffic(case: Case, traffic: int) -> None:
    # Operands that are read by selection count as much as the result at most: the int64 indices of
    # GatherElements, of 256 bytes, count as its result's 128.
    assert work(case).traffic == traffic


def test_a_slice_reads_what_it_writes() -> None:
    bounds = {n: np.array([v]) for n, v in (("s", 0), ("e", 2), ("a", 0))}
    case = Case("y = Slice(x, s, e, a)", {"x": "float[600,8]"}, consts=bounds)
    assert work(case).traffic == 2 * 16 * F + 3 * I64


@pytest.mark.parametrize(
    "case",
    [
        Case("y = Identity(x)", {"x": "float[6,8]"}),
        Case("y = Flatten(x)", {"x": "float[6,8]"}),
    ],
)
def test_a_view_is_free(case: Case) -> None:
    found = work(case)
    assert (found.flops, found.traffic, found.seconds) == (0, 0, 0)


def test_what_is_computed_takes_a_time_to_start() -> None:
    case = Case("y = Relu(x)", {"x": "float[6,8]"})
    assert work(case).seconds > PRESETS["cpu"].overhead


def dim(*parts: Component) -> Sharding:
    """A vector's only dim in components."""
    return Sharding((parts,))


@pytest.mark.parametrize(
    ("source", "room"),
    [
        # (6, 4) and (4, 6) share no sharded dim: in between, all 24 elements are replicated.
        (dim(Component(6, (0,)), Component(4)), 24 * F),
        # What is replicated is only sliced, and nothing else is held.
        (dim(Component(6), Component(4)), 0),
    ],
)
def test_what_is_replicated_already_needs_no_room_to_be_gathered(
    source: Sharding, room: int
) -> None:
    target = dim(Component(4, (0,)), Component(6))
    model = CostModel(PRESETS["cpu"], MESH, SymbolTable())
    assert model.room(source, target, F) == room
