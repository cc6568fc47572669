"""How long the slowest stage takes, before boundaries of stages are known."""

from collections.abc import Collection, Sequence
from itertools import count
from math import ceil, floor

from onnxpar.cost.cost_model import CostModel
from onnxpar.search.node_options import Option
from onnxpar.search.node_passes import passes_of
from onnxpar.search.value_flow import Flow

_PARTS = 2
"""Parts of a layer between which there may be a stage boundary. In a transformer, one value is sent
there, after the attention and after the feed-forward."""
_ROUNDING = 1e-9
"""Quotients that differ by less are equal."""


def seconds_of(
    names: Collection[str], seen: Flow, options: Sequence[Option], cost: CostModel
) -> float:
    """Returns the seconds of some nodes in a micro-batch, without reshards.

    Args:
        names: The names of the nodes.
        seen: The nodes of the forward pass; nothing is recomputed.
        options: The option of each of them.
        cost: The cost model.
    """
    trained: dict[int, list[int]] = {}
    for value in seen.values:
        if value.trained:
            for use in value.uses:
                trained.setdefault(use.item, []).append(use.operand)
    seconds = 0.0
    for number, (item, option) in enumerate(zip(seen.items, options, strict=True)):
        if item.name in names:
            work = cost.node(item.rule, item.view, option.plan, item.cost)
            seconds += passes_of(item, trained.get(number, ()), work) * work.seconds
            seconds += (2 if item.trained else 1) * work.special
    return seconds


def slowest_stage(seconds: float, ends: tuple[float, float], layers: int, stages: int) -> float:
    """Returns the seconds that the slowest stage takes at least.

    What is before the first layer is in the first stage, and what is after the last layer (the head
    and the loss) in the last stage. A boundary may lie in the middle of a layer: for example, if
    the head takes as long as a layer, the last of four stages with 32 layers has 7.5 of them.

    Args:
        seconds: The seconds of all stages together.
        ends: The seconds of what is before the first layer, and of what is after the last one.
        layers: The number of layers, which take equal times.
        stages: The number of stages.
    """
    if stages == 1 or not layers:
        return seconds / stages
    first, last = ends
    half = (seconds - first - last) / (_PARTS * layers)
    least = max(seconds / stages, first, last)
    if half <= 0:
        return least

    def halves(limit: float) -> int:
        """How many halves stages have if none takes longer than a limit."""
        few, more = (max(floor((limit - end) / half + _ROUNDING), 0) for end in ends)
        return few + more + (stages - 2) * floor(limit / half + _ROUNDING)

    def fastest(extra: float) -> float:
        """The least limit at which a stage with extra work has a number of halves."""
        tried = (extra + n * half for n in count(ceil((least - extra) / half - _ROUNDING)))
        return next(limit for limit in tried if halves(limit) >= _PARTS * layers)

    return max(least, min(map(fastest, ends if stages == 2 else (0.0, *ends))))
