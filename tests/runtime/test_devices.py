"""The devices of ranks: the facts decide, and the message says what is missing."""

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxpar_runtime import devices as module
from onnxpar_runtime import probe as probing
from onnxpar_runtime.collectives import World
from onnxpar_runtime.devices import (
    ON_CPU,
    Device,
    Facts,
    Placement,
    alike,
    choose,
    describe,
    placed,
    read_facts,
    route,
)
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.launch import init
from onnxpar_runtime.probe import cause, probe

GOOD = Facts(
    packages=("onnxruntime-gpu",),
    provider=True,
    needs=(13, 0),
    driver=(13, 1),
    gpus=("NVIDIA H100", "NVIDIA H100"),
    missing=(),
    session_errors=("", ""),
    nccl=23203,
)
NO_DRIVER = "no NVIDIA driver: libcuda.so.1: no such file"
# A problem, and the text that the message must have. The first problem is reported.
BAD = {
    "both": (
        {"packages": ("onnxruntime", "onnxruntime-gpu"), "provider": False},
        r"onnxruntime and onnxruntime-gpu are both installed .*pip uninstall onnxruntime "
        r"onnxruntime-gpu, then pip install 'onnxpar\[cuda\]'",
    ),
    "provider": ({"provider": False, "needs": ()}, r"no CUDA provider.*onnxpar\[cuda\]"),
    "driver": ({"driver": (), "driver_error": NO_DRIVER, "gpus": ()}, "libcuda.so.1: no such file"),
    "old driver": ({"driver": (12, 4)}, "supports CUDA 12.4, .* needs CUDA 13.0: install a newer"),
    "no gpu": ({"gpus": (), "session_errors": ()}, "driver shows no GPU"),
    "library": (
        {"missing": ("libcublas.so.13", "libcurand.so.10"), "session_errors": ()},
        r"libcublas.so.13, libcurand.so.10 cannot be loaded: pip install 'onnxpar\[cuda\]'",
    ),
    "crash": (
        {"session_errors": (), "crash": "the process was killed by signal 11, while loading NCCL"},
        "the probe failed: the process was killed by signal 11, while loading NCCL",
    ),
    "session": (
        {"session_errors": ("", "no kernel image")},
        r"cannot run a session on GPU 1 \(NVIDIA H100\): no kernel image",
    ),
    "untried": ({"session_errors": ()}, "no session was tried"),
}


@pytest.mark.parametrize("case", BAD)
def test_cuda_that_is_wanted_and_cannot_be_is_an_error(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(LaunchError, match=f"device cuda: .*{message}"):
        choose("cuda", replace(GOOD, **changes), 0, 1)


@pytest.mark.parametrize("case", BAD)
def test_auto_takes_the_cpu_instead_and_says_why_where_there_is_a_gpu(case: str) -> None:
    changes, _ = BAD[case]
    facts = replace(GOOD, **changes)
    found = choose("auto", facts, 0, 1)
    assert found.device is Device.CPU
    if facts.gpus:
        assert found.notice.startswith("2 GPUs (NVIDIA H100) not used: ")
        assert found.notice.endswith("; computing on the CPU")
    else:
        assert not found.notice


@pytest.mark.parametrize("case", BAD)
def test_the_cpu_asks_for_nothing(case: str) -> None:
    assert choose("cpu", replace(GOOD, **BAD[case][0]), 3, 4) == ON_CPU


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("place", "ranks", "index", "shared", "notice"),
    [
        (0, 1, 0, False, ""),
        (1, 2, 1, False, ""),
        (0, 3, 0, True, "3 ranks share 2 GPUs (NVIDIA H100)"),
        (1, 3, 1, False, "3 ranks share 2 GPUs (NVIDIA H100)"),
        (2, 3, 0, True, "3 ranks share 2 GPUs (NVIDIA H100)"),
        (3, 4, 1, True, "4 ranks share 2 GPUs (NVIDIA H100)"),
    ],
)
def test_ranks_take_the_gpus_in_turn(
    wanted: str, place: int, ranks: int, index: int, shared: bool, notice: str
) -> None:
    found = choose(wanted, GOOD, place, ranks)
    assert found == Placement(Device.CUDA, index, shared, "staged", notice, GOOD)


def test_libraries_that_only_some_operators_need_are_reported() -> None:
    facts = replace(GOOD, absent=("libcudnn.so.9",))
    assert choose("auto", facts, 2, 3).notice == (
        "libcudnn.so.9, which some operators need, cannot be loaded: pip install "
        "'onnxpar[cuda]'; "
        "3 ranks share 2 GPUs (NVIDIA H100)"
    )


