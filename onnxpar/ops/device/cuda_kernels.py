"""Which nodes have a kernel of onnxruntime's CUDA provider, and which are computed on the CPU.

`tools/cuda_kernels.py` lists the provider's kernels in `cuda_kernels.json`. The slot
`refused` of an operator's record says which nodes the provider refuses because of an attribute.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import onnx
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.registry import Registry

_TABLE = "cuda_kernels.json"
Types = Sequence[str | None]
"""Type of each operand or result, `float`, `int64`, …; None if it is absent or unknown."""


@cache
def _read() -> Mapping[str, Any]:
    text = resources.files("onnxpar.ops.device").joinpath(_TABLE).read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def table_version() -> str:
    """Returns the version of onnxruntime whose kernels the table lists."""
    version: str = _read()["onnxruntime"]
    return version


def why_no_kernel(
    domain: str, op_type: str, opset: int, inputs: Types, outputs: Types
) -> str | None:
    """Returns why the CUDA provider has no kernel for a node of these types; None if it has one.

    Args:
        domain: The operator's domain.
        op_type: The operator.
        opset: Version of the domain.
        inputs: Types of the operands.
        outputs: Types of the results.
    """
    domain = "" if domain == "ai.onnx" else domain
    name = f"{domain}:{op_type}" if domain else op_type
    rows: Mapping[str, Any] = _read()["operators"].get(name, {})
    since = max((int(s) for s in rows if int(s) <= opset), default=0)
    if not since or not rows[str(since)]["kernels"]:
        return None if _is_expanded(name, opset) else "the provider has no kernel for it"
    row = rows[str(since)]
    actual = [*_named(row["in"], inputs), *_named(row["out"], outputs)]
    refused: list[str] = []
    for kernel in row["kernels"]:
        wrong = [(n, t) for names, t in actual for n in names if n in kernel and t not in kernel[n]]
        if not wrong:
            return None
        refused.append(f"{wrong[0][0]} is {wrong[0][1]}")
    return f"the provider has no kernel for its types ({refused[0]})"


def _is_expanded(name: str, opset: int) -> bool:
    """Whether onnxruntime replaces an operator by ONNX's function body."""
    versions = _read()["expanded"].get(name)
    return bool(versions) and onnx.defs.get_schema(name, opset, "").since_version in versions


def _named(formal: Sequence[str], actual: Types) -> list[tuple[tuple[str, ...], str]]:
    """Pairs each type with the names of its parameter; the last parameter repeats."""
    if not formal:
        return []
    last = len(formal) - 1
    pairs = ((formal[min(i, last)], kind) for i, kind in enumerate(actual))
    return [(tuple(names.split("|")), kind) for names, kind in pairs if kind is not None]


def has_kernel_in(op_type: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether a standard operator has a kernel whose first result can have a type."""
    rows: Mapping[str, Any] = _read()["operators"].get(op_type, {})
    since = onnx.defs.get_schema(op_type, opset, "").since_version
    known = max((int(s) for s in rows if int(s) <= since), default=0)
    kind = type_name(ir.TensorType(dtype))
    row = rows.get(str(known), {"kernels": [], "out": []})
    variables = {name for names in row["out"][:1] for name in names.split("|")}
    return any(
        all(kind in types for name, types in kernel.items() if name in variables)
        for kernel in row["kernels"]
    )


def why_on_host(node: ir.Node, opset: int, registry: Registry) -> str | None:
    """Returns why a node is computed on the CPU beside the CUDA provider; None if it is not.

    The runtime's library has kernels on the device for nodes of the domain `onnxpar`.
    """
    if node.domain == DOMAIN:
        return None
    inputs = [type_name(v.type) if v is not None else None for v in node.inputs]
    outputs = [type_name(v.type) for v in node.outputs]
    reason = why_no_kernel(node.domain, node.op_type, opset, inputs, outputs)
    definition = registry.of(node)
    if reason or definition is None or definition.refused is None:
        return reason
    return definition.refused(node)


def type_name(kind: ir.TypeProtocol | None) -> str | None:
    """Returns a type as onnxruntime writes it, without `tensor(...)`; None if it is unknown."""
    if kind is None:
        return None
    if isinstance(kind, ir.SequenceType):
        return f"seq({type_name(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({type_name(kind.elem_type)})"
    names = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
    dtype: ir.DataType = kind.dtype
    return names.get(dtype, dtype.name.lower())
