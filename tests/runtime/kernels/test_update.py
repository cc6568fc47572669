"""Optimizer steps over several steps, against torch.optim's formulas in float64 numpy."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.runtime.kernels.one_node import Run, model_of, session

SHAPES = [(), (0,), (1,), (37,), (3, 16384 // 2 + 1)]
TYPES = [np.float32, np.float64]
LR, BETA1, BETA2, EPS, DECAY, SCALE = 0.02, 0.9, 0.99, 1e-6, 0.1, 0.7
MOMENTUM, DAMPENING = 0.8, 0.3

State = list[np.ndarray]
Formula = Callable[[State, np.ndarray, int, float], State]


def sgd(state: State, g: np.ndarray, _step: int, decay: float) -> State:
    (p,) = state
    return [p - LR * (SCALE * g + decay * p)]


def momentum(state: State, g: np.ndarray, step: int, decay: float) -> State:
    p, m = state
    g = SCALE * g + decay * p
    m = g if step == 1 else MOMENTUM * m + (1 - DAMPENING) * g
    return [p - LR * m, m]


def adam(state: State, g: np.ndarray, step: int, decay: float) -> State:
    p, m, v = state
    g = SCALE * g + decay * p
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    root = np.sqrt(v) / np.sqrt(1 - BETA2**step) + EPS
    return [p - LR / (1 - BETA1**step) * m / root, m, v]


def adamw(state: State, g: np.ndarray, step: int, decay: float) -> State:
    p, m, v = state
    return adam([p * (1 - LR * decay), m, v], g, step, 0)


def adam_scalars(step: int) -> list[float]:
    return [
        LR / (1 - BETA1**step),
        BETA1,
        1 - BETA1,
        BETA2,
        1 - BETA2,
        EPS,
        float(np.sqrt(1 - BETA2**step)),
    ]


# Operator, formula, number of states, scalars of a step after `scale`, what stands for decay.
STEPS: dict[str, tuple[Formula, int, Callable[[int], list[float]], float]] = {
    "SgdStep": (sgd, 1, lambda _: [LR], DECAY),
    "MomentumStep": (momentum, 2, lambda t: [LR, MOMENTUM, DAMPENING, float(t == 1)], DECAY),
    "AdamStep": (adam, 3, adam_scalars, DECAY),
    "AdamWStep": (adamw, 3, adam_scalars, 1 - LR * DECAY),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("decays", [False, True])
def test_steps(
    run: Run, op: str, shape: tuple[int, ...], dtype: type[np.floating], decays: bool
) -> None:
    formula, states, scalars, last = STEPS[op]
    rng = np.random.default_rng(11)
    state = [rng.standard_normal(shape).astype(dtype)]
    state += [np.zeros(shape, dtype) for _ in range(states - 1)]
    want = [x.astype(np.float64) for x in state]
    for step in (1, 2, 3):
        g = rng.standard_normal(shape).astype(dtype)
        numbers = [SCALE, *scalars(step), *([last] if decays else [])]
        inputs = [state[0], g, *state[1:], *(np.asarray(x) for x in numbers)]
        state = run(op, *inputs, outputs=[True] * states)
        want = formula(want, g.astype(np.float64), step, DECAY if decays else 0)
    # Numbers below 8 after at most ten roundings a step, in three steps. Adam divides first by
    # second moments, so that an element's step is at most 3 learning rates whatever its gradient,
    # with the relative error of a quotient of rounded numbers.
    unit = 2.0**-24 if dtype == np.float32 else 2.0**-53
    for got, wanted in zip(state, want, strict=True):
        assert got.dtype == dtype
        assert got.shape == shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=unit * 8 * 30)


def test_in_place(run: Run) -> None:
    """The outputs bound to the inputs' memory, as in training."""
    rng = np.random.default_rng(12)
    p, g, m = (rng.standard_normal(20001).astype(np.float32) for _ in range(3))
    v = m * m
    numbers = [np.asarray(x) for x in [1.0, *adam_scalars(3), 0.99]]
    inputs = [p, g, m, v, *numbers]
    want = run("AdamWStep", *inputs, outputs=[True] * 3)
    model = model_of("AdamWStep", inputs, [True] * 3, {})
    # Without the Identity nodes the operator itself writes the graph's outputs.
    del model.graph.node[1:]
    model.graph.node[0].output[:] = ["o0", "o1", "o2"]
    made = session(model, 2)
    binding = made.io_binding()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(np.array(x)) for x in inputs]
    for i, value in enumerate(values):
        binding.bind_ortvalue_input(f"i{i}", value)
    for output, i in enumerate((0, 2, 3)):
        binding.bind_ortvalue_output(f"o{output}", values[i])
    made.run_with_iobinding(binding)
    for i, wanted in zip((0, 2, 3), want, strict=True):
        np.testing.assert_array_equal(values[i].numpy(), wanted)
    np.testing.assert_array_equal(values[1].numpy(), g)


@pytest.mark.parametrize("op", STEPS)
def test_a_step_that_is_not_active_changes_nothing(run: Run, op: str) -> None:
    _, states, scalars, last = STEPS[op]
    state = [np.random.default_rng(i).standard_normal((3, 20001)) for i in range(states)]
    g = np.where(state[0] > 0, np.inf, np.nan)
    numbers = [np.asarray(x) for x in [SCALE, *scalars(1), last, 0.0]]
    got = run(op, state[0], g, *state[1:], *numbers, outputs=[True] * states)
    np.testing.assert_array_equal(got, state)


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_narrow_types(run: Run, kind: int) -> None:
    p, g = np.array([1, -2, 0.5], np.float32), np.array([4, 1, -8], np.float32)
    (got,) = run("SgdStep", p, g, np.asarray(1.0), np.asarray(0.25), narrow=kind)
    np.testing.assert_array_equal(got, [0, -2.25, 2.5])
