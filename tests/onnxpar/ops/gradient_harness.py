"""Checks a gradient: by differences, by PyTorch, and on every mesh against one device.

A case is one node or a few in ONNX's text form, in float64. The loss is the sum of all results with
random weights, so that no element's cotangent hides another's. The joint graph of loss and
gradients passes through rules, plan and partition like every training program. onnx.reference runs
it for all devices in lockstep, since it has float64 where onnxruntime does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxpar.autodiff.differentiate import Differentiated, differentiate
from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.facts.program import Program
from onnxpar.frontend.expand import expand_by_body
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.builder import DOMAIN, ir_shape
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import shardings
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.node_rules import find_rules
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.body_writer import body_partitioner
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.writer import ProgramWriter
from onnxpar.propagation.propagate import Alike, alike, propagate
from tests.lockstep import Array, Evaluate, Lockstep, evaluator, run_model
from tests.onnxpar.ops.op_harness import FULL, SEED, DirtyWriter, assignments, chosen, written

LOSS = "onnxpar.loss"
WEIGHT = "onnxpar.weight."
WEIGHTED = "onnxpar.weighted"
MESHES = (Mesh.of(x=2), Mesh.of(x=2, y=2))
# Differences over five points h apart err by h^4/30 times the fifth derivative, and by
# 1.5 ulp(loss)/h in rounding: 3e-15 and 1e-12 for a loss of 1. A factor of 1e4 over the greater
# error leaves room for derivatives of up to 1e6, such as those of 1/x at 0.1.
STEP = 3e-4
RTOL = 1e-8
# The directions of differences if PyTorch confirms each element. An error that PyTorch has too,
# of e in one of n elements, changes the slope along a direction by |e d|, 1/(2 √n) <= |d| <=
# 2/√n. Whatever the other elements do, the slope is within the tolerance t only if this d is
# within an interval of 2 t / |e|, of a range of at least 1/√n. For n = 100, t = 1e-8 and e = 1e-4
# of the scale, the chance of that is 2e-3 for one direction, and 4e-6 for two.
DIRECTIONS = 2
# PyTorch uses other formulas; 1e-10 is 1e6 ulp.
TORCH_RTOL = 1e-10
# Devices sum the same numbers in another order: 1e3 additions lose 1e3 ulp = 2e-13 at most.
MESH_RTOL = 1e-11

Data = Callable[[np.random.Generator, list[int]], Array] | Array | Sequence[float]
Factors = dict[str, DimSharding]


def shown(parameter: object) -> str:
    """A parameter for the name of a test: a function's name, without its address."""
    return getattr(parameter, "__name__", "") or str(parameter)


