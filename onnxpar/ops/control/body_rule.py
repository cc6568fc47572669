"""The rule of a node with bodies, from the rules of the nodes in them.

The factors of all nodes of a body are unified dim by dim (see `unified_dims`), through the bodies'
inputs, results and captured values. A part of a dim that all nodes can shard in the same way is a
factor of the node with the bodies. A sum over such a part (or a maximum, and so on) may be partial
until the body ends if every node that reads it is linear. The results of the node are then partial,
and so is a state from step to step if its initial value is zero. Nodes of a body never communicate:
a device that is delayed in a loop would block the others. A dim that would need communication there
is replicated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import (
    ABSENT,
    ANY,
    REPLICATED,
    REPLICATED_OPERAND,
    SPECIAL,
    Operand,
    OpRule,
    parse_rule,
)
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding, Sharding
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import BodyFacts, NodeView
from onnxpar.graph.plan import NodePlan, factor_sizes, operand_sharding, shardings
from onnxpar.ops.control.unified_dims import DimParts

PartialDims = dict[int, str]


@dataclass(frozen=True)
class Port:
    """An operand or a result of a node with bodies.

    Attributes:
        outer: The value outside the bodies; None if it is absent.
        inner: The inputs or results of bodies that equal it, or that are slices of it.
        axis: The dim of the outer value that is sliced; None if it is not sliced.
    """

    outer: ir.Value | None
    inner: tuple[ir.Value, ...] = ()
    axis: int | None = None


@dataclass(frozen=True)
class Wiring:
    """How operands and results of a node are connected to its bodies.

    Attributes:
        operands: The operands that the operator has; captured values are excluded.
        results: The results.
        states: For each value that is passed from step to step: its initial value, and the input
            and the result of the body that hold it.
        control: Results of bodies that determine what runs; they must be replicated.
    """

    operands: tuple[Port, ...]
    results: tuple[Port, ...]
    states: tuple[tuple[ir.Value | None, ir.Value, ir.Value], ...] = ()
    control: tuple[ir.Value, ...] = ()


@dataclass
class BodyAnalysis:
    """Which dims of a node with bodies may be sharded.

    Attributes:
        view: The node.
        wiring: How its operands and results are connected to its bodies.
        bodies: The bodies, by attribute.
        partial: For each value in a body, the parts over which it may be partial.
    """

    view: NodeView
    wiring: Wiring
    bodies: Mapping[str, BodyFacts]
    partial: dict[str, PartialDims] = field(default_factory=dict)
    _dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _factors: dict[str, dict[str, int]] = field(default_factory=dict)
    _carried: dict[str, dict[int, PartialDims]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Unifies the factors of all nodes."""
        self.parts = DimParts(self.view.table)
        for body in self.bodies.values():
            for node in body.graph:
                self._node(body, node)
        for port in (*self.wiring.operands, *self.wiring.results):
            self._port(port)
        for begin, before, after in self.wiring.states:
            self._same(before, after, "a step of the loop changes its size")
            if begin is not None:
                self._same(begin, before, "a step of the loop changes its size")
        while not self._settled():
            pass

    # -- dims --------------------------------------------------------------------------------------

    def dims(self, value: ir.Value) -> tuple[int, ...] | None:
        """The parts that are the dims of a value; None if its rank is unknown."""
        name = value.name or ""
        if name not in self._dims:
            shape = self._shape(name)
            if shape is None:
                return None
            self._dims[name] = tuple(self.parts.new(size) for size in shape)
        return self._dims[name]

    def _shape(self, name: str) -> tuple[Dim, ...] | None:
        for body in self.bodies.values():
            if name in body.env.shapes:
                return body.env.shapes[name]
        return self.view.env.shapes.get(name)

    def _forbid(self, value: ir.Value, why: str) -> None:
        self.parts.forbid(self.dims(value) or (), why)

    def _same(self, one: ir.Value, other: ir.Value, why: str) -> None:
        ours, theirs = self.dims(one), self.dims(other)
        if ours is None or theirs is None or len(ours) != len(theirs):
            self._forbid(one, why)
            self._forbid(other, why)
            return
        for a, b in zip(ours, theirs, strict=True):
            self.parts.unify((a,), (b,), why)

    def _node(self, body: BodyFacts, node: ir.Node) -> None:
        name = node.name or ""
        rule, view = body.rules[name], body.views[name]
        sizes = factor_sizes(rule, view)
        why = f"{name!r} ({node.op_type}) in its body needs it replicated"
        if name in body.reasons:
            why = f"{name!r} ({node.op_type}) in its body: {body.reasons[name]}"
        factors = self._factors[name] = {f: self.parts.new(sizes[f]) for f in rule.factors}
        for value, operand in (
            *zip(node.inputs, rule.inputs, strict=False),
            *zip(node.outputs, rule.outputs, strict=True),
        ):
            if value is None or not value.name or operand.mode in (ANY, ABSENT):
                continue
            dims = self.dims(value)
            if operand.mode or dims is None:
                self._forbid(value, why)
                continue
            for dim, names in zip(dims, operand.dims, strict=True):
                if names:
                    # A rule may assume equal sizes of its node's operands (see `facts.equalities`).
                    parts = [factors[n] for n in names]
                    self.parts.unify((dim,), parts, why, assume=len(names) == 1)
                else:
                    self.parts.forbid((dim,), why)
        for factor, kind in rule.kinds.items():
            if kind in (REPLICATED, SPECIAL):
                would = f"{name!r} ({node.op_type}) would communicate"
                self.parts.forbid((factors[factor],), why if kind == REPLICATED else would)

    def _port(self, port: Port) -> None:
        why = "a value in its body has an unknown number of dims"
        if port.outer is None or not port.outer.name:
            return
        outer = self.dims(port.outer)
        if outer is None:
            for value in port.inner:
                self._forbid(value, why)
            return
        rest = outer
        if port.axis is not None:
            axis = port.axis + len(outer) if port.axis < 0 else port.axis
            self.parts.forbid((outer[axis],), "the body iterates over it")
            rest = (*outer[:axis], *outer[axis + 1 :])
        for value in port.inner:
            inner = self.dims(value)
            if inner is None or len(inner) != len(rest):
                self.parts.forbid(outer, why)
                self._forbid(value, why)
                continue
            for a, b in zip(rest, inner, strict=True):
                self.parts.unify((a,), (b,), "the bodies give it different sizes")

    def _leaves(self, value: ir.Value) -> set[int]:
        return set(self.parts.leaves(self.dims(value) or ()))

    def _is_zero(self, value: ir.Value | None) -> bool:
        """Whether all elements of a value are known to be zero."""
        return value is not None and self.view.pattern_of(value).zero

    # -- partial values ------------------------------------------------------------------------

    def _settled(self) -> bool:
        """Follows partial values to the results; False if this forbade another part."""
        self._forbid_twice()
        before = len(self.parts.fixed)
        entering: dict[str, PartialDims] = {v.name or "": {} for _, v, _ in self.wiring.states}
        zeros = {v.name or "" for begin, v, _ in self.wiring.states if self._is_zero(begin)}
        while True:
            self.partial = dict(entering)
            for body in self.bodies.values():
                for node in body.graph:
                    if not self._follow(body, node, zeros):
                        return False
            for name in zeros:
                entering[name] = self.partial[name]
            grown = False
            for begin, inner, after in self.wiring.states:
                old, new = entering[inner.name or ""], self.partial.get(after.name or "", {})
                if old == new:
                    continue
                if not self._is_zero(begin) or not old.items() <= new.items():
                    return self._refuse({**old, **new}, "a sum over it is passed to the next step")
                entering[inner.name or ""] = new
                grown = True
            if not grown:
                break
        for value in self.wiring.control:
            if partial := self.partial.get(value.name or ""):
                return self._refuse(partial, "a reduction over it determines what runs")
        self._check_results()
        return len(self.parts.fixed) == before

    def _forbid_twice(self) -> None:
        # Devices that shard rows and columns alike would compute only the blocks of the diagonal.
        for name, factors in self._factors.items():
            self._forbid_repeated(
                factors.values(), f"two dims of {name!r} in its body must be sharded alike"
            )
        for value, dims in self._dims.items():
            self._forbid_repeated(dims, f"two dims of {value!r} must be sharded alike")

    def _forbid_repeated(self, parts: Iterable[int], why: str) -> None:
        leaves = self.parts.leaves(list(parts))
        self.parts.forbid([leaf for leaf in leaves if leaves.count(leaf) > 1], why)

    def _refuse(self, partial: PartialDims, why: str) -> bool:
        self.parts.forbid(list(partial), why)
        return False

    def _follow(self, body: BodyFacts, node: ir.Node, zeros: set[str]) -> bool:
        name = node.name or ""
        rule, factors = body.rules[name], self._factors[name]
        why = f"{name!r} ({node.op_type}) in its body is not linear in a sum over it"
        held: dict[int, PartialDims] = {}
        for index, (value, operand) in enumerate(zip(node.inputs, rule.inputs, strict=False)):
            partial = self.partial.get(value.name or "", {}) if value is not None else {}
            if not partial or operand.mode == ANY:
                continue
            if operand.mode:
                return self._refuse(partial, why)
            held[index] = partial
        carried: PartialDims = {}
        if held:
            carried = next(iter(held.values()))
            for index, value in enumerate(node.inputs):
                # Zeros are partial in whatever way the other operands are.
                if index in held or value is None or rule.inputs[index].mode:
                    continue
                if value.name in zeros:
                    self.partial[value.name or ""] = held[index] = carried
                elif self._is_zero(value) and ("sum", frozenset(held)) not in rule.linear:
                    held[index] = carried
            every: PartialDims = {k: r for p in held.values() for k, r in p.items()}
            own = set(self.parts.leaves(list(factors.values())))
            kinds = set(carried.values())
            if (
                any(p != carried for p in held.values())
                or len(kinds) != 1
                or (next(iter(kinds)), frozenset(held)) not in rule.linear
                or own & set(carried)
            ):
                return self._refuse(every, why)
        self._carried[name] = held
        for value, operand in zip(node.outputs, rule.outputs, strict=True):
            has = {f for names in operand.dims for f in names}
            partial = dict(carried)
            for factor, kind in rule.kinds.items():
                if kind not in REDUCTIONS or factor in has:
                    continue
                for leaf in self.parts.leaves((factors[factor],)):
                    if leaf not in self.parts.fixed:
                        partial[leaf] = kind
            if partial and (operand.mode or len(set(partial.values())) > 1):
                return self._refuse(partial, why)
            self.partial[value.name or ""] = partial
        return True

    def _check_results(self) -> None:
        partials = [self._result_partial(port) for port in self.wiring.results]
        for port, mine in zip(self.wiring.results, partials, strict=True):
            for value in port.inner:
                theirs = self.partial.get(value.name or "", {})
                if theirs != mine and not self._is_zero(value):
                    self.parts.forbid([*theirs, *mine], "only one of the bodies sums over it")
            if len(set(mine.values())) > 1:
                self.parts.forbid(list(mine), "it would be partial over two reductions")
        for leaf, kind in {k: r for p in partials for k, r in p.items()}.items():
            for port, mine in zip(self.wiring.results, partials, strict=True):
                if port.outer is None or not port.outer.name:
                    continue
                if mine.get(leaf) != kind and leaf not in self._leaves(port.outer):
                    self.parts.forbid(
                        (leaf,),
                        f"it is summed over for one result, but not for {port.outer.name!r}",
                    )
        reached = {leaf for p in partials for leaf in p}
        for port in self.wiring.results:
            if port.outer is not None and port.outer.name:
                reached |= self._leaves(port.outer)
        for operand in self.view.node.inputs:
            if operand is not None:
                self.parts.forbid(list(self._leaves(operand) - reached), "no result contains it")

    def _result_partial(self, port: Port) -> PartialDims:
        """The parts over which a result may be partial."""
        for value in port.inner:
            if not self._is_zero(value):
                return self.partial.get(value.name or "", {})
        return {}

    # -- the rule ----------------------------------------------------------------------------------

    def rule(self) -> OpRule:
        """Returns the rule of the node.

        Raises:
            ModelError: No dim may be sharded.
        """
        node = self.view.node
        inputs = [self._operand(v) for v in node.inputs]
        for index, port in enumerate(self.wiring.operands):
            if not port.inner:
                inputs[index] = REPLICATED_OPERAND if port.outer is not None else ABSENT
        outputs = [self._operand(v) for v in node.outputs]
        text = f"{', '.join(inputs)} -> {', '.join(outputs)}"
        leaves = self._names
        if all(leaf in self.parts.fixed for leaf in leaves):
            raise self.view.fail(self._why())
        replicated = [name for leaf, name in leaves.items() if leaf in self.parts.fixed]
        text += f"; replicated: {' '.join(replicated)}"
        reduced: PartialDims = {}
        for port in self.wiring.results:
            reduced |= self._result_partial(port)
        for leaf, kind in reduced.items():
            text += f"; {kind}: {leaves[leaf]}" if leaf in leaves else ""
        return parse_rule(text, {name: self.parts.size(leaf) for leaf, name in leaves.items()})

    def _why(self) -> str:
        """Says that no dim can be sharded, with up to three reasons."""
        values = (*self.view.node.inputs, *self.view.node.outputs)
        reasons = dict.fromkeys(
            self.parts.fixed[leaf]
            for value in values
            if value is not None
            for leaf in self.parts.leaves(self.dims(value) or ())
            if leaf in self.parts.fixed and self.parts.size(leaf) != 1
        )
        why = f": {'; '.join(list(reasons)[:3])}" if reasons else ""
        return f"no dim can be sharded{why}"

    def _operand(self, value: ir.Value | None) -> str:
        if value is None:
            return ABSENT
        dims = self.dims(value) if value.name else None
        if dims is None:
            return REPLICATED_OPERAND
        return " ".join(self._dim_text(dim) for dim in dims)

    def _dim_text(self, dim: int) -> str:
        leaves = self.parts.leaves((dim,))
        if all(leaf in self.parts.fixed for leaf in leaves):
            return "1"
        names = [self._names.setdefault(leaf, f"f{len(self._names)}") for leaf in leaves]
        return names[0] if len(names) == 1 else f"({' '.join(names)})"

    # -- carrying out a plan -----------------------------------------------------------------------

    def plans(self, factors: Mapping[str, DimSharding], mesh: Mesh) -> "BodyPlans":
        """Returns how the bodies are sharded, given the sharding of the rule's factors."""
        self.rule()
        split = {leaf: factors[n] for leaf, n in self._names.items() if n in factors}
        return BodyPlans(self, split, mesh)


