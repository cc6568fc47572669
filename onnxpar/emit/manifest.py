"""The manifest: what the runtime, `inspect` and checkpoints know of an artifact directory.

Schema 1. Sizes are integers or integer arithmetic over the symbols' names (`onnxpar.core.symbols`);
a symbol whose name is no identifier is written in its safe form throughout. Parameters list
explicit boxes of indices, so that a reader needs no sharding algebra.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import ArtifactError
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, Symbol, as_dim, dim_str, safe_name, symbols_of
from onnxpar.core.symbols.expressions import fraction
from onnxpar.core.version import __version__
from onnxpar.emit.atomic_directory import GENERATOR
from onnxpar.emit.rank_graph import used_system_inputs
from onnxpar.emit.weight_files import Written
from onnxpar.emit.weight_layout import WeightLayout
from onnxpar.facts.equalities import Equality
from onnxpar.facts.index_ranges import IndexRange
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import (
    COORD_PREFIX,
    COUNTERS,
    HYPER_PREFIX,
    LOSS_WEIGHT,
    SYMBOL_PREFIX,
    Collective,
)
from onnxpar.partition.partitioned_model import (
    GraphInput,
    Parameter,
    PartitionedModel,
    PipelinePrograms,
)
from onnxpar_format.boxes import Interval

SCHEMA = 1

Json = dict[str, Any]


def manifest(
    models: Sequence[PartitionedModel],
    graphs: Mapping[str, Sequence[str | None]],
    parameters: Mapping[str, Parameter],
    layout: WeightLayout,
    files: Mapping[str, Written],
    *,
    model_name: str,
    strategy: Mapping[str, Any],
    report: Mapping[str, Any],
    training: Mapping[str, Any] | None = None,
    pipeline: PipelinePrograms | None = None,
) -> Json:
    """Returns the manifest as plain data.

    Args:
        models: The programs, all of one mesh.
        graphs: By program, the graph file of each rank, None where it was not written.
        parameters: By name.
        layout: Where each shard lies; shards in files that were not written are left out.
        files: Every file that was written.
        model_name: Name of the model, for people.
        strategy: The strategy as resolved.
        report: What else the transformer has to tell.
        training: What the runtime must know to train, for programs that train.
        pipeline: How the programs make up a pipeline, where they do.
    """
    mesh = models[0].plan.mesh
    contents: Json = {
        "schema": SCHEMA,
        "generator": f"{GENERATOR} {__version__}",
        "model": model_name,
        "mesh": {"axes": [[n, s] for n, s in mesh.axes], "atoms": list(mesh.atoms)},
        "devices": mesh.size * models[0].stages,
        "symbols": {
            safe_name(name): _symbol(name, pm.symbols) for pm in models for name in pm.symbols
        },
        "programs": {pm.program: _program(pm, graphs[pm.program]) for pm in models},
        "parameters": {
            name: _parameter(parameters[name], layout, files, models[0]) for name in layout.shards
        },
        "files": {n: {"sha256": f.sha256, "bytes": f.size} for n, f in sorted(files.items())},
        "strategy": dict(strategy),
        "replicated": [
            {"node": node, "op_type": op_type, "reason": reason}
            for pm in models
            for node, op_type, reason in pm.replicated
        ],
        "report": dict(report),
    }
    if training is not None:
        contents["training"] = dict(training)
    if pipeline is not None:
        contents["programs"] |= {
            pm.program: _whole(pm, mesh.size * models[0].stages) for pm in pipeline.whole
        }
        contents["pipeline"] = dict(pipeline.entry)
    return contents


def dtype_name(dtype: ir.DataType) -> str:
    """Returns numpy's name of an element type, which also names those that numpy lacks."""
    return {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}.get(
        dtype, dtype.name.lower()
    )


