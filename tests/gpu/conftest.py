"""What tests of the CUDA provider share."""

import shutil
from collections.abc import Mapping

import pytest
from standin import libraries


@pytest.fixture(scope="session")
def standin_cuda(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a process in which the CUDA provider loads without a GPU.

    For subprocesses only: libraries that a process has once looked for are not looked for again.
    """
    if shutil.which("g++") is None or shutil.which("nm") is None:
        pytest.skip("no compiler here (g++, nm)")
    try:
        libraries.provider()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("standin")
    libraries.build(folder)
    return libraries.environment(folder)
