"""Small copies of MNIST's files."""

import gzip
from pathlib import Path

import numpy as np

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(path: Path, array: np.ndarray) -> Path:
    """Writes an IDX file, compressed if the name ends in `.gz`."""
    header = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim])
    header += b"".join(n.to_bytes(4, "big") for n in array.shape)
    data = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def mnist(folder: Path, ending: str = "", dash: str = "-") -> tuple[np.ndarray, np.ndarray]:
    """Writes a training half of 6 and a test half of 4 images of 5x3."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    made = {}
    for part, count in (("train", 6), ("t10k", 4)):
        images = random.integers(0, 256, (count, 5, 3)).astype(np.uint8)
        labels = random.integers(0, 10, count).astype(np.uint8)
        idx(folder / f"{part}-images{dash}idx3-ubyte{ending}", images)
        idx(folder / f"{part}-labels{dash}idx1-ubyte{ending}", labels)
        made[part] = images, labels
    return made["train"]
