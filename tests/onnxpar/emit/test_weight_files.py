"""Directories: weight shards, manifest, streaming."""

import errno
import hashlib
import json
import mmap
import os
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

from onnxpar.core.errors import DirectoryError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding, split
from onnxpar.core.symbols import SymbolTable
from onnxpar.emit import weight_files, weight_sources, write
from onnxpar.emit.weight_files import LANES, write_weights
from onnxpar.emit.weight_layout import layout
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.partition.partitioned_model import Parameter
from onnxpar_format.entries import FileEntry
from tests.onnxpar.emit.small_models import (
    assemble,
    exposing,
    graph_input,
    parameter,
    sharding_of,
    two_layers,
)

MESH = Mesh.of(dp=2, tp=4)


def stored(folder: Path, p: Parameter, mesh: Mesh, rank: int) -> NDArray[np.generic]:
    """A rank's shard as the weight files hold it, read by its offset alone."""
    shard = layout([p], mesh).shard(p.name, rank)
    data = (folder / shard.file).read_bytes()[shard.offset : shard.offset + shard.length]
    assert p.source.dtype is not None
    return np.frombuffer(data, p.source.dtype.numpy()).reshape(shard.shape)


def external(path: Path, name: str, array: NDArray[np.generic], offset: int) -> ir.ExternalTensor:
    """Writes an array at `offset` of a file, which rubbish fills up to there, and refers to it."""
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before.ljust(offset, b"\xaa") + array.tobytes())
    return ir.ExternalTensor(
        path.name,
        offset,
        array.nbytes,
        ir.DataType.from_numpy(array.dtype),
        shape=ir.Shape(array.shape),
        name=name,
        base_dir=path.parent,
    )


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Mesh, Sharding, int]:
    """A mesh, a sharding of known sizes on it, and a number of bytes to read at a time."""
    atoms = tuple(draw(st.lists(st.sampled_from([2, 3]), max_size=3)))
    free = list(draw(st.permutations(range(len(atoms)))))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        dim = []
        for _ in range(draw(st.integers(1, 2))):
            taken = [free.pop() for _ in range(draw(st.integers(0, len(free))))]
            dim.append(Component(draw(st.integers(1, 7)), tuple(taken)))
        dims.append(tuple(dim))
    return Mesh((), atoms), Sharding(tuple(dims)), draw(st.sampled_from([8, 24, 100, 1 << 20]))


@settings(max_examples=80, deadline=None)
@given(
    shardings(),
    st.sampled_from(["int8", "uint16", "float32", "int64", "complex128"]),
    st.sampled_from(["memory", "mapped", "copied"]),
)
def test_shards_are_what_split_says(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[Mesh, Sharding, int],
    dtype: str,
    data: str,
) -> None:
    mesh, sharding, chunk = case
    shape = tuple(int(s) for s in sharding.shape)
    array = np.arange(1, np.prod(shape, dtype=int) + 1).astype(dtype).reshape(shape)
    folder = tmp_path_factory.mktemp("weights")
    if data != "memory" and array.size:
        tensor: ir.TensorProtocol = external(folder / "model.data", "w", array, 5)
    else:
        tensor = ir.tensor(array)
    p = parameter("w", tensor, sharding, mesh)
    places = layout([p], mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sources, "WINDOW", mmap.ALLOCATIONGRANULARITY)
        if data == "copied":
            # No system knows this advice, so pages cannot be requested.
            patch.setattr(weight_sources, "MADV_POPULATE_READ", -1)
        # Nothing smaller than an element can be read at a time.
        files = write_weights([p], places, folder, chunk=max(chunk, array.itemsize))
    for name, written in files.items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            written.bytes,
            written.sha256,
        )
        assert len(content) == places.files[name].size
    joined = np.zeros_like(array)
    for rank in range(mesh.size):
        part = stored(folder, p, mesh, rank)
        np.testing.assert_array_equal(part, split(array, sharding, mesh, rank))
        for box in sharding.sized(mesh).boxes(rank, padded=True):
            inside = part[tuple(slice(*i) for i in box.local)]
            joined[tuple(slice(*i) for i in box.source)] = inside
    np.testing.assert_array_equal(joined, array)


