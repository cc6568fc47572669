"""Products and look-ups with weights of few bits, in blocks along the contraction.

A weight of N rows and K columns is stored as `[N, blocks, bytes of a block]`, with one scale (and
perhaps one zero point) for each block (`MatMulNBits` and `GatherBlockQuantized` of onnxruntime's
contrib operators). A block cannot be sharded: the contraction is sharded between blocks, and where
a byte holds several zero points, between these bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.matmul import on_first
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.index.gather import indexed_place
from onnxpar.ops.local_helpers import normal_axis, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import selects
from onnxpar.ops.operator import Missing, NotDifferentiable, OpDef
from onnxpar.ops.parts import PartForm, Shapes
from onnxpar.ops.quantized.inference import infer_gather_block_quantized, infer_matmul_bnb4

_ZERO_POINTS, _GROUP_INDEX, _BIAS = 3, 4, 5
_INTEGERS = NotDifferentiable("its weights are integers with few bits")
_TRAIN_DEQUANTISED = Missing("the weight holds integers; train a dequantised model")


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a quantised axis in the text of a rule.

    Attributes:
        blocks: A dim with one element for each block.
        packed: A dim with one byte for several blocks.
        inside: The axis itself: the blocks, then the elements of a block.
        clause: The clause that replicates the factors inside a block or a byte.
        sizes: Sizes of the factors.
    """

    blocks: str
    packed: str
    inside: str
    clause: str
    sizes: dict[str, Dim]


_REPLICATED = _Blocks("1", "1", "1", "", {})


