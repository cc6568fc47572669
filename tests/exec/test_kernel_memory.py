"""What the table of kernels says about memory, entry by entry, against measured bytes.

Each entry stands in programs of one device whose peak it decides: its operands are results that
nobody else reads, its results are read once more. A plain kernel would have another peak, so that
an entry that is not true is seen, and so is one without a program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import parser

from onnxpar.cost.live_memory import MemoryStep, live_peak, makes
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.kernel_memory import call
from onnxpar.ops.slots import PLAIN, Kernel
from onnxpar.ops.table import REGISTRY
from onnxpar_runtime.session import Session
from tests.runtime import hand_made

ROWS, COLUMNS = 512, 64
REPLICATED = (ROWS, COLUMNS)
ITEM = 4
# Constants that sessions keep, and the tokens of collectives.
SMALL = 2048

Key = tuple[str, str]
Facts = Callable[[str, str], Kernel]
KERNELS = {
    (d.domain, d.op_type): d.memory
    for d in REGISTRY.defs
    if d.memory is not PLAIN and not d.memory.form and not d.memory.appends
}
APPENDING = {(d.domain, d.op_type): d.memory.appends for d in REGISTRY.defs if d.memory.appends}


def kernel(domain: str, op_type: str) -> Kernel:
    return KERNELS.get((domain, op_type), PLAIN)


@dataclass(frozen=True)
class Case:
    """A program around a kernel.

    Attributes:
        body: From `x` to the outputs, in ONNX text.
        values: Its initializers.
        shapes: Of values that are not [512, 64].
        items: Bytes of an element, where they are not 4.
        outputs: Its outputs.
    """

    body: str
    values: str = ""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    items: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes.get(name, REPLICATED)

    def text(self) -> str:
        results = ", ".join(
            f"float[{', '.join(f'{o}_{d}' for d in range(len(self.shape(o))))}] {o}"
            for o in self.outputs
        )
        return f"g (float[n, {COLUMNS}] x) => ({results}) <{self.values}> {{ {self.body} }}"


def between(name: str, operands: str = "a", values: str = "", before: str = "") -> Case:
    """One kernel, its operand from a kernel before it and its result for one behind it."""
    return Case(f"a = Exp(x) {before} r = {name} ({operands})  y = Sin(r)", values)


def view(name: str, shape: tuple[int, ...], operands: str = "a", values: str = "") -> Case:
    """As `between`, with a result of another shape."""
    case = between(name, operands, values)
    return Case(case.body, case.values, {"r": shape, "y": shape})


def update(name: str, states: str, scalars: int) -> Case:
    """A step of an optimizer; the gradient is the program's input, which is held from outside."""
    makers = {"p": "Exp", "m": "Sin", "v": "Cos"}
    body = " ".join(f"{s} = {makers[s]}(x)" for s in states)
    operands = ["p", "x", *states[1:], *["one"] * scalars]
    body += f" {', '.join(f'new_{s}' for s in states)} = {DOMAIN}.{name} ({', '.join(operands)}) "
    body += " ".join(f"y_{s} = Exp(new_{s})" for s in states)
    return Case(body, "double one = {1.0}", outputs=tuple(f"y_{s}" for s in states))


def gated(name: str) -> Case:
    """The gradient of a gated unit; the gate is the program's input, which is held from outside."""
    body = (
        f"a = Exp(x)  b = Sin(x)  r, s = {DOMAIN}.Gated{name}Grad (a, x, b)  y = Sin(r)  z = Cos(s)"
    )
    return Case(body, outputs=("y", "z"))


ACTIVATIONS = ("Gelu", "GeluTanh", "Silu")
FLAT = (ROWS * COLUMNS,)
IN_PLACE = (
    "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Shrink", "Sigmoid",
    "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu",
)  # fmt: skip
GRADIENTS = (
    "GeluGrad", "GeluTanhGrad", "LogSoftmaxGrad", "ReluGrad", "SigmoidGrad", "SiluGrad",
    "SoftmaxGrad", "TanhGrad",
)  # fmt: skip
BIAS = f"float[{COLUMNS}] bias = {{{', '.join(['0.5'] * COLUMNS)}}}"
BIASED = "b = Add(a, bias)"
MASK = {"c": 1}

