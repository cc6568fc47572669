"""`verify` of training: what it tells, and that it finds mistakes put in on purpose."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import two_layer
from onnx import helper, numpy_helper

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import main
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.cases import default_cases
from onnxpar_runtime.verify.findings import TrainingCase, greatest
from onnxpar_runtime.verify.training_batches import RandomBatches
from tests import training_cases as cases
from tests.changed_graphs import changed
from tests.training_cases import shard

CASE = ["--symbol", "batch=5"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers sharded over data and tensor ranks; the model lies beside them."""
    out = tmp_path_factory.mktemp("two") / "ranks"
    return shard(out, two_layer.build(), "dp=2,tp=2", loss="mse", optimizer="adamw")


def scaled(output: str, factor: float, dtype: type[np.generic] = np.float32) -> Callable[
    [onnx.GraphProto], None
]:  # fmt: skip
    """Returns a change that multiplies an output of the graph."""

    def change(graph: onnx.GraphProto) -> None:
        (node,) = [n for n in graph.node if output in n.output]
        node.output[list(node.output).index(output)] = "mutant"
        for other in graph.node:
            for index, name in enumerate(other.input):
                # What works in the memory of a state takes what is written there.
                if name == output and other.op_type not in ("Accumulate", "StartAhead"):
                    other.input[index] = "mutant"
        graph.initializer.append(numpy_helper.from_array(dtype(factor), "mutant.factor"))
        place = list(graph.node).index(node) + 1
        graph.node.insert(place, helper.make_node("Mul", ["mutant", "mutant.factor"], [output]))

    return change


def replaced(op_type: str, by: str) -> Callable[[onnx.GraphProto], None]:
    """Returns a change that makes the nodes of one operator of ONNX nodes of another."""

    def change(graph: onnx.GraphProto) -> None:
        found = [node for node in graph.node if node.op_type == op_type]
        assert found
        for node in found:
            node.op_type = by

    return change


def unreduced(graph: onnx.GraphProto) -> None:
    """Leaves out the first reduction of a gradient."""
    index = next(i for i, n in enumerate(graph.node) if n.op_type == "Bucket")
    bucket = graph.node[index]
    alone = helper.make_node("Identity", [bucket.input.pop(1)], [bucket.output.pop(1)])
    graph.node.insert(index, alone)


def not_added(graph: onnx.GraphProto) -> None:
    """Leaves a gradient out of those that are added up over micro-batches."""
    gradient = "onnxpar.grad.matmul1.weight"
    (node,) = [n for n in graph.node if n.op_type == "Accumulate" and gradient in n.input]
    before, pairs = node.input[:2], node.input[2:]
    half = len(pairs) // 2
    kept = [index for index in range(half) if pairs[index] != gradient]
    node.input[:] = [*before, *(pairs[i] for i in kept), *(pairs[half + i] for i in kept)]


