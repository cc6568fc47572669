"""Repeated layers as one: the nodes that choose alike in a smaller problem of the same model.

A deep model is a few layers, then the same layer again and again. A layer's options and tables are
those of the one before; where all but the outermost also choose as the one but one before them (so
that two kinds of layers may take turns: columns, then rows), the sum has the variables of four
layers, whatever the depth. Its least choice is one of the whole problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxpar.analysis.layers import find_layers
from onnxpar.analysis.search.flow import Item

_PERIODS = 2
"""Layers that take turns."""
_LEAST = _PERIODS + 3
"""Layers from which on something is the same as something else: two are the outermost."""


@dataclass(frozen=True)
class Run:
    """What repeats: `count` times `period` nodes, from number `start` on."""

    start: int
    period: int
    count: int


def runs(items: Sequence[Item]) -> tuple[Run, ...]:
    """Returns what repeats in a row of nodes, and so often that something can be spared.

    Args:
        items: The nodes.
    """
    if not items:
        return ()
    found: list[Run] = []
    for layer in find_layers([item.view.node for item in items], items[0].view.env):
        size = layer.stop - layer.start
        last = found[-1] if found else None
        if last and last.period == size and last.start + size * last.count == layer.start:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(Run(layer.start, size, 1))
    return tuple(run for run in found if run.count >= _LEAST)


def classes(options: Sequence[object], repeated: Sequence[Run]) -> tuple[int, ...]:
    """Returns the class of each node, numbered in the order in which they come.

    Args:
        options: The options of each node; the same tuple for nodes that are alike.
        repeated: What repeats among the nodes.
    """
    keys: list[object] = list(range(len(options)))
    for run in repeated:
        for layer in range(1, run.count - 1):
            for place in range(run.period):
                item = run.start + layer * run.period + place
                keys[item] = run.start, layer % _PERIODS, place, id(options[item])
    numbers: dict[object, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])
