#!/usr/bin/env python3
"""Writes the results of the golden files again, from the commands and models in them.

    python tools/golden.py [PATTERN ...] [--check]

A golden file, `tests/golden/<area>/<case>.txt`, shows as text what the command line makes of a
small model:

    # One sentence that says what the case shows.
    $ onnxpar shard model.onnx --strategy strategy.yaml -o out
    --- model.onnx
    <the model in ONNX's text form>
    --- strategy.yaml
    <any other file that the command reads>
    === out/rank0000.model.onnx
    <what the command wrote, as text>

The author writes everything before the first `===`, and this tool keeps it. Each `===` names a
file that the command writes, or `printed` for what it prints; the result follows. For
`manifest.json` the result shows what the runtime needs, and for weight files their tensors. A new
case has nothing below its `===` lines. PATTERN is a part of the path of the files; the default is
all files.
"""

import argparse
import difflib
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import safetensors.numpy

from onnxpar.cli import main as onnxpar

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
PRINTED = "printed"
GIVEN, RESULT = "--- ", "=== "
ELEMENTS = 16
"""The most elements of a tensor that are shown."""
_SECONDS = re.compile(r"\b\d+(\.\d+)? s\b")


@dataclass(frozen=True)
class Golden:
    """A golden file.

    Attributes:
        sentence: The comment at its beginning.
        commands: The commands, in order.
        given: The files that the commands read, by name, as text.
        results: The text of the files that they write, by name.
    """

    sentence: str
    commands: tuple[str, ...]
    given: dict[str, str]
    results: dict[str, str]

    @property
    def text(self) -> str:
        """The complete file."""
        parts = [f"# {self.sentence}\n", *(f"$ {command}\n" for command in self.commands)]
        parts += [f"{GIVEN}{name}\n{text}" for name, text in self.given.items()]
        parts += [f"{RESULT}{name}\n{text}" for name, text in self.results.items()]
        return "".join(parts)


def read(text: str) -> Golden:
    """Parses a golden file.

    Raises:
        ValueError: It does not begin with a sentence and a command, or has no results.
    """
    first, *lines = text.splitlines()
    commands: list[str] = []
    given: dict[str, list[str]] = {}
    results: dict[str, list[str]] = {}
    body: list[str] | None = None
    for line in lines:
        if line.startswith(GIVEN):
            body = given.setdefault(line.removeprefix(GIVEN), [])
        elif line.startswith(RESULT):
            body = results.setdefault(line.removeprefix(RESULT), [])
        elif body is not None:
            body.append(f"{line}\n")
        elif line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        else:
            raise ValueError(f"expected `$ command`, `--- file` or `=== file`, got {line!r}")
    if not (first.startswith("# ") and commands and results):
        raise ValueError("expected a sentence after #, a command and a result")
    joined = [{name: "".join(body) for name, body in part.items()} for part in (given, results)]
    return Golden(first.removeprefix("# "), tuple(commands), *joined)


def made(case: Golden) -> Golden:
    """Returns the case with the results that the command line makes now.

    Raises:
        RuntimeError: A command fails, or does not write a file of the results.
    """
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, text in case.given.items():
            if name.endswith(".onnx"):
                onnx.save(parsed(text), name)
            else:
                Path(name).write_text(text, encoding="utf-8")
        printed = "".join(printed_by(command) for command in case.commands)
        results = {n: _shown(Path(n), printed) for n in case.results}
    return replace(case, results=results)


def parsed(text: str) -> onnx.ModelProto:
    """Parses a model; a value that has a type, and that no node makes, is a weight.

    Its elements count up, so no weight is all zeros or all ones, like the scale of a new norm.
    """
    model = onnx.parser.parse_model(text)
    graph = model.graph
    known = {name for node in graph.node for name in node.output}
    known |= {value.name for value in (*graph.input, *graph.initializer)}
    kept = [value for value in graph.value_info if value.name in known]
    for value in graph.value_info:
        if value.name in known:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        counted = np.arange(int(np.prod(shape))).reshape(shape) % 23
        scaled = counted if np.issubdtype(dtype, np.integer) else (counted - 9) / 16
        graph.initializer.append(onnx.numpy_helper.from_array(scaled.astype(dtype), value.name))
    del graph.value_info[:]
    graph.value_info.extend(kept)
    return model


