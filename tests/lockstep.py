"""Interprets a rank-generic graph for all devices at once, in one process and without the runtime.

Standard nodes run in onnxruntime, one session for each stretch between collectives; collectives run
in numpy over all devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import erf
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from onnxpar.api.shard_model import propagate_and_partition
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, DimSharding, Sharding
from onnxpar.core.symbols import symbols_of
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import every_node, read_by
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import COORD_PREFIX, COUNTER_INPUTS, SYMBOL_PREFIX, LocalBuilder
from onnxpar.graph.seeds import Seeds
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.function import VERSION
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.norm_reference import OPERATORS as NORMS
from tests.numpy_operators import numpy_operators
from tests.shards import concrete, join, split_and_mask
from tests.sliding_reference import OPERATORS as SLIDING

FUNCTIONS = {d.op_type: d.function for d in REGISTRY.defs if d.function is not None}
Array = NDArray[np.generic]
Evaluate = Callable[[Mapping[str, Array]], dict[str, Array]]
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def run_model(
    model: PartitionedModel,
    feeds: Mapping[str, Array],
    symbols: Mapping[str, int],
    *,
    reference: bool = False,
    padding: float = 0,
    kept: "Lockstep | None" = None,
) -> dict[str, Array]:
    """Runs all devices on whole inputs and returns whole outputs.

    Args:
        model: The program of all ranks.
        feeds: Whole inputs by name; those of parameters may be among them, else their content is.
        symbols: The value of each symbol.
        reference: Whether standard nodes run in onnx.reference.
        padding: What the padding of floats holds that enter; the program may rely on 0.
        kept: The interpreter of an earlier run of the same model, which is then faster.
    """
    mesh, table = model.plan.mesh, model.builder.table
    whole = {item.name: (feeds[item.name], item.sharding) for item in model.inputs}
    for parameter in model.parameters:
        content = feeds.get(parameter.name)
        if content is None:
            assert parameter.source.const_value is not None
            content = parameter.source.const_value.numpy()
        whole[parameter.name] = content, parameter.sharding
    local: list[dict[str, Array]] = []
    for rank in range(mesh.size):
        here: dict[str, Array] = {}
        for name, (array, sharding) in whole.items():
            # One device has everything; differences run it hundreds of times.
            here[name] = array
            if mesh.size > 1:
                shown = concrete(sharding, table, symbols)
                here[name] = _padded(array, shown, mesh, rank, padding)
        for name in model.builder.system_inputs:
            if name.startswith(COORD_PREFIX):
                value = mesh.coords(rank)[int(name.removeprefix(COORD_PREFIX))]
            elif name in COUNTER_INPUTS:
                value = len(name)
            else:
                value = symbols[name.removeprefix(SYMBOL_PREFIX)]
            here[name] = np.array([value], np.int64)
        local.append(here)
    interpreter = kept or Lockstep(mesh, model.builder, reference)
    values = interpreter.run(local, [o.local for o in model.outputs])
    outputs = {}
    for item, shards in zip(model.outputs, values, strict=True):
        if mesh.size == 1:
            outputs[item.name] = shards[0]
            continue
        dims = zip(item.sharding.dims, shards[0].shape, strict=True)
        sizes = tuple(_sized(dim, size, symbols) for dim, size in dims)
        sharding = Sharding(sizes, item.sharding.partial, item.sharding.reduction)
        sharding = concrete(sharding, table, symbols)
        outputs[item.name] = join(shards, sharding, mesh)
        _check_replicas(item.name, shards, outputs[item.name], sharding, mesh)
    return outputs


def _check_replicas(
    name: str, shards: Sequence[Array], array: Array, sharding: Sharding, mesh: Mesh
) -> None:
    """Fails where a device holds something else than the device that `join` read it from."""
    if sharding.partial or array.dtype.kind not in "fiub":
        return
    for rank, shard in enumerate(shards):
        want, valid = split_and_mask(array, sharding, mesh, rank)
        # Devices that hold the same computed it from the same, by the same nodes.
        np.testing.assert_array_equal(shard[valid], want[valid], f"{name} on device {rank}")


def _padded(array: Array, sharding: Sharding, mesh: Mesh, rank: int, padding: float) -> Array:
    """What a device holds of an array, with `padding` behind its end where that is a float."""
    shard, valid = split_and_mask(array, sharding, mesh, rank)
    shard = shard.copy()
    if padding != 0 and np.issubdtype(shard.dtype, np.floating):
        shard[~valid] = padding
    return shard


def _sized(dim: DimSharding, local: int, symbols: Mapping[str, int]) -> DimSharding:
    """The dim, its size read off a shard where it depends on data; such a dim is not split."""
    known = all(name in symbols for c in dim for name in symbols_of(c.size))
    if known or any(c.atoms for c in dim):
        return dim
    return (Component(local),)


@dataclass
class Lockstep:
    """Interprets a rank-generic graph for all devices at once."""

    mesh: Mesh
    builder: LocalBuilder
    reference: bool
    made: dict[int, tuple[list[str], Evaluate]] = field(init=False, default_factory=dict)
    """What evaluates a stretch, by the id of its first node, and what enters it."""
    read: set[str] = field(init=False, default_factory=set)
    """The names that some node reads."""

    def run(
        self, feeds: Sequence[Mapping[str, Array]], outputs: Sequence[ir.Value]
    ) -> list[list[Array]]:
        """Returns the value of each output on each device."""
        memory = [dict(f) for f in feeds]
        for value in self.builder.initializers:
            assert value.const_value is not None
            for here in memory:
                here[value.name or ""] = value.const_value.numpy()
        stretch: list[ir.Node] = []
        for node in self.builder.nodes:
            if node.domain != DOMAIN or node.op_type in FUNCTIONS:
                stretch.append(node)
                continue
            self._stretch(stretch, memory, outputs)
            stretch = []
            self._custom(node, memory)
        self._stretch(stretch, memory, outputs)
        return [[here[value.name or ""] for here in memory] for value in outputs]

    def _stretch(
        self,
        nodes: Sequence[ir.Node],
        memory: list[dict[str, Array]],
        outputs: Sequence[ir.Value],
    ) -> None:
        if not nodes:
            return
        if id(nodes[0]) not in self.made:
            self.made[id(nodes[0])] = self._evaluator(nodes, memory, outputs)
        names, evaluate = self.made[id(nodes[0])]
        for here in memory:
            here.update(evaluate({name: here[name] for name in names}))

    def _evaluator(
        self,
        nodes: Sequence[ir.Node],
        memory: list[dict[str, Array]],
        outputs: Sequence[ir.Value],
    ) -> tuple[list[str], Evaluate]:
        """Returns the names of what enters a stretch, and what evaluates it."""
        made = {v.name: v for node in nodes for v in node.outputs if v.name}
        used = {v.name: v for node in nodes for v in read_by(node)}
        # What a body makes for itself is read by it too, and is in no memory.
        entering = [v for n, v in used.items() if n not in made and n in memory[0]]
        if not self.read:
            self.read |= {v.name for node in self.builder.nodes for v in read_by(node) if v.name}
        wanted = {v.name for v in outputs}
        leaving = [v for n, v in made.items() if n in wanted or n in self.read]
        graph = onnx.helper.make_graph(
            [ir.serde.serialize_node(node) for node in nodes],
            "stretch",
            [_info(v, memory[0][v.name or ""]) for v in entering],
            [_info(v, None) for v in leaving],
        )
        called = {node.op_type for node in every_node(nodes) if node.domain == DOMAIN}
        model = onnx.helper.make_model(
            graph,
            opset_imports=[
                onnx.helper.make_opsetid("", self.builder.opset),
                onnx.helper.make_opsetid(DOMAIN, VERSION),
                onnx.helper.make_opsetid(MICROSOFT, 1),
            ],
            functions=[
                ir.to_proto(FUNCTIONS[name].made(self.builder.opset)) for name in sorted(called)
            ],
            ir_version=10,
        )
        return [v.name or "" for v in entering], evaluator(model, self.reference)

    def _custom(self, node: ir.Node, memory: list[dict[str, Array]]) -> None:
        names = [v.name or "" for v in node.inputs if v is not None]
        out = node.outputs[0].name or ""
        if node.op_type == "Barrier":
            for here in memory:
                here.update(
                    (v.name or "", here[n]) for v, n in zip(node.outputs, names, strict=False)
                )
            return
        if node.op_type == "Wait":
            for here in memory:
                # What no node reads is the program's result under the name that Start gave it.
                here[out or names[0]] = here.pop(_running(names[0]))
            return
        if node.op_type == "Philox":
            for here in memory:
                distribution = node.attributes["distribution"].as_string()
                here[out] = _random(distribution, *(here[n] for n in names))
            return
        before = [here[names[0]] for here in memory]
        for rank, here in enumerate(memory):
            group = self.mesh.group(rank, node.meta["atoms"])
            parts = [before[member] for member in group]
            # Nobody can read what is not there before its Wait.
            made = _running(out) if node.op_type == "Start" else out
            here[made] = np.asarray(collective(node, parts, group.index(rank)))
            here[node.outputs[1].name or ""] = np.zeros(1, np.uint8)


def _running(name: str) -> str:
    """Where the result of a Start is kept until its Wait."""
    return f"running {name}"


def collective(node: ir.Node, parts: Sequence[Array], position: int) -> Array:
    """What the device at `position` of a group gets from a collective on the group's operands."""

    def read(name: str) -> Any:
        return node.attributes[name].value

    kind = read("op") if node.op_type == "Start" else node.op_type
    if kind in ("AllReduce", "ReduceScatter"):
        total = reduce(COMBINE[read("reduction")], parts)
        if kind == "AllReduce":
            return total
        return np.split(total, len(parts), axis=read("axis"))[position]
    if kind == "AllGather":
        return np.concatenate(parts, axis=read("axis"))
    if kind == "AllToAll":
        mine = [np.split(p, len(parts), axis=read("split_axis"))[position] for p in parts]
        return np.concatenate(mine, axis=read("concat_axis"))
    if kind == "Permute":
        sources = {destination: source for source, destination in node.meta["pairs"]}
        if position not in sources:
            return np.zeros_like(parts[position])
        return parts[sources[position]]
    raise ValueError(f"no numpy form of {kind}")


