"""Training in 16 bits with float32 parameters: what is computed in which type, and loss scales.

onnxruntime computes float16 in float32 on the CPU, so rounding is seen by ONNX's own evaluator.
"""

from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from numpy.typing import NDArray

from onnxpar.autodiff.append_loss import LossKind, LossSpec
from onnxpar.autodiff.mixed_precision import compute_in
from onnxpar.autodiff.optimizer import OptimizerKind
from onnxpar.autodiff.training_program import TrainingProgram, TrainingSpec, prepare_training
from onnxpar.core.errors import ModelError
from onnxpar.frontend.load import normalise
from onnxpar.ops.function import attach_functions
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.recognise import read_parameters
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.trainer import Trainer
from onnxpar_runtime.verify.compare import verify
from tests.lockstep import evaluator
from tests.training_cases import CROSS_ENTROPY, batch_of, hyper, shard

Array = NDArray[Any]
HALF = ir.DataType.FLOAT16
EPSILON = float(np.finfo(np.float16).eps)


def small_mlp() -> ir.Model:
    return mlp.build(image=4, hidden=(12, 8))


def small_transformer() -> ir.Model:
    return transformer.build(layers=1, d_model=16, heads=2, vocab=20, max_positions=8)


def in_float16(model: ir.Model) -> ir.Model:
    """The same network as an exporter writes it from a module in float16."""
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.dtype == ir.DataType.FLOAT:
            half = value.const_value.numpy().astype(np.float16)
            value.const_value, value.dtype = ir.tensor(half, name=value.name), HALF
    for value in (*model.graph.inputs, *(o for node in model.graph for o in node.outputs)):
        if value.dtype == ir.DataType.FLOAT:
            value.dtype = HALF
    return model


def prepared(model: ir.Model, compute: str | None) -> TrainingProgram:
    loss = LossSpec(LossKind.MSE)
    spec = TrainingSpec(loss, OptimizerKind.SGD, compute=compute)
    return prepare_training(read_parameters(model), {}, spec)


@pytest.mark.parametrize("exported", ["float32", "float16"])
def test_gradients_are_pytorchs_with_the_same_casts(exported: str) -> None:
    torch = pytest.importorskip("torch")
    model = small_mlp() if exported == "float32" else in_float16(small_mlp())
    found = prepared(model, "float16" if exported == "float32" else None)
    assert found.compute == "float16"
    held = found.program.model.graph.initializers
    weights = {}
    for name in found.gradients:
        assert held[name].dtype == ir.DataType.FLOAT
        tensor = held[name].const_value
        assert tensor is not None
        weights[name] = torch.tensor(tensor.numpy().copy(), requires_grad=True)
    attach_functions(
        found.program.model, (d.function for d in REGISTRY.defs if d.function is not None)
    )
    products = [
        n for n in found.program.model.graph if n.op_type in ("MatMul", "Gemm", "FusedMatMul")
    ]
    assert len(products) == 3 + 5 and {n.outputs[0].dtype for n in products} == {HALF}
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 1, 4, 4)).astype(exported)
    labels = rng.standard_normal((6, 10)).astype(exported)
    feeds = {"x": x, "labels": labels, "onnxpar.loss_weight": np.float32(1)}
    run = evaluator(ir.to_proto(found.program.model), True)
    outputs = run(feeds)
    hidden = torch.tensor(x).flatten(1).half()
    for layer in (1, 2, 3):
        hidden = hidden @ weights[f"fc{layer}.weight"].half()
        hidden = torch.relu(hidden) if layer < 3 else hidden
    loss = torch.nn.functional.mse_loss(hidden.float(), torch.tensor(labels).float())
    loss.backward()
    assert all(v.grad.numpy().any() for v in weights.values())
    # Three products and three rounded results one after another; then again on the way back.
    assert float(outputs["onnxpar.loss"]) == pytest.approx(loss.item(), rel=4 * EPSILON)
    for name, output in found.gradients.items():
        wanted = weights[name].grad.numpy()
        assert outputs[output].dtype == np.float32
        difference = np.abs(outputs[output] - wanted).max()
        assert difference < 8 * EPSILON * np.abs(wanted).max()


