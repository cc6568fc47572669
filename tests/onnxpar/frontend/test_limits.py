"""Small files that would take unbounded time, or hold what only onnxpar writes, are refused."""

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.cli import main
from onnxpar.frontend.limits import MAX_NESTING

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]


def saved(path: Path, graph: onnx.GraphProto, **more: object) -> Path:
    model = helper.make_model(graph, ir_version=10, opset_imports=OPSETS, **more)
    path.write_bytes(model.SerializeToString())
    return path


def value(name: str, *dims: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def of_dim(path: Path, dim: str) -> Path:
    relu = helper.make_node("Relu", ["x"], ["y"], "r")
    return saved(path, helper.make_graph([relu], "g", [value("x", dim, 4)], [value("y", "m", 4)]))


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", str(path)]) == 2
    return capsys.readouterr().err


NEITHER = (
    "floor()", "max()", "mod(b)", "floor(b, 2)", "sqrt(b)", "foo(b)", "b;c", "1e400*b", "b[0]",
    "b c",
)  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "reason"),
    [
        ("a" * 100_000, "which has 100000 characters; expected at most 1000"),
        ("-" * 500 + "a", "which has more than 100 operations"),
        ("9" * 500, "which has a number of more than 18 digits"),
        (f"max({','.join(f'a{n}' for n in range(60))})", "chooses between more than 8 sizes"),
        ("((((9**64)**64)**64)**64)**64", "a sum or a power has an exponent above 8"),
        ("floor((a+b+c+d+e)**40/7)", "a sum or a power has an exponent above 8"),
        ("a**b**c", "which is not a size"),
        ("batch%0", "(batch) % (0) divides by zero"),
        ("batch//0", "(batch) / (0) divides by zero"),
        (
            "*".join(["9" * 18] * 3),
            "which is 999999999999999997000000000000000002999999999999999999;",
        ),
        ("*".join(["9" * 18] * 3) + "*b", "which has the number 9999999999999999970000000"),
        ("3-5", "which is -2; expected a size from 0 to 2**63 - 1"),
        *((dim, "expected a name or an expression") for dim in NEITHER),
    ],
)
def test_a_dim_that_takes_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dim: str, reason: str
) -> None:
    error = refused(of_dim(tmp_path / "m.onnx", dim), capsys)
    assert error.startswith("onnxpar: error: input 'x' has the dim '") and reason in error
    assert len(error) < 300


def test_an_input_of_many_dims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], "r")
    dims = ["a"] * 65
    graph = helper.make_graph([relu], "g", [value("x", *dims)], [value("y", *dims)])
    error = refused(saved(tmp_path / "m.onnx", graph), capsys)
    assert "input 'x': expected at most 64 dims, got 65" in error


def test_a_model_without_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], "r")
    path = saved(tmp_path / "m.onnx", helper.make_graph([relu], "g", [value("x", 2)], []))
    assert "has no outputs: expected at least one" in refused(path, capsys)


@pytest.mark.parametrize(
    ("key", "given"),
    [("offset", "-4"), ("length", "nan"), ("offset", "9" * 5000), ("length", str(2**63))],
)
def test_places_of_external_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, given: str
) -> None:
    weight = TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    for name, text in (("location", "w.bin"), (key, given)):
        weight.external_data.add(key=name, value=text)
    add = helper.make_node("Add", ["x", "w"], ["y"], "r")
    graph = helper.make_graph([add], "g", [value("x", 4)], [value("y", 4)], [weight])
    error = refused(saved(tmp_path / "m.onnx", graph), capsys)
    assert f"initializer 'w': external data: expected a number of bytes as '{key}'" in error


def of_functions(path: Path, bodies: list[list[onnx.NodeProto]]) -> Path:
    """A call of the first of some functions F0, F1, … of x, each with the result y."""
    functions = [
        helper.make_function("f", f"F{level}", ["x"], ["y"], nodes, OPSETS)
        for level, nodes in enumerate(bodies)
    ]
    call = helper.make_node("F0", ["x"], ["y"], "call", domain="f")
    graph = helper.make_graph([call], "g", [value("x", 2, 4)], [value("y", 2, 4)])
    return saved(path, graph, functions=functions)


