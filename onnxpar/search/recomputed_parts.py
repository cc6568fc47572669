"""What may be recomputed in a plan: all layers, every k-th layer, or a part of each layer.

A part of each layer is selective recomputation (Korthikanti et al., 2023, "Reducing Activation
Recomputation in Large Transformer Models"): of each layer, the results that take most memory for
the time in which they are computed again, such as attention scores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product
from math import floor

from onnxpar.autodiff.recomputation.candidates import (
    ForwardPass,
    LayerNodes,
    LayerPart,
    Loads,
    alike_layers,
    parts_of_layers,
)
from onnxpar.core.name_patterns import patterns_of
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.layers import Layer, find_layers
from onnxpar.facts.program import Program
from onnxpar.ops.kernel_memory import kernel
from onnxpar.search.node_options import Option, bytes_of
from onnxpar.search.value_flow import Flow
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions

LAYERS = (1, 2, 3, 4, 8)
"""Recomputation of every k-th layer is tried for these numbers."""
APART = 1 / 16
"""A part of each layer frees at least this share of the bytes of all layers more than the one
before it."""
SHARES = 8
"""So many shares of the layers are tried that have a part, while the others have the part before
it."""


@dataclass(frozen=True)
class Again:
    """What is recomputed.

    Attributes:
        freed: The bytes that are freed, relative to those that recomputing all layers frees.
        seconds: The seconds that it takes, relative to those of computing all layers once without
            communication.
        options: The same as an entry of a strategy file, if it is not a part of each layer.
        parts: Two parts of a layer: some layers have the second, the others the first.
        share: The share of the layers that have the second.
    """

    freed: float = 0.0
    seconds: float = 0.0
    options: RecomputeOptions = NOTHING
    parts: tuple[LayerPart, LayerPart] | None = None
    share: Fraction = Fraction(1)

    @property
    def amount(self) -> int:
        """Whether nothing is recomputed (0), a part of each layer (1), or complete layers (2)."""
        return 1 if self.parts is not None else 2 if self.options else 0

    @property
    def nodes(self) -> Iterator[str]:
        """The names of the nodes, if it is a part of each layer."""
        if self.parts is None:
            return
        first, second = self.parts
        for alike in second.alike:
            for number, name in enumerate(alike):
                # Layers with the second part are spread evenly.
                more = floor((number + 1) * self.share) > floor(number * self.share)
                if name and (more or alike in first.alike):
                    yield name


@dataclass
class RecomputedParts:
    """The layers of a training program, and what of them may be recomputed.

    Attributes:
        program: The program.
        given: What the user wants to be recomputed; None if that is open.
    """

    program: Program
    given: RecomputeOptions | None

    @cached_property
    def forward(self) -> ForwardPass:
        """The forward pass."""
        return ForwardPass.of(self.program.graph, self.program.registry)

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers of the forward pass."""
        return find_layers(self.forward.row, self.program.env)

    @cached_property
    def inside(self) -> list[frozenset[str]]:
        """Names of the nodes of each layer that can be recomputed."""
        return [self.forward.inside(layer) for layer in self.layers]

    @cached_property
    def ends(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the nodes before the first layer, and of those after the last one."""
        return self.forward.outside(self.layers)

    @property
    def everything(self) -> bool:
        """Whether all layers may be recomputed."""
        return bool(self.layers) if self.given is None else self.given.layers == 1

    def choices(
        self, seen: Flow, options: Sequence[Option], cost: CostModel, stages: int
    ) -> list[Again]:
        """Returns what may be recomputed if a strategy is given.

        Args:
            seen: The nodes of the forward pass.
            options: The strategy: an option for each of them.
            cost: The cost model of a micro-batch.
            stages: The number of stages.
        """
        given = self.given
        if given is not None:
            part = 1 / given.layers if given.layers else 0.0
            return [Again(part, part, given)]
        if not self.layers:
            return [Again()]
        computing, sending = self._seconds(seen, options, cost)
        once, sent = self._of_all_layers(computing), self._of_all_layers(sending)
        every = (k for k in LAYERS if k <= len(self.layers))
        found = [Again()]
        for k in every:
            found.append(Again(1 / k, (1 + sent / once) / k, RecomputeOptions(layers=k)))
        both = {name: spent + sending.get(name, 0.0) for name, spent in computing.items()}
        loads = Loads(self._bytes(seen, options, cost), both, self._views)
        parts = _apart(parts_of_layers(self.forward, self._rows, loads))
        shares = self._shares(stages)
        for (first, second), share in product(pairwise(parts), shares):
            freed, seconds = (
                (a + float(share) * (b - a)) / of
                for a, b, of in (
                    (first.freed, second.freed, parts[-1].freed),
                    (first.seconds, second.seconds, once),
                )
            )
            found.append(Again(freed, seconds, NOTHING, (first, second), share))
        return found

    def options(self, again: Again) -> RecomputeOptions:
        """Returns what is recomputed as an entry of a strategy file."""
        if again.parts is None:
            return again.options
        return RecomputeOptions(nodes=tuple(patterns_of(again.nodes, self.forward.able)))

    def words(self, again: Again) -> str:
        """Returns a part of each layer in words."""
        if again.parts is None:
            return ""
        least, most = (len(part.alike) for part in again.parts)
        of = len(self._first)
        if again.share == 1:
            return f"recompute {most} of {of} nodes of each layer"
        layers = len(self.layers)
        number = floor(again.share * layers)
        others = f", and {least} of each other" if least else ""
        return f"recompute {most} of {of} nodes of {number} of {layers} layers{others}"

    def fits(self, again: Again, virtual_stages: int) -> bool:
        """Whether all virtual stages recompute equally much; else the slowest would decide."""
        every = again.share.denominator
        return every == 1 or len(self.layers) % (virtual_stages * every) == 0

    def _shares(self, stages: int) -> list[Fraction]:
        """The shares of layers with which all stages recompute equally much."""
        length, rest = divmod(len(self.layers), stages)
        few = min(SHARES, length)
        found = {Fraction(round(n * length / few), length) for n in range(1, few + 1)}
        return sorted(found) if not rest else [Fraction(1)]

    def _of_all_layers(self, seconds: Mapping[str, float]) -> float:
        return sum(len(row) * sum(seconds.get(n, 0.0) for n in row[0].own) for row in self._rows)

    # -- of the first of the layers that are alike -----------------------------------------------

    @cached_property
    def _rows(self) -> list[list[LayerNodes]]:
        return alike_layers(self.forward, self.layers)

    @cached_property
    def _first(self) -> frozenset[str]:
        return frozenset(name for row in self._rows for name in row[0].own if name)

    @cached_property
    def _views(self) -> frozenset[str]:
        nodes = (node for node in self.forward.nodes if node.name in self._first)
        registry = self.program.registry
        return frozenset(n.name or "" for n in nodes if kernel(n, registry).view)

    def _seconds(
        self, seen: Flow, options: Sequence[Option], cost: CostModel
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds in which each node computes, and in which its operands are resharded."""
        computing, sending = dict[str, float](), dict[str, float]()
        for item, option in zip(seen.items, options, strict=True):
            if item.name in self._first:
                work = cost.node(item.rule, item.view, option.plan, item.cost)
                computing[item.name], sending[item.name] = work.seconds, work.special
        for value in seen.values:
            readers = [use for use in value.uses if seen.items[use.item].name in self._first]
            if value.producer is None or not readers:
                continue
            producer, output = value.producer
            made = options[producer].plan.outputs[output]
            wants: dict[Sharding, str] = {}
            for use in readers:
                want = options[use.item].plan.inputs[use.operand]
                if want is not None:
                    wants.setdefault(want, seen.items[use.item].name)
            for want, name in wants.items():
                # All readers that want the same sharding share the result.
                sending[name] += cost.reshard(made, want, value.itemsize)
        return computing, sending

    def _bytes(self, seen: Flow, options: Sequence[Option], cost: CostModel) -> Mapping[str, int]:
        """Bytes of a device for each result, as the backward reads it: perhaps gathered."""
        found: dict[str, int] = {}
        for item, option in zip(seen.items, options, strict=True):
            if item.name in self._first:
                node = item.view.node
                for value, sharding in zip(node.outputs, option.plan.outputs, strict=True):
                    width = 0 if value.dtype is None else int(value.dtype.itemsize)
                    found[value.name or ""] = cost.elements(sharding) * width
        for item, option in zip(seen.items, options, strict=True):
            for one in item.saved if item.name in self._first else ():
                operand = None if one.made else item.view.node.inputs[one.index]
                name = "" if operand is None else operand.name or ""
                if name in found:
                    read = bytes_of(operand, option.plan.inputs[one.index], cost)
                    found[name] = max(found[name], read)
        return found


def _apart(parts: Sequence[LayerPart]) -> list[LayerPart]:
    """The parts that are worth a choice: nothing first, and everything that is saved last."""
    found = [LayerPart((), 0.0, 0.0)]
    for part in parts:
        least = 0.0 if part is parts[-1] else APART * parts[-1].freed
        if part.freed > found[-1].freed + least:
            found.append(part)
    return found
