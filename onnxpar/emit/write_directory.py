"""Writes a directory: graphs, weight shards, manifest."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import EncodeError

from onnxpar.core.errors import DirectoryError
from onnxpar.emit import weight_sources
from onnxpar.emit.atomic_directory import MANIFEST, new_directory
from onnxpar.emit.manifest import manifest
from onnxpar.emit.rank_graph import fill, template
from onnxpar.emit.weight_files import write_weights
from onnxpar.emit.weight_layout import layout
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.collective.dialects import DOMAINS, Dialect
from onnxpar.partition.partitioned_model import Parameter, PartitionedModel, PipelinePrograms
from onnxpar_format.entries import FileEntry
from onnxpar_format.manifest import Training
from onnxpar_format.records import to_json

MAX_PROTOBUF = 2**31 - 1
"""Bytes; the largest message that protobuf writes."""

STRATEGY_FILE = "strategy.yaml"
"""The resolved strategy; `shard --strategy` makes the same directory from it."""

LINE = 100


def write(
    models: Sequence[PartitionedModel],
    out_dir: str | Path,
    *,
    ranks: Iterable[int] | None = None,
    force: bool = False,
    report: Mapping[str, Any] | None = None,
    strategy: Mapping[str, Any] | None = None,
    strategy_file: str | None = None,
    model_name: str,
    training: Training | None = None,
    pipeline: PipelinePrograms | None = None,
    dialect: Dialect | None = None,
) -> None:
    """Writes programs of one mesh as a directory, completely or not at all.

    Memory is bounded by a few chunks of a weight, or, if the model holds its weights in memory, by
    a copy of the largest weight for each thread.

    Args:
        models: The programs; a parameter must be sharded alike in all of them.
        out_dir: The directory to make; it is flat, because onnxruntime refuses external data in
            other folders.
        ranks: Write only the graphs of these ranks and the weights that they read.
        force: Replace an existing directory.
        report: The transformer's report, as JSON.
        strategy: The resolved strategy, as JSON.
        strategy_file: The same as a strategy file, written beside the manifest.
        model_name: Name of the model, for people.
        training: What the runtime must know to train.
        pipeline: How the programs make up a pipeline, if they do.
        dialect: Whose collectives the graphs have; None for those of the domain `onnxpar`.

    Raises:
        DialectError: A node cannot be written in the dialect.
        DirectoryError: The directory cannot be written or must not be replaced, a weight's data is
            missing, or the programs do not fit together.
    """
    mesh = models[0].plan.mesh
    if any(pm.plan.mesh != mesh for pm in models):
        raise DirectoryError("all programs of one directory must use one mesh")
    devices = mesh.size * models[0].stages
    chosen = sorted(set(range(devices) if ranks is None else ranks))
    if not chosen or chosen[0] < 0 or chosen[-1] >= devices:
        raise DirectoryError(f"expected ranks from 0 to {devices - 1}, got {chosen}")
    parameters = _parameters(models)
    held: dict[str, set[int]] = {name: set() for name in parameters}
    for pm in models:
        for parameter in pm.parameters:
            held[parameter.name].add(pm.stage)
    stages = {name: sorted(found) for name, found in held.items()}
    places = layout(parameters.values(), mesh, stages)
    needed = {f.name for f in places.files.values() if set(chosen) & set(f.ranks)}
    weight_sources.check(
        p
        for name, p in parameters.items()
        if any(s.file in needed for s in places.shards.get(name, ()))
    )
    size = sum(places.files[name].size for name in needed)
    with new_directory(Path(out_dir), force=force, need=size) as folder:
        files = write_weights(list(parameters.values()), places, folder, ranks=chosen)
        graphs: dict[str, list[str | None]] = {}
        for pm in models:
            form = template(pm, places, dialect)
            graphs[pm.program] = [None] * devices
            for rank in chosen:
                if rank not in pm.ranks:
                    continue
                name = f"rank{rank:04d}.{pm.program}.onnx"
                files[name] = _write_graph(folder / name, fill(form, rank))
                graphs[pm.program][rank] = name
        if strategy_file is not None:
            files[STRATEGY_FILE] = _write(folder / STRATEGY_FILE, strategy_file.encode())
        contents = manifest(
            models,
            graphs,
            parameters,
            places,
            files,
            model_name=model_name,
            strategy=strategy or {},
            report=report or {},
            training=training,
            pipeline=pipeline,
            dialect=dialect,
        )
        with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
            stream.write(_json(to_json(contents)) + "\n")
        for names in graphs.values():
            # The graphs of other ranks differ only in numbers.
            first = next((name for name in names if name is not None), None)
            if first is not None:
                _check(folder / first, dialect)


def _check(path: Path, dialect: Dialect | None) -> None:
    try:
        if dialect is None or DOMAINS[dialect]:
            onnx.checker.check_model(str(path))
        else:
            _check_foreign(path)
    except onnx.checker.ValidationError as error:
        text = " ".join(str(error).split())
        raise DirectoryError(f"{path.name} would not be valid ONNX: {text}") from error


def _check_foreign(path: Path) -> None:
    """Checks a graph with nodes in ONNX's domain that ONNX does not have, as of another domain."""
    proto = onnx.load(path, load_external_data=False)
    version = {entry.domain: entry.version for entry in proto.opset_import}[""]
    for node in proto.graph.node:
        if not node.domain and not onnx.defs.has(node.op_type, max_inclusive_version=version):
            node.domain = DOMAIN
    if all(entry.domain != DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=DOMAIN, version=1)
    other = path.with_suffix(".check")
    try:
        other.write_bytes(proto.SerializeToString())
        onnx.checker.check_model(str(other))
    finally:
        other.unlink(missing_ok=True)


