"""`--debug-nan` names the node, the rank and the element where a value stops to be finite."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.errors import NotFiniteError, OnnxparRuntimeError, RankError
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.session import Session
from onnxpar_runtime.training.trainer import Trainer
from tests.training_cases import hyper, shard

# The mask is infinite where `x` is negative, but no result is: that is no fault.
NETWORK = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 6] x) => (float[batch, 4] y)
<float[6, 8] w1, float[8, 4] w2, float minus = {-inf}, float zero = {0.0}>
{
    [fc1] a = MatMul(x, w1)
    [negative] n = Less(a, zero)
    [mask] m = Where(n, minus, a)
    [exp] b = Exp(m)
    [fc2] y = MatMul(b, w2)
}
"""


def model() -> onnx.ModelProto:
    made = onnx.parser.parse_model(NETWORK)
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (6, 8)), ("w2", (8, 4))):
        array = rng.uniform(0.1, 0.5, shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def feeds(rows: int, **values: tuple[tuple[int, int], float]) -> dict[str, Any]:
    x = np.random.default_rng(1).uniform(-1, 1, (rows, 6)).astype(np.float32)
    for place, value in values.values():
        x[place] = value
    return {"x": x, "labels": np.arange(rows) % 4}


def message(directory: Path, kind: Any, run: Any) -> str:
    with (
        pytest.raises(OnnxparRuntimeError) as caught,
        Ranks(directory, kind, debug_nan=True) as ranks,
    ):
        ranks.on_each(run)
    assert isinstance(caught.value, NotFiniteError | RankError)
    return str(caught.value)


@pytest.fixture(scope="module", params=["dp=2,tp=2", "pipeline"])
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forward and a training directory."""
    folder = tmp_path_factory.mktemp("debug_nan")
    strategy = folder / "s.yaml"
    strategy.write_text(
        "mesh: {dp: 2}\npipeline: {stages: 2, micro_batches: 2, assign: {fc1: 0, exp: 0, fc2: 1}}\n"
    )
    chosen = strategy if request.param == "pipeline" else request.param
    onnx.save(model(), folder / "m.onnx")
    shard_model(folder / "m.onnx", chosen, folder / "forward")
    shard(folder / "training", ir.from_proto(model()), chosen, optimizer="adam")
    return folder


def on_session(**values: tuple[tuple[int, int], float]) -> Any:
    return lambda session: session.run_global({"x": feeds(8, **values)["x"]})


def on_trainer(*micro_batches: dict[str, Any]) -> Any:
    return lambda trainer: trainer.train_step(micro_batches, hyper("adam", 1))


def expect(text: str, parts: Sequence[str]) -> None:
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in {text!r}"


def test_infinite_values_without_effect_are_no_fault(directories: Path) -> None:
    with Ranks(directories / "forward", Session, debug_nan=True) as ranks:
        ranks.on_each(on_session())
    with Ranks(directories / "training", Trainer, debug_nan=True) as ranks:
        batch = feeds(8)
        losses = ranks.on_each(on_trainer(batch, batch))
    with Ranks(directories / "training", Trainer) as ranks:
        assert ranks.on_each(on_trainer(batch, batch)) == losses


def test_the_node_that_overflows_is_named(directories: Path) -> None:
    # Row 5 is row 1 of the ranks that have the second half of the batch: 2 and 3 of four ranks, 1
    # of the two in the first stage.
    text = message(directories / "forward", Session, on_session(big=((5, 2), 1e4)))
    expect(
        text,
        [r"on rank(s 2, 3| 1):", "node 'exp' \\(Exp\\)", r"has Inf in \d+ of \d+", r"at \[1, "],
    )


def test_an_input_is_named(directories: Path) -> None:
    text = message(directories / "forward", Session, on_session(no=((6, 3), np.nan)))
    expect(text, [r"input 'x' has NaN in 1 of 24 elements, the first at \[2, 3\]"])


def test_the_loss_is_followed_back_in_training(directories: Path) -> None:
    batches = feeds(8), feeds(8, big=((5, 2), 1e4))
    text = message(directories / "training", Trainer, on_trainer(*batches))
    expect(text, ["node 'exp' \\(Exp\\)", r"has Inf in \d+ of \d+ elements"])


def test_a_parameter_is_named(directories: Path) -> None:
    def run(trainer: Trainer) -> None:
        w2 = np.full((8, 4), 0.1, np.float32)
        w2[-1, -1] = np.nan
        trainer.load_parameters({"w2": w2})
        trainer.train_step([feeds(8), feeds(8)], hyper("adam", 1))

    text = message(directories / "training", Trainer, run)
    expect(text, [r"input 'w2' has NaN in 1 of \d+ elements"])


@pytest.mark.parametrize("scale", ["1", "dynamic"])
def test_a_product_that_overflows_in_16_bits_is_named(tmp_path: Path, scale: str) -> None:
    """No loss scale can mend an overflow in the forward pass, so it is reported with any."""
    plain = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 6] x) => (float[batch, 4] y) <float[6, 8] w1, float[8, 4] w2>
        { [fc1] a = MatMul(x, w1) [relu] b = Relu(a) [fc2] y = MatMul(b, w2) }"""
    )
    plain.graph.initializer.extend(model().graph.initializer)
    made = shard(tmp_path / "a", ir.from_proto(plain), "dp=2,tp=2", compute="float16")

    def run(row: float) -> Any:
        x = np.full((8, 6), 0.5, np.float32)
        # 6.5e4 is a float16; a column of the first weights adds to about 6 * 0.3, so that some
        # elements of the product are beyond 65,504.
        x[5] = row
        labels = np.arange(8) % 4
        return lambda trainer: trainer.train_step([{"x": x, "labels": labels}], hyper("sgd", 1))

    with Ranks(made, partial(Trainer, loss_scale=scale), debug_nan=True) as ranks:
        ranks.on_each(run(1.0))
    with (
        pytest.raises(OnnxparRuntimeError) as caught,
        Ranks(made, partial(Trainer, loss_scale=scale), debug_nan=True) as ranks,
    ):
        ranks.on_each(run(6.5e4))
    expect(str(caught.value), ["on ranks 2, 3: ", r"node 'fc1' \(MatMul\): .* has Inf in"])
