"""What is about memory, order and shapes inside a session: Barrier, Start/Wait, in place."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxpar_runtime.collectives import OpCounter, Rank
from tests.children import with_tests
from tests.runtime.collectives.teams import Team, feed, group_of, run_text, session

COLLECTIVES = {
    "AllReduce": 'reduction="max"',
    "AllGather": "axis=1",
    "ReduceScatter": 'axis=0, reduction="sum"',
    "AllToAll": "split_axis=0, concat_axis=1",
    "Broadcast": "root=0",
    "Permute": "pairs=[0, 0]",
}


def test_barrier_passes_its_first_input_through(team: Team) -> None:
    text = """g (float[n] x, int64[k] i, bool[b] f, double s) =>
      (float[n] y, int64[k] j, bool[b] h, double t) {
        y = onnxpar.Barrier (x, i, f, s)
        j = onnxpar.Barrier (i, s)
        h = onnxpar.Barrier (f, x, i)
        t = onnxpar.Barrier (s) }"""
    inputs = {
        "x": np.arange(5, dtype=np.float32),
        "i": np.arange(3),
        "f": np.array([True, False]),
        "s": np.array(2.5),
    }

    def act(rank: Rank) -> None:
        got = run_text(rank, text, **inputs)
        for y, x in zip(got, inputs.values(), strict=True):
            assert y.dtype == x.dtype and y.shape == x.shape
            np.testing.assert_array_equal(y, x)

    team.run(act)


@pytest.mark.provider_kernels
def test_a_clone_behind_a_barrier_is_not_merged(team: Team, tmp_path: Path) -> None:
    """onnxruntime merges equal nodes; recomputed ones must survive it."""
    text = """g (float[n] x) => (float[n] y) {
        a = Exp (x)
        b = onnxpar.Barrier (x)
        c = Exp (b)
        y = Add (a, c) }"""

    def act(rank: Rank) -> None:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{rank.index}.onnx")
        sess = session(rank, text, options)
        assert feed(sess, {"x": np.zeros(3, np.float32)})[0].tolist() == [2.0] * 3
        optimized = onnx.load(options.optimized_model_filepath)
        assert [n.op_type for n in optimized.graph.node].count("Exp") == 2

    team.run(act)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_start_and_wait_equal_the_collective(team: Team, op: str) -> None:
    n = team.size
    attributes = COLLECTIVES[op] + f", group={list(range(n))}"
    text = f"""g (float[a, b] x) => (float[c, d] y, float[e, f] z) {{
        y, t = onnxpar.{op} <{attributes}> (x)
        h, u = onnxpar.Start <op="{op}", {attributes}> (x, t)
        z = onnxpar.Wait <op="{op}", {attributes}> (h, x) }}"""

    def act(rank: Rank) -> None:
        sess = session(rank, text)
        rng = np.random.default_rng(rank.index)
        for rows in (4, 8, 8, 8):  # sizes may change from run to run
            y, z = feed(sess, {"x": rng.standard_normal((rows, 3)).astype(np.float32)})
            np.testing.assert_array_equal(y, z)

    team.run(act)


@pytest.mark.provider_kernels
def test_background_and_foreground_do_not_meet(team: Team) -> None:
    """Several collectives in flight, waited for out of order, others of their group between."""
    everyone = list(range(team.size))
    text = f"""g (float[n] x) => (float[n] s1, float[m] s2, float[n] f1, float[n] f2) {{
        two = Constant <value_float=2.0> ()
        x2 = Mul (x, two)
        h1, t1 = onnxpar.Start <op="AllReduce", group={everyone}> (x)
        f1, t2 = onnxpar.AllReduce <reduction="max", group={everyone}> (x, t1)
        h2, t3 = onnxpar.Start <op="AllGather", axis=0, group={everyone}> (x2, t2)
        f2, t4 = onnxpar.AllReduce <reduction="min", group={everyone}> (x2, t3)
        s2 = onnxpar.Wait <op="AllGather", axis=0, group={everyone}> (h2, x2)
        s1 = onnxpar.Wait <op="AllReduce", group={everyone}> (h1, x) }}"""
    n = team.size

    def act(rank: Rank) -> None:
        rank.reset_counters()
        sess = session(rank, text)
        for _ in range(20):
            s1, s2, f1, f2 = feed(sess, {"x": np.full(1000, rank.index + 1.0, np.float32)})
            assert (s1 == n * (n + 1) / 2).all() and (f1 == n).all() and (f2 == 2).all()
            np.testing.assert_array_equal(s2, np.repeat(2.0 * (np.arange(n) + 1), 1000))
        moved = 2 * 4000 * (n - 1) // n
        assert rank.counters() == {
            "AllReduce": OpCounter(60, 60 * moved),
            "AllGather": OpCounter(20, 20 * 4000 * (n - 1)),
        }

    team.run(act)


def test_memory_of_a_start_may_be_that_of_another_in_the_next_run(team: Team) -> None:
    """In each second run, another value takes the memory that the first result had before."""
    text = """g (float[n] x, float[m] y) => (float a, float b, float c) {
        z = Exp (y)
        p, t = onnxpar.Start <op="AllReduce"> (x)
        q, u = onnxpar.Start <op="AllReduce"> (x, t)
        v = onnxpar.Wait <op="AllReduce"> (p, x)
        w = onnxpar.Wait <op="AllReduce"> (q, x)
        a = ReduceMax <keepdims=0> (v)
        b = ReduceMin <keepdims=0> (w)
        c = ReduceMin <keepdims=0> (z) }"""

    def act(rank: Rank) -> None:
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = options.enable_cpu_mem_arena = False
        sess = session(rank, text, options)
        for step in range(8):
            x = np.full(2000, 1.0, np.float32)
            y = np.zeros(70000 if step % 2 else 1, np.float32)
            found = [array.item() for array in feed(sess, {"x": x, "y": y})]
            assert found == [team.size, team.size, 1]

    team.run(act)


def test_a_result_is_waited_for_once(team: Team) -> None:
    text = """g (float[n] x) => (float[n] y, float[n] z) {
        h, t = onnxpar.Start <op="AllReduce"> (x)
        y = onnxpar.Wait <op="AllReduce"> (h, x)
        z = onnxpar.Wait <op="AllReduce"> (h, x) }"""

    def act(rank: Rank) -> None:
        with pytest.raises(Exception, match=f"rank {rank.index}: Wait .*not the result of a Start"):
            run_text(rank, text, x=np.ones(3, np.float32))

    team.run(act)


CHAIN = """
import sys
import numpy as np, onnxruntime
from tests.runtime.collectives.teams import HEADER, onnx
from onnxpar_runtime.collectives import World

