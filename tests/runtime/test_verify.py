"""The comparison finds differences, and reports none where there are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_runtime.errors import DirectoryError, InputError, LaunchError, SymbolValueError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.cases import default_cases
from onnxpar_runtime.verify.compare import verify
from onnxpar_runtime.verify.findings import VerifyOptions, difference_of
from onnxpar_runtime.verify.own_node import OwnNode
from onnxpar_runtime.verify.random_feeds import Span, drawn_feeds, index_spans
from onnxpar_runtime.verify.references import ModelReference
from tests.runtime import hand_made

DOUBLE = (
    "g (float[batch, 3] x) => (float[batch, 3] y) {"
    "  s = Shape<start: int = 0, end: int = 1>(x)  b = Cast<to: int = 1>(s)"
    "  t = Add(x, x)  y = Add(t, b) }"
)
SUM = (
    "g (float[batch, 3] x) => (float[1, 3] y) {"
    "  axes = Constant<value_ints = [0]>()  y = ReduceSum<keepdims: int = 1>(x, axes) }"
)


def edit(directory: Path, old: str, new: str) -> Path:
    path = directory / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return directory


def test_holds(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE)
    cases = verify(hand_made.data_parallel(tmp_path / "a", 3), model)
    assert [c.symbols["batch"] for c in cases] == [6, 5, 1]
    assert all(c.ok and c.max_abs == 0 and c.bytes_counted == c.bytes_expected == 0 for c in cases)


def test_a_file_that_has_changed_is_found(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE)
    directory = hand_made.data_parallel(tmp_path / "a")
    path = directory / "rank0001.model.onnx"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Add", b"Sub", 1))
    with pytest.raises(
        DirectoryError,
        match=r"rank0001\.model\.onnx: its content has changed: "
        r"expected SHA-256",
    ):
        verify(directory, model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_counted(tmp_path: Path, ranks: int) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", SUM)
    directory = hand_made.reduced(tmp_path / "a", ranks)
    for case in verify(directory, model, [{"batch": 5}, {"batch": 1}]):
        assert case.ok, case.problems
        # Three float32 all-reduced by a ring: 2·12·(g-1)/g bytes.
        assert case.bytes_expected == case.bytes_counted == 2 * 12 * (ranks - 1) // ranks
    rounded = edit(directory, f"2*12*{ranks - 1}/{ranks}", f"2*12*{ranks - 1}//{ranks} + 1")
    assert not verify(rounded, model, [{"batch": 5}])[0].ok
    directory = hand_made.reduced(tmp_path / "b", ranks)
    wrong = edit(directory, f"2*12*{ranks - 1}/{ranks}", f"12*{ranks - 1}/{ranks}")
    case = verify(wrong, model, [{"batch": 5}])[0]
    assert not case.ok
    assert case.problems[0].startswith("AllReduce on rank 0: expected ")


def test_a_wrong_program_is_found(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE.replace("Add(x, x)", "Mul(x, x)"))
    case = verify(hand_made.data_parallel(tmp_path / "a"), model, [{"batch": 3}])[0]
    assert not case.ok and case.worst == "y" and case.max_rel > 1e-3
    assert "output 'y': expected a difference of at most" in case.problems[0]
    loose = VerifyOptions(rtol=0.0, atol=1e3)
    assert verify(hand_made.data_parallel(tmp_path / "a"), model, [{"batch": 3}], None, loose)[0].ok


def test_tolerance_is_relative_to_the_largest_magnitude(tmp_path: Path) -> None:
    off = DOUBLE.replace(
        "y = Add(t, b)", "c = Constant<value_float = 1.00001>()  u = Add(t, b)  y = Mul(u, c)"
    )
    model = hand_made.undivided(tmp_path / "m.onnx", off)
    directory = hand_made.data_parallel(tmp_path / "a")
    case = verify(directory, model, [{"batch": 4}], None, VerifyOptions(rtol=2e-5))[0]
    # One rounding of the factor (1.00001 is 1.0000100136) and one of the product, 6e-8 each.
    assert case.ok and case.max_rel == pytest.approx(1e-5, rel=0.02)
    assert not verify(directory, model, [{"batch": 4}], None, VerifyOptions(rtol=5e-6))[0].ok


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ({}, [8, 5, 1]),
        ({"divisor": 4}, [8, 4, 12]),
        ({"divisor": 2, "remainder": 1}, [5, 3, 7]),
        ({"max": 3}, [3, 1, 2]),
    ],
)
def test_default_cases(tmp_path: Path, symbol: dict[str, Any], expected: list[int]) -> None:
    """On four ranks: an even value, an uneven one and the smallest, if the symbol admits them."""
    split = [[("batch", [0, 1])], [(3, [])]]
    directory = hand_made.write(
        tmp_path / "a",
        ["g (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"] * 4,
        atoms=[2, 2],
        inputs=[hand_made.tensor("x", "float32", ["batch", 3], split)],
        outputs=[hand_made.tensor("y", "float32", ["batch", 3], split)],
        symbols={"batch": symbol},
    )
    manifest = Manifest.load(directory)
    found = [c["batch"] for c in default_cases(manifest, manifest.program("model"))]
    assert found == expected


def test_integers_stay_in_range(tmp_path: Path) -> None:
    """Indices go up to the table's size, however they are computed; a mask has zeros and ones."""
    text = (
        "g (int64[n] ids, int32[n] small, int64[n] mask) => (float[n] y) {"
        "  shape = Constant<value_ints = [37]>()  table = ConstantOfShape(shape)"
        "  five = Constant<value_ints = [5]>()  short = ConstantOfShape(five)"
        "  a = Gather(table, ids)  two = Constant<value_int = 2>()  wide = Cast<to: int = 7>(small)"
        "  twice = Mul(wide, two)  b = Gather(short, twice)  m = Cast<to: int = 1>(mask)"
        "  s = Add(a, b)  y = Mul(s, m) }"
    )
    replicated = [[("n", [])]]
    directory = hand_made.write(
        tmp_path / "a",
        [text] * 2,
        atoms=[2],
        inputs=[
            hand_made.tensor("ids", "int64", ["n"], replicated),
            hand_made.tensor("small", "int32", ["n"], replicated),
            hand_made.tensor("mask", "int64", ["n"], replicated),
        ],
        outputs=[hand_made.tensor("y", "float32", ["n"], replicated)],
    )
    model = hand_made.undivided(tmp_path / "m.onnx", text)
    program = Manifest.load(directory).program("model")
    for known in ({}, {"ids": Span(0, 37), "small": Span(0, 4), "mask": Span(0, None)}):
        spans = index_spans(ModelReference(model), program, {"n": 1}, known)
        assert {n: (s.low, s.high) for n, s in spans.items()} == {
            "ids": (0, 37), "small": (0, 3), "mask": (0, 2),
        }  # fmt: skip
    assert all(c.ok for c in verify(directory, model))


