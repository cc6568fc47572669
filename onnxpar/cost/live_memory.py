"""The memory of a program: the bytes of its values that are alive at the same time.

A program is a sequence of steps in the order of execution. A value is alive from the step that
computes it to the last step that reads it; then its memory is freed at once, as in the runtime's
sessions. Views share the memory of their operand, and some kernels overwrite an operand that no
later step reads (`onnxpar.ops.slots`).

Steps come from a plan of the undivided program (`onnxpar.cost.price`), where only the sharding of
each value is known, or from the partitioned program (`onnxpar.partition.program_memory`), which
contains the masks, reshards and local forms.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from onnxpar.ops.slots import Kernel


class Made(NamedTuple):
    """A value that a step computes.

    Attributes:
        name: Its name, which is unique.
        bytes: Its size.
        view_of: The value whose memory it shares; "" for memory of its own.
        over: Values whose memory it may reuse, if they have its size and no later step reads them.
    """

    name: str
    bytes: int
    view_of: str = ""
    over: tuple[str, ...] = ()


class MemoryStep(NamedTuple):
    """One node's execution.

    Attributes:
        name: Name of the node; for other work, a text that no node has.
        reads: Values that it reads, once for each operand.
        makes: Values that it computes.
        work: Bytes that it needs while it runs.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[Made, ...]
    work: int = 0


def live_peak(steps: Sequence[MemoryStep], kept: Collection[str] = ()) -> int:
    """Returns the most bytes that the values of a program, and the work of a step, need at once.

    The arguments are those of `live_bytes`.
    """
    return max(live_bytes(steps, kept), default=0)


def live_bytes(steps: Sequence[MemoryStep], kept: Collection[str] = ()) -> list[int]:
    """Returns for each step the bytes that are needed while it runs: its work, and values.

    The arguments are those of `lifetimes`.
    """
    change = [0] * (len(steps) + 1)
    for life in lifetimes(steps, kept):
        change[life.first] += life.bytes
        change[life.last + 1] -= life.bytes
    return [live + step.work for live, step in zip(accumulate(change), steps, strict=False)]


class Lifetime(NamedTuple):
    """The memory of a value, and of those that share it.

    Attributes:
        name: Name of the value for which it is taken.
        bytes: Its size.
        first: Number of the step that takes it.
        last: Number of the step after which it is free.
    """

    name: str
    bytes: int
    first: int
    last: int


def lifetimes(steps: Sequence[MemoryStep], kept: Collection[str] = ()) -> Iterator[Lifetime]:
    """Yields the memory that the steps of a program take, when it is free again.

    Values that no step computes (inputs, parameters) do not count.

    Args:
        steps: The program. Sizes are only compared, so they may stand for formulas.
        kept: Values that stay after the program, in memory of their own: its outputs. They do not
            count either, since their memory is kept from run to run.
    """
    left = Counter(chain.from_iterable(step.reads for step in steps))
    # The memory of each value, by name; the size and beginning of each memory, and the reads to
    # come.
    place: dict[str, str] = {}
    size: dict[str, int] = {}
    reads: dict[str, int] = {}
    begun: dict[str, int] = {}
    for number, (_, operands, results, _) in enumerate(steps):
        names = []
        for made in results:
            name, home = made.name, _home(made, place, size, reads)
            if home is None or name in kept:
                continue
            if home == name:
                size[home], reads[home], begun[home] = made.bytes, 0, number
            place[name] = home
            # Computing it counts as a read, so that it is alive until the end of the step.
            reads[home] += left.get(name, 0) + 1
            names.append(name)
        for name in (*operands, *names):
            home = place.get(name)
            if home is None:
                continue
            reads[home] -= 1
            if not reads[home]:
                yield Lifetime(home, size[home], begun[home], number)


def _home(
    made: Made, place: Mapping[str, str], size: Mapping[str, int], reads: Mapping[str, int]
) -> str | None:
    """The memory of a computed value; None if the value is a view of one that does not count."""
    if made.view_of:
        return place.get(made.view_of)
    for name in made.over:
        home = place.get(name)
        if home is not None and reads[home] == 1 and size[home] == made.bytes:
            return home
    return made.name


def makes(
    kernel: Kernel, reads: Sequence[str], names: Sequence[str], sizes: Sequence[int]
) -> tuple[Made, ...]:
    """Returns the values that a node computes.

    Args:
        kernel: How its kernel uses memory.
        reads: Names of its operands, "" for an absent one.
        names: Names of its results, "" for one that is not computed.
        sizes: Bytes of each result.
    """
    found = []
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if name:
            view = reads[0] if kernel.view and index == 0 and reads else ""
            over: tuple[str, ...] = ()
            if kernel.over:
                places = (i for i, o in kernel.over if o == index and i < len(reads))
                over = tuple([reads[i] for i in places if reads[i]])
            found.append(Made(name, size, view, over))
    return tuple(found)
