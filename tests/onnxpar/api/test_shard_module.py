"""A PyTorch module that all ranks compute together, in a training loop of PyTorch."""

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxpar.core.errors import CallError, ModelError, StrategyError
from tests.runtime.launching import mpirun
from tests.tiers import FULL

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra torch")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra torch")
pytest.importorskip("torch.utils.checkpoint")

import onnxpar  # noqa: E402

SECONDS = 240
"""The time limit of a job: loading PyTorch and its exporter on four ranks, on busy cores."""
ROOT = Path(__file__).parents[3]
EPSILON = 2e-5
"""Relative to the largest element: sums of 10^2 terms of float32 in another order differ by some
10^-6. Six steps with a rate of 1e-2 move the parameters by a few per cent, and add little."""


class Block(torch.nn.Module):
    """A product, a normalisation with running statistics, and two results of different types."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.down = torch.nn.Linear(8, 6)
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 6), requires_grad=False)

    def forward(self, x: Any, ids: Any) -> Any:
        y = self.down(torch.tanh(self.norm(self.up(x)))) * self.scale + x[ids]
        return y, ids + 1


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {"first": torch.nn.Linear(3, 6), "block": Block(), "last": torch.nn.Linear(6, 2)}
    )


X, IDS = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
OPEN = ({0: "batch"}, {0: "batch"})


def loss_of(parts: Any, rows: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    ids = torch.randint(0, rows, (rows,), generator=generator)
    y, more = parts["block"](parts["first"](x), ids)
    assert torch.equal(more, ids + 1) and not more.requires_grad
    return parts["last"](y).square().mean()


def assert_equal(have: Any, want: Any, what: str) -> None:
    worst = (have - want).abs().max().item()
    assert worst <= EPSILON * max(want.abs().max().item(), 1e-3), (what, worst)


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    """A module, and the same with its block sharded over two ranks."""
    plain, sharded = net(), net()
    sharded["block"] = onnxpar.shard_module(
        sharded["block"], (X, IDS), strategy="tp=2", dynamic_shapes=OPEN
    )
    yield plain, sharded
    sharded["block"].close()


def test_losses_gradients_and_statistics_are_those_of_pytorch(pair: Any) -> None:
    plain, sharded = pair
    assert list(sharded.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in plain.named_parameters()]
    steps = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in pair]
    for seed, rows in enumerate((12, 14, 13, 12, 14, 13)):
        losses = []
        for module, optimizer in zip(pair, steps, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(module, rows, seed))
            losses[-1].backward()
        assert_equal(losses[1], losses[0], f"loss of step {seed}")
        for (name, want), have in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert (have.grad is None) == (want.grad is None), name
            # The bias before the normalisation has no effect: its gradient is rounding.
            if want.grad is not None and name != "block.up.bias":
                assert_equal(have.grad, want.grad, f"gradient of {name} in step {seed}")
        for optimizer in steps:
            optimizer.step()
    for name, want in plain.state_dict().items():
        if name != "block.up.bias" and "running_mean" not in name:
            assert_equal(sharded.state_dict()[name].float(), want.float(), name)
    # One program for even and one for odd numbers of rows.
    assert [sorted(r) for r in sharded["block"].reports] == 2 * [["backward", "forward"]]


def test_a_call_that_does_not_fit_is_refused(pair: Any) -> None:
    block = pair[1]["block"]
    with pytest.raises(
        CallError, match=re.escape("'x': expected the shape (batch, 6), got (4, 7)")
    ):
        block(torch.zeros(4, 7), IDS)
    with pytest.raises(
        CallError, match=r"'ids', dim 0: expected batch = 4, as in input 'x', got 3"
    ):
        block(X, IDS[:3])
    with pytest.raises(CallError, match=r"'x': expected torch.float32, as it was traced, got .*64"):
        block(IDS.unsqueeze(1).expand(4, 6), IDS)
    with pytest.raises(ModelError, match="missing a required argument: 'ids'"):
        block(X)


def test_what_cannot_be_sharded_is_refused(pair: Any) -> None:
    with pytest.raises(ModelError, match=r"ModuleDict is sharded already or has a sharded part"):
        onnxpar.shard_module(pair[1], X, strategy="tp=2")
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module, got str"):
        onnxpar.shard_module("net.onnx", X, strategy="tp=2")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="expected a strategy without pipeline stages, got 2"):
        onnxpar.shard_module(Block(), (X, IDS), strategy="pp=2")
    for dim in (2, -1, "x"):
        with pytest.raises(ModelError, match=f"'x': expected dims from 0 to 1, got {dim!r}"):
            onnxpar.shard_module(
                Block(), (X, IDS), strategy="tp=2", dynamic_shapes=({dim: "batch"},)
            )


class Packs(torch.nn.Module):
    """Returns a dict with a list of one, an input as it is, a result twice, and a buffer."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.arange(4.0))
        self.scale = 2.0

    def forward(self, x: Any) -> Any:
        y = x * self.scale + self.bias
        return {"y": y, "same": x, "again": [y], "one": (None, self.bias)}

    def half_scale(self) -> float:
        return self.scale / 2


