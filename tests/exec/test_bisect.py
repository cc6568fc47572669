"""`verify --bisect` names the node, the rank and the element where a difference begins.

Faults are planted in the graphs of a directory, or in the sharding rule of an operator, 20 in all.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from onnx import helper, numpy_helper

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.cli import main
from onnxpar.ops.table import REGISTRY
from tests.changed_graphs import Change, changed
from tests.training_cases import shard

CASE = {"batch": 3, "seq": 5}
SUMS = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 6] x) => (float[batch, 6] y, float[6] s, float[6] m)
<int64[1] axis = {0}>
{
    [exp] e = Exp(x)
    [total] s = ReduceSum<keepdims = 0>(e, axis)
    [mean] m = ReduceMean<keepdims = 0>(e, axis)
    [shift] y = Sub(e, s)
}
"""
ROWS = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 6] x) => (float[batch, 6] y) {
    [before] a = Tanh(x)
    [row] b = OPERATOR<axis = 1>(a)
    [after] y = Neg(b)
}
"""


def gpt() -> ir.Model:
    return transformer.build(layers=2, d_model=16, heads=2, vocab=32)


def shard_both(folder: Path, strategy: str) -> Path:
    """Shards m.onnx of a folder; its directory for one device lies beside it."""
    shard_model(folder / "m.onnx", strategy, folder / "ranks")
    shard_model(folder / "m.onnx", "replicate", folder / "one", devices=1)
    return folder / "ranks"


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer on 4 ranks."""
    folder = tmp_path_factory.mktemp("forward")
    ir.save(gpt(), folder / "m.onnx")
    return shard_both(folder, "dp=2,tp=2")


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums over a batch that the ranks pad."""
    folder = tmp_path_factory.mktemp("sums")
    onnx.save(onnx.parser.parse_model(SUMS), folder / "m.onnx")
    return shard_both(folder, "dp=2")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training of a transformer."""
    folder = tmp_path_factory.mktemp("training")
    shard(folder / "ranks", gpt(), "dp=2,tp=2")
    shard(folder / "one", gpt(), "replicate", devices=1)
    return folder / "ranks"


def behind(value: str, op_type: str, factor: str, more: Sequence[onnx.NodeProto] = ()) -> Change:
    """Returns a change that applies an operator to a value before anybody reads it."""

    def change(graph: onnx.GraphProto) -> None:
        (place,) = [i for i, n in enumerate(graph.node) if value in n.output]
        node = graph.node[place]
        node.output[list(node.output).index(value)] = "raw"
        graph.initializer.append(numpy_helper.from_array(np.float32(1.5), "planted"))
        graph.node.insert(place + 1, helper.make_node(op_type, ["raw", factor], [value]))
        for node in more:
            graph.node.insert(place + 1, node)

    return change


def scaled(value: str) -> Change:
    return behind(value, "Mul", "planted")


def noisy(value: str) -> Change:
    """Returns a change that makes a kernel of a value give other bits in each run."""
    return behind(value, "Add", "noise", [helper.make_node("RandomNormalLike", ["raw"], ["noise"])])


def misgrouped(number: int) -> Change:
    """Returns a change of the groups of a reduction: {0, 1} {2, 3} and {0, 2} {1, 3} change."""

    def change(graph: onnx.GraphProto) -> None:
        node = _reductions(graph)[number]
        (group,) = [a for a in node.attribute if a.name == "group"]
        own = int(next(n for n in graph.node if n.name == "own.rank").attribute[0].i)
        over_tp = [0, 1] if own in (0, 1) else [2, 3]
        over_dp = [0, 2] if own in (0, 2) else [1, 3]
        group.ints[:] = over_dp if list(group.ints) == over_tp else over_tp

    return change


def bypassed(number: int) -> Change:
    """Returns a change that lets readers of a reduction read what it reduces."""

    def change(graph: onnx.GraphProto) -> None:
        found = _reductions(graph)[number]
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name == found.output[0]:
                    node.input[index] = found.input[0]

    return change


def unmasked(scope: str) -> Change:
    """Returns a change that leaves padding in the operands of a node."""

    def change(graph: onnx.GraphProto) -> None:
        masks = [n for n in graph.node if n.op_type == "Where" and n.name.startswith(scope)]
        assert masks
        for mask in masks:
            for node in graph.node:
                for index, name in enumerate(node.input):
                    if name == mask.output[0]:
                        node.input[index] = mask.input[1]

    return change


def with_attribute(op_type: str, name: str, value: float | int) -> Change:
    """Returns a change of an attribute of the last node of an operator."""

    def change(graph: onnx.GraphProto) -> None:
        node = [n for n in graph.node if n.op_type == op_type][-1]
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def _reductions(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.op_type == "AllReduce"]


