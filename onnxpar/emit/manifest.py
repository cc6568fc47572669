"""Makes the manifest of a directory from programs and weights.

It has the safe form of a symbol whose name is not an identifier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import DirectoryError
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, Symbol, as_dim, dim_str, safe_name, symbols_of
from onnxpar.core.symbols.expressions import count_str
from onnxpar.core.version import __version__
from onnxpar.emit.atomic_directory import GENERATOR
from onnxpar.emit.rank_graph import used_system_inputs
from onnxpar.emit.weight_layout import WeightLayout
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import (
    BACKGROUND_INPUTS,
    COORD_PREFIX,
    COUNTER_INPUTS,
    HYPER_PREFIX,
    LOSS_WEIGHT,
    SYMBOL_PREFIX,
)
from onnxpar.partition.partitioned_model import (
    GraphValue,
    Parameter,
    PartitionedModel,
    PipelinePrograms,
)
from onnxpar_format.entries import (
    SECOND,
    CarriedEntry,
    CollectiveEntry,
    DimComponent,
    EqualSizes,
    FileEntry,
    HandedEntry,
    HandedInEntry,
    IndexRangeEntry,
    ParameterEntry,
    ProgramEntry,
    ShardFile,
    StateOutput,
    SuppliedEntry,
    SymbolEntry,
    SystemInput,
    TensorEntry,
)
from onnxpar_format.manifest import (
    ONE_STAGE,
    SCHEMA,
    ManifestContents,
    PartEntry,
    Replicated,
    StateEntry,
    Training,
)


def manifest(
    models: Sequence[PartitionedModel],
    graphs: Mapping[str, Sequence[str | None]],
    parameters: Mapping[str, Parameter],
    layout: WeightLayout,
    files: Mapping[str, FileEntry],
    *,
    model_name: str,
    strategy: Mapping[str, Any],
    report: Mapping[str, Any],
    training: Training | None = None,
    pipeline: PipelinePrograms | None = None,
    dialect: str | None = None,
) -> ManifestContents:
    """Returns the manifest.

    Args:
        models: The programs, all of one mesh.
        graphs: For each program the graph file of each rank, or None if it was not written.
        parameters: By name.
        layout: Where each shard is stored; shards in files that were not written are left out.
        files: All files that were written.
        model_name: Name of the model, for people.
        strategy: The resolved strategy.
        report: The transformer's report.
        training: What the runtime must know to train, for programs that train.
        pipeline: How the programs make up a pipeline, if they do.
        dialect: The dialect of the graphs, if they are for another runtime.
    """
    mesh = models[0].plan.mesh
    devices = mesh.size * models[0].stages
    programs = [_program(pm, graphs[pm.program]) for pm in models]
    programs += [_without_graphs(pm, devices) for pm in (pipeline.unsplit if pipeline else ())]
    return ManifestContents(
        schema=SCHEMA,
        generator=f"{GENERATOR} {__version__}",
        # Readers refuse control characters, which the name of a file may have.
        model="".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in model_name),
        axes=tuple(mesh.axes),
        atoms=mesh.atoms,
        devices=devices,
        symbols=_symbols(models),
        programs={program.name: program for program in programs},
        parameters={
            name: _parameter(parameters[name], layout, files, models[0]) for name in layout.shards
        },
        files=dict(sorted(files.items())),
        strategy=strategy,
        replicated=tuple(Replicated(*node) for pm in models for node in pm.replicated),
        report=report,
        training=training,
        pipeline=pipeline.entry if pipeline else None,
        dialect=dialect,
    )


def dtype_name(dtype: ir.DataType) -> str:
    """Returns numpy's name of an element type, which also names those that numpy lacks."""
    return {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}.get(
        dtype, dtype.name.lower()
    )


def dtype_named(name: str) -> ir.DataType | None:
    """Returns the element type of a name that `dtype_name` gives; None if there is none."""
    return next((dtype for dtype in ir.DataType if dtype_name(dtype) == name), None)


