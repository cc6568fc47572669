"""Times and memory of a rank on the report page: equal to those of the program that was written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from onnx import TensorProto, helper, numpy_helper

from onnxpar.api.report_page import report_page
from onnxpar.api.shard_model import Summary, shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar.core.machine import PRESETS
from onnxpar.core.symbols import SymbolTable
from onnxpar.partition.program_memory import LocalSizes, program_memory, total_bytes
from onnxpar.report.page_data import directory_page
from onnxpar.report.read_log import MOST_ROWS, LogError, read_log
from onnxpar.report.stage_data import bytes_of
from tests.onnxpar.report.test_page import Elements, run

Json = dict[str, Any]
SIZES = ({}, {"batch": 3, "seq": 17}, {"batch": 8, "seq": 96})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpt")
    model = transformer.build(transformer.Config(layers=2, loss=True))
    ir.save(model, found / "gpt.onnx")
    return found


def sharded(folder: Path, strategy: str, name: str, **more: Any) -> Summary:
    return shard_model(folder / "gpt.onnx", strategy, folder / name, **more)


def adamw() -> TrainingSpec:
    return TrainingSpec(parse_loss("output:loss"), parse_optimizer("adamw"))


def value(page: Json, size: Any, sizes: dict[str, int]) -> float:
    """What the page computes for a size."""
    if isinstance(size, int):
        return size
    symbols = [sizes.get(symbol["name"], symbol["value"]) for symbol in page["symbols"]]
    return run(page["formulas"][size[0]]["code"], symbols)


def shown(page: Json, time: Any) -> float:
    """The seconds of a time at the sizes that the page shows first."""
    if not isinstance(time, list):
        return float(time)
    place = 0
    for axis, symbol in zip(page["grid"], page["symbols"], strict=True):
        assert axis["name"] == symbol["name"]
        place = place * len(axis["sizes"]) + axis["sizes"].index(symbol["value"])
    return float(page["times"][time[0]][place])


def peak(page: Json, program: Json, sizes: dict[str, int]) -> float:
    change = [0.0] * (len(program["nodes"]) + 1)
    for _, size, first, last in program["values"]:
        change[first] += value(page, size, sizes)
        change[last + 1] -= value(page, size, sizes)
    work = dict(program["work"])
    live, most = 0.0, 0.0
    for number, step in enumerate(change[:-1]):
        live += step
        most = max(most, live + work.get(number, 0))
    return most


def bound(page: Json, program: Json, sizes: dict[str, int], *kinds: str) -> float:
    return sum(value(page, size, sizes) for _, kind, size in program["bound"] if kind in kinds)


@pytest.mark.parametrize("sizes", SIZES)
def test_memory_is_that_of_the_program_at_any_size(folder: Path, sizes: dict[str, int]) -> None:
    summary = sharded(folder, "dp=2,tp=2", "memory" + "".join(map(str, sizes.values())))
    # The page is made for these sizes only in the memory that kernels themselves need.
    page = directory_page(summary.out, sizes, PRESETS["cpu"])
    (program,) = page["ranks"]
    known = program_memory(summary.partitioned, sizes)
    assert peak(page, program, sizes) == known.values > 0
    assert bound(page, program, sizes, "output") == known.outputs
    # Only the page counts the sizes of symbols and coordinates, and the constants of the graph.
    assert 0 <= bound(page, program, sizes, "input") - known.inputs < 100
    assert 0 <= bound(page, program, sizes, "weight") - known.weights < 4096


def test_elements_of_half_a_byte(tmp_path: Path) -> None:
    """35 elements of 4 bits are in 18 bytes, and their scales in 20. They are not sharded."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], "/weights"),
        helper.make_node("MatMul", ["x", "d"], ["y"], "/product"),
    ]
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])],
        [
            helper.make_tensor("w", TensorProto.INT4, [7, 5], np.arange(35) % 8),
            numpy_helper.from_array(np.ones(5, np.float32), "s"),
        ],
    )
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "m.onnx")
    summary = shard_model(tmp_path / "m.onnx", "dp=2", tmp_path / "out")
    page = directory_page(summary.out, {}, PRESETS["cpu"])
    (program,) = page["ranks"]
    weights = {
        page["texts"][name]: size for name, kind, size in program["bound"] if kind == "weight"
    }
    assert weights == {"w": 18, "s": 20}
    packed = ir.Value(name="w", shape=ir.Shape((7, 5)), type=ir.TensorType(ir.DataType.INT4))
    assert LocalSizes(SymbolTable({}), {}).bytes(packed) == 18
    assert bytes_of(ir.DataType.INT4, (7, 5)) == 18


