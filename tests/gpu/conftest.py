"""What tests of the CUDA provider share."""

import fcntl
import os
import shutil
from collections.abc import Mapping

import pytest

from tests.children import with_tests
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
