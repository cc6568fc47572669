"""Optimizers: the update of all states, as one global graph.

Every state is read and written element by element, so its new value can overwrite the old one. SGD,
Adam and AdamW have the formulas of `torch.optim` 2.13, with one fused node for each parameter
(`onnxpar.ops.fused.updates`). LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning",
algorithm 2, with the identity for phi) has standard nodes. The formulas are rearranged for fewer
passes over memory; results differ from PyTorch's by rounding.

Hyperparameters are float64 inputs. They are combined in float64 and rounded to the parameter's type
when they meet a tensor. Parameters of 16 bits are updated in float32 and rounded at the end. Their
moments are float32, because a second moment in 16 bits loses its small terms.

A new optimizer has its name in `OptimizerKind`, its program in `_UPDATES`, its hyperparameters in
`onnxpar_runtime.training.hyper`, and its help in `onnxpar.cli.shard`. Its states have the shape of
the parameter; other shapes (Adafactor's rows and columns) need a `StateKind` with a shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import NO_CONSTRAINTS
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.ops.collective.stage_sum import STAGE_SUM
from onnxpar.ops.function import Function, attach_functions
from onnxpar.ops.fused.updates import ADAM_STEP, ADAMW_STEP, MOMENTUM_STEP, SGD_STEP, SQUARE_SUM
from onnxpar.ops.local_helpers import DOUBLE, FLOAT, work_dtype
from onnxpar.ops.old_node import OPSET
from onnxpar.parameters.trainable import ParameterInfo
from onnxpar_format.manifest import StateKind

GRAD_NORM = "onnxpar.grad_norm"
HYPER = "onnxpar.hyper."
NEW = "onnxpar.new."
INVERSE = "loss_scale_inverse"
CLIP_EPSILON = 1e-6
"""Added to the norm when gradients are clipped, as in `torch.nn.utils.clip_grad_norm_`."""

_IR_VERSION = 10
_BOOL = ir.DataType.BOOL


class OptimizerKind(StrEnum):
    """The optimizers, with their names on the command line."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    LAMB = "lamb"


_PREFIXES = {
    StateKind.PARAMETER: "",
    StateKind.GRADIENT: "onnxpar.grad.",
    StateKind.MICRO_GRADIENT: "onnxpar.micro.",
    StateKind.MOMENT1: "onnxpar.moment1.",
    StateKind.MOMENT2: "onnxpar.moment2.",
    StateKind.STATISTIC: "",
}


def state_name(kind: StateKind, parameter: str) -> str:
    """Returns the name of a parameter's state, such as `onnxpar.grad.fc1.weight`."""
    return _PREFIXES[kind] + parameter


@dataclass(frozen=True)
class State:
    """A buffer that lives from step to step.

    Attributes:
        name: Name of the buffer and of the graph input that reads it.
        kind: What it is for.
        parameter: The parameter that it belongs to.
        dtype: Element type.
        shape: Global shape, that of the parameter.
    """

    name: str
    kind: StateKind
    parameter: str
    dtype: ir.DataType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateProgram:
    """A program that updates states.

    Attributes:
        model: The global graph. Its inputs are states and hyperparameters (float64 []).
        states: The states that it reads, in the order of its inputs.
        updated: For each graph output with a state's new value, the name of the state.
        hyperparameters: Names of the hyperparameters that it reads, without the input's prefix.
        reduced: For each gradient, the value that all its readers read. If the gradient is partial,
            it is reduced there, once for all readers.
    """

    model: ir.Model
    states: tuple[State, ...]
    updated: Mapping[str, str]
    hyperparameters: tuple[str, ...]
    reduced: Mapping[str, str]


def moments_of(kind: OptimizerKind) -> tuple[StateKind, ...]:
    """Returns the moments that an optimizer keeps for each parameter."""
    return _UPDATES[kind].moments


def updates_by_tensor(kind: OptimizerKind) -> bool:
    """Whether an optimizer needs a complete tensor to update an element, so it has no parts."""
    return _UPDATES[kind].by_tensor


