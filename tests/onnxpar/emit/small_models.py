"""Small partitioned models, built by hand, for tests of emission and directories."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import sympy
from numpy.typing import NDArray

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import Symbol, SymbolTable, dim_symbol
from onnxpar.graph.builder import ir_shape
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.plan import Plan
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partitioned_model import GraphValue, Parameter, PartitionedModel

BATCH = dim_symbol("batch")


def sharding_of(*dims: Sequence[tuple[int | sympy.Expr, Sequence[int]]]) -> Sharding:
    """The sharding whose dims are the given lists of (size, atoms)."""
    return Sharding(tuple(tuple(Component(n, tuple(a)) for n, a in dim) for dim in dims))


def parameter(
    name: str,
    tensor: NDArray[np.generic] | ir.TensorProtocol,
    sharding: Sharding,
    mesh: Mesh,
) -> Parameter:
    """A parameter with this content, and its local value."""
    content = ir.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    source = ir.Value(
        name=name,
        type=ir.TensorType(content.dtype),
        shape=ir.Shape([int(s) for s in sharding.shape]),
        const_value=content,
    )
    local = ir.Value(name=name, type=source.type, shape=ir_shape(sharding.local_shape(mesh)))
    return Parameter(name, source, local, sharding)


def graph_input(name: str, dtype: ir.DataType, sharding: Sharding, mesh: Mesh) -> GraphValue:
    """An input of the partitioned model."""
    local = ir.Value(
        name=name, type=ir.TensorType(dtype), shape=ir_shape(sharding.local_shape(mesh))
    )
    return GraphValue(name, local, sharding)


def assemble(
    builder: LocalBuilder,
    inputs: Sequence[GraphValue],
    outputs: Mapping[str, tuple[ir.Value, Sharding]],
    parameters: Sequence[Parameter],
    *,
    ir_version: int = 11,
    functions: Sequence[ir.Function] = (),
    program: str = "model",
) -> PartitionedModel:
    """The partitioned model of what was built."""
    ends = []
    for name, (value, sharding) in outputs.items():
        value.name = name
        ends.append(GraphValue(name, value, sharding))
    source = ir.Model(
        ir.Graph([], [], nodes=[], opset_imports={"": builder.opset}, name="net"),
        ir_version=ir_version,
        functions=functions,
    )
    plan = Plan(
        builder.mesh,
        {},
        {i.name: i.sharding for i in inputs},
        {p.name: p.sharding for p in parameters},
        {o.name: o.sharding for o in ends},
    )
    return PartitionedModel(
        program,
        source,
        builder,
        tuple(inputs),
        tuple(ends),
        tuple(parameters),
        plan,
        REGISTRY,
        dict(builder.table),
        (),
    )


def exposing(parameters: Sequence[Parameter], mesh: Mesh) -> PartitionedModel:
    """A model whose outputs are the local shards of its parameters."""
    builder = LocalBuilder(SymbolTable({}), 21, mesh)
    outputs = {}
    for p in parameters:
        shape = p.sharding.local_shape(mesh)
        value = builder.op("Identity", p.local, shape=shape)
        outputs[f"{p.name}.shard"] = (value, Sharding.replicated(shape))
    return assemble(builder, [], outputs, parameters)


def two_layers(mesh: Mesh, seed: int = 0) -> PartitionedModel:
    """relu(x @ up) @ down over the axes dp and tp: up by columns, down by rows, one AllReduce."""
    rng = np.random.default_rng(seed)
    dp, tp = mesh.axis_atoms("dp"), mesh.axis_atoms("tp")
    builder = LocalBuilder(SymbolTable({"batch": Symbol(divisor=mesh.count(dp))}), 21, mesh)
    x = graph_input("x", ir.DataType.FLOAT, sharding_of([(BATCH, dp)], [(8, [])]), mesh)
    up = rng.standard_normal((8, 16)).astype(np.float32)
    down = rng.standard_normal((16, 4)).astype(np.float32)
    first = parameter("up", up, sharding_of([(8, [])], [(16, tp)]), mesh)
    second = parameter("down", down, sharding_of([(16, tp)], [(4, [])]), mesh)
    rows = BATCH / mesh.count(dp)
    builder.scope = "/net"
    hidden = builder.op("MatMul", x.local, first.local, shape=[rows, 16 // mesh.count(tp)])
    hidden = builder.op("Relu", hidden, shape=[rows, 16 // mesh.count(tp)])
    partial = builder.op("MatMul", hidden, second.local, shape=[rows, 4])
    y = builder.collective(
        "AllReduce",
        partial,
        tp,
        shape=[rows, 4],
        moved=rows * 16,
        value="y",
        reason="output y",
        reduction="sum",
    )
    out = sharding_of([(BATCH, dp)], [(4, [])])
    return assemble(builder, [x], {"y": (y, out)}, [first, second])
