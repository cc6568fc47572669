"""Makes one rank's ONNX graph from the rank-generic graph; `write_directory` writes it.

Rank graphs differ only in the `group` (and `pairs`, `root`) of each collective, in the
locations of weights, and in texts for people. So the graph is serialised once, as a template, and
these few fields are filled in for each rank.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from onnxpar.core.errors import DialectError, DirectoryError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import split
from onnxpar.core.symbols import dim_str
from onnxpar.emit.weight_layout import WeightLayout, layout
from onnxpar.facts.host_nodes import HOST, LAYER, host_nodes, is_small
from onnxpar.graph.body_captures import bodies_of, every_node, read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import (
    BACKGROUND_INPUTS,
    COORD_PREFIX,
    COUNTER_INPUTS,
    SYMBOL_PREFIX,
)
from onnxpar.graph.padding_masks import PADDED, PADDING
from onnxpar.ops.collective.dialects import DOMAINS, Dialect, translate
from onnxpar.ops.device.cuda_form import CudaForm, cuda_form, is_narrow
from onnxpar.ops.device.cuda_functions import put
from onnxpar.partition.partitioned_model import GraphValue, Parameter, PartitionedModel
from onnxpar_format import padding_mark
from onnxpar_format.entries import SECOND
from onnxpar_format.padding_mark import PaddingMark

DOMAIN_VERSION = 1
WIDE = int(ir.DataType.FLOAT)
_SHAPE_SIZE = 64
_SCALES = 8
"""The most scales that a Resize has, one per dim."""
MIN_IR_VERSION = 11
"""The first version with multi-device fields."""
MAX_IR_VERSION = 13
"""The last version that onnxruntime 1.31 reads."""


@dataclass(frozen=True)
class Template:
    """A program's graph, and the places in it that differ between ranks.

    Attributes:
        model: The partitioned model.
        layout: Where each weight is stored.
        proto: The graph; `fill` changes it, so it belongs to one rank at a time.
        collectives: Each node that has a group: its position in the graph, and the node.
        weights: `(parameter, position among the initializers)` of each weight in a file.
        shapes: The same for weights that may determine a shape. onnxruntime may read them during
            shape inference, when it refuses external data, so they are stored in the graph.
        group: The attribute of a collective that has its ranks.
    """

    model: PartitionedModel
    layout: WeightLayout
    proto: onnx.ModelProto
    collectives: tuple[tuple[int, ir.Node], ...]
    weights: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[Parameter, int], ...]
    group: str = "group"


def emit_rank(pm: PartitionedModel, rank: int) -> ir.Model:
    """Returns one rank's graph as a separate model.

    Its weights are external tensors, in the files that `onnxpar.emit.write` makes of this model
    alone; they are not read here. To write several ranks, `fill` one `template`.

    Raises:
        DirectoryError: The rank is not in the mesh, or a parameter cannot be stored.
    """
    held = {p.name: (pm.stage,) for p in pm.parameters}
    proto = fill(template(pm, layout(pm.parameters, pm.plan.mesh, held)), rank)
    return ir.from_proto(proto)


def describe_rank(mesh: Mesh, rank: int, stages: int = 1) -> str:
    """Returns a rank's place for people: `stage 0, rank 3 of 8, coordinates dp=0 tp=3`."""
    stage, here = divmod(rank, mesh.size)
    if mesh.axes:
        places = " ".join(
            f"{name}={mesh.index(here, mesh.axis_atoms(name))}" for name, _ in mesh.axes
        )
    elif mesh.atoms:
        places = " ".join(
            f"{c}/{size}" for c, size in zip(mesh.coords(here), mesh.atoms, strict=True)
        )
    else:
        places = "none"
    return f"stage {stage}, rank {rank} of {mesh.size * stages}, coordinates {places}"


def global_group(
    mesh: Mesh, rank: int, atoms: Sequence[int], stages: Sequence[int]
) -> tuple[int, ...]:
    """Returns the ranks of a collective's group: in the rank's stage, or its peers in `stages`."""
    stage, here = divmod(rank, mesh.size)
    if stages:
        return tuple(s * mesh.size + here for s in stages)
    return tuple(stage * mesh.size + member for member in mesh.group(here, atoms))