def states_of(parameters: Sequence[ParameterInfo], kinds: Sequence[StateKind]) -> tuple[State, ...]:
    """Returns the states of all parameters, kind by kind."""
    return tuple(
        State(state_name(kind, p.name), kind, p.name, _state_dtype(kind, p.dtype), p.shape)
        for kind in kinds
        for p in parameters
    )


def _state_dtype(kind: StateKind, dtype: ir.DataType) -> ir.DataType:
    moment = kind in (StateKind.MOMENT1, StateKind.MOMENT2)
    return work_dtype(dtype) if moment else dtype


def optimizer_model(
    kind: OptimizerKind,
    parameters: Sequence[ParameterInfo],
    *,
    opset: int = OPSET,
    scaled: bool = False,
    stages: int = 1,
    double: bool = False,
) -> StateProgram:
    """Returns the program of one optimizer step over all parameters.

    Inputs are the states by their names and `onnxpar.hyper.<name>` (float64 []); outputs are
    `onnxpar.new.<state>` for parameters and moments, and `onnxpar.grad_norm` ([], the 2-norm of all
    gradients before clipping, float64 where a parameter is, else float32). Gradients are clipped to
    the norm `clip_norm`, which may be infinite.

    If `scaled`, gradients have been multiplied by a loss scale (Micikevicius et al., 2018, section
    3.2). Its inverse is the hyperparameter `loss_scale_inverse`, and the norm is that of the
    gradients without the scale. If the norm is not finite, no state changes on any rank; all ranks
    have the same norm.

    Args:
        kind: The optimizer.
        parameters: The parameters that it trains.
        opset: Version of the default domain.
        scaled: Whether gradients have a loss scale.
        stages: Number of pipeline stages. Each has a program for its own parameters, which may be
            none; the norm is that of the gradients of all stages.
        double: Whether some stage has parameters of float64.

    Raises:
        ModelError: There is nothing to train, or a parameter is given twice or not floating.
    """
    update = _UPDATES[kind]
    states = states_of(parameters, (StateKind.PARAMETER, StateKind.GRADIENT, *update.moments))
    builder, inputs = _open(parameters, states, opset, "optimizer", empty=stages > 1)
    reduced: dict[str, ir.Value] = {}
    gradients: list[ir.Value] = []
    for p in parameters:
        name = state_name(StateKind.GRADIENT, p.name)
        reduced[name] = builder.op("Identity", inputs[name], shape=p.shape)
        builder.rename(reduced[name], f"onnxpar.reduced.{p.name}")
        gradient = reduced[name]
        if p.stages:
            builder.scope = f"optimizer/{p.name}"
            gradient = _over_stages(builder, gradient, p.stages)
            builder.scope = "optimizer"
        gradients.append(builder.cast(gradient, work_dtype(p.dtype)))
    scalars = _Scalars(builder)
    norm, active = _norm(builder, parameters, gradients, stages, double=double), None
    if scaled:
        norm, active = _unscaled(scalars, norm)
    builder.rename(norm, GRAD_NORM)
    factor = _clip(scalars, norm)
    if scaled:
        factor = scalars.op("Mul", factor, scalars[INVERSE])
    step = _Step(builder, scalars, factor, active)
    updated: dict[str, str] = {}
    for p, gradient in zip(parameters, gradients, strict=True):
        builder.scope = f"{update.scope}/{p.name}"
        moments = tuple(inputs[state_name(moment, p.name)] for moment in update.moments)
        parameter = builder.cast(inputs[p.name], work_dtype(p.dtype))
        old = _Tensors(parameter, gradient, moments)
        values = update.emit(step, p, old)
        for moment, value in zip((StateKind.PARAMETER, *update.moments), values, strict=True):
            name = state_name(moment, p.name)
            _put_out(builder, value, _state_dtype(moment, p.dtype), NEW + name)
            updated[NEW + name] = name
    builder.graph.outputs.append(norm)
    return StateProgram(
        _close(builder),
        states,
        updated,
        tuple(scalars.inputs),
        {name: value.name or "" for name, value in reduced.items()},
    )


# -- building ------------------------------------------------------------------------------------


