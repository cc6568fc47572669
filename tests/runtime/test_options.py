"""Options that pass through to onnxruntime, and the choice of the device."""

from pathlib import Path

import onnxruntime
import pytest

from onnxpar_runtime import cores as machine
from onnxpar_runtime import launch
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.options import cuda_options, parse_pairs, session_options, threads_per_rank

SPIN = "session.intra_op.spin_duration_us"


def test_defaults() -> None:
    options = session_options({})
    assert options.execution_order == onnxruntime.ExecutionOrder.PRIORITY_BASED
    assert options.intra_op_num_threads == 1
    # Otherwise an idle thread spins for longer than a step's pauses.
    assert 0 < int(options.get_session_config_entry(SPIN)) <= 1000
    changed = session_options({SPIN: "7"}, threads=4)
    assert (changed.intra_op_num_threads, changed.get_session_config_entry(SPIN)) == (4, "7")


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of 16 cores of two hardware threads, outside mpirun."""
    for cpu in range(32):
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{cpu % 16},{cpu % 16 + 16}\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(32)))
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("sixteen")
def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_per_rank(world_size=1, ranks_here=1) == 16
    assert threads_per_rank(world_size=3, ranks_here=3) == 5
    # More ranks than cores.
    assert threads_per_rank(world_size=64, ranks_here=64) == 1
    # Each rank is a process, and the number of processes on this machine is unknown.
    assert threads_per_rank(world_size=4, ranks_here=1) == 4
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "8")
    assert threads_per_rank(world_size=64, ranks_here=1) == 2
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert threads_per_rank(world_size=64, ranks_here=1) == 8
    # Bound to two hardware threads of one core by mpirun.
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 19})
    assert threads_per_rank(world_size=64, ranks_here=1) == 1


@pytest.mark.usefixtures("sixteen")
def test_without_a_topology_every_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CPUS", Path("/absent"))
    assert threads_per_rank(world_size=2, ranks_here=2) == 16


def test_pass_through() -> None:
    pairs = parse_pairs(
        ["intra_op_num_threads=3", "graph_optimization_level=basic", "enable_profiling=false",
         "execution_mode=ORT_PARALLEL", "session.intra_op.allow_spinning=0", "logid=a=b",
         "cuda.use_tf32=1"]
    )  # fmt: skip
    options = session_options(pairs)
    assert options.intra_op_num_threads == 3
    basic = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert options.graph_optimization_level == basic
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.logid == "a=b"
    provider, settings = cuda_options(1, 4096, pairs)
    assert provider == "CUDAExecutionProvider"
    assert settings["use_tf32"] == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads", "expected key=value, got 'threads'"),
        ("=1", "expected key=value"),
        ("nothing=1", "unknown onnxruntime option 'nothing'; known: .*intra_op_num_threads"),
        ("add_initializer=1", "unknown onnxruntime option"),
        ("__class__=1", "unknown onnxruntime option"),
        ("intra_op_num_threads=many", "expected an integer from 0 to 1024, got 'many'"),
        ("intra_op_num_threads=100000", "expected an integer from 0 to 1024, got '100000'"),
        ("inter_op_num_threads=-1", "expected an integer from 0 to 1024, got '-1'"),
        ("log_severity_level=5", "expected an integer from 0 to 4, got '5'"),
        (f"{SPIN}={10**12}", "expected an integer from 0 to 1000000"),
        ("enable_profiling=maybe", "expected true or false"),
        ("graph_optimization_level=most", r"expected one of \['ORT_DISABLE_ALL'"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        session_options(parse_pairs([text]))


def test_twice_is_refused() -> None:
    with pytest.raises(LaunchError, match="given twice"):
        parse_pairs(["a=1", "a=2"])


def test_the_cuda_provider() -> None:
    _, settings = cuda_options(2, 4096, {"intra_op_num_threads": "3"})
    assert settings == {
        "device_id": "2",
        "user_compute_stream": "4096",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
    with pytest.raises(LaunchError, match=r"cuda.device_id: use --device cuda:3 instead"):
        cuda_options(2, 4096, {"cuda.device_id": "3"})
    with pytest.raises(
        LaunchError, match="it cannot be set, because each rank uses its own stream"
    ):
        cuda_options(2, 4096, {"cuda.has_user_compute_stream": "1"})


@pytest.mark.usefixtures("sixteen")
def test_open_mpi_is_told_of_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts cores, of which this machine has half as many as hardware threads."""
    monkeypatch.setattr(launch, "is_open_mpi", lambda path: True)
    for name in launch._BATCH:
        monkeypatch.delenv(name, raising=False)
    assert launch.crowd_options("mpirun", 16) == []
    assert launch.crowd_options("mpirun", 17) == ["--oversubscribe"]