def used_system_inputs(pm: PartitionedModel) -> tuple[ir.Value, ...]:
    """Returns the system inputs that some node reads, in the order of their creation."""
    read = {value for node in pm.builder.nodes for value in read_by(node)}
    return tuple(value for value in pm.builder.system_inputs.values() if value in read)


def template(
    pm: PartitionedModel, places: WeightLayout, dialect: Dialect | None = None
) -> Template:
    """Serialises a partitioned model once. Its nodes are not changed.

    Args:
        pm: The program of all ranks.
        places: Where its weights are stored.
        dialect: Whose collectives the graph has; None for those of the domain `onnxpar`.

    Raises:
        DirectoryError: A parameter has no place and cannot be written into the graph.
        DialectError: A node cannot be written in the dialect.
    """
    source, mesh = pm.source, pm.plan.mesh
    proto = onnx.ModelProto(
        ir_version=min(max(source.ir_version or 0, MIN_IR_VERSION), MAX_IR_VERSION),
        producer_name="onnxpar",
    )
    if source.domain:
        proto.domain = source.domain
    if source.model_version:
        proto.model_version = source.model_version
    # ONNX's checker needs an import of every domain; onnxruntime does not.
    nodes = list(every_node(pm.builder.nodes))
    form = _form(pm, nodes)
    functions = _called_functions(pm, form)
    read = [node.domain for node in nodes] + [d for f in functions for d in f.opset_imports]
    used = {domain: 1 for domain in read if domain not in ("", "ai.onnx")}
    versions = {**used, **source.opset_imports, DOMAIN: DOMAIN_VERSION}
    if dialect is not None:
        versions = {DOMAINS[dialect]: 1, **versions}
        if all(function.domain != DOMAIN for function in functions):
            del versions[DOMAIN]
    for domain, version in versions.items():
        standard = domain in ("", "ai.onnx")
        proto.opset_import.add(domain=domain, version=form.opset if standard else version)
    for function in functions:
        ir.serde.serialize_function_into(proto.functions.add(), function)
    _put_metadata(
        proto,
        {
            **source.metadata_props,
            "onnxpar.program": pm.program,
            "onnxpar.mesh": " ".join(f"{name}={size}" for name, size in mesh.axes)
            or f"{mesh.size} devices",
        },
    )
    graph = proto.graph
    graph.name = source.graph.name or pm.program
    fed = [GraphValue(p.local.name or p.name, p.local, p.sharding) for p in pm.parameters if p.fed]
    for item in (*pm.inputs, *fed):
        _put_value(graph.input.add(), item, mesh)
    for handed in pm.handed_in:
        ir.serde.serialize_value_into(graph.input.add(), handed.local)
        _put_metadata(graph.input[-1], {"onnxpar.from": handed.source})
    for value in used_system_inputs(pm):
        ir.serde.serialize_value_into(graph.input.add(), value)
    for item in pm.outputs:
        _put_value(graph.output.add(), item, mesh)
    written = {item.local for item in pm.outputs}
    for handed in pm.handed_out:
        # An output of the model that other stages also read is one output of the graph.
        if handed.local not in written:
            ir.serde.serialize_value_into(graph.output.add(), handed.local)
    for value in pm.builder.initializers:
        if value.const_value is None:
            raise DirectoryError(f"constant {value.name!r} has no value")
        ir.serde.serialize_tensor_into(graph.initializer.add(), value.const_value)
        graph.initializer[-1].name = value.name or ""
    weights, shapes = [], []
    for parameter in pm.parameters:
        if parameter.fed:
            continue
        if _says_a_size(parameter):
            shapes.append((parameter, len(graph.initializer)))
        elif parameter.name in places.shards:
            weights.append((parameter.name, len(graph.initializer)))
        _put_parameter(graph.initializer.add(), parameter, places, mesh)
    known = {function.identifier() for function in functions}
    collectives = tuple(_put_nodes(graph, pm, form, dialect, known))
    name = "group" if dialect is None else "groups"
    return Template(pm, places, proto, collectives, tuple(weights), tuple(shapes), name)


