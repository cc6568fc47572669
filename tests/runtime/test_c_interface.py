"""The C interface for other languages: shards and checks as Python's; programs without Python."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxpar import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar_format.options import Settings
from onnxpar_runtime.collectives import World
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.inputs import Inputs
from onnxpar_runtime.launch import find_mpirun, mpirun_environment
from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.trainer import Trainer
from tests.runtime import hand_made
from tests.runtime.c_interface import CError, Host, Tensor, under_mpi

RUNTIME = Path(__file__).parents[2] / "runtime"
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
X = np.arange(6 * 64) * 31 % 101 / np.float32(101)
FEEDS = {"x": X.astype(np.float32).reshape(6, 1, 8, 8), "labels": np.arange(6) * 7 % 10}


class Alone(Host):
    """A rank that prepares runs with the others in this process."""

    @staticmethod
    def of(directory: Path, ranks: int, **more: Any) -> "list[dict[str, Any] | CError]":
        """What each rank prepares, or its error."""
        with World.threads(ranks) as world, ThreadPoolExecutor(ranks) as pool:

            def one(rank: int) -> "dict[str, Any] | CError":
                host = Host(directory, rank, world._handle)
                try:
                    return host.prepared(**more)
                except CError as error:
                    return error
                finally:
                    host.close()

            return list(pool.map(one, range(ranks)))


def written(folder: Path, ranks: int = 6) -> Path:
    """A directory whose inputs are sharded unevenly, in merged dims and over several atoms."""
    merged = [[("batch", [0]), ("heads", [1])], [("2*batch + ceil(heads/2)", [])]]
    return hand_made.write(
        folder,
        ["g (float[n] x) => (float[n] x) { }"] * ranks,
        atoms=[2, 3],
        inputs=[
            hand_made.tensor("x", "float32", ["batch", 5], [[("batch", [0, 1])], [(5, [])]]),
            hand_made.tensor(
                "h", "float16", ["heads", "batch"], [[("heads", [])], [("batch", [])]]
            ),
            hand_made.tensor("m", "int64", ["batch*heads", "2*batch + ceil(heads/2)"], merged),
            hand_made.tensor("s", "bool", [], []),
        ],
        # A result with the name of an input: the program passes it on.
        outputs=[hand_made.tensor("x", "float32", ["batch", 5], [[("batch", [0, 1])], [(5, [])]])],
        symbols={"batch": {"max": 64}, "heads": {"divisor": 2}},
        system_inputs=[
            {"name": "b", "kind": "symbol", "symbol": "batch"},
            {"name": "c", "kind": "coordinate", "atom": 1},
        ],
    )


def feeds(batch: int, heads: int) -> dict[str, Any]:
    """Whole inputs of that directory."""
    rng = np.random.default_rng([batch, heads])
    wide = 2 * batch + -(-heads // 2)
    return {
        "x": rng.random((batch, 5), np.float32),
        "h": rng.random((heads, batch)).astype(np.float16),
        "m": rng.integers(0, 99, (batch * heads, wide)),
        "s": np.array(True),
    }


@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (7, 2), (12, 8), (64, 4)])
def test_shards_are_those_of_python(tmp_path: Path, batch: int, heads: int) -> None:
    directory = written(tmp_path)
    given = feeds(batch, heads)
    found = Alone.of(directory, 6, feeds=given)
    manifest = Manifest.load(directory)
    for rank, values in enumerate(found):
        assert not isinstance(values, CError), values
        expected = Inputs(manifest, "model", rank).shard_inputs(given).local
        assert {*values} == {*expected, "b", "c"}
        for name, array in expected.items():
            np.testing.assert_array_equal(values[name], array)
        assert (values["b"].tolist(), values["c"].tolist()) == ([batch], [rank % 3])


def test_a_run_keeps_its_memory(tmp_path: Path) -> None:
    """If it is large enough; the padding is zero, whatever was there before."""
    directory = written(tmp_path)
    with World.threads(6) as world, ThreadPoolExecutor(6) as pool:
        hosts = [Host(directory, rank, world._handle) for rank in range(6)]
        before: list[dict[str, int | None]] = []
        for batch in (12, 7):
            given = feeds(batch, 4)
            found = list(pool.map(lambda host, given=given: host.prepared(given), hosts))
            addresses = [dict(host.addresses) for host in hosts]
            assert addresses == (before or addresses)
            before = addresses
        for host in hosts:
            host.close()
    manifest = Manifest.load(directory)
    for rank, values in enumerate(found):
        for name, array in Inputs(manifest, "model", rank).shard_inputs(given).local.items():
            np.testing.assert_array_equal(values[name], array)


def test_inputs_that_do_not_fit_are_errors_on_all_ranks(tmp_path: Path) -> None:
    directory, given = written(tmp_path), feeds(6, 2)
    cases = {
        "input 'h', dim 1: expected 6 ('batch' in dim 0 of input 'x'), got 5": {
            "h": given["h"][:, :5].copy()
        },
        "input 'm': expected int64, got int32": {"m": given["m"].astype(np.int32)},
        "input 'x': expected 2 dims [batch, 5], got shape [30]": {"x": given["x"].ravel()},
        "input 'x', dim 1: expected 5, got 4": {"x": given["x"][:, :4].copy()},
        "symbol 'batch' is 0, which violates its constraint: at least 1, at most 64": feeds(0, 2),
        "symbol 'heads' is 3, which violates its constraint: 2*N, N >= 1": feeds(6, 3),
    }
    for message, wrong in cases.items():
        errors = Alone.of(directory, 6, feeds={**given, **wrong})
        assert [str(e).removeprefix("rank 0: ") for e in errors] == [message] * 6
    (error, *_) = Alone.of(directory, 6, feeds={"x": given["x"]})
    assert str(error) == "rank 0: program 'model': input 'h' was not given"
    (error, *_) = Alone.of(directory, 6, feeds={"y": given["x"]})
    assert str(error) == "program 'model': no input 'y'; expected 'x', 'h', 'm', 's'"


def test_ranks_with_different_numbers_cannot_go_on(tmp_path: Path) -> None:
    directory, given = written(tmp_path), feeds(6, 2)
    with World.threads(6) as world, ThreadPoolExecutor(6) as pool:

        def one(rank: int) -> str:
            host = Host(directory, rank, world._handle)
            try:
                host.prepared(given, {"step": rank // 5})
            except CError as error:
                return str(error)
            finally:
                host.close()
            return ""

        errors = list(pool.map(one, range(6)))
    message = "expected the same program and numbers on all ranks; rank {} has program 'model', "
    assert errors == [f"{message}step {rank // 5}".format(rank) for rank in range(6)]


def test_a_damaged_weight_file_is_named(trained: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(trained, tmp_path / "copy")
    for file in directory.glob("weights.*.safetensors"):
        with file.open("r+b") as stream:
            stream.seek(8)
            stream.write(b"?")
    library = ctypes.CDLL(str(custom_op_library()))
    library.onnxpar_error.restype = ctypes.c_char_p
    library.onnxpar_open.restype = ctypes.c_void_p
    opened = ctypes.c_void_p(library.onnxpar_open(str(directory).encode(), 0))
    with World.threads(2) as world:
        tensor = ctypes.byref(Tensor())
        assert library.onnxpar_whole_state(opened, world._handle, b"fc1.weight", tensor) == 1
    message = library.onnxpar_error().decode()
    assert re.match(rf"{directory}/weights\.\d+\.safetensors: not JSON: expected ", message)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with pytest.raises(CError, match="made for 6 ranks, and has no rank 6"):
        Host(directory, 6)
    with pytest.raises(CError, match="expected a world of 6 ranks, got none"):
        Host(directory, 0).prepared(feeds(6, 2))
    alone = World.threads(1)
    message = "expected rank 0 of 6, got rank 0 of 1: start 6 processes, as with mpirun -n 6"
    with pytest.raises(CError, match=message):
        Host(directory, 0, alone._handle).prepared(feeds(6, 2))
    alone.close()
    small = hand_made.write(
        tmp_path / "small", ["g (float[1] x) => (float[1] x) { }"], atoms=[], outputs=[],
        inputs=[hand_made.tensor("x", "float32", [1], [[(1, [])]])],
    )  # fmt: skip
    with (
        World.threads(2) as two,
        pytest.raises(CError, match="start 1 process, as with mpirun -n 1"),
    ):
        Host(small, 0, two._handle).prepared({"x": np.ones(1, np.float32)})
    with pytest.raises(CError, match="no program 'other'; it has 'model'"):
        Host(directory, 0).prepared({}, program="other")
    with pytest.raises(CError, match="no number 'rate'; expected one of accumulate, "):
        Host(directory, 0).prepared({}, {"rate": 1})
    manifest = directory / "manifest.json"
    text = manifest.read_text()
    for old, new, message in [
        ('"schema": 1', '"schema": 2', "schema: expected 1"),
        ('"batch", 5]', '"batch"]', r"inputs\[0\]: expected as many dims as sizes"),
        ('"atoms": [0, 1]', '"atoms": [0, 2]', r"dims\[0\]\[0\]: expected atoms of the mesh"),
        ('"float16"', '"float15"', r"dtype: expected an element type, got 'float15'"),
        ('"rank0000', '"../rank', "expected a file name without folders"),
        ("}", "", "not JSON: expected "),
        ('"schema": 1', '"version": 1', "manifest.json: expected the key 'schema'"),
        ('"schema": 1', '"schema": 1.5', "manifest.json: schema: expected an integer"),
    ]:
        assert old in text
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(CError, match=message):
            Host(directory, 0)


def test_arrays_of_another_size_are_errors(tmp_path: Path) -> None:
    library, run = opened(written(tmp_path))
    shape, room = (ctypes.c_int64 * 2)(50, 5), (ctypes.c_float * 250)()

    def give(data: Any, size: int) -> str:
        failed = library.onnxpar_give(run, b"x", 1, shape, 2, data, ctypes.c_size_t(size))
        return library.onnxpar_error().decode() if failed else ""

    assert give(room, 1000) == ""
    assert give(room, 120) == "input 'x': expected 1000 bytes (float32 [50, 5]), got 120"
    assert give(None, 1000) == "input 'x': expected 1000 bytes (float32 [50, 5]), got null"


def test_arrays_for_which_there_is_no_memory(tmp_path: Path) -> None:
    directory = hand_made.write(
        tmp_path, ["g (float[n] x) => (float[n] x) { }"], atoms=[],
        inputs=[hand_made.tensor("x", "float32", ["n", 64], [[("n", [])], [(64, [])]])],
        outputs=[], symbols={"n": {}},
    )  # fmt: skip
    library, run = opened(directory)
    shape, size = (ctypes.c_int64 * 2)(2**50, 64), ctypes.c_size_t(2**58)
    assert library.onnxpar_give(run, b"x", 1, shape, 2, ctypes.c_char_p(b""), size) == 0
    assert library.onnxpar_prepare(run, None) == 1
    assert library.onnxpar_error().decode() == (
        f"input 'x' of shape [{2**50}, 64]: no memory for the {2**58} bytes of [{2**50}, 64]"
    )


def test_numbers_out_of_their_ranges_are_errors(tmp_path: Path) -> None:
    library, run = opened(written(tmp_path))
    for name, value, expected in [
        ("lr", nan, "a number >= 0, got nan"),
        ("lr", -1, "a number >= 0, got -1"),
        ("lr", inf, "a number >= 0, got inf"),
        ("step", -5, "an integer from 0 to 2^53, got -5"),
        ("micro_batch", 1.5, "an integer from 0 to 2^53, got 1.5"),
        ("beta1", 3, "a number >= 0 and < 1, got 3"),
        ("dampening", 2, "a number from 0 to 1, got 2"),
        ("clip_norm", 0, "a number > 0, got 0"),
        ("accumulate", 7, "0, 1, 2 or 3, got 7"),
    ]:
        assert library.onnxpar_set(run, name.encode(), ctypes.c_double(value)) == 1
        assert library.onnxpar_error().decode() == f"number '{name}': expected {expected}"
    assert library.onnxpar_set(run, b"clip_norm", ctypes.c_double(inf)) == 0


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("lr", "sgd", "rate"),
        ("momentum", "momentum", "momentum"),
        ("dampening", "momentum", "dampening"),
        ("beta1", "adam", "betas"),
        ("beta2", "adam", "betas"),
        ("eps", "adam", "eps"),
        ("weight_decay", "sgd", "weight_decay"),
        ("clip_norm", "sgd", "clip_norm"),
    ],
)
def test_the_ranges_of_numbers_are_those_of_train(
    name: str, kind: str, field: str, tmp_path: Path
) -> None:
    library, run = opened(written(tmp_path))
    refused = 0
    for value in (-inf, -1.0, -5e-324, -0.0, 0.0, 5e-324, 0.5, 1 - 2**-53, 1.0, 1 + 2**-52,
                  2.0, 1e308, inf, nan):  # fmt: skip
        found = ""
        if library.onnxpar_set(run, name.encode(), ctypes.c_double(value)):
            found = library.onnxpar_error().decode().partition("expected ")[2]
        pair = {"beta1": (value, 0.5), "beta2": (0.5, value)}
        wanted = ""
        try:
            if name == "lr":
                LearningRateSchedule(value)
            else:
                hyperparameters(kind, Settings(**{field: pair.get(name, value)}))
        except LaunchError as error:
            wanted = str(error).partition("expected ")[2]
        assert found.partition(",")[0] == wanted.partition(",")[0], value
        refused += bool(found)
    assert 4 <= refused < 14


def test_null_pointers_are_errors(tmp_path: Path) -> None:
    library, run = opened(written(tmp_path))
    directory = library.onnxpar_open(str(tmp_path).encode(), 0)
    one, tensor = (ctypes.c_int64 * 1)(1), Tensor()
    for name, arguments, expected in [
        ("open", (None, 0), "a folder"),
        ("ranks", (None,), "a directory"),
        ("graph", (None, b"model"), "a directory"),
        ("graph", (ctypes.c_void_p(directory), None), "the name of a program"),
        ("new_run", (None, b"model"), "a directory"),
        ("new_run", (ctypes.c_void_p(directory), None), "the name of a program"),
        ("give", (None, b"x", 1, one, 1, one, ctypes.c_size_t(4)), "a run"),
        ("give", (run, None, 1, one, 1, one, ctypes.c_size_t(4)), "the name of an input"),
        ("set", (run, None, ctypes.c_double(1)), "the name of a number"),
        ("prepare", (None, None), "a run"),
        ("feeds", (None,), "a run"),
        ("results", (None,), "a run"),
        ("feed", (None, 0, ctypes.byref(tensor)), "a run"),
        ("whole", (run, None, b"y", None), "a tensor to fill"),
        ("whole_state", (None, None, b"w", ctypes.byref(tensor)), "a directory"),
        ("size", (None,), "a world"),
        ("rank", (None,), "a world"),
        ("settle", (None, 0), "a world"),
        ("close", (None,), "a world"),
    ]:
        assert getattr(library, f"onnxpar_{name}")(*arguments) in (None, 1, -1), name
        assert library.onnxpar_error().decode() == f"expected {expected}, got null"
    library.onnxpar_give(run, b"x", 1, None, 2, one, ctypes.c_size_t(4))
    assert library.onnxpar_error().decode() == "input 'x': expected a shape, got null"


def test_an_output_whose_size_depends_on_data_is_not_brought_together(tmp_path: Path) -> None:
    directory = hand_made.write(
        tmp_path, ["g (float[n] x) => (float[m] y) { }"], atoms=[],
        inputs=[hand_made.tensor("x", "float32", ["n"], [[("n", [])]])],
        outputs=[hand_made.tensor("y", "float32", ["m"], [[("m", [])]])], symbols={"n": {}},
    )  # fmt: skip
    library, run = opened(directory)
    one, tensor, data = (ctypes.c_int64 * 1)(1), Tensor(), (ctypes.c_float * 1)()
    assert library.onnxpar_give(run, b"x", 1, one, 1, data, ctypes.c_size_t(4)) == 0
    assert library.onnxpar_prepare(run, None) == 0
    assert library.onnxpar_result(run, 0, ctypes.byref(tensor)) == 0 and tensor.data is None
    assert library.onnxpar_whole(run, None, b"y", ctypes.byref(tensor)) == 1
    message = "output 'y': its size depends on data, so it cannot be brought together; the value "
    message += "that onnxruntime allocates has this rank's part"
    assert library.onnxpar_error().decode() == message


def test_graphs_in_a_dialect_need_its_operators(tmp_path: Path) -> None:
    directory = written(tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "dialect": "tensorrt"}))
    library, _ = opened(directory)
    handle = ctypes.c_void_p(library.onnxpar_open(str(directory).encode(), 0))
    assert library.onnxpar_graph(handle, b"model") is None
    assert 'call onnxpar_add_dialect("tensorrt") on this' in library.onnxpar_error().decode()
    assert library.onnxpar_add_dialect(b"tensorrt") == 0
    try:
        assert library.onnxpar_graph(handle, b"model") is not None
    finally:
        library.onnxpar_add_dialect(None)


def opened(directory: Path) -> "tuple[ctypes.CDLL, ctypes.c_void_p]":
    """The library, and a run of a directory's rank 0."""
    library = ctypes.CDLL(str(custom_op_library()))
    library.onnxpar_error.restype = ctypes.c_char_p
    for name in ("open", "new_run", "graph"):
        getattr(library, f"onnxpar_{name}").restype = ctypes.c_void_p
    handle = ctypes.c_void_p(library.onnxpar_open(str(directory).encode(), 0))
    run = library.onnxpar_new_run(handle, b"model")
    assert run, library.onnxpar_error()
    return library, ctypes.c_void_p(run)


