"""Which initializers are trained, told in full, and the untying of those that exporters merged.

`torch.onnx.export` makes one tensor of all initializers that are equal, such as the ones of every
LayerNormalization, or the zeros that are biases and running means. Trained so, the layers would
share what they do not share in the model that was exported; `untie` gives each its own again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.errors import ModelError
from onnxpar.ops.roles import (
    is_identity,
    is_layer_bias,
    is_scale_or_bias,
    is_statistic,
    reads_elements,
)
from onnxpar.strategy.names import SHOWN, nearest
from onnxpar.training.optimizer import ParameterInfo

FROZEN = "frozen"
NOT_CHOSEN = "not chosen"
EMPTY = "no element"
ONE_ELEMENT = "one element"
STATISTIC = "running statistic"
BUFFER = "buffer of the module"

_COPY_OF = "onnxpar.copy_of"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata key of PyTorch's exporter: what an initializer was, PARAMETER or BUFFER for one."""


@dataclass(frozen=True)
class Tensor:
    """An initializer of the model and whether it is trained.

    Attributes:
        name: Its name.
        elements: How many elements it has.
        trained: Whether it is trained.
        reason: Why it is not; empty where it is.
        used_by: Names of the nodes that read it, each once, in the order of the graph.
    """

    name: str
    elements: int
    trained: bool
    reason: str
    used_by: tuple[str, ...]


@dataclass(frozen=True)
class Counts:
    """How much is trained, of all floating-point initializers.

    Attributes:
        trained: Elements that are trained.
        elements: All elements.
        trained_tensors: Tensors that are trained.
        tensors: All tensors.
    """

    trained: int
    elements: int
    trained_tensors: int
    tensors: int


@dataclass(frozen=True)
class Selection:
    """The outcome of `select`.

    Attributes:
        trained: The parameters chosen, in the order of the model's initializers.
        tensors: Every floating-point initializer that the model's file had, with the reason where
            it is not trained.
    """

    trained: tuple[ParameterInfo, ...]
    tensors: tuple[Tensor, ...]

    def told(self, unreached: Mapping[str, str]) -> tuple[Tensor, ...]:
        """Returns all tensors, those chosen that the loss does not depend on with that reason.

        Args:
            unreached: Parameter -> why no gradient reaches it.
        """
        return tuple(
            Tensor(t.name, t.elements, False, unreached[t.name], t.used_by)
            if t.trained and t.name in unreached
            else t
            for t in self.tensors
        )

    def counts(self, unreached: Mapping[str, str]) -> Counts:
        """Returns how much is trained."""
        told = self.told(unreached)
        trained = [t.elements for t in told if t.trained]
        return Counts(sum(trained), sum(t.elements for t in told), len(trained), len(told))

    def shared(self, unreached: Mapping[str, str]) -> tuple[Tensor, ...]:
        """Returns the tensors that are trained and that more than one node reads."""
        return tuple(t for t in self.told(unreached) if t.trained and len(t.used_by) > 1)

    def entries(self, unreached: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns the manifest's list of tensors."""
        return [
            {
                "name": t.name,
                "elements": t.elements,
                "trained": t.trained,
                "reason": t.reason,
                "used_by": list(t.used_by),
            }
            for t in self.told(unreached)
        ]


def select(
    model: ir.Model,
    originals: Iterable[str],
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    decay: Sequence[str] = (),
    no_decay: Sequence[str] = (),
) -> Selection:
    """Chooses what is trained: floating-point initializers of the file, as the patterns say.

    A tensor of one element is trained where it is the bias or scale of a layer, or named by
    `trainable`; others of one element are constants of formulas. What PyTorch's exporter marks as a
    buffer, such as the frequencies of rotary positions, is trained if it is named. Whether the loss
    depends on a parameter is not looked at here.

    Args:
        model: The normalised model; it is not changed.
        originals: Initializers that the file had; others were constants in the graph.
        trainable: Names and patterns (`fnmatch`) of what to train; none means everything.
        freeze: Names and patterns of what not to train; they win over `trainable`.
        decay: Names and patterns of parameters with weight decay, though they have fewer dims.
        no_decay: Names and patterns of parameters without it, though they have two dims or more.

    Raises:
        ModelError: A pattern matches no floating-point initializer, or one has both kinds of decay.
    """
    known = frozenset(originals)
    values = {
        name: value
        for name, value in model.graph.initializers.items()
        if value.meta.get(_COPY_OF, name) in known and _is_floating(value)
    }
    chosen = _matching("--trainable", trainable, values)
    frozen = _matching("--freeze", freeze, values)
    order = {id(node): i for i, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph))}
    tensors = []
    for name, value in values.items():
        reason = ""
        if name in frozen:
            reason = FROZEN
        elif trainable and name not in chosen:
            reason = NOT_CHOSEN
        elif not trainable or name not in trainable:
            reason = _unfit(value, named=name in chosen)
        readers = {id(node): node for node, _ in value.uses() if reads_elements(node)}
        used_by = [n.name or "" for n in sorted(readers.values(), key=lambda n: order[id(n)])]
        tensors.append(Tensor(name, prod(_sizes(value)), not reason, reason, tuple(used_by)))
    decays = _decays(values, decay, no_decay)
    trained = tuple(
        ParameterInfo(t.name, values[t.name].dtype or ir.DataType.FLOAT, shape, decays(t.name))
        for t in tensors
        if t.trained
        for shape in (_sizes(values[t.name]),)
    )
    return Selection(trained, tuple(tensors))


