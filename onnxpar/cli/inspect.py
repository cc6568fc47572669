"""`onnxpar inspect`: shows how a model was sharded, or how it can be."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onnxpar.api.shard_model import analyse
from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.shard import (
    count,
    describe_device,
    describe_growth,
    describe_mesh,
    describe_nodes,
    describe_sent,
)
from onnxpar.core.errors import DirectoryError
from onnxpar.frontend.load import load
from onnxpar.report.device_placement import device_data
from onnxpar.report.inspect_data import model_data
from onnxpar.report.read_directory import graphs_of, read_report
from onnxpar_format.options import Option

Json = dict[str, Any]
WIDTH = 240
"""Columns of a table that is written to a file or a pipe."""


@takes_options
def command(
    target: Annotated[
        Path,
        typer.Argument(metavar="DIR|MODEL", help="Output of `onnxpar shard`, or an ONNX model."),
    ],
    rank: Annotated[
        int | None, Option("Show only the collective groups of this rank.", "R", minimum=0)
    ] = None,
    program: Annotated[
        str | None,
        Option("Show the nodes of this program. Default: model or training_model.", "NAME"),
    ] = None,
    device: Annotated[
        str | None,
        Option("Show which nodes onnxruntime would run on the CPU instead of this device.", "cuda"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a model was sharded, or how it can be sharded."""
    if device not in (None, "cuda"):
        raise DirectoryError(f"--device: expected cuda, got {device!r}")
    if not target.exists():
        raise DirectoryError(f"{target}: no such directory or model")
    if target.is_dir():
        data = read_report(target, rank, program)
    elif program is not None:
        raise DirectoryError(f"--program {program}: {target} is a model, which has no programs")
    else:
        analysed = analyse(load(target), {})
        data = model_data(analysed)
    if device is not None:
        programs = graphs_of(target) if target.is_dir() else {target.name: analysed.model}
        data["device"] = device_data(programs)
    if as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if device is not None:
        show_device(data["device"], console)
    elif target.is_dir():
        show_directory(data, console)
    else:
        show_model(data, console)


def show_directory(report: Json, console: Console) -> None:
    """Prints the report of a directory as tables."""
    console.print(escape(f"{report['devices']} devices{describe_mesh(report)}"))
    for name, constraint in report["symbols"].items():
        console.print(escape(f"symbol {name}: {constraint or 'any size'}"))
    if "training" in report:
        _show_training(report["training"], console)
        _show_programs(report["programs"], console)
        console.print(escape(f"program {report['program']}:"))
    _show_nodes(report["nodes"], console)
    collectives = _table("collective", "value", "over", "groups", "bytes sent", "for")
    calls = Counter(item["node"] for item in report["collectives"])
    for item in report["collectives"]:
        others = calls[item["node"]] - 1
        groups = " ".join("{" + ",".join(map(str, group)) + "}" for group in item["groups"])
        _row(
            collectives, item["op"], item["value"], item["over"], groups, str(item["bytes"]),
            item["reason"]
            + (f"; in one call with {others} more" if others else "")
            + (f"; in the background of {item['behind']}" if item["behind"] else ""),
        )  # fmt: skip
    if report["collectives"]:
        console.print(collectives)
    conflicts = _table("conflict", "from", "to", "reader", "by", "bytes sent", "why")
    for item in report["conflicts"]:
        reader = f"{item['node']} operand {item['operand']}" if item["node"] else "the output"
        steps = " ".join(item["steps"])
        _row(
            conflicts, item["value"], item["from"], item["to"], reader, steps, str(item["bytes"]),
            item["reason"],
        )  # fmt: skip
    if report["conflicts"]:
        console.print(conflicts)
    states = _table("state", "from output", "layout", "")
    for item in report["states"]:
        _row(states, item["input"], item["output"], item["sharding"], describe_growth(item))
    if report["states"]:
        console.print(states)
    supplied = _table("input", "from program", "its value", "layout")
    for item in report["supplied"]:
        _row(supplied, item["input"], item["source"], item["value"], item["sharding"])
    if report["supplied"]:
        console.print(supplied)
    _show_stages(report, console)
    replicated = _table("replicated node", "operator", "reason")
    for item in report["replicated"]:
        _row(replicated, item["name"], item["op_type"], item["reason"])
    if report["replicated"]:
        console.print(replicated)
    totals = report["totals"]
    text = (
        f"{count(totals['nodes'], 'node')}: {describe_nodes(report)}; "
        f"{count(totals['collectives'], 'collective')}, {describe_sent(report)}"
    )
    if totals["parameters"]:
        text += (
            f"; {count(totals['parameters'], 'parameter')}, "
            f"{totals['parameter_bytes_per_device']:,} "
            f"of {totals['parameter_bytes']:,} bytes on {describe_device(report)}"
        )
    console.print(escape(text))


def _show_stages(report: Json, console: Console) -> None:
    """Prints the contents of the stages of a pipeline, and the transfers between them."""
    if not report["stage_totals"]:
        return
    stages = _table(
        "stage", "ranks", "nodes", "parameters", "bytes on each device", "collectives",
        "bytes sent",
    )  # fmt: skip
    for item in report["stage_totals"]:
        ranks = ",".join(map(str, item["ranks"]))
        size = f"{item['parameter_bytes_per_device']:,}"
        counts = (str(item[key]) for key in ("nodes", "parameters"))
        sent = (str(item[key]) for key in ("collectives", "bytes"))
        _row(stages, str(item["stage"]), ranks, *counts, size, *sent)
    console.print(stages)
    moved = _table("value", "from stage", "to stage", "bytes per rank and micro-batch")
    chunks = any(item["from_chunk"] or item["to_chunk"] for item in report["transfers"])
    for item in report["transfers"]:
        size = "unknown" if item["bytes"] is None else str(item["bytes"])
        ends = (_stage_and_chunk(item, end, chunks) for end in ("from", "to"))
        _row(moved, item["value"], *ends, size)
    console.print(moved)


