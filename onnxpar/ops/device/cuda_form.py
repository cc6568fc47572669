"""How a graph is written so that onnxruntime's CUDA provider has kernels for its nodes.

A provider that knows an operator only up to some version of its schema has no kernel for it in a
graph of a newer opset, even where the new version merely admits more types: onnxruntime 1.31 has
MaxPool, Dropout, Elu and others up to opset 21. So a graph of which all nodes mean the same in an
older opset is written in that. What still has no kernel is written as an operator of ours, where
the runtime's library has one, or computed in float32, where 16 bits are what is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
import onnx_ir as ir

from onnxpar.ops.body_node import difference
from onnxpar.ops.device.cuda_functions import function_for
from onnxpar.ops.device.cuda_kernels import type_name, why_no_kernel, why_on_host
from onnxpar.ops.function import Function
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.registry import Registry

_WINDOWS = 22
"""Since this opset a pool's last window is left out where it would begin in the padding."""


@dataclass(frozen=True)
class CudaForm:
    """How a graph is written.

    Attributes:
        opset: Version of the default domain.
        ours: The nodes that are written as operators of the domain `onnxpar`, and as which.
        wide: The nodes whose operands and results of 16 bits are float32, with casts around them.
    """

    opset: int
    ours: Mapping[ir.Node, Function] = field(default_factory=dict)
    wide: frozenset[ir.Node] = frozenset()


def cuda_form(nodes: Iterable[ir.Node], opset: int, registry: Registry) -> CudaForm:
    """Returns the form in which most nodes have kernels, of equal ones that of the newest opset.

    Args:
        nodes: The nodes of a graph and of its bodies; types of values are known as far as possible.
        opset: Version of the default domain that they are of.
        registry: The table of operators.
    """
    standard = [node for node in nodes if node.domain in ("", "ai.onnx")]
    best, lacking = opset, _lacking(standard, opset, registry)
    for version in range(opset - 1, OPSET - 1, -1):
        if not lacking or not all(_is_same(node, opset, version) for node in standard):
            break
        found = _lacking(standard, version, registry)
        if len(found) < len(lacking):
            best, lacking = version, found
    ours = {n: function for n in lacking if (function := function_for(n, registry)) is not None}
    rest = (node for node in lacking if node not in ours)
    return CudaForm(best, ours, frozenset(node for node in rest if _is_wider(node, best)))


def _lacking(nodes: Sequence[ir.Node], opset: int, registry: Registry) -> list[ir.Node]:
    return [node for node in nodes if why_on_host(node, opset, registry) is not None]


def is_narrow(value: ir.Value | None) -> bool:
    """Whether a value has floats of 16 bits, all of which float32 has too."""
    return value is not None and value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _is_wider(node: ir.Node, opset: int) -> bool:
    """Whether a node has a kernel in float32 where it has none in 16 bits."""
    if not any(map(is_narrow, (*node.inputs, *node.outputs))):
        return False
    if any(a.name in _SAYS_TYPE or a.type in _BODIES for a in node.attributes.values()):
        return False
    inputs, outputs = (
        ["float" if is_narrow(v) else type_name(v.type) if v else None for v in values]
        for values in (node.inputs, node.outputs)
    )
    return why_no_kernel("", node.op_type, opset, inputs, outputs) is None


_SAYS_TYPE = ("dtype", "output_dtype", "stash_type", "to")
_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _is_same(node: ir.Node, given: int, wanted: int) -> bool:
    """Whether a node of one opset means the same in an older one.

    Operators of the default domain that ONNX does not know are onnxruntime's, for any opset.
    """
    if not onnx.defs.has(node.op_type, max_inclusive_version=given):
        return True
    if difference(node.op_type, len(node.inputs), list(node.attributes), given, wanted):
        return False
    if wanted < _WINDOWS <= given and node.attributes.get_int("ceil_mode", 0) != 0:
        return False
    return _admits(node, wanted)


def _admits(node: ir.Node, opset: int) -> bool:
    """Whether the operator of an opset takes the types of a node, as far as they are known."""
    inputs, outputs, admitted = _parameters(node.op_type, opset)
    bound: dict[str, str] = {}
    for formal, values in ((inputs, node.inputs), (outputs, node.outputs)):
        for index, value in enumerate(values):
            if value is None or not isinstance(value.type, ir.TensorType):
                continue
            name, alike = formal[min(index, len(formal) - 1)]
            kind = f"tensor({type_name(value.type)})"
            if kind not in admitted.get(name, {name}):
                return False
            if alike and bound.setdefault(name, kind) != kind:
                return False
    return True


_Formal = tuple[tuple[str, bool], ...]


@cache
def _parameters(op_type: str, opset: int) -> tuple[_Formal, _Formal, dict[str, frozenset[str]]]:
    """Type of each operand and result, whether all of that name are alike, and what it may be."""
    schema = onnx.defs.get_schema(op_type, opset, "")
    inputs, outputs = (
        tuple((p.type_str, p.is_homogeneous) for p in part)
        for part in (schema.inputs, schema.outputs)
    )
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    return inputs, outputs, kinds
