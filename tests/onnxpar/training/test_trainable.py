"""What is trained and why the rest is not; exporters' merged tensors are untied."""

import warnings
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import ArrayLike

from onnxpar.errors import ModelError
from onnxpar.passes.load import load, normalise
from onnxpar.training.trainable import Counts, select, untie

HEAD = '<ir_version: 10, opset_import: ["": 18]>\n'

MODEL = """g (float[n, 4] x, int64[n] ids) => (float[n, 4] y)
<float[3, 4] table, float[4, 4] w1, float[4] b1, float[4, 4] w2, float[1] one, float epsilon,
 int64[2] numbers, float[4] ln, float[0] empty>
{
  [look] e = Gather(table, ids)
  [add] a = Add(x, e)
  [fc1] h = Gemm(a, w1, b1)
  [eps] i = Add(h, epsilon)
  [fc2] j = MatMul(i, w2)
  [shift] k = Add(j, one)
  [fc3] l = MatMul(k, w1)
  [factor] f = Constant<value = float[4] {1, 2, 3, 4}>()
  [scale] m = Mul(l, f)
  [shape] o = Reshape(m, numbers)
  [pad] p = Concat<axis = 0>(empty, ln)
  [norm] y = LayerNormalization(o, p)
}"""


def read(text: str, **contents: ArrayLike) -> tuple[ir.Model, frozenset[str]]:
    """The normalised model and the names of its file's initializers.

    What the text declares between `<` and `>` is an initializer, drawn where it is not given.
    """
    proto = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    for info in proto.graph.value_info:
        kind = info.type.tensor_type
        data = contents.get(info.name, rng.standard_normal([d.dim_value for d in kind.shape.dim]))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        tensor = onnx.numpy_helper.from_array(np.asarray(data).astype(dtype), info.name)
        proto.graph.initializer.append(tensor)
    del proto.graph.value_info[:]
    originals = frozenset(tensor.name for tensor in proto.graph.initializer)
    return normalise(ir.serde.deserialize_model(proto)), originals


def sample() -> tuple[ir.Model, frozenset[str]]:
    return read(MODEL, numbers=[-1, 4])


def test_everything_floating_is_trained_and_the_rest_has_its_reason() -> None:
    selection = select(*sample())
    told = {t.name: (t.elements, t.reason, t.used_by) for t in selection.tensors}
    assert told == {
        "table": (12, "", ("look",)),
        "w1": (16, "", ("fc1", "fc3")),
        "b1": (4, "", ("fc1",)),
        "w2": (16, "", ("fc2",)),
        "one": (1, "", ("shift",)),
        "epsilon": (1, "one element", ("eps",)),
        "ln": (4, "", ("pad",)),
        "empty": (0, "no element", ("pad",)),
    }
    assert [p.name for p in selection.trained] == ["table", "w1", "b1", "w2", "one", "ln"]
    assert {p.name: p.shape for p in selection.trained}["table"] == (3, 4)
    assert [p.name for p in selection.trained if p.decay] == ["table", "w1", "w2"]
    assert selection.counts({}) == Counts(53, 54, 6, 8)
    assert [t.name for t in selection.shared({})] == ["w1"]


@pytest.mark.parametrize(
    ("trainable", "freeze", "trained"),
    [
        (["w*"], [], ["w1", "w2"]),
        ([], ["w*", "table"], ["b1", "one", "ln"]),
        (["w*"], ["w1"], ["w2"]),
        (["eps*", "b1"], [], ["b1", "epsilon"]),
        (["*"], ["?n*"], ["table", "w1", "b1", "w2", "epsilon"]),
    ],
)
def test_patterns(trainable: list[str], freeze: list[str], trained: list[str]) -> None:
    selection = select(*sample(), trainable, freeze)
    assert [p.name for p in selection.trained] == trained
    reasons = {t.name: t.reason for t in selection.tensors if not t.trained}
    allowed = {"frozen", "not chosen", "no element", "one element"}
    assert set(reasons.values()) <= allowed
    assert (reasons.get("w1") == "frozen") == ("w1" in freeze or "w*" in freeze)


def test_decay_groups() -> None:
    selection = select(*sample(), decay=["b1"], no_decay=["table"])
    assert [p.name for p in selection.trained if p.decay] == ["w1", "b1", "w2"]
    with pytest.raises(ModelError, match="'w1': both --decay and --no-decay match"):
        select(*sample(), decay=["w1"], no_decay=["w*"])


