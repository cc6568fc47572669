"""The collectives of rank graphs in the words of other runtimes.

A dialect has its own operators, and says less than the domain `onnxpar`. What it cannot say is an
error that names the node. Nodes have no tokens here: the runtime has to run the collectives of all
ranks in one order, as one that runs the nodes of a graph in their order does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper

from onnxpar.core.errors import DialectError
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.collective.barrier import is_barrier

_TYPE = ir.DataType
_GATHERED = "AllGather"
_EXCHANGED = "AllToAll"
_SUM = "sum"


class Dialect(StrEnum):
    """Whose collectives a graph has.

    Attributes:
        TENSORRT: `DistCollective` of TensorRT 11, in ONNX's domain. It works along dim 0.
        ONNXRUNTIME: `AllReduce`, `AllGather` and `AllToAll` of onnxruntime's domain
            `com.microsoft`, which builds with NCCL have. Their one group has all ranks.
    """

    TENSORRT = "tensorrt"
    ONNXRUNTIME = "onnxruntime"


DOMAINS = {Dialect.TENSORRT: "", Dialect.ONNXRUNTIME: "com.microsoft"}
"""The domain of each dialect's operators."""
_TYPES = {
    Dialect.TENSORRT: {_TYPE.FLOAT, _TYPE.FLOAT16, _TYPE.BFLOAT16, _TYPE.INT8, _TYPE.UINT8,
                       _TYPE.INT32, _TYPE.INT64, _TYPE.BOOL},
    Dialect.ONNXRUNTIME: {_TYPE.FLOAT, _TYPE.FLOAT16, _TYPE.DOUBLE, _TYPE.INT64, _TYPE.BOOL},
}  # fmt: skip
_FLOATS = {_TYPE.FLOAT, _TYPE.FLOAT16, _TYPE.DOUBLE}
# Of several tensors, and of one along a dim.
_VARIADIC = {_SUM: "Sum", "max": "Max", "min": "Min"}
_REDUCE = {_SUM: "ReduceSum", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


@dataclass(frozen=True)
class Translated:
    """The nodes that replace a collective.

    Attributes:
        nodes: The nodes.
        groups: Those of them that need the attribute `groups`: the ranks of the group.
        constants: Small tensors that the nodes read.
    """

    nodes: tuple[onnx.NodeProto, ...]
    groups: tuple[int, ...] = ()
    constants: tuple[onnx.TensorProto, ...] = ()


@dataclass
class _Writer:
    """Appends the nodes that replace one collective."""

    node: ir.Node
    dialect: Dialect
    members: int
    world: int
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def refuse(self, why: str) -> DialectError:
        """Returns the error that the dialect cannot say the node."""
        return DialectError(
            f"node {self.node.name!r} ({self.node.op_type}): cannot be written in the dialect "
            f"{self.dialect}: {why}"
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """Returns an attribute of the collective."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    @property
    def operand(self) -> ir.Value:
        """The tensor of the collective."""
        found = self.node.inputs[0]
        assert found is not None
        return found

    @property
    def dims(self) -> int:
        """Number of its dims."""
        if self.operand.shape is None:
            raise self.refuse("the number of dims of its operand is not known")
        return len(self.operand.shape)

    def axis(self, name: str) -> int:
        """Returns an attribute that is a dim, counted from the first."""
        axis = int(self.attribute(name))
        return axis + self.dims if axis < 0 else axis

    def put(
        self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any
    ) -> list[str]:
        """Appends a node, and returns the names of its outputs."""
        name = f"{self.node.name}/{op_type}.{len(self.nodes)}"
        results = [name if outputs == 1 else f"{name}:{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **attributes))
        return results

    def transposed(self, x: str, order: Sequence[int]) -> str:
        """Appends a Transpose unless it would change nothing."""
        if list(order) == sorted(order):
            return x
        return self.put("Transpose", [x], perm=list(order))[0]

    def parts(self, x: str) -> list[str]:
        """Divides dim 0 into a part for each member."""
        # Since opset 18, the number of outputs does not say the number of parts.
        more = {"num_outputs": self.members} if self.opset >= 18 else {}
        return self.put("Split", [x], outputs=self.members, axis=0, **more)

    def exchange(self, x: str) -> str:
        """Sends a block of dim 0 to each member, and puts those received in their places."""
        if self.dialect is Dialect.TENSORRT:
            return self.collective("all_to_all", x)
        return self.microsoft(_EXCHANGED, x, group_size=self.members)

    def collective(self, operation: str, x: str, reduction: str = "none") -> str:
        """Appends a DistCollective."""
        own = self.members < self.world
        if own:
            self.groups.append(len(self.nodes))
        return self.put(
            "DistCollective", [x], collective_operation=operation, reduce_op=reduction, root=-1,
            nb_rank=self.members, group_size=self.members if own else 0,
        )[0]  # fmt: skip

    def microsoft(self, op_type: str, x: str, **attributes: int) -> str:
        """Appends a node of com.microsoft."""
        return self.put(op_type, [x], domain=DOMAINS[Dialect.ONNXRUNTIME], **attributes)[0]

    def gather(self, x: str, axis: int, dims: int) -> str:
        """Concatenates the members' tensors."""
        if self.dialect is Dialect.ONNXRUNTIME:
            return self.microsoft(_GATHERED, x, axis=axis, group_size=self.members)
        order = _swap(dims, axis)
        gathered = self.collective("all_gather", self.transposed(x, order))
        return self.transposed(gathered, order)


def _swap(dims: int, axis: int) -> list[int]:
    """Returns the order of dims in which the first one and `axis` have changed places."""
    order = list(range(dims))
    if axis:
        order[0], order[axis] = axis, 0
    return order


def _front(dims: int, axis: int) -> list[int]:
    """Returns the order of dims in which `axis` is the first, and the others follow in order."""
    return [axis, *(d for d in range(dims) if d != axis)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _all_reduce(writer: _Writer, x: str) -> str:
    reduction = writer.attribute("reduction", _SUM)
    if writer.dialect is Dialect.TENSORRT:
        return writer.collective("all_reduce", x, reduction)
    if reduction == _SUM and writer.operand.dtype in _FLOATS:
        return writer.microsoft("AllReduce", x)
    # AllReduce only adds floating-point numbers.
    first = f"{writer.node.name}/first"
    writer.constants.append(helper.make_tensor(first, onnx.TensorProto.INT64, [1], [0]))
    (rows,) = writer.put("Unsqueeze", [x, first])
    gathered = writer.gather(rows, 0, writer.dims + 1)
    return writer.put(_REDUCE[reduction], [gathered, first], keepdims=0)[0]


def _all_gather(writer: _Writer, x: str) -> str:
    return writer.gather(x, writer.axis("axis"), writer.dims)


def _reduce_scatter(writer: _Writer, x: str) -> str:
    axis, reduction = writer.axis("axis"), writer.attribute("reduction", _SUM)
    order = _swap(writer.dims, axis)
    x = writer.transposed(x, order)
    if writer.dialect is Dialect.TENSORRT:
        return writer.transposed(writer.collective("reduce_scatter", x, reduction), order)
    if reduction not in _VARIADIC:
        raise writer.refuse(f"it has no ReduceScatter, and no operator for several to {reduction}")
    # Every member receives what belongs to it from all others, which is as many bytes.
    parts = writer.parts(writer.exchange(x))
    return writer.transposed(writer.put(_VARIADIC[reduction], parts)[0], order)


def _all_to_all(writer: _Writer, x: str) -> str:
    split, concat, dims = writer.axis("split_axis"), writer.axis("concat_axis"), writer.dims
    order = _front(dims, split)
    received = writer.exchange(writer.transposed(x, order))
    if concat != split:
        place = order.index(concat)
        (received,) = writer.put("Concat", writer.parts(received), axis=place)
    return writer.transposed(received, _inverse(order))


_TRANSLATIONS: Mapping[str, Callable[[_Writer, str], str]] = {
    "AllReduce": _all_reduce,
    _GATHERED: _all_gather,
    "ReduceScatter": _reduce_scatter,
    _EXCHANGED: _all_to_all,
}


def translate(
    node: ir.Node, dialect: Dialect, opset: int, group: Sequence[int] = (), world: int = 1
) -> Translated:
    """Returns the nodes that replace a node of the domain `onnxpar` in a rank's graph.

    Args:
        node: The node.
        dialect: The dialect.
        opset: The version of ONNX's operators in the graph.
        group: The ranks of its group on some rank, if it is a collective.
        world: Number of all ranks.

    Raises:
        DialectError: The dialect cannot say it; names the node and the reason.
    """
    writer = _Writer(node, dialect, len(group), world, opset)
    x, (y, *_) = writer.operand.name or "", (value.name or "" for value in node.outputs)
    if is_barrier(node):
        identity = helper.make_node("Identity", [x], [y], name=node.name)
        return Translated((identity,))
    if node.op_type not in _TRANSLATIONS or node.domain != DOMAIN:
        raise writer.refuse("it has no such operator")
    dtype = writer.operand.dtype
    if dtype not in _TYPES[dialect]:
        raise writer.refuse(
            f"its collectives have no {dtype.name.lower() if dtype else 'such'} tensors"
        )
    if dtype == _TYPE.BOOL and writer.attribute("reduction") is not None:
        raise writer.refuse("its collectives do not reduce boolean tensors")
    if dialect is Dialect.ONNXRUNTIME and len(group) != world:
        raise writer.refuse(
            f"its only group has all {world} ranks, but the node's has {len(group)}; a mesh of one "
            "axis has no other groups, and the dialect tensorrt has groups of any size"
        )
    if list(group) != sorted(group):
        raise writer.refuse(
            f"its groups are in the order of the ranks, but the node's is {[*group]}"
        )
    made = _TRANSLATIONS[node.op_type](writer, x)
    last = writer.nodes[-1]
    last.output[list(last.output).index(made)] = y
    return Translated(tuple(writer.nodes), tuple(writer.groups), tuple(writer.constants))