# `mask` is counted as a decoder counts the tokens of its cache: none is refused, and so is what the
# cache has no room for. A cache of fewer than eight is too short.
CACHE = (
    "g (float[past] cache, int64[total] mask, int64[seq] ids) => (float[seq] y) {"
    "  axes = Constant<value_ints = [0]>()  count = ReduceSum<keepdims: int = 0>(mask, axes)"
    "  room = Shape(cache)  row = Squeeze(room)  below = Sub(count, row)"
    "  one = Constant<value_int = 1>()  last = Sub(below, one)  a = Gather(cache, last)"
    "  seven = Constant<value_int = 7>()  b = Gather(cache, seven)  c = Gather(cache, ids)"
    "  s = Add(a, b)  y = Add(c, s) }"
)


def cached(out: Path) -> Path:
    replicated = {n: [[(n, [])]] for n in ("past", "total", "seq")}
    return hand_made.write(
        out,
        [CACHE] * 2,
        atoms=[2],
        inputs=[
            hand_made.tensor("cache", "float32", ["past"], replicated["past"]),
            hand_made.tensor("mask", "int64", ["total"], replicated["total"]),
            hand_made.tensor("ids", "int64", ["seq"], replicated["seq"]),
        ],
        outputs=[hand_made.tensor("y", "float32", ["seq"], replicated["seq"])],
    )


