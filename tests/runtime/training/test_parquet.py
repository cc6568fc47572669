"""Parquet files as training data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.entries import TensorEntry
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.training.parquet import read_parquet
from onnxpar_runtime.training.sources import Samples, open_source

arrow: Any = pytest.importorskip("pyarrow", reason="reads Parquet: the extra parquet")
parquet: Any = pytest.importorskip("pyarrow.parquet")


def write(path: Path, **columns: Any) -> Path:
    parquet.write_table(arrow.table(columns), path, row_group_size=3)
    return path


def test_columns_of_numbers_and_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, image = rng.normal(0, 1, (7, 4)).astype(np.float32), rng.integers(0, 9, (7, 2, 3))
    flags, labels = rng.random(7) > 0.5, rng.integers(0, 9, 7).astype(np.int32)
    fixed = arrow.FixedSizeListArray.from_arrays(arrow.array(x.reshape(-1)), 4)
    path = write(
        tmp_path / "a.parquet",
        x=fixed,
        image=arrow.array(image.tolist()),
        flags=arrow.array(flags),
        labels=arrow.array(labels),
    )
    got = read_parquet(path, ["x", "image", "flags", "labels"])
    for name, expected in (("x", x), ("image", image), ("flags", flags), ("labels", labels)):
        assert got[name].dtype == expected.dtype
        np.testing.assert_array_equal(got[name], expected)


def test_as_a_source(tmp_path: Path) -> None:
    specs = [
        TensorEntry("x", "float32", ("batch", 2), ((("batch", ()),), ((2, ()),))),
        TensorEntry("labels", "int64", ("batch",), ((("batch", ()),),)),
    ]
    path = write(tmp_path / "a.parquet", x=[[1.0, 2.0], [3.0, 4.0]], labels=[0, 1])
    with pytest.raises(InputError, match="input 'x': expected float32, got float64"):
        open_source(f"parquet:{path}", specs, "labels")
    x = arrow.array([[1.0, 2.0], [3.0, 4.0]], arrow.list_(arrow.float32()))
    write(path, x=x, labels=[0, 1], title=["not", "read"])
    source = open_source(f"parquet:{path}", specs, "labels")
    assert isinstance(source, Samples) and source.count == 2
    taken = source.take(np.array([1]))
    assert taken["x"].tolist() == [[3.0, 4.0]] and taken["labels"].tolist() == [1]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(InputError, match=r"a\.parquet: no such file"):
        read_parquet(path, ["x", "image", "flags", "labels"])
    write(path, x=[1.0, 2.0])
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-9], whole[: len(whole) // 2], b"\0" * 400):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.parquet: expected a Parquet file: "):
            read_parquet(path, ["x", "image", "flags", "labels"])
    for column, message in (
        ([1, None], "'x': expected a value in every row, got 1 nulls"),
        ([[1], [2, 3]], "'x': expected lists of one length, got lengths from 1 to 2"),
        ([[1], None], "'x': expected a value in every row, got 1 nulls"),
        (["a", "b"], "'x': expected numbers or lists of them, got string"),
    ):
        write(path, x=column)
        with pytest.raises(InputError, match=message):
            read_parquet(path, ["x", "image", "flags", "labels"])


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", x=[1])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(LaunchError, match=r"pip install 'onnxpar\[parquet\]'"):
        read_parquet(path, ["x", "image", "flags", "labels"])
