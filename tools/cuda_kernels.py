#!/usr/bin/env python3
"""Writes the table of the kernels that onnxruntime's CUDA provider has.

    tools/cuda_kernels.py            # writes onnxpar/ops/device/cuda_kernels.json
    tools/cuda_kernels.py --check    # exit code 1 if the file is out of date

The provider itself lists its kernels. It loads without a GPU, with the stand-in libraries of
`tests/gpu/standin`. This needs g++, nm and onnxruntime-gpu. Run it when the version of onnxruntime
changes.

For each operator that has a kernel, the table has each version of its schema: the names of the
types of its operands and results (the last one repeats if there may be any number), and for each
kernel the types that it takes for each name. Kernels that differ in one name are merged. Operators
of the default domain are listed by name, others as `domain:name`.

Under "expanded" it has the versions of default-domain operators for which neither the CPU provider
nor the CUDA provider has a kernel, but ONNX has a function, which onnxruntime then uses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "onnxpar" / "ops" / "device" / "cuda_kernels.json"
PROVIDER = "CUDAExecutionProvider"
HOST = "CPUExecutionProvider"
INTERNAL = "com.ms.internal.nhwc"  # made by onnxruntime's own layout transformation only
HEAD = ("onnxruntime", "expanded")
_OPEN = 2**31 - 1
Kernel = dict[str, list[str]]


def dump() -> Mapping[str, Any]:
    """Returns the table; the CUDA provider must be loadable."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in state.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    kernels: dict[tuple[str, str], list[Any]] = {}
    kernels_of: dict[str, list[Any]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == PROVIDER and kernel.domain != INTERNAL:
            kernels.setdefault((kernel.domain, kernel.op_name), []).append(kernel)
        if kernel.provider in (PROVIDER, HOST) and kernel.domain == "":
            kernels_of.setdefault(kernel.op_name, []).append(kernel)
    operators = {}
    for key in sorted(kernels):
        domain, name = key
        rows: dict[str, Any] = {}
        for since, schema in sorted(schemas.get(key, {}).items()):
            row = {
                "in": [_name(p) for p in schema.inputs],
                "out": [_name(p) for p in schema.outputs],
                "kernels": _merged(
                    [_types(k) for k in kernels[key] if _covers(k.version_range, since)]
                ),
            }
            if not rows or row != rows[max(rows, key=int)]:
                rows[str(since)] = row
        operators[f"{domain}:{name}" if domain else name] = rows
    versions = {
        name: sorted(
            since
            for since in given
            if _has_function(name, since)
            and not any(_covers(kernel.version_range, since) for kernel in kernels_of.get(name, ()))
        )
        for (domain, name), given in sorted(schemas.items())
        if domain == ""
    }
    expanded = {name: since for name, since in versions.items() if since}
    return {"onnxruntime": onnxruntime.__version__, "expanded": expanded, "operators": operators}


def _has_function(name: str, since: int) -> bool:
    if not onnx.defs.has(name, max_inclusive_version=since):
        return False
    schema: Any = onnx.defs.get_schema(name, since, "")  # of functions onnx's stubs do not know
    return bool(schema.has_function or schema.has_context_dependent_function)


def _covers(versions: tuple[int, int], since: int) -> bool:
    """Whether onnxruntime uses a kernel for an operator of this version.

    A kernel without a last version is only for its first version: later ones may differ.
    """
    start, end = versions
    return start == since or (end != _OPEN and start <= since <= end)


def _name(parameter: Any) -> str:
    """Returns `formal name|type name`: kernels constrain either."""
    return f"{parameter.name}|{parameter.typeStr}"


def _types(kernel: Any) -> Kernel:
    return {
        name: sorted(text.replace("tensor(", "").replace(")", "") for text in types)
        for name, types in sorted(kernel.type_constraints.items())
    }


def _merged(kernels: list[Kernel]) -> list[Kernel]:
    """Merges kernels that differ in the types of one name, until none do."""
    found: list[Kernel] = []
    for kernel in kernels:
        for other in found:
            apart = [n for n in kernel if n in other and kernel[n] != other[n]]
            if kernel.keys() == other.keys() and len(apart) <= 1:
                for name in apart:
                    other[name] = sorted({*other[name], *kernel[name]})
                break
        else:
            found.append(dict(kernel))
    return found if len(found) == len(kernels) else _merged(found)


def text_of(table: Mapping[str, Any]) -> str:
    """Returns the file's text: one line for each operator."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}"
        for name, rows in table["operators"].items()
    ]
    body = ",\n".join(lines)
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(table[key])}" for key in HEAD)
    return f'{{{head},\n"operators": {{\n{body}\n}}}}\n'


def read_provider() -> Mapping[str, Any]:
    """Returns the table of the installed provider, on stand-in libraries.

    Raises:
        subprocess.CalledProcessError: This onnxruntime has no CUDA provider, a library cannot be
            built, or the provider does not load.
    """
    with tempfile.TemporaryDirectory() as folder:
        libraries = [sys.executable, "-m", "tests.gpu.standin.libraries", folder]
        done = subprocess.run(
            [*libraries, sys.executable, str(Path(__file__).resolve()), "--dump"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    table: Mapping[str, Any] = json.loads(done.stdout)
    return table


def main() -> int:
    """Reads the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dump:
        json.dump(dump(), sys.stdout)
        return 0
    text = text_of(read_provider())
    if arguments.check:
        return 0 if TABLE.read_text() == text else 1
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
