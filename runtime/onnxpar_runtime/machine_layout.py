"""Whether the ranks of a directory are on the machines where their collectives send least."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations, product

from onnxpar_format.expressions import ExpressionError, evaluate_exact, names_of
from onnxpar_format.manifest import ManifestContents

_TYPICAL = 64
"""The size of each symbol; bytes are only compared with one another."""
_MOST_AXES = 4
"""With more mesh axes, other orders of them are not tried."""
Axes = Sequence[tuple[str, int]]
Groups = tuple[tuple[int, ...], ...]


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


def _leaving(sent: Counter[Groups], machines: Sequence[int], places: Sequence[int]) -> float:
    """Returns the share of the bytes that are sent in groups on several machines.

    Args:
        sent: The bytes by the groups of one stage.
        machines: The machine of each process, in the order of stages.
        places: For each rank of a stage, the number of its process in the stage.
    """
    far = total = 0
    for begin in range(0, len(machines), len(places)):
        of_rank = [machines[begin + place] for place in places]
        for groups, size in sent.items():
            total += size
            if any(len({of_rank[r] for r in group}) > 1 for group in groups):
                far += size
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
