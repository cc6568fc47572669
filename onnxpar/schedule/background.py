"""Runs collectives of a program in the background of what stands between operand and first reader.

A collective becomes two nodes. Start stands where the operand is there, and Wait before the first
reader. Between them, the nodes compute that do not need the result: the gradient of a weight while
the cotangent is reduced, or the layer before while the parameters of the next are gathered
(optimizer parallel, level 3: Rajbhandari et al., 2020; PyTorch FSDP: Zhao et al., VLDB 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_ir as ir

from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.local_nodes import LocalNodes
from onnxpar.cost.timeline import AHEAD_AT_MOST, latest_first, pays
from onnxpar.graph.body_captures import read_by, read_instead
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.collective.barrier import is_barrier
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import node_bytes, value_bytes
from onnxpar.schedule.start_ahead import AHEAD
from onnxpar.schedule.tokens import PEERS, WAITS, chained

_META = ("atoms", "pairs", "stages", "root")


def run_in_background(
    program: PartitionedModel,
    cost: CostModel,
    *,
    room: int | None = None,
    micro_batches: int = 1,
) -> None:
    """Replaces collectives by Start and Wait where that saves time and memory allows it.

    The nodes of the program are changed in place. A collective stays as it is unless the cost model
    says that what is computed between its operand and its first reader hides more of it than it
    costs to run it in the background (`onnxpar.cost.timeline.pays`). Operand and result are in
    memory from Start to Wait. So it also stays as it is if the peak of the program's values would
    rise by more than the largest operand or result of a collective for each micro-batch, and by a
    gathered parameter that is kept for the next gather of it.

    Args:
        program: The program.
        cost: The cost model, with the sizes of symbols at which time and memory are compared.
        room: The bytes by which the peak may rise at most.
        micro_batches: How many micro-batches take turns in the program.
    """
    _Pass(program, cost, micro_batches, room).run()


@dataclass(frozen=True)
class _Gather:
    """A gather of a parameter.

    Attributes:
        node: The AllGather.
        index: Its index among the nodes.
        shard: What it gathers, without the Barrier that delays it.
        after: The other operands of its reader, for which the Barrier waits.
    """

    node: ir.Node
    index: int
    shard: ir.Value
    after: tuple[ir.Value, ...]


@dataclass
class _Pass:
    """The pass over one program.

    Attributes:
        program: The program.
        cost: The cost model.
        ahead: How many collectives may be ahead at a time, if they are the largest.
        room: The bytes by which the peak may rise at most.
    """

    program: PartitionedModel
    cost: CostModel
    ahead: int = 1
    room: int | None = None
    _early: dict[int, list[ir.Node]] = field(default_factory=dict)
    _before: dict[int, list[ir.Node]] = field(default_factory=dict)
    _removed: set[ir.Node] = field(default_factory=set)
    _gates: set[ir.Node] = field(default_factory=set)
    _starts: dict[ir.Node, ir.Node] = field(default_factory=dict)
    _known: dict[ir.Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads the nodes as they stand now."""
        self.builder = self.program.builder
        self._nodes = list(self.builder.nodes)
        self._fed = {p.local for p in self.program.parameters if p.fed}
        self._collectives = {c.node: c for c in self.builder.collectives if not c.stages}
        self._bytes = node_bytes(self.program, self.cost.sizes)
        peak, self._more = max(self._bytes, default=0), self._largest()
        more = (self.ahead + 1) * self._more if self.room is None else max(self.room, 0)
        self._limit = peak + more
        self._budget = min(peak + self.ahead * self._more, self._limit)
        self._made = {v: i for i, node in enumerate(self._nodes) for v in node.outputs}
        self._readers: dict[ir.Value, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for value in read_by(node):
                self._readers.setdefault(value, []).append(index)

    @cached_property
    def _prices(self) -> LocalNodes:
        program = self.program
        given = [*(i.local for i in program.inputs), *(p.local for p in program.parameters)]
        given += [*self.builder.initializers, *self.builder.system_inputs.values()]
        opsets, table = program.source.opset_imports, self.builder.table
        return LocalNodes.of(self._nodes, given, table, opsets, program.registry, [self.cost])

    def run(self) -> None:
        """Changes the program."""
        builder = self.builder
        gathers, unread = [], []
        for index, node in enumerate(self._nodes):
            if not self._communicates(node):
                continue
            gather = self._gather(node, index)
            readers = self._readers.get(node.outputs[0], ())
            if any(AHEAD in self._nodes[reader].meta for reader in readers):
                # StartAhead needs the memory of the state, which Wait's result is not in.
                continue
            first = min(readers, default=None)
            if gather is not None:
                gathers.append(gather)
            elif first is None:
                unread.append((node, index))
            else:
                self._move(node, index, first)
        remaining = self._kept(gathers)
        if len(remaining) < len(gathers):
            # What is kept takes the room of nothing else.
            self._budget = min(self._budget + self._more, self._limit)
        self._prefetch(remaining)
        self._delay(unread)
        moved = {n for d in (self._early, self._before) for nodes in d.values() for n in nodes}
        if moved or self._removed:
            inside = moved | self._removed
            builder.nodes = [
                node
                for index in range(len(self._nodes) + 1)
                for node in (
                    *self._early.get(index, ()),
                    *self._before.get(index, ()),
                    *(n for n in self._nodes[index : index + 1] if n not in inside),
                )
            ]
        for start, wait in self._starts.items():
            # By now it may be the result of another Wait, in other memory.
            wait.replace_input_with(1, start.inputs[0])
        self._chain()

    def _largest(self) -> int:
        """Returns the bytes of the largest operand or result of a collective."""
        return max(
            (
                self._value_bytes(value)
                for node in self._nodes
                if self._communicates(node)
                for value in (node.inputs[0], node.outputs[0])
                if value is not None
            ),
            default=0,
        )

    def _communicates(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.name in self._collectives

    # -- what may move ---------------------------------------------------------------------------

    def _gather(self, node: ir.Node, index: int) -> _Gather | None:
        """Returns a node as the gather of a parameter for one reader, if it is one."""
        operand = node.inputs[0]
        if operand is None or not self._is_gather(node):
            return None
        barrier = operand.producer()
        if operand in self._fed:
            return _Gather(node, index, operand, ())
        if barrier is None or not is_barrier(barrier) or self._readers.get(operand) != [index]:
            return None
        shard, *after = barrier.inputs
        if not after or shard is None or not self._is_parameter(shard):
            return None
        return _Gather(node, index, shard, tuple(v for v in after if v is not None))

    def _is_gather(self, node: ir.Node) -> bool:
        return any(c.node == node.name and c.op == "AllGather" for c in self.builder.collectives)

    def _is_parameter(self, value: ir.Value) -> bool:
        """Whether a value is a trained parameter, or computed from nothing else."""
        maker = value.producer()
        if value in self._fed or maker is None:
            return value in self._fed
        return any(v in self._fed for v in maker.inputs) and all(
            v is None or v in self._fed or v.is_initializer() or v.const_value is not None
            for v in maker.inputs
        )

    def _seconds(self, node: ir.Node) -> float:
        """Returns the seconds of computing a node; 0 for a collective, or if they are not known."""
        if node not in self._known:
            found = None if self._communicates(node) else self._prices.seconds(node)
            self._known[node] = 0.0 if found is None else found[0]
        return self._known[node]

    def _hiding(self, node: ir.Node, begin: int, end: int) -> list[ir.Node]:
        """Returns the nodes in a range that hide a collective; none if that does not pay.

        Of nodes that compute for longer than it takes to start an operator, if there are such.
        """
        known = self._collectives[node.name or ""]
        link = self.cost.machine.link(self.cost.mesh, known.atoms)
        between = [n for n in self._nodes[begin:end] if self._seconds(n)]
        computing = sum(map(self._seconds, between))
        sending = self.cost.call(known.op, known.atoms, self.cost.value(known.bytes))
        if not link.overlaps or not pays(computing, sending, self.cost.handing(link)):
            return []
        start = 2 * self.cost.machine.overhead
        return [n for n in between if self._seconds(n) > start] or between

    def _last_result(self, hiding: Sequence[ir.Node]) -> tuple[ir.Value, ...]:
        """Returns the last result of floating point numbers of some nodes, if there is one.

        Integers may be in host memory. What reads a parameter first may be a Barrier that is
        removed.
        """
        found = [
            y
            for node in hiding
            for x, y in [(node.inputs[0] if node.inputs else None, node.outputs[0])]
            if y.dtype is not None
            and y.dtype.is_floating_point()
            and (x is None or not self._is_parameter(x))
        ]
        return tuple(found[-1:])

    def _fits(self, *longer: tuple[ir.Value | None, int, int]) -> bool:
        """Whether values may be in memory for longer; if so, they are counted.

        Args:
            longer: Each value, with the range of the nodes at which it is not counted yet.
        """
        more: dict[int, int] = {}
        for value, begin, end in longer:
            size = 0 if value is None else self._value_bytes(value)
            for index in range(begin, min(end, len(self._bytes))):
                more[index] = more.get(index, 0) + size
        if any(self._bytes[index] + size > self._budget for index, size in more.items()):
            return False
        for index, size in more.items():
            self._bytes[index] += size
        return True

    def _value_bytes(self, value: ir.Value) -> int:
        return value_bytes(self.program, value, self.cost.sizes)

    # -- moving ----------------------------------------------------------------------------------

    def _move(self, node: ir.Node, index: int, first: int) -> None:
        """Starts a collective behind its operand, and waits before its first reader."""
        x, y = node.inputs[0], node.outputs[0]
        begin = self._made.get(x, -1) + 1 if x is not None else 0
        hiding = self._hiding(node, begin, first)
        # So far the operand is there until the collective runs, and the result from then on.
        if not begin or not hiding or not self._fits((y, begin, index), (x, index, first)):
            return
        self._put(begin, node)
        made = self._wait(node, self._last_result(hiding), _text(hiding))
        self._put(first, *made)
        # The result may be the operand of another collective.
        result = made[-1].outputs[0]
        self._made[result] = first - 1
        self._readers[result] = self._readers[y]

    def _kept(self, gathers: Sequence[_Gather]) -> list[_Gather]:
        """Returns the gathers that remain if none follows one of the same shard.

        The last layer's parameters are gathered for the forward pass, and next for the backward
        pass. They stay in memory in between, if that fits.
        """
        kept: list[_Gather] = []
        for gather in gathers:
            before = kept[-1] if kept else gather
            y, again = before.node.outputs[0], gather.node.outputs[0]
            last = max(self._readers.get(y, (before.index,)))
            if (
                gather is before
                or gather.shard is not before.shard
                or gather.node.meta["atoms"] != before.node.meta["atoms"]
                or gather.node.attributes != before.node.attributes
                or not self._fits((y, last + 1, gather.index))
            ):
                kept.append(gather)
                continue
            barrier = gather.node.inputs[0]
            makers = [gather.node]
            if barrier is not None and barrier is not gather.shard:
                makers += [node for node in [barrier.producer()] if node is not None]
            self._removed.update(makers)
            known = self.builder.collectives
            known[:] = [c for c in known if c.node != gather.node.name]
            self._read_from(y, again)
            self._readers[y] = [*self._readers[y], *self._readers.pop(again)]
        return kept

    def _prefetch(self, gathers: Sequence[_Gather]) -> None:
        """Starts each gather before the wait for one of those before it.

        Results that nobody reads yet are together no larger than `AHEAD_AT_MOST` of the largest.
        """
        results = [self._value_bytes(gather.node.outputs[0]) for gather in gathers]
        most, first = AHEAD_AT_MOST * max(results, default=0), 0
        for number, gather in enumerate(gathers[1:], 1):
            while first < number - 1 and sum(results[first + 1 : number + 1]) > most:
                first += 1
            for before in gathers[first:number]:
                if self._start_early(gather, before):
                    break
                first += 1

    def _start_early(self, gather: _Gather, before: _Gather) -> bool:
        """Starts a gather before the wait for an earlier one, if something is hidden and fits."""
        begin = max(before.index, self._made.get(gather.shard, -1) + 1)
        operand, y = gather.node.inputs[0], gather.node.outputs[0]
        # The Barrier, if there is one, stands before the gather and is removed.
        end = self._made.get(operand, gather.index) if operand is not None else gather.index
        hiding = self._hiding(gather.node, begin, end)
        if not hiding or not self._fits((y, begin, gather.index)):
            return False
        if operand is not gather.shard and operand is not None:
            self._removed.update(n for n in [operand.producer()] if n is not None)
        gate = [self._gate(before.after, before.node)] if before.after else []
        gather.node.replace_input_with(0, gather.shard)
        early = self._early.setdefault(begin, [])
        if begin == before.index and before.node not in self._starts:
            # The rank waits for that one first, so it must not share the link with this one.
            early.append(before.node)
            self._put(begin, *self._wait(before.node, (), ""))
        # Before the wait for the gather before it, so that the link is never idle.
        early.extend([*gate, gather.node])
        self._put(gather.index, *self._wait(gather.node, gather.after, _text(hiding)))
        return True

    def _delay(self, unread: Sequence[tuple[ir.Node, int]]) -> None:
        """Waits for what only the program's end reads behind the start of a later such one.

        Operands of those under way are together no larger than the largest, or there are two.
        """
        places = [*(index for _, index in unread), len(self._nodes)]
        operands = [self._value_bytes(n.inputs[0]) if n.inputs[0] else 0 for n, _ in unread]
        for number, (node, _) in enumerate(unread):
            x = node.inputs[0]
            begin = self._made.get(x, -1) + 1 if x is not None else 0
            for last in latest_first(operands, number):
                end = places[last]
                hiding = self._hiding(node, begin, end)
                if begin and hiding and self._fits((x, begin, end)):
                    self._put(begin, node)
                    after = self._last_result(hiding)
                    self._put(end, *self._wait(node, after, _text(hiding), read=False))
                    break

    def _put(self, index: int, *nodes: ir.Node) -> None:
        self._before.setdefault(index, []).extend(nodes)

    # -- nodes -----------------------------------------------------------------------------------

    def _emit(self, op_type: str, operands: Sequence[ir.Value], scope: ir.Node) -> ir.Node:
        """Returns a new node with a token as its only result."""
        builder, kept = self.builder, self.builder.nodes
        builder.nodes = []
        builder.ops(
            op_type,
            operands,
            [(ir.DataType.UINT8, [1])],
            domain=DOMAIN,
            name=f"{scope.name}/{op_type}",
        )
        (made,) = builder.nodes
        builder.nodes = kept
        return made

    def _gate(self, after: Sequence[ir.Value], scope: ir.Node) -> ir.Node:
        """Returns a Barrier on the chain of tokens; `_chain` gives it its first operand."""
        gate = self._emit("Barrier", [self._first_token(), *after], after[0].producer() or scope)
        self._gates.add(gate)
        return gate

    def _first_token(self) -> ir.Value:
        return self.builder.const([0], ir.DataType.UINT8)

    def _wait(
        self, node: ir.Node, after: Sequence[ir.Value], behind: str, *, read: bool = True
    ) -> list[ir.Node]:
        """Makes a collective a Start, and returns its Wait with what delays it.

        Args:
            node: The collective.
            after: Values that are computed before the Wait. Without them onnxruntime would wait at
                once where it fuses nodes, whose place is then the program's end.
            behind: What is computed meanwhile.
            read: Whether other nodes read the result, which they then take from the Wait.
        """
        y, token, x = node.outputs[0], node.outputs[1], node.inputs[0]
        assert x is not None
        made = []
        if after:
            gate = self._emit("Barrier", [token, *after], node)
            made.append(gate)
            token = gate.outputs[0]
        attributes = [a for n, a in node.attributes.items() if n not in PEERS]
        op = ir.AttrString("op", node.op_type)
        known = self.builder.collectives
        known[:] = [replace(c, behind=behind) if c.node == node.name else c for c in known]
        node.op_type = "Start"
        node.attributes["op"] = op
        result = ir.Value(
            name=self.builder.fresh(f"{node.name}/Wait") if read else "", type=y.type, shape=y.shape
        )
        wait = ir.Node(
            DOMAIN,
            "Wait",
            [y, x, token],
            [op, *attributes],
            outputs=[result, ir.Value(name=self.builder.fresh(f"{node.name}/Wait/token"))],
            name=self.builder.node_names.fresh(f"{node.name}/Wait"),
        )
        wait.outputs[1].type = ir.TensorType(ir.DataType.UINT8)
        wait.outputs[1].shape = ir.Shape([1])
        wait.meta.update({key: node.meta[key] for key in _META if key in node.meta})
        wait.meta[WAITS] = True
        wait.metadata_props["input_names"] = str(["Y", "X", "token"])
        self._starts[node] = wait
        if read:
            self._read_from(result, y)
            if y in self.builder.shapes:
                self.builder.note_shape(result, self.builder.shapes[y])
        return [*made, wait]

    def _read_from(self, new: ir.Value, old: ir.Value) -> None:
        """Lets the readers of a value read another one."""
        for index in self._readers[old]:
            read_instead(self._nodes[index], old, new)

    def _chain(self) -> None:
        """Chains collectives anew, in the order in which they now stand."""
        token: ir.Value | None = None
        kept = []
        for node in self.builder.nodes:
            if node in self._gates or AHEAD in node.meta:
                if token is None and node in self._gates:
                    continue
                node.replace_input_with(0, token or self._first_token())
                token = node.outputs[0]
            elif self._communicates(node):
                token = chained(node, token)
            kept.append(node)
        self.builder.nodes = kept
        places = {node.name: index for index, node in enumerate(kept)}
        self.builder.collectives.sort(key=lambda c: places[c.node])


def _text(hiding: Sequence[ir.Node]) -> str:
    """Returns for people which nodes hide a collective; there is at least one."""
    return " to ".join(dict.fromkeys(str(node.name) for node in (hiding[0], hiding[-1])))
