"""Puts BatchNormalization in training or inference form, and updates its running statistics.

Exporters write the inference form in any mode of the model. For training, a node is put in training
form, and its running statistics are updated by nodes of their own, so that they are plain values of
the graph: new = momentum · old + (1 - momentum) · batch's, where the batch's variance is that of
the population, as the operator's specification says, or PyTorch's. They keep the element type of
their initializer; `onnxpar.autodiff.mixed_precision` widens only trained parameters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.graph.builder import GENERATED
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.metadata_keys import VIRTUAL_STAGE
from onnxpar.graph.new_nodes import identity
from onnxpar.graph.node_view import default_opset
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.local_helpers import work_dtype

_PLACES = (3, 4)
_VARIANCE = 4


@dataclass(frozen=True)
class Running:
    """What `keep_statistics` did.

    Attributes:
        env: Shapes of all values, new ones included.
        updated: Name of each new value of a running statistic -> name of its initializer.
    """

    env: ShapeEnv
    updated: Mapping[str, str]


@dataclass(frozen=True)
class Forms:
    """The nodes with running statistics, by what training does with them.

    Attributes:
        put: Nodes in inference form that are put in training form.
        fixed: Nodes that keep the inference form, since their statistics are frozen.
        stuck: Nodes that stay unchanged: they are in a body of control flow, or their statistics
            are not initializers.
    """

    put: tuple[str, ...]
    fixed: tuple[str, ...]
    stuck: tuple[str, ...]


def forms(graph: ir.Graph, frozen: Iterable[str]) -> Forms:
    """Returns what `keep_statistics` will do; the graph is not changed."""
    frozen = frozenset(frozen)
    put, fixed, stuck = [], [], []
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if not _has_statistics(node):
            continue
        name = node.name or ""
        if not _learns(node, graph):
            stuck.append(name)
        elif _is_frozen(node, frozen):
            fixed.append(name)
        elif not _trains(node):
            put.append(name)
    return Forms(tuple(put), tuple(fixed), tuple(stuck))


def keep_statistics(
    model: ir.Model, env: ShapeEnv, frozen: Iterable[str], prefix: str, *, unbiased: bool = False
) -> Running:
    """Puts nodes in training form and appends the updates of their statistics as outputs.

    If several nodes share statistics, they update them one after the other, in the order of the
    graph, like a layer that is called several times.

    Args:
        model: The normalised model; it is changed.
        env: Its shapes.
        frozen: Names of initializers that do not change. A node with a frozen statistic is put in
            inference form.
        prefix: Beginning of the name of an update; the statistic's name follows.
        unbiased: Whether the running variance takes Σ(x - mean)² / (n - 1), as in PyTorch, and not
            the variance of the population.
    """
    graph = model.graph
    frozen = frozenset(frozen)
    opset = default_opset(model.opset_imports)
    builder = GlobalBuilder.over(graph, opset, env)
    latest: dict[str, ir.Value] = {}
    for node in list(graph):
        if not _has_statistics(node) or not _learns(node, graph):
            continue
        if _is_frozen(node, frozen):
            _infer(node)
            continue
        momentum = node.attributes.get_float("momentum", 0.9)
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        # With momentum 0 the node's outputs are the statistics of the batch.
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
        node.resize_outputs(3)
        builder.scope = node.name or ""
        builder.metadata = {k: v for k, v in node.metadata_props.items() if k == VIRTUAL_STAGE}
        for index in _PLACES:
            statistic, batch = node.inputs[index], node.outputs[index - 2]
            assert statistic is not None
            name = statistic.name or ""
            if not batch.name:
                batch.name = builder.fresh(f"{node.name}:{index - 2}{GENERATED}")
                builder.declare(batch, statistic.dtype, builder.shape_of(statistic))
            readers = list(batch.uses())
            if unbiased and index == _VARIANCE:
                batch = _unbiased(builder, batch, node.inputs[0])
            latest[name] = _mixed(builder, latest.get(name, statistic), batch, momentum)
            for reader, place in readers:
                reader.replace_input_with(place, latest[name])
    updated = {}
    for name, value in latest.items():
        builder.rename(value, prefix + name)
        updated[value.name or ""] = name
        graph.outputs.append(value)
    graph.sort()
    return Running(builder.env, updated)


def infer_with_statistics(graph: ir.Graph) -> None:
    """Puts every node, including those in bodies, in inference form."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if _has_statistics(node):
            _infer(node)


def _unbiased(builder: GlobalBuilder, variance: ir.Value, x: ir.Value | None) -> ir.Value:
    """Returns a variance of n numbers times n / (n - 1); of one number it stays as it is."""
    assert x is not None
    shape = builder.shape_of(x)
    wide = work_dtype(variance.dtype)
    sizes = builder.cast(builder.sizes((*shape[:1], *shape[2:])), wide)
    # In floating point from the beginning: n may exceed what integers of the type hold.
    count = builder.reduce("ReduceProd", sizes, (0,))
    one = builder.const(1, wide)
    others = builder.op("Max", builder.op("Sub", count, one), one)
    share = builder.op("Div", count, others)
    wider = builder.op("Mul", builder.cast(variance, wide), share)
    return builder.cast(wider, variance.dtype)


def _mixed(builder: GlobalBuilder, old: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
    dtype, shape = old.dtype, builder.shape_of(old)
    wide = work_dtype(dtype)
    parts = [
        builder.op("Mul", builder.cast(value, wide), builder.const(share, wide), shape=shape)
        for value, share in ((old, momentum), (batch, 1 - momentum))
    ]
    return builder.cast(builder.op("Add", *parts, shape=shape), dtype)


def _infer(node: ir.Node) -> None:
    """Puts a node in inference form; readers of a new statistic read the old one instead."""
    node.attributes.pop("training_mode", None)
    for index, out in enumerate(node.outputs[1:3], 3):
        old = node.inputs[index]
        assert old is not None
        if out.is_graph_output() and node.graph is not None:
            same = identity(old, out.name or "", f"{node.name}/{out.name}")
            node.graph.append(same)
            old = same.outputs[0]
        out.replace_all_uses_with(old, replace_graph_outputs=True)
    node.resize_outputs(1)


def _has_statistics(node: ir.Node) -> bool:
    return not node.domain and node.op_type == "BatchNormalization"


def _learns(node: ir.Node, graph: ir.Graph) -> bool:
    """Whether a node's statistics can be updated: it is in `graph`, and they are initializers."""
    statistics = [node.inputs[index] for index in _PLACES]
    return node.graph is graph and all(
        v is not None and graph.initializers.get(v.name or "") is v for v in statistics
    )


def _is_frozen(node: ir.Node, frozen: frozenset[str]) -> bool:
    return any(v is not None and v.name in frozen for v in (node.inputs[i] for i in _PLACES))


def _trains(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("training_mode", 0))
