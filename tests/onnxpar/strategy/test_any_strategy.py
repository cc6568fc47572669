"""Any strategy is taken or refused with one clear error; what is taken gives the right numbers."""

from functools import cache
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.errors import OnnxparError, StrategyError
from onnxpar.facts.program import Program
from onnxpar.strategy import Strategy, resolve
from tests.lockstep import run_model

MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[batch, 6] x, float[6, 8] w) => (float[batch, 2, 4] y) <int64[3] s = {0, 2, 4}> {
    [mm] a = MatMul(x, w) [relu] b = Relu(a) [view] y = Reshape(b, s)
}
"""
WORDS = st.sampled_from(
    (
        "mm",
        "relu",
        "view",
        "x",
        "w",
        "dp",
        "tp",
        "*",
        "r*",
        "in",
        "out",
        "None",
        "data_parallel",
        "mesh",
        "devices",
        "symbols",
        "dataset",
        "parameters",
        "nodes",
        "rest",
        "batch",
        "divisor",
    )
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), WORDS, st.text(max_size=3)
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)
TENSOR = st.lists(st.sampled_from([None, 1, 2, 4, 3]), min_size=2, max_size=2) | st.lists(
    st.sampled_from([None, "dp", "tp", ["tp", "dp"]]), min_size=2, max_size=2
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A key's good values, and one time in eight anything."""
    return st.integers(0, 7).flatmap(lambda n: DATA if n == 7 else good)


FILE = st.fixed_dictionaries(
    {"mesh": mostly(st.sampled_from([{"dp": 2, "tp": 4}, {"tp": 2, "dp": 2}]))},
    optional={
        "devices": mostly(st.sampled_from([4, 8])),
        "symbols": mostly(st.just({"batch": {"divisor": 2}})),
        "dataset": mostly(st.sampled_from(["data_parallel", "full_batch", {"x": ["dp", 1]}])),
        "parameters": mostly(st.just({})),
        "parameter_axes": mostly(st.sampled_from([[], ["tp"]])),
        "nodes": st.dictionaries(
            st.sampled_from(["mm", "relu", "view", "*", "r*"]),
            mostly(
                st.fixed_dictionaries(
                    {"in": mostly(st.lists(TENSOR, min_size=1, max_size=2))},
                    optional={"out": mostly(st.lists(TENSOR, max_size=1))},
                )
            ),
            max_size=2,
        ),
        "rest": mostly(st.sampled_from(["propagate", "data_parallel", "replicate", "mindspore"])),
    },
)


@cache
def model() -> Program:
    return analyse(ir.from_proto(onnx.parser.parse_model(MODEL)), {})


def taken(data: Any) -> bool:
    analysed = model()
    try:
        strategy = Strategy.from_dict(data)
        seeds = resolve(strategy, analysed)
    except OnnxparError as error:
        assert str(error)
        return False
    assert seeds.mesh.size == strategy.devices
    return True


@settings(max_examples=300, deadline=None, derandomize=True)
@given(FILE | DATA)
def test_any_data_is_taken_or_refused(data: Any) -> None:
    taken(data)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(alphabet="{}[]:,-&*!|>'\"#%@ \n\tab2~\x00\x85é", max_size=40))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        Strategy.from_text(text, 2)
    except StrategyError as error:
        assert str(error)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(FILE)
def test_a_file_says_the_same_as_its_data(data: dict[str, Any]) -> None:
    def read(make: Any) -> Strategy | None:
        try:
            return Strategy(**{**vars(make()), "source": "", "document": None})
        except StrategyError:
            return None

    text = yaml.safe_dump(data, allow_unicode=True)
    from_text = read(lambda: Strategy.from_text(text))
    if from_text is not None:
        assert from_text == read(lambda: Strategy.from_dict(yaml.safe_load(text)))


def test_the_generator_reaches_strategies_that_are_taken() -> None:
    # The tests above would hold if every sample were refused at its first key.
    data = {"mesh": {"dp": 2, "tp": 4}, "nodes": {"mm": {"in": [["dp", "tp"], ["tp", None]]}}}
    assert taken(data)


PIECES = st.sampled_from([1, 1, 2, 2, 4, 8])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.tuples(PIECES, PIECES, PIECES),
    st.none() | st.tuples(PIECES, PIECES),
    st.sampled_from(["data_parallel", "full_batch"]),
    st.sampled_from(["propagate", "data_parallel", "replicate"]),
    st.integers(1, 9),
)
def test_numeric_strategies_give_the_right_numbers(
    factors: tuple[int, int, int],
    out: tuple[int, int] | None,
    dataset: str,
    rest: str,
    batch: int,
) -> None:
    m, k, n = factors
    entry: dict[str, Any] = {"in": [[m, k], [k, n]]}
    if out is not None:
        entry["out"] = [list(out)]
    data = {"devices": 8, "dataset": dataset, "rest": rest, "nodes": {"mm": entry}}
    if not taken(data):
        # Refused for one of these reasons only.
        assert m * k * n > 8 or (out is not None and out[0] * out[1] > 8)
        return
    analysed = model()
    seeds = resolve(Strategy.from_dict(data), analysed)
    parted = propagate_and_partition(analysed, seeds)
    plan = parted.plan.nodes["mm"]
    assert [s.strategy(seeds.mesh) for s in plan.inputs if s is not None] == [(m, k), (k, n)]
    if out is not None:
        assert parted.plan.resharded["a"].strategy(seeds.mesh) == out
    rng = np.random.default_rng(batch)
    x = rng.standard_normal((batch, 6)).astype(np.float32)
    w = rng.standard_normal((6, 8)).astype(np.float32)
    want = np.maximum(x @ w, 0).reshape(batch, 2, 4)
    got = run_model(parted, {"x": x, "w": w}, {"batch": batch})["y"]
    # float32, sums of 6 terms below 4^2 in another order: 6 * 16 * 2^-24 = 6e-6.
    assert np.abs(got - want).max() < 1e-5