links, count = 4, 1 << 20
nodes = "".join(f"a{i + 1} = {sys.argv[1]} (a{i}) " for i in range(links))
nodes += f"y = ReduceMax <keepdims=0> (a{links})"
text = f"g (float[n] x) => (float y) {{ a0 = Neg (x) {nodes} }}"
info = onnxruntime.OrtMemoryInfo(
    "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT)
# Room for one buffer and a half; a chain that is not in place needs two.
arena = onnxruntime.OrtArenaCfg({"max_mem": count * 6, "arena_extend_strategy": 1})
onnxruntime.create_and_register_allocator(info, arena)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_mem_pattern = False
options.log_severity_level = 4
options.add_session_config_entry("session.use_env_allocators", "1")
with World.threads(1) as world:
    world.rank(0).register(options)
    model = onnx.parser.parse_model(HEADER + text)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    print(session.run(None, {"x": np.full(count, 3, np.float32)})[0])
"""


@pytest.mark.threads_only
@pytest.mark.parametrize(
    ("op", "in_place"),
    [
        ("onnxpar.AllReduce", True),
        ("onnxpar.Broadcast <root=0>", True),
        ("onnxpar.Barrier", True),
        ("onnxpar.Permute <pairs=[0, 0]>", False),
    ],
)
def test_what_works_in_place(op: str, in_place: bool) -> None:
    """Under an arena with room for a buffer and a half, which what is not in place exceeds."""
    result = subprocess.run(
        [sys.executable, "-c", CHAIN, op],
        capture_output=True,
        text=True,
        timeout=60,
        env=with_tests(os.environ),
    )
    assert (result.returncode == 0) == in_place, result.stderr
    assert "-3.0" in result.stdout if in_place else "memory" in result.stderr


@pytest.mark.provider_kernels
def test_an_input_that_is_read_later_is_not_overwritten(team: Team) -> None:
    text = """g (float[n] x) => (float[n] y, float[n] z) {
        a = Neg (x)
        y, t = onnxpar.AllReduce <reduction="sum"> (a)
        b, u = onnxpar.Broadcast <root=0> (a, t)
        z = Sub (a, b) }"""

    def act(rank: Rank) -> None:
        x = np.full(100, rank.index + 1.0, np.float32)
        y, z = run_text(rank, text, x=x)
        np.testing.assert_array_equal(y, np.full(100, -team.size * (team.size + 1) / 2))
        np.testing.assert_array_equal(z, 1 - x)
        assert (x == rank.index + 1).all(), "a graph input was overwritten"

    team.run(act)


def test_shapes_are_inferred_and_kept_symbolic(team: Team) -> None:
    n = team.size
    text = f"""g (float[batch, {4 * n}] x) => (float[r, c] y, float[p, q] z) {{
        y, t = onnxpar.AllGather <axis=1> (x)
        z, u = onnxpar.ReduceScatter <axis=1> (x, t) }}"""

    def act(rank: Rank) -> None:
        sess = session(rank, text)
        y, z = feed(sess, {"x": np.ones((3, 4 * n), np.float32)})
        assert y.shape == (3, 4 * n * n) and z.shape == (3, 4)

    team.run(act)


@pytest.mark.provider_kernels
def test_a_rank_that_inference_does_not_know(team: Team) -> None:
    """The input of the collective comes out of a Reshape whose target is only known at run time."""
    text = """g (float[n] x, int64[r] s) => (float[a, b] y) {
        v = Reshape (x, s)
        w, t = onnxpar.AllGather <axis=1> (v)
        y = Relu (w) }"""

    def act(rank: Rank) -> None:
        x = np.arange(6, dtype=np.float32)
        got = run_text(rank, text, x=x, s=np.array([2, 3]))[0]
        np.testing.assert_array_equal(got, np.tile(x.reshape(2, 3), team.size))

    team.run(act)


@pytest.mark.provider_kernels
def test_a_collective_in_a_branch(team: Team) -> None:
    text = """g (bool c, float[n] x) => (float[n] y) {
        y = If (c) <
          then_branch = p () => (float[n] a) { a, t = onnxpar.AllReduce (x) },
          else_branch = q () => (float[n] b) { b = Neg (x) } > }"""

    def act(rank: Rank) -> None:
        sess = session(rank, text)
        x = np.ones(4, np.float32)
        assert (feed(sess, {"c": np.array(True), "x": x})[0] == team.size).all()
        assert (feed(sess, {"c": np.array(False), "x": x})[0] == -1).all()

    team.run(act)


def test_counters_count_what_the_formulas_say(team: Team) -> None:
    n = team.size
    groups = [[0, 1], [2, 3]] if n == 4 else [list(range(n))]
    g = len(groups[0])

    def act(rank: Rank) -> None:
        rank.reset_counters()
        group = group_of(groups, rank)
        pairs = [group[0], group[-1]]
        # Graph outputs, all of them: onnxruntime runs a float16 node on the CPU in float32 where it
        # finds no float16 neighbours, and then more bytes move.
        outputs = ", ".join(f"float16[a{i}, b{i}] y{i}" for i in range(6))
        text = f"""g (float16[a, b] x) => ({outputs}) {{
            y0, t0 = onnxpar.AllReduce <group={group}> (x)
            y1, t1 = onnxpar.AllGather <axis=0, group={group}> (x, t0)
            y2, t2 = onnxpar.ReduceScatter <axis=0, group={group}> (x, t1)
            y3, t3 = onnxpar.AllToAll <split_axis=0, concat_axis=1, group={group}> (x, t2)
            y4, t4 = onnxpar.Broadcast <root={group[0]}, group={group}> (x, t3)
            y5, t5 = onnxpar.Permute <pairs={pairs}, group={group}> (x, t4) }}"""
        size = 8 * 5 * 2
        run_text(rank, text, x=np.ones((8, 5), np.float16))
        sends = g > 1 and rank.index == group[0]
        assert {k: v.bytes for k, v in rank.counters().items()} == {
            "AllReduce": 2 * size * (g - 1) // g,
            "AllGather": size * (g - 1),
            "ReduceScatter": size * (g - 1) // g,
            "AllToAll": size * (g - 1) // g,
            "Broadcast": size * (g - 1) // g,
            "Permute": size if sends else 0,
        }
        assert {v.calls for v in rank.counters().values()} == {1}
        rank.reset_counters()
        assert rank.counters() == {}

    team.run(act)
