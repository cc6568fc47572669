"""What experts write for the networks of the zoo, and what the presets `tp=N` send beside it."""

import re
from functools import cache
from math import prod
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="exports from PyTorch: the extra zoo")
pytest.importorskip("transformers", reason="exports from PyTorch: the extra zoo")

from tensor_parallel import EXPERTS, WIRE, Sent, compare
from zoo import ZOO, example

from onnxpar.api.plan_strategy import read_workload
from onnxpar.api.pytorch.export_module import export, save
from onnxpar.cli import main
from onnxpar.strategy import load_strategy, resolve
from tests.tiers import FULL

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
GATHER = 2
"""Gathering a tensor sends half of what reducing it does."""
PUBLISHED = {
    # As GPT, Llama, BERT or T5.
    **dict.fromkeys(("bloom", "gemma2", "gemma3", "qwen2_vl", "qwen3_moe"), TABLE + 2 * LAYER),
    **dict.fromkeys(("deberta_v2", "modernbert"), TABLE + 2 * LAYER),
    "bart": REDUCED["t5"],
    "gru": REDUCED["lstm"],
    # Their tables have half of the width.
    "albert": TABLE // 2 + 2 * LAYER,
    "opt": TABLE // 2 + 2 * LAYER,
    # Layers have attention alone.
    "distance_bias": TABLE + 2 * TABLE,
    # Two convolutions, then 20 frames; the decoder is that of T5.
    "whisper": WIDTH * 20 * (1 + 2 * 2) + TABLE + 2 * (LAYER + TABLE),
    # 19 frames: three convolutions of 16 features and a projection; positions are gathered.
    "wav2vec2": 19 * (16 + WIDTH + WIDTH // GATHER + 2 * 2 * WIDTH),
    # A quarter of 16 patches and the class, then all in half of the width.
    "vit_mae": 2 * 2 * (WIDTH * 5 + WIDTH // 2 * 17),
    # As ConvNeXt, and the mean of each norm of responses.
    "convnextv2": 2 * (256 * 16 + 64 * 32 + 16 * 64 + 4 * 128) + 8,
    # As Swin; the head reduces the features of 256 pixels.
    "segformer": 2 * 2 * (256 * 16 + 64 * 32) + 256 * WIDTH,
    # A sum for each block of two convolutions, then T5 of 9 patches and 6 queries, and boxes.
    "detr": 24**2 * 8 + 12**2 * 16 + 6**2 * 32 + 3**2 * 64 + WIDTH * (2 * 2 * 9 + 2 * 3 * 6 + 6),
    # Each expansion and projection is a pair, and so are the two products that scale features.
    "efficientnet": 256 * 8 + 2 * 64 * 16 + 16 * 24 + (4 + 2 + 4 + 4) + 10,
    # A sum for each pair of convolutions; what is made larger is gathered.
    "unet": 2 * 256 * 8 + 2 * 64 * 16 + 16 * 32 + (256 * 8 + 64 * 16) // GATHER,
    # Two sums of a layer, of the parameters of its scan and of the output (Dao and Gu, 2024, 8.1).
    "mamba": 8 * (WIDTH + 2 * (4 + 8 + 8) + 2 * WIDTH),
    # Two linear layers whose pair is reduced, the statistics of the norm between them, the classes.
    "mlp": 128 + 2 + 10,
    "normalised": 16 * 32,
    "normalised_tensors": 16 * 32,
    # Layers of one weight, which cannot be paired, are gathered.
    "group_norm": 2 * 256 * 16 // GATHER,
    "temperature": TABLE + 2 * TABLE // GATHER,
    # Residual features stay sharded: a block reduces what its first and second convolution make.
    "resnet50": sum(
        width * ((2 * side) ** 2 * (side < 32) + side**2 * (2 * blocks - (side < 32)))
        for width, side, blocks in ((8, 32, 3), (16, 16, 4), (32, 8, 6), (64, 4, 3))
    ),
    # Of a graph, 64 nodes in all are assumed, not 64 samples; the classes are reduced.
    "gnn": 2 * WIDTH // GATHER + 10,
    # 8 tokens; two sums for each layer, as GPT. Propagation reduces the logits; they are gathered.
    "rwkv": WIDTH * 8 * (1 + 2 * 2) + 8 * 96 // GATHER,
}
"""The same for networks without a file, by the rule of that paper: weights are sharded by columns
and by rows in turn, and each pair has one sum."""
# With four devices, the square sums of Mamba-2's norm are reduced, too: two devices have one group.
NORMS = {"mamba2": 2 * TOKENS}
HOLDS = {
    # Of ten classes, each of four devices holds three, with padding: 1,024 bytes more of 10,433.
    **dict.fromkeys(((n, "tp=4") for n in ("normalised", "normalised_tensors")), 1.10),
}
"""How many times an expert's bytes of parameters a preset may hold, if not 1.01 (1.05 without an
expert's file)."""
WHOLE = re.compile(
    r"posit|pos_conv|token_type|rel_emb|patch|downsampl|classifier|\.gate\.weight|weight_[ih]h_"
)
"""Matrices that experts' files replicate: positions and types of tokens, patches, classifiers,
routers, and the weights of recurrent networks."""
HEAD = WIDTH // 4
"""Features of a head."""
SAMPLE = ("vit",)
NETWORKS = tuple(REDUCED) if FULL else SAMPLE
WITHOUT_FILE = tuple(PUBLISHED) if FULL else ("mlp",)
FOUR = sorted(path.stem for path in (EXPERTS / "tp=4").glob("*.yaml") if path.stem in NETWORKS)
"""The networks with fewer heads of keys, or groups, than four."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each network is exported once."""
    return tmp_path_factory.mktemp("networks")


def exported(name: str, folder: Path) -> Path:
    """Returns the file of a network of the zoo."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        save(export(example(name)), path)
    return path


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
    assert set(REDUCED) | set(PUBLISHED) == set(ZOO)


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
    expected = held_by_an_expert(exported(name, folder), int(preset[-1]))
    assert found.held <= HOLDS.get((name, preset), 1.05) * expected