def untie(model: ir.Model) -> tuple[str, ...]:
    """Gives scales, biases and running statistics their own where exporters merged equal ones.

    Only tensors whose elements are all the same number, as those of fresh layers are, are taken to
    have been merged by the exporter. Where it left an Identity in the place of a tensor, its name
    comes back; otherwise the first use keeps the name `x` and the others read the copies `x.1`,
    `x.2`…. The model given is changed.

    Returns:
        A notice for each tensor that was untied.
    """
    graph = model.graph
    order = {id(node): i for i, node in enumerate(ir.traversal.RecursiveGraphIterator(graph))}
    taken = _names(graph)
    notices = []
    for name, value in list(graph.initializers.items()):
        uses = sorted(value.uses(), key=lambda use: (order[id(use[0])], use[1]))
        if len(uses) < 2 or not _is_floating(value) or not _is_constant(value, uses):
            continue
        copies = [copy for node, _ in uses for copy in _in_place_of(node, value, graph)]
        uses = [use for use in uses if use[0].graph is not None]
        places = [(node, index) for node, index in uses if _is_place(node, index)]
        # A use that is no scale or bias, such as an initial state, must not be trained with one.
        if places and len(places) == len(uses):
            places.pop(0)
        for node, index in places:
            copy = _copy(value, _free(name, taken))
            graph.register_initializer(copy)
            node.replace_input_with(index, copy)
            copies.append(copy)
        if copies:
            notices.append(_notice(value, copies))
    return tuple(notices)


def _in_place_of(node: ir.Node, value: ir.Value, graph: ir.Graph) -> Iterator[ir.Value]:
    """Puts a copy of an initializer in the place of an Identity of it that is a scale or bias."""
    made = node.outputs[0]
    if not is_identity(node) or made.is_graph_output() or node.graph is not graph:
        return
    if not any(_is_place(user, index) for user, index in made.uses()):
        return
    copy = _copy(value, made.name or "")
    made.replace_all_uses_with(copy)
    graph.remove(node, safe=True)
    graph.register_initializer(copy)
    yield copy


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _sizes(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


# -- selecting -----------------------------------------------------------------------------------


def _matching(option: str, patterns: Sequence[str], names: Iterable[str]) -> frozenset[str]:
    """The names that the patterns match; ModelError for a pattern that matches none."""
    found: set[str] = set()
    names = list(names)
    for pattern in patterns:
        hits = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not hits:
            raise ModelError(
                f"{option} {pattern!r}: expected the name or a pattern of a floating-point "
                f"initializer, got one that none has{nearest(pattern, names)}"
            )
        found.update(hits)
    return frozenset(found)


def _unfit(value: ir.Value, *, named: bool) -> str:
    """Why an initializer is none of the parameters that are trained unless named; empty if it is.

    Args:
        value: The initializer.
        named: Whether a pattern of what to train matches it.
    """
    uses = value.uses()
    if uses and all(is_statistic(node, index) for node, index in uses):
        return STATISTIC
    if not named and value.metadata_props.get(_KIND) == "BUFFER":
        return BUFFER
    elements = prod(_sizes(value))
    if elements == 0:
        return EMPTY
    if elements == 1 and not named and not any(is_layer_bias(node, index) for node, index in uses):
        return ONE_ELEMENT
    return ""


def _decays(
    values: Mapping[str, ir.Value], decay: Sequence[str], no_decay: Sequence[str]
) -> Callable[[str], bool]:
    """Whether weight decay applies to a parameter."""
    on = _matching("--decay", decay, values)
    off = _matching("--no-decay", no_decay, values)
    for name in values:
        if name in on and name in off:
            raise ModelError(f"parameter {name!r}: both --decay and --no-decay match it")
    return lambda name: name in on or (name not in off and len(_sizes(values[name])) > 1)


# -- untying -------------------------------------------------------------------------------------


def _names(graph: ir.Graph) -> set[str]:
    """The names of a graph's values, those of subgraphs included."""
    names = {v.name or "" for v in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names |= {v.name or "" for v in (*node.inputs, *node.outputs) if v is not None}
    return names


def _is_place(node: ir.Node, index: int) -> bool:
    """Whether an operand is a layer's own: its scale, bias or running statistic."""
    return is_scale_or_bias(node, index) or is_statistic(node, index)


def _is_constant(value: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> bool:
    """Whether a tensor has more than one element, all of them the same number.

    One of one element may be a constant of a formula, unless it is somewhere a running statistic.
    """
    assert value.const_value is not None
    count = prod(_sizes(value))
    if count < 2 and not (count and any(is_statistic(node, index) for node, index in uses)):
        return False
    flat = value.const_value.numpy().ravel()
    return bool(np.all(flat == flat[0]))


def _free(name: str, taken: set[str]) -> str:
    count = 1
    while f"{name}.{count}" in taken:
        count += 1
    taken.add(f"{name}.{count}")
    return f"{name}.{count}"


def _copy(value: ir.Value, name: str) -> ir.Value:
    assert value.const_value is not None and value.dtype is not None
    tensor = ir.Tensor(value.const_value.numpy().copy(), dtype=value.dtype, name=name)
    copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
    copy.meta[_COPY_OF] = value.meta.get(_COPY_OF, value.name)
    return copy


def _notice(value: ir.Value, copies: Sequence[ir.Value]) -> str:
    assert value.const_value is not None
    number = float(value.const_value.numpy().flat[0])
    places = [
        f"{v.name!r} at {', '.join(repr(node.name) for node in v.consumers())}"
        for v in (value, *copies)
        if v.uses()
    ]
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return (
        f"initializer {value.name!r} (all elements {number:g}) stood for several scales, biases or "
        "statistics, since exporters merge equal tensors; each place has its own now: "
        f"{', '.join(places[:SHOWN])}{more}"
    )