def not_ahead(graph: onnx.GraphProto) -> None:
    """Leaves out the nodes that start reductions before the optimizer."""
    gone = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "StartAhead"}
    kept = [node for node in graph.node if node.op_type != "StartAhead"]
    for node in kept:
        node.input[:] = [gone.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(kept)


def problems(directory: Path, sharded: Path, steps: int = 2) -> list[str]:
    (case,) = runtime.verify(
        directory,
        sharded.with_suffix(".onnx"),
        cases=["batch=5"],
        options=runtime.VerifyOptions(steps=steps),
    )
    assert isinstance(case, TrainingCase) and case.ok == (not case.problems)
    return list(case.problems)


def test_holds(sharded: Path) -> None:
    assert problems(sharded, sharded, 4) == []


def test_a_wrong_gradient(sharded: Path, tmp_path: Path) -> None:
    """One tenth of a thousandth too large on all ranks: AdamW hardly feels it."""
    change = scaled("onnxpar.grad.matmul1.weight", 1.0001)
    found = problems(changed(sharded, tmp_path / "a", "training_model", change), sharded)
    assert any("step 1: gradient of 'matmul1.weight': expected a difference" in p for p in found)
    assert not any("'matmul2.weight'" in p for p in found)


def test_a_wrong_loss(sharded: Path, tmp_path: Path) -> None:
    change = scaled("onnxpar.loss", 1.0001)
    found = problems(changed(sharded, tmp_path / "a", "training_model", change), sharded, 1)
    assert found and all(p.startswith("step 1") and ": expected loss " in p for p in found)
    found = problems(changed(sharded, tmp_path / "b", "eval_model", change), sharded, 1)
    (problem,) = found
    assert problem.startswith("evaluation: expected loss ")


def test_a_wrong_output_of_evaluation(sharded: Path, tmp_path: Path) -> None:
    change = scaled("y", 1.0001)
    found = problems(changed(sharded, tmp_path / "a", "eval_model", change), sharded, 1)
    assert [p for p in found if p.startswith("evaluation: output 'y': expected a difference")]


def test_a_wrong_count_of_correct_labels(tmp_path: Path) -> None:
    """One more than in the ranks' own logits; rounding of logits alone is no mistake."""

    def one_more(graph: onnx.GraphProto) -> None:
        (node,) = [n for n in graph.node if "onnxpar.correct" in n.output]
        node.output[list(node.output).index("onnxpar.correct")] = "mutant"
        graph.initializer.append(numpy_helper.from_array(np.int64(1), "mutant.one"))
        graph.node.append(helper.make_node("Add", ["mutant", "mutant.one"], ["onnxpar.correct"]))

    made = shard(tmp_path / "made", mlp.build(image=4, hidden=(6,)), "dp=2,tp=2")
    assert problems(made, made, 1) == []
    (problem,) = problems(changed(made, tmp_path / "a", "eval_model", one_more), made, 1)
    assert re.fullmatch(r"evaluation on rank 0: expected \d correct of 5, got \d of 5", problem)


def test_the_greatest_logit() -> None:
    logits = np.array([[1, 3, 3], [-np.inf, -np.inf, -np.inf], [5, np.nan, 7]], np.float16)
    np.testing.assert_array_equal(greatest(logits), [1, 0, -1])


def test_a_copy_of_a_parameter_that_differs(sharded: Path, tmp_path: Path) -> None:
    """Rank 3 alone, of whose parameters another rank has copies."""
    change = scaled("onnxpar.new.matmul2.weight", 1 + 1e-5)
    directory = changed(sharded, tmp_path / "a", "optimizer_model", change, [3])
    found = problems(directory, sharded, 1)
    assert found and all("parameter 'matmul2.weight' on rank 3: element [" in p for p in found)


def test_a_gradient_that_is_not_reduced(sharded: Path, tmp_path: Path) -> None:
    """Gradients are summed up where they are compared; what the optimizer makes of them is not."""
    alone = changed(sharded, tmp_path / "a", "training_model", not_ahead)
    found = problems(changed(alone, tmp_path / "b", "optimizer_model", unreduced), sharded, 1)
    assert any("AllReduce on rank 0: expected " in p for p in found)
    assert any(": parameter 'matmul" in p for p in found)
    assert any("expected a gradient norm of" in p for p in found)


def test_micro_batches_that_are_not_added(sharded: Path, tmp_path: Path) -> None:
    """Only the second step has two."""
    directory = changed(sharded, tmp_path / "a", "training_model", not_added)
    assert problems(directory, sharded, 1) == []
    found = problems(directory, sharded, 2)
    assert any(p.startswith("step 2: gradient of 'matmul1.weight'") for p in found)


def test_a_loss_that_is_no_number(sharded: Path, tmp_path: Path) -> None:
    change = scaled("onnxpar.loss", float("inf"))
    (problem,) = problems(changed(sharded, tmp_path / "a", "training_model", change), sharded)
    assert problem.startswith("step 1: expected loss ") and "the loss is inf" in problem


PICKS = """<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, seq] x, int64[batch, 3] at) => (float[batch, 4] y)
<float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
  a = GatherElements<axis: int = 1>(x, at)
  seven = Constant<value_ints = [7]>()
  b = Gather<axis: int = 1>(x, seven)
  s = Add(a, b)
  y = MatMul(s, w)
}"""


def test_integers_are_in_the_range_of_each_case(tmp_path: Path) -> None:
    """What is picked of a sequence depends on its length, and short ones have no seventh."""
    model = ir.from_proto(onnx.parser.parse_model(PICKS))
    out = shard(tmp_path / "a", model, "dp=2", loss="mse")
    cases = [{"batch": 30, "seq": 20}, {"batch": 9, "seq": 8}]
    texts = [",".join(f"{name}={value}" for name, value in case.items()) for case in cases]
    found = runtime.verify(
        out, tmp_path / "a.onnx", cases=texts, options=runtime.VerifyOptions(steps=2)
    )
    assert all(case.ok for case in found) and [dict(case.symbols) for case in found] == cases
    shard_model(tmp_path / "a.onnx", "replicate", tmp_path / "one", devices=1,
          training=TrainingSpec.of(Manifest.load(out).trained().spec))  # fmt: skip
    draw = RandomBatches(Manifest.load(tmp_path / "one"), cases, 0)
    for case in cases:
        picked = draw.batch(case)["at"]
        # Of 90 and 27 draws one is in the upper half but with a probability of (5/8)^27 = 3e-6.
        assert 8 < picked.max() < 20 if case["seq"] == 20 else 4 < picked.max() < 8
        assert picked.min() >= 0


def test_a_gradient_that_jumps_is_no_mistake(tmp_path: Path) -> None:
    """With this seed an operand of ReLU is 2e-7, where the sides of 0 are told apart by rounding.

    Should another order of sums bring both to one side, the case holds without that.
    """
    ranks = shard(tmp_path / "ranks", mlp.build(), cases.MLP_STRATEGY)
    (case,) = runtime.verify(ranks, tmp_path / "ranks.onnx", cases=["batch=8"])
    assert case.problems == () and isinstance(case, TrainingCase)
    assert set(case.steps[0].jumps) <= {"fc1.weight", "fc2.weight"}


# -- the command ---------------------------------------------------------------------------------


def test_json(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(sharded.with_suffix(".onnx"))
    arguments = ["verify", str(sharded), "--model", model, *CASE, "--steps", "2", "--json"]
    assert main([*arguments, "--lr", "0.01", "--seed", "7"]) == 0
    report = json.loads(capsys.readouterr().out)
    (case,) = report["cases"]
    assert report["ok"] is True and case["symbols"] == {"batch": 5}
    assert case["bytes_expected"] == case["bytes_counted"] > 0
    # The tolerance that verify has for float32 by default.
    assert 0 < case["max_rel"] <= 1e-5 and case["worst"]
    assert [step["step"] for step in case["steps"]] == [1, 2]
    for step in case["steps"]:
        assert step["loss"] == pytest.approx(step["loss_expected"], rel=1e-5)
        assert 0 <= step["state_share"] <= 1


def test_table(
    sharded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = str(sharded.with_suffix(".onnx"))
    assert main(["verify", str(sharded), "--model", model]) == 0
    shown = capsys.readouterr().out
    manifest = Manifest.load(sharded)
    found = default_cases(manifest, manifest.program("training_model"))
    assert len(found) == 3 and found[-1] == {"batch": 1}
    for values in found:
        assert f"largest at batch={values['batch']}: gradient of " in shown
    assert shown.count("yes") == 3 and "…" not in shown
    change = scaled("onnxpar.grad.matmul2.weight", 0.0)
    wrong = changed(sharded, tmp_path / "a", "training_model", change)
    assert main(["verify", str(wrong), "--model", model, *CASE]) == 1
    assert "difference: step 1: gradient of 'matmul2.weight'" in capsys.readouterr().out


def test_given_inputs(sharded: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.random((3, 32), np.float32), "labels": rng.random((3, 16), np.float32)}
    np.savez(tmp_path / "in.npz", **feeds)
    (case,) = runtime.verify(
        sharded,
        sharded.with_suffix(".onnx"),
        inputs=tmp_path / "in.npz",
        options=runtime.VerifyOptions(steps=2),
    )
    assert case.ok and case.symbols == {"batch": 3}


def test_a_directory_as_the_reference(sharded: Path, tmp_path: Path) -> None:
    one = shard(tmp_path / "one", two_layer.build(), "dp", loss="mse", optimizer="adamw", devices=1)
    (case,) = runtime.verify(sharded, one, cases=["batch=5"])
    assert case.ok


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another optimizer", "optimizer: expected adamw, got sgd"),
        ("another loss", "loss: expected mse, got mae"),
        (
            "another network",
            "undivided model: trained parameter 'matmul1.weight': expected float32[",
        ),
        ("several devices", "expected a model, or a directory for 1 device, got 4 devices"),
        ("no model", "no.onnx' does not exist"),
    ],
)
def test_what_is_no_reference(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, message: str
) -> None:
    what = {"loss": "mse", "optimizer": "adamw"}
    model = two_layer.build(hidden=8) if kind == "another network" else two_layer.build()
    what |= {"optimizer": "sgd"} if kind == "another optimizer" else {}
    what |= {"loss": "mae"} if kind == "another loss" else {}
    if kind == "several devices":
        reference = sharded
    elif kind == "no model":
        reference = tmp_path / "no.onnx"
    else:
        reference = shard(tmp_path / "one", model, "dp", devices=1, **what)
    assert main(["verify", str(sharded), "--model", str(reference), *CASE]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("onnxpar: error: ") and error.count("\n") == 1


def test_steps_of_what_does_not_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    ir.save(two_layer.build(), path)
    shard_model(path, "dp=2", tmp_path / "a")
    for option in (["--steps", "2"], ["--lr", "0.1"]):
        assert main(["verify", str(tmp_path / "a"), "--model", str(path), *option]) == 2
        expected = f"onnxpar: error: {option[0]}: expected a training directory"
        assert capsys.readouterr().err.startswith(expected)
