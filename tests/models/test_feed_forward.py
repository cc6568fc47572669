"""The two feed-forward models against numpy."""

import mlp
import numpy as np
import onnx_ir as ir
import pytest
import two_layer

from tests.models.example import run, unknown_shapes, weights


def reference(x: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
    """Matrix products with ReLU between them, in float64."""
    for matrix in matrices[:-1]:
        x = np.maximum(x @ matrix, 0)
    return x @ matrices[-1]


# float32 sums of n products carry a relative error of about sqrt(n) * 2^-24: 1.7e-6 for n = 784.
# Three such layers stay below 1e-5 of the largest output.
RTOL = 1e-5


@pytest.mark.parametrize("batch", [1, 7])
def test_mlp_equals_numpy(batch: int) -> None:
    model = mlp.build(seed=3)
    x = np.random.default_rng(batch).standard_normal((batch, 1, 28, 28), dtype=np.float32)
    got = run(model, {"x": x})["logits"]
    w = weights(model)
    want = reference(
        x.reshape(batch, 784).astype(np.float64), *(w[f"fc{i}.weight"] for i in (1, 2, 3))
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())
    assert got.shape == (batch, 10)


@pytest.mark.parametrize("batch", [1, 16])
def test_two_layer_equals_numpy(batch: int) -> None:
    model = two_layer.build()
    x = np.random.default_rng(batch).standard_normal((batch, 32), dtype=np.float32)
    got = run(model, {"x": x})["y"]
    w = weights(model)
    want = reference(x.astype(np.float64), w["matmul1.weight"], w["matmul2.weight"])
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


def test_node_names_are_those_the_strategies_address() -> None:
    assert [node.name for node in mlp.build().graph] == [
        "/flatten/Flatten",
        "/fc1/MatMul",
        "/relu1/Relu",
        "/fc2/MatMul",
        "/relu2/Relu",
        "/fc3/MatMul",
    ]
    assert [node.name for node in two_layer.build().graph] == [
        "/matmul1/MatMul",
        "/relu/Relu",
        "/matmul2/MatMul",
    ]


@pytest.mark.parametrize("model", [mlp.build(), two_layer.build()], ids=["mlp", "two_layer"])
def test_every_shape_is_inferred(model: ir.Model) -> None:
    assert unknown_shapes(model) == []


def test_hidden_layers_of_any_number_and_width() -> None:
    model = mlp.build(image=4, hidden=(6, 5, 3), classes=2)
    shapes = {name: value.shape for name, value in model.graph.initializers.items()}
    assert shapes == {
        "fc1.weight": (16, 6),
        "fc2.weight": (6, 5),
        "fc3.weight": (5, 3),
        "fc4.weight": (3, 2),
    }


@pytest.mark.parametrize("field", [{"image": 0}, {"hidden": (4, -1)}, {"classes": 0}])
def test_mlp_refuses_empty_layers(field: dict[str, int | tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="expected a positive integer"):
        mlp.build(**field)
