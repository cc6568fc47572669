"""When the stages of a pipeline compute, for given times of their programs."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.player import plan
from onnxpar_runtime.pipeline.schedule import Action, Kind
from onnxpar_runtime.pipeline.simulate import Times, simulate
from onnxpar_runtime.pipeline.values import read_values

Json = dict[str, Any]
_KEEPS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
"""By how much an action changes the number of forwards whose values are kept."""


def pipeline_times(directory: Path, program: str, seconds: Sequence[Mapping[str, float]]) -> Json:
    """Returns steps of a pipeline as its schedule plays them, each action as early as possible.

    Keys: `schedule`, `micro_batches`, `chunks`; `ranks`, for each stage its actions, `[kind, chunk,
    micro-batch, begin, end]`; `end`; and `kept`, for each stage the largest number of micro-batches
    whose forward values it keeps for their backward passes. `begin` and `end` are lists, with the
    seconds in each of the steps. Messages between stages take no time.

    Args:
        directory: The directory.
        program: The program that runs through the stages.
        seconds: For each step the seconds of one run of each of its parts.

    Raises:
        OnnxparRuntimeError: The directory cannot be read, or has no such pipeline.
    """
    manifest = Manifest.load(directory)
    edges = read_values(manifest, program).edges
    pipeline = manifest.pipeline
    assert pipeline is not None, "read_values checks it"
    stages = pipeline.programs[program]
    trains = any(stage.backward for stage in stages)
    played = plan(
        pipeline.schedule if trains else "forward",
        pipeline.stages,
        pipeline.micro_batches,
        pipeline.chunks,
        edges,
    )

    def times(known: Mapping[str, float]) -> Times:
        def of(names: list[str | None]) -> list[float]:
            return [0.0 if name is None else known.get(name, 0.0) for name in names]

        forward = of([stage.forward for stage in stages])
        backward, weight = of([s.backward for s in stages]), of([s.weight for s in stages])
        both = [a + b for a, b in zip(backward, weight, strict=True)]
        return Times(forward, both, backward, weight, [0.0] * len(stages))

    found = [simulate(played, times(known)) for known in seconds]
    rows, kept = [], []
    for rank, steps in enumerate(played.ranks):
        actions = [step for step in steps if isinstance(step, Action)]
        changes = [_KEEPS.get(action.kind, 0) for action in actions]
        kept.append(max(accumulate(changes)))
        rows.append(
            [
                [
                    *(action.kind.value, action.chunk, action.micro_batch),
                    [step.starts[rank][place] for step in found],
                    [step.ends[rank][place] for step in found],
                ]
                for place, action in enumerate(actions)
            ]
        )
    return {
        "schedule": played.schedule.name,
        "micro_batches": pipeline.micro_batches,
        "chunks": pipeline.chunks,
        "ranks": rows,
        "end": [step.makespan for step in found],
        "kept": kept if trains else [1] * pipeline.stages,
    }
