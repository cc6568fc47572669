"""Running sums: over a split axis a scan of each part, and the sum of the parts before it.

Of each part one total a row travels (the exclusive prefix of a parallel scan; Blelloch, 1990,
"Prefix sums and their applications").
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.analysis.shapes import NodeView
from onnxpar.mesh import Atoms
from onnxpar.ops.broadcast import axis_names
from onnxpar.ops.forms import BOOL, copy_or, iota, normal_axes, reduce, reduced, zero_unless
from onnxpar.ops.gradients.reduce import cumsum_gradient
from onnxpar.ops.local import LocalNode
from onnxpar.ops.registry import OpDef
from onnxpar.ops.rule import OpRule, parse_rule
from onnxpar.passes.builder import INT64
from onnxpar.sharding import DimSharding, local_size
from onnxpar.symbols import Dim


def _axis(view: NodeView) -> int:
    axis = view.ints(1, "axis")
    return normal_axes(view, axis or (0,), len(view.shape(0)), "axis")[0]


def cumsum_rule(view: NodeView) -> OpRule:
    """CumSum: every dim may be split; the running one communicates a total a row."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    return parse_rule(f"{text}, . -> {text}; special: {names[_axis(view)]}; linear: sum 0")


def cumsum_local(node: LocalNode) -> Sequence[ir.Value]:
    """The running sum of the local part, and the totals of the parts before it."""
    axis, shape = _axis(node.view), node.in_shape(0)
    factor = axis_names(len(shape))[axis]
    x = node.masked(node.input(0), 0, factor, 0, known_zero=node.zero[0])
    parts = node.components(factor)
    sizes = [local_size(c, node.mesh, node.view.table) for c in parts]
    tall = [*shape[:axis], *sizes, *shape[axis + 1 :]]
    exclusive = bool(node.view.attr("exclusive", 0))
    y = _scan(node, node.builder.reshape(x, tall), tall, axis, parts, exclusive=exclusive)
    return (node.builder.reshape(y, shape),)


def _scan(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    axis: int,
    parts: DimSharding,
    *,
    exclusive: bool,
) -> ir.Value:
    """The running sum over the dims from `axis` on that `parts` are, as over one dim."""
    at = axis + len(parts) - 1
    atoms = parts[-1].atoms
    reverse = int(node.view.attr("reverse", 0))
    where = node.builder.const(at)
    y = node.op("CumSum", x, where, shape=shape, exclusive=int(exclusive), reverse=reverse)
    kept = reduced(shape, [at])
    total = reduce(node, "ReduceSum", x, [at], shape)
    if atoms:
        count = node.mesh.count(atoms)
        totals = node.all_gather(total, atoms, kept, at)
        gathered = [*kept[:at], count, *kept[at + 1 :]]
        # Without the parts that come later, this one among them.
        side = "Greater" if reverse else "Less"
        earlier = node.op(
            side, iota(node, count), _position(node, atoms), dtype=BOOL, shape=[count]
        )
        earlier = node.builder.reshape(earlier, [count, *[1] * (len(shape) - at - 1)])
        before = zero_unless(node, earlier, totals, gathered)
        before = reduce(node, "ReduceSum", before, [at], gathered)
        y = node.op("Add", y, before, shape=shape)
        total = reduce(node, "ReduceSum", totals, [at], gathered)
    if len(parts) == 1:
        return y
    rows = [*shape[:at], *shape[at + 1 :]]
    total = node.builder.reshape(total, rows)
    before = _scan(node, total, rows, axis, parts[:-1], exclusive=True)
    return node.op("Add", y, node.builder.reshape(before, kept), shape=shape)


def _position(node: LocalNode, atoms: Atoms) -> ir.Value:
    """Which of the parts that atoms cut this rank has, int64 [1]."""
    total = node.builder.coord(atoms[0])
    for atom in atoms[1:]:
        size = node.builder.const([node.mesh.atoms[atom]])
        total = node.op("Mul", total, size, dtype=INT64, shape=[1])
        total = node.op("Add", total, node.builder.coord(atom), dtype=INT64, shape=[1])
    return total


DEFS = (OpDef("", "CumSum", 11, cumsum_rule, copy_or(cumsum_local), gradient=cumsum_gradient),)
