"""Random programs sharded at random: the annotation of a plan, read again, is the plan."""

import os

import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import ShardingError
from onnxpar.propagation.propagate import propagate
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.annotation_reader import read_annotation
from onnxpar.strategy.annotation_seeds import annotated_seeds
from onnxpar.strategy.annotation_writer import annotate_proto
from tests.random_programs import program
from tests.random_strategies import document, pinned
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 2000 if FULL else 40
BATCHES = 20


def case(seed: int) -> bool:
    """Runs a case; whether its strategy was taken."""
    model = program(seed)
    analysed = analyse(ir.from_proto(model), {})
    ranks = {v.name or "": v.shape.rank() for v in analysed.model.graph.inputs if v.shape}
    seeds = resolve(Strategy.from_dict(document(seed, ranks)), analysed)
    seeds = pinned(analysed, seeds, seed) if seed % 2 else seeds
    try:
        plan = propagate(analysed, seeds)
    except ShardingError:
        return False
    annotate_proto(model, analysed, plan, {})
    annotation = read_annotation(model, "model")
    assert annotation is not None and annotation.devices == plan.mesh.size
    again = propagate(analysed, annotated_seeds(annotation, analysed))
    assert (again.mesh, again.inputs, again.parameters) == (plan.mesh, plan.inputs, plan.parameters)
    for name, found in plan.nodes.items():
        made = {v.name for v in analysed.rules.views[name].node.outputs}
        # How a result is made that then is laid out otherwise is not said.
        if not made & set(plan.resharded):
            assert again.nodes[name] == found, name
        assert again.nodes[name].inputs == found.inputs, name
    return True


@pytest.mark.parametrize("batch", range(BATCHES))
def test_annotations_say_the_plan(batch: int) -> None:
    seeds = [SEED + n for n in range(CASES) if n % BATCHES == batch]
    assert any([case(seed) for seed in seeds]), f"seeds {seeds}: no strategy was taken"
