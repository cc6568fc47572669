"""Random graphs with random strategies on random nodes equal the undivided graph."""

import os
import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lockstep import run_model

from onnxpar.analysis.plan import factor_sizes
from onnxpar.analysis.seeds import NodeSeed, Seeds
from onnxpar.mesh import Mesh
from onnxpar.pipeline import Analysed, analyse, divide
from onnxpar.sharding import Component, Sharding

COUNT = 300 if os.environ.get("ONNXPAR_FULL") else 20
FIRST = int(os.environ.get("ONNXPAR_SEED", "0")) * COUNT
NODES = 12
# Chains of softmax, norms and products of at most 6 terms, bounded by Tanh: a few dozen roundings
# of 2^-24 each, amplified by the norms' division by deviations of about 0.1.
RTOL = 1e-4

# Each takes tensors x and y of shape [N, S, 6] and makes z of the same shape.
STEPS = (
    "z = Add(x, y)",
    "z = Sub(x, y)",
    "z = Mul(x, y)",
    "z = Max(x, y)",
    "z = Tanh(x)",
    "z = Sigmoid(x)",
    "z = Relu(x)",
    "z = Softmax<axis=0>(x)",
    "z = Softmax<axis=1>(x)",
    "z = LogSoftmax<axis=2>(x)",
    "z = LayerNormalization<axis=2>(x, scale, bias)",
    "p = MatMul(x, weight) \n z = Tanh(p)",
    "p = MatMul(x, up) \n q = Relu(p) \n r = MatMul(q, down) \n z = Tanh(r)",
    "p = Transpose<perm=[0,2,1]>(y) \n q = MatMul(x, p) \n r = Softmax(q) \n z = MatMul(r, y)",
    "p = ReduceMax<keepdims=1>(x, axis2) \n z = Sub(x, p)",
    "p = ReduceMean<keepdims=1>(x, axis0) \n z = Sub(x, p)",
    "p = ReduceSum<keepdims=1>(x, axis1) \n q = Tanh(p) \n z = Add(q, y)",
    "p = ReduceLogSumExp<keepdims=1>(x, axis1) \n z = Sub(y, p)",
    "p = ReduceL2<keepdims=1>(x, axis0) \n q = Tanh(p) \n z = Mul(q, y)",
    "p, q = Split<axis=2, num_outputs=2>(x) \n z = Concat<axis=2>(q, p)",
    "p = Slice(x, one, five, axis2) \n q = Slice(y, four, six, axis2) \n z = Concat<axis=2>(p, q)",
    "s = Shape(x) \n p = Reshape(x, heads) \n q = Transpose<perm=[0,2,1,3]>(p) \n"
    "t = Shape(q) \n u = Reshape(q, merged) \n v = Softmax(u) \n w = Reshape(v, t) \n"
    "h = Transpose<perm=[0,2,1,3]>(w) \n z = Reshape(h, s)",
    "p = Greater(x, y) \n z = Where(p, x, y)",
    "p = Reshape(x, flat) \n q = Relu(p) \n s = Shape(y) \n z = Reshape(q, s)",
    "p = Gather<axis=2>(x, order) \n z = Tanh(p)",
    "p = Trilu(x) \n z = Add(p, y)",
    "s = Shape(x) \n p = ReduceMin<keepdims=0>(x, axis1) \n q = Unsqueeze(p, axis1) \n"
    "z = Expand(q, s)",
    "p = CumSum(x, first) \n z = Tanh(p)",
    "p = Cast<to=11>(x) \n q = Tanh(p) \n z = Cast<to=1>(q)",
)
CONSTANTS = """
  <int64[1] axis0 = {0}, int64[1] axis1 = {1}, int64[1] axis2 = {2}, int64 first = {1},
   int64[1] one = {1}, int64[1] four = {4}, int64[1] five = {5}, int64[1] six = {6},
   int64[4] heads = {0, 0, 2, 3}, int64[3] merged = {-1, 2, 3}, int64[1] flat = {-1},
   int64[6] order = {5, 0, -1, 3, 2, -4}>
"""
NAMES = "pqrstuvwh"


