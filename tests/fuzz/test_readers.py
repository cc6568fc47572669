"""Files of every kind, damaged at random: `tools/fuzz` runs as many as wanted, this a few.

`ONNXPAR_FUZZ_SEED` shifts the cases. What earlier runs found is tested by name below.
"""

import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest

from onnxpar.api.shard_model import shard_model
from onnxpar.cli import main
from onnxpar.core.errors import StrategyError
from onnxpar.strategy.yaml_document import parse_document
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.npz import read_npz
from onnxpar_runtime.tensor_file import read_tensors
from onnxpar_runtime.training.token_file import token_windows
from tests.fuzz.hostile.attack import Attack, Reader, set_mark
from tests.fuzz.hostile.guard import Escape, guarded
from tests.fuzz.hostile.readers import READERS
from tests.fuzz.test_models import MODELS
from tests.runtime import hand_made
from tests.tiers import FULL

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 2000 if FULL else 20
SLOW = ("state-dict", "state-folder", "graph")
"""To import PyTorch, and to make the page of a report, take seconds."""
TRAINED = ("idx", "safetensors", "parquet", "tokens", "tokenizer")
"""Their commands need directories that train or generate."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.filterwarnings("ignore")  # libraries may warn about damaged files
def test_damaged_files(tmp_path: Path, reader: Reader) -> None:
    if reader.name in SLOW and not FULL:
        pytest.skip("seconds; with ONNXPAR_FULL=1")
    attack = Attack(reader, tmp_path)
    for number in range(SEED, SEED + CASES):
        found = attack.run(attack.files(number), None)
        assert found is None, f"tools/fuzz {reader.name} --case {number}: {found}"
    if not reader.commands or (reader.name in TRAINED and not FULL):
        return
    attack.prepare()
    for number in range(SEED, SEED + CASES // 10):
        command = Random(f"command {number}").choice(reader.commands)
        found = attack.run(attack.files(number), command)
        assert found is None, f"tools/fuzz {reader.name} --commands --case {number}: {found}"


def test_the_guard_sees_escapes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with guarded(tmp_path / "in"):
        (tmp_path / "in" / "allowed").write_text("x")
    with pytest.raises(Escape, match="open"), guarded(tmp_path / "in"):
        (tmp_path / "outside").write_text("x")
    with pytest.raises(Escape, match=r"os\.system"), guarded(tmp_path / "in"):
        os.system("true")
    assert not (tmp_path / "outside").exists()


FORKS = """
import json, os, sys
from pathlib import Path
import onnxpar.cli
from tests.fuzz.hostile import guard
from tests.fuzz.hostile.commands import forked

case = Path(sys.argv[1])

def caught():
    try:
        (case.parent / "outside").write_text("x")
    except BaseException:
        return 0

def endless():
    while True:
        pass

def refuses():
    Path("inside").write_text("x")
    sys.stderr.write("error")
    return 2

guard.SECONDS = 0.2
does = {
    "caught": caught, "endless": endless, "refuses": refuses, "aborts": os.abort,
    "starts": lambda: os.system("true"), "code": lambda: 7, "silent": lambda: 2,
    "large": lambda: bytearray(3 << 30),
}
found = {}
for name, onnxpar.cli.main in does.items():
    found[name] = forked(["run"], case).fault("run")
