"""Reverse-mode automatic differentiation on the global graph.

The backward program is appended to the forward one, operator by operator, from the loss to the
parameters, by the gradient rules of `onnxpar.ops`. This happens before partitioning, so collectives
need no gradients, and backward operators are sharded by the same rules as forward ones. The link
from each cotangent to its primal is kept, so that the planner can lay out a cotangent like its
primal. (Griewank & Walther, Evaluating Derivatives, 2008; cotangents are accumulated in reversed
topological order of the nodes.)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError, RuleError
from onnxpar.frontend.expand import expand_by_body
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.metadata_keys import GRADIENT_OF, VIRTUAL_STAGE
from onnxpar.graph.node_view import NodeView, default_opset
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.grad_node import GradNode, Placed, Through
from onnxpar.ops.operator import Missing, NotDifferentiable
from onnxpar.ops.registry import Registry
from onnxpar.ops.view.pieces import join_pieces, side_by_side_pieces

GRADIENT_PREFIX = "onnxpar.grad."
COTANGENT_PREFIX = "onnxpar.cotangent."


@dataclass(frozen=True)
class Differentiated:
    """A graph with its backward program.

    Attributes:
        env: Shapes of all values, new ones included.
        links: The primals of each cotangent, and of each contribution to one, by name. There are
            several if nodes pass the cotangent on unchanged.
        gradients: Name of the gradient of each variable that has one; it is an output.
        unreached: The other variables, each with the reason.
    """

    env: ShapeEnv
    links: Mapping[str, tuple[str, ...]]
    gradients: Mapping[str, str]
    unreached: Mapping[str, str]


def differentiate(
    model: ir.Model,
    env: ShapeEnv,
    registry: Registry,
    loss: str,
    variables: Sequence[str],
    copies: Mapping[str, str] | None = None,
) -> Differentiated:
    """Appends to a model the gradient of its loss.

    Args:
        model: The normalised model; nodes and outputs are appended to its graph. Each gradient
            becomes an output named `onnxpar.grad.<variable>`, after the existing outputs.
        env: Its shapes.
        registry: The operators, with their gradients.
        loss: Name of a value of one element and of a floating-point type.
        variables: Names of the initializers or inputs to differentiate by.
        copies: The originals of variables that are copies, by name. If the loss depends on one of
            several copies, all of them get a gradient, which may be zero.

    Raises:
        ModelError: There is no such loss or variable, or a node between the two has no gradient;
            the message names the path.
    """
    autodiff = _Autodiff(model, env, registry, repr(loss), variables, copies or {})
    value = autodiff.find_loss(loss)

    def one(_: ir.Value) -> ir.Value:
        return autodiff.builder.const(np.ones(autodiff.static_shape(value)), value.dtype)

    return autodiff.run([value], one)


def differentiate_outputs(
    model: ir.Model,
    env: ShapeEnv,
    registry: Registry,
    outputs: Sequence[str],
    variables: Sequence[str],
) -> tuple[Differentiated, dict[str, str]]:
    """Appends to a model the product of given cotangents with the Jacobian of its outputs.

    Each output gets an input of its type and shape for its cotangent.

    Args:
        model: The normalised model; as for `differentiate`, with the cotangents' inputs appended.
        env: Its shapes.
        registry: The operators, with their gradients.
        outputs: Names of the outputs to differentiate, of floating-point types.
        variables: Names of the initializers or inputs to differentiate by.

    Returns:
        The graph with its backward program, and the input with the cotangent of each output, by
        name.

    Raises:
        ModelError: There is no such variable, the shape of an output is unknown, or a node between
            a variable and an output has no gradient; the message names the path.
    """
    autodiff = _Autodiff(model, env, registry, "the outputs", variables, {})
    given: dict[str, str] = {}

    def cotangent(value: ir.Value) -> ir.Value:
        name, builder = value.name or "", autodiff.builder
        if name not in builder.shapes or value.dtype is None:
            raise ModelError(f"output {name!r}: its shape is unknown, so it has no gradient")
        wanted = builder.fresh(f"{COTANGENT_PREFIX}{name}")
        made = builder.add_input(wanted, value.dtype, builder.shape_of(value))
        given[name] = made.name or ""
        return made

    ends = [value for value in model.graph.outputs if value.name in outputs]
    return autodiff.run(ends, cotangent), given


@dataclass
class _Autodiff:
    """Differentiates values of one graph.

    Attributes:
        model: The model; nodes are appended to its graph.
        env: Its shapes.
        registry: The operators.
        what: Names what is differentiated, in messages.
        variables: Names of the initializers or inputs to differentiate by.
        copies: The originals of variables that are copies.
    """

    model: ir.Model
    env: ShapeEnv
    registry: Registry
    what: str
    variables: Sequence[str]
    copies: Mapping[str, str]

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.opset = default_opset(self.model.opset_imports)
        self.builder = GlobalBuilder.over(graph, self.opset, self.env)
        named = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
        self.sources: dict[str, ir.Value] = {}
        for name in self.variables:
            if name not in named:
                raise ModelError(f"{name!r}: expected a parameter or input of the model to train")
            self.sources[name] = named[name]

    def run(
        self, ends: Sequence[ir.Value], cotangent: Callable[[ir.Value], ir.Value]
    ) -> Differentiated:
        """Appends the backward program from these values, given the cotangent of each."""
        for end in ends:
            expand_by_body(self.model, self.registry, self.builder, self.sources.values(), end)
        walk = _Backward(
            self.builder,
            self.registry,
            list(self.model.graph),
            list(self.sources.values()),
            self.model.opset_imports,
            self.what,
        )
        reached = self._reaching(ends)
        walk.run({end: cotangent(end) for end in ends})
        gradients, unreached = {}, {}
        # To how many values each part of a cotangent contributes.
        uses = Counter(
            part
            for parts in walk.parts.values()
            for part in set(parts)
            if isinstance(part, ir.Value)
        )
        families = {self.copies.get(n, n) for n, v in self.sources.items() if v in walk.parts}
        for name, value in self.sources.items():
            if self.copies.get(name, name) in families:
                if value not in walk.parts:
                    zero = self._zero(name, value)
                    walk.parts[value] = [zero]
                    uses.update([zero])
                gradients[name] = self._output(walk, uses, name, value)
            elif value in walk.stopped & reached:
                unreached[name] = "the loss depends on it only through nodes without a derivative"
            else:
                unreached[name] = "the loss does not depend on it"
        return Differentiated(self.builder.env, walk.links, gradients, unreached)

    def find_loss(self, name: str) -> ir.Value:
        """Returns the loss; ModelError if there is none of this name, or it is no float."""
        made = (value for node in self.model.graph for value in node.outputs)
        loss = next((value for value in made if value.name == name), None)
        if loss is None:
            raise ModelError(f"loss {name!r}: no node computes it")
        if loss.dtype is None or not loss.dtype.is_floating_point():
            raise ModelError(f"loss {name!r}: expected a float, got {loss.dtype}")
        return loss

    def static_shape(self, loss: ir.Value) -> tuple[int, ...]:
        """Returns the shape of the loss; ModelError if it has several elements."""
        shape = self.builder.shapes.get(loss.name or "")
        if shape is None or any(size != 1 for size in shape):
            raise ModelError(f"loss {loss.name!r}: expected one element, got the shape {shape}")
        return (1,) * len(shape)

    def _reaching(self, ends: Sequence[ir.Value]) -> set[ir.Value]:
        """Returns the values that these are computed from."""
        found = set(ends)
        for node in reversed(self.model.graph):
            if any(out in found for out in node.outputs):
                found.update(read_by(node))
        return found

    def _zero(self, name: str, value: ir.Value) -> ir.Value:
        """A gradient of zeros, in the virtual stage of the first reader of its variable."""
        self.builder.scope = f"{name}/grad"
        reader = next(node for node in self.model.graph if value in read_by(node))
        self.builder.metadata = {GRADIENT_OF: reader.name or "", **stage_entry(reader)}
        return self.builder.zeros(self.builder.shape_of(value), value.dtype)

    def _output(
        self, walk: "_Backward", uses: Mapping[ir.Value, int], name: str, value: ir.Value
    ) -> str:
        """Makes the gradient of a variable an output of the graph and returns its name."""
        self.builder.scope = name
        total = walk.total(value)
        assert total is not None
        self.builder.metadata = {**self.builder.metadata, **stage_entry(total.producer())}
        wanted = f"{GRADIENT_PREFIX}{name}"
        shared = total.producer() is None or total in self.model.graph.outputs
        if shared or uses.get(total, 0) > 1:
            total = self.builder.op("Identity", total, shape=self.builder.shape_of(total))
        if total.name != wanted:
            primals = walk.links.pop(total.name or "", ())
            self.builder.rename(total, wanted)
            walk.links[total.name or ""] = primals
        walk.link(total, value)
        self.model.graph.outputs.append(total)
        return total.name or ""


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a cotangent that is placed when the other parts are known.

    Attributes:
        placed: Where it goes.
        scope: Begins the names of nodes that place it.
        metadata: Metadata of these nodes.
    """

    placed: Placed
    scope: str
    metadata: Mapping[str, str]


