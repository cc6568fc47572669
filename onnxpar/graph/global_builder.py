"""Adds nodes to a global graph whose shapes are known, for autodiff and the programs of training.

The global graph is the undivided program; added nodes are sharded later by the same rules as the
user's. Every new value gets its shape as expressions and, for small integer values such as target
shapes, its elements, so that inference need not run again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxpar.core.symbols import Dim, dim_str, symbols_of
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.builder import DOMAIN, INT64, Builder
from onnxpar.graph.shapes import ShapeEnv

SIZES = "Sizes"
"""Operator of the global graph, without operands, that returns sizes in terms of the symbols."""
SIZES_KEY = "onnxpar.sizes"
"""Metadata key of such a node: its sizes as JSON, so that shape inference can run again."""


@dataclass
class GlobalBuilder(Builder):
    """Adds nodes to a graph whose shapes are global.

    Attributes:
        graph: The graph; it is changed.
        shapes: Shape of each value by name; new values are added.
        contents: Elements of small integer values by name; new values are added.
        before: The node before which new nodes are inserted; None: they are appended.
        outermost: The graph that has the constants of a body; None if that is `graph`.
    """

    graph: ir.Graph
    shapes: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    contents: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    before: ir.Node | None = None
    outermost: ir.Graph | None = None
    _shape_values: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @staticmethod
    def over(graph: ir.Graph, opset: int, env: ShapeEnv) -> "GlobalBuilder":
        """Returns a builder that appends to a graph whose shapes are known."""
        builder = GlobalBuilder(env.table, opset, graph, dict(env.shapes), dict(env.contents))
        values = [*graph.inputs, *graph.initializers.values()]
        for node in ir.traversal.RecursiveGraphIterator(graph):
            builder.node_names.reserve([node.name])
            values += node.outputs
            for body in bodies_of(node).values():
                values.extend(body.inputs)
        builder.value_names.reserve(value.name for value in values)
        return builder

    def nested(self, body: ir.Graph) -> "GlobalBuilder":
        """Returns a builder that appends to a body; names, shapes and constants are shared."""
        return replace(
            self,
            graph=body,
            before=None,
            outermost=self._holder,
            _shape_values={},
        )

    @property
    def _holder(self) -> ir.Graph:
        return self.graph if self.outermost is None else self.outermost

    @property
    def env(self) -> ShapeEnv:
        """Shapes and contents of all values, including new ones."""
        return ShapeEnv(self.shapes, self.contents, self.table)

    # -- names -----------------------------------------------------------------------------------

    def rename(self, value: ir.Value, name: str) -> None:
        """Gives a value, and its known shape and contents, a new name beginning with `name`."""
        old = value.name or ""
        new = self.fresh(name)
        value.name = new
        for known in (self.shapes, self.contents):
            if old in known:
                known[new] = known.pop(old)

    def forget(self, value: ir.Value) -> None:
        """Removes the name of an output that nothing reads, so that it is not computed."""
        self.shapes.pop(value.name or "", None)
        self.contents.pop(value.name or "", None)
        value.name = ""

    # -- values ----------------------------------------------------------------------------------

    def add_input(self, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        """Adds an input to the graph and returns it."""
        value = self.declare(ir.Value(name=name), dtype, shape)
        self.graph.inputs.append(value)
        return value

    def note_shape(self, value: ir.Value, shape: Sequence[Dim]) -> None:
        """Stores the global shape of a value."""
        self.shapes[value.name or ""] = tuple(shape)

    def shape_of(self, value: ir.Value) -> tuple[Dim, ...]:
        """Returns the global shape of a value; KeyError if it is unknown."""
        return self.shapes[value.name or ""]

    def append(self, node: ir.Node) -> None:
        """Puts a node before the node `before`, or at the end."""
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)

    def hold(self, constant: ir.Value) -> None:
        """Adds a constant to the graph and, if it has integers, stores its elements."""
        self._holder.register_initializer(constant)
        assert constant.const_value is not None
        data = constant.const_value.numpy()
        if data.dtype.kind in "iu":
            self.contents[constant.name or ""] = tuple(int(x) for x in data.ravel())

    def shape_value(self, value: ir.Value) -> ir.Value:
        """Returns the shape of a value as int64 [rank], for Reshape and Expand."""
        shape = self.shape_of(value)
        symbols = {name for d in shape for name in symbols_of(d)}
        if not symbols or (self.outermost is not None and symbols.issubset(self.table)):
            # In a body, this way the value need not be kept from step to step for its shape.
            return self.sizes(shape)
        if value not in self._shape_values:
            made = self.op("Shape", value, dtype=INT64, shape=[len(shape)])
            self.contents[made.name or ""] = tuple(shape)
            self._shape_values[value] = made
        return self._shape_values[value]

    def computed_sizes(self, dims: tuple[Dim, ...]) -> ir.Value:
        """Returns the result of a node `Sizes`, which each device computes from the symbols."""
        made = self.op(SIZES, dtype=INT64, shape=[len(dims)], domain=DOMAIN)
        maker = made.producer()
        assert maker is not None
        maker.metadata_props[SIZES_KEY] = json.dumps(
            [d if isinstance(d, int) else dim_str(d) for d in dims]
        )
        self.contents[made.name or ""] = dims
        return made

    def reshape_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """Returns `x` with the shape of `like`."""
        shape = self.shape_of(like)
        if self.shape_of(x) == shape:
            return x
        return self.reshape_to(x, self.shape_value(like), shape)