def test_integers_stay_in_the_range_of_each_case(tmp_path: Path) -> None:
    """The range depends on the symbols; at their smallest values it is empty."""
    model = hand_made.undivided(tmp_path / "m.onnx", CACHE)
    directory = cached(tmp_path / "a")
    program = Manifest.load(directory).program("model")
    reference = ModelReference(model)
    spans = index_spans(reference, program, {"past": 12, "total": 4, "seq": 3})
    # 4 of up to 6 are 24, twice the room: the last element, counted from either end.
    assert spans == {"mask": Span(1, 7), "ids": Span(0, 12)}
    spans = index_spans(reference, program, {"past": 12, "total": 24, "seq": 3}, spans)
    assert spans == {"mask": Span(1, 2), "ids": Span(0, 12)}
    cases = [{"past": 12, "total": 24, "seq": 3}, {"past": 8, "total": 1, "seq": 9}]
    found = verify(directory, model, cases)
    assert [c.symbols for c in found] == cases and all(c.ok for c in found)
    with pytest.raises(InputError, match=r"model fails at past=1, total=24, seq=3: .*idx"):
        verify(directory, model, [{"past": 1, "total": 24, "seq": 3}])


def test_bad_custom_ops_libraries_are_named(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE)
    graph = hand_made.data_parallel(tmp_path / "a") / "rank0000.model.onnx"
    (tmp_path / "bad.so").write_text("no library")
    for name, message in (("none.so", "no such file"), ("a", "no such file"), ("bad.so", ".+")):
        libraries = [tmp_path / name]
        with pytest.raises(LaunchError, match=rf"custom-op library .*{name}: {message}"):
            ModelReference(model, libraries)
        with pytest.raises(LaunchError, match=rf"custom-op library .*{name}: {message}"):
            OwnNode(graph, ["y"], ["x"], libraries)


def test_zeros_are_drawn_where_not_all_may_be_zeros(tmp_path: Path) -> None:
    reference = ModelReference(hand_made.undivided(tmp_path / "m.onnx", CACHE))
    program = Manifest.load(cached(tmp_path / "a")).program("model")
    rng = np.random.default_rng(0)
    for total, zeros in ((24, True), (1, False)):
        values = {"past": 12, "total": total, "seq": 3}
        spans = {"mask": Span(1, 2), "ids": Span(0, 12)}
        masks = [drawn_feeds(reference, program, values, spans, rng)["mask"] for _ in range(20)]
        assert all(mask.sum() for mask in masks) and zeros == any((m == 0).any() for m in masks)


def test_size_inputs_are_not_guessed(tmp_path: Path) -> None:
    text = "g (int64[1] n) => (float[n] y) { y = ConstantOfShape(n) }"
    directory = hand_made.write(
        tmp_path / "a",
        [text],
        atoms=[],
        inputs=[hand_made.tensor("n", "int64", [1], [[(1, [])]])],
        outputs=[hand_made.tensor("y", "float32", ["k"], [[("k", [])]])],
    )
    model = hand_made.undivided(tmp_path / "m.onnx", text)
    with pytest.raises(InputError, match=r"'n' determines the shape of an output.*--inputs"):
        verify(directory, model)
    assert verify(directory, model, [], {"n": np.array([4])})[0].ok


def test_given_inputs(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE)
    directory = hand_made.data_parallel(tmp_path / "a")
    feeds = {"x": np.ones((7, 3), np.float32)}
    (case,) = verify(directory, model, [], feeds)
    assert case.ok and case.symbols == {"batch": 7}
    with pytest.raises(InputError, match="expected inputs or symbols"):
        verify(directory, model, [{"batch": 7}], feeds)


def test_a_directory_of_one_device_is_a_reference(tmp_path: Path) -> None:
    one = hand_made.write(
        tmp_path / "one",
        [DOUBLE],
        atoms=[],
        inputs=[hand_made.tensor("x", "float32", ["batch", 3], [[("batch", [])], [(3, [])]])],
        outputs=[hand_made.tensor("y", "float32", ["batch", 3], [[("batch", [])], [(3, [])]])],
    )
    assert all(c.ok for c in verify(hand_made.data_parallel(tmp_path / "a"), one))
    with pytest.raises(DirectoryError, match="a directory for 1 device, got 2 devices"):
        verify(one, hand_made.data_parallel(tmp_path / "a"))


