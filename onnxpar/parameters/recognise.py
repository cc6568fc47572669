"""Which initializers of a file are parameters: by marks of its exporter, by name, by use.

PyTorch's exporter marks them (`onnxpar.parameters.restore_exported`). In other files an initializer
is a parameter by its name (`fc1.weight`) or by its use (the weight of a product, the bias of a
layer), a constant if it is a number of a formula, and otherwise in doubt. Tensors in doubt are
never trained, nor left out, without a message.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import listed
from onnxpar.frontend.load import name_nodes, normalise
from onnxpar.graph.names import names_of
from onnxpar.ops.operand_roles import (
    expressed_layer,
    is_layer_bias,
    is_statistic,
    is_weight,
    rearranges,
)
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.merged_tensors import untie
from onnxpar.parameters.origin import (
    MARKED,
    NO_PARAMETER,
    STATISTIC,
    Origin,
    Role,
    is_floating,
    is_uniform,
    note_origin,
    origin_of,
    sizes,
)
from onnxpar.parameters.restore_exported import restore
from onnxpar.parameters.torch_metadata import PARAMETER, Signature, kind_of, read_signature
from onnxpar.parameters.tying import equal_tensors, tie, tie_named

_EXACT = "export_torch"
"""The producer whose marks are exact: `onnxpar.from_torch` merges and folds no parameter."""

PYTORCH = frozenset((_EXACT, "pytorch"))
"""Producers of files that PyTorch's exporters wrote, ours included."""

_TRACED = (
    "the tracing exporter (dynamo=False) does not record which tensors are parameters, buffers, "
    "tied, or computed from others. onnxpar infers this from their names and uses, and trains "
    "merged or folded tensors as they are. torch.onnx.export(dynamo=True, optimize=False) "
    "records all of it"
)