@pytest.mark.parametrize(
    ("option", "pattern", "message"),
    [
        ("trainable", "w3", r"--trainable 'w3': .*; nearest: 'w2', 'w1'"),
        ("freeze", "*.bias", r"--freeze '\*.bias'"),
        ("decay", "numbers", "--decay 'numbers': expected the name or a pattern of a floating"),
        ("no_decay", "f", "--no-decay 'f'"),
    ],
)
def test_patterns_that_match_nothing(option: str, pattern: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        select(*sample(), **{option: [pattern]})


def test_what_the_loss_does_not_reach_is_told() -> None:
    selection = select(*sample(), freeze=["b1"])
    unreached = {"table": "behind ArgMax"}
    entries = {entry["name"]: entry for entry in selection.entries(unreached)}
    assert entries["table"] == {
        "name": "table",
        "elements": 12,
        "trained": False,
        "reason": "behind ArgMax",
        "used_by": ["look"],
    }
    assert entries["b1"]["reason"] == "frozen"
    assert selection.counts(unreached) == Counts(37, 54, 4, 8)


def test_running_statistics_are_not_trained() -> None:
    normal = read(
        """g (float[n, 2, 3] x) => (float[n, 2, 3] y)
        <float[2] scale, float[2] bias, float[2] mean, float[2] var>
        { y = BatchNormalization(x, scale, bias, mean, var) }"""
    )
    told = {t.name: t.reason for t in select(*normal).tensors}
    reason = "running statistic"
    assert told == {"scale": "", "bias": "", "mean": reason, "var": reason}


def test_who_asks_for_the_size_of_a_parameter_does_not_share_it() -> None:
    """As `torch.onnx.export` writes the bias that a convolution does not have."""
    sized = read(
        """g (float[n, 4] x) => (float[n, 4] y, int64[1] z)
        <float[4, 4] w>
        { [size] z = Shape<start = 0, end = 1>(w) [fc] y = MatMul(x, w) }"""
    )
    selection = select(*sized)
    assert [t.used_by for t in selection.tensors] == [("fc",)]
    assert not selection.shared({})


# -- untying -------------------------------------------------------------------------------------

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
    """Of fresh layers, the zeros of bias and running mean are one tensor, and so are the ones."""
    model, _ = read(
        """g (float[n, 2, 3] x) => (float[n, 2, 3] y)
        <float[2] ones, float[2] zeros>
        {
          [bn1] h = BatchNormalization(x, ones, zeros, zeros, ones)
          [bn2] y = BatchNormalization(h, ones, zeros, zeros, ones)
        }""",
        ones=[1.0] * 2,
        zeros=[0.0] * 2,
    )
    notices = untie(model)
    assert [n.split("'")[1] for n in notices] == ["ones", "zeros"]
    first, second = inputs_of(model).values()
    names = [n for n in (*first, *second) if n not in ("x", "h")]
    assert len(set(names)) == 8
    assert {n.split(".")[0] for n in names} == {"ones", "zeros"}


def test_a_statistic_of_one_channel_gets_its_own() -> None:
    model, _ = read(
        """g (float[n, 1, 3] x) => (float[n, 1, 3] y)
        <float[1] s, float[1] b, float[1] mean, float[1] var>
        {
          [bn1] h = BatchNormalization(x, s, b, mean, var)
          [bn2] y = BatchNormalization(h, s, b, mean, var)
        }"""
    )
    untie(model)
    assert inputs_of(model)["bn2"] == ["h", "s", "b", "mean.1", "var.1"]


def test_each_scale_and_bias_gets_its_own() -> None:
    model, originals = read(MERGED, **CONSTANTS)
    notices = untie(model)
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
    selection = select(model, originals)
    # Copies count as tensors of the file, and nothing is shared but the weight, which is no bias.
    assert {p.name for p in selection.trained} == set(model.graph.initializers)
    assert [t.name for t in selection.shared({})] == ["w"]
    assert untie(model) == ()


def test_an_untied_model_computes_the_same() -> None:
    model, _ = read(MERGED, **CONSTANTS)
    x = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)}
    results = []
    for _ in range(2):
        data = ir.serde.serialize_model(model).SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        results.append(session.run(None, x)[0])
        untie(model)
    assert "ones.1" in model.graph.initializers
    assert (results[0] == results[1]).all()


