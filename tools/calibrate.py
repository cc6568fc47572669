#!/usr/bin/env python
"""Measures a machine and writes the file that `--machine FILE` reads.

    mpirun -n 4 python tools/calibrate.py -o machine.yaml [--block 2]… [--threads 2] [--seconds 20]

Start it as you will start the program itself: with as many ranks, bound to the same cores, on the
same machines. All ranks measure at the same time, so they share memory, caches and cores as they
will later. Each number is the least of several rounds, and a round takes as long as its slowest
rank. A round is much longer than the time slice of a process; otherwise each rank that shares a
core would seem to have all of it.

- flops: the three products of a linear layer in training, of 512 × 512 matrices, in onnxruntime:
  x·w, dy·wᵀ and xᵀ·dy; for each type that has kernels.
- bandwidth: a chain of additions of vectors that are larger than any cache; each addition reads two
  vectors and writes one.
- overhead: the time that one more node with a single element adds to a run.
- links: AllReduce and AllGather of the runtime, in a session, of 1 KiB and of 4 MiB. A block of K
  neighbours (`--block K`, K a divisor of the ranks, may be repeated) has its own link, such as the
  ranks of one machine or of one socket. The last link is that of all ranks.
  A link is measured between ranks that have the same position in the next smaller blocks, one from
  each block. All such groups measure at the same time.
  Its wait is the time that a small AllReduce adds to a millisecond of computing, besides its
  latency (the median over pairs of rounds): the delay of the last rank, which is longest if ranks
  share cores.
- memory: that of the machine, divided by its ranks, unless `--memory` gives it.

Latency and bandwidth are those of the cost model: a collective of n ranks takes log2 n rounds of
latency (AllReduce: twice that) and sends the bytes of a ring. A link `overlaps` where the runtime
communicates in the background of computation: between machines, not in the memory that ranks share.

If other processes used at least a tenth of a core of the ranks' machines, a warning says so on
stderr and in the file: the measurement shows only what they left.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, log2
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import TypeVar

import numpy as np
import onnx.parser
import onnxruntime
import yaml

from onnxpar.core.machine import PRESETS
from onnxpar_format.option import parse_bytes
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.options import session_options, threads_per_rank

T = TypeVar("T")
SIDE = 512
TYPES = {
    "float32": ("float", np.float32),
    "float64": ("double", np.float64),
    "float16": ("float16", np.float16),
}
VECTOR = 1 << 23  # elements: 32 MiB
SMALL, LARGE = 1 << 10, 1 << 22  # bytes
FEWEST = 5  # rounds
ROUND = 0.06  # seconds; a process keeps a core for some milliseconds
BUSY = 0.1  # cores that others may take
SEGMENT = 1e-3  # seconds of computing between two collectives
TILE, SEGMENTS = 256, 16  # rows and columns of a product; segments of computing in a run


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Attributes:
        rank: This process.
        threads: Threads that compute.
        seconds: Time for one measurement.
    """

    rank: Rank
    threads: int
    seconds: float

    def session(self, text: str) -> onnxruntime.InferenceSession:
        """Returns a session of a graph in ONNX's text form, with the runtime's options."""
        head = '<ir_version: 10, opset_import: ["": 21, "onnxpar": 1]>'
        model = onnx.parser.parse_model(f"{head}\n{text}").SerializeToString()
        options = session_options({}, self.threads)
        self.rank.register(options)
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def agreed(self, value: float) -> float:
        """Returns the greatest value of all ranks."""
        return float(self.rank.all_reduce(np.array([value]), op="max")[0])

    def least(self, run: Callable[[], object]) -> float:
        """Returns the seconds of a run on the slowest rank in the fastest round."""
        return min(times[0] for times in self._rounds(run))

    def more(self, run: Callable[[], object], base: Callable[[], object]) -> float:
        """Returns by how many seconds a run is longer than another: the median over rounds."""
        return median(longer - shorter for longer, shorter in self._rounds(run, base))

    def _rounds(self, *runs: Callable[[], object]) -> list[list[float]]:
        """Returns for each round the seconds of each run on the slowest rank."""
        for run in runs:
            run()
        begin = perf_counter()
        for run in runs:
            run()
        once = self.agreed(perf_counter() - begin) / len(runs)
        count = ceil(ROUND / max(once, 1e-9))
        rounds: list[list[float]] = []
        started = monotonic()
        # All ranks must make the same number of rounds: otherwise a collective would wait forever.
        while self.agreed(float(len(rounds) < FEWEST or monotonic() - started < self.seconds)):
            rounds.append([self._seconds(run, count) for run in runs])
        return rounds

    def _seconds(self, run: Callable[[], object], count: int) -> float:
        self.agreed(0.0)
        begin = perf_counter()
        for _ in range(count):
            run()
        return self.agreed(perf_counter() - begin) / count