def _stage_and_chunk(item: Json, end: str, chunks: bool) -> str:
    """Returns one end of a transfer: its stage, and its chunk if stages have several."""
    return f"{item[end]}, chunk {item[f'{end}_chunk']}" if chunks else str(item[end])


def _show_nodes(found: Sequence[Json], console: Console) -> None:
    nodes = _table("node", "operator", "operand", "shape", "local shape", "shards", "layout")
    for node in found:
        rows = [("", item) for item in node["inputs"] if item["name"]]
        rows += [("-> ", item) for item in node["outputs"]]
        rows += [("after: ", o["resharded"]) for o in node["outputs"] if "resharded" in o]
        title = [node["name"] + (" *" if node["pinned"] else ""), node["op_type"]]
        for arrow, item in rows:
            _row(nodes, *title, arrow + item["name"], *_layout(item))
            title = ["", ""]
    console.print(nodes)
    if any(node["pinned"] for node in found):
        console.print("* given by the strategy")


def _show_training(training: Json, console: Console) -> None:
    """Prints every tensor of the model, and why it is not trained if it is not."""
    tensors = [t for t in training["tensors"] if t["parameter"]]
    trained = [t for t in tensors if t["trained"]]
    elements, of = (sum(t["elements"] for t in group) for group in (trained, tensors))
    text = (
        f"training {elements:,} of {of:,} parameters, in {len(trained)} of {len(tensors)} "
        f"tensors, with {training['optimizer']['kind']} on {training['loss']['kind']}"
    )
    if training["loss"]["labels"] is not None:
        text += f"; the labels are the input {training['loss']['labels']}"
    console.print(escape(text))
    for notice in training["notices"]:
        console.print(escape(f"notice: {notice}"))
    table = _table("tensor", "elements", "trained", "read by", "rule")
    for t in training["tensors"]:
        why = "yes" if t["trained"] else f"no: {t['reason']}"
        readers = ", ".join(t["used_by"])
        shared = t["trained"] and len(t["used_by"]) > 1
        readers += " (shared)" * shared
        _row(table, t["name"], f"{t['elements']:,}", why, readers, t["rule"])
    console.print(table)


def _show_programs(programs: Mapping[str, Json], console: Console) -> None:
    """Prints a line for each program."""
    table = _table("program", "nodes", "sharded", "collectives", "bytes that a device sends")
    for name, report in programs.items():
        totals = report["totals"]
        kinds = ", ".join(f"{n} {op}" for op, n in totals["collectives_by_op"].items())
        if totals["calls"] < totals["collectives"]:
            kinds += f" in {count(totals['calls'], 'call')}"
        numbers = [str(totals[key]) for key in ("nodes", "sharded")]
        _row(table, name, *numbers, kinds or "none", str(totals["bytes"]))
    console.print(table)


def show_model(data: Json, console: Console) -> None:
    """Prints what a strategy can address in a model, as tables."""
    values = _table("", "name", "type", "shape")
    for kind in ("inputs", "outputs", "parameters"):
        for item in data[kind]:
            _row(values, kind[:-1], item["name"], item["dtype"] or "?", _shape(item["shape"]))
    console.print(values)
    console.print(escape(f"symbols: {', '.join(data['symbols']) or 'none'}"))
    nodes = _table("node", "operator", "operands with an entry", "rule", "factors")
    for node in data["nodes"]:
        factors = ", ".join(
            f"{f['name']}={f['size']}" + ("" if f["kind"] == "parallel" else f" {f['kind']}")
            for f in node["factors"]
        )
        rule = node["reason"] or node["rule"].partition(";")[0]
        _row(nodes, node["name"], node["op_type"], ", ".join(node["operands"]), rule, factors)
    console.print(nodes)
    console.print(
        "A strategy has one list for each of these operands, with one entry for each dim: a "
        "number of shards or a mesh axis. Dims with the same factor are sharded alike. Sharding a "
        "reduction factor (sum) makes the result a partial sum."
    )


def show_device(data: Json, console: Console) -> None:
    """Prints which nodes would run on the CPU instead of a device."""
    fallbacks = _table("graph", "node", "operator", "types", "why it runs on the CPU")
    for name, program in data["programs"].items():
        for item in program["fallbacks"]:
            operator = ":".join(filter(None, (item["domain"], item["op_type"])))
            types = ", ".join(t or "-" for t in item["types"])
            _row(fallbacks, name, item["name"], operator, types, item["reason"])
    if fallbacks.rows:
        console.print(fallbacks)
    for name, program in data["programs"].items():
        text = (
            f"{name}: {len(program['fallbacks'])} of {count(program['nodes'], 'node')} would fall "
            f"back to the CPU; {len(program['sizes'])} more compute sizes there on purpose"
        )
        console.print(escape(text))
    console.print(f"kernels: CUDA provider of onnxruntime {data['onnxruntime']}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(escape, cells))


def _layout(item: Json) -> tuple[str, str, str, str]:
    layout = item["sharding"] or "in its current layout"
    if item["partial"]:
        layout += f", partial {item['partial']['reduction']} over {item['partial']['over']}"
    shards = "" if item["strategy"] is None else ",".join(map(str, item["strategy"]))
    return _shape(item["shape"]), _shape(item["local_shape"]), shards, layout


def _shape(shape: "list[int | str] | None") -> str:
    return "?" if shape is None else f"({', '.join(map(str, shape))})"
