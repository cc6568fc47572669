"""Arrays of a Parquet file, read with pyarrow: one row for each sample."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.regular_file import open_regular
from onnxpar_runtime.errors import InputError, LaunchError


def read_parquet(path: str | Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Returns those of a file's columns that are named; each level of lists is a further dim.

    Raises:
        LaunchError: The package `pyarrow` is missing.
        InputError: The file cannot be read, or a column is not an array of numbers.
    """
    try:
        # A tenth of a second, and not everywhere installed.
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise LaunchError(
            "--data parquet: expected the package pyarrow, which is not installed: "
            "pip install 'onnxpar[parquet]'"
        ) from None
    try:
        with open_regular(path) as stream:
            file = parquet.ParquetFile(stream)
            columns = file.schema_arrow.names
            table = file.read([name for name in dict.fromkeys(columns) if name in names])
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: expected a Parquet file: {error}") from None
    if len(set(columns)) != len(columns):
        raise InputError(f"{path}: expected columns of different names, got {columns}")
    return {name: _array(path, name, table.column(name)) for name in table.column_names}


def _array(path: str | Path, name: str, column: Any) -> NDArray[Any]:
    """Returns a column as an array."""
    from pyarrow import compute, types

    where, shape = f"{path}: column {name!r}", [len(column)]
    values, kind = column.combine_chunks(), column.type
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if values.null_count:
            raise InputError(
                f"{where}: expected a value in every row, got {values.null_count} nulls"
            )
        lengths = compute.unique(compute.list_value_length(values)).to_pylist()
        if len(lengths) > 1:
            raise InputError(
                f"{where}: expected lists of one length, got lengths from {min(lengths)} to "
                f"{max(lengths)}"
            )
        shape.append(lengths[0] if lengths else 0)
        # `flatten` takes account of slices, `values` does not.
        values, kind = values.flatten(), kind.value_type
    if values.null_count:
        raise InputError(f"{where}: expected a value in every row, got {values.null_count} nulls")
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InputError(f"{where}: expected numbers or lists of them, got {column.type}")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
