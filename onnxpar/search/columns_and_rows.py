"""The known form of a plan: matrices sharded by columns and by rows in turn.

See Shoeybi et al., "Megatron-LM" (2019). Only partial sums of products with parameters are reduced,
at most one for every two matrices, and no other value is resharded. In a deep model, this is far
cheaper to see than to search for a better plan.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.rule import SPECIAL, Operand
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.graph.state_names import state_pairs


def is_columns_and_rows(program: Program, plan: Plan, cost: CostModel) -> bool:
    """Whether the forward nodes of a plan have the known form.

    Args:
        program: The program.
        plan: A plan for it.
        cost: A cost model, by which a reshard costs nothing if no device sends anything.
    """
    walk = _Walk(program, plan, cost)
    forward = (n for n in program.graph if not program.rules.views[n.name or ""].is_backward)
    if not all(walk.passes(node) for node in forward):
        return False
    # The local form of the loss communicates, no other may.
    return walk.special <= 1 and 2 * len(walk.reduced) <= walk.matrices


@dataclass
class _Walk:
    """What was seen so far.

    Attributes:
        made: How each value is sharded.
        stored: Parameters, and values that nodes compute from them alone.
        carried: Inputs that are states: their layout follows the output's.
        products: Products of two values that are not stored.
        reduced: Partial sums that are reduced for a reader.
        matrices: Number of matrices, stored values of which a sum of products is taken.
        special: Number of local forms that communicate.
    """

    program: Program
    plan: Plan
    cost: CostModel
    made: dict[str, Sharding] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    carried: Collection[str] = ()
    products: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)
    matrices: int = 0
    special: int = 0

    def __post_init__(self) -> None:
        self.made = {**self.plan.inputs, **self.plan.parameters}
        self.stored = set(self.program.graph.initializers)
        self.carried = state_pairs(self.program.graph).keys()

    def passes(self, node: ir.Node) -> bool:
        """Whether a node reshards nothing but partial sums of products with parameters."""
        found = self.plan.nodes[node.name or ""]
        for name, _, want in self._operands(node, found):
            have = self.made.get(name)
            if have is None or want is None or name in self.carried:
                continue
            if self.cost.reshard(have.with_partial(()), want.with_partial(()), 1):
                return False
            if set(have.partial) - set(want.partial):
                if name in self.products:
                    return False
                self.reduced.add(name)
        self._count(node, found)
        for value, sharding in zip(node.outputs, found.outputs, strict=True):
            name = value.name or ""
            self.made[name] = self.plan.resharded.get(name, sharding)
        return True

    def _count(self, node: ir.Node, found: NodePlan) -> None:
        kinds = found.rule.kinds
        self.special += any(kinds[factor] == SPECIAL for factor in found.factors)
        operands = list(self._operands(node, found))
        self.matrices += sum(
            name in self.stored
            and len(operand.dims) > 1
            and any(kinds[factor] == "sum" for factors in operand.dims for factor in factors)
            for name, operand, _ in operands
        )
        read = {name for name, operand, _ in operands if not operand.mode}
        outputs = [value.name or "" for value in node.outputs]
        if read and read <= self.stored:
            self.stored.update(outputs)
        elif not read & self.stored and any(kinds[f] == "sum" for f in found.factors):
            self.products.update(outputs)

    @staticmethod
    def _operands(node: ir.Node, found: NodePlan) -> Iterator[tuple[str, Operand, Sharding | None]]:
        """Name, rule and sharding of each operand that is there."""
        for value, operand, want in zip(node.inputs, found.rule.inputs, found.inputs, strict=False):
            if value is not None:
                yield value.name or "", operand, want