def flops(bench: Bench, dtype: str) -> float | None:
    """Returns the operations per second of products, or None if the type has no kernel."""
    name, kind = TYPES[dtype]
    products = ["MatMul(x, w)", "Gemm<transB = 1>(a0, w)", "Gemm<transA = 1>(x, a1)"]
    nodes = " ".join(f"a{i} = {product}" for i, product in enumerate(products))
    shape = f"{name}[{SIDE},{SIDE}]"
    try:
        session = bench.session(f"g ({shape} x, {shape} w) => ({shape} a2) {{ {nodes} }}")
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return None
    # Powers of a matrix of norm 1 have neither overflow nor denormal numbers.
    w = np.eye(SIDE, dtype=kind)[::-1].copy()
    feeds = {"x": w, "w": w}
    return 2 * SIDE**3 * len(products) / bench.least(lambda: session.run(None, feeds))


def bandwidth(bench: Bench) -> float:
    """Returns the bytes per second between a rank and its memory."""
    links = 4
    nodes = " ".join(f"a{i + 1} = Add(a{i}, b)" for i in range(links))
    shape = f"float[{VECTOR}]"
    session = bench.session(f"g ({shape} a0, {shape} b) => ({shape} a{links}) {{ {nodes} }}")
    binding = session.io_binding()
    x = np.ones(VECTOR, np.float32)
    binding.bind_cpu_input("a0", x)
    binding.bind_cpu_input("b", x)
    result = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
    binding.bind_ortvalue_output(f"a{links}", result)
    return 3 * x.nbytes * links / bench.least(lambda: session.run_with_iobinding(binding))


def overhead(bench: Bench) -> float:
    """Returns the seconds that a node with one element adds to a run."""
    x = {"a0": np.ones(1, np.float32), "b": np.ones(1, np.float32)}

    def chain(links: int) -> float:
        nodes = " ".join(f"a{i + 1} = Add(a{i}, b)" for i in range(links))
        session = bench.session(f"g (float[1] a0, float[1] b) => (float[1] a{links}) {{ {nodes} }}")
        return bench.least(lambda: session.run(None, x))

    few, many = 10, 210
    return max(chain(many) - chain(few), 0.0) / (many - few)


@dataclass(frozen=True)
class Group:
    """Groups of ranks that communicate at the same time.

    Attributes:
        block: Ranks of the smallest block that has all members of a group.
        inner: Ranks of the blocks of which it has one member each.
    """

    block: int
    inner: int = 1

    @property
    def size(self) -> int:
        """Number of members."""
        return self.block // self.inner

    def of(self, index: int) -> list[int]:
        """Returns the ranks of a rank's group."""
        first = index // self.block * self.block
        return list(range(first + index % self.inner, first + self.block, self.inner))


