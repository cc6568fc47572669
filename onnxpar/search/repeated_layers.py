"""Repeated layers as one: a smaller model, in which alike layers choose alike.

A deep model is a few layers, then the same layer again and again. A layer's options and tables are
those of the one before; where all but the outermost also choose as the one but one before them (so
that two kinds of layers may take turns: columns, then rows), the sum has the variables of four
layers, whatever the depth. Its least choice is one of the whole problem.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxpar.core.sharding import Sharding
from onnxpar.facts.layers import find_layers
from onnxpar.search.node_options import Option
from onnxpar.search.value_flow import Flow, Item, Use, Value

_PERIODS = 2
"""Layers that take turns."""
_LEAST = _PERIODS + 3
"""Layers from which on something is the same as something else: two are the outermost."""

_Place = tuple[int, int]
_Edge = tuple[_Place | None, tuple[_Place, ...], tuple[int, bool, bool, bool], Sharding | None]
"""Output and operands that a value goes between, what moving it costs, its layout if pinned."""


@dataclass(frozen=True)
class _Run:
    """What repeats: `count` times `period` nodes, from number `start` on."""

    start: int
    period: int
    count: int


@dataclass(frozen=True)
class Folded:
    """A model in which one node stands for all that choose as it does.

    Attributes:
        flow: The model.
        classes: The number in it of each node of the whole model.
    """

    flow: Flow
    classes: tuple[int, ...]

    def unfold(self, chosen: Sequence[Option]) -> tuple[Option, ...]:
        """Returns the options of the whole model's nodes."""
        return tuple([chosen[c] for c in self.classes])


def _runs(items: Sequence[Item]) -> tuple[_Run, ...]:
    """Returns what repeats in a row of nodes, and so often that something can be spared.

    Args:
        items: The nodes.
    """
    if not items:
        return ()
    found: list[_Run] = []
    for layer in find_layers([item.view.node for item in items], items[0].view.env):
        size = layer.stop - layer.start
        last = found[-1] if found else None
        if last and last.period == size and last.start + size * last.count == layer.start:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(_Run(layer.start, size, 1))
    return tuple(run for run in found if run.count >= _LEAST)


def fold(flow: Flow, pins: Mapping[str, Sharding]) -> Folded | None:
    """Returns the smaller model in which alike layers choose alike; None where too few repeat.

    Args:
        flow: The model.
        pins: How parameters and inputs lie that the user fixed.
    """
    repeated = _runs(flow.items)
    if not repeated:
        return None
    classes = _classes(flow, repeated)
    often = Counter(classes)
    first: dict[int, Item] = {}
    for item, c in zip(flow.items, classes, strict=True):
        first.setdefault(c, item)
    items = tuple([replace(item, count=often[c]) for c, item in first.items()])
    alike: dict[_Edge, list[Value]] = {}
    for value in flow.values:
        made = value.producer and (classes[value.producer[0]], value.producer[1])
        uses = tuple([(classes[use.item], use.operand) for use in value.uses])
        costs = value.itemsize, value.parameter, value.trained, value.leaves
        alike.setdefault((made, uses, costs, pins.get(value.name)), []).append(value)
    values = []
    for (made, uses, _, _), (value, *others) in alike.items():
        counted = tuple([Use(*use, count) for use, count in Counter(uses).items()])
        names = tuple([other.name for other in others])
        values.append(replace(value, producer=made, uses=counted, alike=names))
    return Folded(Flow(items, tuple(values), flow.table), classes)


def _classes(flow: Flow, repeated: Sequence[_Run]) -> tuple[int, ...]:
    """The class of each node, numbered in the order in which they come."""
    varying = {value.name for value in flow.values if value.trained}
    keys: list[object] = list(range(len(flow.items)))
    for run in repeated:
        for layer in range(1, run.count - 1):
            for place in range(run.period):
                number = run.start + layer * run.period + place
                item = flow.items[number]
                trained = tuple(
                    [v is not None and v.name in varying for v in item.view.node.inputs]
                )
                keys[number] = run.start, layer % _PERIODS, place, item.kind, item.pin, trained
    numbers: dict[object, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])