def test_bfloat16_on_both_sides(tmp_path: Path) -> None:
    text = "g (bfloat16[n] x) => (bfloat16[n] y) { y = Identity(x) }"
    dims = [[("n", [0])]]
    directory = hand_made.write(
        tmp_path / "a",
        [text] * 2,
        atoms=[2],
        inputs=[hand_made.tensor("x", "bfloat16", ["n"], dims)],
        outputs=[hand_made.tensor("y", "bfloat16", ["n"], dims)],
    )
    cases = verify(directory, hand_made.undivided(tmp_path / "m.onnx", text))
    assert len(cases) == 3 and all(c.ok and c.max_abs == 0 for c in cases)


def test_random_numbers_need_a_reference_with_the_same_counters(tmp_path: Path) -> None:
    """The output is `x + step`, so both sides must have the same counters."""
    text = (
        "g (float[n] x, int64[1] step) => (float[n] y)"
        " { s = Cast<to: int = 1>(step)  y = Add(x, s) }"
    )

    def drawing(name: str, ranks: int) -> Path:
        dims = [[("n", [0] if ranks > 1 else [])]]
        return hand_made.write(
            tmp_path / name,
            [text] * ranks,
            atoms=[ranks] if ranks > 1 else [],
            inputs=[hand_made.tensor("x", "float32", ["n"], dims)],
            outputs=[hand_made.tensor("y", "float32", ["n"], dims)],
            system_inputs=[{"name": "step", "kind": "counter", "counter": "step"}],
        )

    model = hand_made.undivided(tmp_path / "m.onnx", text)
    with pytest.raises(InputError, match=r"draws random numbers.*shard --devices 1"):
        verify(drawing("two", 2), model)
    assert all(c.ok for c in verify(drawing("two", 2), drawing("one", 1)))


def test_wrong_requests(tmp_path: Path) -> None:
    model = hand_made.undivided(tmp_path / "m.onnx", DOUBLE)
    directory = hand_made.data_parallel(tmp_path / "a", 2, {"divisor": 2})
    with pytest.raises(
        SymbolValueError, match=r"expected a symbol of the inputs, one of batch, got 'seq'"
    ):
        verify(directory, model, [{"seq": 2}])
    with pytest.raises(SymbolValueError, match="'batch' is 3, which violates"):
        verify(directory, model, [{"batch": 3}])
    with pytest.raises(InputError, match="no such file"):
        verify(directory, tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(DirectoryError, match="onnxruntime cannot load it"):
        verify(directory, tmp_path / "text.onnx")
    other = hand_made.undivided(tmp_path / "o.onnx", DOUBLE.replace("y", "z"))
    with pytest.raises(InputError, match=r"the model has no output 'y'; it has z"):
        verify(directory, other)
    another = hand_made.undivided(tmp_path / "a.onnx", DOUBLE.replace("x", "w"))
    with pytest.raises(
        InputError, match=r"a\.onnx: expected a model with the inputs \['x'\], got \['w'\]"
    ):
        verify(directory, another)
    narrow = hand_made.undivided(tmp_path / "n.onnx", DOUBLE.replace("[batch, 3] x", "[4, 3] x"))
    with pytest.raises(InputError, match="the undivided model fails at batch=2"):
        verify(directory, narrow, [{"batch": 2}])


@pytest.mark.parametrize(
    ("a", "b", "difference", "same"),
    [
        ([1.0, -4.0], [1.5, -4.0], 0.5, True),
        ([np.inf, np.nan, 1], [np.inf, np.nan, 1], 0.0, True),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf, False),
        ([np.nan, 1.0], [0.0, 1.0], np.inf, False),
        ([0.0, 1.0], [np.inf, 1.0], np.inf, False),
        ([1.0], [1.0, 1.0], np.inf, False),
        ([], [], 0.0, True),
    ],
)
def test_difference(a: list[float], b: list[float], difference: float, same: bool) -> None:
    found = difference_of(np.array(a), np.array(b))
    assert (found[0], found[2]) == (difference, same)


def test_difference_of_large_integers() -> None:
    # Neighbours beyond 2^53 are one number in float64, but are not equal.
    assert difference_of(np.array([2**60]), np.array([2**60 + 1]))[0] == 1.0
