"""Seeded weights, files and the command line of the example models."""

import subprocess
import sys
from pathlib import Path

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
import two_layer
from _exporter import EXTERNAL_BYTES, GraphWriter, save, weight_bytes

from tests.models.example import weights
from tests.onnxpar.ops.op_harness import chosen

MODELS = Path(__file__).parents[2] / "models"


def test_weights_depend_on_the_seed_and_their_name_alone() -> None:
    first = weights(mlp.build(seed=1))
    for name, tensor in weights(mlp.build(seed=1)).items():
        np.testing.assert_array_equal(tensor, first[name])
    assert not np.array_equal(first["fc1.weight"], weights(mlp.build(seed=2))["fc1.weight"])
    shallow, deep = (weights(transformer.build(layers=n, d_model=8, heads=2)) for n in (1, 2))
    for name, tensor in shallow.items():
        np.testing.assert_array_equal(tensor, deep[name])


def test_weights_have_the_deviation_they_are_given() -> None:
    # The deviation of n = 784 * 512 draws is off by about 1 / sqrt(2 n) = 0.1 %; 1 % is nine sigma.
    drawn = weights(mlp.build())["fc1.weight"]
    assert drawn.std() == pytest.approx((2 / 784) ** 0.5, rel=0.01)


def test_large_weights_go_beside_the_model(tmp_path: Path) -> None:
    large = two_layer.build(inputs=2048, hidden=2048, outputs=8)
    assert weight_bytes(large) > EXTERNAL_BYTES
    save(large, tmp_path / "large.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    onnx.checker.check_model(tmp_path / "large.onnx", full_check=True)
    for name, tensor in weights(ir.load(tmp_path / "large.onnx")).items():
        np.testing.assert_array_equal(tensor, weights(large)[name])


def test_small_weights_stay_inside_and_a_stale_data_file_goes(tmp_path: Path) -> None:
    (tmp_path / "small.onnx.data").write_bytes(b"old")
    small = two_layer.build()
    save(small, tmp_path / "small.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["small.onnx"]
    for name, tensor in weights(ir.load(tmp_path / "small.onnx")).items():
        np.testing.assert_array_equal(tensor, weights(small)[name])


def test_undrawn_weights_take_no_room(tmp_path: Path) -> None:
    # 1 TiB of parameters: drawing or writing any of them would fail here.
    model = two_layer.build(inputs=2**19, hidden=2**19, outputs=2**18)
    path = tmp_path / "huge.onnx"
    save(model, path, materialise=False)
    data = (tmp_path / "huge.onnx.data").stat()
    assert data.st_size == weight_bytes(model)
    assert data.st_blocks * 512 < 2**20
    assert isinstance(model.graph.initializers["matmul1.weight"].const_value, ir.LazyTensor)
    tensor = ir.load(path).graph.initializers["matmul2.weight"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.offset == 4 * 2**38


def test_one_name_is_one_weight() -> None:
    writer = GraphWriter(0)
    writer.weight("w", (2,), std=1)
    with pytest.raises(ValueError, match="'w' is defined twice"):
        writer.weight("w", (2,), std=1)


@pytest.mark.parametrize(
    "script", chosen(["mlp.py", "two_layer.py", "three_blocks.py", "transformer.py"], 2)
)
def test_each_file_runs_as_a_script(script: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.onnx"
    done = subprocess.run(
        [sys.executable, MODELS / script, "-o", path, "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{path}: ")
    onnx.checker.check_model(path, full_check=True)
    # onnxruntime 1.31 reads no IR version above 13; multi-device fields need 11.
    assert 11 <= onnx.load(path, load_external_data=False).ir_version <= 13


def test_a_wrong_size_is_one_message_and_code_2(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    done = subprocess.run(
        [sys.executable, MODELS / "transformer.py", "-o", path, "--heads", "5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "expected a divisor of d_model 64, got 5" in done.stderr
    assert "Traceback" not in done.stderr
    assert not path.exists()
