"""The operations of a training program against those of textbooks, at several sizes."""

import onnx_ir as ir
import pytest
import transformer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.symbols import Symbol, as_dim, dim_str
from onnxpar.core.symbols.expressions import value_of
from onnxpar.cost.flops import program_flops
from onnxpar.parameters.recognise import read_parameters

GPT = transformer.Config(layers=3, d_model=32, heads=4, vocab=50, max_positions=16, ffn=96)


def flops(
    model: ir.Model,
    symbols: dict[str, Symbol] | None = None,
    loss: str = "softmax_cross_entropy",
) -> str | None:
    spec = TrainingSpec(parse_loss(loss), parse_optimizer("sgd"))
    prepared = prepare_training(read_parameters(model), symbols or {}, spec)
    found = program_flops(prepared.program)
    return None if found is None else dim_str(found)


def test_of_a_transformer() -> None:
    found = flops(transformer.build(GPT))
    assert found is not None
    width, ffn, vocab = 32, 96, 50
    for batch, seq in ((1, 1), (3, 7), (8, 16)):
        layer = 4 * width**2 + 2 * width * ffn
        products = 6 * batch * seq * (3 * layer + width * vocab)
        # Queries by keys and scores by values, for every head; each has two gradients.
        attention = 3 * 3 * 2 * (2 * batch * seq**2 * width)
        assert value_of(as_dim(found), {"batch": batch, "seq": seq}) == products + attention


CONV = """
<ir_version: 10, opset_import: ["" : 20]>
conv (float[batch, 3, 8, 8] x) => (float[batch, 5] y)
<float[4, 3, 3, 3] w = {WEIGHTS}, float[4, 5] v = {MORE}>
{
    a = Conv<pads=[1, 1, 1, 1]>(x, w)
    b = GlobalAveragePool(a)
    c = Flatten(b)
    y = MatMul(c, v)
}
"""
LOOP = """
<ir_version: 10, opset_import: ["" : 20]>
loop (float[batch, 4] x, int64 n) => (float[batch, 4] y)
<float[4, 4] w = {MORE}>
{
    a = MatMul(x, w)
    c = Constant<value = bool {1}>()
    y = Loop(n, c, a) <body = body (int64 i, bool go, float[batch, 4] s)
        => (bool more, float[batch, 4] t) { more = Identity(go) t = Tanh(s) }>
}
"""
CHOSEN = """
<ir_version: 10, opset_import: ["" : 20]>
chosen (float[batch, 4] x, bool[batch] kept) => (float[rows, 4] y, float total)
<float[4, 4] w = {MORE}>
{
    a = Compress<axis=0>(x, kept)
    y = MatMul(a, w)
    total = ReduceMean<keepdims=0>(y)
}
"""


def model(text: str) -> ir.Model:
    text = text.replace("{WEIGHTS}", "{" + ", ".join(["0.1"] * 108) + "}")
    count = 16 if "float[4, 4] w" in text else 20
    return ir.from_onnx_text(text.replace("{MORE}", "{" + ", ".join(["0.1"] * count) + "}"))


def test_of_a_convolution() -> None:
    # Each of 4 x 8 x 8 results adds 3 x 3 x 3 products. The image needs no gradient.
    assert flops(model(CONV)) == dim_str(
        as_dim(f"batch*{2 * 2 * 4 * 64 * 27} + batch*{3 * 2 * 4 * 5}")
    )


def test_of_concrete_sizes() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[8, 4] x, float[2, 4] c) => (float loss) <float[4, 4] w = {MORE}> {
        y = MatMul (x, w)  z = MatMul (c, w)  a = ReduceSum <keepdims = 0> (y)
        b = ReduceSum <keepdims = 0> (z)  loss = Add (a, b) }"""
    # Each product, and the gradient of its weight, has 2 x rows x 4 x 4 operations.
    assert flops(model(text), loss="output:loss") == str(2 * 2 * 16 * (8 + 2))
    # Concrete and symbolic sizes together.
    mixed = flops(model(text.replace("[8, 4] x", "[batch, 4] x")), loss="output:loss")
    assert mixed == dim_str(as_dim("64*batch + 128"))


def test_a_size_depends_on_data() -> None:
    # Labels tell how many rows there are.
    assert flops(model(CHOSEN)) == dim_str(as_dim("64*_d0"))
    assert flops(model(CHOSEN), loss="output:total") is None


def test_a_loop_has_no_number_of_operations() -> None:
    assert flops(model(LOOP)) is None


@pytest.mark.parametrize("per_rank", [False, True])
def test_sizes_of_data_ranks_differ(per_rank: bool) -> None:
    found = flops(transformer.build(GPT), {"seq": Symbol(per_rank=per_rank)})
    assert (found is None) == per_rank
