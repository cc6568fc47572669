"""The preset `tp` is decided for the whole program: fewer bytes, no more memory, same results."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.machine import Link, Machine
from onnxpar.core.sharding import Sharding
from onnxpar.graph.plan import Plan
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.workload import Workload
from onnxpar.strategy import resolve
from onnxpar.strategy.presets import load_strategy

WIRE = Machine("wire", {"float32": 1e30}, 1e30, 1 << 60, 0.0, (Link(0, 1.0, 0.0),))
"""A second is a byte that is sent."""


def block(number: int, x: str) -> str:
    """A feed-forward block with a residual connection."""
    return f"""
        [norm{number}] n{number} = LayerNormalization({x}, scale, shift)
        [up{number}] u{number} = MatMul(n{number}, wu{number})
        [gelu{number}] g{number} = Gelu(u{number})
        [down{number}] d{number} = MatMul(g{number}, wd{number})
        [add{number}] x{number} = Add({x}, d{number})
    """


def patches(batch: str = "batch") -> Workload:
    """A convolution that makes patches, whose features are the residual stream of two blocks."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        vision (float[{batch}, 3, 16, 16] image) => (float[{batch}, 16, 16] y)
        <int64[3] rows = {{0, 16, 16}}>
        {{
            [conv] c = Conv<kernel_shape=[4, 4], strides=[4, 4]>(image, kernel)
            [flat] f = Reshape(c, rows)
            [turned] x0 = Transpose<perm=[0, 2, 1]>(f)
            {block(1, "x0")}
            {block(2, "x1")}
            [out] y = Identity(x2)
        }}
    """
    proto = onnx.parser.parse_model(text)
    shapes = {"kernel": (16, 3, 4, 4), "scale": (16,), "shift": (16,)}
    shapes |= {f"wu{i}": (16, 64) for i in (1, 2)} | {f"wd{i}": (64, 16) for i in (1, 2)}
    for name, shape in shapes.items():
        weight = onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
        proto.graph.initializer.append(weight)
    return Workload.inference(analyse(ir.from_proto(proto), {}))


def sent(workload: Workload, plan: Plan) -> int:
    """Bytes that a device sends at the typical batch of 64."""
    return round(workload.price(plan, WIRE, {}).communicating)


def test_a_split_patch_convolution_does_not_shard_the_residual_stream() -> None:
    """The expert's plan has one AllReduce for each block: the residual stream is replicated."""
    workload = patches()
    seeds = resolve(load_strategy("tp=2"), workload.program)
    decided = decide_parameter_axes(seeds, workload)
    before, after = workload.plan(seeds), workload.plan(decided)
    stream = 64 * 16 * 16 * 4
    assert sent(workload, before) > 3 * stream
    assert sent(workload, after) <= 2.1 * stream
    for number in (1, 2):
        columns, rows = (after.nodes[f"{name}{number}"].inputs[1] for name in ("up", "down"))
        assert columns is not None and columns.describe(after.mesh) == "[~, tp]"
        assert rows is not None and rows.describe(after.mesh) == "[tp, ~]"


@pytest.mark.parametrize("preset", ["tp=2", "dp=2,tp=2", "tp=4"])
def test_the_batch_and_other_axes_stay_as_propagation_has_them(preset: str) -> None:
    workload = patches("4")
    seeds = resolve(load_strategy(preset), workload.program)
    decided = decide_parameter_axes(seeds, workload)
    before, after = workload.plan(seeds), workload.plan(decided)
    ours = {atom for axis in seeds.parameter_axes for atom in axis}

    def batch(sharding: Sharding) -> set[int]:
        return {a for component in sharding.dims[0] for a in component.atoms}

    for name, plan in after.nodes.items():
        for ours_made, made in zip(plan.outputs, before.nodes[name].outputs, strict=True):
            assert batch(ours_made) - ours == batch(made)
            assert not batch(ours_made) & ours


def test_what_the_user_fixed_is_kept() -> None:
    workload = patches()
    seeds = resolve(load_strategy("tp=2"), workload.program)
    shape = workload.program.env.shapes["wu1"]
    fixed = {"wu1": Sharding.replicated(shape)}
    decided = decide_parameter_axes(replace(seeds, parameters=fixed), workload)
    assert decided.parameters["wu1"] == fixed["wu1"]
    assert not workload.plan(decided).parameters["wu1"].split_atoms


def test_nothing_is_searched_without_a_parameter_axis() -> None:
    workload = patches()
    seeds = resolve(load_strategy("dp=2"), workload.program)
    assert decide_parameter_axes(seeds, workload) is seeds
