"""Builds the rank-generic graph: nodes, shape arithmetic, and collectives chained by tokens.

A rank-generic graph is the program of all ranks of a stage. What differs between ranks is either a
small integer input (mesh coordinates; the global values of symbols are inputs too) or is added when
the graph is written (the `group` of a collective, see `onnxpar.emit.rank_graph`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import onnx_ir as ir
import sympy

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, dim_str, symbols_of
from onnxpar.graph.builder import DOMAIN, INT64, Builder
from onnxpar.graph.metadata_keys import AFTER, BEFORE, BYTES, FOR, OVER, VALUE
from onnxpar_format.entries import COUNTERS

SYMBOL_PREFIX = "onnxpar.symbol."
COORD_PREFIX = "onnxpar.coord."
COUNTER_INPUTS = tuple(f"{DOMAIN}.{counter}" for counter in COUNTERS)
"""System inputs with the keys of random numbers; the runtime advances them."""
MICRO_BATCH = f"{DOMAIN}.micro_batch"
"""The one of them that differs between the micro-batches of a step."""
LOSS_WEIGHT = "onnxpar.loss_weight"
"""Input that scales the loss of a micro-batch, and so its gradients."""
HYPER_PREFIX = "onnxpar.hyper."
"""Prefix of the names of the scalars that an optimizer reads, such as the learning rate."""
START_AHEAD = "onnxpar.start_ahead"
"""Input, int64 [1]: whether the optimizer comes next, so that its reductions may start."""
FINISH_LATER = "onnxpar.finish_later"
"""Input, int64 [1]: whether the next program finishes gathers of parameters."""
ACCUMULATE = "onnxpar.accumulate"
"""Input, int64 [1]: what the program does with gradients, see `onnxpar.schedule.accumulate`."""
BACKGROUND_INPUTS = (START_AHEAD, FINISH_LATER, ACCUMULATE)
"""The inputs that the runtime sets for each run of a step."""
PLACE = "place"
"""Key in a node's `meta`: the builder's `place` when the node was built."""

_KINDS = {
    sympy.Add: "Add",
    sympy.Mul: "Mul",
    sympy.Max: "Max",
    sympy.Min: "Min",
    sympy.Mod: "Mod",
}
"""The ONNX operator of each function in a size."""


@dataclass(frozen=True)
class Collective:
    """One collective of the rank-generic graph, for manifest, `inspect` and Netron.

    Attributes:
        op: Operator name in the domain `onnxpar`.
        node: Name of its node.
        value: Name of the global value that it transfers.
        atoms: Mesh atoms that span its groups.
        bytes: Bytes that one rank sends (symbolic), counted as in `onnxpar_runtime`.
        reason: The node and operand that need the value in the layout `after`.
        before: Layout of the value before, for people.
        after: Layout of the value after, for people.
        stages: For groups across pipeline stages: the stages; a group is the ranks at one place on
            their meshes. Empty for groups within a stage.
        started_in: The program that starts it in the background, before this one; "" for none.
        finished_in: The program that finishes it in the background, after this one; "" for none.
        behind: What is computed while it runs in the background, for people; "" in the foreground.
    """

    op: str
    node: str
    value: str
    atoms: Atoms
    bytes: Dim
    reason: str
    before: str
    after: str
    stages: tuple[int, ...] = ()
    started_in: str = ""
    finished_in: str = ""
    behind: str = ""


@dataclass
class LocalBuilder(Builder):
    """Collects the nodes of one rank-generic graph, whose shapes are local.

    Attributes:
        mesh: The device mesh.
        varying: For each symbol whose value differs between ranks, the atoms along which it does.
        nodes: The nodes so far, in order.
        initializers: The constants so far.
        system_inputs: The inputs that the runtime fills, by name.
        collectives: The collectives so far, in order.
        shapes: Local shape of each value whose rank is known.
        place: The place of the next nodes in a pipeline, see
            `onnxpar.graph.pipeline_places.Places`.
    """

    mesh: Mesh
    varying: Mapping[str, frozenset[int]] = field(default_factory=dict)
    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)
    system_inputs: dict[str, ir.Value] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    shapes: dict[ir.Value, tuple[Dim, ...]] = field(default_factory=dict)
    place: int = 0
    _known: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    _bound: dict[str, Callable[[], ir.Value]] = field(default_factory=dict)
    _token: ir.Value | None = None

    def nested(self) -> "LocalBuilder":
        """Returns a builder of a body inside the graph being built.

        Constants and system inputs go to the outer graph, which the body reads; sizes that the body
        computes stay in the body. Names are unique across both.
        """
        return replace(
            self,
            nodes=[],
            collectives=list(self.collectives),
            _known=dict(self._known),
            _bound=dict(self._bound),
        )

    # -- nodes -----------------------------------------------------------------------------------

    def append(self, node: ir.Node) -> None:
        """Puts a node after all others."""
        node.meta[PLACE] = self.place
        self.nodes.append(node)

    def hold(self, constant: ir.Value) -> None:
        """Keeps a new constant among the initializers."""
        self.initializers.append(constant)

    def note_shape(self, value: ir.Value, shape: Sequence[Dim]) -> None:
        """Keeps the local shape of a value."""
        self.shapes[value] = tuple(shape)

    def shape_of(self, value: ir.Value) -> tuple[Dim, ...]:
        """Returns the local shape of a value; KeyError if it is unknown."""
        return self.shapes[value]

    # -- sizes -----------------------------------------------------------------------------------

    def part(self, nodes: list[ir.Node]) -> "LocalBuilder":
        """Returns a builder of some of the nodes, which may be given further ones."""
        return replace(
            self,
            nodes=nodes,
            initializers=list(self.initializers),
            collectives=list(self.collectives),
            system_inputs=dict(self.system_inputs),
            _consts={},  # constants may be removed from the part
        )

    def system_input(self, name: str) -> ir.Value:
        """Returns the int64 input of shape [1] with this name, which the runtime fills."""
        if name not in self.system_inputs:
            self.system_inputs[name] = self.declare(ir.Value(name=name), INT64, [1])
        return self.system_inputs[name]

    def coord(self, atom: int) -> ir.Value:
        """Returns this rank's coordinate along an atom, int64 [1]."""
        return self.system_input(f"{COORD_PREFIX}{atom}")

    def position(self, atoms: Atoms) -> ir.Value:
        """Returns this rank's position in its group over `atoms`, major atom first, int64 [1]."""
        total = self.coord(atoms[0])
        for atom in atoms[1:]:
            scaled = self.op("Mul", total, self.const([self.mesh.atoms[atom]]))
            total = self.op("Add", scaled, self.coord(atom))
        return total

    def bind(self, symbol: str, value: ir.Value, axis: int) -> None:
        """Reads a symbol that no input has from dim `axis` of a local value.

        The dim must be replicated, so that its local size is the global one. If a symbol is bound
        several times, the first binding counts.
        """

        def read() -> ir.Value:
            sizes = self.op("Shape", value, dtype=INT64, shape=[len(value.shape or ())])
            return self.op("Slice", sizes, self.const([axis]), self.const([axis + 1]), shape=[1])

        self._bound.setdefault(symbol, read)

    def size(self, expr: Dim) -> ir.Value:
        """Returns one size as int64 [1].

        Raises:
            ShardingError: A symbol of the expression is neither an input's nor bound to a value.
        """
        return self.sizes([expr])

    def computed_sizes(self, dims: tuple[Dim, ...]) -> ir.Value:
        """Returns sizes by arithmetic on the inputs of the symbols; each size is computed once."""

        def make() -> ir.Value:
            if len(dims) == 1:
                return self._emit_size(dims[0])
            return self.op("Concat", *map(self.size, dims), shape=[len(dims)], axis=0)

        return self.once(dims, make)

    def once(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """Returns what `make` emits, which must depend on sizes and coordinates alone.

        It is emitted when a key is first asked for; later readers of the key get the same value.
        """
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _emit_size(self, expr: sympy.Expr) -> ir.Value:
        if expr.is_Symbol:
            if expr.name in self._bound:
                return self._bound[expr.name]()
            if expr.name not in self.table:
                raise ShardingError(
                    f"{self.scope}: the size {expr.name!r} is known only at run time, and no "
                    f"replicated value holds it"
                )
            return self.system_input(f"{SYMBOL_PREFIX}{expr.name}")
        if isinstance(expr, sympy.floor):
            top, bottom = sympy.fraction(sympy.together(expr.args[0]))
            numerator, denominator = self.size(top), self.size(bottom)
            lows = [self.table.bounds(part)[0] for part in (top, bottom)]
            if any(low is None or low < 0 for low in lows):
                # Div rounds towards zero, so make the numerator a multiple of the denominator.
                rest = self.op("Mod", numerator, denominator, shape=[1])
                numerator = self.op("Sub", numerator, rest, shape=[1])
            return self.op("Div", numerator, denominator, shape=[1])
        top, bottom = sympy.fraction(sympy.together(expr) if expr.is_Add else expr)
        if bottom != 1:
            return self.op("Div", self.size(top), self.size(bottom), shape=[1])
        kind, args = _KINDS.get(expr.func), expr.args
        if expr.is_Pow and expr.exp.is_Integer:
            kind, args = "Mul", [expr.base] * int(expr.exp)
        if kind is None:
            raise ShardingError(f"{self.scope}: cannot compute the size {expr} in a graph")
        return reduce(lambda a, b: self.op(kind, a, b, shape=[1]), map(self.size, args))

    def after(self, x: ir.Value, others: Sequence[ir.Value]) -> ir.Value:
        """Returns `x` as a value that is computed after the others.

        The runtime runs a node as soon as its operands are computed, and fused nodes after all
        others, regardless of their order in the graph.
        """
        made = self.ops("Barrier", [x, *others], [(x.dtype, None)], domain=DOMAIN)[0]
        made.shape = x.shape
        if x in self.shapes:
            self.shapes[made] = self.shapes[x]
        return made

    # -- collectives -----------------------------------------------------------------------------

    def collective(
        self,
        op_type: str,
        x: ir.Value,
        atoms: Atoms,
        *,
        shape: Sequence[Dim],
        moved: Dim,
        value: str,
        reason: str,
        before: Sharding | None = None,
        after: Sharding | None = None,
        pairs: Sequence[tuple[int, int]] = (),
        stages: Sequence[int] = (),
        **attributes: object,
    ) -> ir.Value:
        """Appends a collective over the groups that `atoms` span, after all earlier collectives.

        Args:
            op_type: Operator of the domain `onnxpar`.
            x: Local operand.
            atoms: Atoms of the groups; the first varies slowest in the order of the group.
            shape: Local shape of the result.
            moved: Bytes that one rank sends.
            value: Name of the global value, for people.
            reason: Which node and operand need it.
            before: Layout of the value before.
            after: Layout of the value after.
            pairs: For Permute: (source, destination) positions in the group.
            stages: In place of atoms: the pipeline stages (see `Collective.stages`).
            attributes: Further attributes of the operator.

        Raises:
            ShardingError: The ranks of a group would transfer tensors of different sizes.
        """
        self._check_sizes(op_type, atoms, moved, value, reason)
        texts = (
            before.describe(self.mesh) if before else "",
            after.describe(self.mesh) if after else "",
        )
        over = self.mesh.describe(tuple(atoms)) if atoms else "stages"
        operands = ["X"] if self._token is None else ["X", "token"]
        out, token = self.ops(
            op_type,
            [x] if self._token is None else [x, self._token],
            [(x.dtype, shape), (ir.DataType.UINT8, [1])],
            attributes,
            domain=DOMAIN,
            name=f"{self.scope}/{op_type}.{over}({value})",
            metadata={
                "input_names": str(operands),
                VALUE: value,
                OVER: over,
                BEFORE: texts[0],
                AFTER: texts[1],
                BYTES: dim_str(moved),
                FOR: reason,
            },
        )
        node = self.nodes[-1]
        node.meta["atoms"] = tuple(atoms)
        node.meta["pairs"] = tuple(pairs)
        node.meta["stages"] = tuple(stages)
        self._token = token
        self.collectives.append(
            Collective(
                op_type, node.name or "", value, tuple(atoms), moved, reason, *texts, tuple(stages)
            )
        )
        return out

    def _check_sizes(self, op_type: str, atoms: Atoms, moved: Dim, value: str, reason: str) -> None:
        for symbol in sorted(symbols_of(moved)) if self.varying else ():
            over = self.varying.get(symbol, frozenset()) & set(atoms)
            if over:
                raise ShardingError(
                    f"{reason}: {value!r} would be transferred by {op_type} over "
                    f"{self.mesh.describe(tuple(atoms))}, and its size has the symbol {symbol!r}, "
                    f"which is per-rank along {self.mesh.describe(tuple(sorted(over)))}: choose "
                    f"a strategy that does not move it, or use one size on all ranks"
                )
