"""Builds the rank-generic graph: nodes, shape arithmetic, and collectives chained by tokens.

A rank-generic graph is the program of all ranks of a stage. What differs between ranks is either a
small integer input (mesh coordinates; the global values of symbols are inputs too) or filled in at
emission (the `group` of a collective, see `onnxpar.emit.rank_graph`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import sympy

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, SymbolTable, dim_str, symbols_of

DOMAIN = "onnxpar"
SYMBOL_PREFIX = "onnxpar.symbol."
COORD_PREFIX = "onnxpar.coord."
# Ends the names of values that the model has no name for.
GENERATED = ".out"
COUNTERS = ("onnxpar.seed", "onnxpar.step", "onnxpar.micro_batch")
"""System inputs that key random numbers; the runtime advances them."""
LOSS_WEIGHT = "onnxpar.loss_weight"
"""Input that scales the loss of a micro-batch, and so its gradients."""
HYPER_PREFIX = "onnxpar.hyper."
"""Begins the names of the scalars that an optimizer reads, such as the learning rate."""
INT64 = ir.DataType.INT64
PLACE = "place"
"""Key among a node's `meta`: the builder's `place` when it was built."""


@dataclass(frozen=True)
class Collective:
    """One collective of the rank-generic graph, for manifest, `inspect` and Netron.

    Attributes:
        op: Operator name in the domain `onnxpar`.
        node: Name of its node.
        value: Name of the global value that it moves.
        atoms: Mesh atoms that span its groups.
        bytes: Bytes that one rank sends (symbolic), by the count that `onnxpar_runtime` keeps too.
        reason: The node and operand that want the value so.
        before: Layout of the value before, for people.
        after: Layout of the value after, for people.
        stages: The pipeline stages whose ranks of one place on the mesh are the groups; empty for
            groups within a stage.
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


