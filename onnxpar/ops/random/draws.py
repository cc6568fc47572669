"""Dropout and other operators that draw random numbers, which are the same on every mesh.

onnxruntime's own kernels keep hidden state and count local elements, so different runs, different
meshes and even replicas get different numbers. Here a counter-based generator gives each element a
number by its global index (Philox4x32-10, Salmon et al., 2011). Its key consists of the system
inputs seed, step and micro-batch and of the node's name; the attribute `seed` is not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.sharding import Component, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64
from onnxpar.graph.local_builder import COUNTER_INPUTS
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import block_start
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.fallback import require_readable
from onnxpar.ops.local_helpers import BOOL, DOUBLE, FLOAT, work_dtype, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.old_node import OldNode, Upgrade, operands
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, LocalFn, OpDef, RuleFn, for_ranks
from onnxpar.ops.random.dropout_gradient import dropout_gradient, drops
from onnxpar.ops.slots import Precision, always
from onnxpar.ops.view.reshape import further

_RATIO, _TRAINING = 1, 2


def dropout_rule(view: NodeView) -> OpRule:
    """Dropout: every dim; a sum may stay partial, as all devices drop the same elements."""
    names = " ".join(axis_names(len(view.shape(0))))
    operands = names + further(view)
    outputs = [names] * len(view.node.outputs)
    text = f"{operands} -> {', '.join(outputs)}"
    if len(outputs) == 1:
        text += "; linear: sum 0" if drops(view.node) else "; linear: any 0"
    return parse_rule(text)


def dropout_local(node: LocalNode) -> Sequence[ir.Value]:
    """Keeps an element if its random number is at least the ratio, and scales kept elements."""
    shape = node.out_shape()
    if not drops(node.view.node):
        # The operand, and a mask of true: onnxruntime has no Dropout of opset 22 for CUDA.
        idle_outputs = [node.op("Identity", node.input(0), shape=shape)]
        if len(node.view.node.outputs) > 1:
            true = node.builder.const(np.array(True))
            mask = node.op("Expand", true, node.builder.sizes(shape), dtype=BOOL, shape=shape)
            idle_outputs.append(_masked(node, mask))
        return idle_outputs
    x = node.input(0)
    number = drawn(node, shape, "uniform")
    ratio = node.builder.const(np.array(0.5), FLOAT)
    if node.has(_RATIO):
        ratio = node.builder.cast(node.input(_RATIO), FLOAT)
    kept = node.op("GreaterOrEqual", number, ratio, dtype=BOOL, shape=shape)
    if node.view.const(_TRAINING) is None:
        idle = node.op("Not", node.input(_TRAINING), shape=[])
        kept = node.op("Or", kept, idle, shape=shape)
        none = node.builder.const(np.array(0), FLOAT)
        ratio = node.op("Where", idle, none, ratio, dtype=FLOAT, shape=[])
    one = node.builder.const(np.array(1), FLOAT)
    scale = node.op("Reciprocal", node.op("Sub", one, ratio, shape=[]), shape=[])
    scaled = node.op("Mul", x, node.builder.cast(scale, x.dtype), shape=shape)
    y = zero_unless(node, kept, scaled)
    return [y, _masked(node, kept)] if len(node.view.node.outputs) > 1 else [y]


def _masked(node: LocalNode, kept: ir.Value) -> ir.Value:
    """The mask as an output: false on padding, since the record says that zeros are kept."""
    for factor in node.split_factors():
        kept = node.masked(kept, 0, factor, 0)
    return kept


def stop_dropping(graph: ir.Graph) -> None:
    """Puts every Dropout of a graph, and of its bodies, in inference mode."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if _is_dropout(node) and drops(node):
            node.replace_input_with(_TRAINING, None)


def idle_dropouts(graph: ir.Graph) -> list[str]:
    """Returns the names of the Dropout nodes in inference mode, which drop nothing."""
    nodes = ir.traversal.RecursiveGraphIterator(graph)
    return [node.name or "" for node in nodes if _is_dropout(node) and not drops(node)]


def _is_dropout(node: ir.Node) -> bool:
    return not node.domain and node.op_type == "Dropout"


def drawn(node: LocalNode, shape: Sequence[Dim], distribution: str) -> ir.Value:
    """Emits float32 numbers for output 0, of local shape `shape`.

    They are "uniform" in [0, 1), or "normal" with mean 0 and deviation 1. Each depends only on the
    key and on the element's global row-major index. A merged dim counts as one dim for each of its
    components, which does not change this index.
    """
    builder = node.builder
    parts: list[Component] = [c for dim in node.plan.outputs[0].dims for c in dim]
    local = [local_size(c, node.mesh, node.table) for c in parts]
    name = crc32(node.view.drawing_name.encode())
    key = builder.ops(
        "Concat",
        [*map(builder.system_input, COUNTER_INPUTS), builder.const([name])],
        [(INT64, [4])],
        {"axis": 0},
    )[0]
    numbers = builder.ops(
        "Philox",
        [key, builder.sizes(local), builder.sizes([c.size for c in parts]), _starts(node, parts)],
        [(FLOAT, local)],
        {"distribution": distribution, "dtype": int(FLOAT)},
        domain=DOMAIN,
    )[0]
    return builder.reshape(numbers, shape)


def _starts(node: LocalNode, parts: Sequence[Component]) -> ir.Value:
    if not any(c.atoms for c in parts):
        return node.builder.const(np.zeros(len(parts), np.int64))
    starts = [block_start(node.builder, c) for c in parts]
    if len(starts) == 1:
        return starts[0]
    return node.builder.ops("Concat", starts, [(INT64, [len(starts)])], {"axis": 0})[0]