def test_a_gpu_by_its_number() -> None:
    assert choose("cuda:1", GOOD, 0, 1) == Placement(Device.CUDA, 1, False, "staged", "", GOOD)
    shared = choose("cuda:1", GOOD, 2, 3)
    assert (shared.index, shared.shared) == (1, True)
    assert shared.notice == "3 ranks share GPU 1 (NVIDIA H100)"
    with pytest.raises(LaunchError, match=r"device cuda:2: there is no GPU 2: .* shows 2 GPUs"):
        choose("cuda:2", GOOD, 0, 1)
    # A problem of another GPU does not matter.
    broken = replace(GOOD, session_errors=("broken", ""))
    assert choose("cuda:1", broken, 0, 1).index == 1
    with pytest.raises(LaunchError, match=r"cannot run a session on GPU 0 \(NVIDIA H100\): broken"):
        choose("cuda:0", broken, 0, 1)


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:-1", "cuda:one", "CPU", ""])
def test_unknown_devices(wanted: str) -> None:
    with pytest.raises(LaunchError, match="expected auto, cpu, cuda or cuda:NUMBER"):
        choose(wanted, GOOD, 0, 1)
    with pytest.raises(LaunchError, match="expected auto, cpu, cuda or cuda:NUMBER"):
        init("threads", wanted)


def test_all_ranks_compute_on_one_kind_of_device() -> None:
    cuda = choose("auto", GOOD, 0, 1)
    without = choose("auto", replace(GOOD, **BAD["driver"][0]), 0, 1)
    assert alike([cuda, cuda], cuda) == cuda
    found = alike([cuda, without], cuda)
    assert found.device is Device.CPU
    assert found.notice == f"rank 1 cannot use CUDA: {NO_DRIVER}; all ranks compute on the CPU"
    assert alike([cuda, without], without) == without


def test_facts_of_a_probe() -> None:
    lines = [
        {"packages": ["onnxruntime-gpu"], "provider": True, "needs": [13, 0]},
        {"doing": "loading the driver"},
        {"driver": [13, 1], "gpus": ["NVIDIA H100", "NVIDIA H100"], "doing": "more"},
        {"missing": [], "nccl": 23203},
        {"session_errors": ["", ""], "doing": ""},
    ]
    written = "\n".join(map(json.dumps, lines)).encode()
    assert read_facts(written, "") == GOOD
    # It died while it wrote the fourth line.
    early = read_facts(b"\n".join(written.split(b"\n")[:3]) + b'\n{"miss', "killed by signal 6")
    assert early.gpus == GOOD.gpus
    assert early.crash == "killed by signal 6, while more"
    assert not early.session_errors


def test_an_error_has_the_words_of_cuda() -> None:
    signature = "std::conditional_t<THRW, void, Status> CudaCall(ERRTYPE, const char*, int) " * 8
    text = (
        f"[ONNXRuntimeError] : 1 : FAIL : Exception during initialization: {signature}CUBLAS "
        "failure 1: the library was not initialized ; GPU=0 ; hostname=vm ; file=provider.cc ; "
        "line=245 ; expr=cublasCreate(&handle_); \n\n"
    )
    assert (
        cause(text) == "CUBLAS failure 1: the library was not initialized: cublasCreate(&handle_)"
    )
    assert cause("no such\n  kernel ") == "no such kernel"
    long = cause("x" * 600 + " in the end")
    assert len(long) == 500 and long.endswith("x in the end")


def test_a_probe_that_dies_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: None)

    def found(program: str, seconds: float = 60.0) -> Facts:
        monkeypatch.setattr(module, "PROBE", ("-c", program))
        monkeypatch.setattr(module, "PROBE_SECONDS", seconds)
        module.machine.cache_clear()
        try:
            return module.machine()
        finally:
            module.machine.cache_clear()

    tell = 'print(\'{"provider": true, "doing": "loading the driver"}\', flush=True)'
    dead = found(f"import os; {tell}; os.kill(os.getpid(), 11)")
    assert dead.crash == "the process was killed by signal 11, while loading the driver"
    assert dead.provider
    raised = found(f"{tell}; raise RuntimeError('out of order')")
    assert raised.crash == "exit code 1 RuntimeError: out of order, while loading the driver"
    hanging = found(f"import time; {tell}; time.sleep(60)", seconds=2.0)
    assert hanging.crash == "no answer within 2 s, while loading the driver"
    assert found(tell) == Facts(provider=True)


def test_a_rank_computes_where_it_was_placed() -> None:
    with World.threads(2) as world:
        rank, gpu = world.rank(1), choose("auto", GOOD, 1, 2)
        world.placements[1] = gpu  # as `place` does once the GPU is open
        assert world.rank(1).placement == rank.placement == gpu
        assert [placed(rank, wanted) for wanted in ("auto", "cuda", "cuda:1")] == [gpu] * 3
        assert placed(rank, "cpu") == ON_CPU
        with pytest.raises(LaunchError, match="device cuda:0: the rank already computes on GPU 1"):
            placed(rank, "cuda:0")
        world.rank(0).place(ON_CPU)
        assert placed(world.rank(0), "auto") == ON_CPU


