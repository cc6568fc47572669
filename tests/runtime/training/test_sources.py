"""What the texts of `--data` open, for which inputs, and what they are refused for."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sklearn.datasets import load_digits

from onnxpar_format.entries import TensorEntry
from onnxpar_format.expressions import Size
from onnxpar_format.manifest import Loss
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.training.batches import BatchDim, training_data
from onnxpar_runtime.training.images import resize
from onnxpar_runtime.training.sources import (
    Request,
    Samples,
    Stream,
    open_source,
    per_sample,
    places,
    samples,
    stream_of,
)
from tests.runtime.mnist import mnist


def spec(name: str, dtype: str, *shape: Size) -> TensorEntry:
    return TensorEntry(name, dtype, shape, tuple(((size, ()),) for size in shape))


LABELS = spec("labels", "int64", "batch")
IMAGES = spec("x", "float32", "batch", 1, 28, 28)
ONCE = Request(epoch=1, seed=0, batch_size=None, train=True)


def opened(text: str, *specs: TensorEntry, part: str = "train") -> Samples:
    source = open_source(text, specs, "labels", part)
    assert isinstance(source, Samples)
    return source


@pytest.mark.parametrize(
    "shape", [("b", 1, 28, 28), ("b", 784), ("b", 28, 28, 1), ("b", 28, 28), ("b", 64), ("b", 7, 9)]
)
def test_digits_in_the_shape_of_the_input(shape: tuple[Size, ...]) -> None:
    source = opened("digits", spec("x", "float32", *shape), spec("labels", "int64", "b"))
    data = load_digits()
    kept = np.arange(1797) % 5 != 0
    sides = [int(s) for s in shape[1:] if s != 1]
    height, width = sides if len(sides) == 2 else [round(sides[0] ** 0.5)] * 2
    want = resize(data.images[kept].astype(np.float32) / 16, height, width)
    assert source.count == 1437
    assert source.rows["x"].dtype == np.float32
    np.testing.assert_array_equal(source.rows["x"], want.reshape(1437, *shape[1:]))
    np.testing.assert_array_equal(source.rows["labels"], data.target[kept])


def test_digits_have_two_halves() -> None:
    train, test = (opened("digits", IMAGES, LABELS, part=part) for part in ("train", "test"))
    assert (train.count, test.count) == (1437, 360)
    target = load_digits().target
    np.testing.assert_array_equal(test.rows["labels"], target[::5])
    for text, part in (("digits:test", "train"), ("digits:train", "test")):
        count = opened(text, IMAGES, LABELS, part=part).count
        assert count == (360 if text.endswith("test") else 1437)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_digits_in_the_dtypes_of_the_inputs(dtype: str) -> None:
    source = opened("digits:test", spec("x", dtype, "b", 8, 8), spec("labels", "int32", "b"))
    assert source.rows["x"].dtype.name == dtype
    assert source.rows["labels"].dtype == np.int32
    # Sixteenths are exact in all of them.
    np.testing.assert_array_equal(
        source.rows["x"].astype(np.float64) * 16, load_digits().images[::5]
    )


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((spec("x", "float32", "b", 1, 28, 28),), r"one input for images and one for labels"),
        ((IMAGES, spec("labels", "bool", "b")), r"expected an integer or floating input \[batch\]"),
        ((IMAGES, spec("labels", "float32", "b", 2)), r"\(further dims must be 1\), got 'labels'"),
        ((IMAGES, spec("labels", "int64", "b", 10)), "further dims must be 1"),
        (
            (spec("x", "int64", "b", 784), LABELS),
            "expected a floating input for the images .*, got 'x' int64",
        ),
        ((spec("x", "float32", "b", 785), LABELS), "with a square number n, got 'x'"),
        ((spec("x", "float32", "b", 3, 28, 28), LABELS), r"got 'x' \['b', 3, 28, 28\]"),
        ((spec("x", "float32", "b", "h", "w"), LABELS), r"got 'x' \['b', 'h', 'w'\]"),
    ],
)
def test_digits_that_do_not_fit(specs: tuple[TensorEntry, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_source("digits", specs, "labels")


@pytest.mark.parametrize("shape", [("b",), ("b", 1)])
def test_digits_as_numbers(shape: tuple[Size, ...]) -> None:
    source = opened("digits:test", IMAGES, spec("labels", "float32", *shape))
    want = load_digits().target[::5].astype(np.float32)
    np.testing.assert_array_equal(source.rows["labels"], want.reshape(360, *([1] * len(shape[1:]))))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx(tmp_path: Path, ending: str) -> None:
    images, labels = mnist(tmp_path, ending)
    specs = spec("x", "float32", "b", 5, 3), LABELS
    source = opened(f"idx:{tmp_path}", *specs)
    np.testing.assert_array_equal(source.rows["x"], images.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(source.rows["labels"], labels)
    assert opened(f"idx:{tmp_path}", *specs, part="test").count == 4


def test_npz(tmp_path: Path) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.int32)
    mask = np.ones(3, np.float32)
    np.savez(tmp_path / "a.npz", x=x, labels=y, mask=mask)
    specs = spec("x", "float32", "b", 3), spec("mask", "float32", 3), LABELS
    assert per_sample([specs[0], specs[1], spec("labels", "int64", "b")]) == ("x", "labels")
    source = opened(f"npz:{tmp_path / 'a.npz'}", specs[0], specs[1], spec("labels", "int64", "b"))
    batch = source.take(np.array([2, 0]))
    np.testing.assert_array_equal(batch["x"], x[[2, 0]])
    np.testing.assert_array_equal(batch["labels"], [2, 0])
    np.testing.assert_array_equal(batch["mask"], mask)
    assert batch["labels"].dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 3), np.float32)}, r"missing \['labels'\]"),
        ({"x": np.zeros((4, 3)), "labels": np.zeros(4, int)}, "expected float32, got float64"),
        ({"x": np.zeros((4, 3), np.float32), "labels": np.zeros(3, int)}, r"got \[4, 3\]"),
        ({"x": np.zeros((0, 3), np.float32), "labels": np.zeros(0, int)}, "at least one"),
    ],
)
def test_npz_that_does_not_fit(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        opened(
            f"npz:{tmp_path / 'a.npz'}", spec("x", "float32", "b", 3), spec("labels", "int64", "b")
        )


@pytest.mark.parametrize("text", ["", "digits:all", "npz", "npz:", "idx:", "csv", "tables:", ":x"])
def test_unknown_forms(text: str) -> None:
    with pytest.raises(
        InputError, match=r"expected digits\[:train\|:test\], npz:FILE, parquet:FILE"
    ):
        open_source(text, (IMAGES, LABELS), "labels")


IDS, NEXT = spec("ids", "int64", "b", 8), spec("labels", "int64", "b", 8)
COUNTS = Loss("softmax_cross_entropy", "labels", -100, None)


def test_windows_of_a_token_file(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 50).astype(np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    found = opened(f"tokens:{tmp_path / 't.bin'},seq=8", IDS, NEXT)
    assert found.count == 6
    batch = found.take(np.array([5, 0]))
    assert {name: array.dtype.name for name, array in batch.items()} == dict.fromkeys(
        ("ids", "labels"), "int64"
    )
    np.testing.assert_array_equal(batch["ids"], [tokens[40:48], tokens[:8]])
    np.testing.assert_array_equal(batch["labels"], [tokens[41:49], tokens[1:9]])
    tokens.astype(np.uint32).tofile(tmp_path / "t.bin")
    found = opened(f"tokens:{tmp_path / 't.bin'},seq=49,dtype=uint32", IDS, NEXT)
    np.testing.assert_array_equal(found.take(np.array([0]))["labels"], [tokens[1:]])


class Counted(np.ndarray[Any, Any]):
    """An array that adds up the bytes that indices take from it."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        Counted.taken += found.nbytes
        return found