def _symbol(name: str, symbols: Mapping[str, Symbol]) -> Json:
    symbol = symbols[name]
    keys = ("min", "max", "divisor", "remainder", "unique", "per_rank")
    entry: Json = {key: getattr(symbol, key) for key in keys}
    # Names of one unique object are one size, which the runtime must check: the plan relies on it.
    first = min(other for other in symbols if symbols[other] is symbol)
    if symbol.unique and first != name:
        entry["same_as"] = safe_name(first)
    return entry


def _size(size: Dim) -> int | str:
    if isinstance(size, int):
        return size
    text = dim_str(size)
    return int(text) if text.isdigit() else text


def _bytes(size: Dim) -> int | str:
    """Returns a count that need not be an integer (a half of an odd number of bytes)."""
    if isinstance(size, int):
        return size
    over, under = fraction(size)
    if under == 1:
        return _size(size)
    return f"({dim_str(over)})/({dim_str(under)})"


def _dims(sharding: Sharding) -> list[list[Json]]:
    return [[{"size": _size(c.size), "atoms": list(c.atoms)} for c in dim] for dim in sharding.dims]


def _tensor(item: GraphInput) -> Json:
    if item.local.dtype is None:
        raise ArtifactError(f"{item.name!r}: the element type of this input or output is not known")
    return {
        "name": item.name,
        "dtype": dtype_name(item.local.dtype),
        "shape": [_size(s) for s in item.sharding.shape],
        "dims": _dims(item.sharding),
    }


def state_entry(
    item: GraphInput, kind: str, parameter: str, stages: Sequence[int] = (), *, summed: bool = False
) -> Json:
    """Returns the manifest's entry of a buffer that the runtime keeps between runs.

    Args:
        item: The buffer.
        kind: What it is for.
        parameter: The parameter that it belongs to.
        stages: The pipeline stages that hold it; all where there is no pipeline.
        summed: Whether its value is the sum of what these stages hold.
    """
    entry: Json = {
        **_tensor(item),
        "kind": kind,
        "parameter": parameter,
        "partial": list(item.sharding.partial),
    }
    if stages:
        entry |= {"stages": list(stages), "partial_stages": summed}
    return entry


def _program(pm: PartitionedModel, graphs: Sequence[str | None]) -> Json:
    states = pm.states
    data = [i for i in pm.inputs if _is_data(i, pm)]
    scalars = [i.name for i in pm.inputs if _is_scalar(i.name)]
    scalars += [value.name or "" for value in used_system_inputs(pm)]
    entry: Json = {
        "files": list(graphs),
        "inputs": [_tensor(item) for item in data],
        "outputs": [_tensor(item) for item in pm.outputs if item.name not in states.outputs],
        "system_inputs": [_system_input(name) for name in scalars],
        "collectives": [_collective(c) for c in pm.builder.collectives],
        "equal_sizes": [_equality(e) for e in pm.equalities],
        "index_ranges": [_range(r) for r in pm.ranges],
    }
    if states.inputs or states.outputs:
        fed = [p.name for p in pm.parameters if p.fed]
        entry["state_inputs"] = [i.name for i in pm.inputs if i.name in states.inputs] + fed
        entry["state_outputs"] = [
            {"name": i.name, "state": states.outputs[i.name]}
            for i in pm.outputs
            if i.name in states.outputs
        ]
    if pm.stages > 1:
        entry["handed_in"] = [
            {**_handed(h.local, pm.symbols), "from": h.source} for h in pm.handed_in
        ]
        entry["handed_out"] = [_handed(h.local, pm.symbols) for h in pm.handed_out]
    return entry


def _whole(pm: PartitionedModel, devices: int) -> Json:
    """The entry of a program that a pipeline's programs make up: inputs and outputs, no graphs."""
    return {
        "files": [None] * devices,
        "inputs": [_tensor(i) for i in pm.inputs if _is_data(i, pm)],
        "outputs": [_tensor(i) for i in pm.outputs if i.name not in pm.states.outputs],
        "system_inputs": [],
        "collectives": [],
        "equal_sizes": [_equality(e) for e in pm.equalities],
        "index_ranges": [],
    }


