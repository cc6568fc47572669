"""The forward and the backward program of a model whose parameters are held elsewhere.

Takes a model, the names of the tensors that its user holds, and a strategy; gives two programs of
one plan. The forward program computes the outputs from the inputs and the held tensors. The
backward program takes the cotangents of the outputs besides, and computes the gradients; it
computes again what it needs of the forward program. Everything enters and leaves undivided.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpar.autodiff.differentiate import differentiate_outputs
from onnxpar.autodiff.optimizer import NEW
from onnxpar.core.errors import StrategyError
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Symbol
from onnxpar.emit import write
from onnxpar.facts.program import Program
from onnxpar.frontend.fused_weights import divide_fused_weights
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.plan import Plan
from onnxpar.graph.shapes import shapes
from onnxpar.graph.tensor_parts import part_of, tensor_of
from onnxpar.ops.norm.running_statistics import infer_with_statistics, keep_statistics
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.partition.partition import partition
from onnxpar.propagation.propagate import propagate
from onnxpar.report.inspect_data import directory_data
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, resolve, resolved


@dataclass(frozen=True)
class Held:
    """A tensor that the caller holds, or a range of one.

    Attributes:
        name: Name of the input that takes it.
        tensor: Name of the tensor.
        axis: The dim of which it is a range.
        start: The first index of the range.
        size: The length of the range; None for the complete tensor.
    """

    name: str
    tensor: str
    axis: int = 0
    start: int = 0
    size: int | None = None


@dataclass(frozen=True)
class BlockSignature:
    """What the programs take and return, in order.

    Attributes:
        inputs: Names of the model's inputs; both programs take them first.
        held: The tensors that the forward program takes next.
        kept: Names of the inputs that the backward program takes next, of `held`.
        cotangents: For each output whose cotangent the backward program takes last, the name of
            the input.
        outputs: Names of the model's outputs, which the forward program returns.
        statistics: Names of the tensors whose new values it returns after the outputs.
        gradients: Names of the inputs, the model's or those of held tensors, whose gradients the
            backward program returns.
    """

    inputs: tuple[str, ...]
    held: tuple[Held, ...]
    kept: tuple[str, ...]
    cotangents: Mapping[str, str]
    outputs: tuple[str, ...]
    statistics: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What is asked of the programs of a model.

    Attributes:
        held: Names of the floating-point initializers that the caller holds.
        gradients: Names of the inputs and held tensors whose gradients are wanted.
        training: Whether normalisations use the statistics of the batch and update running ones, as
            PyTorch does.
        fixed: Running statistics that are used as they are, also in training.
    """

    held: frozenset[str]
    gradients: frozenset[str]
    training: bool
    fixed: frozenset[str] = frozenset()


