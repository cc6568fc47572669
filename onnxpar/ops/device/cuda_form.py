"""Chooses the form of a graph in which onnxruntime's CUDA provider has kernels for its nodes.

A provider that knows an operator only up to some version of its schema has no kernel for it in a
graph of a newer opset, even if the new version only admits more types: onnxruntime 1.31 has
MaxPool, Dropout, Elu and others up to opset 21. So a graph whose nodes all mean the same in an
older opset is written in that opset. A node that still has no kernel becomes an operator of ours if
the runtime's library has one, or is computed in float32 if only a 16-bit kernel is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import onnx
import onnx_ir as ir

from onnxpar.graph.body_captures import bodies_of
from onnxpar.ops.body_node import difference
from onnxpar.ops.device.cuda_functions import function_for
from onnxpar.ops.device.cuda_kernels import type_name, why_no_kernel, why_on_host
from onnxpar.ops.function import Function
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.registry import Registry

_WINDOWS = 22
"""From this opset on, a pool has no last window that would begin in the padding."""


@dataclass(frozen=True)
class CudaForm:
    """The form in which a graph is written.

    Attributes:
        opset: Version of the default domain.
        ours: The nodes that become operators of the domain `onnxpar`, and these operators.
        wide: The nodes whose 16-bit operands and results become float32, with casts around them.
    """

    opset: int
    ours: Mapping[ir.Node, Function] = field(default_factory=dict)
    wide: frozenset[ir.Node] = frozenset()


def cuda_form(nodes: Iterable[ir.Node], opset: int, registry: Registry) -> CudaForm:
    """Returns the form in which most nodes have kernels; among equals, that of the newest opset.

    Args:
        nodes: The nodes of a graph and of its bodies, with types of values as far as possible.
        opset: Version of the default domain of these nodes.
        registry: The table of operators.
    """
    standard = [node for node in nodes if not node.domain]
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
    """Whether a value has 16-bit floats, each of which is also a float32."""
    return value is not None and value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _is_wider(node: ir.Node, opset: int) -> bool:
    """Whether a node has a kernel in float32 but none in 16 bits."""
    if not any(map(is_narrow, (*node.inputs, *node.outputs))):
        return False
    if bodies_of(node) or any(name in _TYPE_ATTRIBUTES for name in node.attributes):
        return False
    inputs, outputs = (
        ["float" if is_narrow(v) else type_name(v.type) if v else None for v in values]
        for values in (node.inputs, node.outputs)
    )
    return why_no_kernel("", node.op_type, opset, inputs, outputs) is None


_TYPE_ATTRIBUTES = ("dtype", "output_dtype", "stash_type", "to")


def _is_same(node: ir.Node, given: int, wanted: int) -> bool:
    """Whether a node of one opset means the same in an older one.

    Operators of the default domain that ONNX does not know belong to onnxruntime, in any opset.
    """
    if not onnx.defs.has(node.op_type, max_inclusive_version=given):
        return True
    if difference(node.op_type, len(node.inputs), list(node.attributes), given, wanted):
        return False
    if wanted < _WINDOWS <= given and node.attributes.get_int("ceil_mode", 0) != 0:
        return False
    return _admits(node, wanted)


def _admits(node: ir.Node, opset: int) -> bool:
    """Whether the operator takes the types of a node in an opset, as far as they are known."""
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
    """Types of operands and results, with whether they are homogeneous, and the types admitted."""
    schema = onnx.defs.get_schema(op_type, opset, "")
    inputs, outputs = (
        tuple((p.type_str, p.is_homogeneous) for p in part)
        for part in (schema.inputs, schema.outputs)
    )
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    return inputs, outputs, kinds
