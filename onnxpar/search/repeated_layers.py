"""Repeated layers as one: a smaller model in which equal layers make equal choices.

In a deep model the same layer is repeated many times, and each repetition has the same options and
tables. We demand that all but the outermost layers choose as the layer two before them, so that two
choices may alternate (columns, then rows). Then the sum has the variables of four layers, however
deep the model is. Its least choice is a choice of the complete problem.

If many searches are compared, all layers choose equally, and the sum has the variables of one.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile

from onnxpar.core.sharding import Sharding
from onnxpar.facts.layers import SMALLEST, find_layers, repetitions
from onnxpar.search.node_options import Option
from onnxpar.search.value_flow import Flow, Item, Use, Value

_PERIODS = 2
"""Number of choices that may alternate."""
_LEAST = _PERIODS + 3
"""The least number of layers with which two layers share a choice, besides the outermost two."""

_Place = tuple[int, int]
_Edge = tuple[
    _Place | None, tuple[_Place, ...], tuple[int, bool, bool, bool, bool], Sharding | None
]
"""Producer and readers of a value, everything that resharding it costs, its sharding if fixed."""


@dataclass(frozen=True)
class Folded:
    """A model in which one node stands for all that make the same choice.

    Attributes:
        flow: The smaller model.
        classes: For each node of the complete model, its number in the smaller one.
    """

    flow: Flow
    classes: tuple[int, ...]

    def unfold(self, chosen: Sequence[Option]) -> tuple[Option, ...]:
        """Returns the option of each node of the complete model."""
        return tuple([chosen[c] for c in self.classes])


def _runs(items: Sequence[Item]) -> list[range]:
    """Returns the first nodes of the layers of each repetition that is long enough to be folded."""
    if not items:
        return []
    found = repetitions(find_layers([item.view.node for item in items], items[0].view.env))
    return [run for run in found if len(run) >= _LEAST]


def fold(flow: Flow, pins: Mapping[str, Sharding], *, one: bool = False) -> Folded | None:
    """Returns the smaller model in which equal layers choose equally; None if too few repeat.

    Args:
        flow: The model.
        pins: The shardings of parameters and inputs that the user fixed, by name.
        one: Whether all layers choose equally; else two choices may alternate, and the outermost
            layers choose by themselves.
    """
    repeated = _runs(flow.items)
    if not repeated:
        return None
    classes = _classes(flow, repeated, one)
    often = Counter(classes)
    first: dict[int, Item] = {}
    for item, c in zip(flow.items, classes, strict=True):
        first.setdefault(c, item)
    items = tuple([replace(item, count=often[c]) for c, item in first.items()])
    alike: dict[_Edge, list[Value]] = {}
    for value in flow.values:
        made = value.producer and (classes[value.producer[0]], value.producer[1])
        uses = tuple([(classes[use.item], use.operand) for use in value.uses])
        costs = value.itemsize, value.parameter, value.trained, value.leaves, value.stored
        alike.setdefault((made, uses, costs, pins.get(value.name)), []).append(value)
    values = []
    for (made, uses, _, _), (value, *others) in alike.items():
        counted = tuple([Use(*use, count) for use, count in Counter(uses).items()])
        names = tuple([other.name for other in others])
        values.append(replace(value, producer=made, uses=counted, alike=names))
    return Folded(Flow(items, tuple(values)), classes)


def _classes(flow: Flow, repeated: Sequence[range], one: bool) -> tuple[int, ...]:
    """The class of each node; classes are numbered in the order in which they occur."""
    varying = {value.name for value in flow.values if value.trained}

    def kind(number: int) -> Hashable:
        item = flow.items[number]
        trained = tuple([v is not None and v.name in varying for v in item.view.node.inputs])
        return item.kind, item.pin, trained

    keys: list[object] = list(range(len(flow.items)))
    for run in repeated:
        for layer, first in enumerate(run) if one else enumerate(run[1:-1], 1):
            for place in range(run.step):
                period = 0 if one else layer % _PERIODS
                keys[first + place] = (run.start, period, place, kind(first + place))
        for number, place in _cut_layers(run, len(flow.items), kind) if one else ():
            keys[number] = (run.start, 0, place, kind(number))
    numbers: dict[object, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])


def _cut_layers(
    run: range, count: int, kind: Callable[[int], Hashable]
) -> Iterator[tuple[int, int]]:
    """Yields the nodes of the layers before and after the repeated ones, with their places.

    The repeated nodes may begin in the middle of a layer: exported networks often compute within
    the first layer what all layers share, so its nodes are those of the others with some between.

    Args:
        run: The first nodes of the repeated layers.
        count: The number of nodes of the model.
        kind: What is equal in nodes that may choose equally.
    """
    places = range(run.start, run.start + run.step)
    layer = [kind(number) for number in places]
    before = range(max(run.start - 2 * run.step, 0), run.start)
    row = [kind(number) for number in before]
    found = SequenceMatcher(None, row, layer, autojunk=False).get_matching_blocks()
    pairs = [(before[one.a + i], one.b + i) for one in found for i in range(one.size)]
    if len(pairs) >= SMALLEST:
        yield from pairs
    after = range(run[-1] + run.step, min(run[-1] + 2 * run.step, count))
    yield from takewhile(
        lambda pair: kind(pair[0]) == layer[pair[1]], zip(after, range(run.step), strict=False)
    )