def printed_by(command: str) -> str:
    """Runs a command in this process and returns what it prints.

    Raises:
        RuntimeError: It is not a command of onnxpar, or fails.
    """
    program, *arguments = shlex.split(command)
    if program != "onnxpar":
        raise RuntimeError(f"expected a command of onnxpar, got {command!r}")
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = onnxpar(arguments)
    if code:
        raise RuntimeError(f"exit code {code} of `{command}`\n{printed.getvalue()}")
    return printed.getvalue()


def _shown(path: Path, printed: str) -> str:
    """Returns the text of what was written or printed."""
    if str(path) == PRINTED:
        # Leave out what depends on the machine.
        return _SECONDS.sub("(time)", printed)
    if not path.is_file():
        there = sorted(str(p) for p in Path().rglob("*") if p.is_file())
        raise RuntimeError(f"expected the file {path}, got {', '.join(there)}")
    if path.suffix == ".onnx":
        return Form(onnx.load(path, load_external_data=False)).text()
    if path.suffix == ".safetensors":
        held = sorted(safetensors.numpy.load_file(path).items())
        return "".join(f"{n} = {_tensor(onnx.numpy_helper.from_array(x))}\n" for n, x in held)
    text = path.read_text(encoding="utf-8")
    if path.name == "manifest.json":
        return "".join(f"{line}\n" for line in manifest_form(json.loads(text)))
    return text.rstrip("\n") + "\n"


