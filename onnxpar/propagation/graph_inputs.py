"""How graph inputs enter: already split where every node that reads them would slice them."""

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.resharding.routes import cheapest_route

_GRAPH = ir.AttributeType.GRAPH


def entering(
    plan: Plan,
    nodes: Sequence[ir.Node],
    outputs: Sequence[ir.Value],
    seeds: Seeds,
    table: SymbolTable,
) -> Plan:
    """Returns the plan with inputs split over parameter axes where all that read them want that.

    An input such as a cache of keys follows from the parameters: on a device that computes some
    heads it has those heads only, and what a step makes of it is given to the next as it is. The
    batch is left as the user's strategy says, and so is an input that it lays out by name.

    Args:
        plan: A plan; it is not changed.
        nodes: The nodes of the model.
        outputs: The outputs of the model; one that is an input leaves as it enters.
        seeds: What the user fixed.
        table: What is known of the symbols.
    """
    axes = {atom for axis in seeds.parameter_axes for atom in axis}
    if not axes:
        return plan
    wanted: dict[str, set[Sharding | None]] = {}
    for node in nodes:
        for value, want in zip(node.inputs, plan.nodes[node.name or ""].inputs, strict=False):
            if value is not None:
                wanted.setdefault(value.name or "", set()).add(want)
        for graph in (a.as_graph() for a in node.attributes.values() if a.type == _GRAPH):
            for inner in ir.traversal.RecursiveGraphIterator(graph):
                # What a body captures is not an operand with a sharding.
                for value in inner.inputs:
                    if value is not None:
                        wanted.setdefault(value.name or "", set()).add(None)
    inputs = dict(plan.inputs)
    passed_on = {value.name for value in outputs}
    for name, held in plan.inputs.items():
        wants = wanted.get(name, set())
        if len(wants) != 1 or name in passed_on or name in seeds.held:
            continue
        (want,) = wants
        if want is None or want == held or want.partial or held.partial:
            continue
        added = set(want.split_atoms) - set(held.split_atoms)
        if added <= axes and cheapest_route((held,), want, plan.mesh, table, 1).bytes == 0:
            inputs[name] = want
    return replace(plan, inputs=inputs)
