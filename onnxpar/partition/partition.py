"""From a plan to the program of all ranks: one rank-generic graph."""

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
) -> PartitionedModel:
    """Returns the program of all ranks for a plan.

    Args:
        program: The program of one device; it is not changed.
        plan: What to carry out.
        name: Name of the program that is made.
        states: Which of its operands are buffers of the runtime.
        gathered: Values that are brought into another sharding anew for each node that reads them,
            so that what was brought there for one need not be kept for the next.
        places: Where nodes run in a pipeline, for `onnxpar.stages.split_program`; the nodes stand
            in the order of their places. A version of a value that one stage has made is not used
            in another, which gets the value as it was made.

    Raises:
        ShardingError: A node cannot be written for the sharding the plan gives it.
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
    ).run()
