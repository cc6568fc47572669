"""What experts write for the networks of the zoo, and what the presets `tp=N` send beside it."""

import os
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("transformers", reason="exports from PyTorch: the extra zoo")

from plan_search import exported
from tensor_parallel import EXPERTS, WIRE, Sent, compare

from onnxpar.api.plan_strategy import read_workload
from onnxpar.cli import main
from onnxpar.strategy import load_strategy, resolve

WIDTH, TOKENS = 32, 64
"""The width of the zoo's transformers; the typical size of a sequence."""
LAYER = 2 * WIDTH * TOKENS
"""Elements of a sample that a layer reduces: one sum for attention, one for the feed-forward."""
TABLE = WIDTH * TOKENS
"""Elements of a sample that an embedding reduces, if its table is sharded by vocabulary."""
REDUCED = {
    "gpt2": TABLE + 2 * LAYER,
    "llama": TABLE + 2 * LAYER,
    "bert": TABLE + 2 * LAYER,
    "mixtral": TABLE + 2 * LAYER,
    "encoder": TABLE + 3 * LAYER,
    # Layers of the decoder have two attentions.
    "t5": 2 * TABLE + 2 * LAYER + 2 * (LAYER + TABLE),
    # 16 patches and a token of the class; the text of CLIP has a table.
    "vit": 2 * 2 * WIDTH * 17,
    "clip": 2 * 2 * WIDTH * 17 + TABLE + 2 * LAYER,
    # Two blocks of 256 patches with 16 features, two of 64 with 32.
    "swin": 2 * 2 * (256 * 16 + 64 * 32),
    # One sum for each block: 2, 2, 3 and 2 blocks; patches become fewer, features more.
    "convnext": 2 * 256 * 16 + 2 * 64 * 32 + 3 * 16 * 64 + 2 * 4 * 128,
    "lstm": TABLE,
    "phi3": TABLE + 2 * LAYER,
    # Attention and feed-forward are added before they are reduced.
    "falcon": TABLE + 2 * TABLE,
    # One sum for each layer. Its norm is of groups, of which each device has one.
    "mamba2": TABLE + 2 * TABLE,
}
"""Elements of a sample that a forward run reduces by the published formulas (Shoeybi et al.,
"Megatron-LM", 2019): one sum for each matrix that is sharded by rows."""
# With four devices, the square sums of Mamba-2's norm are reduced, too: two devices have one group.
NORMS = {"mamba2": 2 * TOKENS}
HOLDS = {
    # Of the gate, an expert's file has a quarter on each device; the preset has half.
    ("mamba2", "tp=4"): 1.17,
}
"""How many times an expert's bytes of parameters a preset may hold, if not 1.01."""
FULL = bool(os.environ.get("ONNXPAR_FULL"))
SAMPLE = ("vit", "mixtral")
NETWORKS = tuple(REDUCED) if FULL else SAMPLE
FOUR = sorted(path.stem for path in (EXPERTS / "tp=4").glob("*.yaml") if path.stem in NETWORKS)
"""The networks with fewer heads of keys, or groups, than four."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each network is exported once."""
    return tmp_path_factory.mktemp("networks")


@cache
def plans(path: Path, preset: str) -> dict[str, Sent]:
    """Returns the plans of a network, in numbers."""
    return {plan: found for plan, found, _ in compare(path, preset)}


def test_each_strategy_is_of_a_network() -> None:
    assert set(REDUCED) == {path.stem for path in EXPERTS.glob("*.yaml")}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_expert_reduces_what_is_published(name: str, folder: Path) -> None:
    """A device of two sends each reduced element once, in 4 bytes; the typical batch is 64."""
    workload = read_workload(exported(name, folder), {})
    strategy = load_strategy(str(EXPERTS / f"{name}.yaml"))
    plan = workload.plan(resolve(strategy, workload.program))
    assert workload.price(plan, WIRE, {}).communicating == 4 * 64 * REDUCED[name]


@pytest.mark.parametrize("name", FOUR)
def test_an_expert_of_four_devices_reduces_what_is_published(name: str, folder: Path) -> None:
    """A device of four sends each reduced element 1.5 times; two send each square sum once."""
    workload = read_workload(exported(name, folder), {})
    strategy = load_strategy(str(EXPERTS / "tp=4" / f"{name}.yaml"))
    plan = workload.plan(resolve(strategy, workload.program))
    elements = 1.5 * REDUCED[name] + NORMS.get(name, 0)
    assert workload.price(plan, WIRE, {}).communicating == 4 * 64 * elements


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("strategy", ["expert", "tp=2"])
def test_its_ranks_compute_what_one_device_does(
    name: str, strategy: str, folder: Path, tmp_path: Path
) -> None:
    model, out = str(exported(name, folder)), str(tmp_path / "out")
    strategy = str(EXPERTS / f"{name}.yaml") if strategy == "expert" else strategy
    assert main(["shard", model, "--strategy", strategy, "-o", out]) == 0
    assert main(["verify", out, "--model", model]) == 0


@pytest.mark.parametrize("preset", ["tp=2", "tp=4"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_preset_sends_what_an_expert_does(name: str, preset: str, folder: Path) -> None:
    """An expert's file is for two devices. With four, it shards the same dims, or has another."""
    plan = plans(exported(name, folder), preset)
    found, expert = plan[preset], plan["expert"]
    assert found.typical <= 1.05 * expert.typical
    assert found.large <= 1.05 * expert.large
    assert found.held <= HOLDS.get((name, preset), 1.01) * expert.held
    assert found.typical <= plan["propagation"].typical