def fill(form: Template, rank: int) -> onnx.ModelProto:
    """Fills in one rank's groups and weights, and returns the template's graph.

    The graph is the template's own, and valid until the next call.

    Raises:
        DirectoryError: The rank is not in the mesh.
    """
    pm, mesh = form.model, form.model.plan.mesh
    if rank not in pm.ranks:
        raise DirectoryError(
            f"expected a rank from {pm.ranks.start} to {pm.ranks.stop - 1}, got {rank}"
        )
    graph = form.proto.graph
    original = pm.source.graph.doc_string
    place = describe_rank(mesh, rank, pm.stages)
    graph.doc_string = f"{place}\n\n{original}" if original else place
    devices = str(mesh.size * pm.stages)
    _put_metadata(form.proto, {"onnxpar.rank": str(rank), "onnxpar.devices": devices})
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for index, node in form.collectives:
        key = node.meta["atoms"], node.meta.get("stages", ())
        if key not in groups:
            groups[key] = global_group(mesh, rank, *key)
        group, root = groups[key], node.meta.get("root")
        _put_attribute(graph.node[index], form.group, group)
        pairs = node.meta.get("pairs")
        if pairs:
            _put_attribute(graph.node[index], "pairs", [group[i] for pair in pairs for i in pair])
        if root is not None:
            _put_attribute(graph.node[index], "root", group[root])
    for name, index in form.weights:
        shard = form.layout.shard(name, rank)
        if shard.length:
            location, offset, length = graph.initializer[index].external_data
            location.value = shard.file
            offset.value = str(shard.offset)
            length.value = str(shard.length)
    for parameter, index in form.shapes:
        content = parameter.source.const_value
        assert content is not None
        array = np.asarray(content.numpy())
        shard_of = split(array, parameter.sharding, mesh, rank % mesh.size)
        graph.initializer[index].raw_data = shard_of.astype(
            shard_of.dtype.newbyteorder("<")
        ).tobytes()
    return form.proto


def _form(pm: PartitionedModel, nodes: Sequence[ir.Node]) -> CudaForm:
    """Returns the form of the graph: the same for all devices, with kernels on GPUs.

    A model with functions keeps its opset, which is also that of the functions.
    """
    if pm.source.functions:
        return CudaForm(pm.builder.opset)
    return cuda_form(nodes, pm.builder.opset, pm.registry)


def _put_nodes(
    graph: onnx.GraphProto,
    pm: PartitionedModel,
    form: CudaForm,
    dialect: Dialect | None,
    functions: Collection[tuple[str, str, str]],
) -> Iterator[tuple[int, ir.Node]]:
    outputs = {item.local for item in pm.outputs} | {item.local for item in pm.handed_out}
    on_host = host_nodes(pm.builder.nodes, _given_to_host(pm), pm.registry)
    for node in pm.builder.nodes:
        if dialect is not None and _is_foreign(node, functions, dialect):
            for index in _put_translated(graph, pm, node, dialect, form.opset):
                yield index, node
            continue
        proto = onnx.NodeProto()
        ir.serde.serialize_node_into(proto, node)
        _put_metadata(proto, {**_layouts(pm, node), **_padding(pm, node)})
        if node in on_host:
            _put_metadata(proto, {LAYER: HOST})
        graph.node.extend(_formed(proto, node, form))
        for value in node.outputs:
            if value not in outputs and value.name and value.type is not None:
                ir.serde.serialize_value_into(graph.value_info.add(), value)
        if "atoms" in node.meta:
            yield len(graph.node) - 1, node


