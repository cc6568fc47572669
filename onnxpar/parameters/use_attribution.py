"""Which parameter each use of an initializer was, in a file of `torch.onnx.export`.

The optimizer of PyTorch's exporter makes one initializer of small equal ones. Which of them a node
reads follows from the operator from which it was translated: its text names the placeholders and
computed values that it reads. A placeholder that no operand of the node explains is the one that a
merged initializer was there.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.ops.operand_roles import expressed_layer, is_statistic
from onnxpar.ops.registry import Registry
from onnxpar.parameters.folded_tensors import MAKING, REARRANGING
from onnxpar.parameters.origin import is_floating, is_uniform
from onnxpar.parameters.torch_metadata import (
    Placeholder,
    Signature,
    arguments_of,
    folded_from,
    function_of,
    kind_of,
    module_of,
    operator_of,
    placeholder_of,
)

Key = frozenset[str]
"""Names of the placeholders from which a tensor comes; empty for a constant. A name with the prefix
`UNKNOWN` is not a placeholder, but a value whose source the file does not show."""

CONSTANT: Key = frozenset()
UNKNOWN = "?"


@dataclass
class Initializer:
    """A floating initializer.

    Attributes:
        value: The initializer in the graph.
        own: The placeholders from which it comes, by its mark, its record of folding, or its name.
        folded: Whether it was folded from them.
        rewritten: Whether it has the name of a placeholder but not its mark: a rewriting of the
            optimizer has replaced it.
        key: The placeholders that its uses were.
        functions: Functions of PyTorch that the module's own code applied to them, if any.
    """

    value: ir.Value
    own: tuple[Placeholder, ...]
    folded: bool
    rewritten: bool
    key: Key = CONSTANT
    functions: frozenset[str] = frozenset()

    @property
    def own_key(self) -> Key:
        """The placeholders from which it comes, by name."""
        return frozenset(p.name for p in self.own)


@dataclass
class Operator:
    """An operator of the exported program: its nodes, and the arguments that they do not explain.

    Attributes:
        nodes: Its nodes.
        left: Placeholders that it reads but that are no operand's, in the order of arguments.
        aliases: Arguments that are neither placeholders nor operands: values that the optimizer has
            replaced by others. Empty if they can be computed operands.
        taken: By identity of a merged initializer, which of `left` it was.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    left: list[Placeholder] = field(default_factory=list)
    aliases: tuple[str, ...] = ()
    taken: dict[int, Key] = field(default_factory=dict)