Q = "/layer0/attn/q_proj/MatMul"
FORWARD: list[tuple[str, Change, Sequence[int], str]] = [
    # What is planted, on which ranks (none: on all), and the node to be found.
    ("scaled, heads", scaled(f"{Q}_output_0"), [1], Q),
    ("scaled, columns", scaled("/layer1/mlp/Gelu_output_0"), [2], "/layer1/mlp/Gelu"),
    ("scaled, partial", scaled("/layer0/mlp/fc2/MatMul_output_0"), [3], "/layer0/mlp/fc2/MatMul"),
    ("noise, heads", noisy("/layer0/attn/Softmax_output_0"), [0], "/layer0/attn/Softmax"),
    ("noise, replicated", noisy("/layer1/residual1/Add_output_0"), [3], "/layer1/residual1/Add"),
    ("attribute, all", with_attribute("Softmax", "axis", 2), [], "/layer1/attn/Softmax"),
    ("attribute, one", with_attribute("LayerNormalization", "epsilon", 0.5), [1],
     "/ln_f/LayerNormalization"),
    ("not reduced, 1", bypassed(1), [], "/layer0/attn/out_proj/Add"),
    ("not reduced, 2", bypassed(4), [], "/layer1/mlp/fc2/Add"),
]  # fmt: skip


def found_in(directory: Path, sharded: Path) -> Any:
    found = runtime.first_difference(directory, sharded.parent / "one", CASE)
    assert found.first is not None
    return found


@pytest.mark.parametrize(("what", "change", "ranks", "node"), FORWARD, ids=lambda v: str(v)[:24])
def test_faults_of_a_forward_program(
    forward: Path, tmp_path: Path, what: str, change: Change, ranks: Sequence[int], node: str
) -> None:
    found = found_in(changed(forward, tmp_path / "a", "model", change, ranks), forward)
    first = found.first
    assert (first.node, first.collective) == (node, "")
    assert first.rule and first.difference.amount > 100 * first.bound
    assert first.repeats == (not what.startswith("noise"))
    for rank in ranks:
        assert rank in first.wrong_ranks
    if len(ranks) == 1 and "partial" not in what:
        assert first.wrong_ranks == tuple(ranks)
    if what.startswith("scaled"):
        at = first.difference
        assert at.got == pytest.approx(1.5 * at.expected, rel=1e-4) or "partial" in what
        assert len(at.index) == 3


@pytest.mark.parametrize("number", [0, 2, 4])
def test_wrong_groups(forward: Path, tmp_path: Path, number: int) -> None:
    directory = _each_rank(forward, tmp_path, "model", misgrouped(number))
    graph = onnx.load(forward / "rank0000.model.onnx", load_external_data=False).graph
    first = found_in(directory, forward).first
    assert first.collective == _reductions(graph)[number].name
    assert (first.op_type, first.group) == ("AllReduce", "tp")


