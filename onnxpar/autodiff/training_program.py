"""The undivided program that trains a model: with its loss appended, and differentiated."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxpar.autodiff.append_loss import LOSS, LossInfo, LossKind, LossSpec, append_loss
from onnxpar.autodiff.differentiate import differentiate
from onnxpar.autodiff.mixed_precision import COMPUTE_TYPES, compute_in, widen_parameters
from onnxpar.autodiff.optimizer import NEW, OptimizerKind, updates_by_tensor
from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import Symbol
from onnxpar.facts.program import Program
from onnxpar.frontend.fused_weights import FusedWeights
from onnxpar.frontend.load import symbol_table
from onnxpar.graph.pipeline_places import Copy
from onnxpar.graph.shapes import shapes
from onnxpar.ops.norm.running_statistics import forms, keep_statistics
from onnxpar.ops.random.draws import idle_dropouts
from onnxpar.ops.registry import Registry
from onnxpar.parameters.recognise import PYTORCH, Recognised
from onnxpar.parameters.trainable import FROZEN, Selection, select


@dataclass(frozen=True)
class TrainingSpec:
    """What the user asks to train, and how.

    Attributes:
        loss: The loss.
        optimizer: The optimizer.
        trainable: Patterns of tensors to train in addition to the parameters of the file.
        freeze: Patterns of parameters not to train; `trainable` wins.
        decay: Patterns of parameters with weight decay, in addition to those of two or more dims.
        no_decay: Patterns of parameters without weight decay, whatever their dims.
        compute: Type of products, "float16" or "bfloat16"; None for the model's own type.
        ties: Entries `A=B` for tensors that are one parameter.
    """

    loss: LossSpec
    optimizer: OptimizerKind
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    decay: tuple[str, ...] = ()
    no_decay: tuple[str, ...] = ()
    compute: str | None = None
    ties: tuple[str, ...] = ()

    @staticmethod
    def of(entry: Mapping[str, Any]) -> "TrainingSpec":
        """Returns a spec from its manifest entry: `TrainingSpec.of(asdict(spec)) == spec`."""
        loss = LossSpec(**{**entry["loss"], "kind": LossKind(entry["loss"]["kind"])})
        lists = ("trainable", "freeze", "decay", "no_decay", "ties")
        patterns = {key: tuple(entry[key]) for key in lists}
        return TrainingSpec(
            loss, OptimizerKind(entry["optimizer"]), **patterns, compute=entry["compute"]
        )


@dataclass(frozen=True)
class TrainingProgram:
    """The undivided program of one micro-batch.

    Attributes:
        program: Forward, loss and backward.
        links: For each cotangent its primals, and for each new running statistic the old one.
        loss: The loss.
        gradients: Name of the gradient of each parameter that is trained; it is an output.
        updated: For each output that is a new running statistic, the old one.
        selection: Which parameters are trained, and which are not.
        unreached: The selected parameters on which the loss does not depend, each with the reason.
        notices: Notices about the model, for the user.
        evaluation: The model without loss and backward.
        compute: The 16-bit type of its products, if parameters are float32 masters; else None.
        copies: The copies of initializers in further pipeline stages, by name.
        fuses: Whether nodes may become fused operators (`onnxpar.partition.fuse_nodes`).
    """

    program: Program
    links: Mapping[str, tuple[str, ...]]
    loss: LossInfo
    gradients: Mapping[str, str]
    updated: Mapping[str, str]
    selection: Selection
    unreached: Mapping[str, str]
    notices: tuple[str, ...]
    evaluation: ir.Model
    compute: str | None = None
    copies: Mapping[str, Copy] = field(default_factory=dict)
    fuses: bool = True


Stager = Callable[[Program, Collection[str]], Mapping[str, Copy]]
"""Puts a program's nodes into virtual stages, given the names of its parameters."""


def prepare_training(
    recognised: Recognised,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    stager: Stager | None = None,
) -> TrainingProgram:
    """Appends loss and backward to a model. The model given is used up.

    Args:
        recognised: The normalised model with its recognised parameters.
        symbols: Constraints on the symbols of its inputs.
        spec: What to train and how.
        stager: Puts the forward nodes into virtual stages, in a pipeline.

    Raises:
        OnnxparError: The loss or the parameters do not fit the model, or an operator between them
            has no gradient.
    """
    return _prepare(recognised, symbols, spec, stager, frozenset())


