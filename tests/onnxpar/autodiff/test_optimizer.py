"""Optimizer programs run on one device, against numpy in float64 and against torch.optim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from onnxpar.autodiff.optimizer import (
    GRAD_NORM,
    HYPER,
    OptimizerKind,
    StateKind,
    StateProgram,
    moments_of,
    optimizer_model,
    parse_optimizer,
    state_name,
)
from onnxpar.core.errors import ModelError
from onnxpar.parameters.trainable import ParameterInfo
from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.wanted_operators import want_operators
from tests.onnxpar.ops.op_harness import chosen

Array = NDArray[Any]
FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
KINDS = list(OptimizerKind)
STEPS = 5
SHAPES = {"w": (5, 7), "b": (7,), "scale": (3,), "deep": (2, 3, 4)}


@dataclass(frozen=True)
class Settings:
    """What the user would set; the runtime makes the scalars of a step from it."""

    lr: float = 0.02
    momentum: float = 0.9
    dampening: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-6
    weight_decay: float = 0.1
    clip_norm: float = 1.5

    def scalars(self, t: int) -> dict[str, float]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "momentum_first": float(t == 1),
            "beta1": self.beta1,
            "beta1_complement": 1 - self.beta1,
            "beta2": self.beta2,
            "beta2_complement": 1 - self.beta2,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decay": 1 - self.lr * self.weight_decay,
            "lr_corrected": self.lr / (1 - self.beta1**t),
            "correction2_sqrt": (1 - self.beta2**t) ** 0.5,
            "clip_norm": self.clip_norm,
        }


def parameters(dtype: ir.DataType = FLOAT) -> list[ParameterInfo]:
    """Decay for matrices only, as the default groups have it; two groups of the norm."""
    return [
        ParameterInfo(name, dtype, shape, len(shape) > 1, "odd" if len(shape) == 1 else "even")
        for name, shape in SHAPES.items()
    ]


def draw(kind: str, step: int, infos: Sequence[ParameterInfo]) -> dict[str, Array]:
    """Values of both signs; the norms of the gradients lie on both sides of the limit."""
    rng = np.random.default_rng([len(kind), step])
    size = (0.05, 1.0)[step % 2] if kind == "gradient" else 1.0
    return {p.name: (size * rng.standard_normal(p.shape)).astype(p.dtype.numpy()) for p in infos}


class Machine:
    """Runs a program step by step on buffers that it updates in place, as the runtime does."""

    def __init__(self, program: StateProgram, *, kernels: bool = False) -> None:
        proto = ir.serde.serialize_model(program.model)
        onnx.checker.check_model(proto, full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        if kernels:
            want_operators(options, proto)
            options.register_custom_ops_library(str(custom_op_library()))
        self.session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.program = program
        self.states = {s.name: np.zeros(s.shape, s.dtype.numpy()) for s in program.states}

    def put(self, kind: StateKind, values: Mapping[str, Array]) -> None:
        for parameter, value in values.items():
            self.states[state_name(kind, parameter)][...] = value

    def get(self, kind: StateKind, parameter: str) -> Array:
        return self.states[state_name(kind, parameter)]

    def step(self, scalars: Mapping[str, float]) -> float:
        """Runs once and returns the gradient norm, 0 where the program has none."""
        binding = self.session.io_binding()
        dtypes = {s.name: s.dtype for s in self.program.states}
        for name, array in self.states.items():
            binding.bind_input(name, "cpu", 0, dtypes[name].value, array.shape, array.ctypes.data)
        for output, name in self.program.updated.items():
            array = self.states[name]
            binding.bind_output(
                output, "cpu", 0, dtypes[name].value, array.shape, array.ctypes.data
            )
        for name in self.program.hyperparameters:
            binding.bind_cpu_input(HYPER + name, np.array(scalars[name], np.float64))
        outputs = [value.name for value in self.program.model.graph.outputs]
        if GRAD_NORM in outputs:
            binding.bind_output(GRAD_NORM)
        self.session.run_with_iobinding(binding)
        if GRAD_NORM not in outputs:
            return 0.0
        return float(binding.get_outputs()[outputs.index(GRAD_NORM)].numpy())


# -- the reference -------------------------------------------------------------------------------


@dataclass
class Reference:
    """The textbook formulas on one parameter's states, in float64."""

    kind: OptimizerKind
    settings: Settings
    begin: Array
    decay: bool
    m: Array | float = 0.0
    v: Array | float = 0.0

    def __post_init__(self) -> None:
        self.p = self.begin.astype(np.float64)

    def step(self, t: int, gradient: Array, factor: float) -> None:
        self._step(t, factor * gradient)
        if self.begin.dtype.itemsize == 2:
            self.p = self.p.astype(self.begin.dtype).astype(np.float64)

    def _step(self, t: int, g: Array) -> None:
        s = self.settings
        wd = s.weight_decay if self.decay else 0.0
        if self.kind in (OptimizerKind.SGD, OptimizerKind.MOMENTUM, OptimizerKind.ADAM):
            g = g + wd * self.p
        if self.kind is OptimizerKind.SGD:
            self.p = self.p - s.lr * g
            return
        if self.kind is OptimizerKind.MOMENTUM:
            self.m = g if t == 1 else s.momentum * self.m + (1 - s.dampening) * g
            self.p = self.p - s.lr * self.m
            return
        self.m = s.beta1 * self.m + (1 - s.beta1) * g
        self.v = s.beta2 * self.v + (1 - s.beta2) * g * g
        direction = (self.m / (1 - s.beta1**t)) / (np.sqrt(self.v / (1 - s.beta2**t)) + s.eps)
        ratio = 1.0
        if self.kind is OptimizerKind.ADAMW:
            self.p = self.p * (1 - s.lr * wd)
        if self.kind is OptimizerKind.LAMB:
            direction = direction + wd * self.p
            norms = np.linalg.norm(self.p), np.linalg.norm(direction)
            ratio = float(norms[0] / norms[1]) if all(norms) else 1.0
        self.p = self.p - s.lr * ratio * direction


