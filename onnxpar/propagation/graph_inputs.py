"""The layout of graph inputs: sharded at once if every node that reads them would slice them."""

from dataclasses import replace

from onnxpar.core.sharding import Sharding
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import captured
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.resharding.routes import cheapest_route


def shard_inputs(program: Program, plan: Plan, seeds: Seeds) -> Plan:
    """Returns the plan with inputs sharded over parameter axes if all their readers need that.

    The layout of an input such as a cache of keys follows from the parameters: a device that
    computes some heads holds only those heads, and passes them from step to step in this layout.
    The sharding of the batch is not changed, nor are inputs whose layout the user fixed, nor inputs
    that are outputs too.

    Args:
        program: The program.
        plan: Its plan; it is not changed.
        seeds: The part of the plan that the user fixed.
    """
    table = program.env.table
    axes = {atom for axis in seeds.parameter_axes for atom in axis}
    if not axes:
        return plan
    wanted: dict[str, set[Sharding | None]] = {}
    for node in program.graph:
        for value, want in zip(node.inputs, plan.nodes[node.name or ""].inputs, strict=False):
            if value is not None:
                wanted.setdefault(value.name or "", set()).add(want)
        for value in captured(node):
            # A captured value keeps its layout.
            wanted.setdefault(value.name or "", set()).add(None)
    inputs = dict(plan.inputs)
    outputs = {value.name for value in program.graph.outputs}
    for name, held in plan.inputs.items():
        wants = wanted.get(name, set())
        if len(wants) != 1 or name in outputs or name in seeds.held:
            continue
        (want,) = wants
        if want is None or want == held or want.partial or held.partial:
            continue
        added = set(want.split_atoms) - set(held.split_atoms)
        if added <= axes and cheapest_route((held,), want, plan.mesh, table, 1).bytes == 0:
            inputs[name] = want
    return replace(plan, inputs=inputs)