def test_ranks_that_hold_the_same_share_one_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tp = MESH.axis_atoms("tp")
    arrays = {
        "split": (rng.random((8, 6)).astype(np.float32), sharding_of([(8, tp)], [(6, [])])),
        "replicated": (rng.random(5).astype(np.float32), sharding_of([(5, [])])),
        "all": (rng.random((8, 3)).astype(np.float32), sharding_of([(8, [0, 1, 2])], [(3, [])])),
    }
    ps = [parameter(name, a, s, MESH) for name, (a, s) in arrays.items()]
    places = layout(ps, MESH)
    readers = {f.name: f.ranks for f in places.files.values()}
    assert readers["weights.0000.safetensors"] == tuple(range(8))
    assert sorted(readers.values()) == sorted(
        [tuple(range(8)), (0, 4), (1, 5), (2, 6), (3, 7), *((r,) for r in range(8))]
    )
    write([exposing(ps, MESH)], tmp_path / "out", model_name="m")
    # Every byte of a unique shard once: 8*6 and 5 and 8*3 floats, and no more but headers.
    headers = sum(len(f.header) for f in places.files.values())
    size = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert size - headers == 4 * (8 * 6 + 5 + 8 * 3)


def test_weight_files_are_valid_safetensors_and_aligned(tmp_path: Path) -> None:
    # Lengths whose order matters: 3 bytes before 4-byte elements would leave those unaligned.
    arrays = {
        "odd": np.arange(3, dtype=np.int8),
        "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "f32": np.arange(7, dtype=np.float32),
        "f64": np.arange(9, dtype=np.float64),
        "flag": np.array([True, False, True]),
        "big": np.arange(32, dtype=np.int64),
        "fp8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7.5, np.float64),
    }
    mesh = Mesh.of(dp=1)
    ps = [
        parameter(n, a, Sharding.replicated(tuple(int(d) for d in a.shape)), mesh)
        for n, a in arrays.items()
    ]
    write([exposing(ps, mesh)], tmp_path / "out", model_name="m")
    path = tmp_path / "out" / "weights.0000.safetensors"
    with safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == set(arrays)
        for name in ("odd", "f32", "f64", "flag", "big", "empty", "scalar"):
            np.testing.assert_array_equal(opened.get_tensor(name), arrays[name])
        assert opened.get_slice("bf16").get_dtype() == "BF16"
        assert opened.get_slice("fp8").get_dtype() == "F8_E4M3"
    for p in ps:
        shard = layout(ps, mesh).shard(p.name, 0)
        data = path.read_bytes()[shard.offset : shard.offset + shard.length]
        assert data == arrays[p.name].tobytes()
        assert shard.offset % arrays[p.name].itemsize == 0
    assert layout(ps, mesh).shard("big", 0).offset % 64 == 0


@pytest.mark.parametrize("rank", range(8))
def test_onnxruntime_reads_every_shard(tmp_path: Path, rank: int) -> None:
    rng = np.random.default_rng(1)
    tp = MESH.axis_atoms("tp")
    arrays = {
        # Uneven, fused (three blocks of heads in one dim), lengths of all alignments.
        "uneven": (rng.random((7, 3)).astype(np.float32), sharding_of([(7, tp)], [(3, [])])),
        "fused": (
            rng.random((5, 24)).astype(np.float32),
            sharding_of([(5, [])], [(3, []), (8, tp)]),
        ),
        "bytes": (np.arange(11, dtype=np.int8), sharding_of([(11, [0])])),
        "half": (rng.random((3, 5)).astype(np.float16), sharding_of([(3, [])], [(5, tp)])),
        "long": (np.arange(9), sharding_of([(9, [])])),
        "empty": (np.zeros((0, 4), np.float32), sharding_of([(0, [])], [(4, tp)])),
        "scalar": (np.array(2.5, np.float32), sharding_of()),
    }
    ps = [parameter(name, a, s, MESH) for name, (a, s) in arrays.items()]
    write([exposing(ps, MESH)], tmp_path / "out", model_name="m", ranks=[rank])
    session = ort.InferenceSession(
        tmp_path / "out" / f"rank{rank:04d}.model.onnx", providers=["CPUExecutionProvider"]
    )
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, {}), strict=True))
    for name, (array, sharding) in arrays.items():
        np.testing.assert_array_equal(got[f"{name}.shard"], split(array, sharding, MESH, rank))