CASES: Mapping[Key, tuple[Case, ...]] = {
    ("", "Reshape"): (view("Reshape", FLAT, "a, to", "int64[1] to = {-1}"),),
    ("", "Flatten"): (view("Flatten<axis = 0>", (1, *FLAT)),),
    ("", "Squeeze"): (
        Case(
            "u = Unsqueeze(x, at)  a = Exp(u)  r = Squeeze(a, at)  y = Sin(r)",
            "int64[1] at = {0}",
            {"u": (1, *REPLICATED), "a": (1, *REPLICATED)},
        ),
    ),
    ("", "Unsqueeze"): (view("Unsqueeze", (1, *REPLICATED), "a, at", "int64[1] at = {0}"),),
    ("", "Identity"): (between("Identity"),),
    **{("", name): (between(name),) for name in IN_PLACE},
    ("", "Cast"): (Case("a = Exp(x)  r = Cast<to = 6>(a)  y = Cast<to = 1>(r)"),),
    ("", "ScatterElements"): (
        between("ScatterElements", "a, at, with", "int64[1, 1] at = {3}, float[1, 1] with = {2.0}"),
    ),
    ("", "Softmax"): (between("Softmax"), between("Softmax<axis = 0>")),
    ("", "LogSoftmax"): (between("LogSoftmax"), between("LogSoftmax<axis = 0>")),
    ("", "ConvTranspose"): (
        Case(
            "i = Reshape(x, image)  a = Exp(i)  "
            "r = ConvTranspose<pads = [1, 1, 1, 1]>(a, w)  y = Sin(r)",
            f"int64[4] image = {{8, 4, 32, 32}}, "
            f"float[4, 4, 3, 3] w = {{{', '.join(['0.5'] * 144)}}}",
            dict.fromkeys("iary", (8, 4, 32, 32)),
        ),
    ),
    ("", "Gelu"): (
        between("Gelu", "b", BIAS, BIASED),
        between('Gelu<approximate = "tanh">', "b", BIAS, BIASED),
        between("Gelu"),
    ),
    ("", "Where"): (
        Case("a = Exp(x) b = Sin(x) c = Greater(a, b) r = Where(c, a, b) y = Cos(r)", "", {}, MASK),
        Case(
            "a = Exp(x)  c = Greater(a, zero)  r = Where(c, a, zero)  y = Cos(r)",
            "float[1, 1] zero = {0.0}",
            {},
            MASK,
        ),
    ),
    **{(DOMAIN, name): (between(f"{DOMAIN}.{name}", "a, x"),) for name in GRADIENTS},
    (DOMAIN, "BatchNormalizationInputGrad"): (
        between(
            f"{DOMAIN}.BatchNormalizationInputGrad",
            f"a, x, {', '.join(['bias'] * 5)}, one",
            f"{BIAS}, float[1] one = {{1.0}}",
        ),
    ),
    **{(DOMAIN, f"Gated{name}Grad"): (gated(name),) for name in ACTIVATIONS},
    **{
        (DOMAIN, f"Gated{name}"): (between(f"{DOMAIN}.Gated{name}", "a, x"),)
        for name in ACTIVATIONS
    },
    **{
        (DOMAIN, name): (between(f"{DOMAIN}.{name}", "a, bias, bias", BIAS),)
        for name in ("RotaryEmbedding", "RotaryEmbeddingGrad")
    },
    (DOMAIN, "RMSNormalizationGrad"): (
        Case(
            f"a = Exp(x)  m = ReduceMean(x, last)  "
            f"r = {DOMAIN}.RMSNormalizationGrad (a, x, bias, m)  y = Sin(r)",
            f"int64[1] last = {{1}}, {BIAS}",
            {"m": (ROWS, 1)},
        ),
    ),
    (DOMAIN, "LayerNormalizationGrad"): (
        Case(
            f"a = Exp(x)  m = ReduceMean(x, last)  "
            f"r = {DOMAIN}.LayerNormalizationGrad (a, x, bias, m, m)  y = Sin(r)",
            f"int64[1] last = {{1}}, {BIAS}",
            {"m": (ROWS, 1)},
        ),
    ),
    (DOMAIN, "AllReduce"): (
        Case(
            f'a = Exp(x)  r, t = {DOMAIN}.AllReduce<reduction = "sum", group = [0]>(a)  y = Sin(r)',
            shapes={"t": (1,)},
        ),
    ),
    (DOMAIN, "Broadcast"): (
        Case(
            f"a = Exp(x)  r, t = {DOMAIN}.Broadcast<root = 0, group = [0]>(a)  y = Sin(r)",
            shapes={"t": (1,)},
        ),
    ),
    (DOMAIN, "Wait"): (
        Case(
            f'a = Exp(x)  s, t = {DOMAIN}.Start<op = "AllReduce", group = [0]>(a)  '
            f'r = {DOMAIN}.Wait<op = "AllReduce", group = [0]>(s, a, t)  y = Sin(r)',
            shapes={"t": (1,)},
        ),
    ),
    (DOMAIN, "Finish"): (between(f"{DOMAIN}.Finish"),),
    (DOMAIN, "Barrier"): (between(f"{DOMAIN}.Barrier"),),
    (DOMAIN, "SgdStep"): (update("SgdStep", "p", 2),),
    (DOMAIN, "MomentumStep"): (update("MomentumStep", "pm", 5),),
    (DOMAIN, "AdamStep"): (update("AdamStep", "pmv", 8),),
    (DOMAIN, "AdamWStep"): (update("AdamWStep", "pmv", 8),),
}
HEADS, WIDTH, USED, LENGTH, NEW = 2, 8, 5, 16, 3
CACHE = (1, HEADS, LENGTH, WIDTH)
ROW = (1, NEW, HEADS * WIDTH)
APPENDING_CASES: Mapping[Key, str] = {
    ("com.microsoft", "GroupQueryAttention"): (
        f"(float[{','.join(map(str, ROW))}] q, float[{','.join(map(str, ROW))}] k,"
        f" float[{','.join(map(str, ROW))}] v, float[{','.join(map(str, CACHE))}] past_0,"
        f" float[{','.join(map(str, CACHE))}] past_1) =>"
        f" (float[a, b, c] y, float[d, e, f, g] new_0, float[h, i, j, l] new_1)"
        f" <int32[1, 1] last = {{{USED + NEW - 1}}}, int32[1] total = {{{USED + NEW}}}>"
        f" {{ y, new_0, new_1 = com.microsoft.GroupQueryAttention"
        f"<num_heads = {HEADS}, kv_num_heads = {HEADS}>(q, k, v, past_0, past_1, last, total) }}"
    ),
}
PLAIN_ONES = {
    **{name: between(name) for name in ("Abs", "Exp", "Neg", "Sqrt", "Reciprocal", "Erf")},
    **{name: between(name, "a, a") for name in ("Add", "Mul", "Sub", "Div", "Max")},
    "Transpose": view("Transpose<perm = [1, 0]>", (COLUMNS, ROWS)),
    "LayerNormalization": between("LayerNormalization", "a, bias", BIAS),
}