def test_nodes_of_unknown_size_have_no_time(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "/product"),
        helper.make_node("SplitToSequence", ["h"], ["rows"], "/rows", axis=0),
        helper.make_node("SequenceAt", ["rows", "place"], ["y"], "/row"),
    ]
    graph = helper.make_graph(
        nodes,
        "rows",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8]),
            helper.make_tensor_value_info("place", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones((8, 8), np.float32), "w")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "m.onnx")
    summary = shard_model(tmp_path / "m.onnx", "dp=2", tmp_path / "out")
    page = directory_page(summary.out, {}, PRESETS["cpu"])
    (program,) = page["ranks"]
    seconds = {page["texts"][n["name"]]: shown(page, n["seconds"]) for n in program["nodes"]}
    assert [page["texts"][place] for place in program["untimed"]] == ["/rows"]
    assert seconds["/product"] > 0 and seconds["/rows"] == 0


def test_memory_of_training_programs(folder: Path) -> None:
    summary = sharded(folder, "dp=2,tp=2", "training", training=adamw())
    assert summary.training is not None
    sizes = {"batch": 8, "seq": 32}
    page = directory_page(summary.out, sizes, PRESETS["cpu"])
    by_name = {program["name"]: program for program in page["ranks"]}
    known = {pm.program: program_memory(pm, sizes) for pm in summary.training.programs}
    assert set(by_name) == set(known)
    for name, program in by_name.items():
        assert peak(page, program, sizes) == known[name].values, name
    states = {
        text: value(page, size, sizes)
        for program in page["ranks"]
        for text, kind, size in program["bound"]
        if kind == "state"
    }
    everything = {n: b for memory in known.values() for n, b in memory.states.items()}
    assert sum(states.values()) == sum(everything.values())
    assert total_bytes(known.values()) > sum(states.values())


def test_times_add_up(folder: Path) -> None:
    summary = sharded(folder, "dp=2,tp=2", "times")
    page = directory_page(summary.out, {}, PRESETS["cpu"])
    (program,) = page["ranks"]
    nodes, transfers = program["nodes"], program["transfers"]
    # In shared memory a processor moves the data, so nothing is hidden.
    sent = sum(shown(page, t["seconds"]) for t in transfers)
    computed = sum(shown(page, node["seconds"]) for node in nodes)
    # Numbers have four digits: each term and the end may be wrong by 5e-4 of itself.
    assert computed + sent == pytest.approx(shown(page, program["end"]), rel=1e-3)
    assert computed > 0 < sent
    assert len(transfers) == len(page["programs"][0]["collectives"]) > 0
    assert all(node["owner"] >= 0 for node in nodes if "/layer" in page["texts"][node["name"]])


def test_times_at_the_points_of_the_grid_are_those_of_a_page_for_these_sizes(folder: Path) -> None:
    summary = sharded(folder, "dp=2,tp=2", "points")
    page = directory_page(summary.out, {}, PRESETS["cpu"])
    sizes = {"batch": 32, "seq": 128}
    for symbol in page["symbols"]:
        symbol["value"] = sizes[symbol["name"]]
    other = directory_page(summary.out, sizes, PRESETS["cpu"])
    for one, two in zip(page["ranks"][0]["nodes"], other["ranks"][0]["nodes"], strict=True):
        assert shown(page, one["seconds"]) == shown(other, two["seconds"])
    assert shown(page, page["ranks"][0]["end"]) == shown(other, other["ranks"][0]["end"])


def test_on_gpus_reductions_are_hidden_behind_the_backward_pass(folder: Path) -> None:
    summary = sharded(folder, "dp=4", "hidden", training=adamw())
    page = directory_page(summary.out, {}, PRESETS["h100"])
    program = next(p for p in page["ranks"] if p["name"] == "optimizer_model")
    behind = {item["behind"] for item in program["apart"]}
    assert behind == {"training_model"}
    assert all(shown(page, item["seconds"]) > 0 for item in program["apart"])


