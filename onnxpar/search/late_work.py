"""What a stage does when nothing waits for it, if the schedule is zero bubble."""

from collections.abc import Sequence

from onnxpar.cost.cost_model import CostModel
from onnxpar.search.node_options import Option, saved
from onnxpar.search.node_passes import is_product
from onnxpar.search.value_flow import Flow


def late_work(seen: Flow, options: Sequence[Option], cost: CostModel) -> tuple[float, float]:
    """Returns the seconds of the gradients of weights of a micro-batch, and the bytes they read.

    Only weights that are operands of products count. A gradient reads the other operand, and the
    cotangent of the result.

    Args:
        seen: The nodes of the forward pass; nothing is recomputed.
        options: The option of each of them.
        cost: The cost model.
    """
    weighed = {
        use.item
        for value in seen.values
        if value.trained and (value.parameter or value.stored)
        for use in value.uses
    }
    seconds = bytes_ = 0.0
    for number in weighed:
        item, option = seen.items[number], options[number]
        work = cost.node(item.rule, item.view, option.plan, item.cost)
        if not is_product(work):
            continue
        seconds += item.count * work.seconds
        read = sum(size for one, size in saved(item, option, cost) if not one.made)
        for value, sharding in zip(item.view.node.outputs, option.plan.outputs, strict=True):
            width = 0 if value.dtype is None else int(value.dtype.itemsize)
            read += cost.elements(sharding) * width
        bytes_ += item.count * read
    return seconds, bytes_
