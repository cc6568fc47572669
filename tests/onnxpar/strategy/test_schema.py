"""The strategy file and the presets, before a model is known."""

from pathlib import Path

import pytest

from onnxpar.core.errors import MachineError, StrategyError
from onnxpar.core.layout import Layout
from onnxpar.core.symbols import Symbol
from onnxpar.strategy import Strategy, load_strategy
from onnxpar.strategy.machine_file import load_machine, target_machine
from onnxpar.strategy.yaml_document import parse_document

FULL = """\
mesh: {dp: 2, tp: 4}
symbols: {batch: {divisor: 8, max: 512}, seq: {max: 2048}}
dataset: {x: [dp, ~]}
parameters: {"*.weight": [~, tp]}
nodes:
  "/h.*/mlp":
    in: [[dp, tp], [tp, ~]]
    out:
      - [[dp, tp], None]
rest: replicate
"""


def test_every_key_is_read() -> None:
    strategy = Strategy.from_text(FULL)
    assert strategy.devices == 8
    assert dict(strategy.axes) == {"dp": 2, "tp": 4}
    assert strategy.symbols == {
        "batch": Symbol(divisor=8, max=512),
        "seq": Symbol(max=2048),
    }
    assert strategy.dataset == {"x": (("dp",), None)}
    assert strategy.parameters == {"*.weight": (None, ("tp",))}
    entry = strategy.nodes["/h.*/mlp"]
    assert entry.inputs == ((("dp",), ("tp",)), (("tp",), None))
    assert entry.out == ((("dp", "tp"), None),)
    assert strategy.rest == "replicate"
    assert strategy.where("nodes", "/h.*/mlp") == "strategy.yaml:6"
    assert strategy.where("nodes", "/h.*/mlp", "out", 0) == "strategy.yaml:9"