def parse_optimizer(name: str) -> OptimizerKind:
    """Returns the optimizer with a name; raises ModelError if there is none."""
    known = [k.value for k in OptimizerKind]
    if name not in known:
        raise ModelError(f"--optimizer: expected one of {', '.join(known)}, got {name!r}")
    return OptimizerKind(name)


def _open(
    parameters: Sequence[ParameterInfo],
    states: Sequence[State],
    opset: int,
    what: str,
    *,
    empty: bool = False,
) -> tuple[GlobalBuilder, dict[str, ir.Value]]:
    """A builder of a new graph with the states as its inputs, and these inputs by name."""
    if not parameters and not empty:
        raise ModelError(f"{what}: expected at least one parameter to train, got none")
    seen: set[str] = set()
    for p in parameters:
        if p.name in seen:
            raise ModelError(f"{what}: the parameter {p.name!r} is given twice")
        seen.add(p.name)
        if not p.dtype.is_floating_point():
            raise ModelError(
                f"{what}: parameter {p.name!r}: expected a floating type, got "
                f"{p.dtype.name.lower()}"
            )
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=f"onnxpar.{what}")
    builder = GlobalBuilder(NO_CONSTRAINTS, opset, graph, scope=what)
    inputs = {s.name: builder.add_input(builder.fresh(s.name), s.dtype, s.shape) for s in states}
    return builder, inputs


def _close(builder: GlobalBuilder) -> ir.Model:
    model = ir.Model(builder.graph, ir_version=_IR_VERSION)
    attach_functions(model, (SGD_STEP, MOMENTUM_STEP, ADAM_STEP, ADAMW_STEP, SQUARE_SUM))
    return model


def _put_out(builder: GlobalBuilder, value: ir.Value, dtype: ir.DataType, name: str) -> None:
    """Makes a value a graph output with a type and a name."""
    value = builder.cast(value, dtype)
    builder.rename(value, name)
    builder.graph.outputs.append(value)


def _norm(
    builder: GlobalBuilder,
    parameters: Sequence[ParameterInfo],
    gradients: Sequence[ir.Value],
    stages: int,
    *,
    double: bool,
) -> ir.Value:
    """The 2-norm of all gradients: squares are summed in each group, over groups, over stages."""
    builder.scope = "optimizer/grad_norm"
    wide = DOUBLE if double or any(p.dtype == DOUBLE for p in parameters) else FLOAT
    groups: dict[str, list[ir.Value]] = {}
    for p, gradient in zip(parameters, gradients, strict=True):
        if p.counted:
            square = builder.cast(_square_sum(builder, gradient), wide)
            groups.setdefault(p.norm_group, []).append(square)
    sums = [_sum(builder, squares) for squares in groups.values()]
    total = _sum(builder, sums) if sums else builder.const(0, wide)
    if stages > 1:
        total = builder.op("Identity", total, shape=())
        builder.rename(total, "onnxpar.squared_norm")
        total = _over_stages(builder, total, range(stages))
    return builder.op("Sqrt", total, shape=())


def _over_stages(builder: GlobalBuilder, x: ir.Value, stages: Sequence[int]) -> ir.Value:
    """Sums over stages. Scope and operand must have the same names in all: calls are compared."""
    shape = builder.shape_of(x)
    return builder.op(STAGE_SUM, x, shape=shape, domain=DOMAIN, stages=list(stages))


def _square_sum(builder: GlobalBuilder, x: ir.Value) -> ir.Value:
    """The sum of squares of a tensor, in its type."""
    if not builder.shape_of(x):
        return builder.op("Mul", x, x, shape=())
    return builder.op(SQUARE_SUM.name, x, shape=(), domain=DOMAIN)


def _sum(builder: GlobalBuilder, values: Sequence[ir.Value]) -> ir.Value:
    return values[0] if len(values) == 1 else builder.op("Sum", *values, shape=())


