"""Runs one node's local form on every device, in lockstep, and compares with the undivided node.

Padding of the operands holds garbage, so that a local form which reads it gives a wrong answer.
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import Component, DimSharding, Sharding
from onnxpar.core.symbols import symbols_of
from onnxpar.facts.program import Program
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.local_builder import COORD_PREFIX, SYMBOL_PREFIX, LocalBuilder
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import NodePlan, Plan, factor_sizes, shardings
from onnxpar.graph.shapes import ShapeEnv, shapes
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.fallback import settle
from onnxpar.ops.local_node import copy_node
from onnxpar.ops.node_rules import Rules, completed
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.body_writer import body_partitioner
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.writer import ProgramWriter
from tests.lockstep import COMBINE, Array, Lockstep, evaluator
from tests.shards import concrete, split_and_mask
from tests.tiers import FULL

GARBAGE_INT = 10**6
SEED = int(os.environ.get("ONNXPAR_SEED", "1"))
SAMPLES = 2

T = TypeVar("T")


def chosen(items: Sequence[T], count: int = SAMPLES) -> Sequence[T]:
    """All of them in the full tier, else a sample drawn by ONNXPAR_SEED."""
    if FULL or len(items) <= count:
        return items
    return random.Random(SEED).sample(items, count)


HALF = 4 * 2.0**-11
"""Tolerance of 16-bit results: each term and the sum of the terms are rounded by 2^-11 each, here
and in the undivided node."""


def written(
    nodes: str, inputs: Mapping[str, str], consts: Mapping[str, Array], opset: int
) -> onnx.ModelProto:
    """A model of nodes in ONNX's text form; its outputs are the results that none of them reads."""
    operands = ", ".join(f"{text} {name}" for name, text in inputs.items())
    graph = onnx.parser.parse_graph(f"g ({operands}) => () {{ {nodes} }}")
    read = {name for node in graph.node for name in node.input}
    made = [name for node in graph.node for name in node.output if name and name not in read]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    for name, array in consts.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(MICROSOFT, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@dataclass(frozen=True)
class Case:
    """A small node and its operands.

    Attributes:
        node: The node in ONNX's text form; all its outputs are compared.
        inputs: Type of each operand in ONNX's text form, such as "float[N,6]".
        consts: Operands that are initializers.
        feeds: Operands that must not be random.
        sizes: Value of each symbolic dim.
        opset: Version of the default domain.
        reference: Whether all nodes run in onnx.reference, since onnxruntime lacks a kernel.
        rtol: Tolerance relative to the greatest absolute value of a result. The default is that of
            32 bits: 80 roundings by 2^-23, more than any sum of these cases has terms.
        proto: The one-node model, instead of `node` and `inputs`.
        registry: The table of operators.
    """

    node: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    consts: Mapping[str, Array] = field(default_factory=dict)
    feeds: Mapping[str, Array] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=lambda: {"N": 5})
    opset: int = 20
    reference: bool = False
    rtol: float = 1e-5
    proto: onnx.ModelProto | None = None
    registry: Registry = REGISTRY

    def __str__(self) -> str:
        shown = ", ".join(f"{k}: {v}" for k, v in self.inputs.items())
        return f"{self.node} | {shown} | opset {self.opset} {dict(self.sizes)}"

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The undivided model."""
        if self.proto is not None:
            return self.proto
        model = written(self.node, self.inputs, self.consts, self.opset)
        model.graph.node[0].name = "node"
        return model

    @cached_property
    def global_model(self) -> ir.Model:
        return normalise(ir.from_proto(self.model), self.registry)

    @cached_property
    def env(self) -> ShapeEnv:
        return shapes(self.global_model, symbol_table(self.global_model, {}))

    @cached_property
    def view(self) -> NodeView:
        node, opset = self.global_model.graph[0], self.global_model.opset_imports[""]
        definition = self.registry.find(node.domain, node.op_type, opset)
        return completed(NodeView(node, self.env, opset), definition, self.registry)

    @cached_property
    def stands_alone(self) -> bool:
        """Whether the normalised model is just the node, with operands that the case has."""
        graph = self.global_model.graph
        node = self.view.node
        given = {*self.arrays, *self.consts}
        read = {v.name for v in node.inputs if v is not None}
        return len(graph) == 1 and node.name == "node" and read <= given

    @cached_property
    def definition(self) -> OpDef:
        node = self.view.node
        found = self.registry.find(node.domain, node.op_type, self.view.opset)
        assert found is not None, f"no definition of {node.op_type}"
        return found

    @cached_property
    def rule(self) -> OpRule:
        return settle(self.definition.rule(self.view), self.view)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The undivided operands: random, mixed in sign, seeded by the case's text."""
        rng = np.random.default_rng(list(self.node.encode()))
        found: dict[str, Array] = {}
        for value in self.global_model.graph.inputs:
            name = value.name or ""
            shape = [int(self.env.table.evaluate(d, self.sizes)) for d in self.env.shapes[name]]
            assert value.dtype is not None
            dtype = value.dtype.numpy()
            if name in self.feeds:
                found[name] = np.asarray(self.feeds[name], dtype)
                assert list(found[name].shape) == shape, name
            elif dtype == np.bool_:
                found[name] = rng.random(shape) < 0.5
            elif np.issubdtype(dtype, np.integer):
                found[name] = rng.integers(0, 4, shape).astype(dtype)
            else:
                found[name] = (rng.standard_normal(shape) * 2).astype(dtype)
        return found

    @cached_property
    def expected(self) -> list[Array]:
        """The results of the undivided node."""
        undivided = self.run(Mesh.of(), {}, {}, dirty=False)
        if DOMAIN in {n.domain for n in undivided.program.builder.nodes}:
            return [shards[0] for shards in undivided.shards]
        results = evaluator(self.model, self.reference)(self.arrays)
        names = [o.name for o in self.model.graph.output]
        return [results[n] for n in names]

    # -- placements --------------------------------------------------------------------------------

    def assignments(self, mesh: Mesh) -> Iterator[dict[str, DimSharding]]:
        """Every way to give atoms to the rule's splittable factors, in every order."""
        yield from assignments(self.rule, self.view, mesh)

    def run(
        self,
        mesh: Mesh,
        factors: Mapping[str, DimSharding],
        carried: Mapping[int, tuple[Atoms, str]],
        *,
        dirty: bool = True,
        rule: OpRule | None = None,
        copy: bool = False,
    ) -> "Run":
        """Runs the node on all devices.

        Args:
            mesh: The mesh.
            factors: Components of the sharded factors.
            carried: Operands that stay partial.
            dirty: Whether padding holds garbage; else zeros, and the partitioner knows it.
            rule: The rule, by default the operator's own.
            copy: Whether to copy the node instead of writing its local form.
        """
        rule = rule or self.rule
        plan = shardings(rule, self.view, factors, mesh, carried=carried)
        return execute(self, mesh, plan, dirty=dirty, copy=copy)

    def check(
        self,
        mesh: Mesh,
        factors: Mapping[str, DimSharding],
        carried: Mapping[int, tuple[Atoms, str]] = MappingProxyType({}),
        *,
        dirty: bool = True,
    ) -> None:
        """Fails unless every device's shard of every output is right."""
        run = self.run(mesh, factors, carried, dirty=dirty)
        wrong = run.wrong(self)
        assert not wrong, f"{self}\n{dict(factors)} {dict(carried)} on {mesh.atoms}: {wrong}"


