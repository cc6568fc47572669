"""Bodies and functions that no runtime could run are refused with what ONNX requires."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.core.errors import OnnxparError
from onnxpar.frontend.load import load, normalise


def value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def body(inputs: int, outputs: int) -> onnx.GraphProto:
    """A body whose first input and output may be a condition; each output is the last input."""
    taken = [value("i", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL)][:inputs]
    taken += [value(f"v{k}", 4) for k in range(inputs - len(taken))]
    nodes, given = [], []
    for k in range(outputs):
        kind = TensorProto.BOOL if k == 0 else TensorProto.FLOAT
        nodes.append(helper.make_node("Identity", ["c" if k == 0 else "v0"], [f"o{k}"], f"n{k}"))
        given.append(value(f"o{k}", *([] if k == 0 else [4]), kind=kind))
    return helper.make_graph(nodes, "body", taken, given)


def scan_body() -> onnx.GraphProto:
    add = helper.make_node("Add", ["s", "r"], ["t"], "add")
    copy = helper.make_node("Identity", ["t"], ["u"], "copy")
    return helper.make_graph([add, copy], "b", [value("s", 4), value("r", 4)],
                             [value("t", 4), value("u", 4)])  # fmt: skip


def refused(tmp_path: Path, model: onnx.ModelProto) -> str:
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OnnxparError) as error:
        normalise(load(tmp_path / "m.onnx"))
    return str(error.value)


def model(*nodes: onnx.NodeProto, **more: Any) -> onnx.ModelProto:
    inputs = [value("m", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL)]
    graph = helper.make_graph(
        list(nodes), "g", [*inputs, value("x", 4), value("xs", "n", 4)], [value("y", 4)]
    )
    imports = [helper.make_opsetid(domain, 1) for domain in more.pop("domains", ())]
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), *imports], ir_version=8, **more
    )


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 2), "body: inputs (iteration, condition, states): expected 3, got 2"),
        ((4, 2), "body: inputs (iteration, condition, states): expected 3, got 4"),
        ((3, 1), "body: outputs (condition, states, scans): expected 2, got 1"),
    ],
)
def test_loops(tmp_path: Path, counts: tuple[int, int], message: str) -> None:
    loop = helper.make_node("Loop", ["m", "c", "x"], ["y"], "lp", body=body(*counts))
    assert refused(tmp_path, model(loop)) == f"node 'lp' (Loop): {message}"


def test_branches(tmp_path: Path) -> None:
    one = helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "t", [], [value("r", 4)])
    none = helper.make_graph([], "e", [], [])
    branches = {"then_branch": one, "else_branch": none}
    message = refused(tmp_path, model(helper.make_node("If", ["c"], ["y"], "i", **branches)))
    assert message == "node 'i' (If): else_branch: outputs: expected 1, got 0"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_scan_inputs": 0}, "num_scan_inputs: expected 1 to 2, the operands, got 0"),
        ({"num_scan_inputs": 3}, "num_scan_inputs: expected 1 to 2, the operands, got 3"),
        ({"scan_input_directions": [7]}, "expected 0 (forward) or 1 (reverse), got [7]"),
        ({"scan_input_directions": [0, 0]}, "scan_input_directions: numbers: expected 1, got 2"),
        ({"scan_input_axes": [2]}, "scan_input_axes: expected axes of a tensor of 2 dims, got 2"),
        ({"scan_output_axes": [-3]}, "scan_output_axes: expected axes of a tensor of 2 dims, got"),
    ],
)
def test_scans(tmp_path: Path, attributes: dict[str, Any], message: str) -> None:
    given = {"num_scan_inputs": 1} | attributes
    scan = helper.make_node("Scan", ["x", "xs"], ["y", "z"], "sc", body=scan_body(), **given)
    found = refused(tmp_path, model(scan))
    assert found.startswith("node 'sc' (Scan): ") and message in found


def function(
    domain: str, name: str, outputs: tuple[str, ...] = ("q",), made: str = "q"
) -> onnx.FunctionProto:
    node = helper.make_node("Neg", ["p"], [made], "n")
    imports = [helper.make_opsetid("", 18)]
    return helper.make_function(domain, name, ["p"], list(outputs), [node], imports)


def test_functions(tmp_path: Path) -> None:
    call = helper.make_node("A", ["x"], ["y"], "n", domain="loc")
    twice = model(call, functions=[function("loc", "A"), function("loc", "A")], domains=["loc"])
    assert "expected one function 'loc::A', got 2" in refused(tmp_path, twice)
    lacking = model(call, functions=[function("loc", "A", made="r")], domains=["loc"])
    assert "function 'loc::A': no node makes the output 'q'" in refused(tmp_path, lacking)
    more = helper.make_node("A", ["x"], ["y", "z"], "n", domain="loc")
    message = refused(tmp_path, model(more, functions=[function("loc", "A")], domains=["loc"]))
    assert message == "node 'n': expected at most 1 results, as the function 'loc::A' has, got 2"
    relu = model(helper.make_node("Relu", ["x"], ["y"], "n"), functions=[function("", "Relu")])
    assert "expected another name than that of an operator of ONNX" in refused(tmp_path, relu)


def test_programs_that_are_sharded_already(tmp_path: Path) -> None:
    node = helper.make_node("AllReduce", ["x"], ["y"], "n", domain="onnxpar")
    message = refused(tmp_path, model(node, domains=["onnxpar"]))
    assert "expected an undivided model" in message


def test_a_cycle_through_a_body(tmp_path: Path) -> None:
    read = helper.make_graph([helper.make_node("Relu", ["w"], ["r"])], "t", [], [value("r", 4)])
    branches = {"then_branch": read, "else_branch": read}
    first = helper.make_node("If", ["c"], ["v"], "first", **branches)
    second = helper.make_node("Relu", ["v"], ["w"], "second")
    last = helper.make_node("Identity", ["v"], ["y"], "last")
    message = refused(tmp_path, model(first, second, last))
    assert message.startswith("the graph has a cycle: ") and "'first' <- 'second'" in message


def test_a_declared_type_that_nothing_gives(tmp_path: Path) -> None:
    wrong = model(helper.make_node("Relu", ["x"], ["y"], "n"))
    wrong.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    assert refused(tmp_path, wrong) == (
        "output 'y': expected FLOAT, which its node gives, got INT64 as its declared type"
    )
