"""The kernels for GPUs against those for the CPU.

Every case runs in a process of its own: on the stand-ins, where the kernels' sources are compiled
for the host and their threads are emulated, and, where there is a GPU, on that.
"""

from typing import Any

import numpy as np
import pytest

from tests.gpu.device_nodes import (
    KINDS,
    REAL,
    SHAPES,
    TYPES,
    UNIT,
    Array,
    Both,
    Process,
    close,
    every_type,
    normal,
)
from tests.runtime.kernels.one_node import GATHERS
from tests.tiers import FULL, covering

# Name, attributes, and the ends of where it is defined.
STANDARD: list[tuple[str, dict[str, float], float, float]] = [
    ("Acos", {}, -1, 1),
    ("Acosh", {}, 1, 9),
    ("Asin", {}, -1, 1),
    ("Asinh", {}, -9, 9),
    ("Atan", {}, -9, 9),
    ("Atanh", {}, -0.9, 0.9),
    ("Celu", {"alpha": 0.7}, -9, 9),
    ("Cosh", {}, -3, 3),
    ("Elu", {}, -9, 9),
    ("Elu", {"alpha": 1.5}, -9, 9),
    ("Selu", {}, -9, 9),
    ("Selu", {"alpha": 0.5, "gamma": 2.0}, -9, 9),
    ("Sinh", {}, -3, 3),
    ("Tan", {}, -1.4, 1.4),
    ("ThresholdedRelu", {"alpha": 0.25}, -2, 2),
]


def test_standard_operators_of_one_operand(both: Both) -> None:
    for op, attributes, low, high in STANDARD:
        for shape in SHAPES:
            x = np.random.default_rng(9).uniform(low, high, shape).astype(np.float32)
            (want,), (got,) = both(op, x, **attributes)
            # Both are within a few units in the last place of a result of at most 30 (10 on most
            # of the way); where onnxruntime subtracts 1 from a power it errs by a unit of 1.
            np.testing.assert_allclose(got, want, rtol=16 * UNIT["float32"], atol=8 * 2.0**-24)


