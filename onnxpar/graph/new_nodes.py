"""Nodes and constants that passes add without a builder: constants, identities, copies."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import onnx_ir as ir


def constant(name: str, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
    """Returns a constant value of an array, by default in the array's element type."""
    data = np.asarray(array)
    data = data if dtype is None else data.astype(dtype.numpy())
    kind = dtype or ir.DataType.from_numpy(data.dtype)
    return ir.Value(
        name=name,
        type=ir.TensorType(kind),
        shape=ir.Shape(data.shape),
        const_value=ir.Tensor(data, dtype=kind, name=name),
    )


def identity(value: ir.Value, result: str, name: str | None = None) -> ir.Node:
    """Returns an Identity of a value; its result has the name `result`."""
    output = ir.Value(name=result, type=copy(value.type), shape=value.shape)
    return ir.Node("", "Identity", [value], outputs=[output], name=name)


def twin(node: ir.Node, inputs: Sequence[ir.Value | None], suffix: str = "") -> ir.Node:
    """Returns a copy of a node without bodies that reads `inputs`.

    The names of the copy and of its results are those of the node with `suffix` appended.
    """
    outputs = []
    for old in node.outputs:
        new = ir.Value(
            name=f"{old.name}{suffix}" if old.name else "", type=copy(old.type), shape=old.shape
        )
        new.metadata_props.update(old.metadata_props)
        outputs.append(new)
    made = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        overload=node.overload,
        outputs=outputs,
        name=f"{node.name}{suffix}",
        version=node.version,
    )
    made.metadata_props.update(node.metadata_props)
    made.meta.update(node.meta)
    return made
