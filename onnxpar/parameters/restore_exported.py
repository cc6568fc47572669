"""Finds the origins of the initializers of a PyTorch export, and undoes its optimizations.

With `optimize=True`, its default, the exporter folds nodes that depend only on initializers, makes
one initializer of small equal ones, and drops biases that are zero. The file computes the same, but
trains differently: tied weights become two tensors, equal parameters of different layers become
one, constants are merged with parameters. Most of this can be seen from the metadata
(`onnxpar.parameters.torch_metadata`). This module uses it for each use of an initializer:

- a use whose operator reads other placeholders than those of the initializer was merged, and gets a
  tensor of its own;
- a tensor that was folded from a parameter by a rearrangement is trained in its place; if the
  parameter is also present, or was folded twice, one is computed from the other again;
- exponentials and negatives of parameters are computed again from the parameters;
- biases that operators of the exported program read and nodes do not are restored as zeros.

Tensors that were folded from parameters in another way, or multiplied by a batch norm, are in
doubt.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.name_patterns import listed
from onnxpar.graph.names import names_of
from onnxpar.graph.new_nodes import constant
from onnxpar.ops.operand_roles import applied, inverted, is_statistic, missing_bias
from onnxpar.ops.registry import Registry
from onnxpar.parameters.folded_tensors import dims, doubt, functions_of, order, overlap
from onnxpar.parameters.origin import (
    MARKED,
    NO_PARAMETER,
    STATISTIC,
    Origin,
    Role,
    array_of,
    copy_of,
    note_origin,
)
from onnxpar.parameters.torch_metadata import PARAMETER, Signature, arguments_of
from onnxpar.parameters.tying import put, tie
from onnxpar.parameters.use_attribution import CONSTANT, UNKNOWN, Attribution, Initializer, Key

_ASK = "when the model was exported; optimize=False avoids that"


def restore(model: ir.Model, signature: Signature, registry: Registry) -> tuple[str, ...]:
    """Restores a model, which is changed, and stores the origin of each floating initializer.

    Args:
        model: The model as it was read from a file.
        signature: Its signature, not empty.
        registry: The table of operators.

    Returns:
        Notices of the changes, and of parameters of the module that the file lacks.
    """
    work = _Restorer(model, signature, registry)
    work.split()
    work.add_biases()
    work.invert()
    work.tie()
    return (*work.missing(), *work.notices)


class _Restorer(Attribution):
    def __init__(self, model: ir.Model, signature: Signature, registry: Registry) -> None:
        super().__init__(model.graph, signature, registry)
        self.graph = model.graph
        self.notices: list[str] = []
        self.names = names_of(self.graph, nodes=False)

    # -- biases ------------------------------------------------------------------------------------

    def add_biases(self) -> None:
        """Gives layers the zero biases that the optimizer has dropped."""
        for operator in self.operators.values():
            biases = [p for p in operator.left if p.is_parameter]
            places = [n for n in operator.nodes if missing_bias(n, self.registry) is not None]
            if len(biases) != 1 or len(places) != 1 or biases[0].target in self.names:
                continue
            (node,), (bias,) = places, biases
            weight = self.by_value.get(id(node.inputs[1]))
            place = missing_bias(node, self.registry)
            read = {p.name for p in self.signature.read_by(node)}
            if weight is None or place is None:
                continue
            if not weight.own_key & read and weight.value.name not in arguments_of(node):
                continue
            dtype = weight.value.dtype or ir.DataType.FLOAT
            value = constant(bias.target, np.zeros(place[1]), dtype)
            self.graph.register_initializer(value)
            self.names.reserve([bias.target])
            if len(node.inputs) <= place[0]:
                node.resize_inputs(place[0] + 1)
            node.replace_input_with(place[0], value)
            tensor = Initializer(value, (bias,), False, False, frozenset({bias.name}))
            self.tensors.append(tensor)
            self.by_value[id(value)] = tensor
            operator.left.remove(bias)
            self.notices.append(
                f"bias {bias.target!r} of node {node.name!r} was restored: the exporter had "
                "dropped it because it was zero"
            )

    # -- uses --------------------------------------------------------------------------------------

    def split(self) -> None:
        """Gives each use of an initializer the tensor that it was before the exporter merged it."""
        outputs = (out for node in self.graph.all_nodes() for out in node.outputs)
        live = {v.name for v in (*self.graph.inputs, *outputs) if v.name is not None}
        for tensor in list(self.tensors):
            uses = sorted(tensor.value.uses(), key=lambda u: (self.order[id(u[0])], u[1]))
            found: dict[Key, list[tuple[ir.Node, int]]] = {}
            for node, index in uses:
                found.setdefault(self.key(tensor, node, index), []).append((node, index))
            tensor.key = (
                tensor.own_key if tensor.own_key in found or not found else next(iter(found))
            )
            if tensor.folded:
                tensor.functions = functions_of(tensor.value, self.signature, uses, live)
            names = []
            for key, places in found.items():
                if key == tensor.key:
                    continue
                copy = self._copy(tensor, key)
                names.append(copy.name)
                for node, index in places:
                    node.replace_input_with(index, copy)
            if names:
                shown = ", ".join(repr(name) for name in names)
                self.notices.append(
                    f"initializer {tensor.value.name!r} was shared by several tensors of the "
                    "module, which the exporter had merged because they were equal; they were "
                    f"restored: {shown}"
                )

    def _copy(self, tensor: Initializer, key: Key) -> ir.Value:
        """Returns a new initializer for the uses that were other placeholders."""
        name, folded = tensor.value.name or "", tensor.folded
        first = self.signature.placeholders.get(min(key)) if len(key) == 1 else None
        if first is not None and not folded and first.target not in self.names:
            name = first.target
        value = copy_of(tensor.value, self.names.fresh(name))
        self.graph.register_initializer(value)
        known = self.signature.placeholders
        own = tuple(known[n] for n in sorted(key) if n in known)
        copy = Initializer(value, own, folded, False, key, tensor.functions)
        self.tensors.append(copy)
        self.by_value[id(value)] = copy
        return value

    # -- functions and ties ------------------------------------------------------------------------

    def invert(self) -> None:
        """Computes exponentials and negatives of a parameter again, from the parameter."""
        for tensor in list(self.tensors):
            chain = order(tensor.functions, tensor.value)
            if chain and len(tensor.own) == 1 == len(tensor.key) and tensor.own[0].is_parameter:
                self._compute_again(tensor, chain)

    def _compute_again(self, tensor: Initializer, chain: Sequence[str]) -> None:
        value, target = tensor.value, tensor.own[0].target
        array = array_of(value)
        for function in reversed(chain):
            array = inverted(function, array)
        if not np.isfinite(array.astype(np.float32)).all():
            return
        source = constant(self.names.fresh(target), array, value.dtype)
        made = source
        uses = list(value.uses())
        for function in chain:
            node = applied(function, made)
            made = put(self.graph, node, made, self.names)
        for node, index in uses:
            node.replace_input_with(index, made)
        del self.graph.initializers[value.name or ""]
        self.graph.register_initializer(source)
        tensor.value, tensor.functions = source, frozenset()
        self.notices.append(
            f"initializer {value.name!r} is again computed from the parameter {source.name!r}: "
            f"the exporter had folded {' and '.join(chain)}"
        )

    def tie(self) -> None:
        """Makes one tensor of those that are the same parameter, and stores all origins."""
        same: dict[Key, list[Initializer]] = defaultdict(list)
        for tensor in self.tensors:
            same[tensor.key].append(tensor)
        for key, tensors in same.items():
            origins = {id(t.value): self._origin(t) for t in tensors}
            trained = [t for t in tensors if origins[id(t.value)].role is Role.PARAMETER]
            if key != CONSTANT and len(trained) > 1:
                trained.sort(key=lambda t: t.folded)
                base, *others = trained
                origins.update(self._tied(base, others))
            for tensor in tensors:
                note_origin(tensor.value, origins[id(tensor.value)])

    def _tied(self, base: Initializer, others: Sequence[Initializer]) -> dict[int, Origin]:
        """Computes tensors from the one that they rearrange; returns the origins of others."""
        doubtful: dict[int, Origin] = {}
        for tensor in others:
            if tie(self.graph, base.value, tensor.value, self.names):
                self.notices.append(
                    f"initializer {tensor.value.name!r} is again computed from "
                    f"{base.value.name!r}: the exporter had folded it, and both are one parameter"
                )
            elif not base.folded or overlap(base.functions) or overlap(tensor.functions):
                names = tuple(p.target for p in tensor.own)
                why = f"it and {base.value.name!r} both hold {', '.join(names)}"
                doubtful[id(tensor.value)] = Origin(
                    Role.DOUBTFUL, f"{why}: they were separated {_ASK}", names=names
                )
        return doubtful

    # -- origins -----------------------------------------------------------------------------------

    def _origin(self, tensor: Initializer) -> Origin:
        """Returns the origin of a tensor."""
        unknown = sorted(name[1:] for name in tensor.key if name.startswith(UNKNOWN))
        if unknown:
            return Origin(
                Role.DOUBTFUL,
                f"it comes from the value {unknown[0]!r} of the module, and the computation of "
                f"that value was lost {_ASK}",
            )
        placeholders = [self.signature.placeholders[name] for name in sorted(tensor.key)]
        names = ", ".join(p.target for p in placeholders)
        kinds = {p.kind for p in placeholders}
        uses = list(tensor.value.uses())
        if uses and all(is_statistic(node, index, self.registry) for node, index in uses):
            return Origin(Role.CONSTANT, STATISTIC)
        if PARAMETER not in kinds:
            marked = len(kinds) == 1 and not tensor.folded
            return Origin(Role.CONSTANT, MARKED.format(min(kinds)) if marked else NO_PARAMETER)
        if tensor.rewritten:
            return Origin(
                Role.DOUBTFUL,
                f"it was fused with another tensor, such as a batch norm, {_ASK}",
            )
        if not tensor.folded:
            return Origin(Role.PARAMETER, MARKED.format(PARAMETER))
        parameters = tuple(p.target for p in placeholders if p.is_parameter)
        others = tuple(p.target for p in placeholders if not p.is_parameter)
        why = doubt(tensor.value, tensor.functions, parameters, others)
        if why:
            return Origin(Role.DOUBTFUL, f"{why} {_ASK}", names=parameters)
        count = dims(tensor.value, tensor.functions, self.registry)
        return Origin(Role.PARAMETER, f"folded from {names}", count, parameters)

    def missing(self) -> tuple[str, ...]:
        """Returns a notice of the parameters of the module that the file lacks."""
        there = {name for tensor in self.tensors for name in tensor.key}
        known = {t.value.name for t in self.tensors}
        names = [
            p.target
            for p in self.signature.placeholders.values()
            if p.is_parameter
            and p.name not in there
            and p.target not in known
            and not self.is_alias(p.target)
        ]
        if not names:
            return ()
        return (
            f"the file lacks {listed(names)}, which are parameters of the "
            "PyTorch module: they are unused, or another name of a tied parameter, or were "
            "dropped by the exporter's optimizer (optimize=False prevents that)",
        )