def _prepare(
    recognised: Recognised,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    stager: Stager | None,
    whole: frozenset[str],
) -> TrainingProgram:
    """As `prepare_training`; fused weights of these names are not divided."""
    model, notices = recognised.model, list(recognised.notices)
    idle = idle_dropouts(model.graph)
    if idle:
        notices.append(
            f"{len(idle)} Dropout nodes ({idle[0]!r}, …) were exported for inference and have "
            "no effect; to train with dropout, export the model in training mode"
        )
    selection = select(
        model, recognised.registry, spec.trainable, spec.freeze, spec.decay, spec.no_decay
    )
    if not selection.trained:
        raise ModelError(
            "nothing to train: the model has no floating-point parameter that is not frozen"
        )
    frozen = frozenset(t.name for t in selection.tensors if t.reason == FROZEN)
    if updates_by_tensor(spec.optimizer):
        whole |= {p.name for p in selection.trained}
    env = shapes(model, symbol_table(model, symbols, recognised.registry))
    fused = FusedWeights(Program.of(model, env, recognised.registry), whole)
    spare = recognised.clone() if fused else recognised
    model = fused.divide().model
    selection = selection.divided(model.graph)
    notices += _normalisation_notices(model.graph, frozen)
    selection, compute = _in_half(model, selection, spec, recognised.registry)
    if compute is not None:
        notices.append(f"{compute} computation: {_ON_CPU[compute]}")
    evaluation = model.clone()
    info = append_loss(model, spec.loss)
    model = info.model
    del model.graph.outputs[:-1]
    model = common.RemoveUnusedNodesPass()(model).model
    names = [p.name for p in selection.trained]
    copies: Mapping[str, Copy] = {}
    if stager is not None:
        env = shapes(model, symbol_table(model, symbols, recognised.registry))
        copies = stager(Program.of(model, env, recognised.registry), names)
    env = shapes(model, symbol_table(model, symbols, recognised.registry))
    running = keep_statistics(
        model, env, frozen, NEW, unbiased=spare.model.producer_name in PYTORCH
    )
    variables = [*names, *(name for name, copy in copies.items() if copy.original in names)]
    found = differentiate(
        model,
        running.env,
        recognised.registry,
        LOSS,
        [n for n in variables if n in model.graph.initializers],
        {name: copy.original for name, copy in copies.items()},
    )
    tensors = {p.name: p.tensor for p in selection.trained}
    reached = {tensors[n] for n in found.gradients if n in tensors}
    missed = {tensors[n] for n in names if n not in found.gradients}
    if reached & missed:
        # The gradient of a tensor exists completely or not at all.
        return _prepare(spare, symbols, spec, stager, whole | (reached & missed))
    selection.ask(reached)
    if not found.gradients:
        raise ModelError(f"nothing to train: the loss depends on none of {', '.join(names)}")
    reasons = {**dict.fromkeys(names, "the loss does not depend on it"), **found.unreached}
    unreached = {
        tensors.get(n, n): reason for n, reason in reasons.items() if n not in found.gradients
    }
    return TrainingProgram(
        Program.of(model, found.env, recognised.registry),
        # A new statistic is laid out like the old one, as a gradient is like its parameter.
        {**found.links, **{new: (old,) for new, old in running.updated.items()}},
        info,
        found.gradients,
        running.updated,
        selection,
        unreached,
        tuple(notices),
        evaluation,
        compute,
        copies,
    )


_ON_CPU = {
    "float16": "on the CPU, onnxruntime computes it in float32, with the same speed and precision",
    "bfloat16": "it runs on CUDA only; onnxruntime has no CPU kernels for it",
}


def _in_half(
    model: ir.Model, selection: Selection, spec: TrainingSpec, registry: Registry
) -> tuple[Selection, str | None]:
    """Makes the model compute in 16 bits with float32 parameters, if asked for or stored so.

    Returns:
        The selection with the new types of parameters, and the 16-bit type, if there is one.
    """
    names = [p.name for p in selection.trained]
    widened = widen_parameters(model.graph, names)
    types = {dtype.name.lower() for dtype in widened.values()}
    if spec.compute is not None:
        if types - {spec.compute}:
            raise ModelError(
                f"--compute {spec.compute}: expected a model whose parameters are float32, got "
                f"{', '.join(sorted(types))}"
            )
        compute_in(model, COMPUTE_TYPES[spec.compute], registry)
        types = {spec.compute}
    trained = tuple(
        replace(p, dtype=ir.DataType.FLOAT) if p.name in widened else p for p in selection.trained
    )
    # Of two types the maximum is float16, whose range needs loss scaling.
    return replace(selection, trained=trained), max(types, default=None)


def _normalisation_notices(graph: ir.Graph, frozen: frozenset[str]) -> list[str]:
    """Notices about which statistics BatchNormalization nodes use in training."""
    found = forms(graph, frozen)
    texts = (
        (
            found.put,
            "were exported for inference; training uses the statistics of each micro-batch, and "
            "evaluation the running statistics",
        ),
        (found.fixed, "use their frozen running statistics in training too"),
        (
            found.stuck,
            "keep their exported form: their running statistics are computed in the graph, or "
            "they are in a control-flow body",
        ),
    )
    return [
        f"{len(names)} BatchNormalization nodes ({names[0]!r}{', …' if names[1:] else ''}) {text}"
        for names, text in texts
        if names
    ]
