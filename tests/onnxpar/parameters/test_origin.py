"""Whether all elements of an initializer are the same number."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.parameters import origin
from onnxpar.parameters.origin import is_uniform

SHAPE = (3, 1 << 20)


def external(path: Path, offset: int) -> ir.Value:
    tensor = ir.ExternalTensor(
        path.name, offset, 12 << 20, ir.DataType.FLOAT, shape=ir.Shape(SHAPE), name="w",
        base_dir=path.parent,
    )  # fmt: skip
    return ir.Value(name="w", const_value=tensor)


@pytest.mark.parametrize(("at", "uniform"), [(0, False), (1, False), (-1, False), (None, True)])
def test_blocks(at: int | None, *, uniform: bool) -> None:
    """One other element anywhere is enough."""
    array = np.full(SHAPE, 2.0, np.float32)
    if at is not None:
        array.ravel()[at] = 1.0
    assert is_uniform(ir.Value(name="w", const_value=ir.tensor(array))) is uniform


def test_holes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a file has data are elements read; a hole may be at its end or before data."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(40 << 20)
        file.seek(16 << 20)
        file.write(b"\1")
    read: list[str] = []
    array_of = origin.array_of

    def noted(value: ir.Value) -> NDArray[Any]:
        read.append(value.name or "")
        return array_of(value)

    monkeypatch.setattr(origin, "array_of", noted)
    assert is_uniform(external(path, 0))
    assert is_uniform(external(path, 28 << 20))
    assert not read
    assert not is_uniform(external(path, 8 << 20))
    assert read == ["w"]
