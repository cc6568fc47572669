"""The bytes that ranks send, by the manifest's formulas and as the ranks count them."""

from collections.abc import Mapping, Sequence
from math import floor, prod
from typing import Any

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import CollectiveEntry, HandedEntry
from onnxpar_format.expressions import ExpressionError, evaluate_exact
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.values import read_values

_NOT_KNOWN = "?"


def collectives(manifest: Manifest, program: str, stage: int) -> tuple[CollectiveEntry, ...]:
    """Returns the collectives of a stage's ranks in one run of a program on one micro-batch.

    They include values that are sent to other stages, as `Send`.

    Args:
        manifest: The manifest.
        program: Name of the program.
        stage: The stage; 0 without a pipeline.

    Raises:
        DirectoryError: There is no such program.
    """
    pipeline = manifest.pipeline
    if pipeline is None or program not in pipeline.parts:
        return manifest.program(program).collectives
    if program in pipeline.updates:
        names = pipeline.updates[program][stage :: pipeline.stages]
        return tuple(c for name in names for c in manifest.program(name).collectives)
    own, stages = pipeline.virtual_stages_of(stage), pipeline.programs[program]
    issued = [c for i in own for n in stages[i].programs for c in manifest.program(n).collectives]
    for (_, source, target), values in read_values(manifest, program).messages.items():
        if source in own and target not in own:
            issued += [_send(value, source, target) for value in values]
    return tuple(issued)


def _send(value: HandedEntry, source: int, target: int) -> CollectiveEntry:
    size: str | int = _NOT_KNOWN
    if value.shape is not None:
        item = DTYPES[value.dtype].dtype.itemsize
        item *= prod(n for n in value.shape if isinstance(n, int))
        size = "*".join([str(item), *(f"({n})" for n in value.shape if isinstance(n, str))])
    return CollectiveEntry(
        op="Send",
        node="",
        value=value.name,
        atoms=(),
        stages=None,
        bytes=size,
        reason=f"virtual stage {target} reads the results of {source}",
        before="",
        after="",
    )


def compare_bytes(
    runs: Mapping[str, Sequence[Mapping[str, int]]],
    group: Ranks[Any],
    *,
    widened: bool = False,
) -> tuple[int | None, int, list[str]]:
    """Returns bytes expected and counted, and the operators for which they differ.

    Fractions of a byte in a formula are rounded down, as the ranks count. A rank that sends nothing
    in a Permute, or receives in a Broadcast, counts less than the formula says.

    Args:
        runs: For each program the values of the symbols in each of its runs since the counts were
            reset.
        group: The ranks.
        widened: Allow twice the bytes: on the CPU onnxruntime may convert float16 to float32 before
            a collective instead of after it.

    Returns:
        The largest number of bytes that a rank should send, None if a formula has an unknown size;
        the largest number that a rank counted; and the differences, for people.
    """
    manifest = group.manifest
    wanted = [_expected(manifest, runs, stage) for stage in range(manifest.stages)]
    counters = group.counters()
    counted = max(sum(c.bytes for c in counts.values()) for counts in counters)
    problems: dict[str, str] = {}
    total = 0
    for rank, counts in enumerate(counters):
        expected = wanted[manifest.stage_of(rank)]
        if expected is None:
            return None, counted, []
        total = max(total, sum(expected.values()))
        if manifest.dialect is not None:
            continue  # another runtime may have other collectives in place of those
        for op in sorted(set(expected) | set(counts)):
            want, got = expected.get(op, 0), counts[op].bytes if op in counts else 0
            one_sided = op in ("Permute", "Broadcast", "Send", "Recv")
            if got > want * (2 if widened else 1) or (got < want and not one_sided):
                problem = f"{op} on rank {rank}: expected {want} bytes, got {got}"
                problems.setdefault(op, problem)
    return total, counted, [problems[op] for op in sorted(problems)]


def _expected(
    manifest: Manifest, runs: Mapping[str, Sequence[Mapping[str, int]]], stage: int
) -> dict[str, int] | None:
    """Returns the bytes by operator; None if a formula cannot be evaluated."""
    expected: dict[str, int] = {}
    for program, values in runs.items():
        for issued in collectives(manifest, program, stage):
            try:
                size = sum(floor(evaluate_exact(issued.bytes, sizes)) for sizes in values)
            except ExpressionError:
                return None
            expected[issued.op] = expected.get(issued.op, 0) + size
    return expected
