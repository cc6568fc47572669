"""How `onnxpar inspect` shows a model that has not been sharded: what a strategy can address."""

from collections.abc import Sequence
from typing import Any

from onnxpar.cli.directory_tables import NAME, NUMBER, TIMES, Wanted, note_sizes, shape_text
from onnxpar.cli.screen import Column, Content, Screen
from onnxpar.core.errors import DirectoryError
from onnxpar.report.fold_layers import (
    common_name,
    fold_alike,
    fold_rows,
    layers_data,
    matching_nodes,
    without_sizes,
)

Json = dict[str, Any]
_HELP = (
    "A strategy has one list for each of these operands, with one entry for each dim: a number of "
    "shards or a mesh axis. Dims with the same factor are sharded alike. Sharding a reduction "
    "factor (sum) makes the result a partial sum."
)


def show_model(data: Json, wanted: Wanted) -> None:
    """Prints what a strategy can address in a model.

    Raises:
        DirectoryError: A pattern matches no node, or collectives are asked for.
    """
    if wanted.collectives:
        raise DirectoryError("--collectives: expected the output of `onnxpar shard`, got a model")
    screen = Screen()
    if wanted.all:
        _values(data, screen)
    if wanted.layers:
        _layers(data["nodes"], screen)
    if wanted.all or wanted.nodes:
        _nodes(data["nodes"], wanted, screen)
        screen.note(_HELP)


def _values(data: Json, screen: Screen) -> None:
    """Prints how many parameters there are, and inputs, outputs and parameters."""
    screen.entry("nodes", f"{len(data['nodes']):,}")
    for name, constraint in data["symbols"].items():
        screen.entry("symbol", f"{name}: {constraint or 'any size'}")
    if not data["symbols"]:
        screen.entry("symbols", "none")
    for notice in data["notices"]:
        screen.entry("notice", notice)
    rows = []
    for kind in ("inputs", "outputs", "parameters"):
        groups = fold_rows(
            data[kind], lambda v: (v["name"],), lambda v: (v["dtype"], str(v["shape"]))
        )
        for alike in groups:
            times = str(len(alike)) if len(alike) > 1 else ""
            name = common_name([v["name"] for v in alike])
            shape = shape_text(alike[0]["shape"])
            rows.append((times, kind[:-1], name, alike[0]["dtype"] or "?", shape))
    columns = TIMES, Column(""), Column("name", NAME), Column("type"), Column("shape")
    screen.table(columns, rows)


def _nodes(nodes: Sequence[Json], wanted: Wanted, screen: Screen) -> None:
    """Prints the rules of the wanted nodes; of all that do more than compute sizes by default."""
    rows = []
    others, sizes = without_sizes(nodes)
    shown = nodes if wanted.nodes else others
    chosen = {n["name"] for n in matching_nodes(shown, wanted.nodes or ("*",))}
    for every in (*fold_alike(others), *fold_alike(sizes)):
        alike = [node for node in every if node["name"] in chosen]
        if not alike:
            continue
        node = alike[0]
        operands = zip(*(n["operands"] for n in alike), strict=True)
        factors = ", ".join(
            f"{f['name']}={f['size']}" + ("" if f["kind"] == "parallel" else f" {f['kind']}")
            for f in node["factors"]
        )
        times = str(len(alike)) if len(alike) > 1 else ""
        name = common_name([n["name"] for n in alike])
        entries = ", ".join(common_name(names) for names in operands)
        rule = node["reason"] or node["rule"].partition(";")[0]
        rows.append((times, name, node["op_type"], entries, rule, factors))
    columns = (
        TIMES, Column("node", Content.NODE), Column("operator", NAME, optional=True),
        Column("operands with an entry", optional=True), Column("rule"), Column("factors"),
    )  # fmt: skip
    screen.table(columns, rows)
    if not wanted.nodes:
        note_sizes(sizes, screen)


def _layers(nodes: Sequence[Json], screen: Screen) -> None:
    """Prints a row for each repeated layer, and for the nodes between them."""
    rows = [
        (
            f"{layer['count']}" if layer["count"] > 1 else "", layer["first"],
            layer["last"] if layer["nodes"] > 1 else "", f"{layer['nodes']:,}",
        )
        for layer in layers_data(nodes)
    ]  # fmt: skip
    columns = TIMES, Column("first node", NAME), Column("last node", NAME), Column("nodes", NUMBER)
    screen.table(columns, rows)