def predicted(case: Case, facts: Facts) -> int:
    """The peak of a case's values if kernels do as their facts say."""
    graph = ir.from_proto(parser.parse_model(hand_made.HEADER + case.text())).graph
    steps = []
    for node in graph:
        names = [v.name or "" for v in node.outputs]
        reads = [v.name or "" if v is not None else "" for v in node.inputs]
        sizes = [prod(case.shape(n)) * case.items.get(n, ITEM) for n in names]
        shapes = [
            v.shape.numpy() if v is not None and v.is_initializer() and v.shape else case.shape(n)
            for n, v in zip(reads, node.inputs, strict=True)
        ]
        seen = call(node, shapes, [case.shape(n) for n in names], ITEM, REGISTRY)
        fact = facts(node.domain, node.op_type)
        steps.append(
            MemoryStep(names[0], tuple(reads), makes(fact, reads, names, sizes), fact.work(seen))
        )
    return live_peak(steps, case.outputs)


def measured(case: Case, folder: Path) -> int:
    """The bytes that a session held at most, without what is bound to it."""

    def spec(name: str) -> dict[str, object]:
        shape = case.shape(name)
        return hand_made.tensor(name, "float32", shape, [[(n, [])] for n in shape])

    directory = hand_made.write(
        folder / "a", [case.text()], atoms=[], inputs=[spec("x")], outputs=map(spec, case.outputs)
    )
    x = np.linspace(0.1, 1.0, prod(REPLICATED), dtype=np.float32).reshape(REPLICATED)
    with Session(directory, device="cpu", measured=True) as session:
        for _ in range(2):  # the second has the outputs of the first beside it
            session.run({"x": x})
        return session.peak_bytes() - (1 + len(case.outputs)) * x.nbytes