def repeated(levels: int, calls: int) -> list[list[onnx.NodeProto]]:
    """Functions that each call the next one, the last one Relu."""
    names = ["x", *(f"t{n}" for n in range(calls - 1)), "y"]
    kinds = [*((f"F{level}", "f") for level in range(1, levels)), ("Relu", "")]
    return [
        [helper.make_node(kind, [names[n]], [names[n + 1]], domain=domain) for n in range(calls)]
        for kind, domain in kinds
    ]


@pytest.mark.parametrize("location", ["a\0b", "a\nb"])
def test_names_of_external_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], location: str
) -> None:
    """NUL ended in "embedded null byte"."""
    weight = TensorProto(name="w", data_type=1, dims=[4], data_location=1)
    weight.external_data.add(key="location", value=location)
    add = helper.make_node("Add", ["x", "w"], ["y"], "r")
    graph = helper.make_graph([add], "g", [value("x", 4)], [value("y", 4)], [weight])
    error = refused(saved(tmp_path / "m.onnx", graph), capsys)
    assert (
        f"initializer 'w': expected a file's name without control characters, got {location!r}"
        in error
    )


@pytest.mark.parametrize(
    ("levels", "calls", "reason"),
    [
        (
            8,
            8,
            "expected at most 23000 nodes from functions in a model of 65 nodes, got 1000000 or ",
        ),
        (
            14,
            2,
            "expected at most 15800 nodes from functions in a model of 29 nodes, got 16384 once",
        ),
        (65, 1, "expected calls of at most 64 functions inside one another, got 65"),
        (500, 2, "expected calls of at most 64 functions inside one another, got 500"),
    ],
)
def test_functions_that_call_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], levels: int, calls: int, reason: str
) -> None:
    error = refused(of_functions(tmp_path / "m.onnx", repeated(levels, calls)), capsys)
    assert "function 'f::F0': " in error and reason in error


def test_functions_that_are_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 16 were said to "call each other recursively"."""
    path = of_functions(tmp_path / "m.onnx", repeated(64, 1))
    assert main(["inspect", str(path)]) == 0
    assert "Relu" in capsys.readouterr().out


def test_bodies_in_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bodies that are inside one another only once functions are inlined."""
    bodies = []
    for level in range(10):
        kind = ("Relu", "") if level == 9 else (f"F{level + 1}", "f")
        inner = helper.make_node(kind[0], ["x"], ["r"], domain=kind[1])
        other = helper.make_node("Neg", ["x"], ["s"])
        branches = [
            helper.make_graph([n], "b", [], [onnx.ValueInfoProto(name=n.output[0])])
            for n in (inner, other)
        ]
        bodies.append(
            [
                helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
                helper.make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
                helper.make_node(
                    "If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]
                ),
            ]
        )
    assert "it has a body inside 8 others" in refused(
        of_functions(tmp_path / "m.onnx", bodies), capsys
    )


def nested(depth: int) -> onnx.GraphProto:
    """A graph with a Loop in a Loop, and so on."""
    if depth == 0:
        work = helper.make_node("Relu", ["v"], ["w"], "r")
    else:
        work = helper.make_node("Loop", ["n", "c", "v"], ["w"], f"l{depth}", body=nested(depth - 1))
    trip = [value("i", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL)]
    condition = helper.make_node("Identity", ["c"], ["d"])
    results = [value("d", kind=TensorProto.BOOL), value("w", 2, 4)]
    return helper.make_graph([condition, work], f"b{depth}", [*trip, value("v", 2, 4)], results)


