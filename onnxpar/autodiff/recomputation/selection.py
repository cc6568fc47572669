"""Which nodes are recomputed, by the user's options."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from onnxpar.autodiff.recomputation.candidates import ForwardPass, Loads, by_cost
from onnxpar.autodiff.recomputation.clones import Planned, Recomputation, recompute
from onnxpar.core.errors import StrategyError
from onnxpar.core.name_patterns import nearest
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.price import price
from onnxpar.facts.layers import find_layers
from onnxpar.ops.kernel_memory import kernel
from onnxpar.strategy.divided_weights import divided_nodes
from onnxpar.strategy.recompute_entry import KEEP, RecomputeOptions


def recomputed(
    planned: Planned,
    options: RecomputeOptions,
    measure: "Measure",
    always: frozenset[str] = frozenset(),
) -> Planned:
    """Returns a program with the recomputation that the user asks for.

    Args:
        planned: Forward and backward of a model; not changed.
        options: The user's options.
        measure: How memory and time are measured, for a limit on memory.
        always: Names of nodes that are recomputed in any case.

    Raises:
        StrategyError: A pattern matches no node that can be recomputed; no layers are found; or the
            program does not fit the limit on memory.
    """
    names = always | chosen_nodes(planned, options) if options else always
    if options.memory is None:
        return recompute(planned, Recomputation(names, options.communication == KEEP))
    return _within(planned, options, names, measure)


@dataclass(frozen=True)
class Measure:
    """How time and memory are measured.

    Attributes:
        cost: The cost model.
        held: Returns the bytes that a device holds when it trains with a program.
    """

    cost: CostModel
    held: Callable[[Planned], int]


def _within(
    planned: Planned, options: RecomputeOptions, named: frozenset[str], measure: Measure
) -> Planned:
    """The program with the smallest set of `by_cost` that fits the limit on memory."""

    def made(names: frozenset[str]) -> tuple[Planned, int]:
        run = recompute(planned, Recomputation(names, options.communication == KEEP))
        return run, measure.held(run)

    assert options.memory is not None
    run, held = made(named)
    if held <= options.memory:
        return run
    forward = ForwardPass.of(planned.program.graph, planned.program.registry)
    layers = find_layers(forward.row, planned.program.env)
    sets = [named | more for more in by_cost(forward, layers, _loads(planned, measure.cost))]
    low, high = 0, len(sets) - 1
    best: Planned | None = None
    least = held
    if sets:
        run, held = made(sets[high])
        least = min(least, held)
        best = run if held <= options.memory else None
    if best is None:
        raise StrategyError(
            f"{options.where}: expected at most {options.memory:,} bytes on a device, got "
            f"{least:,} even if every value that costs memory is recomputed"
        )
    while low < high:
        middle = (low + high) // 2
        run, held = made(sets[middle])
        if held <= options.memory:
            best, high = run, middle
        else:
            low = middle + 1
    return best


def _loads(planned: Planned, cost: CostModel) -> Loads:
    found, _ = price(planned.program, planned.plan, cost)
    sizes: dict[str, int] = {}
    views = set()
    for node in planned.program.graph:
        if kernel(node, planned.program.registry).view:
            views.add(node.name or "")
        for value, sharding in zip(
            node.outputs, planned.plan.nodes[node.name or ""].outputs, strict=True
        ):
            item = 4 if value.dtype is None else int(value.dtype.itemsize)
            sizes[value.name or ""] = cost.elements(sharding) * item
    seconds = {node.name: node.seconds for node in found.nodes}
    return Loads(sizes, seconds, frozenset(views))


def chosen_nodes(planned: Planned, options: RecomputeOptions) -> frozenset[str]:
    """Returns the names of the forward nodes that are recomputed; raises as `recomputed`."""
    forward = ForwardPass.of(planned.program.graph, planned.program.registry)
    divided = divided_nodes(forward.nodes)
    called: dict[str, list[str]] = {}
    for name in (node.name or "" for node in forward.nodes):
        for own in dict.fromkeys((name, divided.get(name, name))):
            called.setdefault(own, []).append(name)
    found: set[str] = set()
    for pattern in options.nodes:
        found |= _matching(forward, called, pattern, options.where)
    if options.layers:
        layers = find_layers(forward.row, planned.program.env)
        if not layers:
            raise StrategyError(
                f"{options.where}: expected repeated layers, got none in the "
                f"{len(forward.nodes)} nodes of the forward pass; select nodes by name patterns "
                "instead"
            )
        if options.layers > len(layers):
            raise StrategyError(
                f"{options.where}: expected at most {len(layers)} under 'layers', the number of "
                f"repeated layers, got {options.layers}, which leaves nothing to recompute"
            )
        for layer in layers[options.layers - 1 :: options.layers]:
            found |= forward.inside(layer)
    return frozenset(found)


def _matching(
    forward: ForwardPass, called: Mapping[str, Sequence[str]], pattern: str, where: str
) -> frozenset[str]:
    """The nodes that a name or a pattern selects.

    Args:
        forward: The forward pass.
        called: The nodes that have a name: more than one if a node of the file was divided.
        pattern: The name or pattern.
        where: Where the user gave it, for messages.
    """
    # Most names of equal layers differ in what follows the last wildcard, which is quickly seen.
    end = re.split(r"[*?\]]", pattern)[-1]
    hits = called.get(pattern) or [
        name
        for own, names in called.items()
        if own.endswith(end) and fnmatchcase(own, pattern)
        for name in names
    ]
    if not hits:
        raise StrategyError(
            f"{where}: expected the name or a pattern of a node of the forward pass, got "
            f"{pattern!r}{nearest(pattern, called)}"
        )
    able = forward.able.intersection(hits)
    if not able:
        raise StrategyError(
            f"{where}: {pattern!r}: nodes with bodies, and nodes that read only parameters and "
            f"constants, cannot be recomputed; got {hits[0]!r}"
        )
    return able
