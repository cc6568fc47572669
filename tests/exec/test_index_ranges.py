"""Labels and tokens out of range are refused on every mesh, before anything is computed."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.group import run_threads

# The labels are cast and reshaped on their way to the loss.
MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (int64[batch, seq] ids, int32[batch, seq] labels) => (float loss)
<int64[1] flat = {-1}> {
    [rows] x = Gather (table, ids)
    y = MatMul (x, w)
    scores = Flatten <axis = 2> (y)
    wide = Cast <to = 7> (labels)
    long = Reshape (wide, flat)
    [loss] loss = SoftmaxCrossEntropyLoss <ignore_index = -7> (scores, long)
}"""


@pytest.fixture(scope="module", params=["dp", "tp=2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranges")
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    for name, shape in (("table", (8, 6)), ("w", (6, 4))):
        values = rng.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, folder / "m.onnx")
    shard_model(folder / "m.onnx", request.param, folder / "out", devices=2)
    return folder / "out"


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "ids": rng.integers(-8, 8, (4, 3)),
        "labels": rng.integers(0, 4, (4, 3), dtype=np.int32),
    }


def test_indices_from_behind_and_ignored_labels_are_admitted(directory: Path) -> None:
    given = feeds()
    given["ids"][0, 0], given["ids"][3, 2], given["labels"][1, 1] = -8, 7, -7
    assert np.isfinite(run_threads(directory, given)["loss"])


@pytest.mark.parametrize(
    ("name", "element", "message"),
    [
        ("ids", 8, "'ids': expected elements from -8 to 7 for node 'rows' (Gather), got 8 at "),
        ("ids", -9, "got -9 at "),
        ("labels", 4, "'labels': expected elements from 0 to 3, or -7 for node 'loss' (Soft"),
        ("labels", -1, "got -1 at "),
    ],
)
def test_an_element_out_of_range_is_refused(
    directory: Path, name: str, element: int, message: str
) -> None:
    given = feeds()
    given[name][2, 1] = element
    # Where one rank alone has the element, the others tell its message.
    with pytest.raises(OnnxparRuntimeError) as caught:
        run_threads(directory, given)
    assert message in str(caught.value) and caught.value.exit_code == 2
