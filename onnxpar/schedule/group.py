"""Puts collectives of the optimizer's program together, so that a handful of calls carry them out.

A Bucket is one node, and one call of the transport, with several operands and results: the
reductions of gradients, and the gathers of updated parameters. It stands behind the last operand
and before the first reader, so what it holds are neighbours: none needs the result of another.
Nothing is copied, and each result has the bits of a call of its own.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxpar.core.machine import Machine
from onnxpar.cost.timeline import buckets
from onnxpar.graph.body_captures import read_by, read_instead
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import Collective
from onnxpar.graph.metadata_keys import BYTES, OVER, VALUE
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import node_bytes, value_bytes
from onnxpar.schedule.tokens import PEERS, chained

KINDS = ("AllReduce", "ReduceScatter", "AllGather")
"""The collectives of which several can be one call."""
NEXT = "; "
"""Stands between the names of the tensors of a call."""


def group_collectives(
    program: PartitionedModel, machine: Machine, sizes: Mapping[str, int]
) -> PartitionedModel:
    """Returns the program with buckets in place of collectives that can be one call.

    The nodes of its builder are changed. The peak of its values does not rise.

    Args:
        program: The program.
        machine: Its links decide how large a bucket is.
        sizes: Sizes of symbols, for the memory of values; the others have the size
            `Symbol.typical`.
    """
    grouping = _Grouping(program, sizes)
    known = {c.node: c for c in program.builder.collectives if c.op in KINDS and not c.stages}
    mesh = program.plan.mesh
    found = [node for node in grouping.nodes if node.name in known]
    for bucket in list(
        buckets(
            found,
            _kind,
            lambda node: max(grouping.bytes_of(v) for v in (node.inputs[0], node.outputs[0])),
            lambda node: machine.link(mesh, node.meta["atoms"]),
        )
    ):
        for row in grouping.neighbours(bucket):
            # A gather alone is a Bucket too: `onnxpar.schedule.finish_later` takes no other form.
            if len(row) > 1 or known[row[0].name or ""].op == "AllGather":
                grouping.join(row, [known[node.name or ""] for node in row])
    return grouping.finish()


def _kind(node: ir.Node) -> Hashable:
    """What the collectives of one call have in common."""
    operand = node.inputs[0]
    attributes = str(sorted((name, str(a.value)) for name, a in node.attributes.items()))
    dtype = operand.dtype if operand is not None else None
    return node.op_type, node.meta["atoms"], attributes, dtype


@dataclass
class _Grouping:
    """The nodes of a program while they are put together.

    Attributes:
        program: The program.
        sizes: Sizes of symbols.
        nodes: Its nodes, in order.
        instead: The results that replace others.
        buckets: The nodes made so far.
    """

    program: PartitionedModel
    sizes: Mapping[str, int]
    nodes: list[ir.Node] = field(init=False)
    instead: dict[ir.Value, ir.Value] = field(default_factory=dict)
    buckets: set[ir.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.nodes = list(self.program.builder.nodes)
        # By node: the bytes of values that are in memory while it runs.
        self._held = dict(zip(self.nodes, node_bytes(self.program, self.sizes), strict=True))
        self._budget = max(self._held.values(), default=0)
        self._place()

    def bytes_of(self, value: ir.Value | None) -> int:
        """Returns the bytes of a value on a device; 0 if they are not known before the run."""
        return 0 if value is None else value_bytes(self.program, value, self.sizes)

    def _place(self) -> None:
        self._index = {node: index for index, node in enumerate(self.nodes)}
        self._readers: dict[ir.Value, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in read_by(node):
                self._readers.setdefault(value, []).append(index)

    def neighbours(self, row: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
        """Yields the nodes in rows, each of which can be one node."""
        joined: list[ir.Node] = []
        for node in row:
            if joined and not self._fits([*joined, node]):
                yield joined
                joined = []
            joined.append(node)
        yield joined

    def _target(self, row: Sequence[ir.Node]) -> int | None:
        """Returns the place of the one of the nodes where all can stand; None if there is none."""
        makers = [v.producer() for node in row for v in node.inputs[:1] if v is not None]
        ready = max((self._index[m] for m in makers if m in self._index), default=-1)
        needed = min(
            (i for node in row for i in self._readers.get(node.outputs[0], ())),
            default=len(self.nodes),
        )
        places = [self._index[node] for node in row]
        return next((place for place in places if ready < place < needed), None)

    def _fits(self, row: Sequence[ir.Node]) -> bool:
        """Whether nodes can be one node, and what is in memory then stays below the peak."""
        target = self._target(row)
        if target is None:
            return False
        more = self._more(row, target)
        return all(self._held[node] + size <= self._budget for node, size in more.items())

    def _more(self, row: Sequence[ir.Node], target: int) -> dict[ir.Node, int]:
        """Returns by node what is in memory longer if all stand in one place: results, operands."""
        more: dict[ir.Node, int] = {}
        for node in row:
            place = self._index[node]
            early = target < place
            size = self.bytes_of(node.outputs[0] if early else node.inputs[0])
            between = self.nodes[target:place] if early else self.nodes[place + 1 : target + 1]
            for other in between:
                more[other] = more.get(other, 0) + size
        return more

    def join(self, row: Sequence[ir.Node], known: Sequence[Collective]) -> None:
        """Replaces nodes by one.

        Args:
            row: The nodes.
            known: The description of each.
        """
        builder, target, first = self.program.builder, self._target(row), row[0]
        assert target is not None
        names = [c.value for c in known]
        attributes = [a for n, a in first.attributes.items() if n not in PEERS]
        operands = [v for node in row for v in node.inputs[:1]]
        token = ir.Value(name=builder.fresh(f"{first.name}/Bucket/token"))
        token.type, token.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape([1])
        results = [
            ir.Value(name=y.name, type=y.type, shape=y.shape, doc_string=y.doc_string)
            for y in (node.outputs[0] for node in row)
        ]
        over = first.metadata_props[OVER]
        bucket = ir.Node(
            DOMAIN,
            "Bucket",
            [builder.const([0], ir.DataType.UINT8), *operands],
            [
                ir.AttrString("op", first.op_type),
                ir.AttrString("values", NEXT.join(names)),
                *attributes,
            ],
            outputs=[token, *results],
            name=builder.node_names.fresh(f"onnxpar.schedule/{first.op_type}.{over}({names[-1]})"),
        )
        bucket.meta.update(first.meta)
        inputs = ["token", *("X" for _ in row)]
        bucket.metadata_props.update(
            {
                "input_names": str(inputs),
                VALUE: NEXT.join(names),
                OVER: over,
                BYTES: str(sum((c.bytes for c in known), start=0)),
            }
        )
        for node, result in zip(row, results, strict=True):
            old = node.outputs[0]
            result.metadata_props.update(old.metadata_props)
            for index in self._readers.get(old, ()):
                read_instead(self.nodes[index], old, result)
            if old in builder.shapes:
                builder.note_shape(result, builder.shapes[old])
            self.instead[old] = result
        self.buckets.add(bucket)
        for node, size in self._more(row, target).items():
            self._held[node] += size
        at = self.nodes[target]
        self._held[bucket] = self._held[at]
        self.nodes = [bucket if n is at else n for n in self.nodes if n is at or n not in row]
        self._place()
        rest = {node.name for node in row}
        builder.collectives = [
            replace(c, node=bucket.name or "") if c.node in rest else c for c in builder.collectives
        ]

    def finish(self) -> PartitionedModel:
        """Chains all collectives in the order in which they now stand, and returns the program."""
        token: ir.Value | None = None
        for node in self.nodes:
            if node.domain != DOMAIN or "atoms" not in node.meta:
                continue
            if node in self.buckets:
                if token is not None:
                    node.replace_input_with(0, token)
                token = node.outputs[0]
                continue
            token = chained(node, token)
        builder, places = self.program.builder, {n.name: i for i, n in enumerate(self.nodes)}
        builder.nodes = self.nodes
        builder.collectives.sort(key=lambda c: places[c.node])
        outputs = (
            replace(o, local=self.instead.get(o.local, o.local)) for o in self.program.outputs
        )
        return replace(self.program, outputs=tuple(outputs))
