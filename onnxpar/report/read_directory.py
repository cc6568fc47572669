"""Reads the report of a directory, and the graphs in it, for all that shows directories."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import DirectoryError, OnnxparError
from onnxpar.emit.atomic_directory import MANIFEST
from onnxpar.emit.read_manifest import read_manifest
from onnxpar.frontend.limits import check_numbers
from onnxpar.frontend.load import read
from onnxpar.report.inspect_data import OF_A_PROGRAM
from onnxpar_format.file_sizes import size_fault

Json = dict[str, Any]


@contextmanager
def blamed_on_report(directory: Path) -> Iterator[None]:
    """Turns an exception of code that shows a directory's report into a `DirectoryError`.

    The report is what `onnxpar shard` wrote, and is not checked before it is shown. If it has been
    changed, anything in it may be of another type.

    Raises:
        DirectoryError: The block raised an exception that is neither ours nor of the system.
    """
    try:
        yield
    except (OnnxparError, OSError):
        raise
    except Exception as error:
        raise DirectoryError(
            f"{directory / MANIFEST}: expected the report that `onnxpar shard` wrote, got one that "
            "cannot be shown; run `onnxpar shard` again, unless the file has been changed: then "
            "restore it"
        ) from error


def read_programs(directory: Path) -> tuple[Json, dict[str, Json]]:
    """Returns the manifest of a directory, and the report of each of its programs by name.

    The first program is the one that is shown if none is named. Each has the keys `OF_A_PROGRAM`.

    Raises:
        DirectoryError: There is no manifest, or it has no report.
    """
    path = directory / MANIFEST
    manifest = read_manifest(directory)
    report = manifest.get("report") if isinstance(manifest, dict) else None
    keys = ("mesh", "devices", "stages", "symbols", "program", "programs", *OF_A_PROGRAM)
    if not isinstance(report, dict) or any(key not in report for key in keys):
        raise DirectoryError(f"{path}: expected a report of how the model was sharded, got none")
    first = {key: report[key] for key in OF_A_PROGRAM}
    return manifest, {report["program"]: first, **report["programs"]}


def read_report(directory: Path, rank: int | None = None, program: str | None = None) -> Json:
    """Returns the report of a directory.

    Keys are those of `onnxpar.report.inspect_data.inspect_data` for one program; `program`, its
    name; `programs`, with the keys `OF_A_PROGRAM` except `nodes` for every program; `notices`, the
    first file that is missing or has another size, if any has; `dialect`, the runtime whose
    collectives the graphs have, None for those of `onnxpar`; and, in a training directory,
    `training`, the manifest's entry of that name.

    Args:
        directory: The directory.
        rank: Show only the collective groups of this rank.
        program: Which program; None for the forward or the training program.

    Raises:
        DirectoryError: There is no manifest, or it has no report, no such rank or no such program.
    """
    manifest, known = read_programs(directory)
    report = manifest["report"]
    if rank is not None and rank >= report["devices"]:
        raise DirectoryError(
            f"{directory}: expected a rank from 0 to {report['devices'] - 1}, got {rank}"
        )
    known = {name: {**p, "collectives": _of_rank(p, rank)} for name, p in known.items()}
    shown = report["program"] if program is None else program
    if shown not in known:
        raise DirectoryError(
            f"{directory}: no program {shown!r}; it has {', '.join(sorted(known))}"
        )
    every = {
        name: {key: p[key] for key in OF_A_PROGRAM if key != "nodes"} for name, p in known.items()
    }
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    fault = size_fault(directory, sizes, "manifest")
    notices = [] if fault is None else [f"{fault}; `onnxpar run` needs it"]
    data = {**report, **known[shown], "program": shown, "programs": every, "notices": notices}
    data["dialect"] = manifest.get("dialect")
    if "training" in manifest:
        data["training"] = manifest["training"]
    return data


def graphs_of(directory: Path) -> dict[str, ir.Model]:
    """Returns one rank's graph of each program, also of those of stages, by file name.

    Raises:
        DirectoryError: A graph cannot be read, or there is none.
    """
    found: dict[str, ir.Model] = {}
    seen = set()
    for path in sorted(directory.glob("rank*.onnx")):
        program = path.name.partition(".")[2]
        if program in seen:
            continue
        seen.add(program)
        found[path.name] = read_graph(path)
    if not found:
        raise DirectoryError(f"{directory}: expected rank graphs (rank*.onnx), got none")
    return found


def read_graph(path: Path) -> ir.Model:
    """Returns a rank's graph; weights are read when they are used.

    Raises:
        DirectoryError: It cannot be read.
    """
    try:
        graph = ir.from_proto(read(path))
        ir.external_data.set_base_dir(graph.graph, path.parent)
        for each in graph.graphs():
            values = (*each.inputs, *(output for node in each for output in node.outputs))
            for value in values:
                for dim in value.shape or ():
                    if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                        check_numbers(f"value {value.name!r}", dim.value)
        return graph
    except Exception as error:
        raise DirectoryError(f"{path}: not an ONNX graph: {error}") from None


def _of_rank(report: Json, rank: int | None) -> list[Json]:
    """Returns the collectives of a program with only the groups that contain the rank."""
    found: list[Json] = report["collectives"]
    if rank is None:
        return found
    return [{**c, "groups": [group for group in c["groups"] if rank in group]} for c in found]