def assert_packed(found: Any, x: Any, scale: float) -> None:
    assert list(found) == ["y", "same", "again", "one"]
    torch.testing.assert_close(found["y"], x * scale + torch.arange(4.0))
    torch.testing.assert_close(found["same"], x)
    assert isinstance(found["again"], list) and torch.equal(found["again"][0], found["y"])
    assert found["one"][0] is None and torch.equal(found["one"][1], torch.arange(4.0))


def test_results_attributes_hooks_and_copies_are_those_of_the_module() -> None:
    seen = []
    plain = Packs()
    plain.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    sharded = onnxpar.shard_module(
        plain, torch.zeros(4, 4), strategy="dp=2", dynamic_shapes=({0: "batch"},)
    )
    sharded.register_forward_hook(lambda module, args, result: {**result, "hooked": True})
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = sharded(x)
    assert found.pop("hooked")
    assert_packed(found, x, 2.0)
    (found["y"].sum() + 3 * found["same"].sum() + found["again"][0].sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 2 * 2.0 + 3))
    assert seen == [(2, 4)], "the hook ran when the module was traced"
    assert sharded.half_scale() == 1.0 and not hasattr(sharded, "absent")
    for copied in (copy.deepcopy(sharded), pickled(sharded)):
        assert isinstance(copied, onnxpar.ShardedModule) and not copied.reports
        assert copied.bias is not plain.bias and copied._buffers is copied._example.module._buffers
    with pytest.raises(CallError, match="'x', dim 0: expected batch >= 1, got 0"):
        sharded(x[:0])
    sharded.scale = 3.0
    assert plain.scale == 3.0
    if FULL:
        found = sharded(x)
        assert found.pop("hooked")
        assert_packed(found, x, 3.0)
        assert len(sharded.reports) == 2
    sharded.double()
    with pytest.raises(
        CallError, match=r"tensor 'bias': expected torch.float32, as when .* got torch.float64"
    ):
        sharded(x)
    sharded.close()


def pickled(module: Any) -> Any:
    """A copy by pickle, of what pickle can copy: hooks are functions without a name here."""
    module = copy.deepcopy(module)
    module._forward_hooks.clear(), module._forward_pre_hooks.clear()
    return pickle.loads(pickle.dumps(module))