@dataclass
class _Backward:
    """The backward walk over the nodes of one graph.

    Attributes:
        builder: Where nodes are appended.
        registry: The operators.
        forward: The nodes, in their order.
        sources: The variables.
        opsets: Version of each domain.
        what: Names what is differentiated, for people.
        links: As in `Differentiated`.
        parts: The contributions to each value's cotangent.
        done: The cotangents that have been added up.
    """

    builder: GlobalBuilder
    registry: Registry
    forward: Sequence[ir.Node]
    sources: Sequence[ir.Value]
    opsets: Mapping[str, int]
    what: str
    links: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[ir.Value, list[ir.Value | _Piece]] = field(default_factory=dict)
    done: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.varying, self.stopped = self._dependent()

    def run(self, cotangents: Mapping[ir.Value, ir.Value]) -> None:
        """Walks backward from values whose cotangents are given."""
        for value, cotangent in cotangents.items():
            self.parts.setdefault(value, []).append(cotangent)
            self.link(cotangent, value)
        for node in reversed(self.forward):
            if any(out in self.parts for out in node.outputs):
                self._node(node)

    def _dependent(self) -> tuple[set[ir.Value], set[ir.Value]]:
        """Returns the values that vary with a source, and those read where the variation ends."""
        varying: set[ir.Value] = set(self.sources)
        stopped: set[ir.Value] = set()
        for node in self.forward:
            read = [v for v in read_by(node) if v in varying]
            if not read:
                continue
            if isinstance(self._gradient(node), NotDifferentiable):
                stopped.update(read)
                continue
            carried = self._carries_integers(node)
            for value in node.outputs:
                if carried or value.dtype is None or value.dtype.is_floating_point():
                    varying.add(value)
                else:
                    stopped.update(read)
        return varying, stopped

    def _carries_integers(self, node: ir.Node) -> bool:
        definition = self.registry.definition(node, self.opsets)
        return definition is not None and definition.carries_integers

    def _gradient(self, node: ir.Node) -> object:
        definition = self.registry.definition(node, self.opsets)
        if definition is None:
            return Missing(f"the operator {node.domain or 'onnx'}::{node.op_type} is not known")
        return definition.gradient

    def _node(self, node: ir.Node) -> None:
        wanted = frozenset(i for i, v in enumerate(node.inputs) if v in self.varying)
        if not wanted:
            return
        gradient = self._gradient(node)
        if isinstance(gradient, NotDifferentiable):
            return
        if isinstance(gradient, Missing):
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) has no gradient: {gradient.reason}; it is on "
                f"the path {self._path(node)}"
            )
        assert callable(gradient)
        self.builder.scope = f"{node.name}/grad"
        self.builder.metadata = {GRADIENT_OF: node.name or "", **stage_entry(node)}
        cotangents = tuple(self.total(out) for out in node.outputs)
        view = NodeView(node, self.builder.env, self.builder.opset)
        inner = _Inner(self.registry, self.opsets, self.what)
        grad = GradNode(view, self.builder, cotangents, wanted, self.varying, inner)
        results = list(gradient(grad))
        for index in sorted(wanted):
            value, made = node.inputs[index], results[index] if index < len(results) else None
            if value is None or made is None:
                continue
            if isinstance(made, Placed):
                self._check(node, index, value, made.piece)
                piece = _Piece(made, self.builder.scope, self.builder.metadata)
                self.parts.setdefault(value, []).append(piece)
                continue
            if isinstance(made, Through):
                value, made = made.value, made.cotangent
            self._check(node, index, value, made)
            self.parts.setdefault(value, []).append(made)
            self.link(made, value)

    def _check(self, node: ir.Node, index: int, value: ir.Value, made: ir.Value) -> None:
        want, have = self.builder.shapes.get(value.name or ""), self.builder.shape_of(made)
        # The cotangent of integers belongs to the floats that they represent.
        real = value.dtype is None or value.dtype.is_floating_point()
        wrong = real and made.dtype != value.dtype
        if wrong or (want is not None and len(want) != len(have)):
            raise RuleError(
                f"node {node.name!r} ({node.op_type}): the gradient of input {index} must be "
                f"{value.dtype} {want}, but its rule computed {made.dtype} {have}"
            )

    def link(self, cotangent: ir.Value, primal: ir.Value) -> None:
        """Records that a value is a cotangent of another one, or a contribution to it."""
        known = self.links.get(cotangent.name or "", ())
        self.links[cotangent.name or ""] = tuple(dict.fromkeys((*known, primal.name or "")))

    def total(self, value: ir.Value) -> ir.Value | None:
        """Returns the cotangent of a value: the sum of the contributions of its readers."""
        if value in self.done:
            return self.done[value]
        parts = self.parts.get(value)
        if not parts:
            return None
        # In a pipeline, each stage adds up its own parts and the sum of later stages, and sends one
        # tensor to the stage before it.
        groups: dict[int, list[ir.Value | _Piece]] = {}
        for part in parts:
            groups.setdefault(self._stage(part), []).append(part)
        total: ir.Value | None = None
        for stage in sorted(groups, reverse=True):
            # Parts of the first readers are added first: those of queries, keys and values, which
            # may be partial over the same devices, are one sum before the residual's is added.
            whole = self._placed(groups[stage], value)
            own = whole[-1]
            for part in reversed(whole[:-1]):
                own = self._added(part, own, value)
            total = own if total is None else self._added(total, own, value)
        assert total is not None
        if len(parts) > 1:
            self.builder.rename(total, f"{GRADIENT_PREFIX}{value.name}")
        self.link(total, value)
        self.done[value] = total
        return total

    def _stage(self, part: ir.Value | _Piece) -> int:
        maker = part.placed.piece.producer() if isinstance(part, _Piece) else part.producer()
        return 0 if maker is None else virtual_stage_of(maker)

    def _placed(self, parts: Sequence[ir.Value | _Piece], value: ir.Value) -> list[ir.Value]:
        """The parts of a value's cotangent, in its shape; pieces that do not overlap are one."""
        builder, shape = self.builder, self.builder.shape_of(value)
        kept = builder.scope, builder.metadata
        pieces = {part.placed: part for part in parts if isinstance(part, _Piece)}
        found = [part for part in parts if not isinstance(part, _Piece)]
        for group in side_by_side_pieces(builder, pieces):
            if len(group) == 1:
                part = pieces[group[0]]
                builder.scope, builder.metadata = part.scope, dict(part.metadata)
            else:
                of_stage = stage_entry(group[0].piece.producer())
                builder.metadata = {**kept[1], **of_stage}
            found.append(join_pieces(builder, group, shape[group[0].axis]))
            self.link(found[-1], value)
            builder.scope, builder.metadata = kept
        return found

    def _added(self, left: ir.Value, right: ir.Value, value: ir.Value) -> ir.Value:
        """The sum of two parts of a value's cotangent, in the virtual stage of the second part."""
        for part in (left, right):
            self.link(part, value)
        kept = self.builder.metadata
        self.builder.metadata = {**kept, **stage_entry(right.producer())}
        total = self.builder.op("Add", left, right, shape=self.builder.shape_of(value))
        self.builder.metadata = kept
        return total

    def _path(self, node: ir.Node) -> str:
        """Names the nodes on a path from the loss through `node` to a variable."""
        names = [node.name or node.op_type]
        down: ir.Node | None = node
        end = ""
        while down is not None:
            value = next((v for v in read_by(down) if v in self.varying), None)
            if value is None:
                break
            down = value.producer()
            if down is None:
                end = value.name or ""
            else:
                names.append(down.name or down.op_type)
        shown = names if len(names) <= 8 else [*names[:4], "…", *names[-3:]]
        return f"{self.what} <- … <- " + " <- ".join([*map(repr, shown), repr(end)])


