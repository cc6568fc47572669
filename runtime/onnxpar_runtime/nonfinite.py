"""Finds where values that are not finite come from: the first node, the rank and the element.

With `--debug-nan` every value of a rank's graphs is exposed. When a result of a program (the loss,
an output, a gradient, a new parameter) is not finite, it is followed back to a node whose operands
do not have the same: NaN, Inf or -Inf. Where an operand has another of these (a NaN may come from
`Inf - Inf`), that is followed back, too. Infinite values that reach no result, such as the masks of
attention, are no fault.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import ProgramEntry
from onnxpar_format.texts import numbered_ranks
from onnxpar_runtime.agree import agree
from onnxpar_runtime.errors import NotFiniteError
from onnxpar_runtime.exposed_graph import DOMAIN, KEPT, add_outputs
from onnxpar_runtime.tensors import to_host

Array = NDArray[Any]
_FLOATS = {element.code for element in DTYPES.values() if element.dtype.kind in "fcV"}
_GROUP = "group"
_TESTS: dict[str, Callable[[Array], NDArray[np.bool_]]] = {
    "NaN": np.isnan,
    "Inf": lambda array: np.isinf(array) & (array > 0),
    "-Inf": lambda array: np.isinf(array) & (array < 0),
}
"""What is looked for, the worst first."""
_RUN, _FOREIGN = 1 << 24, 1 << 56
"""Weights in the order of findings: by run, then by node; those from other ranks come last."""


@dataclass(frozen=True)
class _Finding:
    """Where a value that is not finite comes from, as far as this rank sees."""

    text: str
    order: int


class Watch:
    """Looks at all values of the programs of one rank.

    Between two calls of `settle` it remembers the first finding.
    """

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self._graphs: dict[str, onnx.GraphProto] = {}
        self._first: _Finding | None = None
        self._runs = 0

    def expose(self, graph: onnx.GraphProto, program: ProgramEntry) -> None:
        """Makes all floating-point values of a rank's graph outputs.

        Args:
            graph: The graph, which is changed.
            program: The program of which it is the graph.
        """
        nodes = onnx.GraphProto()
        nodes.node.extend(graph.node)
        self._graphs[program.name] = nodes
        types = {
            value.name: value.type.tensor_type.elem_type
            for value in (*graph.value_info, *graph.output)
        }
        names = {name for name, code in types.items() if code in _FLOATS}
        states = {output.name for output in program.state_outputs}
        add_outputs(graph, names, states, inputs=True)

    def look(self, program: ProgramEntry, made: Mapping[str, Any]) -> None:
        """Looks at the values of a run.

        Args:
            program: The program.
            made: The OrtValues of its outputs, without states.
        """
        self._runs += 1
        if self._first is None:
            values = {name.removeprefix(KEPT): to_host(value) for name, value in made.items()}
            search = _Search(self._graphs[program.name], program, values)
            self._first = search.finding(self._runs)

    def forget(self) -> None:
        """Drops what was found, because the step is repeated or skipped."""
        self._first, self._runs = None, 0

    def settle(self, rank: Any) -> None:
        """Raises on all ranks if any has found something. Every rank must call it.

        Raises:
            NotFiniteError: A value is not finite; the message is that of the rank where it began.
            RankError: As NotFiniteError, on several ranks.
        """
        found, size = self._first, rank.world.size
        self.forget()
        orders = np.zeros(size, np.int64)
        orders[rank.index] = 0 if found is None else found.order
        if size > 1:
            orders = rank.all_reduce(orders)
        if not orders.any():
            return
        least = orders[orders > 0].min()
        ranks = [int(index) for index in np.flatnonzero(orders == least)]
        error = None
        if found is not None and rank.index == ranks[0]:
            where = f"on {numbered_ranks(ranks)}: " if size > 1 else ""
            error = NotFiniteError(f"{where}{found.text}")
        agree(rank, error)


class _Search:
    """The values of one run, and the nodes that made them."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        program: ProgramEntry,
        values: Mapping[str, Array],
    ) -> None:
        self._graph, self._program, self._values = graph, program, values
        self._foreign = {value.name for value in program.handed_in}
        self._makers = {
            name: place for place, node in enumerate(graph.node) for name in node.output if name
        }
        self._known: dict[str, tuple[str, ...]] = {}

    def finding(self, run: int) -> _Finding | None:
        """Returns where the first result that is not finite comes from; None if all are."""
        program = self._program
        results = [spec.name for spec in program.outputs]
        results += [output.name for output in program.state_outputs]
        results += [value.name for value in program.handed_out]
        for kind in _TESTS:
            for name in results:
                if kind in self._kinds(name):
                    return self._followed(name, kind, run)
        return None

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Returns what is in a value."""
        if name not in self._known:
            array = self._values.get(name)
            self._known[name] = () if array is None else _kinds(array)
        return self._known[name]

    def _followed(self, result: str, kind: str, run: int) -> _Finding:
        begin, foreign = self._origin(result, kind)
        text = f"program {self._program.name}: {self._described(begin, kind)}"
        if begin in self._makers:
            more, from_others = self._other_operand(self._graph.node[self._makers[begin]])
            text, foreign = text + more, foreign or from_others
        if result != begin:
            text += f"; it reaches {result!r}"
        order = run * _RUN + self._makers.get(begin, -1) + 2
        return _Finding(text, order + (_FOREIGN if foreign else 0))

    def _origin(self, name: str, kind: str) -> tuple[str, bool]:
        """Follows a value back; returns where it begins, and whether another program made that."""
        while (place := self._makers.get(name)) is not None:
            node = self._graph.node[place]
            # An operand that comes later is one in whose memory the result was written.
            earlier = (o for o in node.input if self._makers.get(o, -1) < place)
            operands = [operand for operand in earlier if kind in self._kinds(operand)]
            if not operands:
                # What only other ranks had is in the result of a collective.
                return name, _is_collective(node)
            name = max(operands, key=lambda operand: self._makers.get(operand, -1))
        return name, name in self._foreign

    def _described(self, name: str, kind: str) -> str:
        place = self._makers.get(name)
        if place is None:
            return f"input {name!r} {self._where(name, kind)}"
        node = self._graph.node[place]
        return f"node {node.name!r} ({node.op_type}): its result {name!r} {self._where(name, kind)}"

    def _where(self, name: str, kind: str) -> str:
        array = self._values[name]
        found = _TESTS[kind](array)
        index = [int(i) for i in np.argwhere(found)[0]] if array.ndim else []
        first = f", the first at {index} of the rank's shard" if index else ""
        return f"has {kind} in {int(found.sum())} of {array.size} elements{first}"

    def _other_operand(self, node: onnx.NodeProto) -> tuple[str, bool]:
        """Returns where an operand of another kind comes from, and whether others made that."""
        for operand in node.input:
            for kind in self._kinds(operand):
                begin, foreign = self._origin(operand, kind)
                source = self._described(begin, kind)
                return f"; its operand {operand!r} has {kind}, from {source}", foreign
        return "; its operands are finite", False


def _kinds(array: Array) -> tuple[str, ...]:
    if array.dtype.kind not in "fcV" or np.isfinite(array).all():
        return ()
    return tuple(kind for kind, test in _TESTS.items() if test(array).any())


def _is_collective(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and any(a.name == _GROUP for a in node.attribute)