def test_programs_of_many_calls_are_bounded(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = pair[1]["block"]
    monkeypatch.setattr("onnxpar.api.pytorch.shard_module._KEPT", 2)
    with torch.no_grad():
        made = block(X, IDS)[0]
        block(X[:3], IDS[:3] % 3)
        assert len(block.reports) == 2
        # The programs for even numbers have the rest of the call.
        torch.testing.assert_close(block(X, IDS)[0], made)
    assert len(block.reports) == 2


@pytest.mark.full
def test_evaluation_frozen_layers_and_dropout() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.drop = Block(), torch.nn.Dropout(0.5)
            self.bound = torch.nn.Parameter(torch.ones(6))

        def forward(self, x: Any, ids: Any) -> Any:
            return self.drop(self.block(x, ids)[0] * self.bound)

    plain = Dropping()
    plain.block.norm.eval()
    plain.block.norm.running_var.fill_(3.0)
    sharded = onnxpar.shard_module(
        copy.deepcopy(plain), (X, IDS), strategy="dp=2", dynamic_shapes=OPEN
    )
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    kept = []
    for _ in range(2):
        sharded.zero_grad()
        given = x.clone().requires_grad_()
        y = sharded(given, IDS)
        y.sum().backward()
        kept.append(y != 0)
        # Each element that is kept is doubled, in the gradient too.
        full = plain.block(x, IDS)[0]
        assert_equal(y, torch.where(kept[-1], 2 * full, 0), "dropped")
        wanted = torch.where(kept[-1], 2 * full, 0).sum(0)
        assert_equal(sharded.bound.grad, wanted, "its gradient")
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(sharded.block.norm.running_mean, torch.zeros(8))
    plain.eval(), sharded.eval()
    with torch.no_grad():
        assert_equal(sharded(x, IDS), plain(x, IDS), "evaluation")
    sharded.close()


LOOP = """
import copy, os
import torch
from torch.nn import functional as F
import onnxpar
from tiny_gpt import TinyGpt

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
torch.manual_seed(0)
plain = TinyGpt(vocabulary=50, width=16, layers=1)
sharded = copy.deepcopy(plain)
if rank:
    torch.nn.init.zeros_(sharded.blocks[0].up.weight)  # rank 0's values are given to all
block = onnxpar.shard_module(
    sharded.blocks[0], torch.zeros(4, 6, 16), strategy="STRATEGY",
    dynamic_shapes=({0: "batch", 1: "seq"},),
)
sharded.blocks[0] = block
nets = plain, sharded
steps = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in nets]
for step, (rows, length) in enumerate([(4, 6), (2, 9), (3, 7)] * 3):
    ids = torch.randint(50, (rows, length + 1))
    losses = []
    for module, optimizer in zip(nets, steps):
        optimizer.zero_grad()
        logits = module(ids[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
    assert abs(losses[0] - losses[1]) < 1e-5, (step, losses)
    for (name, want), have in zip(plain.named_parameters(), sharded.parameters()):
        worst = (want.grad - have.grad).abs().max() / want.grad.abs().max().clamp_min(1e-4)
        # Attention ignores the bias of the keys: its gradient is rounding.
        assert worst < 2e-5 or name.endswith("qkv.bias"), (step, name, worst)
    for optimizer in steps:
        optimizer.step()
collectives = {c["op"] for c in block.reports[0]["forward"]["collectives"]}
if rank == 0:
    print("equal", sorted(collectives))
try:
    block(torch.full((4, 6, 16), float(rank)))
except onnxpar.OnnxparError as error:
    print(f"r{rank} {error}")
"""


@pytest.mark.full
def test_modules_draw_numbers_of_their_own_and_can_be_checkpointed() -> None:
    def block() -> Any:
        parts = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)
        made = torch.nn.Sequential(*parts)
        made.register_buffer("once", torch.ones(1), persistent=False)
        return onnxpar.shard_module(made, torch.zeros(4, 8), strategy="tp=2")

    first, second = block(), block()
    second.load_state_dict(first.state_dict())
    x = torch.ones(4, 8)
    assert not torch.equal(first(x) == 0, second(x) == 0)
    assert "once" not in first.state_dict()
    first.eval()
    leaf = x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(first, leaf, use_reentrant=False).sum().backward()
    weight = first.state_dict()["0.weight"]
    torch.testing.assert_close(leaf.grad, weight.sum(0).expand(4, 8))