@pytest.mark.parametrize("key", KERNELS, ids=lambda key: ".".join(filter(None, key)))
def test_an_entry_is_true_and_says_something(tmp_path: Path, key: Key) -> None:
    def without(domain: str, op_type: str) -> Kernel:
        return PLAIN if (domain, op_type) == key else kernel(domain, op_type)

    says = False
    for number, case in enumerate(CASES[key]):
        held = measured(case, tmp_path / str(number))
        assert predicted(case, kernel) == pytest.approx(held, abs=SMALL), case.body
        says |= abs(predicted(case, without) - held) > prod(REPLICATED)
    assert says


@pytest.mark.parametrize("key", APPENDING, ids=lambda key: ".".join(filter(None, key)))
def test_a_kernel_that_appends_writes_only_new_elements(key: Key) -> None:
    model = parser.parse_model(hand_made.HEADER + "g " + APPENDING_CASES[key])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    pairs = APPENDING[key]
    names = [[v.name for v in ends] for ends in (session.get_inputs(), session.get_outputs())]
    random = np.random.default_rng(0)
    feed = {i.name: random.standard_normal(i.shape, dtype=np.float32) for i in session.get_inputs()}
    alone = dict(zip(names[1], session.run(None, feed), strict=True))
    binding = session.io_binding()
    # An OrtValue is in the memory of the array that it is made from.
    given = {name: value.copy() for name, value in feed.items()}
    held = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feed.items()}
    for name in names[0]:
        binding.bind_ortvalue_input(name, held[name])
    for operand, result in pairs:
        binding.bind_ortvalue_output(names[1][result], held[names[0][operand]])
    binding.bind_output(names[1][0])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[-1].numpy(), alone[names[1][0]])
    for operand, result in pairs:
        before, after = given[names[0][operand]], held[names[0][operand]].numpy()
        used = np.s_[:, :, : USED + NEW]
        np.testing.assert_array_equal(after[used], alone[names[1][result]][used])
        same = np.all(after == before, axis=(0, 1, 3))
        assert same.tolist() == [not USED <= n < USED + NEW for n in range(LENGTH)]


@pytest.mark.parametrize("name", PLAIN_ONES)
def test_what_is_not_named_is_plain(tmp_path: Path, name: str) -> None:
    assert ("", name) not in KERNELS
    held = measured(PLAIN_ONES[name], tmp_path)
    assert predicted(PLAIN_ONES[name], kernel) == pytest.approx(held, abs=SMALL)
