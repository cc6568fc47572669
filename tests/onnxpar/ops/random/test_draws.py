"""Random numbers: of the distribution asked for, and never such as the ranks disagree on."""

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition, shard_model
from onnxpar.core.errors import ShardingError
from onnxpar.strategy import Strategy, resolve
from onnxpar_runtime import Session
from tests.lockstep import run_model
from tests.onnxpar.ops.op_harness import Case

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
COUNT = 10_000


def drawn(node: str, **inputs: str) -> np.ndarray:
    """What one device draws for a node."""
    return Case(node, inputs).expected[0]


def off(deviation: float) -> float:
    """Five deviations of the mean of COUNT numbers, which one seed in a million exceeds."""
    return 5 * deviation / COUNT**0.5


def test_uniform_numbers_fill_their_range() -> None:
    x = drawn(f"y = RandomUniform<shape=[{COUNT}], low=-2.0, high=4.0>()")
    assert x.dtype == np.float32 and x.min() >= -2 and x.max() <= 4
    deviation = 6 / 12**0.5
    assert abs(x.mean() - 1) < off(deviation) and abs(x.std() - deviation) < off(deviation)


def test_normal_numbers_have_their_mean_and_scale() -> None:
    x = drawn("y = RandomNormalLike<mean=3.0, scale=0.5, dtype=11>(x)", x=f"int32[{COUNT}]")
    assert x.dtype == np.float64
    assert abs(x.mean() - 3) < off(0.5) and abs(x.std() - 0.5) < off(0.5)
    assert abs((np.abs(x - 3) < 0.5).mean() - 0.6827) < off(0.5)


def test_bernoulli_is_one_as_often_as_its_chance_says() -> None:
    chances = np.repeat(np.array([0, 0.2, 1], np.float32), COUNT)
    case = Case("y = Bernoulli(x)", {"x": f"float[{3 * COUNT}]"}, feeds={"x": chances})
    never, seldom, always = np.split(case.expected[0], 3)
    assert not never.any() and always.all() and set(np.unique(seldom)) == {0, 1}
    assert abs(seldom.mean() - 0.2) < off(0.4)


def test_multinomial_draws_as_often_as_the_chances_say() -> None:
    # The logarithms of 1, 0, 2 and 5 eighths, times a number that must not matter.
    logs = np.log(np.array([[1, 0.0, 2, 5]]) / 8 + 1e-30) + 3
    case = Case(
        f"y = Multinomial<sample_size={COUNT}, dtype=7>(x)", {"x": "float[1,4]"}, feeds={"x": logs}
    )
    (row,) = case.expected[0]
    assert row.dtype == np.int64
    shares = np.bincount(row, minlength=4) / COUNT
    assert shares[1] == 0
    assert np.all(np.abs(shares - [1 / 8, 0, 2 / 8, 5 / 8]) < off(0.5))


def test_nodes_draw_independently() -> None:
    graph = f"""g (float[{COUNT}] x) => (float[{COUNT}] y, float[{COUNT}] z)
        {{ [a] y = RandomNormalLike(x) [b] z = RandomNormalLike(x) }}"""
    made = run(graph, {"x": np.zeros(COUNT, np.float32)}, devices=2)
    assert abs(np.corrcoef(made["y"], made["z"])[0, 1]) < off(1)


def run(graph: str, feeds: dict[str, np.ndarray], devices: int) -> dict[str, np.ndarray]:
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(HEAD + graph)), {})
    strategy = Strategy.from_text(f"devices: {devices}\ndataset: data_parallel", source="test")
    program = propagate_and_partition(analysed, resolve(strategy, analysed))
    return run_model(program, feeds, {})


NOISE = """g (float[6, 4] x) => (float[6, 4] y) { n = RandomNormalLike(x) y = Add(x, n) }"""


def test_noise_is_that_of_one_device_on_every_mesh() -> None:
    """If each rank drew for itself, replicas of a value would differ."""
    feeds = {"x": np.zeros((6, 4), np.float32)}
    alone = run(NOISE, feeds, devices=1)["y"]
    assert alone.std() > 0
    for devices in (2, 4):
        assert np.array_equal(run(NOISE, feeds, devices)["y"], alone)


SAMPLED = """g (float[6, 5] x) => (int32[6, 3] y) { y = Multinomial<sample_size = 3>(x) }"""


def test_samples_are_those_of_one_device_on_every_mesh() -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)}
    alone = run(SAMPLED, feeds, devices=1)["y"]
    assert len(np.unique(alone)) > 1
    for devices in (2, 4):
        assert np.array_equal(run(SAMPLED, feeds, devices)["y"], alone)


def body(nodes: str) -> str:
    return f"""g (float[4, 3] x, bool c) => (float[4, 3] y) <float r = {{0.5}}, bool t = {{1}},
      bool f = {{0}}> {{
        [i] y = If<then_branch = one () => (float[4, 3] p) {{ {nodes} }},
                   else_branch = two () => (float[4, 3] q) {{ q = Neg(x) }}>(c) }}"""


NESTED = """p = If<then_branch = a () => (float[4, 3] v) { [z] v = RandomNormalLike(x) },
            else_branch = b () => (float[4, 3] w) { w = Relu(x) }>(c)"""


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (
            body("[d] p = Dropout(x, r, t)"),
            r"node 'i' \(If\): 'd' \(Dropout\) in its body draws",
        ),
        (body("p = Dropout(x, r, c)"), r"'one/Dropout' \(Dropout\) in its body draws"),
        (body(NESTED), r"node 'i' \(If\): 'z' \(RandomNormalLike\) in its body draws"),
        (
            """g (float[4, 3] x) => (float[n] y) {
              i = NonZero(x) f = Cast<to = 1>(i) [r] y = RandomUniformLike(f) }""",
            r"node 'r' \(RandomUniformLike\) draws random numbers",
        ),
    ],
)
def test_numbers_that_ranks_would_draw_differently_are_refused(
    graph: str, said: str, tmp_path: Path
) -> None:
    feeds = {"x": np.full((4, 3), 0.5, np.float32), "c": np.array(True)}
    with pytest.raises(ShardingError, match=said):
        run(graph, feeds, devices=2)
    feeds = {name: array for name, array in feeds.items() if f" {name}" in graph.split("=>")[0]}
    onnx.save(onnx.parser.parse_model(HEAD + graph), tmp_path / "m.onnx")
    shard_model(tmp_path / "m.onnx", "replicate", tmp_path / "one", devices=1)
    made = Session(tmp_path / "one").run_global(feeds)
    assert made is not None and made["y"].size


@pytest.mark.parametrize("node", ["p = Dropout(x)", "p = Dropout(x, r)", "p = Dropout(x, r, f)"])
def test_a_body_that_draws_nothing_is_replicated(node: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for branch, expected in ((True, x), (False, -x)):
        made = run(body(node), {"x": x, "c": np.array(branch)}, devices=2)
        assert np.array_equal(made["y"], expected)