print(json.dumps(found))
"""


def test_forks_are_judged(tmp_path: Path) -> None:
    """In a process without threads: to fork this one could stop the fork."""
    (tmp_path / "case" / "tmp").mkdir(parents=True)
    command = [sys.executable, "-c", FORKS, str(tmp_path / "case")]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    found = json.loads(printed)
    assert found.pop("refuses") is None
    expected = {
        "caught": f"exit code 120: 'Escape: open {tmp_path / 'outside'}",
        "endless": "exit code 120: 'Hang at ",
        "aborts": "exit code -6",
        "starts": "exit code 120: 'Escape at ",
        "code": "exit code 7",
        "silent": "no message",
        "large": "exit code 120: 'MemoryError at",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert found[name].replace('"', "'").startswith(f"onnxpar run: {text}"), found[name]
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "case" / "tmp" / "inside").exists()


def test_the_mark_of_a_killed_process_has_its_case(tmp_path: Path) -> None:
    """A process may be killed at any moment; an empty mark once counted 0 inputs of 20,000."""
    mark, read = tmp_path / "mark", []
    set_mark(mark, 0)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(lambda: [set_mark(mark, number) for number in range(3000)])
        while not written.done():
            read.append(int(mark.read_text() or -1))
    assert int(mark.read_text()) == 2999 and len(read) > 1
    assert read == sorted(read) and read[0] >= 0


def npz(path: Path, member: bytes, way: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", way) as archive:
        archive.writestr("x.npy", member)
    return path


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text.encode() + b"\n"


@pytest.mark.parametrize(
    "shape", ["(10000000000000,)", "(" + "1," * 70 + ")", "(4, 8", f"({10**30},)", "(None,)"]
)
def test_npz_with_an_impossible_shape(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    file = npz(tmp_path / "in.npz", header(text))
    with guarded(tmp_path), pytest.raises(InputError, match=r"in\.npz: not a readable .*'x'"):
        read_npz(file)


def test_npz_that_has_less_than_its_header_says(tmp_path: Path) -> None:
    """3 MB took 3 GiB: 1.5 GB of zeros were unpacked before numpy missed the rest."""
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3000000,), }"
    member = header(text) + bytes(8_000_000)
    file = npz(tmp_path / "in.npz", member, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        reason = rf"array 'x': expected {len(member) + 4_000_000} bytes .*, got {len(member)}"
        with pytest.raises(InputError, match=reason):
            read_npz(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_npz_with_damaged_lzma(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.arange(1000))
    file = npz(tmp_path / "in.npz", stream.getvalue(), zipfile.ZIP_LZMA)
    data = bytearray(file.read_bytes())
    data[60:80] = bytes(20)
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.npz: not a readable"):
        read_npz(file)


def test_safetensors_with_a_type_that_is_no_text(tmp_path: Path) -> None:
    head = json.dumps({"a": {"dtype": {}, "shape": [], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "w").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(InputError, match=r"'a' has the unknown type \{\}"):
        read_tensors(tmp_path / "w")


@pytest.mark.parametrize(
    "value", ["!!timestamp x", "!!bool x", "!!int ''", "!!int x", "!!float x", "2001-99-99"]
)
def test_yaml_values_that_are_not_of_their_tag(value: str) -> None:
    with pytest.raises(StrategyError, match=r"s\.yaml:1:\d+: not valid YAML: expected a"):
        parse_document(f"a: {value}", "s.yaml")


@pytest.mark.parametrize(
    "value", ["0x" + "f" * 390, "0" + "7" * 390, "0b" + "1" * 390, "1" + ":59" * 50, str(2**63)]
)
def test_yaml_integers_of_more_than_64_bits(value: str) -> None:
    with pytest.raises(StrategyError, match=r"s\.yaml:1:10: expected an integer of 64 bits"):
        parse_document(f"devices: {value}", "s.yaml")
    with pytest.raises(StrategyError, match=r"s\.yaml:1:1: expected an integer of 64 bits"):
        parse_document(f"{value}: 1", "s.yaml")


def test_yaml_numbers_whose_text_is_long() -> None:
    """Python reads long numbers of other bases than ten, but cannot print them.

    Each part of a number of base 60 costs as much time as the number has digits.
    """
    of_base_60 = "1" + ":59" * 5000
    for value in "0x" + "f" * 5000, "0" + "7" * 5000, of_base_60, of_base_60 + ".0", "9" * 5000:
        with pytest.raises(StrategyError, match=r"s\.yaml:1:4: expected a number of at most 400"):
            parse_document(f"a: {value}", "s.yaml")


@pytest.mark.parametrize("name", ["a\\0b", "\\ud800", "\\e[31m", "a\\nb"])
def test_text_that_cannot_be_shown_in_a_line(name: str) -> None:
    """As the name of a mesh axis, a lone surrogate ended `shard` with an internal error."""
    for text in (f'mesh: {{"{name}": 2}}', f'inputs: {{x: ["{name}"]}}'):
        with pytest.raises(StrategyError, match=r"s\.yaml:1:\d+: expected text without control"):
            parse_document(text, "s.yaml")


@pytest.mark.parametrize("special", ["pipe", "device"])
@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("a/manifest.json", ["inspect", "a"]),
        ("a/rank0000.model.onnx", ["verify", "a", "--model", "m.onnx"]),
        ("a/checkpoint.json", ["checkpoint", "merge", "a", "b"]),
        ("calls/rank0000.calls.json", ["diagnose", "calls"]),
        ("t.json", ["trace", "t.json"]),
        ("log", ["report", "a", "-o", "p.html", "--log", "log"]),
        ("x.npz", ["run", "a", "--inputs", "x.npz", "--outputs", "y.npz"]),
        ("w.safetensors", ["verify", "a", "m.onnx", "--inputs", "x.npz"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_pipes_and_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    special: str,
    place: str,
    arguments: list[str],
) -> None:
    """A pipe would be waited for without end, and a device such as /dev/zero has no end."""
    monkeypatch.chdir(tmp_path)
    onnx.save(MODELS["net"], "m.onnx")
    shard_model("m.onnx", "dp=1", "a")
    (tmp_path / "calls").mkdir()
    Path(place).unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(place)
    else:
        Path(place).symlink_to("/dev/zero")
    if place == "w.safetensors":
        with guarded(tmp_path), pytest.raises(InputError, match="not a regular file"):
            read_tensors(Path(place))
        return
    with guarded(tmp_path):
        assert main(arguments) == 2
    assert "regular file" in capsys.readouterr().err


def test_arguments_that_are_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    """`shard -o` with such a name ended with an internal error of ONNX's checker."""
    for argument in "o\udcff", "o\ud800":
        assert main(["shard", "m.onnx", "--strategy", "dp=2", "-o", argument]) == 2
        assert capsys.readouterr().err == (
            f"onnxpar: error: expected arguments in UTF-8, got {argument!r}\n"
        )


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a\0b", 7, "x" * 5000])
def test_view_serves_no_file_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: object
) -> None:
    (tmp_path / "secret").write_text("secret")
    directory = hand_made.data_parallel(tmp_path / "a")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["programs"]["model"]["files"][0] = name
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert main(["view", str(directory), "--no-browser"]) == 2
    assert "error" in capsys.readouterr().err