def _is_foreign(
    node: ir.Node, functions: Collection[tuple[str, str, str]], dialect: Dialect
) -> bool:
    """Whether a node of our domain needs another form in a dialect.

    Raises:
        DialectError: It is in a body.
    """
    for body in bodies_of(node).values():
        for inner in body:
            if _is_foreign(inner, functions, dialect):
                raise DialectError(
                    f"node {inner.name!r} ({inner.op_type}): cannot be written in the dialect "
                    f"{dialect}: it is in a body of node {node.name!r}"
                )
    return node.domain == DOMAIN and node.op_identifier() not in functions


def _put_translated(
    graph: onnx.GraphProto, pm: PartitionedModel, node: ir.Node, dialect: Dialect, opset: int
) -> Iterator[int]:
    """Appends what a node is in a dialect; yields the positions of nodes that need its group."""
    mesh, group = pm.plan.mesh, tuple[int, ...]()
    if "atoms" in node.meta:
        key = node.meta["atoms"], node.meta.get("stages", ())
        group = global_group(mesh, pm.ranks.start, *key)
    made = translate(node, dialect, opset, group, mesh.size * pm.stages)
    graph.initializer.extend(made.constants)
    start = len(graph.node)
    for proto in made.nodes:
        _put_metadata(proto, dict(node.metadata_props))
        graph.node.append(proto)
    yield from (start + index for index in made.groups)
    result = node.outputs[0]
    if result.type is not None and result not in {item.local for item in pm.outputs}:
        ir.serde.serialize_value_into(graph.value_info.add(), result)


def _formed(proto: onnx.NodeProto, node: ir.Node, form: CudaForm) -> list[onnx.NodeProto]:
    """Returns the node in the graph's form, also in its bodies, with casts around it if needed."""
    for name, body in bodies_of(node).items():
        inner = _attribute(proto, name).g.node
        made = [_formed(p, n, form) for p, n in zip(inner, body, strict=True)]
        del inner[:]
        for nodes in made:
            inner.extend(nodes)
    if node in form.ours:
        put(proto, form.ours[node], form.opset)
    if node not in form.wide:
        return [proto]
    before, after = [], []
    for index in _narrow(node.inputs):
        wide = f"{proto.name}/wide.{index}"
        before.append(_cast(wide, proto.input[index], wide, WIDE))
        proto.input[index] = wide
    for index in _narrow(node.outputs):
        name, wide = proto.output[index], f"{proto.name}/wide:{index}"
        if name:
            after.append(_cast(wide, wide, name, int(node.outputs[index].dtype or WIDE)))
            proto.output[index] = wide
    return [*before, proto, *after]


def _narrow(values: Sequence[ir.Value | None]) -> list[int]:
    return [index for index, value in enumerate(values) if is_narrow(value)]


def _cast(name: str, x: str, y: str, to: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [x], [y], name=name, to=to)


def _given_to_host(pm: PartitionedModel) -> set[ir.Value]:
    """Returns the values that begin on the host: sizes, coordinates, counters, small constants."""
    builder = pm.builder
    prefixes = (SYMBOL_PREFIX, COORD_PREFIX, *COUNTER_INPUTS, *BACKGROUND_INPUTS)
    given = {
        v
        for name, v in builder.system_inputs.items()
        if name.removeprefix(SECOND).startswith(prefixes)
    }
    constants = [*builder.initializers, *(p.local for p in pm.parameters if not p.fed)]
    return given | {value for value in constants if is_small(value)}


def _layouts(pm: PartitionedModel, node: ir.Node) -> dict[str, str]:
    """Returns the layouts of a node of the undivided model, for people."""
    plan = pm.plan.nodes.get(node.name or "")
    if plan is None or node.domain == DOMAIN:
        return {}
    mesh = pm.plan.mesh
    texts = {
        "onnxpar.in_layouts": " ".join(s.describe(mesh) if s else "-" for s in plan.inputs),
        "onnxpar.out_layouts": " ".join(s.describe(mesh) for s in plan.outputs),
    }
    if plan.reason:
        texts["onnxpar.replicated"] = plan.reason
    return texts


