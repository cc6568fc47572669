"""One rank's session, and all ranks in one process over the `threads` transport."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxpar_runtime.collectives import World
from onnxpar_runtime.errors import (
    DirectoryError,
    InputError,
    LaunchError,
    OnnxparRuntimeError,
    RankError,
    SymbolValueError,
)
from onnxpar_runtime.group import ThreadsGroup, run_threads
from onnxpar_runtime.session import Session
from tests.runtime import hand_made

SECONDS = 10.0
"""The time within which all ranks must end after one has failed."""


def rows(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(count).standard_normal((count, 3), dtype=np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_arrays_of_any_size(tmp_path: Path, ranks: int) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", ranks)
    if ranks == 1:
        directory = hand_made.write(
            tmp_path / "one",
            ["g (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"],
            atoms=[],
            inputs=[hand_made.tensor("x", "float32", ["b", 3], [[("b", [])], [(3, [])]])],
            outputs=[hand_made.tensor("y", "float32", ["b", 3], [[("b", [])], [(3, [])]])],
        )
    with ThreadsGroup(directory) as group:
        for batch in (1, 2, 3, 5, 6, 7, 7, 2, 8, 9, 10, 11, 12, 13):  # more than bindings are kept
            x = rows(batch)
            y = group.run_global({"x": x})["y"]
            # Each element is one float32 addition of exact operands, so equality is exact.
            np.testing.assert_array_equal(y, x + x + np.float32(batch if ranks > 1 else 0))


def test_results_do_not_change_with_the_next_run(tmp_path: Path) -> None:
    with ThreadsGroup(hand_made.data_parallel(tmp_path / "a")) as group:
        first = group.run_global({"x": rows(4)})["y"]
        kept = first.copy()
        group.run_global({"x": rows(4) + 1})
        np.testing.assert_array_equal(first, kept)


def test_reduction_over_uneven_parts(tmp_path: Path) -> None:
    directory = hand_made.reduced(tmp_path / "a", 3)
    for batch in (1, 3, 4):
        x = np.round(rows(batch) * 8)  # small integers: float32 sums of them are exact
        y = run_threads(directory, {"x": x})["y"]
        np.testing.assert_array_equal(y, x.sum(0, keepdims=True))


def test_local_arrays(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 2, {"divisor": 2})
    x = rows(6)
    with ThreadsGroup(directory) as group:
        parts = group.each(lambda r: group.members[r].run({"x": x[3 * r : 3 * r + 3]})["y"])
        np.testing.assert_array_equal(np.concatenate(parts), x + x + 6)


def test_local_arrays_of_an_uneven_split_need_the_symbol(tmp_path: Path) -> None:
    with ThreadsGroup(hand_made.data_parallel(tmp_path / "a")) as group:
        x = rows(2)
        with pytest.raises(SymbolValueError, match=r"'batch' has no value: .* pass `symbols`"):
            group.on_each(lambda member: member.run({"x": x}))
        result = group.on_each(lambda member: member.run({"x": x}, {"batch": 3})["y"])
        np.testing.assert_array_equal(result[1], x + x + 3)
        with pytest.raises(InputError, match=r"expected the local shape \(3, 3\), got \(2, 3\)"):
            group.on_each(lambda member: member.run({"x": x}, {"batch": 5}))


def fused_dim(folder: Path, *more: str) -> Path:
    """A dim merged from (batch, 4 heads), sharded by batch outside and by heads inside.

    Args:
        folder: Where to write the directory.
        more: Names of further inputs [batch].
    """
    dims = [[("batch", [0]), (4, [1])]]
    inputs = "".join(f"float[b] {name}, " for name in more)
    text = (
        f"g (float[n] x, {inputs}int64[1] c0, int64[1] c1) => (float[n] y) {{"
        "  two = Constant<value_ints = [2]>()  t = Mul(c0, two)  i = Add(t, c1)"
        "  f = Cast<to: int = 1>(i)  y = Add(x, f) }"
    )
    x, y = (hand_made.tensor(name, "float32", ["4*batch"], dims) for name in ("x", "y"))
    batches = [hand_made.tensor(n, "float32", ["batch"], [[("batch", [])]]) for n in more]
    return hand_made.write(
        folder,
        [text] * 4,
        atoms=[2, 2],
        inputs=[x, *batches],
        outputs=[y],
        symbols={"batch": {}},
        system_inputs=[
            {"name": f"c{atom}", "kind": "coordinate", "atom": atom} for atom in range(2)
        ],
    )


def test_fused_dim_without_its_symbol(tmp_path: Path) -> None:
    # No dim is the batch alone, so its value is unknown.
    directory = fused_dim(tmp_path / "a")
    with ThreadsGroup(directory) as group, pytest.raises(DirectoryError, match="'batch'"):
        group.run_global({"x": np.zeros(12, np.float32)})


def test_fused_dim_with_its_symbol(tmp_path: Path) -> None:
    directory = fused_dim(tmp_path / "a", "s")
    feeds = {"x": np.zeros(12, np.float32), "s": np.zeros(3, np.float32)}
    # Batches 0 and 1 are on coordinate 0 of atom 0, batch 2 on coordinate 1; heads 0, 1 and 2, 3.
    expected = [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]]
    assert run_threads(directory, feeds)["y"].reshape(3, 4).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "code", "numpy_dtype"),
    [
        ("bfloat16", "bfloat16", ml_dtypes.bfloat16),
        ("float16", "float16", np.float16),
        ("float64", "double", np.float64),
        ("int8", "int8", np.int8),
        ("bool", "bool", np.bool_),
    ],
)
def test_element_types(tmp_path: Path, dtype: str, code: str, numpy_dtype: Any) -> None:
    split = [[("batch", [0])]]
    directory = hand_made.write(
        tmp_path / "a",
        [f"g ({code}[n] x) => ({code}[n] y) {{ y = Identity(x) }}"] * 2,
        atoms=[2],
        inputs=[hand_made.tensor("x", dtype, ["batch"], split)],
        outputs=[hand_made.tensor("y", dtype, ["batch"], split)],
    )
    x = np.array([1, 0, 3, 1, 5]).astype(numpy_dtype)
    with ThreadsGroup(directory) as group:
        for _ in range(2):
            y = group.run_global({"x": x})["y"]
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)


def test_output_whose_size_depends_on_data(tmp_path: Path) -> None:
    directory = hand_made.write(
        tmp_path / "a",
        ["g (float[n] x) => (int64[1, k] y) { y = NonZero(x) }"] * 2,
        atoms=[2],
        inputs=[hand_made.tensor("x", "float32", ["n"], [[("n", [])]])],
        outputs=[hand_made.tensor("y", "int64", [1, "k"], [[(1, [])], [("k", [])]])],
    )
    with ThreadsGroup(directory) as group:
        for x in ([0, 1, 2, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 3]):
            y = group.run_global({"x": np.array(x, np.float32)})["y"]
            assert y.tolist() == [np.flatnonzero(x).tolist()]


def test_violated_symbol_on_all_ranks(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 3, {"divisor": 4, "max": 16})
    with ThreadsGroup(directory) as group:
        for batch in (6, 20):
            seen: list[str] = []

            def run(rank: int, batch: int = batch, seen: list[str] = seen) -> None:
                try:
                    group.members[rank].run_global({"x": rows(batch)})
                except SymbolValueError as error:
                    seen.append(str(error))

            group.each(run)
            message = f"'batch' is {batch}, which violates its constraint: 4*N, N >= 1, at most 16"
            assert len(seen) == 3 and all(message in s for s in seen)
        # What all ranks agreed on is no failure of the world: the next batch runs.
        np.testing.assert_array_equal(group.run_global({"x": rows(4)})["y"], 2 * rows(4) + 4)


def test_one_ranks_bad_input_is_reported_by_all(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 3)
    x = rows(6)
    with ThreadsGroup(directory) as group:
        seen: dict[int, str] = {}

        def run(rank: int) -> None:
            part = x[2 * rank : 2 * rank + 2]
            feeds = {"x": part.astype(np.float64) if rank == 1 else part}
            try:
                group.members[rank].run(feeds, {"batch": 6})
            except RankError as error:
                seen[rank] = str(error)
                assert error.exit_code == 2

        group.each(run)
        assert sorted(seen) == [0, 1, 2]
        assert all(
            s.startswith("r1 | input 'x': expected float32, got float64") for s in seen.values()
        )


def test_ranks_that_disagree_about_a_symbol(tmp_path: Path) -> None:
    with (
        ThreadsGroup(hand_made.data_parallel(tmp_path / "a")) as group,
        pytest.raises(
            SymbolValueError, match=r"'batch': expected one value on all ranks.*from 3 to 4"
        ),
    ):
        group.each(lambda r: group.members[r].run({"x": rows(2)}, {"batch": 3 + r}))


def test_a_rank_that_fails_in_the_middle_ends_all(tmp_path: Path) -> None:
    start = time.monotonic()
    with ThreadsGroup(hand_made.failing(tmp_path / "a", 3)) as group:
        with pytest.raises(RankError) as caught:
            group.run_global({"x": rows(1)})
        assert caught.value.rank == 2
        assert "r2 | " in str(caught.value) and "indices" in str(caught.value)
    assert time.monotonic() - start < SECONDS


def test_a_rank_that_raises_between_collectives_ends_all(tmp_path: Path) -> None:
    start = time.monotonic()
    with ThreadsGroup(hand_made.reduced(tmp_path / "a", 3)) as group:

        def run(rank: int) -> object:
            if rank == 1:
                raise ValueError("the disk is full")
            return group.members[rank].run_global({"x": rows(3)})

        with pytest.raises(RankError, match=r"r1 \| ValueError: the disk is full"):
            group.each(run)
    assert time.monotonic() - start < SECONDS


def without_input(directory: Path) -> Path:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"name": "y", "dtype"', '"name": "z", "dtype"'))
    return directory


def broken_graph(directory: Path) -> Path:
    path = directory / "rank0001.model.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    return directory


def unknown_operator(directory: Path) -> Path:
    path = directory / "rank0001.model.onnx"
    model = onnx.load(path, load_external_data=False)
    node = model.graph.node[0]
    node.op_type = "X" * len(node.op_type)  # the manifest has the size of the file
    onnx.save(model, path)
    return directory


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (without_input, DirectoryError, r"outputs \['z'\] are not in the graph"),
        (broken_graph, OnnxparRuntimeError, "rank0001.model.onnx: cannot be read"),
        (unknown_operator, OnnxparRuntimeError, "rank0001.model.onnx: onnxruntime cannot load it"),
    ],
)
def test_graphs_that_do_not_fit(
    tmp_path: Path, damage: Callable[[Path], Path], kind: type[Exception], message: str
) -> None:
    directory = damage(hand_made.data_parallel(tmp_path / "a"))
    with pytest.raises(kind, match=message):
        ThreadsGroup(directory)


def test_wrong_world_and_libraries(tmp_path: Path) -> None:
    directory = hand_made.data_parallel(tmp_path / "a", 3)
    with pytest.raises(LaunchError, match=r"was made for 3 ranks, got 1: .*mpirun -n 3"):
        Session(directory)
    with World.threads(2) as world, pytest.raises(LaunchError, match="for 3 ranks, got 2"):
        Session(directory, rank=world.rank(0))
    with pytest.raises(OnnxparRuntimeError, match=r"custom-op library .*none\.so: no such file"):
        ThreadsGroup(directory, custom_ops=[tmp_path / "none.so"])
    (tmp_path / "bad.so").write_text("no library")
    with pytest.raises(OnnxparRuntimeError, match=r"custom-op library .*bad\.so: "):
        ThreadsGroup(directory, custom_ops=[tmp_path / "bad.so"])


def test_counters_reach_the_graph(tmp_path: Path) -> None:
    names = ("seed", "step", "micro_batch")
    inputs = ", ".join(f"int64[1] {n}" for n in names)
    directory = hand_made.write(
        tmp_path / "a",
        [f"g ({inputs}) => (int64[3] y) {{ y = Concat<axis = 0>({', '.join(names)}) }}"] * 2,
        atoms=[2],
        inputs=[],
        outputs=[hand_made.tensor("y", "int64", [3], [[(3, [])]])],
        system_inputs=[{"name": n, "kind": "counter", "counter": n} for n in names],
    )
    with ThreadsGroup(directory) as group:
        assert group.run_global({})["y"].tolist() == [0, 0, 0]
        for session in group.members:
            session.counters["seed"] = 7
            session.counters["step"] = 1 << 40
        assert group.run_global({})["y"].tolist() == [7, 1 << 40, 0]