def norm_of(gradients: Mapping[str, Array]) -> float:
    return float(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients.values())))


def coefficient(norm: float, limit: float) -> float:
    return min(1.0, limit / (norm + 1e-6))


EPSILON = {d: ml_dtypes.finfo(d.numpy()).eps for d in (DOUBLE, FLOAT)}
EPSILON[ir.DataType.FLOAT16] = EPSILON[ir.DataType.BFLOAT16] = EPSILON[FLOAT]

# Of sums of a few rounded terms of the size of the tensor, over 5 steps: below 100 roundings, each
# of half an epsilon. 16-bit parameters are rounded once a step, from values computed in float32; a
# rounding that falls the other way is one epsilon.
TOLERANCE = {
    DOUBLE: 50 * float(EPSILON[DOUBLE]),
    FLOAT: 50 * float(EPSILON[FLOAT]),
    **{
        d: STEPS * float(ml_dtypes.finfo(d.numpy()).eps)
        for d in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    },
}


def worst(got: Array, expected: Array) -> float:
    """The greatest difference relative to the tensor's greatest element."""
    difference = np.abs(got.astype(np.float64) - expected)
    return float(np.max(difference) / np.max(np.abs(expected)))


# Settings, and whether their limit clips the gradients of the even and the odd steps.
VARIANTS = {
    "default": (Settings(), (False, True)),
    "unlimited": (Settings(clip_norm=float("inf")), (False, False)),
    "dampened": (Settings(dampening=0.3, weight_decay=0.0), (False, True)),
    "hot": (Settings(lr=0.5, eps=0.1, beta1=0.5, momentum=0.0, clip_norm=0.1), (True, True)),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "variant", "kernels"),
    chosen([*product(KINDS, TOLERANCE, VARIANTS, [False, True])], 60),
)
def test_five_steps_are_the_textbook(
    kind: OptimizerKind, dtype: ir.DataType, variant: str, kernels: bool
) -> None:
    (settings, clipped), infos = VARIANTS[variant], parameters(dtype)
    machine = Machine(optimizer_model(kind, infos), kernels=kernels)
    begin = draw("parameter", 0, infos)
    machine.put(StateKind.PARAMETER, begin)
    model = {p.name: Reference(kind, settings, begin[p.name], p.decay) for p in infos}
    for t in range(1, STEPS + 1):
        gradients = draw("gradient", t, infos)
        machine.put(StateKind.GRADIENT, gradients)
        norm = machine.step(settings.scalars(t))
        # The root of a sum of 69 squares: fewer than 40 roundings of half an epsilon.
        assert norm == pytest.approx(norm_of(gradients), rel=20 * float(EPSILON[dtype]))
        factor = coefficient(norm_of(gradients), settings.clip_norm)
        assert (factor < 1) == clipped[t % 2]
        for name, gradient in gradients.items():
            model[name].step(t, gradient.astype(np.float64), factor)
    for p in infos:
        wanted = model[p.name]
        assert worst(machine.get(StateKind.PARAMETER, p.name), wanted.p) < TOLERANCE[dtype]
        for kept, moment in zip(moments_of(kind), (wanted.m, wanted.v), strict=False):
            assert worst(machine.get(kept, p.name), np.asarray(moment)) < TOLERANCE[dtype]