def noise_rule(view: NodeView) -> OpRule:
    """Every dim is a factor of the output alone, so each device draws its shard.

    Raises:
        ModelError: A size depends on data, or the element type is not a floating-point type.
    """
    require_readable(view, "the sizes of the output", view.out_shape())
    dtype = view.node.outputs[0].dtype
    if dtype is None or not dtype.is_floating_point():
        raise view.fail(f"expected numbers of a floating-point type, got {dtype}")
    rule = parse_rule(f"* -> {' '.join(axis_names(len(view.out_shape())))}")
    return replace(rule, inputs=rule.inputs[: view.arity])


def _noise(distribution: str, shift: str, scale: str) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def local(node: LocalNode) -> Sequence[ir.Value]:
        shape = node.out_shape()
        dtype = work_dtype(node.out_dtype())
        low = float(node.attr(shift, 0.0))
        factor = float(node.attr(scale, 1.0))
        if distribution == "uniform":
            factor -= low
        x = node.builder.cast(drawn(node, shape, distribution), dtype)
        for op_type, number in (("Mul", factor), ("Add", low)):
            constant = node.builder.const(np.array(number), dtype)
            x = node.op(op_type, x, constant, dtype=dtype, shape=shape)
        return (node.builder.cast(x, node.out_dtype()),)

    local.__doc__ = (
        f"Draws each element by its global index ({distribution}, with the node's {shift} and "
        f"{scale})."
    )
    return local


def bernoulli_rule(view: NodeView) -> OpRule:
    """Bernoulli: every dim; a max or min may stay partial: all devices draw equal numbers."""
    names = " ".join(axis_names(len(view.shape(0))))
    dtype = view.node.outputs[0].dtype
    floats = dtype is not None and dtype.is_floating_point()
    return parse_rule(f"{names} -> {names}" + ("; linear: max 0, min 0" if floats else ""))


def bernoulli_local(node: LocalNode) -> Sequence[ir.Value]:
    """Gives 1 where the element's random number is less than its probability."""
    shape = node.out_shape()
    dtype = work_dtype(node.input(0).dtype)
    chance = node.builder.cast(node.input(0), dtype)
    number = node.builder.cast(drawn(node, shape, "uniform"), dtype)
    hit = node.op("Less", number, chance, dtype=BOOL, shape=shape)
    return (node.builder.cast(hit, node.out_dtype()),)


def multinomial_rule(view: NodeView) -> OpRule:
    """Multinomial: rows and samples may be sharded; the probabilities of a row are replicated."""
    return parse_rule("b C -> b S; replicated: C")


def multinomial_local(node: LocalNode) -> Sequence[ir.Value]:
    """Counts the running sums of a row's probabilities that the random number exceeds."""
    shape = node.out_shape()
    rows, classes = node.in_shape(0)
    # In float64 the product of the total and a uniform number below 1 is below the total.
    x = node.builder.cast(node.input(0), DOUBLE)
    top = node.builder.reduce("ReduceMax", x, [1], keepdims=True)
    low = node.op("Sub", x, top, shape=[rows, classes])
    chances = node.op("Exp", low, shape=[rows, classes])
    ends = node.op("CumSum", chances, node.builder.const(1), shape=[rows, classes])
    total = node.builder.reduce("ReduceSum", chances, [1], keepdims=True)
    number = node.builder.cast(drawn(node, shape, "uniform"), DOUBLE)
    place = node.op("Mul", number, total, shape=shape)
    tall = [*shape, classes]
    place = node.builder.reshape(place, [*shape, 1])
    ends = node.builder.reshape(ends, [rows, 1, classes])
    passed = node.op("Less", place, ends, dtype=BOOL, shape=tall)
    passed = node.builder.cast(node.op("Not", passed, shape=tall), INT64)
    count = node.builder.reduce("ReduceSum", passed, [2], keepdims=True)
    # The running sum and the total may differ in their last bits.
    last = node.builder.size(classes - 1)
    count = node.op("Min", node.builder.reshape(count, shape), last, shape=shape)
    return (node.builder.cast(count, node.out_dtype()),)


_NORMAL = _noise("normal", "mean", "scale")
_UNIFORM = _noise("uniform", "low", "high")


def _drawing(op_type: str, since: int, rule: RuleFn, local: LocalFn) -> OpDef:
    return OpDef("", op_type, since, rule, local, gradient=NOT_DIFFERENTIABLE, draws=always)


def _mask_as_data(old: OldNode) -> None:
    """The mask had the type of the data."""
    if len(old.node.outputs) > 1 and old.node.outputs[1].name:
        old.follow(1, "CastLike", old.input(0))


DEFS = (
    OpDef(
        "",
        "Dropout",
        7,
        dropout_rule,
        dropout_local,
        dropout_gradient,
        keeps_zero=True,
        draws=drops,
        host_operands=(_RATIO, _TRAINING),
        precision=Precision(follows=True, written_out=True),
        upgrades={10: Upgrade(_mask_as_data), 12: operands(ratio=1)},
    ),
    _drawing("RandomNormal", 1, noise_rule, _NORMAL),
    _drawing("RandomNormalLike", 1, noise_rule, _NORMAL),
    _drawing("RandomUniform", 1, noise_rule, _UNIFORM),
    _drawing("RandomUniformLike", 1, noise_rule, _UNIFORM),
    _drawing("Bernoulli", 15, bernoulli_rule, bernoulli_local),
    _drawing("Multinomial", 7, multinomial_rule, multinomial_local),
    # Its operands are the key, and sizes and starts of the numbers.
    for_ranks("Philox", host_operands=(0, 1, 2, 3)),
)
