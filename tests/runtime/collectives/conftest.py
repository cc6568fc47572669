"""The `team` fixture: all ranks as threads, at 1, 2 and 4 ranks, or this rank of an MPI job."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxpar_format.place import find_place
from onnxpar_runtime.collectives import World
from tests.runtime.collectives.teams import UNDER_MPI, Team, open_devices

# The GPU is none: libraries of tests/gpu/standin stand in for CUDA's.
STANDIN = os.environ.get("ONNXPAR_TEST_STANDIN") == "1"
SIZES = [int(n) for n in os.environ.get("ONNXPAR_TEST_SIZES", "1 2 4").split()]
if UNDER_MPI:
    place = find_place()
    assert place is not None
    SIZES = [place.size]
    # Each rank is a pytest of its own, and all at once would clear the same old temporary folders.
    root = Path(tempfile.gettempdir()) / f"onnxpar-rank{place.rank}"
    root.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


@pytest.fixture(scope="session")
def mpi_world() -> Iterator[World | None]:
    """One MPI world for all tests, because making one is a collective; None for threads."""
    if not UNDER_MPI:
        yield None
        return
    with World.mpi() as world:
        yield open_devices(world)


@pytest.fixture(params=SIZES)
def team(request: pytest.FixtureRequest, mpi_world: World | None) -> Iterator[Team]:
    """The ranks."""
    if mpi_world is not None:
        yield Team(mpi_world)
        return
    with World.threads(request.param) as world:
        yield Team(open_devices(world))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is about ranks in one process, or needs kernels that there are not."""
    without = {}
    if UNDER_MPI:
        without["threads_only"] = "about ranks in one process"
    if STANDIN:
        without["provider_kernels"] = "the provider's kernels compute nothing without a GPU"
    for item in items:
        for marker, reason in without.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Ends an MPI job at the first failure: the other ranks would wait for this one."""
    outcome = yield
    report = outcome.get_result()
    if UNDER_MPI and report.failed:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
        print(f"r{rank} | {item.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
