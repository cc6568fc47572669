"""Which bytes of a program's collectives leave a machine, if machines have equally many ranks."""

from collections.abc import Sequence
from typing import Any

from onnxpar.core.errors import DirectoryError
from onnxpar.core.symbols import Dim, SymbolTable, as_dim, dim_text
from onnxpar.core.symbols.expressions import count_str

Json = dict[str, Any]


def machine_traffic(collectives: Sequence[Json], devices: int, ranks: int) -> Json:
    """Returns the traffic between machines that have consecutive ranks, as launchers place them.

    `over` has an entry for each set of mesh axes, those with most bytes first: `over`, the axes;
    `machines`, the most machines of a group; `collectives`, their number; `bytes`, which a device
    sends in them. `bytes` is the sum of those whose groups are on several machines, and `advice`
    says which axis to write last in the mesh, or is empty.

    Args:
        collectives: As in `onnxpar.report.inspect_data.inspect_data`.
        devices: Number of ranks.
        ranks: Ranks of a machine.

    Raises:
        DirectoryError: `ranks` does not divide the number of ranks.
    """
    if ranks < 1 or devices % ranks:
        raise DirectoryError(
            f"--ranks-per-machine: expected a divisor of the {devices} ranks, got {ranks}"
        )
    sums: dict[str, Dim] = {}
    counts: dict[str, int] = {}
    machines: dict[str, int] = {}
    members: dict[str, int] = {}
    for item in collectives:
        over = item["over"]
        sums[over] = sums.get(over, 0) + as_dim(item["bytes"])
        counts[over] = counts.get(over, 0) + 1
        spread = max((len({r // ranks for r in group}) for group in item["groups"]), default=1)
        machines[over] = max(machines.get(over, 1), spread)
        members[over] = max(map(len, item["groups"]), default=1)
    table = SymbolTable()
    order = sorted(sums, key=lambda over: -table.typical(sums[over]))
    crossing: Dim = 0
    for over in order:
        if machines[over] > 1:
            crossing = crossing + sums[over]
    advice = ""
    if order and machines[order[0]] > 1 and members[order[0]] <= ranks:
        advice = (
            f"Most bytes, those over {order[0]}, leave a machine: groups of {order[0]} are on one "
            "machine if it is the last axis of the mesh."
        )
    return {
        "ranks_per_machine": ranks,
        "over": [
            {
                "over": over,
                "machines": machines[over],
                "collectives": counts[over],
                "bytes": count_str(sums[over], dim_text),
            }
            for over in order
        ],
        "bytes": count_str(crossing, dim_text),
        "advice": advice,
    }