@pytest.mark.parametrize("clip", [1.5, float("inf")])
@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=lambda d: d.name.lower())
@pytest.mark.parametrize("kind", [k for k in KINDS if k is not OptimizerKind.LAMB])
def test_five_steps_are_pytorchs(kind: OptimizerKind, dtype: ir.DataType, clip: float) -> None:
    torch = pytest.importorskip("torch")
    settings, infos = Settings(dampening=0.3, clip_norm=clip), parameters(dtype)
    machine = Machine(optimizer_model(kind, infos))
    begin = draw("parameter", 0, infos)
    machine.put(StateKind.PARAMETER, begin)
    tensors = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in begin.items()}
    groups = [
        {"params": [tensors[p.name] for p in infos if p.decay == decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    adam = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    makers: dict[OptimizerKind, Any] = {
        OptimizerKind.SGD: (torch.optim.SGD, {}),
        OptimizerKind.MOMENTUM: (
            torch.optim.SGD,
            {"momentum": settings.momentum, "dampening": settings.dampening},
        ),
        OptimizerKind.ADAM: (torch.optim.Adam, adam),
        OptimizerKind.ADAMW: (torch.optim.AdamW, adam),
    }
    make, options = makers[kind]
    optimizer = make(groups, lr=settings.lr, foreach=False, **options)
    for t in range(1, STEPS + 1):
        gradients = draw("gradient", t, infos)
        for name, gradient in gradients.items():
            tensors[name].grad = torch.from_numpy(gradient.copy())
        wanted = torch.nn.utils.clip_grad_norm_(list(tensors.values()), settings.clip_norm)
        optimizer.step()
        machine.put(StateKind.GRADIENT, gradients)
        norm = machine.step(settings.scalars(t))
        # A square, a sum and a root for each element, and parameters of the steps before: 40 units.
        assert norm == pytest.approx(float(wanted), rel=40 * float(EPSILON[dtype]))
    for name, tensor in tensors.items():
        got = machine.get(StateKind.PARAMETER, name)
        # Both sides round.
        assert worst(got, tensor.detach().double().numpy()) < 2 * TOLERANCE[dtype]


def test_no_step_at_rate_zero_and_where_norms_vanish() -> None:
    # Warm-up begins at rate 0, where LAMB divides the step by its own norm.
    infos = [ParameterInfo("still", FLOAT, (4,)), ParameterInfo("zero", FLOAT, (4,))]
    machine = Machine(optimizer_model(OptimizerKind.LAMB, infos))
    still = np.array([1, -2, 3, -4], np.float32)
    machine.put(StateKind.PARAMETER, {"still": still})
    machine.put(StateKind.GRADIENT, {"still": still[::-1], "zero": np.ones(4, np.float32)})
    settings = Settings(clip_norm=float("inf"))
    machine.step(replace(settings, lr=0.0).scalars(1))
    assert machine.get(StateKind.PARAMETER, "still").tolist() == still.tolist()
    assert machine.get(StateKind.PARAMETER, "zero").tolist() == [0, 0, 0, 0]
    # A parameter that is zero is moved as by Adam, the ratio being 1.
    machine.step(replace(settings, lr=0.125).scalars(2))
    moved = machine.get(StateKind.PARAMETER, "zero")
    # Epsilon 1e-6 is added to a root of 1, and the moments have some ten roundings of 2^-24.
    assert moved == pytest.approx(np.full(4, -0.125), rel=1e-5)


def test_a_norm_that_overflows_spoils_its_own_parameter_alone() -> None:
    infos = [ParameterInfo("huge", FLOAT, (2,)), ParameterInfo("fine", FLOAT, (2,))]
    machine = Machine(optimizer_model(OptimizerKind.SGD, infos))
    machine.put(StateKind.GRADIENT, {"huge": np.full(2, 3e38, np.float32), "fine": np.ones(2)})
    settings = Settings(lr=0.5, clip_norm=float("inf"))
    assert machine.step(settings.scalars(1)) == float("inf")
    assert machine.get(StateKind.PARAMETER, "fine").tolist() == [-0.5, -0.5]


def test_the_norm_of_many_elements_is_exact_enough_to_be_compared() -> None:
    # The rounding of 2048 sums of 2048 terms is as good as random.
    infos = [ParameterInfo("big", FLOAT, (2048, 2048))]
    machine = Machine(optimizer_model(OptimizerKind.SGD, infos))
    gradient = np.random.default_rng(0).standard_normal((2048, 2048)).astype(np.float32)
    machine.put(StateKind.GRADIENT, {"big": gradient})
    assert machine.step(Settings().scalars(1)) == pytest.approx(
        norm_of({"big": gradient}), rel=1e-6
    )


def test_hyperparameters_are_those_that_are_read() -> None:
    plain = [replace(p, decay=False) for p in parameters()]
    assert set(optimizer_model(OptimizerKind.SGD, plain).hyperparameters) == {"lr", "clip_norm"}
    assert "decay" not in optimizer_model(OptimizerKind.ADAMW, plain).hyperparameters
    assert "decay" in optimizer_model(OptimizerKind.ADAMW, parameters()).hyperparameters
    program = optimizer_model(OptimizerKind.MOMENTUM, parameters())
    names = {value.name for value in program.model.graph.inputs}
    read = {HYPER + name for name in program.hyperparameters}
    assert names == read | {state.name for state in program.states}


def test_gradients_are_read_through_the_value_that_is_reduced() -> None:
    program = optimizer_model(OptimizerKind.ADAM, parameters())
    for gradient, reduced in program.reduced.items():
        (value,) = [v for v in program.model.graph.inputs if v.name == gradient]
        (node,) = value.consumers()
        assert [out.name for out in node.outputs] == [reduced]


@pytest.mark.parametrize("opset", [21, 24])
def test_every_opset_has_what_the_programs_use(opset: int) -> None:
    infos = parameters()
    for program in (optimizer_model(kind, infos, opset=opset) for kind in KINDS):
        assert program.model.opset_imports[""] == opset
        Machine(program)


def test_what_cannot_be_trained_is_refused() -> None:
    one = ParameterInfo("w", FLOAT, (2,))
    with pytest.raises(ModelError, match="'adamax'"):
        parse_optimizer("adamax")
    with pytest.raises(ModelError, match="at least one parameter"):
        optimizer_model(OptimizerKind.SGD, [])
    with pytest.raises(ModelError, match="'w' is given twice"):
        optimizer_model(OptimizerKind.SGD, [one, one])
    with pytest.raises(ModelError, match="'n': expected a floating type, got int64"):
        optimizer_model(OptimizerKind.SGD, [one, ParameterInfo("n", ir.DataType.INT64, (2,))])
