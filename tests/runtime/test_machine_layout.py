"""On which machines ranks are placed, and which notice a run on several machines gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from onnxpar_runtime.machine_layout import lay_out, layout_notice

# The groups of the axes of a mesh of 2 x 4, the first major.
MAJOR = [[r, r + 4] for r in range(4)]
MINOR = [[0, 1, 2, 3], [4, 5, 6, 7]]
BLOCKS = [7, 7, 7, 7, 5, 5, 5, 5]
ROUND = [7, 5, 7, 5, 7, 5, 7, 5]


def manifest(collectives: Any, axes: Sequence[tuple[str, int]], stages: int = 1) -> Mock:
    devices = 1
    for _, size in axes:
        devices *= size
    return Mock(
        axes=axes, stage_devices=devices, devices=stages * devices,
        report={"collectives": collectives},
    )  # fmt: skip


def sent(tp: int | str, dp: int | str, *, tp_is_minor: bool = True) -> list[dict[str, Any]]:
    groups = (MINOR, MAJOR) if tp_is_minor else (MAJOR, MINOR)
    return [{"groups": g, "bytes": b} for g, b in zip(groups, (tp, dp), strict=True)]


MESH = (("dp", 2), ("tp", 4))


def test_nothing_to_say() -> None:
    assert layout_notice(manifest(sent("batch", 8), MESH), [7] * 8) == ""
    # 64 of 72 bytes stay.
    assert layout_notice(manifest(sent("batch", 8), MESH), BLOCKS) == ""
    assert layout_notice(manifest([], MESH), BLOCKS) == ""


def test_ranks_round_robin() -> None:
    found = layout_notice(manifest(sent("3*batch", 64), MESH), ROUND)
    # Groups of dp, ranks r and r + 4, are on one machine there, and those of tp are not.
    assert found.startswith("75% of the bytes of collectives leave a machine; with consecutive")
    assert "25% would: start them with mpirun --map-by slot (Open MPI), or srun --dis" in found
    # Round robin is best if dp sends more.
    assert layout_notice(manifest(sent(1, 99), MESH), ROUND) == ""


def test_axes_in_the_wrong_order() -> None:
    axes = (("tp", 2), ("dp", 4))
    found = layout_notice(manifest(sent(60, 40, tp_is_minor=False), axes), BLOCKS)
    assert found == (
        "60% of the bytes of collectives leave a machine; with the mesh axes in the order "
        "dp=4,tp=2, 40% would: shard with it"
    )


def test_stages_of_a_pipeline() -> None:
    # Each stage has both machines: the groups of tp are on one.
    two = manifest(sent(60, 40), MESH, stages=2)
    assert layout_notice(two, BLOCKS * 2).startswith("40% of the bytes")
    # Each stage has a machine of its own, and all collectives stay.
    assert layout_notice(two, [7] * 8 + [5] * 8) == ""


@pytest.mark.parametrize(
    "damaged",
    [5, [5], [{}], [{"groups": [[0, 9]], "bytes": 3}], [{"groups": 4, "bytes": 3}],
     [{"groups": [["a"]], "bytes": 3}], [{"groups": MINOR, "bytes": "1/"}],
     [{"groups": MINOR, "bytes": None}], [{"groups": MINOR, "bytes": "1//0"}]],
)  # fmt: skip
def test_a_report_that_is_damaged(damaged: Any, tmp_path: Path) -> None:
    assert layout_notice(manifest(damaged, MESH), BLOCKS) == ""


def test_axes_are_laid_onto_machines() -> None:
    axes = (("tp", 2), ("dp", 4))
    case = manifest(sent("batch", 40, tp_is_minor=False), axes)
    found = lay_out(case, [4, 4])
    # Ranks r and r + 4 of a group of tp are on one machine.
    assert found is not None and found.machines == (0, 0, 1, 1) * 2
    assert found.axes == (("dp", 4), ("tp", 2)) and found.assumed == 64
    assert (found.total, found.leaving, found.consecutive) == (104, 40, 64)
    # What a launcher does by itself is best, no axis fits a machine, or the slots are too few.
    assert lay_out(manifest(sent(40, 60, tp_is_minor=False), axes), [4, 4]) is None
    assert lay_out(case, [1] * 8) is None
    assert lay_out(case, [4, 3]) is None
    assert lay_out(case, [8]) is None


def test_slots_that_an_axis_does_not_divide() -> None:
    """Of six slots, four are used: the groups of tp are consecutive, and none is divided."""
    case = manifest(sent(60, 40), MESH)
    found = lay_out(case, [6, 6])
    assert found is not None and found.machines == (0,) * 4 + (1,) * 4
    assert (found.total, found.leaving, found.assumed) == (100, 40, None)
    # Ranks 0 to 5 are on the first machine: half of the groups of tp and of dp are divided.
    assert found.consecutive == 30 + 20


def test_stages_are_laid_onto_machines_one_after_another() -> None:
    axes = (("tp", 2), ("dp", 4))
    case = manifest(sent(60, 40, tp_is_minor=False), axes, stages=2)
    assert lay_out(case, [8, 8]) is None
    found = lay_out(case, [4] * 4)
    assert found is not None and found.machines == (0, 0, 1, 1) * 2 + (2, 2, 3, 3) * 2
