"""Networks with BatchNormalization train as PyTorch trains them, running statistics included."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ShardingError
from onnxpar.core.symbols import Symbol
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import read_tensors
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.run import save
from onnxpar_runtime.verify import training_steps
from onnxpar_runtime.verify.compare import verify
from tests.training_cases import batch_of, hyper, shard

Array = NDArray[Any]
STEPS = 6
MOMENTUM = 0.75  # PyTorch's is 1 - 0.75
LR = 0.05
WEIGHTS = {
    "fc1": (8, 6),
    "bn1.s": (6,),
    "bn1.b": (6,),
    "bn1.m": (6,),
    "bn1.v": (6,),
    "fc2": (6, 10),
    "bn2.s": (10,),
    "bn2.b": (10,),
    "bn2.m": (10,),
    "bn2.v": (10,),
}
STATISTICS = ["bn1.m", "bn1.v", "bn2.m", "bn2.v"]
EXPORTED = f"""
[fc1] h0 = MatMul(x, fc1)
[bn1] h1 = BatchNormalization<momentum={MOMENTUM}>(h0, bn1.s, bn1.b, bn1.m, bn1.v)
[relu] h2 = Relu(h1)
[fc2] h3 = MatMul(h2, fc2)
[bn2] y = BatchNormalization<momentum={MOMENTUM}>(h3, bn2.s, bn2.b, bn2.m, bn2.v)"""


def model(opset: int = 18, norm: str = f"momentum={MOMENTUM}") -> ir.Model:
    """Two layers, each with a BatchNormalization in inference form."""
    text = EXPORTED.replace(f"momentum={MOMENTUM}", norm)
    for name in WEIGHTS:
        text = text.replace(name, name.replace(".", "_"))  # the text form has no dots in names
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[n, 8] x) => (float[n, 10] y) '
        f"{{ {text.replace('[fc1]', '[a]').replace('[fc2]', '[b]')} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        low = 0.5 if name.endswith((".s", ".v")) else -0.5
        array = rng.uniform(low, low + 1, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name.replace(".", "_")))
    return ir.from_proto(proto)


def named(name: str) -> str:
    return name.replace(".", "_")


@pytest.mark.parametrize(
    ("strategy", "opset"),
    [
        *(("dp=2", 13), ("dp=2,tp=2", 18)),
        *(pytest.param(strategy, 18, marks=pytest.mark.full) for strategy in ("tp=2", "dp=3")),
    ],
)
def test_steps_equal_pytorchs(strategy: str, opset: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    out = shard(tmp_path / "out", model(opset), strategy)
    arrays = {
        name: model().graph.initializers[named(name)].const_value.numpy().copy()  # type: ignore[union-attr]
        for name in WEIGHTS
    }
    w = {name: torch.tensor(a) for name, a in arrays.items()}
    trained = [w[name].requires_grad_() for name in WEIGHTS if name not in STATISTICS]
    optimizer = torch.optim.SGD(trained, lr=LR)

    def forward(x: Any, *, training: bool) -> Any:
        for layer in "12":
            x = torch.as_tensor(x) @ w[f"fc{layer}"]
            m, v, s, b = (w[f"bn{layer}.{part}"] for part in "mvsb")
            n = len(x)
            # The backward pass reads what it was given.
            mean, variance = m.clone(), v.clone()
            x = functional.batch_norm(x, mean, variance, s, b, training, 1 - MOMENTUM)
            if training:
                # PyTorch mixes the unbiased variance in; ONNX's is that of the population.
                population = (variance - v * MOMENTUM) * (n - 1) / n
                w[f"bn{layer}.m"], w[f"bn{layer}.v"] = mean, v * MOMENTUM + population
            x = torch.relu(x) if layer == "1" else x
        return x

    rng = np.random.default_rng(1)
    with TrainerGroup(out) as group:
        for step in range(1, STEPS + 1):
            batches = [batch_of(out, rng, n=n) for n in ((7, 12) if step % 2 else (9,))]
            total = sum(len(b["x"]) for b in batches)
            optimizer.zero_grad()
            expected = 0.0
            for batch in batches:
                logits = forward(batch["x"], training=True)
                labels = torch.tensor(batch["labels"])
                loss = functional.cross_entropy(logits, labels, reduction="sum") / total
                loss.backward()
                expected += float(loss.detach())
            optimizer.step()
            found = group.train_step(batches, hyper("sgd", step, lr=LR))
            # Float32, after up to six steps: as the parameters below.
            assert found.loss == pytest.approx(expected, rel=1e-5)
        for name, tensor in w.items():
            got = group.gather(named(name))
            # Six steps of sums over at most 12 rows.
            np.testing.assert_allclose(got, tensor.detach().numpy(), rtol=2e-5, atol=2e-6)
        batch = batch_of(out, rng, n=11)
        logits = forward(batch["x"], training=False)
        expected = float(functional.cross_entropy(logits, torch.tensor(batch["labels"])).detach())
        # From parameters that differ as above.
        assert group.evaluate(batch)["loss"] == pytest.approx(expected, rel=1e-5)


def test_statistics_are_saved_loaded_and_reset(tmp_path: Path) -> None:
    out = shard(tmp_path / "out", model(), "dp=2,tp=2")
    file = tmp_path / "trained.safetensors"
    rng = np.random.default_rng(1)
    with TrainerGroup(out) as group:
        first = {name: group.gather(named(name)) for name in STATISTICS}
        group.train_step([batch_of(out, rng, n=8)], hyper("sgd", 1))
        trained = {name: group.gather(named(name)) for name in STATISTICS}
        assert all((first[name] != trained[name]).any() for name in STATISTICS)
        group.on_each(lambda member: save(member, file))
        saved = {name: array.copy() for name, array in read_tensors(file).items()}
        assert set(saved) == set(map(named, WEIGHTS))
        group.reset()
        for name in STATISTICS:
            np.testing.assert_array_equal(group.gather(named(name)), first[name])
        group.on_each(lambda member: member.load_parameters(saved))
        for name in STATISTICS:
            np.testing.assert_array_equal(group.gather(named(name)), trained[name])
            assert named(name) in group.members[0].statistics()


def test_the_manifest_says_what_is_kept(tmp_path: Path) -> None:
    manifest = Manifest.load(shard(tmp_path / "out", model(), "dp=2"))
    training = manifest.trained()
    kept = [name for name, state in training.states.items() if state.kind == "statistic"]
    assert kept == [named(name) for name in STATISTICS]
    program = manifest.program("training_model")
    assert set(kept) < set(program.state_inputs)
    assert {o.state for o in program.state_outputs} > set(kept)
    assert set(kept) < set(manifest.program("eval_model").state_inputs)
    (notice,) = training.notices
    assert notice.startswith("2 BatchNormalization nodes ('bn1', …) were exported for inference")


def test_verify_finds_statistics_that_are_mixed_wrongly(tmp_path: Path) -> None:
    """Losses, gradients and parameters are the same, since no step reads what it mixes."""
    out = shard(tmp_path / "out", model(), "dp=2")
    reference = shard(tmp_path / "reference", model(norm=f"momentum={MOMENTUM + 1e-3}"), "dp=1")
    (case,) = verify(out, reference, [{"n": 7}])
    assert len(case.problems) == len(STATISTICS)
    assert all(p.startswith("step 1: statistic 'bn") for p in case.problems)


def test_rounding_that_a_norm_carries_on_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns whose deviation is 1e-3 of their mean: the first norm divides rounding by that."""
    norm = f"epsilon=1e-12, momentum={MOMENTUM}"
    out, reference = (shard(tmp_path / s, model(norm=norm), s) for s in ("dp=2", "dp=1"))
    rng = np.random.default_rng(3)
    x = (1 + 1e-3 * rng.standard_normal((37, 8))).astype(np.float32)
    feeds = {"x": x, "labels": rng.integers(0, 10, 37)}
    (case,) = verify(out, reference, feeds=feeds)
    assert case.ok, case.problems
    monkeypatch.setattr(training_steps, "_SHAKE_ULPS", 0)
    (case,) = verify(out, reference, feeds=feeds)
    assert any(p.startswith("step 1: statistic 'bn2_") for p in case.problems)


