"""The price of a pipeline, for a GPT of equal layers whose weights are cast to 16 bits."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import transformer
import yaml

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.machine import PRESETS
from onnxpar.parameters.recognise import read_parameters
from onnxpar.partition.partitioned_model import PartitionedModel, PipelinePrograms
from onnxpar.search.rival_plans import Pricing
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_memory import fullest_stage
from onnxpar.stages.stage_price import PipelineSplit, StagedPrice
from onnxpar.stages.stage_programs import SplitProgram, Staging
from onnxpar.strategy import load_strategy, resolve
from onnxpar.strategy.recompute_entry import RecomputeOptions
from onnxpar_format.manifest import StateKind
from onnxpar_runtime.manifest import Manifest

LAYERS, WIDTH, STAGES = 8, 32, 4
SIZES = {"batch": 4, "seq": 16}
LONG = {"batch": 64, "seq": 16}


def staged(stages: int, micro_batches: int, sizes: Mapping[str, int] = SIZES) -> StagedPrice:
    config = transformer.Config(layers=LAYERS, d_model=WIDTH, heads=4, vocab=64, max_positions=16)
    spec = TrainingSpec(
        parse_loss("softmax_cross_entropy"),
        parse_optimizer("adamw"),
        compute=parse_compute("float16"),
    )
    prepared = prepare_training(read_parameters(transformer.build(config)), {}, spec)
    workload = Workload.training(prepared, spec, load_strategy("tp=2", 2).optimizer_parallel)
    plan = workload.plan(resolve(load_strategy("tp=2", 2), workload.program))
    pricing = Pricing(workload, PRESETS["h100"], sizes, PipelineSplit(stages, micro_batches))
    found = pricing.way("tp=2", plan).staged
    assert found is not None
    return found


def test_a_stage_holds_the_weights_that_it_casts() -> None:
    found = staged(STAGES, 8)
    # Two layers of 12·d² + 13·d elements; a parameter, its gradient and two moments; at most all of
    # it is on each of the two devices, at least half.
    complete = 4 * 4 * (LAYERS // STAGES) * (12 * WIDTH**2 + 13 * WIDTH)
    for stage in found.stages[1:-1]:
        assert complete / 2 <= stage.held <= complete


def test_equal_layers_are_partitioned_evenly() -> None:
    inner = [stage.seconds for stage in staged(STAGES, 8).stages[1:-1]]
    # The same costs of the same layers, added in another order.
    assert inner[0] == pytest.approx(inner[1], rel=1e-9)
    counts = [stage.nodes for stage in staged(STAGES, 8).stages]
    assert max(counts) < 2 * min(counts)


def test_casts_of_weights_are_not_kept_for_each_micro_batch() -> None:
    one_token = {"batch": 1, "seq": 1}
    # The first stage keeps as many micro-batches as there are stages, if there are so many.
    several, one = (staged(2, count, one_token).stages[0] for count in (2, 1))
    casts = 2 * (LAYERS // 2) * 12 * WIDTH**2 / 2
    assert 0 < (several.peak - several.held) - (one.peak - one.held) < casts


full = pytest.mark.full


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("interleaved", 3),
        pytest.param("zb-h1", 1, marks=full),
        pytest.param("1f1b", 1, marks=full),
        pytest.param("gpipe", 1, marks=full),
    ],
)
def test_stages_need_the_memory_of_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, chunks: int
) -> None:
    """Parts of layers are recomputed, and stages end within layers."""
    # Plans count the scores of attention as if they were kept.
    monkeypatch.setattr("onnxpar.partition.fuse_nodes.find_attentions", lambda *_: iter(()))
    config = transformer.Config(layers=3, d_model=WIDTH, heads=4, vocab=64, max_positions=16)
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
    prepared = prepare_training(read_parameters(transformer.build(config)), {}, spec)
    alone = load_strategy("replicate", 1)
    workload = Workload.training(prepared, spec, alone.optimizer_parallel)
    nodes = tuple(f"/layer*/{part}" for part in ("attn/*_proj/*", "ln1/*", "mlp/fc1/*", "mlp/Gelu"))
    split = PipelineSplit(2, 4, schedule, chunks)
    pricing = Pricing(workload, PRESETS["h100"], LONG, split, RecomputeOptions(nodes))
    found = pricing.way("one", workload.plan(resolve(alone, workload.program))).staged
    assert found is not None

    entry = {"stages": 2, "micro_batches": 4, "schedule": schedule, "chunks": chunks}
    entries = {
        "mesh": {"x": 1},
        "rest": "replicate",
        "pipeline": {**entry, "assign": dict(found.assign)},
        "recompute": {"nodes": list(nodes)},
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(entries))
    onnx.save(ir.to_proto(transformer.build(config)), tmp_path / "m.onnx")
    peaks = []

    def pipeline(
        staging: Staging, split: Sequence[SplitProgram], rest: Sequence[PartitionedModel]
    ) -> PipelinePrograms:
        one = {**LONG, "batch": LONG["batch"] // 4}
        peaks.append(fullest_stage(split[0].programs, rest, staging.pipeline_split, one))
        return made(staging, split, rest)

    made = Staging.pipeline
    monkeypatch.setattr(Staging, "pipeline", pipeline)
    shard_model(tmp_path / "m.onnx", tmp_path / "s.yaml", tmp_path / "out", training=spec)
    training = Manifest.load(tmp_path / "out").training
    assert training is not None
    parameters = [s for s in training.states.values() if s.kind == StateKind.PARAMETER]
    for stage, priced in enumerate(found.stages):
        mine = sum(prod(map(int, state.shape)) for state in parameters if stage in state.stages)
        # Float32: a parameter, its gradient and two moments; and the sizes that the model reads.
        assert priced.held == pytest.approx(16 * mine, rel=0.01)
    # The programs also have masks of padding and shapes, which are small beside activations.
    assert found.peak == pytest.approx(peaks[0], rel=0.03)
