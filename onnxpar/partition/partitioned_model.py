"""The result of partitioning: one graph for all ranks, with the shardings of inputs and parameters.

`onnxpar.partition.writer` makes it; `onnxpar.emit.rank_graph` turns it into one graph per rank
and `onnxpar.emit` into a directory of files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Symbol
from onnxpar.facts.carried_states import CarriedState
from onnxpar.facts.equalities import Equality
from onnxpar.facts.index_ranges import IndexRange
from onnxpar.facts.supplied_inputs import SuppliedInput
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.plan import Plan
from onnxpar.ops.registry import Registry
from onnxpar.propagation.conflicts import Conflict
from onnxpar_format.manifest import Pipeline


@dataclass(frozen=True)
class Parameter:
    """An initializer of the model, sharded.

    Attributes:
        name: Name in the model.
        source: The global initializer; its `const_value` may be an `ir.ExternalTensor`, which is
            read lazily.
        local: The value of the rank-generic graph that stands for a rank's shard: an initializer
            with dtype and local shape and without `const_value`.
        sharding: Its sharding; never partial, sizes are integers.
        fed: Whether it is trained: the graph takes it as an input, from a buffer that the runtime
            keeps, and its file holds the initial value.
    """

    name: str
    source: ir.Value
    local: ir.Value
    sharding: Sharding
    fed: bool = False


@dataclass(frozen=True)
class GraphValue:
    """An input or an output of the model.

    Attributes:
        name: Name in the model.
        local: The value of the rank-generic graph, with the same name and a known dtype.
        sharding: Its sharding, canonical; sizes may be symbolic, and only a state may be partial.
    """

    name: str
    local: ir.Value
    sharding: Sharding


@dataclass(frozen=True)
class States:
    """The operands of a program that live in buffers of the runtime, from one run to the next.

    Padding in these buffers is always zero: programs rely on it and keep it zero.

    Attributes:
        inputs: Names of inputs and initializers that are read from a buffer of the same name.
        outputs: For each output that is written to a buffer, the buffer's name.
        sums: For each input that is the sum of a gradient over micro-batches, the buffer of the
            gradient (see `onnxpar.schedule.accumulate`).
    """

    inputs: frozenset[str] = frozenset()
    outputs: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Handed:
    """A local tensor that one program of a pipeline makes and another one reads.

    Attributes:
        local: The value: an output of the first graph and an input of the second.
        source: Name of the program that makes it.
    """

    local: ir.Value
    source: str


@dataclass(frozen=True)
class PartitionedModel:
    """The program of all ranks, or of those of a pipeline stage.

    Attributes:
        program: Name of the program, as in `rank0003.<program>.onnx`.
        source: The undivided model; gives name, opset imports and metadata.
        builder: Holds nodes in the order of execution, small constants, system inputs and
            collectives. Nodes whose outputs nobody needs are not in it.
        inputs: The model's inputs.
        outputs: The model's outputs.
        parameters: Initializers that go to the weight files.
        plan: The plan that was carried out; its mesh is the program's.
        registry: The table of operators.
        symbols: Constraint of each symbol by name.
        replicated: `(node, op_type, reason)` of each node that every rank computes in full.
        equalities: Sizes that rules assume to be equal without a proof.
        ranges: Ranges that operators require of the elements of inputs.
        states: Which of its operands are buffers of the runtime.
        carried: In a forward program, the outputs that are inputs of the next run.
        supplied: The inputs that another program of the directory supplies.
        conflicts: Reshards between neighbours that want a value in different layouts.
        stage: The pipeline stage whose ranks run it.
        stages: Number of stages; the ranks of stage s begin at `s * mesh.size`.
        virtual_stage: Its virtual stage; a stage may have several.
        handed_in: The values that it reads from other programs of the same micro-batch.
        handed_out: The values that it makes for them.
        twice: In a program of two micro-batches that take turns, the nodes of the undivided program
            that are there for each of them, by name; the others are there once.
    """

    program: str
    source: ir.Model
    builder: LocalBuilder
    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]
    parameters: tuple[Parameter, ...]
    plan: Plan
    registry: Registry
    symbols: Mapping[str, Symbol]
    replicated: tuple[tuple[str, str, str], ...]
    equalities: tuple[Equality, ...] = ()
    ranges: tuple[IndexRange, ...] = ()
    states: States = States()
    carried: tuple[CarriedState, ...] = ()
    supplied: tuple[SuppliedInput, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stage: int = 0
    stages: int = 1
    virtual_stage: int = 0
    handed_in: tuple[Handed, ...] = ()
    handed_out: tuple[Handed, ...] = ()
    twice: frozenset[str] = frozenset()

    @property
    def ranks(self) -> range:
        """The ranks that run it."""
        size = self.plan.mesh.size
        return range(self.stage * size, (self.stage + 1) * size)


@dataclass(frozen=True)
class PipelinePrograms:
    """How the programs of a directory make up a pipeline.

    Attributes:
        unsplit: The programs before they were split, for their inputs and outputs.
        entry: The manifest's entry "pipeline".
        assign: The virtual stage of each node of the chain, by name.
    """

    unsplit: tuple[PartitionedModel, ...]
    entry: Pipeline
    assign: Mapping[str, int]

    def shown(self, programs: Sequence[PartitionedModel]) -> tuple[PartitionedModel, ...]:
        """Returns the programs before they were split, and those of `programs` never split."""
        split = {id(pm.plan) for pm in self.unsplit}
        return (*self.unsplit, *(pm for pm in programs if id(pm.plan) not in split))
