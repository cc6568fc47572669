"""A decoder in the stages of a pipeline: schedules, tokens of every stage, states, failures.

Tokens of other meshes with stages are compared in test_generator and test_requests.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import ShardingError
from onnxpar.strategy import Strategy
from onnxpar_runtime.errors import InputError, RankError
from onnxpar_runtime.generation.bound_graph import BoundGraph
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.group import Ranks, run_threads
from onnxpar_runtime.manifest import Manifest
from tests.decoders import growing
from tests.runtime.generation.decoders import decoder
from tests.runtime.generation.plain import greedy

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 96, size).tolist() for size in (3, 30)]


def pipeline(**entry: Any) -> Strategy:
    return Strategy.from_dict({"devices": 2, "pipeline": {"stages": 2, **entry}})


@pytest.mark.parametrize("kind", ["growing", "in_place"])
def test_a_rank_with_two_virtual_stages_keeps_the_states_of_both(kind: str, tmp_path: Path) -> None:
    """Four virtual stages for two layers: most have one state, and some none."""
    model = decoder(kind, tmp_path)
    strategy = pipeline(schedule="interleaved", chunks=2)
    out = shard_model(model, strategy, tmp_path / "out").out
    programs = Manifest.load(out).programs
    held = [len(programs[f"model.{n}"].carried) for n in range(4)]
    assert sum(held) == len(programs["model"].carried) == 4
    with Ranks(out, Generator) as ranks:
        for found in ranks.on_each(lambda m: m.generate(PROMPTS, max_new_tokens=12)):
            assert found == greedy(model, PROMPTS, 12)


@pytest.mark.parametrize("strategy", ["pp=2", "pp=2,tp=2", "tp=2"])
def test_logits_whose_size_only_the_run_shows(strategy: str, tmp_path: Path) -> None:
    """The positions that count are found by NonZero: all of them, but no formula says so."""
    path = growing(tmp_path / "model.onnx")
    model = onnx.load(path)
    for node in model.graph.node:
        node.input[:] = ["chosen" if name == "n2" else name for name in node.input]
    added = [
        helper.make_node("GreaterOrEqual", ["rows", "zero"], ["counts"], "Counts"),
        helper.make_node("NonZero", ["counts"], ["found"], "Found"),
        helper.make_node("Squeeze", ["found", "first"], ["places"], "Places"),
        helper.make_node("Gather", ["n2", "places"], ["chosen"], "Chosen", axis=1),
    ]
    for node in reversed(added):
        model.graph.node.insert(len(model.graph.node) - 1, node)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "positions"
    onnx.save(model, path)
    out = shard_model(path, strategy, tmp_path / "out").out
    assert Manifest.load(out).program("model").outputs[0].shape[1] != "sequence_length"
    with Ranks(out, Generator) as ranks:
        prompts = PROMPTS[1:]
        for found in ranks.on_each(lambda m: m.generate(prompts, max_new_tokens=8)):
            assert found == greedy(path, prompts, 8)


def test_the_cache_is_divided_by_layers(tmp_path: Path) -> None:
    """A stage has one layer of two, and memory for the logits only in the last."""
    out = shard_model(decoder("in_place", tmp_path), "pp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        ranks.on_each(lambda m: m.generate([[1, 2], [3, 4]], max_new_tokens=8))
        shares = [m.state_bytes for m in ranks.members]
    # Keys and values of 2 sequences, 4 heads, 9 positions and 16 numbers.
    assert shares == [2 * 2 * 4 * 9 * 16 * 4] * 2


def test_a_token_that_only_the_first_stage_reads_ends_all_ranks_alike(tmp_path: Path) -> None:
    out = shard_model(growing(tmp_path / "model.onnx"), "pp=2", tmp_path / "out").out
    with Ranks(out, Generator) as ranks:
        with pytest.raises(InputError, match="elements from -96 to 95 for node") as caught:
            ranks.on_each(lambda m: m.generate([[1, 96]], max_new_tokens=2))
        assert caught.value.agreed
        # Nothing is broken: the next prompt gets its tokens.
        ranks.on_each(lambda m: m.generate([[1, 2]], max_new_tokens=2))


def test_run_checks_the_indices_of_a_pipeline(tmp_path: Path) -> None:
    out = shard_model(growing(tmp_path / "model.onnx"), "pp=2", tmp_path / "out").out
    cache = np.zeros((1, 4, 0, 4), np.float32)
    feeds = {
        "input_ids": np.array([[96]]),
        "attention_mask": np.ones((1, 1), np.int64),
        "position_ids": np.zeros((1, 1), np.int64),
        **{f"past_key_values_{n}_{part}": cache for n in (0, 1) for part in ("key", "value")},
    }
    with pytest.raises(InputError, match="'input_ids': expected elements from -96 to 95"):
        run_threads(out, feeds)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_ends_all_with_its_message(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step and in a later one, while the other stage waits or has yet to wait."""
    out = shard_model(growing(tmp_path / "model.onnx"), "pp=2", tmp_path / "out").out
    run = BoundGraph.run

    for step in (0, 3):
        left = {0: step, 1: step}

        def failing(self: BoundGraph, handed: Any, left: dict[int, int] = left) -> dict[str, Any]:
            index = self.executor.rank.index
            left[index] -= 1
            if index == stage and left[index] < 0:
                raise RankError(index, "a test made it fail")
            return run(self, handed)

        monkeypatch.setattr(BoundGraph, "run", failing)
        with (
            Ranks(out, Generator) as ranks,
            pytest.raises(RankError, match=rf"r{stage} \| a test made it fail"),
        ):
            ranks.on_each(lambda m: m.generate([[1, 2]], max_new_tokens=6))


def test_a_state_that_two_stages_read_is_refused(tmp_path: Path) -> None:
    """The second layer reads the keys that the first has replaced."""
    path = growing(tmp_path / "model.onnx")
    model = onnx.load(path)
    nodes = {node.output[0]: node for node in model.graph.node}
    added = helper.make_node("ReduceSum", ["past_key_values_0_key"], ["sum"], keepdims=0)
    scaled = helper.make_node("Mul", ["sum", "zeroed"], ["nothing"], "Mul_nothing")
    moved = helper.make_node("Add", [nodes["down1"].output[0], "nothing"], ["down1b"], "Add_down")
    place = list(model.graph.node).index(nodes["down1"]) + 1
    for node in (moved, scaled, added):
        model.graph.node.insert(place, node)
    model.graph.initializer.append(helper.make_tensor("zeroed", TensorProto.FLOAT, [], [0.0]))
    consumer = nodes["x2"]
    consumer.input[list(consumer.input).index("down1")] = "down1b"
    onnx.save(model, path)
    entry = {"assign": {"*sum*": 1, "Mul_nothing": 1}}
    with pytest.raises(ShardingError, match=r"state 'past_key_values_0_key' is read by 'model.1'"):
        shard_model(path, pipeline(**entry), tmp_path / "out")


def test_inspect_lists_the_states_of_a_pipeline(tmp_path: Path) -> None:
    out = shard_model(growing(tmp_path / "model.onnx"), "pp=2,tp=2", tmp_path / "out").out
    report = json.loads((out / "manifest.json").read_text())["report"]
    assert [state["input"] for state in report["states"]] == [
        f"past_key_values_{n}_{part}" for n in (0, 1) for part in ("key", "value")
    ]