def _blocks(elements: int, block: int, per_byte: int) -> _Blocks:
    """Names the blocks of an axis; a byte holds the zero points of `per_byte` blocks."""
    count, rest = divmod(elements, block)
    if rest or count % per_byte:
        return _REPLICATED
    sizes: dict[str, Dim] = {"z": count // per_byte, "q": block}
    if per_byte == 1:
        return _Blocks("z", "z", "(z q)", "; replicated: q", sizes)
    return _Blocks("(z p)", "z", "(z p q)", "; replicated: p q", {**sizes, "p": per_byte})


def _per_byte(view: NodeView, index: int, bits: int) -> int:
    """Zero points in a byte; 1 if there are none, or if they are not packed integers."""
    value = view.node.inputs[index] if view.has(index) else None
    return 8 // bits if value is not None and value.dtype == ir.DataType.UINT8 else 1


def _flat(view: NodeView, index: int, rows: str, columns: str) -> str:
    """A table of rows and columns, which older models store flattened."""
    if not view.has(index):
        return "-"
    if len(view.shape(index)) > 1:
        return f"{rows} {columns}"
    return "1" if columns == "1" else f"({rows} {columns.strip('()')})"


def matmul_nbits_rule(view: NodeView) -> OpRule:
    """MatMulNBits: `a (z q), n z 1, n z -> a n; sum: z`, z blocks of q elements of K.

    Raises:
        ModelError: The weight is packed for one kernel (`weight_prepacked`).
    """
    if view.attr("weight_prepacked", 0):
        raise view.fail(
            "its weight is packed for one kernel ('weight_prepacked'); export the model without it"
        )
    columns, block, bits = (int(view.attr(n)) for n in ("K", "block_size", "bits"))
    per_byte = _per_byte(view, _ZERO_POINTS, bits)
    named = _REPLICATED if view.has(_GROUP_INDEX) else _blocks(columns, block, per_byte)
    names = " ".join(axis_names(len(view.shape(0)) - 1))
    packed = named.packed if per_byte > 1 else named.blocks
    operands = [
        f"{names} {named.inside}",
        f"n {named.blocks} 1" if len(view.shape(1)) == 3 else _flat(view, 1, "n", "1"),
        _flat(view, 2, "n", named.blocks),
        _flat(view, _ZERO_POINTS, "n", packed),
        "." if view.has(_GROUP_INDEX) else "-",
        "n" if view.has(_BIAS) else "-",
    ][: view.arity]
    if named is _REPLICATED and any(len(view.shape(i)) == 1 for i in (1, 2, 3) if view.has(i)):
        # A flattened table whose rows are unknown cannot be sharded.
        operands[1:] = ["." if view.has(i) else "-" for i in range(1, view.arity)]
    linear = "linear: sum 0+5, sum 2+5" if view.has(_BIAS) else "linear: sum 0, sum 2"
    sizes: dict[str, Dim] = {**named.sizes, "n": int(view.attr("N"))}
    rows = "n" if "n" in operands[1] else "1"
    total = "; sum: z" if named is not _REPLICATED else ""
    text = f"{', '.join(operands)} -> {names} {rows}{total}{named.clause}; {linear}"
    return parse_rule(text, sizes)


def matmul_nbits_local(node: LocalNode) -> Sequence[ir.Value]:
    """The attributes get local sizes; one device adds the bias."""
    rows, columns = node.out_shape()[-1], node.in_shape(0)[-1]
    inputs = list(node.inputs)
    split = "z" in node.plan.rule.kinds and node.atoms("z")
    if split and node.has(_BIAS):
        inputs[_BIAS] = on_first(node, _BIAS, node.atoms("z"))
    return node.copy(inputs, {"N": int(rows), "K": int(columns)})


def matmul_nbits_part(view: NodeView, operands: Shapes, result: Sequence[Dim]) -> PartForm | None:
    """A part of the rows of the weight is a smaller number of rows."""
    return PartForm({"N": int(result[-1])})


def gather_block_quantized_rule(view: NodeView) -> OpRule:
    """GatherBlockQuantized: `V (z w), i, V z -> i (z q); sum: V`; w bytes hold the q of a block.

    The blocks are replicated if a byte holds several zero points.
    """
    shape = view.shape(0)
    axis = normal_axis(view, view.attr("gather_axis", 0), len(shape))
    quantised = normal_axis(view, view.attr("quantize_axis", 1), len(shape))
    block, bits = int(view.attr("block_size", 128)), int(view.attr("bits", 4))
    value = view.node.inputs[0]
    stored = 8 // bits if value is not None and value.dtype == ir.DataType.UINT8 else 1
    length = shape[quantised]
    named = _REPLICATED
    packed = stored > 1 and _per_byte(view, 3, bits) > 1
    if isinstance(length, int) and quantised != axis and block % stored == 0 and not packed:
        named = _blocks(length * stored, block, 1)
    names = axis_names(len(shape))

    def table(rows: str, quantised_text: str) -> str:
        words = list(names)
        words[axis], words[quantised] = rows, quantised_text
        return " ".join(words)

    places = [f"i{n}" for n in range(len(view.shape(1)))]
    data = named.inside.replace("q", "w") if stored > 1 else named.inside
    output = list(names)
    output[quantised] = named.inside
    output[axis : axis + 1] = places
    zero_points = named.packed if stored > 1 else named.blocks
    operands = [table("V", data), " ".join(places), table("V", named.blocks)]
    if view.arity > 3:
        operands.append(table("V", zero_points) if view.has(3) else "-")
    text = f"{', '.join(operands)} -> {' '.join(output)}; sum: V"
    sizes = dict(named.sizes)
    replicated: list[str] = [name for name in ("p", "q") if name in sizes]
    if stored > 1 and "q" in sizes:
        sizes["w"] = block // stored
        replicated.append("w")
    if replicated:
        text += f"; replicated: {' '.join(replicated)}"
    return parse_rule(text + "; linear: sum 2", sizes)


def gather_block_quantized_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up the rows in this rank's shard of the indexed dim; other rows are zero."""
    place, inside = indexed_place(node)
    rows = node.copy([node.input(0), place, *node.inputs[2:]])[0]
    if inside is None:
        return (rows,)
    rank = len(node.view.shape(0))
    axis = normal_axis(node.view, node.attr("gather_axis", 0), rank)
    inside = node.builder.reshape(inside, [*node.in_shape(1), *[1] * (rank - axis - 1)])
    return (zero_unless(node, inside, rows),)


def gather_block_quantized_indices(view: NodeView) -> list[tuple[int, Dim, Dim, int | None]]:
    """Indices count from the front; negative ones count from the end."""
    shape = view.shape(0)
    size = shape[normal_axis(view, view.attr("gather_axis", 0), len(shape))]
    return [(1, -size, size - 1, None)]


def matmul_bnb4_rule(view: NodeView) -> OpRule:
    """MatMulBnb4: `a (z q), (n z w), (n z) -> a n; sum: z`; w bytes hold the q of a block."""
    columns, block = int(view.attr("K")), int(view.attr("block_size"))
    names = " ".join(axis_names(len(view.shape(0)) - 1))
    if columns % block or not view.attr("transB", 1):
        return parse_rule(f"{names} 1, ., . -> {names} 1; linear: sum 0, sum 2")
    sizes: dict[str, Dim] = {
        "n": int(view.attr("N")),
        "z": columns // block,
        "q": block,
        "w": block // 2,
    }
    text = f"{names} (z q), (n z w), (n z) -> {names} n"
    return parse_rule(f"{text}; sum: z; replicated: q w; linear: sum 0, sum 2", sizes)


DEFS = (
    OpDef(
        MICROSOFT,
        "MatMulNBits",
        1,
        matmul_nbits_rule,
        matmul_nbits_local,
        gradient=_TRAIN_DEQUANTISED,
        on_part=matmul_nbits_part,
    ),
    OpDef(
        MICROSOFT,
        "MatMulBnb4",
        1,
        matmul_bnb4_rule,
        matmul_nbits_local,
        gradient=_TRAIN_DEQUANTISED,
        infer=infer_matmul_bnb4,
    ),
    OpDef(
        MICROSOFT,
        "GatherBlockQuantized",
        1,
        gather_block_quantized_rule,
        gather_block_quantized_local,
        gradient=_INTEGERS,
        cost=selects,
        indices=gather_block_quantized_indices,
        infer=infer_gather_block_quantized,
    ),
)
