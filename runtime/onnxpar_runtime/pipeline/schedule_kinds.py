"""The schedules by name.

All of them differentiate the micro-batches of a virtual stage in ascending order, so that gradients
are summed in the order in which one device would sum them, and the sums are equal to the last bit.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.schedule import Action, Kind, Schedule

Actions = tuple[Action, ...]
_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def make(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        stages: Number of ranks of the pipeline, p ≥ 1.
        micro_batches: Number of micro-batches, m ≥ 1; it need not be a multiple of `stages`.
        chunks: Number of virtual stages on each rank, v ≥ 1; more than 1 only for schedules that
            run around the ranks several times.

    Raises:
        ScheduleError: An unknown name, or a number that the schedule does not take.
    """
    for what, number in (
        ("stages", stages),
        ("micro-batches", micro_batches),
        ("chunks", chunks),
    ):
        if number < 1:
            raise ScheduleError(f"schedule {name!r}: {what}: expected at least 1, got {number}")
    if name not in SCHEDULES:
        raise ScheduleError(f"expected a schedule of {', '.join(SCHEDULES)}, got {name!r}")
    if chunks > 1 and name not in CHUNKED:
        raise ScheduleError(
            f"schedule {name!r}: expected one chunk for each stage, got {chunks}; schedules with "
            f"several chunks are {', '.join(CHUNKED)}"
        )
    of_rank = SCHEDULES[name]
    ranks = tuple(of_rank(rank, stages, micro_batches, chunks) for rank in range(stages))
    return Schedule(name, stages, micro_batches, chunks, ranks)


def _forward(rank: int, stages: int, micro_batches: int, chunks: int) -> Actions:
    """Forwards alone, for evaluation: the micro-batches go around the ranks in groups."""
    return tuple(
        Action(_F, chunk, micro_batch)
        for chunk, micro_batch in _around(stages, micro_batches, chunks)
    )


def _gpipe(rank: int, stages: int, micro_batches: int, chunks: int) -> Actions:
    """GPipe (Huang et al., NeurIPS 2019): all forwards, then all backwards."""
    return tuple(Action(kind, 0, k) for kind in (_F, _B) for k in range(micro_batches))


def _one_f_one_b(rank: int, stages: int, micro_batches: int, chunks: int) -> Actions:
    """PipeDream-Flush (Narayanan et al., ICML 2021): forwards and backwards alternate."""
    return _alternate(
        [(0, k) for k in range(micro_batches)],
        [(0, k) for k in range(micro_batches)],
        stages - rank - 1,
    )


def _interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Actions:
    """Interleaved 1F1B (Narayanan et al., SC 2021), for any number of micro-batches.

    With one chunk it is 1F1B, which needs fewer forwards ahead.
    """
    if chunks == 1:
        return _one_f_one_b(rank, stages, micro_batches, chunks)
    # The last rank starts its backwards with the last chunk of micro-batch 0. Every rank before it
    # is two units ahead: its forward comes one unit earlier, and its backward one unit later.
    warm_up = (chunks - 1) * groups(stages, micro_batches)[0] + 2 * (stages - rank - 1)
    forwards = list(_around(stages, micro_batches, chunks))
    backwards = [(chunks - 1 - chunk, micro_batch) for chunk, micro_batch in forwards]
    return _alternate(forwards, backwards, warm_up)


def _zb_h1(rank: int, stages: int, micro_batches: int, chunks: int) -> Actions:
    """ZB-H1 (Qi et al., ICLR 2024, section 2.3): 1F1B with split backwards.

    Rank r computes the parameters' gradients r micro-batches late, so that every rank keeps the
    activations of as many micro-batches as rank 0 of 1F1B.
    """
    actions: list[Action] = []
    for action in _one_f_one_b(rank, stages, micro_batches, chunks):
        if action.kind is _F:
            actions.append(action)
            continue
        actions.append(Action(_I, 0, action.micro_batch))
        if action.micro_batch >= rank:
            actions.append(Action(_W, 0, action.micro_batch - rank))
    late = range(max(0, micro_batches - rank), micro_batches)
    actions.extend(Action(_W, 0, micro_batch) for micro_batch in late)
    return tuple(actions)


def groups(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Returns the sizes of the groups in which micro-batches go around the ranks, largest first.

    A group with fewer micro-batches than ranks would come back to rank 0 late. So there are as many
    groups as possible with at least `stages` in each, of sizes that differ by at most 1.
    """
    count = max(1, micro_batches // stages)
    size, larger = divmod(micro_batches, count)
    return tuple(size + (group < larger) for group in range(count))


def _around(stages: int, micro_batches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yields chunk and micro-batch in the order of forwards: each group through every chunk."""
    first = 0
    for size in groups(stages, micro_batches):
        for chunk in range(chunks):
            yield from ((chunk, micro_batch) for micro_batch in range(first, first + size))
        first += size


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int
) -> Actions:
    """Returns `warm_up` forwards, then forwards and backwards in turn, then the other backwards."""
    ahead = min(warm_up, len(forwards))
    actions = [Action(_F, *unit) for unit in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += (Action(_F, *forward), Action(_B, *backward))
    actions.extend(Action(_B, *unit) for unit in backwards[len(forwards) - ahead :])
    return tuple(actions)


SCHEDULES: MappingProxyType[str, Callable[[int, int, int, int], Actions]] = MappingProxyType(
    {
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved": _interleaved,
        "zb-h1": _zb_h1,
        "forward": _forward,
    }
)
# Those that take several chunks on a rank.
CHUNKED = ("interleaved", "forward")
