"""What holds for all tests."""

import atexit
import gc
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest

from onnxpar_runtime.launch import SESSIONS
from tests.tiers import FULL
from tests.torch_registry import keep_if_loaded

# A shell starts background jobs with SIGINT ignored, nohup does so with SIGHUP, and children
# inherit it: tests that send these signals would wait for programs that never hear them.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, default)

# As the command line does: hundreds of thousands of objects live as long as the process. Traversing
# them again and again takes a fifth of the time of the tests that transform models.
gc.set_threshold(100_000, 20, 50)
atexit.register(gc.freeze)

# OpenBLAS starts a pool of threads with NumPy, which few tests need. It spins at first, for a tenth
# of a second of a core in each program that a test starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

numbers = count()
folders = tempfile.TemporaryDirectory(prefix="onnxpar-tests-")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives the mpiruns of each test a folder of their own, and keeps PyTorch's table of functions.

    Tests that kill an mpirun leave its session directory, which is named after its PID: PIDs come
    again within a run of all tests. mpirun makes the folder: few tests need one, and to remove the
    empty folders of all others takes half a minute.
    """
    os.environ[SESSIONS] = f"{folders.name}/{next(numbers)}"
    keep_if_loaded()


def pytest_collection(session: pytest.Session) -> None:
    """Imports all tests from the last on in each worker but the first, if all are collected.

    Before anything is compiled, workers that import in one order compile the same files at the same
    time. In two orders, each compiles half of them. What an import raises, collection reports.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if worker == "gw0" or session.config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"), reverse=True):
        module = path.relative_to(session.config.rootpath).with_suffix("")
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(module.parts))


ONE_AT_A_TIME = ("mpi", "collectives")


# First, since xdist reads the groups in a hook of the same name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skips what is marked `full` in the quick tier, and gives some tests to one worker.

    The latter are tests that start many ranks, or time them, those of a module that exports
    networks once for all of its tests, those of a module that share a fixture of it, and the cases
    of a test: with ten thousand groups xdist needs a quarter of a minute to choose the next one.
    """
    for item in items:
        if not FULL and item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="of the full tier: ONNXPAR_FULL=1"))
        folder = Path(item.path).parent.name
        if folder in ONE_AT_A_TIME:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif folder == "models":
            item.add_marker(pytest.mark.xdist_group(Path(item.path).stem))
        elif not item.get_closest_marker("xdist_group") and shares(item):
            item.add_marker(pytest.mark.xdist_group(f"{folder}/{Path(item.path).stem}"))
        elif not item.get_closest_marker("xdist_group") and hasattr(item, "callspec"):
            name = getattr(item, "originalname", item.name)
            item.add_marker(pytest.mark.xdist_group(f"{folder}/{Path(item.path).stem}/{name}"))


def shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture that is made once for its module."""
    return isinstance(item, pytest.Function) and any(
        fixture.scope == "module"
        for found in item._fixtureinfo.name2fixturedefs.values()
        for fixture in found
    )