class Form:
    """The golden form of a model: a line for each node, with the types of its results.

    ONNX's own text form drops the multi-device fields and metadata, and lists types far from their
    values. Here small constants are written where they are read. Consecutive nodes of a scope are
    written below it, where `./name` is `scope/name`. The name of a node is left out if its result
    is `name.out`. Metadata follows #: first the layouts of operands -> those of results.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Takes a model; `text` gives its form."""
        self._model = model
        self._constants: dict[str, str] = {}

    def text(self) -> str:
        """Returns the lines, joined."""
        model = self._model
        versions = [f"{o.domain or 'onnx'} {o.version}" for o in model.opset_import]
        lines = [f"ir {model.ir_version}, opsets {', '.join(sorted(versions))}"]
        found = {p.key: p.value for p in model.metadata_props}
        lines += [", ".join(f"{key} {found[key]}" for key in sorted(found))] if found else []
        lines += [f"configuration {c.name!r}: {c.num_devices} devices" for c in model.configuration]
        lines += self._graph(model.graph)
        for function in sorted(model.functions, key=lambda f: (f.domain, f.name)):
            lines += self._function(function)
        return "".join(f"{line}\n" for line in lines)

    def _graph(self, graph: onnx.GraphProto, margin: str = "") -> list[str]:
        types = {v.name: v for v in (*graph.value_info, *graph.output)}
        read = {name for node in graph.node for name in node.input}
        small = {
            i.name: _tensor(i)
            for i in graph.initializer
            if re.fullmatch(r"onnxpar\.const(\.\d+)?", i.name) and i.name in read
            if i.data_location != onnx.TensorProto.EXTERNAL
        }
        self._constants |= {name: text for name, text in small.items() if "…" not in text}
        lines = [
            f"{margin}graph {graph.name}" + (f"  # {graph.doc_string}" if graph.doc_string else "")
        ]
        lines += [f"{margin}  in  {_value(v)}" for v in graph.input]
        lines += [
            f"{margin}  has {i.name} = {_tensor(i)}{_noted(i.metadata_props)}"
            for i in graph.initializer
            if i.name not in self._constants
        ]
        lines += self._nodes(graph.node, types, f"{margin}  ")
        lines += [f"{margin}  out {_value(v)}" for v in graph.output]
        return lines

    def _function(self, function: onnx.FunctionProto) -> list[str]:
        attributes = [*function.attribute, *(a.name for a in function.attribute_proto)]
        given = f"<{', '.join(attributes)}>" if attributes else ""
        head = f"{function.domain}.{function.name}{given}({', '.join(function.input)})"
        types = {v.name: v for v in function.value_info}
        lines = [f"function {head} -> {', '.join(function.output)}"]
        return lines + self._nodes(function.node, types, "  ")

    def _nodes(
        self, nodes: Sequence[onnx.NodeProto], types: dict[str, onnx.ValueInfoProto], margin: str
    ) -> list[str]:
        lines: list[str] = []
        last = ""
        for node in nodes:
            scope = _scope(node.name)
            if scope != last:
                lines.append(f"{margin}{scope or '.'}/" if scope else f"{margin}-")
                last = scope
            lines += self._node(node, types, scope, margin + ("  " if scope else ""))
        return lines

    def _node(
        self, node: onnx.NodeProto, types: dict[str, onnx.ValueInfoProto], scope: str, margin: str
    ) -> list[str]:
        def short(name: str) -> str:
            prefix = f"{scope}/"
            return f"./{name.removeprefix(prefix)}" if scope and name.startswith(prefix) else name

        results = []
        for name in node.output:
            kind = f": {_type(types[name].type)}" if name in types else ""
            results.append(f"{short(name)}{kind}" if name else '""')
        operands = [self._constants.get(n, short(n)) if n else '""' for n in node.input]
        bodies = [a for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        plain = [f"{a.name}={_attribute(a)}" for a in _named(node.attribute) if a not in bodies]
        operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        # A result that is named after its node also shows the node's name.
        own = re.compile(re.escape(node.name) + r"(:0)?\.out(\.\d+)?")
        named = any(own.fullmatch(name) for name in node.output)
        name = "" if named or not node.name else f"[{short(node.name)}] "
        more = f"<{', '.join(plain)}>" if plain else ""
        call = f"{operator}{more}({', '.join(operands)})"
        lines = [f"{margin}{name}{', '.join(results)} = {call}{_noted(node.metadata_props)}"]
        for body in _named(bodies):
            lines.append(f"{margin}  {body.name}:")
            lines += self._graph(body.g, f"{margin}    ")
        for device in node.device_configurations:
            stage = f", stage {device.pipeline_stage}" if device.HasField("pipeline_stage") else ""
            lines.append(f"{margin}  on {device.configuration_id!r}{stage}")
            lines += [f"{margin}    {_spec(spec)}" for spec in device.sharding_spec]
        return lines


def _named(attributes: Iterable[onnx.AttributeProto]) -> list[onnx.AttributeProto]:
    return sorted(attributes, key=lambda a: a.name)


def _scope(name: str) -> str:
    """Returns the part of a name before its last /; text in parentheses counts as one word."""
    return name.split("(", 1)[0].rpartition("/")[0]


def _noted(properties: Iterable[onnx.StringStringEntryProto]) -> str:
    """Returns metadata as a comment: layouts first, then the rest by key."""
    found = {p.key.removeprefix("onnxpar."): p.value for p in properties}
    found.pop("input_names", None)  # Each collective operator has its own, always the same.
    parts = []
    for before, after in (("in_layouts", "out_layouts"), ("before", "after")):
        if before in found or after in found:
            operands, results = found.pop(before, ""), found.pop(after, "")
            parts += [f"{operands} -> {results}"] if operands or results else []
    if "global_shape" in found or "layout" in found:
        shape, layout = found.pop("global_shape", ""), found.pop("layout", "")
        parts += [f"{shape} as {layout}"] if (shape, layout) != ("[]", "[]") else []
    parts += [f"{key}: {value}" for key, value in sorted(found.items())]
    return f"  # {'; '.join(parts)}" if parts else ""


def _value(value: onnx.ValueInfoProto) -> str:
    return f"{value.name}: {_type(value.type)}{_noted(value.metadata_props)}"


def _type(kind: onnx.TypeProto) -> str:
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        return f"sequence({_type(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({_type(kind.optional_type.elem_type)})"
    if which != "tensor_type":
        return which or "?"
    name = _dtype(kind.tensor_type.elem_type)
    if not kind.tensor_type.HasField("shape"):
        return f"{name}[...]"
    dims = [
        d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?")
        for d in kind.tensor_type.shape.dim
    ]
    return f"{name}[{', '.join(dims)}]" if dims else name


def _dtype(number: int) -> str:
    return str(onnx.TensorProto.DataType.Name(number)).lower()


def _tensor(tensor: onnx.TensorProto, most: int = ELEMENTS) -> str:
    """Returns type and shape, and the elements if they are few, or the tensor's file."""
    shape = f"[{', '.join(map(str, tensor.dims))}]" if tensor.dims else ""
    kind = f"{_dtype(tensor.data_type)}{shape}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        places = {e.key: e.value for e in tensor.external_data}
        return f"{kind} of {places['location']}"
    elements = onnx.numpy_helper.to_array(tensor)
    if elements.size > most:
        return f"{kind} {{…}}"
    texts = [_element(e) for e in elements.reshape(-1)]
    return f"{kind} {{{', '.join(texts)}}}" if tensor.dims else f"{kind} {texts[0]}"


def _element(element: object) -> str:
    if isinstance(element, bytes | str):
        return json.dumps(element.decode() if isinstance(element, bytes) else element)
    return str(element).lower()


def _attribute(attribute: onnx.AttributeProto) -> str:
    kinds = onnx.AttributeProto
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    match attribute.type:
        case kinds.FLOAT:
            return str(np.float32(attribute.f))
        case kinds.FLOATS:
            return f"[{', '.join(str(np.float32(f)) for f in attribute.floats)}]"
        case kinds.STRING:
            return json.dumps(attribute.s.decode())
        case kinds.STRINGS:
            return json.dumps([s.decode() for s in attribute.strings])
        case kinds.TENSOR:
            return _tensor(attribute.t)
        case kinds.TYPE_PROTO:
            return _type(attribute.tp)
        case kinds.INT:
            return str(attribute.i)
        case kinds.INTS:
            return str(list(attribute.ints))
    raise ValueError(f"attribute {attribute.name}: no text for its type {attribute.type}")


def _spec(spec: onnx.ShardingSpecProto) -> str:
    """Returns a tensor's sharding: the shards of each sharded dim, and the devices of each."""
    groups = {g.key: list(g.value) for g in spec.index_to_device_group_map}
    dims = []
    for dim in spec.sharded_dim:
        parts = []
        for part in dim.simple_sharding:
            size = part.dim_param or (str(part.dim_value) if part.HasField("dim_value") else "?")
            parts.append(f"{size} in {part.num_shards}")
        dims.append(f"dim {dim.axis}: {' × '.join(parts)}")
    devices = [str(groups.get(d, d)) for d in spec.device]
    return f"{spec.tensor_name}: {', '.join(dims) or 'replicated'}; on {' '.join(devices)}"


def manifest_form(manifest: dict[str, Any]) -> list[str]:
    """Returns the lines of the golden form of a manifest: all that the runtime needs to know.

    `8@0,1` is a dim of 8 that is sharded over the atoms 0 and 1 of the mesh. Components are listed
    major first, as in `(2@0 × 4)`. `[4:5, 0:2] at [0:1, 0:2] of [2, 2]` says which part of a weight
    a file has, where it is in the file's tensor, and the shape of that tensor. Left out are
    collectives, which the graphs show; the strategy and the report, which are for people; and
    versions, and the hashes and bytes of files.
    """
    mesh = manifest["mesh"]
    axes = ", ".join(f"{name}={size}" for name, size in mesh["axes"])
    lines = [f"{manifest['devices']} devices, mesh {axes} of atoms {mesh['atoms']}"]
    for name, symbol in manifest["symbols"].items():
        lines.append(f"symbol {name}: {_pairs({k: v for k, v in symbol.items() if v})}")
    for name, program in manifest["programs"].items():
        lines += [f"program {name}", *_program(program)]
    for name, parameter in manifest["parameters"].items():
        lines.append(f"parameter {_data(parameter | {'name': name})}")
        for shard in parameter["shards"]:
            boxes = [f"{_box(b['global'])} at {_box(b['local'])}" for b in shard["boxes"]]
            held = f"{', '.join(boxes) or 'only padding'} of {shard['local_shape']}"
            lines.append(f"  ranks {shard['ranks']}: {held} in {shard['file']}")
    if training := manifest.get("training"):
        for part in ("loss", "optimizer"):
            lines.append(f"{part} {_pairs(training[part])}")
        lines += [f"trained {t['name']}" for t in training["tensors"] if t["trained"]]
        for state in training["states"]:
            keys = ("kind", "parameter", "partial", "stages", "partial_stages")
            more = {key: state[key] for key in keys if key in state}
            lines.append(f"state {_data(state)}: {_pairs(more)}")
    if pipeline := manifest.get("pipeline"):
        programs = pipeline.pop("programs")
        lines.append(f"pipeline {_pairs(pipeline)}")
        for name, stages in programs.items():
            lines.append(f"  {name}")
            lines += [f"    {number}: {_pairs(parts)}" for number, parts in enumerate(stages)]
    return lines


def _program(program: dict[str, Any]) -> list[str]:
    """Returns the lines of a program, without empty lists."""
    names = program.get("files", ())
    lines = ["  files " + ", ".join(n or "none" for n in names)] if any(names) else []
    for key, word in (("inputs", "in "), ("outputs", "out")):
        lines += [f"  {word} {_data(value)}" for value in program.get(key, ())]
    for value in program.get("system_inputs", ()):
        kind = value["kind"]
        more = value.get(kind, value.get("atom"))
        text = kind if more is None else f"{kind} {more}"
        lines.append(f"  computed {value['name']}: {text}")
    lines += [f"  reads {name}" for name in program.get("state_inputs", ())]
    lines += [f"  writes {s['state']} := {s['name']}" for s in program.get("state_outputs", ())]
    for key in ("handed_in", "handed_out"):
        for value in program.get(key, ()):
            source = f" from {value['from']}" if "from" in value else ""
            shape = "..." if value["shape"] is None else ", ".join(map(str, value["shape"]))
            lines.append(f"  {key} {value['name']}: {value['dtype']}[{shape}]{source}")
    for key in ("equal_sizes", "index_ranges"):
        lines += [f"  {key} {_pairs(entry)}" for entry in program.get(key, ())]
    return lines


def _data(tensor: dict[str, Any]) -> str:
    """Returns a tensor's name, type, and global dims with the atoms that shard them."""
    dims = []
    for parts in tensor["dims"]:
        texts = []
        for part in parts:
            atoms = ",".join(map(str, part["atoms"]))
            texts.append(f"{part['size']}@{atoms}" if atoms else str(part["size"]))
        dims.append(f"({' × '.join(texts)})" if len(texts) > 1 else "".join(texts))
    return f"{tensor['name']}: {tensor['dtype']}" + (f"[{', '.join(dims)}]" if dims else "")


def _box(intervals: Iterable[Sequence[int]]) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in intervals)}]"