@dataclass
class _Scalars:
    """Hyperparameters, which become inputs when first read, and float64 arithmetic on them."""

    builder: GlobalBuilder
    inputs: dict[str, ir.Value] = field(default_factory=dict)
    _known: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ir.Value:
        if name not in self.inputs:
            self.inputs[name] = self.builder.add_input(HYPER + name, DOUBLE, ())
        return self.inputs[name]

    def op(self, op_type: str, *operands: ir.Value, dtype: ir.DataType = DOUBLE) -> ir.Value:
        """The result of an operator on scalars, computed once for all parameters."""
        key = (op_type, *operands)
        if key not in self._known:
            self._known[key] = self.builder.op(op_type, *operands, shape=(), dtype=dtype)
        return self._known[key]

    def cast(self, scalar: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """A scalar in another type, computed once for all parameters."""
        assert dtype is not None
        key = ("cast", scalar, dtype)
        if key not in self._known:
            self._known[key] = self.builder.cast(scalar, dtype)
        return self._known[key]

    def const(self, number: float) -> ir.Value:
        return self.builder.const(number, DOUBLE)


def _unscaled(scalars: _Scalars, norm: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The norm of gradients without their loss scale, and 1 if it is finite, else 0."""
    wide = scalars.cast(norm, DOUBLE)
    # x - x is 0 only if x is finite.
    zero = scalars.op("Sub", wide, wide)
    finite = scalars.op("Equal", zero, scalars.const(0), dtype=_BOOL)
    unscaled = scalars.cast(scalars.op("Mul", wide, scalars[INVERSE]), norm.dtype)
    return unscaled, scalars.cast(finite, DOUBLE)


def _clip(scalars: _Scalars, norm: ir.Value) -> ir.Value:
    """The factor of all gradients, min(1, clip_norm / (norm + 1e-6)); 1 without a limit."""
    limit, one = scalars["clip_norm"], scalars.const(1)
    above = scalars.op("Add", scalars.cast(norm, DOUBLE), scalars.const(CLIP_EPSILON))
    factor = scalars.op("Min", one, scalars.op("Div", limit, above))
    # Without a limit, a norm that overflows must not give inf / inf, which would spoil everything.
    unlimited = scalars.op("IsInf", limit, dtype=_BOOL)
    return scalars.op("Where", unlimited, one, factor)


@dataclass(frozen=True)
class _Tensors:
    """The states of a parameter, in the type of the update's arithmetic."""

    parameter: ir.Value
    gradient: ir.Value
    moments: tuple[ir.Value, ...]


@dataclass(frozen=True)
class _Step:
    """What the updates of all parameters share.

    Attributes:
        builder: Where nodes are written.
        scalars: The hyperparameters.
        clip: The factor of all gradients, float64 [].
        active: 0 if nothing changes in this step, else 1, float64 []; None for steps that always
            change the states.
    """

    builder: GlobalBuilder
    scalars: _Scalars
    clip: ir.Value
    active: ir.Value | None

    def op(self, op_type: str, *operands: ir.Value) -> ir.Value:
        """The result of an elementwise operator, shaped as its first operand."""
        return self.builder.op(op_type, *operands, shape=self.builder.shape_of(operands[0]))

    def scaled(self, x: ir.Value, *factors: ir.Value) -> ir.Value:
        """A tensor times the product of scalars."""
        factor = factors[0]
        for other in factors[1:]:
            factor = self.scalars.op("Mul", factor, other)
        return self.op("Mul", x, self.scalars.cast(factor, x.dtype))


# -- the updates ---------------------------------------------------------------------------------
# Each returns the new parameter and the new moments.


def _fused(
    function: Function, step: _Step, p: ParameterInfo, old: _Tensors
) -> tuple[ir.Value, ...]:
    """One node, whose scalars are the hyperparameters that the function names."""
    scalars = step.scalars
    tensors = [old.parameter, old.gradient, *old.moments]
    operands = list(tensors)
    for name in function.inputs[len(tensors) :]:
        if name == "scale":
            operands.append(step.clip)
        elif name == "active":
            operands.append(scalars.const(1) if step.active is None else step.active)
        elif name in _WITHOUT_DECAY and not p.decay:
            operands.append(scalars.const(_WITHOUT_DECAY[name]))
        else:
            operands.append(scalars[_HYPERPARAMETERS.get(name, name)])
    new = [(old.parameter.dtype, p.shape)] * (1 + len(old.moments))
    return step.builder.ops(function.name, operands, new, domain=DOMAIN)


def _lamb(step: _Step, p: ParameterInfo, old: _Tensors) -> tuple[ir.Value, ...]:
    """New parameter: p - lr (|p| / |r|) r, r = Adam's direction + wd p; a norm of 0 makes no ratio.

    It is computed from u = lr r, which contains the corrected learning rate: the change is
    (lr |p| / |u|) u, or u itself.
    """
    s, op, builder = step.scalars, step.op, step.builder
    m, v = _moments(step, old)
    u = _change(step, m, v)
    if p.decay:
        u = op("Add", u, step.scaled(old.parameter, s["lr"], s["weight_decay"]))
    size, length = (op("Sqrt", _square_sum(builder, x)) for x in (old.parameter, u))
    zero = builder.const(0, u.dtype)
    positive = [builder.op("Greater", n, zero, shape=(), dtype=_BOOL) for n in (size, length)]
    ratio = op("Div", op("Mul", size, s.cast(s["lr"], u.dtype)), length)
    both, one = op("And", *positive), builder.const(1, u.dtype)
    ratio = builder.op("Where", both, ratio, one, shape=(), dtype=u.dtype)
    values = (op("Sub", old.parameter, op("Mul", u, ratio)), m, v)
    if step.active is None:
        return values
    changes, was = s.cast(step.active, _BOOL), (old.parameter, *old.moments)
    return tuple(
        builder.op("Where", changes, new, kept, shape=p.shape, dtype=new.dtype)
        for new, kept in zip(values, was, strict=True)
    )


def _moments(step: _Step, old: _Tensors) -> tuple[ir.Value, ir.Value]:
    """New m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², g clipped.

    g² is computed from the square of (1 - beta1) g, which exists already, and a constant factor.
    """
    s, op = step.scalars, step.op
    m, v = old.moments
    share = s["beta1_complement"]
    part = step.scaled(old.gradient, share, step.clip)
    weight = s.op("Div", s["beta2_complement"], s.op("Mul", share, share))
    new_m = op("Add", step.scaled(m, s["beta1"]), part)
    new_v = op("Add", step.scaled(v, s["beta2"]), step.scaled(op("Mul", part, part), weight))
    return new_m, new_v


def _change(step: _Step, m: ir.Value, v: ir.Value) -> ir.Value:
    """lr_corrected m / (sqrt(v) / correction2_sqrt + eps), both sides times correction2_sqrt."""
    s, op = step.scalars, step.op
    epsilon = s.cast(s.op("Mul", s["eps"], s["correction2_sqrt"]), v.dtype)
    quotient = op("Div", m, op("Add", op("Sqrt", v), epsilon))
    return step.scaled(quotient, s["lr_corrected"], s["correction2_sqrt"])


@dataclass(frozen=True)
class _Update:
    """An optimizer.

    Attributes:
        scope: Its name.
        moments: The moments that it keeps.
        emit: Emits the update of one parameter.
        by_tensor: Whether the update of an element depends on the other elements of its tensor.
    """

    scope: str
    moments: tuple[StateKind, ...]
    emit: Callable[[_Step, ParameterInfo, _Tensors], tuple[ir.Value, ...]]
    by_tensor: bool = False


# Values of hyperparameters for parameters without weight decay.
_WITHOUT_DECAY = {"weight_decay": 0.0, "decay": 1.0}
_HYPERPARAMETERS = {"first": "momentum_first"}
_BOTH = (StateKind.MOMENT1, StateKind.MOMENT2)
_UPDATES = {
    OptimizerKind.SGD: _Update("sgd", (), partial(_fused, SGD_STEP)),
    OptimizerKind.MOMENTUM: _Update(
        "momentum", (StateKind.MOMENT1,), partial(_fused, MOMENTUM_STEP)
    ),
    OptimizerKind.ADAM: _Update("adam", _BOTH, partial(_fused, ADAM_STEP)),
    OptimizerKind.ADAMW: _Update("adamw", _BOTH, partial(_fused, ADAMW_STEP)),
    OptimizerKind.LAMB: _Update("lamb", _BOTH, _lamb, by_tensor=True),
}
