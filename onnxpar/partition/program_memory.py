"""The bytes that a rank holds for its programs, computed from the programs themselves."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

import onnx_ir as ir

from onnxpar.core.symbols import SymbolTable, as_dim
from onnxpar.cost.live_memory import MemoryStep, live_bytes, live_peak, makes
from onnxpar.graph.body_captures import read_by
from onnxpar.ops.kernel_memory import call, kernel
from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import Shape
from onnxpar.partition.partitioned_model import PartitionedModel


@dataclass(frozen=True)
class ProgramMemory:
    """The bytes that a rank holds for one program.

    Attributes:
        weights: Parameters that it reads from files.
        states: The buffers that it reads or writes and that live from run to run, by name.
        inputs: Its inputs.
        outputs: Its outputs that are not written to buffers; they are kept for the next run.
        values: The peak of the values between its nodes.
        adding: The same if a step has several micro-batches: gradients are values, too, until they
            have been added up in the buffers.
        unknown: Values whose size is not known before the run; they are not counted.
    """

    weights: int
    states: Mapping[str, int]
    inputs: int
    outputs: int
    values: int
    adding: int
    unknown: tuple[str, ...]


def program_memory(
    program: PartitionedModel, sizes: Mapping[str, int] | None = None
) -> ProgramMemory:
    """Returns the bytes that a rank holds for a program; all ranks hold the same.

    Args:
        program: The program of all ranks.
        sizes: Sizes of symbols by name; the others have the size `Symbol.typical`.
    """
    tensors = LocalSizes(program.builder.table, dict(sizes or {}))
    outputs = {o.local.name or "": o for o in program.outputs}
    buffers, fed, sums = program.states.outputs, program.states.inputs, program.states.sums
    added = {o.local.name or "" for o in program.outputs if buffers.get(o.name) in sums.values()}
    states = {p.name: tensors.bytes(p.local) for p in program.parameters if p.fed}
    # The runtime has the sums of gradients in the buffers of the gradients.
    read = [i for i in program.inputs if i.name in fed and i.name not in sums]
    states |= {i.name: tensors.bytes(i.local) for i in read}
    states |= {
        buffers[o.name]: tensors.bytes(o.local) for o in program.outputs if o.name in buffers
    }
    steps = tuple(memory_steps(program.builder.nodes, tensors, program.registry))
    # The values that other programs read are there until the program ends.
    leaving = MemoryStep("", tuple(h.local.name or "" for h in program.handed_out), (), 0)
    return ProgramMemory(
        weights=sum(tensors.bytes(p.local) for p in program.parameters if not p.fed),
        states=states,
        inputs=sum(tensors.bytes(i.local) for i in program.inputs if i.name not in fed),
        outputs=sum(tensors.bytes(o.local) for o in program.outputs if o.name not in buffers),
        values=live_peak((*steps, leaving), outputs),
        adding=live_peak((*steps, leaving), outputs.keys() - added),
        unknown=tuple(tensors.unknown),
    )


def node_bytes(program: PartitionedModel, sizes: Mapping[str, int]) -> list[int]:
    """Returns for each node the bytes of the values that are there while it runs.

    Args:
        program: The program of all ranks.
        sizes: As in `program_memory`.
    """
    tensors = LocalSizes(program.builder.table, sizes)
    steps = tuple(memory_steps(program.builder.nodes, tensors, program.registry))
    return live_bytes(steps, {o.local.name or "" for o in program.outputs})


def value_bytes(program: PartitionedModel, value: ir.Value, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a value of a program; 0 if its size is not known before the run."""
    return LocalSizes(program.builder.table, sizes).bytes(value)


def total_bytes(programs: Iterable[ProgramMemory], *, several: bool = False) -> int:
    """Returns the most bytes that a rank holds while it runs these programs one after another.

    Weights and buffers are shared, so each buffer counts once; inputs and outputs of every program
    stay bound.

    Args:
        programs: The programs.
        several: Whether a step has several micro-batches.
    """
    known = tuple(programs)
    states: dict[str, int] = {}
    for program in known:
        states |= program.states
    bound = sum(p.inputs + p.outputs for p in known)
    weights = max((p.weights for p in known), default=0)
    values = max((p.adding if several else p.values for p in known), default=0)
    return weights + sum(states.values()) + bound + values


def handed_bytes(program: PartitionedModel, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each value of `handed_in`, by name; `sizes` as in `program_memory`."""
    tensors = LocalSizes(program.builder.table, sizes)
    return {h.local.name or "": tensors.bytes(h.local) for h in program.handed_in}


class LocalSizes:
    """Sizes of values at given sizes of symbols.

    Attributes:
        unknown: Values that were asked for, and whose size is not known before the run.
    """

    def __init__(self, table: SymbolTable, sizes: Mapping[str, int]) -> None:
        """Takes the symbols, and the sizes of some; others have the size `Symbol.typical`."""
        self._table = table
        self._sizes = sizes
        self.unknown: list[str] = []

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Returns the local shape of a value; None if it is absent or not known."""
        if value is None or value.shape is None:
            return None
        dims = []
        for dim in value.shape:
            size = dim.value if isinstance(dim, ir.SymbolicDim) else dim
            if size is None:
                return None
            dims.append(self._table.typical(as_dim(size), self._sizes))
        return tuple(dims)

    def bytes(self, value: ir.Value) -> int:
        """Returns the bytes of a value, 0 if its shape is not known."""
        shape = self.shape(value)
        if shape is None or value.dtype is None:
            self.unknown.append(value.name or "")
            return 0
        return ceil(prod(shape) * value.dtype.itemsize)


def memory_steps(
    nodes: Iterable[ir.Node], tensors: LocalSizes, registry: Registry
) -> Iterator[MemoryStep]:
    """Yields the steps of a rank's program; a body counts only with the values that it reads.

    Args:
        nodes: The nodes, in the order of execution.
        tensors: The sizes of their values.
        registry: The table of operators.
    """
    for node in nodes:
        facts = kernel(node, registry)
        operands = [v.name or "" if v is not None else "" for v in node.inputs]
        names = [v.name or "" for v in node.outputs]
        sizes = [tensors.bytes(v) if v.name else 0 for v in node.outputs]
        first = node.outputs[0].dtype if node.outputs else None
        seen = call(
            node,
            [tensors.shape(v) for v in node.inputs],
            [tensors.shape(v) for v in node.outputs],
            int(first.itemsize) if first is not None else 0,
            registry,
        )
        reads = tuple(v.name or "" for v in read_by(node))
        yield MemoryStep(
            node.name or "", reads, makes(facts, operands, names, sizes), facts.work(seen)
        )
