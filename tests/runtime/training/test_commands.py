"""What `train` and `eval` share, where it is about several ranks; the rest is in tests/cli."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_trained import regression, start
from safetensors.numpy import load_file

from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError
from onnxpar_runtime.tensor_file import Entry
from onnxpar_runtime.training import commands


def test_parameters_are_saved_whole(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.each(lambda rank: commands.save(group.members[rank], tmp_path / "w"))
    np.testing.assert_array_equal(load_file(tmp_path / "w")["w"], start())


def test_all_ranks_hear_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def full(path: Any, entries: Sequence[Entry], arrays: Iterable[Any]) -> None:
        raise InputError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(commands, "write_tensors", full)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        for member in group.members:
            gather = member.gather
            monkeypatch.setattr(
                member, "gather", lambda name, gather=gather: gathered.append(name) or gather(name)
            )
        with pytest.raises(OnnxparRuntimeError, match="No space left on device"):
            group.each(lambda rank: commands.save(group.members[rank], tmp_path / "w"))
    # The rank that could not write took what the other had to send.
    assert gathered == ["w", "w"]
