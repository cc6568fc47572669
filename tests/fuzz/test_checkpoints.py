"""Checkpoints that are cut short or garbled: a clear error, and nothing written."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxpar_format.checkpoint import FILE_NAME
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.reshard import merge
from onnxpar_runtime.errors import CheckpointError
from tests.runtime.hand_trained import checkpoint
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
ROUNDS = 3000 if FULL else 300
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**70, 1.5, "", "x", "../x", "rank0000.safetensors", [], [[0, 1]],
    [[0, 3], [0, 2]], [[-1, 2], [0, 2]], [[2, 1], [0, 2]], {}, {"a": 1}, "f" * 64, float("nan"),
)  # fmt: skip


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("fuzz"))


def places(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in parsed JSON."""
    if path:
        yield path
    inner = (
        item.items()
        if isinstance(item, dict)
        else enumerate(item if isinstance(item, list) else ())
    )
    for key, value in inner:
        yield from places(value, (*path, key))


def signed(contents: Any) -> str:
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"))
    return f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}",\n"contents": {text}}}\n'


def tried(checkpoint: Path, target: Path) -> str | None:
    """Merges a checkpoint; returns the error, after which there is nothing of the target."""
    try:
        merge(checkpoint, target)
    except CheckpointError as error:
        assert [p for p in target.parent.iterdir() if target.name in p.name] == []
        return str(error)
    shutil.rmtree(target)
    return None


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


def test_values_that_are_something_else(copy: Path, tmp_path: Path) -> None:
    raw = json.loads((copy / FILE_NAME).read_text())["contents"]
    rng = random.Random(SEED)
    ways, refused = list(places(raw)), 0
    for _ in range(ROUNDS):
        garbled = json.loads(json.dumps(raw))
        *path, last = rng.choice(ways)
        parent = garbled
        for key in path:
            parent = parent[key]
        if rng.random() < 0.2:
            del parent[last]
        else:
            parent[last] = rng.choice(VALUES)
        (copy / FILE_NAME).write_text(signed(garbled))
        message = tried(copy, tmp_path / "out")
        refused += message is not None
        assert message is None or str(copy) in message, (SEED, path, last)
    # What is left are texts that may be anything, such as the model's name.
    assert refused > ROUNDS / 2


def test_bytes_of_the_manifest_that_are_others(copy: Path, tmp_path: Path) -> None:
    data = (copy / FILE_NAME).read_bytes()
    rng = random.Random(SEED)
    for _ in range(ROUNDS // 3):
        garbled = bytearray(data)
        garbled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (copy / FILE_NAME).write_bytes(garbled)
        message = tried(copy, tmp_path / "out")
        if message is None:
            # The text says the same, as with another space between two words.
            assert json.loads(garbled) == json.loads(data)
        else:
            assert FILE_NAME in message
    for length in range(0, len(data) - 1, max(1, len(data) // 40)):
        (copy / FILE_NAME).write_bytes(data[:length])
        assert FILE_NAME in (tried(copy, tmp_path / "out") or "")


Change = Callable[[bytes], bytes]
CHANGES: dict[str, tuple[Change, str]] = {
    "empty": (lambda data: b"", "truncated, expected {} bytes, got 0 bytes"),
    "cut short": (lambda data: data[:-1], "truncated, expected {} bytes"),
    "longer": (lambda data: data + b"x", "changed, expected {} bytes"),
    "a bit": (
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "its content has changed: expected the checksum",
    ),
    "no header": (lambda data: bytes(len(data)), "rank0000.safetensors"),
    "header": (lambda data: data[:9] + b"?" + data[10:], "rank0000.safetensors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_are_others(copy: Path, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    file = copy / "rank0000.safetensors"
    data = file.read_bytes()
    file.write_bytes(change(data))
    error = tried(copy, tmp_path / "out") or ""
    assert str(copy) in error and file.name in error and message.format(len(data)) in error


def test_files_that_are_missing(copy: Path, tmp_path: Path) -> None:
    (copy / "rank0001.safetensors").unlink()
    error = tried(copy, tmp_path / "out") or ""
    assert "rank0001.safetensors: missing, though the checkpoint names it" in error
    (copy / FILE_NAME).unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        merge(copy, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it has no checkpoint.json"):
        Checkpoint.load(copy)
