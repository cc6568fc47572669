"""What PyTorch's exporter does to parameters is undone: each case is one that a module meets."""

import copy
import warnings
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from onnxpar.core.errors import ModelError
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.origin import Role, origin_of
from onnxpar.parameters.recognise import read_parameters, recognise
from onnxpar.parameters.trainable import Selection, select
from tests.onnxpar.parameters.declared import read
from tests.tiers import FULL

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
nn = torch.nn
F = torch.nn.functional
full = pytest.mark.full
BATCH = torch.export.Dim("batch")
BATCHES = (2, 5)

# A sum of 64 terms and a few functions behind it: 8 · 2^-24 times some ten of the largest element.
# At most 100 roundings of 6e-8, relative to the largest value.
ATOL = 1e-5


def exported(module: Any, inputs: Any, *, optimize: bool = True) -> ir.Model:
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (inputs,),
            dynamic_shapes=({0: BATCH},),
            dynamo=True,
            optimize=optimize,
            verbose=False,
        )
    # As it is in a file.
    return ir.from_proto(ir.to_proto(program.model))


def run(model: ir.Model, x: NDArray[Any]) -> NDArray[Any]:
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(found)


def check(module: Any, *, optimize: bool = True) -> tuple[Selection, tuple[str, ...], ir.Model]:
    """Recognises an export of a module of [batch, 8] inputs; it computes what the module does."""
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    found = read_parameters(exported(module, x, optimize=optimize))
    rng = np.random.default_rng(0)
    for batch in BATCHES:
        fed = rng.standard_normal((batch, 8)).astype(np.float32)
        want = module(torch.tensor(fed)).detach().numpy()
        got = run(found.model, fed)
        np.testing.assert_allclose(got, want, rtol=0, atol=ATOL * max(1.0, np.abs(want).max()))
    return select(found.model, REGISTRY), found.notices, found.model


def elements(module: Any) -> tuple[int, int]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return sum(p.numel() for p in parameters), len(parameters)