_SHOWN = 3
_PARAMETER = re.compile(
    r"(^|_)(weights?|bias(es)?|kernel|gamma|beta|embeddings?|embedding_table|coefficients?|"
    r"intercepts?|[wb]\d*|[wb]_\d+|ReadVariableOp)(_(ih|hh)_l\d+(_reverse)?)?$",
    re.IGNORECASE,
)
_NORM = re.compile(r"(norm|ln)\w*[./]?\w*(scale|gain)$", re.IGNORECASE)
_NUMBER = re.compile(r"(^|_)(alpha|gain|gate|scale|slope|temperature)$", re.IGNORECASE)
_GENERATED = re.compile(
    r"^(onnx::\w+|val_\d+|_v_\d+|\d+|const\w*|.*Constant(_\d+)?(_output_\d+)?|_?tensor_constant\d+"
    r"|lifted_tensor_\d+)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Recognised:
    """A normalised model whose floating-point initializers have stored origins.

    Attributes:
        model: The model.
        notices: Notices for the user.
        registry: The table of operators with which it was normalised.
    """

    model: ir.Model
    notices: tuple[str, ...]
    registry: Registry

    def clone(self) -> "Recognised":
        """Returns a record with a copy of the model."""
        return Recognised(self.model.clone(), self.notices, self.registry)


def read_parameters(
    model: ir.Model, ties: Sequence[str] = (), registry: Registry = REGISTRY
) -> Recognised:
    """Recognises a model's parameters and normalises it.

    Args:
        model: The model as it was read; it is changed, and must not be used afterwards.
        ties: As for `recognise`.
        registry: The table of operators.

    Raises:
        ModelError: As for `recognise`, or the model is not valid.
    """
    notices = recognise(model, ties, registry)
    return Recognised(normalise(model, registry), notices, registry)


def recognise(
    model: ir.Model, ties: Sequence[str] = (), registry: Registry = REGISTRY
) -> tuple[str, ...]:
    """Stores the origin of each floating-point initializer, and undoes changes of exporters.

    Args:
        model: The model as it was read from a file; it is changed.
        ties: `A=B` each, for tensors that are one parameter (`--tie`).
        registry: The table of operators.

    Returns:
        Notices for the user.

    Raises:
        ModelError: An initializer has no data, or as for `onnxpar.parameters.tying.tie_named`.
    """
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            raise ModelError(f"initializer {name!r} has no data")
    name_nodes(model.graph)
    signature = read_signature(model)
    notices: list[str] = []
    traced = not signature.placeholders and model.producer_name == "pytorch"
    if not signature.placeholders:
        notices += [_TRACED] if traced else []
        notices += untie(model, registry)
    elif model.producer_name != _EXACT:
        notices += restore(model, signature, registry)
    notices += tie_named(model, ties)
    for graph in model.graphs():
        for value in graph.initializers.values():
            if is_floating(value) and origin_of(value) is None:
                note_origin(value, _origin(value, signature, traced=traced, registry=registry))
    if not signature.placeholders:
        notices += _tie_tables(model, registry)
        notices += _equal(model)
    return tuple(notices)


def _origin(value: ir.Value, signature: Signature, *, traced: bool, registry: Registry) -> Origin:
    """Returns the origin of an initializer, by its mark, its name or its uses.

    Args:
        value: The initializer.
        signature: The signature of PyTorch's exporter; empty for other files.
        traced: Whether the file is from PyTorch's tracing exporter, which writes no signature.
        registry: The table of operators.
    """
    name = value.name or ""
    known = signature.targets.get(name)
    # Its own mark is newer: a parameter with two names may have been frozen.
    kind = kind_of(value) or (None if known is None else known.kind)
    if kind is not None:
        role = Role.PARAMETER if kind == PARAMETER else Role.CONSTANT
        return Origin(role, MARKED.format(kind))
    if signature.placeholders:
        return Origin(Role.CONSTANT, NO_PARAMETER)
    elements = prod(sizes(value))
    uses = list(_uses(value, registry))
    last = re.split(r"[./:]", re.sub(r"(\.\d+|:\d+)+$", "", name))[-1]
    generated = _GENERATED.match(name) is not None
    if uses and all(is_statistic(node, index, registry) for node, index in uses):
        return Origin(Role.CONSTANT, STATISTIC)
    if (_PARAMETER.search(last) or _NORM.search(name)) and not generated:
        return Origin(Role.PARAMETER, "it has the name of a parameter")
    if elements > 1:
        for node, index in uses:
            if is_weight(node, index, registry):
                return Origin(Role.PARAMETER, f"it is the weight of node {node.name!r}")
    if generated and elements and is_uniform(value):
        for node, index in uses:
            if (layer := expressed_layer(node, registry)) and index > 0:
                return Origin(Role.CONSTANT, f"exporters use it to express a {layer}")
    if not elements:
        return Origin(Role.CONSTANT, "it is empty")
    for node, index in uses:
        if is_layer_bias(node, index, registry):
            return Origin(Role.PARAMETER, f"it is the scale or bias of node {node.name!r}")
    if elements <= 1:
        # Numbers of formulas have no names of their own in traced files.
        doubt = not generated and (traced or _NUMBER.search(last))
        return (
            Origin(Role.DOUBTFUL, _doubt(uses)) if doubt else Origin(Role.CONSTANT, "one element")
        )
    return Origin(Role.DOUBTFUL, _doubt(uses))


def _doubt(uses: Sequence[tuple[ir.Node, int]]) -> str:
    readers = ", ".join(f"{node.name!r} ({node.op_type})" for node, _ in uses[:_SHOWN])
    return f"neither its name nor its use, at {readers or 'no node'}, shows what it is"


def _uses(value: ir.Value, registry: Registry) -> Iterator[tuple[ir.Node, int]]:
    """Yields the nodes and operand numbers that read the elements of a value, also rearranged."""
    for node, index in value.uses():
        if rearranges(node, registry) and index == 0:
            yield from _uses(node.outputs[0], registry)
        else:
            yield node, index


def _parameters(model: ir.Model) -> list[ir.Value]:
    return [
        value
        for value in model.graph.initializers.values()
        if (origin := origin_of(value)) is not None and origin.role is Role.PARAMETER
    ]


def _tie_tables(model: ir.Model, registry: Registry) -> Iterator[str]:
    """Ties tensors that an exporter folded from a lookup table, such as the weight of a head."""
    names = names_of(model.graph, nodes=False)
    for first, *others in equal_tensors(_parameters(model)):
        group = [first, *others]
        tables = [v for v in group if not _GENERATED.match(v.name or "")]
        if len(tables) != 1:
            continue
        uses = _uses(tables[0], registry)
        if not any(i == 0 and is_weight(n, i, registry) for n, i in uses):
            continue
        for value in group:
            if value is not tables[0] and tie(model.graph, tables[0], value, names):
                yield (
                    f"initializer {value.name!r} has the elements of the table {tables[0].name!r} "
                    "and no name of its own: both are treated as one parameter"
                )


def _equal(model: ir.Model) -> Iterator[str]:
    """Notices parameters with equal elements, which may be tied or not in the module."""
    groups = equal_tensors(_parameters(model))
    if groups:
        texts = [" = ".join(repr(v.name) for v in group[:_SHOWN]) for group in groups]
        pair = f"{groups[0][0].name}={groups[0][1].name}"
        yield (
            f"parameters have equal elements but are trained separately: "
            f"{listed(texts, '; ', _SHOWN)}; if the module has them tied, pass --tie {pair}"
        )
