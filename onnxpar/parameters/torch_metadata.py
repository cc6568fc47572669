"""The metadata of `torch.onnx.export` about the origin of tensors.

PyTorch's exporter records the signature of the program that it translated: which of its
placeholders is a parameter, a buffer or a constant of the module, and its name there. Each node has
the text of the operator (of PyTorch's `fx` graph) from which it was translated, which names the
placeholders that the operator reads, and the module of the operator. onnxscript's optimizer records
the values from which it folded an initializer. See `torch.export.graph_signature` and
`onnxscript.optimizer.FOLDED_FROM_KEY`.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_PLACEHOLDER = "pkg.torch.onnx.original_node_name"
_OPERATOR = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"

PARAMETER = "PARAMETER"
_KINDS = (PARAMETER, "BUFFER", "CONSTANT_TENSOR")
_ENTRY = re.compile(rf"^\s*(\S+): ({'|'.join(_KINDS)})\b.*?target='([^']*)'", re.MULTILINE)
_TOKEN = re.compile(r"%([A-Za-z_]\w*)")
_TARGET = re.compile(r"target=torch\.ops\.aten\.(\w+)")
_COUNTED = re.compile(r"_\d+$")


@dataclass(frozen=True)
class Placeholder:
    """An input of the program that PyTorch exported that is not one of the user's inputs.

    Attributes:
        name: Its name in the program: `p_fc1_weight`.
        kind: PARAMETER, BUFFER or CONSTANT_TENSOR.
        target: Its name in the module: `fc1.weight`.
    """

    name: str
    kind: str
    target: str

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the module."""
        return self.kind == PARAMETER


@dataclass(frozen=True)
class Signature:
    """The placeholders of an exported program, by name; empty for other models."""

    placeholders: Mapping[str, Placeholder]

    @cached_property
    def targets(self) -> Mapping[str, Placeholder]:
        """The placeholders by their names in the module."""
        return {p.target: p for p in self.placeholders.values()}

    def read_by(self, node: ir.Node) -> tuple[Placeholder, ...]:
        """Returns the placeholders that a node's operator reads, in the order of its arguments."""
        found = self.placeholders
        return tuple(found[t] for t in arguments_of(node) if t in found)


def read_signature(model: ir.Model) -> Signature:
    """Returns the signature that a model has, completed by the marks of its initializers."""
    text = model.graph.metadata_props.get(_SIGNATURE, "")
    found = {name: Placeholder(name, kind, target) for name, kind, target in _ENTRY.findall(text)}
    for name, value in model.graph.initializers.items():
        kind = kind_of(value)
        if kind is not None:
            placeholder = value.metadata_props.get(_PLACEHOLDER, name)
            target = found[placeholder].target if placeholder in found else name
            # The mark of the tensor itself is newer: a parameter may have been frozen.
            found[placeholder] = Placeholder(placeholder, kind, target)
    return Signature(found)


def kind_of(value: ir.Value) -> str | None:
    """Returns the kind with which an initializer is marked; None if it is not."""
    kind = value.metadata_props.get(_KIND)
    return kind if kind in _KINDS else None


def placeholder_of(value: ir.Value) -> str:
    """Returns the name of the placeholder that a marked initializer was."""
    return value.metadata_props.get(_PLACEHOLDER, value.name or "")


def folded_from(value: ir.Value) -> tuple[str, ...]:
    """Returns the names of the values that an initializer was folded from."""
    text = value.metadata_props.get(_FOLDED_FROM)
    if text is None:
        return ()
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ()
    return tuple(str(name) for name in found) if isinstance(found, list | tuple | set) else ()


def operator_of(node: ir.Node) -> str:
    """Returns the text of the operator of a node; all nodes of one operator have the same text."""
    return node.metadata_props.get(_OPERATOR, "")


def target_of(node: ir.Node) -> str:
    """Returns the operator of PyTorch from which a node comes, as `linear`; empty if unknown."""
    found = _TARGET.search(operator_of(node))
    return found[1] if found else operator_of(node)


def has_factor(node: ir.Node) -> bool:
    """Whether the operator of a node has a factor of an operand as a named argument."""
    return re.search(r"\b(alpha|beta|value): ", operator_of(node)) is not None


def arguments_of(node: ir.Node) -> tuple[str, ...]:
    """Returns the names of the values that a node's operator reads, in order."""
    _, _, arguments = operator_of(node).partition("](args = (")
    return tuple(_TOKEN.findall(arguments))


def module_of(node: ir.Node) -> str:
    """Returns the module of a node, as `layers.0.fc`; empty for the outermost."""
    text = node.metadata_props.get(_SCOPES, "")
    names = [part.strip().strip("'\"") for part in text.strip("[]").split(",")]
    return names[-2] if len(names) > 1 else ""


def function_of(name: str) -> str:
    """Returns the function of PyTorch after which a value is named: `exp` for `exp_3`."""
    return _COUNTED.sub("", name).strip("_")


def is_inner(name: str) -> bool:
    """Whether a value is inside the translation of one operator."""
    return re.fullmatch(r"(val|tmp)_\d+|tmp", name) is not None