def test_the_same_from_python() -> None:
    layout = Layout((2, 4), ("dp", "tp"))
    data = {
        "devices": 8,
        "symbols": {"batch": Symbol(divisor=8)},
        "nodes": {"a": {"in": [layout("dp", "tp"), (4, None)]}},
    }
    strategy = Strategy.from_dict(data)
    assert strategy.nodes["a"].inputs == (layout("dp", "tp"), (4, None))
    assert strategy.symbols["batch"].divisor == 8
    assert strategy.where("nodes", "a") == "strategy: nodes.a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mesh: {dp: 2, tp: 4}", ("tp",)),
        ("mesh: {dp: 2, x: 2, y: 2}\nparameters: {w: [x]}", ("y",)),
        ("mesh: {dp: 2, x: 2, y: 2}\nnodes: {n: {in: [[[y, x]]]}}", ()),
        ("mesh: {dp: 2, tp: 2}\nparameters: {w: [tp]}", ("tp",)),
        ("mesh: {dp: 2, x: 2}\nparameters: {w: [x]}\nparameter_axes: [x]", ("x",)),
        ("mesh: {dp: 2, x: 2}\nparameter_axes: []", ()),
    ],
)
def test_tp_and_axes_that_no_entry_uses_shard_parameters(
    text: str, expected: tuple[str, ...]
) -> None:
    assert Strategy.from_text(text).parameter_axes == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh: {dp: 2}\nnode: {}", "s:2: unknown key 'node'; nearest: 'nodes'"),
        ("nodes:\n  a:\n    ni: [[1]]", "s:3: unknown key 'ni' in 'nodes': 'a'; nearest: 'in'"),
        (
            "mesh: {dp: 2}\nrest: all",
            "s:2: 'rest': expected 'propagate', 'data_parallel', 'replicate', 'search' or",
        ),
        (
            "mesh: {dp: 2}\nrest: propagate\nsearch: {level: 1}",
            "s:3: expected 'rest: search', because the key 'search' is present, got 'propagate'",
        ),
        ("search: {level: 3}", "s:1: 'search': 'level': expected 0, 1 or 2, got 3"),
        ("search: {memory: much}", "s:1: 'search': 'memory': expected a size such as 80GiB"),
        ("search: {fast: 1}", "s:1: unknown key 'fast' in 'search'"),
        ("devices: 2\nnodes: {a: {in: [['(3 4']]}}", "expected the components of a dim, such as"),
        ("mesh: {x: 2}\nnodes: {a: {in: [['(3 4:y)']]}}", "expected a mesh axis, got 'y'"),
        (
            "mesh: {x: 2}\nnodes: {a: {in: [[~]], partial: {operands: [0], axes: [y]}}}",
            "expected a mesh axis, got 'y'",
        ),
        (
            "devices: 3\npipeline: {stages: 2}",
            "s:2: expected a number of stages that divides the 3 devices, got 2",
        ),
        (
            "devices: 2\npipeline: {stages: 2, chunks: 2, schedule: 1f1b}",
            "s:2: 'pipeline': expected 'chunks' of 1, or the schedule 'interleaved', got 2",
        ),
        (
            "devices: 2\npipeline: {stages: 2, assign: {'/a/*': 2}}",
            r"s:2: 'pipeline': expected numbers from 0 to 1 under 'assign', got "
            r"\{'/a/\*': 2\}",
        ),
        (
            "mesh: {dp: 2}\ndevices: 2\npipeline: {stages: 2}",
            r"s:2: expected 4 devices, as the mesh dp=2 in 2 stages has, got 2 from 'devices'",
        ),
        (
            "mesh: {dp: 2}\nmicro_batches: 4\npipeline: {stages: 2}",
            "s:2: expected the micro-batches of a pipeline under 'pipeline', got micro_batches: 4",
        ),
        ("mesh: {dp: 2}\nmicro_batches: 0", "s:2: 'micro_batches': expected .* got 0"),
        ("recompute: []", "s:1: 'recompute': expected 'nodes', 'layers' or 'memory'"),
        ("optimizer_parallel: {}", "s:1: 'optimizer_parallel': 'level': expected this key, got no"),
        ("optimizer_parallel: {level: 4}", "'level': expected 0, 1, 2 or 3, got 4"),
        ("optimizer_parallel: {level: 1, thresold: 1}", "nearest: 'threshold'"),
        ("optimizer_parallel: {level: 1, threshold: -1}", "'threshold': .* got -1"),
        ("optimizer_parallel: {level: 1, group: 1}", "'group': .* got 1"),
        ("optimizer_parallel: 1", "expected a mapping with the keys 'level', 'threshold', 'group'"),
        ("a: [", "s:1:5: not valid YAML"),
        ("mesh: {dp: 2}\n\tx: 1", "s:2:1: not valid YAML"),
        ("mesh: {dp: 2}\nmesh: {dp: 3}", "s:2:1: key 'mesh' is already defined on line 1"),
        ("mesh:\n  dp: 2\n  dp: 4", "s:3:3: key 'dp' is already defined on line 2"),
        ("mesh: {on: 2}", "s:1:8: expected text as a key, got True"),
        ("mesh: !!python/name:os.system {dp: 2}", "s:1:7: expected no tag, got 'tag:yaml.org"),
        ("!!python/tuple [mesh]", "s:1:1: expected no tag, got 'tag:yaml.org,2002:python/tuple'"),
        ("mesh: !x {dp: 2}", "s:1:7: expected no tag, got '!x'"),
        (
            f"mesh: {{{', '.join(f'a{i}: 1' for i in range(33))}}}",
            "s:1: expected at most 32 mesh axes, got 33",
        ),
        ("nodes: &a {x: *a}", "s:1:8: an alias refers to a node that contains it"),
        ("x: \x01", "s: not valid YAML: character 3: special characters are"),
        ("mesh: {dp: 2", "s:1:"),
        ("- a", r"s: expected a mapping with keys such as mesh and nodes, got \['a'\]"),
        ("rest: propagate", "s: expected a mesh, 'devices' or --devices, got none of them"),
        ("mesh: {}", "s:1: expected mesh axes, got none"),
        ("mesh: {dp: 0}", "s:1: mesh axis 'dp': expected an integer >= 1 as its size, got 0"),
        ("mesh: {dp: two}", "s:1: 'mesh': 'dp': expected an integer, got 'two'"),
        ("mesh: {dp: 99999999999999999}", "s:1: expected at most"),
        ("mesh: [dp]", r"s:1: 'mesh': expected a mapping, got \['dp'\]"),
        ("mesh: {dp: 2}\ndevices: 4", "s:2: expected 2 devices, as the mesh dp=2 has, got 4 "),
        ("devices: 65537", "s:1: 'devices': expected from 1 to 65536 devices, got 65537"),
        ("mesh: {dp: 2, tp: 100000}", "s:1: expected at most 65536 devices, got 100000"),
        ("pipeline: {stages: 0}", "s:1: 'pipeline': 'stages': expected a number >= 1, got 0$"),
        (
            "pipeline: {stages: 2, micro_batches: 99999999999}",
            "s:1: 'pipeline': 'micro_batches': expected a number <= 65536, got 99999999999$",
        ),
        (
            "nodes: {a: {in: [[1]], partial: {operands: [], axes: [a]}}}",
            r"s:1: 'nodes': 'a': 'partial': 'operands': expected at least 1 item, got \[\]$",
        ),
        ("search: {memory: -1}", "s:1: 'search': 'memory': expected a number >= 1, got -1$"),
        ("devices: 0", "s:1: 'devices': expected from 1 to .* devices, got 0"),
        ("devices: true", "s:1: 'devices': expected an integer, got True"),
        ("symbols: {b: {divisor: 0}}", "s:1: 'symbols': 'b': Symbol: divisor: expected at least 1"),
        ("symbols: {b: {divisor: 2.5}}", "s:1: 'symbols': 'b': Symbol: divisor: expected an int"),
        ("symbols:\n  b: {divsor: 8}", "s:2: 'symbols': 'b': unknown key 'divsor'; nearest: 'div"),
        ("symbols: {b: 8}", "s:1: 'symbols': 'b': expected constraints such as .*, got 8"),
        ("dataset: all", "s:1: 'dataset': expected data_parallel, full_batch or a mapping"),
        ("mesh: {dp: 2}\ndataset: {x: [pd]}", "s:2: dataset 'x': expected a mesh axis, got 'pd'"),
        ("mesh: {dp: 2}\nparameters: {w: [tp]}", "s:2: parameters 'w': expected a mesh axis"),
        ("mesh: {dp: 2}\nparameter_axes: [tp]", "s:2: expected mesh axes, got 'tp'"),
        ("mesh: {dp: 2}\nparameters: {w: dp}", "s:2: 'parameters': 'w': expected a list with"),
        ("nodes: {a: {}}", "s:1: 'nodes': 'a': expected 'in', 'out' or both, got neither"),
        ("nodes: {a: [[2]]}", "s:1: 'nodes': 'a': expected a mapping with the keys 'in', 'out'"),
        ("nodes: {a: {in: [2, 4]}}", "s:1: 'nodes': 'a': 'in': expected a list with one list for"),
        ("nodes: {a: {in: [[0]]}}", "'in': expected a number of shards >= 1, got 0"),
        ("nodes: {a: {in: [[yes]]}}", r"expected a number of shards, a mesh axis or ~ \(quote"),
        ("nodes: {a: {in: [[2.0]]}}", "expected a number of shards, a mesh axis, .*, got 2.0"),
        ("nodes: {a: {in: [[2, dp]]}}", "expected numbers of shards or mesh axes, not both"),
        ("nodes: {a: {in: [[dp, dp]]}}", "expected mesh axis 'dp' at most once in a tensor"),
        ("nodes: {a: {in: [[[]]]}}", r"expected a number of shards, .*, got \[\]"),
        ("[" * 5000, "s: nested too deeply"),
        (f"a: {'[' * 65}{']' * 65}", "s: nested too deeply"),
        ("2026-13-41", "s:1:1: not valid YAML: expected a value of the type timestamp"),
    ],
)
def test_mistakes_name_line_expected_and_got(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=f"^{message}" if message[:2] == "s:" else message):
        Strategy.from_text(text, source="s")


