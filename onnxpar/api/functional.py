"""`shard`: a function, a model or a part of one as a callable that all ranks compute together.

    dense = onnxpar.shard(dense_relu, in_strategy=((4, 2), None, None))
    y = dense(x, weight, bias)

The first call determines the shapes. It shards the function with a symbol for every size, so a
later call with other sizes can use the same programs if their constraints allow these sizes. For a
call with other numbers of dims, other element types, or other sizes that are equal, the function is
sharded again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.errors import CallError, ModelError, OnnxparError, StrategyError
from onnxpar.core.name_patterns import match
from onnxpar.core.symbols import Symbol, as_dim, dim_symbol
from onnxpar.emit import write
from onnxpar.facts.program import Program
from onnxpar.frontend.callable import Exportable, Gates, Source, add_gates, source_of, typed
from onnxpar.frontend.load import normalise
from onnxpar.report.inspect_data import directory_data
from onnxpar.search.find_plan import LEVELS
from onnxpar.search.limited_search import search
from onnxpar.search.rival_plans import Pricing
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import NodeEntry, Strategy, resolve, resolved
from onnxpar.strategy.call_layouts import (
    Given,
    followed,
    left_as_given,
    made_by,
    matrix_of,
    read_entry,
    read_together,
)
from onnxpar.strategy.divided_weights import match_parameters
from onnxpar.strategy.factor_splits import rank_of, show
from onnxpar.strategy.machine_file import machine_of
from onnxpar.strategy.schema import MAX_DEVICES, SearchEntry
from onnxpar.strategy.tensor_entry import TensorEntry
from onnxpar.strategy.yaml_document import Document

Dims = tuple[tuple[int | str, ...], ...]
Shardable = Exportable | ir.Function | ir.Model | onnx.ModelProto | str | Path
Entry = Sequence[int | None] | Any
WHERE = "shard"
DATASETS = ("full_batch", "data_parallel")


def shard(
    fn: Shardable,
    in_strategy: Sequence[Entry],
    out_strategy: Sequence[Entry] | None = None,
    parameter_plan: Mapping[str, Entry] | None = None,
    level: int = 0,
    *,
    devices: int | None = None,
    dataset: str | Sequence[str] = "full_batch",
    machine: str = "cpu",
) -> "Sharded":
    """Returns a callable that computes `fn` on all ranks together.

    The ranks are the processes that mpirun started; outside of mpirun they are threads of this
    process. Every rank must make the same calls.

    Args:
        fn: An onnxscript function or an `ir.Function`, whose sizes are those of each call; or a
            model, its path, proto or `ONNXProgram`, or a part of one (`onnxpar.part`), with its
            declared sizes.
        in_strategy: For each input of `fn` a tuple with a number of shards for each dim, a layout
            (a `Layout` that was called with a name for each dim), or None to derive it. The nodes
            that read the input take it in this layout if their rules allow it.
        out_strategy: The same for each output: the layout in which it is computed.
        parameter_plan: The same for the initializers of `fn`, by name or pattern.
        level: What the search minimises for everything that is open: 0 time, with
            communication counted tenfold; 1 memory; 2 time.
        devices: Number of ranks. Default: as many as mpirun started; without mpirun, the least
            number that can carry out the strategies.
        dataset: `full_batch`: every rank takes and returns whole arrays. `data_parallel`: each rank
            takes and returns shards, with dim 0 sharded over all ranks (for an output with a
            strategy, its shard in that layout); scalars and declared dims of 1 are not sharded. Or
            one of the two words for each input; outputs are then shards if any input is. If ranks
            are threads, a sequence with a shard for each rank takes the place of a shard.
        machine: The machine that the search plans for, a preset or a machine file.

    Raises:
        ModelError: `fn` cannot be sharded, or is already sharded: shard cannot be nested.
        StrategyError: The number of entries is not that of inputs or outputs, the product of an
            entry does not divide the devices, or a parameter, level or dataset is unknown.
    """
    if isinstance(fn, Sharded):
        raise ModelError(
            f"shard: {fn.name!r} is already sharded, and shard cannot be nested; give all "
            f"strategies in one call"
        )
    source = source_of(fn)
    sliced = _sliced(dataset, len(source.inputs))
    if isinstance(level, bool) or level not in LEVELS:
        raise StrategyError(f"level: expected one of {list(LEVELS)}, got {level!r}")
    inputs = _entries(in_strategy, source.inputs, "in_strategy", "input")
    outputs = _entries(
        (None,) * len(source.outputs) if out_strategy is None else out_strategy,
        source.outputs,
        "out_strategy",
        "output",
    )
    plan = {
        str(name): read_entry(entry, f"parameter_plan, {name!r}")
        for name, entry in (parameter_plan or {}).items()
    }
    match(plan, source.parameters, "parameter", {name: "parameter_plan" for name in plan})
    for entry, name, shape in zip(inputs, source.inputs, source.shapes, strict=True):
        if entry is not None and shape is not None:
            _check_rank(entry, f"in_strategy, input {name!r}", shape)
    titles = [
        *((f"in_strategy[{i}]", e) for i, e in enumerate(inputs)),
        *((f"out_strategy[{i}]", e) for i, e in enumerate(outputs)),
        *((f"parameter_plan, {name!r}", e) for name, e in plan.items()),
    ]
    matrices = [(title, matrix_of(entry)) for title, entry in titles if entry is not None]
    # Loads onnxruntime, which `import onnxpar` and all other functions do without.
    from onnxpar.api import runtime

    count = _devices(devices, matrices, runtime.started())
    given = Given(inputs, outputs, plan, level, count, sliced, machine)
    return Sharded(source, given, runtime)


def _sliced(dataset: str | Sequence[str], inputs: int) -> tuple[bool, ...]:
    """Returns for each input whether a rank is given a shard of it."""
    each = (dataset,) * inputs if isinstance(dataset, str) else tuple(dataset)
    for entry in (dataset,) if isinstance(dataset, str) else each:
        if entry not in DATASETS:
            raise StrategyError(f"dataset: expected one of {', '.join(DATASETS)}, got {entry!r}")
    if len(each) != inputs:
        raise StrategyError(
            f"dataset: expected one word, or one for each of the {inputs} inputs, got {len(each)}"
        )
    return tuple(entry == "data_parallel" for entry in each)


def _entries(
    given: Sequence[Entry], names: Sequence[str], argument: str, what: str
) -> tuple[TensorEntry | None, ...]:
    if not isinstance(given, tuple | list):
        raise StrategyError(
            f"{argument}: expected a tuple with an entry for each {what}, as in ((4, 2), None), "
            f"got {given!r}"
        )
    if len(given) != len(names):
        raise StrategyError(
            f"{argument}: expected {len(names)} entries for the {what}s "
            f"{', '.join(map(repr, names)) or 'none'}, got {len(given)}"
        )
    return tuple(
        None if entry is None else read_entry(entry, f"{argument}[{index}], {what} {name!r}")
        for index, (entry, name) in enumerate(zip(given, names, strict=True))
    )


def _check_rank(entry: TensorEntry, title: str, shape: Sequence[object]) -> None:
    if rank_of(entry) != len(shape):
        raise StrategyError(
            f"{title}: expected {len(shape)} entries for the shape "
            f"({', '.join(map(str, shape))}), got {rank_of(entry)}: {show(entry)}"
        )


def _devices(
    given: int | None, matrices: Sequence[tuple[str, tuple[int, ...]]], started: int | None
) -> int:
    """Returns the number of ranks on which the caller, mpirun and the strategies agree."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise StrategyError(f"devices: expected a number of ranks, got {given!r}")
    if started is not None and given not in (None, started):
        raise StrategyError(
            f"devices: expected the {started} ranks that mpirun started, got {given}"
        )
    count = started if given is None else given
    if count is None:
        if not matrices:
            raise StrategyError(
                "devices: expected a number of ranks, since no strategy gives one; got none"
            )
        count = lcm(*(prod(matrix) for _, matrix in matrices))
    if not 1 <= count <= MAX_DEVICES:
        raise StrategyError(f"devices: expected from 1 to {MAX_DEVICES} ranks, got {count}")
    for title, matrix in matrices:
        if count % prod(matrix):
            product = "·".join(map(str, matrix))
            raise StrategyError(
                f"{title}: expected numbers of shards whose product divides the {count} devices, "
                f"got {product} = {prod(matrix)}"
            )
    return count