def away_from_zero(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Numbers of both signs, 0.1 to 2 in size: away from the kink of many functions at 0."""
    return np.asarray(rng.uniform(0.1, 2, shape) * rng.choice([-1, 1], shape))


def between(low: float, high: float) -> Data:
    """Evenly distributed numbers."""
    return lambda rng, shape: np.asarray(rng.uniform(low, high, shape))


@dataclass(frozen=True)
class GradCase:
    """A small forward program and its operands.

    Attributes:
        nodes: The nodes in ONNX's text form; the factors of one node are sharded.
        inputs: Type of each operand in ONNX's text form, such as "double[N,6]". An operand whose
            sizes are all numbers becomes a parameter (its gradient may be partial), others are
            inputs.
        torch: The same function in PyTorch. It takes the module `torch` and tensors by keyword, and
            returns a tensor, or a tuple with one for each output.
        sizes: Value of each symbolic dim.
        data: Operands for which `away_from_zero` is unsuitable: a function of generator and shape,
            or the elements.
        consts: Operands that are initializers and not differentiated by.
        by: Names to differentiate by; by default all operands of type double.
        flat: Names among `by` on which the loss does not depend: their gradient must be absent.
        opset: Version of the default domain.
        reference: Whether onnx.reference runs the nodes; else onnxruntime, which has fewer
            operators in float64 but is right about some more.
        split: Index of the node that is sharded; the others follow.
        alone: Whether this runs the nodes themselves. If it lacks them in float64, it runs the
            nodes that replace them in training.
        rtol: Tolerance against differences, relative to the greatest gradient and the loss.
        torch_rtol: The same against PyTorch.
        registry: The table of operators.
    """

    nodes: str
    inputs: Mapping[str, str]
    torch: Callable[..., Any] | None = None
    sizes: Mapping[str, int] = field(default_factory=lambda: {"N": 5, "S": 3})
    data: Mapping[str, Data] = field(default_factory=dict)
    consts: Mapping[str, Array] = field(default_factory=dict)
    by: Sequence[str] | None = None
    flat: Sequence[str] = ()
    opset: int = 20
    reference: bool = True
    split: int = 0
    alone: bool = True
    rtol: float = RTOL
    torch_rtol: float = TORCH_RTOL
    registry: Registry = REGISTRY

    def __str__(self) -> str:
        shown = ", ".join(f"{k}: {v}" for k, v in self.inputs.items())
        return f"{self.nodes} | {shown} | opset {self.opset}"

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The forward model; every operand that is not constant is an input."""
        return written(self.nodes, self.inputs, self.consts, self.opset)

    @property
    def variables(self) -> list[str]:
        """The names to differentiate by."""
        if self.by is not None:
            return list(self.by)
        return [name for name, text in self.inputs.items() if text.startswith("double")]

    @cached_property
    def program(self) -> "GradProgram":
        """Loss and gradients on the undivided graph."""
        return GradProgram.build(self)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The undivided operands and the weights of the results, seeded by the case's text."""
        rng = np.random.default_rng(list(self.nodes.encode()))
        found: dict[str, Array] = {}
        env = self.program.env
        graph = self.program.model.graph
        for value in (*graph.inputs, *(graph.initializers[n] for n in self.program.parameters)):
            name = value.name or ""
            shape = [int(env.table.evaluate(d, self.sizes)) for d in env.shapes[name]]
            assert value.dtype is not None
            dtype = value.dtype.numpy()
            data = self.data.get(name)
            if callable(data):
                array = data(rng, shape)
            elif data is not None:
                array = np.asarray(data)
            elif dtype == np.bool_:
                array = rng.random(shape) < 0.5
            elif np.issubdtype(dtype, np.integer):
                array = rng.integers(0, 3, shape)
            else:
                array = away_from_zero(rng, shape)
            assert list(array.shape) == shape, f"{name}: {array.shape}, expected {shape}"
            found[name] = array.astype(dtype)
        return found

    @cached_property
    def single(self) -> dict[str, Array]:
        """Loss and gradients on one device, by the name of the variable ("" for the loss)."""
        return self._named(
            run_model(self._partitioned, self.arrays, self.sizes, kept=self._interpreter)
        )

    def results(self, factors: Factors, mesh: Mesh, padding: float = 0) -> dict[str, Array]:
        """Loss and gradients on a mesh, with one node sharded as `factors` says."""
        program = self.program.partitioned(factors, mesh, clean=padding == 0)
        return self._named(
            run_model(program, self.arrays, self.sizes, reference=self.reference, padding=padding)
        )

    def _named(self, made: Mapping[str, Array]) -> dict[str, Array]:
        names = {LOSS: "", **{g: n for n, g in self.program.done.gradients.items()}}
        return {names[name]: array for name, array in made.items() if name in names}

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Fails unless the gradients are right, on one device and on all meshes."""
        self.check_program()
        confirmed = self.check_torch()
        self.check_differences(elements=FULL or not confirmed)
        self.check_meshes()

    def check_program(self) -> None:
        """Fails if a variable has no gradient, or if the backward program has a dead value."""
        done, graph = self.program.done, self.program.model.graph
        assert set(done.unreached) == set(self.flat), f"{self}: unreached {dict(done.unreached)}"
        read = {v for node in graph for v in node.inputs} | set(graph.outputs)
        # A loop has all of its states as results, and each result of a loop must have a name.
        dead = [
            v.name
            for n in self.program.backward
            for v in n.outputs
            if v.name and v not in read and not bodies_of(n)
        ]
        assert not dead, f"{self}: nobody reads {dead}"

    def check_differences(self, elements: bool = True) -> None:
        """Fails unless the gradients are those of central differences.

        Args:
            elements: Whether each element is compared; else the slopes along random directions.
        """
        for name in self.program.done.gradients:
            got = self.single[name]
            if elements or got.size <= DIRECTIONS:
                want = self._differences(name)
                self._close(name, got, want, self.rtol, "differences")
                continue
            rng = np.random.default_rng(list(self.nodes.encode()))
            for _ in range(DIRECTIONS):
                along = rng.uniform(0.5, 1, got.shape) * rng.choice([-1, 1], got.shape)
                along /= np.linalg.norm(along)
                slope = self._slope(name, along)
                scale = max(float(np.max(np.abs(got))), float(np.abs(self.single[""])))
                off = abs(slope - float(np.sum(got * along)))
                assert off <= self.rtol * scale, f"{self}\n{name!r}: slope {slope}, off by {off}"

    def check_torch(self) -> bool:
        """Fails unless loss and gradients are PyTorch's; returns whether it could tell."""
        if self.torch is None or find_spec("torch") is None:
            return False
        torch = import_module("torch")
        forward = {n: a for n, a in self.arrays.items() if not n.startswith(WEIGHT)}
        tensors = {n: torch.tensor(a) for n, a in forward.items()}
        variables = [n for n in self.variables if n not in self.flat]
        for name in variables:
            tensors[name].requires_grad_()
        made = self.torch(torch, **tensors)
        results = made if isinstance(made, tuple) else (made,)
        weights = [torch.tensor(self.arrays[n]) for n in self.program.weights]
        assert [list(r.shape) for r in results] == [list(w.shape) for w in weights], str(self)
        loss = sum((r * w).sum() for r, w in zip(results, weights, strict=True))
        loss.backward()
        self._close("loss", self.single[""], loss.detach().numpy(), self.torch_rtol, "torch")
        for name in variables:
            self._close(
                name, self.single[name], tensors[name].grad.numpy(), self.torch_rtol, "torch"
            )
        return set(self.program.done.gradients) <= set(variables)

    def check_meshes(self) -> None:
        """Fails unless every sharding gives the results of one device, also with NaN as padding."""
        for number, (mesh, factors) in enumerate(self._shardings(), len(self.nodes)):
            for padding in (0, np.nan) if FULL else ((0, np.nan)[number % 2],):
                made = self.results(factors, mesh, padding)
                for name, array in made.items():
                    how = f"{factors} on {mesh.atoms}, padding {padding}, seed {SEED}"
                    self._close(name, array, self.single[name], MESH_RTOL, how)

    def _shardings(self) -> list[tuple[Mesh, Factors]]:
        """What is checked: in the full tier, all.

        The quick tier draws from those that differ. One axis shards the same factors on both
        meshes, so it needs the small one. The axes of the large one have equal sizes, so of two
        shardings that exchange them, one is enough. Nothing is sharded only if nothing can be.
        """
        if FULL:
            return [(mesh, f) for mesh in MESHES for f in self.program.assignments(mesh)]
        one, two = MESHES
        single = [f for f in self.program.assignments(one) if f] or [{}]
        both = [f for f in self.program.assignments(two) if _atoms(f) == [0, 1]]
        return [(one, f) for f in chosen(single)] + [(two, f) for f in chosen(both, 1)]

    def _close(self, name: str, got: Array, want: Array, rtol: float, how: str) -> None:
        assert got.shape == want.shape and got.dtype == want.dtype, f"{self}: {name}, {how}"
        scale = max(float(np.max(np.abs(want), initial=0)), float(np.abs(self.single[""])))
        near = np.all(np.isfinite(got)) and np.all(np.abs(got - want) <= rtol * scale)
        assert near, f"{self}\n{name!r}: {how}\ngot {got}\nexpected {want}"

    def _differences(self, name: str) -> Array:
        """∂loss/∂`name`, element by element."""
        slopes = np.zeros(self.arrays[name].shape)
        for index in range(slopes.size):
            along = np.zeros(slopes.shape)
            along.flat[index] = 1
            slopes.flat[index] = self._slope(name, along)
        return slopes

    def _slope(self, name: str, along: Array) -> float:
        """The slope of the loss along a direction by the five-point central difference."""
        losses = {
            step: self._loss({**self.arrays, name: self.arrays[name] + step * STEP * along})
            for step in (-2, -1, 1, 2)
        }
        return (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * STEP)

    def _loss(self, arrays: Mapping[str, Array]) -> float:
        if self._forward is None:
            made = run_model(self._partitioned, arrays, self.sizes, kept=self._interpreter)
            return float(made[LOSS])
        results = self._forward({n: a for n, a in arrays.items() if not n.startswith(WEIGHT)})
        names = (n.removeprefix(WEIGHT) for n in self.program.weights)
        return sum(float(np.sum(results[n] * arrays[WEIGHT + n])) for n in names)

    @cached_property
    def _partitioned(self) -> PartitionedModel:
        return self.program.partitioned({}, Mesh.of())

    @cached_property
    def _interpreter(self) -> Lockstep:
        return Lockstep(Mesh.of(), self._partitioned.builder, self.reference)

    @cached_property
    def _forward(self) -> Evaluate | None:
        """The forward model by itself; None if it has nodes of ours, such as random ones."""
        if not self.alone:
            return None
        forward = {n.name for n in self.program.forward}
        ours = [n for n in self._partitioned.builder.nodes if n.domain == DOMAIN]
        if any((n.name or "").split("/")[0] in forward for n in ours):
            return None
        return evaluator(self.proto, self.reference)


@dataclass(frozen=True)
class SplitNode:
    """The node that is sharded: its rule, and the node before its body replaced it."""

    rule: OpRule
    view: NodeView


@dataclass(frozen=True)
class GradProgram(Program):
    """A loss and its gradients on the undivided graph, and what the planner needs of them."""

    done: Differentiated
    split: SplitNode
    forward: Sequence[ir.Node]
    backward: Sequence[ir.Node]
    parameters: Sequence[str]
    weights: Sequence[str]

    @staticmethod
    def build(case: GradCase) -> "GradProgram":
        """Appends the loss, differentiates it and finds the rules of all nodes."""
        model = normalise(ir.from_proto(case.proto), case.registry)
        env = shapes(model, symbol_table(model, {}))
        graph = model.graph
        # A node that is differentiated by its body is sharded by its own rule.
        first = model.clone()
        name = list(first.graph)[case.split].name or ""
        own = find_rules(first, env, case.registry)
        assert name not in own.reasons, f"{case}: {own.reasons[name]}"
        builder = GlobalBuilder.over(graph, model.opset_imports[""], env)
        parameters = _hold(graph, case.variables)
        weights = _append_loss(builder)
        expand_by_body(
            model, case.registry, builder, _variables(graph, case.variables), graph.outputs[-1]
        )
        forward = [node for node in graph if not (node.name or "").startswith(f"{WEIGHTED}/")]
        before = set(graph)
        done = differentiate(model, builder.env, case.registry, LOSS, case.variables)
        backward = [node for node in graph if node not in before]
        rules = find_rules(model, done.env, case.registry)
        assert not rules.reasons, f"{case}: replicated {dict(rules.reasons)}"
        split = SplitNode(own.by_node[name], own.views[name])
        program = (model, done.env, rules, case.registry)
        return GradProgram(*program, done, split, forward, backward, parameters, weights)

    @cached_property
    def alike(self) -> Alike:
        """What all plans of the program have in common."""
        return alike(self)

    def assignments(self, mesh: Mesh) -> Iterator[Factors]:
        """Every way to give the atoms of a mesh to factors of the sharded node, in every order."""
        yield from assignments(self.split.rule, self.split.view, mesh)

    def partitioned(self, factors: Factors, mesh: Mesh, *, clean: bool = True) -> PartitionedModel:
        """Plans and partitions the program.

        Args:
            factors: Components of the sharded factors of the node, from which the shardings of its
                operands follow.
            mesh: The mesh.
            clean: Whether padding of operands is 0; else the partitioner assumes nothing about it.
        """
        node, name = self.split.view.node, self.split.view.name
        plan = shardings(self.split.rule, self.split.view, factors, mesh, pinned=True)
        given = {v.name: s for v, s in zip(node.inputs, plan.inputs, strict=False) if v is not None}
        inputs = {
            v.name or "": given[v.name] or Sharding.replicated(self.env.shapes[v.name or ""])
            for v in self.model.graph.inputs
            if v.name in given
        }
        nodes = {name: NodeSeed(name, factors)} if name in self.rules.by_node else {}
        seeds = Seeds(mesh, nodes, inputs)
        planned = propagate(self, seeds, self.done.links, self.alike)
        builder = LocalBuilder(self.env.table, self.model.opset_imports[""], mesh)
        kind = ProgramWriter if clean else DirtyWriter
        bodies = body_partitioner(self.registry)
        return kind(self, planned, builder, bodies).run()


def _atoms(factors: Factors) -> list[int]:
    """The atoms in the order in which the factors are sharded over them."""
    return [a for parts in factors.values() for component in parts for a in component.atoms]


def _variables(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    return [v for v in (*graph.inputs, *graph.initializers.values()) if v.name in names]


def _hold(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Turns the inputs to differentiate by into parameters, if they have a fixed shape."""
    held = []
    for value in list(graph.inputs):
        name, shape = value.name or "", value.shape
        # A scalar would be folded into the graph.
        if name in names and shape and all(isinstance(d, int) for d in shape):
            graph.inputs.remove(value)
            assert value.dtype is not None
            value.const_value = ir.Tensor(
                np.zeros([int(d) for d in shape if isinstance(d, int)], value.dtype.numpy()),
                dtype=value.dtype,
                name=name,
            )
            graph.register_initializer(value)
            held.append(name)
    return held


def _append_loss(builder: GlobalBuilder) -> list[str]:
    """Appends Σ result · weight, where weights are new inputs, and returns their names."""
    graph = builder.graph
    names: list[str] = []
    total: ir.Value | None = None
    for result in list(graph.outputs):
        if result.dtype is None or not result.dtype.is_floating_point():
            continue
        shape = builder.shape_of(result)
        weight = ir.Value(name=f"{WEIGHT}{result.name}")
        builder.declare(weight, result.dtype, shape)
        weight.shape = ir_shape(shape)
        graph.inputs.append(weight)
        names.append(weight.name or "")
        builder.scope = WEIGHTED
        part = builder.op("Mul", result, weight, shape=shape)
        if shape:
            part = builder.reduce("ReduceSum", part, range(len(shape)))
        total = part if total is None else builder.op("Add", total, part, shape=[])
    assert total is not None
    builder.rename(total, LOSS)
    graph.outputs.append(total)
    return names
