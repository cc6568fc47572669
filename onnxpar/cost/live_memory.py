"""The memory of a program: the bytes of its values that are alive at the same time.

A program is a sequence of steps in the order of execution. A value is alive from the step that
makes it to the last one that reads it; then its memory is given back at once, as the runtime's
sessions do. Views share the memory of their operand, and some kernels write over an operand that
nobody reads any more (`onnxpar.ops.slots`).

Steps come from a plan of the undivided program (`onnxpar.cost.price`), where only the sharding of
each value is known, or from the program that was made of it (`onnxpar.partition.program_memory`),
which has masks, reshards and local forms as they run.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onnxpar.ops.slots import Kernel


@dataclass(frozen=True)
class Made:
    """A value that a step makes.

    Attributes:
        name: Its name; every value has one of its own.
        bytes: Its size.
        view_of: The value that it lies on; "" for memory of its own.
        over: Values whose memory it may take, if they are of its size and nobody reads them later.
    """

    name: str
    bytes: int
    view_of: str = ""
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryStep:
    """One node's execution.

    Attributes:
        name: Name of the node.
        reads: Values that it reads, once for each operand.
        makes: Values that it makes.
        work: Bytes that it needs while it runs.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[Made, ...]
    work: int = 0


@dataclass(frozen=True)
class Peak:
    """Where a program's values take the most memory.

    Attributes:
        bytes: Of all values that are alive then, and of the step's work.
        step: The step, from 0; -1 where there is none.
        name: Its node's name.
    """

    bytes: int
    step: int
    name: str


def live_peak(steps: Sequence[MemoryStep], kept: Collection[str] = ()) -> Peak:
    """Returns the peak of what a program makes and drops again.

    What no step makes (inputs, parameters) is held from outside and counts nothing.

    Args:
        steps: The program.
        kept: Values that stay after the program, in memory of their own: its outputs. They count
            nothing either, since they are there from the run before.
    """
    left: dict[str, int] = {}
    for step in steps:
        for name in step.reads:
            left[name] = left.get(name, 0) + 1
    # Of each value the memory that it lies in; of each memory its size, and reads to come.
    place: dict[str, str] = {}
    size: dict[str, int] = {}
    reads: dict[str, int] = {}
    live, peak = 0, Peak(0, -1, "")
    for number, step in enumerate(steps):
        for made in step.makes:
            if made.name in kept:
                continue
            home = _home(made, place, size, reads)
            if home is None:
                continue
            if home == made.name:
                size[home], reads[home] = made.bytes, 0
                live += made.bytes
            place[made.name] = home
            # Its own making counts as a reading, so that it lasts to the end of the step.
            reads[home] += left.get(made.name, 0) + 1
        if live + step.work > peak.bytes:
            peak = Peak(live + step.work, number, step.name)
        for name in (*step.reads, *(m.name for m in step.makes)):
            home = place.get(name)
            if home is None:
                continue
            reads[home] -= 1
            if not reads[home]:
                live -= size[home]
    return peak


def _home(
    made: Made, place: Mapping[str, str], size: Mapping[str, int], reads: Mapping[str, int]
) -> str | None:
    """The memory of a value that is made; None where it is not the program's own."""
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
    """Returns the values that a node makes.

    Args:
        kernel: What its kernel does with memory.
        reads: Names of its operands, "" where one is absent.
        names: Names of its results, "" where one is not made.
        sizes: Bytes of each.
    """
    found = []
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        view = reads[0] if kernel.view and index == 0 and reads else ""
        over = tuple(reads[i] for i, o in kernel.over if o == index and i < len(reads))
        if name:
            found.append(Made(name, size, view, tuple(n for n in over if n)))
    return tuple(found)
