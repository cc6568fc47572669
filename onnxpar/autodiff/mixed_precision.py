"""Mixed precision: the forward graph computes in 16 bits, the parameters are kept in float32.

The initializers are the float32 masters; the graph casts them where it computes in 16 bits
(Micikevicius et al., 2018, "Mixed Precision Training", section 3.1). So gradients reach the
optimizer in float32, through the gradient of the cast, and evaluation computes as training does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.names import Names, names_of
from onnxpar.graph.node_view import default_opset
from onnxpar.ops.local_helpers import FLOAT
from onnxpar.ops.precision import half_operands
from onnxpar.ops.registry import Registry

COMPUTE_TYPES: Mapping[str, ir.DataType] = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
"""The 16-bit types in which products can be computed, by name."""


OPEN_TYPE = "auto"
"""In place of a type: `plan` decides it."""


def parse_compute(text: str) -> str:
    """Returns the name of a 16-bit type; raises ModelError if it is not in `COMPUTE_TYPES`."""
    if text not in COMPUTE_TYPES:
        known = ", ".join(COMPUTE_TYPES)
        hint = "; only plan decides the type" if text == OPEN_TYPE else ""
        raise ModelError(f"--compute: expected one of {known}, got {text!r}{hint}")
    return text


def widen_parameters(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.DataType]:
    """Turns 16-bit initializers into float32 masters, which the graph casts back.

    Args:
        graph: The graph; it is changed.
        names: Names of the initializers to consider.

    Returns:
        The original type of each initializer that was widened, by name.
    """
    made = _Casts(graph)
    found = {}
    for name in names:
        value = graph.initializers[name]
        tensor, dtype = value.const_value, value.dtype
        if tensor is None or dtype is None or dtype not in COMPUTE_TYPES.values():
            continue
        uses = tuple(value.uses())
        if not uses:
            continue
        found[name] = dtype
        value.const_value = _widened(tensor, name)
        value.dtype = FLOAT
        cast = made.cast(value, dtype, made.first(node for node, _ in uses))
        for node, index in uses:
            node.replace_input_with(index, cast)
    return found


def _widened(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    def wide() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().astype(np.float32), name=name)

    return ir.LazyTensor(wide, FLOAT, ir.Shape(tensor.shape.numpy()), name=name)


def compute_in(model: ir.Model, dtype: ir.DataType, registry: Registry) -> int:
    """Makes a float32 model compute its products in 16 bits, as `ops.precision` sorts operators.

    Outputs of the model keep their types.

    Args:
        model: A normalised model; its graph is changed.
        dtype: The 16-bit type.
        registry: The table of operators.

    Returns:
        The number of nodes that compute in 16 bits.

    Raises:
        ModelError: There is no such node.
    """
    opset = default_opset(model.opset_imports)
    return _Precision(model.graph, dtype, opset, registry).run()


@dataclass
class _Casts:
    """Casts of values, each made once: right after the value; of initializers, before a reader."""

    graph: ir.Graph
    known: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    names: Names = field(init=False)
    outer: dict[int, tuple[int, ir.Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = names_of(self.graph)
        for place, node in enumerate(self.graph):
            for inner in (
                node,
                *(n for body in bodies_of(node).values() for n in body.all_nodes()),
            ):
                self.outer[id(inner)] = (place, node)

    def first(self, readers: Iterable[ir.Node]) -> ir.Node:
        """Returns the first node of the graph that is one of the readers or contains one."""
        return min((self.outer[id(node)] for node in readers), key=lambda found: found[0])[1]

    def cast(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        if (value, dtype) in self.known:
            return self.known[value, dtype]
        name = self.names.fresh(f"{value.name}.{dtype.name.lower()}")
        out = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        node = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[out], name=f"{name}/Cast")
        maker = value.producer()
        if maker is not None:
            self.graph.insert_after(maker, node)
        else:
            self.graph.insert_before(before, node)
        self.known[value, dtype] = out
        return out


@dataclass
class _Precision:
    graph: ir.Graph
    dtype: ir.DataType
    opset: int
    registry: Registry

    def __post_init__(self) -> None:
        self.casts = _Casts(self.graph)
        self.narrow: set[ir.Value] = set()
        # The range of bfloat16 is that of float32.
        like = np.float32 if self.dtype == ir.DataType.BFLOAT16 else np.float16
        self.most = float(np.finfo(like).max)

    def run(self) -> int:
        count = 0
        for node in list(self.graph):
            found = half_operands(node, self.opset, self.dtype, self.registry)
            if found is not None and self._takes(node, *found):
                inputs, outputs, _ = found
                for index in sorted(inputs):
                    self._narrow(node, index)
                for index in outputs:
                    out = node.outputs[index]
                    out.dtype = self.dtype
                    self.narrow.add(out)
                count += 1
            else:
                self._widen(node)
        if not count:
            raise ModelError(
                f"--compute {self.dtype.name.lower()}: expected products of float32 matrices in "
                "the model, got none"
            )
        self._widen_elsewhere()
        return count

    def _takes(
        self, node: ir.Node, inputs: frozenset[int], outputs: frozenset[int], must: bool
    ) -> bool:
        """Whether a node can be computed in 16 bits."""
        operands = [node.inputs[i] for i in sorted(inputs)]
        given = [v for v in operands if v is not None]
        if not given or any(v.dtype != FLOAT and v not in self.narrow for v in given):
            return False
        if any(node.outputs[i].dtype != FLOAT for i in outputs):
            return False
        if must:
            return True
        moving = [v for v in given if not v.is_initializer()]
        # One wide operand makes the result wide.
        return bool(moving) and all(v in self.narrow for v in moving) and self._fits(given)

    def _fits(self, values: Iterable[ir.Value]) -> bool:
        """Whether constants, such as the -3e38 of a mask, are finite in 16 bits."""
        for value in values:
            tensor = value.const_value
            if tensor is not None and tensor.size == 1 and abs(tensor.numpy().item()) > self.most:
                return False
        return True

    def _narrow(self, node: ir.Node, index: int) -> None:
        value = node.inputs[index]
        if value is not None and value not in self.narrow:
            node.replace_input_with(index, self.casts.cast(value, self.dtype, node))

    def _widen(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and value in self.narrow:
                node.replace_input_with(index, self.casts.cast(value, FLOAT, node))

    def _widen_elsewhere(self) -> None:
        """Gives control-flow bodies and the model's outputs their original types."""
        for value in self.narrow:
            for user, index in tuple(value.uses()):
                if user.graph is not self.graph:
                    user.replace_input_with(index, self.casts.cast(value, FLOAT, user))
        for index, value in enumerate(self.graph.outputs):
            if value not in self.narrow:
                continue
            name = value.name or ""
            wide = self.casts.cast(value, FLOAT, self.graph[0])
            value.name, wide.name = f"{name}.{self.dtype.name.lower()}", name
            self.graph.outputs[index] = wide