def test_each_rank_reads_its_slice_of_a_sparse_file_of_10_gb(tmp_path: Path) -> None:
    path, size, seq = tmp_path / "t.bin", 10**10, 1024
    with path.open("wb") as stream:
        stream.truncate(size)
    specs = [
        TensorEntry(name, "int64", ("b", seq), ((("b", (0,)),), ((seq, ()),)))
        for name in ("ids", "labels")
    ]
    found = open_source(f"tokens:{path},seq={seq}", specs, "labels")
    assert isinstance(found, Samples)
    assert found.count == (size // 2 - 1) // seq
    source = replace(found, rows={n: a.view(Counted) for n, a in found.rows.items()})
    for rank in range(4):
        Counted.taken = 0
        own = places(specs, (4,), rank, COUNTS, source)
        data = training_data(source, specs, BatchDim("b"), batch=16, own=own)
        (step,) = islice(data.epoch(1, skip=100_000), 1)
        assert step.samples == 16
        # Of 16 windows a rank has 4, as inputs and as labels, of 2 bytes a token.
        assert Counted.taken == 2 * 4 * seq * 2
    # The system reads nothing around it: `rr` is the flag of random reads (proc(5), VmFlags).
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"{path}\n")
    assert "rr" in mapping.partition("VmFlags:")[2].partition("\n")[0].split()
    # With a label to ignore that is a token, each rank counts all labels.
    wanted = replace(COUNTS, ignore_index=0)
    assert set(places(specs, (4,), 0, wanted, source)) == {"ids"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t.bin", "expected tokens:FILE,seq=N"),
        ("t.bin,seq=0", "expected tokens:FILE,seq=N"),
        ("t.bin,seq=8,seq=9", "expected tokens:FILE,seq=N"),
        ("t.bin,seq=8,length=9", "expected tokens:FILE,seq=N"),
        ("t.bin,seq=8,dtype=float32", r"dtype=uint8\|uint16\|uint32"),
        ("none.bin,seq=8", "expected a file of uint16 numbers"),
        (".,seq=8", "expected a file of uint16 numbers"),
        ("odd.bin,seq=8", "expected a file of uint16 numbers"),
        ("t.bin,seq=50", "expected at least 51 tokens, got 50"),
    ],
)
def test_token_files_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.zeros(50, np.uint16).tofile("t.bin")
    Path("odd.bin").write_bytes(bytes(51))
    with pytest.raises(InputError, match=message):
        opened(f"tokens:{text}", IDS, NEXT)


