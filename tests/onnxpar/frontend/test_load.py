"""Reading and normalising models: what is accepted, and what is refused with a name."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import Symbol
from onnxpar.frontend.load import load, normalise, symbol_table

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'


def read(text: str) -> ir.Model:
    return ir.serde.deserialize_model(onnx.parser.parse_model(HEAD + text))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.onnx' does not exist"):
        load(tmp_path / "no.onnx")
    with pytest.raises(ModelError, match="is a directory"):
        load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"hello, this is no model", bytes(range(256)) * 4])
def test_not_a_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"x\.onnx"):
        load(path)


def test_cycle_names_its_nodes() -> None:
    model = read("g (float[n] x) => (float[n] y) { a = Add(x, x) y = Relu(a) }")
    first, second = list(model.graph)
    first.name, second.name = "first", "second"
    first.replace_input_with(1, second.outputs[0])
    with pytest.raises(ModelError, match=r"cycle: '(first|second)' <- '(first|second)'"):
        normalise(model)


def test_dangling_input_is_named() -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n] x) => (float[n] y) { y = Add(x, ghost) }")
    with pytest.raises(ModelError, match=r"node 'Add_y' \(Add\): input 1 \('ghost'\)"):
        normalise(ir.serde.deserialize_model(proto))


def test_output_without_a_node() -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n] x) => (float[n] y) { z = Relu(x) }")
    with pytest.raises(ModelError, match="'y' is not computed by a node"):
        normalise(ir.serde.deserialize_model(proto))


def test_names_constants_and_shapes() -> None:
    model = normalise(
        read(
            """g (float[n, 4] x) => (float[p, q] y) {
              c = Constant<value_ints: ints = [-1, 2]>()
              a = Relu(x)
              b = Relu(a)
              y = Reshape(b, c)
            }"""
        )
    )
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names) == 3
    assert all(names)
    assert np.array_equal(model.graph.initializers["c"].const_value.numpy(), [-1, 2])
    assert str(model.graph.outputs[0].shape) == "[2*n,2]"


def test_unnamed_dims_get_names_of_their_own() -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n] x) => (float[n] y) { y = Relu(x) }")
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    model = normalise(ir.serde.deserialize_model(proto))
    assert str(model.graph.inputs[0].shape) == "[x.0]"
    assert list(symbol_table(model, {})) == ["x.0"]


def test_constraint_on_unknown_symbol() -> None:
    model = normalise(read("g (float[n] x) => (float[n] y) { y = Relu(x) }"))
    with pytest.raises(ModelError, match=r"'batch'.*there is only 'n'"):
        symbol_table(model, {"batch": Symbol(divisor=8)})


def test_an_operator_that_the_standard_lacks() -> None:
    model = read("g (float[n] x) => (float[n] y) { y = Foo(x) }")
    next(iter(model.graph)).name = "odd"
    with pytest.raises(ModelError, match="node 'odd': ONNX has no operator 'Foo' in opset 20"):
        normalise(model)


def test_an_opset_of_the_future() -> None:
    model = read("g (float[n] x) => (float[n] y) { y = Relu(x) }")
    model.opset_imports[""] = 999
    with pytest.raises(ModelError, match=r"at most .*, got 999"):
        normalise(model)


@pytest.mark.parametrize(("opset", "message"), [(3, "at least 7, got 3"), (999, ", got 999")])
def test_an_opset_error_names_the_file(tmp_path: Path, opset: int, message: str) -> None:
    model = read("g (float[n] x) => (float[n] y) { y = Relu(x) }")
    model.opset_imports[""] = opset
    ir.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=f"m.onnx': expected an opset version of .*{message}"):
        load(tmp_path / "m.onnx")


def test_a_value_made_twice_is_named(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        HEAD + "g (float[n] x) => (float[n] y) { a = Relu(x) a = Neg(x) y = Neg(a) }"
    )
    path = tmp_path / "twice.onnx"
    onnx.save(proto, path)
    with pytest.raises(ModelError, match="'a'"):
        load(path)


CUT_TABLE = """
g (float[batch, seq, 2] x) => (float[batch, seq, 2] y)
<int64[1] zero = {0}, int64[1] axis = {1}> {
  size = Shape <start = 1, end = 2> (x)
  cut = Slice(table, zero, size, axis)
  y = Add(x, cut)
}
"""


@pytest.mark.parametrize(
    ("given", "rows", "most"),
    [(Symbol(), 8, 8), (Symbol(max=5), 8, 5), (Symbol(max=50, min=2), 8, 8), (Symbol(), 1, 0)],
)
def test_a_table_that_is_cut_to_a_length_limits_it(given: Symbol, rows: int, most: int) -> None:
    model = read(CUT_TABLE)
    table = np.zeros((1, rows, 2), np.float32)
    value = ir.Value(name="table", const_value=ir.tensor(table, name="table"))
    model.graph.register_initializer(value)
    for node in model.graph:
        if node.op_type == "Slice":
            node.replace_input_with(0, value)
    symbols = symbol_table(normalise(model), {"seq": given})
    assert symbols["seq"] == Symbol(max=most, min=given.min)
    assert symbols["batch"] == Symbol()


ROTATED = """
<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g (float[batch, seq, 32] q, float[batch, seq, 16] k, int64[batch, total] mask,
   float[batch, 2, length, 8] past_k, float[batch, 2, length, 8] past_v,
   int32[batch] seqlens, float[ROWS, 4] cosines, float[64, 4] sines)
  => (float[batch, seq, 32] y, float[batch, 2, length, 8] present_k,
      float[batch, 2, length, 8] present_v)
{
  size = Shape <start = 1, end = 2> (mask)
  small = Cast <to = 6> (size)
  longest = Squeeze(small)
  y, present_k, present_v = com.microsoft.GroupQueryAttention
    <num_heads = 4, kv_num_heads = 2, do_rotary = 1>
    (q, k, k, past_k, past_v, seqlens, longest, cosines, sines)
}
"""


@pytest.mark.parametrize(
    ("given", "rows", "most"), [(Symbol(), 48, 48), (Symbol(), 99, 64), (Symbol(max=5), 48, 5)]
)
def test_a_table_of_angles_limits_positions(given: Symbol, rows: int, most: int) -> None:
    model = ir.from_proto(onnx.parser.parse_model(ROTATED.replace("ROWS", str(rows))))
    symbols = symbol_table(normalise(model), {"total": given})
    assert symbols["total"] == Symbol(max=most)
    assert symbols["length"].max == Symbol().max


def test_what_inference_does_not_know_is_taken_as_declared() -> None:
    model = onnx.parser.parse_model("""
      <ir_version: 10, opset_import: ["": 20, "elsewhere": 1]>
      g (float[n, 6] x) => (float[n, 3] y) { y = elsewhere.Mystery(x) }""")
    normal = normalise(ir.from_proto(model))
    (output,) = normal.graph.outputs
    assert output.shape == ir.Shape(["y.0", 3])


def test_a_model_of_other_domains_alone_need_not_import_the_default_one() -> None:
    text = """<ir_version: 10, opset_import: ["ai.onnx.ml": 4]>
      g (float[n, 6] x) => (float[n, 6] y) { y = ai.onnx.ml.Binarizer(x) }"""
    assert len(normalise(ir.from_proto(onnx.parser.parse_model(text))).graph) == 1


def test_an_input_of_strings_is_refused() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
      g (string[n] x) => (string[n] y) { y = Identity(x) }"""
    with pytest.raises(ModelError, match="input 'x' has text elements"):
        normalise(ir.from_proto(onnx.parser.parse_model(text)))


def test_a_branch_that_sizes_decide_is_inlined() -> None:
    """No symbol is 0, so one of the two is never taken; its sizes would else be unknown."""
    model = normalise(
        read(
            """g (float[n, m] x) => (float[p, q] y) {
              s = Shape(x) zero = Constant<value_int = 0>() k = Gather(s, zero)
              some = Greater(k, zero)
              y = If(some)
                <then_branch = a () => (float[p, q] t) { t = Relu(x) },
                 else_branch = b () => (float[p, q] e) { e = ReduceMax<keepdims = 1>(x) }>
            }"""
        )
    )
    assert [node.op_type for node in model.graph] == ["Relu"]
    assert str(model.graph.outputs[0].shape) == "[n,m]"
