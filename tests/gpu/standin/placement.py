"""Prints where onnxruntime's CUDA provider puts the nodes of models, as JSON.

    python placement.py [--ranks N] MODEL...

For each model: `{"cuda": [[operator, node], …], "cpu": [...], "copies": [[operator, value, operator
that makes it, readers as operator:operand], …]}`, of the graph after onnxruntime's own
optimisations, bodies included. Needs a GPU or the stand-ins. With `--ranks`, operators of the
domain `onnxpar` are registered for rank 0 of so many, which has a GPU.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.options import session_options

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
COPIES = ("MemcpyFromHost", "MemcpyToHost")
_ALL = re.compile(r"All nodes placed on \[(\w+)\]")
_SOME = re.compile(r"Node\(s\) placed on \[(\w+)\]")
_NODE = re.compile(r"VerifyEachNodeIsAssignedToAnEp\]\s+(\S+) \((.*)\)\s*$")


@contextmanager
def _standard_error(into: Path) -> Iterator[None]:
    """Sends what native code writes to standard error to a file."""
    kept = os.dup(2)
    with into.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _nodes(body)


def placement(model: Path, rank: Rank | None = None) -> Mapping[str, Any]:
    """Makes a session on the CUDA provider and returns where its nodes are.

    Args:
        model: The model's file.
        rank: For which rank operators of the domain `onnxpar` are registered, if they are.

    Raises:
        RuntimeError: The provider did not load, or the session could not be made.
    """
    options = session_options({})
    options.log_severity_level = 0  # the only place where the final placement is logged
    if rank is not None:
        rank.register(options)
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        optimised, log = Path(folder) / "optimised.onnx", Path(folder) / "log"
        options.optimized_model_filepath = str(optimised)
        failure = None
        with _standard_error(log):
            try:
                session = onnxruntime.InferenceSession(str(model), options, providers=[CUDA])
            except Exception as error:
                failure = error
        if failure is not None:
            raise RuntimeError(f"{model}: {failure}")
        if CUDA not in session.get_providers():
            raise RuntimeError(f"{model}: the CUDA provider did not load:\n{log.read_text()}")
        graph = onnx.load(optimised, load_external_data=False).graph
        text = log.read_text(errors="replace")
    listed: dict[str, list[tuple[str, str]]] = {CUDA: [], CPU: []}
    current = ""
    for line in text.splitlines():
        if found := _SOME.search(line):
            current = found[1]
        elif current and (found := _NODE.search(line)):
            listed[current].append((found[1], found[2]))
        elif found := _ALL.search(line):
            listed[found[1]] += [(node.op_type, node.name) for node in graph.node]
    makers = {name: node.op_type for node in _nodes(graph) for name in node.output}
    readers: dict[str, set[str]] = {}
    for node in _nodes(graph):
        for index, name in enumerate(node.input):
            readers.setdefault(name, set()).add(f"{node.op_type}:{index}")
    copies = [
        (n.op_type, n.input[0], makers.get(n.input[0], ""), sorted(readers[n.output[0]]))
        for n in _nodes(graph)
        if n.op_type in COPIES
    ]
    keep = {p: [item for item in nodes if item[0] not in COPIES] for p, nodes in listed.items()}
    return {"cuda": keep[CUDA], "cpu": keep[CPU], "copies": copies}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("models", type=Path, nargs="+")
    arguments = parser.parse_args()
    rank = World.threads(arguments.ranks).rank(0) if arguments.ranks else None
    if rank is not None:
        rank.open_device(0, "staged")
    found = {str(m): placement(m, rank) for m in arguments.models}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