@dataclass
class GraphBuilder:
    """Collects the nodes of one rank-generic graph.

    Attributes:
        mesh: The device mesh.
        table: What is known of the symbols.
        opset: Version of the default domain of the graph being built.
        varying: Of each symbol whose value differs between ranks, the atoms along which it does.
        place: Which program of a pipeline the nodes built from here on belong to, see
            `onnxpar.graph.pipeline_places.Places`.
    """

    mesh: Mesh
    table: SymbolTable
    opset: int
    varying: Mapping[str, frozenset[int]] = field(default_factory=dict)
    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)
    system_inputs: dict[str, ir.Value] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    place: int = 0
    _scope: str = ""
    _names: dict[str, int] = field(default_factory=dict)
    _node_names: dict[str, int] = field(default_factory=dict)
    _sizes: dict[object, ir.Value] = field(default_factory=dict)
    _consts: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    _bound: dict[str, Callable[[], ir.Value]] = field(default_factory=dict)
    _token: ir.Value | None = None

    # -- nodes -----------------------------------------------------------------------------------

    def scope(self, name: str) -> None:
        """Sets the prefix of the names of the nodes that are built from here on."""
        self._scope = name

    def nested(self) -> "GraphBuilder":
        """Returns a builder of a body inside the graph being built.

        Constants and system inputs go to the outer graph, which the body reads; sizes that the body
        computes stay in the body. Names are found once in all of them.
        """
        return replace(
            self,
            nodes=[],
            collectives=list(self.collectives),
            _sizes=dict(self._sizes),
            _bound=dict(self._bound),
        )

    def fresh(self, hint: str) -> str:
        """Returns a name that no other value of this graph has, beginning with `hint`."""
        return _fresh(self._names, hint)

    def fresh_node(self, hint: str) -> str:
        """Returns a name that no other node of this graph has, beginning with `hint`."""
        return _fresh(self._node_names, hint)

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Sequence[Dim] | None]],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[ir.Value, ...]:
        """Appends a node and returns its outputs, one for each `(dtype, local shape)` given."""
        node_name = name or self.fresh_node(f"{self._scope}/{op_type}")
        values = []
        for index, (dtype, shape) in enumerate(outputs):
            suffix = "" if len(outputs) == 1 else f":{index}"
            values.append(
                ir.Value(
                    name=self.fresh(f"{node_name}{suffix}{GENERATED}"),
                    type=ir.TensorType(dtype) if dtype is not None else None,
                    shape=ir_shape(shape) if shape is not None else None,
                )
            )
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(dict(attributes or {})),
            outputs=values,
            name=node_name,
        )
        node.metadata_props.update(metadata or {})
        node.meta[PLACE] = self.place
        self.nodes.append(node)
        return tuple(values)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        dtype: ir.DataType | None = None,
        shape: Sequence[Dim] | None = None,
        **attributes: object,
    ) -> ir.Value:
        """Appends a standard node with one output; its dtype defaults to the first input's.

        Raises:
            ShardingError: The model's opset does not have the operator yet.
        """
        if not _is_defined(op_type, self.opset):
            raise ShardingError(
                f"{self._scope}: to be divided it needs the operator {op_type}, which opset "
                f"{self.opset} does not have; convert the model to opset 13 or newer"
            )
        if dtype is None:
            first = next((v for v in inputs if v is not None), None)
            dtype = first.dtype if first is not None else None
        return self.ops(op_type, inputs, [(dtype, shape)], attributes)[0]

    # -- constants and sizes ---------------------------------------------------------------------

    def const(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        """Returns a constant (Python numbers become int64 or float32 unless `dtype` says)."""
        data = np.asarray(array)
        if dtype is not None:
            data = data.astype(dtype.numpy())
        elif data.dtype.kind in "iu" and not isinstance(array, np.ndarray):
            data = data.astype(np.int64)
        elif data.dtype.kind == "f" and not isinstance(array, np.ndarray):
            data = data.astype(np.float32)
        kind = dtype or ir.DataType.from_numpy(data.dtype)
        key = (kind, data.shape, data.tobytes())
        if key not in self._consts:
            name = self.fresh("onnxpar.const")
            tensor = ir.Tensor(data, dtype=kind, name=name)
            value = ir.Value(
                name=name, type=ir.TensorType(kind), shape=ir.Shape(data.shape), const_value=tensor
            )
            self.initializers.append(value)
            self._consts[key] = value
        return self._consts[key]

    def system_input(self, name: str) -> ir.Value:
        """Returns the int64 input of shape [1] with this name, which the runtime fills."""
        if name not in self.system_inputs:
            self.system_inputs[name] = ir.Value(
                name=name, type=ir.TensorType(INT64), shape=ir.Shape([1])
            )
        return self.system_inputs[name]

    def coord(self, atom: int) -> ir.Value:
        """Returns this rank's coordinate along an atom, int64 [1]."""
        return self.system_input(f"{COORD_PREFIX}{atom}")

    def bind(self, symbol: str, value: ir.Value, axis: int) -> None:
        """Tells where a symbol that is no input symbol is read: dim `axis` of a local value.

        The dim must not be split, so that the local size is the global one. The first word stays.
        """

        def read() -> ir.Value:
            whole = self.op("Shape", value, dtype=INT64, shape=[len(value.shape or ())])
            return self.op("Slice", whole, self.const([axis]), self.const([axis + 1]), shape=[1])

        self._bound.setdefault(symbol, read)

    def size(self, expr: Dim) -> ir.Value:
        """Returns a size as int64 [1]: a constant, or arithmetic on the symbols' inputs.

        Raises:
            ShardingError: A symbol of the expression is neither an input's nor bound to a value.
        """
        if isinstance(expr, int | sympy.Integer):
            return self.const([int(expr)])
        if expr not in self._sizes:
            self._sizes[expr] = self._emit_size(expr)
        return self._sizes[expr]

    def _emit_size(self, expr: sympy.Expr) -> ir.Value:
        if expr.is_Symbol:
            if expr.name in self._bound:
                return self._bound[expr.name]()
            if expr.name not in self.table:
                raise ShardingError(
                    f"{self._scope}: the size {expr.name!r} is known only when the model runs, and "
                    "no value that is whole on every device has it"
                )
            return self.system_input(f"{SYMBOL_PREFIX}{expr.name}")
        if isinstance(expr, sympy.floor | sympy.ceiling):
            top, bottom = sympy.fraction(sympy.together(expr.args[0]))
            numerator, denominator = self.size(top), self.size(bottom)
            if isinstance(expr, sympy.ceiling):
                less = self.op("Sub", denominator, self.const([1]), shape=[1])
                numerator = self.op("Add", numerator, less, shape=[1])
            if not all(self._at_least_zero(part) for part in (top, bottom)):
                # Div rounds towards zero; a number without what Mod leaves is divided exactly.
                rest = self.op("Mod", numerator, denominator, shape=[1])
                numerator = self.op("Sub", numerator, rest, shape=[1])
            return self.op("Div", numerator, denominator, shape=[1])
        if expr.is_Mul and any(f.is_Rational and not f.is_Integer for f in expr.args):
            top, bottom = sympy.fraction(expr)
            return self.op("Div", self.size(top), self.size(bottom), shape=[1])
        if expr.is_Add:
            top, bottom = sympy.fraction(sympy.together(expr))
            if bottom != 1:
                return self.op("Div", self.size(top), self.size(bottom), shape=[1])
        if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
            base = self.size(expr.base)
            total = base
            for _ in range(int(expr.exp) - 1):
                total = self.op("Mul", total, base, shape=[1])
            return total
        kinds = {sympy.Add: "Add", sympy.Mul: "Mul", sympy.Max: "Max", sympy.Min: "Min"}
        if isinstance(expr, sympy.Mod):
            return self.op("Mod", *(self.size(a) for a in expr.args), shape=[1])
        kind = next((k for c, k in kinds.items() if isinstance(expr, c)), None)
        if kind is None:
            raise ShardingError(f"{self._scope}: cannot compute the size {expr} in a graph")
        total = self.size(expr.args[0])
        for arg in expr.args[1:]:
            total = self.op(kind, total, self.size(arg), shape=[1])
        return total

    def _at_least_zero(self, expr: sympy.Expr) -> bool:
        low, _ = self.table.bounds(int(expr) if expr.is_Integer else expr)
        return low is not None and low >= 0

    def shape(self, dims: Sequence[Dim]) -> ir.Value:
        """Returns a shape as int64 [len(dims)]: one constant where all of it is static."""
        if all(isinstance(d, int | sympy.Integer) for d in dims):
            return self.const(np.array([int(d) for d in dims], np.int64))
        if len(dims) == 1:
            return self.size(dims[0])
        key = ("shape", *dims)
        if key not in self._sizes:
            parts = [self.size(d) for d in dims]
            self._sizes[key] = self.ops("Concat", parts, [(INT64, [len(dims)])], {"axis": 0})[0]
        return self._sizes[key]

    def reshape(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Returns `x` with the local shape `dims`; the value itself where nothing changes."""
        if x.shape is not None and ir_shape(dims) == x.shape:
            return x
        # A size of zero means zero; before opset 14 there was no way to say so.
        zeros: dict[str, Any] = {"allowzero": 1} if self.opset >= 14 else {}
        return self.op("Reshape", x, self.shape(dims), shape=dims, **zeros)

    def after(self, x: ir.Value, others: Sequence[ir.Value]) -> ir.Value:
        """Returns `x` as a value that is not there before the others are.

        The runtime runs a node as soon as its operands are there, and nodes that it has fused after
        all others, wherever they stand.
        """
        name = self.fresh_node(f"{self._scope}/Barrier")
        made = self.ops("Barrier", [x, *others], [(x.dtype, None)], domain=DOMAIN, name=name)[0]
        made.shape = x.shape
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
            reason: Which node and operand want it.
            before: Layout of the value before.
            after: Layout of the value after.
            pairs: For Permute: (source, destination) positions in the group.
            stages: In place of atoms: the pipeline stages whose counterparts are a group.
            attributes: Further attributes of the operator.

        Raises:
            ShardingError: The ranks of a group would move tensors of different sizes.
        """
        self._check_sizes(op_type, atoms, moved, value, reason)
        texts = (
            before.describe(self.mesh) if before else "",
            after.describe(self.mesh) if after else "",
        )
        node_name = self.fresh_node(f"{self._scope}/{op_type}({value})")
        operands = ["X"] if self._token is None else ["X", "token"]
        out, token = self.ops(
            op_type,
            [x] if self._token is None else [x, self._token],
            [(x.dtype, shape), (ir.DataType.UINT8, [1])],
            attributes,
            domain=DOMAIN,
            name=node_name,
            metadata={
                "input_names": str(operands),
                "onnxpar.value": value,
                "onnxpar.layout_before": texts[0],
                "onnxpar.layout_after": texts[1],
                "onnxpar.bytes_sent": dim_str(moved),
                "onnxpar.reason": reason,
            },
        )
        node = self.nodes[-1]
        node.meta["atoms"] = tuple(atoms)
        node.meta["pairs"] = tuple(pairs)
        node.meta["stages"] = tuple(stages)
        self._token = token
        self.collectives.append(
            Collective(
                op_type, node_name, value, tuple(atoms), moved, reason, *texts, tuple(stages)
            )
        )
        return out

    def _check_sizes(self, op_type: str, atoms: Atoms, moved: Dim, value: str, reason: str) -> None:
        for symbol in sorted(symbols_of(moved)) if self.varying else ():
            over = self.varying.get(symbol, frozenset()) & set(atoms)
            if over:
                raise ShardingError(
                    f"{reason}: {value!r} would be moved by {op_type} over "
                    f"{self.mesh.describe(tuple(atoms))}, and its size has the symbol {symbol!r}, "
                    f"which is per-rank along {self.mesh.describe(tuple(sorted(over)))}: choose a "
                    "strategy that leaves it where it is, or give all ranks one size"
                )


def _fresh(taken: dict[str, int], hint: str) -> str:
    name = hint
    while name in taken:
        taken[hint] += 1
        name = f"{hint}.{taken[hint]}"
    taken[name] = 0
    return name


@lru_cache(maxsize=1024)
def _is_defined(op_type: str, opset: int) -> bool:
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def ir_shape(dims: Sequence[Dim]) -> ir.Shape:
    """Returns an onnx_ir shape: ints stay ints, expressions become symbolic dims."""
    return ir.Shape([int(d) if isinstance(d, int | sympy.Integer) else _text(d) for d in dims])


@lru_cache(1 << 16)
def _text(expr: sympy.Expr) -> str:
    # sympy prints a size in 0.2 ms, and a graph of 6,000 nodes has four sizes a value.
    return dim_str(expr)
