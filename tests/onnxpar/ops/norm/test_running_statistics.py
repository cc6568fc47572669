"""Forms of BatchNormalization: what is put in training form, and how statistics are kept."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.shapes import shapes
from onnxpar.ops.norm.running_statistics import forms, infer_with_statistics, keep_statistics
from tests.lockstep import evaluator

OPERANDS = ("s", "b", "mean", "var", "mean2", "var2")
ONE = "[bn] y = BatchNormalization<momentum=0.8>(x, s, b, mean, var)"
TWO = """[bn1] h = BatchNormalization<momentum=0.8>(x, s, b, mean, var)
[bn2] y = BatchNormalization<momentum=0.5>(h, s, b, {}, {})"""
TRAINED = "[bn] y, p, q = BatchNormalization<training_mode=1, momentum=0.8>(x, s, b, mean, var)"


def read(nodes: str, outputs: str = "float[n, 4] y", opset: int = 18) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": {opset}]>\n'
    text += f"g (float[n, 4] x) => ({outputs}) {{ {nodes} }}"
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(1)
    for name in OPERANDS:
        array = rng.uniform(0.5, 2, 4).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return normalise(ir.from_proto(proto))


def kept(model: ir.Model, *frozen: str) -> dict[str, str]:
    env = shapes(model, symbol_table(model, {}))
    return dict(keep_statistics(model, env, frozen, "new.").updated)


def ran(model: ir.Model, x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    # onnxruntime's kernel writes new statistics over the old ones, which the update still reads; it
    # gets no such node from us.
    return evaluator(ir.to_proto(model), True)({"x": x})


def weights(model: ir.Model) -> dict[str, NDArray[np.float32]]:
    return {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


@pytest.mark.parametrize("text", [ONE, TRAINED])
def test_a_statistic_is_mixed_with_that_of_the_batch(text: str) -> None:
    model = read(text)
    before = weights(model)
    assert kept(model) == {"new.mean": "mean", "new.var": "var"}
    x = np.random.default_rng(2).standard_normal((6, 4)).astype(np.float32)
    made = ran(model, x)
    mean, variance = x.mean(0), x.var(0)
    y = (x - mean) / np.sqrt(variance + 1e-5) * before["s"] + before["b"]
    # Sums of 6 float32: a few units of rounding of numbers of size 3.
    for name, want in (
        ("y", y),
        ("new.mean", 0.8 * before["mean"] + 0.2 * mean),
        ("new.var", 0.8 * before["var"] + 0.2 * variance),
    ):
        np.testing.assert_allclose(made[name], want, rtol=1e-5, atol=1e-6)


def test_a_layer_that_is_called_twice_mixes_twice() -> None:
    model = read(TWO.format("mean", "var"))
    before = weights(model)
    kept(model)
    x = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
    made = ran(model, x)
    h = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * before["s"] + before["b"]
    once = 0.8 * before["mean"] + 0.2 * x.mean(0)
    # Means of five float32 rows of size 1, normalised once: 2^-24 for each of some 16 operations.
    np.testing.assert_allclose(made["new.mean"], 0.5 * once + 0.5 * h.mean(0), rtol=1e-5, atol=1e-6)


def test_each_layer_has_its_own() -> None:
    assert set(kept(read(TWO.format("mean2", "var2"))).values()) == {"mean", "var", "mean2", "var2"}


@pytest.mark.parametrize("frozen", ["mean", "var"])
@pytest.mark.parametrize("text", [ONE, TRAINED])
def test_a_frozen_statistic_keeps_the_inference_form(text: str, frozen: str) -> None:
    model = read(text)
    assert forms(model.graph, [frozen]).fixed == ("bn",)
    assert kept(model, frozen) == {}
    (node,) = model.graph
    assert not node.attributes.get_int("training_mode", 0)
    assert len(node.outputs) == 1


def test_who_reads_a_new_statistic_reads_the_mixed_one() -> None:
    model = read(f"{TRAINED} z = Neg(p)", "float[n, 4] y, float[4] z")
    kept(model)
    made = ran(model, np.ones((3, 4), np.float32))
    np.testing.assert_array_equal(made["z"], -made["new.mean"])


def test_evaluation_takes_the_running_statistics() -> None:
    model = read(TRAINED, "float[n, 4] y, float[4] p")
    before = weights(model)
    infer_with_statistics(model.graph)
    x = np.ones((3, 4), np.float32)
    made = ran(model, x)
    y = (x - before["mean"]) / np.sqrt(before["var"] + 1e-5) * before["s"] + before["b"]
    # Differences of numbers of size 1 can lose a few bits more than the five roundings of 2^-24.
    np.testing.assert_allclose(made["y"], y, rtol=1e-5)
    np.testing.assert_array_equal(made["p"], before["mean"])


def test_statistics_that_are_computed_stay() -> None:
    model = read("m = Neg(mean) [bn] y = BatchNormalization(x, s, b, m, var)")
    assert forms(model.graph, []).stuck == ("bn",)
    assert kept(model) == {}
    assert "training_mode" not in list(model.graph)[-1].attributes