def test_frozen_statistics_do_not_change(tmp_path: Path) -> None:
    out = shard(tmp_path / "out", model(), "dp=2", freeze=("bn1_*",))
    training = Manifest.load(out).trained()
    kept = [name for name, state in training.states.items() if state.kind == "statistic"]
    assert kept == ["bn2_m", "bn2_v"]
    assert any("('bn1') use their frozen running statistics" in text for text in training.notices)


def test_a_model_of_an_older_opset_trains_as_one_of_a_newer(tmp_path: Path) -> None:
    (case,) = verify(
        shard(tmp_path / "out", model(12), "dp=2"),
        shard(tmp_path / "one", model(), "dp=1"),
        [{"n": 7}],
    )
    assert case.ok, case.problems


RESIDUAL = """g (float[n, 3, 8, 8] x) => (float[n, 10] y) {
  c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)
  h = BatchNormalization<momentum = 0.75>(c, s, b, m, v)
  r = Relu(h)
  g = GroupNormalization<num_groups = 3>(r, gs, gb)
  t = Add(h, g)
  p = GlobalAveragePool(t)
  f = Flatten(p)
  y = MatMul(f, fc)
}"""


def test_a_convolution_sends_statistics_and_nothing_else(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {RESIDUAL}')
    rng = np.random.default_rng(0)
    shapes = {
        "w": (6, 3, 3, 3),
        "fc": (6, 10),
        **dict.fromkeys(("s", "b", "m", "v", "gs", "gb"), (6,)),
    }
    for name, shape in shapes.items():
        array = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    reference = shard(tmp_path / "1", ir.from_proto(proto), "dp=1")
    out = shard(tmp_path / "2", ir.from_proto(proto), "dp=2")
    sent = Manifest.load(out).program("training_model").collectives
    # Mean, variance and both sums of the backward pass, of 6 channels, and the loss. Of two ranks
    # each sends as many bytes as a sum has.
    assert sorted((c.op, c.bytes) for c in sent) == [("AllReduce", n) for n in (4, 24, 24, 48)]
    (case,) = verify(out, reference, [{"n": 7}], options=VerifyOptions(steps=2))
    assert case.ok, case.problems


def test_sizes_of_each_rank_are_refused(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 6, seq] x) => (float[n, 6, seq] y)
        { y = BatchNormalization<training_mode = 0>(x, s, b, m, v) }"""
    )
    for name in "sbmv":
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(6, np.float32), name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    with pytest.raises(
        ShardingError, match="statistics run over the size 'seq', which is per-rank"
    ):
        shard_model(
            path, "dp=2", tmp_path / "out", training=spec, symbols={"seq": Symbol(per_rank=True)}
        )