def test_what_was_not_merged_stays() -> None:
    # Different elements: shared on purpose. One use: shared with nobody. A matrix of zeros that two
    # products read: tied, and no bias.
    model, _ = read(
        """g (float[n, 4] x) => (float[n, 4] y) <float[4] bias, float[4] once, float[4, 4] w>
        {
          a = Add(x, bias)  b = Add(a, bias)  c = Add(b, once)
          d = MatMul(c, w)  y = MatMul(d, w)
        }""",
        once=[0.0] * 4,
        w=np.zeros((4, 4)),
    )
    before = inputs_of(model)
    assert untie(model) == ()
    assert inputs_of(model) == before


def test_a_state_that_equals_a_bias_keeps_its_tensor() -> None:
    model, _ = read(
        """g (float[n, 4] x) => (float[n, 4] y) <float[4] zeros, float[4, 4] w>
        { [state] a = Max(x, zeros)  [fc] b = MatMul(a, w)  [bias] y = Add(b, zeros) }""",
        zeros=[0.0] * 4,
    )
    (notice,) = untie(model)
    assert inputs_of(model)["state"] == ["x", "zeros"]
    assert inputs_of(model)["bias"] == ["b", "zeros.1"]
    assert "'zeros.1' at 'bias'" in notice


def test_an_identity_in_the_place_of_a_tensor_gives_its_name_back() -> None:
    # The exporter that traces writes merged tensors so.
    model, originals = read(
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
    (notice,) = untie(model)
    assert [list(inputs_of(model)[node]) for node in "abcd"] == [
        ["x", "ln1.bias.1"],
        ["a", "ln2.bias"],
        ["b", "tied.w"],
        ["c", "w"],
    ]
    # What is told to be an output stays; a tensor of different elements is tied on purpose.
    assert set(model.graph.initializers) == {"ln1.bias", "ln1.bias.1", "ln2.bias", "w"}
    assert "'ln2.bias' at 'b'" in notice
    assert {p.name for p in select(model, originals).trained} == set(model.graph.initializers)


def test_copies_take_no_name_that_is_there() -> None:
    model, _ = read(
        """g (float[n, 4] x) => (float[n, 4] "z.2") <float[4] z>
        { "z.1" = Add(x, z)  a = Add("z.1", z)  "z.2" = Add(a, z) }""",
        z=[0.0] * 4,
    )
    untie(model)
    assert list(model.graph.initializers) == ["z", "z.3", "z.4"]


def test_a_long_notice_is_cut() -> None:
    adds = " ".join(f"[n{i}] v{i + 1} = Add(v{i}, z)" for i in range(12))
    model, _ = read(
        f"g (float[n, 4] v0) => (float[n, 4] v12) <float[4] z> {{ {adds} }}", z=[1.0] * 4
    )
    (notice,) = untie(model)
    assert notice.endswith("'z.7' at 'n7' and 4 more")


@pytest.mark.parametrize("traced", [False, True])
def test_pytorchs_exports_train_as_much_as_pytorch(traced: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    nn = torch.nn
    module = nn.Sequential(
        nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)
    )
    nn.init.zeros_(module[2].bias)
    path = tmp_path / "model.onnx"
    example = torch.zeros(2, 3, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (example,), path, dynamo=not traced, verbose=False)
    model = load(path)
    originals = frozenset(model.graph.initializers)
    model = normalise(model)
    assert len(untie(model)) == 2
    selection = select(model, originals)
    parameters = list(module.parameters())
    counts = selection.counts({})
    assert counts.trained == sum(p.numel() for p in parameters)
    assert counts.trained_tensors == len(parameters)
    assert not selection.shared({})
    assert sum(not p.decay for p in selection.trained) == sum(p.ndim < 2 for p in parameters)


def test_buffers_of_pytorch_are_trained_only_by_name() -> None:
    model, originals = sample()
    kind = "pkg.torch.export.graph_signature.InputSpec.kind"
    model.graph.initializers["w1"].metadata_props[kind] = "PARAMETER"
    model.graph.initializers["w2"].metadata_props[kind] = "BUFFER"
    reasons = {t.name: t.reason for t in select(model, originals).tensors}
    assert reasons["w2"] == "buffer of the module"
    assert not reasons["w1"] and not reasons["table"]
    named = select(model, originals, trainable=["w*"])
    assert {p.name for p in named.trained} == {"w1", "w2"}
