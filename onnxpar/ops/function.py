"""Operators of the domain `onnxpar` that have a body of standard operators: `Function`.

They exist for speed: one node replaces standard operators that need many passes over memory. A
graph that calls one carries its body as a model-local function. onnxruntime uses a registered
kernel of the same name if there is one, and the function otherwise. So the graph means the same
without the runtime's library.

Functions are generic in the element type T of their tensors; those of optimizers are called with
float32 or float64. Scalars of optimizers are float64 and are rounded to T before they are combined
with a tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx.parser
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import default_opset
from onnxpar.ops.contrib_schemas import MICROSOFT

VERSION = 1


@dataclass(frozen=True)
class Function:
    """An operator as a function.

    Attributes:
        text: The function in ONNX's text form, as in `Square (x) => (y) { y = Mul(x, x) }`. All its
            inputs and attributes are required, and its last outputs are optional.
    """

    text: str

    @cached_property
    def _proto(self) -> onnx.FunctionProto:
        return self._parsed(onnx.defs.onnx_opset_version())

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self._proto.name

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs."""
        return tuple(self._proto.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its outputs."""
        return tuple(self._proto.output)

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of its attributes."""
        return tuple(self._proto.attribute)

    def _parsed(self, opset: int) -> onnx.FunctionProto:
        more = f', "{MICROSOFT}": 1' if f"{MICROSOFT}." in self.text else ""
        head = f'<domain: "{DOMAIN}", opset_import: ["": {opset}{more}]>'
        return onnx.parser.parse_function(f"{head} {self.text}")

    def made(self, opset: int) -> ir.Function:
        """Returns the function for a version of the default domain."""
        return ir.serde.deserialize_function(self._parsed(opset))


def attach_functions(model: ir.Model, known: Iterable[Function]) -> None:
    """Adds those of the `known` functions to a model that its nodes call; the model is changed."""
    opset = default_opset(model.opset_imports)
    functions = {function.name: function for function in known}
    for node in model.graph:
        if node.domain != DOMAIN or node.op_identifier() in model.functions:
            continue
        if node.op_type in functions:
            model.functions[node.op_identifier()] = functions[node.op_type].made(opset)
            model.opset_imports[DOMAIN] = VERSION