def _symbols(models: Sequence[PartitionedModel]) -> dict[str, SymbolEntry]:
    """Returns the constraints of all symbols; those of one name in several programs all hold.

    Raises:
        DirectoryError: No size satisfies the constraints of two programs.
    """
    found: dict[str, Symbol] = {}
    same: dict[str, str | None] = {}
    for pm in models:
        for name, symbol in pm.symbols.items():
            other = found.get(name, symbol)
            try:
                found[name] = symbol if other == symbol else other.both(symbol)
            except ValueError as error:
                raise DirectoryError(
                    f"symbol {name!r}: no size satisfies {other} and, in {pm.program!r}, {symbol}: "
                    f"{error}"
                ) from None
            # The plan relies on names of one `unique` symbol having one size; the runtime must
            # check it.
            first = min(n for n, one in pm.symbols.items() if one is symbol)
            same[name] = safe_name(first) if symbol.unique and first != name else same.get(name)
    return {
        safe_name(name): SymbolEntry(**vars(symbol), same_as=same[name])
        for name, symbol in found.items()
    }


def _size(size: Dim) -> int | str:
    if isinstance(size, int):
        return size
    text = dim_str(size)
    return int(text) if text.isdigit() else text


def _dims(sharding: Sharding) -> tuple[tuple[DimComponent, ...], ...]:
    return tuple(tuple(DimComponent(_size(c.size), c.atoms) for c in d) for d in sharding.dims)


def _shape(sharding: Sharding) -> tuple[int | str, ...]:
    return tuple(_size(s) for s in sharding.shape)


def _tensor(item: GraphValue) -> TensorEntry:
    return TensorEntry(item.name, _dtype(item), _shape(item.sharding), _dims(item.sharding))


def _dtype(item: GraphValue) -> str:
    if item.local.dtype is None:
        raise DirectoryError(f"{item.name!r}: the element type of this input or output is unknown")
    return dtype_name(item.local.dtype)


def state_entry(
    item: GraphValue,
    kind: str,
    parameter: str,
    stages: tuple[int, ...] = (),
    *,
    summed: bool,
    part: PartEntry | None = None,
) -> StateEntry:
    """Returns the manifest's entry for a buffer that the runtime keeps between runs.

    Args:
        item: The buffer.
        kind: Its purpose.
        parameter: The parameter to which it belongs.
        stages: The pipeline stages that hold it; empty without a pipeline.
        summed: Whether its value is the sum of what these stages hold.
        part: The tensor of which it is a part.
    """
    return StateEntry(
        **vars(_tensor(item)),
        kind=kind,
        parameter=parameter,
        partial=item.sharding.partial,
        stages=stages or ONE_STAGE,
        partial_stages=summed if stages else None,
        part=part,
    )


def _program(pm: PartitionedModel, graphs: Sequence[str | None]) -> ProgramEntry:
    states = pm.states
    scalars = [i.name for i in pm.inputs if _is_scalar(i.name)]
    scalars += [value.name or "" for value in used_system_inputs(pm)]
    more: dict[str, Any] = {}
    if states.inputs or states.outputs:
        fed = [p.name for p in pm.parameters if p.fed]
        more["state_inputs"] = (*(i.name for i in pm.inputs if i.name in states.inputs), *fed)
        more["state_outputs"] = tuple(
            StateOutput(i.name, states.outputs[i.name])
            for i in pm.outputs
            if i.name in states.outputs
        )
    # Also in a pipeline of one stage, whose forward program hands values to the backward one.
    if pm.stages > 1 or pm.handed_in or pm.handed_out:
        more["handed_in"] = tuple(
            HandedInEntry(**vars(_handed(h.local, pm.symbols)), source=h.source)
            for h in pm.handed_in
        )
        more["handed_out"] = tuple(_handed(h.local, pm.symbols) for h in pm.handed_out)
    return replace(
        _without_graphs(pm, len(graphs)),
        files=tuple(graphs),
        system_inputs=tuple(_system_input(name) for name in scalars),
        collectives=tuple(
            CollectiveEntry(
                **{
                    **{name: value for name, value in vars(c).items() if name != "behind"},
                    "bytes": count_str(c.bytes),
                    "started_in": c.started_in or None,
                    "finished_in": c.finished_in or None,
                }
            )
            for c in pm.builder.collectives
        ),
        **more,
    )