def _random(distribution: str, key: Array, local: Array, shape: Array, start: Array) -> Array:
    """Numbers that depend on the key and the global index alone."""
    generator = np.random.default_rng([int(k) % 2**32 for k in key])
    draw = {"uniform": generator.random, "normal": generator.standard_normal}[distribution]
    numbers = np.asarray(draw([int(n) for n in shape], np.float32))
    result = np.full([int(n) for n in local], np.nan, np.float32)
    part = numbers[tuple(slice(int(s), int(s + n)) for s, n in zip(start, local, strict=True))]
    result[tuple(slice(0, n) for n in part.shape)] = part
    return result


def _info(value: ir.Value, array: Array | None) -> onnx.ValueInfoProto:
    assert value.dtype is not None, f"{value.name} has no element type"
    shape: list[int | str] | None = None
    if array is not None:
        known = list(value.shape) if value.shape is not None else [None] * array.ndim
        names = enumerate(known)
        shape = [d if isinstance(d, int) else f"{value.name}.{i}" for i, d in names]
    return onnx.helper.make_tensor_value_info(value.name or "", int(value.dtype), shape)


def check_branches(program: Program, kept: slice) -> None:
    """Runs y = If(p) with branches x[:, kept] and its negative, x [n, 6] sharded over rows."""
    rows = Sharding.of(program.env.shapes["x"], [(0,), ()])
    partitioned = propagate_and_partition(program, Seeds(Mesh.of(dp=2), {}, {"x": rows}))
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    for chosen, want in ((True, x[:, kept]), (False, -x[:, kept])):
        made = run_model(partitioned, {"x": x, "p": np.array(chosen)}, {"n": 5})
        np.testing.assert_array_equal(made["y"], want)


