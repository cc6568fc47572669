"""The arithmetic operations of an undivided program, as an expression in its symbols."""

from onnxpar.core.rule import ANY
from onnxpar.core.symbols import Dim, as_dim, symbols_of
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.plan import factor_sizes
from onnxpar.ops.node_cost import Share, by_rule, contracts


def program_flops(program: Program) -> Dim | None:
    """Returns the operations of one run of a program, on all devices together.

    A multiplication and an addition are two operations. Products, convolutions, attention and
    recurrent layers are counted, and elementwise operators, reductions and normalisations are not.
    This is how the utilisation of a device is usually given (Chowdhery et al., "PaLM: Scaling
    Language Modeling with Pathways", 2022, appendix B). Nodes that are computed on several devices,
    or once more for the backward pass, count once.

    Args:
        program: The program, before it is partitioned and without recomputation.

    Returns:
        The number of operations. None if the sizes of the inputs do not determine it: a node has a
        body, which may run any number of times, a size depends on data, or a symbol has a value on
        each data rank.
    """
    rules, shapes, total = program.rules, program.env.shapes, []
    for node in program.graph:
        if bodies_of(node):
            return None
        name = node.name or ""
        rule, view, count = rules.by_node[name], rules.views[name], rules.costs.get(name)
        read = [
            None if value is None or operand.mode == ANY else shapes.get(value.name or "")
            for value, operand in zip(node.inputs, rule.inputs, strict=True)
        ]
        made = [shapes.get(value.name or "", ()) for value in node.outputs]
        # Bytes do not matter here, and comparing them would need numbers.
        share = Share(
            rule,
            view,
            factor_sizes(rule, view),
            tuple(read),
            tuple(made),
            (0,) * len(read),
            (0,) * len(made),
        )
        if count is not None or contracts(share):
            flops = (count or by_rule)(share).flops
            # Costs of concrete sizes are floats, which sizes are not made of.
            total.append(round(flops) if isinstance(flops, float) else flops)
    count_of_all = as_dim(sum(total))
    given = {
        s for v in program.graph.inputs for size in shapes[v.name or ""] for s in symbols_of(size)
    }
    known = {s for s in given if not program.env.table[s].per_rank}
    return count_of_all if symbols_of(count_of_all) <= known else None