def test_tokens_need_one_input_and_labels(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a program with one integer input for tokens"):
        opened("tokens:t.bin,seq=8", spec("x", "float32", "b", 8), NEXT)


def test_a_part_of_the_samples_is_held_out_by_the_seed() -> None:
    source = samples(
        "--data made", {"x": np.arange(20.0, dtype=np.float32)}, [spec("x", "float32", "b")]
    )
    training, held_out = source.validation(0.25, seed=3)
    parts = [part.take(np.arange(part.count))["x"] for part in (training, held_out)]
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(np.concatenate(parts)) == list(range(20))
    again = source.validation(0.25, seed=3)[1]
    np.testing.assert_array_equal(again.take(np.arange(5))["x"], parts[1])
    other = source.validation(0.25, seed=4)[1]
    assert (other.take(np.arange(5))["x"] != parts[1]).any()
    for fraction in (0.0, 0.01, 0.99, -1.0, 2.0):
        with pytest.raises(InputError, match="expected at least one of the 20 samples"):
            source.validation(fraction, seed=3)
    with pytest.raises(InputError, match="without a test split"):
        training.validation(0.25, seed=3)


def test_batches_of_an_iterable() -> None:
    class Sampler:
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader(list[Any]):
        sampler = Sampler()

    x, y = np.zeros((2, 8), np.int64), [[1] * 8] * 2
    loader = Loader([(x, y), [x, y], {"ids": x, "labels": y}])
    found = stream_of("data Loader", loader, [IDS, NEXT])
    for epoch in (1, 2):
        for batch in found.open(Request(epoch, 0, None, True)):
            assert isinstance(batch, dict)
            np.testing.assert_array_equal(batch["labels"], y)
            assert batch["ids"] is x
    assert Sampler.epochs == [0, 1]
    for wrong in (x, (x,), 3):
        with pytest.raises(InputError, match=r"batch 1: expected a dict, or a sequence of arrays"):
            list(stream_of("data Loader", [wrong], [IDS, NEXT]).open(Request(1, 0, None, True)))


def stream(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, name: str) -> Stream:
    """The function `batches` of a module of that name, whose text is `body`."""
    (folder / f"{name}.py").write_text(body)
    monkeypatch.chdir(folder)
    # As on a new interpreter, which mpirun has started with a script.
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    source = open_source(f"{name}:batches", (IMAGES, LABELS), "labels")
    assert isinstance(source, Stream)
    return source


def test_a_function_gets_what_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "def batches(epoch, train):\n    return iter([{'x': epoch, 'train': train}])\n"
    source = stream(tmp_path, monkeypatch, body, "asks_for_some")
    request = Request(epoch=7, seed=1, batch_size=2, train=False)
    assert list(source.open(request)) == [{"x": 7, "train": False}]
    body = "def batches(**given):\n    yield given\n"
    source = stream(tmp_path, monkeypatch, body, "asks_for_all")
    assert list(source.open(request)) == [{"epoch": 7, "seed": 1, "batch_size": 2, "train": False}]


def test_a_batch_for_each_data_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stream(
        tmp_path, monkeypatch, "def batches():\n    yield {'x': 1}, {'x': 2}\n", "two_ranks"
    )
    assert list(source.open(ONCE)) == [({"x": 1}, {"x": 2})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def batches():\n    return 5\n", "expected an iterable of dicts, got 5"),
        ("def batches():\n    yield [1]\n", "batch 1: expected a dict of arrays, or a tuple"),
        ("def batches():\n    yield ()\n", "batch 1: expected a dict"),
    ],
)
def test_a_function_that_gives_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    name = f"gives_{abs(hash(body))}"
    source = stream(tmp_path, monkeypatch, body, name)
    with pytest.raises(InputError, match=message):
        list(source.open(ONCE))


@pytest.mark.parametrize(
    ("text", "message"),
    [("nowhere_at_all:f", "No module named"), ("math:nothing", "no attribute"),
     ("math:pi", "'pi' in 'math' is not a function")],
)  # fmt: skip
def test_a_function_that_is_not_there(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_source(text, (IMAGES, LABELS), "labels")


def test_a_program_without_samples() -> None:
    with pytest.raises(InputError, match="expected the first input to have a dim of samples"):
        per_sample([spec("x", "float32")])
