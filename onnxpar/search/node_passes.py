"""How often the work of a node is done in a step, and how long it takes at least."""

from collections.abc import Collection, Iterable

from onnxpar.core.sharding import REDUCTIONS
from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.search.node_options import Option
from onnxpar.search.value_flow import Item


def passes_of(item: Item, trained: Collection[int], work: Work) -> int:
    """Returns how many times a node's work is done, forward and backward."""
    if not item.trained:
        return 1
    if not is_product(work):
        return 2
    # The backward of a product has one product for each operand with a cotangent.
    kinds = item.rule.kinds
    multiplied = (
        i
        for i, operand in enumerate(item.rule.inputs)
        if any(kinds[f] in REDUCTIONS for names in operand.dims for f in names)
    )
    return 3 if all(i in trained for i in multiplied) else 2


def is_product(work: Work) -> bool:
    """Whether a node computes much more than it reads and writes."""
    return work.flops > 2 * work.traffic


def least_computing(
    item: Item, trained: Collection[int], options: Iterable[Option], cost: CostModel
) -> tuple[float, float]:
    """Returns the least seconds of a node under any option, forward and backward.

    Args:
        item: The node.
        trained: The operands that have cotangents.
        options: Its options.
        cost: The cost model.
    """
    works = [cost.node(item.rule, item.view, option.plan, item.cost) for option in options]
    backward = ((passes_of(item, trained, work) - 1) * work.seconds for work in works)
    return min(work.seconds for work in works), min(backward)
