"""The memory of a device of a pipeline stage, computed from the programs of the stage."""

from collections.abc import Mapping, Sequence

from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import (
    ProgramMemory,
    handed_bytes,
    program_memory,
    total_bytes,
)
from onnxpar.stages.stage_price import PipelineSplit


def fullest_stage(
    programs: Sequence[PartitionedModel],
    others: Sequence[PartitionedModel],
    split: PipelineSplit,
    sizes: Mapping[str, int],
) -> int:
    """Returns the bytes at the peak of a device of the stage that needs most.

    While one of its programs runs, a stage keeps what the unfinished micro-batches have left for
    their backwards, or for gradients of weights alone. These micro-batches count equally for all
    its virtual stages.

    Args:
        programs: The programs of all stages: the forwards first, each backward before that of
            gradients of weights. One that is forward and backward counts as a backward.
        others: The other programs of a step, of all stages.
        split: Stages, micro-batches and schedule.
        sizes: Sizes of symbols by name; the others have their typical size.
    """
    first = split.virtual_stages - split.joined
    forwards = {pm.program for pm in programs[:first]}
    backwards: dict[int, str] = {}
    for pm in programs[first:]:
        backwards.setdefault(pm.virtual_stage, pm.program)
    not_last = forwards | set(backwards.values())
    found = []
    for stage in range(split.stages):
        own = [pm for pm in programs if pm.stage == stage]
        known = {pm.program: program_memory(pm, sizes) for pm in own}
        taken = {pm.program: handed_bytes(pm, sizes) for pm in own}
        stashes: dict[int, dict[str, int]] = {pm.virtual_stage: {} for pm in own}
        made: dict[int, dict[str, int]] = {pm.virtual_stage: {} for pm in own}
        for pm in own:
            for handed in pm.handed_in:
                if pm.program in forwards or handed.source not in forwards:
                    continue
                name = handed.local.name or ""
                stashes[pm.virtual_stage][name] = taken[pm.program][name]
                if handed.source in known:
                    made[pm.virtual_stage][name] = taken[pm.program][name]
        complete = sum(sum(s.values()) for s in stashes.values())
        waiting = sum(sum(taken[p].values()) for p in taken.keys() - not_last)
        kept = int(split.stash(stage, complete, waiting))
        most = 0
        for pm in own:
            stash = stashes[pm.virtual_stage]
            arrived = sum(size for name, size in taken[pm.program].items() if name not in stash)
            running = known[pm.program].adding + arrived
            if pm.program in forwards:
                # What it leaves for its own backward is counted in `kept`.
                running -= sum(made[pm.virtual_stage].values())
            most = max(most, kept + running)
        besides = [program_memory(pm, sizes) for pm in others if pm.stage == stage]
        found.append(_held(list(known.values()), besides, most))
    return max(found)


def _held(programs: Sequence[ProgramMemory], besides: Sequence[ProgramMemory], values: int) -> int:
    """Bytes held for programs whose values take at most `values` bytes at the same time."""
    alone = max((p.adding for p in (*programs, *besides)), default=0)
    return total_bytes([*programs, *besides], several=True) + max(values - alone, 0)
