"""The attributes of windows in the gradients of convolutions and pools."""

from collections.abc import Sequence
from typing import Any

from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.window.geometry import Spatial


def window_attributes(node: GradNode, dims: Sequence[Spatial]) -> dict[str, Any]:
    """Returns kernel_shape, strides, dilations and pads of a node's windows.

    Args:
        node: The node.
        dims: Its spatial dims.

    Raises:
        ModelError: The padding depends on symbolic sizes.
    """
    view = node.view
    before = [d.before for d in dims if d.before is not None]
    after = [d.after for d in dims if d.after is not None]
    if len(before) != len(dims):
        raise view.fail(
            "a gradient needs constant sizes where they determine the padding, got "
            f"auto_pad={view.attr('auto_pad', 'NOTSET')!r}"
        )
    return {
        "kernel_shape": [d.kernel for d in dims],
        "strides": [d.stride for d in dims],
        "dilations": [d.dilation for d in dims],
        "pads": [*before, *after],
    }
