"""Our safetensors files against the safetensors package, and malformed files."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.tensor_file import Entry, forget_pages, read_tensors, write_tensors

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "é": np.array(5, np.int64),
    "none": np.zeros((0, 4), np.float64),
    "flags": np.array([True, False, True]),
    "half": np.array([1.5, -2], np.float16),
    "t": np.arange(6, dtype=np.int32).reshape(2, 3).T,
}


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    entries = [Entry(name, a.dtype.name, a.shape) for name, a in arrays.items()]
    write_tensors(path, entries, iter(arrays.values()))
    return path


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", ARRAYS)
    loaded = load_file(path)
    assert set(loaded) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(loaded[name], array)
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    arrays = {k: np.ascontiguousarray(v) for k, v in ARRAYS.items()}
    save_file(arrays, tmp_path / "a")
    loaded = read_tensors(tmp_path / "a")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(loaded[name], array)


def test_bfloat16(tmp_path: Path) -> None:
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    loaded = read_tensors(write(tmp_path / "a", {"x": array, "y": np.zeros(0, np.float32)}))["x"]
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array)


def damaged(path: Path, header: dict[str, dict[str, object]] | str, data: bytes) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_fill_the_file_without_gaps(tmp_path: Path) -> None:
    def entry(start: int, stop: int) -> dict[str, object]:
        return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}

    whole = {"a": entry(0, 4), "b": entry(4, 8)}
    assert set(read_tensors(damaged(tmp_path / "good", whole, bytes(8)))) == {"a", "b"}
    twice = json.dumps(whole).replace('"b"', '"a"')
    for header, data, message in (
        ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "'b' begins at byte 2, expected 4"),
        ({"a": entry(0, 4), "b": entry(5, 8)}, bytes(8), "'b' begins at byte 5, expected 4"),
        (whole, bytes(9), r"\d+ bytes, expected \d+"),
        (twice, bytes(8), "'a' is there twice"),
    ):
        with pytest.raises(InputError, match=message):
            read_tensors(damaged(tmp_path / "bad", header, data))


def test_an_array_that_is_not_its_entry(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected float32"):
        write_tensors(tmp_path / "a", [Entry("x", "float32", (2,))], [np.zeros(2)])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its folder .* does not exist"):
        write(tmp_path / "nowhere" / "a", ARRAYS)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_tensors(tmp_path / "nowhere")


def altered(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no header"),
        (b"PK\x03\x04 a zip file", "it has no header"),
        ((99).to_bytes(8, "little") + b"{}", "it has no header"),
        ((3).to_bytes(8, "little") + b"{x}", "Expecting property name"),
        (altered([]), "its header is not an object"),
        (altered({"x": 1}), "the header's entry of 'x'"),
        (altered({"x": {"dtype": "F32", "shape": [1]}}), "the header's entry of 'x'"),
        (altered({"x": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}, b"1"), "type 'F8'"),
        (altered({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "entry"),
        (
            altered({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
            "of 'x' ",
        ),
        (
            altered({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
            "may be truncated",
        ),
        (altered({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"), "ent"),
    ],
)
def test_malformed(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_tensors(tmp_path / "a")
    assert message in str(caught.value)


def test_truncated(tmp_path: Path) -> None:
    content = write(tmp_path / "a", ARRAYS).read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "b").write_bytes(content[:length])
        with pytest.raises(InputError, match="not a readable safetensors file"):
            read_tensors(tmp_path / "b")


def test_pages_that_are_forgotten_can_be_read_again(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=2_000_000)
    loaded = read_tensors(write(tmp_path / "a", {"x": array, "y": np.zeros(0, np.float32)}))
    np.testing.assert_array_equal(loaded["x"], array)
    before = _mapped_bytes()
    for tensor in loaded.values():
        forget_pages(tensor)
    # Of 16 MB, all whole pages are released.
    assert before - _mapped_bytes() >= 15_000_000
    np.testing.assert_array_equal(loaded["x"], array)


def _mapped_bytes() -> int:
    """Resident bytes of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("RssFile:"))
    return 1024 * int(line.split()[1])
