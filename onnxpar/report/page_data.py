"""What the report page shows, as plain data.

Begins with `page_data`; `onnxpar.report.write_page` makes a page of it. The tables of
`onnxpar.report.tables` hold what occurs often, and everything else refers to them by place.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxpar.core.errors import SymbolError
from onnxpar.core.machine import Machine
from onnxpar.core.symbols import Symbol
from onnxpar.core.version import __version__
from onnxpar.emit.manifest import dtype_named
from onnxpar.report.fold_layers import (
    FoldedNodes,
    common_name,
    fold_nodes,
    fold_rows,
    without_sizes,
)
from onnxpar.report.inspect_data import is_sharded
from onnxpar.report.rank_programs import rank_programs
from onnxpar.report.read_directory import read_programs
from onnxpar.report.size_grid import size_grid
from onnxpar.report.stage_data import bytes_of
from onnxpar.report.tables import Tables

Json = dict[str, Any]
Played = Callable[[str, Sequence[Mapping[str, float]]], Json]
"""Plays a step of a pipeline, as `onnxpar.api.runtime.pipeline_times`."""
UPDATE = "optimizer_model"
"""The program that updates the parameters; in a pipeline, its name and the number of a stage."""


def page_data(directories: Sequence[Json]) -> Json:
    """Returns the data of a page about one directory, or about two to compare.

    Args:
        directories: The data of each, as `directory_page` returns it.
    """
    return {"version": __version__, "directories": list(directories)}


def directory_page(
    directory: Path,
    sizes: Mapping[str, int],
    machine: Machine,
    played: Played | None = None,
    run_sizes: Mapping[str, int] | None = None,
) -> Json:
    """Returns the part of a page about one directory.

    Args:
        directory: The directory.
        sizes: The sizes of symbols that the page shows first.
        machine: The machine whose times are predicted.
        played: Plays a step of the directory's pipeline; without it, the page has none.
        run_sizes: The sizes of other symbols in a run, where they are admissible;
            `Symbol.typical` for the rest.

    Raises:
        DirectoryError: It has no report, a graph in it cannot be read, or a size is not admissible.
    """
    manifest, programs = read_programs(directory)
    # Nodes that only compute sizes come last, so that layers are without gaps.
    for program in programs.values():
        program["nodes"] = [node for part in without_sizes(program["nodes"]) for node in part]
    report = manifest["report"]
    symbols = {name: Symbol.parse(text) for name, text in report["symbols"].items()}
    for name, size in sizes.items():
        if name in symbols:
            symbols[name].check(name, size)
    sizes = {**_admitted(run_sizes or {}, symbols), **sizes}
    tables, grid = Tables(symbols), size_grid(symbols, sizes)
    data = {
        "name": directory.name or str(directory),
        "generator": manifest["generator"],
        "model": manifest["model"],
        "mesh": {"axes": list(report["mesh"]["axes"].items()), "atoms": report["mesh"]["atoms"]},
        "devices": report["devices"],
        "stages": report["stages"],
        "micro_batches": (manifest.get("pipeline") or {"micro_batches": 1})["micro_batches"],
        "files": {
            "count": len(manifest["files"]),
            "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        },
        "symbols": [_symbol(name, symbol, sizes) for name, symbol in symbols.items()],
        "parameters": _parameters(manifest),
        "machine": machine.name,
        "grid": grid.data(),
        "ranks": rank_programs(directory, manifest, programs, tables, machine, grid),
        "programs": [_program(name, program, tables) for name, program in programs.items()],
        "step": [n for n in programs if n == report["program"] or n.split(".")[0] == UPDATE],
    }
    if played is not None and report["stages"] > 1:
        data["pipeline"] = _pipeline(data, tables, len(grid.points), played)
    return data | tables.contents()


def _admitted(sizes: Mapping[str, int], symbols: Mapping[str, Symbol]) -> dict[str, int]:
    """Returns the sizes that their symbols admit."""
    found = {}
    for name in sizes.keys() & symbols.keys():
        with suppress(SymbolError):
            symbols[name].check(name, sizes[name])
            found[name] = sizes[name]
    return found


def _pipeline(data: Json, tables: Tables, points: int, played: Played) -> Json | None:
    """Returns a step of a pipeline; None if the graphs of no rank are there."""
    first = data["programs"][0]["name"]
    if not any(part["of"] == first for part in data["ranks"]):
        return None
    ends = [
        {part["name"]: tables.at(part["end"], point) for part in data["ranks"]}
        for point in range(points)
    ]
    found = played(first, ends)
    ranks = [
        [[*action[:3], *map(tables.time, action[3:])] for action in actions]
        for actions in found["ranks"]
    ]
    return found | {"ranks": ranks, "end": tables.time(found["end"])}


def _symbol(name: str, symbol: Symbol, sizes: Mapping[str, int]) -> Json:
    facts = symbol.facts
    return {
        "name": name,
        "constraint": str(symbol) or "any size",
        "least": facts.min,
        "most": facts.max,
        "step": max(facts.divisor, 1),
        "value": sizes.get(name, symbol.typical()),
    }


def _parameters(manifest: Json) -> list[Json]:
    """Returns each parameter, with the bytes that a device holds and the devices that hold each.

    Those that differ only in the numbers of their names are one entry, with their `count`.
    """
    layouts = manifest["strategy"].get("parameters", {})
    found = []
    for name, entry in manifest["parameters"].items():
        dtype = dtype_named(entry["dtype"])
        shards = entry["shards"]
        found.append(
            {
                "name": name,
                "dtype": entry["dtype"],
                "shape": entry["shape"],
                "layout": layouts.get(name, {}).get("text", ""),
                "shards": len(shards),
                "copies": max((len(shard["ranks"]) for shard in shards), default=0),
                "local": max((bytes_of(dtype, s["local_shape"]) for s in shards), default=0),
            }
        )
    groups = fold_rows(found, lambda row: [row["name"]], lambda row: str({**row, "name": ""}))
    return [
        {**group[0], "name": common_name([row["name"] for row in group]), "count": len(group)}
        for group in groups
    ]


def _program(name: str, program: Json, tables: Tables) -> Json:
    nodes, sizes = without_sizes(program["nodes"])
    return {
        "name": name,
        "nodes": [_node(node, program["layouts"], tables) for node in program["nodes"]],
        "blocks": [_block(block, nodes) for block in fold_nodes(nodes)]
        + [[len(nodes), len(sizes), 1, []]] * bool(sizes),
        "sizes": len(sizes),
        "collectives": [_collective(c, tables) for c in program["collectives"]],
        "conflicts": [{**c, "bytes": tables.size(c["bytes"])} for c in program["conflicts"]],
        "replicated": program["replicated"],
        "states": program["states"],
        "supplied": program["supplied"],
        "totals": {**program["totals"], "bytes": tables.size(program["totals"]["bytes"])},
        "stage_totals": [{**s, "bytes": tables.size(s["bytes"])} for s in program["stage_totals"]],
        "transfers": [
            {**t, "bytes": None if t["bytes"] is None else tables.size(t["bytes"])}
            for t in program["transfers"]
        ],
    }


def _block(block: FoldedNodes, nodes: Sequence[Json]) -> list[Any]:
    """Returns first node, number of nodes of a layer, layers, and the layers' common names."""
    alike = range(block.size if block.count > 1 else 0)
    names = [common_name([nodes[i]["name"] for i in block.places(place)]) for place in alike]
    return [block.start, block.size, block.count, names]


