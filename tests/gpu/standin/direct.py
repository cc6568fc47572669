"""Calls the stand-ins directly, for their own test: `direct.py CASE` prints what it found as JSON.

A process of its own, since the CUDA libraries that a process has once looked for are not checked
again. Pairs of streams have queues of every pace, so that what is in no order comes in either one
for some of them.
"""

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import partial
from typing import Any

SIZE, PAIRS = 4096, 15
UP, DOWN, SAME = 1, 2, 3  # cudaMemcpyKind
NON_BLOCKING, NOT_READY = 1, 600
UINT8, SUM = 1, 0

cuda = ctypes.CDLL("libcudart.so.13")


def call(name: str, *arguments: Any) -> None:
    """Calls CUDA's runtime."""
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"


def made(name: str, *arguments: Any) -> c_void_p:
    """Returns the handle that an entry writes to its first argument."""
    handle = c_void_p()
    call(name, byref(handle), *arguments)
    return handle


def stream(flags: int = NON_BLOCKING) -> c_void_p:
    """Returns a new stream."""
    return made("cudaStreamCreateWithFlags", c_uint(flags))


def memory() -> c_void_p:
    """Returns device memory, of zeros."""
    return made("cudaMalloc", c_size_t(SIZE))


def fill(at: c_void_p, value: int, on: c_void_p) -> None:
    """Enqueues a fill."""
    call("cudaMemsetAsync", at, c_int(value), c_size_t(SIZE), on)


def copy(to: Any, source: Any, kind: int, on: c_void_p) -> None:
    """Enqueues a copy."""
    call("cudaMemcpyAsync", to, source, c_size_t(SIZE), c_int(kind), on)


def hold(later: c_void_p, earlier: c_void_p) -> None:
    """Lets one stream wait for what is on another one."""
    event = made("cudaEventCreate")
    call("cudaEventRecord", event, earlier)
    call("cudaStreamWaitEvent", later, event, c_uint(0))
    call("cudaEventDestroy", event)


def value(at: c_void_p, on: c_void_p) -> int:
    """Returns the first byte, once the stream has come there."""
    array = (ctypes.c_ubyte * SIZE)()
    copy(array, at, DOWN, on)
    return array[0]


def pairs(flags: int = NON_BLOCKING) -> Iterator[tuple[c_void_p, c_void_p]]:
    """Yields two streams at a time, of one kind."""
    for _ in range(PAIRS):
        yield stream(flags), stream(flags)


def waits() -> dict[str, list[int]]:
    """What one stream reads of another one's work, behind an event or not."""
    found: dict[str, list[int]] = {"held": [], "free": []}
    for name, seen in found.items():
        for first, second in pairs():
            data = memory()
            for _ in range(4):
                fill(data, 7, first)
            if name == "held":
                hold(second, first)
            seen.append(value(data, second))
    return found


def legacy() -> dict[str, list[int]]:
    """What the legacy stream reads of the work of blocking streams and of others."""
    found: dict[str, list[int]] = {}
    for name, flags in (("blocking", 0), ("others", NON_BLOCKING)):
        found[name] = []
        for first, _ in pairs(flags):
            data = memory()
            for _ in range(4):
                fill(data, 7, first)
            found[name].append(value(data, c_void_p()))
    return found


def sources() -> dict[str, list[int]]:
    """What arrives of host memory that is overwritten once the call has returned."""
    found: dict[str, list[int]] = {"pinned": [], "pageable": []}
    for name, seen in found.items():
        for on, _ in pairs():
            host = ctypes.create_string_buffer(SIZE)
            at = made("cudaMallocHost", c_size_t(SIZE)) if name == "pinned" else host
            data = memory()
            ctypes.memset(at, 7, SIZE)
            copy(data, at, UP, on)
            ctypes.memset(at, 9, SIZE)
            seen.append(value(data, on))
    return found


def freed() -> dict[str, list[int]]:
    """What is read of memory that is freed, before and behind that on its stream, and pinned."""
    found: dict[str, list[int]] = {"behind": [], "before": [], "pinned": []}
    for on, _ in pairs():
        data, other, later = memory(), memory(), memory()
        host = made("cudaMallocHost", c_size_t(SIZE))
        ctypes.memset(host, 7, SIZE)
        fill(data, 7, on)
        copy(other, data, SAME, on)
        copy(later, host, UP, on)
        call("cudaFreeHost", host)
        call("cudaFreeAsync", data, on)
        found["before"].append(value(other, on))
        found["behind"].append(value(data, on))
        found["pinned"].append(value(later, on))
    return found