def _without_graphs(pm: PartitionedModel, devices: int) -> ProgramEntry:
    """Returns a program's entry with inputs and outputs, but without graphs."""
    more: dict[str, Any] = {}
    if pm.carried:
        more["carried"] = tuple(CarriedEntry(**vars(state)) for state in pm.carried)
    if pm.supplied:
        more["supplied"] = tuple(SuppliedEntry(**vars(pair)) for pair in pm.supplied)
    return ProgramEntry(
        name=pm.program,
        files=(None,) * devices,
        inputs=tuple(
            _tensor(i)
            for i in pm.inputs
            if i.name not in pm.states.inputs and not _is_scalar(i.name)
        ),
        outputs=tuple(_tensor(i) for i in pm.outputs if i.name not in pm.states.outputs),
        system_inputs=(),
        collectives=(),
        equal_sizes=tuple(
            EqualSizes(
                e.node,
                e.op_type,
                (e.left.value, e.right.value),
                (e.left.dim, e.right.dim),
                (_size(e.left.size), _size(e.right.size)),
            )
            for e in pm.equalities
        ),
        index_ranges=tuple(
            IndexRangeEntry(**{**vars(r), "low": _size(r.low), "high": _size(r.high)})
            for r in pm.ranges
        ),
        **more,
    )


def _handed(value: ir.Value, symbols: Mapping[str, Symbol]) -> HandedEntry:
    """Returns the entry of a local tensor between programs, with its shape if it is known."""
    if value.dtype is None:
        raise DirectoryError(f"{value.name!r}, a value between stages: its element type is unknown")
    sizes = [dim if isinstance(dim, int) else as_dim(dim.value or "") for dim in value.shape or ()]
    known = value.shape is not None and all(
        name in symbols for size in sizes if not isinstance(size, int) for name in symbols_of(size)
    )
    shape = tuple(_size(size) for size in sizes) if known else None
    return HandedEntry(value.name or "", dtype_name(value.dtype), shape)


def _is_scalar(name: str) -> bool:
    """Whether the runtime computes an input itself, from settings and counts."""
    return name.removeprefix(SECOND) == LOSS_WEIGHT or name.startswith(HYPER_PREFIX)


def _system_input(name: str) -> SystemInput:
    if name.startswith(SYMBOL_PREFIX):
        return SystemInput(name, "symbol", symbol=safe_name(name.removeprefix(SYMBOL_PREFIX)))
    if name.startswith(COORD_PREFIX):
        return SystemInput(name, "coordinate", atom=int(name.removeprefix(COORD_PREFIX)))
    of_one = name.removeprefix(SECOND)
    if of_one in COUNTER_INPUTS:
        return SystemInput(name, "counter", counter=of_one.removeprefix(f"{DOMAIN}."))
    if of_one == LOSS_WEIGHT:
        return SystemInput(name, "loss_weight")
    if name in BACKGROUND_INPUTS:
        return SystemInput(name, name.removeprefix(f"{DOMAIN}."))
    if name.startswith(HYPER_PREFIX):
        hyper = name.removeprefix(HYPER_PREFIX)
        return SystemInput(name, "hyperparameter", hyperparameter=hyper)
    raise DirectoryError(f"system input {name!r} has an unknown kind")


def _parameter(
    parameter: Parameter,
    layout: WeightLayout,
    files: Mapping[str, FileEntry],
    pm: PartitionedModel,
) -> ParameterEntry:
    sharding, mesh = parameter.sharding, pm.plan.mesh
    dtype = parameter.source.dtype
    assert dtype is not None, "layout() refuses parameters without a type"
    sized = sharding.sized(mesh)
    return ParameterEntry(
        name=parameter.name,
        dtype=dtype_name(dtype),
        shape=_shape(sharding),
        dims=_dims(sharding),
        shards=tuple(
            ShardFile(
                shard.ranks,
                shard.file,
                sized.boxes(shard.ranks[0] % mesh.size, padded=True),
                shard.shape,
            )
            for shard in layout.shards[parameter.name]
            if shard.file in files
        ),
    )