def _parameters(models: Sequence[PartitionedModel]) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for pm in models:
        for parameter in pm.parameters:
            other = found.setdefault(parameter.name, parameter)
            if other.sharding != parameter.sharding or other.source.dtype != parameter.source.dtype:
                mesh = pm.plan.mesh
                raise DirectoryError(
                    f"parameter {parameter.name!r} is sharded in two ways: "
                    f"{other.sharding.describe(mesh)} and, in {pm.program!r}, "
                    f"{parameter.sharding.describe(mesh)}"
                )
    return found


def _write(path: Path, data: bytes) -> FileEntry:
    path.write_bytes(data)
    return FileEntry(hashlib.sha256(data).hexdigest(), len(data))


def _write_graph(path: Path, proto: onnx.ModelProto) -> FileEntry:
    try:
        data = proto.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise DirectoryError(
            f"{path.name}: cannot be serialised: {error}; constants of more than {MAX_PROTOBUF} "
            "bytes must be weights"
        ) from error
    return _write(path, data)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


def _json(contents: Mapping[str, Any]) -> str:
    try:
        return _pretty(contents, "\n")
    except (TypeError, ValueError) as error:
        raise DirectoryError(f"the manifest cannot be written as JSON: {error}") from error


def _pretty(item: Any, indent: str) -> str:
    """Returns JSON that is broken into lines only where an item does not fit on one line.

    An item with a line break inside does not fit, and neither does the item around it, so each item
    is written once.
    """
    inner = indent + " "
    if isinstance(item, dict):
        parts = [f"{_ENCODER.encode(str(k))}: {_pretty(v, inner)}" for k, v in item.items()]
        opened, closed = "{", "}"
    elif isinstance(item, list | tuple):
        parts = [_pretty(v, inner) for v in item]
        opened, closed = "[", "]"
    else:
        # The encoder has a short way for text, but not for integers.
        return str(item) if type(item) is int else _ENCODER.encode(item)
    flat = opened + ", ".join(parts) + closed
    if len(flat) <= LINE and "\n" not in flat:
        return flat
    return opened + inner + f",{inner}".join(parts) + indent + closed