def test_a_pipeline_is_played_at_the_predicted_times(folder: Path) -> None:
    strategy = folder / "pipeline.yaml"
    strategy.write_text("mesh: {dp: 2}\npipeline: {stages: 2, schedule: 1f1b}\n", encoding="utf-8")
    sharded(folder, str(strategy), "pipeline", training=adamw())
    report_page([folder / "pipeline"], folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    (page,) = json.loads(Elements(text).scripts[0])["directories"]
    pipeline = page["pipeline"]
    ends = {p["name"]: shown(page, p["end"]) for p in page["ranks"]}
    assert pipeline["schedule"] == "1f1b" and len(pipeline["ranks"]) == 2
    # Numbers have four digits: a begin and an end may be wrong by 5e-4 of the step each.
    rounding = 1e-3 * shown(page, pipeline["end"])
    began = {}
    parts = {(0, "F"): "forward_model.0", (0, "B"): "backward_model.0"}
    parts[1, "B"] = "forward_backward_model.1"
    for stage, actions in enumerate(pipeline["ranks"]):
        spans = [(kind, micro, shown(page, a), shown(page, b)) for kind, _, micro, a, b in actions]
        for (kind, micro, start, end), after in zip(spans, [*spans[1:], None], strict=True):
            began[stage, kind, micro] = start
            takes = ends[parts[stage, kind]] if (stage, kind) in parts else 0.0
            assert end - start == pytest.approx(takes, abs=rounding)
            assert after is None or end <= after[2] + rounding
    for micro in range(pipeline["micro_batches"]):
        assert began[0, "F", micro] + ends["forward_model.0"] <= began[1, "F", micro] + rounding
        assert began[1, "B", micro] + ends[parts[1, "B"]] <= began[0, "B", micro] + rounding
    assert pipeline["kept"] == [2, 1]


def test_a_directory_without_graphs_still_has_a_page(folder: Path) -> None:
    sharded(folder, "dp=2", "some", ranks=[1])
    assert [p["rank"] for p in directory_page(folder / "some", {}, PRESETS["cpu"])["ranks"]] == [1]
    for file in (folder / "some").glob("rank*.onnx"):
        file.write_bytes(b"not a model")
    with pytest.raises(OnnxparError, match="not an ONNX graph"):
        directory_page(folder / "some", {}, PRESETS["cpu"])
    for file in (folder / "some").glob("rank*.onnx"):
        file.unlink()
    assert directory_page(folder / "some", {}, PRESETS["cpu"])["ranks"] == []


def test_a_size_that_the_symbol_does_not_admit(folder: Path) -> None:
    sharded(folder, "dp=2", "one")
    with pytest.raises(OnnxparError, match="'batch'"):
        directory_page(folder / "one", {"batch": 0}, PRESETS["cpu"])


def test_a_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    lines: list[Json] = [{"epoch": 1, "step": n, "loss": 2.0 / n, "note": "x"} for n in range(1, 6)]
    lines += [{"step": 6, "loss": float("nan")}, {"event": "end"}]
    lines[2]["lr"] = 0.1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_log(log)
    assert found["columns"] == ["epoch", "step", "loss", "lr"]
    assert found["rows"][2] == [1, 3, 2 / 3, 0.1] and len(found["rows"]) == 5
    assert (found["steps"], found["logged"], found["stride"]) == ([1, 2, 3, 4, 5], 5, 1)
    assert found["evaluations"] == {}
    # A run that continues at the end of an epoch evaluates it again.
    evaluations = [(10, 0.5), (5, 0.75), (10, 0.25)]
    lines += [{"run_step": n, "evaluation_loss": x, "evaluation_text": "x"} for n, x in evaluations]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(log) == found | {"evaluations": {"evaluation_loss": [(5, 0.75), (10, 0.25)]}}
    for text, message in (("[]\n", "line 1: expected a JSON object"), ("{", "line 1: not JSON")):
        log.write_text(text)
        with pytest.raises(LogError, match=message):
            read_log(log)
    log.write_text("")
    with pytest.raises(LogError, match="expected lines with a loss, got none"):
        read_log(log)
    with pytest.raises(LogError, match="absent"):
        read_log(tmp_path / "absent")


def test_a_long_log_is_thinned_and_keeps_its_numbers(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    # Every fourth of 20,003 steps was logged, and the last.
    steps = [*range(4, 20_003, 4), 20_003]
    log.write_text("".join(f'{{"run_step": {n}, "loss": {1 / n}}}\n' for n in steps))
    found = read_log(log)
    assert (found["logged"], found["stride"]) == (5001, 3)
    assert len(found["rows"]) == len(found["steps"]) <= MOST_ROWS
    assert found["steps"][:3] == [4, 16, 28] and found["steps"][-2:] == [19_996, 20_003]
    assert found["rows"][-1] == [20_003, 1 / 20_003]
    # The last is shown once, too, if it is one of every three.
    log.write_text("".join(f'{{"loss": {n}}}\n' for n in range(1, 4004)))
    found = read_log(log)
    assert found["steps"][-2:] == [4000, 4003] and found["rows"][-1] == [4003]
