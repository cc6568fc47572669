"""What tests of the CUDA provider share."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from onnxpar_runtime.devices import machine, obstacle
from tests.children import with_tests
from tests.gpu.device_nodes import Array, Both, Process
from tests.gpu.standin import libraries


@pytest.fixture(scope="session")
def standin_cuda(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a process in which the CUDA provider loads without a GPU.

    For subprocesses only: libraries that a process has once looked for are not checked again.
    """
    if shutil.which("g++") is None or shutil.which("nm") is None:
        pytest.skip("no compiler here (g++, nm)")
    try:
        libraries.provider()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # one for all workers of this run
    folder, unfinished = shared / "standin", shared / "standin.unfinished"
    with (shared / "standin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            libraries.build(unfinished)
            unfinished.rename(folder)
    return with_tests(libraries.environment(folder))


@pytest.fixture(scope="module", params=["standin", pytest.param("gpu", marks=pytest.mark.gpu)])
def worker(request: pytest.FixtureRequest) -> Iterator[Process]:
    if request.param == "standin":
        environment = request.getfixturevalue("standin_cuda")
    elif why := obstacle(machine()):
        pytest.skip(f"no GPU: {why}")
    else:
        environment = with_tests(os.environ)
    process = Process(environment)
    yield process
    process.close()


@pytest.fixture
def both(worker: Process) -> Both:
    """Runs a node and returns its outputs on the CPU and on the device.

    Two runs on the device must agree to the bit.
    """

    def run(
        op: str, *inputs: Array | None, outputs: Sequence[bool] = (True,), **attributes: Any
    ) -> tuple[list[Array], list[Array]]:
        cpu, cuda = worker.ask(op, inputs, attributes, outputs)
        assert not isinstance(cpu, str), cpu
        assert not isinstance(cuda, str), cuda
        for first, second in zip(*cuda, strict=True):
            np.testing.assert_array_equal(first, second)
        for want, got in zip(cpu[0], cuda[0], strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
        return cpu[0], cuda[0]

    return run