@dataclass(frozen=True)
class _Inner:
    """Differentiates bodies; see `InnerGradients`."""

    registry: Registry
    opsets: Mapping[str, int]
    what: str

    def expand(
        self, builder: GlobalBuilder, variables: Sequence[ir.Value], results: Sequence[ir.Value]
    ) -> None:
        graph = builder.graph
        graph.opset_imports.update(self.opsets)
        model = ir.Model(graph, ir_version=10)
        for value in results:
            expand_by_body(model, self.registry, builder, variables, value)

    def differentiate(
        self,
        builder: GlobalBuilder,
        cotangents: Mapping[ir.Value, ir.Value],
        variables: Sequence[ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        walk = _Backward(
            builder, self.registry, list(builder.graph), variables, self.opsets, self.what
        )
        walk.run(cotangents)
        found = {}
        for value in variables:
            builder.scope = value.name or ""
            total = walk.total(value)
            if total is not None:
                found[value] = total
        return found


def stage_entry(node: ir.Node | None) -> dict[str, str]:
    """Returns the metadata that puts a node into the virtual stage of another, if it has one."""
    if node is None or VIRTUAL_STAGE not in node.metadata_props:
        return {}
    return {VIRTUAL_STAGE: node.metadata_props[VIRTUAL_STAGE]}
