"""Sizes that an operator needs equal and nothing proves: every run compares them."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.group import run_threads
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.cases import complete_case, default_cases
from onnxpar_runtime.verify.compare import verify

LOSS = """<ir_version: 10, opset_import: ["": 21]>
g (float[batch, k] x, int64[n] labels, float[4, 3] w) => (float loss) {
    [fc] scores = MatMul (x, w)
    [loss] loss = SoftmaxCrossEntropyLoss (scores, labels)
}"""
BODY = "'scores' and dim 0 of 'labels' must be equal, got "
MESSAGE = (
    f"node 'loss' (SoftmaxCrossEntropyLoss): dim 0 of {BODY}"
    "3 (batch = 3, dim 0 of input 'x') and 4 (n = 4, dim 0 of input 'labels')"
)
CONTRACTED = (
    "node 'fc' (MatMul): dim 1 of 'x' and dim 0 of 'w' must be equal, got "
    "5 (k = 5, dim 1 of input 'x') and 4"
)


def feeds(batch: int, labels: int, k: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((batch, k)).astype(np.float32),
        "labels": rng.integers(0, 3, labels),
        "w": rng.standard_normal((4, 3)).astype(np.float32),
    }


@pytest.fixture(scope="module", params=["dp", "tp=2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal")
    onnx.save(onnx.parser.parse_model(LOSS), folder / "m.onnx")
    shard_model(folder / "m.onnx", request.param, folder / "out", devices=2)
    return folder / "out"


def test_a_run_refuses_sizes_that_differ(directory: Path) -> None:
    equal_sizes = json.loads((directory / "manifest.json").read_text())["programs"]["model"][
        "equal_sizes"
    ]
    assert [(e["node"], e["values"], e["dims"], e["sizes"]) for e in equal_sizes] == [
        ("fc", ["x", "w"], [1, 0], ["k", 4]),
        ("loss", ["scores", "labels"], [0, 0], ["batch", "n"]),
    ]
    assert run_threads(directory, feeds(3, 3))["loss"].shape == ()
    for given, message in ((feeds(3, 4), MESSAGE), (feeds(3, 3, k=5), CONTRACTED)):
        with pytest.raises(InputError) as caught:
            run_threads(directory, given)
        assert str(caught.value) == message
    with pytest.raises(InputError, match="must be equal"):
        verify(directory, directory.parent / "m.onnx", feeds=feeds(3, 4))


def test_verify_chooses_equal_sizes(directory: Path) -> None:
    manifest = Manifest.load(directory)
    program = manifest.program("model")
    cases = default_cases(manifest, program)
    assert len({case["batch"] for case in cases}) == 3
    assert all(case["batch"] == case["n"] and case["k"] == 4 for case in cases)
    assert complete_case(manifest, program, {"n": 7}) == {"batch": 7, "n": 7, "k": 4}
    with pytest.raises(InputError, match="must be equal"):
        complete_case(manifest, program, {"batch": 3, "n": 4})
    assert all(case.ok for case in verify(directory, directory.parent / "m.onnx"))
