"""The lookup of operator definitions by (domain, type, version): `Registry`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.errors import RuleError
from onnxpar.graph.node_view import default_opset
from onnxpar.ops.old_node import Upgrade
from onnxpar.ops.operator import OpDef


@dataclass(frozen=True, eq=False)
class Registry:
    """A table of operator definitions."""

    defs: tuple[OpDef, ...]
    _index: dict[tuple[str, str], list[OpDef]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Builds the index; RuleError if an operator is defined twice."""
        seen: set[tuple[str, str, int]] = set()
        for op in self.defs:
            key = (op.domain, op.op_type, op.since_version)
            if key in seen:
                raise RuleError(f"operator {op.op_type} since {op.since_version} is defined twice")
            seen.add(key)
            self._index.setdefault((op.domain, op.op_type), []).append(op)
        for versions in self._index.values():
            versions.sort(key=lambda op: op.since_version, reverse=True)

    def find(self, domain: str, op_type: str, version: int) -> OpDef | None:
        """Returns the definition that holds for a version of its domain, or None."""
        domain = "" if domain == "ai.onnx" else domain
        for op in self._index.get((domain, op_type), ()):
            if op.since_version <= version:
                return op
        return None

    def upgrades(self, op_type: str) -> Mapping[int, Upgrade]:
        """Returns the upgrades of an operator of the default domain, by version."""
        versions = self._index.get(("", op_type), ())
        return {v: upgrade for op in versions for v, upgrade in op.upgrades.items()}

    def definition(self, node: ir.Node, opsets: Mapping[str, int]) -> OpDef | None:
        """Returns the definition of a node's operator, or None.

        Args:
            node: The node.
            opsets: Version of each domain; 1 if it is missing.
        """
        version = opsets.get(node.domain, 1) if node.domain else default_opset(opsets)
        return self.find(node.domain, node.op_type, version)

    def of(self, node: ir.Node) -> OpDef | None:
        """Returns the newest definition of a node's operator, or None.

        It is for slots that do not depend on the opset, such as those about kernels.
        """
        found = self._index.get((node.domain, node.op_type))
        return found[0] if found else None

    def oldest(self, op: OpDef) -> OpDef:
        """Returns the first definition of the same operator."""
        return self._index[op.domain, op.op_type][-1]