ROUTES = [
    # wanted, ranks on two GPUs, what is otherwise, may share; the way, and what is said
    ("auto", 2, {}, False, "nccl", ""),
    ("nccl", 2, {}, False, "nccl", ""),
    ("mpi", 2, {}, False, "staged", ""),
    ("threads", 1, {}, False, "staged", ""),
    ("auto", 1, {}, False, "staged", ""),
    ("nccl", 1, {}, False, "nccl", ""),
    (
        "auto",
        2,
        {"nccl": 0, "nccl_error": "no NCCL"},
        False,
        "staged",
        "because NCCL is not used: no NCCL",
    ),
    ("nccl", 2, {"nccl": 0, "nccl_error": "no NCCL"}, False, "", "transport nccl: no NCCL"),
    ("auto", 3, {}, False, "staged", "rank 0 shares its GPU with another"),
    ("nccl", 3, {}, False, "", "transport nccl: rank 0 shares its GPU .* only with .*_ENABLE=1"),
    ("auto", 3, {}, True, "nccl", ""),
    ("nccl", 3, {}, True, "nccl", ""),
    ("auto", 3, {"nccl": 22703}, True, "staged", "allows that since 2.30.0, and this is 2.27.3"),
    ("auto", 2, {"nccl": 22703}, True, "nccl", ""),
    ("nccl", 3, {"nccl": 22703}, True, "", "transport nccl: rank 0 shares .* this is 2.27.3"),
    ("mpi", 3, {}, True, "staged", ""),
    ("auto", 2, BAD["driver"][0], False, "staged", ""),
    ("nccl", 2, BAD["driver"][0], False, "", f"the ranks compute on the CPU: {NO_DRIVER}"),
    (
        "nccl",
        2,
        BAD["session"][0],
        False,
        "",
        "nccl: 2 GPUs .* not used: cannot run a session on GPU 1",
    ),
]


@pytest.mark.parametrize(("wanted", "ranks", "changes", "may", "way", "said"), ROUTES)
def test_the_way_of_tensors_between_ranks(
    wanted: str,
    ranks: int,
    changes: dict[str, Any],
    may: bool,
    way: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1" if may else "0")
    placements = [choose("auto", replace(GOOD, **changes), r, ranks) for r in range(ranks)]
    if not way:
        with pytest.raises(LaunchError, match=said):
            route(wanted, placements, placements[-1])
        return
    found = [route(wanted, placements, own) for own in placements]
    assert {p.transport for p in found} == {way}
    for before, after in zip(placements, found, strict=True):
        new = after.notice.removeprefix(before.notice)
        assert said in new if said else not new


def test_nccl_is_not_for_the_cpu() -> None:
    with pytest.raises(LaunchError, match=r"^transport nccl: the ranks compute on the CPU$"):
        route("nccl", [ON_CPU, ON_CPU], ON_CPU)
    facts = replace(GOOD, **BAD["driver"][0])
    cuda, without = choose("auto", GOOD, 0, 1), choose("auto", facts, 0, 1)
    common = alike([cuda, without], cuda)
    with pytest.raises(LaunchError, match="transport nccl: rank 1 cannot use CUDA: no NVIDIA"):
        route("nccl", [common], common)


def test_gpus_are_looked_for_even_if_onnxruntime_cannot_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing.onnxruntime, "get_available_providers", list)
    monkeypatch.setattr(probing, "_tell_driver", lambda tell: tell({"gpus": ["NVIDIA H200"]}) or 1)
    lines: list[bytes] = []
    probe(lambda found: lines.append(json.dumps(found).encode()))
    found = choose("auto", read_facts(b"\n".join(lines), ""), 0, 1)
    assert found.notice.startswith("1 GPU (NVIDIA H200) not used: this onnxruntime has no CUDA")


def test_description() -> None:
    assert describe(GOOD) == [
        "onnxruntime    onnxruntime-gpu, built for CUDA 13.0",
        "driver         CUDA 13.1",
        "GPUs           NVIDIA H100, NVIDIA H100",
        "libraries      all load",
        "NCCL           2.32.3",
        "CUDA           can be used",
    ]
    lacking = replace(GOOD, missing=("libcublas.so.13",), absent=("libcudnn.so.9",))
    assert describe(lacking)[3].split(maxsplit=1) == [
        "libraries",
        "libcublas.so.13, libcudnn.so.9 cannot be loaded: pip install 'onnxpar[cuda]'",
    ]
    alone = Facts(("onnxruntime-gpu",), True, (13, 0), driver_error=NO_DRIVER)
    assert describe(alone) == [
        "onnxruntime    onnxruntime-gpu, built for CUDA 13.0",
        "driver         none",
        "GPUs           none",
        "libraries      not checked",
        "NCCL           not checked",
        f"CUDA           {NO_DRIVER}",
    ]
