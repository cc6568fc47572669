"""Directories made by hand: a few lines of ONNX text for each rank, and a manifest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import parser

Dims = Sequence[Sequence[tuple[int | str, Sequence[int]]]]
FREE = {"min": 1, "max": 0, "divisor": 1, "remainder": 0, "unique": False, "per_rank": False}
HEADER = '<ir_version: 10, opset_import: ["" : 21, "onnxpar" : 1]>\n'


def tensor(name: str, dtype: str, shape: Sequence[int | str], dims: Dims) -> dict[str, Any]:
    """Returns the manifest's entry of an input or output; `dims` are `(size, atoms)` components."""
    parts = [[{"size": n, "atoms": list(a)} for n, a in dim] for dim in dims]
    return {"name": name, "dtype": dtype, "shape": list(shape), "dims": parts}


def collective(op: str, node: str, atoms: Sequence[int], size: int | str) -> dict[str, Any]:
    """Returns the manifest's entry of a collective that sends `size` bytes on each rank."""
    return {
        "op": op,
        "node": node,
        "value": node,
        "atoms": list(atoms),
        "bytes": size,
        "reason": "made by hand",
        "before": "",
        "after": "",
    }


def write(
    directory: Path,
    graphs: Sequence[str],
    *,
    atoms: Sequence[int],
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    symbols: Mapping[str, Mapping[str, Any]] | None = None,
    system_inputs: Sequence[Mapping[str, Any]] = (),
    collectives: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Writes a directory whose rank r runs the ONNX text `graphs[r]`."""
    directory.mkdir(parents=True, exist_ok=True)
    files, names = {}, []
    for rank, text in enumerate(graphs):
        name = f"rank{rank:04d}.model.onnx"
        onnx.save(parser.parse_model(HEADER + text), directory / name)
        data = (directory / name).read_bytes()
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        names.append(name)
    manifest = {
        "schema": 1,
        "generator": "by hand",
        "model": "test",
        "mesh": {"axes": [["dp", len(graphs)]], "atoms": list(atoms)},
        "devices": len(graphs),
        "symbols": {k: {**FREE, **v} for k, v in (symbols or {}).items()},
        "programs": {
            "model": {
                "files": names,
                "inputs": list(inputs),
                "outputs": list(outputs),
                "system_inputs": list(system_inputs),
                "collectives": list(collectives),
            }
        },
        "parameters": {},
        "files": files,
        "strategy": {},
        "replicated": [],
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def data_parallel(directory: Path, ranks: int = 2, symbol: Mapping[str, Any] | None = None) -> Path:
    """Writes `y = 2*x + batch`, x float32 [batch, 3] with dim 0 sharded over a prime of ranks.

    The symbol's global value comes from a system input, so a rank that got its local value differs.
    """
    text = (
        "g (float[n, 3] x, int64[1] onnxpar_batch) => (float[n, 3] y)"
        " { b = Cast<to: int = 1>(onnxpar_batch)  t = Add(x, x)  y = Add(t, b) }"
    )
    split = [[("batch", [0])], [(3, [])]]
    return write(
        directory,
        [text] * ranks,
        atoms=[ranks],
        inputs=[tensor("x", "float32", ["batch", 3], split)],
        outputs=[tensor("y", "float32", ["batch", 3], split)],
        symbols={"batch": symbol or {}},
        system_inputs=[{"name": "onnxpar_batch", "kind": "symbol", "symbol": "batch"}],
    )


def reduced(directory: Path, ranks: int = 2) -> Path:
    """Writes `y = sum(x, dim 0)`, x float32 [batch, 3] sharded over a prime number of ranks."""
    members = ", ".join(str(r) for r in range(ranks))
    text = (
        "g (float[n, 3] x) => (float[1, 3] y) { axes = Constant<value_ints = [0]>()"
        "  p = ReduceSum<keepdims: int = 1>(x, axes)"
        '  y, token = onnxpar.AllReduce<reduction: string = "sum", '
        f"group: ints = [{members}]>(p) }}"
    )
    return write(
        directory,
        [text] * ranks,
        atoms=[ranks],
        inputs=[tensor("x", "float32", ["batch", 3], [[("batch", [0])], [(3, [])]])],
        outputs=[tensor("y", "float32", [1, 3], [[(1, [])], [(3, [])]])],
        symbols={"batch": {}},
        collectives=[collective("AllReduce", "y", [0], f"2*12*{ranks - 1}/{ranks}")],
    )


def undivided(path: Path, text: str) -> Path:
    """Writes the ONNX text of an undivided model."""
    onnx.save(parser.parse_model(HEADER + text), path)
    return path


def failing(directory: Path, ranks: int = 2) -> Path:
    """Writes a program whose last rank fails during the run while the others wait for it.

    Every rank takes row `coordinate` of a table that lacks the last rank's row, and all reduce it.
    """
    members = ", ".join(str(r) for r in range(ranks))
    text = (
        "g (float[n, 3] x, int64[1] coordinate) => (float[1, 3] y) {"
        f"  rows = Constant<value_ints = [{ranks - 1}]>()"
        "  three = Constant<value_ints = [3]>()  shape = Concat<axis = 0>(rows, three)"
        "  table = ConstantOfShape(shape)  row = Gather(table, coordinate)"
        '  y, token = onnxpar.AllReduce<reduction: string = "sum", '
        f"group: ints = [{members}]>(row) }}"
    )
    return write(
        directory,
        [text] * ranks,
        atoms=[ranks],
        inputs=[tensor("x", "float32", ["batch", 3], [[("batch", [])], [(3, [])]])],
        outputs=[tensor("y", "float32", [1, 3], [[(1, [])], [(3, [])]])],
        system_inputs=[{"name": "coordinate", "kind": "coordinate", "atom": 0}],
        collectives=[collective("AllReduce", "y", [0], f"2*12*{ranks - 1}/{ranks}")],
    )


def endless(directory: Path, waits: int | None) -> Path:
    """Writes a program of two ranks that takes hours, and then reduces.

    Rank `waits` has nothing to compute, and waits for the other in the reduction.
    """
    texts = []
    for rank in range(2):
        count = 1 if rank == waits else 10**12
        texts.append(
            "g (float[n, 3] x) => (float[n, 3] y) {"
            f"  count = Constant<value_int = {count}>()  go = Constant<value_int = 1>()"
            "  yes = Cast<to = 9>(go)  z = Loop (count, yes, x) <body = b (int64 i, bool c, "
            "float[n, 3] s) => (bool d, float[n, 3] t) { d = Identity(c)  t = Sin(s) }>"
            '  y, token = onnxpar.AllReduce<reduction: string = "sum", group: ints = [0, 1]>(z) }'
        )
    replicated = [[("batch", [])], [(3, [])]]
    return write(
        directory,
        texts,
        atoms=[2],
        inputs=[tensor("x", "float32", ["batch", 3], replicated)],
        outputs=[tensor("y", "float32", ["batch", 3], replicated)],
        symbols={"batch": {}},
        collectives=[collective("AllReduce", "y", [0], "12*batch")],
    )
