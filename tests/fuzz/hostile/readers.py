"""The kinds of files that onnxpar reads, with undamaged ones to begin from."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx

from onnxpar.api.report_page import report_page
from onnxpar.api.shard_model import analyse, plan, shard_model
from onnxpar.frontend.load import load
from onnxpar.graph.validity import blamed_on_model
from onnxpar.report.read_log import read_log
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from tests.fuzz.hostile.array_files import (
    change_idx,
    change_npz,
    change_tensors,
    idx_files,
    npz_files,
    read_archive,
    read_idx,
    read_tensor_file,
    tensor_files,
)
from tests.fuzz.hostile.attack import Files, Reader
from tests.fuzz.hostile.foreign_files import FOREIGN
from tests.fuzz.hostile.messages import change_message
from tests.fuzz.hostile.small_directories import make, trained_on
from tests.fuzz.hostile.values import (
    TEXTS,
    change_bytes,
    change_json,
    change_text,
    change_tree,
    json_bytes,
)
from tests.fuzz.test_models import MODELS

STRATEGY = """\
mesh: {dp: 2, tp: 2}
nodes:
  "MatMul*":
    inputs: [[dp, null], [null, tp]]
symbols:
  batch: {divisor: 2, min: 2, max: 64}
inputs:
  x: [dp, null]
"""
SEARCH = """\
mesh: {dp: 2, tp: 2}
search: {algorithm: ilp, memory: 1GiB, machine: h100}
"""
TAGS = (
    '!!python/object/apply:os.system ["true"]', "!!python/name:os.system", "!!int x", "!!float x",
    "!!timestamp x", "!!binary ^", "!!bool x", "!!null x", "!!set {a, b}", "!!omap [a]", "!!int",
    "!!pairs [a]", "!x y", "!<tag:x> y", "&a [*a]", "*nobody", "&b {<<: *b}", "{<<: [1]}", "? [a]",
    "|", ">+9", "2001-99-99", "0o9", "1:99:99", ".inf", "- - -", "{a: 1, a: 2}", "\t", "'", '"\\x"',
    "0x" + "f" * 5_000, "0" + "7" * 300, "0b" + "1" * 300, "1" + ":59" * 5_000,
)  # fmt: skip
"""What may stand for a value in YAML."""


def _read_model(case: Path) -> None:
    path = case / "model.onnx"
    with blamed_on_model(path):
        analyse(load(path), {})


def _models(work: Path, case: Path) -> list[Files]:
    annotated = [_annotated(model, name, work) for name, model in MODELS.items()]
    return [{"model.onnx": data} for data in (*_plain(), *annotated)]


def _plain() -> list[bytes]:
    return [model.SerializeToString() for model in MODELS.values()]


def _annotated(model: onnx.ModelProto, name: str, work: Path) -> bytes:
    from onnxpar.api.annotate import annotate

    onnx.save(model, work / f"{name}.onnx")
    annotate(work / f"{name}.onnx", "dp=2,tp=2", work / f"{name}.annotated.onnx")
    return (work / f"{name}.annotated.onnx").read_bytes()


def _change_model(files: Files, draw: Random) -> Files:
    if draw.random() < 0.15:
        return {"model.onnx": change_bytes(files["model.onnx"], draw)}
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(files["model.onnx"])
    except Exception:  # an earlier change broke it
        return {"model.onnx": change_bytes(files["model.onnx"], draw)}
    change_message(proto, draw)
    return {"model.onnx": proto.SerializeToString()}


def _read_annotation(case: Path) -> None:
    path = case / "model.onnx"
    with blamed_on_model(path):
        plan(path, None)


def _annotations(work: Path, case: Path) -> list[Files]:
    return [{"model.onnx": _annotated(model, name, work)} for name, model in MODELS.items()]


def _change_annotation(files: Files, draw: Random) -> Files:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(files["model.onnx"])
    except Exception:
        return files
    parts: list[Any] = list(proto.configuration)
    for node in proto.graph.node:
        parts += node.device_configurations
    for entry in proto.metadata_props:
        if draw.random() < 0.3:
            try:
                root = json.loads(entry.value)
                change_tree(root, draw)
                entry.value = json_bytes(root).decode("utf-8", "replace")
            except (ValueError, TypeError, RecursionError):
                entry.value = draw.choice(TEXTS)
    if parts:
        change_message(draw.choice(parts), draw)
    return {"model.onnx": proto.SerializeToString()}


def _net(case: Path) -> Path:
    path = case / "net.onnx"
    if not path.exists():
        onnx.save(MODELS["net"], path)
    return path


def _strategies(work: Path, case: Path) -> list[Files]:
    _net(case)
    return [
        {"s.yaml": STRATEGY.encode()},
        {"s.yaml": SEARCH.encode()},
    ]


_analysed: dict[Path, Any] = {}


def _read_strategy(case: Path) -> None:
    path = _net(case)
    found = Strategy.from_file(case / "s.yaml")
    if case not in _analysed:
        _analysed[case] = analyse(load(path), {})
    resolve(found, _analysed[case])


def _parsed(text: bytes) -> Any:
    """The data of a YAML text, which mostly is JSON since an earlier change."""
    import yaml

    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _change_yaml(name: str) -> Any:
    def change(files: Files, draw: Random) -> Files:
        text = files[name]
        kind = draw.randrange(4)
        if kind < 2:
            try:
                root = _parsed(text)
                change_tree(root, draw)
                return {name: json_bytes(root)}
            except Exception:  # an earlier change broke it
                return {name: change_text(text, draw)}
        if kind == 2:
            places = [n for n, c in enumerate(text) if c in b":[{,-"] or [0]
            at = draw.choice(places) + 1
            end = draw.choice(
                (at, min([n for n in range(at, len(text)) if text[n] in b",]}\n"] or [at]))
            )
            return {name: text[:at] + b" " + draw.choice(TAGS).encode() + text[end:]}
        return {name: change_text(text, draw)}

    return change


def _change_json(name: str) -> Any:
    def change(files: Files, draw: Random) -> Files:
        return {**files, name: change_json(files[name], draw)}

    return change


MACHINE = """\
name: mine
flops: {float32: 1.0e+12, bfloat16: 4.0e+12}
bandwidth: 1.0e+11
memory: 16GiB
overhead: 1.0e-6
links:
  - {devices: 2, bandwidth: 1.0e+10, latency: 1.0e-6}
  - {bandwidth: 1.0e+9, latency: 1.0e-5}
