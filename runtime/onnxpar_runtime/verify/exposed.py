"""Runs a directory with every value exposed: intermediate values become outputs of its graphs.

The graphs are copied to a temporary directory and given more outputs; weights are linked. Since a
value that is an output cannot be fused away, onnxruntime may compute it in another way than in a
usual run.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from onnxpar_format.manifest import FILE_NAME
from onnxpar_runtime.exposed_graph import KEPT, add_outputs
from onnxpar_runtime.manifest import Manifest

Array = NDArray[Any]


def expose(directory: Path, folder: Path, names: Collection[str], *, inputs: bool = False) -> Path:
    """Copies a directory to `folder`, and exposes values in its graphs.

    Args:
        directory: The directory.
        folder: An empty folder for the copy.
        names: The values to expose. Results of collectives are exposed besides, under the names of
            their nodes.
        inputs: Whether to expose the inputs of the graphs, too, under their names after `KEPT`.

    Returns:
        The copy.
    """
    manifest = Manifest.load(directory)
    programs = {name: p for p in manifest.programs.values() for name in p.files if name is not None}
    contents = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    for path in directory.iterdir():
        target = folder / path.name
        if path.name in programs:
            states = {output.name for output in programs[path.name].state_outputs}
            model = onnx.load(path, load_external_data=False)
            add_outputs(model.graph, names, states, inputs=inputs)
            data = model.SerializeToString()
            target.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            contents["files"][path.name] = {"sha256": digest, "bytes": len(data)}
        elif path.is_file() and path.name != FILE_NAME:
            # onnxruntime refuses weights that are behind a symbolic link.
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
    (folder / FILE_NAME).write_text(json.dumps(contents), encoding="utf-8")
    return folder


def exposed_values(group: Any, run: Callable[[Any], object]) -> list[Mapping[str, Array]]:
    """Returns the exposed values of a run on each rank, by name.

    Args:
        group: The sessions or trainers of a directory that `expose` made.
        run: Runs the group once.
    """
    kept: list[dict[str, Array]] = group.on_each(lambda member: member.keep_outputs())
    run(group)
    return [{name.removeprefix(KEPT): array for name, array in one.items()} for one in kept]
