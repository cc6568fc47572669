"""Readers of files of arrays: NumPy's archives, IDX, safetensors."""

import gzip
import io
import json
import zipfile
from pathlib import Path
from random import Random

import numpy as np

from tests.fuzz.hostile.attack import Files
from tests.fuzz.hostile.foreign_files import Runs
from tests.fuzz.hostile.values import change_bytes, change_text, change_tree, json_bytes


def npz_files() -> list[Files]:
    """Archives, one of them compressed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    made = []
    for compressed in (False, True):
        stream = io.BytesIO()
        if compressed:
            np.savez_compressed(stream, x=x)
        else:
            np.savez(stream, x=x)
        made.append({"in.npz": stream.getvalue()})
    return made


HEADERS = (
    "(1000000000000,)", "(" + "1," * 70 + ")", "(-1,)", "(4, 8", "{}", "(True,)", "(1e3,)",
    "(2**40,)", "()", "(0, 10**18)", "((4,),)", "(" * 300, f"({'9' * 4000},)",
)  # fmt: skip
TYPES = (
    "<f4",
    ">f8",
    "|O",
    "<U9",
    "<M8[s]",
    "|V2",
    "|S0",
    "f4,f4",
    "[('a','<f4')]",
    "<c16",
    "junk",
    "<f3",
)


def change_npz(files: Files, draw: Random) -> Files:
    """Changes bytes, or makes another archive."""
    data = files["in.npz"]
    kind = draw.randrange(4)
    if kind == 0:
        return {"in.npz": change_bytes(data, draw)}
    stream = io.BytesIO()
    ways = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    with zipfile.ZipFile(stream, "w", draw.choice(ways)) as archive:
        for _ in range(draw.choice((1, 1, 1, 2, 0))):
            name = draw.choice(
                ("x.npy", "x.npy", "x.npy", "x", "../../x.npy", "/x.npy", "y\0.npy", "x.npz")
            )
            archive.writestr(name, _npy(draw))
    made = bytearray(stream.getvalue())
    if kind == 1:
        return {"in.npz": change_bytes(bytes(made), draw)}
    return {"in.npz": bytes(made)}


def _npy(draw: Random) -> bytes:
    stream = io.BytesIO()
    if draw.random() < 0.2:
        np.save(stream, np.array([Runs()], dtype=object), allow_pickle=True)
        return stream.getvalue()
    shape, kind = draw.choice((*HEADERS, "(4, 8)")), draw.choice((*TYPES, *["<f4"] * 9))
    order = draw.choice(("False", "True", "None", "0"))
    descr = kind if kind.startswith("[") else repr(kind)
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if draw.random() < 0.2:
        text = change_text(text.encode(), draw).decode("latin-1")
    head = text.encode("latin-1", "replace") + b"\n"
    version = draw.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    size = min(len(head), 65535).to_bytes(2 if version[0] == 1 else 4, "little")
    body = draw.choice((np.ones((4, 8), np.float32).tobytes(), b"", b"\x00" * 5))
    return b"\x93NUMPY" + version + size + head + body


def idx_files(work: Path, case: Path) -> list[Files]:
    """Images and labels, plain and packed."""
    images = (
        b"\x00\x00\x08\x03"
        + b"".join(n.to_bytes(4, "big") for n in (6, 8, 8))
        + bytes(range(128)) * 3
    )
    labels = b"\x00\x00\x08\x01" + (6).to_bytes(4, "big") + bytes(range(6))
    plain = {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}
    return [plain, {f"{name}.gz": gzip.compress(data) for name, data in plain.items()}]


def change_idx(files: Files, draw: Random) -> Files:
    """Changes sizes or bytes."""
    name = draw.choice(sorted(files))
    data = files[name]
    packed = name.endswith(".gz")
    if packed and draw.random() < 0.7:
        try:
            data = gzip.decompress(data)
        except Exception:  # an earlier change broke it
            return {**files, name: change_bytes(data, draw)}
    else:
        packed = False
    if draw.random() < 0.5:
        at = draw.randrange(0, 16)
        data = (
            data[:at]
            + draw.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\0\x0e\xff"))
            + data[at + 4 :]
        )
    else:
        data = change_bytes(data, draw)
    return {**files, name: gzip.compress(data, 1) if packed else data}


def read_idx(case: Path) -> None:
    """Reads images and labels."""
    from onnxpar_runtime.training.images import mnist_files

    mnist_files(case, "train")


def tensor_files(work: Path, case: Path) -> list[Files]:
    """Two tensors, and the parameters of a model of `small_directories`."""
    from safetensors.numpy import save

    rng = np.random.default_rng(0)
    several = {"a": rng.standard_normal((4, 8)), "b": np.arange(3, dtype=np.int8)}
    parameters = {"w": rng.standard_normal((64, 10)).astype(np.float32)}
    return [{"w.safetensors": save(tensors)} for tensors in (several, parameters)]


def change_tensors(files: Files, draw: Random, name: str = "w.safetensors") -> Files:
    """Changes bytes, or the header."""
    data = files[name]
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3 or len(data) < 8 + size:
        return {name: change_bytes(data, draw)}
    head, body = data[8 : 8 + size], data[8 + size :]
    try:
        root = json.loads(head)
        change_tree(root, draw)
        head = json_bytes(root)
    except (ValueError, RecursionError):
        head = change_text(head, draw)
    length = draw.choice((len(head), len(head), len(head), 0, 2**63, len(head) + 1))
    return {name: length.to_bytes(8, "little") + head + body}


def read_tensor_file(case: Path) -> None:
    """Reads all tensors."""
    from onnxpar_runtime.tensor_file import read_tensors

    for array in read_tensors(case / "w.safetensors").values():
        array.sum()


def read_archive(case: Path) -> None:
    """Reads all arrays."""
    from onnxpar_runtime.npz import read_npz

    read_npz(case / "in.npz")