def _is_data(item: GraphInput, pm: PartitionedModel) -> bool:
    return item.name not in pm.states.inputs and not _is_scalar(item.name)


def _handed(value: ir.Value, symbols: Mapping[str, Symbol]) -> Json:
    """A local tensor that goes from program to program; its shape, where symbols tell it."""
    if value.dtype is None:
        raise ArtifactError(f"{value.name!r}: the element type of a value between stages")
    shape: list[int | str] | None = None
    if value.shape is not None:
        shape = []
        for dim in value.shape:
            size = dim if isinstance(dim, int) else as_dim(dim.value or "")
            if not isinstance(size, int) and any(n not in symbols for n in symbols_of(size)):
                shape = None
                break
            shape.append(_size(size))
    return {"name": value.name or "", "dtype": dtype_name(value.dtype), "shape": shape}


def _is_scalar(name: str) -> bool:
    """Whether the runtime computes an input by itself, from settings and counts."""
    return name == LOSS_WEIGHT or name.startswith(HYPER_PREFIX)


def _system_input(name: str) -> Json:
    if name.startswith(SYMBOL_PREFIX):
        symbol = safe_name(name.removeprefix(SYMBOL_PREFIX))
        return {"name": name, "kind": "symbol", "symbol": symbol}
    if name.startswith(COORD_PREFIX):
        return {"name": name, "kind": "coordinate", "atom": int(name.removeprefix(COORD_PREFIX))}
    if name in COUNTERS:
        return {"name": name, "kind": "counter", "counter": name.removeprefix(f"{DOMAIN}.")}
    if name == LOSS_WEIGHT:
        return {"name": name, "kind": "loss_weight"}
    if name.startswith(HYPER_PREFIX):
        hyper = name.removeprefix(HYPER_PREFIX)
        return {"name": name, "kind": "hyperparameter", "hyperparameter": hyper}
    raise ArtifactError(f"system input {name!r} is of no known kind")


def _collective(collective: Collective) -> Json:
    return {
        "op": collective.op,
        "node": collective.node,
        "value": collective.value,
        "atoms": list(collective.atoms),
        "stages": list(collective.stages),
        "bytes": _bytes(collective.bytes),
        "reason": collective.reason,
        "before": collective.before,
        "after": collective.after,
    }


def _equality(equality: Equality) -> Json:
    sides = (equality.left, equality.right)
    return {
        "node": equality.node,
        "op_type": equality.op_type,
        "values": [side.value for side in sides],
        "dims": [side.dim for side in sides],
        "sizes": [_size(side.size) for side in sides],
    }


def _range(demand: IndexRange) -> Json:
    return {
        "node": demand.node,
        "op_type": demand.op_type,
        "input": demand.input,
        "low": _size(demand.low),
        "high": _size(demand.high),
        "ignored": demand.ignored,
    }


def _parameter(
    parameter: Parameter,
    layout: WeightLayout,
    files: Mapping[str, Written],
    pm: PartitionedModel,
) -> Json:
    sharding, mesh = parameter.sharding, pm.plan.mesh
    dtype = parameter.source.dtype
    assert dtype is not None, "layout() refuses parameters without a type"
    return {
        "dtype": dtype_name(dtype),
        "shape": [_size(s) for s in sharding.shape],
        "dims": _dims(sharding),
        "shards": [
            {
                "ranks": list(shard.ranks),
                "file": shard.file,
                "boxes": [
                    {"global": _intervals(box.source), "local": _intervals(box.local)}
                    for box in sharding.sized(mesh).boxes(shard.ranks[0] % mesh.size, padded=True)
                ],
                "local_shape": list(shard.shape),
            }
            for shard in layout.shards[parameter.name]
            if shard.file in files
        ],
    }


def _intervals(box: Sequence[Interval]) -> list[list[int]]:
    return [list(interval) for interval in box]
