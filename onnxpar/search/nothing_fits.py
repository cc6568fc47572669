"""The message if no plan fits into the memory of a device."""

from collections.abc import Iterable, Sequence
from math import lcm

from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.plan import Plan
from onnxpar.search.rival_plans import Way
from onnxpar_format.texts import bytes_text


def nothing_fits(refused: Sequence[Way], presets: Sequence[Way], table: SymbolTable) -> str:
    """The message if there is no plan: why not, what the presets would need, what may help."""
    texts = [f"{way.name}: {way.reason}" if refused[1:] else way.reason for way in refused]
    plans = {way.name: way.plan for way in presets if way.plan is not None}
    if plans:
        least = min((way for way in presets if way.name in plans), key=lambda way: way.peak)
        texts.append(
            f"the preset that needs least memory is {least.name}, with {bytes_text(least.peak)}"
        )
        divisors = _unproved(plans.values(), table)
        if divisors:
            options = " ".join(f"--symbol {name}:divisor={n}" for name, n in divisors.items())
            texts.append(
                "sizes that may not divide evenly are padded or gathered, which takes memory; if "
                f"they always divide evenly, {options} may help"
            )
    return "; ".join(texts)


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
