"""From a plan to the program of all ranks: one graph in which only data depends on the rank."""

from onnxpar.facts.program import Program
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.pipeline_places import ONE_PLACE, Places
from onnxpar.graph.plan import Plan, varying
from onnxpar.partition.body_writer import body_partitioner
from onnxpar.partition.partitioned_model import PartitionedModel, States
from onnxpar.partition.writer import STATELESS, ProgramWriter
from onnxpar.propagation.conflicts import conflicts


def partition(
    program: Program,
    plan: Plan,
    *,
    name: str = "model",
    states: States = STATELESS,
    gathered: frozenset[str] = frozenset(),
    places: Places = ONE_PLACE,
    fuses: bool = True,
) -> PartitionedModel:
    """Returns the program of all ranks for a plan.

    Args:
        program: The program of one device; it is not changed.
        plan: Its plan.
        name: Name of the new program.
        states: Which of its operands are buffers of the runtime.
        gathered: Values that are resharded again for each node that reads them, so that the result
            need not be kept between these nodes.
        places: Where nodes run in a pipeline, for `onnxpar.stages.split_program`; the nodes are in
            the order of their places. A stage gets each value in the sharding in which it was
            made, or in that of `Places.sent`.
        fuses: Whether nodes of a training program may become fused operators.

    Raises:
        ShardingError: A node has no local form for its sharding in the plan.
    """
    table = program.env.table
    builder = LocalBuilder(table, program.opset, plan.mesh, varying(plan.inputs, table))
    return ProgramWriter(
        program,
        plan,
        builder,
        body_partitioner(program.registry),
        name,
        states,
        gathered,
        places,
        conflicts(program, plan, gathered),
        fuses,
    ).run()