class Net(nn.Module):  # type: ignore[misc]
    """A module that is what a function makes of it."""

    def __init__(self, forward: Any, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def P(*shape: int, value: float | None = None) -> Any:
    torch.manual_seed(1)
    return nn.Parameter(torch.randn(*shape) if value is None else torch.full(shape, value))


def layers(count: int, first: Any = None) -> Any:
    first = first or nn.Linear(8, 8)
    return nn.ModuleList(copy.deepcopy(first) for _ in range(count))


def _through(net: Any, x: Any) -> Any:
    for layer in net.layers:
        x = torch.relu(layer(x))
    return x


def _groups(net: Any, x: Any) -> Any:
    return net.second(net.first(x[:, :, None])).squeeze(-1)


CASES = {
    "norms that begin alike": lambda: Net(
        lambda n, x: n.b(torch.tanh(n.a(x))), a=nn.LayerNorm(8), b=nn.LayerNorm(8)
    ),
    "a norm without scale beside one with ones": lambda: Net(
        lambda n, x: n.b(torch.tanh(n.a(x))),
        a=nn.LayerNorm(8),
        b=nn.LayerNorm(8, elementwise_affine=False),
    ),
    "a norm without scale before one with ones": lambda: Net(
        lambda n, x: n.b(torch.tanh(n.a(x))),
        a=nn.LayerNorm(8, elementwise_affine=False),
        b=nn.LayerNorm(8),
    ),
    "group norms with and without scale": lambda: Net(
        _groups, first=nn.GroupNorm(2, 8), second=nn.GroupNorm(2, 8, affine=False)
    ),
    "group norms without and with scale": lambda: Net(
        _groups, first=nn.GroupNorm(2, 8, affine=False), second=nn.GroupNorm(2, 8)
    ),
    "group norms of as many groups as channels": lambda: Net(
        _groups, first=nn.GroupNorm(8, 8), second=nn.GroupNorm(8, 8)
    ),
    "copied layers": lambda: Net(_through, layers=layers(3)),
    "one layer twice": lambda: Net(_through, layers=[fc := nn.Linear(8, 8), fc], fc=fc),
    "a weight and its transpose": lambda: Net(
        lambda n, x: torch.relu(x @ n.w) @ n.w.t(), w=P(8, 8)
    ),
    "transposes of a weight alone": lambda: Net(
        lambda n, x: torch.relu(x @ n.w.t()) @ n.w.t(), w=P(8, 8)
    ),
    "an exponential": lambda: Net(lambda n, x: x * n.s.exp(), s=P(value=0.5)),
    "a negative exponential": lambda: Net(lambda n, x: x * -torch.exp(n.s.float()), s=P(8)),
    "an exponential of a negative": lambda: Net(lambda n, x: x * (-n.s).exp(), s=P(8)),
    "a negative exponential, rearranged": lambda: Net(
        lambda n, x: (x[:, :, None] * -torch.exp(n.s).unsqueeze(0)).flatten(1), s=P(8, 3)
    ),
    "a zero bias": lambda: Net(lambda n, x: n.fc(x), fc=_without_bias()),
    "copied layers with zero biases": lambda: Net(_through, layers=layers(2, _without_bias())),
    "a fresh batch norm": lambda: Net(lambda n, x: n.bn(torch.tanh(x)), bn=nn.BatchNorm1d(8)),
    "a batch norm without scale": lambda: Net(
        lambda n, x: n.bn(torch.tanh(x)) * n.s, bn=nn.BatchNorm1d(8, affine=False), s=P(8)
    ),
    "rows of a table": lambda: Net(
        lambda n, x: x[:, None] + n.table(n.places),
        table=nn.Embedding(3, 8),
        places=torch.tensor([2, 0, 1]),
    ),
    "slopes": lambda: Net(lambda n, x: n.slope(x[:, :, None]).flatten(1), slope=nn.PReLU(8)),
    "an integer and a parameter": lambda: Net(lambda n, x: x * (1 + n.s), s=P(8)),
    "a vector of one row and one": lambda: Net(
        lambda n, x: (x[:, None, None] * (1.0 + n.s)).flatten(1), s=P(1, 1, 8)
    ),
    "a zero bias of a transposed weight": lambda: Net(
        lambda n, x: F.linear(torch.relu(x @ n.w), n.w, n.b), w=P(8, 8), b=P(8, value=0.0)
    ),
    "one and a parameter": lambda: Net(lambda n, x: x * (1.0 + n.s), s=P(8)),
    "a number": lambda: Net(lambda n, x: x * n.s + n.t, s=P(value=1.5), t=P(1)),
    "buffers that equal parameters": lambda: Net(
        lambda n, x: (x * n.a + n.b) * n.c,
        a=P(8, value=2.0),
        b=torch.full((8,), 2.0),
        c=torch.full((8,), 2.0),
    ),
    "a table of sines": lambda: Net(
        lambda n, x: n.fc(x + torch.sin(torch.arange(8.0) * n.f)),
        fc=nn.Linear(8, 8),
        f=torch.ones(8),
    ),
    "halves of one parameter": lambda: Net(
        lambda n, x: torch.cat([x @ h for h in n.w.chunk(2, dim=1)], -1), w=P(8, 8)
    ),
    "a convolution": lambda: Net(
        lambda n, x: n.conv(x[:, None]).flatten(1), conv=nn.Conv1d(1, 3, 3, padding=1)
    ),
}


def _without_bias() -> Any:
    fc = nn.Linear(8, 8)
    nn.init.zeros_(fc.bias)
    return fc


STATISTICS = {
    name: {"bn.running_mean": 0.0, "bn.running_var": 1.0}
    for name in ("a fresh batch norm", "a batch norm without scale")
}
"""Elements of the running statistics that a case has."""


REPLICATED = ("norms that begin alike", "copied layers", "an exponential")
"""Cases that are exported without the optimizer too; of the others that is the full tier."""


@pytest.mark.parametrize(
    ("case", "optimize"),
    [
        # Exports of networks that differ in one place; a quarter of them, and all in the full tier.
        *((case, True) for case in (CASES if FULL else list(CASES)[::4])),
        *((case, False) for case in (CASES if FULL else list(REPLICATED)[:1])),
    ],
)
def test_as_much_is_trained_as_in_pytorch(case: str, optimize: bool) -> None:
    module = CASES[case]()
    selection, _, model = check(module, optimize=optimize)
    assert not selection.doubtful
    kept = {t.name for t in selection.tensors if t.reason == "running statistic"}
    values = {n: model.graph.initializers[n].const_value for n in kept}
    found = {n: float(v.numpy()[0]) for n, v in values.items() if v is not None}
    assert found == STATISTICS.get(case, {})
    counts = selection.counts({})
    count, tensors = elements(module)
    assert counts.trained == counts.elements == count
    assert counts.trained_tensors == tensors
    # By PyTorch's dims, whatever the exporter made of them.
    decayed = sum(p.numel() for p in module.parameters() if p.ndim > 1)
    assert sum(int(np.prod(p.shape)) for p in selection.trained if p.decay) == decayed


def test_tied_weights_are_one() -> None:
    module = Net(
        lambda n, x: n.head(n.table((x > 0).long())),
        table=nn.Embedding(11, 8),
        head=nn.Linear(8, 11),
    )
    module.head.weight = module.table.weight
    selection, notices, _ = check(module)
    assert selection.counts({}).trained == elements(module)[0]
    assert any("is again computed from 'head.weight'" in n for n in notices)
    (shared,) = selection.shared({})
    assert shared.name == "head.weight"


@pytest.mark.parametrize(
    ("function", "how"),
    [
        pytest.param(torch.sigmoid, "sigmoid", marks=full),
        pytest.param(lambda s: s.exp().exp(), "exp 2 times", marks=full),
        (lambda s: -s.tanh(), "neg, tanh"),
        (lambda s: -torch.exp(-torch.exp(s)), "exp 2 times"),
        pytest.param(lambda s: torch.cat([s[:4], s[:4]]), "cat", marks=full),
        (lambda s: torch.cat([s[:4], -s[:4]]), "cat, neg"),
        pytest.param(lambda s: s + s, "add", marks=full),
        (lambda s: s + s[0], "add"),
        pytest.param(lambda s: s * 0.125, "mul", marks=full),
        pytest.param(lambda s: torch.add(1.0, s, alpha=3), "add", marks=full),
    ],
)
def test_what_was_computed_otherwise_is_in_doubt(function: Any, how: str) -> None:
    selection, _, model = check(Net(lambda n, x: x * function(n.gate), gate=P(8)))
    (reason,) = selection.doubtful.values()
    assert reason.startswith(f"computed from gate by {how}")
    assert not select(read_parameters(model).model, REGISTRY, freeze=["gate"]).doubtful
    with pytest.raises(ModelError, match=f"computed from gate by {how}"):
        selection.ask(selection.doubtful)


def test_a_normalised_weight_is_in_doubt() -> None:
    """It is computed before the layer that reads it transposes it."""
    fc = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    selection, _, _ = check(Net(lambda n, x: n.fc(x), fc=fc))
    (reason,) = selection.doubtful.values()
    assert "original0" in reason and "linalg_vector_norm" in reason


@pytest.mark.parametrize(
    "module",
    [
        Net(lambda n, x: F.linear(x[:, None], n.w + n.b @ n.a), w=P(8, 8), a=P(2, 8), b=P(8, 2)),
        pytest.param(Net(lambda n, x: F.linear(x[:, None], n.w * 0.125), w=P(8, 8)), marks=full),
        pytest.param(Net(lambda n, x: F.linear(x[:, None], n.w.tril()), w=P(8, 8)), marks=full),
        pytest.param(Net(lambda n, x: torch.add(x, n.p, alpha=3), p=P(8)), marks=full),
        Net(lambda n, x: torch.addcmul(x, n.a, n.b, value=2), a=P(8), b=P(8)),
        Net(lambda n, x: x[:, :6] * n.p[:6] + x[:, 2:] * n.p[2:], p=P(8)),
    ],
)
def test_what_training_as_it_stands_would_not_follow_is_in_doubt(module: Any) -> None:
    selection, _, model = check(module)
    assert selection.doubtful
    with pytest.raises(ModelError, match="--trainable NAME"):
        selection.ask(selection.doubtful)
    # One of several names freezes no tensor that others are in as well.
    first = next(iter(dict(module.named_parameters())))
    count = len(dict(module.named_parameters()))
    if count > 1:
        with pytest.raises(ModelError, match=f"--freeze '{first}'"):
            select(model, REGISTRY, freeze=[first])


def test_a_number_that_equals_another_by_chance_is_in_doubt() -> None:
    mixed = Net(lambda n, x: n.share * x + (1 - n.share) * torch.tanh(x), share=P(value=0.5))
    selection, _, _ = check(mixed)
    (reason,) = selection.doubtful.values()
    assert "the computation of that value was lost when the model was exported" in reason
    assert not check(mixed, optimize=False)[0].doubtful


def test_rows_that_are_read_twice_are_in_doubt() -> None:
    places = torch.tensor([2, 0, 2])
    module = Net(
        lambda n, x: x[:, None] + n.table(n.places), table=nn.Embedding(3, 8), places=places
    )
    selection, _, _ = check(module)
    (reason,) = selection.doubtful.values()
    assert reason.startswith("computed from table.weight, places by embedding")


def test_a_weight_with_a_batch_norm_in_it_is_in_doubt() -> None:
    module = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Flatten())
    found = read_parameters(exported(module, torch.randn(3, 8, 1)))
    selection = select(found.model, REGISTRY)
    assert set(selection.doubtful) == {"0.weight", "0.bias"}
    assert all("batch norm" in reason for reason in selection.doubtful.values())
    # A file that keeps it trains what the module does.
    kept = select(
        read_parameters(exported(module, torch.randn(3, 8, 1), optimize=False)).model, REGISTRY
    )
    assert not kept.doubtful and kept.counts({}).trained == elements(module)[0]


