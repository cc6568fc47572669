"""A manifest that is wrong in any way is one clear error; a right one becomes frozen data."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlp
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.core import errors
from onnxpar.emit.read_manifest import read_manifest
from onnxpar_format.entries import SymbolEntry
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import Manifest
from tests.runtime import hand_made, hand_trained

Edit = Callable[[dict[str, Any]], object]


def edit(directory: Path, change: Edit) -> Path:
    path = directory / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return directory


def program(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["programs"]["model"]  # type: ignore[no-any-return]


def test_load(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2, {"divisor": 4})
    manifest = Manifest.load(directory)
    assert (manifest.devices, manifest.atoms, manifest.axes) == (2, (2,), (("dp", 2),))
    assert manifest.symbols["batch"] == SymbolEntry(divisor=4)
    assert manifest.graph_path("model", 1) == directory / "rank0001.model.onnx"
    assert manifest.program("model").system_inputs[0].symbol == "batch"
    manifest.verify_files()


def test_ranks_that_have_the_same_copy_divide_the_files(tmp_path: Path) -> None:
    """Each file that one of them reads is checked once, by one that reads it."""
    made = tmp_path / "m"
    ir.save(mlp.build(image=8, hidden=(16, 12)), tmp_path / "m.onnx")
    shard_model(tmp_path / "m.onnx", "dp=2,tp=2", made)
    manifest = Manifest.load(made)
    for beside in [0, 1, 2, 3], [0, 1], [2, 0], [3]:
        shares = {rank: manifest.files_to_verify(rank, beside) for rank in beside}
        assert all(names <= manifest.files_of(rank) for rank, names in shares.items())
        checked = sorted(name for names in shares.values() for name in names)
        assert checked == sorted(set().union(*(manifest.files_of(rank) for rank in beside)))


def test_another_copy_has_another_number(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    (tmp_path / "b").symlink_to(directory)
    shutil.copytree(directory, tmp_path / "c")
    first, same, other = (Manifest.load(tmp_path / name) for name in "abc")
    assert first.digest == same.digest == other.digest
    assert first.copy_number == same.copy_number != other.copy_number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "expected schema 1, got 2"),
        (lambda m: m.pop("mesh"), "'mesh' is missing"),
        (lambda m: m.update(devices=3), "mesh.atoms: expected integers > 1 whose product is 3"),
        (lambda m: m.update(devices="2"), "manifest.devices: expected int, got '2'"),
        (lambda m: m.update(devices=True), "manifest.devices: expected int, got True"),
        (lambda m: m["symbols"]["batch"].update(divisor=0), "divisor >= 1"),
        (lambda m: m["symbols"]["batch"].pop("max"), "symbols.batch: 'max' is missing"),
        (lambda m: m["symbols"]["batch"].update(same_as=1), "batch.same_as: expected str, got 1"),
        (lambda m: m["symbols"]["batch"].update(same_as="b"), "batch.same_as: expected one of"),
        (lambda m: program(m)["files"].pop(), "2 entries, one per rank"),
        (lambda m: program(m)["files"].__setitem__(0, "../x.onnx"), "without folders"),
        (
            lambda m: program(m)["files"].__setitem__(0, "x.onnx"),
            "files: expected one of the files [",
        ),
        (lambda m: program(m)["inputs"][0].update(dtype="float8"), "'x'.dtype: expected one of"),
        (lambda m: program(m)["inputs"][0]["dims"].pop(), "'x'.shape: expected 1 sizes"),
        (lambda m: program(m)["inputs"][0]["dims"][1][0].update(atoms=[0]), "at most once"),
        (lambda m: program(m)["inputs"][0]["dims"][1][0].update(atoms=[1]), "at most once"),
        (
            lambda m: program(m)["system_inputs"][0].update(kind="dice"),
            "'hyperparameter', 'start_ahead', 'finish_later', 'accumulate'], got 'dice'",
        ),
        (lambda m: program(m)["system_inputs"][0].update(symbol="seq"), "got 'seq'"),
        (lambda m: program(m).update(equal_sizes={}), "equal_sizes: expected list, got {}"),
        (
            lambda m: program(m).update(equal_sizes=[{"values": ["a"], "dims": [0], "sizes": [1]}]),
            "equal_sizes[0]: 'node' is missing",
        ),
        (
            lambda m: program(m).update(
                equal_sizes=[{"node": "n", "op_type": "Add", "values": ["a"], "dims": [0]}]
            ),
            "equal_sizes[0].values: expected 2 items, got ['a']",
        ),
        (lambda m: m["files"]["rank0000.model.onnx"].update(sha256="0"), "64 hexadecimal digits"),
    ],
)
def test_malformed(tmp_path: Path, change: Edit, message: str) -> None:
    directory = edit(hand_made.data_parallel(tmp_path / "a"), change)
    with pytest.raises(DirectoryError) as caught:
        Manifest.load(directory)
    assert message in str(caught.value)
    assert str(directory / "manifest.json") in str(caught.value)


def test_missing_directory_and_manifest(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="no such directory"):
        Manifest.load(tmp_path / "nowhere")
    with pytest.raises(DirectoryError, match=r"got one without manifest\.json"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00"])
def test_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DirectoryError):
        Manifest.load(tmp_path)


def test_files_are_checked(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    path = directory / "rank0001.model.onnx"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manifest = Manifest.load(directory)  # the size is the same, and checksums are read on request
    with pytest.raises(
        DirectoryError,
        match=r"rank0001\.model\.onnx: its content has changed: "
        r"expected SHA-256",
    ):
        manifest.verify_files()
    path.write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(DirectoryError, match=f"truncated, expected {size} bytes, got {size - 1}"):
        Manifest.load(directory)
    path.unlink()
    with pytest.raises(DirectoryError, match="missing"):
        Manifest.load(directory)


def test_unwritten_rank_and_unknown_program(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    manifest = Manifest.load(edit(directory, lambda m: program(m)["files"].__setitem__(1, None)))
    with pytest.raises(
        DirectoryError, match=r"graph of rank 1 was not written, only those of \[0\]"
    ):
        manifest.graph_path("model", 1)
    with pytest.raises(DirectoryError, match="expected a rank from 0 to 1, got 2"):
        manifest.graph_path("model", 2)
    with pytest.raises(DirectoryError, match=r"no program 'train'; it has model"):
        manifest.program("train")


def test_damage_of_any_part_is_a_directory_error(tmp_path: Path) -> None:
    """Replaces each value of the manifest by values of other types: never another exception."""
    directory = hand_made.reduced(tmp_path / "a")
    path = directory / "manifest.json"
    text = path.read_text()
    rng = random.Random(7)

    def places(node: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        below = [
            p
            for k in keys
            if isinstance(node[k], dict | list)
            for p in places(node[k], (*trail, k))
        ]
        return [*((*trail, k) for k in keys), *below]

    refused = 0
    for trail in places(json.loads(text)):
        raw = json.loads(text)
        node = raw
        for key in trail[:-1]:
            node = node[key]
        node[trail[-1]] = rng.choice([None, -1, 1.5, "x", [], {}, [None], {"a": 1}, True])
        path.write_text(json.dumps(raw))
        try:
            Manifest.load(directory)
        except DirectoryError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    ("symbol", "admitted", "refused"),
    [
        (SymbolEntry(), [1, 2, 100], [0, -1]),
        (SymbolEntry(divisor=8), [8, 16], [0, 4, 12]),
        (SymbolEntry(divisor=8, remainder=3), [11, 19], [3, 8]),
        (SymbolEntry(min=5, max=20, divisor=4), [8, 20], [4, 24]),
        (SymbolEntry(min=5, max=2), [5, 1000], [4]),
    ],
)
def test_constraint(symbol: SymbolEntry, admitted: list[int], refused: list[int]) -> None:
    assert all(symbol.admits(v) for v in admitted)
    assert not any(symbol.admits(v) for v in refused)
    # The first ten lie among the first numbers up to ten periods beyond the least.
    search = range(1, symbol.min + 11 * symbol.divisor)
    assert symbol.admissible(1, 10) == [v for v in search if symbol.admits(v)][:10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema=99), "expected schema 1, got 99"),
        (lambda raw: raw.update(devices=float("nan")), "expected finite numbers, got NaN"),
        (lambda raw: raw["symbols"]["batch"].update(divisor=0), "expected divisor >= 1 and"),
        (lambda raw: raw["mesh"].update(atoms=[7]), "expected integers > 1 whose product is 2"),
        (lambda raw: raw["report"].update(devices=10**9), r"\.report\.devices: expected 2 as in"),
        (lambda raw: raw["report"].update(stages=-1), r"\.report\.stages: expected 1 as in"),
        (
            lambda raw: raw["report"]["mesh"].update(atoms=[0]),
            r"\.report\.mesh: expected {'axes': {'dp': 2}, 'atoms': \[2\]} as in",
        ),
        (
            lambda raw: raw["report"]["symbols"].update(batch="\x1b]0;evil\x07"),
            r"expected text without control characters, got '\\x1b\]0;evil\\x07'",
        ),
        (lambda raw: raw["report"].update({"\x9b2J": 1}), "expected text without control"),
        (lambda raw: raw["report"].update(text="a\\u001bb\n\t\\r"), None),
    ],
)
def test_what_shows_a_directory_checks_its_manifest(
    tmp_path: Path, change: Edit, message: str | None
) -> None:
    """`inspect` accepted what `run` refuses, and wrote escape sequences to the terminal."""
    directory = hand_made.data_parallel(tmp_path / "a", 2)
    report = {"mesh": {"axes": {"dp": 2}, "atoms": [2]}, "devices": 2, "stages": 1, "symbols": {}}
    edit(directory, lambda raw: raw.update(report=report))
    assert read_manifest(directory)["report"] == report
    edit(directory, change)
    if message is None:
        assert read_manifest(directory) == json.loads((directory / "manifest.json").read_text())
        return
    for read in read_manifest, Manifest.load:
        with pytest.raises((DirectoryError, errors.DirectoryError), match=message):
            read(directory)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("shape", [3000, 2], r"w\.shape\[0\]: expected the product of its components \[3\], got 3"),
        ("dims", [[{"size": "n", "atoms": []}], [{"size": 2, "atoms": []}]], r"w\.dims: expected"),
        ("shards 1 local_shape", [3, 2000], r"rank 1\.local_shape: expected \[3, 2\], got \[3, 20"),
        ("shards 0 boxes 0 global 0", [0, 3000], r"rank 0\.boxes\.global: expected ranges of the"),
        ("shards 0 boxes 0 local 1", [1, 2], r"rank 0\.boxes\.local: expected ranges of the len"),
        ("shards 0 boxes", [], r"rank 0\.boxes: expected 6 elements of rank 0, got 0"),
        (
            "dtype",
            "float32",
            r"weights\.000[01]\.safetensors: parameter 'w': expected float32 \[3, 2",
        ),
    ],
)
def test_parameters_agree_with_themselves_and_their_weights(
    tmp_path: Path, path: str, value: object, message: str
) -> None:
    directory = hand_trained.regression(tmp_path / "a")

    def change(raw: Any) -> None:
        *keys, last = [int(k) if k.isdigit() else k for k in path.split()]
        inside = raw["parameters"]["w"]
        for key in keys:
            inside = inside[key]
        inside[last] = value

    Manifest.load(directory).check_weights(0)
    edit(directory, change)
    with pytest.raises(DirectoryError, match=message):
        ThreadsGroup(directory, program="training_model")


def test_a_parameter_that_is_not_in_its_file(tmp_path: Path) -> None:
    directory = hand_trained.regression(tmp_path / "a")
    edit(directory, lambda raw: raw["parameters"].update(v=raw["parameters"]["w"]))
    message = r"weights\.0001\.safetensors: parameter 'v': expected .*, got no tensor of this name"
    with pytest.raises(DirectoryError, match=message):
        Manifest.load(directory).check_weights(1)


def test_the_file_of_a_model_may_have_any_name(tmp_path: Path) -> None:
    model = tmp_path / "a\x1bb\n ü.onnx"
    ir.save(mlp.build(image=4, hidden=(3,)), model)
    shard_model(model, "dp=1", tmp_path / "m")
    assert Manifest.load(tmp_path / "m").model == "a\ufffdb\ufffd ü"