def test_a_message_about_data_without_a_file_names_the_key_once() -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.from_dict({"devices": 2, "pipeline": {"stages": 0}})
    assert str(caught.value) == "strategy: 'pipeline': 'stages': expected a number >= 1, got 0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth: 2", "bandwidth: fast", "2: 'bandwidth': expected a number, got 'fast'"),
        ("bandwidth: 2", "bandwidth: -1", "2: 'bandwidth': expected a number >= 1, got -1"),
        ("bandwidth: 2", "bandwidth: 1e-300", "2: 'bandwidth': expected a number >= 1, got 1e-300"),
        (
            "overhead: 0",
            "overhead: 1.0e+308",
            "2: 'overhead': expected a number <= 1e+06, got 1e+308",
        ),
        (
            "[\n{",
            f"[\n{'{devices: 2, bandwidth: 1, latency: 1},' * 100}{{",
            "3: expected increasing numbers of devices, and none for the last entry, got "
            f"{'[' + '2, ' * 25 + '2'}...",
        ),
        ("latency: 4", "late: 4", "4: 'links': 0: 'latency': expected this key, got none"),
        ("memory: 3", "memory: lots", "2: 'memory': expected a size such as 80GiB, got 'lots'"),
        ("name: a", "name: a, x: 1", "1: 'x': unknown key"),
    ],
)
def test_mistakes_in_a_machine_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (
        "{name: a, flops: {float32: 1.0},\nbandwidth: 2, memory: 3, overhead: 0,\n"
        "links: [\n{bandwidth: 3, latency: 4, overlaps: true}]}"
    )
    path = tmp_path / "m.yaml"
    path.write_text(text)
    assert load_machine(str(path)).links[0].overlaps
    path.write_text(text.replace(old, new))
    with pytest.raises(MachineError) as caught:
        load_machine(str(path))
    assert str(caught.value) == f"{path}:{message}"