def test_bodies_in_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for depth, code in ((MAX_NESTING, 2), (2, 0)):
        loop = helper.make_node("Loop", ["n", "c", "x"], ["y"], "l", body=nested(depth))
        counts = [value("n", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL)]
        graph = helper.make_graph([loop], "g", [value("x", 2, 4), *counts], [value("y", 2, 4)])
        path = saved(tmp_path / "m.onnx", graph)
        assert main(["inspect", str(path)]) == code
        assert ("it has a body inside 8 others" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    "key", ["onnxpar.captured", "onnxpar.virtual_stage", "pkg.onnx_shape_inference.sym_data"]
)
def test_marks_of_passes_in_a_file_are_dropped(tmp_path: Path, key: str) -> None:
    model = onnx.load(of_dim(tmp_path / "m.onnx", "n"))
    for item in (model.graph.node[0], model.graph.input[0]):
        mark = item.metadata_props.add()
        mark.key, mark.value = key, "]]{"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 0


def test_a_node_with_too_many_operands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = helper.make_node("Transpose", ["x", "x"], ["y"], "t")
    graph = helper.make_graph([node], "g", [value("x", 2, 4)], [value("y", 4, 2)])
    error = refused(saved(tmp_path / "m.onnx", graph), capsys)
    assert "node 't' (Transpose)" in error and "input size 2" in error


@pytest.mark.timeout(30)
def test_a_pipe_as_the_file_of_a_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value="pipe")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "m")
    graph = helper.make_graph([node], "g", [value("x", 2, 4)], [value("y", 2, 4)], [weight])
    path = saved(tmp_path / "m.onnx", graph)
    assert main(["shard", str(path), "--strategy", "dp=2", "-o", str(tmp_path / "d")]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_files_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pipes "did not exist", and all of a large file was read before protobuf refused it."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(1 << 31)
    for name, reason in (
        ("pipe", "is not a regular file"),
        ("large", "expected at most 2147483647 bytes"),
    ):
        assert reason in refused(tmp_path / name, capsys)


def test_no_memory_is_no_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 570. TiB")

    monkeypatch.setattr("onnxpar.cli.inspect.load", fail)
    assert main(["inspect", str(of_dim(tmp_path / "m.onnx", "n"))]) == 1
    error = capsys.readouterr().err
    assert error == "onnxpar: error: there is not enough memory: Unable to allocate 570. TiB\n"


def test_an_unknown_exception_is_an_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("so")

    monkeypatch.setattr("onnxpar.cli.inspect.load", fail)
    assert main(["inspect", str(of_dim(tmp_path / "m.onnx", "n"))]) == 1
    error = capsys.readouterr().err
    assert error.startswith("onnxpar: error: internal error in onnxpar 0.") and "so;" in error
    monkeypatch.setenv("ONNXPAR_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(tmp_path / "m.onnx")])


@pytest.mark.parametrize(
    ("op_type", "count", "last", "message"),
    [
        # Each node doubles the number of elements, or the length of their formulas.
        ("Concat", 30, "Reshape", f"expected a shape of at most 64 dims, got {2**31}"),
        ("Concat", 30, "Expand", f"expected a shape of at most 64 dims, got {2**31}"),
        ("Mul", 60, "Expand", ""),
        ("Add", 60, "Expand", ""),
    ],
)
def test_sizes_that_double_again_and_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    op_type: str,
    count: int,
    last: str,
    message: str,
) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["k0"], "shape")]
    axis = {"axis": 0} if op_type == "Concat" else {}
    for k in range(count):
        nodes.append(helper.make_node(op_type, [f"k{k}"] * 2, [f"k{k + 1}"], f"n{k}", **axis))
    nodes.append(helper.make_node(last, ["x", f"k{count}"], ["y"], "last"))
    graph = helper.make_graph(nodes, "g", [value("x", "a", "b")], [value("y", "c", "d")])
    assert main(["inspect", str(saved(tmp_path / "m.onnx", graph))]) == (2 if message else 0)
    assert message in capsys.readouterr().err
