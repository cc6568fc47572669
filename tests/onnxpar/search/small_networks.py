"""Random small networks to be trained, each from one seed.

What differs is what a plan of training has to weigh: products in a row and products of values,
residuals and branches, what broadcasts, statistics of rows, and weights that several nodes read.
"""

import random
from collections.abc import Callable

import onnx_ir as ir

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.symbols import dim_symbol
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.parameters.recognise import read_parameters
from onnxpar.search.workload import Workload
from tests.random_builder import F32, Program, Value, build

WIDTHS = (4, 8, 12)


def product(p: Program) -> None:
    """Rows of features times a weight, often one that another product has: as it is, or turned."""
    x = last(p)
    width = x.shape[-1]
    shared = [(t.name, t.dims) for t in p.initializers if len(t.dims) == 2 and width in t.dims]
    if shared and p.draw.random() < 0.5:
        name, (rows, columns) = p.draw.choice(shared)
    else:
        rows, columns = width, p.draw.choice(WIDTHS)
        name = p.weight([rows, columns])
    if rows != width:
        name, columns = p.op("Transpose", name, perm=[1, 0])[0], rows
    p.add(p.op("MatMul", x.name, name)[0], (*x.shape[:-1], columns), F32)


def bias(p: Program) -> None:
    x = last(p)
    p.add(p.op(p.draw.choice(["Add", "Mul"]), x.name, p.weight([x.shape[-1]]))[0], x.shape, F32)


def activation(p: Program) -> None:
    x = last(p)
    p.add(p.op(p.draw.choice(["Relu", "Tanh", "Sigmoid"]), x.name)[0], x.shape, F32)


def residual(p: Program) -> None:
    """The sum or the product with an earlier value of the same shape, or with itself."""
    x = last(p)
    same = [v for v in p.values if v.shape == x.shape]
    y = p.draw.choice(same)
    p.add(p.op(p.draw.choice(["Add", "Add", "Mul"]), x.name, y.name)[0], x.shape, F32)


def statistic(p: Program) -> None:
    """A row less its mean, by two nodes or by one."""
    x = last(p)
    if p.draw.random() < 0.5:
        scale = p.weight([x.shape[-1]])
        p.add(p.op("LayerNormalization", x.name, scale, axis=-1)[0], x.shape, F32)
        return
    mean = p.op("ReduceMean", x.name, p.const([-1]), keepdims=1)[0]
    p.add(p.op("Sub", x.name, mean)[0], x.shape, F32)


def attention(p: Program) -> None:
    """Products of two values: of rows with rows, normalised, and back."""
    x = last(p)
    if x.rank != 3:
        return
    turned = p.op("Transpose", x.name, perm=[0, 2, 1])[0]
    scores = p.op("MatMul", x.name, turned)[0]
    if p.draw.random() < 0.5:
        scores = p.op("Softmax", scores, axis=-1)[0]
    p.add(p.op("MatMul", scores, x.name)[0], x.shape, F32)


def merged(p: Program) -> None:
    """Batch and positions as one dim."""
    x = last(p)
    if x.rank == 3:
        width = x.shape[-1]
        rows = x.shape[0] * x.shape[1]
        p.add(p.op("Reshape", x.name, p.const([-1, width]))[0], (rows, width), F32)


PIECES: tuple[tuple[Callable[[Program], None], int], ...] = (
    (product, 6),
    (bias, 3),
    (activation, 2),
    (residual, 3),
    (statistic, 2),
    (attention, 1),
    (merged, 1),
)


def last(p: Program) -> Value:
    """What the network has come to; sometimes what it had before, so that it branches."""
    return p.values[-1] if p.draw.random() < 0.8 else p.draw.choice(p.values[1:] or p.values)


def network(seed: int, pieces: int, parallel: OptimizerParallel) -> Workload:
    """A program that trains a network of so many pieces, one of them a product at least."""
    draw = random.Random(f"network {seed}")
    p = Program(draw, F32)
    batch, seq = dim_symbol("batch"), dim_symbol("seq")
    shape = (
        (batch, draw.choice(WIDTHS)) if draw.random() < 0.6 else (batch, seq, draw.choice(WIDTHS))
    )
    p.inputs.append(p.add("x", shape, F32))
    product(p)
    names, weights = zip(*PIECES, strict=True)
    while len(p.values) - len(p.inputs) < pieces:
        draw.choices(names, weights)[0](p)
    loss = draw.choice(["mse", "mse", "softmax_cross_entropy", "mae"])
    model = read_parameters(ir.from_proto(build(p, [p.values[-1]])))
    # What nothing reads is no longer there.
    used = model.model.graph.initializers
    names = [t.name for t in p.initializers if t.data_type == F32 and t.name in used]
    spec = TrainingSpec(
        parse_loss(loss),
        parse_optimizer("adam"),
        trainable=tuple(n for n in names if n[0] == "w"),
        freeze=tuple(n for n in names if n[0] != "w"),
    )
    return Workload.training(prepare_training(model, {}, spec), spec, parallel)
