"""What is trained, by which rule, and why the rest is not."""

import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from onnxpar.core.errors import ModelError
from onnxpar.frontend.load import load
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.recognise import read_parameters
from onnxpar.parameters.trainable import Counts, Selection, select
from onnxpar_format.manifest import TrainingTensor
from tests.onnxpar.parameters.declared import read

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


def chosen(model: ir.Model, *args: Any, **options: Any) -> Selection:
    return select(read_parameters(model).model, REGISTRY, *args, **options)


def sample() -> ir.Model:
    return read(MODEL, numbers=[-1, 4])


def test_parameters_are_trained_and_the_rest_has_its_reason() -> None:
    selection = chosen(sample())
    tensors = {t.name: (t.elements, t.reason, t.rule, t.used_by) for t in selection.tensors}
    name, doubt = "it has the name of a parameter", selection.doubtful["ln"]
    assert tensors == {
        "table": (12, "", "it is the weight of node 'look'", ("look",)),
        "w1": (16, "", name, ("fc1", "fc3")),
        "b1": (4, "", name, ("fc1",)),
        "w2": (16, "", name, ("fc2",)),
        "one": (1, "", "it is the scale or bias of node 'shift'", ("shift",)),
        "epsilon": (1, "constant", "one element", ("eps",)),
        "ln": (4, "", doubt, ("pad",)),
        "empty": (0, "no element", "it is empty", ("pad",)),
    }
    assert doubt == "neither its name nor its use, at 'pad' (Concat), shows what it is"
    assert [p.name for p in selection.trained] == ["table", "w1", "b1", "w2", "one", "ln"]
    assert {p.name: p.shape for p in selection.trained}["table"] == (3, 4)
    assert [p.name for p in selection.trained if p.decay] == ["table", "w1", "w2"]
    # Constants are no parameters.
    assert selection.counts({}) == Counts(53, 53, 6, 6)
    assert [t.name for t in selection.shared({})] == ["w1"]


@pytest.mark.parametrize(
    ("trainable", "freeze", "trained"),
    [
        (["w*"], [], ["table", "w1", "b1", "w2", "one", "ln"]),
        ([], ["w*", "table"], ["b1", "one", "ln"]),
        (["w*"], ["*"], ["w1", "w2"]),
        (["eps*"], ["b1"], ["table", "w1", "w2", "one", "epsilon", "ln"]),
        (["*"], ["?n*"], ["table", "w1", "b1", "w2", "one", "epsilon", "ln"]),
    ],
)
def test_patterns(trainable: list[str], freeze: list[str], trained: list[str]) -> None:
    selection = chosen(sample(), trainable, freeze)
    assert [p.name for p in selection.trained] == trained
    reasons = {t.name: t.reason for t in selection.tensors if not t.trained}
    assert set(reasons.values()) <= {"frozen", "constant", "no element"}
    named = {t.name for t in selection.tensors if t.rule == "--trainable names it"}
    assert named <= set(trained) and bool(named) == bool(trainable)


def test_what_is_in_doubt_is_asked_for() -> None:
    selection = chosen(sample())
    selection.ask(["w1", "one"])
    with pytest.raises(ModelError, match=r"(?s)--trainable NAME .*ln \[4\]: neither"):
        selection.ask(["w1", "ln"])
    for options in ({"trainable": ["ln"]}, {"freeze": ["ln"]}):
        assert not chosen(sample(), **options).doubtful


@pytest.mark.parametrize(
    ("name", "text", "role"),
    [
        ("slopes", "y = Mul(x, slopes)", "doubtful"),
        ("mean", "y = Sub(x, mean)", "doubtful"),
        ("scale.weight", "y = Mul(x, 'scale.weight')", "parameter"),
        ("LayerNorm_0/scale", "y = Mul(x, 'LayerNorm_0/scale')", "parameter"),
        ("l0_norm1_scale", "y = Mul(x, l0_norm1_scale)", "parameter"),
        ("scale", "y = Mul(x, scale)", "doubtful"),
        ("onnx::MatMul_12", "y = MatMul(x, 'onnx::MatMul_12')", "parameter"),
        ("onnx::Mul_12", "y = Mul(x, 'onnx::Mul_12')", "doubtful"),
        ("dense/kernel/Read/ReadVariableOp:0", "y = Mul(x, 'dense/kernel/Read/ReadVariableOp:0')",
         "parameter"),
        ("linear_0.w_0", "t = Transpose('linear_0.w_0') y = MatMul(x, t)", "parameter"),
        ("h", "t = Transpose(h) y = MatMul(x, t)", "parameter"),
        ("logit_scale", "y = Mul(x, logit_scale)", "doubtful"),
        ("eps", "y = Add(x, eps)", "constant"),
    ],
)  # fmt: skip
def test_names_and_places_tell(name: str, text: str, role: str) -> None:
    shape = {"logit_scale": "", "eps": "", "slopes": "[4]", "mean": "[4]"}.get(name, "[4, 4]")
    quoted = text.replace("'", '"')
    model = read(f'g (float[4, 4] x) => (float[4, 4] y) <float{shape} "{name}"> {{ {quoted} }}')
    selection = chosen(model)
    (tensor,) = selection.tensors
    found = "doubtful" if tensor.name in selection.doubtful else "parameter"
    assert (found if tensor.trained else tensor.reason) == role


