"""The export from PyTorch keeps parameters, names and open dims, and computes the same."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.models.example import run
from tests.training_cases import shard

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra zoo")

from export_torch import load_function  # noqa: E402

from onnxpar.api.pytorch.export_module import Example, export, plain_export  # noqa: E402
from onnxpar_runtime.manifest import Manifest  # noqa: E402
from tests.tiers import FULL  # noqa: E402

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"

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
    out = shard(tmp_path / "net", ir.from_proto(ir.to_proto(exported)), "tp=2")
    states = Manifest.load(out).trained().states.values()
    trained = {state.parameter for state in states if state.kind == "gradient"}
    wanted = {n for n, p in net.named_parameters() if p.requires_grad}
    assert trained == {n for n in wanted if not n.startswith("unused")}


class Kinds(torch.nn.Module):
    """Each kind of tensor that becomes an initializer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
        self.plain_norm = torch.nn.LayerNorm(8, elementwise_affine=False)
        self.groups = torch.nn.GroupNorm(2, 8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.shift = torch.nn.Parameter(torch.zeros(1))
        self.fixed = torch.nn.Parameter(torch.linspace(1, 2, 8), requires_grad=False)
        self.register_buffer("mean", torch.linspace(2, 3, 8))
        self.register_buffer("slopes", torch.linspace(3, 4, 8), persistent=False)
        self.plain = torch.linspace(4, 5, 8)

    def forward(self, ids: Any) -> Any:
        x = (self.embed(ids) - self.mean) * self.slopes / self.plain * self.fixed
        x = self.plain_norm(self.norms[1](self.norms[0](x * self.scale + self.shift)))
        x = self.groups(x.transpose(1, 2)).transpose(1, 2)
        # PyTorch names this result "mean" too.
        return self.head(x - x.mean((1, 2), keepdim=True))


@pytest.mark.filterwarnings("ignore")  # of PyTorch about itself
def test_only_parameters_that_need_a_gradient_are_marked_so() -> None:
    torch.manual_seed(0)
    module = Kinds()
    ids = torch.zeros(3, 5, dtype=torch.int64)
    model = export(Example(module, {"ids": ids}, {"ids": {0: "batch", 1: "seq"}}))
    kinds = {n: v.metadata_props[KIND] for n, v in model.graph.initializers.items()}
    assert set(kinds.values()) == {"PARAMETER", "BUFFER"}
    marked = {name for name, kind in kinds.items() if kind == "PARAMETER"}
    # The head's weight goes by its first name. Ones and zeros of two norms are equal, not one.
    assert marked == {n for n, p in module.named_parameters() if p.requires_grad}
    assert {"scale", "shift", "embed.weight", "norms.0.weight", "norms.1.weight"} <= marked
    assert {"fixed", "mean"} <= set(kinds)
    for name, value in model.graph.initializers.items():
        if name in marked:
            wanted = module.get_parameter(name).detach().numpy()
            assert value.const_value is not None
            assert value.const_value.shape.numpy() == wanted.shape
            np.testing.assert_array_equal(value.const_value.numpy(), wanted)
    ids = torch.tensor(np.random.default_rng(0).integers(0, 11, (2, 4)))
    want = module(ids).detach().numpy()
    got = run(model, {"ids": ids.numpy()})["logits"]
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU] if FULL else [torch.nn.LSTM])
def test_recurrent_modules_keep_their_length_open(kind: Any) -> None:
    """PyTorch alone fixes it in the second export of a process, and notes it of the output."""
    torch.manual_seed(0)
    module = First(kind(8, 8, batch_first=True))
    example = Example(module, {"x": torch.zeros(3, 7, 8)}, {"x": {0: "batch", 1: "seq"}})
    for _ in range(2):
        model = export(example)
        (x,), (logits,) = model.graph.inputs, model.graph.outputs
        assert [str(d) for d in x.shape or ()] == ["batch", "seq", "8"]
        assert [str(d) for d in logits.shape or ()] == ["batch", "seq", "8"]
        fed = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
        want = module(torch.tensor(fed)).detach().numpy()
        got = run(model, {"x": fed})["logits"]
        np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


class First(torch.nn.Module):
    """The first of a module's outputs."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)[0]


@pytest.mark.full
def test_a_dim_that_pytorch_fixes_is_refused() -> None:
    """It unrolls this module, and says nothing."""
    module = First(torch.nn.RNN(8, 8, batch_first=True))
    example = Example(module, {"x": torch.zeros(3, 4, 8)}, {"x": {0: "batch", 1: "seq"}})
    message = r"input 'x', dim 1 \(seq\): expected it to stay open, got 4"
    with pytest.raises(ValueError, match=message):
        export(example)
    with pytest.raises(ValueError, match=message):
        plain_export(example, optimize=True)
    fixed = replace(example, dims={"x": {0: "batch"}})
    assert [str(d) for d in export(fixed).graph.inputs[0].shape or ()] == ["batch", "4", "8"]


@pytest.mark.parametrize("optimize", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_plain_export_is_what_pytorch_writes(net: Any, optimize: bool) -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    example = Example(net, {"ids": ids}, {"ids": {0: "batch", 1: "seq"}}, outputs=("a",))
    model = plain_export(example, optimize=optimize)
    # Optimised, the norm is folded into the convolution before it, and the weights are transposed.
    assert ("fc.weight" in model.graph.initializers) is not optimize
    assert ("bn.weight" in model.graph.initializers) is not optimize
    fed = np.random.default_rng(0).integers(0, 11, (2, 4))
    want = net(torch.tensor(fed))[0].detach().numpy()
    (got,) = run(model, {"ids": fed}).values()
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


def test_mistakes_are_reported(net: Any) -> None:
    example = Example(net, {"ids": torch.zeros(3, 5, dtype=torch.int64)}, {"x": {0: "batch"}})
    with pytest.raises(ValueError, match="dims of 'x': expected one of ids"):
        export(example)
    with pytest.raises(ValueError, match="3 names for outputs, of which there are 2"):
        export(replace(example, dims={}, outputs=("a", "b", "c")))
    with pytest.raises(ValueError, match=r"expected package\.module:function"):
        load_function("zoo")
    with pytest.raises(ValueError, match="no_such_module"):
        load_function("no_such_module:f")