def events() -> dict[str, list[int]]:
    """Results of asking for an event: never recorded, at once, and after waiting for it."""
    found: dict[str, list[int]] = {"new": [], "recorded": [], "waited": []}
    for on, _ in pairs():
        event, data = made("cudaEventCreate"), memory()
        found["new"].append(cuda.cudaEventQuery(event))
        for _ in range(4):
            fill(data, 7, on)
        call("cudaEventRecord", event, on)
        found["recorded"].append(cuda.cudaEventQuery(event))
        call("cudaEventSynchronize", event)
        found["waited"].append(cuda.cudaEventQuery(event))
    return found


def capture() -> dict[str, Any]:
    """What graphs do, and what breaks a capture."""
    main, side, data, other = stream(0), stream(), memory(), memory()
    graph = c_void_p()

    def begin() -> None:
        call("cudaStreamBeginCapture", main, c_int(0))

    def end() -> int:
        return cuda.cudaStreamEndCapture(main, byref(graph))

    begin()
    fill(data, 7, main)
    hold(side, main)
    copy(other, data, SAME, side)
    hold(main, side)
    found: dict[str, Any] = {"joined": end()}
    found["captured"] = value(other, side)
    exec_ = made("cudaGraphInstantiate", graph, ctypes.c_ulonglong(0))
    call("cudaGraphLaunch", exec_, main)
    call("cudaStreamSynchronize", main)
    found["launched"] = value(other, side)
    begin()
    hold(side, main)
    fill(data, 7, side)
    found["unjoined"] = end()
    begin()
    found["legacy"] = [cuda.cudaMemset(data, c_int(0), c_size_t(SIZE)), end()]
    begin()
    found["malloc"] = [cuda.cudaMalloc(byref(c_void_p()), c_size_t(SIZE)), end()]
    begin()
    event = made("cudaEventCreate")
    call("cudaEventRecord", event, main)
    found["event"] = [end(), cuda.cudaEventSynchronize(event)]
    return found


def together(actions: Sequence[Callable[[], object]]) -> None:
    """Does all at the same time."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def crossed() -> dict[str, bool]:
    """Whether two ranks that use two communicators in different orders come to an end."""
    nccl = ctypes.CDLL("libnccl.so.2")

    class Id(ctypes.Structure):
        _fields_ = [("data", ctypes.c_char * 128)]

    ids = [Id(), Id()]
    for one in ids:
        assert nccl.ncclGetUniqueId(byref(one)) == 0
    barrier = threading.Barrier(2)
    ended = [False, False]

    def act(rank: int) -> None:
        call("cudaSetDevice", c_int(rank))
        comms, streams, data = [c_void_p(), c_void_p()], [stream(), stream()], memory()
        for comm, one in zip(comms, ids, strict=True):
            assert nccl.ncclCommInitRank(byref(comm), c_int(2), one, c_int(rank)) == 0

        def reduce(which: int) -> None:
            ends = [data, data, c_size_t(SIZE), c_int(UINT8), c_int(SUM)]
            assert nccl.ncclAllReduce(*ends, comms[which], streams[which]) == 0

        for which in range(2):  # connected in one order
            reduce(which)
            call("cudaStreamSynchronize", streams[which])
        barrier.wait()
        for which in (rank, 1 - rank):
            reduce(which)
        limit = time.monotonic() + 1
        while not ended[rank] and time.monotonic() < limit:
            ended[rank] = all(cuda.cudaStreamQuery(one) != NOT_READY for one in streams)
        barrier.wait()
        # At once: what one has on the device is behind what the other has.
        together([partial(nccl.ncclCommAbort, comm) for comm in comms])
        call("cudaDeviceSynchronize")

    together([partial(act, rank) for rank in range(2)])
    return {"ended": all(ended)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case for case in (waits, legacy, sources, freed, events, capture, crossed)
}

if __name__ == "__main__":
    json.dump(CASES[sys.argv[1]](), sys.stdout)
