"""Which bytes leave a machine."""

from typing import Any

import pytest

from onnxpar.core.errors import DirectoryError
from onnxpar.report.machine_traffic import machine_traffic


def collective(over: str, size: int | str, *groups: list[int]) -> dict[str, Any]:
    return {"over": over, "bytes": size, "groups": list(groups)}


NEIGHBOURS = [0, 1], [2, 3]
FAR = [0, 2], [1, 3]


def test_bytes_over_the_inner_axis_stay() -> None:
    found = machine_traffic(
        [
            collective("dp", 100, *FAR),
            collective("tp", "8*batch", *NEIGHBOURS),
            collective("tp", "batch", *NEIGHBOURS),
        ],
        devices=4,
        ranks=2,
    )
    assert found["over"] == [
        {"over": "tp", "machines": 1, "collectives": 2, "bytes": "9*batch"},
        {"over": "dp", "machines": 2, "collectives": 1, "bytes": 100},
    ]
    assert found["bytes"] == 100 and found["advice"] == ""


def test_an_axis_that_could_stay_is_named() -> None:
    collectives = [collective("tp", 900, *FAR), collective("dp", 100, *NEIGHBOURS)]
    found = machine_traffic(collectives, devices=4, ranks=2)
    assert found["bytes"] == 900
    assert "groups of tp are on one machine if it is the last axis" in found["advice"]
    # A group of four ranks cannot stay on a machine of two.
    wide = machine_traffic([collective("tp", 900, [0, 1, 2, 3])], devices=4, ranks=2)
    assert wide["bytes"] == 900 and wide["advice"] == ""


def test_no_collectives() -> None:
    assert machine_traffic([], devices=1, ranks=1) == {
        "ranks_per_machine": 1, "over": [], "bytes": 0, "advice": "",
    }  # fmt: skip


def test_ranks_that_do_not_fill_machines() -> None:
    with pytest.raises(DirectoryError, match="expected a divisor of the 8 ranks, got 3"):
        machine_traffic([], devices=8, ranks=3)
