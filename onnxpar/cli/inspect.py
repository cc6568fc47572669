"""`onnxpar inspect`: shows how a model was sharded, or how it can be."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxpar.api.shard_model import analyse
from onnxpar.cli.describe import count
from onnxpar.cli.directory_tables import Wanted, show_directory
from onnxpar.cli.model_tables import show_model
from onnxpar.cli.options import AsJson, takes_options
from onnxpar.cli.screen import Column, Content, Screen
from onnxpar.core.errors import DirectoryError
from onnxpar.frontend.load import load
from onnxpar.graph.validity import blamed_on_model
from onnxpar.report.device_placement import device_data
from onnxpar.report.fold_layers import layers_data, matching_nodes
from onnxpar.report.inspect_data import model_data
from onnxpar.report.machine_traffic import machine_traffic
from onnxpar.report.read_directory import blamed_on_report, graphs_of, read_report
from onnxpar_format.option import Option

Json = dict[str, Any]


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
        Option(
            "Show which nodes onnxruntime would run on the CPU instead of this device.",
            "cuda",
            values=("cuda",),
        ),
    ] = None,
    node: Annotated[
        Sequence[str],
        Option("Show every operand of these nodes; may be repeated.", "GLOB"),
    ] = (),
    layers: Annotated[bool, Option("Show only the layers.", flags=("--layers",))] = False,
    collectives: Annotated[
        bool, Option("Show only the collectives.", flags=("--collectives",))
    ] = False,
    ranks_per_machine: Annotated[
        int | None,
        Option("Show which bytes leave a machine, if each machine has K ranks.", "K", minimum=1),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a model was sharded, or how it can be sharded.

    Layers that repeat are shown once, with their number (×).
    """
    wanted = Wanted(tuple(node), layers, collectives)
    if device not in (None, "cuda"):
        raise DirectoryError(f"--device: expected cuda, got {device!r}")
    if not target.exists():
        raise DirectoryError(f"{target}: no such directory or model")
    if target.is_dir():
        with blamed_on_report(target):
            data = read_report(target, rank, program)
            if device is not None:
                data["device"] = device_data(graphs_of(target))
            if ranks_per_machine is not None:
                data["machines"] = machine_traffic(
                    data["collectives"], data["devices"], ranks_per_machine
                )
            _show(data, wanted, show_directory, as_json)
        return
    if ranks_per_machine is not None:
        raise DirectoryError(f"--ranks-per-machine: {target} is a model, which has no collectives")
    if program is not None:
        raise DirectoryError(f"--program {program}: {target} is a model, which has no programs")
    with blamed_on_model(target):
        analysed = analyse(load(target), {})
    data = model_data(analysed)
    if device is not None:
        data["device"] = device_data({target.name: analysed.model})
    _show(data, wanted, show_model, as_json)


def _show(data: Json, wanted: Wanted, show: Callable[[Json, Wanted], None], as_json: bool) -> None:
    if as_json:
        data["layers"] = layers_data(data["nodes"])
        if wanted.nodes:
            data["nodes"] = matching_nodes(data["nodes"], wanted.nodes)
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    elif "device" in data:
        show_device(data["device"])
    else:
        show(data, wanted)


def show_device(data: Json) -> None:
    """Prints which nodes would run on the CPU instead of a device."""
    screen = Screen()
    rows = []
    for name, program in data["programs"].items():
        for item in program["fallbacks"]:
            operator = ":".join(filter(None, (item["domain"], item["op_type"])))
            types = ", ".join(t or "-" for t in item["types"])
            rows.append((name, item["name"], operator, types, item["reason"]))
    columns = (
        Column("graph", Content.NAME), Column("node", Content.NAME),
        Column("operator", Content.NAME), Column("types"), Column("why it runs on the CPU"),
    )  # fmt: skip
    screen.table(columns, rows)
    for name, program in data["programs"].items():
        screen.note(
            f"{name}: {len(program['fallbacks'])} of {count(program['nodes'], 'node')} would fall "
            f"back to the CPU; {len(program['sizes'])} more compute sizes there on purpose"
        )
    screen.note(f"kernels: CUDA provider of onnxruntime {data['onnxruntime']}")