class BlockPrograms:
    """Plans both programs; `write_forward` and `write_backward` write a directory each.

    Args:
        model: The model as it was exported; it is used up.
        wanted: What is asked of it.
        strategy: How it is sharded.
        symbols: Constraints on the symbols of its inputs.
        registry: The table of operators.

    Attributes:
        signature: What the programs take and return.

    Raises:
        OnnxparError: The strategy does not fit the model, it has pipeline stages, or a node between
            an output and a tensor whose gradient is wanted has no gradient.
    """

    def __init__(
        self,
        model: ir.Model,
        wanted: Asked,
        strategy: Strategy,
        symbols: Mapping[str, Symbol],
        registry: Registry = REGISTRY,
    ) -> None:
        """Differentiates and plans; writes nothing."""
        if strategy.pipeline is not None:
            raise StrategyError(
                f"{strategy.source}: a pipeline divides a training into micro-batches, which a "
                "module in a program of PyTorch cannot do; expected a strategy without one"
            )
        model = normalise(model, registry)
        outputs = tuple(value.name or "" for value in model.graph.outputs)
        inputs = tuple(value.name or "" for value in model.graph.inputs)
        env = shapes(model, symbol_table(model, symbols, registry))
        program = divide_fused_weights(Program.of(model, env, registry))
        model, env = program.model, program.env
        held = tuple(
            _held(value)
            for value in model.graph.initializers.values()
            if tensor_of(value) in wanted.held
        )
        updated: Mapping[str, str] = {}
        if wanted.training:
            running = keep_statistics(model, env, wanted.fixed, NEW, unbiased=True)
            env, updated = running.env, running.updated
        else:
            infer_with_statistics(model.graph)
        forward = model.clone()
        variables = [name for name in inputs if name in wanted.gradients]
        variables += [each.name for each in held if each.tensor in wanted.gradients]
        floats = [
            value.name or ""
            for value in model.graph.outputs
            if value.name in outputs and value.dtype is not None and value.dtype.is_floating_point()
        ]
        found, cotangents = differentiate_outputs(model, env, registry, floats, variables)
        self._program = Program.of(model, found.env, registry)
        self._gradients = tuple(found.gradients.values())
        self._forward = (*outputs, *updated)
        needed = {v.name for v in _needed(model.graph, self._gradients)}
        self.signature = BlockSignature(
            inputs,
            held,
            tuple(each.name for each in held if each.name in needed),
            cotangents,
            outputs,
            tuple(updated.values()),
            tuple(found.gradients),
        )
        trained = {n: g for n, g in found.gradients.items() if n not in inputs}
        workload = Workload(self._program, found.links, trained, 0, forward)
        strategy = settled(strategy, workload, symbols)
        self._plan = self._planned(strategy, found.links)

    def write_forward(self, folder: Path) -> dict[str, Any]:
        """Writes the forward program, and returns its report."""
        return self._write(folder, self._forward, [held.name for held in self.signature.held])

    def write_backward(self, folder: Path) -> dict[str, Any]:
        """Writes the backward program, and returns its report."""
        taken = [*self.signature.kept, *self.signature.cotangents.values()]
        return self._write(folder, self._gradients, taken)

    def _planned(self, strategy: Strategy, links: Mapping[str, tuple[str, ...]]) -> Plan:
        program = self._program
        seeds = resolve(strategy, program)
        known = program.env.shapes
        seeds = replace(
            seeds,
            # The layout of a cotangent follows from that of its output.
            inputs={
                n: s for n, s in seeds.inputs.items() if n not in self.signature.cotangents.values()
            },
            outputs={
                name: Sharding.replicated(known[name])
                for name in (*self._forward, *self._gradients)
                if name in known
            },
        )
        plan = propagate(program, seeds, links)
        held = {each.name: plan.parameters[each.name] for each in self.signature.held}
        return replace(plan, inputs={**plan.inputs, **held})

    def _write(self, folder: Path, outputs: Sequence[str], taken: Sequence[str]) -> dict[str, Any]:
        """Writes the part of the program that computes these outputs.

        Args:
            folder: The directory to write.
            outputs: The outputs, in order.
            taken: What it takes after the model's inputs.
        """
        model = self._program.model.clone()
        graph = model.graph
        _keep(graph, outputs)
        known = {v.name: v for v in graph.inputs}
        for each in self.signature.held:
            value = known[each.name] = graph.initializers.pop(each.name)
            value.const_value = None
        graph.inputs[:] = [known[name] for name in (*self.signature.inputs, *taken)]
        part = Program.of(model, self._program.env, self._program.registry)
        parted = partition(part, self._plan)
        report = directory_data((parted,))
        write(
            (parted,),
            folder,
            report=report,
            strategy=resolved(parted.plan, parted.source),
            model_name=graph.name or "block",
        )
        return report


def _held(value: ir.Value) -> Held:
    part, name = part_of(value), value.name or ""
    if part is None:
        return Held(name, name)
    assert value.shape is not None
    size = value.shape[part.axis]
    assert isinstance(size, int)
    return Held(name, part.tensor, part.axis, part.start, size)


def _needed(graph: ir.Graph, outputs: Collection[str]) -> set[ir.Value]:
    """Returns the values from which some outputs are computed, these included."""
    needed = {value for value in graph.outputs if value.name in outputs}
    for node in reversed(graph):
        if not needed.isdisjoint(node.outputs):
            needed.update(read_by(node))
    return needed


def _keep(graph: ir.Graph, outputs: Sequence[str]) -> None:
    """Removes all other outputs, and nodes of no use. Nodes keep all results, as in the plan."""
    needed = _needed(graph, outputs)
    made = {value.name: value for value in graph.outputs}
    graph.outputs[:] = [made[name] for name in outputs]
    for node in reversed(list(graph)):
        if needed.isdisjoint(node.outputs):
            graph.remove(node, safe=True)
