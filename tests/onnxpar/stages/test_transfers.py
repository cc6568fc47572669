"""Values go to other stages in the sharding that is fastest, and every result stays the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import transformer

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.machine import PRESETS, Link
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.cost.cost_model import CostModel
from onnxpar.stages.transfers import transfer
from onnxpar.strategy import load_strategy
from onnxpar.strategy.pipeline_entry import PipelineEntry
from onnxpar_runtime.manifest import Manifest
from tests.tiers import FULL

SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
SHAPE = (8, 1024, 4096)
WHOLE, ROWS, COLUMNS = (
    Sharding.of(SHAPE, dims) for dims in ([(), (), ()], [(0,), (), ()], [(), (), (0,)])
)
PARTIAL = WHOLE.with_partial([0], "sum")
FAST, SLOW = Link(0, 4.5e11, 4e-6), Link(0, 50e9, 10e-6)
"""The links of H100s: within a machine and between machines."""
MACHINE = """\
name: pairs
flops: {float32: 6.0e+10}
bandwidth: 1.0e+12
memory: 8GiB
overhead: 3.0e-6
links: [{devices: 2, bandwidth: 1.0e+12, latency: 1.0e-7}, {bandwidth: 1.0e+10, latency: 1.0e-7}]
"""


def sent(made: Sharding, *wants: Sharding, link: Link = SLOW) -> Sharding:
    """In which sharding two GPUs of a machine send a value to two of another one."""
    cost = CostModel(PRESETS["h100"], Mesh.of(tp=2), SymbolTable({}))
    return transfer(cost, link, made, {1: wants}, 4).sharding


def test_of_replicas_each_device_sends_a_shard_where_the_link_is_slower() -> None:
    assert sent(WHOLE, WHOLE) == ROWS
    assert sent(WHOLE, WHOLE, link=FAST) == WHOLE


def test_it_is_resharded_before_it_is_sent() -> None:
    for link in (SLOW, FAST):
        assert sent(WHOLE, COLUMNS, link=link) == COLUMNS
        assert sent(PARTIAL, COLUMNS, link=link) == COLUMNS
    assert sent(COLUMNS, WHOLE) == COLUMNS


def test_a_partial_sum_is_sent_as_shards_of_the_sum() -> None:
    assert sent(PARTIAL, WHOLE) == ROWS


def test_a_small_value_is_sent_as_it_was_made() -> None:
    small = Sharding.of((2, 4), [(), ()])
    assert sent(small, small) == small


def test_what_two_readers_want() -> None:
    assert sent(WHOLE, ROWS, WHOLE) == ROWS
    cost = CostModel(PRESETS["h100"], Mesh.of(tp=2), SymbolTable({}))
    one = transfer(cost, SLOW, WHOLE, {1: [WHOLE]}, 4)
    two = transfer(cost, SLOW, WHOLE, {1: [WHOLE], 2: [WHOLE]}, 4)
    assert two.sharding == ROWS and two.seconds > one.seconds


def test_a_value_of_odd_sizes_is_not_scattered() -> None:
    odd = Sharding.of((7, 1023, 4095), [(), (), ()])
    assert sent(odd, odd) == odd


PIPELINES: list[dict[str, Any]] = [
    {"stages": 2, "micro_batches": 2},
    {"stages": 3, "micro_batches": 3, "schedule": "zb-h1"},
    {"stages": 2, "micro_batches": 2, "chunks": 2, "schedule": "interleaved"},
]
if not FULL:
    PIPELINES = PIPELINES[:1]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.get("schedule", "1f1b"))
def test_training_sends_half_and_computes_the_same(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """The residual stream is replicated over the two devices of a stage, one machine each."""
    path, machine = tmp_path / "m.onnx", tmp_path / "machine.yaml"
    layers = pipeline["stages"] * pipeline.get("chunks", 1)
    ir.save(transformer.build(layers=layers, d_model=16, max_positions=16, vocab=32), path)
    machine.write_text(MACHINE)
    sizes = {}
    for name in ("cpu", str(machine)):
        out = tmp_path / Path(name).stem
        strategy = load_strategy(f"pp={pipeline['stages']},tp=2")
        search = strategy.search.model_copy(update={"machine": name})
        entry = PipelineEntry(**pipeline)
        shard_model(path, replace(strategy, search=search, pipeline=entry), out, training=SPEC)
        if name != "cpu":  # what is sent as it was made, other tests verify
            found = runtime.verify(out, path, cases=["batch=4,seq=6", "batch=3,seq=5"])
            assert len(found) == 2
            for case in found:
                assert case.problems == () and case.bytes_counted == case.bytes_expected
        programs = Manifest.load(out).programs
        sizes[out.name] = {
            h.name: h.shape[-1]
            for title in ("training_model.0", "forward_model.0")
            for h in (programs[title].handed_out if title in programs else ())
            if h.shape is not None and len(h.shape) == 3
        }
    assert 16 in sizes["cpu"].values() and not any(".sent" in n for n in sizes["cpu"])
    scattered = [size for name, size in sizes["machine"].items() if ".sent" in name]
    assert scattered and set(scattered) == {8}
