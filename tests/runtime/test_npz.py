"""Arrays from files: only lossless conversions, and clear errors otherwise."""

import stat
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxpar_format.entries import TensorEntry
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import convert, read_npz, write_npz
from tests.runtime import hand_made


def spec(dtype: str) -> TensorEntry:
    return TensorEntry("x", dtype, (2,), (((2, ()),),))


@pytest.mark.parametrize(
    ("have", "want"),
    [("int32", "int64"), ("uint8", "int64"), ("float16", "float32"), ("float32", "float64"),
     ("bool", "bool"), ("int64", "int64")],
)  # fmt: skip
def test_lossless(have: str, want: str) -> None:
    result = convert([spec(want)], {"x": np.array([0, 1], have)})["x"]
    assert result.dtype == np.dtype(want)
    assert result.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("have", "want"),
    [("float64", "float32"), ("int64", "int32"), ("int64", "float32"), ("uint64", "int64"),
     ("bool", "int64"), ("int64", "bool"), ("float32", "int64"), ("float32", "bfloat16"),
     ("S4", "int32"), ("S2", "bfloat16")],
)  # fmt: skip
def test_refused(have: str, want: str) -> None:
    with pytest.raises(InputError, match=f"input 'x': expected {want}, got"):
        convert([spec(want)], {"x": np.zeros(2, have)})


def test_bfloat16_survives_a_file(tmp_path: Path) -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    write_npz(tmp_path / "a.npz", {"x": array})
    result = convert([spec("bfloat16")], read_npz(tmp_path / "a.npz"))["x"]
    assert result.dtype == array.dtype
    assert result.astype(float).tolist() == [1.5, -2]


def test_names_and_dims(tmp_path: Path) -> None:
    specs = Manifest.load(hand_made.data_parallel(tmp_path / "a")).program("model").inputs
    with pytest.raises(
        InputError, match=r"expected \['x'\], got \['z'\]: missing \['x'\], unknown"
    ):
        convert(specs, {"z": np.zeros((2, 3), np.float32)})
    with pytest.raises(InputError, match=r"expected 2 dims, got shape \(3,\)"):
        convert(specs, {"x": np.zeros(3, np.float32)})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_npz(tmp_path / "none.npz")
    for name, content in (("text", b"hello"), ("empty", b""), ("truncated", b"PK\x03\x04abc")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"not a readable \.npz") as caught:
            read_npz(tmp_path / name)
        assert "pickle" not in str(caught.value)
    np.save(tmp_path / "one.npy", np.zeros(2))
    with pytest.raises(InputError, match="got one array"):
        read_npz(tmp_path / "one.npy")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    with pytest.raises(
        InputError,
        match=r"not a readable .*array 'x': it contains Python "
        r"objects$",
    ):
        read_npz(tmp_path / "pickled.npz")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(InputError, match=r"array 'notes\.txt': it is not an array$"):
        read_npz(tmp_path / "other.zip")
    with pytest.raises(InputError, match=r"not a readable .*directory"):
        read_npz(tmp_path)
    write_npz(tmp_path / "complete.npz", {"x": np.arange(1000.0)})
    complete = (tmp_path / "complete.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(complete[: len(complete) // 2])
    with pytest.raises(InputError, match="not a readable"):
        read_npz(tmp_path / "half.npz")
    with zipfile.ZipFile(tmp_path / "member.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY")
    with pytest.raises(InputError, match=r"^\S*member.npz: not a readable") as caught:
        read_npz(tmp_path / "member.npz")
    assert str(caught.value).count("member.npz") == 1


def test_written_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    write_npz(target, {"y": np.arange(3)})
    assert read_npz(target)["y"].tolist() == [0, 1, 2]
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
    with pytest.raises(InputError, match=r"its folder .* does not exist"):
        write_npz(tmp_path / "nowhere" / "out.npz", {"y": np.arange(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]
