"""On which machines ranks should be, so that the fewest bytes of collectives leave a machine."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations, product
from operator import mul

from onnxpar_format.expressions import ExpressionError, evaluate_exact, names_of
from onnxpar_format.manifest import ManifestContents

_TYPICAL = 64
"""The size of each symbol; bytes are only compared with one another."""
_MOST_AXES = 4
"""With more mesh axes, other orders of them are not tried."""
Axes = Sequence[tuple[str, int]]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The machines of ranks, and what their collectives send to other machines.

    Attributes:
        machines: The number of each rank's machine.
        axes: The mesh axes in the order in which they are laid onto machines, major first.
        total: The bytes that a rank sends in collectives in one step.
        leaving: How many of them leave its machine, on average over ranks.
        consecutive: How many would with consecutive ranks on each machine.
        assumed: The size with which symbols were counted; None if no size has a symbol.
    """

    machines: tuple[int, ...]
    axes: Axes
    total: int
    leaving: int
    consecutive: int
    assumed: int | None


def lay_out(manifest: ManifestContents, slots: Sequence[int]) -> Layout | None:
    """Returns the layout of a directory's ranks on machines from which the fewest bytes leave.

    Mesh axes are laid onto machines in each order, with as many ranks on each machine as it has
    slots, or fewer, so that no group over the last axes is divided. Stages of a pipeline stay
    consecutive.

    Args:
        manifest: The manifest of a directory, whose report has the collectives of a stage.
        slots: The most ranks of each machine.

    Returns:
        The layout; None if none is better than consecutive ranks, or the slots are too few.
    """
    sent, count = _sent(manifest), manifest.devices
    if len(slots) < 2 or sum(slots) < count or not sent or len(manifest.axes) > _MOST_AXES:
        return None
    begin = range(0, count, manifest.stage_devices)
    plain = _filled(slots, count)
    now = best = _leaving(sent, plain, range(manifest.stage_devices))
    found = None
    for order in permutations(manifest.axes):
        places = _places(manifest.axes, order)
        for block in accumulate((size for _, size in reversed(order)), mul, initial=1):
            filled = _filled([block * (number // block) for number in slots], count)
            if len(filled) < count:
                break
            share = _leaving(sent, filled, places)
            if share < best:
                best = share
                found = order, [filled[first + place] for first in begin for place in places]
    if found is None:
        return None
    total, symbolic = sent.total(), any(_symbols(manifest))
    return Layout(
        machines=tuple(found[1]), axes=found[0], total=total, leaving=round(best * total),
        consecutive=round(now * total), assumed=_TYPICAL if symbolic else None,
    )  # fmt: skip


def _filled(slots: Sequence[int], count: int) -> list[int]:
    """Returns the machine of each of `count` ranks that fill machines in order, or of fewer."""
    return [machine for machine, number in enumerate(slots) for _ in range(number)][:count]


def layout_notice(manifest: ManifestContents, machines: Sequence[int]) -> str:
    """Returns what would let fewer bytes leave a machine, for people; empty if nothing would.

    Consecutive ranks on each machine are tried, and then other orders of the mesh axes.

    Args:
        manifest: The manifest of a directory, whose report has the collectives of a stage.
        machines: A number for the machine of each rank.
    """
    if len(set(machines)) == 1 or not (sent := _sent(manifest)):
        return ""
    now = _leaving(sent, machines, range(manifest.stage_devices))
    blocks = sorted(machines, key=list(dict.fromkeys(machines)).index)
    consecutive = _leaving(sent, blocks, range(manifest.stage_devices))
    if consecutive < now:
        return (
            f"{now:.0%} of the bytes of collectives leave a machine; with consecutive ranks on "
            f"each machine, {consecutive:.0%} would: start them with mpirun --map-by slot (Open "
            "MPI), or srun --distribution=block"
        )
    if len(manifest.axes) > _MOST_AXES:
        return ""
    orders = [tuple(order) for order in permutations(manifest.axes)]
    shares = [_leaving(sent, blocks, _places(manifest.axes, order)) for order in orders]
    least = min(shares)
    if least >= now:
        return ""
    order = ",".join(f"{name}={size}" for name, size in orders[shares.index(least)])
    return (
        f"{now:.0%} of the bytes of collectives leave a machine; with the mesh axes in the order "
        f"{order}, {least:.0%} would: shard with it"
    )


def _sent(manifest: ManifestContents) -> Counter[Groups]:
    """Returns the bytes that a device sends, by the groups of the collectives."""
    found: Counter[Groups] = Counter()
    try:
        for item in (manifest.report or {}).get("collectives", ()):
            groups = tuple(tuple(map(int, group)) for group in item["groups"])
            size = item["bytes"]
            if not isinstance(size, int | str):
                return Counter()
            sizes = dict.fromkeys(names_of(size), _TYPICAL)
            if all(0 <= r < manifest.stage_devices for group in groups for r in group):
                found[groups] += int(evaluate_exact(size, sizes))
    except (KeyError, TypeError, ValueError, ExpressionError):
        return Counter()  # A report is for people: a run does not need it.
    return found


def _symbols(manifest: ManifestContents) -> Iterator[str]:
    """Yields the symbols in the sizes of collectives that `_sent` could read."""
    for item in (manifest.report or {}).get("collectives", ()):
        yield from names_of(item["bytes"])


def _leaving(sent: Counter[Groups], machines: Sequence[int], places: Sequence[int]) -> float:
    """Returns the share of the bytes that ranks send in groups on several machines.

    Args:
        sent: The bytes by the groups of one stage.
        machines: The machine of each process, in the order of stages.
        places: For each rank of a stage, the number of its process in the stage.
    """
    far = total = 0
    for begin in range(0, len(machines), len(places)):
        of_rank = [machines[begin + place] for place in places]
        for groups, size in sent.items():
            for group in groups:
                total += size * len(group)
                if len({of_rank[r] for r in group}) > 1:
                    far += size * len(group)
    return far / total if total else 0.0


def _places(axes: Axes, order: Axes) -> list[int]:
    """Returns the number that each rank would have if the axes were in another order."""
    strides = {}
    stride = 1
    for name, size in reversed(order):
        strides[name] = stride
        stride *= size
    coordinates: Iterable[tuple[int, ...]] = product(*(range(size) for _, size in axes))
    return [
        sum(c * strides[name] for c, (name, _) in zip(at, axes, strict=True)) for at in coordinates
    ]