class Attribution:
    """The floating initializers of a graph, and the placeholders that their uses were.

    Attributes:
        tensors: The initializers.
        by_value: The same by identity of the value.
        operators: The operators from which nodes were translated, by text.
    """

    def __init__(self, graph: ir.Graph, signature: Signature, registry: Registry) -> None:
        """Reads a graph; it is not changed."""
        self.signature = signature
        self.registry = registry
        nodes = list(ir.traversal.RecursiveGraphIterator(graph))
        self.order = {id(node): i for i, node in enumerate(nodes)}
        marks = any(kind_of(v) for v in graph.initializers.values())
        self.tensors = [
            self._tensor(v, marks) for v in graph.initializers.values() if is_floating(v)
        ]
        self.by_value = {id(t.value): t for t in self.tensors}
        self.operators: dict[str, Operator] = defaultdict(Operator)
        for node in nodes:
            if operator_of(node):
                self.operators[operator_of(node)].nodes.append(node)
        for operator in self.operators.values():
            self._explain(operator)
        known = {p.name for t in self.tensors for p in t.own}
        self._lacking = any(
            p.is_parameter and p.name not in known and not self.is_alias(p.target)
            for p in signature.placeholders.values()
        )

    def is_alias(self, target: str) -> bool:
        """Whether the module of a parameter reads that of another module, to which it was tied."""
        module, _, last = target.rpartition(".")
        return any(
            module_of(node) == module
            and p.is_parameter
            and p.target != target
            and last_part(p.target) == last
            for operator in self.operators.values()
            for node in operator.nodes[:1]
            for p in self.signature.read_by(node)
        )

    def _tensor(self, value: ir.Value, marks: bool) -> Initializer:
        known, targets = self.signature.placeholders, self.signature.targets
        name = value.name or ""
        if kind_of(value) is not None:
            return Initializer(value, (known[placeholder_of(value)],), False, False)
        sources = folded_from(value)
        own = tuple(targets[s] for s in sources if s in targets)
        if own or sources:
            return Initializer(value, own, True, False)
        if name in targets:
            # A tool may have dropped all marks; then the operators of its readers decide.
            reads = [self.signature.read_by(node) for node, _ in value.uses()]
            other = any(found and targets[name] not in found for found in reads)
            return Initializer(value, (targets[name],), False, marks or other)
        return Initializer(value, (), False, False)

    def _explain(self, operator: Operator) -> None:
        """Finds the arguments of an operator that the operands of its nodes do not explain."""
        read = self.signature.read_by(operator.nodes[0])
        arguments = dict.fromkeys(arguments_of(operator.nodes[0]))
        made = {id(out) for node in operator.nodes for out in node.outputs}
        operands = [v for node in operator.nodes for v in node.inputs if v is not None]
        outside = {id(v): v for v in operands if id(v) not in made}
        claimed: set[str] = set()
        named = {v.name for v in outside.values()}
        unnamed = 0
        for value in outside.values():
            tensor = self.by_value.get(id(value))
            if tensor is not None:
                # If it is an argument itself, it was computed from its placeholders before.
                claimed |= set() if value.name in arguments else tensor.own_key
            elif not value.is_initializer() and value.name not in arguments:
                unnamed += 1
        operator.left = [p for p in dict.fromkeys(read) if p.name not in claimed]
        placeholders = self.signature.placeholders
        others = [a for a in arguments if a not in placeholders and a not in named]
        # Computed operands explain as many; if more are left, some were initializers.
        operator.aliases = tuple(others) if len(others) > unnamed else ()

    def key(self, tensor: Initializer, node: ir.Node, index: int) -> Key:
        """Returns the placeholders that one use of an initializer was."""
        own, text = tensor.own_key, operator_of(node)
        if not text or tensor.value.name in arguments_of(node):
            return own
        operator = self.operators[text]
        if is_statistic(node, index, self.registry):
            return self._statistic(tensor, node, index)
        # The ones that scale a norm without a parameter were merged with its running variance.
        statistic = not any(p.is_parameter for p in tensor.own) and any(
            v is tensor.value and is_statistic(node, i, self.registry)
            for i, v in enumerate(node.inputs)
        )
        if not statistic and own & {p.name for p in self.signature.read_by(node)}:
            return own
        # Now it was merged, or its operator reads it by a name that no longer exists. Only uniform
        # tensors, and parameters that were copied, are equal by chance.
        if not own and operator.left and not operator.taken:
            self._take_constants(operator)
        if own and operator.left and id(tensor) not in operator.taken:
            operator.taken[id(tensor)] = self._take(operator, tensor)
        if id(tensor) in operator.taken:
            return operator.taken[id(tensor)]
        if operator.aliases and not statistic:
            return self._alias(operator, tensor, node)
        return own if own and not is_uniform(tensor.value) else CONSTANT

    def _statistic(self, tensor: Initializer, node: ir.Node, index: int) -> Key:
        """Returns the buffer of a running statistic, by its place among the statistics."""
        places = [i for i in range(len(node.inputs)) if is_statistic(node, i, self.registry)]
        buffers = [p for p in self.signature.read_by(node) if not p.is_parameter]
        if len(places) != len(buffers):
            return tensor.own_key
        return frozenset({buffers[places.index(index)].name})

    def _alias(self, operator: Operator, tensor: Initializer, node: ir.Node) -> Key:
        """Returns the placeholders of an initializer that its operator reads by an unknown name.

        It may be the same tensor, returned by a function that changes nothing; the tensor of
        another module that was computed in the same way; or a tensor that is equal by chance.
        """
        own, functions = tensor.own_key, {function_of(a) for a in operator.aliases}
        like = {*REARRANGING, *MAKING, function_of(tensor.value.name or "")}
        chance = is_uniform(tensor.value) and not functions & like
        unknown = frozenset({UNKNOWN + operator.aliases[-1]})
        if any(p.is_parameter for p in tensor.own):
            return unknown if chance else self._of_module(tensor, node)
        return unknown if chance and self._lacking else own

    def _take(self, operator: Operator, tensor: Initializer) -> Key:
        """Returns the placeholder of an operator whose name is most like that of the tensor."""
        wanted = tensor.own[0].target.split(".")
        best = max(
            operator.left,
            key=lambda p: (_alike(p.target.split("."), wanted), -operator.left.index(p)),
        )
        operator.left.remove(best)
        return frozenset({best.name})

    def _take_constants(self, operator: Operator) -> None:
        """Finds the constants that were the unexplained parameters of an operator.

        A constant that was first in the file has been merged with parameters of other operators.
        A node by which exporters express another layer always has a constant scale and bias.
        """
        candidates = {
            id(tensor): None
            for node in sorted(operator.nodes, key=lambda n: self.order[id(n)])
            if not expressed_layer(node, self.registry) or len(operator.nodes) == 1
            for value in node.inputs
            if value is not None and (tensor := self.by_value.get(id(value))) is not None
            if not tensor.own and is_uniform(value)
            if len({operator_of(n) for n, _ in value.uses()}) > 1
        }
        if len(candidates) == len(operator.left):
            for key, placeholder in zip(candidates, operator.left, strict=True):
                operator.taken[key] = frozenset({placeholder.name})

    def _of_module(self, tensor: Initializer, node: ir.Node) -> Key:
        """Returns the placeholder of the same name and kind in the module of a node."""
        module = module_of(node)
        if not module or any(p.target.startswith(f"{module}.") for p in tensor.own):
            return tensor.own_key
        wanted = last_part(tensor.own[0].target)
        inside = [
            p
            for p in self.signature.placeholders.values()
            if p.target == f"{module}.{wanted}" and p.kind == tensor.own[0].kind
        ]
        return frozenset({inside[0].name}) if len(inside) == 1 else tensor.own_key


def last_part(target: str) -> str:
    """Returns the last part of a dotted name."""
    return target.rpartition(".")[2]


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns how many trailing parts of two names are the same."""
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count
