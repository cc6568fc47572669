"""IDX files, plain and compressed, and malformed ones."""

import gzip
import importlib.machinery
import importlib.util
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.images import handwritten_digits, mnist_files, read_idx, resize
from tests.runtime.mnist import CODES, idx, mnist


@pytest.mark.parametrize("dtype", list(CODES))
@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_idx(tmp_path: Path, dtype: str, name: str) -> None:
    array = np.arange(-3, 21).reshape(2, 3, 4).astype(dtype)
    result = read_idx(idx(tmp_path / name, array))
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(("ending", "dash"), [("", "-"), (".gz", "-"), ("", "."), (".gz", ".")])
def test_mnist(tmp_path: Path, ending: str, dash: str) -> None:
    images, labels = mnist(tmp_path, ending, dash)
    got, classes = mnist_files(tmp_path, "train")
    assert (got.dtype, classes.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(got, images.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(classes, labels)
    assert len(mnist_files(tmp_path, "test")[0]) == 4


def test_unreadable(tmp_path: Path) -> None:
    content = idx(tmp_path / "a", np.zeros((2, 3), np.uint8)).read_bytes()
    cases = {
        "short": (content[:-1], r"expected 18 bytes for \[2, 3\], got 17 bytes"),
        "long": (content + b"x", "got 19 bytes"),
        "other": (b"\x89PNG1234", "not an IDX file, it begins with 89 50 4e 47"),
        "empty": (b"", "not an IDX file"),
        "header": (content[:6], "expected"),
        "type.gz": (b"no gzip", "cannot be read"),
        "half.gz": (gzip.compress(content)[:-9], "cannot be read"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_idx(tmp_path / name)
    with pytest.raises(InputError, match="none of the files train-images-idx3-ubyte, train-images"):
        mnist_files(tmp_path, "train")


def test_no_more_is_read_than_the_header_says(tmp_path: Path) -> None:
    content = idx(tmp_path / "a", np.zeros((2, 3), np.uint8)).read_bytes()
    with gzip.open(tmp_path / "bomb.gz", "wb", 1) as stream:
        stream.write(content)
        for _ in range(4):
            stream.write(bytes(1 << 24))
    (tmp_path / "dims").write_bytes(b"\0\0\x08\xff" + bytes(4 * 255))
    with pytest.raises(InputError, match=r"dims: expected at most 8 dims, got 255"):
        read_idx(tmp_path / "dims")
    tracemalloc.start()
    with pytest.raises(InputError, match=r"expected 18 bytes for \[2, 3\], got 19 bytes"):
        read_idx(tmp_path / "bomb.gz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


def test_halves_that_do_not_fit(tmp_path: Path) -> None:
    mnist(tmp_path)
    idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(7, np.uint8))
    with pytest.raises(InputError, match="expected one label for each image, got 7 for 6"):
        mnist_files(tmp_path, "train")
    idx(tmp_path / "train-images-idx3-ubyte", np.zeros(7, np.uint8))
    with pytest.raises(InputError, match=r"expected images uint8 \[count, height, width\]"):
        mnist_files(tmp_path, "train")


def test_resize_to_other_sides() -> None:
    images = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    # A plane stays a plane between the outermost pixel centres.
    wide = resize(images, 3, 8)
    np.testing.assert_allclose(np.diff(wide[0, 1, 1:-1]), 0.5, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(resize(images, 3, 4), images)


def test_digits_are_those_of_scikit_learn() -> None:
    images, classes = handwritten_digits()
    data = load_digits()
    assert (images.dtype, classes.dtype) == (np.float32, np.int64)
    # Sixteenths are exact.
    np.testing.assert_array_equal(images * 16, data.images)
    np.testing.assert_array_equal(classes, data.target)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"scikit-learn, which is not installed \(pip install"):
        handwritten_digits()
    moved = importlib.machinery.ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: moved)
    with pytest.raises(InputError, match=r"digits of scikit-learn: .*digits\.csv\.gz not found"):
        handwritten_digits()
