"""Dropout: random numbers of a counter-based generator, equal on every mesh.

onnxruntime's own Dropout keeps hidden state and counts local elements, so that no two runs or
divisions agree. Here every element draws by its global index (Philox4x32-10, Salmon et al., 2011),
keyed by the system inputs seed, step and micro-batch, and by the node's name.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import onnx_ir as ir

from onnxpar.analysis.shapes import NodeView
from onnxpar.ops.broadcast import axis_names
from onnxpar.ops.forms import BOOL, FLOAT, cast, zero_unless
from onnxpar.ops.local import LocalNode
from onnxpar.ops.registry import OpDef
from onnxpar.ops.rule import OpRule, parse_rule
from onnxpar.passes.builder import COUNTERS, DOMAIN, INT64
from onnxpar.passes.padding import block_start
from onnxpar.sharding import Component, local_size
from onnxpar.symbols import Dim

_RATIO, _TRAINING = 1, 2


def trains(view: NodeView) -> bool:
    """Whether a Dropout node may drop anything."""
    if not view.has(_TRAINING):
        return False
    known = view.const(_TRAINING)
    return known is None or bool(known)


def dropout_rule(view: NodeView) -> OpRule:
    """Dropout: every dim; parts of a pending sum drop the same elements on every device."""
    names = " ".join(axis_names(len(view.shape(0))))
    operands = names + "".join(", ." if view.has(i) else ", -" for i in range(1, view.arity))
    outputs = [names] * len(view.node.outputs)
    text = f"{operands} -> {', '.join(outputs)}"
    if len(outputs) == 1:
        text += "; linear: sum 0" if trains(view) else "; linear: any 0"
    return parse_rule(text)


def dropout_local(node: LocalNode) -> Sequence[ir.Value]:
    """Keeps an element where its random number is at least the ratio, and scales what is kept."""
    if not trains(node.view):
        y, *mask = node.copy()
        return [y, *(_masked(node, m) for m in mask)]
    shape = node.out_shape()
    x = node.input(0)
    number = uniform(node, shape)
    ratio = node.builder.const(np.array(0.5), FLOAT)
    if node.view.has(_RATIO):
        ratio = cast(node, node.input(_RATIO), FLOAT, [])
    kept = node.op("GreaterOrEqual", number, ratio, dtype=BOOL, shape=shape)
    if node.view.const(_TRAINING) is None:
        idle = node.op("Not", node.input(_TRAINING), shape=[])
        kept = node.op("Or", kept, idle, shape=shape)
        ratio = node.op("Where", idle, node.builder.const(np.array(0), FLOAT), ratio, dtype=FLOAT)
    one = node.builder.const(np.array(1), FLOAT)
    scale = node.op("Reciprocal", node.op("Sub", one, ratio, shape=[]), shape=[])
    scaled = node.op("Mul", x, cast(node, scale, x.dtype, []), shape=shape)
    y = zero_unless(node, kept, scaled, shape)
    return [y, _masked(node, kept)] if len(node.view.node.outputs) > 1 else [y]


def _masked(node: LocalNode, kept: ir.Value) -> ir.Value:
    """The mask as an output: false on padding, as the partitioner may count on."""
    for factor in node.split_factors():
        kept = node.masked(kept, 0, factor, 0)
    return kept


def uniform(node: LocalNode, shape: Sequence[Dim]) -> ir.Value:
    """Emits float32 numbers in [0, 1) for output 0, of local shape `shape`.

    Each is a function of the key and of the element's global row-major index alone. A merged dim
    is drawn as one dim for each of its components, which leaves that index as it is.
    """
    builder = node.builder
    parts: list[Component] = [c for dim in node.plan.outputs[0].dims for c in dim]
    local = [local_size(c, node.mesh, node.view.table) for c in parts]
    name = crc32(node.view.name.encode())
    key = builder.ops(
        "Concat",
        [*map(builder.system_input, COUNTERS), builder.const([name])],
        [(INT64, [4])],
        {"axis": 0},
    )[0]
    drawn = builder.ops(
        "Philox",
        [key, builder.shape(local), builder.shape([c.size for c in parts]), _starts(node, parts)],
        [(FLOAT, local)],
        {"distribution": "uniform", "dtype": int(FLOAT)},
        domain=DOMAIN,
    )[0]
    return builder.reshape(drawn, shape)


def _starts(node: LocalNode, parts: Sequence[Component]) -> ir.Value:
    if not any(c.atoms for c in parts):
        return node.builder.const(np.zeros(len(parts), np.int64))
    starts = [block_start(node.builder, c) for c in parts]
    if len(starts) == 1:
        return starts[0]
    return node.builder.ops("Concat", starts, [(INT64, [len(starts)])], {"axis": 0})[0]


DEFS = (OpDef("", "Dropout", 7, dropout_rule, dropout_local, keeps_zero=True),)