def test_a_machine_that_a_strategy_names(tmp_path: Path) -> None:
    """The message names the strategy, and does not show what is in the file."""
    path, secret = tmp_path / "s.yaml", tmp_path / "secret"
    secret.write_text("root:x:0")
    for key in "search", "target":
        path.write_text(f"mesh: {{dp: 2}}\n{key}: {{machine: {secret}}}")
        with pytest.raises(MachineError) as caught:
            target_machine(Strategy.from_file(path))
        assert str(caught.value) == (
            f"{path}:2: {key!r}: 'machine': {secret}: expected the keys of a machine file, such as "
            "flops and links, got a scalar"
        )
    with pytest.raises(MachineError, match=r"^machine 'h10': expected a file or a known machine"):
        target_machine(Strategy.from_dict({"devices": 2, "search": {"machine": "h10"}}))


def test_memory_that_no_device_has(tmp_path: Path) -> None:
    """Memory that is no float ended `plan` with an OverflowError."""
    path = tmp_path / "m.yaml"
    text = "name: a\nflops: {float32: 1.0}\nbandwidth: 1.0\nmemory: MEMORY\noverhead: 0.0\n"
    text += "links: [{bandwidth: 1.0, latency: 0.0}]\n"
    for memory in str(5 * 10**18), f"{10**290}GiB":
        path.write_text(text.replace("MEMORY", memory))
        with pytest.raises(MachineError, match=r"m\.yaml:4: expected at most 2\*\*62 bytes"):
            load_machine(str(path))


def test_aliases_are_read_but_may_not_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "parameters: {a: &w [~, tp], b: *w}\nmesh: {tp: 2}"
    assert Strategy.from_text(text).parameters["b"] == (None, ("tp",))
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    monkeypatch.setattr("onnxpar.strategy.yaml_document.MAX_NODES", 1000)
    with pytest.raises(StrategyError, match="expected at most 1000 keys and items"):
        parse_document(bomb, "s")