def _pairs(found: dict[str, Any]) -> str:
    """Returns keys with their values, without those that are null, false or empty."""
    shown = {
        k: v for k, v in found.items() if v is not None and v is not False and v not in ([], "")
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def difference(path: Path) -> str:
    """Returns the difference between a golden file and its results now: a unified diff, or "".

    Raises:
        ValueError: The file is malformed.
        RuntimeError: A command fails.
    """
    old = path.read_text(encoding="utf-8")
    new = made(read(old)).text
    name = str(path.relative_to(FOLDER))
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), f"{name} (golden)", f"{name} (now)"
    )
    return "".join(lines)


def files(patterns: Sequence[str] = ()) -> list[Path]:
    """Returns the golden files whose path contains one of the patterns, by name."""
    found = sorted(FOLDER.rglob("*.txt"))
    return [
        p for p in found if not patterns or any(s in str(p.relative_to(FOLDER)) for s in patterns)
    ]


def main() -> int:
    """Rewrites the files, prints which of them changed, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the results of the golden files again.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="part of a file's path")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file differs"
    )
    options = parser.parse_args()
    chosen, changed, failed = files(options.patterns), 0, 0
    for path in chosen:
        try:
            old = path.read_text(encoding="utf-8")
            new = made(read(old)).text
        except Exception as error:
            failed += 1
            print(f"failed   {path.relative_to(FOLDER)}: {error}", file=sys.stderr)
            continue
        if new != old:
            changed += 1
            print(f"changed  {path.relative_to(FOLDER)}")
            if not options.check:
                path.write_text(new, encoding="utf-8")
    print(f"{len(chosen)} golden files, {changed} changed, {failed} failed")
    return int(failed > 0 or not chosen or (options.check and changed > 0))


if __name__ == "__main__":
    sys.exit(main())
