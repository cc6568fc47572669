"""Repeated layers of a report are found, whatever their names, and differences are kept."""

import copy
from typing import Any

import pytest

from onnxpar.report.fold_layers import (
    FoldedNodes,
    common_name,
    fold_alike,
    fold_nodes,
    fold_rows,
    without_sizes,
)

Json = dict[str, Any]
LAYER = ("MatMul", "Add", "Relu", "MatMul", "Add", "Mul", "Softmax")


def operand(name: str, sharding: str = "[dp, ~]") -> Json:
    return {
        "name": name, "shape": ["batch", 8], "local_shape": ["batch//2", 8], "sharding": sharding,
        "partial": None,
    }  # fmt: skip


def network(layers: int) -> list[Json]:
    """A node, equal layers that also read what they begin with, and a node."""
    found, value = [], "x"

    def node(name: str, op_type: str, *reads: str) -> str:
        found.append(
            {
                "name": name,
                "op_type": op_type,
                "stage": 0,
                "pinned": False,
                "inputs": [operand(r) for r in reads],
                "outputs": [operand(f"{name}_out")],
            }
        )
        return f"{name}_out"

    value = node("embed", "Gather", value)
    for i in range(layers):
        first = value
        for place, op_type in enumerate(LAYER):
            value = node(f"/h{i}/{op_type}_{place}", op_type, value, first)
    node("head", "MatMul", value)
    return found


def test_layers_are_one_block() -> None:
    nodes = network(12)
    blocks = fold_nodes(nodes)
    assert blocks == [FoldedNodes(0, 1, 1), FoldedNodes(1, 7, 12), FoldedNodes(85, 1, 1)]
    names = [nodes[i]["name"] for i in blocks[1].places(2)]
    assert common_name(names) == "/h*/Relu_2" and len(names) == 12


def test_a_layer_with_another_layout_is_not_like_the_others() -> None:
    nodes = network(9)
    nodes[1 + 4 * 7 + 3]["outputs"][0] = operand("/h4/MatMul_3_out", "[dp, tp]")
    sizes = [(b.start, b.size, b.count) for b in fold_nodes(nodes)]
    assert sizes == [(0, 1, 1), (1, 7, 4), (29, 7, 1), (36, 7, 4), (64, 1, 1)]
    resharded = network(9)
    output = resharded[1 + 8 * 7]["outputs"][0]
    output["resharded"] = copy.copy(operand(output["name"], "[~, ~]"))
    assert fold_nodes(resharded)[1] == FoldedNodes(1, 7, 8)


def test_every_node_is_in_one_block() -> None:
    for layers in (0, 1, 2, 5):
        nodes = network(layers)
        places = [
            i for block in fold_nodes(nodes) for p in range(block.size) for i in block.places(p)
        ]
        assert sorted(places) == list(range(len(nodes)))
    assert fold_nodes([]) == []


def test_a_layer_with_more_nodes_is_shown_with_the_others() -> None:
    nodes = network(9)
    # The first layer makes a mask that all layers read; its name has the number of the layer.
    mask = copy.deepcopy(nodes[3])
    mask |= {"name": "/h0/mask/Where", "op_type": "Where", "outputs": [operand("mask")]}
    nodes.insert(4, mask)
    assert fold_nodes(nodes)[1].count < 9
    rows = fold_alike(nodes)
    assert [len(row) for row in rows] == [1, 9, 9, 9, 1, 9, 9, 9, 9, 1]
    assert [common_name([n["name"] for n in row]) for row in rows[3:6]] == [
        "/h*/Relu_2", "/h0/mask/Where", "/h*/MatMul_3"
    ]  # fmt: skip
    assert sorted(n["name"] for row in rows for n in row) == sorted(n["name"] for n in nodes)


def test_a_node_with_another_layout_stays_apart() -> None:
    nodes = network(9)
    nodes[1 + 4 * 7 + 3]["outputs"][0] = operand("/h4/MatMul_3_out", "[dp, tp]")
    rows = [row for row in fold_alike(nodes) if row[0]["name"].endswith("MatMul_3")]
    assert sorted(map(len, rows)) == [1, 8]
    assert [node["name"] for node in min(rows, key=len)] == ["/h4/MatMul_3"]


def test_nodes_that_compute_sizes_are_apart() -> None:
    nodes = network(2)
    for node in nodes:
        node["computes_sizes"] = node["op_type"] == "Mul"
    others, sizes = without_sizes(nodes)
    assert [n["op_type"] for n in sizes] == ["Mul", "Mul"]
    assert [n for n in nodes if n["op_type"] != "Mul"] == others


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["/a/b"], "/a/b"),
        (["h1.w2", "h10.w2"], "h*.w2"),
        (["/q/MatMul", "/k/MatMul", "/v/MatMul"], "/*/MatMul"),
        (["x", "x_1"], "x*"),
        (["ab", "aab"], "a*b"),
        (["/h0/attn/Where_1", "/h1/attn/Where"], "/h*/attn/Where*"),
    ],
)
def test_a_name_for_several(names: list[str], pattern: str) -> None:
    assert common_name(names) == pattern


def test_rows_that_differ_in_numbers_are_grouped() -> None:
    rows = [("h0.w", 4), ("h1.w", 4), ("head", 4), ("h2.w", 8), ("h3.w", 4)]
    groups = fold_rows(rows, lambda r: [r[0]], lambda r: r[1])
    assert groups == [[rows[0], rows[1], rows[4]], [rows[2]], [rows[3]]]