def test_what_follows_too_many_items_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The items were counted after all had been read: 100,000 take 5 s and 80 MB, also too many."""
    monkeypatch.setattr("onnxpar.strategy.yaml_document.MAX_NODES", 1000)
    with pytest.raises(StrategyError, match="s:1:2002: expected at most 1000 keys and items"):
        parse_document("[" + "1," * 2000 + "}", "s")


@pytest.mark.parametrize(
    ("text", "devices", "axes"),
    [
        ("dp", 8, {"dp": 8}),
        ("dp", 1, {"dp": 1}),
        ("dp=3", None, {"dp": 3}),
        ("tp=4", None, {"tp": 4}),
        ("dp=2,tp=4", None, {"dp": 2, "tp": 4}),
        ("dp=2,tp=4", 8, {"dp": 2, "tp": 4}),
        ("tp=4,dp=2", None, {"tp": 4, "dp": 2}),
        ("dp,tp=4", 8, {"dp": 2, "tp": 4}),
        ("tp", 4, {"tp": 4}),
        ("replicate", 4, {}),
    ],
)
def test_presets(text: str, devices: int | None, axes: dict[str, int]) -> None:
    strategy = load_strategy(text, devices)
    assert list(strategy.axes.items()) == list(axes.items())
    assert strategy.parameter_axes == (("tp",) if "tp" in axes else ())
    assert strategy.devices == (devices or 8 if len(axes) > 1 else devices or sum(axes.values()))
    assert strategy.dataset == ("full_batch" if text == "replicate" else "data_parallel")
    assert strategy.rest == ("replicate" if text == "replicate" else "propagate")


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("dp", None, "expected dp=N or --devices, got neither"),
        ("replicate", None, "expected a mesh, 'devices' or --devices"),
        (
            "dp=2,tp=4",
            4,
            "preset 'dp=2,tp=4': mesh: expected 4 devices, as --devices has, got 8 from the mesh "
            "dp=2 x tp=4",
        ),
        ("dp,tp=3", 8, "3 devices do not divide the 8 requested"),
        ("dp,tp", 8, "expected a number for every axis but one"),
        ("dp=2,dp=4", None, "expected dp once, got it twice"),
        ("dp=0", None, "expected an integer >= 1 as its size, got 0"),
        ("pd=2", None, "got 'pd'; nearest: 'tp', 'pp', 'dp'"),
        ("sp=2", None, "expected a file or a preset, got 'sp'; nearest: "),
        ("xx", None, "got 'xx'; there are 'dp', 'tp', 'pp', 'replicate', 'auto'"),
        ("auto", None, "expected a mesh, 'devices' or --devices"),
        ("auto:magic", 8, "expected one of recursive, ilp, propagation after 'auto:'"),
        ("missing.yaml", 8, r"expected an existing file or a preset \(.*\), got neither"),
        ("dp=two", 8, r"expected an existing file or a preset \(.*\), got neither"),
        ("", 8, "expected a file or a preset, got a directory"),
    ],
)
def test_presets_refused(text: str, devices: int | None, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        load_strategy(text, devices)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dp").write_text("mesh: {x: 4}")
    monkeypatch.chdir(tmp_path)
    assert dict(load_strategy("dp", 4).axes) == {"x": 4}
    (tmp_path / "s.json").write_text('{"mesh": {"dp": 2}, "nodes": {"a": {"in": [[null, 2]]}}}')
    assert load_strategy("s.json").nodes["a"].inputs == ((None, 2),)
    (tmp_path / "none.yaml").write_text("{}")
    assert load_strategy("none.yaml", 4).devices == 4
    for empty in "", "null", "# nothing\r":
        (tmp_path / "empty.yaml").write_text(empty)
        with pytest.raises(StrategyError, match=r"^empty\.yaml: expected keys, got an empty file$"):
            load_strategy("empty.yaml", 4)
    (tmp_path / "binary.yaml").write_bytes(b"mesh: \xff")
    with pytest.raises(StrategyError, match=r"binary.yaml: expected UTF-8 text, got byte 6"):
        load_strategy("binary.yaml")
    with pytest.raises(StrategyError, match="got a directory"):
        load_strategy(str(tmp_path))