@dataclass(frozen=True)
class BodyPlans:
    """How the bodies of a node are sharded.

    Attributes:
        analysis: Which dims may be sharded.
        split: The components of each part that is sharded.
        mesh: The device mesh.
    """

    analysis: BodyAnalysis
    split: Mapping[int, DimSharding]
    mesh: Mesh

    def components(self, parts: Sequence[int]) -> DimSharding:
        """The components of a list of parts."""
        known = self.analysis.parts
        return tuple(
            c
            for leaf in known.leaves(parts)
            for c in self.split.get(leaf, (Component(known.size(leaf)),))
        )

    def _held(self, partial: PartialDims) -> tuple[tuple[int, ...], str]:
        """The atoms over which a value is partial, and its reduction."""
        atoms = tuple(a for leaf in partial for c in self.split.get(leaf, ()) for a in c.atoms)
        return atoms, next(iter(partial.values()), "sum")

    def sharding(self, value: ir.Value) -> Sharding:
        """The sharding of a value in the bodies."""
        analysis = self.analysis
        dims, shape = analysis.dims(value), analysis._shape(value.name or "")
        if dims is None or shape is None:
            return Sharding.replicated(())
        names = {f"d{i}": self.components((dim,)) for i, dim in enumerate(dims)}
        operand = Operand(tuple((name,) for name in names))
        sizes = dict(zip(names, shape, strict=True))
        atoms, reduction = self._held(analysis.partial.get(value.name or "", {}))
        laid = operand_sharding(operand, shape, names, sizes)
        return laid.with_partial(atoms, reduction).canonical(self.mesh, analysis.view.table)

    def nodes(self, body: BodyFacts) -> dict[str, NodePlan]:
        """The plan of each node of a body."""
        found = {}
        for node in body.graph:
            name = node.name or ""
            rule, view = body.rules[name], body.views[name]
            factors = {
                f: self.components((part,)) for f, part in self.analysis._factors[name].items()
            }
            factors = {f: c for f, c in factors.items() if any(p.atoms for p in c)}
            held = {i: self._held(p) for i, p in self.analysis._carried[name].items()}
            carried = {i: (atoms, kind) for i, (atoms, kind) in held.items() if atoms}
            found[name] = shardings(
                rule,
                view,
                factors,
                self.mesh,
                carried=carried,
                reason=body.reasons.get(name, ""),
            )
        return found
