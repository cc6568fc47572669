"""Dropout in training mode, through files and collective library: equal on every mesh."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar import shard_model
from onnxpar_format.entries import COUNTERS
from onnxpar_runtime.group import ThreadsGroup

MODEL = """
  <ir_version: 10, opset_import: ["" : 20]>
  g (float[batch,6] x) => (float[batch,6] y, float[batch,6] z)
  <float r = {0.25}, bool t = {1}> {
    [drop1] y = Dropout (x, r, t)
    [drop2] z = Dropout (x, r, t)
  }"""
RATIO = 0.25


def run(path: Path, counters: dict[str, int], x: np.ndarray) -> dict[str, np.ndarray]:
    with ThreadsGroup(path) as group:
        for session in group.members:
            session.counters.update(counters)
        return group.run_global({"x": x})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("random")
    onnx.save(onnx.parser.parse_model(MODEL), root / "model.onnx")
    found = {}
    for preset, devices in (("dp=1", 1), ("dp=3", 3), ("dp=4", 4)):
        shard_model(root / "model.onnx", preset, root / preset, devices=devices)
        found[preset] = root / preset
    return found


@pytest.mark.parametrize("preset", ["dp=3", "dp=4"])
def test_a_division_drops_what_one_device_drops(folders: dict[str, Path], preset: str) -> None:
    x = np.arange(1, 43, dtype=np.float32).reshape(7, 6)
    for counters in ({}, {"seed": 5}, {"seed": 5, "step": 9}):
        one = run(folders["dp=1"], counters, x)
        many = run(folders[preset], counters, x)
        for name in ("y", "z"):
            np.testing.assert_array_equal(many[name], one[name])
            kept = one[name] != 0
            # A quotient and a product in float32: two roundings of 2^-24, and those of 1 - RATIO.
            np.testing.assert_allclose(one[name][kept], x[kept] / (1 - RATIO), rtol=1e-6)


def test_draws_depend_on_every_counter_and_on_the_node(folders: dict[str, Path]) -> None:
    x = np.ones((500, 6), np.float32)
    runs = [run(folders["dp=1"], c, x) for c in ({}, *({name: 1} for name in COUNTERS))]
    masks = [r["y"] != 0 for r in runs] + [runs[0]["z"] != 0]
    for mask in masks:
        # 3000 draws: the standard deviation of the mean is sqrt(0.25 · 0.75 / 3000) < 0.008.
        assert abs(mask.mean() - (1 - RATIO)) < 0.04
    for i, first in enumerate(masks):
        assert all((first != second).any() for second in masks[i + 1 :])