def test_damaged_manifests_are_errors(tmp_path: Path) -> None:
    """Whatever bytes change, there is an error or a result, and no crash."""
    directory, given = written(tmp_path, 1), feeds(2, 2)
    manifest = directory / "manifest.json"
    text = manifest.read_text().replace('"atoms": [2, 3]', '"atoms": []')
    text = re.sub(r'"atoms": \[[01, ]+\]', '"atoms": []', text)
    text = re.sub(
        r'\{"name": "c"[^}]*\}', '{"name": "c", "kind": "counter", "counter": "seed"}', text
    )
    manifest.write_text(text)
    host = Host(directory, 0)
    assert host.prepared(given)["c"].tolist() == [0]
    host.close()
    rng = np.random.default_rng(0)
    errors = 0
    for _ in range(150):
        data = bytearray(text.encode())
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.choice(list(b'0129-"[]{},:ab/*. '))
        manifest.write_bytes(data)
        try:
            host = Host(directory, 0)
        except CError:
            errors += 1
            continue
        try:
            host.prepared(given)
        except CError:
            errors += 1
        host.close()
    assert errors > 75


def flags() -> list[str]:
    """How a C++ compiler finds the installed library."""
    folder = custom_op_library().parent
    return [f"-I{folder.parent / 'include'}", f"-L{folder}", "-lonnxpar_ops",
            f"-Wl,-rpath,{folder}"]  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled."""
    made = tmp_path_factory.mktemp("example") / "train"
    source = RUNTIME / "examples" / "train.cc"
    assert len(source.read_text().splitlines()) <= 100
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
    command = [str(COMPILER), "-std=c++17", *warnings, str(source), *flags(), "-ldl"]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=100)
    return made


def library_file() -> str:
    """The library in onnxruntime's wheel."""
    (found,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    return str(found)


def network(folder: Path) -> Path:
    """A classifier of 8x8 images."""
    ir.save(mlp.build(image=8, hidden=(16,)), folder / "mlp.onnx")
    return folder / "mlp.onnx"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for training on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
    shard_model(network(folder), "dp=2", folder / "out", training=spec)
    return folder / "out"


@needs_compiler
def test_a_program_without_python_trains_on_two_ranks(program: Path, trained: Path) -> None:
    hyper = hyperparameters("adamw", Settings())
    with Ranks(trained, Trainer) as ranks:

        def step(number: int) -> float:
            return ranks.on_each(lambda t: t.train_step([FEEDS], hyper.at(number, 0.1)))[0].loss

        losses = [step(number) for number in (1, 2, 3)]
        weights = ranks.on_each(lambda t: t.parameters())[0]["fc1.weight"]
    outcome = under_mpi(2, [str(program), str(trained), library_file(), "3", "0.1"])
    assert outcome.returncode == 0, outcome.stderr
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert [name for name, _ in lines] == ["onnxpar.loss"] * 3 + ["fc1.weight"]
    # The same graphs and sums; only the order of onnxruntime's nodes may differ, which changes no
    # result. Nine digits of a float32 say all of it.
    np.testing.assert_array_equal(np.float32([x for _, x in lines[:3]]), np.float32(losses))
    # 1,024 weights below 2 in size, added in double precision, printed with nine digits.
    assert float(lines[3][1]) == pytest.approx(weights.astype(np.float64).sum(), abs=1e-6)


@pytest.mark.full
@needs_compiler
def test_a_program_without_python_runs_and_refuses(
    program: Path, trained: Path, tmp_path: Path
) -> None:
    shard_model(network(tmp_path), "tp=2", tmp_path / "model")
    outcome = under_mpi(2, [str(program), str(tmp_path / "model"), library_file()])
    assert outcome.returncode == 0, outcome.stderr
    wrong = under_mpi(2, [str(program), str(trained), library_file(), "1", "0.1", "4"])
    message = "rank 0: input 'labels', dim 0: expected 6 ('batch' in dim 0 of input 'x'), got 4"
    assert wrong.returncode == 1 and wrong.stderr.count(message) == 2
    wrong = under_mpi(1, [str(program), str(trained), library_file(), "3", "abc"])
    assert "LEARNING_RATE: expected a number from 0 to 1000000, got abc" in wrong.stderr
    more = under_mpi(2, [str(program), str(tmp_path / "model"), library_file(), "0", "0", "50"])
    assert more.returncode == 0 and more.stdout != outcome.stdout, more.stderr
    wrong = under_mpi(1, [str(program), str(trained), library_file(), "1", "0.1"])
    assert wrong.returncode == 1
    assert "rank 1 is not in a world of 1 ranks: start a process for each" in wrong.stderr
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    wrong = subprocess.run(
        [str(program), str(trained), library_file()],
        env=kept | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    message = "srun started 2 processes, but MPI does not connect them: this program uses "
    message += "Open MPI, so start it with its mpirun (or srun --mpi=pmix), or name the library of "
    assert wrong.returncode == 1 and message in wrong.stderr
    wrong = under_mpi(3, [str(program), str(trained), library_file(), "1", "0.1"])
    assert wrong.returncode == 1 and "made for 2 ranks, and has no rank 2" in wrong.stderr


@pytest.mark.full
@needs_compiler
def test_cmake_and_pkg_config_find_the_library_for_c(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(
        "#include <onnxpar.h>\n#include <stdio.h>\nint main(void) {\n"
        '  if (onnxpar_open("/nothing", 0) != NULL) return 1;\n'
        "  puts(onnxpar_error());\n  return 0;\n}\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(host C)\n"
        "find_package(onnxpar 0.1 REQUIRED)\n"
        "add_executable(host main.c)\ntarget_link_libraries(host onnxpar::ops)\n"
        "target_compile_options(host PRIVATE -std=c99 -Wall -Wextra -Wpedantic -Werror)\n"
    )
    root = custom_op_library().parent.parent
    build = tmp_path / "build"
    for command in [
        ["cmake", "-S", str(tmp_path), "-B", str(build), f"-DCMAKE_PREFIX_PATH={root}"],
        ["cmake", "--build", str(build)],
    ]:
        subprocess.run(command, check=True, timeout=100)
    made = [str(build / "host")]
    if shutil.which("pkg-config"):
        place = {**os.environ, "PKG_CONFIG_PATH": str(root / "lib" / "pkgconfig")}
        found = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "onnxpar"],
            env=place, check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        made.append(str(tmp_path / "host"))
        subprocess.run(["gcc", str(source), *found, "-o", made[1]], check=True, timeout=100)
    for program in made:
        out = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        assert out == "/nothing/manifest.json: cannot be read\n"


@pytest.mark.full
@needs_compiler
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    page = (RUNTIME.parent / "docs" / "c_api.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name in ("models", "runtime"):
        (tmp_path / name).symlink_to(RUNTIME.parent / name)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    places = (Path(sys.executable).parent, Path(find_mpirun()).parent, os.environ["PATH"])
    outcome = subprocess.run(
        ["bash", "-e", "-c", commands.replace("mpirun", "mpirun --oversubscribe")],
        cwd=tmp_path,
        env={**mpirun_environment(kept), "PATH": os.pathsep.join(map(str, places))},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("onnxpar.loss") == 3


def test_the_messages_of_the_interface_name_nothing_of_python() -> None:
    for path in (RUNTIME / "csrc" / "capi").glob("*.*"):
        messages = re.findall(r'"([^"]*)"', path.read_text())
        assert not [m for m in messages if re.search(r"onnxpar_runtime|\bWorld\b", m)], path
    assert ctypes.CDLL(str(custom_op_library())).onnxpar_prepare
