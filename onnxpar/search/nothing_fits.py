"""The message if no plan fits into the memory of a device, and what would fit.

For complete plans of training, `Configurations.nothing_fits` makes the message, from estimates.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, lcm

from onnxpar.core.errors import OnnxparError
from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.plan import Plan
from onnxpar.search.limited_search import least_memory
from onnxpar.search.rival_plans import Pricing, Way
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.schema import Strategy
from onnxpar_format.texts import bytes_text

MORE = (2, 4, 8, 16, 32, 64)
"""If nothing fits, as many times the devices are tried."""
HELPS = 0.9
"""More devices do not help if the smallest plan needs more than this share of the memory that the
smallest plan on fewer devices needs."""


def nothing_fits(
    strategy: Strategy,
    pricings: Mapping[int, Pricing],
    refused: Sequence[Way],
    presets: Sequence[Way],
) -> str:
    """Returns why there is no plan, what the presets would need, and what may help.

    Args:
        strategy: The strategy.
        pricings: The prices of plans, for each number of stages.
        refused: Each number of stages, with the reason.
        presets: The presets.
    """
    texts = [f"{way.name}: {way.reason}" if refused[1:] else way.reason for way in refused]
    plans = {way.name: way.plan for way in presets if way.plan is not None}
    if plans:
        least = min((way for way in presets if way.name in plans), key=lambda way: way.peak)
        texts.append(
            f"the preset that needs least memory is {least.name}, with {bytes_text(least.peak)}"
        )
    pricing = next(iter(pricings.values()))
    texts.append(_more_devices(strategy, pricing))
    divisors = _unproved(plans.values(), pricing.workload.program.env.table)
    if divisors:
        options = " ".join(f"--symbol {name}:divisor={n}" for name, n in divisors.items())
        texts.append(
            "sizes that may not divide evenly are padded or gathered, which takes memory; if "
            f"they always divide evenly, {options} may help"
        )
    return "; ".join(filter(None, texts))


def _more_devices(strategy: Strategy, pricing: Pricing) -> str:
    """Returns how many devices would be enough, or that more do not help, and why."""
    last, where, helps, found = inf, "", True, None
    for devices, way in _smallest(strategy, pricing):
        where = f"{devices} devices" + (f" in {way.stages} stages" if way.stages > 1 else "")
        if way.fits(pricing.machine.memory):
            return f"{where} would be enough, with {bytes_text(way.peak)} on each"
        helps, found = way.peak <= HELPS * last, way
        if not helps:
            break
        last = way.peak
    if found is None or found.price is None:
        return ""
    verdict = f"{where} would not be enough" if helps else "more devices do not help"
    trained = ", gradients and moments" if pricing.workload.gradients else ""
    largest = max(found.price.nodes, key=lambda node: node.made)
    result = f", and the result of node {largest.name!r} has {bytes_text(largest.made)}"
    return (
        f"{verdict}: on {where}, the smallest peak found is {bytes_text(found.peak)}, of which "
        f"{bytes_text(found.held)} are parameters{trained}"
        f"{result if largest.made > found.held else ''}"
    )


def _smallest(strategy: Strategy, pricing: Pricing) -> Iterator[tuple[int, Way]]:
    """Yields numbers of devices, each with the plan of least memory that a search finds.

    A mesh that is given is that of one stage, so more devices make more stages.
    """
    split = pricing.split
    if strategy.nodes or strategy.annotation is not None or split.assign:
        return
    for times in MORE:
        stages = split.stages * (times if strategy.axes else 1)
        devices = strategy.world * times
        sizes = pricing.workload.micro_batch(strategy.search.sizes, split.micro_batches)
        search = strategy.search.model_copy(update={"sizes": sizes})
        one = replace(strategy, devices=devices // stages, pipeline=None, search=search)
        other = replace(pricing, split=replace(split, stages=stages), _known=[])
        try:
            seeds = resolve(one, pricing.workload.program)
            found = least_memory(one, pricing.workload, seeds, split.micro_batches)
            yield devices, other.found(found.seeds)
        except OnnxparError:
            return


def _unproved(plans: Iterable[Plan], table: SymbolTable) -> dict[str, int]:
    """The divisors of symbols, not known so far, with which all dims would divide evenly."""
    found: dict[str, int] = {}
    for plan in plans:
        shardings = (s for node in plan.nodes.values() for s in (*node.inputs, *node.outputs))
        for part in (c for s in shardings if s is not None for dim in s.dims for c in dim):
            pieces = plan.mesh.count(part.atoms)
            is_symbol = not isinstance(part.size, int) and part.size.is_Symbol
            if is_symbol and not table.divisible(part.size, pieces):
                found[str(part.size)] = lcm(found.get(str(part.size), 1), pieces)
    return found