def _node(node: Json, drawn: Mapping[str, Any], tables: Tables) -> Json:
    outputs = []
    for output in node["outputs"]:
        found = _operand(output, drawn, tables)
        if "resharded" in output:
            found.append(_operand(output["resharded"], drawn, tables))
        outputs.append(found)
    return {
        "name": node["name"],
        "op": tables.text(node["op_type"]),
        "stage": node["stage"],
        "pinned": int(node["pinned"]),
        "sharded": int(is_sharded(node)),
        "rule": tables.text(node["rule"]),
        "reason": tables.text(node["reason"]),
        "inputs": [_operand(item, drawn, tables) for item in node["inputs"]],
        "outputs": outputs,
    }


def _operand(item: Json, drawn: Mapping[str, Any], tables: Tables) -> list[Any]:
    """Returns name, shape, local shape and layout of an operand, by their places."""
    return [
        tables.text(item["name"]),
        tables.shape(item["shape"]),
        tables.shape(item["local_shape"]),
        tables.layout(item, drawn),
    ]


def _collective(item: Json, tables: Tables) -> Json:
    groups = item["groups"]
    return {
        "op": item["op"],
        "node": tables.text(item["node"]),
        "value": tables.text(item["value"]),
        "over": item["over"],
        "groups": len(groups),
        "size": len(groups[0]) if groups else 0,
        "bytes": tables.size(item["bytes"]),
        "reason": tables.text(item["reason"]),
        "before": item["before"],
        "after": item["after"],
        "behind": item["behind"],
    }
