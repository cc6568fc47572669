"""Reshards a synthetic checkpoint, and compares time and memory with `cp` of the same bytes.

    python tools/bench/checkpoint.py --gib 4

The checkpoint is of parameters and two moments of a transformer's shapes, of one large embedding,
sharded by dp=2 and tp=2 with one of the moments split over dp too; it is resharded to tp=4 and
merged.
Every measurement is a process of its own. Rounds take turns with `cp -r`, and with `cp -r` followed
by `sync`, since `cp` leaves to the system what a checkpoint brings to the disk before it has a
name. Ratios are of the medians; more than 1 is faster than `cp`. SHA-256 of what is written
is made in any case, that of the source with `--verify`. Two or three processors are used and `cp`
uses one, so that other work slows it less.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_options import peak_memory

from onnxpar_format.checkpoint import GENERATOR, SCHEMA, CheckpointContents, Progress
from onnxpar_runtime.checkpoint.folder import finish, write_file
from onnxpar_runtime.checkpoint.layout import stored_tensors
from onnxpar_runtime.checkpoint.reshard import merge, reshard
from onnxpar_runtime.checkpoint.sums import modulus, sum_of
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import Entry, header

WIDTH = 4096
SEED = 0
Json = dict[str, Any]


def manifest_of(
    folder: Path, axes: Sequence[tuple[str, int]], shapes: dict[str, list[int]]
) -> Path:
    """Writes a manifest with states alone: columns by tp, one moment's rows by dp too."""
    names = [name for name, _ in axes]
    states = []
    for name, (rows, columns) in shapes.items():
        for kind, state in (
            ("parameter", name),
            ("moment1", f"onnxpar.moment1.{name}"),
            ("moment2", f"onnxpar.moment2.{name}"),
        ):
            by = [names.index("dp")] if kind == "moment2" and "dp" in names else []
            tp = [i for i, axis in enumerate(names) if axis == "tp"]
            dims = [[{"size": rows, "atoms": by}], [{"size": columns, "atoms": tp}]]
            states.append(
                {
                    "name": state, "kind": kind, "parameter": name, "dtype": "float32",
                    "shape": [rows, columns], "dims": dims, "partial": [],
                }
            )  # fmt: skip
    parameters = {s["name"]: {**s, "shards": []} for s in states if s["kind"] == "parameter"}
    manifest = {
        "schema": 1, "generator": "bench", "model": "synthetic", "programs": {}, "symbols": {},
        "mesh": {"axes": [list(a) for a in axes], "atoms": [size for _, size in axes]},
        "devices": int(np.prod([size for _, size in axes])), "parameters": parameters,
        "files": {}, "strategy": {}, "replicated": [],
        "training": {
            "loss": {"kind": "mse"}, "optimizer": {"kind": "adamw"}, "states": states,
            "tensors": [], "notices": [], "spec": {},
        },
    }  # fmt: skip
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def synthetic(folder: Path, manifest: Manifest) -> Path:
    """Writes a checkpoint of random bytes."""
    tensors = stored_tensors(manifest)
    folder.mkdir()
    rng, files = np.random.default_rng(SEED), {}
    sums = dict.fromkeys(tensors, 0)
    for file in sorted({shard.file for t in tensors.values() for shard in t.shards}):
        own = [(t, s) for t in tensors.values() for s in t.shards if s.file == file]
        entries = [Entry(t.name, t.dtype, s.shape) for t, s in own]
        files[file] = write_file(folder / file, _bytes(entries, rng, sums))
    tensors = {name: replace(tensor, sum=sums[name]) for name, tensor in tensors.items()}
    contents = CheckpointContents(
        SCHEMA, GENERATOR, "synthetic", "adamw", manifest.devices, Progress(1, 1, 1), {},
        tensors, files,
    )  # fmt: skip
    target = folder.with_name("source")
    finish(folder, contents, target)
    return target


def _bytes(
    entries: Sequence[Entry], rng: np.random.Generator, sums: dict[str, int]
) -> Iterator[bytes]:
    yield header(entries)
    for entry in entries:
        for start in range(0, entry.bytes, 1 << 24):
            piece = rng.bytes(min(1 << 24, entry.bytes - start))
            total = sums[entry.name] + sum_of(np.frombuffer(piece, np.float32))
            sums[entry.name] = total % modulus(4)
            yield piece


def measured(action: Any, *arguments: Path) -> tuple[float, float]:
    """Returns seconds and the peak MiB of memory of a function in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_timed, (action, arguments))


def _timed(action: Any, arguments: Sequence[Path]) -> tuple[float, float]:
    start = time.perf_counter()
    action(*arguments)
    seconds = time.perf_counter() - start
    return seconds, peak_memory() / 2**20


def copied(source: Path, target: Path, *, sync: bool) -> float:
    """Returns the seconds of `cp -r`, and of bringing the copy to the disk if `sync`."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        subprocess.run(["sync", *target.iterdir(), target], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=4.0, help="GiB of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to write; by default the folder for temporary files"
    )
    options = parser.parse_args()
    # A quarter is one embedding, the rest are square; each has two moments.
    elements = options.gib * 2**30 / 4 / 3
    layers = max(1, round(elements * 0.75 / WIDTH**2))
    shapes = {"embedding": [int(elements * 0.25) // WIDTH, WIDTH]}
    shapes |= {f"layer{i}": [WIDTH, WIDTH] for i in range(layers)}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="onnxpar-bench-") as name:
        work = Path(name)
        first = manifest_of(work / "dp2tp2", [("dp", 2), ("tp", 2)], shapes)
        four = manifest_of(work / "tp4", [("tp", 2), ("tp", 2)], shapes)
        source = synthetic(work / "made", Manifest.load(first))
        size = sum(path.stat().st_size for path in source.iterdir())
        os.sync()
        print(f"{size / 2**30:.2f} GiB, {3 * len(shapes)} tensors, the largest "
              f"{shapes['embedding'][0] * WIDTH * 4 / 2**20:.0f} MiB")  # fmt: skip
        rows: dict[str, list[tuple[float, float]]] = {}
        for _ in range(options.rounds):
            for what, action, more in (
                ("reshard to tp=4", reshard, (four,)),
                ("merge", merge, ()),
                ("with --verify", partial(reshard, verify=True), (four,)),
            ):
                rows.setdefault(what, []).append(measured(action, source, work / "target", *more))
                shutil.rmtree(work / "target")
            for what, sync in (("cp", False), ("cp and sync", True)):
                rows.setdefault(what, []).append((copied(source, work / "target", sync=sync), 0.0))
                shutil.rmtree(work / "target")
        plain, synced = (median(s for s, _ in rows[what]) for what in ("cp", "cp and sync"))
        for what, found in rows.items():
            seconds, memory = median(s for s, _ in found), max(m for _, m in found)
            print(f"{what:16} {seconds:7.2f} s  {size / seconds / 2**30:5.2f} GiB/s  "
                  f"{plain / seconds:5.2f} of cp  {synced / seconds:5.2f} of cp and sync"
                  + (f"  peak {memory:.0f} MiB" if memory else ""))  # fmt: skip


if __name__ == "__main__":
    main()
