"""The schedule of a pipeline in training, if the strategy leaves it open."""

from dataclasses import replace

from onnxpar.autodiff.training_program import TrainingProgram
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.stages.assign_stages import estimated_seconds
from onnxpar.stages.program_places import late_nodes
from onnxpar.stages.stage_price import ZERO_BUBBLE, PipelineSplit
from onnxpar.strategy import Strategy

RUN = 2e-4
"""Seconds to start one more program and to keep what it reads (docs/design/0016-pipeline.md)."""


def choose_schedule(strategy: Strategy, split: PipelineSplit, prepared: TrainingProgram) -> str:
    """Returns the faster one of 1F1B and ZB-H1 by the estimated times of the slowest stage.

    Zero bubble runs a program more for each micro-batch, and computes gradients of weights while a
    stage would wait (Qi et al., ICLR 2024). If the strategy limits the memory or recomputes, it is
    1F1B, which keeps less.

    Args:
        strategy: The strategy.
        split: The stages and micro-batches, with one virtual stage for each stage.
        prepared: The undivided program, its nodes in their virtual stages.
    """
    if split.stages == 1 or strategy.recompute or strategy.search.memory is not None:
        return split.schedule
    graph = prepared.program.graph
    seconds = estimated_seconds(strategy, prepared.program, graph)
    late = late_nodes(graph, prepared.links, prepared.gradients)
    # For each stage: its forward, what earlier stages wait for, and the gradients of weights.
    parts = [[0.0, 0.0, 0.0] for _ in range(split.stages)]
    for node in graph:
        name = node.name or ""
        part = 0 if GRADIENT_OF not in node.metadata_props else 1 + (name in late)
        parts[virtual_stage_of(node)][part] += seconds[name]
    slowest = max(parts, key=sum)
    zero_bubble = replace(split, schedule=ZERO_BUBBLE)
    step = zero_bubble.step(sum(slowest), min(slowest)) + split.micro_batches * RUN
    return ZERO_BUBBLE if step < split.step(sum(slowest), 0.0) else split.schedule
