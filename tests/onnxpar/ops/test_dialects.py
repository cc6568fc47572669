"""The collectives of other runtimes compute what ours do, and what they cannot say is an error."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from onnxpar.core.errors import DialectError
from onnxpar.ops.collective.dialects import DOMAINS, Dialect, translate
from onnxpar_runtime.collectives import Rank, World
from tests.runtime.collectives.teams import Team

SHAPES = ((4, 8, 12), (8, 4, 4))
WORLD = 4
PAIRS = [[0, 1], [2, 3]]
EVERYONE = [list(range(WORLD))]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("AllReduce", {"reduction": r}) for r in ("sum", "max", "min", "prod")),
    *(("AllGather", {"axis": a}) for a in (0, 1, -1)),
    *(("ReduceScatter", {"axis": a, "reduction": r}) for a in (0, 2) for r in ("sum", "max")),
    *(
        ("AllToAll", {"split_axis": s, "concat_axis": c})
        for s, c in product(range(3), range(3))
    ),
]  # fmt: skip


def node(
    op: str, dtype: ir.DataType = ir.DataType.FLOAT, name: str = "here", **attributes: Any
) -> ir.Node:
    """A collective as the partitioner makes it; its result has its name."""
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([None] * 3))
    given = [ir.Attr(k, _kind(v), v) for k, v in attributes.items()]
    made = ir.Node("onnxpar", op, [x], given, num_outputs=2, name=name)
    made.outputs[0].name = name
    return made


def _kind(value: object) -> ir.AttributeType:
    return ir.AttributeType.STRING if isinstance(value, str) else ir.AttributeType.INT


def ours(one: ir.Node, group: Sequence[int]) -> onnx.NodeProto:
    """The node in our words."""
    attributes = {k: a.value for k, a in one.attributes.items()}
    attributes["group"] = list(group)
    return helper.make_node(
        one.op_type, ["x"], [one.name or ""], one.name, domain="onnxpar", **attributes
    )


def translated(
    one: ir.Node, dialect: Dialect, group: Sequence[int], opset: int
) -> tuple[list[onnx.NodeProto], Sequence[onnx.TensorProto]]:
    """The node in another runtime's words, with its group filled in."""
    made = translate(one, dialect, opset, group, WORLD)
    for index in made.groups:
        made.nodes[index].attribute.append(helper.make_attribute("groups", list(group)))
    return list(made.nodes), made.constants


def session(
    rank: Rank,
    dtype: Any,
    outputs: Sequence[str],
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[onnx.TensorProto] = (),
    dialect: Dialect | None = None,
    opset: int = 21,
) -> onnxruntime.InferenceSession:
    """A session of nodes that read `x`."""
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", code, [None] * 3)],
        [helper.make_tensor_value_info(name, code, None) for name in outputs],
        list(constants),
    )
    domains = {"onnxpar": 1} | ({DOMAINS[dialect]: 1} if dialect else {}) | {"": opset}
    imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    # Neither form has tokens here, so the order is that of the nodes.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    rank.register(options, dialect)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def compare(
    dialect: Dialect,
    all_nodes: Sequence[ir.Node],
    groups: list[list[int]],
    opset: int = 21,
    dtype: type = np.float32,
) -> None:
    """Runs collectives in both forms on every rank, at several shapes."""
    names = [one.name or "" for one in all_nodes]

    def act(rank: Rank) -> None:
        group = next(g for g in groups if rank.index in g)
        plain = [ours(one, group) for one in all_nodes]
        pairs = [translated(one, dialect, group, opset) for one in all_nodes]
        nodes = [node for made, _ in pairs for node in made]
        constants = [tensor for _, made in pairs for tensor in made]
        one = session(rank, dtype, names, plain, opset=opset)
        other = session(rank, dtype, names, nodes, constants, dialect, opset)
        for number, shape in enumerate(SHAPES):
            rng = np.random.default_rng([rank.index, number])
            # Small integers: sums and products of four are exact in any order.
            x = rng.integers(-3, 4, shape).astype(dtype)
            wanted, got = (made.run(None, {"x": x}) for made in (one, other))
            for name, left, right in zip(names, wanted, got, strict=True):
                np.testing.assert_array_equal(right, left, err_msg=name)

    with World.threads(WORLD) as world:
        Team(world).run(act)


ALL = [node(op, name=f"{op} {attributes}", **attributes) for op, attributes in CASES]


def test_tensorrt_says_all_in_groups() -> None:
    compare(Dialect.TENSORRT, ALL, PAIRS)


def test_onnxruntime_says_all_of_all_ranks() -> None:
    compare(Dialect.ONNXRUNTIME, ALL, EVERYONE)


@pytest.mark.parametrize("dialect", Dialect)
def test_integers_and_older_opsets(dialect: Dialect) -> None:
    integers = node("AllReduce", ir.DataType.INT64, reduction="sum")
    compare(dialect, [integers], EVERYONE, dtype=np.int64)
    compare(dialect, [node("AllToAll", split_axis=1, concat_axis=2)], EVERYONE, opset=17)


def test_a_group_of_all_ranks_is_not_listed() -> None:
    made = translate(node("AllReduce", reduction="sum"), Dialect.TENSORRT, 21, range(2), 2)
    (one,) = made.nodes
    attributes = {a.name: helper.get_attribute_value(a) for a in one.attribute}
    assert (one.op_type, one.domain, made.groups) == ("DistCollective", "", ())
    assert attributes == {
        "collective_operation": b"all_reduce", "reduce_op": b"sum", "root": -1, "nb_rank": 2,
        "group_size": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "one", "group", "why"),
    [
        (Dialect.TENSORRT, node("Permute"), [0, 1], "it has no such operator"),
        (Dialect.TENSORRT, node("AllGather", ir.DataType.DOUBLE, axis=0), [0, 1],
         "its collectives have no double tensors"),
        (Dialect.TENSORRT, node("AllReduce", ir.DataType.BOOL, reduction="max"), [0, 1],
         "its collectives do not reduce boolean tensors"),
        (Dialect.TENSORRT, node("AllGather", axis=0), [1, 0],
         r"its groups are in the order of the ranks, but the node's is \[1, 0\]"),
        (Dialect.ONNXRUNTIME, node("AllReduce", reduction="sum"), [0, 1],
         "its only group has all 4 ranks, but the node's has 2"),
        (Dialect.ONNXRUNTIME, node("AllGather", ir.DataType.BFLOAT16, axis=0), [0, 1, 2, 3],
         "its collectives have no bfloat16 tensors"),
        (Dialect.ONNXRUNTIME, node("ReduceScatter", axis=0, reduction="prod"), [0, 1, 2, 3],
         "it has no ReduceScatter, and no operator for several to prod"),
    ],
)  # fmt: skip
def test_what_a_dialect_cannot_say(
    dialect: Dialect, one: ir.Node, group: list[int], why: str
) -> None:
    where = rf"node 'here' \({one.op_type}\): cannot be written in the dialect {dialect}: {why}"
    with pytest.raises(DialectError, match=where):
        translate(one, dialect, 21, group, WORLD)