@pytest.mark.parametrize("node", ["total", "mean"])
def test_padding_that_is_left_in(sums: Path, tmp_path: Path, node: str) -> None:
    directory = changed(sums, tmp_path / "a", "model", unmasked(f"{node}/"))
    found = runtime.first_difference(directory, sums.parent / "one", {"batch": 3})
    assert found.first is not None and found.first.node == node
    # The padded row of zeros adds exp(0) to the sum over three rows, which all ranks have.
    assert found.first.difference.amount == pytest.approx(1 if node == "total" else 1 / 3, rel=1e-4)
    assert found.first.wrong_ranks == (0, 1)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_wrong_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """A rule that takes every dim as parallel, as that of an elementwise operator does."""
    relu = REGISTRY.find("", "Relu", 21)
    (definition, *others) = REGISTRY._index["", operator]
    assert relu is not None
    wrong = replace(definition, rule=relu.rule, local=relu.local)
    monkeypatch.setitem(REGISTRY._index, ("", operator), [wrong, *others])
    onnx.save(onnx.parser.parse_model(ROWS.replace("OPERATOR", operator)), tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text("mesh: {tp: 2}\nnodes: {row: {in: [[~, tp]]}}\n")
    shard_model(tmp_path / "m.onnx", tmp_path / "s.yaml", tmp_path / "out")
    found = runtime.first_difference(tmp_path / "out", tmp_path / "m.onnx", {"batch": 4})
    assert found.first is not None and found.first.node == "row"
    assert found.first.wrong_ranks == (0, 1)
    assert found.agree >= 1


# One node computes the gradient of an attention, under the name of its last product.
BACKWARD = "/layer1/attn/values/MatMul/grad/FusedMatMul.1"
PRODUCT = "/layer0/mlp/fc1/MatMul/grad/FusedMatMul"


@pytest.mark.parametrize(
    ("change", "ranks", "node"),
    [
        (scaled(f"{BACKWARD}.out"), [2], BACKWARD),
        (noisy(f"{PRODUCT}.out"), [1], PRODUCT),
        pytest.param(scaled("/layer1/ln2/LayerNormalization_output_0"), [0],
                     "/layer1/ln2/LayerNormalization", marks=pytest.mark.full),
    ],
    ids=["backward", "noise", "forward"],
)  # fmt: skip
def test_faults_of_a_training(
    training: Path, tmp_path: Path, change: Change, ranks: Sequence[int], node: str
) -> None:
    directory = changed(training, tmp_path / "a", "training_model", change, ranks)
    found = found_in(directory, training)
    assert (found.program, found.first.node) == ("training_model", node)
    assert set(ranks) <= set(found.first.wrong_ranks)


def test_a_wrong_group_in_the_backward_pass(training: Path, tmp_path: Path) -> None:
    graph = onnx.load(training / "rank0000.training_model.onnx", load_external_data=False).graph
    names = [n.name for n in _reductions(graph)]
    number = next(i for i, name in enumerate(names) if "/grad/" in name and "layer0" in name)
    directory = _each_rank(training, tmp_path, "training_model", misgrouped(number))
    assert found_in(directory, training).first.collective == names[number]


def test_nothing_is_wrong(training: Path, forward: Path) -> None:
    """Differences that rounding explains are not faults: the bias of keys has no gradient."""
    for directory in (training, forward):
        found = runtime.first_difference(directory, directory.parent / "one", CASE)
        assert found.first is None and found.agree > 70
    pipeline = training.parent / "stages"
    shard(pipeline, gpt(), "pp=2,dp=2")
    found = runtime.first_difference(pipeline, training.parent / "one", CASE)
    assert found.first is None and found.agree > 190


def test_the_command(forward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = changed(forward, tmp_path / "a", "model", scaled(f"{Q}_output_0"), [1])
    model = ["--model", str(forward.parent / "m.onnx"), "--symbol", "batch=3,seq=5"]
    command = ["verify", str(wrong), *model, "--bisect"]
    out = str(tmp_path / "values.npz")
    assert main([*command, "--dump", out, "--node", "/layer0/attn/q_proj/*"]) == 1
    shown = capsys.readouterr().out
    assert f"first wrong   {Q} (MatMul)\n" in shown
    assert "on rank 1\n" in shown and "rule          " in shown
    assert "element       [" in shown and "rounding explains" in shown
    with np.load(out) as arrays:
        assert sorted(arrays) == [
            f"{side}/{Q.replace('MatMul', name)}_output_0"
            for side in ("ranks", "undivided") for name in ("Add", "MatMul")
        ]  # fmt: skip
        got, expected = arrays[f"ranks/{Q}_output_0"], arrays[f"undivided/{Q}_output_0"]
        assert got.shape == expected.shape == (3, 5, 16)
        # Rank 1 has the second half of the columns of the first two samples.
        np.testing.assert_allclose(got[:2, :, 8:], 1.5 * expected[:2, :, 8:], rtol=1e-4)
        np.testing.assert_allclose(got[:2, :, :8], expected[:2, :, :8], rtol=1e-4)
    assert main([*command, "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["bisect"]["first"]
    assert first["node"] == Q and first["wrong_ranks"] == [1]
    assert main(["verify", str(forward), *model, "--bisect", "--json"]) == 0
    assert "bisect" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node", "*"], "--node: expected --dump FILE as well, got none"),
        (["--bisect", "--generate", "3"], "--bisect: expected no --generate"),
        (["--dump", "v.npz", "--node", "nobody"], "--node nobody: matches no node"),
    ],
)
def test_users_mistakes(
    forward: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(forward.parent / "m.onnx"), "--symbol", "batch=3,seq=5"]
    assert main(["verify", str(forward), *model, *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def _each_rank(sharded: Path, folder: Path, program: str, change: Change) -> Path:
    """Changes the graphs of all ranks; the change finds the rank in a node that is then removed."""
    path = sharded
    for rank in range(4):

        def of_rank(graph: onnx.GraphProto, rank: int = rank) -> None:
            graph.node.append(
                helper.make_node("Constant", [], ["own.rank"], name="own.rank", value_int=rank)
            )
            change(graph)
            del graph.node[-1]

        path = changed(path, folder / f"of{rank}", program, of_rank, [rank])
    return path