"""


def _machines(work: Path, case: Path) -> list[Files]:
    _net(case)
    return [{"m.yaml": MACHINE.encode()}]


def _directories(work: Path, case: Path) -> list[Files]:
    """The folders of one device and of four, of which each is `out` in its turn."""
    onnx.save(MODELS["net"], work / "net.onnx")
    rng = np.random.default_rng(0)
    np.savez(case / "x.npz", x=rng.standard_normal((4, 8)).astype(np.float32))
    found: list[Files] = []
    for strategy in ("dp=1", "dp=2,tp=2"):
        shard_model(work / "net.onnx", strategy, work / strategy)
        found.append({f"out/{f.name}": f.read_bytes() for f in (work / strategy).iterdir()})
    return found


def _directory(work: Path, case: Path) -> Path:
    """Makes the folder of one device, which stays as it is."""
    files = _directories(work, case)[0]
    (case / "out").mkdir()
    for name, data in files.items():
        (case / name).write_bytes(data)
    return case / "out"


def _read_manifest(case: Path) -> None:
    from onnxpar.cli.view import graph_file
    from onnxpar_runtime.manifest import Manifest

    errors = []
    reads: tuple[Callable[[], object], ...] = (
        lambda: Manifest.load(case / "out"),
        lambda: graph_file(case / "out", None, 0),
        lambda: report_page([case / "out"], case / "page.html"),
    )
    for read in reads:
        try:
            read()
        except Exception as error:
            if not isinstance(getattr(error, "exit_code", None), int):
                raise
            errors.append(error)
    if errors:
        raise errors[0]


_GRAPH = "out/rank0000.model.onnx"


def _graphs(work: Path, case: Path) -> list[Files]:
    _directory(work, case)
    return [{_GRAPH: (case / _GRAPH).read_bytes()}]


def _change_graph(files: Files, draw: Random) -> Files:
    return {_GRAPH: _change_model({"model.onnx": files[_GRAPH]}, draw)["model.onnx"]}


def _read_graph(case: Path) -> None:
    from onnxpar.cli.view import simple_file
    from onnxpar.report.device_placement import device_data
    from onnxpar.report.read_directory import blamed_on_report, graphs_of

    report_page([case / "out"], case / "page.html")
    simple_file(case / "out", case / _GRAPH, None, case / "tmp")
    with blamed_on_report(case / "out"):
        device_data(graphs_of(case / "out"))


def _archives(work: Path, case: Path) -> list[Files]:
    _directory(work, case)
    return npz_files()


def _checkpoints(work: Path, case: Path) -> list[Files]:
    from tests.runtime.hand_trained import checkpoint

    made = checkpoint(work)
    return [{f"ck/{path.name}": path.read_bytes() for path in made.iterdir()}]


def _change_checkpoint(files: Files, draw: Random) -> Files:
    import hashlib

    text = "ck/checkpoint.json"
    name = draw.choice((text, text, *sorted(set(files) - {text})))
    found = dict(files)
    try:
        contents = json.loads(files[text])["contents"]
        if name == text:
            change_tree(contents, draw)
        else:
            found[name] = change_tensors({"w": files[name]}, draw, "w")["w"]
            entry = contents["files"][name.removeprefix("ck/")]
            entry["bytes"], entry["sha256"] = (
                len(found[name]),
                hashlib.sha256(found[name]).hexdigest(),
            )
    except Exception:  # an earlier change broke it
        return {**files, name: change_bytes(files[name], draw)}
    # The sums are those of the changed contents: what is read behind them is attacked too.
    body = json_bytes(contents).decode("utf-8", "surrogatepass")
    sum_of = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()
    found[text] = f'{{"sha256": "{sum_of}",\n"contents": {body}}}\n'.encode(
        "utf-8", "surrogatepass"
    )
    return found


def _read_checkpoint(case: Path) -> None:
    from onnxpar_runtime.checkpoint.reshard import merge

    merge(case / "ck", case / "merged")


def _calls(work: Path, case: Path) -> list[Files]:
    row = [1, 0, 1, 0, 0, 1, 1, 64, 77, 10, 11, 12, 0]
    found: Files = {}
    for rank in range(2):
        raw = {
            "rank": rank, "size": 2, "host": "h", "reason": "test", "wall_ns": 10**18,
            "time_ns": 10**9,
            "names": ["AllReduce_1"], "channels": [{"ranks": [0, 1], "lane": 0, "tag": 0}],
            "calls": [row, [2, 1, 0, *row[3:]]],
        }  # fmt: skip
        found[f"calls/rank{rank:04d}.calls.json"] = json.dumps(raw).encode()
    return [found]


def _read_calls(case: Path) -> None:
    from onnxpar.report.diagnosis import diagnose

    diagnose(case / "calls").json()


def _traces(work: Path, case: Path) -> list[Files]:
    own = {
        "version": 1, "command": "run", "stage_devices": 1, "device": "cpu", "threads": ["t"],
        "clocks": [{"offset": 0.0, "uncertainty": 0.0, "drift": 0.0}],
    }  # fmt: skip
    at = {"name": "a", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 0}
    step, call = {"ph": "X", "cat": "step", "args": {}}, {"op": "collective", "last": 0}
    sizes = {"sizes": {"n": 4}}
    event = [
        {**step, **at},
        {**step, **at, "cat": "program", "args": sizes},
        {**step, **at, "cat": "operator", "tid": 3},
        {**step, **at, "cat": "call", "tid": 1, "args": {**call, "bytes": 8}},
        {**step, **at, "cat": "waiting", "tid": 1, "dur": 1.0},
        {**step, **at, "cat": "call", "tid": 10, "args": call},
    ]
    return [{"t.json": json.dumps({"traceEvents": event, "onnxpar": own}).encode()}]


def _read_trace(case: Path) -> None:
    from onnxpar.report.trace_data import trace_data
    from onnxpar.report.trace_table import trace_table

    found = trace_table(case / "t.json")
    found.json()
    list(found.lines())
    json.dumps(trace_data(found), allow_nan=False)


def _logs(work: Path, case: Path) -> list[Files]:
    _directory(work, case)
    line = json.dumps({"epoch": 1, "step": 1, "loss": 2.5, "lr": 0.1, "samples_per_s": 100.0})
    return [{"log.jsonl": (line + "\n").encode() * 3}]


def _change_log(files: Files, draw: Random) -> Files:
    lines = files["log.jsonl"].split(b"\n")
    if draw.random() < 0.2:
        return {"log.jsonl": change_text(files["log.jsonl"], draw)}
    at = draw.randrange(len(lines))
    lines[at] = change_json(lines[at], draw)
    return {"log.jsonl": b"\n".join(lines)}


def _genai(work: Path, case: Path) -> list[Files]:
    model = {
        "decoder": {
            "filename": "model.onnx",
            "head_size": 8,
            "inputs": {"past_key_names": "past.%d.key"},
            "outputs": {"present_key_names": "present.%d.key"},
        }
    }
    (case / "g").mkdir()
    onnx.save(MODELS["net"], case / "g" / "model.onnx")
    return [{"g/genai_config.json": json.dumps({"model": model}).encode()}]


def _read_genai(case: Path) -> None:
    from onnxpar.frontend.genai_folder import genai_model

    genai_model(case / "g")


def _shard(*arguments: str) -> Any:
    def command(case: Path) -> list[str]:
        return ["shard", *(a.replace("{}", str(case)) for a in arguments), "-o", str(case / "made")]

    return command


def _on(*arguments: str) -> Any:
    return lambda case: [a.replace("{}", str(case)) for a in arguments]


READERS: tuple[Reader, ...] = (
    Reader(
        "model", _models, _change_model, _read_model,
        (
            _on("inspect", "{}/model.onnx"),
            _shard("{}/model.onnx", "--strategy", "dp=2,tp=2"),
            _on("plan", "{}/model.onnx", "--devices", "4", "-o", "{}/s.yaml"),
        ),
    ),
    Reader(
        "annotation", _annotations, _change_annotation, _read_annotation,
        (_shard("{}/model.onnx"), _on("inspect", "{}/model.onnx")),
    ),
    Reader(
        "strategy", _strategies, _change_yaml("s.yaml"), _read_strategy,
        (_shard("{}/net.onnx", "--strategy", "{}/s.yaml"),),
    ),
    Reader(
        "machine", _machines, _change_yaml("m.yaml"),
        lambda case: load_machine(str(case / "m.yaml")),
        (_on("plan", "{}/net.onnx", "--devices=2", "--machine={}/m.yaml", "-o", "{}/s.yaml"),),
    ),
    Reader(
        "manifest", _directories, _change_json("out/manifest.json"), _read_manifest,
        (
            _on("inspect", "{}/out"),
            _on("report", "{}/out", "-o", "{}/page.html"),
            _on("run", "{}/out", "--inputs", "{}/x.npz", "--outputs", "{}/y.npz"),
        ),
    ),
    Reader(
        "npz", _archives, change_npz, read_archive,
        (_on("run", "{}/out", "--inputs", "{}/in.npz", "--outputs", "{}/y.npz"),),
    ),
    Reader(
        "idx", idx_files, change_idx, read_idx,
        (lambda case: trained_on("flat", "idx:{}", case),), partial(make, "flat"),
    ),
    Reader(
        "safetensors", tensor_files, change_tensors, read_tensor_file,
        (
            _on("eval", "{}/flat", "--data=npz:{}/samples.npz", "--parameters={}/w.safetensors"),
        ),
        partial(make, "flat"),
    ),
    Reader(
        "checkpoint", _checkpoints, _change_checkpoint, _read_checkpoint,
        (
            _on("checkpoint", "merge", "{}/ck", "{}/merged"),
            _on("checkpoint", "export", "{}/ck", "-o", "{}/w.safetensors"),
        ),
    ),
    Reader("calls", _calls, lambda f, d: _change_json(d.choice(sorted(f)))(f, d), _read_calls,
           (_on("diagnose", "{}/calls"),)),
    Reader("trace", _traces, _change_json("t.json"), _read_trace, (_on("trace", "{}/t.json"),)),
    Reader("log", _logs, _change_log, lambda case: read_log(case / "log.jsonl"),
           (_on("report", "{}/out", "-o", "{}/page.html", "--log", "{}/log.jsonl"),)),
    Reader("genai", _genai, _change_json("g/genai_config.json"), _read_genai,
           (_shard("{}/g", "--strategy", "dp=2"),)),
    Reader(
        "graph", _graphs, _change_graph, _read_graph,
        (
            _on("inspect", "{}/out", "--device", "cuda"),
            _on("report", "{}/out", "-o", "{}/page.html"),
            _on("run", "{}/out", "--inputs", "{}/x.npz", "--outputs", "{}/y.npz"),
        ),
    ),
    *FOREIGN,
)  # fmt: skip
