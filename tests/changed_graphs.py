"""Directories whose graphs are changed: faults that are put in on purpose."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

Change = Callable[[onnx.GraphProto], None]


def changed(
    sharded: Path, out: Path, program: str, change: Change, ranks: Sequence[int] = ()
) -> Path:
    """Copies a directory with the graphs of a program changed, of all ranks or of some."""
    shutil.copytree(sharded, out)
    manifest = json.loads((out / "manifest.json").read_text())
    for rank, name in enumerate(manifest["programs"][program]["files"]):
        if ranks and rank not in ranks:
            continue
        model = onnx.load(out / name, load_external_data=False)
        change(model.graph)
        data = model.SerializeToString()
        (out / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        manifest["files"][name] = {**manifest["files"][name], "sha256": digest, "bytes": len(data)}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out