def test_one_rank_gets_its_own_files_only(tmp_path: Path) -> None:
    write([two_layers(MESH)], tmp_path / "all", model_name="net")
    write([two_layers(MESH)], tmp_path / "one", model_name="net", ranks=[6])
    files = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    assert set(files) == {"manifest.json", "rank0006.model.onnx", "weights.0002.safetensors"}
    for name in set(files) - {"manifest.json"}:
        assert files[name] == (tmp_path / "all" / name).read_bytes()
    manifest = json.loads(files["manifest.json"])
    assert manifest["programs"]["model"]["files"] == [None] * 6 + ["rank0006.model.onnx", None]
    assert [s["ranks"] for s in manifest["parameters"]["up"]["shards"]] == [[2, 6]]


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(
        [two_layers(MESH)],
        out,
        model_name="net",
        strategy={"mesh": {"dp": 2, "tp": 4}},
        report={"seconds": 1.5},
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["model"] == "net"
    assert manifest["mesh"] == {"axes": [["dp", 2], ["tp", 4]], "atoms": [2, 2, 2]}
    assert manifest["strategy"] == {"mesh": {"dp": 2, "tp": 4}}
    assert manifest["report"] == {"seconds": 1.5}
    program = manifest["programs"]["model"]
    assert program["inputs"] == [
        {
            "name": "x",
            "dtype": "float32",
            "shape": ["batch", 8],
            "dims": [[{"size": "batch", "atoms": [0]}], [{"size": 8, "atoms": []}]],
        }
    ]
    assert [c["op"] for c in program["collectives"]] == ["AllReduce"]
    assert manifest["parameters"]["down"]["shards"][1] == {
        "ranks": [1, 5],
        "file": "weights.0001.safetensors",
        "boxes": [{"global": [[4, 8], [0, 4]], "local": [[0, 4], [0, 4]]}],
        "local_shape": [4, 4],
    }
    present = {p.name for p in out.iterdir()}
    assert present == {"manifest.json", *manifest["files"]}
    for name, entry in manifest["files"].items():
        data = (out / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_packed_elements_are_not_split(tmp_path: Path) -> None:
    values = np.array([[1, -2, 3], [4, -5, 6]], ml_dtypes.int4)
    tensor = ir.Tensor(values, dtype=ir.DataType.INT4)
    p = parameter("q", tensor, Sharding.replicated((2, 3)), MESH)
    write([exposing([p], MESH)], tmp_path / "out", model_name="m")
    shard = layout([p], MESH).shard("q", 0)
    data = (tmp_path / "out" / shard.file).read_bytes()[shard.offset :]
    # Two elements to a byte, the first in the low half: 1, -2 | 3, 4 | -5, 6.
    assert data == bytes([0xE1, 0x43, 0x6B])
    split_q = parameter("q", tensor, sharding_of([(2, [0])], [(3, [])]), MESH)
    with pytest.raises(DirectoryError, match=r"'q'.*int4 are packed 2 to a byte"):
        layout([split_q], MESH)


def test_text_stays_in_the_graph(tmp_path: Path) -> None:
    tensor = ir.StringTensor([b"one", b"two"], shape=ir.Shape([2]))
    p = parameter("words", tensor, Sharding.replicated((2,)), MESH)
    write([exposing([p], MESH)], tmp_path / "out", model_name="m", ranks=[0])
    path = tmp_path / "out" / "rank0000.model.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.run(None, {})[0].tolist() == ["one", "two"]


def test_weights_are_read_from_their_place_in_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    first, second = rng.random((6, 4)).astype(np.float32), rng.random((4, 6))
    data = tmp_path / "model.data"
    ps = [
        parameter("a", external(data, "a", first, 100), sharding_of([(6, [1])], [(4, [2])]), MESH),
        parameter(
            "b", external(data, "b", second, 1000), sharding_of([(4, [])], [(6, [0, 1])]), MESH
        ),
    ]
    write([exposing(ps, MESH)], tmp_path / "out", model_name="m")
    places = layout(ps, MESH)
    for p, array in zip(ps, (first, second), strict=True):
        for rank in range(MESH.size):
            shard = places.shard(p.name, rank)
            content = (tmp_path / "out" / shard.file).read_bytes()[shard.offset :]
            part = np.frombuffer(content[: shard.length], array.dtype).reshape(shard.shape)
            np.testing.assert_array_equal(part, split(array, p.sharding, MESH, rank))


@pytest.mark.parametrize("ranks", [None, [3], [0, 5]])
def test_files_are_shared_out_to_threads_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[int] | None
) -> None:
    # More files than each thread may have open; one alone, which two threads hash and write.
    monkeypatch.setattr(weight_files, "OPEN_FILES", LANES)
    rng = np.random.default_rng(3)
    arrays = [rng.random((64, 96)).astype(np.float32) for _ in range(3)]
    layouts = ([(64, [])], [(96, [0, 1, 2])]), ([(64, [0, 1, 2])], [(96, [])])
    ps = [
        parameter(
            f"w{i}", external(tmp_path / "data", f"w{i}", a, 30_000 * i), sharding_of(*c), MESH
        )
        for i, (a, c) in enumerate(zip(arrays, (*layouts, layouts[0]), strict=True))
    ]
    places = layout(ps, MESH)
    written = write_weights(ps, places, tmp_path, ranks=ranks, chunk=1000)
    chosen = range(MESH.size) if ranks is None else ranks
    assert list(written) == [f.name for f in places.files.values() if set(f.ranks) & set(chosen)]
    assert {f.name for f in tmp_path.glob("*.safetensors")} == set(written)
    for name, file in written.items():
        content = (tmp_path / name).read_bytes()
        assert file == FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    for p, array in zip(ps, arrays, strict=True):
        for rank in chosen:
            shard = places.shard(p.name, rank)
            content = (tmp_path / shard.file).read_bytes()[shard.offset :][: shard.length]
            part = np.frombuffer(content, np.float32).reshape(shard.shape)
            np.testing.assert_array_equal(part, split(array, p.sharding, MESH, rank))


def test_one_thread_that_fails_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.zeros((2, 5000), np.float32)
    p = parameter("w", array, sharding_of([(2, [0])], [(5000, [])]), MESH)
    first, second = layout([p], MESH).files
    appended = []
    original = weight_files._Files.append

    def append(files: weight_files._Files, name: str, data: weight_sources.Bytes) -> None:
        appended.append(name)
        if name == first and appended.count(name) > 1:
            raise OSError(errno.EIO, "no more of this")
        time.sleep(0.001)
        original(files, name, data)

    monkeypatch.setattr(weight_files._Files, "append", append)
    with pytest.raises(OSError, match="no more of this"):
        write_weights([p], layout([p], MESH), tmp_path, chunk=8)
    # 2500 chunks would have been more than two seconds of sleep.
    assert appended.count(second) < 2500


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_blocks_that_cannot_be_had_at_once_are_had_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    p = parameter("w", np.arange(3, dtype=np.int8), Sharding.replicated((3,)), MESH)
    if number == errno.ENOSPC:
        with pytest.raises(OSError, match=os.strerror(number)):
            write_weights([p], layout([p], MESH), tmp_path)
    else:
        write_weights([p], layout([p], MESH), tmp_path)
        np.testing.assert_array_equal(stored(tmp_path, p, MESH, 0), [0, 1, 2])


@pytest.mark.parametrize("copied", [False, True])
def test_memory_does_not_grow_with_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    if copied:
        monkeypatch.setattr(weight_sources, "MADV_POPULATE_READ", -1)
    copied = copied or sys.platform != "linux"
    rows, columns, chunk = 64, 1 << 18, 1 << 20
    data = tmp_path / "model.data"
    with data.open("wb") as stream:
        stream.truncate(rows * columns * 4)
    tensor = ir.ExternalTensor(
        data.name,
        0,
        rows * columns * 4,
        ir.DataType.FLOAT,
        shape=ir.Shape([rows, columns]),
        name="w",
        base_dir=tmp_path,
    )
    p = parameter("w", tensor, sharding_of([(rows, [])], [(columns, [1, 2])]), MESH)
    out = tmp_path / "out"
    out.mkdir()
    tracemalloc.start()
    write_weights([p], layout([p], MESH), out, chunk=chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Of a row of 1 MiB a shard has a quarter, so that four rows make a chunk. Each thread gathers
    # one chunk, and where it copies the source four, while it still has the last four; the tensor
    # has 64. The rest is headers and paths.
    assert peak < LANES * (1 + 8 * copied) * chunk + chunk


@pytest.mark.parametrize(
    ("length", "declared", "message"),
    [
        (None, 96, r"'w': its data file .*model.data is missing"),
        (90, 96, r"'w': .*truncated: expected at least 104 bytes \(96 from byte 8\), got 90"),
        (104, 80, r"'w': expected 96 bytes of external data for float\[6, 4\], got 80 bytes"),
    ],
)
def test_weights_that_are_not_there_are_named_before_anything_is_written(
    tmp_path: Path, length: int | None, declared: int, message: str
) -> None:
    if length is not None:
        (tmp_path / "model.data").write_bytes(bytes(length))
    tensor = ir.ExternalTensor(
        "model.data",
        8,
        declared,
        ir.DataType.FLOAT,
        shape=ir.Shape([6, 4]),
        name="w",
        base_dir=tmp_path,
    )
    p = parameter("w", tensor, sharding_of([(6, [1])], [(4, [])]), MESH)
    before = set(tmp_path.iterdir())
    with pytest.raises(DirectoryError, match=message):
        write([exposing([p], MESH)], tmp_path / "out", model_name="m")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../secret"])
def test_weights_outside_the_models_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(96))
    tensor = ir.ExternalTensor(
        location, 0, 96, ir.DataType.FLOAT, shape=ir.Shape([24]), name="w", base_dir=folder
    )
    p = parameter("w", tensor, Sharding.replicated((24,)), MESH)
    with pytest.raises(DirectoryError, match="'w': expected its data file in the model's folder"):
        write([exposing([p], MESH)], tmp_path / "out", model_name="m")


def test_programs_share_weights_and_must_agree_on_them(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32)
    p = parameter("w", array, sharding_of([(8, [0])]), MESH)
    other = parameter("w", array, sharding_of([(8, [1])]), MESH)
    first = exposing([p], MESH)
    second = exposing([parameter("w", array, sharding_of([(8, [0])]), MESH)], MESH)
    object.__setattr__(second, "program", "eval_model")
    write([first, second], tmp_path / "out", model_name="m")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"rank0007.model.onnx", "rank0007.eval_model.onnx"} <= names
    assert sum(name.startswith("weights") for name in names) == 2
    third = exposing([other], MESH)
    object.__setattr__(third, "program", "eval_model")
    with pytest.raises(DirectoryError, match="'w' is sharded in two ways"):
        write([first, third], tmp_path / "out2", model_name="m")


def test_header_length_comes_first(tmp_path: Path) -> None:
    p = parameter("w", np.zeros(3, np.float32), Sharding.replicated((3,)), MESH)
    write([exposing([p], MESH)], tmp_path / "out", model_name="m")
    data = (tmp_path / "out" / "weights.0000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 64 == 0
    assert json.loads(data[8 : 8 + length])["w"] == {
        "dtype": "F32",
        "shape": [3],
        "data_offsets": [0, 12],
    }


def test_input_without_a_type_is_refused(tmp_path: Path) -> None:
    builder = LocalBuilder(SymbolTable({}), 21, MESH)
    x = graph_input("x", ir.DataType.FLOAT, sharding_of([(8, [])]), MESH)
    y = builder.op("Relu", x.local, shape=[8])
    y.type = None
    pm = assemble(builder, [x], {"y": (y, sharding_of([(8, [])]))}, [])
    with pytest.raises(DirectoryError, match="'y': the element type"):
        write([pm], tmp_path / "out", model_name="m")
    assert not list(tmp_path.iterdir())