@pytest.mark.parametrize(
    ("number", "kind"), covering(range(len(STANDARD)), ["bfloat16", "float16", "float64"])
)
def test_standard_operators_in_other_types(worker: Process, number: int, kind: str) -> None:
    op, attributes, low, high = STANDARD[number]
    # The CPU has no kernels for most: what is wanted is what float32 gives, rounded.
    x = np.random.default_rng(9).uniform(low, high, (3, 1025)).astype(TYPES[kind])
    asked, _ = worker.ask(op, [x.astype(np.float32)], attributes, [True])
    _, found = worker.ask(op, [x], attributes, [True])
    assert not isinstance(found, str), found
    assert found[0][0].dtype == (np.float32 if kind == "bfloat16" else TYPES[kind])
    # As above, the rounding of x to float32 among it: slopes are at most 35 (that of the tangent).
    error = 64 * 2.0**-24 * (1 + np.abs(asked[0][0].astype(np.float64)))
    close(found[0][0], asked[0][0], "float32" if kind == "float64" else kind, error)


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel_shape": [3]}),
    ((2, 3, 8, 7), {"kernel_shape": [2, 3], "strides": [2, 1]}),
    ((1, 5, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 2, 9, 9), {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [2, 1, 0, 1]}),
    ((1, 2, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ((1, 2, 5, 5), {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [1] * 4, "ceil_mode": 1}),
    ((1, 2, 7, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 7, 8), {"kernel_shape": [4, 4], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 7, 8), {"kernel_shape": [3, 3], "strides": [2, 3], "auto_pad": "VALID"}),
    ((2, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 3]}),
    ((0, 2, 5, 6), {"kernel_shape": [2, 2]}),
]


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "attributes"), POOLS, ids=str)
def test_max_pool(
    both: Both, shape: tuple[int, ...], attributes: dict[str, Any], kind: str
) -> None:
    # Few different numbers, so that many windows have their greatest more than once.
    x = np.random.default_rng(10).integers(-3, 4, shape).astype(TYPES[kind])
    for outputs in ([True, False], [True, True]):
        want, got = both("MaxPool", x, outputs=outputs, **attributes)
        for w, g in zip(want, got, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_max_pool_in_16_bits(worker: Process, kind: str) -> None:
    x = normal(11, (2, 3, 9, 8), kind)
    given = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    asked, _ = worker.ask("MaxPool", [x.astype(np.float32)], given, [True, True])
    _, found = worker.ask("MaxPool", [x], given, [True, True])
    assert not isinstance(found, str), found
    for want, got in zip(asked[0], found[0], strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_max_pool_that_cannot_be(worker: Process) -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    for attributes, message in (
        ({"kernel_shape": [2, 2], "strides": [1]}, "strides has 1 numbers, expected 2"),
        ({"kernel_shape": [2, 0]}, "kernel_shape has 0, expected at least 1"),
        ({"kernel_shape": [2, 5]}, "a window of 5 is longer than the dim of size 4"),
        ({"kernel_shape": [2]}, "expected 1 spatial dims"),
    ):
        _, error = worker.ask("MaxPool", [x], attributes, [True, False], runs=1)
        assert isinstance(error, str) and message in error, error


@every_type
def test_square_sum(both: Both, kind: str) -> None:
    # More tensors than one launch takes, one of several pieces, none of the same alignment.
    shapes = [(i % 7,) for i in range(66)] + [(3, 16384 + 5), (), (0,), (33,)]
    (want,), (got,) = both("SquareSum", *(normal(i, s, kind) for i, s in enumerate(shapes)))
    # Float64 sums: of 50,000 terms in another order each, and one rounding to float32.
    bound = 2 * 2.0**-24 if got.dtype == np.float32 else 2 * 16384 * 2.0**-53
    assert got == pytest.approx(want, rel=bound, abs=0)


@every_type
def test_batch_norm(both: Both, kind: str) -> None:
    for shape in ((6, 3), (2, 3, 4), (4, 5, 30, 11), (2, 130, 2)):
        x, dy = normal(5, shape, kind), normal(6, shape, kind)
        vectors = [normal(i, shape[1:2], kind) for i in range(7, 12)]
        count = x.size // shape[1]
        # Sums in another order, as for layer_norm.
        units = 2 * REAL[kind] * 4 * (np.sqrt(count) + 8)
        op, given = "BatchNormalizationInputGrad", (*vectors, np.array([count], TYPES[kind]))
        for of in (
            both("ChannelSums", dy, x, vectors[1], outputs=[True] * 2),
            both("ChannelSquareSum", x, vectors[1]),
            both(op, dy, x, *given),
        ):
            for want, got in zip(*of, strict=True):
                size = max(1.0, np.abs(want.astype(np.float64)).max())
                close(got, want, kind, units * size)


@every_type
def test_turned_weights(both: Both, kind: str) -> None:
    for shape, group in (((6, 3, 3, 3), 1), ((8, 5, 2), 2), ((4, 7), 1)):
        wants, gots = both("TurnedWeights", normal(5, shape, kind), group=group)
        np.testing.assert_array_equal(gots[0], wants[0])


LOSS = [(6, 5), (4, 2056), (3, 1501), (3, 4, 7), (2, 3, 2, 5), (40, 8)]


def labels_of(shape: tuple[int, ...], ignore: int | None) -> Array:
    rng = np.random.default_rng(8)
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignore is not None:
        labels[rng.random(labels.shape) < 0.3] = ignore
        labels.flat[0] = 1  # one counts
    return labels


@pytest.mark.parametrize(
    ("kind", "reduction", "how"),
    covering(KINDS, ["mean", "sum", "none"], [(False, None), (True, -100), (False, 2)]),
)
def test_loss(both: Both, reduction: str, how: tuple[bool, int | None], kind: str) -> None:
    weighted, ignore = how
    attributes = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    for shape in LOSS if FULL or not weighted else LOSS[:4]:
        scores = normal(9, shape, kind, 2)
        labels = labels_of(shape, ignore)
        weights = [np.abs(normal(10, shape[1:2], kind))] if weighted else []
        (loss, log_prob), (got, got_log_prob) = both(
            "SoftmaxCrossEntropyLoss", scores, labels, *weights, outputs=[True, True], **attributes
        )
        # Logarithms below 32 of sums of probabilities in blocks; see the CPU kernel's test.
        error = 2 * REAL[kind] * (32 + shape[1] ** 0.5)
        close(got_log_prob, log_prob, kind, error)
        count = labels.size if reduction == "sum" else 1
        most = max([1.0, *(float(w.max()) for w in weights)])
        close(got, loss, kind, error * count * most)
        places = labels.shape if reduction == "none" else ()
        dloss = normal(11, places, kind)
        (dx,), (got,) = both(
            "SoftmaxCrossEntropyLossGrad", dloss, log_prob.astype(TYPES[kind]), labels, *weights,
            **attributes,
        )  # fmt: skip
        factor = most * np.abs(dloss.astype(np.float64)).max(initial=1)
        close(got, dx, kind, 2 * REAL[kind] * 40 * factor)


def test_loss_of_impossible_classes(both: Both) -> None:
    y = np.array([[0.0, -np.inf, -200.0]], np.float32)
    (_,), (dx,) = both("SoftmaxCrossEntropyLossGrad", np.ones((), np.float32), y, np.array([0]))
    np.testing.assert_array_equal(dx, [[0, 0, 0]])
    scores = np.array([[1e4, -np.inf, -1e4], [-1e30, -1e30, -1e30]], np.float32)
    (want,), (got,) = both("SoftmaxCrossEntropyLoss", scores, np.array([2, 2]), reduction="none")
    # A logarithm and two sums on each side, with a rounding of 2^-24 each: at most 4 of them.
    np.testing.assert_allclose(got, want, rtol=2.0**-22, atol=0)


def test_loss_where_nothing_counts(both: Both) -> None:
    y = np.full((2, 3), np.log(1 / 3), np.float32)
    labels = np.full(2, -1)
    one = np.ones((), np.float32)
    (_,), (dx,) = both("SoftmaxCrossEntropyLossGrad", one, y, labels, ignore_index=-1)
    np.testing.assert_array_equal(dx, np.zeros((2, 3)))
    (_,), (loss,) = both("SoftmaxCrossEntropyLoss", y, labels, ignore_index=-1)
    assert np.isnan(loss)


@every_type
def test_gather(both: Both, kind: str) -> None:
    for shape, places, axis in GATHERS:
        rng = np.random.default_rng(12)
        rows = shape[axis]
        few = rng.integers(-rows, max(rows, 1), 5)
        drawn = rng.choice(few, places) if rows else np.zeros(places)
        indices = np.asarray(drawn, np.int64)
        at = axis % len(shape)
        # Multiples of 1/8 below 4 add up exactly; so do sums of signs in 16 bits.
        size = (*shape[:at], *places, *shape[at + 1 :])
        dy = (rng.integers(-31, 32, size) / 8).astype(TYPES[kind])
        (want,), (got,) = both(
            "GatherGrad", dy, indices, np.full(shape, np.nan, TYPES[kind]), axis=axis
        )
        np.testing.assert_array_equal(got, want)


def test_gather_adds_in_the_order_of_places(both: Both) -> None:
    # Within a run of 32 sorted places the sum is the CPU's, in every bit.
    indices = np.random.default_rng(13).permutation(np.repeat(np.arange(7), 4))
    dy = normal(14, (28, 5), "float32")
    (want,), (got,) = both("GatherGrad", dy, indices, np.zeros((9, 5), np.float32))
    np.testing.assert_array_equal(got, want)


LR, BETA1, BETA2, EPS, DECAY, SCALE = 0.02, 0.9, 0.99, 1e-6, 0.1, 0.7
ADAM = [LR / (1 - BETA1**3), BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, float(np.sqrt(1 - BETA2**3))]
# Operator, number of states, scalars after `scale`, what stands for decay.
STEPS: list[tuple[str, int, list[float], float]] = [
    ("SgdStep", 1, [LR], DECAY),
    ("MomentumStep", 2, [LR, 0.8, 0.3, 0.0], DECAY),
    ("MomentumStep", 2, [LR, 0.8, 0.3, 1.0], DECAY),
    ("AdamStep", 3, ADAM, DECAY),
    ("AdamWStep", 3, ADAM, 1 - LR * DECAY),
]


@pytest.mark.parametrize(("number", "kind"), covering(range(len(STEPS)), KINDS))
def test_step(both: Both, number: int, kind: str) -> None:
    op, states, numbers, decay = STEPS[number]
    for shape in SHAPES:
        for given in ([], [decay], [decay, 1.0], [decay, 0.0]):
            state = [normal(15 + i, shape, kind) for i in range(states)]
            if states == 3:
                state[2] = np.abs(state[2])
            gradient = normal(20, shape, kind)
            if 0.0 in given:
                gradient[...] = np.nan
            scalars = [np.asarray(x, np.float64) for x in (SCALE, *numbers, *given)]
            wants, gots = both(
                op, state[0], gradient, *state[1:], *scalars, outputs=[True] * states
            )
            # At most 8 roundings of numbers below 8; the quotient of Adam's step by a root of
            # eps alone is below (1 - beta1) / eps, times lr.
            for want, got in zip(wants, gots, strict=True):
                size = np.maximum(8, 4 * np.abs(want.astype(np.float64)))
                close(got, want, kind, 0 if 0.0 in given else 8 * REAL[kind] * size)


@every_type
@pytest.mark.parametrize("mode", range(4))
def test_accumulate(worker: Process, mode: int, kind: str) -> None:
    gradients = [normal(30 + i, shape, kind) for i, shape in enumerate(SHAPES)]
    sums = [normal(40 + i, shape, kind) for i, shape in enumerate(SHAPES)]
    operands = [*gradients, *sums]
    given = [np.zeros(1, np.uint8), np.array([mode]), *operands]
    (cpu,), cuda = worker.ask("Accumulate", given, {}, [True], changed=range(2, len(given)))
    # The first output is a token, of which nobody reads a value. A sum is rounded once.
    _, *wants = cpu
    for _, *gots in cuda:
        for want, got in zip(wants, gots, strict=True):
            np.testing.assert_array_equal(got, want)
    unchanged = [
        np.array_equal(want.astype(np.float64), operand.astype(np.float64))
        for want, operand in zip(wants, operands, strict=True)
        if operand.size
    ]
    half = len(unchanged) // 2
    # Only sums change before the last micro-batch, only gradients in it.
    assert unchanged == [mode != 1] * half + [mode not in (2, 3)] * half


KEY = [2**40 + 7, 5, 3, 2**32 - 1]
# Shape of the block, of the tensor, and where the block begins.
BLOCKS = [
    ([], [], []),
    ([0, 4], [3, 4], [0, 0]),
    ([1], [9], [6]),
    ([1000], [1000], [0]),
    ([1001], [3000], [1999]),
    ([3, 4, 5], [3, 4, 5], [0, 0, 0]),
    ([3, 1, 5], [9, 4, 5], [6, 3, 0]),
    ([2, 2, 3, 5], [4, 6, 3, 11], [2, 4, 0, 6]),
    ([4, 3, 4], [4, 5, 4], [0, 3, 0]),  # reaches beyond
]


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_random_numbers_are_equal_to_the_bit(both: Both, distribution: str) -> None:
    for block in BLOCKS:
        numbers = [np.asarray(x, np.int64) for x in (KEY, *block)]
        (want,), (got,) = both("Philox", *numbers, distribution=distribution)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (
            "SoftmaxCrossEntropyLoss",
            (np.zeros((2, 3), np.float32), np.array([1, 7])),
            "label 1 is 7",
        ),
        (
            "SoftmaxCrossEntropyLossGrad",
            (np.ones((), np.float32), np.zeros((2, 3), np.float32), np.array([-1, 0])),
            "label 0 is -1",
        ),
        (
            "GatherGrad",
            (np.ones((2, 3), np.float32), np.array([1, -6]), np.zeros((5, 3), np.float32)),
            "index 1 is -6",
        ),
    ],
)  # fmt: skip
def test_values_out_of_range(
    worker: Process, op: str, inputs: tuple[Array, ...], message: str
) -> None:
    cpu, _ = worker.ask(op, inputs, {}, [True], runs=0)
    assert message in cpu
    # Nobody waits for the device: the first run goes through, the next one tells.
    _, ((first,),) = worker.ask(op, inputs, {}, [True], runs=1)
    assert not np.isfinite(first).all() if op == "SoftmaxCrossEntropyLoss" else True
    _, cuda = worker.ask(op, inputs, {}, [True], runs=2)
    assert f"{op} 'node': {message}" in cuda
    assert "found by the run before" in cuda
    # Whoever has waited for the device anyway gets the error of the run itself.
    _, waited = worker.ask(op, inputs, {}, [True], runs=0, last=inputs)
    assert waited.startswith(f"r0 | {op} 'node': {message}") and "found" not in waited


def test_a_label_out_of_range_after_runs_that_nobody_waited_for(worker: Process) -> None:
    scores, sound, wrong = np.zeros((2, 3), np.float32), np.array([1, 2]), np.array([1, 7])
    ask = ("SoftmaxCrossEntropyLoss", (scores, sound), {}, [True])
    _, cuda = worker.ask(*ask, runs=3, last=(scores, wrong))
    assert "label 1 is 7, expected one of 3 classes; found by one of the last 4 runs" in cuda
    _, cuda = worker.ask(*ask, runs=3, last=(scores, sound))
    assert len(cuda) == 4


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        ("ReluGrad", [(2, 3), (1, 3)], "y has shape [1, 3], expected [2, 3] as dy"),
        ("SgdStep", [(2, 3), (3,), (), ()], "g has shape [3], expected [2, 3] as p"),
    ],
)
def test_shapes_are_checked_as_on_the_cpu(
    worker: Process, op: str, inputs: list[tuple[int, ...]], message: str
) -> None:
    arrays = [np.zeros(s, np.float32 if s else np.float64) for s in inputs]
    cpu, cuda = worker.ask(op, arrays, {}, [True])
    assert message in cpu and message in cuda