def graph(rng: random.Random) -> str:
    """The text of a random graph of two inputs and two outputs."""
    values = ["a", "b"]
    lines = []
    for index in range(NODES):
        step = rng.choice(STEPS)
        names = {"x": rng.choice(values[-3:]), "y": rng.choice(values), "z": f"z{index}"}
        names |= {n: f"{n}{index}" for n in NAMES}
        for line in step.split("\n"):
            head, _, rest = line.strip().partition("(")
            outputs, equals, operator = head.partition("=")
            outs = ", ".join(names[o.strip()] for o in outputs.split(","))
            ins = ", ".join(names.get(i.strip(), i.strip()) for i in rest.rstrip(") ").split(","))
            lines.append(f"[n{len(lines)}] {outs} {equals}{operator}({ins})")
        values.append(f"z{index}")
    body = "\n".join(lines)
    out = f"float[N,S,6] z{NODES - 1}, float[N,S,6] z{NODES - 2}"
    return (
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[N,S,6] a, float[N,S,6] b) => ({out})'
        f"{CONSTANTS} {{ {body} }}"
    )


def model(text: str, rng: np.random.Generator) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    shapes = {"weight": (6, 6), "up": (6, 8), "down": (8, 6), "scale": (6,), "bias": (6,)}
    used = {i for node in proto.graph.node for i in node.input}
    for name, shape in shapes.items():
        if name in used:
            array = rng.standard_normal(shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def strategies(analysed: Analysed, mesh: Mesh, rng: random.Random) -> Seeds:
    """Splits some nodes, inputs and parameters at random."""

    def deal(count: int) -> list[list[int]]:
        dims: list[list[int]] = [[] for _ in range(count)]
        for atom in rng.sample(range(len(mesh.atoms)), len(mesh.atoms)):
            if rng.random() < 0.6:
                dims[rng.randrange(count)].append(atom)
        return dims

    nodes = {}
    for node in analysed.model.graph:
        name = node.name or ""
        rule, view = analysed.rules.rules[name], analysed.rules.views[name]
        if rule.splittable and rng.random() < 0.35:
            sizes = factor_sizes(rule, view)
            dealt = zip(rule.splittable, deal(len(rule.splittable)), strict=True)
            factors = {f: (Component(sizes[f], tuple(atoms)),) for f, atoms in dealt if atoms}
            pending = {k for f in factors if (k := rule.kinds[f]) in ("sum", "max", "min", "prod")}
            if len(pending) < 2:
                nodes[name] = NodeSeed(name, factors)
    inputs = {
        v.name or "": Sharding.of(analysed.env.shapes[v.name or ""], deal(3))
        for v in analysed.model.graph.inputs
    }
    axes = ((0,),) if rng.random() < 0.3 else ()
    return Seeds(mesh, nodes, inputs, {}, axes)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_divided_graph_equals_the_undivided_one(seed: int) -> None:
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    proto = model(graph(rng), numbers)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    mesh = Mesh((), rng.choice([(2,), (3,), (2, 2), (2, 3), (3, 2)]))
    analysed = analyse(ir.from_proto(proto), {})
    parted = divide(analysed, strategies(analysed, mesh, rng))
    for sizes in ({"N": 4, "S": 6}, {"N": 5, "S": 3}, {"N": 1, "S": 2}):
        shape = (sizes["N"], sizes["S"], 6)
        feeds = {n: numbers.standard_normal(shape).astype(np.float32) for n in ("a", "b")}
        feeds = {v.name: feeds[v.name] for v in reference.get_inputs()}
        want = reference.run(None, feeds)
        got = run_model(parted, feeds, 20, sizes)
        for output, array in zip(reference.get_outputs(), want, strict=True):
            worst = np.abs(got[output.name] - array).max()
            scale = np.abs(array).max()
            assert worst <= RTOL * scale, f"{output.name} at {sizes} on {mesh.atoms}: {worst}"