def test_norms_softmax_and_loss_stay_wide() -> None:
    model = normalise(small_transformer())
    assert compute_in(model, HALF, REGISTRY) > 10
    kinds: dict[str, set[ir.DataType | None]] = {}
    for node in model.graph:
        kinds.setdefault(node.op_type, set()).add(node.outputs[0].dtype)
    assert kinds["MatMul"] == {HALF}
    assert kinds["LayerNormalization"] == kinds["Softmax"] == {ir.DataType.FLOAT}
    assert kinds["Gelu"] == {HALF}
    (logits,) = model.graph.outputs
    assert logits.name == "logits" and logits.dtype == ir.DataType.FLOAT
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_mask_that_half_cannot_hold_stays_wide() -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
    g (float[n, 4] x, bool[n, 4] m) => (float[n, 4] y)
    <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float low = {-3e38}> {
        h = MatMul(x, w)
        y = Where(m, h, low)
    }"""
    model = normalise(ir.from_proto(onnx.parser.parse_model(text)))
    compute_in(model, HALF, REGISTRY)
    run = evaluator(ir.to_proto(model), True)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y = run({"x": x, "m": x > 3})["y"]
    assert y.dtype == np.float32 and np.isfinite(y).all() and y.min() < -2e38


@pytest.mark.parametrize(
    ("build", "strategy", "symbols", "optimizer"),
    [
        pytest.param(small_mlp, "dp=2,tp=2", {"batch": 5}, "adamw", marks=pytest.mark.full),
        (small_transformer, "tp=2", {"batch": 3, "seq": 7}, "lamb"),
    ],
    ids=["mlp", "gpt"],
)
def test_equals_the_undivided_run(
    tmp_path: Path, build: Any, strategy: str, symbols: dict[str, int], optimizer: str
) -> None:
    ranks = shard(tmp_path / "a", build(), strategy, optimizer=optimizer, compute="float16")
    one = shard(tmp_path / "b", build(), "dp", devices=1, optimizer=optimizer, compute="float16")
    (case,) = verify(ranks, one, [symbols], options=VerifyOptions(steps=2))
    assert case.ok, case.problems
    with TrainerGroup(ranks) as group:
        states = group.manifest.trained().states.values()
        assert {s.dtype for s in states} == {"float32"}


def losses(directory: Path, scale: str | None, steps: int) -> list[float]:
    batch = batch_of(directory, np.random.default_rng(3), batch=6)
    with TrainerGroup(directory, loss_scale=scale) as group:
        scalars = (hyper("adamw", t, 1e-2, clip_norm=1.0) for t in range(1, steps + 1))
        results = [group.train_step([batch], s) for s in scalars]
        (norms, _) = group.on_each(lambda member: member.gradient_norms(["*"]))
        # The program adds some hundred float32 squares up in another order.
        assert norms["*"] == pytest.approx(results[-1].grad_norm, rel=1e-5)
        return [result.loss for result in results]


def test_a_scale_that_is_a_power_of_two_changes_nothing(tmp_path: Path) -> None:
    ranks = shard(tmp_path / "a", small_mlp(), "dp=2", optimizer="adamw", compute="float16")
    one = losses(ranks, "1", 5)
    # The norm's small constant is added to what has been unscaled, so clipping is the same too.
    assert losses(ranks, None, 5) == losses(ranks, "1024", 5) == one
    assert one[-1] < one[0] - 0.05


def test_an_overflow_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    ranks = shard(tmp_path / "a", small_mlp(), "dp=2", optimizer="adamw", compute="float16")
    batch = batch_of(ranks, np.random.default_rng(3), batch=6)
    with TrainerGroup(ranks) as group:
        group.train_step([batch], hyper("adamw", 1))
        kept = [n for n, s in group.manifest.trained().states.items() if "grad" not in s.kind]
        before = [{n: m.state(n) for n in kept} for m in group.members]
        for member in group.members:
            member.loss_scale.scale = 2.0**122
        result = group.train_step([batch, batch], hyper("adamw", 2))
        assert result.skipped and np.isfinite(result.loss)
        for member, states in zip(group.members, before, strict=True):
            assert (member.loss_scale.scale, member.loss_scale.skipped) == (2.0**121, 1)
            assert member.steps == 2
            for name, array in states.items():
                np.testing.assert_array_equal(member.state(name), array)
        for member in group.members:
            member.loss_scale.scale = 2.0**16
        assert not group.train_step([batch], hyper("adamw", 2)).skipped
        assert (group.gather(kept[0]) != before[0][kept[0]]).any()


def test_bfloat16_is_refused_on_the_cpu(tmp_path: Path) -> None:
    ranks = shard(tmp_path / "a", small_mlp(), "dp", devices=1, compute="bfloat16")
    with pytest.raises(LaunchError, match="bfloat16, but onnxruntime has no CPU kernels"):
        Trainer(ranks, device="cpu")


def test_what_cannot_be_computed_in_16_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--compute bfloat16: expected a model whose parameters"):
        prepared(in_float16(small_mlp()), "bfloat16")
    text = """<ir_version: 10, opset_import: ["": 18]>
    g (double[n, 2] x) => (double[n, 2] y) <double[2, 2] w = {1, 0, 0, 1}> { y = MatMul(x, w) }"""
    model = normalise(ir.from_proto(onnx.parser.parse_model(text)))
    with pytest.raises(ModelError, match="expected products of float32 matrices"):
        compute_in(model, HALF, REGISTRY)
    ranks = shard(tmp_path / "a", small_mlp(), "dp", devices=1, loss=CROSS_ENTROPY)
    with pytest.raises(LaunchError, match="loss_scale 8: the programs compute in the type"):
        Trainer(ranks, device="cpu", loss_scale="8")
