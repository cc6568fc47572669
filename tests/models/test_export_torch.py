"""The export from PyTorch keeps parameters; the zoo's networks are what PyTorch computes."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from _run import run

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")

from export_torch import Example, export, load_function, save  # noqa: E402

from onnxpar.passes.load import load, normalise  # noqa: E402
from onnxpar.training.trainable import select, untie  # noqa: E402

FULL = bool(os.environ.get("ONNXPAR_FULL"))

# Sums have at most 128 terms, a network some thirty sums one after the other, and norms divide what
# was added at their scale: 30 sqrt(128) 2^-24 = 2e-5 of the largest output.
RTOL = 2e-5


class Net(torch.nn.Module):
    """Everything that a plain export damages: equal tensors, transposed and folded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.bn = torch.nn.BatchNorm1d(8)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
        self.fc = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = torch.nn.Linear(2, 2)
        self.fixed = torch.nn.Parameter(torch.linspace(1, 2, 8), requires_grad=False)
        self.register_buffer("scale", torch.linspace(2, 3, 8))

    def forward(self, ids: Any) -> tuple[Any, Any]:
        x = self.embed(ids) * self.scale * self.fixed
        x = self.bn(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = x + self.fc(self.norms[0](x))
        return self.head(self.norms[1](x)), x


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def exported(net: Any) -> ir.Model:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    return export(Example(net, {"ids": ids}, {"ids": {0: "batch", 1: "seq"}}))


def test_every_parameter_that_is_used_has_its_name(net: Any, exported: ir.Model) -> None:
    kept = exported.graph.initializers
    for name, parameter in net.named_parameters():
        if name.startswith("unused"):
            assert name not in kept
            continue
        tensor = kept[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), parameter.detach().numpy())
    assert {"bn.running_mean", "bn.running_var"} <= set(kept)


def test_it_computes_what_the_module_does(net: Any, exported: ir.Model) -> None:
    assert [value.name for value in exported.graph.outputs] == ["logits"]
    for batch, seq in ((1, 2), (4, 9)):
        ids = np.random.default_rng(0).integers(0, 11, (batch, seq))
        want = net(torch.tensor(ids))[0].detach().numpy()
        got = run(exported, {"ids": ids})["logits"]
        np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


@pytest.mark.filterwarnings("ignore")  # of PyTorch about itself
def test_it_is_as_small_as_an_optimised_export(net: Any, exported: ir.Model) -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    plain = torch.onnx.export(net, (ids,), dynamo=True, verbose=False, opset_version=20)
    ours, theirs = (Counter(n.op_type for n in m.graph) for m in (exported, plain.model))
    # The plain one folds BatchNormalization into the convolution and transposes the weights.
    assert ours - theirs == Counter(BatchNormalization=1, Transpose=2)
    assert set(plain.model.graph.initializers) != set(exported.graph.initializers)


def test_nodes_are_named_by_their_module(exported: ir.Model) -> None:
    names = [node.name or "" for node in exported.graph]
    assert len(set(names)) == len(names)
    assert {"/conv/Conv", "/bn/BatchNormalization", "/norms.1/LayerNormalization"} <= set(names)


def test_all_that_needs_a_gradient_is_trained(net: Any, exported: ir.Model, tmp_path: Path) -> None:
    save(exported, tmp_path / "net.onnx")
    loaded = load(tmp_path / "net.onnx")
    originals = frozenset(loaded.graph.initializers)
    model = normalise(loaded)
    assert untie(model) == ()
    trained = {p.name for p in select(model, originals).trained}
    wanted = {n for n, p in net.named_parameters() if p.requires_grad}
    assert trained == {n for n in wanted if not n.startswith("unused")}


def test_mistakes_are_told(net: Any) -> None:
    example = Example(net, {"ids": torch.zeros(3, 5, dtype=torch.int64)}, {"x": {0: "batch"}})
    with pytest.raises(ValueError, match="dims of 'x': expected one of ids"):
        export(example)
    with pytest.raises(ValueError, match="3 names for outputs, of which there are 2"):
        export(replace(example, dims={}, outputs=("a", "b", "c")))
    with pytest.raises(ValueError, match=r"expected package\.module:function"):
        load_function("zoo")
    with pytest.raises(ValueError, match="no_such_module"):
        load_function("no_such_module:f")


QUICK = ("gpt2",)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["mlp", "gpt2", "bert", "llama", "mixtral", "qwen3_moe", "t5", "bart", "vit", "resnet50",
     "convnext", "whisper", "mamba"],
)  # fmt: skip
def test_networks_of_the_zoo_compute_what_pytorch_does(name: str) -> None:
    zoo = pytest.importorskip("zoo", reason="needs transformers: the extra zoo")
    if not FULL and name not in QUICK:
        pytest.skip("ten seconds each; with ONNXPAR_FULL=1")
    made = zoo.example(name)
    model = export(made)
    kept = set(model.graph.initializers)
    assert {n for n, _ in made.module.named_parameters()} <= kept
    rng = np.random.default_rng(0)
    sizes = {"batch": 2, "seq": 6, "target": 9}
    feeds = {}
    for key, traced in made.inputs.items():
        shape = [
            sizes[s] if (s := made.dims[key].get(i)) else n for i, n in enumerate(traced.shape)
        ]
        if traced.dtype == torch.int64:
            feeds[key] = rng.integers(0, 2, shape)
        else:
            feeds[key] = rng.standard_normal(shape).astype(np.float32)
    with torch.no_grad():
        want = made.module(**{n: torch.tensor(a) for n, a in feeds.items()})
    want = (want if isinstance(want, torch.Tensor) else want.logits).numpy()
    got = run(model, feeds)["logits"]
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())