class Picks(torch.nn.Module):
    """Reads a buffer of integers, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor([1]))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(x[:, self.index] + x)


@pytest.mark.full
def test_changes_of_parts_and_buffers_are_seen() -> None:
    plain = Picks()
    sharded = onnxpar.shard_module(plain, torch.zeros(4, 8), strategy="dp=2")
    x = torch.arange(32.0).reshape(4, 8) + 1
    assert (sharded(x) == 0).any()
    plain.drop.eval()
    torch.testing.assert_close(sharded(x), plain(x))
    sharded.load_state_dict({"index": torch.tensor([3])})
    torch.testing.assert_close(sharded(x), x[:, 3:4] + x)


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("strategy", ["tp=2", "dp=2", "dp=2,tp=2"])
def test_a_block_under_mpirun_trains_as_in_one_process(tmp_path: Path, strategy: str) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (model,) = re.findall(r"^```python tiny_gpt.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "tiny_gpt.py").write_text(model, encoding="utf-8")
    program = tmp_path / "loop.py"
    program.write_text(LOOP.replace("STRATEGY", strategy), encoding="utf-8")
    ranks = 4 if "," in strategy else 2
    surroundings = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = mpirun(ranks, [str(program)], surroundings, SECONDS)
    assert done.code == 0, done.text
    assert "equal" in done.out
    assert done.out.count("expected the same numbers on all ranks") == ranks


DIFFERENT = """
import os
import torch
import onnxpar

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
x = torch.ones(4, 6)

def act(f):
    try:
        f()
        os.write(1, b"no error\\n")
    except onnxpar.OnnxparError as error:
        os.write(1, f"r{rank} {error}\\n".encode())

def part():
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.1))

def shard(net):
    return onnxpar.shard_module(net, x, strategy="tp=2", dynamic_shapes=({0: "batch"},))

act(lambda: shard(torch.nn.Linear(6, 6 + rank)))
net = shard(part())
act(lambda: net.train(rank == 0)(x))
net.train()
net.get_submodule("1").train(rank == 0)
act(lambda: net(x))
net.train()
act(lambda: net(x[: 4 - rank]))
act(lambda: net(x[:, : 6 - rank]))
net.get_parameter("0.bias").requires_grad_(rank == 0)
act(lambda: net(x))
net.get_parameter("0.bias").requires_grad_()
loss = net(x).sum()
act(lambda: net(x) if rank else loss.backward())
if rank == 0:
    net(x)
"""


@pytest.mark.full
def test_ranks_that_make_different_calls_are_told_so(tmp_path: Path) -> None:
    program = tmp_path / "different.py"
    program.write_text(DIFFERENT, encoding="utf-8")
    done = mpirun(2, [str(program)], {"ONNXPAR_TIMEOUT": "5"}, SECONDS)
    assert done.code != 0 and "no error" not in done.out, done.text
    own = [
        [line[3:] for line in done.out.splitlines() if line.startswith(f"r{r} ")] for r in (0, 1)
    ]
    title = "Sequential (sharded module 0)"
    same = "expected the same on all ranks, got"
    assert own[0] == own[1] == [
        f"tensor 'weight': {same} torch.float32[6, 6] on rank 0 and torch.float32[7, 6] on rank 1",
        f"mode: {same} training on rank 0 and evaluation on rank 1",
        f"parts in the other mode: {same} none on rank 0 and 1 on rank 1",
        f"input 'input': {same} torch.float32[4, 6] on rank 0 and torch.float32[3, 6] on rank 1",
        "rank 1: Sequential, input 'input': expected the shape (batch, 6), got (4, 5); open "
        "further dims with dynamic_shapes",
        f"tensors that require a gradient: {same} 0.bias on rank 0 and none on rank 1",
        f"call: {same} backward of {title} on rank 0 and forward of {title} on rank 1",
    ]  # fmt: skip
    text = f"r0 | rank 0: forward of {title}, on all ranks on group [0, 1]: waited 5 s for rank 1"
    assert text in done.err, done.err


@pytest.mark.full
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(
        "import torch, onnxpar\n"
        "onnxpar.shard_module(torch.nn.Linear(2, 2), torch.zeros(2, 2), strategy='tp=4')\n",
        encoding="utf-8",
    )
    done = mpirun(2, [str(program)])
    assert done.code != 0
    assert "got 4 from the mesh tp=4; mpirun started 2 ranks" in done.err
