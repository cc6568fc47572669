"""Random small programs, each from one seed.

A program is a row of pieces; each adds a few nodes that read values already there, or adds nothing
where no value fits.
"""

import random
from collections.abc import Callable, Mapping
from functools import reduce
from operator import mul
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxpar.core.errors import ShardingError
from onnxpar.core.symbols import Dim, Symbol, dim_symbol
from tests.random_builder import (
    BOOL,
    F32,
    F64,
    I64,
    LARGEST,
    SYMBOLS,
    Array,
    Program,
    Value,
    broadcast,
    build,
    elements,
    plain,
)

T = TypeVar("T")

VOCABULARY = 6
SIZES = (1, 2, 3, 4, 6, 8)
# What exporters write for "to the end".
ENDS = ((1 << 63) - 1, (1 << 31) - 1, 1 << 40)


def unary(p: Program) -> None:
    x = p.pick(F32, F64)
    if x is None:
        return
    kinds = ["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "Softplus", "Sign"]
    op_type = p.draw.choice([*kinds, "Sin", "Exp"] if x.tame else kinds)
    if op_type in ("Softplus", "Sign") and x.dtype == F64:
        op_type = "Tanh"
    tame = op_type in ("Tanh", "Sigmoid", "Sin", "Sign") or (x.tame and op_type != "Exp")
    p.add(p.op(op_type, x.name)[0], x.shape, x.dtype, tame=tame)


def binary(p: Program) -> None:
    x = p.pick(F32, F64)
    if x is None:
        return
    op_type = p.draw.choice(["Add", "Sub", "Mul", "Add", "Mul", "Max", "Min", "Div"])
    if op_type == "Div":
        shape = [d if isinstance(d, int) and p.draw.random() < 0.7 else 1 for d in x.shape]
        shape = shape[p.draw.randrange(len(shape) + 1) :]
        data = 1 + np.random.default_rng(p.draw.randrange(1 << 30)).random(shape)
        p.add(p.op("Div", x.name, p.const(data, x.dtype))[0], x.shape, x.dtype, tame=x.tame)
        return
    others = [
        (v, s)
        for v in p.values
        if v.dtype == x.dtype
        for s in [broadcast(x.shape, v.shape)]
        if s is not None and len(s) <= 5 and elements(s) <= LARGEST
    ]
    if others and p.draw.random() < 0.6:
        y, out = p.draw.choice(others)
        tame = x.tame and y.tame and op_type != "Mul"
        pair = [x.name, y.name]
    else:
        shape = [d if isinstance(d, int) and p.draw.random() < 0.7 else 1 for d in x.shape]
        pair = [x.name, p.weight(shape[p.draw.randrange(len(shape) + 1) :], x.dtype)]
        out, tame = x.shape, x.tame and op_type != "Mul"
    p.draw.shuffle(pair)
    p.add(p.op(op_type, *pair)[0], out, x.dtype, tame=tame)


def integers(p: Program) -> None:
    x = p.pick(I64)
    if x is None:
        return
    way = p.draw.randrange(3)
    if way == 0:
        name = p.op(p.draw.choice(["Add", "Mul", "Sub"]), x.name, p.const(p.draw.randint(1, 3)))[0]
        p.add(name, x.shape, I64)
    elif way == 1:
        p.add(p.op("Cast", x.name, to=p.float_type)[0], x.shape, p.float_type, tame=False)
    else:
        p.add(p.op("Greater", x.name, p.const(p.draw.randint(-2, 2)))[0], x.shape, BOOL)


def conditions(p: Program) -> None:
    c = p.pick(BOOL)
    if c is None or p.draw.random() < 0.4:
        x = p.pick(F32, F64)
        if x is not None:
            # A bound that no exact value meets, so that rounding does not decide.
            bound = p.const(p.draw.uniform(-0.6, 0.6), x.dtype)
            p.add(p.op("Less", x.name, bound)[0], x.shape, BOOL)
        return
    if p.draw.random() < 0.3:
        p.add(p.op("Cast", c.name, to=p.float_type)[0], c.shape, p.float_type)
        return
    x = p.pick(F32, F64)
    if x is None:
        return
    same = [v for v in p.values if v.dtype == x.dtype]
    y = p.draw.choice(same)
    out = broadcast(c.shape, x.shape)
    out = None if out is None else broadcast(out, y.shape)
    if out is None or p.draw.random() < 0.4:
        out = broadcast(c.shape, x.shape)
        other = p.const(p.draw.choice([0, -3, 1.5]), x.dtype)
    else:
        other = y.name
    if out is None or len(out) > 5 or elements(out) > LARGEST:
        return
    pair = [x.name, other]
    p.draw.shuffle(pair)
    p.add(p.op("Where", c.name, *pair)[0], out, x.dtype, tame=x.tame and y.tame)


def float_casts(p: Program) -> None:
    x = p.pick(F32, F64)
    if x is not None:
        to = F64 if x.dtype == F32 else F32
        p.add(p.op("Cast", x.name, to=to)[0], x.shape, to, tame=x.tame)


def matmul(p: Program) -> None:
    x = p.pick(F32, F64, least=1)
    if x is None:
        return
    inner = x.shape[-1]
    others = []
    for y in p.values:
        if y.dtype == x.dtype and y.rank >= 2 and x.rank >= 2 and y.shape[-2] == inner:
            outer = broadcast(x.shape[:-2], y.shape[:-2])
            if outer is not None:
                others.append((y, (*outer, x.shape[-2], y.shape[-1])))
    others = [(y, s) for y, s in others if len(s) <= 5 and elements(s) <= LARGEST]
    if others and p.draw.random() < 0.4:
        y, shape = p.draw.choice(others)
        p.add(p.op("MatMul", x.name, y.name)[0], shape, x.dtype, tame=False)
        return
    if not isinstance(inner, int):
        return
    n = p.draw.choice(SIZES)
    if x.rank == 2 and p.draw.random() < 0.4:
        turned = p.draw.random() < 0.5
        operands = [x.name, p.weight([n, inner] if turned else [inner, n], x.dtype)]
        if p.draw.random() < 0.7:
            operands.append(p.weight(p.draw.choice([[n], [1, n], [1], []]), x.dtype))
        scale = {"alpha": 0.5, "beta": 2.0} if p.draw.random() < 0.3 else {}
        name = p.op("Gemm", *operands, transB=int(turned), **scale)[0]
        p.add(name, (x.shape[0], n), x.dtype, tame=False)
    elif x.rank == 2 and isinstance(x.shape[0], int) and p.draw.random() < 0.3:
        weight = p.weight([n, x.shape[0]], x.dtype)
        p.add(p.op("MatMul", weight, x.name)[0], (n, inner), x.dtype, tame=False)
    elif p.draw.random() < 0.15:
        name = p.op("MatMul", x.name, p.weight([inner], x.dtype))[0]
        p.add(name, x.shape[:-1], x.dtype, tame=False)
    else:
        name = p.op("MatMul", x.name, p.weight([inner, n], x.dtype))[0]
        p.add(name, (*x.shape[:-1], n), x.dtype, tame=False)


def normalise(p: Program) -> None:
    x = p.pick(F32, F64, least=1)
    if x is None:
        return
    axis = p.draw.randrange(x.rank)
    shown = axis - x.rank if p.draw.random() < 0.5 else axis
    if p.draw.random() < 0.6:
        op_type = p.draw.choice(["Softmax", "Softmax", "LogSoftmax"])
        name = p.op(op_type, x.name, axis=shown)[0]
        p.add(name, x.shape, x.dtype, tame=op_type == "Softmax")
        return
    scaled = x.shape[axis:]
    sizes = [d for d in scaled if isinstance(d, int)]
    if len(sizes) < len(scaled):
        return
    operands = [x.name, p.weight(sizes, x.dtype)]
    if p.draw.random() < 0.7:
        operands.append(p.weight(sizes, x.dtype))
    # A large epsilon: rows of equal elements do not blow rounding up.
    name = p.op("LayerNormalization", *operands, axis=shown, epsilon=0.1)[0]
    p.add(name, x.shape, x.dtype)


def reduction(p: Program) -> None:
    x = p.pick(F32, F64, least=1)
    if x is None:
        return
    kinds = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"]
    kinds += ["ReduceL1", "ReduceLogSumExp"] if x.dtype == F32 else []
    op_type = p.draw.choice(kinds)
    axes = sorted(p.draw.sample(range(x.rank), p.draw.randint(1, x.rank)))
    keep = p.draw.random() < 0.5
    shape = [1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes]
    operands = [x.name]
    if len(axes) < x.rank or p.draw.random() < 0.5:
        operands.append(p.const([a - x.rank if p.draw.random() < 0.5 else a for a in axes]))
    name = p.op(op_type, *operands, keepdims=int(keep))[0]
    p.add(name, shape, x.dtype, tame=op_type in ("ReduceMean", "ReduceMax") and x.tame)


def reshape(p: Program) -> None:
    """Merges and splits dims a few times, then writes the target in one of its forms."""
    x = p.pick(F32, F64, I64, BOOL, least=1)
    if x is None:
        return
    dims = list(x.shape)
    for _ in range(p.draw.randint(1, 3)):
        at = p.draw.randrange(len(dims)) if dims else 0
        if len(dims) > 1 and at + 1 < len(dims) and p.draw.random() < 0.5:
            merged: Any = dims[at] * dims[at + 1]
            dims[at : at + 2] = [merged if isinstance(merged, int) else merged.expand()]
        elif dims and len(dims) < 5:
            part = _divisor(p, dims[at])
            if part is not None:
                pair = [part, _plain_quotient(dims[at], part)]
                p.draw.shuffle(pair)
                dims[at : at + 1] = pair
    open_at = p.draw.randrange(len(dims)) if dims and p.draw.random() < 0.4 else None
    written: list[Dim] = list(dims)
    for i, size in enumerate(dims):
        if i == open_at:
            written[i] = -1
        elif i < x.rank and size == x.shape[i] and p.draw.random() < 0.3:
            written[i] = 0
    p.add(p.op("Reshape", x.name, p.target(written))[0], dims, x.dtype, tame=x.tame)


def _divisor(p: Program, dim: Dim) -> Dim | None:
    if isinstance(dim, int):
        return p.draw.choice([d for d in range(1, dim + 1) if dim % d == 0])
    number, rest = dim.as_coeff_Mul()
    if len(dim.as_ordered_terms()) > 1:
        return None
    parts: list[Dim] = [d for d in range(2, int(number) + 1) if int(number) % d == 0]
    parts += [s for s in rest.as_ordered_factors() if s.is_Symbol]
    parts = [s for s in parts if s != dim]
    return p.draw.choice(parts) if parts else 1


def _plain_quotient(dim: Any, part: Any) -> Dim:
    if isinstance(dim, int):
        return dim // int(part)
    return plain((dim / part).expand())


def arrange(p: Program) -> None:
    """Transpose, Squeeze, Unsqueeze, Flatten."""
    x = p.pick(F32, F64, I64, BOOL, least=1)
    if x is None:
        return
    way = p.draw.randrange(5)
    if way in (0, 1):
        order = p.draw.sample(range(x.rank), x.rank)
        name = p.op("Transpose", x.name, perm=order)[0]
        p.add(name, [x.shape[i] for i in order], x.dtype, tame=x.tame)
    elif way == 2:
        gone = [i for i, d in enumerate(x.shape) if d == 1]
        if not gone:
            return
        gone = sorted(p.draw.sample(gone, p.draw.randint(1, len(gone))))
        shape = [d for i, d in enumerate(x.shape) if i not in gone]
        p.add(p.op("Squeeze", x.name, p.const(gone))[0], shape, x.dtype, tame=x.tame)
    elif way == 3 and x.rank < 5:
        at = p.draw.randint(0, x.rank)
        shape = [*x.shape[:at], 1, *x.shape[at:]]
        p.add(p.op("Unsqueeze", x.name, p.const([at]))[0], shape, x.dtype, tame=x.tame)
    elif way == 4:
        axis = p.draw.randint(0, x.rank)
        halves = [reduce(mul, half, 1) for half in (x.shape[:axis], x.shape[axis:])]
        shape = [h if isinstance(h, int) else plain(h.expand()) for h in halves]
        p.add(p.op("Flatten", x.name, axis=axis)[0], shape, x.dtype, tame=x.tame)


def slices(p: Program) -> None:
    x = p.pick(F32, F64, I64, least=1)
    if x is None:
        return
    axes = sorted(p.draw.sample(range(x.rank), p.draw.randint(1, min(2, x.rank))))
    starts, ends, steps, shape = [], [], [], list(x.shape)
    for axis in axes:
        size = x.shape[axis]
        if isinstance(size, int):
            start = p.draw.randrange(size)
            stop = p.draw.randint(start + 1, size)
            step = p.draw.choice([1, 1, 2])
            shape[axis] = len(range(start, stop, step))
            if p.draw.random() < 0.15:
                start, stop, step, shape[axis] = -1, -p.draw.choice(ENDS), -1, size
            elif stop == size and p.draw.random() < 0.5:
                stop = p.draw.choice(ENDS)
            else:
                start = start - size if p.draw.random() < 0.3 else start
            starts.append(p.const([start]))
            ends.append(p.const([stop]))
            steps.append(step)
            continue
        number, rest = size.as_coeff_Mul()
        way = p.draw.randrange(4)
        starts.append(p.const([0 if way < 3 else -1]))
        steps.append(1)
        if way == 0 and number > 1 and len(size.as_ordered_terms()) == 1:
            shape[axis] = plain(rest)
            ends.append(p.size(shape[axis]))
        elif way == 1:
            shape[axis] = 1
            ends.append(p.const([1]))
        elif way == 3:
            shape[axis] = 1
            ends.append(p.const([p.draw.choice(ENDS)]))
        else:
            far = p.const([p.draw.choice(ENDS)])
            ends.append(p.size(size) if p.draw.random() < 0.5 else far)
    join = [s[0] if len(s) == 1 else p.op("Concat", *s, axis=0)[0] for s in (starts, ends)]
    operands = [x.name, *join, p.const(axes)]
    if any(s != 1 for s in steps):
        operands.append(p.const(steps))
    p.add(p.op("Slice", *operands)[0], shape, x.dtype, tame=x.tame)


def splits(p: Program) -> None:
    x = p.pick(F32, F64, I64, least=1)
    if x is None:
        return
    axes = [i for i, d in enumerate(x.shape) if isinstance(d, int) and d > 1]
    if not axes:
        return
    axis = p.draw.choice(axes)
    size = x.shape[axis]
    assert isinstance(size, int)
    if size % 2 == 0 and p.draw.random() < 0.6:
        sizes = [size // 2] * 2
        names = p.op("Split", x.name, outputs=2, axis=axis, num_outputs=2)
    else:
        first = p.draw.randint(1, size - 1)
        sizes = [first, size - first]
        names = p.op("Split", x.name, p.const(sizes), outputs=2, axis=axis)
    for name, length in zip(names, sizes, strict=True):
        p.add(name, [*x.shape[:axis], length, *x.shape[axis + 1 :]], x.dtype, tame=x.tame)


def concat(p: Program) -> None:
    x = p.pick(F32, F64, I64, least=1)
    if x is None:
        return
    axis = p.draw.randrange(x.rank)
    fits = [
        v
        for v in p.values
        if v.dtype == x.dtype
        and v.rank == x.rank
        and all(a == b for i, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis)
    ]
    parts = [x, *(p.draw.choice(fits) for _ in range(p.draw.randint(1, 2)))]
    p.draw.shuffle(parts)
    total: Any = sum(v.shape[axis] for v in parts)
    shape = [*x.shape[:axis], total, *x.shape[axis + 1 :]]
    if elements(shape) <= LARGEST:
        name = p.op("Concat", *(v.name for v in parts), axis=axis)[0]
        p.add(name, shape, x.dtype, tame=all(v.tame for v in parts))


def gather(p: Program) -> None:
    ids = p.pick(I64, most=3)
    if ids is None:
        return
    x = p.pick(F32, F64, least=1, most=3)
    axes = [] if x is None else [i for i, d in enumerate(x.shape) if isinstance(d, int)]
    if x is None or not axes or p.draw.random() < 0.6:
        rows: tuple[Dim, ...] = (p.draw.choice([5, VOCABULARY, 8]), p.draw.choice(SIZES))
        sizes = [d for d in rows if isinstance(d, int)]
        x, axis = Value(p.weight(sizes), rows, p.float_type), 0
    else:
        axis = p.draw.choice(axes)
    # Indices from -size to size - 1, as ONNX allows.
    size = x.shape[axis]
    assert isinstance(size, int)
    modulus = p.const(2 * size)
    wrapped = p.op("Mod", ids.name, modulus)[0]
    index = p.op("Sub", wrapped, p.const(size))[0]
    shape = (*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])
    if len(shape) <= 5 and elements(shape) <= LARGEST:
        name = p.op("Gather", x.name, index, axis=axis)[0]
        p.add(name, shape, x.dtype, tame=x.tame)


def expand(p: Program) -> None:
    x = p.pick(F32, F64, I64, most=3)
    if x is None:
        return
    sizes: list[Dim] = [*SIZES, *(dim_symbol(n) for n in SYMBOLS)]
    shape = [p.draw.choice(sizes) if d == 1 and p.draw.random() < 0.7 else d for d in x.shape]
    if p.draw.random() < 0.4:
        shape.insert(0, p.draw.choice(sizes))
    if elements(shape) > LARGEST:
        return
    asked = [
        1 if i > 0 and len(shape) == x.rank and p.draw.random() < 0.2 and d == x.shape[i] else d
        for i, d in enumerate(shape)
    ]
    p.add(p.op("Expand", x.name, p.target(asked))[0], shape, x.dtype, tame=x.tame)


def make(p: Program) -> None:
    """ConstantOfShape, Range, and a table of positions sliced to a symbolic length."""
    sizes: list[Dim] = [*SIZES, *(dim_symbol(n) for n in SYMBOLS)]
    way = p.draw.randrange(3)
    if way == 0:
        shape = [p.draw.choice(sizes) for _ in range(p.draw.randint(1, 3))]
        dtype = p.draw.choice([p.float_type, I64])
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        filler = numpy_helper.from_array(np.array([p.draw.choice([0, 1, 3])], kind))
        p.add(p.op("ConstantOfShape", p.target(shape), value=filler)[0], shape, dtype)
    elif way == 1:
        size = p.draw.choice(sizes)
        end = p.op("Squeeze", p.size(size), p.const([0]))[0]
        p.add(p.op("Range", p.const(0), end, p.const(1))[0], [size], I64)
    else:
        size, width = dim_symbol(p.draw.choice(SYMBOLS)), p.draw.choice(SIZES)
        table = p.weight([32, width])
        name = p.op("Slice", table, p.const([0]), p.size(size), p.const([0]))[0]
        p.add(name, [size, width], p.float_type)


PIECES: tuple[tuple[Callable[[Program], None], int], ...] = (
    (unary, 3),
    (binary, 5),
    (integers, 1),
    (conditions, 2),
    (float_casts, 1),
    (matmul, 5),
    (normalise, 3),
    (reduction, 3),
    (reshape, 5),
    (arrange, 3),
    (slices, 3),
    (splits, 2),
    (concat, 2),
    (gather, 3),
    (expand, 2),
    (make, 2),
)


def program(seed: int, pieces: int = 10) -> onnx.ModelProto:
    """A random valid model with the symbols `batch` and `seq`, of at least one piece."""
    draw = random.Random(f"program {seed}")
    # Mostly float64, where the comparison can be sharp.
    p = Program(draw, draw.choice([F64, F64, F32]))
    batch, seq = (dim_symbol(n) for n in SYMBOLS)
    shapes: list[tuple[Dim, ...]] = [(batch, seq, draw.choice(SIZES)), (batch, draw.choice(SIZES))]
    shapes += [(batch, seq)] if draw.random() < 0.3 else []
    for i, shape in enumerate(shapes):
        p.inputs.append(p.add(f"x{i}", shape, p.float_type))
    p.inputs.append(p.add("ids", (batch, seq), I64))
    names, weights = [piece for piece, _ in PIECES], [weight for _, weight in PIECES]
    while len(p.values) - len(p.inputs) < pieces:
        draw.choices(names, weights)[0](p)
    read = {name for node in p.nodes for name in node.input}
    made = [v for v in p.values if v not in p.inputs]
    ends = [v for v in made if v.name not in read]
    # A few values that others read are outputs too.
    ends += draw.sample([v for v in made if v.name in read], min(2, len(made) - len(ends)))
    return build(p, ends)


def is_narrow(model: onnx.ModelProto) -> bool:
    """Whether a value is rounded to float32 midway, which is no better in float64."""
    return any(
        attribute.i == F32
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "to"
    ) or any(value.type.tensor_type.elem_type == F32 for value in model.graph.input)


class Sizes:
    """Random sizes of the symbols of a program, all from one seed.

    Attributes:
        constraints: What they satisfy.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"sizes {seed}")
        self._divisor = self._draw.choice([1, 1, 1, 2, 4])
        constrained = self._divisor > 1
        self.constraints = {"batch": Symbol(divisor=self._divisor)} if constrained else {}

    def draw(self) -> dict[str, int]:
        """The sizes of one run."""
        return {
            "batch": self._divisor * self._draw.choice([1, 2, 3, 5]),
            "seq": self._draw.choice([1, 2, 5, 7]),
        }


def unless_refused(make: Callable[[], T]) -> T | None:
    """Returns what is made by a random strategy; None if the strategy is refused."""
    try:
        return make()
    except ShardingError as error:
        assert "'n" in str(error), "a refusal names its node"
        return None


def taken(case: Callable[[int], bool], seeds: range) -> int:
    """Returns how many cases are taken; the message of one that fails names its seed."""
    count = 0
    for seed in seeds:
        try:
            count += case(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return count


def feeds(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Random inputs of a model at the given sizes."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in dims]
        if info.type.tensor_type.elem_type == I64:
            found[info.name] = rng.integers(0, 50, shape)
        else:
            dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            found[info.name] = rng.standard_normal(shape).astype(dtype)
    return found
