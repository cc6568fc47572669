"""What a model's file may not say, whatever its operators are."""

import os
from collections.abc import Callable, MutableSequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import SparseTensorProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxpar.cli import main


def model(*dims: int | str) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"], "product"),
        helper.make_node("Softmax", ["t"], ["y"], "soft", axis=1),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims or ("n", 4)) for n in "xyt"]
    graph = helper.make_graph(nodes, "g", [values[0]], [values[1]], [weight], value_info=values[2:])
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def tensor(dims: list[int]) -> TensorProto:
    return TensorProto(name="t", data_type=TensorProto.FLOAT, dims=dims)


def constant(proto: onnx.ModelProto, **value: object) -> None:
    node = helper.make_node("Constant", [], ["c"], "const", **value)
    proto.graph.node.insert(0, node)


def again(values: MutableSequence[ValueInfoProto]) -> None:
    values.append(values[0])


def from_node(proto: onnx.ModelProto, name: str) -> None:
    proto.graph.node.append(helper.make_node("Neg", ["x"], [name], "last"))


CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "version": (
        lambda m: setattr(m, "ir_version", 99),
        f"expected an ir_version of 0 to {onnx.IR_VERSION}, the newest that the installed onnx "
        "knows, got 99",
    ),
    "attributes": (
        lambda m: m.graph.node[1].attribute.append(helper.make_attribute("axis", 0)),
        "node 'soft' (Softmax): expected attribute 'axis' once, got it 2 times",
    ),
    "input": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -3),
        "value 'x': expected dims of at least 0, or -1 for an unknown size, got -3",
    ),
    "value": (
        lambda m: setattr(m.graph.value_info[0].type.tensor_type.shape.dim[1], "dim_value", -4),
        "value 't': expected dims of at least 0, or -1 for an unknown size, got -4",
    ),
    "initializer": (
        lambda m: m.graph.initializer[0].dims.__setitem__(0, -4),
        "initializer 'w': expected dims of at least 0, got [-4, 4]",
    ),
    "constant": (
        lambda m: constant(m, value=tensor([-3])),
        "node 'const' (Constant): tensor 't': expected dims of at least 0, got [-3]",
    ),
    "sparse constant": (
        lambda m: constant(m, sparse_value=SparseTensorProto(dims=[-1, 4], values=tensor([1]))),
        "node 'const' (Constant): tensor 't': expected dims of at least 0, got [-1, 4]",
    ),
    "sparse": (
        lambda m: m.graph.sparse_initializer.add(dims=[4, 4], values=tensor([1])),
        "initializer 't': sparse initializers are not supported: expected all elements, as in "
        "'initializer', got 'sparse_initializer'",
    ),
    "inputs": (
        lambda m: again(m.graph.input),
        "expected one value 'x', got an input and an input",
    ),
    "outputs": (lambda m: again(m.graph.output), "expected one output 'y', got 2"),
    "input and result": (
        lambda m: from_node(m, "x"),
        "expected one value 'x', got an input and a result of node 'last' (Neg)",
    ),
    "initializer and result": (
        lambda m: from_node(m, "w"),
        "expected one value 'w', got an initializer and a result of node 'last' (Neg)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str) -> None:
    proto, path = model(), tmp_path / "m.onnx"
    CHANGES[change][0](proto)
    path.write_bytes(proto.SerializeToString())
    for command in (
        ["inspect", str(path)],
        ["shard", str(path), "--strategy", "dp=2", "-o", str(tmp_path / "d")],
    ):
        assert main(command) == 2
        assert capsys.readouterr().err == f"onnxpar: error: {str(path)!r}: {CHANGES[change][1]}\n"
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("dims", [(0, 4), (-1, 4), ("n", 4)])
@pytest.mark.parametrize("version", [3, onnx.IR_VERSION])
def test_taken(tmp_path: Path, dims: tuple[int | str, ...], version: int) -> None:
    """A dim may be empty, and some exporters write -1 for a size that is not known."""
    proto, path = model(*dims), tmp_path / "m.onnx"
    proto.ir_version = version
    path.write_bytes(proto.SerializeToString())
    assert main(["shard", str(path), "--strategy", "dp=2", "-o", str(tmp_path / "d")]) == 0


def external(folder: Path) -> Path:
    """The model with its weights in a file."""
    folder.mkdir(parents=True)
    proto, path = model(), folder / "m.onnx"
    proto.graph.node.append(helper.make_node("Unsqueeze", ["y", "axes"], ["z"], "wider"))
    proto.graph.output[0].name = "z"
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


def moved(path: Path, to: Path, link: str) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, to)
    path.symlink_to(link)


@pytest.mark.parametrize("command", ["shard", "annotate", "inspect"])
def test_a_link_of_weights_out_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = external(tmp_path / "m")
    moved(tmp_path / "m/m.data", tmp_path / "secret", "../secret")
    more = [] if command == "inspect" else ["--strategy", "dp=2", "-o", str(tmp_path / "d.onnx")]
    assert main([command, str(path), *more]) == 2
    error = capsys.readouterr().err
    assert f"{str(path)!r}: initializer 'w': expected external files in the folder" in error
    assert f"got 'm.data', a link that leads to {tmp_path / 'secret'}" in error
    assert not (tmp_path / "d.onnx").exists()


@pytest.mark.parametrize("command", ["shard", "annotate", "inspect"])
def test_a_hard_link_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """As onnx and onnx_ir; before, it depended on the size and the type of a weight."""
    path = external(tmp_path / "m")
    os.link(path.with_name("m.data"), tmp_path / "secret")
    more = [] if command == "inspect" else ["--strategy", "dp=2", "-o", str(tmp_path / "d.onnx")]
    assert main([command, str(path), *more]) == 2
    assert capsys.readouterr().err == (
        f"onnxpar: error: {str(path)!r}: initializer 'w': expected external files in the folder of "
        "the model, got 'm.data', which has 2 names (hard links); use a copy of it\n"
    )
    assert not (tmp_path / "d.onnx").exists()


def test_links_in_the_folder_of_the_model(tmp_path: Path) -> None:
    """The second is how the cache of Hugging Face is laid out; `axes` is read at once."""
    inner = external(tmp_path / "m")
    moved(tmp_path / "m/m.data", tmp_path / "m/blobs/1", "blobs/1")
    cached = external(tmp_path / "snapshots/1")
    for number, name in enumerate(("m.onnx", "m.data")):
        blob = f"blobs/{number}"
        moved(tmp_path / "snapshots/1" / name, tmp_path / blob, f"../../{blob}")
    for path in (inner, cached):
        out = str(path.parent / "d")
        assert main(["shard", str(path), "--strategy", "dp=2", "-o", out]) == 0
