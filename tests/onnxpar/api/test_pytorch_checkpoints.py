"""Training goes on in PyTorch where onnxpar stopped, and here where PyTorch stopped."""

import importlib
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.cli import main
from onnxpar.core.errors import ModelError, OnnxparError
from onnxpar_format.checkpoint import Progress
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.training.checkpoints import load_checkpoint, save_checkpoint
from onnxpar_runtime.training.permutation import permutation
from onnxpar_runtime.training.run import train_with
from tests.training_cases import shard

torch = pytest.importorskip("torch", reason="exports from PyTorch: the extra torch")
pytest.importorskip("onnxscript", reason="exports from PyTorch: the extra torch")

import onnxpar  # noqa: E402
from onnxpar.api.pytorch.files import import_files  # noqa: E402

BATCH, SAMPLES, SEED = 4, 12, 3
STEPS_OF_EPOCH = SAMPLES // BATCH
CK = Saving(Path("ck"))

SOURCE = '''
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))

class GPT(nn.Module):
    """With a tied head, a frozen scale, a parameter that nothing uses, and a buffer."""
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.ln = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.full((16,), 1.5), requires_grad=False)
        self.register_buffer("version", torch.tensor(7))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x) * self.scale)

def make():
    torch.manual_seed(5)
    net = GPT()
    # As `onnxpar shard` does by default: no decay of parameters of fewer than two dims.
    flat = [p for p in net.parameters() if p.dim() < 2 and p.requires_grad]
    large = [p for p in net.parameters() if p.dim() >= 2]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": large}]
    return net, torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)

def module():
    return make()[0]

def adam():
    net = GPT()
    return net, torch.optim.Adam(net.parameters())

def fails():
    return make(1)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module `small_gpt`, a directory `d` that trains it, and data `a.npz`."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "small_gpt.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        net, _ = importlib.import_module("small_gpt").make()
        ids = torch.zeros(2, 8, dtype=torch.int64)
        model = onnxpar.from_torch(net, ids, dynamic_shapes=({0: "batch"},), outputs=("logits",))
        shard(folder / "d", model, "dp=2,tp=2", optimizer="adamw")
        tokens = np.random.default_rng(1).integers(0, 20, (SAMPLES, 9))
        np.savez(folder / "a.npz", ids=tokens[:, :-1], labels=tokens[:, 1:])
        yield folder
    del sys.modules["small_gpt"]


@pytest.fixture
def gpt(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; the current folder is empty but for `d` and `a.npz`."""
    for name in ("d", "a.npz"):
        (tmp_path / name).symlink_to(home / name)
    monkeypatch.chdir(tmp_path)
    return sys.modules["small_gpt"]


def ours(steps: int, **more: Any) -> list[float]:
    """Trains with four ranks up to a step; returns the losses."""
    wanted = TrainingRun(
        "npz:a.npz", lr=more.pop("lr", 3e-3), batch_size=BATCH, seed=SEED, steps=steps,
        settings=Settings(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), print_every=0,
        log=Path("log.jsonl"), **more,
    )  # fmt: skip
    with TrainerGroup("d", seed=SEED) as group:
        group.on_each(lambda member: train_with(member, wanted))
    lines = Path("log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def theirs(net: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Trains in PyTorch from a step of the run to another on the same batches."""
    data, losses = np.load("a.npz"), []
    for step in range(first, last):
        epoch, number = divmod(step, STEPS_OF_EPOCH)
        places = np.arange(number * BATCH, (number + 1) * BATCH)
        rows = permutation(SAMPLES, SEED, epoch + 1)(places)
        logits = net(torch.from_numpy(data["ids"][rows]))
        labels = torch.from_numpy(data["labels"][rows])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(got: list[float], wanted: list[float]) -> None:
    """Compares losses of ten steps.

    A step moves each element by up to the learning rate, whatever its gradient's size. The sums of
    a gradient, of 4 * 8 * 20 terms at most, have a relative error of sqrt(640) 2^-24 = 1.5e-6 of
    the largest element. Elements a hundred times smaller than that have an error of 1.5e-4, and
    move wrongly by 3e-3 * 1.5e-4; the slope of the loss along them is a hundredth of the gradient's
    norm, which is below 10. So ten steps move the loss by 10 * 3e-3 * 1.5e-4 * 0.1 * sqrt(28) =
    2.4e-6, with an independent direction for each of 28 tensors, and the loss is at least 3.
    Its own sums, of 32 rows of 20 terms, have an error of sqrt(640) 2^-24. Together: 2.3e-6.
    """
    assert len(got) == len(wanted) == 10
    assert all(math.isfinite(loss) for loss in wanted)
    np.testing.assert_allclose(got, wanted, rtol=2.5e-6, atol=0)


def test_pytorch_continues_from_a_checkpoint(gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ours(8, checkpoints=CK)
    files = ["--state-dict", "net.pt", "--optimizer-state", "adamw.pt"]
    assert main(["checkpoint", "export", "ck", "--module", "small_gpt:make", *files]) == 0
    assert "net.pt, adamw.pt: after step 8" in capsys.readouterr().out
    net, optimizer = gpt.make()
    untrained = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    weights = torch.load("net.pt", weights_only=True)
    assert list(weights) == list(untrained)
    net.load_state_dict(weights, strict=True)
    for name, tensor in net.state_dict().items():
        changed = not torch.equal(tensor, untrained[name])
        assert changed == (name not in ("unused", "scale", "version")), name
    assert torch.equal(weights["head.weight"], weights["wte.weight"])
    state = torch.load("adamw.pt", weights_only=True)
    # `unused` is the first parameter of the first group; the frozen `scale` is in no group.
    assert list(state["state"]) == list(range(1, 29))
    assert {float(entry["step"]) for entry in state["state"].values()} == {8.0}
    optimizer.load_state_dict(state)
    close(theirs(net, optimizer, 8, 18), ours(18, resume=Path("ck"))[-10:])


def test_training_goes_on_where_pytorch_stopped(
    gpt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer = gpt.make()
    net.version += 1
    theirs(net, optimizer, 0, STEPS_OF_EPOCH * 3)
    torch.save(net.state_dict(), "net.pt")
    torch.save(optimizer.state_dict(), "adamw.pt")
    files = ["--state-dict", "net.pt", "--optimizer-state", "adamw.pt"]
    assert (
        main(["checkpoint", "import", "begun", "--to", "d", "--module", "small_gpt:make", *files])
        == 0
    )
    capsys.readouterr()
    (loss,) = ours(1, resume=Path("begun"), lr=4e-3)
    printed = capsys.readouterr().out
    assert "begun with begun: the optimizer has done 9 steps" in printed
    assert "notice: lr is 0.004, but the checkpoint was written with 0.003" in printed
    got = ours(10, resume=Path("begun"), checkpoints=CK)
    assert got[0] == loss
    # The run begins with its own epoch 1, so PyTorch goes back to that data.
    close(got, theirs(net, optimizer, 0, 10))
    # And back again: the optimizer's step counts both.
    other, second = gpt.make()
    other.load_state_dict(onnxpar.state_dict("ck", other))
    assert int(other.version) == 7, "a buffer that the graph does not have is the module's own"
    second.load_state_dict(onnxpar.optimizer_state_dict("ck", other, second))
    assert second.state_dict()["state"][1]["step"] == 19
    close(theirs(other, second, 10, 20), ours(20, resume=CK.checkpoint)[-10:])


def test_parameters_alone_begin_without_moments(gpt: Any) -> None:
    net, optimizer = gpt.make()
    with torch.no_grad():
        net.wpe.weight += 0.1
    torch.save(net.state_dict(), "net.pt")
    module = ["--module", "small_gpt:module", "--state-dict", "net.pt"]
    assert main(["checkpoint", "import", "begun", "--to", "d", *module]) == 0
    close(ours(10, resume=Path("begun")), theirs(net, optimizer, 0, 10))


SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
import onnxpar

def rank(number, folder, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    import small_gpt
    net = small_gpt.module()
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net(torch.arange(16).reshape(2, 8)).square().mean().backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    checkpoint.save({"model": weights, "optim": states}, checkpoint_id=folder)
    whole = {n: p.full_tensor() for n, p in net.named_parameters()}
    if number == 0:
        torch.save(whole, "whole.pt")
        try:
            onnxpar.write_checkpoint("other", "d", net)
        except onnxpar.OnnxparError as error:
            print(error, flush=True)

if __name__ == "__main__":
    mp.spawn(rank, args=sys.argv[1:], nprocs=2)
"""


def saved_folder(gpt: Any, folder: str, *, by_name: bool) -> Any:
    """A folder of torch.distributed.checkpoint of a module that has done a step; both."""
    distributed = pytest.importorskip("torch.distributed.checkpoint")
    states = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    net, optimizer = gpt.make()
    theirs(net, optimizer, 0, 1)
    found = states.get_optimizer_state_dict(net, optimizer) if by_name else optimizer.state_dict()
    whole = {"model": net.state_dict(), "optim": found}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        distributed.save(whole, checkpoint_id=folder, no_dist=True)
    return net, optimizer


@pytest.mark.parametrize("by_name", [True, False])
def test_a_folder_of_torch_distributed_is_read(gpt: Any, by_name: bool) -> None:
    net, optimizer = saved_folder(gpt, "dcp", by_name=by_name)
    import_files(Path("begun"), Path("d"), "small_gpt:make", Path("dcp"), Path("dcp"))
    for name, tensor in onnxpar.state_dict("begun", net).items():
        assert torch.equal(tensor, net.state_dict()[name]), name
    got = onnxpar.optimizer_state_dict("begun", net, optimizer)["state"]
    for number, state in optimizer.state_dict()["state"].items():
        for key, tensor in state.items():
            assert torch.equal(got[number][key], tensor), (number, key)


def test_a_folder_that_cannot_be_read_is_refused(gpt: Any) -> None:
    saved_folder(gpt, "dcp", by_name=True)

    def refused(message: str, module: str = "module", optimizer: bool = False) -> None:
        states = Path("dcp") if optimizer else None
        with pytest.raises(OnnxparError, match=message):
            import_files(Path("x"), Path("d"), f"small_gpt:{module}", Path("dcp"), states)
        assert not Path("x").exists()

    description = Path("dcp", ".metadata").read_bytes()
    Path("dcp", ".metadata").write_bytes(pickle.dumps(print))
    refused("builtins.print, which is no part of a description")
    Path("dcp", ".metadata").write_bytes(description[:200])
    refused("expected a folder of torch.distributed.checkpoint")
    Path("dcp", ".metadata").write_bytes(description.replace(b"model.ln.bias", b"model.ln.bios"))
    refused("expected a tensor 'model.ln.bias', got none; nearest: 'model.ln.bios'")
    Path("dcp", ".metadata").write_bytes(description)
    (file,) = Path("dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    refused("expected a folder of torch.distributed.checkpoint")
    file.unlink()
    refused("no file '__0_0.distcp'")


@pytest.mark.full
def test_what_fsdp_has_saved_on_two_ranks_is_read(gpt: Any, tmp_path: Path) -> None:
    Path("sharded.py").write_text(SHARDED)
    surroundings = {**os.environ, "PYTHONPATH": str(Path(gpt.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "sharded.py", "dcp", str(tmp_path / "meet")],
        env=surroundings, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "expected a complete tensor, got a DTensor; save module and" in done.stdout
    assert len(list(Path("dcp").glob("*.distcp"))) == 2
    import_files(Path("begun"), Path("d"), "small_gpt:make", Path("dcp"), Path("dcp"))
    whole, net = torch.load("whole.pt"), gpt.module()
    found = onnxpar.state_dict("begun", net)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "mesh: {dp: 2}\noptimizer_parallel: {level: 3, threshold: 0}\n",
            marks=pytest.mark.full,
        ),
        "mesh: {tp: 2}\npipeline: {stages: 2, micro_batches: 2, schedule: 1f1b}\n",
    ],
)
def test_states_come_back_from_any_strategy(
    gpt: Any, home: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    model = onnxpar.load(home / "d.onnx")
    devices = 4 if "pipeline" in text else 2
    shard(tmp_path / "e", model, tmp_path / "s.yaml", optimizer="adamw", devices=devices)
    net, optimizer = gpt.make()
    theirs(net, optimizer, 0, 3)
    onnxpar.write_checkpoint("begun", "e", net, optimizer)
    with TrainerGroup("e") as group:
        group.on_each(lambda member: load_checkpoint(member, "begun"))
        group.on_each(lambda member: save_checkpoint(member, "ck", Progress(earlier=3)))
    other, second = gpt.make()
    other.load_state_dict(onnxpar.state_dict("ck", other))
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in net.state_dict().items())
    wanted = optimizer.state_dict()["state"]
    found = onnxpar.optimizer_state_dict("ck", other, second)["state"]
    assert list(found) == list(wanted)
    for number, state in wanted.items():
        assert all(torch.equal(tensor, found[number][key]) for key, tensor in state.items())


def test_what_does_not_fit_is_refused(gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = gpt.make()
    _, adam = gpt.adam()
    with pytest.raises(ModelError, match=r"has the optimizer adamw: expected Adam or AdamW.*Adam$"):
        onnxpar.write_checkpoint("c", "d", net, adam)
    _, foreign = gpt.make()
    with pytest.raises(ModelError, match="expected parameters of GPT, got another one of shape"):
        onnxpar.write_checkpoint("c", "d", net, foreign)
    amsgrad = torch.optim.AdamW(net.parameters(), amsgrad=True)
    with pytest.raises(ModelError, match="expected amsgrad=False, got True"):
        onnxpar.write_checkpoint("c", "d", net, amsgrad)
    theirs(net, optimizer, 0, 1)
    optimizer.state[net.wpe.weight]["step"] += 1
    with pytest.raises(ModelError, match=r"got 1 for .* and 2 for 'wpe.weight'"):
        onnxpar.write_checkpoint("c", "d", net, optimizer)
    optimizer.state[net.wpe.weight]["step"] -= 1
    for value, message in ((math.nan, "expected finite numbers"), (-1.0, "no number below 0")):
        optimizer.state[net.wpe.weight]["exp_avg_sq"][0, 0] = value
        with pytest.raises(ModelError, match=f"moment2 'wpe.weight': expected.*{message[-14:]}"):
            onnxpar.write_checkpoint("c", "d", net, optimizer)
    optimizer.state[net.wpe.weight]["step"].fill_(math.nan)
    with pytest.raises(ModelError, match=r"expected a whole number of steps from 0 to .*, got nan"):
        onnxpar.write_checkpoint("c", "d", net, optimizer)
    with torch.no_grad():
        net.scale += 1
    with pytest.raises(
        CheckpointError, match=r"'scale' is not trained: expected its elements in d"
    ):
        onnxpar.write_checkpoint("c", "d", net)
    with pytest.raises(ModelError, match=r"expected the parameter 'blocks.*' of d, got none"):
        onnxpar.write_checkpoint("c", "d", torch.nn.Linear(2, 2))
    net.scale.data -= 1
    net.wpe.weight.data = net.wpe.weight.data.double()
    with pytest.raises(CheckpointError, match=r"'wpe.weight': expected float32 \[8, 16\], got f"):
        onnxpar.write_checkpoint("c", "d", net)
    assert not Path("c").exists()
    ours(1, checkpoints=CK)
    fewer = torch.optim.AdamW([net.ln.weight])
    with pytest.raises(ModelError, match=r"expected all parameters that were trained, got none fo"):
        onnxpar.optimizer_state_dict("ck", net, fewer)


MISTAKES = [
    (["--module", "small_gpt:none", "--state-dict", "n.pt"], "has no attribute 'none'"),
    (["--module", "math:floor", "--state-dict", "n.pt"], "floor() takes exactly one argument"),
    (["--module", "math:pi", "--state-dict", "n.pt"], "'pi' in 'math' is not a function"),
    (["--module", "os:getcwd", "--state-dict", "n.pt"], "returns an nn.Module"),
    (
        ["--module", "small_gpt:module", "--state-dict", "n.pt", "--optimizer-state", "o.pt"],
        "for --optimizer-state, got no optimizer",
    ),
    (["--state-dict", "n.pt"], "--state-dict: expected --module"),
    (["--state-dict", "n.pt", "-o", "x.onnx"], "one of --output and --state-dict"),
    ([], "one of --output and --state-dict"),
    (["-o", "x.safetensors", "--module", "a:b"], "expected --state-dict as well"),
]


def test_mistakes_of_the_command(gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ours(1, checkpoints=CK)
    for more, message in MISTAKES:
        assert main(["checkpoint", "export", "ck", *more]) in (1, 2)
        assert message in capsys.readouterr().err
        assert not Path("n.pt").exists()


def test_files_that_are_not_pytorchs_and_code_that_fails(
    gpt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("net.pt").write_bytes(b"no")
    command = ["checkpoint", "import", "begun", "--to", "d", "--state-dict", "net.pt", "--module"]
    assert main([*command, "small_gpt:module"]) == 2
    assert "net.pt: expected a file of torch.save" in capsys.readouterr().err
    torch.save({"wte.weight": torch.zeros(3)}, "net.pt")
    assert main([*command, "small_gpt:module"]) == 2
    assert "Missing key(s) in state_dict" in capsys.readouterr().err
    assert main([*command, "small_gpt:fails"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("Traceback") == 1
    assert "return make(1)" in errors
    assert "onnxpar_runtime" not in errors
    net, optimizer = gpt.make()
    torch.save(net.state_dict(), "net.pt")
    groups = optimizer.state_dict()["param_groups"]
    for state in ({0: {"step": torch.tensor(1.0)}}, {99: {}}, {0: {"step": "x"}}, {0: 3}, 7):
        torch.save({"state": state, "param_groups": groups}, "adamw.pt")
        assert main([*command, "small_gpt:make", "--optimizer-state", "adamw.pt"]) == 2, state
    errors = capsys.readouterr().err
    assert "state 0: expected a parameter's tensors step, exp_avg, exp_avg_sq" in errors
    assert "internal error" not in errors
    # Whatever is damaged, the message says so.
    data, draw = Path("net.pt").read_bytes(), random.Random(0)
    for _ in range(40):
        at = draw.randrange(len(data) // 2)
        Path("net.pt").write_bytes(data[:at] + draw.randbytes(4) + data[at + draw.randrange(9) :])
        with suppress(OnnxparError):
            import_files(Path("begun"), Path("d"), "small_gpt:module", Path("net.pt"), None)
            shutil.rmtree("begun")  # the change was where nobody reads
    assert not Path("begun").exists()
