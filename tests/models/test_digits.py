"""The digits: their resize against onnxruntime's, and the file they are written to."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from digits import digits

from onnxpar_runtime.training.images import resize

RESIZE = """
<ir_version: 10, opset_import: ["": 19]>
resize (float[n, 1, h, h] x, int64[4] sizes) => (float[n, 1, k, k] y) {
    y = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (x, , , sizes)
}
"""


@pytest.mark.parametrize(("old", "new"), [(8, 28), (8, 8), (8, 5), (1, 3)])
def test_resize_equals_the_operator(old: int, new: int) -> None:
    images = np.random.default_rng(0).random((3, old, old), dtype=np.float32)
    model = onnx.parser.parse_model(RESIZE).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    sizes = np.array([3, 1, new, new])
    want = session.run(None, {"x": images[:, None], "sizes": sizes})[0][:, 0]
    # Values up to 1 weighed by float32 factors in another order: a few units of 6e-8.
    np.testing.assert_allclose(resize(images, new), want, rtol=0, atol=5e-7)


def test_digits_are_images_in_the_unit_range() -> None:
    every = digits()
    assert every.shape == (1797, 1, 28, 28)
    assert every.dtype == np.float32
    assert every.min() == 0
    assert 0.9 < every.max() <= 1 + 1e-6
    np.testing.assert_array_equal(digits(count=3, start=10), every[10:13])


@pytest.mark.parametrize(("count", "start"), [(1798, 0), (0, 5), (1, 1797), (2, -1)])
def test_refuses_digits_that_do_not_exist(count: int, start: int) -> None:
    with pytest.raises(ValueError, match="expected a range within 0 to 1797"):
        digits(count, start)


def test_runs_as_a_script(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "models" / "digits.py"
    path = tmp_path / "digits.npz"
    done = subprocess.run(
        [sys.executable, script, "-o", path, "--count", "5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    with np.load(path) as archive:
        np.testing.assert_array_equal(archive["x"], digits(5))
