"""Two names of one unique symbol: the plan takes them for one size, and every run checks it."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxpar import Strategy, Symbol
from onnxpar.api.shard_model import shard_model
from onnxpar_runtime.errors import SymbolValueError
from onnxpar_runtime.group import run_threads
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.cases import complete_case

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[2, b] z, float[2, a] x) => (float[2, c] y) { [c] y = Concat <axis = 1> (z, x) }"""


def write(folder: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), folder / "m.onnx")
    strategy = Strategy.from_text(
        "mesh: {dp: 2}\nnodes: {c: {in: [[~, dp], [~, dp]]}}", source="test"
    )
    one = Symbol(unique=True)
    shard_model(folder / "m.onnx", strategy, folder / "out", symbols={"a": one, "b": one})
    return folder / "out"


def test_checked_at_run_time(tmp_path: Path) -> None:
    out = write(tmp_path)
    symbols = json.loads((out / "manifest.json").read_text())["symbols"]
    assert symbols["b"]["same_as"] == "a" and "same_as" not in symbols["a"]
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    np.testing.assert_array_equal(run_threads(out, {"x": x, "z": x})["y"], np.hstack([x, x]))
    with pytest.raises(SymbolValueError, match=r"'a' and 'b': expected equal.*got 3 and 5"):
        run_threads(out, {"x": x[:, :3], "z": x})


def test_verify_fills_the_other_name(tmp_path: Path) -> None:
    manifest = Manifest.load(write(tmp_path))
    program = manifest.program("model")
    assert complete_case(manifest, program, {"a": 7}) == {"a": 7, "b": 7}
    assert complete_case(manifest, program, {"b": 9}) == {"a": 9, "b": 9}
    with pytest.raises(SymbolValueError, match="got 7 and 9"):
        complete_case(manifest, program, {"a": 7, "b": 9})
