"""A convolutional network whose images are split in space, trained beside one device."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests.tiers import FULL
from tests.training_cases import shard

# Padding, strides, overlapping pools, groups, a convolution of one element and a global pool.
_NODES = """
    c1 = Conv<pads=[1,1,1,1]>(x, w1, b1)
    r1 = Relu(c1)
    p1 = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r1)
    c2 = Conv<strides=[2,2], pads=[1,1,1,1]>(p1, w2)
    r2 = Relu(c2)
    p2 = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(r2)
    c3 = Conv<group=8, pads=[1,1,1,1]>(p2, w3, b3)
    c4 = Conv(c3, w4)
    g = GlobalAveragePool(c4)
    f = Flatten(g)
    y = Gemm<transB=1>(f, w5, b5)
"""
_WEIGHTS = {
    "w1": (6, 3, 3, 3),
    "b1": (6,),
    "w2": (8, 6, 3, 3),
    "w3": (8, 1, 3, 3),
    "b3": (8,),
    "w4": (16, 8, 1, 1),
    "w5": (10, 16),
    "b5": (10,),
}


def _network(height: str) -> ir.Model:
    graph = onnx.parser.parse_graph(
        f"g (float[batch,3,{height},20] x) => (float[batch,10] y) {{ {_NODES} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in _WEIGHTS.items():
        array = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    opsets = [onnx.helper.make_opsetid("", 20)]
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))


_SPLITS = (
    ("23", "{sp: 2, q: 2}", "[~, ~, sp, q]"),
    ("24", "{dp: 2, sp: 2}", "[dp, ~, sp, ~]"),
    ("22", "{sp: 4}", "[~, ~, sp, ~]"),
)


@pytest.mark.parametrize(("height", "mesh", "rows"), _SPLITS if FULL else _SPLITS[:1])
def test_images_split_in_space_train_as_unsharded_ones(
    tmp_path: Path, height: str, mesh: str, rows: str
) -> None:
    strategy = tmp_path / "strategy.yaml"
    strategy.write_text(f"mesh: {mesh}\ndataset: {{x: {rows}}}\n")
    ranks = shard(tmp_path / "ranks", _network(height), strategy)
    reference = shard(tmp_path / "one", _network(height), "replicate", devices=1)
    found = verify(ranks, reference, [{"batch": 3}], options=VerifyOptions(steps=2))
    assert [problem for case in found for problem in case.problems] == []
    program = Manifest.load(ranks).program("training_model")
    halos = [c for c in program.collectives if c.op == "Permute"]
    # Five nodes have overlapping windows, and so have their gradients by images and weights.
    assert len(halos) > 10