def collective(bench: Bench, kind: str, groups: Group, size: int) -> float:
    """Returns the seconds of a collective of ranks that hold `size` bytes each."""
    group = groups.of(bench.rank.index)
    links = max(4, min(100, (1 << 22) // size))
    if kind == "AllReduce":
        call, shape = f"AllReduce <group = {group}>", "float[n]"
    else:
        call, shape = f"AllGather <axis = 0, group = {group}>", "float[m]"
    # All AllGathers read the same value: the values of a chain would grow.
    nodes = [f"a0, t0 = onnxpar.{call} (x)"]
    for i in range(1, links):
        source = f"a{i - 1}" if kind == "AllReduce" else "x"
        nodes.append(f"a{i}, t{i} = onnxpar.{call} ({source}, t{i - 1})")
    session = bench.session(f"g (float[n] x) => ({shape} a{links - 1}) {{ {' '.join(nodes)} }}")
    feeds = {"x": np.zeros(size // 4, np.float32)}
    return bench.least(lambda: session.run(None, feeds)) / links


def late(bench: Bench, groups: Group) -> float:
    """Returns the seconds that a small AllReduce adds to a segment."""
    group, shape = groups.of(bench.rank.index), f"float[{TILE},{TILE}]"
    feeds = {"a": np.zeros((TILE, TILE), np.float32), "w": np.eye(TILE, dtype=np.float32)}

    def chain(products: int, *, meet: bool) -> Callable[[], object]:
        nodes, last = [], "a"
        for i in range(SEGMENTS):
            for j in range(products):
                nodes.append(f"p{i}_{j} = MatMul({last}, w)")
                last = f"p{i}_{j}"
            nodes.append(f"s{i} = ReduceSum <keepdims = 0> ({last})")
            if meet:
                token = f", t{i - 1}" if i else ""
                nodes.append(f"r{i}, t{i} = onnxpar.AllReduce <group = {group}> (s{i}{token})")
            nodes.append(f"b{i} = Add({last}, {'r' if meet else 's'}{i})")
            last = f"b{i}"
        text = f"g ({shape} a, {shape} w) => ({shape} {last}) {{ {' '.join(nodes)} }}"
        session = bench.session(text)
        return lambda: session.run(None, feeds)

    one = bench.least(chain(1, meet=False)) / SEGMENTS
    products = max(round(SEGMENT / one), 1)
    return bench.more(chain(products, meet=True), chain(products, meet=False)) / SEGMENTS


def link(bench: Bench, groups: Group) -> dict[str, float | bool]:
    """Returns the link of groups as in a machine file."""
    latencies, bandwidths, count = [], [], groups.size
    for kind, rounds, sent in (
        ("AllReduce", 2.0, 2 * (count - 1) / count),
        ("AllGather", 1.0, count - 1.0),
    ):
        small, large = (collective(bench, kind, groups, size) for size in (SMALL, LARGE))
        # On a busy machine the small collective may take longer. A tenth of the time of the large
        # one is then still time for its bytes: without a bound the link would cost nothing.
        slope = max(large - small, large / 10) / (LARGE - SMALL)
        latencies.append(max(small - slope * SMALL, 1e-9) / (rounds * log2(count)))
        bandwidths.append(sent / slope)
    latency = _mean(latencies)
    wait = max(late(bench, groups) - 2 * log2(count) * latency, 0.0)
    found = {"bandwidth": _mean(bandwidths), "latency": latency, "wait": wait}
    return {k: _rounded(v) for k, v in found.items()} | {
        "overlaps": bench.rank.overlaps(groups.of(bench.rank.index))
    }


def _mean(values: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return exp(sum(map(log, values)) / len(values))


def measure(bench: Bench, blocks: Sequence[int], memory: int, name: str) -> dict[str, object]:
    """Returns the content of the machine file."""
    rates = {dtype: flops(bench, dtype) for dtype in TYPES}
    size = bench.rank.world.size
    links: list[dict[str, float | bool]] = []
    inner = 1
    for block in blocks:
        inner = inner if block % inner == 0 else 1
        links.append({"devices": block, **link(bench, Group(block, inner))})
        inner = block
    if size > 1:
        links.append(link(bench, Group(size, inner)))
    else:
        preset = PRESETS["cpu"].links[-1]
        links.append({"bandwidth": preset.bandwidth, "latency": preset.latency})
    return {
        "name": name,
        "flops": {dtype: _rounded(rate) for dtype, rate in rates.items() if rate is not None},
        "bandwidth": _rounded(bandwidth(bench)),
        "memory": memory,
        "overhead": _rounded(overhead(bench)),
        "links": links,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def host_memory(rank: Rank) -> int:
    """Returns the memory of a host in bytes, divided by its ranks; the least of all hosts."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(rank.all_reduce(np.array([total // sharers(rank)]), op="min")[0])


def sharers(rank: Rank) -> int:
    """Returns how many ranks run on this machine, whatever they call their hosts."""
    here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", rank.world.size))
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = int(boot.read_text(encoding="ascii")[:8], 16) if boot.exists() else -1 - rank.index
    numbers = np.zeros(rank.world.size)
    numbers[rank.index] = own
    return max(here, int((rank.all_reduce(numbers) == own).sum()))


def computed() -> float | None:
    """Returns the processor seconds that this machine has used, or None if that is unknown."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except FileNotFoundError:
        return None
    names = "user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"
    ticks = dict(zip(names, map(int, words[1:]), strict=False))
    busy = sum(n for name, n in ticks.items() if name not in ("idle", "iowait"))
    return busy / os.sysconf("SC_CLK_TCK")


def watched(rank: Rank, action: Callable[[], T]) -> tuple[T, float]:
    """Returns the result of `action`, and the cores that other processes used meanwhile."""
    here = sharers(rank)
    before, own, begin = computed(), process_time(), perf_counter()
    done = action()
    after, own, seconds = computed(), process_time() - own, perf_counter() - begin
    # Each rank takes its share of the machine's time and subtracts its own; the sum is the others'.
    share = 0.0 if before is None or after is None else (after - before) / here - own
    return done, float(rank.all_reduce(np.array([share / seconds]), op="sum")[0])


def main() -> int:
    """Measures as one of the ranks; rank 0 writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the machine file to write")
    parser.add_argument(
        "--block", type=int, action="append", default=[], help="ranks that have a link of their own"
    )
    parser.add_argument(
        "--threads", type=int, help="threads of a rank; by default as many as in the runtime"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="approximate time for all measurements"
    )
    parser.add_argument("--memory", help="memory of one rank, such as 8GiB")
    parser.add_argument("--name", default="measured", help="name of the machine in the file")
    arguments = parser.parse_args()
    # Check now what would otherwise fail after the measurement.
    if not arguments.out.parent.is_dir():
        parser.error(f"--out: expected a file in a folder that exists, got {arguments.out}")
    try:
        given = parse_bytes(arguments.memory) if arguments.memory else None
    except ValueError as error:
        parser.error(f"--memory: {error}")
    rank = init()
    size = rank.world.size
    blocks = sorted(arguments.block)
    if any(k < 2 or k >= size or size % k for k in blocks) or len(set(blocks)) < len(blocks):
        parser.error(f"--block: expected different divisors of {size} ranks, got {blocks}")

    def body() -> int:
        memory = host_memory(rank) if given is None else given
        measurements = len(TYPES) + 3 + 6 * (len(blocks) + (size > 1))
        threads = arguments.threads or threads_per_rank(size, len(rank.world.local_ranks))
        bench = Bench(rank, threads, arguments.seconds / measurements)
        data, others = watched(rank, lambda: measure(bench, blocks, memory, arguments.name))
        if rank.index == 0:
            head = f"# Measured by tools/calibrate.py: {size} ranks, {threads} threads each"
            if size == 1:
                head += "; the link is that of the preset cpu"
            if others >= BUSY:
                busy = f"other processes took {others:.1f} cores while this was measured"
                print(f"warning: {busy}; measure again on a quiet machine", file=sys.stderr)
                head += f"; {busy}"
            text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None)
            arguments.out.write_text(f"{head}.\n{text}", encoding="utf-8")
            print(text, end="")
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    sys.exit(main())