def test_parameters_that_the_file_lacks_are_reported() -> None:
    _, notices, _ = check(Net(lambda n, x: x * n.gate + n.s, gate=P(value=1.0), s=P(8)))
    (notice,) = notices
    assert notice.startswith("the file lacks gate, which are parameters of the PyTorch module")


def test_bytes_of_a_weight_that_is_not_read_again_stay() -> None:
    """Two parameters of equal elements that nobody copied: those of `Net.p` begin alike."""
    module = Net(lambda n, x: torch.relu(x @ n.a) @ n.b, a=P(8, 8), b=P(8, 8))
    selection, _, _ = check(module)
    assert selection.counts({}).trained == 128


# -- ties that the user tells ---------------------------------------------------------------------

TIED = """g (float[n, 4] x) => (float[n, 4] y) <float[4, 4] w1, float[4, 4] w2, float[4, 3] w3>
{ a = MatMul(x, w1) b = MatMul(a, w2) c = MatMul(x, w3) d = Shape(c) y = Add(a, b) }"""
W = np.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize("second", [W, W.T])
def test_a_tie_of_the_user(second: NDArray[Any]) -> None:
    model = read(TIED, w1=W, w2=second)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    want = run(read(TIED, w1=W, w2=second), x)
    (notice,) = recognise(model, ["w1=w2"])
    assert notice == "'w2' is computed from 'w1', as --tie says"
    assert "w2" not in model.graph.initializers
    np.testing.assert_array_equal(run(model, x), want)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("w1", "--tie 'w1': expected two names, A=B"),
        ("w1=w9", "--tie 'w1=w9': .* got 'w9'; nearest: 'w3', 'w2', 'w1'"),
        ("w1=w2", "--tie 'w1=w2': expected tensors with equal elements"),
        ("w1=w3", r"got different ones, of shapes \[4, 4\] and \[4, 3\]"),
    ],
)
def test_ties_that_cannot_be(pair: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        recognise(read(TIED), [pair])


def test_equal_parameters_of_other_files_are_reported() -> None:
    table = np.random.default_rng(0).standard_normal((16, 8))
    text = """g (int64[n] ids) => (float[n, 16] y)
    <float[16, 8] "embed.weight", float[8, 16] "onnx::MatMul_9", float[8, 8] "a.weight",
     float[8, 8] "b.weight">
    {
      e = Gather("embed.weight", ids)
      [a] a = MatMul(e, "a.weight") [b] b = MatMul(a, "b.weight") y = MatMul(b, "onnx::MatMul_9")
    }"""
    same = {"a.weight": table[:8], "b.weight": table[:8]}
    model = read(text, **{"embed.weight": table, "onnx::MatMul_9": table.T}, **same)
    folded, equal = recognise(model)
    assert "'onnx::MatMul_9' has the elements of the table 'embed.weight'" in folded
    assert "'a.weight' = 'b.weight'" in equal and "--tie a.weight=b.weight" in equal
    roles = [
        origin_of(v) for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT
    ]
    assert [o.role for o in roles if o is not None] == [Role.PARAMETER] * 3