@dataclass(frozen=True)
class ShardedProgram:
    """A function that was sharded for calls whose arrays have these dims.

    Attributes:
        dims: Dims of each input: sizes, symbols or expressions in symbols.
        dtypes: Element type of each input.
        symbols: Constraints on the symbols.
        report: What `onnxpar inspect --json` would print.
        ranks: The ranks with their graphs loaded.
    """

    dims: Dims
    dtypes: tuple[np.dtype[Any], ...]
    symbols: Mapping[str, Symbol]
    report: Mapping[str, Any] = field(repr=False)
    ranks: Any = field(repr=False)


class Sharded:
    """What `shard` returns: call it with the arrays of all inputs.

    Attributes:
        name: Name of the function or model.
        inputs: Names of the inputs, in the order of arguments.
        outputs: Names of the outputs.
        devices: Number of ranks.
        programs: The programs for which calls sharded the function, in order.
    """

    def __init__(self, source: Source, given: Given, runtime: Any) -> None:
        """Use `shard`."""
        self._source = source
        self._given = given
        self._runtime = runtime
        self.name = source.name
        self.inputs = source.inputs
        self.outputs = source.outputs
        self.devices = given.devices
        self.programs: list[ShardedProgram] = []

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Computes the function; every rank must call it.

        Args:
            arrays: The inputs in order: whole arrays, or shards if `dataset` says so.
            named: Inputs by name.

        Returns:
            The output, or a tuple of outputs: each a whole array, or the rank's shard of it; if
            ranks are threads, a list with the shard of each rank.

        Raises:
            OnnxparError: An input is missing, or its rank, type or size is not the declared one; a
                strategy does not fit the shapes; or the model is not valid. All ranks raise it.
            OnnxparRuntimeError: A rank failed; see `onnxpar_runtime.Session`.
        """
        declared = self._source.shapes
        sliced = {
            name: flag and (dims is None or not dims or dims[0] != 1)
            for name, flag, dims in zip(self.inputs, self._given.sliced, declared, strict=True)
        }
        call = self._runtime.Call.of_all_ranks(
            self.devices, self.name, lambda: self._feeds(arrays, named), sliced
        )
        _values(self.inputs, declared, call.shapes)
        program = self._known(call)
        if program is None:
            program = self._shard(call)
            self.programs.append(program)
        try:
            results = program.ranks.run(call, sliced=any(self._given.sliced))
        except BaseException as error:
            if not getattr(error, "agreed", isinstance(error, OnnxparError)):
                # Ranks were stopped in the middle of the run.
                self.programs.remove(program)
                program.ranks.close()
            raise
        return results[0] if len(results) == 1 else tuple(results)

    def close(self) -> None:
        """Frees the ranks' sessions. The next call shards the function again."""
        for program in self.programs:
            program.ranks.close()
        self.programs.clear()

    def __enter__(self) -> "Sharded":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _feeds(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        if len(arrays) > len(self.inputs):
            raise CallError(
                f"{self.name}: expected {len(self.inputs)} inputs, got {len(arrays)} arguments"
            )
        feeds = dict(zip(self.inputs, arrays, strict=False))
        for name, array in named.items():
            if name not in self.inputs or name in feeds:
                state = "is given twice" if name in feeds else "is not an input"
                known = ", ".join(map(repr, self.inputs))
                raise CallError(f"{self.name}: {name!r} {state}; inputs are {known}")
            feeds[name] = array
        missing = [name for name in self.inputs if feeds.get(name) is None]
        if missing:
            raise CallError(f"{self.name}: expected an array for input {missing[0]!r}, got none")
        return {name: feeds[name] for name in self.inputs}

    def _known(self, call: Any) -> ShardedProgram | None:
        """Returns an existing program that a call can use."""
        for program in self.programs:
            if program.dtypes != call.dtypes:
                continue
            try:
                values = _values(self.inputs, program.dims, call.shapes)
                for name, symbol in program.symbols.items():
                    symbol.check(name, values[name])
            except OnnxparError:
                continue
            return program
        return None

    def _shard(self, call: Any) -> ShardedProgram:
        for name, entry, shape in zip(self.inputs, self._given.inputs, call.shapes, strict=True):
            if entry is not None:
                _check_rank(entry, f"in_strategy, input {name!r}", shape)
        try:
            return self._shard_for(self._dims(call.shapes, symbolic=True), call)
        except OnnxparError:
            # A constant inside may fit only one size, such as the numbers of a Reshape.
            if all(shape is not None for shape in self._source.shapes):
                raise
        return self._shard_for(self._dims(call.shapes, symbolic=False), call)

    def _dims(self, shapes: Sequence[tuple[int, ...]], *, symbolic: bool) -> Dims:
        """Returns the declared dims; if there are none, sizes, or one symbol for equal sizes.

        Sizes that are equal by accident only make the program fit fewer calls. A dim of 1 is always
        a number: broadcasting depends on it.
        """
        names: dict[int, str] = {}
        found = []
        for name, declared, shape in zip(self.inputs, self._source.shapes, shapes, strict=True):
            dims: list[int | str] = []
            for axis, size in enumerate(shape):
                if declared is not None:
                    known = declared[axis]
                    dims.append(f"{name}.{axis}" if known is None else known)
                elif size > 1 and symbolic:
                    dims.append(names.setdefault(size, f"{name}.{axis}"))
                else:
                    dims.append(size)
            found.append(tuple(dims))
        return tuple(found)

    def _shard_for(self, dims: Dims, call: Any) -> ShardedProgram:
        values = _values(self.inputs, dims, call.shapes)
        # A divisor that the size shares with the number of devices saves padding.
        symbols = {
            name: Symbol(divisor=divisor)
            for name, value in values.items()
            if (divisor := gcd(value, self.devices)) > 1
        }

        def make(folder: Path) -> Mapping[str, Any]:
            types = [
                ir.DataType.from_numpy(given) if declared is None else declared
                for given, declared in zip(call.dtypes, self._source.dtypes, strict=True)
            ]
            if any(shape is None for shape in self._source.shapes):
                self._check_sizes(call.shapes, types)
            return self._write(folder, dims, types, symbols, values)

        ranks, report = self._runtime.open_program(self.devices, make)
        return ShardedProgram(dims, call.dtypes, symbols, report, ranks)

    def _check_sizes(self, shapes: Sequence[tuple[int, ...]], types: Sequence[ir.DataType]) -> None:
        """Raises ModelError if the sizes of a call do not fit together: symbols would hide that."""
        model = self._source.make()
        typed(model, self.inputs, shapes, types)
        normalise(model)

    def _write(
        self,
        folder: Path,
        dims: Dims,
        types: Sequence[ir.DataType],
        symbols: Mapping[str, Symbol],
        values: Mapping[str, int],
    ) -> Mapping[str, Any]:
        """Shards the function for inputs of these dims, writes it, and returns the report."""
        given = self._given
        model = self._source.make()
        typed(model, self.inputs, dims, types)
        outputs = given.outputs
        gates = add_gates(
            model,
            self.inputs,
            behind=[i for i, e in enumerate(given.inputs) if e and given.sliced[i]],
            made=[i for i, e in enumerate(outputs) if e and not any(given.sliced)],
        )
        program = analyse(model, symbols)
        leaving = [program.env.shapes.get(v.name or "") for v in program.model.graph.outputs]
        for index, (laid, shape) in enumerate(zip(outputs, leaving, strict=True)):
            # The rank is unknown if the shape depends on data.
            if laid is not None and shape is not None:
                _check_rank(laid, f"out_strategy[{index}], output {self.outputs[index]!r}", shape)
        strategy = self._strategy(program, gates, dims, values)
        seeds = resolve(strategy, program)
        # The layout of a shard that is given says nothing about the nodes that read it.
        pinned = {n: s for n, s in seeds.inputs.items() if not self._slice_of(n, dims)}
        pinned |= seeds.parameters
        pinned |= {
            g: made_by(seeds, program.rules, g) for g in gates.inputs.values() if g in seeds.nodes
        }
        seeds = followed(seeds, program.rules, program.env.shapes, pinned)
        seeds = left_as_given(seeds, program.rules, gates.outputs, sliced=any(given.sliced))
        entry = strategy.search
        workload = Workload.inference(program)
        undivided = PipelineSplit(stages=1, micro_batches=1)
        pricing = Pricing(workload, machine_of(strategy), entry.sizes, undivided)
        found = search(strategy, workload, seeds, peak=pricing.peak)
        parted = propagate_and_partition(program, found.seeds)
        report = directory_data((parted,))
        write(
            (parted,),
            folder,
            report=report,
            strategy=resolved(parted.plan, parted.source),
            model_name=self.name,
        )
        return report

    def _slice_of(self, name: str, dims: Dims) -> TensorEntry | None:
        """Returns the layout of an input if each rank is given a shard of it."""
        index = self.inputs.index(name)
        shape = dims[index]
        if not self._given.sliced[index] or not shape or shape[0] == 1:
            return None
        return (self.devices, *([1] * (len(shape) - 1)))

    def _strategy(
        self, program: Program, gates: Gates, dims: Dims, values: Mapping[str, int]
    ) -> Strategy:
        """Returns what was given, as a strategy for the graph between the gates."""
        given = self._given
        # By the name of the value that the function's nodes read, which may be that of a gate.
        entries = {gates.inputs.get(i, n): given.inputs[i] for i, n in enumerate(self.inputs)}
        parameters = match_parameters(
            given.parameters,
            program.graph,
            dict.fromkeys(given.parameters, "parameter_plan"),
        )
        entries |= {name: entry for name, (_, entry) in parameters.items()}
        laid = {name: entry for name, entry in entries.items() if entry}
        nodes, taken = read_together(program.rules, laid, given.devices)
        laid = {name: entry for name, entry in laid.items() if name not in taken}
        slices = {n: e for n in self.inputs if (e := self._slice_of(n, dims))}
        made = gates.made or dict(enumerate(gates.outputs))
        through = {g: laid.get(g) for g in gates.inputs.values()}
        through |= {g: given.outputs[index] for index, g in made.items()}
        return Strategy(
            WHERE,
            given.devices,
            dataset={n: e for n, e in laid.items() if n in self.inputs} | slices,
            parameters={n: e for n, e in laid.items() if n in parameters},
            nodes=nodes
            | {g: NodeEntry.model_validate({"in": [e]}) for g, e in through.items() if e},
            rest="search",
            search=SearchEntry.model_validate(
                {"level": given.level, "machine": given.machine, "sizes": dict(values)}
            ),
            document=Document({}, WHERE),
        )


def _values(
    names: Sequence[str],
    dims: Sequence[Sequence[int | str | None] | None],
    shapes: Sequence[tuple[int, ...]],
) -> dict[str, int]:
    """Returns the sizes of the symbols that are a dim by themselves.

    Raises:
        CallError: A shape does not fit the dims, or a symbol has two sizes.
    """
    found: dict[str, int] = {}
    for name, wanted, shape in zip(names, dims, shapes, strict=True):
        if wanted is None:
            continue
        if len(wanted) != len(shape):
            raise CallError(
                f"input {name!r}: expected {len(wanted)} dims "
                f"({', '.join(map(str, wanted))}), got the shape {shape}"
            )
        for axis, (dim, size) in enumerate(zip(wanted, shape, strict=True)):
            if isinstance(dim, int):
                expected = dim
            elif dim is None or as_dim(dim) != dim_symbol(dim):
                continue
            else:
                expected = found.setdefault(dim, size)
            if expected != size:
                what = f" for {dim!r}, as in other inputs" if isinstance(dim, str) else ""
                raise CallError(
                    f"input {name!r}, dim {axis}: expected {expected}{what}, got {size}"
                )
    return found
