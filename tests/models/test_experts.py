"""What experts write for the networks of the zoo, and what the presets `tp=N` send beside it."""

import os
import re
from functools import cache
from math import prod
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
PUBLISHED = {
    "gru": TABLE,
    # The table has half of the width.
    "albert": TABLE // 2 + 2 * LAYER,
    "deberta_v2": TABLE + 2 * LAYER,
    # Two convolutions, then 20 frames; the decoder is that of T5.
    "whisper": WIDTH * 20 * (1 + 2 * 2) + TABLE + 2 * (LAYER + TABLE),
    # 19 frames: three convolutions of 16 features and a projection; positions are gathered, which
    # sends half of what reducing them does.
    "wav2vec2": 19 * (16 + WIDTH + WIDTH // 2 + 2 * 2 * WIDTH),
    # As Swin; the head reduces the features of 256 pixels.
    "segformer": 2 * 2 * (256 * 16 + 64 * 32) + 256 * WIDTH,
}
"""The same for networks without a file, by the rule of that paper: weights are sharded by columns
and by rows in turn, and each pair has one sum."""
# With four devices, the square sums of Mamba-2's norm are reduced, too: two devices have one group.
NORMS = {"mamba2": 2 * TOKENS}
HOLDS = {
    # Of the gate, an expert's file has a quarter on each device; the preset has half.
    ("mamba2", "tp=4"): 1.17,
}
"""How many times an expert's bytes of parameters a preset may hold, if not 1.01."""
WHOLE = re.compile(
    r"posit|pos_conv|token_type|rel_emb|patch|downsampl|classifier|\.gate\.weight|weight_[ih]h_"
)
"""Matrices that experts' files replicate: positions and types of tokens, patches, classifiers,
routers, and the weights of recurrent networks."""
HEAD = WIDTH // 4
"""Features of a head."""
FULL = bool(os.environ.get("ONNXPAR_FULL"))
SAMPLE = ("vit", "mixtral")
NETWORKS = tuple(REDUCED) if FULL else SAMPLE
WITHOUT_FILE = tuple(PUBLISHED) if FULL else ("gru",)
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


def held_by_an_expert(path: Path, devices: int) -> float:
    """Returns the bytes of parameters on a device if an expert shards matrices, and no vectors.

    Matrices in `WHOLE` and depthwise filters are replicated. Devices that outnumber the heads of
    keys and values share them.
    """
    held = 0.0
    for name, value in read_workload(path, {}).program.graph.initializers.items():
        shape, kind = value.shape.numpy(), value.dtype  # type: ignore[union-attr]
        assert kind is not None
        matrix = kind.is_floating_point() and sum(size > 1 for size in shape) > 1
        depthwise = len(shape) > 3 and shape[1] == 1
        shards = devices if matrix and not depthwise and not WHOLE.search(name) else 1
        if "k_proj.weight" in name or "v_proj.weight" in name:
            shards = min(shards, shape[0] // HEAD)
        held += prod(shape) * kind.itemsize / shards
    return held


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


@pytest.mark.parametrize("preset", ["tp=2", "tp=4"])
@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_a_preset_sends_what_is_published(name: str, preset: str, folder: Path) -> None:
    """Networks without a file send at most 1.05 times that, and hold what an expert's would."""
    plan = plans(exported(name, folder), preset)
    found, before = plan[preset], plan["propagation"]
    share = 2 * (1 - 1 / int(preset[-1]))
    assert found.typical <= 1.05 * share * 4 * 64 * PUBLISHED[name]
    assert found.typical <= before.typical
    assert found.held <= 1.05 * held_by_an_expert(exported(name, folder), int(preset[-1]))
