"""`onnxpar inspect`: how a model was divided, or how it can be."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnxpar.analysis.report import model_data
from onnxpar.artifacts.directory import MANIFEST
from onnxpar.cli.options import AsJson
from onnxpar.cli.shard import count, describe_nodes
from onnxpar.errors import ArtifactError
from onnxpar.passes.load import load
from onnxpar.pipeline import analyse

Json = dict[str, Any]
WIDTH = 240
"""Columns of a table that goes to a file or a pipe."""


def command(
    target: Annotated[
        Path,
        typer.Argument(metavar="DIR|MODEL", help="What `onnxpar shard` wrote, or an ONNX model."),
    ],
    rank: Annotated[
        int | None, typer.Option(min=0, help="Of collectives, show the groups of this rank only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a model was divided, or what of a model can be."""
    if target.is_dir():
        data = read_report(target, rank)
    else:
        analysed = analyse(load(target), {})
        data = model_data(analysed.model, analysed.env, analysed.rules)
    if as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if target.is_dir():
        show_divided(data, console)
    else:
        show_model(data, console)


def read_report(directory: Path, rank: int | None = None) -> Json:
    """Returns the report of an artifact directory, with the groups of one rank only if asked.

    Raises:
        ArtifactError: No manifest, one without a report, or no such rank.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{directory}: not an artifact directory, no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: not readable: {error}") from None
    report = manifest.get("report") if isinstance(manifest, dict) else None
    keys = ("mesh", "devices", "symbols", "nodes", "collectives", "replicated", "totals")
    if not isinstance(report, dict) or any(key not in report for key in keys):
        raise ArtifactError(f"{path}: expected a report of how the model was divided, got none")
    if rank is None:
        return report
    if rank >= report["devices"]:
        raise ArtifactError(
            f"{directory}: expected a rank from 0 to {report['devices'] - 1}, got {rank}"
        )
    collectives = [
        {**item, "groups": [group for group in item["groups"] if rank in group]}
        for item in report["collectives"]
    ]
    return {**report, "collectives": collectives}


def show_divided(report: Json, console: Console) -> None:
    """Prints the report of an artifact directory as tables."""
    axes = " x ".join(f"{name}={size}" for name, size in report["mesh"]["axes"].items())
    console.print(escape(f"{report['devices']} devices{', mesh ' + axes if axes else ''}"))
    for name, constraint in report["symbols"].items():
        console.print(escape(f"symbol {name}: {constraint or 'any size'}"))
    nodes = _table("node", "operator", "operand", "shape", "on a device", "pieces", "layout")
    for node in report["nodes"]:
        rows = [("", item) for item in node["inputs"] if item["name"]]
        rows += [("-> ", item) for item in node["outputs"]]
        rows += [("after: ", o["resharded"]) for o in node["outputs"] if "resharded" in o]
        title = [node["name"] + (" *" if node["pinned"] else ""), node["op_type"]]
        for arrow, item in rows:
            _row(nodes, *title, arrow + item["name"], *_layout(item))
            title = ["", ""]
    console.print(nodes)
    if any(node["pinned"] for node in report["nodes"]):
        console.print("* strategy given by the user")
    collectives = _table("collective", "value", "over", "groups", "bytes sent", "for")
    for item in report["collectives"]:
        groups = " ".join("{" + ",".join(map(str, group)) + "}" for group in item["groups"])
        _row(
            collectives, item["op"], item["value"], item["over"], groups, str(item["bytes"]),
            item["reason"],
        )  # fmt: skip
    if report["collectives"]:
        console.print(collectives)
    replicated = _table("replicated node", "operator", "reason")
    for item in report["replicated"]:
        _row(replicated, item["name"], item["op_type"], item["reason"])
    if report["replicated"]:
        console.print(replicated)
    totals = report["totals"]
    console.print(
        escape(
            f"{count(totals['nodes'], 'node')}: {describe_nodes(report)}; "
            f"{count(totals['collectives'], 'collective')}, a device sends {totals['bytes']} "
            f"bytes; {count(totals['parameters'], 'parameter')}, "
            f"{totals['parameter_bytes_per_device']:,} "
            f"of {totals['parameter_bytes']:,} bytes on each device"
        )
    )


def show_model(data: Json, console: Console) -> None:
    """Prints what of a model can be divided as tables."""
    values = _table("", "name", "type", "shape")
    for kind in ("inputs", "outputs", "parameters"):
        for item in data[kind]:
            _row(values, kind[:-1], item["name"], item["dtype"] or "?", _shape(item["shape"]))
    console.print(values)
    console.print(escape(f"symbols: {', '.join(data['symbols']) or 'none'}"))
    nodes = _table("node", "operator", "an entry for each of", "rule", "factors")
    for node in data["nodes"]:
        factors = ", ".join(
            f"{f['name']}={f['size']}" + ("" if f["kind"] == "parallel" else f" {f['kind']}")
            for f in node["factors"]
        )
        rule = node["reason"] or node["rule"].partition(";")[0]
        _row(nodes, node["name"], node["op_type"], ", ".join(node["operands"]), rule, factors)
    console.print(nodes)
    console.print(
        "A strategy has one list for each operand, one entry a dim: a number of pieces or a mesh "
        "axis. Dims of one factor are cut alike; a reduced factor (sum) leaves a pending sum."
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(escape, cells))


def _layout(item: Json) -> tuple[str, str, str, str]:
    layout = item["sharding"] or "as it lies"
    if item["partial"]:
        layout += f", pending {item['partial']['reduction']} over {item['partial']['over']}"
    pieces = "" if item["strategy"] is None else ",".join(map(str, item["strategy"]))
    return _shape(item["shape"]), _shape(item["local_shape"]), pieces, layout


def _shape(shape: "list[int | str] | None") -> str:
    return "?" if shape is None else f"({', '.join(map(str, shape))})"
