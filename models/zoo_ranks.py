"""Runs and trains the ranks of a zoo network, to compare them with PyTorch."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import onnx_ir as ir
from zoo_pytorch import DECAY, EPSILON, Arrays, Trained

from onnxpar.ops.fused.updates import ADAMW_STEP
from onnxpar_format.options import Settings
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.hyper import hyperparameters


def train(directory: Path, batches: Sequence[Arrays], rate: float) -> Trained:
    """Trains all ranks in this process with AdamW.

    Args:
        directory: The directory.
        batches: The batch of each step.
        rate: Learning rate.
    """
    scalars = hyperparameters("adamw", Settings(weight_decay=DECAY, eps=EPSILON))
    with TrainerGroup(directory) as group:
        states = group.manifest.trained().states
        kept = [name for name, state in states.items() if state.kind == "statistic"]
        gradients = [state for state in states.values() if state.kind == "gradient"]
        decays = _decays(group.manifest)
        parameters = {
            g.parameter: (prod(int(size) for size in g.shape), g.parameter in decays)
            for g in gradients
        }
        losses = [
            group.train_step([batch], scalars.at(step, rate)).loss
            for step, batch in enumerate(batches, 1)
        ]
        return Trained(losses, {name: group.gather(name) for name in kept}, parameters)


def _decays(manifest: Manifest) -> frozenset[str]:
    """Returns the parameters whose update reads the weight decay; others have a constant."""
    graph = ir.load(manifest.graph_path("optimizer_model", 0)).graph
    place = ADAMW_STEP.inputs.index("decay")
    found = set()
    for node in graph:
        if node.op_type == ADAMW_STEP.name:
            parameter, decay = node.inputs[0], node.inputs[place]
            assert parameter is not None and decay is not None
            if decay.is_graph_input():
                found.add(parameter.name or "")
    return frozenset(found)