def _erf(x: Array) -> Array:
    """In the type of its operand; onnx.reference rounds it to float32."""
    return np.vectorize(erf, otypes=[x.dtype])(x)


def _gelu(x: Array, *, approximate: str | None) -> Array:
    """In the type of its operand, for the same reason."""
    if approximate == "tanh":
        inner = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    else:
        inner = _erf(x / np.sqrt(2))
    return (x * (1 + inner) / 2).astype(x.dtype)


def _fused_matmul(
    a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0
) -> Array:
    """alpha·A'·B', the operands' last two dims turned or not."""
    a, b = (x.swapaxes(-1, -2) if turned else x for x, turned in ((a, transA), (b, transB)))
    return np.asarray(np.matmul(a, b) * a.dtype.type(alpha))


def _layer_norm(
    x: Array, scale: Array, bias: Array | None = None, *, axis: int, epsilon: float, stash_type: int
) -> tuple[Array, ...]:
    """With statistics in any type; onnx.reference has float32 alone."""
    kind = onnx.helper.tensor_dtype_to_np_dtype(stash_type)
    wide = x.astype(kind)
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = wide.mean(axes, keepdims=True)
    centred = wide - mean
    inverse = 1 / np.sqrt((centred**2).mean(axes, keepdims=True) + float(epsilon))
    y = (centred * inverse).astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse.astype(kind)


REFERENCE_OPS = [
    *SLIDING,
    *NORMS,
    *numpy_operators("", Erf=_erf, Gelu=_gelu, LayerNormalization=_layer_norm),
    *numpy_operators(MICROSOFT, FusedMatMul=_fused_matmul),
]


def evaluator(model: onnx.ModelProto, reference: bool) -> Evaluate:
    """Returns a function from a model's inputs to its outputs, both by name."""
    return _kept_evaluator(model.SerializeToString(deterministic=True), reference)


# Most ways to shard an operator give every device the same nodes, and a session takes milliseconds.
@lru_cache(maxsize=200)
def _kept_evaluator(data: bytes, reference: bool) -> Evaluate:
    model = onnx.ModelProto.FromString(data)
    names = [o.name for o in model.graph.output]
    if reference:
        # It would not take its own operators inside of functions.
        inlined = inline_local_functions(model)
        evaluate = ReferenceEvaluator(inlined, new_ops=REFERENCE_OPS)

        def interpret(feeds: Mapping[str, Array]) -> dict[str, Array]:
            with np.errstate(all="ignore"):
                return dict(zip(names, evaluate.run(None, dict(feeds)), strict=True))

        return interpret
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))
