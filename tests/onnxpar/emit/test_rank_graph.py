"""Rank graphs: what they have in common, and how they differ."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxpar.core.errors import DirectoryError
from onnxpar.core.mesh import Mesh
from onnxpar.core.symbols import Symbol, SymbolTable
from onnxpar.emit import write
from onnxpar.emit.rank_graph import describe_rank, emit_rank, fill, template
from onnxpar.emit.weight_layout import layout
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.onnxpar.emit.small_models import BATCH, assemble, graph_input, sharding_of, two_layers

MESH = Mesh.of(dp=2, tp=4)


def collective(
    op: str, atoms: tuple[int, ...], mesh: Mesh = MESH, **more: object
) -> onnx.NodeProto:
    """The one collective of a graph, as rank 5 gets it."""
    builder = LocalBuilder(SymbolTable({"batch": Symbol()}), 21, mesh)
    x = graph_input("x", ir.DataType.FLOAT, sharding_of([(BATCH, [])], [(8, [])]), mesh)
    pairs = more.pop("pairs", ())
    y = builder.collective(
        op, x.local, atoms, shape=[BATCH, 8], moved=0, value="x", reason="", pairs=pairs, **more
    )
    pm = assemble(builder, [x], {"y": (y, sharding_of([(BATCH, [])], [(8, [])]))}, [])
    proto = fill(template(pm, layout([], mesh)), 5)
    return proto.graph.node[0]


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


@pytest.mark.parametrize(
    ("atoms", "group"),
    [
        ((0,), [1, 5]),
        ((1, 2), [4, 5, 6, 7]),
        ((2, 1), [4, 6, 5, 7]),
        ((0, 2), [0, 1, 4, 5]),
        ((), [5]),
    ],
)
def test_group_lists_ranks_first_atom_outermost(atoms: tuple[int, ...], group: list[int]) -> None:
    node = collective("AllGather", atoms, axis=1)
    assert attributes(node) == {"group": group, "axis": 1}
    assert node.domain == "onnxpar"


def test_permute_pairs_become_global_ranks() -> None:
    # Positions 0…3 of the group (4, 5, 6, 7): a shift by one.
    shift = [(0, 1), (1, 2), (2, 3)]
    node = collective("Permute", (1, 2), pairs=shift)
    assert attributes(node) == {"group": [4, 5, 6, 7], "pairs": [4, 5, 5, 6, 6, 7]}


def test_broadcast_root_becomes_a_global_rank() -> None:
    pm = two_layers(MESH)
    pm.builder.nodes[-1].meta["root"] = 2
    form = template(pm, layout(pm.parameters, MESH))
    roots = [attributes(fill(form, rank).graph.node[-1])["root"] for rank in range(8)]
    assert roots == [2, 2, 2, 2, 6, 6, 6, 6]


def test_ranks_differ_in_groups_weights_and_texts_only() -> None:
    pm = two_layers(MESH)
    form = template(pm, layout(pm.parameters, MESH))
    bare = []
    for rank in range(MESH.size):
        proto = onnx.ModelProto.FromString(fill(form, rank).SerializeToString())
        assert list(attributes(proto.graph.node[-1])["group"]) == list(MESH.group(rank, (1, 2)))
        proto.graph.node[-1].ClearField("attribute")
        proto.graph.ClearField("doc_string")
        for tensor in proto.graph.initializer:
            del tensor.external_data[:]
        del proto.metadata_props[:]
        bare.append(proto.SerializeToString(deterministic=True))
    assert len(set(bare)) == 1


def test_filling_one_template_twice_leaves_no_trace() -> None:
    form = template(two_layers(MESH), layout(two_layers(MESH).parameters, MESH))
    first = fill(form, 3).SerializeToString(deterministic=True)
    fill(form, 6)
    assert fill(form, 3).SerializeToString(deterministic=True) == first


def test_texts_for_people() -> None:
    proto = ir.to_proto(emit_rank(two_layers(MESH), 7))
    assert proto.graph.doc_string == "stage 0, rank 7 of 8, coordinates dp=1 tp=3"
    names = {node.name for node in proto.graph.node}
    assert names == {"/net/MatMul", "/net/Relu", "/net/MatMul.1", "/net/AllReduce.tp(y)"}
    reduce = {p.key: p.value for p in proto.graph.node[-1].metadata_props}
    assert reduce["input_names"] == "['X']"
    assert reduce["bytes"] == "8*batch"
    weight = {p.key: p.value for p in proto.graph.initializer[0].metadata_props}
    assert weight == {"onnxpar.layout": "[~, tp]", "onnxpar.global_shape": "[8, 16]"}


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh.of(), "stage 0, rank 0 of 1, coordinates none"),
        (Mesh((), (2, 3)), "stage 0, rank 0 of 6, coordinates 0/2 0/3"),
        (Mesh.of(dp=1, tp=2), "stage 0, rank 0 of 2, coordinates dp=0 tp=0"),
    ],
)
def test_place_of_a_rank(mesh: Mesh, text: str) -> None:
    assert describe_rank(mesh, 0) == text


def test_system_inputs_follow_the_models_own_and_unused_ones_are_left_out() -> None:
    builder = LocalBuilder(SymbolTable({"batch": Symbol(), "seq": Symbol()}), 21, MESH)
    x = graph_input("x", ir.DataType.INT64, sharding_of([(1, [])]), MESH)
    builder.coord(2)
    y = builder.op("Add", x.local, builder.coord(0), shape=[1])
    y = builder.op("Mul", y, builder.size(BATCH), shape=[1])
    pm = assemble(builder, [x], {"y": (y, sharding_of([(1, [])]))}, [])
    names = [value.name for value in emit_rank(pm, 0).graph.inputs]
    assert names == ["x", "onnxpar.coord.0", "onnxpar.symbol.batch"]


@pytest.mark.parametrize(("given", "written"), [(8, 11), (11, 11), (13, 13), (14, 13)])
def test_ir_version_is_one_that_onnxruntime_reads(given: int, written: int) -> None:
    builder = LocalBuilder(SymbolTable({}), 19, MESH)
    x = graph_input("x", ir.DataType.FLOAT, sharding_of([(8, [])]), MESH)
    y = builder.op("Relu", x.local, shape=[8])
    pm = assemble(builder, [x], {"y": (y, sharding_of([(8, [])]))}, [], ir_version=given)
    model = emit_rank(pm, 0)
    assert model.ir_version == written
    assert model.opset_imports == {"": 19, "onnxpar": 1}


def test_functions_that_are_called_come_along() -> None:
    def function(name: str, inner: str, domain: str) -> ir.Function:
        value = ir.Value(name="a")
        node = ir.Node(domain, inner, [value], num_outputs=1, name=inner)
        body = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 21, "own": 1})
        return ir.Function("own", name, "", graph=body, attributes=[])

    functions = [
        function("Outer", "Inner", "own"),
        function("Inner", "Relu", ""),
        function("Other", "Relu", ""),
    ]
    builder = LocalBuilder(SymbolTable({}), 21, MESH)
    x = graph_input("x", ir.DataType.FLOAT, sharding_of([(8, [])]), MESH)
    (y,) = builder.ops("Outer", [x.local], [(ir.DataType.FLOAT, [8])], domain="own")
    pm = assemble(builder, [x], {"y": (y, sharding_of([(8, [])]))}, [], functions=functions)
    assert {f.name for f in emit_rank(pm, 0).functions.values()} == {"Outer", "Inner"}


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(DirectoryError, match="from 0 to 7, got 8"):
        emit_rank(two_layers(MESH), 8)


def test_checker_passes_on_every_file(tmp_path: Path) -> None:
    pm: PartitionedModel = two_layers(MESH)
    write([pm], tmp_path / "out", model_name="net")
    files = sorted((tmp_path / "out").glob("*.onnx"))
    assert len(files) == MESH.size
    for path in files:
        onnx.checker.check_model(str(path), full_check=True)
