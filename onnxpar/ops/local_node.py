"""The view and the builder of a local form: `LocalNode`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import RuleError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, DimSharding, Sharding, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.node_view import BodyFacts
from onnxpar.graph.padding_masks import mask_component
from onnxpar.graph.plan import NodePlan, factor_sizes
from onnxpar.ops.emitted_node import EmittedNode
from onnxpar.resharding.routes import moved_bytes

Captured = tuple[ir.Value, Sharding, ir.Value, bool]
"""A captured value of a body: global value, sharding, local value, whether its padding is zero."""

PartitionBody = Callable[
    [
        LocalBuilder,
        BodyFacts,
        Mapping[str, NodePlan],
        Sequence[Captured],
        Sequence[Sharding],
        Sequence[Sharding],
    ],
    ir.Graph,
]
"""Returns the body for one device, given the builder of the graph around it, the body, the plan of
each of its nodes, the values that it captures, and the shardings of its inputs and results."""


@dataclass(frozen=True)
class LocalNode(EmittedNode[LocalBuilder]):
    """A node that is emitted for one device.

    Attributes:
        view: The node of the undivided graph.
        plan: How it is sharded.
        builder: The builder.
        inputs: Local operands, in the shardings of the plan. Padding along a reduced factor has the
            identity of the reduction. An operand that the rule takes in any sharding (`*`) may be
            None.
        zero: Whether the padding of each operand is known to be zero.
        partition_body: Partitions a body of the node.
    """

    plan: NodePlan
    inputs: tuple[ir.Value | None, ...]
    zero: tuple[bool, ...]
    partition_body: PartitionBody

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.builder.mesh

    @property
    def operands(self) -> Sequence[ir.Value | None]:
        """The local operands."""
        return self.inputs

    def size(self, factor: str) -> Dim:
        """Global size of a factor."""
        return factor_sizes(self.plan.rule, self.view)[factor]

    def components(self, factor: str) -> DimSharding:
        """Components of a factor; a single one without atoms if it is not sharded."""
        return self.plan.factors.get(factor) or (Component(self.size(factor)),)

    def atoms(self, factor: str) -> Atoms:
        """Atoms that shard a factor."""
        return tuple(a for c in self.components(factor) for a in c.atoms)

    def local_size(self, factor: str) -> Dim:
        """Local size of a factor, padding included."""
        return prod(local_size(c, self.mesh, self.table) for c in self.components(factor))

    def is_even(self, factor: str) -> bool:
        """Whether the sharding of a factor is proved to leave no padding."""
        return all(
            not c.atoms or self.view.table.divisible(c.size, self.mesh.count(c.atoms))
            for c in self.components(factor)
        )

    def split_factors(self, kind: str | None = None) -> tuple[str, ...]:
        """Factors that the plan shards, in the order of the rule; only those of `kind` if given."""
        kinds = self.plan.rule.kinds
        return tuple(f for f in kinds if self.atoms(f) and kind in (None, kinds[f]))

    def split_atoms(self, kind: str) -> Atoms:
        """Atoms that shard the factors of one kind, in the order of the rule."""
        return tuple(a for factor in self.split_factors(kind) for a in self.atoms(factor))

    def in_shape(self, index: int) -> tuple[Dim, ...]:
        """Local shape of operand `index`."""
        sharding = self.plan.inputs[index]
        if sharding is None:
            raise self.fail(f"operand {index} has no fixed sharding", RuleError)
        return sharding.local_shape(self.mesh, self.view.table)

    def out_shape(self, index: int = 0) -> tuple[Dim, ...]:
        """Local shape of output `index`."""
        return self.plan.outputs[index].local_shape(self.mesh, self.view.table)

    def out_dtype(self, index: int = 0) -> ir.DataType | None:
        """Element type of output `index`."""
        return self.view.node.outputs[index].dtype

    def copy(
        self,
        inputs: Sequence[ir.Value | None] | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> tuple[ir.Value, ...]:
        """Emits the same operator in local shapes; `attributes` replace or (None) drop its own."""
        node = self.view.node
        merged = {**node.attributes, **(attributes or {})}
        kept = {k: v for k, v in merged.items() if v is not None}
        known = self.view.env.shapes
        outputs = [
            # A result of unknown rank gets no shape, rather than rank 0.
            (out.dtype, self.out_shape(i) if out.name in known or not out.name else None)
            for i, out in enumerate(node.outputs)
        ]
        made = self.builder.ops(
            node.op_type,
            list(self.inputs if inputs is None else inputs),
            outputs,
            kept,
            domain=node.domain,
            name=self.view.name,
            metadata=dict(node.metadata_props),
        )
        for value, source in zip(made, node.outputs, strict=True):
            if source.type is not None and not isinstance(source.type, ir.TensorType):
                value.type = source.type  # a sequence, or an optional value
        return made

    def all_reduce(self, x: ir.Value, atoms: Atoms, reduction: str = "sum") -> ir.Value:
        """Emits an AllReduce of local `x`; returns `x` itself if there are no atoms."""
        if not atoms:
            return x
        return self.builder.collective(
            "AllReduce",
            x,
            tuple(sorted(atoms)),
            shape=self.shape(x),
            moved=moved_bytes("all_reduce", self._bytes(x), self.mesh.count(atoms)),
            value=x.name or "",
            reason=f"{self.view.name} ({self.view.op_type} over a sharded dim)",
            reduction=reduction,
        )

    def all_gather(self, x: ir.Value, atoms: Atoms, axis: int) -> ir.Value:
        """Emits an AllGather of local `x` along `axis`, first atom outermost."""
        count, shape = self.mesh.count(atoms), self.shape(x)
        return self.builder.collective(
            "AllGather",
            x,
            atoms,
            shape=[*shape[:axis], shape[axis] * count, *shape[axis + 1 :]],
            moved=moved_bytes("all_gather", self._bytes(x), count),
            value=x.name or "",
            reason=f"{self.view.name} ({self.view.op_type} over a sharded dim)",
            axis=axis,
        )

    def _bytes(self, x: ir.Value) -> Dim:
        each = int(x.dtype.itemsize) if x.dtype is not None else 1
        return each * prod(self.shape(x))

    def masked(
        self, x: ir.Value, operand: int, factor: str, fill: float | str, *, known_zero: bool = False
    ) -> ir.Value:
        """Returns local operand `x` with the padding of `factor` set to `fill`.

        Args:
            x: A local value laid out as operand `operand`.
            operand: Index of the input whose dims `x` has.
            factor: The factor whose padding is set.
            fill: A number, or "lowest"/"highest" for the ends of the dtype's range.
            known_zero: Whether the padding is known to hold zero.
        """
        scaled = factor in self.plan.rule.scaled
        if (self.is_even(factor) and not scaled) or (known_zero and fill == 0):
            return x
        dims = self.plan.rule.inputs[operand].dims
        for axis, names in enumerate(dims):
            if factor in names:
                sharding = self.plan.inputs[operand]
                assert sharding is not None
                return self._masked(x, sharding, axis, names, factor, fill)
        return x

    def _masked(
        self,
        x: ir.Value,
        sharding: Sharding,
        axis: int,
        names: tuple[str, ...],
        factor: str,
        fill: float | str,
    ) -> ir.Value:
        before = [c for n in names[: names.index(factor)] for c in self.components(n)]
        # A scaled factor has another size in each operand.
        scaled = factor in self.plan.rule.scaled
        inside = list(sharding.dims[axis] if scaled else self.components(factor))
        after = [c for n in names[names.index(factor) + 1 :] for c in self.components(n)]
        local = list(sharding.local_shape(self.mesh, self.view.table))
        for position, component in enumerate(inside):
            if component.atoms:
                x = mask_component(
                    self.builder,
                    x,
                    local,
                    axis,
                    [*before, *inside[:position]],
                    component,
                    [*inside[position + 1 :], *after],
                    fill,
                )
        return x


def copy_node(node: LocalNode) -> Sequence[ir.Value]:
    """The default local form: the same operator on the local operands."""
    return node.copy()
