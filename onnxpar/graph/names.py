"""Unique names: all builders and passes name what they add with `Names`."""

from collections.abc import Iterable

import onnx_ir as ir


class Names:
    """The names that are in use, of values or of nodes or of both."""

    def __init__(self, taken: Iterable[str | None] = ()) -> None:
        """Starts with names that are in use; None is ignored."""
        self._count = {name: 0 for name in taken if name is not None}

    def __contains__(self, name: str) -> bool:
        """Whether a name is in use."""
        return name in self._count

    def reserve(self, taken: Iterable[str | None]) -> None:
        """Adds names that are in use."""
        for name in taken:
            self._count.setdefault(name or "", 0)

    def fresh(self, hint: str) -> str:
        """Returns and reserves the first of `hint`, `hint.1`, `hint.2`, … that is not in use."""
        name = hint
        while name in self._count:
            self._count[hint] += 1
            name = f"{hint}.{self._count[hint]}"
        self._count[name] = 0
        return name


def names_of(graph: ir.Graph, *, nodes: bool = True) -> Names:
    """Returns the names of the values and (`nodes`) nodes of a graph and of its bodies."""
    names = Names(v.name for v in (*graph.inputs, *graph.initializers.values()))
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names.reserve(v.name for v in (*node.inputs, *node.outputs) if v is not None)
        names.reserve([node.name] if nodes else [])
    return names
