"""Scales, biases and statistics that exporters merged get their own."""

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.merged_tensors import untie
from onnxpar.parameters.recognise import read_parameters
from onnxpar.parameters.trainable import select
from tests.onnxpar.parameters.declared import read

MERGED = """g (float[n, 4] x) => (float[n, 4] y)
<float[4] ones, float[4] zeros, float[4, 4] w, float[4] other>
{
  [ln1] a = LayerNormalization(x, ones, zeros)
  [fc1] b = Gemm(a, w, zeros)
  [ln2] c = LayerNormalization(b, ones, other)
  [fc2] d = MatMul(c, w)
  [bias2] e = Add(zeros, d)
  [gain] y = Mul(e, ones)
}"""
CONSTANTS = {"ones": [1.0] * 4, "zeros": [0.0] * 4}


def inputs_of(model: ir.Model) -> dict[str, list[str | None]]:
    return {node.name or "": [v.name for v in node.inputs if v is not None] for node in model.graph}


def test_running_statistics_get_their_own() -> None:
    """In new layers, the zeros of bias and running mean are one tensor, and so are the ones."""
    model = read(
        """g (float[n, 2, 3] x) => (float[n, 2, 3] y)
        <float[2] ones, float[2] zeros>
        {
          [bn1] h = BatchNormalization(x, ones, zeros, zeros, ones)
          [bn2] y = BatchNormalization(h, ones, zeros, zeros, ones)
        }""",
        ones=[1.0] * 2,
        zeros=[0.0] * 2,
    )
    notices = untie(model, REGISTRY)
    assert [n.split("'")[1] for n in notices] == ["ones", "zeros"]
    first, second = inputs_of(model).values()
    names = [n for n in (*first, *second) if n not in ("x", "h")]
    assert len(set(names)) == 8
    assert {n.split(".")[0] for n in names} == {"ones", "zeros"}


def test_a_statistic_of_one_channel_gets_its_own() -> None:
    model = read(
        """g (float[n, 1, 3] x) => (float[n, 1, 3] y)
        <float[1] s, float[1] b, float[1] mean, float[1] var>
        {
          [bn1] h = BatchNormalization(x, s, b, mean, var)
          [bn2] y = BatchNormalization(h, s, b, mean, var)
        }"""
    )
    untie(model, REGISTRY)
    assert inputs_of(model)["bn2"] == ["h", "s", "b", "mean.1", "var.1"]


def test_each_scale_and_bias_gets_its_own() -> None:
    model = read(MERGED, **CONSTANTS)
    notices = untie(model, REGISTRY)
    assert inputs_of(model) == {
        "ln1": ["x", "ones", "zeros"],
        "fc1": ["a", "w", "zeros.1"],
        "ln2": ["b", "ones.1", "other"],
        "fc2": ["c", "w"],
        "bias2": ["zeros.2", "d"],
        "gain": ["e", "ones.2"],
    }
    assert [n.split("'")[1] for n in notices] == ["ones", "zeros"]
    assert "(all elements 1)" in notices[0]
    assert "'zeros' at 'ln1', 'zeros.1' at 'fc1', 'zeros.2' at 'bias2'" in notices[1]
    selection = select(read_parameters(model).model, REGISTRY)
    # Copies count as tensors of the file, and nothing is shared but the weight, which is no bias.
    assert {p.name for p in selection.trained} == set(model.graph.initializers)
    assert [t.name for t in selection.shared({})] == ["w"]
    assert untie(model, REGISTRY) == ()


def test_an_untied_model_computes_the_same() -> None:
    model = read(MERGED, **CONSTANTS)
    x = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)}
    results = []
    for _ in range(2):
        data = ir.serde.serialize_model(model).SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        results.append(session.run(None, x)[0])
        untie(model, REGISTRY)
    assert "ones.1" in model.graph.initializers
    assert (results[0] == results[1]).all()


def test_what_was_not_merged_stays() -> None:
    # Different elements: shared on purpose. One use: shared with nobody. A matrix of zeros that two
    # products read: tied, and no bias.
    model = read(
        """g (float[n, 4] x) => (float[n, 4] y) <float[4] bias, float[4] once, float[4, 4] w>
        {
          a = Add(x, bias)  b = Add(a, bias)  c = Add(b, once)
          d = MatMul(c, w)  y = MatMul(d, w)
        }""",
        once=[0.0] * 4,
        w=np.zeros((4, 4)),
    )
    before = inputs_of(model)
    assert untie(model, REGISTRY) == ()
    assert inputs_of(model) == before


def test_a_state_that_equals_a_bias_keeps_its_tensor() -> None:
    model = read(
        """g (float[n, 4] x) => (float[n, 4] y) <float[4] zeros, float[4, 4] w>
        { [state] a = Max(x, zeros)  [fc] b = MatMul(a, w)  [bias] y = Add(b, zeros) }""",
        zeros=[0.0] * 4,
    )
    (notice,) = untie(model, REGISTRY)
    assert inputs_of(model)["state"] == ["x", "zeros"]
    assert inputs_of(model)["bias"] == ["b", "zeros.1"]
    assert "'zeros.1' at 'bias'" in notice


def test_an_identity_in_the_place_of_a_tensor_gives_its_name_back() -> None:
    # The exporter that traces writes merged tensors so.
    model = read(
        """g (float[n, 4] x) => (float[n, 4] y, float[4] kept)
        <float[4] "ln1.bias", float[4] w>
        {
          "ln2.bias" = Identity("ln1.bias")
          "tied.w" = Identity(w)
          kept = Identity("ln1.bias")
          [a] a = Add(x, "ln1.bias")
          [b] b = Add(a, "ln2.bias")
          [c] c = Add(b, "tied.w")
          [d] y = Add(c, w)
        }""",
        **{"ln1.bias": [0.0] * 4},
    )
    (notice,) = untie(model, REGISTRY)
    assert [list(inputs_of(model)[node]) for node in "abcd"] == [
        ["x", "ln1.bias.1"],
        ["a", "ln2.bias"],
        ["b", "tied.w"],
        ["c", "w"],
    ]
    # A tensor that is also an output stays; a tensor of different elements is tied on purpose.
    assert set(model.graph.initializers) == {"ln1.bias", "ln1.bias.1", "ln2.bias", "w"}
    assert "'ln2.bias' at 'b'" in notice
    trained = {p.name for p in select(read_parameters(model).model, REGISTRY).trained}
    assert trained == {"ln1.bias", "ln1.bias.1", "ln2.bias", "w"}


def test_copies_take_no_name_that_is_there() -> None:
    model = read(
        """g (float[n, 4] x) => (float[n, 4] "z.2") <float[4] z>
        { "z.1" = Add(x, z)  a = Add("z.1", z)  "z.2" = Add(a, z) }""",
        z=[0.0] * 4,
    )
    untie(model, REGISTRY)
    assert list(model.graph.initializers) == ["z", "z.3", "z.4"]


def test_a_long_notice_is_shortened() -> None:
    adds = " ".join(f"[n{i}] v{i + 1} = Add(v{i}, z)" for i in range(12))
    model = read(f"g (float[n, 4] v0) => (float[n, 4] v12) <float[4] z> {{ {adds} }}", z=[1.0] * 4)
    (notice,) = untie(model, REGISTRY)
    assert notice.endswith("'z.7' at 'n7' and 4 more")
