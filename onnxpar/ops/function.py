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

import onnx.parser
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import default_opset

VERSION = 1


@dataclass(frozen=True)
class Function:
    """An operator as a function.

    Attributes:
        name: Name of the operator.
        inputs: Names of its inputs, which are all required.
        outputs: Names of its outputs; the last ones are optional.
        body: Its nodes, in ONNX's text form.
        attributes: Names of its attributes, which are all required.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    attributes: tuple[str, ...] = ()

    def made(self, opset: int) -> ir.Function:
        """Returns the function for a version of the default domain."""
        attributes = f"<{', '.join(self.attributes)}>" if self.attributes else ""
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["": {opset}]> {self.name} {attributes} '
            f"({', '.join(self.inputs)}) => ({', '.join(self.outputs)}) {{ {self.body} }}"
        )
        return ir.serde.deserialize_function(onnx.parser.parse_function(text))


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