def test_ones_of_group_norms_are_constants() -> None:
    """As the exporter that traces writes nn.GroupNorm."""
    norm = """g (float[n, 2, 6] x) => (float[n, 2, 6] y)
        <float[2] "onnx::InstanceNormalization_5", float[2] "onnx::InstanceNormalization_6">
        { y = InstanceNormalization(x, "onnx::InstanceNormalization_5",
                                    "onnx::InstanceNormalization_6") }"""
    names = ["onnx::InstanceNormalization_5", "onnx::InstanceNormalization_6"]
    selection = chosen(read(norm, **dict(zip(names, ([1.0] * 2, [0.0] * 2), strict=True))))
    assert [(t.trained, t.rule) for t in selection.tensors] == [
        (False, "exporters use it to express a group norm")
    ] * 2
    assert {t.trained for t in chosen(read(norm)).tensors} == {True}


def test_decay_groups() -> None:
    selection = chosen(sample(), decay=["b1"], no_decay=["table"])
    assert [p.name for p in selection.trained if p.decay] == ["w1", "b1", "w2"]
    with pytest.raises(ModelError, match="'w1': both --decay and --no-decay match"):
        chosen(sample(), decay=["w1"], no_decay=["w*"])


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
        chosen(sample(), **{option: [pattern]})


def test_what_the_loss_does_not_reach_is_reported() -> None:
    selection = chosen(sample(), freeze=["b1"])
    unreached = {"table": "behind ArgMax"}
    entries = {entry.name: entry for entry in selection.outcome(unreached)}
    assert entries["table"] == TrainingTensor(
        name="table",
        elements=12,
        trained=False,
        parameter=True,
        reason="behind ArgMax",
        rule="it is the weight of node 'look'",
        used_by=("look",),
    )
    assert entries["b1"].reason == "frozen"
    assert selection.counts(unreached) == Counts(37, 53, 4, 6)


def test_running_statistics_are_not_trained() -> None:
    normal = read(
        """g (float[n, 2, 3] x) => (float[n, 2, 3] y)
        <float[2] scale, float[2] bias, float[2] mean, float[2] var>
        { y = BatchNormalization(x, scale, bias, mean, var) }"""
    )
    reasons = {t.name: t.reason for t in chosen(normal).tensors}
    reason = "running statistic"
    assert reasons == {"scale": "", "bias": "", "mean": reason, "var": reason}


def test_who_asks_for_the_size_of_a_parameter_does_not_share_it() -> None:
    """As `torch.onnx.export` writes the bias that a convolution does not have."""
    sized = read(
        """g (float[n, 4] x) => (float[n, 4] y, int64[1] z)
        <float[4, 4] w>
        { [size] z = Shape<start = 0, end = 1>(w) [fc] y = MatMul(x, w) }"""
    )
    selection = chosen(sized)
    assert [t.used_by for t in selection.tensors] == [("fc",)]
    assert not selection.shared({})


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("optimize", [False, True])
def test_pytorchs_exports_train_as_much_as_pytorch(
    traced: bool, optimize: bool, tmp_path: Path
) -> None:
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
        kind = {"dynamo": False} if traced else {"dynamo": True, "optimize": optimize}
        torch.onnx.export(module, (example,), path, verbose=False, **kind)
    selection = chosen(load(path))
    parameters = list(module.parameters())
    counts = selection.counts({})
    assert counts.trained == counts.elements == sum(p.numel() for p in parameters)
    assert counts.trained_tensors == len(parameters)
    assert not selection.shared({}) and not selection.doubtful
    assert sum(not p.decay for p in selection.trained) == sum(p.ndim < 2 for p in parameters)