def _padding(pm: PartitionedModel, node: ir.Node) -> dict[str, str]:
    """Returns the mark of a node that sets padding which other values of symbols may not need."""
    component, operand = node.meta.get(PADDING), node.meta.get(PADDED)
    if component is None or operand is None or isinstance(component.size, int):
        return {}
    divisor = pm.plan.mesh.count(component.atoms)
    return {padding_mark.KEY: str(PaddingMark(operand, dim_str(component.size), divisor))}


def _put_value(proto: onnx.ValueInfoProto, item: GraphValue, mesh: Mesh) -> None:
    ir.serde.serialize_value_into(proto, item.local)
    proto.name = item.name
    _put_metadata(
        proto,
        {
            "onnxpar.layout": item.sharding.describe(mesh),
            "onnxpar.global_shape": str(list(item.sharding.shape)),
        },
    )


def _says_a_size(parameter: Parameter) -> bool:
    """Whether onnxruntime may read it for shape inference; it cannot read a weight file then."""
    content = parameter.source.const_value
    if content is None or content.size > _SHAPE_SIZE:
        return False
    if content.dtype == ir.DataType.FLOAT:
        return len(content.shape) == 1 and content.size <= _SCALES
    return content.dtype in (ir.DataType.INT64, ir.DataType.INT32)


def _put_parameter(
    proto: onnx.TensorProto, parameter: Parameter, places: WeightLayout, mesh: Mesh
) -> None:
    source = parameter.source
    if parameter.name not in places.shards:
        # It holds text, for which ONNX allows no external data.
        if source.const_value is None or parameter.sharding.split_atoms:
            raise DirectoryError(f"parameter {parameter.name!r} is not in the weight files")
        ir.serde.serialize_tensor_into(proto, source.const_value)
        proto.name = parameter.local.name or parameter.name
        return
    shard = places.shards[parameter.name][0]
    proto.name = parameter.local.name or parameter.name
    proto.data_type = int(source.dtype or ir.DataType.UNDEFINED)
    proto.dims.extend(shard.shape)
    if shard.length and not _says_a_size(parameter):
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key in ("location", "offset", "length"):
            proto.external_data.add(key=key)
    else:
        proto.raw_data = b""
    _put_metadata(
        proto,
        {
            "onnxpar.layout": parameter.sharding.describe(mesh),
            "onnxpar.global_shape": str(list(parameter.sharding.shape)),
        },
    )


def _put_metadata(
    proto: onnx.ModelProto | onnx.NodeProto | onnx.ValueInfoProto | onnx.TensorProto,
    texts: dict[str, str],
) -> None:
    present = {entry.key: entry for entry in proto.metadata_props}
    for key, text in texts.items():
        if key in present:
            present[key].value = text
        else:
            proto.metadata_props.add(key=key, value=text)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    found: onnx.AttributeProto | None = next((a for a in node.attribute if a.name == name), None)
    if found is None:
        found = node.attribute.add(name=name)
    return found


def _put_attribute(node: onnx.NodeProto, name: str, value: int | Sequence[int]) -> None:
    _attribute(node, name).CopyFrom(onnx.helper.make_attribute(name, value))


def _called_functions(pm: PartitionedModel, form: CudaForm) -> list[ir.Function]:
    """Returns the functions that the program calls, directly or through others.

    They are the model's own, and those of operators that onnxpar inserted.
    """
    functions = dict(pm.source.functions)
    for node in every_node(pm.builder.nodes):
        definition = pm.registry.of(node)
        made = None if definition is None else definition.function
        if made is not None and node.op_identifier() not in functions:
            functions[node.op_identifier()] = made.made(form.opset)
    found: dict[tuple[str, str, str], ir.Function] = {}
    waiting = list(pm.builder.nodes)
    while waiting:
        node = waiting.pop()
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                waiting.extend(attribute.as_graph())
        identifier = node.op_identifier()
        if identifier in functions and identifier not in found:
            found[identifier] = functions[identifier]
            waiting.extend(functions[identifier])
    stand = {function.name: function for function in form.ours.values()}
    return [*found.values(), *(stand[name].made(form.opset) for name in sorted(stand))]