def sharded(folder: Path) -> Path:
    """A directory for one device."""
    onnx.save(MODELS["net"], folder / "m.onnx")
    shard_model(folder / "m.onnx", "dp=1", folder / "a")
    return folder / "a"


def test_a_graph_whose_name_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharded(tmp_path) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["programs"]["model"]["files"] = ["m" * 300 for _ in range(manifest["devices"])]
    path.write_text(json.dumps(manifest))
    assert main(["report", str(path.parent), "-o", str(tmp_path / "p.html")]) in (0, 2)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("dim", ["floor((a+b+c+d+e)**40/7)", "((((9**64)**64)**64)**64)**64"])
def test_rank_graphs_with_powers_that_take_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dim: str
) -> None:
    path = sharded(tmp_path) / "rank0000.model.onnx"
    proto = onnx.load(path, load_external_data=False)
    proto.graph.value_info[0].type.tensor_type.shape.dim[0].dim_param = dim
    path.write_bytes(proto.SerializeToString())
    with guarded(tmp_path):
        assert main(["report", str(path.parent), "-o", str(tmp_path / "p.html")]) == 2
    assert "a sum or a power has an exponent above 8" in capsys.readouterr().err


def test_messages_of_ranks_are_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed by the runtime, which printed 20,000 characters of a damaged file."""
    shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000},), }}"
    file = npz(tmp_path / "in.npz", header(shape))
    command = ["run", str(sharded(tmp_path)), "--inputs", str(file), "--outputs", "out.npz"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "in.npz: not a readable .npz file: array 'x'" in error and len(error) < 4200


@pytest.mark.parametrize("report", [7, {}, {"mesh": 1}, "nodes", {"programs": [], "program": {}}])
def test_a_report_that_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: object
) -> None:
    path = sharded(tmp_path) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    old = manifest["report"]
    manifest["report"] = {**old, **report} if isinstance(report, dict) and report else report
    path.write_text(json.dumps(manifest))
    for command in (
        ["inspect", str(path.parent)],
        ["report", str(path.parent), "-o", str(tmp_path / "p.html")],
    ):
        assert main(command) == 2
        assert f"error: {path}" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "m.onnx", "--devices=2", "--stages={}", "-o", "s.yaml"],
        ["plan", "m.onnx", "--devices=2", "--symbol=n={}", "-o", "s.yaml"],
        ["shard", "m.onnx", "--strategy", "dp={}", "-o", "o"],
        ["inspect", "{}"],
        ["shard", "m.onnx", "--strategy", "dp=2", "--recompute", "layers={}", "-o", "o"],
        ["report", "a", "--symbol", "batch={}", "-o", "p.html"],
        ["verify", "a", "--model", "m.onnx", "--symbol", "batch={}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_numbers_of_thousands_of_digits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    """Python refuses to read them, which ended as an internal error; so did a token file's seq."""
    monkeypatch.chdir(tmp_path)
    onnx.save(MODELS["net"], "m.onnx")
    assert main([a.replace("{}", "9" * 5000) for a in arguments]) == 2
    assert "internal error" not in capsys.readouterr().err
    with pytest.raises(InputError, match=r"expected tokens:FILE"):
        token_windows("--data", f"t,seq={'9' * 5000}")
