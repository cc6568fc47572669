"""Upgrades of Softmax, BatchNormalization and GroupNormalization from old opsets."""

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.ops.old_node import OldNode, Upgrade


def _of_one_axis(old: OldNode) -> None:
    """These versions normalised `axis` and all later axes together: they are merged first."""
    axis, shape = int(old.attr("axis", 1)), old.shape(0)
    if shape is not None:
        axis = axis + len(shape) if axis < 0 else axis
    if axis == -1 or (shape is not None and all(d == 1 for d in shape[axis + 1 :])):
        old.node.attributes.add(ir.AttrInt64("axis", axis))
        return
    x = old.input(0)
    old.put(0, old.emit("Flatten", x, axis=axis))
    old.node.attributes.add(ir.AttrInt64("axis", -1))
    old.follow(0, "Reshape", old.emit("Shape", x))


OF_ONE_AXIS = Upgrade(_of_one_axis, by_shapes=True)


def statistics_of_channels(old: OldNode) -> None:
    """Without `spatial` each place had its own mean: such a node becomes several operators."""
    spatial = old.attr("spatial", 1)
    old.node.attributes.pop("spatial", None)
    if spatial:
        return
    x, scale, bias, mean, variance = old.node.inputs
    epsilon = old.constant(old.attr("epsilon", 1e-5), np.float32)
    width = old.emit("Sqrt", old.emit("Add", variance, old.emit("CastLike", epsilon, x)))
    rows = old.emit("Div", old.emit("Sub", x, mean), width)
    old.become("Add", [old.emit("Mul", rows, scale), bias], {})


def training_as_attribute(old: OldNode) -> None:
    """A node was in training form if it had further outputs.

    Raises:
        ModelError: Its saved statistics are read, which later versions do not return.
    """
    node = old.node
    if not any(out.name for out in node.outputs[1:]):
        return
    if any(out.uses() or out.is_graph_output() for out in node.outputs[3:]):
        raise ModelError(
            f"node {node.name!r} (BatchNormalization): its saved statistics are read, which "
            "later opsets do not have; convert the model"
        )
    node.resize_outputs(min(len(node.outputs), 3))
    node.attributes.add(ir.AttrInt64("training_mode", 1))


def affine_of_channels(old: OldNode) -> None:
    """Scale and bias had one number for each group, which is now repeated for each channel.

    Statistics had the type of the data; now they are float32 unless `stash_type` says otherwise.
    """
    x = old.input(0)
    if x is not None and x.dtype == ir.DataType.DOUBLE:
        old.node.attributes.add(ir.AttrInt64("stash_type", int(x.dtype)))
    groups, shape = int(old.attr("num_groups")), old.shape(0)
    channels = None if shape is None else shape[1]
    if isinstance(channels, int):
        each = old.constant([groups, channels // groups], np.int64)
    else:
        sizes = old.emit("Shape", x, start=1, end=2)
        count = old.constant([groups], np.int64)
        each = old.emit("Concat", count, old.emit("Div", sizes, count), axis=0)
    column, row = (old.constant(dims, np.int64) for dims in ([groups, 1], [-1]))
    for index in (1, 2):
        wide = old.emit("Expand", old.emit("Reshape", old.input(index), column), each)
        old.put(index, old.emit("Reshape", wide, row))