def assignments(rule: OpRule, view: NodeView, mesh: Mesh) -> Iterator[dict[str, DimSharding]]:
    """Every way to give the atoms of a mesh to the factors of a node's rule, in every order."""
    sizes, names = factor_sizes(rule, view), rule.splittable
    for places in product((None, *names), repeat=len(mesh.atoms)):
        given = {n: [a for a, p in enumerate(places) if p == n] for n in names if n in places}
        for orders in product(*(permutations(atoms) for atoms in given.values())):
            yield {
                n: (Component(sizes[n], tuple(order)),)
                for n, order in zip(given, orders, strict=True)
            }


def merged_assignments(case: Case, mesh: Mesh) -> Iterator[dict[str, DimSharding]]:
    """Every way to shard the major or minor component of a factor whose size is composite."""
    sizes = factor_sizes(case.rule, case.view)
    for name in case.rule.splittable:
        size = sizes[name]
        if not isinstance(size, int):
            continue
        for major in range(2, size):
            if size % major:
                continue
            parts = (major, size // major)
            for places in product((0, 1), repeat=len(mesh.atoms)):
                atoms = [tuple(a for a, p in enumerate(places) if p == side) for side in (0, 1)]
                if all(n % mesh.count(a) == 0 or n > 1 for n, a in zip(parts, atoms, strict=True)):
                    yield {name: tuple(Component(n, a) for n, a in zip(parts, atoms, strict=True))}


# -- execution -------------------------------------------------------------------------------------


class DirtyWriter(ProgramWriter):
    """A partitioner that assumes of no padding that it is zero."""

    def define(self, name: str, sharding: Sharding, local: ir.Value, *, zero: bool) -> None:
        super().define(name, sharding, local, zero=False)


@dataclass(frozen=True)
class Wrong:
    """A shard that is not what it should be. Tests that expect one do not print it."""

    where: str
    got: Array
    expected: Array

    def __str__(self) -> str:
        got, want = (f"{a.dtype}{list(a.shape)} {a}" for a in (self.got, self.expected))
        return f"{self.where}: got {got}, expected {want}"


@dataclass(frozen=True)
class Run:
    """The results of all devices: shards[output][device]."""

    mesh: Mesh
    program: PartitionedModel
    plan: NodePlan
    shards: list[list[Array]]
    zero: list[bool]

    def wrong(self, case: Case) -> Wrong | None:
        """Returns what is wrong with the results."""
        # An absent output has no name.
        named = [i for i, out in enumerate(case.view.node.outputs) if out.name]
        for index, (shards, expected) in enumerate(zip(self.shards, case.expected, strict=True)):
            sharding = self.plan.outputs[named[index]]
            if sharding.rank != expected.ndim:
                return Wrong(f"output {index}, sharding {sharding}", shards[0], expected)
            sharding = _sized(sharding, expected.shape, case.sizes)
            sharding = concrete(sharding, case.env.table, case.sizes)
            for rank in range(self.mesh.size):
                got = shards[self.mesh.group(rank, sharding.partial)[0]]
                for member in self.mesh.group(rank, sharding.partial)[1:]:
                    got = COMBINE[sharding.reduction](got, shards[member])
                want, valid = split_and_mask(expected, sharding, self.mesh, rank)
                where = f"output {index}, device {rank}"
                if got.shape != want.shape or got.dtype != want.dtype:
                    return Wrong(where, got, want)
                if not _close(got[valid], want[valid], expected, case.rtol):
                    return Wrong(where, got, want)
                if self.zero[index] and np.any(got[~valid] != 0):
                    return Wrong(f"{where}, whose padding is said to be zero", got, want)
        return None


def _sized(sharding: Sharding, shape: Sequence[int], sizes: Mapping[str, int]) -> Sharding:
    """The sharding, with data-dependent sizes of replicated dims taken from a result."""
    dims = tuple(
        (Component(size),)
        if not all(name in sizes for c in dim for name in symbols_of(c.size))
        and not any(c.atoms for c in dim)
        else dim
        for dim, size in zip(sharding.dims, shape, strict=True)
    )
    return replace(sharding, dims=dims)


def _close(got: Array, want: Array, result: Array, rtol: float) -> bool:
    """Whether a shard is right, relative to the greatest value of the undivided result."""
    if not np.issubdtype(want.dtype, np.inexact) and want.dtype.kind != "V":
        return bool(np.array_equal(got, want))
    got, want, result = (np.asarray(a, np.float64) for a in (got, want, result))
    finite = np.isfinite(result)
    scale = float(np.max(np.abs(result[finite]), initial=1e-30))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        return bool(np.all(same | (np.abs(got - want) <= rtol * scale)))


def execute(case: Case, mesh: Mesh, plan: NodePlan, *, dirty: bool, copy: bool = False) -> Run:
    """Partitions the one-node model by a plan and runs all devices in lockstep."""
    model, env, node = case.global_model, case.env, case.view.node
    held = {
        v.name or "": s or Sharding.replicated(env.shapes[v.name or ""])
        for v, s in zip(node.inputs, plan.inputs, strict=False)
        if v is not None
    }
    undivided = {
        v.name or "": Sharding.replicated(env.shapes[v.name or ""])
        for v in [*model.graph.inputs, *model.graph.initializers.values()]
    }
    outputs = {v.name or "": plan.outputs[i] for i, v in enumerate(node.outputs) if v.name}
    definition = case.definition
    if copy:
        definition = OpDef(node.domain, node.op_type, 1, definition.rule, copy_node)
    rules = Rules({"node": plan.rule}, {"node": case.view}, {}, {"node": definition})
    kind = DirtyWriter if dirty else ProgramWriter
    work = kind(
        Program(model, env, rules, case.registry),
        Plan(
            mesh,
            {"node": plan},
            {
                v.name or "": held.get(v.name or "", undivided[v.name or ""])
                for v in model.graph.inputs
            },
            {n: held.get(n, undivided[n]) for n in model.graph.initializers},
            {n: outputs[n] for n in (v.name or "" for v in model.graph.outputs)},
        ),
        LocalBuilder(env.table, case.view.opset, mesh),
        body_partitioner(case.registry),
    )
    program = work.run()
    for equal in program.equalities:
        one, other = (env.table.evaluate(s.size, case.sizes) for s in (equal.left, equal.right))
        assert one == other, f"{case}: assumes that {equal.left} and {equal.right} are equal"
    feeds = [
        _feeds(
            case,
            program,
            {n: concrete(s, env.table, case.sizes) for n, s in (undivided | held).items()},
            mesh,
            rank,
            dirty,
        )
        for rank in range(mesh.size)
    ]
    values = Lockstep(mesh, program.builder, case.reference).run(
        feeds, [o.local for o in program.outputs]
    )
    zero = [work.zero[o.name, o.sharding] for o in program.outputs]
    return Run(mesh, program, plan, values, zero)


def _feeds(
    case: Case,
    program: PartitionedModel,
    held: Mapping[str, Sharding],
    mesh: Mesh,
    rank: int,
    dirty: bool,
) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    entering = [(i.name, i.local) for i in program.inputs]
    entering += [(p.name, p.local) for p in program.parameters]
    for name, local in entering:
        array = case.arrays[name] if name in case.arrays else np.asarray(case.consts[name])
        sharding = held[name]
        array = _part(array, sharding, mesh, rank, name)
        shard, valid = split_and_mask(array, sharding, mesh, rank)
        if dirty and name in case.arrays and not valid.all():
            shard[~valid] = _garbage(shard.dtype)
        feeds[local.name or ""] = shard
    for name in program.builder.system_inputs:
        if name.startswith(SYMBOL_PREFIX):
            feeds[name] = np.array([case.sizes[name.removeprefix(SYMBOL_PREFIX)]])
        elif name.startswith(COORD_PREFIX):
            feeds[name] = np.array([mesh.coords(rank)[int(name.removeprefix(COORD_PREFIX))]])
        else:
            feeds[name] = np.array([len(name)])
    return feeds


def _garbage(dtype: np.dtype[np.generic]) -> object:
    if dtype == np.bool_:
        return True
    if np.issubdtype(dtype, np.integer):
        return GARBAGE_INT % (np.iinfo(dtype).max + 1)
    return np.nan


def _part(array: Array, sharding: Sharding, mesh: Mesh, rank: int, name: str) -> Array:
    """A device's term of a partial value: terms of both signs that reduce to `array`."""
    if not sharding.partial:
        return array
    group = mesh.group(rank, sharding.partial)
    rng = np.random.default_rng(list(name.encode()))
    parts = [np.asarray(rng.standard_normal(array.shape) * 3 + 0.5) for _ in group]
    if not np.issubdtype(array.dtype, np.inexact):
        parts = [np.asarray(rng.integers(1, 5, array.shape)) for _ in group]
    parts = [np.where(p == 0, 1, p).astype(array.dtype) for p in parts]
    winner = rng.integers(0, len(group), array.shape)
    for index, part in enumerate(parts):
        if sharding.reduction in ("max", "min"):
            sign = 1 if sharding.reduction == "min" else -1
            parts[index] = np.where(winner == index, array, array + sign * np.abs(part))
    if sharding.reduction == "sum":
        parts[0] = array - np.sum(parts[1:], axis=0)
    if sharding.reduction == "prod":
        parts[0] = array / np.prod(parts[1:], axis=0)
    return parts[group.index(rank)].astype(array.dtype)
