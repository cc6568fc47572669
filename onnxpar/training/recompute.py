"""Which nodes are recomputed, by what the user asks for."""

from fnmatch import fnmatchcase

from onnxpar.analysis.layers import find_layers
from onnxpar.analysis.recompute import KEEP, ForwardPass, RecomputeOptions
from onnxpar.errors import StrategyError
from onnxpar.passes.recompute import Planned, Recomputation, recompute
from onnxpar.strategy.names import nearest


def recomputed(planned: Planned, options: RecomputeOptions) -> Planned:
    """Returns a program in which what the user asks for is recomputed.

    Args:
        planned: Forward and backward of a model; not changed.
        options: What the user asks for.

    Raises:
        StrategyError: A pattern holds for no node, or for nodes with bodies only; or no layers are
            found.
    """
    if not options:
        return planned
    if options.memory is not None:
        raise StrategyError(f"{options.where}: a limit of memory is not built yet")
    names = chosen_nodes(planned, options)
    return recompute(planned, Recomputation(names, options.communication == KEEP))


def chosen_nodes(planned: Planned, options: RecomputeOptions) -> frozenset[str]:
    """Returns the names of the forward nodes that are recomputed; raises as `recomputed`."""
    forward = ForwardPass.of(planned.model.graph)
    found: set[str] = set()
    for pattern in options.nodes:
        found |= _matching(forward, pattern, options.where)
    if options.layers:
        layers = find_layers(forward.nodes, planned.env)
        if not layers:
            raise StrategyError(
                f"{options.where}: expected layers that repeat, found none in the "
                f"{len(forward.nodes)} nodes of the forward pass; name nodes by patterns"
            )
        for layer in layers[options.layers - 1 :: options.layers]:
            found |= forward.inside(layer)
    return frozenset(found)


def _matching(forward: ForwardPass, pattern: str, where: str) -> frozenset[str]:
    names = [node.name or "" for node in forward.nodes]
    hits = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
    if not hits:
        raise StrategyError(
            f"{where}: expected the name or a pattern of a node of the forward pass, got "
            f"{pattern!r}{nearest(pattern, names)}"
        )
    able = forward.able.intersection(hits)
    if not able:
        raise StrategyError(
            f"{where}: {pattern!r}: nodes with bodies, and nodes that read parameters and "
            f"constants only, are not recomputed; got {hits[0]!r}"
        )
    return able
